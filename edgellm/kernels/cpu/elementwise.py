"""RMS norm, rope and gated activation on CPU rows.  Float32 arithmetic, float32 or bfloat16 rows."""

from __future__ import annotations

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cpu import _ops
from edgellm.kernels.cpu.threads import kernel_threads

ROW_DTYPES = (torch.float32, torch.bfloat16)


def check_rows(name: str, rows: torch.Tensor, width: int | None = None) -> None:
    """Refuse anything the kernels would misread.

    Raises:
        InvalidArgumentError: not a C-contiguous 2-D CPU tensor of a supported dtype and width.
    """
    if rows.dtype not in ROW_DTYPES or rows.dim() != 2 or not rows.is_contiguous() or rows.device.type != "cpu":
        raise InvalidArgumentError(
            f"{name} is {tuple(rows.shape)} {rows.dtype} on {rows.device}, contiguous={rows.is_contiguous()}; "
            "a C-contiguous 2-D float32 or bfloat16 CPU tensor is needed"
        )
    if width is not None and rows.shape[1] != width:
        raise InvalidArgumentError(f"{name} has width {rows.shape[1]}; {width} is needed")


def check_vector(name: str, vector: torch.Tensor, size: int) -> None:
    """Refuse a weight that is not (size,) float32 and contiguous."""
    if vector.dtype != torch.float32 or vector.shape != (size,) or not vector.is_contiguous():
        raise InvalidArgumentError(f"{name} is {tuple(vector.shape)} {vector.dtype}; ({size},) float32 is needed")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight.

    Args:
        x: (N, W) float32 or bfloat16.
        weight: (W,) float32.
        out: (N, W), dtype of x; may be x.
    Effects: writes out.
    """
    check_rows("x", x)
    check_rows("out", out, x.shape[1])
    check_vector("weight", weight, x.shape[1])
    if out.dtype != x.dtype or out.shape[0] != x.shape[0]:
        raise InvalidArgumentError(f"out is {tuple(out.shape)} {out.dtype}; {tuple(x.shape)} {x.dtype} is needed")
    _ops.rms_norm(
        x.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        x.shape[1],
        x.dtype == torch.bfloat16,
        eps,
        kernel_threads(),
    )


def rope_(
    rows: torch.Tensor,
    angles: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Rotate pairs (i, i + R / 2) of every query and key head in place, after an optional RMS norm of the whole head.

    Args:
        rows: (T, W) float32 or bfloat16; a row starts with the query heads, then the key heads.
        angles: (2, T, R / 2) float32, cosine and sine; R leading elements of a head turn, at most head_dim.
        query_norm, key_norm: (head_dim,) float32 or None.
    Effects: writes rows.
    """
    check_rows("rows", rows)
    if rows.shape[1] < (num_heads + num_kv_heads) * head_dim:
        raise InvalidArgumentError(
            f"rows has width {rows.shape[1]}; {num_heads} + {num_kv_heads} heads of {head_dim} do not fit"
        )
    half = angles.shape[-1]
    if angles.shape != (2, rows.shape[0], half) or not 1 <= half <= head_dim // 2 or angles.dtype != torch.float32:
        raise InvalidArgumentError(
            f"angles is {tuple(angles.shape)} {angles.dtype}; (2, {rows.shape[0]}, up to {head_dim // 2}) float32 is "
            "needed"
        )
    for name, norm in (("query_norm", query_norm), ("key_norm", key_norm)):
        if norm is not None:
            check_vector(name, norm, head_dim)
    _ops.rope(
        rows.data_ptr(),
        angles.data_ptr(),
        0 if query_norm is None else query_norm.data_ptr(),
        0 if key_norm is None else key_norm.data_ptr(),
        rows.shape[0],
        rows.shape[1],
        num_heads,
        num_kv_heads,
        head_dim,
        2 * half,
        rows.dtype == torch.bfloat16,
        eps,
        kernel_threads(),
    )


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """out = silu(gate) * up.

    Args:
        gate_up: (N, 2F) float32 or bfloat16; gate, then up.
        out: (N, F), dtype of gate_up.
    Effects: writes out.
    """
    check_rows("gate_up", gate_up, 2 * out.shape[1])
    check_rows("out", out)
    if out.dtype != gate_up.dtype or out.shape[0] != gate_up.shape[0]:
        raise InvalidArgumentError(f"out is {tuple(out.shape)} {out.dtype}; it does not match gate_up")
    _ops.silu_mul(
        gate_up.data_ptr(), out.data_ptr(), out.shape[0], out.shape[1], out.dtype == torch.bfloat16, kernel_threads()
    )


def gelu_mul(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor) -> None:
    """out = gelu(gate) * up, with the tanh form of gelu (Hendrycks and Gimpel, Gaussian error linear units, 2016).

    Args:
        gate, up: (N, F) float32 or bfloat16, each row contiguous, any row stride: columns of a wider matrix do.
        out: (N, F), dtype of gate.
    Effects: writes out.
    """
    check_rows("out", out)
    for name, rows in (("gate", gate), ("up", up)):
        if rows.shape != out.shape or rows.dtype != out.dtype or rows.stride(1) != 1 or rows.device.type != "cpu":
            raise InvalidArgumentError(
                f"{name} is {tuple(rows.shape)} {rows.dtype} with strides {rows.stride()} on {rows.device}; "
                f"{tuple(out.shape)} {out.dtype} with contiguous rows is needed"
            )
    _ops.gelu_mul(
        gate.data_ptr(),
        gate.stride(0),
        up.data_ptr(),
        up.stride(0),
        out.data_ptr(),
        out.shape[0],
        out.shape[1],
        out.dtype == torch.bfloat16,
        kernel_threads(),
    )
