"""What the rehearsed pod is shut into: a control group of its own, or nothing but its policy's limit.

Why it exists: where no group can be made, the pod's own cap can still be tried. What must stay true: both count the
memory that the pod itself counts (M8), and only the first has a kernel behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from parkade_cache.memory.cgroup import CgroupVersion
from parkade_cache.memory.reading import MemorySampler
from parkade_serving.rehearse.group import MemoryGroup
from parkade_serving.rehearse.inside import command


class Enclosure(Protocol):
    """Where the pod runs."""

    @property
    def has_kernel_limit(self) -> bool: ...

    @property
    def kernel_refuses(self) -> bool:
        """Whether the kernel refuses a limit below what is in use (cgroup v1) instead of killing for it (v2)."""

    @property
    def processes_file(self) -> Path | None:
        """Where a neighbour enters; None where there is nothing to enter."""

    def wrap(self, program: Sequence[str], *, python: str) -> tuple[str, ...]:
        """The command line that runs ``program`` in it."""

    def net_bytes(self) -> int:
        """Memory in use there, less what the kernel would take back."""

    def set_limit(self, limit_bytes: int | None) -> None:
        """The kernel's limit, where there is one; raises ``LimitRefusedError`` where the kernel refuses."""

    def oom_kills(self) -> int | None:
        """Processes that the kernel has killed for want of memory; None where nobody counts."""


@dataclass(frozen=True, slots=True)
class InGroup:
    """A control group of its own."""

    group: MemoryGroup
    has_kernel_limit: bool = True

    @property
    def kernel_refuses(self) -> bool:
        return self.group.level.version is CgroupVersion.V1

    @property
    def processes_file(self) -> Path | None:
        return self.group.processes_file

    def wrap(self, program: Sequence[str], *, python: str) -> tuple[str, ...]:
        return command(program, python=python, group=self.group.folder, mount=self.group.mount)

    def net_bytes(self) -> int:
        return self.group.net_bytes()

    def set_limit(self, limit_bytes: int | None) -> None:
        self.group.set_limit(limit_bytes)

    def oom_kills(self) -> int | None:
        return self.group.oom_kills()


@dataclass(frozen=True, slots=True)
class PolicyOnly:
    """No group: the policy's limit counts against the whole container's, or the machine's, memory in use."""

    has_kernel_limit: bool = False
    kernel_refuses: bool = False
    _sampler: MemorySampler = field(default_factory=MemorySampler)

    @property
    def processes_file(self) -> Path | None:
        return None

    def wrap(self, program: Sequence[str], *, python: str) -> tuple[str, ...]:
        del python
        return tuple(program)

    def net_bytes(self) -> int:
        # Under a cap of one byte the reading is the cap's, and says what counts as in use.
        reading = self._sampler.sample_under(1)
        return (reading.current_bytes or 0) - reading.credit_bytes

    def set_limit(self, limit_bytes: int | None) -> None:
        del limit_bytes

    def oom_kills(self) -> int | None:
        return None
