"""Choice of experts on CUDA: the reference against the CPU path, then the device against the reference."""

from __future__ import annotations

import pytest
import torch
from row_ops import assert_close, assert_same_bits, captured, record_launches, strided_rows

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu.choose_experts import choose_experts, launch_config
from edgellm.kernels.ref import choose_experts as ref
from edgellm.models import moe

SHAPES = [(1, 1), (6, 3), (8, 8), (33, 5), (128, 8), (512, 10), (600, 40)]


def run(function, scores: torch.Tensor, count: int, **options) -> tuple[torch.Tensor, torch.Tensor]:
    shares = torch.full((len(scores), count), float("nan"), device=scores.device)
    chosen = torch.full((len(scores), count), -7, dtype=torch.int32, device=scores.device)
    function(scores, shares, chosen, **options)
    return shares, chosen


@pytest.mark.parametrize("normalise", [False, True])
def test_reference_is_the_cpu_path(normalise: bool) -> None:
    torch.manual_seed(1)
    scores, factors = torch.randn(9, 12) * 3, torch.rand(12)
    shares, chosen = run(ref.choose_experts, scores, 4, normalise=normalise, factors=factors)
    weights, experts = moe.choose_experts(scores, 4, normalise=normalise)
    assert torch.equal(chosen.long(), experts)
    torch.testing.assert_close(shares, weights * factors[experts])


def test_launch_and_struct(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    scores = torch.randn(5, 9)[:, :8]
    run(choose_experts, scores, 2, normalise=True)
    run(choose_experts, scores[:0], 2, normalise=True)
    assert len(launches) == 1
    params = launches[0].params
    assert (params["scores_stride"], params["num_experts"], params["count"], params["normalise"]) == (9, 8, 2, 1)
    assert launches[0].config == launch_config(5)
    assert launch_config(5).grid == (2, 1, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": torch.zeros(3, 6).half()}, "scores is"),
        ({"shares": torch.zeros(2, 2)}, "shares is"),
        ({"chosen": torch.zeros(3, 2, dtype=torch.int64)}, "chosen is"),
        ({"shares": torch.zeros(3, 7)}, "7 of 6 experts"),
        ({"factors": torch.zeros(5)}, "factors is"),
    ],
)
def test_bad_arguments(monkeypatch: pytest.MonkeyPatch, changes: dict[str, torch.Tensor], message: str) -> None:
    launches = record_launches(monkeypatch)
    operands = {
        "scores": torch.zeros(3, 6),
        "shares": torch.zeros(3, 2),
        "chosen": torch.zeros(3, 2, dtype=torch.int32),
    }
    with pytest.raises(InvalidArgumentError, match=message):
        choose_experts(**(operands | changes), normalise=True)
    assert not launches


@pytest.mark.gpu
@pytest.mark.parametrize(("num_experts", "count"), SHAPES)
@pytest.mark.parametrize("normalise", [False, True])
def test_device_equals_reference(num_experts: int, count: int, normalise: bool) -> None:
    torch.manual_seed(2)
    for rows in (1, 4, 131):
        scores = strided_rows(rows, num_experts, num_experts + 1, torch.float32, "cuda") * 4
        factors = torch.rand(num_experts, device="cuda")
        for extra in ({}, {"factors": factors}):
            shares, chosen = run(choose_experts, scores, count, normalise=normalise, **extra)
            moved = {name: tensor.cpu() for name, tensor in extra.items()}
            expected, order = run(ref.choose_experts, scores.cpu(), count, normalise=normalise, **moved)
            assert torch.equal(chosen.cpu(), order)
            assert_close(shares, expected)


@pytest.mark.gpu
def test_equal_scores_infinities_and_nan() -> None:
    inf, nan = float("inf"), float("nan")
    rows = [[1.0, 2.0, 2.0, 2.0], [-inf, -inf, 0.0, -inf], [nan, 1.0, nan, 3.0], [nan] * 4, [inf, 1.0, 1.0, 1.0]]
    scores = torch.tensor(rows, device="cuda")
    _, chosen = run(choose_experts, scores, 3, normalise=True)
    assert chosen[:2].tolist() == [[1, 2, 3], [2, 0, 1]]
    assert chosen[2:].tolist() == [[3, 1, -1], [-1, -1, -1], [0, 1, 2]]


@pytest.mark.gpu
def test_graph_equals_eager() -> None:
    scores = torch.randn(7, 64, device="cuda")
    shares, chosen = torch.empty(7, 6, device="cuda"), torch.empty(7, 6, dtype=torch.int32, device="cuda")
    graph = captured(lambda: choose_experts(scores, shares, chosen, normalise=True))
    scores.neg_()
    graph.replay()
    expected, order = run(choose_experts, scores, 6, normalise=True)
    assert_same_bits(shares, expected)
    assert_same_bits(chosen, order)


@pytest.mark.gpu
def test_sanitizer_choose_experts() -> None:
    run(choose_experts, torch.randn(5, 70, device="cuda"), 9, normalise=False)
    torch.cuda.synchronize()
