"""KV pages in fp8-e4m3: one scale for each token of each head, kept in the page behind the head's bytes.

A head block is `page_size * head_dim` e4m3 bytes, then `page_size` float32 scales; value = e4m3 * scale.  A token's
bytes depend on that token alone, so chunking, reuse and copies never change what is stored.
"""

from __future__ import annotations

import torch

E4M3_MAX = 448.0
E4M3_NAN = 0x7F
SCALE_BYTES = 4
# Rows whose largest value is below this are stored as zeros with scale 1: their scale would be a denormal number.
SMALLEST_AMAX = 2.0**-100


def head_block_bytes(page_size: int, head_dim: int) -> int:
    """Bytes of one head in one page: values, then scales."""
    return page_size * (head_dim + SCALE_BYTES)


def quantise_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row to e4m3 with the scale amax / 448 (1 for a row of zeros), round to nearest even.

    Args:
        rows: (..., D) float; NaN stays NaN and does not enter the scale.
    Returns:
        (..., D) uint8 bits of e4m3, (...) float32 scales.
    """
    wide = rows.float()
    amax = torch.where(wide.isnan(), 0.0, wide.abs()).amax(-1)
    scales = torch.where(amax < SMALLEST_AMAX, 1.0, amax / E4M3_MAX)
    scaled = (wide / scales[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scales


def dequantise_rows(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """(..., D) uint8 bits of e4m3 and (...) float32 scales to (..., D) float32."""
    return values.view(torch.float8_e4m3fn).float() * scales[..., None]


def split_pages(pages: torch.Tensor, page_size: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the values and of the scales of fp8 pages; writing to them writes to the pages.

    Args:
        pages: (..., head_block_bytes) uint8, last axis contiguous.
    Returns:
        (..., page_size, head_dim) uint8 bits of e4m3, (..., page_size) float32 scales.
    """
    num_values = page_size * head_dim
    values = pages[..., :num_values].view(*pages.shape[:-1], page_size, head_dim)
    return values, pages[..., num_values:].view(torch.float32)


def quantise_pages(pages: torch.Tensor) -> torch.Tensor:
    """(..., page_size, head_dim) float pages to (..., head_block_bytes) uint8 ones; a new tensor."""
    page_size, head_dim = pages.shape[-2:]
    shape = (*pages.shape[:-2], head_block_bytes(page_size, head_dim))
    quantised = torch.empty(shape, dtype=torch.uint8, device=pages.device)
    values, scales = split_pages(quantised, page_size, head_dim)
    new_values, new_scales = quantise_rows(pages)
    values.copy_(new_values)
    scales.copy_(new_scales)
    return quantised


def dequantise_pages(pages: torch.Tensor, page_size: int, head_dim: int) -> torch.Tensor:
    """What fp8 pages hold.

    Args:
        pages: (num_pages, 2, kv_heads, head_block_bytes) uint8.
    Returns:
        (num_pages, 2, kv_heads, page_size, head_dim) float32; a new tensor.
    """
    return dequantise_rows(*split_pages(pages, page_size, head_dim))
