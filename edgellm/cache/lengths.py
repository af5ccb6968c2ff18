"""The length ledger of one request: per-sequence lengths as arrays, so that a step costs few Python operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Int64Array = npt.NDArray[np.int64]
    BoolArray = npt.NDArray[np.bool_]

_INT_FIELDS = (
    "committed",
    "num_tokens",
    "prompt",
    "coverage",
    "draft_coverage",
    "reuse",
    "common",
    "proven",
    "offered_blocks",
    "recorded_blocks",
)
_BOOL_FIELDS = ("finalized", "draft_unproven", "ended", "sealed", "silenced", "publishes", "publishes_generated")


class LengthLedger:
    """Arrays indexed by execution order; `size` entries are live, the rest is spare room.

    Attributes (all in tokens unless named otherwise):
        committed: state exists for positions [0, committed).
        num_tokens: length of the token list (prompt and accepted tokens).
        prompt: length of the prompt.
        coverage, draft_coverage: positions that the leased pages can hold.
        reuse: where prefill began.
        common: prefix materialised by base and draft; equals committed when not speculative.
        proven: what the runtime reported as final, for the check of every publication; policies never move it.
        offered_blocks: leading full blocks that need no further offer: this sequence published them, or took them
            over from another.
        recorded_blocks: blocks of the last endpoint offered for retention.
        finalized: the prompt is complete (a ghost joiner is not).
        draft_unproven: its prompt is complete and the draft pass over it may still be queued; nothing of it may be
            published before a verification or a wait.
        ended: reported as ended normally; it takes part in no further step.
        sealed: its unfilled last page was given to the index; the lease can only be released.
        silenced: a fault of the publication policy was charged to it; no hook is called for it any more.
        publishes, publishes_generated: what the sequence's policies allow, and nothing once it is silenced.
    """

    __slots__ = (*_INT_FIELDS, *_BOOL_FIELDS, "size")

    committed: Int64Array
    num_tokens: Int64Array
    prompt: Int64Array
    coverage: Int64Array
    draft_coverage: Int64Array
    reuse: Int64Array
    common: Int64Array
    proven: Int64Array
    offered_blocks: Int64Array
    recorded_blocks: Int64Array
    finalized: BoolArray
    draft_unproven: BoolArray
    ended: BoolArray
    sealed: BoolArray
    silenced: BoolArray
    publishes: BoolArray
    publishes_generated: BoolArray

    def __init__(self, capacity: int) -> None:
        self.size = 0
        for name in _INT_FIELDS:
            setattr(self, name, np.zeros(capacity, np.int64))
        for name in _BOOL_FIELDS:
            setattr(self, name, np.zeros(capacity, np.bool_))

    def append(
        self,
        *,
        reuse: int,
        num_tokens: int,
        coverage: int,
        draft_coverage: int,
        publishes: bool,
        publishes_generated: bool,
    ) -> None:
        """Add one sequence whose committed length is its reused length."""
        index = self.size
        self.committed[index] = self.common[index] = self.proven[index] = self.reuse[index] = reuse
        self.num_tokens[index] = self.prompt[index] = num_tokens
        self.coverage[index] = coverage
        self.draft_coverage[index] = draft_coverage
        self.offered_blocks[index] = self.recorded_blocks[index] = 0
        self.finalized[index] = self.draft_unproven[index] = self.ended[index] = self.sealed[index] = self.silenced[
            index
        ] = False
        self.publishes[index] = publishes
        self.publishes_generated[index] = publishes and publishes_generated
        self.size += 1

    def pop(self) -> None:
        """Drop the last sequence."""
        self.size -= 1

    def keep(self, survivors: list[int]) -> None:
        """Keep the named sequences, in this order."""
        for name in (*_INT_FIELDS, *_BOOL_FIELDS):
            column = getattr(self, name)
            column[: len(survivors)] = column[survivors]
        self.size = len(survivors)
