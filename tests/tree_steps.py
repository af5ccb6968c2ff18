"""Random steps of prompt chunks, single tokens, chains and trees, as a session plans them, for two executors to run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from ragged import ragged_batch

from edgellm.decoding.chain import widen
from edgellm.decoding.draft_tree import DraftTree, mark_trees

if TYPE_CHECKING:
    from edgellm.runtime.batch import RaggedBatch


def random_tree(rng: np.random.Generator, size: int, vocab: int) -> DraftTree:
    """Each node stands behind any one before it; the first two are siblings, so that it branches."""
    parents = [int(rng.integers(node + 1)) if node > 1 else 0 for node in range(size)]
    return DraftTree(rng.integers(1, vocab, size).tolist(), parents, [1.0] * size)


@dataclass(frozen=True, slots=True)
class TreeStep:
    """A batch with its proposals, and what becomes of them.

    Attributes:
        branches: (slot, tokens before, accepted rows) of each tree of which some way is kept.
    """

    batch: RaggedBatch
    branches: list[tuple[int, int, list[int]]]


class TreePlan:
    """Every slot has a sequence that grows, ends and begins anew.

    Args:
        most: tokens of a sequence, a whole tree behind it included.
        tree: nodes of a tree at most.
        chunk: tokens of a prompt chunk at most.
    """

    def __init__(self, page_rows: np.ndarray, *, most: int, tree: int, chunk: int, vocab: int, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self._page_rows, self._most, self._tree, self._chunk, self._vocab = page_rows, most, tree, chunk, vocab
        self._lengths = [0] * len(page_rows)

    def step(self) -> TreeStep:
        """Some slots: those without tokens begin with a chunk, others verify a tree, a chain or one token."""
        slots = self.rng.permutation(len(self._lengths))[: self.rng.integers(1, len(self._lengths) + 1)].tolist()
        for slot in slots:
            if self._lengths[slot] + self._tree + 1 > self._most or self.rng.random() < 0.2:
                self._lengths[slot] = 0
        slots.sort(key=lambda slot: self._lengths[slot] > 0)  # chunks come first
        rows, proposals = [], []
        for slot in slots:
            rows.append((slot, self._lengths[slot], self._tokens(slot)))
            proposals.append(self._proposal(slot))
        wide: Any = mark_trees(widen(ragged_batch(rows, self._page_rows), proposals), proposals)
        return TreeStep(wide, [*self._keep(rows, proposals)])

    def _tokens(self, slot: int) -> list[int]:
        chunk = self._chunk if self.rng.random() < 0.5 else int(self.rng.integers(1, self._chunk))
        count = 1 if self._lengths[slot] else chunk
        return self.rng.integers(1, self._vocab, count).tolist()

    def _proposal(self, slot: int) -> Any:
        if not self._lengths[slot]:
            return []
        kind, size = self.rng.integers(4), int(self.rng.integers(2, self._tree + 1))
        if kind < 2:
            return random_tree(self.rng, size, self._vocab)
        return self.rng.integers(1, self._vocab, size if kind == 2 else 0).tolist()

    def _keep(self, rows: list[Any], proposals: list[Any]) -> Any:
        for (slot, past, tokens), proposal in zip(rows, proposals, strict=True):
            kept = [*range(len(tokens))]
            if isinstance(proposal, DraftTree):
                node = int(self.rng.integers(len(proposal) + 1))
                kept = []
                while node:
                    kept.insert(0, node)
                    node = proposal.parents[node - 1]
                kept.insert(0, 0)
                yield slot, past, kept
            elif len(proposal):
                kept = [*range(int(self.rng.integers(1, len(proposal) + 2)))]
            self._lengths[slot] = past + len(kept)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each slot that have state."""
        return list(self._lengths)


def commit(executor: Any, step: TreeStep) -> None:
    """Keep the branches of a step that ran."""
    if step.branches:
        slots, past, rows = ([branch[part] for branch in step.branches] for part in range(3))
        executor.commit_rows(slots, past, rows)
