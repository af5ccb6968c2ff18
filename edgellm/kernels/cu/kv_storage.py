"""The KV memory of all layers as the kernels that move tokens and pages see it."""

from __future__ import annotations

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu.tensors import KVLayout, check_device, describe, kv_layout


def storage_layout(storage: torch.Tensor, head_dim: int | None = None) -> KVLayout:
    """The layout of one layer of `storage`, a contiguous stack of every layer's pages.

    Args:
        storage: (layers, num_pages, 2, kv_heads, page_size, head_dim), or for fp8 uint8
            (layers, num_pages, 2, kv_heads, page_size * (head_dim + 4)).
        head_dim: needed for fp8, whose shape does not show it.
    Raises:
        InvalidArgumentError: another shape, or not contiguous.
    """
    check_storage(storage)
    return kv_layout(storage[0], head_dim)


def check_storage(storage: torch.Tensor) -> None:
    """Refuse anything but a contiguous, aligned tensor (layers, num_pages, ...) with something in a page."""
    good = storage.dim() > 2 and storage.numel() > 0 and storage.is_contiguous() and storage.data_ptr() % 16 == 0
    if not good:
        raise InvalidArgumentError(
            f"storage is {describe(storage)}; a contiguous (layers, num_pages, ...) at a multiple of 16 bytes is needed"
        )
    check_device("storage", storage)


def page_bytes(storage: torch.Tensor) -> int:
    """Bytes of one page of one layer."""
    return storage.stride(1) * storage.element_size()


def layer_bytes(storage: torch.Tensor) -> int:
    """Bytes of all pages of one layer."""
    return storage.stride(0) * storage.element_size()
