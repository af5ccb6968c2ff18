"""Tiny random models of every family beside the dense ones: the configs of their parity tests, saved in a folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from parity import test_gemma, test_granite_hybrid, test_mamba2, test_qwen_hybrid
from parity.mixer_parity import save_random
from transformers import (
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    PreTrainedModel,
)

Save = Callable[..., PreTrainedModel]


def _granite(name: str, folder: Path, **more: Any) -> PreTrainedModel:
    values = test_granite_hybrid.BASE | test_granite_hybrid.VARIANTS[name] | more
    return save_random(GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, values, folder)


def _mamba2(name: str, folder: Path, **more: Any) -> PreTrainedModel:
    changes, save = test_mamba2.VARIANTS[name]
    return save_random(Mamba2Config, Mamba2ForCausalLM, test_mamba2.BASE | changes | more, folder, **save)


# name: saves a random model in a folder, with further changes of its config, and returns transformers' model
MODELS: dict[str, Save] = {
    **{f"qwen-{name}": partial(test_qwen_hybrid.make_reference, name) for name in test_qwen_hybrid.VARIANTS},
    **{f"mamba2-{name}": partial(_mamba2, name) for name in test_mamba2.VARIANTS},
    **{f"granite-{name}": partial(_granite, name) for name in test_granite_hybrid.VARIANTS},
    **{name: partial(test_gemma.make_reference, name) for name in test_gemma.VARIANTS},
}

_MOE_OF_EIGHTS = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 32}

# Sizes that the kernels of 16-bit rows take: heads for tensor cores, beside those that they leave to plain loops.
WIDE: dict[str, Save] = {
    "qwen-next-moe": partial(
        test_qwen_hybrid.make_reference,
        "next-moe",
        head_dim=64,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        **_MOE_OF_EIGHTS,
    ),
    "qwen-3.5-dense": partial(test_qwen_hybrid.make_reference, "3.5-dense", head_dim=128),
    "mamba2-plain": partial(_mamba2, "plain"),
    "mamba2-biases": partial(_mamba2, "biases"),
    "granite-experts": partial(
        _granite, "experts", hidden_size=128, num_attention_heads=2, num_key_value_heads=1, mamba_d_head=32
    ),
    "gemma3": partial(test_gemma.make_reference, "gemma3", head_dim=64),
    "gemma4-shared": partial(test_gemma.make_reference, "gemma4-shared", head_dim=64, global_head_dim=512),
    "gemma4-experts": partial(test_gemma.make_reference, "gemma4-experts", head_dim=128, global_head_dim=320),
}

# One of each kind of layer.
SOME = (
    "qwen-next-dense",
    "qwen-next-moe",
    "qwen-3.5-dense",
    "qwen-3.5-moe",
    "mamba2-one-group-tied",
    "mamba2-biases",
    "granite-experts",
    "granite-attention-only",
    "gemma3",
    "gemma4-shared",
    "gemma4-key-is-value",
    "gemma4-experts",
)
