"""Lowering of plans to ragged batches: exact arrays (specification section 9.1)."""

from __future__ import annotations

import numpy as np

from edgellm.request import LLMGenerationRequest
from edgellm.runtime.lowering import BatchLowering
from edgellm.session.finish import FinishRule
from edgellm.session.prompt import TokenizedPrompt
from edgellm.session.resident import Resident
from edgellm.session.types import (
    RequestId,
    ResidentRef,
    ScheduledSequenceDescriptor,
    SequenceIdentity,
    SequenceWork,
)

PAGE_ROWS = np.arange(12, dtype=np.int32).reshape(4, 3)


def resident(slot: int, *, prompt: list[int], committed: int, generated: list[int] | None = None) -> Resident:
    made = Resident(
        identity=SequenceIdentity(RequestId(slot + 1), ResidentRef(slot, 1)),
        request=LLMGenerationRequest(),
        prompt=TokenizedPrompt(np.array(prompt, dtype=np.int32)),
        rule=FinishRule(frozenset(), 10),
        cancel_token=None,
        text=None,
        exclusive=False,
        uniform=False,
    )
    made.start_at(committed, None)
    made.generated = generated or []
    return made


def context(row: Resident, query: int, *, final: bool) -> ScheduledSequenceDescriptor:
    return ScheduledSequenceDescriptor(row.identity, SequenceWork.CONTEXT, query, row.committed, final)


def decode(row: Resident) -> ScheduledSequenceDescriptor:
    return ScheduledSequenceDescriptor(row.identity, SequenceWork.DECODE, 1, row.committed)


def lowering() -> BatchLowering:
    return BatchLowering(max_sequences=4, page_rows=PAGE_ROWS)


def test_full_cohort_decode() -> None:
    rows = [
        resident(2, prompt=[5] * 9, committed=10, generated=[70, 71]),
        resident(0, prompt=[6] * 3, committed=3, generated=[80]),
    ]
    lowered = lowering().lower(rows, [decode(row) for row in rows])
    batch = lowered.batch
    assert batch.token_ids.tolist() == [71, 80]
    assert batch.positions.tolist() == [10, 3]
    assert batch.query_start.tolist() == [0, 1, 2]
    assert batch.query_len.tolist() == [1, 1]
    assert batch.past_len.tolist() == [10, 3]
    assert batch.state_index.tolist() == [2, 0]
    assert batch.logits_index.tolist() == [0, 1]
    assert batch.logits_to_seq.tolist() == [0, 1]
    assert (lowered.plan_row, lowered.selected) == ([0, 1], [0, 1])
    assert batch.page_rows is PAGE_ROWS


def test_mixed_step_puts_context_rows_first_and_selects_final_chunks_and_decodes() -> None:
    rows = [
        resident(1, prompt=[1, 2, 3], committed=3, generated=[90]),
        resident(3, prompt=[10, 11, 12, 13, 14], committed=1),
        resident(0, prompt=[20, 21, 22], committed=0),
    ]
    plan = [decode(rows[0]), context(rows[1], 2, final=False), context(rows[2], 3, final=True)]
    lowered = lowering().lower(rows, plan)
    batch = lowered.batch
    assert batch.token_ids.tolist() == [11, 12, 20, 21, 22, 90]
    assert batch.positions.tolist() == [1, 2, 0, 1, 2, 3]
    assert batch.query_start.tolist() == [0, 2, 5, 6]
    assert batch.query_len.tolist() == [2, 3, 1]
    assert batch.past_len.tolist() == [1, 0, 3]
    assert batch.state_index.tolist() == [3, 0, 1]
    assert batch.logits_index.tolist() == [4, 5]
    assert batch.logits_to_seq.tolist() == [1, 2]
    assert (lowered.plan_row, lowered.selected) == ([1, 2, 0], [2, 0])


def test_chunk_starts_where_shared_state_ends_and_a_covered_chunk_has_no_row() -> None:
    partly = resident(0, prompt=list(range(20, 30)), committed=0)
    partly.state_length = 4
    wholly = resident(1, prompt=list(range(40, 50)), committed=0)
    wholly.state_length = 8
    rows = [partly, wholly]
    lowered = lowering().lower(rows, [context(partly, 6, final=False), context(wholly, 6, final=False)])
    assert lowered.batch.token_ids.tolist() == [24, 25]
    assert lowered.batch.positions.tolist() == [4, 5]
    assert lowered.batch.past_len.tolist() == [4]
    assert lowered.plan_row == [0]
    assert lowered.selected == []
    assert len(lowered.batch.logits_index) == 0


def test_arrays_are_reused_and_grow_for_a_larger_step() -> None:
    low = lowering()
    row = resident(0, prompt=list(range(1000)), committed=0)
    first = low.lower([row], [context(row, 10, final=False)]).batch.token_ids
    second = low.lower([row], [context(row, 20, final=False)]).batch.token_ids
    assert np.shares_memory(first, second)
    large = low.lower([row], [context(row, 1000, final=True)]).batch
    assert large.token_ids.tolist() == list(range(1000))
    assert large.positions.tolist() == list(range(1000))


def test_dtypes_follow_the_batch_contract() -> None:
    row = resident(0, prompt=[1, 2], committed=0)
    batch = lowering().lower([row], [context(row, 2, final=True)]).batch
    for name in ("token_ids", "positions", "query_start", "query_len", "past_len", "state_index", "logits_to_seq"):
        assert getattr(batch, name).dtype == np.int32, name
    assert batch.logits_index.dtype == np.int64
