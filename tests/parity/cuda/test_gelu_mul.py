"""Gated activation with gelu on CUDA: the reference against the CPU kernel, then the device against the reference."""

from __future__ import annotations

import pytest
import torch
from row_ops import ROW_TYPES, assert_close, assert_same_bits, captured, record_launches, strided_rows

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cpu import elementwise
from edgellm.kernels.cu.gelu_mul import gelu_mul, launch_config
from edgellm.kernels.ref import gelu_mul as ref


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_is_the_cpu_kernel(dtype: torch.dtype) -> None:
    gate, up = (torch.randn(2, 3, 75) * 4).to(dtype)
    ours, theirs = torch.empty(2, 3, 75, dtype=dtype)
    ref.gelu_mul(gate, up, ours)
    elementwise.gelu_mul(gate, up, theirs)
    tolerance = 3e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(theirs, ours, rtol=tolerance, atol=3e-6)


def test_launches_and_struct(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    gate_up, out = torch.randn(4, 512, dtype=torch.bfloat16), torch.empty(4, 256, dtype=torch.bfloat16)
    gelu_mul(gate_up[:, :256], gate_up[:, 256:], out)
    gelu_mul(gate_up[:, :255], gate_up[:, 256:511], out[:, :255])
    gelu_mul(gate_up[:0, :256], gate_up[:0, 256:], out[:0])
    assert [launch.key for launch in launches] == [(torch.bfloat16, 8), (torch.bfloat16, 1)]
    assert launches[1].params["width"] == 255
    assert launches[1].params["gate_stride"] == launches[1].params["up_stride"] == 512
    assert launch_config(70000, 8, 8).grid == (1, 65535, 1)


@pytest.mark.parametrize(
    ("up", "out", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 4), "up is"),
        (torch.zeros(2, 4), torch.zeros(2, 3), "out is"),
        (torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.float16), "out is"),
    ],
)
def test_bad_arguments(monkeypatch: pytest.MonkeyPatch, up: torch.Tensor, out: torch.Tensor, message: str) -> None:
    launches = record_launches(monkeypatch)
    with pytest.raises(InvalidArgumentError, match=message):
        gelu_mul(torch.zeros(2, 4), up, out)
    assert not launches


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("width", [1, 7, 8, 64, 1027, 12288])
def test_device_equals_reference(dtype: torch.dtype, width: int) -> None:
    for rows, stride in ((1, 2 * width), (9, 2 * width + 5), (33, 2 * width + 8)):
        gate_up = strided_rows(rows, 2 * width, stride, dtype, "cuda") * 5
        out = torch.full((rows, width), float("nan"), dtype=dtype, device="cuda")
        gelu_mul(gate_up[:, :width], gate_up[:, width:], out)
        expected = torch.empty(rows, width, dtype=dtype)
        ref.gelu_mul(gate_up[:, :width].cpu(), gate_up[:, width:].cpu(), expected)
        assert_close(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROW_TYPES)
def test_large_values_neither_overflow_nor_become_nan(dtype: torch.dtype) -> None:
    gate = torch.tensor([[-200.0, -20.0, 0.0, 90.0]], device="cuda", dtype=dtype)
    out = torch.empty(1, 4, device="cuda", dtype=dtype)
    gelu_mul(gate, torch.ones_like(gate), out)
    assert out.tolist() == [[0.0, 0.0, 0.0, 90.0]]


@pytest.mark.gpu
def test_graph_equals_eager() -> None:
    gate, up = torch.randn(2, 4, 128, device="cuda").half()
    out, expected = torch.empty(2, 4, 128, device="cuda", dtype=torch.float16)
    graph = captured(lambda: gelu_mul(gate, up, out))
    gate.neg_()
    graph.replay()
    gelu_mul(gate, up, expected)
    assert_same_bits(out, expected)


@pytest.mark.gpu
def test_sanitizer_gelu_mul() -> None:
    for width in (8, 27):
        gate, up = torch.randn(2, 3, width, device="cuda").bfloat16()
        gelu_mul(gate, up, torch.empty_like(gate))
    torch.cuda.synchronize()
