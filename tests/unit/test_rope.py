"""Rotary frequencies of each kind: exact values by hand, and equality with transformers' functions."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from edgellm.errors import UnsupportedModelError
from edgellm.models.config import RopeConfig, make_rope
from edgellm.models.fields import Fields
from edgellm.models.rope import RotaryAngles, inverse_frequencies

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SCALED: list[tuple[str, dict[str, Any]]] = [
    ("linear", {"factor": 4.0}),
    ("llama3", LLAMA3),
    ("llama3", LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 512}),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 32768}),
    ("yarn", {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.707, "mscale_all_dim": 0.5}),
    (
        "yarn",
        {
            "factor": 2.0,
            "original_max_position_embeddings": 64,
            "truncate": False,
            "beta_fast": 8,
            "beta_slow": 2,
            "attention_factor": 1.25,
        },
    ),
    ("yarn", {"factor": 0.5, "original_max_position_embeddings": 2048}),
]


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize(("kind", "values"), SCALED)
def test_scaled_frequencies_equal_transformers(kind: str, values: dict[str, Any], head_dim: int) -> None:
    values = {"rope_theta": 500000.0, **values}
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": kind, **values},
    )
    expected, expected_scale = ROPE_INIT_FUNCTIONS[kind](config)
    actual, scale = inverse_frequencies(make_rope(kind, Fields("config.json", values), max_positions=131072), head_dim)
    torch.testing.assert_close(actual, expected, atol=0.0, rtol=1e-6)
    assert scale == pytest.approx(expected_scale, rel=1e-12)


def test_default_frequencies() -> None:
    actual, scale = inverse_frequencies(RopeConfig(theta=10000.0), 8)
    torch.testing.assert_close(actual, torch.tensor([1.0, 0.1, 0.01, 0.001]), rtol=1e-6, atol=0)
    assert scale == 1.0


def test_stored_factors_divide_the_frequencies() -> None:
    actual, _ = inverse_frequencies(RopeConfig(theta=10000.0, freq_factors=(1.0, 2.0, 4.0, 8.0)), 8)
    torch.testing.assert_close(actual, torch.tensor([1.0, 0.05, 0.0025, 0.000125]), rtol=1e-6, atol=0)


def test_angles_are_cosine_and_sine_times_the_scale() -> None:
    angles = RotaryAngles(
        RopeConfig(theta=100.0, kind="yarn", factor=4.0, original_max_positions=64, attention_factor=2.0), 4
    )
    table = angles(torch.tensor([0, 3], dtype=torch.int32))
    assert table.shape == (2, 2, 2)
    assert table[:, 0].tolist() == [[2.0, 2.0], [0.0, 0.0]]
    assert table[0, 1, 0].item() == pytest.approx(2.0 * math.cos(3.0), rel=1e-6)
    assert table[1, 1, 0].item() == pytest.approx(2.0 * math.sin(3.0), rel=1e-6)


def test_zero_counts_as_not_set() -> None:
    zeros = {"beta_fast": 0, "beta_slow": 0.0, "mscale": 0.0, "mscale_all_dim": 0}
    plain = {"rope_theta": 1e4, "factor": 4.0}
    make = [make_rope("yarn", Fields("config.json", plain | more), max_positions=64) for more in ({}, zeros)]
    assert make[0] == make[1]


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("dynamic", {"rope_theta": 1e4, "factor": 2.0}, "rope type 'dynamic' is not supported; supported: default"),
        ("linear", {"rope_theta": 1e4}, "rope type 'linear' needs 'factor'"),
        ("llama3", {"rope_theta": 1e4, "factor": 8.0}, "needs 'low_freq_factor'"),
        ("llama3", LLAMA3 | {"rope_theta": 1e4, "high_freq_factor": 1.0}, "the high one must be larger"),
        ("yarn", {"rope_theta": 1e4, "factor": "4"}, "factor is '4'; a number above 0 and up to"),
        ("default", {"rope_theta": 0.0}, "rope_theta is 0.0; a number above 1 and up to 1e+30 is needed"),
        ("default", {"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; supported: 1.0"),
    ],
)
def test_refused(kind: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=re.escape(message)):
        make_rope(kind, Fields("config.json", values), max_positions=4096)
