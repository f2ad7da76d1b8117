"""vLLM's plug-in surface that Parkade stands on, checked over its sources without importing them.

`SURFACE` is the whole list: what is subclassed, called, read or given as a flag, and which part of Parkade does so.
When the engine moves something, the failing test names it and the file to adapt. The installed engine is always
checked; ``PARKADE_CONTRACT_WHEEL`` names another release (``make test-contract``), whose wheel goes to ``build/``.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

ROOT = Path(__file__).resolve().parents[2]
WHEEL_ENV = "PARKADE_CONTRACT_WHEEL"
WHEEL_FOLDER = ROOT / "build" / "contract"

CONNECTOR = "serving/parkade_serving/connector.py"
MANAGER = "serving/parkade_serving/manager.py"
WORKER = "serving/parkade_serving/worker.py"
SPEC = "serving/parkade_serving/spec.py"
DEVICE = "serving/parkade_serving/device.py"
OWNER = "serving/parkade_serving/owner_runtime.py"
ENDPOINTS = "serving/parkade_serving/endpoints.py"
MIDDLEWARE = "serving/parkade_serving/middleware.py"
LAUNCHER = "serving/parkade_serving/serve_plan.py"
DEMO = "serving/parkade_serving/demo/plan.py"

_V1 = "distributed/kv_transfer/kv_connector/v1"


@dataclass(frozen=True)
class Needed:
    """Names that one file of the engine must offer."""

    path: str
    """Inside the package ``vllm``; alternatives, oldest first, are separated by ``|``."""
    owner: str
    """A class, or empty for names of the module itself."""
    names: tuple[str, ...]
    user: str
    """The file of Parkade that breaks."""


@dataclass(frozen=True)
class Signature:
    """Parameters that a function must take, by these names."""

    path: str
    owner: str
    function: str
    parameters: tuple[str, ...]
    user: str


@dataclass(frozen=True)
class Implemented:
    """An abstract class of the engine and the class of Parkade that must implement all of it."""

    path: str
    owner: str
    by: str
    user: str


@dataclass(frozen=True)
class Mentioned:
    """A string that must stand somewhere in a file: entry-point groups, headers, variables."""

    path: str
    text: str
    user: str


# fmt: off
NAMES = (
    Needed("v1/kv_offload/base.py", "OffloadingManager", (
        "lookup", "get_load_source", "prepare_load", "prepare_store", "complete_load", "complete_store",
        "on_new_request", "on_request_finished", "on_schedule_end", "has_pending_work", "reset_cache", "get_stats",
        "shutdown",
    ), MANAGER),
    Needed("v1/kv_offload/base.py", "LookupResult", ("HIT", "MISS", "HIT_PENDING", "RETRY"), MANAGER),
    Needed("v1/kv_offload/base.py", "ReqContext", (
        "req_id", "set_state", "get_state", "get_offload_key_position",
    ), MANAGER),
    Needed("v1/kv_offload/base.py", "", (
        "OffloadKey", "PrepareStoreOutput", "RequestOffloadingContext", "ScheduleEndContext", "get_offload_group_idx",
    ), MANAGER),
    Needed("v1/metrics/cache_hit_source.py", "CacheHitSource", ("HOST", "DISK"), MANAGER),
    Needed("v1/kv_offload/base.py", "OffloadingWorker", (
        "submit_store", "submit_load", "get_finished", "wait", "shutdown",
    ), WORKER),
    Needed("v1/kv_offload/base.py", "TransferResult", (
        "job_id", "success", "transfer_size", "transfer_time",
    ), WORKER),
    Needed("v1/kv_offload/base.py", "GPULoadStoreSpec", ("group_sizes",), WORKER),
    Needed("v1/kv_offload/base.py", "BlockIDsLoadStoreSpec", ("block_ids",), WORKER),
    Needed("v1/kv_offload/base.py", "", ("LoadStoreSpec",), WORKER),
    Needed("v1/kv_offload/base.py", "OffloadingSpec", (
        "get_manager", "get_worker", "extra_config", "offload_prompt_only",
    ), SPEC),
    Needed("v1/kv_offload/base.py", "CanonicalKVCaches", ("tensors", "group_data_refs"), DEVICE),
    Needed("v1/kv_offload/base.py", "CanonicalKVCacheTensor", ("tensor",), DEVICE),
    Needed("v1/kv_offload/base.py", "CanonicalKVCacheRef", ("tensor_idx", "page_size_bytes"), DEVICE),
    Needed("v1/kv_offload/config.py", "OffloadingConfig", (
        "groups", "worker_kv_bytes_per_block", "extra_config", "model", "cache", "parallel",
    ), OWNER),
    Needed("v1/kv_offload/config.py", "OffloadingGroupConfig", ("tokens_per_block", "group_id"), OWNER),
    Needed("v1/kv_offload/config.py", "OffloadingParallelConfig", (
        "rank", "world_size", "tp_size", "pp_size", "data_parallel_size",
    ), OWNER),
    Needed(f"{_V1}/offloading_connector.py", "OffloadingConnector", (
        "connector_scheduler", "connector_worker", "register_kv_caches", "handle_preemptions", "start_load_kv",
        "wait_for_save", "get_finished", "build_connector_worker_meta", "on_new_request",
        "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta", "update_connector_output",
        "request_finished", "request_finished_all_groups",
    ), CONNECTOR),
    Needed(f"{_V1}/base.py", "KVConnectorBase_V1", (
        "get_transfer_results", "get_block_ids_with_load_errors", "has_pending_block_frees", "_connector_metadata",
    ), CONNECTOR),
    Needed(f"{_V1}/base.py", "KVConnectorTransferResults", (
        "finished_sending", "finished_recving", "failed_recving",
    ), CONNECTOR),
    Needed(f"{_V1}/base.py", "", ("KVConnectorMetadata", "KVConnectorRole", "KVConnectorWorkerMetadata"), CONNECTOR),
    Needed(f"{_V1}/offloading/common.py", "OffloadingConnectorMetadata", (
        "load_jobs", "store_jobs", "jobs_to_flush",
    ), CONNECTOR),
    Needed(f"{_V1}/offloading/common.py", "OffloadingWorkerMetadata", (
        "completed_jobs", "transfer_stats", "aggregate",
    ), CONNECTOR),
    Needed(f"{_V1}/offloading/common.py", "TransferJob", ("req_id", "src_spec", "dst_spec"), CONNECTOR),
    Needed(f"{_V1}/offloading/scheduler.py", "OffloadingConnectorScheduler", (
        "manager", "config", "_req_status", "_jobs", "_chunks_being_loaded", "_stale_job_threshold",
    ), CONNECTOR),
    Needed(f"{_V1}/offloading/scheduler.py", "SchedulerOffloadConfig", ("kv_group_configs", "num_workers"), CONNECTOR),
    Needed(f"{_V1}/offloading/scheduler.py", "GroupOffloadConfig", ("sliding_window_size_in_chunks",), CONNECTOR),
    Needed(f"{_V1}/offloading/scheduler.py", "RequestOffloadState", (
        "req", "group_states", "req_context", "transfer_jobs", "update_offload_keys",
    ), CONNECTOR),
    Needed(f"{_V1}/offloading/scheduler.py", "RequestGroupState", (
        "offload_keys", "next_stored_chunk_idx",
    ), CONNECTOR),
    Needed(f"{_V1}/offloading/scheduler.py", "TransferJobStatus", (
        "req_id", "is_store", "fenced_block_ids",
    ), CONNECTOR),
    Needed(f"{_V1}/offloading/worker.py", "OffloadingConnectorWorker", ("worker",), CONNECTOR),
    Needed("v1/request.py", "Request", (
        "request_id", "session_id", "cache_salt", "num_prompt_tokens", "num_computed_tokens", "status",
        "num_output_tokens", "skip_reading_prefix_cache",
    ), CONNECTOR),
    Needed("v1/request.py", "RequestStatus", ("FINISHED_ABORTED",), CONNECTOR),
    Needed("v1/core/sched/output.py", "SchedulerOutput", (
        "finished_req_ids", "num_scheduled_tokens", "preempted_req_ids",
    ), CONNECTOR),
    Needed("v1/outputs.py", "KVConnectorOutput", ("kv_connector_worker_meta", "finished_sending"), CONNECTOR),
    Needed("config/kv_transfer.py", "KVTransferConfig", (
        "kv_connector", "kv_connector_module_path", "kv_role", "kv_load_failure_policy", "kv_connector_extra_config",
    ), LAUNCHER),
    Needed("plugins/endpoint_plugins/interface.py", "EndpointPlugin", (
        "name", "required_tasks", "attach_router", "init_state",
    ), ENDPOINTS),
    # Flags are fields here: dashes in the flag are underscores in the field.
    Needed("engine/arg_utils.py", "EngineArgs", (
        "kv_transfer_config", "prefix_caching_hash_algo", "shutdown_timeout",
    ), LAUNCHER),
    Needed("engine/arg_utils.py", "EngineArgs", (
        "max_model_len", "block_size", "num_gpu_blocks_override", "kv_cache_memory_bytes", "max_num_seqs",
        "enforce_eager", "dtype", "seed", "served_model_name",
    ), DEMO),
    Needed("entrypoints/launchers/cli_args.py|entrypoints/common/cli_args.py", "BaseFrontendArgs", (
        "enable_prompt_tokens_details",
    ), LAUNCHER),
    Needed("entrypoints/launchers/cli_args.py|entrypoints/common/cli_args.py", "FrontendArgs", (
        "middleware", "disable_uvicorn_access_log",
    ), LAUNCHER),
)

SIGNATURES = (
    Signature("v1/kv_offload/base.py", "OffloadingManager", "lookup", ("key", "req_context"), MANAGER),
    Signature("v1/kv_offload/base.py", "OffloadingManager", "prepare_load", ("keys", "req_context"), MANAGER),
    Signature("v1/kv_offload/base.py", "OffloadingManager", "prepare_store", ("keys", "req_context"), MANAGER),
    Signature("v1/kv_offload/base.py", "OffloadingManager", "complete_load", ("keys", "req_context"), MANAGER),
    Signature("v1/kv_offload/base.py", "OffloadingManager", "complete_store", (
        "keys", "req_context", "success",
    ), MANAGER),
    Signature("v1/kv_offload/base.py", "OffloadingWorker", "submit_store", (
        "job_id", "src_spec", "dst_spec",
    ), WORKER),
    Signature("v1/kv_offload/base.py", "OffloadingWorker", "submit_load", (
        "job_id", "src_spec", "dst_spec",
    ), WORKER),
    Signature("v1/kv_offload/base.py", "OffloadingWorker", "wait", ("job_ids",), WORKER),
    Signature("v1/kv_offload/base.py", "OffloadingSpec", "get_worker", ("kv_caches",), SPEC),
    Signature(f"{_V1}/base.py", "KVConnectorBase_V1", "__init__", (
        "vllm_config", "role", "kv_cache_config",
    ), CONNECTOR),
    Signature(f"{_V1}/base.py", "KVConnectorBase_V1", "get_transfer_results", ("finished_req_ids",), CONNECTOR),
    Signature(f"{_V1}/offloading_connector.py", "OffloadingConnector", "get_num_new_matched_tokens", (
        "request", "num_computed_tokens",
    ), CONNECTOR),
    Signature(f"{_V1}/offloading_connector.py", "OffloadingConnector", "update_state_after_alloc", (
        "request", "blocks", "num_external_tokens",
    ), CONNECTOR),
    Signature(f"{_V1}/offloading_connector.py", "OffloadingConnector", "request_finished_all_groups", (
        "request", "block_ids",
    ), CONNECTOR),
    Signature("plugins/endpoint_plugins/interface.py", "EndpointPlugin", "init_state", (
        "engine_client", "state", "args",
    ), ENDPOINTS),
)

IMPLEMENTED = (
    Implemented("v1/kv_offload/base.py", "OffloadingManager", "ParkadeManager", MANAGER),
    Implemented("v1/kv_offload/base.py", "OffloadingWorker", "ParkadeWorker", WORKER),
    Implemented("v1/kv_offload/base.py", "OffloadingSpec", "ParkadeSpec", SPEC),
)

MENTIONED = (
    Mentioned("plugins/__init__.py", "vllm.endpoint_plugins", ENDPOINTS),
    Mentioned("plugins/__init__.py", "vllm.general_plugins", LAUNCHER),
    Mentioned("envs.py", "VLLM_PLUGINS", LAUNCHER),
    Mentioned("envs.py", "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", LAUNCHER),
    Mentioned("entrypoints/generate/base/serving.py", "X-Session-ID", MIDDLEWARE),
    Mentioned("config/kv_transfer.py", "recompute", LAUNCHER),
    Mentioned("config/cache.py", "sha256_cbor", LAUNCHER),
    Mentioned("v1/kv_offload/factory.py", "spec_module_path", LAUNCHER),
)
# fmt: on

SURFACE = (*NAMES, *SIGNATURES, *IMPLEMENTED, *MENTIONED)


class Sources(Protocol):
    """The engine's Python files of one release."""

    release: str

    def read(self, path: str) -> str | None: ...


class InstalledSources:
    """What is installed, found without importing it."""

    release = "vLLM as installed"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, path: str) -> str | None:
        file = self._folder / path
        return file.read_text() if file.is_file() else None


class WheelSources:
    """A wheel on disk."""

    def __init__(self, wheel: Path) -> None:
        self.release = "-".join(wheel.name.split("-")[:2])
        self._archive = zipfile.ZipFile(wheel)

    def read(self, path: str) -> str | None:
        try:
            return self._archive.read(f"vllm/{path}").decode()
        except KeyError:
            return None


def installed_sources() -> InstalledSources:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("no vLLM is installed: make env")
    return InstalledSources(Path(spec.origin).parent)


@functools.cache
def wheel_sources(requirement: str) -> WheelSources:
    folder = WHEEL_FOLDER / "".join(character if character.isalnum() else "_" for character in requirement)
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--dest", str(folder), requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = sorted(folder.glob("*.whl"))
        assert wheels, f"{requirement} could not be downloaded:\n{done.stderr}"
    return WheelSources(wheels[-1])


@pytest.fixture(params=["installed", *filter(None, [os.environ.get(WHEEL_ENV)])])
def sources(request: pytest.FixtureRequest) -> Sources:
    return installed_sources() if request.param == "installed" else wheel_sources(request.param)


@functools.cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def module_of(sources: Sources, path: str, user: str) -> ast.Module:
    for candidate in path.split("|"):
        text = sources.read(candidate)
        if text is not None:
            return _parsed(text)
    pytest.fail(f"{sources.release} has no vllm/{path} any more; adapt {user}")


def scope_of(sources: Sources, path: str, owner: str, user: str) -> ast.Module | ast.ClassDef:
    module = module_of(sources, path, user)
    if not owner:
        return module
    for node in module.body:
        if isinstance(node, ast.ClassDef) and node.name == owner:
            return node
    pytest.fail(f"{sources.release}: vllm/{path} has no class {owner} any more; adapt {user}")


def names_in(scope: ast.Module | ast.ClassDef) -> set[str]:
    """Methods, attributes of the class, attributes that a method gives to ``self``, and imported names."""
    return set(_names(scope))


def _names(scope: ast.Module | ast.ClassDef) -> Iterator[str]:
    for node in scope.body:
        yield from _defined(node)
    if isinstance(scope, ast.ClassDef):
        for node in ast.walk(scope):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                yield node.attr


def _defined(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Assign(targets=targets):
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            yield from (alias.asname or alias.name for alias in aliases)
        case _:
            return


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def functions_in(scope: ast.Module | ast.ClassDef) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    return {node.name: node for node in scope.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def is_abstract(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "abstractmethod" for node in function.decorator_list)


def _label(entry: object) -> str:
    match entry:
        case Needed(owner=owner, path=path):
            return owner or path
        case Signature(owner=owner, function=function):
            return f"{owner}.{function}"
        case Implemented(by=by):
            return by
        case Mentioned(text=text):
            return text
    return str(entry)


def _ids(entries: Sequence[object]) -> list[str]:
    return [f"{index}-{_label(entry)}" for index, entry in enumerate(entries)]


@pytest.mark.parametrize("needed", NAMES, ids=_ids(NAMES))
def test_the_engine_still_has_every_name_that_is_relied_on(sources: Sources, needed: Needed):
    found = names_in(scope_of(sources, needed.path, needed.owner, needed.user))
    missing = [name for name in needed.names if name not in found]
    where = f"{needed.owner or 'the module'} in vllm/{needed.path}"
    assert not missing, f"{sources.release}: {where} lost {', '.join(missing)}; adapt {needed.user}"


@pytest.mark.parametrize("needed", SIGNATURES, ids=_ids(SIGNATURES))
def test_the_engine_still_calls_with_the_same_parameters(sources: Sources, needed: Signature):
    function = functions_in(scope_of(sources, needed.path, needed.owner, needed.user)).get(needed.function)
    assert function is not None, f"{sources.release}: {needed.owner}.{needed.function} is gone; adapt {needed.user}"
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    taken = tuple(name for name in names if name != "self")[: len(needed.parameters)]
    message = f"{sources.release}: {needed.owner}.{needed.function} takes {taken}; adapt {needed.user}"
    assert taken == needed.parameters, message


@pytest.mark.parametrize("needed", IMPLEMENTED, ids=_ids(IMPLEMENTED))
def test_every_abstract_method_of_the_engine_is_implemented(sources: Sources, needed: Implemented):
    theirs = functions_in(scope_of(sources, needed.path, needed.owner, needed.user))
    module = ast.parse((ROOT / needed.user).read_text())
    (ours,) = (node for node in module.body if isinstance(node, ast.ClassDef) and node.name == needed.by)
    abstract = {name for name, function in theirs.items() if is_abstract(function)}
    missing = sorted(abstract - functions_in(ours).keys())
    assert abstract, f"{sources.release}: {needed.owner} has no abstract methods any more; read it again"
    assert not missing, f"{sources.release}: {needed.owner} now also asks for {', '.join(missing)}; adapt {needed.user}"


@pytest.mark.parametrize("needed", MENTIONED, ids=_ids(MENTIONED))
def test_the_engine_still_knows_the_strings_that_are_relied_on(sources: Sources, needed: Mentioned):
    text = sources.read(needed.path)
    assert text is not None, f"{sources.release} has no vllm/{needed.path} any more; adapt {needed.user}"
    gone = f"{sources.release}: {needed.text!r} is gone from vllm/{needed.path}; adapt {needed.user}"
    assert needed.text in text, gone


def test_every_part_of_parkade_that_is_named_exists():
    missing = sorted({entry.user for entry in SURFACE if not (ROOT / entry.user).is_file()})
    assert not missing
