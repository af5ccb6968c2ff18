"""Gated activation of a feed-forward layer: gelu(gate) * up (Hendrycks and Gimpel, Gaussian error linear units)."""

from __future__ import annotations

import ctypes

import torch

from edgellm.kernels.cu import loader
from edgellm.kernels.cu.launch import LaunchConfig
from edgellm.kernels.cu.rows import MAX_GRID_YZ, ROW_TYPES, access_elements, allows_vectors
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import address, check_rows, type_name

THREADS = 128  # kGeluThreads


class GeluMulParams(ctypes.Structure):
    _fields_ = (
        ("gate", ctypes.c_void_p),
        ("up", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("gate_stride", ctypes.c_int64),
        ("up_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("num_rows", ctypes.c_int32),
        ("width", ctypes.c_int32),
    )


SPEC = KernelSpec(
    name="gelu_mul",
    entry="gelu_mul",
    params=GeluMulParams,
    params_name="GeluMulParams",
    variants=tuple(
        Variant((dtype, step), f"{type_name(dtype)}, {step}")
        for dtype in ROW_TYPES
        for step in (access_elements(dtype), 1)
    ),
)


def launch_config(num_rows: int, width: int, step: int) -> LaunchConfig:
    """A thread for `step` columns; rows along y, several a block when there are more than a grid holds."""
    return LaunchConfig((-(-width // (step * THREADS)), min(num_rows, MAX_GRID_YZ), 1), (THREADS, 1, 1))


def gelu_mul(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor) -> None:
    """out = gelu(gate) * up with the tanh form of gelu, in float32 with one rounding.

    Args:
        gate, up: (T, F) float32, float16 or bfloat16, CUDA; rows may be apart: columns of a wider matrix do.
        out: (T, F), dtype of gate; may be either of them.
    Raises:
        InvalidArgumentError: shapes, types or devices do not fit.  Nothing was launched.
    Effects: writes out.  Ordering: torch's current stream; never waits.
    """
    check_rows("gate", gate, dtype=ROW_TYPES)
    num_rows, width = gate.shape
    check_rows("up", up, dtype=gate.dtype, rows=num_rows, width=width)
    check_rows("out", out, dtype=gate.dtype, rows=num_rows, width=width)
    if num_rows == 0 or width == 0:
        return
    step = access_elements(gate.dtype) if allows_vectors(gate, up, out) else 1
    params = GeluMulParams(
        address(gate), address(up), address(out), gate.stride(0), up.stride(0), out.stride(0), num_rows, width
    )
    loader.kernel(SPEC, (gate.dtype, step)).launch(launch_config(num_rows, width, step), params, pdl=True)
