"""A real Llama of two layers with random weights: what engine tests need where speed counts and the words do not.

The weights are the same wherever they are made. They are drawn wide enough that the next token depends on everything
before it: a wrong block of KV cache changes the text, which a small spread of weights would hide.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from parkade_serving.model import default_cache_dir, prepare_model

_FORMAT = 1
"""Part of the folder's name; raise it when what is written into the folder changes."""
_SEED = 20_260
_LAYERS = 2
_CONTEXT = 8192
FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class TinyShape:
    """What decides how large a token's KV cache is; the CPU backend takes heads of 32, 64 and wider."""

    heads: int = 2
    head_dim: int = 32
    hidden: int = 64

    @property
    def token_bytes(self) -> int:
        """KV cache of one token in float32: keys and values of every layer."""
        return 2 * _LAYERS * self.heads * self.head_dim * FLOAT32_BYTES

    @property
    def name(self) -> str:
        return f"tiny-llama-{self.hidden}-{self.heads}x{self.head_dim}-{_FORMAT}"


def prepare_tiny_model(shape: TinyShape | None = None) -> Path:
    """The folder with weights and tokenizer; seconds the first time. Loads PyTorch."""
    shape = shape or TinyShape()
    tokenizer = prepare_model()
    target = default_cache_dir() / shape.name
    if target.is_dir():
        return target
    part = Path(tempfile.mkdtemp(prefix=f".{shape.name}-", dir=target.parent))
    try:
        _write_weights(shape, part)
        for file in tokenizer.glob("tokenizer*"):
            shutil.copy(file, part)
        part.chmod(0o755)
        try:
            part.rename(target)
        except OSError:
            # Another process was faster; its folder is the same.
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


def _write_weights(shape: TinyShape, folder: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(_SEED)
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=shape.hidden,
        intermediate_size=2 * shape.hidden,
        num_hidden_layers=_LAYERS,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.head_dim,
        max_position_embeddings=_CONTEXT,
        initializer_range=0.4,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)
