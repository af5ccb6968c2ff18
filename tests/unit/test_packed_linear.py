"""Linear layers on packed weights in the device graph, by the references: few rows, many rows by pieces, gates."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from edgellm.kernels.cu.quantised_linear import MAX_ROWS
from edgellm.kernels.packed_weight import PackedKind, PackedWeight, empty_packed, store_fp8, store_int4
from edgellm.kernels.ref.quantised_linear import expand_weight
from edgellm.models.config import ModelConfig, RopeConfig
from edgellm.models.device_ops import reference_ops
from edgellm.models.packed_linear import cuda_packed_ops
from edgellm.models.quantisation import Quantisation, StoredFormat
from edgellm.models.registry import Architecture
from edgellm.testing.random_model import random_model

ROWS = (3, MAX_ROWS, MAX_ROWS + 1)


def packed(kind: PackedKind, rows: int, columns: int, *, workspace: int) -> PackedWeight:
    generator = torch.Generator().manual_seed(rows)
    weight = empty_packed(
        kind, rows, columns, group_columns=64, workspace=torch.full((workspace,), float("nan"), dtype=torch.bfloat16)
    )
    scales = torch.rand(rows, columns // 64, generator=generator) / 8
    if kind is PackedKind.INT4:
        store_int4(weight, torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=generator), scales)
    else:
        store_fp8(weight, torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn), scales)
    return weight


def dense(weight: PackedWeight) -> torch.Tensor:
    matrix = torch.empty(weight.shape, dtype=weight.dtype)
    expand_weight(weight, matrix)
    return matrix


@pytest.mark.parametrize("kind", list(PackedKind))
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("workspace", [16 * 128, 40 * 128, 96 * 128])
def test_a_packed_weight_multiplies_as_its_matrix(kind: PackedKind, rows: int, workspace: int) -> None:
    ops, weight = reference_ops(), packed(kind, 96, 128, workspace=workspace)
    torch.manual_seed(rows)
    x, bias, residual = (torch.randn(*shape).bfloat16() for shape in ((rows, 128), (96,), (rows, 96)))
    for options in ({}, {"bias": bias}, {"bias": bias, "residual": residual}):
        ours, theirs = (torch.full((rows, 96), float("nan")).bfloat16() for _ in range(2))
        ops.linear(x, weight, ours, **options)
        ops.linear(x, dense(weight), theirs, **options)
        torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("rows", ROWS)
def test_residual_in_place(rows: int) -> None:
    ops, weight = reference_ops(), packed(PackedKind.INT4, 96, 128, workspace=48 * 128)
    x, stream = torch.randn(rows, 128).bfloat16(), torch.randn(rows, 96).bfloat16()
    expected = torch.empty_like(stream)
    ops.linear(x, weight, expected, residual=stream)
    ops.linear(x, weight, stream, residual=stream)
    assert torch.equal(stream, expected)


@pytest.mark.parametrize("rows", ROWS)
def test_gates(rows: int) -> None:
    ops, weight = reference_ops(), packed(PackedKind.FP8, 96, 128, workspace=32 * 128)
    x, gate_up = torch.randn(rows, 128).bfloat16() / 4, torch.empty(rows, 96).bfloat16()
    ours, theirs = torch.empty(rows, 48).bfloat16(), torch.empty(rows, 48).bfloat16()
    ops.gated(x, weight, ours, None, gate_up)
    ops.gated(x, dense(weight), theirs, None, gate_up)
    torch.testing.assert_close(ours, theirs, rtol=2**-5, atol=2**-6)


@pytest.mark.parametrize(
    ("deterministic", "rows", "columns", "by_kernel"),
    [
        (False, MAX_ROWS, 4096, True),
        (False, MAX_ROWS + 1, 3584, False),
        (True, MAX_ROWS + 1, 4096, False),
        (True, MAX_ROWS + 1, 3584, True),
        (True, 2048, 3584, True),
    ],
)
def test_who_multiplies(deterministic: bool, rows: int, columns: int, by_kernel: bool) -> None:
    """Deterministic sums have one order: where the kernel's is its own, no other product may stand in for it."""
    weight: Any = empty_packed(
        PackedKind.INT4, 16, columns, group_columns=columns, workspace=torch.empty(1, device="meta")
    )
    assert cuda_packed_ops(deterministic=deterministic).by_kernel(rows, weight) == by_kernel


@pytest.mark.parametrize("stored", [StoredFormat.AWQ, StoredFormat.FP8])
def test_random_models_may_be_packed(stored: StoredFormat) -> None:
    rope = RopeConfig(theta=1e4)
    config = ModelConfig(
        architecture=Architecture.LLAMA,
        vocab_size=32,
        hidden_size=256,
        intermediate_size=512,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        max_positions=64,
        rms_norm_eps=1e-5,
        rope=rope,
        tied_embeddings=True,
        quantisation=Quantisation(stored, 64),
    )
    weights = random_model(config, dtype=torch.bfloat16, spread=0.02, packed=True).weights
    for matrix in (weights.layers[0].qkv, weights.layers[0].down):
        assert 0.01 < float(dense(matrix).float().std()) < 0.04
    assert float(weights.embedding.float().std()) == pytest.approx(0.02, rel=0.1)


def test_pieces_are_whole_panels() -> None:
    for workspace, rows in ((16 * 128, 16), (40 * 128, 32), (200 * 128, 96)):
        assert packed(PackedKind.INT4, 96, 128, workspace=workspace).piece_rows() == rows
