"""Batches for the attention kernels over ragged rows: random lengths, shuffled pages, poison where nobody may read."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from edgellm.kernels.ref.fp8_pages import quantise_pages, split_pages
from edgellm.kernels.ref.paged_prefill import seen_keys

UNTOUCHED = 7.0  # what `out` holds before
NAN_BYTE = 0xFF
# Elementwise, relative to the largest magnitude of a result, and of the norm of all differences.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
NORM_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 5e-3}


@dataclass(frozen=True, slots=True)
class Case:
    """What a batch is made of.  sequences: (past, new tokens); a negative past marks a padding sequence."""

    sequences: tuple[tuple[int, int], ...]
    head_dim: int = 64
    kv_heads: int = 2
    group: int = 4
    page_size: int = 16
    window: int = 0
    soft_cap: float = 0.0
    has_sinks: bool = False
    is_tree: bool = False
    is_fp8: bool = False
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0

    @property
    def num_heads(self) -> int:
        return self.kv_heads * self.group


@dataclass(slots=True)
class Batch:
    """The operands of a call by name; `keys` and `values` are what each sequence's places hold."""

    case: Case
    operands: dict[str, Any]

    def run(self, op: Any, **options: Any) -> torch.Tensor:
        """A new `out` that the op has written."""
        head_dim, heads = self.case.head_dim, self.case.num_heads
        query = self.operands["query"]
        out = torch.full((query.shape[0], heads * head_dim), UNTOUCHED, dtype=query.dtype, device=query.device)
        op(**self.operands, out=out, **options)
        return out

    def to(self, device: str) -> Batch:
        moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in self.operands.items()}
        rows = self.operands["query"]
        moved["query"] = _strided(rows, rows.shape[1] + 64).to(device)[:, : rows.shape[1]]
        return Batch(self.case, moved)


def make_batch(case: Case, *, pages_per_slot: int = 0) -> Batch:
    """A batch on the CPU.  The same seed gives sequence n the same keys, values and queries for any page size.

    Args:
        pages_per_slot: width of the page table; 0: what the longest sequence needs, and one page more.
    """
    rng = torch.Generator().manual_seed(case.seed)
    per_slot = pages_per_slot or max(-(-(past + new) // case.page_size) for past, new in case.sequences) + 1
    num_slots = len(case.sequences) + 1
    pages = torch.full((num_slots * per_slot, 2, case.kv_heads, case.page_size, case.head_dim), float("nan"))
    page_table = torch.full((num_slots, per_slot), -1, dtype=torch.int32)
    slots = torch.randperm(num_slots, generator=rng)[: len(case.sequences)].int()
    free = torch.randperm(pages.shape[0], generator=rng).tolist()
    queries = []
    for n, (past, new) in enumerate(case.sequences):
        own = torch.Generator().manual_seed(case.seed * 1000 + n + 1)
        if past < 0:
            slots[n] = -1
            queries.append(torch.full((new, case.num_heads * case.head_dim), float("nan")))
            continue
        kv = torch.randn(past + new, 2, case.kv_heads, case.head_dim, generator=own)
        queries.append(1.5 * torch.randn(past + new, case.num_heads * case.head_dim, generator=own)[past:])
        first = max(0, past - case.window) // case.page_size if case.window else 0
        for block in range(first, -(-(past + new) // case.page_size)):
            page_id = free.pop()
            page_table[slots[n], block] = page_id
            part = kv[block * case.page_size : (block + 1) * case.page_size]
            pages[page_id, :, :, : len(part)] = part.permute(1, 2, 0, 3)
    counts = torch.tensor([0, *(new for _, new in case.sequences)])
    operands: dict[str, Any] = {
        "query": torch.cat(queries).to(case.dtype),
        "pages": _stored(pages, case),
        "page_table": page_table,
        "slots": slots,
        "query_start": counts.cumsum(0).int(),
        "past_len": torch.tensor([max(past, 0) for past, _ in case.sequences], dtype=torch.int32),
        "num_heads": case.num_heads,
        "scale": case.head_dim**-0.5,
        "window": case.window,
        "soft_cap": case.soft_cap,
        "sinks": torch.randn(case.num_heads, generator=rng) if case.has_sinks else None,
        "tree_mask": _tree_mask(case, rng) if case.is_tree else None,
    }
    return Batch(case, operands)


def _strided(rows: torch.Tensor, stride: int) -> torch.Tensor:
    wide = torch.full((rows.shape[0], stride), float("nan"), dtype=rows.dtype)
    wide[:, : rows.shape[1]] = rows
    return wide


def _stored(pages: torch.Tensor, case: Case) -> torch.Tensor:
    """Pages of the case's element type; NaN stays NaN, in fp8 with its scale."""
    if not case.is_fp8:
        return pages.to(case.dtype)
    stored = quantise_pages(pages.to(case.dtype))
    values, scales = split_pages(stored, case.page_size, case.head_dim)
    unwritten = pages[..., 0].isnan()
    values[unwritten] = NAN_BYTE
    scales[unwritten] = float("nan")
    return stored


def _tree_mask(case: Case, rng: torch.Generator) -> torch.Tensor:
    """Ancestors of each new token in a random tree, itself included; bits of other sequences' tokens are noise."""
    words = max(-(-new // 32) for _, new in case.sequences) + 1
    rows = []
    for _, new in case.sequences:
        ancestors: list[int] = []
        for token in range(new):
            parent = int(torch.randint(-1, token, (1,), generator=rng)) if token else -1
            bits = (ancestors[parent] if parent >= 0 else 0) | 1 << token
            ancestors.append(bits)
            rows.append(bits | ((1 << 32 * words) - 1) >> new << new)
    split = [[row >> 32 * w & 0xFFFFFFFF for w in range(words)] for row in rows]
    return torch.tensor(split, dtype=torch.int64).to(torch.int32)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Elements within the type's tolerance, and the norm of the differences within a half percent of the norm."""
    dtype = actual.dtype
    actual, expected = actual.double().cpu(), expected.double().cpu()
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    error = float((actual - expected).norm() / expected.norm())
    assert error <= NORM_TOLERANCE[dtype], f"relative error {error:.2e}"


def assert_written(batch: Batch, out: torch.Tensor) -> None:
    """Rows of padding sequences hold what they held before."""
    starts = batch.operands["query_start"].tolist()
    for n, slot in enumerate(batch.operands["slots"].tolist()):
        if slot < 0:
            assert bool((out[starts[n] : starts[n + 1]] == UNTOUCHED).all())


def visible(batch: Batch, sequence: int, row: int) -> torch.Tensor:
    """Positions of the keys that a row of a sequence sees."""
    past, new = batch.case.sequences[sequence]
    mask = batch.operands["tree_mask"]
    first = int(batch.operands["query_start"][sequence])
    return seen_keys(row, past, new, batch.case.window, None if mask is None else mask[first + row])


# Lengths around page, key tile and row tile borders, a padding sequence, an empty one.
LENGTHS = ((0, 1), (15, 1), (0, 17), (-1, 3), (63, 66), (128, 5), (200, 0), (1000, 33), (0, 150))
TREE_LENGTHS = ((0, 7), (60, 9), (-1, 4), (129, 40), (1030, 64), (17, 1))


def feature_cases(**fixed: Any) -> list[Case]:
    """Groups and page sizes in turn with every option of the op."""
    plain = Case(LENGTHS, **fixed)
    tree = dataclasses.replace(plain, sequences=TREE_LENGTHS, is_tree=True)
    return [
        dataclasses.replace(plain, group=4, page_size=16),
        dataclasses.replace(plain, group=1, page_size=64, kv_heads=3, seed=1),
        dataclasses.replace(plain, group=2, page_size=32, window=100, seed=2),
        dataclasses.replace(plain, group=7, page_size=16, soft_cap=2.0, seed=3),
        dataclasses.replace(plain, group=3, page_size=128, has_sinks=True, seed=4),
        dataclasses.replace(plain, group=8, page_size=64, kv_heads=1, window=64, has_sinks=True, seed=5),
        dataclasses.replace(plain, group=16, page_size=32, kv_heads=1, window=1, soft_cap=5.0, seed=6),
        dataclasses.replace(tree, group=4, page_size=16, seed=7),
        dataclasses.replace(tree, group=3, page_size=64, window=80, has_sinks=True, soft_cap=3.0, seed=8),
    ]
