"""Lowering: a validated plan and its residents become the `RaggedBatch` of one forward pass.

Context rows come before decode rows, so that kernels can split the batch once; within each kind plan order
is kept.  A chunk starts where the sequence's state ends, which is behind the planned start when another
sequence published a part of it meanwhile; a chunk that is covered entirely has no row.  Arrays are allocated
once and grow only when a step is larger than every one before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from edgellm.runtime.batch import RaggedBatch
from edgellm.session._lowering import lower_rows, tokens_to_run
from edgellm.session._step_plan import StepPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from edgellm.session.resident import Resident
    from edgellm.session.types import ScheduledSequenceDescriptor

    Int32Array = npt.NDArray[np.int32]

_INITIAL_TOKENS = 256


@dataclass(slots=True)
class LoweredStep:
    """Attributes:
    batch: the views are valid until the next `lower`.
    plan_row: per sequence of the batch, its index in the rows that were lowered.
    selected: per logits row, the index of its sequence in the rows that were lowered.
    """

    batch: RaggedBatch
    plan_row: list[int]
    selected: list[int]


class BatchLowering:
    """Reusable host arrays of one session.  Not thread-safe."""

    def __init__(self, *, max_sequences: int, page_rows: Int32Array) -> None:
        """
        Args:
            page_rows: (num_slots, pages_per_slot) int32, the live page table; referenced, never copied.
        """
        self._page_rows = page_rows
        self._query_start = np.zeros(max_sequences + 1, dtype=np.int32)
        self._query_len = np.zeros(max_sequences, dtype=np.int32)
        self._past_len = np.zeros(max_sequences, dtype=np.int32)
        self._state_index = np.zeros(max_sequences, dtype=np.int32)
        self._logits_index = np.zeros(max_sequences, dtype=np.int64)
        self._logits_to_seq = np.zeros(max_sequences, dtype=np.int32)
        self._token_ids = np.zeros(_INITIAL_TOKENS, dtype=np.int32)
        self._positions = np.zeros(_INITIAL_TOKENS, dtype=np.int32)

    def lower(self, rows: Sequence[Resident], descriptors: Sequence[ScheduledSequenceDescriptor]) -> LoweredStep:
        """The batch of `rows`, each doing what its descriptor says.

        Args:
            rows: one descriptor each, already validated.
        """
        plan = descriptors if type(descriptors) is StepPlan else StepPlan(descriptors)
        self._reserve_tokens(tokens_to_run(rows, plan))
        plan_row, selected, tokens = lower_rows(
            rows,
            plan,
            self._token_ids,
            self._positions,
            self._query_start,
            self._query_len,
            self._past_len,
            self._state_index,
            self._logits_index,
            self._logits_to_seq,
        )
        return LoweredStep(self._views(len(plan_row), tokens, len(selected)), plan_row, selected)

    def _views(self, sequences: int, tokens: int, logits: int) -> RaggedBatch:
        return RaggedBatch(
            token_ids=self._token_ids[:tokens],
            positions=self._positions[:tokens],
            query_start=self._query_start[: sequences + 1],
            query_len=self._query_len[:sequences],
            past_len=self._past_len[:sequences],
            state_index=self._state_index[:sequences],
            page_rows=self._page_rows,
            logits_index=self._logits_index[:logits],
            logits_to_seq=self._logits_to_seq[:logits],
        )

    def _reserve_tokens(self, tokens: int) -> None:
        if tokens > len(self._token_ids):
            size = max(tokens, 2 * len(self._token_ids))
            self._token_ids = np.zeros(size, dtype=np.int32)
            self._positions = np.zeros(size, dtype=np.int32)
