"""The page rows of a step's sequences, out of the table of all slots."""

from __future__ import annotations

import ctypes

import torch

from edgellm.kernels.cu import loader
from edgellm.kernels.cu.launch import LaunchConfig
from edgellm.kernels.cu.rows import access_elements, allows_vectors
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import address, check_rows, check_shape

THREADS = 128  # kGatherThreads
STEPS = (4, 1)  # page ids of one access


class PageTableGatherParams(ctypes.Structure):
    _fields_ = (
        ("table", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("width", ctypes.c_int32),
        ("num_slots", ctypes.c_int32),
    )


SPEC = KernelSpec(
    name="page_table_gather",
    entry="page_table_gather",
    params=PageTableGatherParams,
    params_name="PageTableGatherParams",
    variants=tuple(Variant((step,), str(step)) for step in STEPS),
)


def launch_config(num_rows: int, width: int, step: int) -> LaunchConfig:
    """A row along x, its blocks along y, `step` a thread."""
    return LaunchConfig((num_rows, -(-width // (step * THREADS)), 1), (THREADS, 1, 1))


def page_table_gather(table: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
    """out[n] = table[slots[n]]; -1 throughout where the slot is out of range (-1: padding).

    Args:
        table: (num_slots, pages_per_slot) int32, CUDA; rows may be apart.
        slots: (N,) int32.
        out: (N, pages_per_slot) int32, not overlapping table.
    Raises:
        InvalidArgumentError: shapes, types or devices do not fit.  Nothing was launched.
    Effects: writes out.  Ordering: torch's current stream; never waits.
    """
    check_rows("table", table, dtype=torch.int32)
    check_shape("slots", slots, (-1,), torch.int32)
    num_rows, width = slots.shape[0], table.shape[1]
    check_rows("out", out, dtype=torch.int32, rows=num_rows, width=width)
    if num_rows == 0 or width == 0:
        return
    step = access_elements(torch.int32) if allows_vectors(table, out) else 1
    params = PageTableGatherParams(
        address(table), address(slots), address(out), table.stride(0), out.stride(0), width, table.shape[0]
    )
    loader.kernel(SPEC, (step,)).launch(launch_config(num_rows, width, step), params, pdl=True)
