"""``parkade serve``: stock ``vllm serve`` with Parkade's plug-ins, checked settings and safe defaults."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from parkade_serving import vllm_command
from parkade_serving.command_line import Parser, configure_logging, size
from parkade_serving.engine_arguments import EngineArguments
from parkade_serving.identity import DEFAULT_HEADERS, IdentitySettings
from parkade_serving.serve_plan import plan_serve
from parkade_serving.settings import ServeOptions, ServeSettings, check_settings
from parkade_serving.sockets import owner_socket_path, socket_folder

_MODES: Final = {"write-behind": "WriteBehind", "on-evict": "OnEvict"}
# The groups that vLLM filters by VLLM_PLUGINS.
_PLUGIN_GROUPS: Final = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
    "vllm.endpoint_plugins",
)
_EXAMPLE: Final = """\
example:
  parkade serve Qwen/Qwen3-8B --parked-max 64Gi --memory-floor 6Gi \\
    --spill-dir /var/lib/parkade --spill-size 400Gi --max-model-len 131072

Sizes are Kubernetes quantities such as 512Mi, 96Gi or 1G. Every flag that is not listed here goes to vLLM as it
stands; see: vllm serve --help=all
"""


def main(argv: Sequence[str]) -> int:
    """Run ``parkade serve`` with these arguments; the exit code is the engine's."""
    parsed, rest = parser().parse_known_args(_without_engine_help(argv))
    settings = check_settings(_options(parsed), EngineArguments(rest), os.environ, limit_bytes=find_limit_bytes())
    plan = plan_serve(settings, os.environ, program=_program(), plugins=_plugins())
    if parsed.print_command:
        sys.stdout.write(plan.shell() + "\n")
        return 0
    return _run(settings, plan.command, {**os.environ, **plan.additions}, plan.shutdown_seconds)


def parser() -> argparse.ArgumentParser:
    """Parkade's own flags; nothing here may have the name of one of vLLM's."""
    made = Parser(
        prog="parkade serve",
        usage="parkade serve MODEL [options] [vllm serve options]",
        description="One serving pod's process: stock vllm serve that keeps conversations alive when memory runs low.",
        epilog=_EXAMPLE,
    )
    _add_memory(made.add_argument_group("memory"))
    _add_spill(made.add_argument_group("disk"))
    _add_identity(made.add_argument_group("identity and access"))
    _add_process(made.add_argument_group("process"))
    return made


def find_limit_bytes() -> int | None:
    """The pod's memory limit: the cgroup's where there is one, else the machine's memory."""
    import psutil  # noqa: PLC0415 - not for --help

    limits = [int(psutil.virtual_memory().total)]
    try:
        from parkade_cache.memory.reading import MemorySampler  # noqa: PLC0415
    except ImportError:
        return limits[0]
    found = MemorySampler().sample().limit_bytes
    return min(limits if found is None else [*limits, found])


def _add_memory(group: Any) -> None:
    group.add_argument("--parked-max", type=size, metavar="SIZE", help="RAM for idle conversations; 0 keeps none")
    group.add_argument("--parked-conversations", type=_count, metavar="N", help="conversations in RAM; 0 is no limit")
    group.add_argument("--memory-limit", type=_size_or_auto, metavar="SIZE|auto", help="a cap below the pod's limit")
    group.add_argument("--memory-floor", type=size, metavar="SIZE", help="bytes that stay available under the limit")
    group.add_argument("--headroom", type=size, metavar="SIZE", help="bytes above the floor that a resize leaves free")
    group.add_argument("--min-tokens", type=_count, metavar="N", help="shorter conversations are not kept")
    group.add_argument(
        "--policy", type=_policy_file, metavar="FILE", help="a policy as JSON, followed while it runs; flags win"
    )


def _add_spill(group: Any) -> None:
    group.add_argument("--spill-dir", type=Path, metavar="DIR", help="local disk for conversations; off without it")
    group.add_argument("--spill-size", type=size, metavar="SIZE", help="its capacity; needed with --spill-dir")
    group.add_argument("--spill-min-free", type=size, metavar="SIZE", help="bytes of the disk that stay free")
    group.add_argument("--spill-mode", type=_mode, metavar="{write-behind,on-evict}", help="when to write")
    group.add_argument("--write-budget", type=size, metavar="SIZE", help="bytes written per hour at most")


def _add_identity(group: Any) -> None:
    names = ", ".join(DEFAULT_HEADERS)
    group.add_argument("--conversation-header", action="append", metavar="NAME", help=f"repeatable; default: {names}")
    group.add_argument("--tenant-header", metavar="NAME", help="a header with the tenant, set by a trusted proxy")
    group.add_argument("--id-key-file", type=Path, metavar="FILE", help="the key that conversation ids are hashed with")
    group.add_argument("--token-file", type=Path, metavar="FILE", help="bearer tokens of the admin routes, one a line")


def _add_process(group: Any) -> None:
    group.add_argument("--socket-dir", type=Path, metavar="DIR", help="private folder for the pod's sockets")
    group.add_argument(
        "--drain-seconds", type=_count, default=110, metavar="N", help="time to write out when ended; default 110"
    )
    group.add_argument("--print-command", action="store_true", help="print the vllm command and its environment")


def _options(parsed: argparse.Namespace) -> ServeOptions:
    values = {name: value for name, value in vars(parsed).items() if name in ServeOptions.__slots__}
    headers = tuple(name.lower() for name in parsed.conversation_header or DEFAULT_HEADERS)
    tenant = parsed.tenant_header.lower() if parsed.tenant_header else None
    values["identity"] = IdentitySettings(headers=headers, tenant_header=tenant)
    values.pop("policy", None)
    if parsed.policy is not None:
        values["policy_file"], values["policy"] = parsed.policy
    values["socket_dir"] = parsed.socket_dir or socket_folder()
    return ServeOptions(**values)


def _run(settings: ServeSettings, command: Sequence[str], env: dict[str, str], shutdown_seconds: int) -> int:
    from parkade_serving.launcher import Ending, Launcher  # noqa: PLC0415 - needs sockets, not for --help
    from parkade_serving.rpc import OwnerClient  # noqa: PLC0415
    from parkade_serving.sockets import (  # noqa: PLC0415
        check_socket_path,
        clear_draining_mark,
        make_private_folder,
        mark_draining,
    )

    configure_logging()
    check_socket_path(owner_socket_path(env))
    make_private_folder(settings.socket_dir)
    clear_draining_mark(env)
    owner = OwnerClient(owner_socket_path(env))

    def drain(seconds: float) -> None:
        mark_draining(env)
        owner.call("drain", {"grace_s": seconds}, timeout_s=seconds)

    ending = Ending(drain=drain, drain_seconds=settings.drain_seconds, shutdown_seconds=shutdown_seconds)
    return Launcher(command, env, ending).run()


def _program() -> tuple[str, ...]:
    if vllm_command.is_needed():
        return (sys.executable, "-m", vllm_command.__name__)
    beside = Path(sys.executable).with_name(vllm_command.ENGINE)
    return (str(beside) if beside.is_file() else vllm_command.ENGINE,)


def _plugins() -> Iterable[tuple[str, str]]:
    return [(group, entry.name) for group in _PLUGIN_GROUPS for entry in metadata.entry_points(group=group)]


def _without_engine_help(argv: Sequence[str]) -> list[str]:
    return ["--help" if argument.startswith("--help=") else argument for argument in argv]


def _policy_file(text: str) -> tuple[Path, dict[str, object]]:
    import json  # noqa: PLC0415

    try:
        document = json.loads(Path(text).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be used: {error}") from None
    if not isinstance(document, dict):
        raise argparse.ArgumentTypeError(f"{text} must hold a JSON object")
    return Path(text), document


def _size_or_auto(text: str) -> int | None:
    return None if text == "auto" else size(text)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _mode(text: str) -> str:
    mode = _MODES.get(text, text)
    if mode not in _MODES.values():
        raise argparse.ArgumentTypeError(f"{text!r} is neither write-behind nor on-evict")
    return mode
