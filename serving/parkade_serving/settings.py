"""What ``parkade serve`` was told, checked as a whole before anything starts. Pure.

What must stay true: settings that were accepted hold together; every refusal is one line that says what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from parkade_cache.errors import SettingsError
from parkade_cache.policy import Policy, merge_documents, parse_policy
from parkade_serving.engine_arguments import EngineArguments
from parkade_serving.identity import IdentitySettings
from parkade_serving.refusals import refuse_unsafe


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Parkade's own flags as they were typed; None is not given."""

    parked_max: int | None = None
    parked_conversations: int | None = None
    memory_limit: int | None = None
    memory_floor: int | None = None
    headroom: int | None = None
    spill_dir: Path | None = None
    spill_size: int | None = None
    spill_min_free: int | None = None
    spill_mode: str | None = None
    write_budget: int | None = None
    min_tokens: int | None = None
    policy: Mapping[str, object] = field(default_factory=dict)
    """The document in the file given with ``--policy``; flags count over it."""
    policy_file: Path | None = None
    """That file: it is followed while the pod runs."""
    identity: IdentitySettings = field(default_factory=IdentitySettings)
    id_key_file: Path | None = None
    token_file: Path | None = None
    socket_dir: Path
    drain_seconds: int = 110


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """Everything a pod is started from."""

    engine: EngineArguments
    policy: Policy
    policy_file: Path | None
    policy_over: Mapping[str, object]
    """What the flags say, which a changed file does not override."""
    spill_dir: Path | None
    socket_dir: Path
    identity: IdentitySettings
    id_key_file: Path | None
    token_file: Path | None
    drain_seconds: int

    @property
    def revision(self) -> str | None:
        return self.engine.value("--revision")


def check_settings(
    options: ServeOptions, engine: EngineArguments, env: Mapping[str, str], *, limit_bytes: int | None
) -> ServeSettings:
    """The settings to start with; ``limit_bytes`` is the pod's memory limit as it was found out.

    Raises:
        SettingsError: flags that contradict each other or the engine's.
        PolicyError: limits, floors and budgets that do.

    """
    if engine.model is None and not (engine.has("--model") or engine.has("--config")):
        raise SettingsError("name the model first, such as: parkade serve Qwen/Qwen3-8B --parked-max 16Gi")
    document = policy_document(options)
    _check_spill(options, document)
    policy = parse_policy(document, limit_bytes=limit_bytes)
    refuse_unsafe(engine, env, spill_on=policy.spill is not None)
    for flag, path in (("--id-key-file", options.id_key_file), ("--token-file", options.token_file)):
        if path is not None and not path.is_file():
            raise SettingsError(f"{flag} {path}: there is no such file")
    return ServeSettings(
        engine=engine,
        policy=policy,
        policy_file=options.policy_file.absolute() if options.policy_file is not None else None,
        policy_over=flags_document(options),
        spill_dir=options.spill_dir.absolute() if options.spill_dir is not None else None,
        socket_dir=options.socket_dir.absolute(),
        identity=options.identity,
        id_key_file=options.id_key_file.absolute() if options.id_key_file is not None else None,
        token_file=options.token_file.absolute() if options.token_file is not None else None,
        drain_seconds=options.drain_seconds,
    )


def policy_document(options: ServeOptions) -> dict[str, object]:
    """The policy's document: the file's, with the flags on top."""
    return merge_documents(options.policy, flags_document(options))


def flags_document(options: ServeOptions) -> dict[str, object]:
    """What the flags alone say, as a policy's document."""
    memory = {
        "limit": options.memory_limit,
        "floor": options.memory_floor,
        "headroom": options.headroom,
        "parked": _given(
            max=options.parked_max, maxConversations=options.parked_conversations, minTokens=options.min_tokens
        ),
    }
    spill = _given(
        size=options.spill_size,
        minFree=options.spill_min_free,
        mode=options.spill_mode,
        writeBudgetPerHour=options.write_budget,
    )
    if spill or "spill" in options.policy or options.spill_dir is not None:
        spill |= _given(minTokens=options.min_tokens)
    return {"memory": _given(**memory)} | _given(spill=spill or None)


def _check_spill(options: ServeOptions, document: Mapping[str, object]) -> None:
    section = document.get("spill")
    has_size = isinstance(section, Mapping) and section.get("size") is not None
    if options.spill_dir is not None and not has_size:
        raise SettingsError("--spill-dir needs a capacity; add --spill-size, such as --spill-size 100Gi")
    if options.spill_dir is None and section is not None:
        raise SettingsError("a spill capacity or budget needs a directory; add --spill-dir, or leave both out")


def _given(**values: object) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not None}
