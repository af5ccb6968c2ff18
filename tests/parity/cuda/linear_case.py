"""Operands of the linear kernels with poison around them, and how far results may be from float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from edgellm.kernels.ref.skinny_linear import skinny_linear as reference

# Norm of the error over norm of the result: one rounding to the output type, and float32 sums of exact products.
NORM_TOLERANCE = {torch.bfloat16: 2.5e-3, torch.float16: 3.2e-4, torch.float32: 2e-5}
# (N, K): layers of small models, then odd and short ones.
SHAPES = (
    (4096, 1024),
    (1024, 2048),
    (6144, 1024),
    (1024, 3072),
    (960, 576),
    (576, 1536),
    (4096, 12288),
    (1, 8),
    (17, 8),
    (33, 40),
    (131, 520),
    (1061, 1048),
)

Linear = Callable[..., None]


@dataclass(slots=True)
class LinearCase:
    """x and residual with rows apart, NaN between and behind their rows; `weight` and `bias` without gaps."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    residual: torch.Tensor


def poisoned(rows: int, width: int, gap: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """(rows, width) of normal numbers, `gap` NaN behind each row and one row of NaN at the end."""
    whole = torch.full((rows + 1, width + gap), float("nan"), dtype=dtype, device=device)
    view = whole[:rows, :width]
    view.copy_(torch.randn(rows, width, device=device))
    return view


def make_case(
    rows: int,
    out_width: int,
    in_width: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype | None = None,
    device: str = "cuda",
) -> LinearCase:
    """Results of magnitude about one."""
    torch.manual_seed(rows * 7 + out_width + in_width)
    weight = torch.randn(out_width, in_width, device=device) / in_width**0.5
    return LinearCase(
        poisoned(rows, in_width, 24, dtype, device),
        weight.to(dtype),
        torch.randn(out_width, device=device).to(dtype),
        poisoned(rows, out_width, 3, out_dtype or dtype, device),
    )


def norm_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm())


def check_against_reference(
    linear: Linear, case: LinearCase, *, bias: bool, residual: bool, out_dtype: torch.dtype
) -> None:
    """One call, compared with float64; what lies behind the rows of `out` stays."""
    rows, out_width = case.residual.shape
    whole = torch.full((rows + 1, out_width + 5), 7.0, dtype=out_dtype, device=case.x.device)
    out = whole[:rows, :out_width]
    options = {"bias": case.bias if bias else None, "residual": case.residual if residual else None}
    linear(case.x, case.weight, out, **options)
    expected = torch.empty(rows, out_width, dtype=torch.float64, device=case.x.device)
    reference(case.x, case.weight, expected, **options)
    assert norm_error(out, expected) < NORM_TOLERANCE[out_dtype]
    # Single elements: a wrong one is lost in a norm over millions.
    scale = float(expected.abs().max())
    assert float((out.double() - expected).abs().max()) < 4 * NORM_TOLERANCE[out_dtype] * scale
    assert bool((whole[rows:] == 7.0).all())
    assert bool((whole[:, out_width:] == 7.0).all())


def rows_at_once(linear: Linear, case: LinearCase, rows: int) -> torch.Tensor:
    """The first `rows` rows of a case, bias and residual included, by one call."""
    out = torch.empty_like(case.residual[:rows])
    linear(case.x[:rows], case.weight, out, case.bias, residual=case.residual[:rows])
    return out
