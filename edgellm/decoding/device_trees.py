"""`DeviceTreePasses`: trees from a paged draft model where the target computes on a device.

The levels of a round are one chain of passes, a replayed graph where its shape has been seen: which nodes a level grows
behind is chosen on the device, and the host reads all candidates once, at the end.  A level's nodes are entries of the
draft's pages behind the written ones: scratch, which the next round overwrites.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from edgellm.decoding.device_drafts import DevicePasses
from edgellm.decoding.draft_model import DraftStep
from edgellm.decoding.draft_staging import ExpectedPass, slot_rows
from edgellm.decoding.draft_tree import DraftTable, pack_mask
from edgellm.runtime.step_inputs import StepShape, TreeTensors
from edgellm.runtime.tree_rows import words_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from edgellm.decoding.chain import KeptRow
    from edgellm.decoding.draft_ops import DraftExecutor
    from edgellm.decoding.tree_passes import RankingHead
    from edgellm.models.device_step import Attend
    from edgellm.runtime.kv_cache import KVCache
    from edgellm.runtime.step_inputs import StepTensors

    Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LevelSizes:
    """How the levels of a table grow, which is the same for every sequence.

    Attributes:
        top_k: nodes of a level that the next one grows behind, at most.
        each: candidates behind a node; fewer than `top_k` where the head has no more tokens.
        widths: nodes that grow of level 1, 2 and so on, without the deepest level, of which none does.
    """

    top_k: int
    each: int
    widths: tuple[int, ...]

    @classmethod
    def of(cls, top_k: int, num_tokens: int, depth: int) -> LevelSizes:
        """
        Args:
            num_tokens: that the head may propose.
        """
        each, widths = min(top_k, num_tokens), []
        candidates = each
        for _ in range(1, depth):
            widths.append(min(top_k, candidates))
            candidates = widths[-1] * each
        return cls(top_k, each, tuple(widths))

    def places(self, depth: int) -> int:
        """Scratch entries of trees of `depth` levels."""
        return sum(self.widths[: depth - 1])

    def words(self, depth: int) -> int:
        """int32 words that say one table of `depth` levels; see `table`."""
        return 2 * self.each + (1 + 2 * self.each) * self.places(depth)

    def table(self, words: Int32Array, depth: int) -> DraftTable:
        """The table that a device made, or its first levels.

        Args:
            words: token ids of level 1 and their log-probabilities (bits of float32); then of each level which entries
                of the one before it grew behind, counted from that level's first, and its own two parts.
        """
        table, start = DraftTable(self.top_k), 0
        for width in (1, *self.widths[: depth - 1]):
            if start:
                table.go_on_behind(words[start : start + width])
                start += width
            end = start + width * self.each
            token_ids, log_probs = words[start:end], words[end : end + width * self.each].view(np.float32)
            table.grow(token_ids.reshape(width, -1).astype(np.int64), log_probs.reshape(width, -1))
            start = end + width * self.each
        return table


@dataclass(frozen=True, slots=True)
class _Level:
    """What the pass of a level is the same for, whatever the tables hold: N sequences, W nodes of each.

    Attention takes masks of whole rows, from the first scratch entry on: a sequence's row has S tokens, of which the
    first S - W stand for the levels before and are left out of everything else.

    Attributes:
        row: S.
        token_seq: (N * S,) int32, -1 where a token stands for an earlier level.
        query_start: (N + 1,) int32.
        places: (W,) int32 scratch entries of the level.
        bits: (W, words) int32, the bit of each of them.
    """

    number: int
    row: int
    token_seq: torch.Tensor
    query_start: torch.Tensor
    places: torch.Tensor
    bits: torch.Tensor

    def spread(self, rows: torch.Tensor) -> torch.Tensor:
        """(N * S, ...) of (N * W, ...): the level's rows behind zeros."""
        width = len(self.places)
        if self.row == width:
            return rows
        wide = rows.new_zeros((len(rows) // width, self.row, *rows.shape[1:]))
        wide[:, self.row - width :] = rows.view(-1, width, *rows.shape[1:])
        return wide.flatten(0, 1)

    def last(self, rows: torch.Tensor) -> torch.Tensor:
        """(N * W, ...) of (N * S, ...): what `spread` took."""
        by_sequence = rows.view(-1, self.row, *rows.shape[1:])
        return by_sequence[:, self.row - len(self.places) :].flatten(0, 1)

    def attend(self, attend: Attend) -> Attend:
        """Attention of the level's rows by that of rows which begin with the levels before."""
        if self.row == len(self.places):
            return attend

        def attend_last(kv_layer: int, qkv: torch.Tensor, angles: Any, out: torch.Tensor, **layer: Any) -> None:
            room = out.new_empty((len(self.token_seq), out.shape[1]))
            turned = None if angles is None else torch.stack([self.spread(part) for part in angles.unbind(0)])
            attend(kv_layer, self.spread(qkv), turned, room, **layer)
            out.copy_(self.last(room))

        return attend_last


class DeviceTreePasses(DevicePasses):
    """See `DraftPasses` and `TreePasses`.

    Args:
        top_k: K, candidates behind each node, and nodes that a level grows behind.
        depth: most levels.
    """

    def __init__(self, head: RankingHead, kv_cache: KVCache, executor: DraftExecutor, top_k: int, depth: int) -> None:
        self._ranking = head
        self._sizes = LevelSizes.of(top_k, head.num_tokens, depth)
        self._mask_words = words_for(max(1, self._sizes.places(depth)))
        self._kept_levels: dict[tuple[int, int], _Level] = {}
        device, num_slots = executor.device.torch_device, executor.table_shape[0]
        # What comes behind the entries, by slot; a row behind the last slot takes what padding writes.
        firsts = (num_slots + 1, self._sizes.each)
        self._first_tokens = torch.zeros(firsts, dtype=torch.int32, device=device)
        self._first_log_probs = torch.zeros(firsts, dtype=torch.float32, device=device)
        self._found = torch.zeros(num_slots * self._sizes.words(depth), dtype=torch.int32, device=device)
        super().__init__(head, kv_cache, executor, depth)

    @torch.inference_mode()
    def hold(self, rows: Sequence[KeptRow]) -> None:
        """All of them: a tree may be larger than the ring, and then its first nodes were not kept."""
        self._ring.put(rows)

    @torch.inference_mode()
    def tables(
        self, slots: Sequence[int], past: Sequence[int], limits: Sequence[int], page_rows: Int32Array
    ) -> list[DraftTable]:
        depth = limits[0]
        # A row that has its levels goes on at its last place; what comes behind it there is not looked at.
        scratch = np.array([max(0, self._sizes.places(limit) - 1) for limit in limits], np.int32)
        batch = self._proposal_batch(slots, past, scratch, page_rows)
        shape = self._staging.run(("tree", depth), batch, partial(self._grow, depth))
        found: Any = self._device.download(self._found_of(depth, shape.rows))
        return [self._sizes.table(words, limit) for words, limit in zip(found, limits, strict=False)]

    # ---- launches: what follows may be captured, and reads nothing back ------------------------------------------

    def _run_entries(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, step: DraftStep, ends: torch.Tensor, slots: torch.Tensor
    ) -> None:
        tokens, log_probs, own = self._rank(token_ids, hidden, step, ends, projected=False)
        self._first_tokens.index_copy_(0, slots, tokens)
        self._first_log_probs.index_copy_(0, slots, log_probs)
        self._rows.tokens.index_copy_(0, slots, tokens[:, 0])
        self._rows.own.index_copy_(0, slots, own)

    def _rank(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        step: DraftStep,
        ends: torch.Tensor | None,
        *,
        projected: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        top_k = self._sizes.each
        tokens, log_probs, own = self._ranking.rank(token_ids, hidden, step, ends, projected=projected, top_k=top_k)
        return tokens.int(), log_probs, own

    def _grow(self, depth: int, step: StepTensors, shape: StepShape) -> None:
        """A table of `depth` levels for each row, the first of them known already."""
        slots, each = slot_rows(step.slots, len(self._rows.own) - 1), self._sizes.each
        tokens, log_probs = self._first_tokens.index_select(0, slots), self._first_log_probs.index_select(0, slots)
        own, seen = self._rows.own.index_select(0, slots)[:, None], step.slots.new_zeros((shape.rows, 1, 1))
        scores, found = log_probs, [tokens, log_probs.view(torch.int32)]
        for number, width in enumerate(self._sizes.widths[: depth - 1], start=1):
            level, best = self._level(number, shape.rows), scores.topk(width, dim=1)
            parents = best.indices // each
            seen = _rows_of(seen.expand(-1, -1, self._mask_words), parents) | level.bits
            node_tokens, behind = tokens.gather(1, best.indices), _rows_of(own, parents)
            tokens, log_probs, own = self._run_level(level, step, node_tokens, behind, seen)
            scores = (best.values[:, :, None] + log_probs.view(-1, width, each)).flatten(1)
            found += [best.indices.int(), tokens, log_probs.view(torch.int32)]
        torch.cat(found, dim=1, out=self._found_of(depth, shape.rows))

    def _run_level(
        self, level: _Level, step: StepTensors, tokens: torch.Tensor, hidden: torch.Tensor, seen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The pass of a level.

        Args:
            step: `positions` of the first scratch entries, `past_len` of the last ones.
            tokens: (N, W) int32 of the nodes; hidden: (N, W, width) of their parents; seen: (N, W, words) their bits.
        Returns:
            (N, W * K) int32 tokens and float32 log-probabilities behind them; (N, W, width) their own hidden rows.
        """
        first, (count, width) = step.positions, tokens.shape
        places = torch.minimum(first[:, None] + level.places, step.past_len[:, None]).flatten()
        mask = level.spread(seen.flatten(0, 1))
        tree = TreeTensors(level.spread(places), step.slots, step.slots, mask)
        rows = replace(step, token_seq=level.token_seq, query_start=level.query_start, past_len=first, tree=tree)
        shape = StepShape(len(mask), count, 0, count, mask_words=self._mask_words)
        positions = (first[:, None] + (level.number - 1)).expand(count, width).reshape(-1).contiguous()
        here = DraftStep(positions, level.attend(self._staging.step(rows, shape).attend))
        found, log_probs, own = self._rank(tokens.flatten(), hidden.flatten(0, 1), here, None, projected=True)
        return found.view(count, -1), log_probs.view(count, -1), own.view(count, width, -1)

    # ---- memory --------------------------------------------------------------------------------------------------

    def _expected_proposal(self, rows: int) -> ExpectedPass:
        """Trees of all levels."""
        return ExpectedPass(("tree", self._num_drafts), rows, rows, partial(self._grow, self._num_drafts))

    def _found_of(self, depth: int, rows: int) -> torch.Tensor:
        width = self._sizes.words(depth)
        return self._found[: rows * width].view(rows, width)

    def _level(self, number: int, count: int) -> _Level:
        """Level `number` of `count` sequences, at addresses that stay."""
        if (number, count) not in self._kept_levels:
            self._kept_levels[number, count] = self._new_level(number, count)
        return self._kept_levels[number, count]

    def _new_level(self, number: int, count: int) -> _Level:
        row = self._sizes.places(number + 1)
        first = self._sizes.places(number)
        token_seq = np.repeat(np.arange(count, dtype=np.int32)[:, None], row, axis=1)
        token_seq[:, :first] = -1
        places = np.arange(first, row, dtype=np.int32)
        bits = pack_mask([1 << place for place in places.tolist()], self._mask_words)
        starts = np.arange(count + 1, dtype=np.int32) * np.int32(row)
        arrays = (token_seq.ravel(), starts, places, bits)
        return _Level(number, row, *(torch.from_numpy(array).to(self._device.torch_device) for array in arrays))


def _rows_of(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """(N, W, width): of (N, P, width) rows those that (N, W) int64 names."""
    return rows.gather(1, index[:, :, None].expand(-1, -1, rows.shape[2]))
