"""Tiny checkpoints to damage: a safetensors folder and a GGUF file, both loadable as written, without transformers."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from ragged import permuted_page_rows, ragged_batch
from safetensors.torch import save_file

from edgellm.errors import UnsupportedModelError, WeightFileError
from edgellm.models.loader import load_model
from edgellm.runtime.executor_cpu import CpuExecutor
from edgellm.runtime.kv_cache import KVCache

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "pad_token_id": None,
}
LAYER_SHAPES = {
    "input_layernorm.weight": (8,),
    "self_attn.q_proj.weight": (8, 8),
    "self_attn.k_proj.weight": (4, 8),
    "self_attn.v_proj.weight": (4, 8),
    "self_attn.q_proj.bias": (8,),
    "self_attn.k_proj.bias": (4,),
    "self_attn.v_proj.bias": (4,),
    "self_attn.o_proj.weight": (8, 8),
    "post_attention_layernorm.weight": (8,),
    "mlp.gate_proj.weight": (6, 8),
    "mlp.up_proj.weight": (6, 8),
    "mlp.down_proj.weight": (8, 6),
}
GGUF_LAYER = {
    "attn_norm": (8,), "attn_q": (8, 8), "attn_k": (4, 8), "attn_v": (4, 8), "attn_output": (8, 8), "ffn_norm": (8,),
    "ffn_gate": (6, 8), "ffn_up": (6, 8), "ffn_down": (8, 6),
}  # fmt: skip
GGUF_INTS = {
    "context_length": 64, "embedding_length": 8, "block_count": 2, "feed_forward_length": 6, "attention.head_count": 4,
    "attention.head_count_kv": 2, "rope.dimension_count": 2, "rope.scaling.original_context_length": 32,
}  # fmt: skip
GGUF_FLOATS = {"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0, "rope.scaling.factor": 2.0}
REFUSALS = (UnsupportedModelError, WeightFileError)


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    shapes = {f"model.layers.{layer}.{name}": shape for layer in range(2) for name, shape in LAYER_SHAPES.items()}
    shapes |= {"model.embed_tokens.weight": (11, 8), "model.norm.weight": (8,), "lm_head.weight": (11, 8)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def write_safetensors(folder: Path, config: dict[str, Any] | None = None) -> Path:
    """config.json and model.safetensors."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    save_file(tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_sharded(folder: Path) -> dict[str, str]:
    """config.json and two shards; returns the weight map of their index, which is written as well."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    stored = tensors()
    weight_map = {name: f"model-0000{place % 2 + 1}-of-00002.safetensors" for place, name in enumerate(sorted(stored))}
    for file in set(weight_map.values()):
        save_file({name: stored[name] for name in stored if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def write_gguf(path: Path, *, replace: dict[str, Any] | None = None) -> Path:
    """A two-layer llama with a vocabulary; `replace` sets metadata keys to other values, of other types."""
    values: dict[str, Any] = {f"llama.{name}": value for name, value in (GGUF_INTS | GGUF_FLOATS).items()}
    values |= {"llama.rope.scaling.type": "yarn", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
    values |= {"tokenizer.ggml.tokens": [f"t{place}" for place in range(11)], "tokenizer.ggml.token_type": [1] * 11}
    values |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in (values | (replace or {})).items():
        add_value(writer, name, value)
    rng = np.random.default_rng(4)
    shapes = {f"blk.{layer}.{name}": shape for layer in range(2) for name, shape in GGUF_LAYER.items()}
    shapes |= {"token_embd": (11, 8), "output_norm": (8,), "output": (11, 8)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value) if 0 <= value < 2**32 else writer.add_int64(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)


def safetensors_header_bytes(blob: bytes) -> int:
    """Where the header ends in the file."""
    return 8 + int(struct.unpack("<Q", blob[:8])[0])


def replace_header(path: Path, header: Any) -> None:
    """Give a safetensors file another header before the same data."""
    blob = path.read_bytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + blob[safetensors_header_bytes(blob) :])


def header_of(path: Path) -> dict[str, Any]:
    blob = path.read_bytes()
    header: dict[str, Any] = json.loads(blob[8 : safetensors_header_bytes(blob)])
    return header


def flipped(blob: bytes, start: int, end: int, chance: random.Random) -> bytes:
    """One to three bytes in [start, end) changed: a bit, or the whole byte."""
    damaged = bytearray(blob)
    for _ in range(chance.randint(1, 3)):
        place = chance.randrange(start, end)
        damaged[place] = damaged[place] ^ (1 << chance.randrange(8)) if chance.random() < 0.5 else chance.randrange(256)
    return bytes(damaged)


def refusal(attempt: Callable[[], object]) -> Exception | None:
    """The error of edgellm about the checkpoint that `attempt` raises; anything else it raises goes on."""
    try:
        attempt()
    except REFUSALS as error:
        return error
    return None


def load_and_run(path: Path) -> None:
    """Load a checkpoint and run three tokens through it, so that what loads is known to compute."""
    model = load_model(path)
    executor = CpuExecutor(model, KVCache.for_model(model.config, num_pages=4, page_size=4))
    logits = executor.forward(ragged_batch([(0, 0, [1, 2, 3])], permuted_page_rows(1, 4, seed=1)))
    assert logits.shape == (1, model.config.vocab_size)
