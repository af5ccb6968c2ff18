"""`SpecCommonStateTracker`: the draft trails the base by exactly the last accepted span."""

from __future__ import annotations

import pytest

from edgellm.cache.common_state import SpecCommonStateTracker
from edgellm.errors import ContractViolation, InvalidArgumentError


def tracked(*lengths):
    tracker = SpecCommonStateTracker()
    for slot, length in enumerate(lengths):
        tracker.initialize(slot, length)
    return tracker


def test_accepted_tokens_become_common_with_the_next_draft_pass():
    tracker = tracked(9, 20)
    assert tracker.draft_prefill_pending
    tracker.materialize_pending(0)
    assert tracker.draft_prefill_pending is False
    assert tracker.common_lengths == [9, 20]
    tracker.record_accepted(0, 3)
    tracker.record_accepted(1, 1)
    assert (tracker.common_lengths, tracker.pending(0)) == ([9, 20], 3)
    tracker.materialize_pending(1)
    assert (tracker.common_lengths, tracker.pending(0)) == ([12, 21], 0)
    tracker.materialize_pending(2)
    assert tracker.common_lengths == [12, 21]


def test_a_span_is_materialised_before_the_next_one():
    tracker = tracked(4)
    tracker.record_accepted(0, 2)
    with pytest.raises(ContractViolation, match="2 accepted tokens without draft state"):
        tracker.record_accepted(0, 1)
    assert tracker.pending(0) == 2


def test_compaction_keeps_the_order_of_the_survivors():
    tracker = tracked(4, 5, 6)
    tracker.record_accepted(2, 3)
    tracker.compact([0, -1, 1])
    assert len(tracker) == 2
    tracker.materialize_pending(1)
    assert tracker.common_lengths == [4, 9]
    for wrong in ([0], [1, 0]):
        with pytest.raises(InvalidArgumentError):
            tracker.compact(wrong)
    assert tracker.common_lengths == [4, 9]


def test_slots_are_dense_and_may_begin_again():
    tracker = tracked(4)
    with pytest.raises(InvalidArgumentError, match="dense"):
        tracker.initialize(2, 1)
    with pytest.raises(InvalidArgumentError):
        tracker.initialize(0, -1)
    tracker.record_accepted(0, 2)
    tracker.initialize(0, 7)
    assert (tracker.common_lengths, tracker.pending(0)) == ([7], 0)
    with pytest.raises(ContractViolation, match="unknown"):
        tracker.pending(1)
    with pytest.raises(InvalidArgumentError):
        tracker.record_accepted(0, -1)
    with pytest.raises(InvalidArgumentError):
        tracker.materialize_pending(-1)
    tracker.reset()
    assert len(tracker) == 0
    assert tracker.draft_prefill_pending


def test_nothing_is_an_allowed_length_and_an_allowed_span():
    tracker = tracked(0, 5)
    tracker.record_accepted(0, 0)
    tracker.record_accepted(1, 0)
    tracker.record_accepted(1, 2)  # a span of none leaves nothing to materialise
    tracker.materialize_pending(1)
    assert tracker.common_lengths == [0, 7]
