"""Reference of page copies."""

from __future__ import annotations

import torch

from edgellm.kernels.ref.fp8_pages import split_pages


def copy_pages(
    storage: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    *,
    places: torch.Tensor | None = None,
    head_dim: int | None = None,
) -> None:
    """Page source[i] to target[i] in all layers, or only its first places[i] tokens; pages out of range are skipped.

    Args: as the kernel's wrapper.
    Effects: writes storage.
    """
    parts = (storage,) if places is None else _parts(storage, head_dim)
    for pair, (old, new) in enumerate(zip(source.tolist(), target.tolist(), strict=True)):
        if not (0 <= old < storage.shape[1] and 0 <= new < storage.shape[1]):
            continue
        for part in parts:
            if places is None:
                part[:, new] = part[:, old]
            else:
                count = max(int(places[pair]), 0)
                part[:, new, :, :, :count] = part[:, old, :, :, :count]


def _parts(storage: torch.Tensor, head_dim: int | None) -> tuple[torch.Tensor, ...]:
    """Views (layers, pages, 2, kv_heads, page_size, ...) of what a page holds."""
    if storage.dtype != torch.uint8 or head_dim is None:
        return (storage,)
    return split_pages(storage, storage.shape[-1] // (head_dim + 4), head_dim)
