"""``parkade cache``: what people and scripts see of it. What it does to files is in the component tests."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from parkade_cache.spill import FileSystem, SpillConfig, SpillStore
from parkade_cache.spill.testing import publish_chain, some_identity
from parkade_serving import cache_command
from parkade_serving.cache_command import ProgressBar
from parkade_serving.cli import main

A, B = "a" * 32, "b" * 32


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A dead directory: two conversations that share two blocks, and another identity."""
    folder = tmp_path / "spill"
    fs = FileSystem()
    with open_store(folder, model="org/other") as store:
        publish_chain(fs, store, ["z"], conversation="z" * 32, created_at=1_600_000_000.0)
    with open_store(folder) as store:
        publish_chain(fs, store, ["s", "t", "a"], conversation=A)
        publish_chain(fs, store, ["b"], conversation=B, parent="t", created_at=1_800_000_000.0)
    return folder


def open_store(folder: Path, *, model: str = "org/model") -> SpillStore:
    config = SpillConfig(
        root=folder,
        capacity_bytes=1 << 30,
        min_free_bytes=0,
        write_budget_bytes_per_hour=None,
        block_bytes=5000,
        ranks=1,
    )
    return SpillStore.open(config, some_identity(model=model))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: object) -> tuple[int, str, str]:
        code = main(["cache", *map(str, arguments)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


Run = Callable[..., tuple[int, str, str]]


def ids(listing: dict[str, Any]) -> list[str]:
    return [found["id"] for one in listing["identities"] for found in one["conversations"]]


# -- help and errors ---------------------------------------------------------------------------------------------------


def test_help_shows_every_action_and_an_example(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert "example:\n  parkade cache ls" in out


@pytest.mark.parametrize("action", ["ls", "check", "rm", "gc"])
def test_every_action_has_help_with_an_example(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["cache", action, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert f"example:\n  parkade cache {action}" in text
    assert "xit code" in text


@pytest.mark.parametrize("arguments", [[], ["paint"]])
def test_an_unknown_action_is_one_line_and_exit_code_two(run: Run, arguments: list[str]) -> None:
    code, _, error = run(*arguments)
    assert (code, error.count("\n")) == (2, 1)
    assert "parkade cache --help" in error


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls"],
        ["check"],
        ["rm"],
        ["rm", "x"],
        ["rm", "x", "id", "--all"],
        ["rm", "x", "--all", "--identity", "f"],
        ["gc"],
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_two(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["cache", *arguments])
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "action", [["ls"], ["check"], ["rm", "--all"], ["rm", "--all", "--yes"], ["gc"], ["gc", "--yes"]]
)
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: None, "there is no directory"),
        (lambda path: path.write_bytes(b""), "Not a directory"),
        (Path.mkdir, "is not a spill directory: give the one that a pod has as --spill-dir"),
        (lambda path: path.symlink_to("/nowhere"), "there is no directory"),
        (lambda path: path.mkdir() or (path / "identities").symlink_to("/"), "not a folder of this user"),
        (lambda path: (path / "identities").mkdir(parents=True) or (path / "lock").mkdir(), "not a regular file"),
    ],
)
def test_a_directory_that_cannot_be_used_is_one_line_and_exit_code_two(
    run: Run, tmp_path: Path, action: list[str], make: Callable[[Path], object], said: str
) -> None:
    path = tmp_path / "place"
    make(path)
    before = sorted(tmp_path.rglob("*"))
    code, out, error = run(action[0], path, *action[1:])
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert error.startswith("parkade cache: ")
    assert said in error
    assert "Errno" not in error
    assert sorted(tmp_path.rglob("*")) == before


def test_the_command_imports_no_engine_and_no_web_framework(root: Path) -> None:
    code = (
        "import sys\nfrom parkade_serving.cli import main\nmain(sys.argv[1:])\n"
        "heavy = {'vllm', 'torch', 'transformers', 'fastapi', 'zmq', 'pydantic', 'psutil'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    for arguments in (["ls", str(root)], ["check", str(root), "--read-data"], ["gc", str(root), "--yes"]):
        done = subprocess.run(
            [sys.executable, "-c", code, "cache", *arguments], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_its_help_imports_not_even_numpy() -> None:
    code = (
        "import sys\nfrom parkade_serving.cli import main\nmain(['cache', '--help'])\nsys.exit('numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


# -- ls ----------------------------------------------------------------------------------------------------------------


def test_ls_shows_identities_and_their_conversations(run: Run, root: Path) -> None:
    code, out, _ = run("ls", root)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith(f"{root}: ")
    assert lines[0].endswith("on disk, no pod has it")
    headings = [line for line in lines if line.startswith("identity ")]
    assert [heading.split()[2:] for heading in headings] == [["own", "org/model"], ["foreign", "org/other"]]
    (row,) = [line.split() for line in lines if line.strip().startswith(A)]
    assert row == [A, "48", "3", "24.0", "KiB", "16.0", "KiB", "1", "2023-11-14", "22:13:20Z"]


def test_ls_prints_json_with_sizes_in_bytes(run: Run, root: Path) -> None:
    code, out, _ = run("ls", root, "--json")
    listing = json.loads(out)
    assert code == 0
    assert listing["in_use_by"] is None
    own = next(one for one in listing["identities"] if one["standing"] == "own")
    assert own["identity"]["block_tokens"] == 16
    assert own["index"] == {"state": "read", "reason": ""}
    assert own["conversations"][0] == {
        "id": B,
        "tokens": 16,
        "blocks": 3,
        "bytes": 3 * 8192,
        "shared_bytes": 2 * 8192,
        "packs": 2,
        "last_used": 1_800_000_000.0,
        "complete": True,
    }
    assert listing["bytes"] == sum(one["bytes"] for one in listing["identities"]) > 4 * 8192


def test_ls_of_one_identity(run: Run, root: Path) -> None:
    fingerprint = some_identity(model="org/other").fingerprint
    assert ids(json.loads(run("ls", root, "--json", "--identity", fingerprint)[1])) == ["z" * 32]
    assert fingerprint in run("ls", root, "--identity", fingerprint)[1]
    code, out, error = run("ls", root, "--identity", "f" * 16)
    assert (code, out, error.count("\n")) == (1, "", 1)


def test_ls_of_a_directory_in_use_says_by_whom(run: Run, root: Path) -> None:
    with open_store(root):
        code, out, _ = run("ls", root)
        assert (code, f"in use by process {os.getpid()} on host" in out) == (0, True)
        assert json.loads(run("ls", root, "--json")[1])["in_use_by"]["pid"] == os.getpid()


def test_ls_notes_what_is_out_of_order(run: Run, root: Path) -> None:
    folder = root / "identities" / some_identity().fingerprint
    pack = next(path for path in folder.rglob("*.pack") if B.encode() in path.read_bytes())
    (folder / "rank-0" / "tmp" / f"{'0' * 32}.tmp").write_bytes(b"half")
    (root / "quarantine" / "x.pack").write_bytes(b"?")
    (root / "receipts").mkdir()
    (root / "receipts" / "receipts.jsonl").write_bytes(b"{}")
    os.truncate(pack, 8192)
    (folder / "identity.json").unlink()
    _, out, _ = run("ls", root)
    assert f"pack {pack.stem} is not served: a file has another size" in out
    assert "unfinished: 1 file, 4.0 KiB" in out
    assert "in quarantine: 1 file, 4.0 KiB, receipts 4.0 KiB" in out
    assert "not described" in out
    (folder / "index.sqlite").write_bytes(b"?" * 5000)
    _, out, _ = run("ls", root)
    assert "index not used: opening the spill index" in out
    assert "not in the index: 1 pack" in out


def test_a_gap_in_a_chain_is_marked(run: Run, root: Path) -> None:
    pack = next(path for path in root.rglob("*.pack") if A.encode() in path.read_bytes())
    pack.unlink()
    _, out, _ = run("ls", root)
    assert f"{B} -" in out
    assert "some chains have a gap" in out


def test_names_found_on_the_disk_do_not_steer_the_terminal(run: Run, root: Path) -> None:
    with open_store(root) as store:
        publish_chain(FileSystem(), store, ["e"], conversation="\x1b[2Jevil\nidentity")
    _, out, _ = run("ls", root)
    assert "\\x1b[2Jevil\\nidentity" in out
    assert "\x1b" not in out


# -- check -------------------------------------------------------------------------------------------------------------


def test_check_of_good_and_of_damaged_packs(run: Run, root: Path) -> None:
    code, out, error = run("check", root)
    assert (code, error) == (0, "")
    assert out == f"{root}: 3 packs, 5 blocks: all good\n"
    pack = next(path for path in root.rglob("*.pack") if A.encode() in path.read_bytes())
    with pack.open("r+b") as file:
        file.seek(5000)
        file.write(b"!")
    assert run("check", root)[0] == 0
    code, out, _ = run("check", root, "--read-data")
    assert code == 1
    assert out.splitlines()[0] == f"{root}: 3 packs, 5 blocks, 40.0 KiB read: 1 damaged"
    assert str(pack.relative_to(root)) in out
    assert "next start: served until such a block is read" in out


def test_check_prints_json(run: Run, root: Path) -> None:
    fingerprint = some_identity().fingerprint
    (root / "identities" / fingerprint / "index.sqlite").unlink()
    (root / "identities" / fingerprint / "rank-0" / "tmp" / f"{'0' * 32}.tmp").write_bytes(b"half")
    code, out, _ = run("check", root, "--json", "--read-data")
    report = json.loads(out)
    assert code == 1
    assert (report["packs"], report["blocks"], report["read_bytes"]) == (3, 5, 5 * 8192)
    assert report["damage"] == [
        {
            "identity": fingerprint,
            "pack": None,
            "file": f"identities/{fingerprint}/index.sqlite",
            "what": "the index is missing",
            "blocks": 0,
            "next_start": "rebuilt from the packs; when conversations were last used is lost",
        }
    ]
    assert [found["what"] for found in report["leftovers"]] == ["unfinished"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_drawn_after_two_seconds_and_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(sys, "stderr", Terminal())
    bar = ProgressBar(in_bytes=True, clock=lambda: now[0])
    bar.show(1 << 20, 4 << 20)
    bar.clear()
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]
    now[0] = 2.0
    bar.show(2 << 20, 4 << 20)
    bar.show(3 << 20, 4 << 20)
    now[0] = 2.3
    bar.show(4 << 20, 4 << 20)
    bar.show(0, 0)
    bar.clear()
    drawn = sys.stderr.getvalue().split("\r")  # type: ignore[attr-defined]
    assert drawn == [
        "",
        f"[{'#' * 15}{'.' * 15}] 50 %  2.0 MiB of 4.0 MiB\x1b[K",
        f"[{'#' * 30}] 100 %  4.0 MiB of 4.0 MiB\x1b[K",
        "\x1b[K",
    ]


def test_no_bar_is_drawn_where_nobody_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    now = iter([0.0, 100.0, 200.0])
    bar = ProgressBar(in_bytes=False, clock=lambda: next(now))
    bar.show(1, 2)
    bar.clear()
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]


# -- rm and gc ---------------------------------------------------------------------------------------------------------


def test_rm_shows_its_plan_and_does_it_only_when_told(run: Run, root: Path) -> None:
    code, out, error = run("rm", root, A)
    assert code == 1
    assert out.splitlines()[1] == (
        f"  conversation {A} of identity {some_identity().fingerprint}: 1 block, 8.0 KiB; "
        "2 blocks that others need: kept"
    )
    assert error == "parkade cache rm: nothing was done; add --yes to do it\n"
    assert A in ids(json.loads(run("ls", root, "--json")[1]))
    code, out, error = run("rm", "--yes", root, A)
    assert (code, error) == (0, "")
    assert out.splitlines()[-1] == "done: 8.0 KiB came back"
    assert A not in ids(json.loads(run("ls", root, "--json")[1]))


def test_rm_prints_json(run: Run, root: Path) -> None:
    code, out, _ = run("rm", root, A, B, "--json")
    plan = json.loads(out)
    assert (code, plan["done"], [step["blocks"] for step in plan["plan"]]) == (1, False, [3, 1])
    code, out, error = run("rm", root, A, B, "--json", "--yes")
    done = json.loads(out)
    assert (code, done["done"], done["left_alone"], error) == (0, True, [], "")
    assert done["plan"] == plan["plan"]
    assert done["freed_bytes"] > 4 * 8192


def test_rm_of_what_is_not_there_does_nothing_of_the_rest(run: Run, root: Path) -> None:
    for arguments in ([A, "nobody"], ["--identity", "f" * 16]):
        code, out, error = run("rm", root, *arguments, "--yes")
        assert (code, out, error.count("\n")) == (1, "", 1)
        assert "nothing was done" in error
    assert A in ids(json.loads(run("ls", root, "--json")[1]))


def test_rm_of_an_identity_and_of_all(run: Run, root: Path) -> None:
    fingerprint = some_identity(model="org/other").fingerprint
    code, out, _ = run("rm", root, "--identity", fingerprint, "--yes")
    assert code == 0
    assert f"identity {fingerprint} (foreign, org/other): 1 block," in out
    assert ids(json.loads(run("ls", root, "--json")[1])) == [B, A]
    assert run("rm", root, "--all", "--yes")[0] == 0
    assert json.loads(run("ls", root, "--json")[1])["identities"] == []
    assert run("rm", root, "--all")[:2] == (0, f"{root}: nothing to do\n")


@pytest.mark.parametrize(
    "arguments", [["rm", A], ["rm", A, "--yes"], ["rm", "--all", "--yes"], ["gc"], ["gc", "--yes"]]
)
def test_nothing_is_taken_from_a_living_pod(run: Run, root: Path, arguments: list[str]) -> None:
    with open_store(root):
        code, out, error = run(arguments[0], root, *arguments[1:])
        assert (code, out, error.count("\n")) == (4, "", 1)
        assert f"is in use by process {os.getpid()} on host" in error
        assert ("DELETE /parkade/v1/conversations/ID" in error) == (arguments[0] == "rm")


def test_gc_removes_other_identities_but_those_to_keep(run: Run, root: Path) -> None:
    fingerprint = some_identity(model="org/other").fingerprint
    assert run("gc", root, "--keep", fingerprint)[:2] == (0, f"{root}: nothing to do\n")
    code, _, error = run("gc", root, "--keep", "f" * 16)
    assert (code, "f" * 16 in error) == (1, True)
    assert run("gc", root)[0] == 1
    code, out, _ = run("gc", root, "--yes", "--json")
    assert code == 0
    assert [(step["kind"], step["name"]) for step in json.loads(out)["plan"]] == [("identity", fingerprint)]
    assert ids(json.loads(run("ls", root, "--json")[1])) == [B, A]


def test_what_could_not_be_removed_is_said_with_exit_code_one(run: Run, root: Path) -> None:
    folder = root / "identities" / some_identity().fingerprint
    (folder / "link").symlink_to("/etc/hostname")
    code, out, _ = run("rm", root, "--all", "--yes")
    assert code == 1
    assert f"left alone: not all of {folder} could be removed" in out


def test_a_directory_that_changes_while_its_plan_is_read_is_left_as_it_is(
    run: Run, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def confirm(*_: object) -> bool:
        with open_store(root) as store:
            publish_chain(FileSystem(), store, ["c"], conversation=A, parent="a")
        return True

    monkeypatch.setattr(cache_command, "_confirmed", confirm)
    code, out, error = run("rm", root, A)
    assert (code, "changed meanwhile" in error, "done" in out) == (1, True, False)
    assert A in ids(json.loads(run("ls", root, "--json")[1]))


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    ours, theirs = pty.openpty()
    yield ours, theirs
    for fd in (ours, theirs):
        os.close(fd)


@pytest.mark.parametrize(("typed", "gone"), [("y\n", True), ("n\n", False), ("\n", False)])
def test_a_person_is_asked(root: Path, terminal: tuple[int, int], typed: str, gone: bool) -> None:
    ours, theirs = terminal
    os.write(ours, typed.encode())
    done = subprocess.run(
        [sys.executable, "-m", "parkade_serving.cli", "cache", "rm", str(root), A],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        check=False,
    )
    assert done.returncode == (0 if gone else 1)
    assert ("done: " in done.stdout) == gone
    assert "Do this? [y/N]" in os.read(ours, 4096).decode()
