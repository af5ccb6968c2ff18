"""The gates of rows against their references, and the independence of rows."""

from __future__ import annotations

import inspect

import pytest
import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cpu import gates
from edgellm.kernels.ref import gates as ref

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def strided(num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows that lie apart."""
    return (torch.randn(num_rows, width + 3) * 4).to(dtype)[:, 1 : 1 + width]


def delta_gates(*operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """decay and beta of a, b, rate and bias."""
    decay, beta = torch.empty((2, *operands[0].shape)).unbind(0)
    gates.delta_gates(*operands, decay, beta)
    return decay, beta


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("gate_width", [1, 45])
@pytest.mark.parametrize("num_rows", [1, 9, 900])
def test_gate_equals_the_reference(num_rows: int, gate_width: int, silu: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, gate = strided(num_rows, 45, dtype), strided(num_rows, gate_width, dtype)
    gate[0, 0] = -200.0  # exp overflows
    expected = x.clone()
    ref.gate_(expected, gate, silu=silu)
    gates.gate_(x, gate, silu=silu)
    close(x, expected, dtype)


def test_two_threads_give_the_same() -> None:
    torch.manual_seed(5)
    x, gate, a = torch.randn(3000, 40), torch.randn(3000, 40), torch.randn(3000, 16)
    rate, bias = -torch.rand(16), torch.randn(16)
    results = []
    before = torch.get_num_threads()
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        gated = x.clone()
        gates.gate_(gated, gate, silu=True)
        results.append(torch.cat((gated, *delta_gates(a, a, rate, bias)), dim=1))
    torch.set_num_threads(before)
    assert torch.equal(*results)


def test_a_large_negative_gate_gives_zero() -> None:
    x = torch.ones(1, 17)
    gates.gate_(x, torch.full((1, 17), -500.0), silu=True)
    assert x.abs().max().item() < 1e-30


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "heads"), [(1, 6), (7, 32), (300, 48)])
def test_delta_gates_equal_the_reference(num_rows: int, heads: int, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    a, b = strided(num_rows, heads, dtype), strided(num_rows, heads, dtype)
    a[0, :4] = torch.tensor([90.0, -90.0, 20.5, 0.0])
    rate, bias = -torch.rand(heads) * 16, torch.randn(heads)
    expected = torch.empty(num_rows, heads), torch.empty(num_rows, heads)
    ref.delta_gates(a, b, rate, bias, *expected)
    for ours, theirs in zip(delta_gates(a, b, rate, bias), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=2e-6)
    assert ours.dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x, gate, bias = torch.randn(11, 27).to(dtype), torch.randn(11, 27).to(dtype), torch.randn(27)
    together = x.clone()
    gates.gate_(together, gate)
    decay, beta = delta_gates(x, gate, -bias.abs(), bias)
    for row in range(11):
        one = slice(row, row + 1)
        alone = x[one].clone()
        gates.gate_(alone, gate[one])
        assert torch.equal(alone, together[one])
        one_decay, one_beta = delta_gates(x[one], gate[one], -bias.abs(), bias)
        assert torch.equal(one_decay, decay[one])
        assert torch.equal(one_beta, beta[one])


def test_wrong_arguments_are_refused() -> None:
    x = torch.ones(2, 8)
    with pytest.raises(InvalidArgumentError, match=r"gate is torch.bfloat16 and x torch.float32"):
        gates.gate_(x, torch.ones(2, 8).bfloat16())
    with pytest.raises(InvalidArgumentError, match=r"gate is \(2, 4\)"):
        gates.gate_(x, torch.ones(2, 4))
    with pytest.raises(InvalidArgumentError, match=r"b is \(1, 8\)"):
        gates.delta_gates(x, torch.ones(1, 8), torch.ones(8), torch.ones(8), torch.empty(2, 8), torch.empty(2, 8))
    with pytest.raises(InvalidArgumentError, match=r"beta is \(2, 4\)"):
        gates.delta_gates(x, x, torch.ones(8), torch.ones(8), torch.empty(2, 8), torch.empty(2, 4))
    with pytest.raises(InvalidArgumentError, match="bias is"):
        delta_gates(x, x, torch.ones(8), torch.ones(9))


@pytest.mark.parametrize("name", ["gate_", "delta_gates"])
def test_reference_has_the_same_signature(name: str) -> None:
    assert inspect.signature(getattr(gates, name)) == inspect.signature(getattr(ref, name))
