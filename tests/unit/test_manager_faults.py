"""Faults that random operations found in the manager, each as the shortest sequence that showed it."""

from __future__ import annotations

import pytest

from edgellm.testing.cache_workout import FLAVOURS, CacheWorkout


@pytest.mark.parametrize("allocation", [1, 2, 3])
def test_a_failed_publication_of_a_recurrent_sequence_keeps_no_index_page(allocation: int) -> None:
    """Pages that only index come during publication; when memory runs out behind that, they must go back."""
    work = CacheWorkout(FLAVOURS["recurrent"], 2, 8)
    sequence = work.acquire(0, [1])
    assert sequence is not None
    work.extend(0, [1, 1, 1])
    before = work.state()
    work.manager._fail_after(allocation)
    with pytest.raises(MemoryError):
        work.manager.publish(sequence.lease, sequence.chain, 4, make_record=False)
    assert work.state() == before


@pytest.mark.parametrize("allocation", [1, 2, 3, 4])
def test_a_failed_checkpoint_of_a_recurrent_sequence_keeps_no_index_page(allocation: int) -> None:
    work = CacheWorkout(FLAVOURS["recurrent"], 2, 8)
    sequence = work.acquire(0, [1])
    assert sequence is not None
    work.extend(0, [1, 1, 1])
    work.compute(0, 4)
    work.reserve_checkpoint(0)
    work.capture_checkpoint(0, sequence.staged[0])
    before = work.state()
    work.manager._fail_after(allocation)
    with pytest.raises(MemoryError):
        work.manager.publish_hybrid(sequence.lease, sequence.chain, 4, sequence.staged[0].reservation)
    assert work.state() == before


def test_draft_state_that_looks_two_tokens_ahead_is_not_taken_over_on_the_strength_of_one() -> None:
    """The last entries of a draft page were made with two tokens behind the block; only one of them is compared."""
    work = CacheWorkout(FLAVOURS["spec-two-future"], 2, 16)
    assert work.acquire(0, [1, 1, 2, 0, 0], speculative=True)
    assert work.acquire(0, [1, 1, 2, 2, 2], speculative=True)
    work.compute(0, 5)
    work.publish(0, make_record=False)
    work.rebind(1)  # checks what it takes over
    work.compute(1, 5)
    work.publish(1, make_record=False)


def test_draft_state_in_front_of_media_is_not_taken_over_in_front_of_other_media() -> None:
    """The token behind the block is media on both sides: nothing says that it is the same."""
    work = CacheWorkout(FLAVOURS["spec"], 2, 16)
    assert work.acquire(2, [1, 1, -1, 1, 1], speculative=True)
    assert work.acquire(2, [1, 1, -3, 1, 1], speculative=True)
    work.compute(0, 5)
    work.publish(0, make_record=False)
    work.rebind(1)  # checks what it takes over
