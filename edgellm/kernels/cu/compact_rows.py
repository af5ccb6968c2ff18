"""Compaction of a batch: the rows of what leaves are dropped, the others close up, in place."""

from __future__ import annotations

import ctypes

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu import loader
from edgellm.kernels.cu.launch import LaunchConfig
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import address, check_device, check_shape, describe

THREADS = 128  # kCompactThreads
WORD_TYPES = {16: "uint4", 4: "edgellm::u32", 1: "edgellm::u8"}


class CompactRowsParams(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("mapping", ctypes.c_void_p),
        ("row_bytes", ctypes.c_int64),
        ("num_rows", ctypes.c_int32),
    )


SPEC = KernelSpec(
    name="compact_rows",
    entry="compact_rows",
    params=CompactRowsParams,
    params_name="CompactRowsParams",
    variants=tuple(Variant((size,), name) for size, name in WORD_TYPES.items()),
)


def launch_config(row_bytes: int, word_bytes: int) -> LaunchConfig:
    """A thread for a word of every row."""
    return LaunchConfig((-(-row_bytes // (word_bytes * THREADS)), 1, 1), (THREADS, 1, 1))


def compact_rows(tensor: torch.Tensor, mapping: torch.Tensor, *, rows: int = 1) -> None:
    """Move entry i of the batch to mapping[i], in place; -1 evicts it.

    Targets increase, so mapping[i] <= i; an entry whose target does not is skipped.  What stands beyond the last
    target keeps its old content.

    Args:
        tensor: (n * rows, ...) of any type, contiguous, CUDA; an entry is `rows` consecutive rows.
        mapping: (n,) int32.
    Raises:
        InvalidArgumentError: shapes, types or devices do not fit.  Nothing was launched.
    Effects: writes tensor.  Ordering: torch's current stream; never waits.
    """
    check_shape("mapping", mapping, (-1,), torch.int32)
    num_entries = mapping.shape[0]
    if rows < 1 or tensor.dim() < 1 or tensor.shape[0] != num_entries * rows or not tensor.is_contiguous():
        raise InvalidArgumentError(
            f"tensor is {describe(tensor)}; {num_entries} entries of {rows} rows (at least 1), contiguous, are needed"
        )
    check_device("tensor", tensor)
    if tensor.numel() == 0:
        return
    row_bytes = tensor.numel() // num_entries * tensor.element_size()
    word_bytes = word_size(row_bytes, tensor.data_ptr())
    params = CompactRowsParams(address(tensor), address(mapping), row_bytes, num_entries)
    loader.kernel(SPEC, (word_bytes,)).launch(launch_config(row_bytes, word_bytes), params, pdl=True)


def word_size(row_bytes: int, data_address: int) -> int:
    """The largest access that divides a row and its address."""
    return next(size for size in WORD_TYPES if row_bytes % size == 0 and data_address % size == 0)
