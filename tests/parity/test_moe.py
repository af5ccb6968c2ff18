"""Experts on CPU rows against a plain loop over tokens in float64, and the independence of rows."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from edgellm.kernels.cpu.linear import SKINNY_ROWS
from edgellm.models.moe import MlpWeights, MoeBlock, MoeConfig, MoeWeights, choose_experts

HIDDEN, INNER, SHARED, NUM_EXPERTS, COUNT = 24, 20, 12, 7, 3


def make_weights(dtype: torch.dtype) -> MoeWeights:
    torch.manual_seed(4)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape) * 0.4).to(dtype)

    return MoeWeights(
        router=random(NUM_EXPERTS + 1, HIDDEN),
        gate_up=random(NUM_EXPERTS, 2 * INNER, HIDDEN),
        down=random(NUM_EXPERTS, HIDDEN, INNER),
        shared=MlpWeights(gate_up=random(2 * SHARED, HIDDEN), down=random(HIDDEN, SHARED)),
    )


def make_block(weights: MoeWeights, *, normalise: bool = True) -> MoeBlock:
    config = MoeConfig(
        num_experts=NUM_EXPERTS,
        experts_per_token=COUNT,
        expert_size=INNER,
        shared_size=SHARED,
        normalise=normalise,
    )
    return MoeBlock(config, weights)


def mlp(row: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = (gate_up.double() @ row).chunk(2)
    return down.double() @ (functional.silu(gate) * up)


def expected(row: torch.Tensor, weights: MoeWeights, *, normalise: bool) -> torch.Tensor:
    row = row.double()
    scores = weights.router.double() @ row
    chosen = scores[:-1].softmax(0)
    best = chosen.argsort(descending=True)[:COUNT].tolist()
    share = sum(chosen[expert] for expert in best) if normalise else 1.0
    total = torch.sigmoid(scores[-1]) * mlp(row, weights.shared.gate_up, weights.shared.down)
    for expert in best:
        total += chosen[expert] / share * mlp(row, weights.gate_up[expert], weights.down[expert])
    return total


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("num_rows", [1, 5, 70])
def test_block_equals_a_loop_over_tokens(num_rows: int, normalise: bool) -> None:
    weights = make_weights(torch.float32)
    rows, hidden = torch.randn(num_rows, HIDDEN), torch.randn(num_rows, HIDDEN)
    result = hidden.clone()
    make_block(weights, normalise=normalise).add(rows, result)
    for row, before, after in zip(rows, hidden, result, strict=True):
        wanted = (before.double() + expected(row, weights, normalise=normalise)).float()
        torch.testing.assert_close(after, wanted, atol=2e-5, rtol=2e-5)


def test_bfloat16_block_stays_close() -> None:
    weights = make_weights(torch.bfloat16)
    rows = torch.randn(9, HIDDEN).bfloat16()
    result = torch.zeros(9, HIDDEN, dtype=torch.bfloat16)
    make_block(weights).add(rows, result)
    wanted = torch.stack([expected(row, weights, normalise=True) for row in rows]).float()
    assert (result.float() - wanted).std() / wanted.std() < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    block = make_block(make_weights(dtype))
    rows = torch.randn(SKINNY_ROWS, HIDDEN).to(dtype)
    together = torch.zeros_like(rows)
    block.add(rows, together)
    for start, stop in ((0, 1), (1, 3), (SKINNY_ROWS - 1, SKINNY_ROWS), (2, SKINNY_ROWS)):
        alone = torch.zeros_like(rows[start:stop])
        block.add(rows[start:stop].clone(), alone)
        assert torch.equal(alone, together[start:stop])


def test_every_expert_can_be_chosen_at_once() -> None:
    weights, experts = choose_experts(torch.tensor([[0.0, 2.0, 1.0]]), 3, normalise=False)
    assert experts.tolist() == [[1, 2, 0]]
    assert weights.sum().item() == pytest.approx(1.0)
