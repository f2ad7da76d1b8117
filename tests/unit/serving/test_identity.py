"""Whose turn is this: ids, tenants and salts (interfaces, "Conversation id")."""

from __future__ import annotations

import contextlib
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parkade_cache.errors import SettingsError
from parkade_serving.identity import (
    DEFAULT_HEADERS,
    NO_TENANT,
    Hasher,
    IdentityError,
    IdentitySettings,
    Tenant,
    client_id_of,
    tenant_of,
)

SETTINGS = IdentitySettings()
WITH_TENANT = IdentitySettings(tenant_header="x-tenant")
HASHER = Hasher(b"k" * 32)


def raw(**headers: str) -> list[tuple[bytes, bytes]]:
    return [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]


def test_the_first_header_of_the_list_wins() -> None:
    headers = [(name.encode(), str(rank).encode()) for rank, name in reversed(list(enumerate(DEFAULT_HEADERS)))]
    while headers:
        assert client_id_of(headers, {"prompt_cache_key": "body"}, SETTINGS) == headers[-1][1].decode()
        headers.pop()


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ({"session_id": "s", "prompt_cache_key": "k", "conversation": "c"}, "s"),
        ({"prompt_cache_key": "k", "conversation": "c"}, "k"),
        ({"conversation": "c"}, "c"),
        ({"conversation": {"id": "c"}}, "c"),
        ({"conversation": {"id": 5}}, None),
        ({"prompt_cache_key": "  ", "conversation": "c"}, "c"),
        ({"prompt_cache_key": 7}, None),
        ({"user": "alice", "previous_response_id": "resp_1", "metadata": {"session_id": "x"}}, None),
        ({}, None),
    ],
)
def test_the_body_is_asked_in_order_and_the_user_never(body: dict[str, object], found: str | None) -> None:
    assert client_id_of([], body, SETTINGS) == found


def test_header_names_are_compared_without_case_and_values_without_space() -> None:
    assert client_id_of([(b"X-Session-ID", b"  abc ")], {}, SETTINGS) == "abc"


def test_an_empty_header_is_no_id() -> None:
    assert client_id_of(raw(x_session_id="", x_conversation_id="c"), {}, SETTINGS) == "c"


def test_the_same_value_twice_is_one_id() -> None:
    assert client_id_of(raw(x_session_id="a") * 2, {}, SETTINGS) == "a"


HOSTILE = [
    [(b"x-session-id", b"a"), (b"x-session-id", b"b")],
    [(b"x-session-id", b"x" * 1_000_000)],
    [(b"x-session-id", b"x" * 513)],
    [(b"x-session-id", b"a\x00b")],
    [(b"x-session-id", b"a\x1b[31mb")],
    [(b"x-session-id", b"\xff\xfe")],
    [(b"x-session-id", "a\u0085b".encode())],
]


@pytest.mark.parametrize("headers", HOSTILE)
def test_a_hostile_header_is_refused_with_advice(headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(IdentityError, match=r"send (it once|a short id|printable text)") as refusal:
        client_id_of(headers, {}, SETTINGS)
    assert refusal.value.param == "x-session-id"
    assert len(str(refusal.value)) < 200


@pytest.mark.parametrize("value", ["x" * 513, "ä" * 300, "a\nb", "a\x00", "\ud800"])
def test_a_hostile_body_value_is_refused_with_advice(value: str) -> None:
    with pytest.raises(IdentityError, match="send") as refusal:
        client_id_of([], {"conversation": {"id": value}}, SETTINGS)
    assert refusal.value.param == "conversation"


def test_an_id_of_exactly_the_limit_is_accepted() -> None:
    assert client_id_of([(b"x-session-id", b"x" * 512)], {}, SETTINGS) == "x" * 512


@given(st.lists(st.tuples(st.sampled_from([b"x-session-id", b"session_id", b"x-tenant"]), st.binary(max_size=20))))
def test_any_header_bytes_are_an_id_or_refused(headers: list[tuple[bytes, bytes]]) -> None:
    with contextlib.suppress(IdentityError):
        tenant = tenant_of(headers, {}, WITH_TENANT)
        client_id = client_id_of(headers, {}, WITH_TENANT)
        if client_id is not None:
            assert len(HASHER.conversation(tenant, client_id)) == 32


def test_the_trusted_header_wins_over_the_bodys_salt() -> None:
    assert tenant_of(raw(x_tenant="acme"), {"cache_salt": "mine"}, WITH_TENANT) == Tenant(b"header", b"acme")
    assert tenant_of([], {"cache_salt": "mine"}, WITH_TENANT) == Tenant(b"salt", b"mine")
    assert tenant_of(raw(x_tenant="acme"), {}, SETTINGS) == NO_TENANT


def test_one_tenants_id_never_equals_anothers() -> None:
    tenants = [NO_TENANT, Tenant(b"header", b"a"), Tenant(b"salt", b"a"), Tenant(b"header", b"b")]
    ids = {HASHER.conversation(tenant, "c") for tenant in tenants}
    assert len(ids) == len(tenants)


@given(st.binary(max_size=8), st.text(max_size=8), st.binary(max_size=8), st.text(max_size=8))
def test_no_two_pairs_of_tenant_and_id_are_run_together(one: bytes, id_1: str, other: bytes, id_2: str) -> None:
    with contextlib.suppress(UnicodeEncodeError):
        same = HASHER.conversation(Tenant(b"salt", one), id_1) == HASHER.conversation(Tenant(b"salt", other), id_2)
        assert same == ((one, id_1) == (other, id_2))


def test_ids_depend_on_the_key_and_hide_what_they_were_made_from() -> None:
    made = HASHER.conversation(NO_TENANT, "my-session")
    assert made != Hasher(b"q" * 32).conversation(NO_TENANT, "my-session")
    assert made == Hasher(b"k" * 32).conversation(NO_TENANT, "my-session")
    assert set(made) <= set(string.hexdigits.lower())


def test_a_salt_is_within_what_the_engine_accepts() -> None:
    salt = HASHER.salt(Tenant(b"header", b"a@/\\"))
    assert len(salt) <= 128
    assert set(salt).isdisjoint("@/\\\x00")


def test_settings_come_from_the_environments_json() -> None:
    settings = IdentitySettings.from_env_value('{"headers": ["X-Chat"], "tenant_header": "X-Org"}')
    assert settings.headers == ("x-chat",)
    assert settings.tenant_header == "x-org"
    assert IdentitySettings.from_env_value(settings.to_env_value()) == settings
    assert IdentitySettings.from_env_value("") == IdentitySettings()
    assert IdentitySettings.from_env_value('{"tenant_header": ""}').tenant_header is None


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"headers": "x"}',
        '{"headers": [5]}',
        '{"headers": ["a b"]}',
        '{"header": []}',
        '{"tenant_header": 5}',
        '{"headers": ["x-a"], "tenant_header": "x-a"}',
    ],
)
def test_settings_that_cannot_be_used_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(SettingsError) as refusal:
        IdentitySettings.from_env_value(text)
    assert "\n" not in str(refusal.value)
