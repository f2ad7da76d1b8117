"""Lanes and buffers: a task that fails ends nothing, what was accepted is run, and no buffer exists twice."""

from __future__ import annotations

import threading

import pytest

from parkade_cache.buffers import BufferPool
from parkade_cache.lanes import Lane
from parkade_cache.slots import PAGE_BYTES


def test_tasks_run_in_order_and_one_that_raises_does_not_end_the_lane(caplog: pytest.LogCaptureFixture) -> None:
    lane, ran = Lane("test"), []

    def fails() -> None:
        raise RuntimeError("simulated")

    for task in (lambda: ran.append(1), fails, lambda: ran.append(2)):
        lane.submit(task)
    lane.close()
    assert ran == [1, 2]
    assert "simulated" in caplog.text


def test_what_was_accepted_before_the_end_is_run_and_nothing_is_accepted_after_it() -> None:
    lane, go, ran = Lane("test"), threading.Event(), []
    lane.submit(lambda: go.wait(10))  # type: ignore[arg-type,return-value]
    lane.submit(lambda: ran.append(1))
    closer = threading.Thread(target=lane.close)
    closer.start()
    go.set()
    closer.join()
    assert ran == [1]
    assert not lane.try_submit(lambda: ran.append(2))
    with pytest.raises(RuntimeError, match="closed"):
        lane.submit(lambda: None)


def test_buffers_are_bounded_and_whole_pages() -> None:
    pool = BufferPool(buffer_bytes=PAGE_BYTES + 1, limit_bytes=5 * PAGE_BYTES)
    assert (pool.buffer_bytes, pool.count) == (2 * PAGE_BYTES, 2)
    one, two = pool.take_many(5)
    assert pool.try_take() is None
    one[:] = 1
    assert not two.any(), "two buffers overlap"
    assert one.ctypes.data % PAGE_BYTES == 0
    pool.give(one)
    assert pool.try_take() is one


def test_who_needs_a_buffer_waits_for_one() -> None:
    pool = BufferPool(buffer_bytes=PAGE_BYTES, limit_bytes=PAGE_BYTES)
    taken = pool.take_many(pool.count)
    found = []
    waiter = threading.Thread(target=lambda: found.extend(pool.take_many(1)))
    waiter.start()
    pool.give(taken[0])
    waiter.join(10)
    assert len(found) == 1
