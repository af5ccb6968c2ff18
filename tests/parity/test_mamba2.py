"""Tiny random Mamba-2 models against transformers: logits and greedy tokens, float32, any chunking; and served."""

from __future__ import annotations

from collections.abc import Callable
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
from transformers import Mamba2Config, Mamba2ForCausalLM

from edgellm import LLM
from edgellm.errors import PluginError, UnsupportedModelError, WeightFileError
from edgellm.models.config import config_from_hf, read_config_json
from edgellm.models.loader import load_model
from edgellm.models.step import HiddenRequest

BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_heads": 8,
    "head_dim": 8,
    "state_size": 16,
    "n_groups": 2,
    "num_hidden_layers": 3,
    "chunk_size": 8,
    # Wide weights make logits that differ, so that greedy tokens are not one repeated token.
    "initializer_range": 0.3,
    "eos_token_id": 0,
}

# name: (changes of the config, keyword arguments of save_pretrained)
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "one-group-tied": ({"n_groups": 1, "tie_word_embeddings": True}, {}),
    "biases": ({"use_bias": True, "n_groups": 4}, {}),
    "no-conv-bias": ({"use_conv_bias": False, "conv_kernel": 3}, {}),
    "step-limits": ({"time_step_limit": [0.2, 0.6]}, {}),
    "residual-of-the-models-dtype": ({"residual_in_fp32": False, "expand": 3, "num_heads": 12}, {}),
    "sharded": ({"conv_kernel": 2}, {"max_shard_size": "20KB"}),
}


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    changes, save = VARIANTS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    reference = save_random(Mamba2Config, Mamba2ForCausalLM, BASE | changes, folder, **save)
    if save:
        assert len(list(folder.glob("*.safetensors"))) > 2
    return Pair(reference, load_model(folder))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_random(Mamba2Config, Mamba2ForCausalLM, BASE, tmp_path)
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
    executor.request_hidden(HiddenRequest(layers=(1, 3), normed=True))
    found = executor.forward_verify(batch)
    torch.testing.assert_close(found.logits, expected.logits[0], atol=TOLERANCE, rtol=TOLERANCE)
    # transformers lists what leaves each layer, then the normed rows.
    wanted = torch.cat([expected.hidden_states[place][0] for place in (0, 2, 3)], dim=1)
    assert found.hidden is not None
    torch.testing.assert_close(found.hidden, wanted, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_refused_proposal_leaves_nothing_behind(saved: Path) -> None:
    """Verify five tokens, keep two, go on: the same bits as without the three."""
    model = load_model(saved)
    (prompt,) = prompts([20])
    rows = page_rows(3)
    straight, rewound = make_executor(model), make_executor(model)
    for executor in (straight, rewound):
        executor.forward(ragged_batch([(1, 0, prompt[:10])], rows))
    straight.forward(ragged_batch([(1, 10, prompt[10:12])], rows))
    batch = ragged_batch([(1, 10, [*prompt[10:12], 7, 8, 9])], rows)
    batch.logits_index = np.arange(5, dtype=np.int64)
    batch.logits_to_seq = np.zeros(5, np.int32)
    rewound.forward_verify(batch)
    rewound.rewind([1], [2])
    last = [executor.forward(ragged_batch([(1, 12, prompt[12:])], rows)) for executor in (straight, rewound)]
    assert torch.equal(*last)


@pytest.mark.parametrize("float_residual", [True, False])
def test_bfloat16_stays_close_to_float32(tmp_path: Path, float_residual: bool) -> None:
    save_random(Mamba2Config, Mamba2ForCausalLM, BASE | {"residual_in_fp32": float_residual}, tmp_path)
    (prompt,) = prompts([29])
    logits: dict[str, torch.Tensor] = {}
    for dtype in ("float32", "bfloat16"):
        executor = make_executor(load_model(tmp_path, dtype=dtype))
        executor.forward(ragged_batch([(2, 0, prompt[:20])], page_rows(7)))
        logits[dtype] = executor.forward(ragged_batch([(2, 20, prompt[20:])], page_rows(7)))[0]
    error = (logits["bfloat16"] - logits["float32"]).std() / logits["float32"].std()
    assert 0.0 < error < 0.08


def test_the_config_names_the_state_of_every_layer(saved: Path) -> None:
    config = load_model(saved).config
    assert (config.num_kv_layers, config.num_layers, config.max_positions) == (0, 3, 1 << 17)
    pieces = {(piece.layer, piece.name): piece.shape for piece in config.recurrent_pieces}
    # 64 inner channels, and B and C of 2 groups of 16.
    shapes = {"conv": (128, 3), "state": (8, 8, 16)}
    assert pieces == {(layer, name): shape for layer in range(3) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(method 'gptq'\) is not supported"),
        ({"rms_norm": False}, "rms_norm is false"),
        ({"time_step_limit": [0.5, 0.1]}, r"time_step_limit is \[0.5, 0.1\]; a list of the least and the greatest"),
        ({"time_step_limit": "wide"}, "time_step_limit is 'wide'"),
        ({"n_groups": 3}, "8 heads of the mixer are no multiple of its 3 groups"),
        ({"head_dim": 16}, "num_heads 8 times head_dim 16 is not expand 2 times hidden_size 32"),
        ({"conv_kernel": 1}, "conv_kernel is 1; an integer from 2 to 8"),
        ({"conv_kernel": 9}, "conv_kernel is 9; an integer from 2 to 8"),
        ({"state_size": None}, "state_size is missing"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(saved: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        config_from_hf(read_config_json(saved) | changes)


def test_damaged_fields_are_refused(saved: Path) -> None:
    check_damaged_fields(read_config_json(saved))


@pytest.mark.parametrize("limit", [None, [0.0, float("inf")], [0, {"__float__": "Infinity"}]])
def test_every_spelling_of_no_limit_is_none(saved: Path, limit: Any) -> None:
    raw = read_config_json(saved)
    assert config_from_hf(raw | {"time_step_limit": limit}) == config_from_hf(raw)


def test_a_config_that_leaves_tensors_unread_is_refused(tmp_path: Path) -> None:
    save_random(Mamba2Config, Mamba2ForCausalLM, BASE | {"use_bias": True}, tmp_path)
    raw = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(raw.replace('"use_bias": true', '"use_bias": false'))
    with pytest.raises(WeightFileError, match=r"stores 'backbone.layers.0.mixer.in_proj.bias'"):
        load_model(tmp_path)


@pytest.mark.parametrize("check", [check_served, check_pressed])
def test_served_with_reuse_from_checkpoints(
    check: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model without any KV page: batches, repeated prompts, chat turns and evicted checkpoints give exact tokens."""
    monkeypatch.setenv("EDGELLM_PLUGINS", "hybrid")
    check(tmp_path, served_folder(Mamba2Config, Mamba2ForCausalLM, BASE, tmp_path))


def test_serving_needs_the_package_that_knows_checkpoints(tmp_path: Path) -> None:
    served_folder(Mamba2Config, Mamba2ForCausalLM, BASE, tmp_path)
    with pytest.raises(PluginError, match=r"pure_recurrent models.*package edgellm-hybrid"):
        LLM(tmp_path, device="cpu", max_model_len=128)
