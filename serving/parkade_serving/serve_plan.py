"""From settings to the stock ``vllm serve`` command and its environment. Pure.

What must stay true: everything Parkade needs is in flags and variables that a user can also give by hand; what the
user gave is never changed, only added to.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from parkade_cache.errors import SettingsError
from parkade_serving.environment import TOKEN_FILE_ENV
from parkade_serving.id_key import KEY_DIR_ENV, KEY_ENV, KEY_FILE_ENV
from parkade_serving.identity import IDENTITY_ENV
from parkade_serving.settings import ServeSettings
from parkade_serving.sockets import SOCKET_DIR_ENV

MIDDLEWARE: Final = "parkade_serving.middleware.IdentityMiddleware"
PLUGIN: Final = "parkade"
PLUGINS_ENV: Final = "VLLM_PLUGINS"
WORKER_SHUTDOWN_ENV: Final = "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"
SHUTDOWN_ENV: Final = "PARKADE_SHUTDOWN_SECONDS"
"""What the owner may take to write out the rest when the engine is shut down without a drain."""
DEFAULT_SHUTDOWN_SECONDS: Final = 30
_STABLE_HASH: Final = "sha256_cbor"
_ENDPOINT_GROUP: Final = "vllm.endpoint_plugins"
# Off unless it is named: naming every installed plug-in must not turn it on.
_OPT_IN: Final = frozenset({"lora_hf_hub_resolver"})


@dataclass(frozen=True, slots=True)
class ServePlan:
    """What to run."""

    command: tuple[str, ...]
    additions: Mapping[str, str]
    """Variables to set on top of the environment."""
    shutdown_seconds: int

    def shell(self) -> str:
        """The same by hand, for a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.additions.items())]
        return " \\\n  ".join([*variables, shlex.join(self.command)])


def plan_serve(
    settings: ServeSettings,
    env: Mapping[str, str],
    *,
    program: tuple[str, ...],
    plugins: Iterable[tuple[str, str]],
) -> ServePlan:
    """The command and the environment for ``settings``.

    ``program`` starts vLLM's command line; ``plugins`` are the installed (group, name) of vLLM's entry points.

    Raises:
        SettingsError: an installed plug-in leaves no safe value for ``VLLM_PLUGINS``.

    """
    engine = settings.engine
    shutdown = engine.number("--shutdown-timeout")
    seconds = DEFAULT_SHUTDOWN_SECONDS if shutdown is None else shutdown
    command = [*program, "serve", *engine.arguments, *_added_flags(settings)]
    additions = {
        PLUGINS_ENV: plugin_names(env.get(PLUGINS_ENV), plugins),
        SOCKET_DIR_ENV: str(settings.socket_dir),
        IDENTITY_ENV: settings.identity.to_env_value(),
        **_key_variable(settings, env),
        WORKER_SHUTDOWN_ENV: env.get(WORKER_SHUTDOWN_ENV, str(max(seconds, 5))),
        SHUTDOWN_ENV: env.get(SHUTDOWN_ENV, str(max(1, seconds * 2 // 3))),
    }
    if settings.token_file is not None:
        additions[TOKEN_FILE_ENV] = str(settings.token_file)
    return ServePlan(tuple(command), additions, seconds)


def connector_config(settings: ServeSettings) -> dict[str, Any]:
    """The value of ``--kv-transfer-config``."""
    parkade: dict[str, Any] = {"policy": settings.policy.to_json(), "socket_dir": str(settings.socket_dir)}
    if settings.spill_dir is not None:
        parkade["spill_dir"] = str(settings.spill_dir)
    if settings.policy_file is not None:
        parkade["policy_file"] = str(settings.policy_file)
        parkade["policy_over"] = settings.policy_over
    if settings.revision is not None:
        parkade["revision"] = settings.revision
    return {
        "kv_connector": "ParkadeConnector",
        "kv_connector_module_path": "parkade_serving.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "ParkadeSpec",
            "spec_module_path": "parkade_serving.spec",
            "offload_prompt_only": False,
            "parkade": parkade,
        },
    }


def plugin_names(named: str | None, installed: Iterable[tuple[str, str]]) -> str:
    """``VLLM_PLUGINS`` with Parkade in it and nothing lost.

    An unset variable loads every plug-in, except that plug-ins with HTTP routes load only when named; a set one loads
    only what it names. So where it is unset, every installed one must be named, except for those.
    """
    if named is not None:
        names = [name for name in named.split(",") if name]
    else:
        pairs = list(installed)
        with_routes = {name for group, name in pairs if group == _ENDPOINT_GROUP} - {PLUGIN}
        names = sorted({name for group, name in pairs if group != _ENDPOINT_GROUP} - {PLUGIN} - _OPT_IN)
        if both := with_routes.intersection(names):
            raise SettingsError(
                f"the vLLM plug-in {min(both)} would also add HTTP routes when it is named;"
                f" set {PLUGINS_ENV} to the plug-ins you want"
            )
    return ",".join([*names, *([] if PLUGIN in names else [PLUGIN])])


def _added_flags(settings: ServeSettings) -> list[str]:
    engine = settings.engine
    flags = ["--kv-transfer-config", json.dumps(connector_config(settings), separators=(",", ":"))]
    for flag, value in (
        ("--prefix-caching-hash-algo", _STABLE_HASH),
        ("--shutdown-timeout", str(DEFAULT_SHUTDOWN_SECONDS)),
        ("--api-server-count", "1"),
    ):
        if not engine.has(flag):
            flags += [flag, value]
    if not engine.has("--enable-prompt-tokens-details") and not engine.has("--no-enable-prompt-tokens-details"):
        flags.append("--enable-prompt-tokens-details")
    if MIDDLEWARE not in engine.values("--middleware"):
        flags += ["--middleware", MIDDLEWARE]  # Last, so that it is the outermost.
    return flags


def _key_variable(settings: ServeSettings, env: Mapping[str, str]) -> dict[str, str]:
    if settings.id_key_file is not None:
        return {KEY_FILE_ENV: str(settings.id_key_file)}
    if env.get(KEY_ENV) or env.get(KEY_FILE_ENV):
        return {}
    return {KEY_DIR_ENV: str(settings.spill_dir or settings.socket_dir)}
