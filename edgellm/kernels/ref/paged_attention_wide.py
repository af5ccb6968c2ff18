"""Reference of attention for heads of 512 columns: the same formula as `paged_prefill`, for any head size."""

from __future__ import annotations

import torch

from edgellm.kernels.ref.paged_prefill import paged_prefill


def paged_attention_wide(
    query: torch.Tensor,
    pages: torch.Tensor,
    page_table: torch.Tensor,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    past_len: torch.Tensor,
    out: torch.Tensor,
    *,
    num_heads: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
) -> None:
    """See the kernel's wrapper for what the arguments are."""
    paged_prefill(
        query,
        pages,
        page_table,
        slots,
        query_start,
        past_len,
        out,
        num_heads=num_heads,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        tree_mask=tree_mask,
    )
