"""Tiny random Granite 4 models against transformers: mixers and attention, experts, scaling constants; and served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity.mixer_parity import (
    PAGE_SIZE,
    TOLERANCE,
    VOCAB_SIZE,
    Pair,
    check_damaged_fields,
    check_pressed,
    check_served,
    make_executor,
    page_rows,
    prompts,
    save_random,
    served_folder,
)
from ragged import ragged_batch
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

from edgellm.errors import UnsupportedModelError
from edgellm.models.config import config_from_hf, read_config_json
from edgellm.models.loader import load_model
from edgellm.models.step import HiddenRequest

BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 24,
    "shared_intermediate_size": 48,
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "attention", "mamba", "attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.5,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}
ROPE = {"position_embedding_type": "rope", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}

VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "nope-by-name": {"position_embedding_type": "nope", "mamba_d_head": "auto", "mamba_n_groups": 2},
    "rope-tied": ROPE | {"tie_word_embeddings": True},
    "experts": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "one-expert": {"num_local_experts": 3, "num_experts_per_tok": 1, "residual_multiplier": 1.0},
    "biases": ROPE | {"attention_bias": True, "mamba_proj_bias": True},
    "no-conv-bias": {"mamba_conv_bias": False, "mamba_d_conv": 3, "time_step_limit": [0.1, 0.7]},
    "attention-only": ROPE | {"layer_types": ["attention"] * 4},
    "mixers-only": {"layer_types": ["mamba"] * 4},
}


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    values = BASE | VARIANTS[request.param]
    reference = save_random(GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, values, folder)
    return Pair(reference, load_model(folder))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    values = BASE | VARIANTS["experts"]
    save_random(GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, values, tmp_path)
    return tmp_path


@pytest.mark.parametrize("chunk", [1, 7, PAGE_SIZE, 1000])
def test_greedy_equals_transformers_for_every_chunk_size(pair: Pair, chunk: int) -> None:
    pair.check_greedy([chunk], [29], seed=1)


def test_five_sequences_of_chunks_and_decode_rows_equal_transformers(pair: Pair) -> None:
    pair.check_greedy([1000, 7, 3, 13, 1], [1, 29, 17, 40, 6], seed=2)


def test_all_logits_and_hidden_rows_of_a_chunk_equal_transformers(pair: Pair) -> None:
    (prompt,) = prompts([19])
    batch = ragged_batch([(0, 0, prompt)], page_rows(6))
    batch.logits_index = np.arange(len(prompt), dtype=np.int64)
    batch.logits_to_seq = np.zeros(len(prompt), np.int32)
    with torch.no_grad():
        expected = pair.reference(torch.tensor([prompt]), use_cache=False, output_hidden_states=True)
    executor = make_executor(pair.model)
    executor.request_hidden(HiddenRequest(layers=(0, 2), normed=True))
    found = executor.forward_verify(batch)
    torch.testing.assert_close(found.logits, expected.logits[0], atol=TOLERANCE, rtol=TOLERANCE)
    wanted = torch.cat([expected.hidden_states[place][0] for place in (0, 2, -1)], dim=1)
    assert found.hidden is not None
    torch.testing.assert_close(found.hidden, wanted, atol=TOLERANCE, rtol=TOLERANCE)


def test_bfloat16_stays_close_to_float32(saved: Path) -> None:
    (prompt,) = prompts([29])
    logits: dict[str, torch.Tensor] = {}
    for dtype in ("float32", "bfloat16"):
        executor = make_executor(load_model(saved, dtype=dtype))
        executor.forward(ragged_batch([(2, 0, prompt[:20])], page_rows(7)))
        logits[dtype] = executor.forward(ragged_batch([(2, 20, prompt[20:])], page_rows(7)))[0]
    error = (logits["bfloat16"] - logits["float32"]).std() / logits["float32"].std()
    assert 0.0 < error < 0.1


def test_layers_own_either_pages_or_state(pair: Pair) -> None:
    config = pair.model.config
    mixers = {piece.layer for piece in config.recurrent_pieces}
    assert config.num_kv_layers + len(mixers) == config.num_layers
    assert mixers == {layer for layer, kind in enumerate(pair.reference.config.layer_types) if "linear" in kind}


def test_old_and_new_names_of_layer_types_are_the_same(saved: Path) -> None:
    raw = read_config_json(saved)
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    old = [names.get(kind, kind) for kind in raw["layer_types"]]
    new = [{"mamba": "linear_attention", "attention": "full_attention"}[kind] for kind in old]
    configs = [config_from_hf(raw | {"layer_types": kinds}) for kinds in (old, new)]
    without = {name: value for name, value in raw.items() if name != "layer_types"}
    configs.append(config_from_hf(without | {"layers_block_type": old}))
    assert configs[0] == configs[1] == configs[2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantization_config \(method 'fp8'\) is not supported"),
        ({"normalization_function": "layernorm"}, "normalization_function is 'layernorm'; supported: 'rmsnorm'"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'; supported: 'rope', 'nope' or none"),
        ({"layer_types": ["mamba", "moe", "mamba", "mamba"]}, "layer_types names 'moe'; supported: mamba, "),
        ({"layer_types": ["mamba"]}, "layer_types has 1 entries and num_hidden_layers is 4"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9; an integer from 1 to 6"),
        ({"mamba_d_head": 16}, "mamba_n_heads 8 times mamba_d_head 16 is not mamba_expand times hidden_size, 64"),
        ({"mamba_n_groups": 3}, "8 heads of the mixer are no multiple of its 3 groups"),
        ({"attention_multiplier": 0.0}, "attention_multiplier is 0.0; a number above 0"),
        ({"logits_scaling": None}, "logits_scaling is missing"),
        (
            {"position_embedding_type": "rope", "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}},
            "dynamic",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(saved: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        config_from_hf(read_config_json(saved) | changes)


def test_damaged_fields_are_refused(saved: Path) -> None:
    check_damaged_fields(read_config_json(saved))


def test_files_hold_the_names_of_published_checkpoints(saved: Path) -> None:
    from safetensors import safe_open

    with safe_open(saved / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert {"model.layers.0.block_sparse_moe.input_linear.weight", "model.layers.0.mamba.A_log"} <= names
    assert json.loads((saved / "config.json").read_text())["architectures"] == ["GraniteMoeHybridForCausalLM"]


@pytest.mark.parametrize("name", ["dense", "experts", "mixers-only", "attention-only"])
def test_served_with_reuse(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hybrid, pure recurrent and attention-only: batches, a repeated prompt and a second turn give exact tokens."""
    monkeypatch.setenv("EDGELLM_PLUGINS", "hybrid")
    values = BASE | VARIANTS[name]
    reference = served_folder(GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, values, tmp_path)
    check_served(tmp_path, reference)


def test_served_under_pressure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages and checkpoints of a hybrid are evicted and resumed; the tokens stay exact."""
    monkeypatch.setenv("EDGELLM_PLUGINS", "hybrid")
    values = BASE | VARIANTS["experts"]
    reference = served_folder(GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, values, tmp_path)
    check_pressed(tmp_path, reference)
