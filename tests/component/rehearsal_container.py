"""Makes a rehearsal's control group inside a container-like one, on a kernel with cgroup v2; run as a program.

Without arguments it makes a group with the memory controller and starts itself in there, where it sees that group as a
container sees its own: at the top, holding its processes, and handing no controller down. It prints what it saw.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from parkade_cache.memory.cgroup import CgroupTree, CgroupVersion
from parkade_serving.rehearse import inside
from parkade_serving.rehearse.group import made_group

MIB = 1 << 20

READ = """
import json
from parkade_cache.memory.reading import MemorySampler
print(json.dumps(dict(MemorySampler(cap_bytes=200 << 20).sample().as_fields())))
"""


def main() -> int:
    levels = CgroupTree().levels()
    top = Path(levels[0].folder) if levels else Path()
    if not levels or levels[0].version is not CgroupVersion.V2:
        sys.stdout.write(json.dumps({"skip": "no memory controller of cgroup v2 is mounted here"}) + "\n")
        return 0
    (top / "cgroup.subtree_control").write_text("+memory")
    container = top / "container"
    container.mkdir()
    try:
        command = (sys.executable, __file__, "inside")
        return subprocess.run(
            inside.command(command, python=sys.executable, group=container, mount=top), check=False
        ).returncode
    finally:
        container.rmdir()


def from_inside() -> int:
    top = Path(CgroupTree().levels()[0].folder)
    control, processes = top / "cgroup.subtree_control", top / "cgroup.procs"
    found: dict[str, object] = {"processes_before": len(processes.read_text().split())}
    with made_group() as group:
        group.set_limit(300 * MIB)
        command = (sys.executable, "-c", READ)
        done = subprocess.run(
            inside.command(command, python=sys.executable, group=group.folder, mount=group.mount),
            capture_output=True,
            text=True,
            check=True,
        )
        found |= {"handed_down": control.read_text().split(), "seen": json.loads(done.stdout)}
        found["oom_kills"] = group.oom_kills()
    found |= {
        "handed_down_after": control.read_text().split(),
        "processes_after": len(processes.read_text().split()),
        "left": [path.name for path in top.iterdir() if path.is_dir()],
    }
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(from_inside() if sys.argv[1:] else main())
