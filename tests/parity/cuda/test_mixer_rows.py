"""Row-wise parts of a Mamba-2 mixer on CUDA: step sizes, and the gated norm; references first, then the device."""

from __future__ import annotations

import math

import pytest
import torch
from row_ops import ROW_TYPES, assert_close, assert_same_bits, captured, record_launches, strided_rows
from torch.nn import functional

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu import group_norm_gate as norm_op
from edgellm.kernels.cu.group_norm_gate import group_norm_gate
from edgellm.kernels.cu.step_sizes import launch_config, step_sizes
from edgellm.kernels.ref import group_norm_gate as norm_ref
from edgellm.kernels.ref import step_sizes as steps_ref

EPS = 1e-5
SHAPES = [(8, 1), (24, 3), (257, 1), (512, 4), (5120, 1), (8192, 8)]  # columns, groups


def test_step_sizes_of_the_reference() -> None:
    x, bias = torch.randn(3, 5) * 4, torch.randn(5)
    out = torch.empty(3, 5)
    steps_ref.step_sizes(x.bfloat16(), bias, out, least=0.1, greatest=2.0)
    expected = [[min(max(math.log1p(math.exp(v)), 0.1), 2.0) for v in row] for row in (x.bfloat16() + bias).tolist()]
    torch.testing.assert_close(out, torch.tensor(expected))


def test_gated_norm_of_the_reference_is_that_of_the_cpu_graph() -> None:
    """One group and several, against torch's own norm."""
    x, gate, weight = torch.randn(4, 24), torch.randn(4, 24), torch.rand(24) + 0.5
    for groups in (1, 3):
        out = torch.empty(4, 24)
        norm_ref.group_norm_gate(x, gate, weight, EPS, out, num_groups=groups)
        parts = (x * functional.silu(gate)).view(4, groups, -1)
        expected = functional.rms_norm(parts, parts.shape[-1:], eps=EPS).view(4, 24) * weight
        torch.testing.assert_close(out, expected)


def test_launches_and_structs(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    wide = torch.randn(5, 100).bfloat16()
    step_sizes(wide[:, 7:16], torch.zeros(9), torch.empty(5, 9), least=0.5)
    step_sizes(wide[:0, :9], torch.zeros(9), torch.empty(0, 9))
    x, gate, out = (torch.randn(3, 96).half() for _ in range(3))
    group_norm_gate(x, gate, torch.ones(96), EPS, out, num_groups=2)
    group_norm_gate(x, gate, torch.ones(96), EPS, out, num_groups=32)
    group_norm_gate(x[:0], gate[:0], torch.ones(96), EPS, out[:0], num_groups=2)
    keys = [(torch.bfloat16,), (torch.float16, 8), (torch.float16, 1)]
    assert [launch.key for launch in launches] == keys
    assert (launches[0].params["x_stride"], launches[0].params["least"]) == (100, 0.5)
    assert launches[0].params["greatest"] == math.inf
    assert launches[1].params["group_width"] == 48
    assert launches[1].config.grid == (2, 3, 1)
    assert launch_config(3, 100).grid == (3, 1, 1)
    assert norm_op.launch_config(70000, 1).grid == (1, 65535, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gate": torch.zeros(2, 4)}, "gate is"),
        ({"weight": torch.zeros(6).half()}, "weight is"),
        ({"out": torch.zeros(3, 6)}, "out is"),
        ({"num_groups": 4}, "6 columns in 4 groups"),
        ({"num_groups": 0}, "6 columns in 0 groups"),
    ],
)
def test_bad_arguments_of_the_norm(monkeypatch: pytest.MonkeyPatch, changes: dict, message: str) -> None:
    launches = record_launches(monkeypatch)
    operands = {"x": torch.zeros(2, 6), "gate": torch.zeros(2, 6), "weight": torch.zeros(6), "out": torch.zeros(2, 6)}
    with pytest.raises(InvalidArgumentError, match=message):
        group_norm_gate(**(operands | {"eps": EPS, "num_groups": 2} | changes))
    assert not launches


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(2, 6).double()}, "x is"),
        ({"bias": torch.zeros(5)}, "bias is"),
        ({"out": torch.zeros(2, 6).half()}, "out is"),
        ({"least": 2.0, "greatest": 1.0}, "limits of the step size"),
        ({"least": math.nan}, "limits of the step size"),
    ],
)
def test_bad_arguments_of_step_sizes(monkeypatch: pytest.MonkeyPatch, changes: dict, message: str) -> None:
    launches = record_launches(monkeypatch)
    operands = {"x": torch.zeros(2, 6), "bias": torch.zeros(6), "out": torch.zeros(2, 6)}
    with pytest.raises(InvalidArgumentError, match=message):
        step_sizes(**(operands | changes))
    assert not launches


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROW_TYPES)
def test_step_sizes_equal_reference(dtype: torch.dtype) -> None:
    for rows, width, stride in ((1, 1, 1), (7, 24, 40), (300, 128, 131)):
        x = strided_rows(rows, width, stride, dtype, "cuda") * 15
        bias, out = torch.randn(width, device="cuda"), torch.empty(rows, width, device="cuda")
        for limits in ({}, {"least": 0.2, "greatest": 9.0}):
            expected = torch.empty(rows, width)
            steps_ref.step_sizes(x.cpu(), bias.cpu(), expected, **limits)
            step_sizes(x, bias, out, **limits)
            torch.testing.assert_close(out.cpu(), expected, rtol=2e-6, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize(("width", "groups"), SHAPES)
def test_norm_equals_reference(dtype: torch.dtype, width: int, groups: int) -> None:
    for rows, stride in ((1, width), (5, width + 3), (130, width + 8)):
        x, gate = (strided_rows(rows, width, stride, dtype, "cuda") * 3 for _ in range(2))
        weight = torch.rand(width, device="cuda") + 0.5
        out, expected = torch.empty(rows, width, dtype=dtype, device="cuda"), torch.empty(rows, width, dtype=dtype)
        norm_ref.group_norm_gate(x.cpu(), gate.cpu(), weight.cpu(), EPS, expected, num_groups=groups)
        group_norm_gate(x, gate, weight, EPS, out, num_groups=groups)
        if dtype == torch.float32:
            torch.testing.assert_close(out.cpu(), expected, rtol=5e-6, atol=2e-6)
        else:
            assert_close(out, expected)
        single = torch.empty_like(out)
        for row in range(min(rows, 5)):
            part = slice(row, row + 1)
            group_norm_gate(x[part], gate[part], weight, EPS, single[part], num_groups=groups)
        assert_same_bits(single[:5], out[:5])
        group_norm_gate(x, gate, weight, EPS, x, num_groups=groups)
        assert_same_bits(x.contiguous(), out)


@pytest.mark.gpu
def test_graphs_equal_eager() -> None:
    x, gate = torch.randn(2, 4, 256, device="cuda").half()
    weight, bias = torch.rand(256, device="cuda"), torch.rand(256, device="cuda")
    out, expected = torch.empty(2, 4, 256, device="cuda", dtype=torch.float16)
    steps, expected_steps = torch.empty(2, 4, 256, device="cuda")

    def run(normed: torch.Tensor, sizes: torch.Tensor) -> None:
        group_norm_gate(x, gate, weight, EPS, normed, num_groups=2)
        step_sizes(gate, bias, sizes)

    graph = captured(lambda: run(out, steps))
    gate.neg_()
    graph.replay()
    run(expected, expected_steps)
    assert_same_bits(out, expected)
    assert_same_bits(steps, expected_steps)


@pytest.mark.gpu
def test_sanitizer_mixer_rows() -> None:
    for width in (8, 27):
        x, gate = torch.randn(2, 3, width, device="cuda").bfloat16()
        group_norm_gate(x, gate, torch.ones(width, device="cuda"), EPS, torch.empty_like(x), num_groups=1)
        step_sizes(x, torch.ones(width, device="cuda"), torch.empty(3, width, device="cuda"))
    torch.cuda.synchronize()
