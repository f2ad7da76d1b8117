"""A pod whose system calls fail when told; ``fiu-run -x python faulty_pod.py FOLDER`` prints how each case ended.

libfiu stands between this process and the C library, so that pack writers, pack readers and SQLite get the errors that
a device would give, at the calls that the code really makes. What must stay true in every case: nothing published is
lost or served wrong, RAM goes on serving, and the disk is used again by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from support.pod import BLOCK_TOKENS, EIGHT_EXTENTS, Pod, prompt

from parkade_cache import disk_tier, owner
from parkade_cache.disk_tier import WriteTicket
from parkade_cache.receipts import ReceiptKind
from parkade_cache.spill import WriteOutcome

MORE = list(range(9 * BLOCK_TOKENS))
RANDOM_TURNS = 40

_fiu = ctypes.CDLL("libfiu.so.0")
_fiu.fiu_enable.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint]
_fiu.fiu_enable_random.argtypes = [*_fiu.fiu_enable.argtypes, ctypes.c_float]
_fiu.fiu_disable.argtypes = [ctypes.c_char_p]


@contextlib.contextmanager
def failing(*points: str, probability: float = 1.0, error: int = errno.EIO) -> Iterator[None]:
    """These calls fail with ``error``, always or by chance."""
    for point in points:
        enabled = _fiu.fiu_enable_random(f"posix/io/{point}".encode(), 1, error, 0, probability)
        assert enabled == 0, f"libfiu has no {point}"
    try:
        yield
    finally:
        for point in points:
            _fiu.fiu_disable(f"posix/io/{point}".encode())


# -- what a case needs -----------------------------------------------------------------------------------------


def order(pod: Pod, name: str) -> WriteTicket:
    assert pod.owner.disk is not None
    ticket = pod.owner.disk.order_write(pod.conversation(name), urgent=True)
    assert isinstance(ticket, WriteTicket), ticket
    return ticket


def publish(pod: Pod, name: str) -> list[int]:
    tokens = pod.turn(name, prompt(name, 15)).tokens
    pod.settle()
    assert pod.evict(name)
    assert pod.described(name)["disk_blocks"] == 15
    return tokens


def comes_from(pod: Pod, name: str, tokens: list[int]) -> str:
    turned = pod.turn(name, [*tokens, *MORE])
    pod.settle()
    return turned.receipt.outcome if turned.reused >= len(tokens) else f"{turned.reused} of {len(tokens)} tokens"


def await_degraded(pod: Pod, *words: str) -> None:
    pod.until(lambda: not pod.state.spill_healthy, "the disk counts as failed")
    conditions = {one["type"]: one for one in pod.owner.summary()["conditions"]}
    assert conditions["SpillHealthy"]["status"] == "False"
    message = conditions["SpillHealthy"]["message"]
    assert any(word in message for word in ("Input/output", "disk I/O", *words)), message
    assert "degraded" in [outcome for outcome, _ in pod.outcomes(ReceiptKind.SPILL)]


def await_healthy(pod: Pod) -> None:
    pod.until(lambda: pod.state.spill_healthy and not pod.state.recovering, "the disk is used again")
    assert ("disk_healthy", "") in pod.outcomes(ReceiptKind.RECOVER)


# -- cases -----------------------------------------------------------------------------------------------------


def a_write_fails(folder: Path, *points: str) -> None:
    """Whatever step of a pack's writing fails, RAM keeps its blocks, and they are written later."""
    with Pod(folder=folder) as pod:
        a = publish(pod, "A")
        b = pod.turn("B", prompt("B", 15)).tokens
        pod.settle()
        with failing(*points):
            ticket = order(pod, "B")
            assert ticket.done.wait(10)
            assert ticket.outcome is WriteOutcome.FAILED, ticket.outcome
            await_degraded(pod)
            assert comes_from(pod, "B", b) == "resumed_ram"
        await_healthy(pod)
        assert comes_from(pod, "A", a) == "resumed_disk"
        pod.settle()
        pod.evict("B")
        assert comes_from(pod, "B", b) == "resumed_disk"
        assert pod.temporaries() == []
        pod.check()
        pod.stop()
    with Pod(folder=folder) as pod:
        assert [comes_from(pod, name, tokens) for name, tokens in (("A", a), ("B", b))] == ["resumed_disk"] * 2


def the_index_cannot_be_read(folder: Path) -> None:
    """What the index says is not needed to serve, and whatever it loses is in the packs."""
    with Pod(folder=folder) as pod:
        a = publish(pod, "A")
        pod.stop()
    with Pod(folder=folder) as pod:
        b = pod.turn("B", prompt("B", 15)).tokens
        pod.settle()
        with failing("rw/pread", "rw/pwrite"):
            assert pod.owner.disk is not None
            ticket = pod.owner.disk.order_write(pod.conversation("B"), urgent=True)
            if isinstance(ticket, WriteTicket):
                assert ticket.done.wait(10)
            # SQLite takes some pages that it cannot read for damaged ones; the index is made again from the packs then.
            await_degraded(pod, "malformed")
            assert comes_from(pod, "B", b) == "resumed_ram"
        await_healthy(pod)
        assert comes_from(pod, "A", a) == "resumed_disk"
        pod.check()


def anything_fails_now_and_then(folder: Path) -> None:
    """Forty turns on a disk of which one call in ten fails; every byte that comes back is compared with what it was."""
    chance = random.Random(4)
    with Pod(folder=folder, parked_max=EIGHT_EXTENTS, mode="WriteBehind", spill={"writeBehindIdleSeconds": 0}) as pod:
        tokens = {name: prompt(name, 10) for name in "ABCDEF"}
        with failing("rw/pread", "rw/pwrite", "sync/*", "dir/*", probability=0.1):
            for number in range(RANDOM_TURNS):
                name = chance.choice("ABCDEF")
                tokens[name] = [*pod.turn(name, tokens[name]).tokens, *prompt(f"turn {number}", 2)]
        # The owner looks less and less often at a disk that fails again and again, at last once a minute.
        pod.until(lambda: pod.state.spill_healthy and not pod.state.recovering, "the disk is used again", 150.0)
        pod.until(lambda: pod.state.ledger.dirty_blocks == 0, "what is dirty is written", 60.0)
        pod.settle()
        for name in sorted(tokens):
            tokens[name] = pod.turn(name, tokens[name]).tokens
            pod.settle()
            while not pod.evict(name):
                # It was being written.
                pod.settle()
            assert comes_from(pod, name, tokens[name]) == "resumed_disk", name
        pod.check()


CASES: dict[str, Callable[[Path], None]] = {
    "flush of a file": lambda folder: a_write_fails(folder, "sync/fdatasync"),
    "flush of a folder": lambda folder: a_write_fails(folder, "sync/fsync"),
    "rename": lambda folder: a_write_fails(folder, "dir/rename"),
    "index": lambda folder: a_write_fails(folder, "rw/pwrite"),
    "open": lambda folder: a_write_fails(folder, "oc/open"),
    "reads of the index": the_index_cannot_be_read,
    "anything, now and then": anything_fails_now_and_then,
}


def main() -> None:
    """Run every case; one line of JSON: what each ended with, "ok" or a traceback."""
    owner.TICK_S = 0.02
    disk_tier.PROBE_INTERVAL_S = 0.05
    disk_tier.RETRY_AFTER_FAILURE_S = 0.1
    found: dict[str, str] = {}
    for number, (name, case) in enumerate(CASES.items()):
        try:
            case(Path(sys.argv[1]) / str(number))
        except Exception:  # noqa: BLE001 - every case is reported
            found[name] = traceback.format_exc()
        else:
            found[name] = "ok"
    print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
