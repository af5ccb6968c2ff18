"""Changed page rows put into the device's page table, from where they were uploaded to."""

from __future__ import annotations

import ctypes

import torch

from edgellm.kernels.cu import loader
from edgellm.kernels.cu.launch import LaunchConfig
from edgellm.kernels.cu.rows import access_elements, allows_vectors
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import address, check_rows, check_shape

THREADS = 128  # kUpdateThreads
STEPS = (4, 1)  # page ids of one access


class TableUpdateParams(ctypes.Structure):
    _fields_ = (
        ("table", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("rows_stride", ctypes.c_int64),
        ("width", ctypes.c_int32),
        ("num_slots", ctypes.c_int32),
    )


SPEC = KernelSpec(
    name="table_update",
    entry="table_update",
    params=TableUpdateParams,
    params_name="TableUpdateParams",
    variants=tuple(Variant((step,), str(step)) for step in STEPS),
)


def launch_config(num_rows: int, width: int, step: int) -> LaunchConfig:
    """A row along x, its blocks along y, `step` a thread."""
    return LaunchConfig((num_rows, -(-width // (step * THREADS)), 1), (THREADS, 1, 1))


def table_update(table: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """table[slots[i]] = rows[i]; slots out of range (-1: padding) are skipped.

    Args:
        table: (num_slots, pages_per_slot) int32, CUDA; rows may be apart.
        slots: (n,) int32, each slot at most once.
        rows: (n, pages_per_slot) int32, not overlapping table.
    Raises:
        InvalidArgumentError: shapes, types or devices do not fit.  Nothing was launched.
    Effects: writes table.  Ordering: torch's current stream; never waits.
    """
    check_rows("table", table, dtype=torch.int32)
    check_shape("slots", slots, (-1,), torch.int32)
    num_rows, width = slots.shape[0], table.shape[1]
    check_rows("rows", rows, dtype=torch.int32, rows=num_rows, width=width)
    if num_rows == 0 or width == 0:
        return
    step = access_elements(torch.int32) if allows_vectors(table, rows) else 1
    params = TableUpdateParams(
        address(table), address(slots), address(rows), table.stride(0), rows.stride(0), width, table.shape[0]
    )
    loader.kernel(SPEC, (step,)).launch(launch_config(num_rows, width, step), params, pdl=True)
