"""`config.json` of Gemma3 and Gemma4: what is read, in every spelling, and what is refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from edgellm.errors import UnsupportedModelError, WeightFileError
from edgellm.models.config import KVLayer, RopeConfig, config_from_hf
from edgellm.models.families.gemma import GemmaConfig, GemmaExperts
from edgellm.models.weights import TensorSpec, empty_weights, load_weights

SLIDING, FULL = "sliding_attention", "full_attention"
# The fields of the published 1B file, with small sizes.
GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 48,
    "intermediate_size": 80,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 7,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 64,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 8,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 199,
}
# Those of the 4B file, which leaves the shape of attention to the defaults of its format.
TOWERS3: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
}
GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "attention_bias": False,
    "attention_k_eq_v": False,
    "enable_moe_block": False,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 32,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 48,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 80,
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_global_key_value_heads": None,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 3,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 8,
    "use_double_wide_mlp": True,
    "vocab_size": 199,
    "vocab_size_per_layer_input": 199,
}
EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 24}


def read(raw: dict[str, Any]) -> GemmaConfig:
    config = config_from_hf(raw)
    assert isinstance(config, GemmaConfig)
    return config


def test_gemma3() -> None:
    config = read(GEMMA3)
    assert [layer.window for layer in config.layers] == [8, 8, 8, 8, 8, 0, 8]
    assert config.kv_layers == tuple(KVLayer(1, 16, layer.window) for layer in config.layers)
    assert (config.num_kv_layers, config.attention_scale, config.norm_offset) == (7, 0.125, 1.0)
    assert config.tied_embeddings
    assert (config.rope.theta, config.local_rope.theta) == (1e6, 1e4)
    assert (config.value_norm, config.layer_scale, config.per_layer_size, config.final_softcap) == (
        False,
        False,
        0,
        None,
    )


def test_gemma3_says_the_same_in_newer_fields() -> None:
    older = GEMMA3 | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    newer = {name: value for name, value in GEMMA3.items() if "rope" not in name and "pattern" not in name}
    newer["rope_parameters"] = {
        FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    }
    newer["layer_types"] = [SLIDING] * 5 + [FULL, SLIDING]
    assert read(older) == read(newer)


def test_gemma3_with_towers_takes_the_defaults_of_its_format() -> None:
    config = read(TOWERS3)
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262208, 8, 4, 256)
    assert (config.rope.kind, config.rope.factor, config.local_rope.kind) == ("linear", 8.0, "default")
    assert (config.attention_scale, config.eos_token_ids, config.weight_dtype) == (256**-0.5, (1, 106), "bfloat16")
    assert config.stored_prefix == "language_model.model."
    assert [idx for idx, layer in enumerate(config.layers) if not layer.window] == [5, 11, 17, 23, 29]


def test_gemma4() -> None:
    config = read(GEMMA4)
    sliding, full = KVLayer(2, 16, 8), KVLayer(2, 32, 0)
    assert config.kv_layers == (sliding, sliding, full)
    assert [(layer.kv_layer, layer.owns_kv) for layer in config.layers] == [
        (0, True),
        (1, True),
        (2, True),
        (1, False),
        (1, False),
        (2, False),
    ]
    assert [layer.intermediate_size for layer in config.layers] == [80, 80, 80, 160, 160, 160]
    assert (config.attention_scale, config.norm_offset, config.final_softcap) == (1.0, 0.0, 30.0)
    assert config.rope == RopeConfig(theta=1e6, kind="linear", freq_factors=(1.0,) * 4 + (math.inf,) * 12)
    assert config.local_rope == RopeConfig(theta=1e4, original_max_positions=512)


def test_gemma4_says_the_same_layer_by_layer() -> None:
    shape = {"head_dim": 32, "num_key_value_heads": 1}
    newer = {name: value for name, value in GEMMA4.items() if "global" not in name}
    newer |= {"attention_k_eq_v": True, "per_layer_config": {"2": shape, "5": shape}}
    older = read(GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1})
    assert older == read(newer)
    assert older.kv_layers[2] == KVLayer(1, 32, 0)
    assert [layer.value_from_key for layer in older.layers] == [False, False, True, False, False, True]


def test_gemma4_with_towers_is_the_same_model_under_other_names() -> None:
    outer = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "vision_config": {"a": 1}}
    config = read(outer | {"text_config": GEMMA4})
    names = empty_weights(config, *meta())[1]
    plain = empty_weights(read(GEMMA4), *meta())[1]
    assert [name.replace("model.language_model.", "model.") for name in names] == list(plain)


def meta() -> tuple[Any, Any]:
    import torch

    return torch.float32, torch.device("meta")


class Listing:
    """A checkpoint of which only the header is read."""

    def __init__(self, config: GemmaConfig, *more: str) -> None:
        targets = empty_weights(config, *meta())[1]
        self._specs = {name: TensorSpec(tuple(tensor.shape), "F32", 4) for name, tensor in targets.items()}
        self._specs.update(dict.fromkeys(more, TensorSpec((1,), "F32", 4)))

    def specs(self) -> dict[str, TensorSpec]:
        return self._specs

    def read(self, name: str) -> Any:
        raise AssertionError(f"{name} was read")

    sample = read


@pytest.mark.parametrize("name", ["model.layers.4.self_attn.k_proj.weight", "model.vision_tower.layers.0.weight"])
def test_tensors_that_the_text_model_has_no_use_for_stay_unread(name: str) -> None:
    """The trial passes, and the first tensor is asked for."""
    config = read(GEMMA4)
    with pytest.raises(AssertionError, match=r"model\.embed_tokens\.weight was read"):
        load_weights(config, Listing(config, name), dtype=meta()[0], device=meta()[1])


def test_a_projection_that_the_model_would_need_is_not_left_unread() -> None:
    config = read(GEMMA4)
    name = "model.layers.6.self_attn.k_proj.weight"
    with pytest.raises(WeightFileError, match=r"stores 'model\.layers\.6\.self_attn\.k_proj\.weight'"):
        load_weights(config, Listing(config, name), dtype=meta()[0], device=meta()[1])


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; capped attention scores"),
        (GEMMA3, {"attention_bias": True}, "attention_bias is true; biases of the attention projections"),
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        (GEMMA3, {"hidden_activation": "silu"}, "hidden_activation is 'silu'; supported: 'gelu_pytorch_tanh'"),
        (GEMMA3, {"query_pre_attn_scalar": None}, "query_pre_attn_scalar is missing"),
        (GEMMA3, {"num_key_value_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        (GEMMA3, {"sliding_window": None}, "sliding_window is missing; an integer from 1"),
        (GEMMA3, {"quantization_config": {"quant_method": "gptq"}}, "method 'gptq'"),
        (GEMMA3, {"rope_scaling": {"rope_type": "proportional"}}, "rope type 'proportional' is not supported"),
        (GEMMA4, EXPERTS | {"top_k_experts": 9}, "top_k_experts is 9; an integer from 1 to 8"),
        (GEMMA4, EXPERTS | {"num_experts": None}, "num_experts is missing"),
        (GEMMA4, {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        (GEMMA4, {"layer_types": [SLIDING] * 6}, "layer_types is.*'full_attention' as the last kind"),
        (GEMMA4, {"layer_types": [FULL] * 5}, "layer_types is.*a list of 6 kinds"),
        (GEMMA4, {"layer_types": ["chunked_attention"] * 6}, "layer_types is.*a list of 6 kinds"),
        (GEMMA4, {"num_kv_shared_layers": 6}, "num_kv_shared_layers is 6.*K and V of its own"),
        (GEMMA4, {"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4.*K and V of its own"),
        (GEMMA4, {"global_head_dim": 33}, "layer 2 has 2 kv heads of 33 for 4 query heads"),
        (GEMMA4, {"global_head_dim": 1024}, "global_head_dim is 1024; an integer from 1 to 512"),
        (GEMMA4, {"vocab_size_per_layer_input": 100}, "vocab_size_per_layer_input is 100; vocab_size, 199, is needed"),
        (GEMMA4, {"per_layer_config": {"2": {"sliding_window": 4}}}, r"per_layer_config.2.sliding_window is 4"),
        (
            GEMMA4,
            {"per_layer_config": {"2": {"head_dim": 64}}},
            "layer 5 has 2 kv heads of 16, but reads K and V of layer 2",
        ),
        (
            GEMMA4,
            {"per_layer_config": {"2": {"head_dim": 64}}, "num_kv_shared_layers": 0},
            "full_attention have heads of .16, 64.",
        ),
        (GEMMA4, {"rope_parameters": None}, "rope of full_attention layers, field rope_theta is missing"),
    ],
)
def test_refusals(base: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        config_from_hf(base | changes)


def test_experts() -> None:
    assert read(GEMMA4).experts is None
    assert read(GEMMA4 | EXPERTS).experts == GemmaExperts(num_experts=8, experts_per_token=2, expert_size=24)


def test_vision_marks_of_attention_do_not_concern_text() -> None:
    assert read(GEMMA4 | {"use_bidirectional_attention": "vision"}) == read(GEMMA4)
