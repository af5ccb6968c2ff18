"""Reference of the commit of accepted tree rows."""

from __future__ import annotations

import torch

from edgellm.kernels.ref.fp8_pages import split_pages


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
    """Sequence by sequence, token by token: place base_len + index[i] to place base_len + i.

    Args: as the kernel's wrapper; indices increase and places have pages.
    Effects: writes storage.
    """
    parts: tuple[torch.Tensor, ...] = (storage,)
    if storage.dtype == torch.uint8 and head_dim is not None:
        parts = split_pages(storage, storage.shape[-1] // (head_dim + 4), head_dim)
    page_size = parts[0].shape[4]
    for sequence, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        length, page_ids = int(base_len[sequence]), page_table[slot].tolist()
        for target, source in enumerate(index[sequence, : int(count[sequence])].tolist()):
            new, old = length + target, length + source
            for part in parts:
                row = part[:, page_ids[old // page_size], :, :, old % page_size].clone()
                part[:, page_ids[new // page_size], :, :, new % page_size] = row
