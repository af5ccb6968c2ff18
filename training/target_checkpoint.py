"""The target file as a Hugging Face folder: for the runtime where neither the GGUF file nor a network is at hand."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import torch

from training.small_tokenizer import CHAT_TEMPLATE, TURN_END, TURN_START
from training.target_file import read_target

if TYPE_CHECKING:
    from pathlib import Path

    from training.target_file import LlamaShape

_OUTPUT = "lm_head.weight"
_TOKENIZER_FIELDS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": TURN_START,
    "eos_token": TURN_END,
    "chat_template": CHAT_TEMPLATE,
    "clean_up_tokenization_spaces": False,
}


def write_checkpoint(target: Path, tokenizer: Path, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write config.json, model.safetensors and the tokenizer's files; returns the folder.

    Args:
        target: a file of `training.target_file.pack`.
        tokenizer: folder with tokenizer.json.
        dtype: of the matrices; float32 computes what the packed checkpoint computes, bfloat16 what it computes with
            `dtype="bfloat16"`.  Norms stay float32.
    Raises:
        ValueError: no target file.
    """
    from safetensors.torch import save_file

    shape, tensors = read_target(target)
    folder.mkdir(parents=True, exist_ok=True)
    # Some writers store a tied output matrix once more.
    stored = {name: values for name, values in tensors.items() if not (shape.tied_embeddings and name == _OUTPUT)}
    kept = {name: (values if values.ndim == 1 else values.to(dtype)).contiguous() for name, values in stored.items()}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config_fields(shape, str(dtype).removeprefix("torch.")))
    shutil.copy(tokenizer / "tokenizer.json", folder)
    _write_json(folder / "tokenizer_config.json", _TOKENIZER_FIELDS)
    return folder


def config_fields(shape: LlamaShape, dtype: str) -> dict[str, Any]:
    """The fields of the target's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.tied_embeddings,
        "eos_token_id": shape.eos_token_id,
        "torch_dtype": dtype,
    }


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
