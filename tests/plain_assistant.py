"""A random assistant of the plain shared-KV layout for a tiny Llama."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tiny_drafts import TinyPair
from tiny_model import write_tiny_llama

if TYPE_CHECKING:
    from pathlib import Path

HIDDEN, INNER, DONORS = 64, 72, [2, 0, 2]


def write_plain_shared_kv_pair(folder: Path, **sizes: Any) -> TinyPair:
    """A three-layer Llama, and an assistant of three layers over two of its, with half its vocabulary."""
    model = write_tiny_llama(folder / "llama", **{"num_hidden_layers": 3, **sizes})
    return TinyPair(model, "shared_kv_mtp", write_assistant(folder / "assistant", model))


def write_assistant(folder: Path, model: Path, *, seed: int = 3) -> Path:
    import torch

    from edgellm_shared_kv.stored_tensors import save_assistant

    base = json.loads((model / "config.json").read_text())
    outer, vocab, heads = base["hidden_size"], base["vocab_size"], base["num_attention_heads"]
    head_dim = base.get("head_dim") or outer // heads
    drafted = (vocab + 1) // 2
    generator = torch.Generator().manual_seed(seed)

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.15

    def norm() -> torch.Tensor:
        return torch.rand(HIDDEN, generator=generator) + 0.5

    chosen = torch.randperm(vocab, generator=generator)[:drafted].sort().values
    tensors = {
        "pre_projection.weight": new(HIDDEN, 2 * outer),
        "post_projection.weight": new(outer, HIDDEN),
        "norm.weight": norm(),
        "lm_head.weight": new(drafted, HIDDEN),
        "d2t": chosen - torch.arange(drafted),
    }
    for idx in range(len(DONORS)):
        layer = f"layers.{idx}."
        tensors |= {
            f"{layer}input_layernorm.weight": norm(),
            f"{layer}post_attention_layernorm.weight": norm(),
            f"{layer}self_attn.q_proj.weight": new(heads * head_dim, HIDDEN),
            f"{layer}self_attn.o_proj.weight": new(HIDDEN, heads * head_dim),
            f"{layer}mlp.gate_proj.weight": new(INNER, HIDDEN),
            f"{layer}mlp.up_proj.weight": new(INNER, HIDDEN),
            f"{layer}mlp.down_proj.weight": new(HIDDEN, INNER),
        }
    config = {
        "architectures": ["SharedKvAssistantForCausalLM"],
        "backbone_hidden_size": outer,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": heads,
        "donor_layers": DONORS,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocab,
        "draft_vocab_size": drafted,
    }
    save_assistant(folder, config, tensors)
    return folder
