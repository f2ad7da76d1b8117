"""What every mover must do, whether it is in this process or behind a socket, with one rank or two."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from parkade_cache.arena import Arena
from parkade_cache.device import DeviceBlock, HostDevice
from parkade_cache.ids import NO_KEY, BlockKey, ConversationId, PackId
from parkade_cache.local_mover import LocalMover
from parkade_cache.mover import (
    BlockMeta,
    ExtentsCommitted,
    ExtentsReleased,
    HeapReleased,
    JobId,
    JobOutcome,
    Mover,
    PackOrder,
    PackWritten,
    Report,
    SlotBlock,
    WrittenEntry,
)
from parkade_cache.slots import PAGE_BYTES, Geometry
from parkade_cache.spill import FileSystem, PackAddress, PackReader, PackWriter
from parkade_cache.spill.layout import pack_path
from parkade_cache.transfers import LoadJob, LoadSource, StoreJob, StoreTarget
from parkade_serving.mover_socket import MoverHub, MoverPeer
from parkade_serving.mover_wire import Hello, encode_hello, encode_report, send_frame

BLOCK_BYTES = 3 * PAGE_BYTES - 100
IDENTITY = "0" * 16
SLOTS = 4


def meta(number: int) -> BlockMeta:
    parent = key(number - 1) if number else NO_KEY
    return BlockMeta(key=key(number), parent=parent, end_token=16 * (number + 1), group=0)


def key(number: int) -> BlockKey:
    return BlockKey(b"%032d" % number + bytes(4))


def pack_id(number: int) -> PackId:
    return PackId(f"{number:032x}")


class Answers:
    """Reports as they come in."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self._changed = threading.Condition()

    def __call__(self, report: Report) -> None:
        with self._changed:
            self.reports.append(report)
            self._changed.notify_all()

    def to(self, job: int, *, ranks: int, timeout_s: float = 10.0) -> list[Report]:
        """The answers of all ranks to one job, by rank."""
        with self._changed:
            found = self._changed.wait_for(lambda: self._of(job) if len(self._of(job)) >= ranks else None, timeout_s)
            assert found, f"job {job} has {len(self._of(job))} of {ranks} answers"
            return sorted(found, key=lambda report: report.rank)

    def _of(self, job: int) -> list[Report]:
        return [report for report in self.reports if report.job == job]


class Ranks:
    """A mover for the owner and what is behind it."""

    def __init__(self, folder: Path, *, count: int) -> None:
        self.folder = folder
        self.count = count
        self.answers = Answers()
        self.geometry = Geometry(
            slot_bytes=3 * PAGE_BYTES, slots_per_extent=SLOTS, extent_bytes=SLOTS * 3 * PAGE_BYTES, ranks=count
        )
        self.devices = [HostDevice([random_blocks(rank)]) for rank in range(count)]
        self.local: list[LocalMover] = []
        self.mover: Mover
        for rank in range(count):
            for name in ("tmp", "packs"):
                (folder / f"rank-{rank}" / name).mkdir(parents=True)

    def new_local(self, rank: int, sink: Callable[[Report], None]) -> LocalMover:
        arena = Arena(extent_bytes=self.geometry.extent_bytes, max_extents=8)
        mover = LocalMover(
            geometry=self.geometry, arena=arena, device=self.devices[rank], sink=sink, rank=rank, process=f"w{rank}"
        )
        self.local.append(mover)
        return mover

    def attach(self) -> None:
        self.mover.attach(str(self.folder), IDENTITY, direct=False)

    def to(self, job: int) -> list[Report]:
        return self.answers.to(job, ranks=self.count)

    def fill_slots(self, count: int) -> list[SlotBlock]:
        """Store ``count`` engine blocks into slots, on every rank."""
        for mover in self.local:
            blocks = tuple(DeviceBlock(0, n) for n in range(count))
            targets = tuple(StoreTarget(n) for n in range(count))
            mover.store(StoreJob(JobId(9000), blocks, targets))
            assert await_transfer(mover, 9000).failed == ()
        return [SlotBlock(meta(n), n) for n in range(count)]

    def stream(self, pack: PackId, count: int, *, job: int = 9100) -> list[tuple[int, ...]]:
        """Stream ``count`` engine blocks to a pack, on every rank; positions that failed, by rank."""
        failed = []
        for mover in self.local:
            blocks = tuple(DeviceBlock(0, n) for n in range(count))
            targets = tuple(StoreTarget(-1, pack, meta(n)) for n in range(count))
            mover.store(StoreJob(JobId(job), blocks, targets))
            failed.append(await_transfer(mover, job).failed)
        return failed

    def blocks_in(self, pack: PackId, rank: int) -> list[bytes]:
        fs = FileSystem()
        path = pack_path(self.folder / f"rank-{rank}", pack)
        with PackReader(fs, path, expected=PackAddress(pack, IDENTITY, rank), direct=False) as reader:
            info = reader.read_info()
            buffers = [bytearray(entry.nbytes) for entry in info.entries]
            assert all(reader.read_into(info.entries, buffers))
        return [bytes(buffer) for buffer in buffers]

    def files(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if path.is_file()]


def random_blocks(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).integers(0, 256, (64, BLOCK_BYTES), dtype=np.uint8)


def await_transfer(mover: LocalMover, job: int):
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for done in mover.take_finished():
            if done.job == job:
                return done
        time.sleep(0.001)
    raise AssertionError(f"transfer {job} did not end")


@contextlib.contextmanager
def in_process(folder: Path) -> Iterator[Ranks]:
    ranks = Ranks(folder, count=1)
    ranks.mover = ranks.new_local(0, ranks.answers)
    yield ranks
    ranks.mover.close()


@contextlib.contextmanager
def behind_sockets(folder: Path, count: int) -> Iterator[Ranks]:
    ranks = Ranks(folder, count=count)
    path = folder / "m.sock"
    ranks.mover = MoverHub(path, ranks=count, slot_bytes=ranks.geometry.slot_bytes, sink=ranks.answers)
    peers = [MoverPeer(path, rank=rank, slot_bytes=ranks.geometry.slot_bytes) for rank in range(count)]
    for rank, peer in enumerate(peers):
        peer.start(ranks.new_local(rank, peer.report))
    yield ranks
    ranks.mover.close()
    for peer, mover in zip(peers, ranks.local, strict=True):
        mover.close()
        peer.close()


@pytest.fixture(params=["in process", "socket, 1 rank", "socket, 2 ranks"])
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ranks]:
    made = in_process(tmp_path) if request.param == "in process" else behind_sockets(tmp_path, int(request.param[8]))
    with made as ranks:
        ranks.attach()
        yield ranks
        jobs = Counter((report.job, report.rank) for report in ranks.answers.reports)
        assert max(jobs.values(), default=1) == 1, "an order was answered twice"


class TestEveryMover:
    def test_commits_and_releases_extents(self, ranks: Ranks) -> None:
        ranks.mover.commit(JobId(1), [0, 2])
        for report in ranks.to(1):
            assert isinstance(report, ExtentsCommitted)
            assert (report.outcome, report.extents) == (JobOutcome.DONE, (0, 2))
            assert report.nbytes == 2 * ranks.geometry.extent_bytes
        assert all(mover.arena.committed_bytes == 2 * ranks.geometry.extent_bytes for mover in ranks.local)
        ranks.mover.release(JobId(2), [0, 2])
        for report in ranks.to(2):
            assert isinstance(report, ExtentsReleased)
            assert (report.outcome, report.nbytes) == (JobOutcome.DONE, 2 * ranks.geometry.extent_bytes)
        assert all(mover.arena.committed_bytes == 0 for mover in ranks.local)

    def test_answers_a_commit_and_a_release_that_fail(self, ranks: Ranks) -> None:
        def fails(_extent: int) -> int:
            raise RuntimeError("simulated")

        ranks.local[-1].arena.commit = fails  # type: ignore[assignment,method-assign]
        ranks.local[-1].arena.release = fails  # type: ignore[method-assign]
        ranks.mover.commit(JobId(1), [0])
        ranks.mover.release(JobId(2), [0])
        for job in (1, 2):
            last = ranks.to(job)[-1]
            assert (last.outcome, last.reason) == (JobOutcome.FAILED, "simulated")

    def test_releases_the_heap_of_every_process(self, ranks: Ranks) -> None:
        ranks.mover.release_heap(JobId(1))
        for rank, report in enumerate(ranks.to(1)):
            assert isinstance(report, HeapReleased)
            assert (report.outcome, report.process) == (JobOutcome.DONE, f"w{rank}")
            assert report.resident_before_bytes > 0

    def test_writes_parked_blocks_into_a_pack_of_its_own_on_every_rank(self, ranks: Ranks) -> None:
        blocks = ranks.fill_slots(6)
        tips = ((key(5), 96),)
        ranks.mover.write(JobId(1), PackOrder(pack_id(1), ConversationId("c"), 12.5, tips), blocks, urgent=True)
        for rank, report in enumerate(ranks.to(1)):
            assert isinstance(report, PackWritten)
            assert (report.outcome, report.tips, report.created_at) == (JobOutcome.DONE, tips, 12.5)
            assert [entry.meta for entry in report.entries] == [meta(n) for n in range(6)]
            assert report.file_bytes == pack_path(ranks.folder / f"rank-{rank}", pack_id(1)).stat().st_size
            assert ranks.blocks_in(pack_id(1), rank) == [bytes(ranks.devices[rank].planes[0][n]) for n in range(6)]

    def test_writes_background_orders_in_the_order_they_were_given(self, ranks: Ranks) -> None:
        blocks = ranks.fill_slots(2)
        for n in range(1, 6):
            ranks.mover.write(JobId(n), PackOrder(pack_id(n), ConversationId("c"), 0.0), blocks, urgent=False)
        for n in range(1, 6):
            ranks.to(n)
        for rank in range(ranks.count):
            assert [r.job for r in ranks.answers.reports if r.rank == rank] == [1, 2, 3, 4, 5]

    def test_w1_an_urgent_write_overtakes_the_background_queue(self, ranks: Ranks) -> None:
        blocks = ranks.fill_slots(2)
        go = self.hold(ranks, "_write_lane")
        for n in range(1, 21):
            ranks.mover.write(JobId(n), PackOrder(pack_id(n), ConversationId("c"), 0.0), blocks, urgent=False)
        ranks.mover.write(JobId(99), PackOrder(pack_id(99), ConversationId("c"), 0.0), blocks, urgent=True)
        ranks.to(99)
        assert {report.job for report in ranks.answers.reports} == {99}
        go.set()
        ranks.to(20)

    def test_cancels_a_queued_write_at_once(self, ranks: Ranks) -> None:
        blocks = ranks.fill_slots(2)
        go = self.hold(ranks, "_write_lane")
        ranks.mover.write(JobId(1), PackOrder(pack_id(1), ConversationId("c"), 0.0), blocks, urgent=False)
        ranks.mover.cancel(JobId(1))
        assert {report.outcome for report in ranks.to(1)} == {JobOutcome.CANCELLED}
        go.set()
        ranks.mover.write(JobId(2), PackOrder(pack_id(2), ConversationId("c"), 0.0), blocks, urgent=False)
        ranks.to(2)
        assert not any(pack_id(1) in path.name for path in ranks.files())

    def test_cancels_a_running_write_and_leaves_no_file(self, ranks: Ranks) -> None:
        blocks = ranks.fill_slots(2)
        go, running = threading.Event(), []
        for mover in ranks.local:
            self.slow(mover, go, running)
        ranks.mover.write(JobId(1), PackOrder(pack_id(1), ConversationId("c"), 0.0), blocks, urgent=False)
        self.until(lambda: len(running) == ranks.count)
        ranks.mover.cancel(JobId(1))
        self.until(lambda: all(1 in mover._cancelled_writes for mover in ranks.local))
        go.set()
        assert {report.outcome for report in ranks.to(1)} == {JobOutcome.CANCELLED}
        assert not any(pack_id(1) in path.name for path in ranks.files())

    def test_cancelling_what_is_over_changes_nothing(self, ranks: Ranks) -> None:
        blocks = ranks.fill_slots(1)
        ranks.mover.write(JobId(1), PackOrder(pack_id(1), ConversationId("c"), 0.0), blocks, urgent=True)
        ranks.to(1)
        ranks.mover.cancel(JobId(1))
        ranks.mover.cancel(JobId(77))
        ranks.mover.release_heap(JobId(2))
        ranks.to(2)

    def test_answers_a_write_that_fails_and_leaves_no_file(self, ranks: Ranks) -> None:
        ranks.mover.write(
            JobId(1), PackOrder(pack_id(1), ConversationId("c"), 0.0), [SlotBlock(meta(0), 31)], urgent=True
        )
        assert {report.outcome for report in ranks.to(1)} == {JobOutcome.FAILED}
        assert all(report.reason for report in ranks.to(1))
        assert not any(pack_id(1) in path.name for path in ranks.files())

    def test_streams_blocks_into_a_pack(self, ranks: Ranks) -> None:
        order = PackOrder(pack_id(1), ConversationId("c"), 0.0, ((key(4), 80),))
        ranks.mover.open_stream(order, 5 * BLOCK_BYTES)
        assert ranks.stream(pack_id(1), 5) == [()] * ranks.count
        ranks.mover.finish_stream(JobId(1), order)
        for rank, report in enumerate(ranks.to(1)):
            assert isinstance(report, PackWritten)
            assert report.outcome is JobOutcome.DONE
            assert ranks.blocks_in(pack_id(1), rank) == [bytes(ranks.devices[rank].planes[0][n]) for n in range(5)]

    def test_blocks_captured_before_the_stream_is_open_are_in_it(self, ranks: Ranks) -> None:
        assert ranks.stream(pack_id(1), 3) == [()] * ranks.count
        order = PackOrder(pack_id(1), ConversationId("c"), 0.0)
        ranks.mover.open_stream(order, 3 * BLOCK_BYTES)
        ranks.mover.finish_stream(JobId(1), order)
        assert {report.outcome for report in ranks.to(1)} == {JobOutcome.DONE}

    def test_a_finished_stream_without_a_block_is_no_pack(self, ranks: Ranks) -> None:
        order = PackOrder(pack_id(1), ConversationId("c"), 0.0)
        ranks.mover.open_stream(order, BLOCK_BYTES)
        ranks.mover.finish_stream(JobId(1), order)
        assert {report.outcome for report in ranks.to(1)} == {JobOutcome.FAILED}

    def test_an_aborted_stream_leaves_no_file_and_no_buffer_taken(self, ranks: Ranks) -> None:
        free = [len(mover._bounce._free) for mover in ranks.local]
        order = PackOrder(pack_id(1), ConversationId("c"), 0.0)
        ranks.mover.open_stream(order, BLOCK_BYTES)
        ranks.stream(pack_id(1), 4)
        ranks.mover.abort_stream(JobId(1), pack_id(1), "refused_budget")
        for report in ranks.to(1):
            assert (report.outcome, report.reason) == (JobOutcome.CANCELLED, "refused_budget")
        late = ranks.stream(pack_id(1), 4, job=9200)
        assert late == [(0, 1, 2, 3)] * ranks.count, "a block captured for an aborted stream has nowhere to go"
        self.until(lambda: [len(mover._bounce._free) for mover in ranks.local] == free)
        assert not any(pack_id(1) in path.name for path in ranks.files())

    def test_aborting_a_stream_nobody_knows_is_answered(self, ranks: Ranks) -> None:
        ranks.mover.abort_stream(JobId(1), pack_id(1), "refused_size")
        assert {report.outcome for report in ranks.to(1)} == {JobOutcome.CANCELLED}

    def test_a_pack_that_was_forgotten_can_be_read_again(self, ranks: Ranks) -> None:
        blocks = ranks.fill_slots(2)
        ranks.mover.write(JobId(1), PackOrder(pack_id(1), ConversationId("c"), 0.0), blocks, urgent=True)
        ranks.to(1)
        for round_ in range(2):
            for rank, mover in enumerate(ranks.local):
                sources = tuple(LoadSource(-1, pack_id(1), n) for n in range(2))
                mover.load(
                    LoadJob(JobId(500 + round_), (DeviceBlock(0, 50), DeviceBlock(0, 51)), sources, deadline_s=10)
                )
                assert await_transfer(mover, 500 + round_).failed == ()
                plane = ranks.devices[rank].planes[0]
                assert np.array_equal(plane[50:52], plane[0:2])
            ranks.mover.forget_pack(pack_id(1))

    def test_every_order_returns_at_once(self, ranks: Ranks) -> None:
        lanes = ("_write_lane", "_urgent_lane", "_stream_lane", "_memory_lane")
        holds = [self.hold(ranks, lane) for lane in lanes]
        order = PackOrder(pack_id(1), ConversationId("c"), 0.0)
        ranks.mover.commit(JobId(1), [0])
        ranks.mover.release_heap(JobId(2))
        ranks.mover.write(JobId(3), order, [], urgent=True)
        ranks.mover.finish_stream(JobId(4), order)
        ranks.mover.abort_stream(JobId(5), pack_id(2), "no")
        for go in holds:
            go.set()
        for job in range(1, 6):
            ranks.to(job)

    def test_what_is_ordered_after_the_end_is_answered_as_cancelled(self, ranks: Ranks) -> None:
        ranks.mover.close()
        order = PackOrder(pack_id(1), ConversationId("c"), 0.0)
        ranks.mover.commit(JobId(1), [0])
        ranks.mover.release(JobId(2), [0])
        ranks.mover.release_heap(JobId(3))
        ranks.mover.write(JobId(4), order, [], urgent=False)
        ranks.mover.finish_stream(JobId(5), order)
        ranks.mover.abort_stream(JobId(6), pack_id(2), "no")
        for job in range(1, 7):
            assert {report.outcome for report in ranks.to(job)} == {JobOutcome.CANCELLED}

    def hold(self, ranks: Ranks, lane: str) -> threading.Event:
        go = threading.Event()
        for mover in ranks.local:
            getattr(mover, lane).submit(lambda: go.wait(20))
        return go

    def slow(self, mover: LocalMover, go: threading.Event, running: list[int]) -> None:
        append = mover._append_slots

        def slowly(writer: PackWriter, unit: Sequence[SlotBlock]) -> list[WrittenEntry]:
            running.append(mover.rank)
            go.wait(20)
            return append(writer, unit)

        mover._append_slots = slowly  # type: ignore[method-assign]

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.002)


# -- only behind a socket ------------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Ranks]:
    with behind_sockets(tmp_path, 2) as ranks:
        ranks.attach()
        ranks.mover.release_heap(JobId(1))
        ranks.to(1)
        yield ranks


def cut(ranks: Ranks, rank: int) -> None:
    """The rank's process is gone."""
    hub = ranks.mover
    assert isinstance(hub, MoverHub)
    hub._peers[rank].connection.shutdown(socket.SHUT_RDWR)


def test_a_rank_that_is_lost_answers_its_open_orders_as_failed(two: Ranks) -> None:
    go = threading.Event()
    two.local[1]._memory_lane.submit(lambda: go.wait(20))
    two.mover.commit(JobId(10), [0])
    two.answers.to(10, ranks=1)
    cut(two, 1)
    first, second = two.to(10)
    assert first.outcome is JobOutcome.DONE
    assert (second.outcome, second.rank) == (JobOutcome.FAILED, 1)
    assert "rank 1 is gone" in second.reason
    go.set()


def test_what_is_ordered_after_a_loss_fails_at_once_for_the_lost_rank(two: Ranks) -> None:
    cut(two, 1)
    order = PackOrder(pack_id(1), ConversationId("c"), 0.0)
    two.mover.commit(JobId(10), [0])
    two.mover.release(JobId(11), [0])
    two.mover.write(JobId(12), order, [], urgent=True)
    two.mover.finish_stream(JobId(13), order)
    two.mover.abort_stream(JobId(14), pack_id(1), "x")
    two.mover.release_heap(JobId(15))
    for job in range(10, 16):
        assert two.to(job)[1].outcome is JobOutcome.FAILED


def test_a_rank_that_sends_no_report_is_lost(two: Ranks) -> None:
    go = threading.Event()
    two.local[1]._memory_lane.submit(lambda: go.wait(20))
    two.mover.commit(JobId(10), [0])
    two.answers.to(10, ranks=1)
    peer = two.local[1]._sink.__self__  # type: ignore[attr-defined]
    send_frame(peer._connection, b"\x00nonsense")
    assert two.to(10)[1].outcome is JobOutcome.FAILED
    go.set()


def test_a_frame_of_an_impossible_length_loses_the_rank_and_nothing_else(two: Ranks) -> None:
    peer = two.local[1]._sink.__self__  # type: ignore[attr-defined]
    peer._connection.sendall(struct.pack("<I", 0xFFFFFFFF))
    two.mover.commit(JobId(10), [0])
    assert [report.outcome for report in two.to(10)] == [JobOutcome.DONE, JobOutcome.FAILED]


def test_a_report_for_another_rank_or_of_a_job_nobody_ordered_is_not_passed_on(two: Ranks) -> None:
    peer = two.local[0]._sink.__self__  # type: ignore[attr-defined]
    stray = ExtentsCommitted(JobId(77), 0, JobOutcome.DONE, (1,), 1, 0.0)
    send_frame(peer._connection, encode_report(stray))
    two.mover.release_heap(JobId(2))
    two.to(2)
    assert not [report for report in two.answers.reports if report.job == 77]


@pytest.mark.parametrize(
    "hello",
    [
        Hello(rank=0, slot_bytes=3 * PAGE_BYTES, pid=1),
        Hello(rank=9, slot_bytes=3 * PAGE_BYTES, pid=1),
        Hello(rank=-1, slot_bytes=3 * PAGE_BYTES, pid=1),
        Hello(rank=1, slot_bytes=PAGE_BYTES, pid=1),
    ],
    ids=["taken", "no such rank", "negative", "other sizes"],
)
def test_a_stranger_is_not_let_in_and_the_others_go_on(two: Ranks, hello: Hello) -> None:
    with connect(two) as stranger:
        send_frame(stranger, encode_hello(hello))
        assert stranger.recv(1) == b"", "the connection is closed"
    two.mover.release_heap(JobId(2))
    assert {report.outcome for report in two.to(2)} == {JobOutcome.DONE}


def test_a_peer_that_says_no_hello_is_not_let_in(two: Ranks) -> None:
    with connect(two) as stranger:
        send_frame(stranger, b"GET / HTTP/1.1")
        assert stranger.recv(1) == b""


def test_a_rank_that_was_lost_does_not_come_back(two: Ranks) -> None:
    """Its memory is gone: what the ledger says is in its slots is not there any more."""
    cut(two, 1)
    two.mover.commit(JobId(10), [0])
    two.to(10)
    with connect(two) as again:
        send_frame(again, encode_hello(Hello(rank=1, slot_bytes=3 * PAGE_BYTES, pid=2)))
        assert again.recv(1) == b""


def test_orders_given_before_all_ranks_are_there_reach_all_of_them_in_order(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, count=2)
    path = tmp_path / "m.sock"
    hub = ranks.mover = MoverHub(path, ranks=2, slot_bytes=ranks.geometry.slot_bytes, sink=ranks.answers)
    ranks.attach()
    hub.commit(JobId(1), [0])
    hub.release(JobId(2), [0])
    peers = [MoverPeer(path, rank=rank, slot_bytes=ranks.geometry.slot_bytes) for rank in range(2)]
    for rank, peer in enumerate(peers):
        peer.start(ranks.new_local(rank, peer.report))
    for job in (1, 2):
        assert {report.outcome for report in ranks.to(job)} == {JobOutcome.DONE}
    hub.close()
    for peer, mover in zip(peers, ranks.local, strict=True):
        mover.close()
        peer.close()


def test_a_rank_that_reads_nothing_holds_up_no_order(two: Ranks) -> None:
    """Orders are queued for a slow rank, whatever its socket's buffer holds: the owner never waits in a send."""
    peer = two.local[1]._sink.__self__  # type: ignore[attr-defined]
    obey, go = peer._obey, threading.Event()
    peer._obey = lambda mover, order: (go.wait(20), obey(mover, order))
    blocks = [SlotBlock(meta(0), 0)] * 20_000
    order = PackOrder(pack_id(1), ConversationId("c"), 0.0)
    for n in range(100, 103):
        # About 2 MB each, ten times what a socket takes.
        two.mover.write(JobId(n), order, blocks, urgent=False)
    for n in range(100, 103):
        two.mover.cancel(JobId(n))
    two.mover.release_heap(JobId(2))
    two.answers.to(2, ranks=1)
    go.set()
    two.to(2)
    for n in range(100, 103):
        two.to(n)


def connect(ranks: Ranks) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(10)
    connection.connect(str(ranks.folder / "m.sock"))
    return connection
