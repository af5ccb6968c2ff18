"""Linear layers on CPU rows: our own kernel where few rows make reading the weight the cost, else oneDNN or BLAS."""

from __future__ import annotations

import functools

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cpu import _ops
from edgellm.kernels.cpu.elementwise import check_rows
from edgellm.kernels.cpu.threads import helper_threads

SKINNY_ROWS = _ops.SKINNY_ROWS

# The operator that torch's compiler emits for a linear layer.  Measured at 64 to 1,024 float32 rows: twice the speed
# of `torch.mm` with AVX-512 on AMD, where MKL stays below its best; equal with AVX2.
_ONEDNN = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch._C._has_mkldnn else None


@functools.cache
def _onednn_computes(dtype: torch.dtype) -> bool:
    """Whether oneDNN has a linear layer of this dtype on this processor; bfloat16 needs more than AVX2."""
    if _ONEDNN is None:
        return False
    probe = torch.zeros((1, 8), dtype=dtype)
    try:
        _ONEDNN(probe, probe, None, "none", [], "")
    except RuntimeError:  # "could not create a primitive descriptor"
        return False
    return True


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    accumulate: bool = False,
) -> torch.Tensor:
    """x weight^T + bias; with `accumulate`, out += that.

    Args:
        x: (N, K) float32 or bfloat16.
        weight: (M, K), dtype of x.
        out: (N, M), dtype of x, or float32 for bfloat16 x without `accumulate`.
        bias: (M,), dtype of x.
    Returns:
        out, or a new tensor of its shape and dtype where the library allocates its own result.
    Effects: may write out; with `accumulate` always does, and returns it.
    """
    check_rows("x", x)
    check_rows("weight", weight, x.shape[1])
    check_rows("out", out, weight.shape[0])
    if weight.dtype != x.dtype or out.shape[0] != x.shape[0] or (out.dtype != x.dtype and out.dtype != torch.float32):
        raise InvalidArgumentError(
            f"x {tuple(x.shape)} {x.dtype}, weight {tuple(weight.shape)} {weight.dtype} and out {tuple(out.shape)} "
            f"{out.dtype} do not fit together"
        )
    if x.shape[0] <= SKINNY_ROWS:
        _skinny(x, weight, out, bias, accumulate)
        return out
    product = _product(x, weight, bias)
    if accumulate:
        return out.add_(product)
    return product if product.dtype == out.dtype else product.to(out.dtype)


def _skinny(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, accumulate: bool
) -> None:
    _ops.skinny_linear(
        x.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        x.shape[1],
        weight.shape[0],
        x.dtype == torch.bfloat16,
        accumulate,
        out.dtype == torch.float32,
        helper_threads(),
    )


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if _ONEDNN is None or not _onednn_computes(x.dtype):
        return torch.nn.functional.linear(x, weight, bias)
    result: torch.Tensor = _ONEDNN(x, weight, bias, "none", [], "")
    return result
