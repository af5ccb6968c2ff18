"""Step sizes of a Mamba-2 scan, from what the projection gives each head."""

from __future__ import annotations

import ctypes

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu import loader
from edgellm.kernels.cu.launch import LaunchConfig
from edgellm.kernels.cu.rows import ROW_TYPES
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import address, check_rows, check_vector, type_name

THREADS = 128  # kStepSizesThreads


class StepSizesParams(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("num_rows", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("least", ctypes.c_float),
        ("greatest", ctypes.c_float),
    )


SPEC = KernelSpec(
    name="step_sizes",
    entry="step_sizes",
    params=StepSizesParams,
    params_name="StepSizesParams",
    variants=tuple(Variant((dtype,), type_name(dtype)) for dtype in ROW_TYPES),
)


def launch_config(num_rows: int, width: int) -> LaunchConfig:
    """A thread an element."""
    return LaunchConfig((-(-num_rows * width // THREADS), 1, 1), (THREADS, 1, 1))


def step_sizes(
    x: torch.Tensor, bias: torch.Tensor, out: torch.Tensor, *, least: float = 0.0, greatest: float = float("inf")
) -> None:
    """out = softplus(x + bias), at least `least` and at most `greatest`, in float32.

    Args:
        x: (T, H) float32, float16 or bfloat16, CUDA; rows may be apart.
        bias: (H,) float32.
        out: (T, H) float32; rows may be apart.
    Raises:
        InvalidArgumentError: shapes, types or devices do not fit, or the limits are in the wrong order.  Nothing was
            launched.
    Effects: writes out.  Ordering: torch's current stream; never waits.
    """
    check_rows("x", x, dtype=ROW_TYPES)
    num_rows, width = x.shape
    check_vector("bias", bias, width, torch.float32)
    check_rows("out", out, dtype=torch.float32, rows=num_rows, width=width)
    if not least <= greatest:
        raise InvalidArgumentError(f"limits of the step size are {least} and {greatest}; least <= greatest is needed")
    if num_rows == 0 or width == 0:
        return
    params = StepSizesParams(
        address(x), address(bias), address(out), x.stride(0), out.stride(0), num_rows, width, least, greatest
    )
    loader.kernel(SPEC, (x.dtype,)).launch(launch_config(num_rows, width), params, pdl=True)
