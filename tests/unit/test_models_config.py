"""`config.json` to `ModelConfig`: what is read, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgellm.errors import UnsupportedModelError, WeightFileError
from edgellm.models.config import ModelConfig, RopeConfig, config_from_hf, read_config_json
from edgellm.models.registry import Architecture, architecture_from_gguf

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}


def test_llama() -> None:
    assert config_from_hf(LLAMA) == ModelConfig(
        architecture=Architecture.LLAMA,
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=8,
        num_kv_heads=2,
        head_dim=8,
        max_positions=2048,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=10000.0, original_max_positions=2048),
        tied_embeddings=True,
        weight_dtype="bfloat16",
        bos_token_id=1,
        eos_token_ids=(2, 3),
    )


def test_derived_sizes() -> None:
    config = config_from_hf(LLAMA | {"head_dim": 10})
    assert (config.q_size, config.kv_size, config.group_size) == (80, 20, 4)


def test_what_the_families_differ_in() -> None:
    flags = {
        name: (config.qkv_bias, config.o_bias, config.qk_norm, config.head_dim)
        for name, config in (
            ("llama", config_from_hf(LLAMA)),
            ("qwen2", config_from_hf(QWEN2)),
            ("qwen3", config_from_hf(QWEN3)),
            ("qwen3 biased", config_from_hf(QWEN3 | {"attention_bias": True})),
        )
    }
    assert flags == {
        "llama": (False, False, False, 8),
        "qwen2": (True, False, False, 8),
        "qwen3": (False, False, True, 16),
        "qwen3 biased": (True, True, True, 16),
    }


def test_both_spellings_of_rope_give_the_same() -> None:
    scaling = {"type": "linear", "factor": 2.0}
    new = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    without = {name: value for name, value in LLAMA.items() if name != "rope_theta"}
    assert config_from_hf(LLAMA | {"rope_scaling": scaling}) == config_from_hf(without | {"rope_parameters": new})


def test_one_eos_and_none() -> None:
    assert config_from_hf(LLAMA | {"eos_token_id": 7}).eos_token_ids == (7,)
    assert config_from_hf(LLAMA | {"eos_token_id": None}).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"], "model_type": "mamba"},
            r"MambaForCausalLM \(model_type 'mamba'\) is not supported; supported: LlamaForCausalLM \(llama\), "
            r"Qwen2ForCausalLM \(qwen2\), Qwen3ForCausalLM \(qwen3\)",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": [], "model_type": "gpt2"}, "no architecture"),
        ({"rope_theta": None}, r'config.json has no rope.*add "rope_theta": 10000.0'),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope' is not supported"),
        ({"quantization_config": {"quant_method": "eetq"}}, "method 'eetq'.*GGUF file"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu'"),
        ({"num_key_value_heads": 3}, "num_heads 8 is not a multiple of num_kv_heads 3"),
        ({"num_attention_heads": 7}, "hidden_size 64 is not a multiple of num_attention_heads 7"),
        ({"vocab_size": None}, "config.json: vocab_size is missing; an integer from 1 to 4194304 is needed: download"),
        ({"num_hidden_layers": 0}, "config.json: num_hidden_layers is 0; an integer from 1 to 1024 is needed"),
        ({"head_dim": 7}, "head_dim is 7; rope needs an even head_dim"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'; a number above 0 and up to 1 is needed"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        config_from_hf(LLAMA | changes)


def test_sliding_window_is_refused_where_it_is_used() -> None:
    with pytest.raises(UnsupportedModelError, match="use_sliding_window is true"):
        config_from_hf(QWEN2 | {"use_sliding_window": True})
    assert config_from_hf(QWEN2 | {"use_sliding_window": False, "sliding_window": 4096}).max_positions == 2048


def test_qwen3_without_head_dim_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no head_dim"):
        config_from_hf({name: value for name, value in QWEN3.items() if name != "head_dim"})


def test_model_type_alone_is_enough() -> None:
    assert config_from_hf({k: v for k, v in QWEN2.items() if k != "architectures"}).architecture is Architecture.QWEN2


def test_unknown_gguf_architecture_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="'gemma3' is not supported; supported: llama, qwen2, qwen3"):
        architecture_from_gguf("gemma3")


def test_config_file_missing_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(WeightFileError, match=r"config.json is missing"):
        read_config_json(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(WeightFileError, match=r"cannot be read as JSON.*download it again"):
        read_config_json(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(WeightFileError, match="holds a list"):
        read_config_json(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_config_json(tmp_path) == LLAMA
