"""Random pages, page tables and ragged tokens for the tests of kernels that write or move K and V."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from edgellm.kernels.ref.fp8_pages import E4M3_NAN, quantise_rows, split_pages

FP8 = torch.float8_e4m3fn
NUM_SLOTS = 6
PAGES_PER_SLOT = 4


@dataclass(slots=True)
class PagedCase:
    """Poisoned storage (layers, pages, 2, kv_heads, ...), a table of permuted pages, and tokens of some sequences."""

    storage: torch.Tensor
    page_table: torch.Tensor
    slots: torch.Tensor
    token_seq: torch.Tensor
    positions: torch.Tensor
    page_size: int
    head_dim: int

    def to(self, device: str) -> PagedCase:
        moved = (
            tensor.clone().to(device)
            for tensor in (self.storage, self.page_table, self.slots, self.token_seq, self.positions)
        )
        return PagedCase(*moved, page_size=self.page_size, head_dim=self.head_dim)


def poisoned_storage(
    layers: int, pages: int, kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """NaN throughout, scales included."""
    if dtype != FP8:
        return torch.full((layers, pages, 2, kv_heads, page_size, head_dim), float("nan"), dtype=dtype)
    storage = torch.full((layers, pages, 2, kv_heads, page_size * (head_dim + 4)), E4M3_NAN, dtype=torch.uint8)
    split_pages(storage, page_size, head_dim)[1].fill_(float("nan"))
    return storage


def random_storage(
    layers: int, pages: int, kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """Different normal numbers at every place."""
    plain = torch.randn(layers, pages, 2, kv_heads, page_size, head_dim)
    if dtype != FP8:
        return plain.to(dtype)
    storage = torch.empty(layers, pages, 2, kv_heads, page_size * (head_dim + 4), dtype=torch.uint8)
    values, scales = split_pages(storage, page_size, head_dim)
    new_values, new_scales = quantise_rows(plain)
    values.copy_(new_values)
    scales.copy_(new_scales)
    return storage


def page_table(page_size: int, lengths: list[int], slots: list[int]) -> tuple[torch.Tensor, int]:
    """(NUM_SLOTS, PAGES_PER_SLOT) int32 of distinct pages in random order, -1 where none is needed; how many pages."""
    num_pages = NUM_SLOTS * PAGES_PER_SLOT
    free = torch.randperm(num_pages).tolist()
    table = torch.full((NUM_SLOTS, PAGES_PER_SLOT), -1, dtype=torch.int32)
    for slot, length in zip(slots, lengths, strict=True):
        for block in range(-(-length // page_size)):
            table[slot, block] = free.pop()
    return table, num_pages


def make_case(*, kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype, layers: int = 1) -> PagedCase:
    """Sequences that end at, before and after a page's border, one padding sequence, and padding tokens."""
    past, new = [0, page_size - 1, page_size, 2 * page_size + 3], [page_size + 1, 1, 2, 5]
    slots = [4, 0, 2, 5]
    table, num_pages = page_table(page_size, [p + n for p, n in zip(past, new, strict=True)], slots)
    positions = [torch.arange(p, p + n) for p, n in zip(past, new, strict=True)]
    token_seq = [torch.full((n,), seq) for seq, n in enumerate(new)]
    padding = torch.tensor([-1, 4, -1])  # sequence 4 has slot -1
    return PagedCase(
        storage=poisoned_storage(layers, num_pages, kv_heads, page_size, head_dim, dtype),
        page_table=table,
        slots=torch.tensor([*slots, -1], dtype=torch.int32),
        token_seq=torch.cat((*token_seq, padding)).int(),
        positions=torch.cat((*positions, torch.zeros(3))).int(),
        page_size=page_size,
        head_dim=head_dim,
    )
