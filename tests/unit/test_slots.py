"""The slot pool: behaviours 1 to 4 of the session specification, and 103 of the context cache's."""

from __future__ import annotations

import pickle
import random

import pytest

from edgellm.errors import InvalidArgumentError
from edgellm.session._slots import ResidentSlotPool
from edgellm.session.types import ResidentRef


def test_behaviour_1_fresh_pool_hands_out_lowest_slots_with_epoch_1_then_none() -> None:
    pool = ResidentSlotPool(3)
    assert [pool.acquire() for _ in range(4)] == [ResidentRef(0, 1), ResidentRef(1, 1), ResidentRef(2, 1), None]
    assert pool.available() == 0


def test_behaviour_2_released_slot_comes_back_under_a_new_epoch() -> None:
    pool = ResidentSlotPool(3)
    _, second, _ = pool.acquire(), pool.acquire(), pool.acquire()
    assert pool.release(ResidentRef(1, 1))
    assert not pool.contains(ResidentRef(1, 1))
    assert pool.acquire() == ResidentRef(1, 2)
    assert second == ResidentRef(1, 1)


def test_behaviour_3_stale_release_is_refused_and_owner_unaffected() -> None:
    pool = ResidentSlotPool(1)
    stale = pool.acquire()
    assert stale is not None
    assert pool.release(stale)
    owner = pool.acquire()
    assert owner == ResidentRef(0, 2)
    assert not pool.release(stale)
    assert pool.contains(owner)
    assert pool.available() == 0


def test_103_a_released_ref_is_refused_when_its_slot_lives_again() -> None:
    pool = ResidentSlotPool(1)
    old = pool.acquire()
    assert old == ResidentRef(0, 1)
    assert pool.release(old)
    new = pool.acquire()
    assert new == ResidentRef(0, 2)
    assert (pool.contains(old), pool.contains(new)) == (False, True)
    assert not pool.release(old)
    assert pool.contains(new)
    assert pool.release(new)
    pool.check_invariants()


@pytest.mark.parametrize("ref", [ResidentRef(), ResidentRef(0, 0), ResidentRef(7, 1), ResidentRef(-1, 1)])
def test_refs_that_never_lived_are_not_contained(ref: ResidentRef) -> None:
    pool = ResidentSlotPool(2)
    pool.acquire()
    assert not pool.contains(ref)
    assert not pool.release(ref)


def test_behaviour_4_equal_call_sequences_give_equal_refs_on_two_ranks() -> None:
    left, right = ResidentSlotPool(5), ResidentSlotPool(5)
    choice = random.Random(20)
    live: list[ResidentRef] = []
    seen: set[ResidentRef] = set()
    for _ in range(500):
        if live and choice.random() < 0.5:
            ref = live.pop(choice.randrange(len(live)))
            assert left.release(ref)
            assert right.release(ref)
        else:
            first, second = left.acquire(), right.acquire()
            assert first == second
            if first is not None:
                assert first not in seen
                seen.add(first)
                live.append(first)
        left.check_invariants()
        assert left.available() == 5 - len(live)


@pytest.mark.parametrize(
    "ref", [ResidentRef(2**70, 1), ResidentRef(0, 2**64), ResidentRef(0, -1), ResidentRef(-(2**70), 1)]
)
def test_numbers_beyond_any_slot_or_epoch_are_not_contained(ref: ResidentRef) -> None:
    pool = ResidentSlotPool(1)
    owner = pool.acquire()
    assert not pool.contains(ref)
    assert not pool.release(ref)
    assert owner is not None
    assert pool.contains(owner)


def test_a_ref_is_an_ordinary_value() -> None:
    ref = ResidentSlotPool(1).acquire()
    assert ref is not None
    assert (ref, hash(ref), repr(ref)) == (ResidentRef(0, 1), hash(ResidentRef(0, 1)), repr(ResidentRef(0, 1)))
    assert pickle.loads(pickle.dumps(ref)) == ref


@pytest.mark.parametrize("capacity", [0, -3])
def test_a_capacity_below_1_is_refused(capacity: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"the slot pool has capacity {capacity}; it needs at least 1"):
        ResidentSlotPool(capacity)
