"""The length ledger of one request: per-sequence lengths as arrays, so that a step costs few Python operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Int64Array = npt.NDArray[np.int64]
    BoolArray = npt.NDArray[np.bool_]

_INT_FIELDS = ("committed", "num_tokens", "coverage", "reuse", "common", "published_blocks", "recorded_blocks")
_BOOL_FIELDS = ("finalized", "publishes", "publishes_generated")


class LengthLedger:
    """Arrays indexed by execution order; `size` entries are live, the rest is spare room.

    Attributes (all in tokens unless named otherwise):
        committed: state exists for positions [0, committed).
        num_tokens: length of the token list (prompt and accepted tokens).
        coverage: positions that the leased pages can hold.
        reuse: where prefill began.
        common: prefix materialised by base and draft; equals committed when not speculative.
        published_blocks: full blocks offered to the index so far.
        recorded_blocks: blocks of the last endpoint offered for retention.
        finalized: the prompt is complete (a ghost joiner is not).
        publishes, publishes_generated: what the sequence's policies allow.
    """

    __slots__ = (*_INT_FIELDS, *_BOOL_FIELDS, "size")

    committed: Int64Array
    num_tokens: Int64Array
    coverage: Int64Array
    reuse: Int64Array
    common: Int64Array
    published_blocks: Int64Array
    recorded_blocks: Int64Array
    finalized: BoolArray
    publishes: BoolArray
    publishes_generated: BoolArray

    def __init__(self, capacity: int) -> None:
        self.size = 0
        for name in _INT_FIELDS:
            setattr(self, name, np.zeros(capacity, np.int64))
        for name in _BOOL_FIELDS:
            setattr(self, name, np.zeros(capacity, np.bool_))

    def append(self, *, reuse: int, num_tokens: int, coverage: int, publishes: bool, publishes_generated: bool) -> None:
        """Add one sequence whose committed length is its reused length."""
        index = self.size
        self.committed[index] = self.common[index] = self.reuse[index] = reuse
        self.num_tokens[index] = num_tokens
        self.coverage[index] = coverage
        self.published_blocks[index] = self.recorded_blocks[index] = 0
        self.finalized[index] = False
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
