"""Tiny models for every decoder, with a random draft where it needs one: real files, read by the real loaders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiny_model import write_byte_tokenizer, write_tiny_llama, write_tiny_qwen_hybrid

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch


@dataclass(frozen=True, slots=True)
class TinyPair:
    """A model and what speculates for it.

    Attributes:
        decoder: kind of the decoder.
        draft: its draft's folder, or None where it needs none.
    """

    model: Path
    decoder: str
    draft: Path | None = None


def write_lookup_pair(folder: Path, **sizes: Any) -> TinyPair:
    return TinyPair(write_tiny_llama(folder / "llama", **sizes), "prompt_lookup")


def write_hybrid_lookup_pair(folder: Path, **sizes: Any) -> TinyPair:
    return TinyPair(write_tiny_qwen_hybrid(folder / "hybrid", mtp=False, **sizes), "prompt_lookup")


def write_mtp_pair(folder: Path, **sizes: Any) -> TinyPair:
    return TinyPair(write_tiny_qwen_hybrid(folder / "mtp", **sizes), "mtp")


def write_eagle_pair(folder: Path, **sizes: Any) -> TinyPair:
    """A six-layer Llama and an EAGLE-3 head of half its vocabulary."""
    model = write_tiny_llama(folder / "llama", **{"num_hidden_layers": 6, **sizes})
    return TinyPair(model, "eagle", write_eagle_head(folder / "head", model))


def write_shared_kv_pair(folder: Path, **sizes: Any) -> TinyPair:
    """A Gemma4 whose last layers share KV, with a sliding window of 16, and an assistant of two layers."""
    return TinyPair(
        write_tiny_gemma4(folder / "gemma", **sizes),
        "shared_kv_mtp",
        write_gemma4_assistant(folder / "assistant", **sizes),
    )


PAIRS: dict[str, Callable[..., TinyPair]] = {
    "prompt_lookup": write_lookup_pair,
    "hybrid_lookup": write_hybrid_lookup_pair,
    "eagle": write_eagle_pair,
    "mtp": write_mtp_pair,
    "shared_kv": write_shared_kv_pair,
}


def write_eagle_head(folder: Path, model: Path, *, seed: int = 3) -> Path:
    """A random EAGLE-3 head for a Llama folder, in the public layout."""
    import json

    import torch

    from edgellm_eagle.checkpoint import save_head

    target = json.loads((model / "config.json").read_text())
    hidden, vocab, inner = target["hidden_size"], target["vocab_size"], 80
    kv_width = target["num_key_value_heads"] * hidden // target["num_attention_heads"]
    drafted = (vocab + 1) // 2
    generator = torch.Generator().manual_seed(seed)

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.15

    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    shapes = {
        "q": (hidden, 2 * hidden),
        "k": (kv_width, 2 * hidden),
        "v": (kv_width, 2 * hidden),
        "o": (hidden, hidden),
    }
    chosen = torch.randperm(vocab, generator=generator)[:drafted].sort().values
    tensors = {
        "fc.weight": new(hidden, 3 * hidden),
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": new(drafted, hidden),
        "d2t": chosen - torch.arange(drafted),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill_(0, chosen, True),
        **{f"midlayer.{name}.weight": torch.rand(hidden, generator=generator) + 0.5 for name in norms},
        **{f"midlayer.self_attn.{name}_proj.weight": new(*shape) for name, shape in shapes.items()},
        "midlayer.mlp.gate_proj.weight": new(inner, hidden),
        "midlayer.mlp.up_proj.weight": new(inner, hidden),
        "midlayer.mlp.down_proj.weight": new(hidden, inner),
    }
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "max_position_embeddings")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **{name: target[name] for name in names},
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "draft_vocab_size": drafted,
    }
    save_head(folder, config, tensors)
    return folder


_GEMMA: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "sliding_window": 16,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
    },
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "eos_token_id": 0,
    "bos_token_id": 0,
    "pad_token_id": 0,
}
_GEMMA_HIDDEN = 48


def write_tiny_gemma4(folder: Path, *, vocab_size: int | None = None, seed: int = 11) -> Path:
    import torch
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    tokens = write_byte_tokenizer(folder)
    torch.manual_seed(seed)
    config = Gemma4TextConfig(
        **_GEMMA,
        vocab_size=vocab_size or tokens,
        hidden_size=_GEMMA_HIDDEN,
        intermediate_size=80,
        num_hidden_layers=6,
        layer_types=["sliding_attention", "full_attention"] * 3,
        num_kv_shared_layers=2,
    )
    model = Gemma4ForCausalLM(config)
    _narrow_embedding(model)
    model.save_pretrained(folder)
    return folder


def write_gemma4_assistant(folder: Path, *, vocab_size: int = 257, seed: int = 12) -> Path:
    """An assistant over the last windowed and the last full layer that keep KV of their own."""
    import torch
    from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

    torch.manual_seed(seed)
    text = Gemma4TextConfig(
        **_GEMMA,
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=4,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
    )
    model = Gemma4AssistantForCausalLM(Gemma4AssistantConfig(text_config=text, backbone_hidden_size=_GEMMA_HIDDEN))
    _narrow_embedding(model)
    model.save_pretrained(folder)
    return folder


def _narrow_embedding(model: Any) -> None:
    """Gemma scales its embedding up: with wide weights every token would answer with itself."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("embed_tokens.weight"):
                parameter.normal_(0.0, 0.05)
            elif name.endswith("model.norm.weight"):
                parameter.fill_(3.0)
