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
from edgellm.session.types import SequenceWork

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
        self._iota = np.arange(max_sequences + 1, dtype=np.int32)
        self._token_ids = np.zeros(_INITIAL_TOKENS, dtype=np.int32)
        self._positions = np.zeros(_INITIAL_TOKENS, dtype=np.int32)

    def lower(self, rows: Sequence[Resident], descriptors: Sequence[ScheduledSequenceDescriptor]) -> LoweredStep:
        """The batch of `rows`, each doing what its descriptor says.

        Args:
            rows: one descriptor each, already validated.
        """
        decode = [i for i, descriptor in enumerate(descriptors) if descriptor.work is SequenceWork.DECODE]
        if len(decode) == len(rows):
            return self._lower_decode(rows)
        context = [
            i
            for i, descriptor in enumerate(descriptors)
            if descriptor.work is SequenceWork.CONTEXT and rows[i].state_length < _chunk_end(descriptor)
        ]
        return self._lower_mixed(rows, descriptors, context, decode)

    def _lower_decode(self, rows: Sequence[Resident]) -> LoweredStep:
        """One token a row; no Python work per row beyond reading the three numbers."""
        count = len(rows)
        self._reserve_tokens(count)
        self._query_len[:count] = 1
        self._query_start[: count + 1] = self._iota[: count + 1]
        self._past_len[:count] = [resident.committed for resident in rows]
        self._state_index[:count] = [resident.ref.slot for resident in rows]
        self._token_ids[:count] = [resident.generated[-1] for resident in rows]
        self._positions[:count] = self._past_len[:count]
        self._logits_index[:count] = self._iota[:count]
        self._logits_to_seq[:count] = self._iota[:count]
        return LoweredStep(self._views(count, count, count), list(range(count)), list(range(count)))

    def _lower_mixed(
        self,
        rows: Sequence[Resident],
        descriptors: Sequence[ScheduledSequenceDescriptor],
        context: list[int],
        decode: list[int],
    ) -> LoweredStep:
        plan_row = context + decode
        self._reserve_tokens(sum(descriptor.query_length for descriptor in descriptors))
        selected: list[int] = []
        start = 0
        for row, index in enumerate(plan_row):
            resident, descriptor = rows[index], descriptors[index]
            past = resident.state_length
            query = _chunk_end(descriptor) - past
            end = start + query
            if descriptor.work is SequenceWork.CONTEXT:
                self._token_ids[start:end] = resident.prompt[past : past + query]
            else:
                self._token_ids[start] = resident.generated[-1]
            self._positions[start:end] = np.arange(past, past + query, dtype=np.int32)
            self._query_start[row] = start
            self._query_len[row] = query
            self._past_len[row] = past
            self._state_index[row] = resident.ref.slot
            if descriptor.select_last_token_logits:
                self._logits_index[len(selected)] = end - 1
                self._logits_to_seq[len(selected)] = row
                selected.append(index)
            start = end
        self._query_start[len(plan_row)] = start
        return LoweredStep(self._views(len(plan_row), start, len(selected)), plan_row, selected)

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


def _chunk_end(descriptor: ScheduledSequenceDescriptor) -> int:
    return descriptor.past_length + descriptor.query_length
