"""RMS norm of rows (Zhang and Sennrich 2019), with the residual sum that precedes it in a decoder layer."""

from __future__ import annotations

import ctypes

import torch

from edgellm.kernels.cu import loader
from edgellm.kernels.cu.launch import LaunchConfig
from edgellm.kernels.cu.rows import ROW_TYPES, access_elements, allows_vectors
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import address, check_rows, check_vector, type_name

BLOCK_THREADS = 128  # at least; several narrow rows share a block
# (threads a row, 16-byte vectors a thread); the last takes any width and alignment.
SHAPES = ((32, 1), (128, 1), (256, 1), (512, 1), (512, 2), (1024, 2))
BY_ELEMENT = (256, 0)


class RmsNormParams(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("residual_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("num_rows", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("inverse_width", ctypes.c_float),
    )


SPEC = KernelSpec(
    name="rms_norm",
    entry="rms_norm",
    params=RmsNormParams,
    params_name="RmsNormParams",
    variants=tuple(
        Variant((dtype, threads, vectors), f"{type_name(dtype)}, {threads}, {vectors}")
        for dtype in ROW_TYPES
        for threads, vectors in (*SHAPES, BY_ELEMENT)
    ),
)


def row_shape(width: int, dtype: torch.dtype, *, is_vectorised: bool) -> tuple[int, int]:
    """(threads a row, vectors a thread).  Depends on the row alone, so a row's bits do not depend on its batch."""
    if is_vectorised:
        for threads, vectors in SHAPES:
            if width <= threads * vectors * access_elements(dtype):
                return threads, vectors
    return BY_ELEMENT


def launch_config(num_rows: int, threads: int) -> LaunchConfig:
    """Blocks of at least BLOCK_THREADS threads, `threads` of them a row."""
    rows_per_block = max(1, BLOCK_THREADS // threads)
    return LaunchConfig((-(-num_rows // rows_per_block), 1, 1), (threads, rows_per_block, 1))


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, *, residual: torch.Tensor | None = None
) -> None:
    """out = r / sqrt(mean(r^2) + eps) * weight, where r is x, or residual + x, which then replaces residual.

    Float32 arithmetic; the sum is rounded to the rows' type when it is stored, and the norm is of what was stored.

    Args:
        x: (T, D) float32, float16 or bfloat16, CUDA; rows may be apart.
        weight: (D,) float32.
        out: (T, D), dtype of x; may be x.
        residual: (T, D), dtype of x, overlapping neither x nor out.
    Raises:
        InvalidArgumentError: shapes, types or devices do not fit.  Nothing was launched.
    Effects: writes out, and residual.  Ordering: torch's current stream; never waits.
    """
    num_rows, width = check_operands(x, weight, out, residual)
    if num_rows == 0:
        return
    threads, vectors = row_shape(width, x.dtype, is_vectorised=allows_vectors(x, weight, out, residual))
    params = RmsNormParams(
        address(x),
        address(weight),
        address(residual),
        address(out),
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        num_rows,
        width,
        eps,
        1.0 / width if width else 0.0,
    )
    loader.kernel(SPEC, (x.dtype, threads, vectors)).launch(launch_config(num_rows, threads), params, pdl=True)


def check_operands(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None
) -> tuple[int, int]:
    """(rows, width) of operands that fit together."""
    check_rows("x", x, dtype=ROW_TYPES)
    num_rows, width = x.shape
    check_vector("weight", weight, width, torch.float32)
    check_rows("out", out, dtype=x.dtype, rows=num_rows, width=width)
    if residual is not None:
        check_rows("residual", residual, dtype=x.dtype, rows=num_rows, width=width)
    return num_rows, width
