"""Reference of paged attention: gather, then the textbook formula in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def paged_attention(
    pages: torch.Tensor,
    query: torch.Tensor,
    page_rows: npt.NDArray[np.int32],
    slots: npt.NDArray[np.int32],
    lengths: npt.NDArray[np.int32],
    scale: float,
    window: int = 0,
    tree_mask: npt.NDArray[np.int32] | None = None,
    tree_start: npt.NDArray[np.int32] | None = None,
) -> torch.Tensor:
    """Each query row over the first `lengths[r]` tokens of its slot; with a window, over the last `window` of those.

    Args:
        pages: (num_pages, 2, kv_heads, page_size, head_dim).
        query: (R, num_heads, head_dim).
        tree_mask, tree_start: see the kernel's wrapper; a row's first `tree_start` tokens, then those of its bits.
    Returns:
        (R, num_heads, head_dim), dtype of query.  Pure.
    """
    group = query.shape[1] // pages.shape[2]
    rows = []
    for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        places = torch.arange(length)
        if tree_mask is not None and tree_start is not None and tree_mask[row].any():
            words, start = tree_mask[row].tolist(), int(tree_start[row])
            bits = [bit for bit in range(32 * len(words)) if words[bit // 32] >> (bit % 32) & 1]
            places = torch.tensor([*range(start), *(start + bit for bit in bits)])
        places = places[max(len(places) - window, 0) if window else 0 :]
        seen = gather_kv(pages, page_rows[slot], int(places[-1]) + 1)[:, :, places]
        key, value = seen.float().repeat_interleave(group, dim=1)
        scores = (key @ query[row].float()[:, :, None]).squeeze(-1) * scale
        rows.append((scores.softmax(-1)[:, None, :] @ value).squeeze(1))
    return torch.stack(rows).to(query.dtype)


def gather_kv(pages: torch.Tensor, page_ids: npt.NDArray[np.int32], length: int) -> torch.Tensor:
    """(2, kv_heads, length, head_dim) of the first `length` tokens."""
    page_size = pages.shape[3]
    used = torch.as_tensor(page_ids[: -(-length // page_size)], dtype=torch.long)
    return pages[used].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]


def write_kv(pages: torch.Tensor, key: torch.Tensor, value: torch.Tensor, offsets: npt.NDArray[np.int64]) -> None:
    """Store (T, kv_heads, head_dim) rows at page_id * page_size + place; negative offsets are skipped."""
    page_size = pages.shape[3]
    for token, offset in enumerate(offsets.tolist()):
        if offset >= 0:
            pages[offset // page_size, 0, :, offset % page_size] = key[token].to(pages.dtype)
            pages[offset // page_size, 1, :, offset % page_size] = value[token].to(pages.dtype)
