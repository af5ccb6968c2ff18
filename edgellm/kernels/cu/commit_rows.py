"""Commit of accepted tree rows: their K and V move together, in all layers at once."""

from __future__ import annotations

import ctypes

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu import loader
from edgellm.kernels.cu.kv_storage import layer_bytes, storage_layout
from edgellm.kernels.cu.launch import LaunchConfig
from edgellm.kernels.cu.rows import ACCESS_BYTES, MAX_GRID_YZ
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import SCALE_BYTES, KVLayout, address, check_shape, check_vector

THREADS = 128  # kCommitThreads
WORD_TYPES = {16: "uint4", 4: "edgellm::u32"}


class CommitRowsParams(ctypes.Structure):
    _fields_ = (
        ("storage", ctypes.c_void_p),
        ("page_table", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("base_len", ctypes.c_void_p),
        ("index", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("layer_bytes", ctypes.c_int64),
        ("page_bytes", ctypes.c_int64),
        ("head_bytes", ctypes.c_int32),
        ("place_bytes", ctypes.c_int32),
        ("scale_bytes", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("page_size", ctypes.c_int32),
        ("num_pages", ctypes.c_int32),
        ("num_slots", ctypes.c_int32),
        ("pages_per_slot", ctypes.c_int32),
        ("max_count", ctypes.c_int32),
    )


SPEC = KernelSpec(
    name="commit_rows",
    entry="commit_rows",
    params=CommitRowsParams,
    params_name="CommitRowsParams",
    variants=tuple(Variant((size,), name) for size, name in WORD_TYPES.items()),
)


def launch_config(num_sequences: int, num_layers: int, words: int) -> LaunchConfig:
    """A sequence along x, layers along y, the words of a token's K and V in all heads along z."""
    return LaunchConfig((num_sequences, num_layers, -(-words // THREADS)), (THREADS, 1, 1))


def commit_rows(
    storage: torch.Tensor,
    page_table: torch.Tensor,
    slots: torch.Tensor,
    base_len: torch.Tensor,
    index: torch.Tensor,
    count: torch.Tensor,
    *,
    head_dim: int | None = None,
) -> None:
    """Move K and V of place base_len[n] + index[n, i] to place base_len[n] + i, for i in [0, count[n]).

    Visited tree rows stand in order, so index[n, i] >= i and increases, and moving in place is safe.  An index that
    does not increase, and a place without a page, end the moves of their sequence.

    Args:
        storage: every layer's pages, as `KVCache` lays them out, CUDA.
        page_table: (num_slots, pages_per_slot) int32.
        slots: (N,) int32, -1 padding.
        base_len: (N,) int32 tokens before the tree.
        index: (N, S + 1) int32 tree rows accepted.
        count: (N,) int32 how many of them.
        head_dim: for fp8 pages, whose shape does not show it.
    Raises:
        InvalidArgumentError: shapes, types or devices do not fit.  Nothing was launched.
    Effects: writes storage.  Ordering: torch's current stream; never waits.
    """
    layout = storage_layout(storage, head_dim)
    check_shape("page_table", page_table, (-1, -1), torch.int32)
    num_sequences = slots.numel()
    for name, vector in (("slots", slots), ("base_len", base_len), ("count", count)):
        check_vector(name, vector, num_sequences, torch.int32)
    check_shape("index", index, (num_sequences, -1), torch.int32)
    word_bytes = word_size(layout, storage.shape[0])
    if index.numel() == 0:
        return
    place_bytes, scale_bytes = layout.head_dim * layout.dtype.itemsize, SCALE_BYTES if layout.is_fp8 else 0
    params = CommitRowsParams(
        address(storage),
        address(page_table),
        address(slots),
        address(base_len),
        address(index),
        address(count),
        layer_bytes(storage),
        layout.page_bytes,
        layout.head_bytes,
        place_bytes,
        scale_bytes,
        2 * layout.kv_heads,
        layout.page_size,
        storage.shape[1],
        page_table.shape[0],
        page_table.shape[1],
        index.shape[1],
    )
    words = (place_bytes // word_bytes + scale_bytes // SCALE_BYTES) * 2 * layout.kv_heads
    config = launch_config(num_sequences, storage.shape[0], words)
    loader.kernel(SPEC, (word_bytes,)).launch(config, params, pdl=True)


def word_size(layout: KVLayout, num_layers: int) -> int:
    """Bytes that a thread moves at once.

    Raises:
        InvalidArgumentError: a token's head is no multiple of 4 bytes, or there are too many layers.
    """
    place_bytes = layout.head_dim * layout.dtype.itemsize
    if place_bytes % 4 or num_layers > MAX_GRID_YZ:
        raise InvalidArgumentError(
            f"{num_layers} layers with heads of {place_bytes} bytes a token; at most {MAX_GRID_YZ} layers and a "
            "multiple of 4 bytes are supported"
        )
    return 4 if place_bytes % ACCESS_BYTES or layout.head_bytes % ACCESS_BYTES else ACCESS_BYTES
