"""Gated activation on CUDA: the reference against the CPU kernel, then the device against the reference."""

from __future__ import annotations

import pytest
import torch
from row_ops import ROW_TYPES, assert_close, assert_same_bits, captured, record_launches, strided_rows

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cpu import elementwise
from edgellm.kernels.cu.silu_mul import launch_config, silu_mul
from edgellm.kernels.ref import silu_mul as ref


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_is_the_cpu_kernel(dtype: torch.dtype) -> None:
    gate_up = (torch.randn(3, 2 * 75) * 4).to(dtype)
    ours, theirs = torch.empty(2, 3, 75, dtype=dtype)
    ref.silu_mul(gate_up, ours)
    elementwise.silu_mul(gate_up, theirs)
    assert_close(theirs, ours)


def test_launch_config() -> None:
    assert launch_config(1, 3072, 8).grid == (3, 1, 1)
    assert launch_config(5, 1, 1).grid == (1, 5, 1)
    assert launch_config(70000, 8, 8).grid == (1, 65535, 1)


def test_launches_and_struct(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    gate_up, out = torch.randn(4, 512, dtype=torch.bfloat16), torch.empty(4, 256, dtype=torch.bfloat16)
    silu_mul(gate_up, out)
    silu_mul(gate_up[:, :510], out[:, :255])
    silu_mul(gate_up[:0], out[:0])
    assert [launch.key for launch in launches] == [(torch.bfloat16, 8), (torch.bfloat16, 1)]
    assert launches[1].params["width"] == 255
    assert launches[1].params["gate_up_stride"] == 512


@pytest.mark.parametrize(
    ("gate_up", "out", "message"),
    [
        (torch.zeros(2, 7), torch.zeros(2, 3), "an even width"),
        (torch.zeros(2, 8), torch.zeros(2, 3), "out is"),
        (torch.zeros(2, 8), torch.zeros(2, 4, dtype=torch.float16), "out is"),
        (torch.zeros(2, 8, dtype=torch.float64), torch.zeros(2, 4), "gate_up is"),
    ],
)
def test_bad_arguments(monkeypatch: pytest.MonkeyPatch, gate_up: torch.Tensor, out: torch.Tensor, message: str) -> None:
    launches = record_launches(monkeypatch)
    with pytest.raises(InvalidArgumentError, match=message):
        silu_mul(gate_up, out)
    assert not launches


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("width", [1, 7, 8, 64, 1000, 1027, 3072, 12288])
def test_device_equals_reference(dtype: torch.dtype, width: int) -> None:
    for rows, stride in ((1, 2 * width), (9, 2 * width + 5), (33, 2 * width + 8)):
        gate_up = strided_rows(rows, 2 * width, stride, dtype, "cuda") * 5
        out, expected = torch.full((rows, width), float("nan"), dtype=dtype, device="cuda"), torch.empty(rows, width)
        expected = expected.to(dtype)
        ref.silu_mul(gate_up.cpu(), expected)
        silu_mul(gate_up, out)
        assert_close(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROW_TYPES)
def test_large_values_neither_overflow_nor_become_nan(dtype: torch.dtype) -> None:
    gate_up = torch.tensor([[-200.0, -88.0, 0.0, 90.0, 1.0, 1.0, 1.0, 1.0]], device="cuda", dtype=dtype)
    out = torch.empty(1, 4, device="cuda", dtype=dtype)
    silu_mul(gate_up, out)
    assert out.tolist() == [[0.0, pytest.approx(0.0, abs=1e-36), 0.0, 90.0]]


@pytest.mark.gpu
def test_more_rows_than_a_grid_holds() -> None:
    gate_up = torch.randn(70000, 16, device="cuda")
    out, expected = torch.empty(70000, 8, device="cuda"), torch.empty(70000, 8, device="cuda")
    silu_mul(gate_up, out)
    ref.silu_mul(gate_up, expected)
    assert_close(out, expected)


@pytest.mark.gpu
def test_graph_equals_eager() -> None:
    gate_up = torch.randn(4, 256, device="cuda").half()
    out, expected = torch.empty(2, 4, 128, device="cuda", dtype=torch.float16)
    graph = captured(lambda: silu_mul(gate_up, out))
    gate_up.neg_()
    graph.replay()
    silu_mul(gate_up, expected)
    assert_same_bits(out, expected)


@pytest.mark.gpu
def test_sanitizer_silu_mul() -> None:
    for width in (8, 27):
        gate_up = torch.randn(3, 2 * width, device="cuda").bfloat16()
        silu_mul(gate_up, torch.empty(3, width, device="cuda", dtype=torch.bfloat16))
    torch.cuda.synchronize()
