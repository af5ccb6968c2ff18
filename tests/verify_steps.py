"""Random steps with chunks, decode rows and verified rows, as a session plans them, and what is taken back of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from edgellm.runtime.batch import RaggedBatch

Row = tuple[int, int, list[int]]


def verifying(batch: RaggedBatch, rows: Sequence[int]) -> RaggedBatch:
    """The batch with the logits of every token of `rows`, and of the last one of all others."""
    index: list[int] = []
    owners: list[int] = []
    for row in range(batch.num_sequences):
        first, end = int(batch.query_start[row]), int(batch.query_start[row + 1])
        wanted = range(first if row in rows else end - 1, end)
        index += wanted
        owners += [row] * len(wanted)
    batch.logits_index, batch.logits_to_seq = np.array(index, np.int64), np.array(owners, np.int32)
    return batch


@dataclass
class VerifyPlan:
    """Steps over `num_slots` sequences of up to `most` tokens, each of which goes on where the step before left it.

    Attributes:
        verify_tokens: most tokens of a verified row; longer rows are prompt chunks.
        begin: called with a slot where a sequence starts anew.
    """

    num_slots: int
    most: int
    verify_tokens: int
    vocab_size: int
    begin: Callable[[int], None]
    seed: int = 9
    lengths: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def step(self, *, proposals: bool = True) -> tuple[list[Row], list[int]]:
        """Rows, chunks first, and which of them are verified."""
        chunks: list[Row] = []
        others: list[Row] = []
        for slot in self.rng.permutation(self.num_slots)[: self.rng.integers(1, self.num_slots + 1)].tolist():
            count = int(self.rng.choice([1, 1, 2, self.verify_tokens, 3, 2 * self.verify_tokens + 1]))
            past = self.lengths.get(slot, 0)
            if not past or past + count > self.most:
                past, count = 0, self.verify_tokens + 3
                self.begin(slot)
            is_chunk = count > self.verify_tokens
            count = count if is_chunk or proposals else 1
            (chunks if is_chunk else others).append((slot, past, self.rng.integers(0, self.vocab_size, count).tolist()))
            self.lengths[slot] = past + count
        rows = chunks + others
        return rows, [place for place, row in enumerate(rows) if place >= len(chunks) and len(row[2]) > 1]

    def take_back(self, rows: Sequence[Row], verified: Sequence[int]) -> tuple[list[int], list[int]]:
        """Slots and tokens kept of some verified rows."""
        slots, kept = [], []
        for row in verified:
            slot, past, tokens = rows[row]
            count = int(self.rng.integers(1, len(tokens) + 1))
            if count < len(tokens) or self.rng.random() < 0.3:
                self.lengths[slot] = past + count
                slots.append(slot)
                kept.append(count)
        return slots, kept
