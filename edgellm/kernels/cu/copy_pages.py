"""Copies of KV pages in all layers: whole pages, or the first places of a page."""

from __future__ import annotations

import ctypes

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu import loader
from edgellm.kernels.cu.kv_storage import check_storage, layer_bytes, page_bytes, storage_layout
from edgellm.kernels.cu.launch import LaunchConfig
from edgellm.kernels.cu.rows import ACCESS_BYTES, MAX_GRID_YZ
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import address, check_vector

THREADS = 256  # kCopyThreads
BLOCK_BYTES = THREADS * 4 * ACCESS_BYTES  # kCopyThreads * kCopyVectors vectors
WORD_BYTES = 4


class CopyPagesParams(ctypes.Structure):
    _fields_ = (
        ("storage", ctypes.c_void_p),
        ("source", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("layer_bytes", ctypes.c_int64),
        ("page_bytes", ctypes.c_int32),
        ("head_bytes", ctypes.c_int32),
        ("place_bytes", ctypes.c_int32),
        ("page_size", ctypes.c_int32),
        ("num_pages", ctypes.c_int32),
    )


SPEC = KernelSpec(
    name="copy_pages",
    entry="copy_pages",
    params=CopyPagesParams,
    params_name="CopyPagesParams",
    variants=(Variant((THREADS,), str(THREADS)),),
)


def launch_config(num_pairs: int, num_layers: int, page_size_bytes: int) -> LaunchConfig:
    """A pair along x, its layers along y, chunks of the page along z."""
    return LaunchConfig((num_pairs, num_layers, -(-page_size_bytes // BLOCK_BYTES)), (THREADS, 1, 1))


def copy_pages(
    storage: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    *,
    places: torch.Tensor | None = None,
    head_dim: int | None = None,
) -> None:
    """Copy page source[i] to page target[i] in all layers; with `places`, only its first places[i] tokens.

    Pages are copied side by side, so no target may be the source of another pair, nor named twice: the lists live
    on the device, and it is for the host that made them to check (`KVCache.copy_pages` does).
    A pair with a page out of range (-1: padding) copies nothing.

    Args:
        storage: (layers, num_pages, ...) contiguous, CUDA; with `places`, as `KVCache` lays it out.
        source, target: (n,) int32.
        places: (n,) int32 tokens of each pair; page_size or more is the whole page.
        head_dim: with `places` of fp8 pages, whose shape does not show it.
    Raises:
        InvalidArgumentError: shapes, types or devices do not fit.  Nothing was launched.
    Effects: writes storage.  Ordering: torch's current stream; never waits.
    """
    check_storage(storage)
    check_vector("source", source, source.numel(), torch.int32)
    check_vector("target", target, source.numel(), torch.int32)
    head_bytes, place_bytes, page_size = _page_parts(storage, places, head_dim, source.numel())
    if source.numel() == 0:
        return
    params = CopyPagesParams(
        address(storage),
        address(source),
        address(target),
        address(places),
        layer_bytes(storage),
        page_bytes(storage),
        head_bytes,
        place_bytes,
        page_size,
        storage.shape[1],
    )
    config = launch_config(source.numel(), storage.shape[0], page_bytes(storage))
    loader.kernel(SPEC, (THREADS,)).launch(config, params, pdl=True)


def _page_parts(
    storage: torch.Tensor, places: torch.Tensor | None, head_dim: int | None, num_pairs: int
) -> tuple[int, int, int]:
    """(bytes of a head, bytes of a token in it, page size); one place without structure when pages are copied whole."""
    num_bytes = page_bytes(storage)
    if num_bytes % ACCESS_BYTES or storage.shape[0] > MAX_GRID_YZ or num_bytes > MAX_GRID_YZ * BLOCK_BYTES:
        raise InvalidArgumentError(
            f"storage has {storage.shape[0]} layers of pages of {num_bytes} bytes; at most {MAX_GRID_YZ} layers and "
            f"{MAX_GRID_YZ * BLOCK_BYTES} bytes, a multiple of {ACCESS_BYTES}, are supported"
        )
    if places is None:
        return num_bytes, num_bytes, 1
    check_vector("places", places, num_pairs, torch.int32)
    layout = storage_layout(storage, head_dim)
    place_bytes = layout.head_dim * layout.dtype.itemsize
    if place_bytes % WORD_BYTES:
        raise InvalidArgumentError(f"a token's head takes {place_bytes} bytes; a multiple of {WORD_BYTES} is needed")
    return layout.head_bytes, place_bytes, layout.page_size
