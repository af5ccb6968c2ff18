"""The latest rows of each resident slot, kept in a ring by place."""

from __future__ import annotations

import ctypes

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu import loader
from edgellm.kernels.cu.launch import LaunchConfig
from edgellm.kernels.cu.rows import MAX_GRID_YZ, ROW_TYPES, access_elements, allows_vectors
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import TYPE_NAMES, address, check_device, check_rows, check_shape, describe

THREADS = 128  # kKeepThreads


class KeepRowsParams(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("token_seq", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("ring", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("width", ctypes.c_int32),
        ("room", ctypes.c_int32),
        ("num_sequences", ctypes.c_int32),
        ("num_slots", ctypes.c_int32),
    )


SPEC = KernelSpec(
    name="keep_rows",
    entry="keep_rows",
    params=KeepRowsParams,
    params_name="KeepRowsParams",
    variants=tuple(
        Variant((dtype, step), f"{TYPE_NAMES[dtype]}, {step}")
        for dtype in ROW_TYPES
        for step in (access_elements(dtype), 1)
    ),
)


def launch_config(num_rows: int, width: int, step: int) -> LaunchConfig:
    """A row along x, columns along y, `step` a thread."""
    return LaunchConfig((num_rows, -(-width // (step * THREADS)), 1), (THREADS, 1, 1))


def keep_rows(
    rows: torch.Tensor,
    places: torch.Tensor,
    token_seq: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    ring: torch.Tensor,
) -> None:
    """ring[slots[n], p % room] = rows[t] for rows t of sequences n at places p >= lengths[n] - room.

    Args:
        rows: (T, width) float32, float16 or bfloat16, CUDA.
        places: (T,) int32, of each row in its sequence; no two of a sequence the same.
        token_seq: (T,) int32, sequence n of each row; -1 (padding) is skipped.
        slots: (N,) int32, no two equal but -1, whose rows are skipped.
        lengths: (N,) int32, places behind the last one of the step.
        ring: (num_slots, room, width), dtype of rows, contiguous.
    Raises:
        InvalidArgumentError: shapes, types or devices do not fit.  Nothing was launched.
    Effects: writes ring.  Ordering: torch's current stream; never waits.
    """
    _check(rows, places, token_seq, slots, lengths, ring)
    if not rows.numel() or not slots.shape[0] or not ring.numel():
        return
    width = rows.shape[1]
    step = access_elements(rows.dtype) if allows_vectors(rows, ring.view(-1, width)) else 1
    config = launch_config(rows.shape[0], width, step)
    if config.grid[1] > MAX_GRID_YZ:
        raise InvalidArgumentError(f"rows have {width} elements; at most {MAX_GRID_YZ * THREADS * step} fit")
    params = KeepRowsParams(
        *map(address, (rows, places, token_seq, slots, lengths, ring)),
        rows.stride(0),
        width,
        ring.shape[1],
        slots.shape[0],
        ring.shape[0],
    )
    loader.kernel(SPEC, (rows.dtype, step)).launch(config, params, pdl=True)


def _check(
    rows: torch.Tensor,
    places: torch.Tensor,
    token_seq: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    ring: torch.Tensor,
) -> None:
    check_rows("rows", rows, dtype=ROW_TYPES)
    check_shape("places", places, (rows.shape[0],), torch.int32)
    check_shape("token_seq", token_seq, (rows.shape[0],), torch.int32)
    check_shape("slots", slots, (-1,), torch.int32)
    check_shape("lengths", lengths, (slots.shape[0],), torch.int32)
    if ring.dim() != 3 or ring.shape[2] != rows.shape[1] or ring.dtype != rows.dtype or not ring.is_contiguous():
        raise InvalidArgumentError(
            f"ring is {describe(ring)}; a contiguous (num_slots, room, {rows.shape[1]}) of {rows.dtype} is needed"
        )
    check_device("ring", ring)
