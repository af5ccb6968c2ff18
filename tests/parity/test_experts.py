"""Routed experts of few rows against the reference, and the refusal of what would be misread."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cpu import experts
from edgellm.kernels.cpu.linear import SKINNY_ROWS
from edgellm.kernels.ref import experts as ref

HIDDEN, INNER, NUM_EXPERTS = 37, 22, 9


def arguments(num_rows: int, count: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    torch.manual_seed(num_rows + count)
    return {
        "rows": torch.randn(num_rows, HIDDEN).to(dtype),
        "shares": torch.rand(num_rows, count),
        "chosen": torch.stack([torch.randperm(NUM_EXPERTS)[:count] for _ in range(num_rows)]),
        "gate_up": (torch.randn(NUM_EXPERTS, 2 * INNER, HIDDEN) * 0.4).to(dtype),
        "down": (torch.randn(NUM_EXPERTS, HIDDEN, INNER) * 0.4).to(dtype),
        "total": torch.randn(num_rows, HIDDEN),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 4, NUM_EXPERTS])
@pytest.mark.parametrize("num_rows", [1, 3, SKINNY_ROWS])
def test_few_experts_equal_the_reference(num_rows: int, count: int, dtype: torch.dtype) -> None:
    given = arguments(num_rows, count, dtype)
    expected = given["total"].double()
    ref.few_experts(**given | {"total": expected})
    experts.few_experts(**given)
    error = given["total"].double() - expected
    assert error.std() / expected.std() < (1e-6 if dtype == torch.float32 else 0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    given = arguments(SKINNY_ROWS, 3, dtype)
    before = given["total"].clone()
    experts.few_experts(**given)
    for row in range(SKINNY_ROWS):
        one = slice(row, row + 1)
        alone = before[one].clone()
        part = {name: given[name][one].clone() for name in ("rows", "shares", "chosen")}
        experts.few_experts(**given | part | {"total": alone})
        assert torch.equal(alone, given["total"][one])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chosen": torch.tensor([[0, 9], [1, 2]])}, r"int64 in \[0, 9\) is needed"),
        ({"chosen": torch.tensor([[0, -1], [1, 2]])}, r"int64 in \[0, 9\) is needed"),
        ({"chosen": torch.zeros(2, 3, dtype=torch.int64)}, "do not fit the rows"),
        ({"down": torch.zeros(8, HIDDEN, INNER)}, "do not fit together"),
        ({"down": torch.zeros(NUM_EXPERTS, HIDDEN, 2 * INNER)[:, :, ::2]}, "C-contiguous weights are needed"),
        ({"total": torch.zeros(2, HIDDEN).bfloat16()}, "do not fit together"),
        ({"total": torch.zeros(3, HIDDEN)}, "2 rows, 3 in total"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    given = arguments(2, 2) | change
    before = given["total"].clone()
    with pytest.raises(InvalidArgumentError, match=message):
        experts.few_experts(**given)
    assert torch.equal(given["total"], before)


def test_more_rows_than_the_kernel_takes_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=f"up to {SKINNY_ROWS} rows"):
        experts.few_experts(**arguments(SKINNY_ROWS + 1, 2))


def test_reference_has_the_same_signature() -> None:
    assert inspect.signature(experts.few_experts) == inspect.signature(ref.few_experts)
