"""Gates, the gated head norm and the scatter of state on CUDA, against their references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from row_ops import ROW_TYPES, assert_close, assert_same_bits, captured, record_launches, strided_rows

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cpu import elementwise
from edgellm.kernels.cpu import gates as cpu_gates
from edgellm.kernels.cu.gated_norm import gated_norm
from edgellm.kernels.cu.gates import delta_gates, gate_, gate_config
from edgellm.kernels.ref import gated_norm as ref_norm
from edgellm.kernels.ref import gates as ref

EPS = 1e-6
WIDTHS = ((64, 64), (45, 45), (45, 48), (512, 520), (512, 513))  # (columns, from row to row)
HEADS = ((4, 128), (3, 64), (2, 256), (2, 32), (3, 12), (1, 500))


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """To two roundings: exp is another function on the device."""
    step = {torch.float32: 1e-6}.get(actual.dtype, torch.finfo(actual.dtype).eps)
    torch.testing.assert_close(actual.cpu(), expected, rtol=2 * step, atol=2e-6)


# ---- references, launches and refusals ------------------------------------------------------------------------------


def test_reference_of_the_gated_norm_is_the_cpu_path() -> None:
    x, gate = torch.randn(2, 9, 3 * 16).bfloat16()
    weight, out = torch.rand(16) + 0.5, torch.empty(9, 48, dtype=torch.bfloat16)
    ref_norm.gated_norm(x, gate, weight, EPS, out)
    expected = x.clone()
    elementwise.rms_norm(expected.view(-1, 16), weight, EPS, expected.view(-1, 16))
    cpu_gates.gate_(expected, gate, silu=True)
    torch.testing.assert_close(out, expected, rtol=2**-6, atol=1e-6)


def test_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    x = torch.zeros(70_000, 64)
    gate_(x, x.clone())
    gate_(x[:5, :63], torch.zeros(5, 1), silu=True)
    gate_(x[:0], x[:0])
    assert [launch.key for launch in launches] == [(torch.float32, 4), (torch.float32, 1)]
    assert launches[0].config == gate_config(70_000, 64, 4)
    assert launches[0].config.grid == (1, 65_535, 1)
    assert [launch.params["is_scalar"] for launch in launches] == [0, 1]
    launches.clear()
    gates = torch.zeros(9, 6).half()
    rate, tall = torch.zeros(6), torch.zeros(9, 6)
    delta_gates(gates, gates, rate, rate, tall, tall.clone())
    delta_gates(gates[:0], gates[:0], rate, rate, tall[:0], tall[:0])
    assert [(launch.spec.name, launch.key) for launch in launches] == [("delta_gates", (torch.float16,))]


@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize(("heads", "head_dim"), HEADS)
def test_norm_variants(monkeypatch: pytest.MonkeyPatch, heads: int, head_dim: int, dtype: torch.dtype) -> None:
    launches = record_launches(monkeypatch)
    x = torch.zeros(7, heads * head_dim, dtype=dtype)
    gated_norm(x, x.clone(), torch.zeros(head_dim), EPS, x)
    gated_norm(x, strided_rows(7, heads * head_dim, heads * head_dim + 1, dtype), torch.zeros(head_dim), EPS, x)
    gated_norm(x[:0], x[:0], torch.zeros(head_dim), EPS, x[:0])
    parts = {128: 4, 64: 2, 256: 8}.get(head_dim, 0)
    assert [launch.key for launch in launches] == [(dtype, parts), (dtype, 0)]
    assert launches[0].config.grid == (-(-7 * heads // 4), 1, 1)


@pytest.mark.parametrize(
    ("function", "changes", "message"),
    [
        (gate_, {"x": torch.zeros(3, 8).double()}, "x is"),
        (gate_, {"gate": torch.zeros(3, 2)}, "gate is"),
        (gate_, {"gate": torch.zeros(2, 8)}, "gate is"),
        (gate_, {"gate": torch.zeros(3, 8).half()}, "gate is"),
        (delta_gates, {"a": torch.zeros(3)}, "a is"),
        (delta_gates, {"b": torch.zeros(3, 9)}, "b is"),
        (delta_gates, {"rate": torch.zeros(9)}, "rate is"),
        (delta_gates, {"bias": torch.zeros(8).half()}, "bias is"),
        (delta_gates, {"decay": torch.zeros(3, 8).half()}, "decay is"),
        (delta_gates, {"beta": torch.zeros(2, 8)}, "beta is"),
        (gated_norm, {"weight": torch.zeros(3)}, "D a divisor of x's 8"),
        (gated_norm, {"weight": torch.zeros(4).half()}, "weight is"),
        (gated_norm, {"gate": torch.zeros(3, 4)}, "gate is"),
        (gated_norm, {"out": torch.zeros(3, 8).half()}, "out is"),
    ],
)
def test_bad_arguments(monkeypatch: pytest.MonkeyPatch, function: Any, changes: dict[str, Any], message: str) -> None:
    launches = record_launches(monkeypatch)
    rows, vector = torch.zeros(3, 8), torch.zeros(8)
    arguments = {
        gate_: {"x": rows, "gate": rows},
        delta_gates: {"a": rows, "b": rows, "rate": vector, "bias": vector, "decay": rows, "beta": rows},
        gated_norm: {"x": rows, "gate": rows, "weight": vector, "eps": EPS, "out": rows},
    }[function]
    with pytest.raises(InvalidArgumentError, match=message):
        function(**(arguments | changes))
    assert not launches


# ---- device ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("is_scalar", [False, True])
@pytest.mark.parametrize(("width", "stride"), WIDTHS)
def test_gate(width: int, stride: int, is_scalar: bool, silu: bool, dtype: torch.dtype) -> None:
    for num_rows in (1, 9):
        x = strided_rows(num_rows, width, stride, dtype)
        gate = strided_rows(num_rows, 1 if is_scalar else width, stride, dtype) * 4
        gate[0, 0] = -200.0  # exp overflows
        expected, wide = x.clone(), torch.full((num_rows, stride), 7.0, dtype=dtype, device="cuda")
        actual = wide[:, :width].copy_(x)
        ref.gate_(expected, gate, silu=silu)
        gate_(actual, gate.to("cuda"), silu=silu)
        assert_near(actual, expected)
        assert bool((wide[:, width:] == 7.0).all())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("width", [1, 5, 32])
def test_delta_gates(width: int, dtype: torch.dtype) -> None:
    a, b = strided_rows(300, width, width + 3, dtype) * 20, strided_rows(300, width, width + 3, dtype) * 20
    rate, bias = -torch.rand(width) * 16, torch.randn(width)
    expected = torch.empty(a.shape), torch.empty(b.shape)
    ref.delta_gates(a, b, rate, bias, *expected)
    actual = torch.full((2, 300, width + 1), 7.0, device="cuda")
    decay, beta = (part[:, :width] for part in actual)
    delta_gates(a.to("cuda"), b.to("cuda"), rate.to("cuda"), bias.to("cuda"), decay, beta)
    torch.testing.assert_close(decay.cpu(), expected[0], rtol=2e-6, atol=1e-9)
    torch.testing.assert_close(beta.cpu(), expected[1], rtol=2e-6, atol=1e-9)
    assert bool((actual[:, :, width:] == 7.0).all())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize(("heads", "head_dim"), HEADS)
@pytest.mark.parametrize("gap", [0, 1])
def test_gated_norm(heads: int, head_dim: int, gap: int, dtype: torch.dtype) -> None:
    width = heads * head_dim
    x, gate = (strided_rows(37, width, width + gap, dtype) * 3 for _ in range(2))
    weight, expected = torch.rand(head_dim) + 0.5, torch.empty(37, width, dtype=dtype)
    ref_norm.gated_norm(x, gate, weight, EPS, expected)
    actual = x.to("cuda")
    gated_norm(actual, gate.to("cuda"), weight.to("cuda"), EPS, actual)
    if dtype == torch.float32:
        torch.testing.assert_close(actual.cpu(), expected, rtol=4e-6, atol=1e-6)
    else:
        assert_near(actual, expected)
    single = x[5:6].to("cuda")
    gated_norm(single, gate[5:6].to("cuda"), weight.to("cuda"), EPS, single)
    assert_same_bits(single, actual[5:6])


@pytest.mark.gpu
def test_graph_equals_eager() -> None:
    x, gate = torch.randn(2, 9, 512, device="cuda").bfloat16()
    weight, out, expected = torch.rand(128, device="cuda"), torch.empty_like(x), torch.empty_like(x)
    gated_norm(x, gate, weight, EPS, expected)
    graph = captured(lambda: gated_norm(x, gate, weight, EPS, out))
    out.zero_()
    graph.replay()
    assert_close(out, expected)
    assert_same_bits(out, expected)
