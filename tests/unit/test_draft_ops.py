"""The two forms of the operators that draft models are written against: the CPU's kernels, and those of a device."""

from __future__ import annotations

import pytest
import torch

from edgellm.decoding.draft_ops import CpuDraftOps, DeviceDraftOps, DraftOps, device_executor
from edgellm.models.config import RopeConfig
from edgellm.models.device_ops import reference_ops
from edgellm.models.moe import MlpWeights, MoeConfig, MoeWeights

ROWS, WIDTH, INNER = 7, 24, 40


@pytest.fixture(scope="module")
def forms() -> tuple[DraftOps, DraftOps]:
    return CpuDraftOps(), DeviceDraftOps(reference_ops(), torch.device("cpu"))


def new(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.3


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_rows_of_a_table_and_norms(forms: tuple[DraftOps, DraftOps]) -> None:
    ids, table = torch.tensor([3, 0, 9, 3], dtype=torch.int32), new(10, WIDTH)
    host, device = (ops.embed(ids, table) for ops in forms)
    assert torch.equal(host, table[ids.long()])
    assert torch.equal(host, device)
    close(*(ops.rms_norm(host, torch.rand(WIDTH) * 0 + 1.5, 1e-5) for ops in forms))


@pytest.mark.parametrize("rows", [1, ROWS, 70])
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_products_leave_the_residual_alone(
    forms: tuple[DraftOps, DraftOps], rows: int, dtype: torch.dtype | None
) -> None:
    x, weight, bias, residual = (
        new(rows, WIDTH),
        new(INNER, WIDTH, seed=2),
        new(INNER, seed=3),
        new(rows, INNER, seed=4),
    )
    before = residual.clone()
    results = [ops.linear(x, weight, bias, residual=residual, dtype=dtype) for ops in forms]
    close(*results)
    close(results[0], x @ weight.T + bias + residual)
    assert torch.equal(residual, before)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gated_products(forms: tuple[DraftOps, DraftOps], activation: str) -> None:
    x, gate_up = new(ROWS, WIDTH), new(2 * INNER, WIDTH, seed=2)
    gate, up = (x @ gate_up.T).chunk(2, dim=1)
    wanted = (
        torch.nn.functional.silu(gate) if activation == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
    )
    host, device = (ops.gated(x, gate_up, activation) for ops in forms)
    close(host, wanted * up)
    close(host, device)


def test_gates_are_applied_in_place(forms: tuple[DraftOps, DraftOps]) -> None:
    for ops in forms:
        rows, gate = new(ROWS, WIDTH), new(ROWS, WIDTH, seed=2)
        wanted = rows * gate.sigmoid()
        ops.gate_(rows, gate)
        close(rows, wanted)


@pytest.mark.parametrize("rope", [RopeConfig(theta=10000.0), RopeConfig(theta=500.0, kind="linear", factor=4.0)])
def test_angles_of_heads_that_turn_in_part(forms: tuple[DraftOps, DraftOps], rope: RopeConfig) -> None:
    positions = torch.tensor([0, 5, 4000], dtype=torch.int32)
    host, device = (ops.rotary(rope, 12)(positions) for ops in forms)
    assert host.shape == (2, 3, 6)
    close(host, device)


@pytest.mark.parametrize("rows", [1, ROWS, 40])
@pytest.mark.parametrize("normalise", [True, False])
def test_experts(forms: tuple[DraftOps, DraftOps], rows: int, normalise: bool) -> None:
    config = MoeConfig(num_experts=6, experts_per_token=2, expert_size=16, shared_size=INNER, normalise=normalise)
    weights = MoeWeights(
        router=new(7, WIDTH, seed=5),
        gate_up=new(6, 32, WIDTH, seed=6),
        down=new(6, WIDTH, 16, seed=7),
        shared=MlpWeights(gate_up=new(2 * INNER, WIDTH, seed=8), down=new(WIDTH, INNER, seed=9)),
    )
    normed, stream = new(rows, WIDTH), new(rows, WIDTH, seed=2)
    before = stream.clone()
    host, device = (ops.experts(config, weights)(normed, stream) for ops in forms)
    close(host, device)
    assert torch.equal(stream, before)
    assert not torch.allclose(host, stream)


def test_an_executor_without_a_table_computes_on_the_cpu() -> None:
    assert device_executor(object()) is None
