"""The stock command that ``parkade serve`` runs, as a user could type it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from parkade_cache.errors import SettingsError
from parkade_cache.policy import parse_policy
from parkade_serving.engine_arguments import EngineArguments
from parkade_serving.identity import IdentitySettings
from parkade_serving.serve_command import parser
from parkade_serving.serve_plan import MIDDLEWARE, ServePlan, plan_serve, plugin_names
from parkade_serving.settings import ServeOptions, check_settings

GIB = 1024**3
GENERAL, ENDPOINT = "vllm.general_plugins", "vllm.endpoint_plugins"


def plan_for(*engine: str, env: dict[str, str] | None = None, **options: Any) -> ServePlan:
    found = {"socket_dir": Path("/run/parkade"), "parked_max": GIB, **options}
    settings = check_settings(ServeOptions(**found), EngineArguments(["m", *engine]), env or {}, limit_bytes=9 * GIB)
    return plan_serve(settings, env or {}, program=("vllm",), plugins=[(GENERAL, "parkade"), (ENDPOINT, "parkade")])


def flag(plan: ServePlan, name: str) -> str:
    return plan.command[plan.command.index(name) + 1]


def test_the_command_is_stock_vllm_with_the_users_flags_first() -> None:
    plan = plan_for("--port", "9000", "--seed", "-1")
    assert plan.command[:7] == ("vllm", "serve", "m", "--port", "9000", "--seed", "-1")
    assert flag(plan, "--prefix-caching-hash-algo") == "sha256_cbor"
    assert flag(plan, "--shutdown-timeout") == "30"
    assert flag(plan, "--api-server-count") == "1"
    assert "--enable-prompt-tokens-details" in plan.command
    assert plan.command[-2:] == ("--middleware", MIDDLEWARE)


def test_what_the_user_gave_is_not_given_again() -> None:
    plan = plan_for(
        "--prefix-caching-hash-algo=sha256",
        "--shutdown-timeout",
        "60",
        "--api-server-count",
        "1",
        "--enable-prompt-tokens-details",
        "--middleware",
        MIDDLEWARE,
        "--middleware",
        "mine.Own",
    )
    joined = " ".join(plan.command)
    for once in (
        "prefix-caching-hash-algo",
        "shutdown-timeout",
        "api-server-count",
        "prompt-tokens-details",
        MIDDLEWARE,
    ):
        assert joined.count(once) == 1
    assert plan.shutdown_seconds == 60


def test_the_connector_gets_the_whole_policy_and_where_things_are() -> None:
    plan = plan_for("--revision", "abc", spill_dir=Path("/spill"), spill_size=5 * GIB)
    config = json.loads(flag(plan, "--kv-transfer-config"))
    extra = config.pop("kv_connector_extra_config")
    assert config == {
        "kv_connector": "ParkadeConnector",
        "kv_connector_module_path": "parkade_serving.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    parkade = extra.pop("parkade")
    assert extra == {
        "spec_name": "ParkadeSpec",
        "spec_module_path": "parkade_serving.spec",
        "offload_prompt_only": False,
    }
    policy = parse_policy(parkade.pop("policy"))
    assert policy.memory.parked.max == GIB
    assert policy.memory.floor == 512 * 1024**2
    assert parkade == {"socket_dir": "/run/parkade", "spill_dir": "/spill", "revision": "abc"}


def test_the_environment_says_who_this_pod_is() -> None:
    plan = plan_for(identity=IdentitySettings(headers=("x-chat",), tenant_header="x-org"))
    assert plan.additions == {
        "VLLM_PLUGINS": "parkade",
        "PARKADE_SOCKET_DIR": "/run/parkade",
        "PARKADE_IDENTITY": '{"headers": ["x-chat"], "tenant_header": "x-org"}',
        "PARKADE_ID_KEY_DIR": "/run/parkade",
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "30",
        "PARKADE_SHUTDOWN_SECONDS": "20",
    }


def test_the_id_key_lies_beside_the_blocks_unless_there_is_another(tmp_path: Path) -> None:
    spill: dict[str, Any] = {"spill_dir": Path("/spill"), "spill_size": GIB}
    assert plan_for(**spill).additions["PARKADE_ID_KEY_DIR"] == "/spill"
    (tmp_path / "key").write_text("k" * 32)
    named = plan_for(**spill, id_key_file=tmp_path / "key").additions
    assert named["PARKADE_ID_KEY_FILE"] == str(tmp_path / "key")
    assert "PARKADE_ID_KEY_DIR" not in named
    assert "PARKADE_ID_KEY_DIR" not in plan_for(**spill, env={"PARKADE_ID_KEY": "k" * 32}).additions


def test_times_the_user_set_in_the_environment_stay() -> None:
    env = {"VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "90", "PARKADE_SHUTDOWN_SECONDS": "5"}
    assert {name: plan_for(env=env).additions[name] for name in env} == env


def test_no_secret_is_in_the_command_or_in_what_is_printed(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("very-secret-key-material")
    (tmp_path / "token").write_text("very-secret-token")
    plan = plan_for(id_key_file=tmp_path / "key", token_file=tmp_path / "token")
    assert "very-secret" not in plan.shell()
    assert plan.additions["PARKADE_TOKEN_FILE"] == str(tmp_path / "token")


def test_what_is_printed_can_be_typed() -> None:
    plan = plan_for("--chat-template", "it's {{ x }}")
    words = shlex.split(plan.shell().replace("\\\n", " "))
    assert tuple(words[len(plan.additions) :]) == plan.command
    assert dict(word.split("=", 1) for word in words[: len(plan.additions)]) == plan.additions


@pytest.mark.parametrize(
    ("named", "installed", "expected"),
    [
        ("a,b", [], "a,b,parkade"),
        ("parkade,a", [], "parkade,a"),
        ("", [(GENERAL, "a")], "parkade"),
        (None, [], "parkade"),
        (None, [(GENERAL, "a"), ("vllm.platform_plugins", "b"), (ENDPOINT, "parkade")], "a,b,parkade"),
        (None, [(ENDPOINT, "routes")], "parkade"),
        (
            None,
            [(GENERAL, "lora_hf_hub_resolver"), (GENERAL, "lora_filesystem_resolver")],
            "lora_filesystem_resolver,parkade",
        ),
    ],
)
def test_no_plug_in_vanishes_and_none_is_turned_on(
    named: str | None, installed: list[tuple[str, str]], expected: str
) -> None:
    assert plugin_names(named, installed) == expected


def test_a_plug_in_that_would_get_routes_by_being_named_is_left_to_the_user() -> None:
    with pytest.raises(SettingsError, match="VLLM_PLUGINS"):
        plugin_names(None, [(GENERAL, "other"), (ENDPOINT, "other")])


@pytest.mark.slow
def test_the_engines_own_parser_takes_the_command_and_has_none_of_our_flags() -> None:
    pytest.importorskip("vllm", exc_type=ImportError)
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    engine = make_arg_parser(FlexibleArgumentParser())
    args = engine.parse_args(list(plan_for("--port", "9000").command[2:]))
    assert (args.model_tag, args.port, args.shutdown_timeout, args.api_server_count) == ("m", 9000, 30, 1)
    assert args.prefix_caching_hash_algo == "sha256_cbor"
    assert args.middleware == [MIDDLEWARE]
    assert args.kv_transfer_config.kv_connector == "ParkadeConnector"
    assert args.kv_transfer_config.kv_load_failure_policy == "recompute"
    theirs = {option for action in engine._actions for option in action.option_strings}
    ours = {option for action in parser()._actions for option in action.option_strings} - {"-h", "--help"}
    assert ours.isdisjoint(theirs)
