"""The config of the Qwen hybrids: what is read, and what is refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from edgellm.errors import UnsupportedModelError
from edgellm.models.config import StatePiece, config_from_hf
from edgellm.models.qwen_hybrid_config import QwenHybridConfig
from edgellm.models.qwen_hybrid_weights import allocate_mtp
from edgellm.models.registry import Architecture

NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "eos_token_id": 90,
    "full_attention_interval": 4,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 12,
    "max_position_embeddings": 256,
    "mlp_only_layers": [1],
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 5,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 24,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 97,
}


def conditional(**changes: Any) -> dict[str, Any]:
    """A Qwen3.5 config with a text part, as published."""
    unused = ("architectures", "model_type", "partial_rotary_factor", "rope_theta", "rope_scaling", "num_experts")
    text = {name: value for name, value in NEXT.items() if name not in unused and "moe" not in name}
    text |= {
        "model_type": "qwen3_5_text",
        "attn_output_gate": True,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [1, 1, 0],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text | changes,
        "tie_word_embeddings": True,
        "vision_config": {"depth": 1},
    }


def read(raw: dict[str, Any]) -> QwenHybridConfig:
    config = config_from_hf(copy.deepcopy(raw))
    assert isinstance(config, QwenHybridConfig)
    return config


def test_next_config_is_read() -> None:
    config = read(NEXT)
    assert config.architecture is Architecture.QWEN3_NEXT
    assert config.layer_kinds == ("linear_attention",) * 3 + ("full_attention", "linear_attention")
    assert config.moe_layers == (True, False, True, True, True)
    assert config.moe is not None
    assert config.moe.experts_per_token == 2
    assert config.moe.normalise
    assert config.rotary_dim == 4
    assert config.rope.theta == 1e7
    assert config.eos_token_ids == (90,)
    assert config.weight_dtype == "bfloat16"
    assert config.num_kv_layers == 1
    assert config.interleaved_projections
    assert config.prefix == "model."


def test_recurrent_pieces_are_those_of_the_delta_nets() -> None:
    pieces = read(NEXT).recurrent_pieces
    assert pieces[:2] == (StatePiece(0, "conv", (80, 3)), StatePiece(0, "state", (4, 8, 12)))
    assert [piece.layer for piece in pieces] == [0, 0, 1, 1, 2, 2, 4, 4]


def test_text_part_of_a_conditional_model_is_read() -> None:
    config = read(conditional())
    assert config.architecture is Architecture.QWEN3_5
    assert config.prefix == "model.language_model."
    assert not config.interleaved_projections
    assert config.tied_embeddings
    assert config.moe is None
    assert not any(config.moe_layers)
    assert config.rotary_dim == 4
    assert config.weight_dtype == "bfloat16"


def test_experts_in_every_second_layer() -> None:
    assert read(NEXT | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}).moe_layers == (False, True) + (False,) * 3
    assert read(NEXT | {"num_experts": 0}).moe is None


def test_stored_names_settle_the_layout_of_experts() -> None:
    config = read(NEXT)
    assert config.settled(["model.layers.0.mlp.experts.0.gate_proj.weight"]) == config
    settled = config.settled(
        ["model.layers.0.mlp.experts.gate_up_proj", "mtp.layers.0.mlp.experts.0.up_proj.weight", "mtp.fc.weight"],
    )
    assert isinstance(settled, QwenHybridConfig)
    assert (settled.packed_experts, settled.packed_mtp_experts, settled.num_mtp_layers) == (True, False, 1)
    assert settled.prefix == "model."
    assert config.settled(["model.language_model.embed_tokens.weight"]).prefix == "model.language_model."


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantization_config \(method 'fp8'\) is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu', 'swish'"),
        ({"attn_output_gate": False}, "attn_output_gate is False; supported: True"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid'"),
        ({"use_sliding_window": True}, "use_sliding_window is True; supported: False"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types is .*; a list of 5 names"),
        ({"layer_types": ["full_attention"] * 4 + ["mamba"]}, "layer_types is .*each 'linear_attention'"),
        ({"full_attention_interval": None}, "full_attention_interval is missing"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads 3 is not a multiple of linear_num_key_heads 2"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1; an integer from 2 to 8"),
        ({"linear_key_head_dim": None}, "linear_key_head_dim is missing"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9; an integer from 1 to 8"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
        ({"mlp_only_layers": [5]}, r"mlp_only_layers is \[5\]; a list of layers from 0 to 4"),
        ({"mlp_only_layers": 3}, "mlp_only_layers is 3"),
        ({"partial_rotary_factor": None}, "rope field partial_rotary_factor is missing"),
        ({"partial_rotary_factor": 0.1}, "rotates 1 elements; an even number of at least 2"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        ({"head_dim": None}, "head_dim is missing"),
        ({"eos_token_id": 97}, "eos_token_id is 97"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(NEXT | changes)


def test_refusals_name_the_text_part() -> None:
    with pytest.raises(UnsupportedModelError, match=r"text_config\.linear_key_head_dim is 'a'"):
        read(conditional(linear_key_head_dim="a"))
    with pytest.raises(UnsupportedModelError, match="quantization_config"):
        read(conditional() | {"quantization_config": {"quant_method": "awq"}})


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, []),
        ({}, ["mtp.layers.0.input_layernorm.weight", "mtp.layers.1.input_layernorm.weight"]),
        ({"mtp_use_dedicated_embeddings": True}, ["mtp.layers.0.input_layernorm.weight"]),
    ],
)
def test_prediction_heads_of_another_form_are_refused(changes: dict[str, Any], names: list[str]) -> None:
    import torch

    config = read(conditional(**changes)).settled(names)
    with pytest.raises(UnsupportedModelError, match="multi-token prediction layers"):
        allocate_mtp(config, lambda *shape: torch.empty(shape, device="meta"))


@pytest.mark.parametrize("name", ["mtp_num_hidden_layers", "num_nextn_predict_layers"])
def test_a_prediction_head_of_as_many_layers_as_the_config_says(name: str) -> None:
    import torch

    stored = ["mtp.layers.0.input_layernorm.weight"]
    for value in (0, 2):
        config = read(conditional(**{name: value})).settled(stored)  # plain decoding reads nothing of it
        with pytest.raises(UnsupportedModelError, match=f"stores 1 .*{name} in config.json is {value}"):
            allocate_mtp(config, lambda *shape: torch.empty(shape, device="meta"))
    for unsaid in (1, None):
        config = read(conditional(mtp_num_hidden_layers=None) | {name: unsaid}).settled(stored)
        allocate_mtp(config, lambda *shape: torch.empty(shape, device="meta"))
    for bad in (-1, "a", True):
        with pytest.raises(UnsupportedModelError, match=f"text_config.{name} is {bad!r}; an integer from 0 to 1024"):
            read(conditional(**{name: bad}))
