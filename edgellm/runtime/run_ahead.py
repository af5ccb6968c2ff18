"""The step after the latest one, computed before it is asked for.

While the host reads the tokens of a step, applies stop rules, publishes and plans, the GPU would stand still.  Most of
the time what comes next is known but for the tokens, and those are on the device: every sequence adds one.  So that
step is enqueued at once, and when the session asks for it (or for some of its rows, or for them beside a prompt
chunk) its logits are there.  When it asks for anything else they are dropped; the keys and values that were written
for nothing lie behind what their sequences have committed, and whoever gets those pages writes them later in the
same stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from edgellm.runtime.batch import RaggedBatch

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    Int32Array = npt.NDArray[np.int32]


@dataclass(slots=True)
class AheadStep:
    """A step of one decode row a sequence that is enqueued, and what it takes for granted.

    Attributes:
        slots, past: (N,) int32, of each row.
        logits: (N, vocab_size) float32 on the device; the executor's, until its next launch.
        hidden: (N, hidden_width), likewise; None where they were not asked for.
        token_ids: (N,) int32, the tokens that the rows add; None until the host knows them.
    """

    slots: Int32Array
    past: Int32Array
    logits: torch.Tensor
    hidden: torch.Tensor | None = None
    token_ids: Int32Array | None = None

    def is_all_of(self, batch: RaggedBatch) -> bool:
        """Whether the batch is these rows in this order, a logits row for each: what comes next nearly always."""
        count = len(self.slots)
        return (
            self.token_ids is not None
            and len(batch.token_ids) == count
            and equal(batch.logits_index, np.arange(count))
            and equal(batch.state_index, self.slots)
            and equal(batch.past_len, self.past)
            and equal(batch.token_ids, self.token_ids)
        )

    def rows_of(self, batch: RaggedBatch, first: int) -> npt.NDArray[np.int64] | None:
        """Row here of each sequence of `batch` from `first` on, all of one token; None where one of them has none."""
        if self.token_ids is None:
            return None
        slots, past = batch.state_index[first:], batch.past_len[first:]
        tokens = batch.token_ids[batch.num_tokens - len(slots) :]
        if len(slots) == len(self.slots) and np.array_equal(slots, self.slots):
            rows = np.arange(len(slots))
        else:
            place = {slot: row for row, slot in enumerate(self.slots.tolist())}
            found = [place.get(slot, -1) for slot in slots.tolist()]
            if min(found, default=-1) < 0:
                return None
            rows = np.array(found)
        same = np.array_equal(self.past[rows], past) and np.array_equal(self.token_ids[rows], tokens)
        return rows if same else None


def equal(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    """Whether short arrays of one type hold the same; a tenth of the time of NumPy's own."""
    return one.tobytes() == other.tobytes()


def following_step(batch: RaggedBatch) -> RaggedBatch | None:
    """What comes after `batch` if every sequence goes on: one token each, not known yet (0).

    None where not every row gets a token now, because then prompts are unfinished.
    """
    count = batch.num_sequences
    starts = np.arange(count + 1, dtype=np.int32)
    rows = starts[:count]
    if not equal(batch.logits_to_seq, rows):
        return None
    past = batch.past_len + batch.query_len
    return RaggedBatch(
        token_ids=np.zeros(count, np.int32),
        positions=past,
        query_start=starts,
        query_len=np.ones(count, np.int32),
        past_len=past,
        state_index=batch.state_index.copy(),
        page_rows=batch.page_rows,
        logits_index=rows.astype(np.int64),
        logits_to_seq=rows,
    )


def context_part(batch: RaggedBatch, rows: int) -> RaggedBatch:
    """The first `rows` sequences of a batch, with their logits rows."""
    tokens = int(batch.query_start[rows])
    logits = int(np.searchsorted(batch.logits_index, tokens))
    return RaggedBatch(
        token_ids=batch.token_ids[:tokens],
        positions=batch.positions[:tokens],
        query_start=batch.query_start[: rows + 1],
        query_len=batch.query_len[:rows],
        past_len=batch.past_len[:rows],
        state_index=batch.state_index[:rows],
        page_rows=batch.page_rows,
        logits_index=batch.logits_index[:logits],
        logits_to_seq=batch.logits_to_seq[:logits],
    )
