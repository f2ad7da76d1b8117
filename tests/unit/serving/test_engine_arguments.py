"""The engine's flags are found however vLLM would take them, and passed on as they were typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from parkade_cache.errors import SettingsError
from parkade_serving.engine_arguments import EngineArguments


@pytest.mark.parametrize(
    "arguments",
    [
        ["--data-parallel-size", "2"],
        ["--data-parallel-size=2"],
        ["--data_parallel_size", "2"],
        ["-dp", "2"],
        ["-dp=2"],
        ["--data-parallel-size", "1", "-dp", "2"],
    ],
)
def test_a_flag_is_found_in_every_spelling_and_the_last_one_counts(arguments: list[str]) -> None:
    assert EngineArguments(["m", *arguments]).number("--data-parallel-size") == 2


@pytest.mark.parametrize(
    "argument", ["--kv-transfer-config", "--kv-transfer-config.kv_role=kv_both", "--kv_transfer_config={}", "--kv-tr"]
)
def test_dotted_and_abbreviated_flags_are_found(argument: str) -> None:
    assert EngineArguments(["m", argument, "x"]).has("--kv-transfer-config")


def test_a_flag_that_begins_another_ones_name_is_not_taken_for_it() -> None:
    engine = EngineArguments(["m", "--data-parallel-size", "2"])
    assert not engine.has("--data-parallel-size-local")
    assert EngineArguments(["m", "--config-format", "hf"]).value("--config") is None


def test_the_file_given_with_config_is_read_and_the_command_line_counts_over_it(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text(
        "data-parallel-size: 4\nshutdown_timeout: 9\nenable-prefix-caching: false\n"
        "middleware: [a.B, c.D]\nkv-transfer-config: {kv_role: kv_both}\n"
    )
    engine = EngineArguments(["m", "--config", str(file), "--shutdown-timeout", "5"])
    assert engine.number("--data-parallel-size") == 4
    assert engine.number("--shutdown-timeout") == 5
    assert engine.has("--no-enable-prefix-caching")
    assert engine.values("--middleware") == ("a.B", "c.D")
    assert engine.value("--kv-transfer-config") == '{"kv_role": "kv_both"}'


@pytest.mark.parametrize("text", ["- a\n", "{", "5"])
def test_a_config_file_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "vllm.yaml").write_text(text)
    with pytest.raises(SettingsError) as refusal:
        EngineArguments(["m", "--config", str(tmp_path / "vllm.yaml")])
    assert "\n" not in str(refusal.value)
    with pytest.raises(SettingsError):
        EngineArguments(["m", "--config", str(tmp_path / "missing.yaml")])


def test_the_model_is_the_first_argument_or_not_there() -> None:
    assert EngineArguments(["m", "--port", "1"]).model == "m"
    assert EngineArguments(["--port", "1", "m"]).model is None
    assert EngineArguments([]).model is None


def test_a_value_that_is_no_number_is_left_to_the_engine() -> None:
    assert EngineArguments(["m", "--shutdown-timeout", "soon"]).number("--shutdown-timeout") is None
    assert EngineArguments(["m", "--shutdown-timeout"]).number("--shutdown-timeout") is None
