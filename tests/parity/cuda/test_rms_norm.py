"""RMS norm with residual sum on CUDA: the reference against the CPU kernel, then the device against the reference."""

from __future__ import annotations

import pytest
import torch
from row_ops import ROW_TYPES, assert_close, assert_same_bits, captured, record_launches, strided_rows

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cpu import elementwise
from edgellm.kernels.cu.rms_norm import BY_ELEMENT, SHAPES, launch_config, rms_norm, row_shape
from edgellm.kernels.ref import rms_norm as ref

EPS = 1e-6
# Each variant's width and the border to the next; an odd width; one beyond what fits registers.
WIDTHS = (8, 64, 256, 264, 520, 1024, 2048, 2056, 4096, 8192, 16384, 20000, 33, 1000)


def operands(rows: int, width: int, dtype: torch.dtype, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """x, weight, residual, out."""
    torch.manual_seed(width + rows)
    x, residual = torch.randn(2, rows, width, device=device).to(dtype)
    return x, torch.rand(width, device=device) + 0.5, residual, torch.full_like(x, float("nan"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 33, 1024])
def test_reference_is_the_cpu_kernel(dtype: torch.dtype, width: int) -> None:
    x, weight, _, out = operands(3, width, dtype)
    theirs = torch.empty_like(x)
    ref.rms_norm(x, weight, EPS, out)
    elementwise.rms_norm(x, weight, EPS, theirs)
    assert_close(theirs, out)


def test_reference_stores_the_rounded_sum_and_norms_it() -> None:
    x, weight, residual, out = operands(4, 16, torch.bfloat16)
    total = (x.float() + residual.float()).bfloat16()
    plain = torch.empty_like(x)
    ref.rms_norm(x, weight, EPS, out, residual=residual)
    ref.rms_norm(total, weight, EPS, plain)
    assert torch.equal(residual, total)
    assert torch.equal(out, plain)


def test_a_row_decides_its_variant_alone() -> None:
    assert row_shape(1024, torch.bfloat16, is_vectorised=True) == (128, 1)
    assert row_shape(4096, torch.bfloat16, is_vectorised=True) == (512, 1)
    assert row_shape(4096, torch.float32, is_vectorised=True) == (512, 2)
    assert row_shape(8200, torch.float32, is_vectorised=True) == BY_ELEMENT
    assert row_shape(1024, torch.bfloat16, is_vectorised=False) == BY_ELEMENT
    used = {row_shape(width, torch.bfloat16, is_vectorised=True) for width in (256, 1024, 2048, 4096, 8192, 16384)}
    assert used == set(SHAPES)


def test_launch_config() -> None:
    assert launch_config(1, 256).grid == (1, 1, 1)
    assert launch_config(9, 32).grid == (3, 1, 1)
    assert launch_config(9, 32).block == (32, 4, 1)
    assert launch_config(9, 512).block == (512, 1, 1)


def test_launches_and_struct(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    x, weight, residual, out = operands(5, 1024, torch.float16)
    rms_norm(x, weight, EPS, out, residual=residual)
    rms_norm(x[:, :1001], weight[:1001], EPS, out[:, :1001])
    rms_norm(x[:0], weight, EPS, out[:0])
    assert [launch.key for launch in launches] == [(torch.float16, 128, 1), (torch.float16, *BY_ELEMENT)]
    first = launches[0].params
    assert (first["x"], first["residual"], first["out"]) == (x.data_ptr(), residual.data_ptr(), out.data_ptr())
    assert (first["num_rows"], first["width"], first["x_stride"]) == (5, 1024, 1024)
    assert launches[1].params["residual"] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(2, 8, dtype=torch.int32)}, "x is .*float32 or torch.float16"),
        ({"x": torch.zeros(8)}, r"x is \(8,\)"),
        ({"weight": torch.zeros(7)}, "weight is"),
        ({"weight": torch.zeros(8, dtype=torch.bfloat16)}, "weight is"),
        ({"out": torch.zeros(3, 8)}, "out is"),
        ({"out": torch.zeros(2, 8, dtype=torch.bfloat16)}, "out is"),
        ({"residual": torch.zeros(2, 9)}, "residual is"),
    ],
)
def test_bad_arguments(monkeypatch: pytest.MonkeyPatch, changes: dict[str, torch.Tensor], message: str) -> None:
    launches = record_launches(monkeypatch)
    arguments = {"x": torch.zeros(2, 8), "weight": torch.zeros(8), "out": torch.zeros(2, 8), "eps": EPS} | changes
    with pytest.raises(InvalidArgumentError, match=message):
        rms_norm(**arguments)  # type: ignore[arg-type]
    assert not launches


def test_cpu_tensors_are_refused() -> None:
    x, weight, _, out = operands(2, 8, torch.float32)
    with pytest.raises(InvalidArgumentError, match="x is on cpu; a CUDA tensor is needed"):
        rms_norm(x, weight, EPS, out)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("has_residual", [False, True])
def test_device_equals_reference(dtype: torch.dtype, width: int, has_residual: bool) -> None:
    for rows in (1, 7, 130):
        x, weight, residual, out = operands(rows, width, dtype, "cuda")
        expected, expected_residual = out.cpu(), residual.cpu()
        ref.rms_norm(x.cpu(), weight.cpu(), EPS, expected, residual=expected_residual if has_residual else None)
        rms_norm(x, weight, EPS, out, residual=residual if has_residual else None)
        assert_close(out, expected)
        assert_same_bits(residual, expected_residual)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROW_TYPES)
def test_strided_rows_and_in_place(dtype: torch.dtype) -> None:
    for width, stride in ((1024, 3072), (1024, 1025), (96, 104), (100, 130)):
        x = strided_rows(5, width, stride, dtype, "cuda")
        residual, weight = strided_rows(5, width, stride + 8, dtype, "cuda"), torch.rand(width, device="cuda")
        expected, expected_residual = torch.empty(5, width, dtype=dtype), residual.cpu()
        ref.rms_norm(x.cpu(), weight.cpu(), EPS, expected, residual=expected_residual)
        rms_norm(x, weight, EPS, x, residual=residual)
        assert_close(x, expected)
        assert_same_bits(residual, expected_residual)


@pytest.mark.gpu
def test_bits_of_a_row_do_not_depend_on_its_batch() -> None:
    for width in (64, 1024, 4096, 16384):
        x, weight, _, out = operands(300, width, torch.bfloat16, "cuda")
        rms_norm(x, weight, EPS, out)
        for rows in (1, 2, 37):
            part = torch.empty_like(x[:rows])
            rms_norm(x[:rows], weight, EPS, part)
            assert_same_bits(part, out[:rows])


@pytest.mark.gpu
def test_graph_equals_eager() -> None:
    x, weight, residual, out = operands(3, 1024, torch.bfloat16, "cuda")
    graph = captured(lambda: rms_norm(x, weight, EPS, out, residual=residual))
    new_x, _, new_residual, expected = operands(3, 1024, torch.bfloat16, "cuda")
    x.copy_(new_x * 2)
    residual.copy_(new_residual)
    graph.replay()
    rms_norm(new_x * 2, weight, EPS, expected, residual=new_residual)
    assert_same_bits(out, expected)
    assert_same_bits(residual, new_residual)


@pytest.mark.gpu
def test_sanitizer_rms_norm() -> None:
    for width in (24, 1024, 33):
        x, weight, residual, out = operands(3, width, torch.bfloat16, "cuda")
        rms_norm(x, weight, EPS, out, residual=residual)
    torch.cuda.synchronize()
