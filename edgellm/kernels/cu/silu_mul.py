"""Gated activation of a feed-forward layer: silu(gate) * up."""

from __future__ import annotations

import ctypes

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu import loader
from edgellm.kernels.cu.launch import LaunchConfig
from edgellm.kernels.cu.rows import MAX_GRID_YZ, ROW_TYPES, access_elements, allows_vectors
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import address, check_rows, describe, type_name

THREADS = 128  # kSiluThreads


class SiluMulParams(ctypes.Structure):
    _fields_ = (
        ("gate_up", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("gate_up_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("num_rows", ctypes.c_int32),
        ("width", ctypes.c_int32),
    )


SPEC = KernelSpec(
    name="silu_mul",
    entry="silu_mul",
    params=SiluMulParams,
    params_name="SiluMulParams",
    variants=tuple(
        Variant((dtype, step), f"{type_name(dtype)}, {step}")
        for dtype in ROW_TYPES
        for step in (access_elements(dtype), 1)
    ),
)


def launch_config(num_rows: int, width: int, step: int) -> LaunchConfig:
    """A thread for `step` columns; rows along y, several a block when there are more than a grid holds."""
    return LaunchConfig((-(-width // (step * THREADS)), min(num_rows, MAX_GRID_YZ), 1), (THREADS, 1, 1))


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """out = silu(first half of gate_up) * second half, in float32 with one rounding.

    Args:
        gate_up: (T, 2F) float32, float16 or bfloat16, CUDA; rows may be apart.
        out: (T, F), dtype of gate_up, not overlapping it.
    Raises:
        InvalidArgumentError: shapes, types or devices do not fit.  Nothing was launched.
    Effects: writes out.  Ordering: torch's current stream; never waits.
    """
    check_rows("gate_up", gate_up, dtype=ROW_TYPES)
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.shape[1] != 2 * width:
        raise InvalidArgumentError(f"gate_up is {describe(gate_up)}; an even width (gate, then up) is needed")
    check_rows("out", out, dtype=gate_up.dtype, rows=num_rows, width=width)
    if num_rows == 0:
        return
    step = access_elements(gate_up.dtype) if allows_vectors(gate_up, out) else 1
    params = SiluMulParams(address(gate_up), address(out), gate_up.stride(0), out.stride(0), num_rows, width)
    loader.kernel(SPEC, (gate_up.dtype, step)).launch(launch_config(num_rows, width, step), params, pdl=True)
