"""What is found in a body is what the engine will find; what does not change keeps its bytes."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parkade_serving.bodies import JsonBody


def cleaned(payload: bytes) -> Any:
    body = JsonBody(payload)
    body.take_out_forbidden()
    return json.loads(body.payload())


def test_a_body_in_which_nothing_changes_keeps_its_very_bytes() -> None:
    payload = b'{ "model" : "m",\n"messages": [ {"content": "\\u00e9"} ], "temperature": 1.0 }'
    body = JsonBody(payload)
    body.take_out_forbidden()
    assert body.payload() is payload
    assert not body.changed


def test_the_messages_bytes_survive_a_change_elsewhere() -> None:
    messages = b'[ {"content": "\\u00e9  \\/", "n": 1.00} ]'
    body = JsonBody(b'{"messages": ' + messages + b', "cache_salt": "mine"}')
    body.set_salt("theirs")
    assert messages in body.payload()
    assert json.loads(body.payload())["cache_salt"] == "theirs"


@pytest.mark.parametrize(
    "payload",
    [
        b'{"kv_transfer_params": {"do_remote_prefill": true}}',
        b'{"kv\\u005ftransfer_params": {"a": 1}}',
        b'{"kv_transfer_params": null, "kv_transfer_params": {"a": 1}}',
        b'{"kv_transfer_params": {"a": 1}, "x": NaN}',
        '{"kv_transfer_params": {"a": 1}}'.encode("utf-16"),
        '{"kv_transfer_params": {"a": 1}}'.encode("utf-8-sig"),
        b'{"kv_transfer_params": {"a": 1}, "x": "\\ud800"}',
        b'{"session_id": "raw"}',
        b'{"vllm_xargs": {"kv_transfer_params": "crash", "session_id": "raw"}}',
        b'{"sampling_params": {"extra_args": {"kv_transfer_params": {}, "session_id": "raw"}}}',
        b'{"vllm_xargs": {"k\\u0076_transfer_params": 1}, "x": Infinity}',
    ],
)
def test_clients_own_transfer_parameters_and_session_ids_are_taken_out_however_they_are_written(payload: bytes) -> None:
    text = json.dumps(cleaned(payload))
    assert "kv_transfer_params" not in text
    assert "session_id" not in text


def test_other_extra_arguments_stay() -> None:
    found = cleaned(b'{"vllm_xargs": {"kv_transfer_params": 1, "mine": "x"}, "sampling_params": {"n": 2}}')
    assert found == {"vllm_xargs": {"mine": "x"}, "sampling_params": {"n": 2}}


def test_numbers_that_are_no_json_survive_a_change() -> None:
    found = cleaned(b'{"session_id": "s", "x": NaN, "y": Infinity}')
    assert math.isnan(found["x"])
    assert found["y"] == math.inf


@pytest.mark.parametrize("payload", [b"", b"[]", b"5", b"{", b'{"a": "\x01"}', b"null", b"\xff", b"[" * 100_000])
def test_what_the_engine_will_refuse_is_passed_on_as_it_came(payload: bytes) -> None:
    body = JsonBody(payload)
    assert body.fields() == {}
    body.take_out_forbidden()
    body.set_salt("s")
    assert body.payload() == payload
    assert not body.is_object


def test_the_fields_that_say_who_asks_are_read() -> None:
    body = JsonBody(b'{"prompt_cache_key": "k", "conversation": {"id": "c"}, "user": "u", "cache_salt": "s", "n": [1]}')
    assert body.fields() == {"prompt_cache_key": "k", "conversation": {"id": "c"}, "cache_salt": "s"}


def test_the_last_of_duplicate_keys_counts_as_it_does_for_the_engine() -> None:
    payload = b'{"cache_salt": "first", "cache_salt": "last"}'
    assert JsonBody(payload).fields()["cache_salt"] == json.loads(payload)["cache_salt"]


values = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
names = st.text(max_size=3) | st.sampled_from(["session_id", "kv_transfer_params", "vllm_xargs", "cache_salt"])


@given(st.dictionaries(names, values, max_size=6), st.booleans())
def test_everything_else_means_the_same_after_a_change(document: dict[str, Any], ascii_only: bool) -> None:
    try:
        payload = json.dumps(document, ensure_ascii=ascii_only).encode()
    except UnicodeEncodeError:
        return
    body = JsonBody(payload)
    body.take_out_forbidden()
    body.set_salt("salt")
    expected = {name: value for name, value in document.items() if name not in {"session_id", "kv_transfer_params"}}
    extra = expected.get("vllm_xargs")
    if isinstance(extra, dict):
        kept = {name: value for name, value in extra.items() if name not in {"session_id", "kv_transfer_params"}}
        expected["vllm_xargs"] = kept
    assert json.loads(body.payload()) == {**expected, "cache_salt": "salt"}
