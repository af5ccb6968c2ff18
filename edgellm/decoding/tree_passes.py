"""`HostTreePasses`: the passes with which a draft model on the CPU grows trees, a level of all sequences in each.

A level's nodes are entries of the draft's pages behind the written ones: scratch, which the next round overwrites.
Each sees the written entries and its own ancestors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from edgellm.decoding.draft_model import DraftHead, HostDraft, draft_batch, host_step
from edgellm.decoding.draft_passes import HostPasses
from edgellm.decoding.draft_tree import DraftTable, pack_mask
from edgellm.runtime.batch import RaggedBatch
from edgellm.runtime.tree_rows import words_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from edgellm.decoding.draft_model import DraftRows, DraftStep
    from edgellm.runtime.kv_cache import KVCache

    Int32Array = npt.NDArray[np.int32]


class TreePasses(Protocol):
    """The passes with which trees are grown; `HostTreePasses` and `device_trees.DeviceTreePasses`."""

    def tables(
        self, slots: Sequence[int], past: Sequence[int], limits: Sequence[int], page_rows: Int32Array
    ) -> list[DraftTable]:
        """Candidates behind the entries of each slot, as many levels as its limit; further entries are scratch.

        Args:
            past: entries of each that are written.
            limits: at least 1, never rising.
        Raises:
            BrokenInvariantError: a slot has no entries.
        """
        ...


class RankingHead(DraftHead, Protocol):
    """A head that also says how likely its proposals are."""

    @property
    def num_tokens(self) -> int:
        """Tokens that it may propose."""
        ...

    def rank(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        step: DraftStep,
        ends: torch.Tensor | None,
        *,
        projected: bool,
        top_k: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`forward`, with the K likeliest tokens of each row, or as many as the head has.

        Returns:
            (N, K) int64 token ids of the target's vocabulary, likeliest first; (N, K) float32 their log-probabilities;
            (N, width) hidden rows of the head's own.
        """
        ...


@dataclass(frozen=True, slots=True)
class Candidates:
    """What may come behind R rows.

    Attributes:
        token_ids, log_probs: (R, K) int64 and float32, likeliest first.
    """

    token_ids: npt.NDArray[np.int64]
    log_probs: npt.NDArray[np.float32]

    def rows(self, first: int, end: int) -> Candidates:
        return Candidates(self.token_ids[first:end], self.log_probs[first:end])


class HostTreeDraft(HostDraft):
    """A head over its pages on the CPU that grows trees as well as chains.  Borrows both."""

    def __init__(self, head: RankingHead, kv_cache: KVCache) -> None:
        super().__init__(head, kv_cache)
        self._ranking = head

    @torch.inference_mode()
    def rank(
        self, batch: RaggedBatch, hidden: torch.Tensor, *, projected: bool, top_k: int
    ) -> tuple[Candidates, torch.Tensor]:
        """Write the entries of a batch; what may come behind the rows of its `logits_index`."""
        step = host_step(batch, self._ranking.config, self._kv_cache, hidden.dtype)
        ends = torch.from_numpy(batch.logits_index)
        token_ids = torch.from_numpy(batch.token_ids)
        chosen, log_probs, own = self._ranking.rank(token_ids, hidden, step, ends, projected=projected, top_k=top_k)
        return Candidates(chosen.numpy(), log_probs.numpy()), own


@dataclass(slots=True)
class _Growing:
    """A sequence's table and the entries that its nodes have.

    Attributes:
        past: entries in front of the tree.
        places: scratch entries so far.
        seen: by table entry, which scratch entries it sees, itself included, as bits.
        rows: by table entry of the latest level, its row in that level's hidden rows.
    """

    slot: int
    past: int
    table: DraftTable
    places: int = 0
    seen: dict[int, int] = field(default_factory=lambda: {0: 0})
    rows: dict[int, int] = field(default_factory=dict)


class HostTreePasses(HostPasses):
    """Passes of a draft model on the CPU, one after the other.

    Args:
        draft: the model; asked for at each pass.
        top_k: K, candidates behind each node, and nodes that a level grows behind.
    """

    def __init__(self, draft: Callable[[], HostTreeDraft], top_k: int) -> None:
        super().__init__(draft)
        self._trees = draft
        self._top_k = top_k

    def tables(
        self, slots: Sequence[int], past: Sequence[int], limits: Sequence[int], page_rows: Int32Array
    ) -> list[DraftTable]:
        firsts = [self._first(slot) for slot in slots]
        growing = [_Growing(slot, length, DraftTable(self._top_k)) for slot, length in zip(slots, past, strict=True)]
        own = torch.stack([hidden for _, hidden in firsts])
        for row, (one, (candidates, _)) in enumerate(zip(growing, firsts, strict=True)):
            one.table.grow(candidates.token_ids, candidates.log_probs)
            one.rows = {0: row}
        level = 1
        while count := sum(limit > level for limit in limits):
            own = self._grow(growing[:count], own, level, page_rows)
            level += 1
        return [one.table for one in growing]

    def _proposals(self, rows: DraftRows) -> tuple[Sequence[Any], torch.Tensor]:
        batch = draft_batch(rows)
        found, own = self._trees().rank(batch, rows.hidden, projected=rows.projected, top_k=self._top_k)
        return [found.rows(row, row + 1) for row in range(len(own))], own

    def _grow(self, growing: list[_Growing], own: torch.Tensor, level: int, page_rows: Int32Array) -> torch.Tensor:
        """Run the frontier of each table, level `level`, and add what may come behind it.

        Args:
            own: hidden rows of the level before.
        Returns:
            hidden rows of this one.
        """
        parents = [one.rows[one.table.parents[entry]] for one in growing for entry in one.table.frontier]
        batch = _level_batch(growing, level, page_rows)
        found, rows = self._trees().rank(batch, own[parents], projected=True, top_k=self._top_k)
        for number, one in enumerate(growing):
            first, end = int(batch.query_start[number]), int(batch.query_start[number + 1])
            one.rows = dict(zip(one.table.frontier, range(first, end), strict=True))
            one.table.grow(found.token_ids[first:end], found.log_probs[first:end])
        return rows


def _level_batch(growing: Sequence[_Growing], level: int, page_rows: Int32Array) -> RaggedBatch:
    """The frontier of each table as entries behind those that its tree has."""
    counts = np.array([len(one.table.frontier) for one in growing], np.int32)
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    tree_start = np.array([one.past for one in growing], np.int32)
    past = np.array([one.past + one.places for one in growing], np.int32)
    seen = [_take_place(one, entry) for one in growing for entry in one.table.frontier]
    return RaggedBatch(
        token_ids=np.array([one.table.token_ids[entry] for one in growing for entry in one.table.frontier], np.int32),
        positions=np.repeat(tree_start + np.int32(level - 1), counts),
        query_start=starts,
        query_len=counts,
        past_len=past,
        state_index=np.array([one.slot for one in growing], np.int32),
        page_rows=page_rows,
        logits_index=np.arange(len(seen), dtype=np.int64),
        logits_to_seq=np.repeat(np.arange(len(counts), dtype=np.int32), counts),
        tree_mask=pack_mask(seen, words_for(max(one.places for one in growing))),
        tree_start=tree_start,
    )


def _take_place(one: _Growing, entry: int) -> int:
    """The entry's bits, once it has the next place."""
    one.seen[entry] = one.seen[one.table.parents[entry]] | 1 << one.places
    one.places += 1
    return one.seen[entry]
