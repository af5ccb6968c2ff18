"""Reference of decode attention: the textbook formula in float64; and how the kernel cuts its work, as plain lists."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from edgellm.kernels.ref.paged_prefill import capped, gather_kv, softmax_with_sinks

TILE_KEYS = 16
MIN_TILES = 8  # kMinTiles


def paged_decode(
    query: torch.Tensor,
    pages: torch.Tensor,
    page_table: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    workspace: torch.Tensor | None,
    *,
    num_heads: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    early_reads: bool = False,
    starts: torch.Tensor | None = None,
    states: torch.Tensor | None = None,
) -> None:
    """Row by row; see the kernel's wrapper for what the arguments are.

    `workspace` and `early_reads` change nothing here.  Any head_dim, page size and group.
    Effects: writes the rows of out that have a slot and a length, and start at 0; states of the others.
    """
    head_dim = out.shape[1] // num_heads
    for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        if slot < 0 or length < 1:
            continue
        first = max(0, length - window) if window else 0 if starts is None else int(starts[row])
        if first >= length:
            continue
        key, value = gather_kv(pages, page_table[slot], length, head_dim)
        key, value = (part[:, first:].repeat_interleave(num_heads // part.shape[0], dim=0) for part in (key, value))
        heads = query[row, : num_heads * head_dim].double().view(num_heads, head_dim)
        scores = capped(heads[:, None, :] @ key.transpose(1, 2) * scale, soft_cap)
        if starts is not None and states is not None and first:
            states[row] = softmax_state(scores, value)
            continue
        everything = torch.ones(1, key.shape[1], dtype=torch.bool, device=key.device)
        weights = softmax_with_sinks(scores, everything, sinks)
        out[row] = (weights @ value).flatten().to(out.dtype)


def softmax_state(scores: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """(heads, head_dim + 4): an unfinished softmax of scores (heads, 1, keys) over values (heads, keys, head_dim)."""
    top = scores.amax(dim=2)
    weights = torch.exp(scores - top[:, :, None])
    state = torch.zeros(len(scores), value.shape[2] + 4, dtype=scores.dtype, device=scores.device)
    state[:, :-4] = (weights @ value)[:, 0]
    state[:, -4] = top[:, 0] * math.log2(math.e)
    state[:, -3] = weights.sum(dim=2)[:, 0]
    return state


# ---- the kernel's schedule ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """Tiles [begin, end) of one row and kv head, counted from the sequence's start, that one warp works on."""

    block: int
    warp: int
    row: int
    head: int
    begin: int
    end: int


def row_tiles(slot: int, length: int, window: int) -> range:
    """The 16-key tiles of a row that hold a key it sees; none for padding."""
    first = max(0, length - window) // TILE_KEYS if window else 0
    return range(first, first if slot < 0 else max(first, -(-length // TILE_KEYS)))


def part_begin(total: int, parts: int, index: int) -> int:
    """Where part `index` begins when `total` is cut into equal parts, the first ones one longer."""
    each, longer = divmod(total, parts)
    return index * each + min(index, longer)


@dataclass(frozen=True, slots=True)
class Cut:
    """How `total` tiles are cut for blocks: into runs of `run` tiles (the last may be shorter), those into `parts`."""

    total: int
    run: int
    parts: int

    @property
    def blocks(self) -> int:
        return -(-self.total // self.run) * self.parts

    def begin(self, block: int) -> int:
        before, part = divmod(block, self.parts)
        return min(self.total, before * self.run + part_begin(self.run, self.parts, part))

    def block_of(self, tile: int) -> int:
        before, rest = divmod(tile, self.run)
        each, longer = divmod(self.run, self.parts)
        border = longer * (each + 1)
        return before * self.parts + (rest // (each + 1) if rest < border else longer + (rest - border) // each)


def make_cut(pair_tiles: Sequence[int], blocks: int, align_tiles: int) -> Cut:
    """Equal pieces, or pieces that end with pairs where all pairs are equally long and that costs little.

    Args:
        pair_tiles: tiles of each pair of a row and a kv head, none of them 0.
        blocks: of the launch; fewer work when there are less than MIN_TILES tiles for each.
        align_tiles: by how many tiles a piece that ends with a pair may be longer.
    """
    total = sum(pair_tiles)
    parts = max(1, min(blocks, total // MIN_TILES))
    if pair_tiles and min(pair_tiles) == max(pair_tiles):
        tiles, pairs = pair_tiles[0], len(pair_tiles)
        run = tiles * -(-pairs // blocks)
        pair_parts = min(max(1, tiles // MIN_TILES), blocks // pairs) if pairs <= blocks else 1
        if -(-run // pair_parts) - total // parts <= align_tiles:
            return Cut(total, run, pair_parts)
    return Cut(total, max(1, total), parts)


def cut_line(
    slots: Sequence[int],
    lengths: Sequence[int],
    *,
    kv_heads: int,
    window: int,
    blocks: int,
    warps: int,
    align_tiles: int,
) -> list[Span]:
    """All tiles of all rows and kv heads on one line, cut into pieces for blocks and those into parts for warps.

    Returns:
        What each warp does, in order of the line.
    """
    rows = [row_tiles(slot, length, window) for slot, length in zip(slots, lengths, strict=True)]
    pairs = [(row, head, tiles) for row, tiles in enumerate(rows) for head in range(kv_heads) if tiles]
    cut = make_cut([len(tiles) for _, _, tiles in pairs], blocks, align_tiles)
    borders = iter(_borders(cut, warps))
    spans: list[Span] = []
    block = warp = at = end = 0
    for row, head, tiles in pairs:
        tile = tiles.start
        while tile < tiles.stop:
            while at == end:
                block, warp, end = next(borders)
            step = min(tiles.stop - tile, end - at)
            spans.append(Span(block, warp, row, head, tile, tile + step))
            tile, at = tile + step, at + step
    return spans


def _borders(cut: Cut, warps: int) -> list[tuple[int, int, int]]:
    """(block, warp, end on the line)."""
    found = []
    for block in range(cut.blocks):
        first, length = cut.begin(block), cut.begin(block + 1) - cut.begin(block)
        found += [(block, warp, first + part_begin(length, warps, warp + 1)) for warp in range(warps)]
    return found
