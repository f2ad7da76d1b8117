"""Runs real vLLM with the conversation cache in one process and prints what happened as JSON.

Run by the engine tests, one process per life of a pod: ``engine_process.py FOLDER PHASE``. Engine, owner and mover
share the process (the ``uni`` executor), so that the bytes that go in and out of the engine's memory can be looked at.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

FOLDER = Path(sys.argv[1])
PHASE = sys.argv[2]
PARKED = sys.argv[3]

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_PLUGINS="parkade",
    OMP_NUM_THREADS=str(len(os.sched_getaffinity(0))),
)

import argparse as library  # noqa: E402 - a long, real text that every Python has

import numpy as np  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402

from parkade_serving.model import prepare_model  # noqa: E402

BLOCK_TOKENS = 128


def digest(buffer: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(buffer).tobytes()).hexdigest()


class Watch:
    """Notes every block that leaves or enters the engine, and reads back what has entered."""

    def __init__(self, device: Any) -> None:
        self.out: list[str] = []
        self.entered: list[str] = []
        self.differing = 0
        copy_out, copy_in = device.copy_out, device.copy_in

        def watched_out(blocks: Any, targets: Any, after: Any) -> None:
            copy_out(blocks, targets, after)
            self.out += [digest(target) for target in targets]

        def watched_in(sources: Any, blocks: Any, after: Any) -> None:
            copy_in(sources, blocks, after)
            for source, block in zip(sources, blocks, strict=True):
                back = np.empty_like(source)
                copy_out((block,), (back,), None)
                self.entered.append(digest(back))
                self.differing += not np.array_equal(back, source)

        device.copy_out, device.copy_in = watched_out, watched_in


class Engine:
    def __init__(self) -> None:
        parkade = {
            "policy": {
                "memory": {"floor": "64Mi", "parked": {"max": PARKED}},
                "spill": {"size": "1Gi", "minFree": "1Mi"},
            },
            "spill_dir": str(FOLDER / "spill"),
            "socket_dir": str(FOLDER / "sockets"),
        }
        self.llm = LLM(
            model=str(prepare_model()),
            dtype="float32",
            max_model_len=1024,
            num_gpu_blocks_override=9,
            max_num_seqs=2,
            enforce_eager=True,
            distributed_executor_backend="uni",
            prefix_caching_hash_algo="sha256_cbor",
            disable_log_stats=True,
            kv_transfer_config={
                "kv_connector": "ParkadeConnector",
                "kv_connector_module_path": "parkade_serving.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "spec_name": "ParkadeSpec",
                    "spec_module_path": "parkade_serving.spec",
                    "parkade": parkade,
                },
            },
        )
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.owner = self.core.scheduler.connector.at_scheduler.owner
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.watch = Watch(get_kv_transfer_group().at_worker.worker.mover.device)
        self.tokenizer = self.llm.get_tokenizer()

    def turn(self, tokens: list[int]) -> dict[str, Any]:
        output = self.llm.generate(
            [{"prompt_token_ids": tokens}], SamplingParams(temperature=0, max_tokens=12), use_tqdm=False
        )[0]
        self.settle()
        return {
            "prompt": len(tokens),
            "cached": output.num_cached_tokens,
            "reply": list(output.outputs[0].token_ids),
            "receipt": self.receipts("turn")[-1],
        }

    def together(self, prompts: list[list[int]]) -> None:
        """Requests in flight at the same time."""
        self.llm.generate(
            [{"prompt_token_ids": tokens} for tokens in prompts],
            SamplingParams(temperature=0, max_tokens=4),
            use_tqdm=False,
        )
        self.settle()

    def settle(self) -> None:
        """The offline engine stops stepping with the last token: step until the request is closed."""
        deadline = time.monotonic() + 30
        while self.owner.state.turns or self.owner.state.finished_streams:
            self.core.step_fn()
            assert time.monotonic() < deadline, "the turn did not close"
            time.sleep(0.002)
        while any(conversation.writing for conversation in self.owner.state.conversations):
            assert time.monotonic() < deadline, "a write did not end"
            time.sleep(0.01)

    def receipts(self, kind: str | None = None) -> list[dict[str, Any]]:
        return self.owner.list_receipts({"kind": kind, "limit": 10_000})


def damage_one_pack() -> str:
    """Flip one byte in the payload of the oldest pack."""
    pack = min((FOLDER / "spill").glob("identities/*/rank-0/packs/*/*.pack"), key=lambda path: path.name)
    with pack.open("r+b") as file:
        file.seek(4096 + 12345)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0xFF]))
    return pack.name


def main() -> None:
    # The offline engine steps without a pause while a request waits; a server sleeps a millisecond, which lets the
    # cache's threads run. Switching often does the same here.
    sys.setswitchinterval(0.0005)
    engine = Engine()
    text = inspect.getsource(library) + inspect.getsource(textwrap)
    tokens = engine.tokenizer.encode(text)
    first, other, newcomer = tokens[:650], tokens[1000:1650], tokens[:300] + tokens[3000:3200]
    facts: dict[str, Any] = {}
    match PHASE:
        case "first-life":
            facts["fresh"] = engine.turn(first)
            facts["engine_hit"] = engine.turn(first)
            facts["other"] = engine.turn(other)
            facts["restored"] = engine.turn(first)
            grown = first + facts["restored"]["reply"] + tokens[700:900]
            facts["other_again"] = engine.turn(other)
            facts["grown"] = engine.turn(grown)
            twins = [tokens[:256] + tokens[2000:2150], tokens[:256] + tokens[2300:2450]]
            engine.together(twins)
            engine.turn(other)
            facts["twins"] = [engine.turn(twin) for twin in twins]
        case "second-life":
            facts["newcomer"] = engine.turn(newcomer)
            facts["restored"] = engine.turn(first)
        case "damaged":
            facts["pack"] = damage_one_pack()
            facts["damaged"] = [engine.turn(first), engine.turn(other)]
            facts["healed"] = [engine.turn(first), engine.turn(other)]
            facts["quarantined"] = engine.owner.summary()["disk"]["quarantined"]
    facts["out"] = engine.watch.out
    facts["entered"] = engine.watch.entered
    facts["differing"] = engine.watch.differing
    facts["summary"] = engine.owner.summary()
    facts["kinds"] = sorted({receipt["kind"] for receipt in engine.receipts()})
    started = time.monotonic()
    engine.core.shutdown()
    facts["shutdown_seconds"] = time.monotonic() - started
    (FOLDER / f"{PHASE}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
