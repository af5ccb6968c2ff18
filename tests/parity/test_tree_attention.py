"""Rows of trees over pages on the CPU: against the reference, and to the bit the rows of their paths alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cpu.paged_attention import PagedAttention
from edgellm.kernels.ref import paged_attention as ref

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
NUM_ROWS, HEADS, KV_HEADS = 40, 6, 2


@dataclass
class Rows:
    """Rows of one tree of `NUM_ROWS` nodes behind `past` tokens, and one row that is of no tree, in slot 1."""

    masks: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    slots: np.ndarray
    paths: list[list[int]]


def tree_rows(past: int, seed: int) -> Rows:
    rng = np.random.default_rng(seed)
    paths: list[list[int]] = [[0]]
    for node in range(1, NUM_ROWS):
        paths.append([*paths[int(rng.integers(0, node))], node])
    masks = np.zeros((NUM_ROWS + 1, 2), np.uint32)
    for node, path in enumerate(paths):
        for ancestor in path:
            masks[node, ancestor // 32] |= np.uint32(1 << ancestor % 32)
    return Rows(
        masks.view(np.int32),
        np.array([past] * NUM_ROWS + [9], np.int32),
        np.array([past + len(path) for path in paths] + [past + 5], np.int32),
        np.array([0] * NUM_ROWS + [1], np.int32),
        paths,
    )


def new_pages(past: int, page_size: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, np.ndarray]:
    """Pages for two slots; what no row may read is NaN."""
    torch.manual_seed(past + page_size)
    per_slot = -(-(past + NUM_ROWS) // page_size) + 1
    pages = torch.randn(2 * per_slot, 2, KV_HEADS, page_size, head_dim).to(dtype)
    rows = np.random.default_rng(4).permutation(2 * per_slot).astype(np.int32).reshape(2, per_slot)
    for place in range(past + NUM_ROWS, per_slot * page_size):
        pages[rows[:, place // page_size], :, :, place % page_size] = float("nan")
    return pages, rows


def attend(
    pages: torch.Tensor,
    query: torch.Tensor,
    page_rows: np.ndarray,
    slots: np.ndarray,
    lengths: np.ndarray,
    window: int,
    tree_mask: np.ndarray | None = None,
    tree_start: np.ndarray | None = None,
) -> torch.Tensor:
    matrix, out = query.flatten(1).contiguous(), torch.empty_like(query.flatten(1))
    plan = PagedAttention(
        pages=pages,
        num_heads=query.shape[1],
        query_dtype=query.dtype,
        query_rows=np.arange(len(query)),
        page_rows=page_rows,
        slots=slots,
        lengths=lengths,
        scale=query.shape[2] ** -0.5,
        window=window,
        tree_mask=tree_mask,
        tree_start=tree_start,
    )
    plan.run(pages, matrix, out)
    return out.view(query.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 40, 300])
@pytest.mark.parametrize(("past", "page_size"), [(0, 16), (1, 16), (250, 16), (255, 32), (300, 128), (30, 3)])
def test_tree_rows_equal_the_reference(past: int, page_size: int, window: int, dtype: torch.dtype) -> None:
    rows = tree_rows(past, seed=past + page_size)
    pages, page_rows = new_pages(past, page_size, 24, dtype)
    query = torch.randn(NUM_ROWS + 1, HEADS, 24).to(dtype)
    trees = (rows.masks, rows.starts)
    expected = ref.paged_attention(pages, query, page_rows, rows.slots, rows.lengths, 24**-0.5, window, *trees)
    actual = attend(pages, query, page_rows, rows.slots, rows.lengths, window, *trees)
    torch.testing.assert_close(actual.float(), expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [20, 64])
@pytest.mark.parametrize(("past", "page_size", "window"), [(1, 16, 0), (244, 16, 0), (60, 32, 50), (30, 3, 0)])
def test_a_row_of_a_tree_is_to_the_bit_that_of_its_path_alone(
    past: int, page_size: int, window: int, head_dim: int, dtype: torch.dtype
) -> None:
    rows = tree_rows(past, seed=7)
    pages, page_rows = new_pages(past, page_size, head_dim, dtype)
    query = torch.randn(NUM_ROWS + 1, HEADS, head_dim).to(dtype)
    together = attend(pages, query, page_rows, rows.slots, rows.lengths, window, rows.masks, rows.starts)
    for node in (0, 1, 2, 17, 33, NUM_ROWS - 1):
        moved = pages.clone()
        for target, source in enumerate(rows.paths[node]):
            old, new = past + source, past + target
            kept = pages[page_rows[0, old // page_size], :, :, old % page_size]
            moved[page_rows[0, new // page_size], :, :, new % page_size] = kept
        one = slice(node, node + 1)
        alone = attend(moved, query[one], page_rows, rows.slots[one], rows.lengths[one], window)
        assert torch.equal(alone[0], together[node])
    plain = attend(pages, query[-1:], page_rows, rows.slots[-1:], rows.lengths[-1:], window)
    assert torch.equal(plain[0], together[-1])


def test_what_a_row_does_not_see_is_not_read() -> None:
    rows = tree_rows(20, seed=1)
    pages, page_rows = new_pages(20, 16, 16, torch.float32)
    for place in set(range(NUM_ROWS)) - set(rows.paths[-1]):
        pages[page_rows[0, (20 + place) // 16], :, :, (20 + place) % 16] = float("nan")
    query = torch.randn(1, HEADS, 16)
    last = slice(NUM_ROWS - 1, NUM_ROWS)
    out = attend(pages, query, page_rows, rows.slots[last], rows.lengths[last], 0, rows.masks[last], rows.starts[last])
    assert bool(out.isfinite().all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tree_mask": np.ones((2, 1), np.int32)}, "words"),
        ({"tree_mask": np.ones((1, 1), np.int64)}, "int32 is needed"),
        ({"tree_start": None}, "must come with tree_mask"),
        ({"tree_mask": np.full((1, 1), 3, np.int32)}, "must be the sum"),
        ({"tree_mask": np.full((1, 1), 1 << 30, np.int32)}, "does not cover it"),
    ],
)
def test_rows_that_contradict_themselves_are_refused(change: dict[str, np.ndarray | None], message: str) -> None:
    pages, page_rows = new_pages(2, 16, 16, torch.float32)
    arguments = {"tree_mask": np.ones((1, 1), np.int32), "tree_start": np.array([2], np.int32), **change}
    query, page_rows = torch.randn(1, HEADS, 16), np.ascontiguousarray(page_rows[:, :2])
    with pytest.raises(InvalidArgumentError, match=message):
        attend(pages, query, page_rows, np.zeros(1, np.int32), np.array([3], np.int32), 0, **arguments)
