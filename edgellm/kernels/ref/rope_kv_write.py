"""Reference of head norms, rotation and the write of K and V into pages."""

from __future__ import annotations

import torch

from edgellm.kernels.ref.fp8_pages import quantise_rows, split_pages


def rope_kv_write(
    qkv: torch.Tensor,
    angles: torch.Tensor | None,
    pages: torch.Tensor | None,
    page_table: torch.Tensor | None,
    slots: torch.Tensor | None,
    token_seq: torch.Tensor | None,
    positions: torch.Tensor | None,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int | None = None,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    value_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Token by token: Q in place, K and V to place positions[t] of the page row of slots[token_seq[t]].

    Args: as the kernel's wrapper; `rotary_dim` shows in the angles already.
    Effects: writes qkv's Q and pages.
    """
    for token in range(qkv.shape[0]):
        slot = 0
        if token_seq is not None:
            sequence = int(token_seq[token])
            slot = -1 if sequence < 0 else 0 if slots is None else int(slots[sequence])
        if slot < 0:
            continue
        heads = qkv[token, : qkv.shape[1] // head_dim * head_dim].view(-1, head_dim)
        angle = None if angles is None else angles[:, token]
        query = heads[:num_heads]
        query.copy_(_norm_and_rotate(query, query_norm, angle, eps))
        if pages is None or page_table is None or positions is None:
            continue
        key = _norm_and_rotate(heads[num_heads : num_heads + num_kv_heads], key_norm, angle, eps)
        value = heads[num_heads + num_kv_heads : num_heads + 2 * num_kv_heads]
        value = _norm_and_rotate(value, value_norm, None, eps)
        _store(pages, torch.stack((key, value)), page_table[slot], int(positions[token]))


def _norm_and_rotate(
    heads: torch.Tensor, norm: torch.Tensor | None, angle: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """(heads, head_dim) normed by weights `norm`, leading pairs rotated by `angle` (2, pairs), rounded once."""
    wide = heads.float()
    if norm is not None:
        wide = wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * norm
    if angle is not None:
        pairs = angle.shape[1]
        low, high, rest = torch.split(wide, [pairs, pairs, wide.shape[-1] - 2 * pairs], dim=-1)
        wide = torch.cat((low * angle[0] - high * angle[1], high * angle[0] + low * angle[1], rest), dim=-1)
    return wide.to(heads.dtype)


def _store(pages: torch.Tensor, rows: torch.Tensor, page_ids: torch.Tensor, position: int) -> None:
    """K and V (2, kv_heads, head_dim) at a position of a sequence; dropped where it has no page."""
    head_dim = rows.shape[-1]
    page_size = pages.shape[3] // (head_dim + 4) if pages.dtype == torch.uint8 else pages.shape[3]
    if not 0 <= position < page_size * page_ids.shape[0]:
        return
    page, place = int(page_ids[position // page_size]), position % page_size
    if not 0 <= page < pages.shape[0]:
        return
    if pages.dtype != torch.uint8:
        pages[page, :, :, place] = rows
        return
    values, scales = split_pages(pages, page_size, head_dim)
    values[page, :, :, place], scales[page, :, :, place] = quantise_rows(rows)
