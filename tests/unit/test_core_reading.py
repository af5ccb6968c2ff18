"""Faults of the cache core that were found by reading it: each test is the shortest way into one."""

from __future__ import annotations

import copy
import gc
import pickle

import numpy as np
import pytest
from manager_rig import A, B, C, P, Run, cached, chain, checkpointed, hybrid, mtp, spec, vanilla

from edgellm._core.cache_manager import CacheRequestLease, ContextCacheManager
from edgellm.cache.types import AcquireStatus, HybridSnapshotReservation, ResourceDemand
from edgellm.errors import InvalidArgumentError

INT64_MAX = 2**63 - 1


# Retention


@pytest.mark.parametrize("first_expiry", [0, 1000])
@pytest.mark.parametrize("speculative", [False, True])
def test_a_tail_source_that_was_let_go_never_outlives_the_blocks_in_front_of_it(
    first_expiry: int, speculative: bool
) -> None:
    manager = spec(8, future=0)
    producer = Run(manager, A + B, speculative=speculative, expiry=50)
    producer.publish(make_record=False)
    producer.release()
    hit = Run(manager, A + B, speculative=speculative, expiry=first_expiry)  # copies from block 1 and lets it go
    assert (hit.lease.shared_block_count, hit.lease.tail_token_count) == (1, P - 1)
    manager.set_expiry(hit.lease, 100)
    hit.release()
    manager.set_now(200)
    manager.check_invariants()
    front, child = manager.index.path_of(1)
    assert manager.index.eviction_order().index(child) < manager.index.eviction_order().index(front)
    assert manager.index.expiry_of(front) == first_expiry  # what was promised to the tail source


def test_an_expiry_set_later_counts_for_all_that_is_still_held() -> None:
    manager = vanilla(8)
    cached(manager, A, expiry=50)
    hit = Run(manager, A + B + [1], expiry=0)
    manager.set_expiry(hit.lease, 100)
    hit.publish()
    hit.release()
    assert [manager.index.expiry_of(p) for p in range(2)] == [100, 100]


def test_a_tail_source_that_is_still_held_gets_the_expiry_set_last() -> None:
    manager = vanilla(8)
    cached(manager, A + B, expiry=50)
    hit = Run(manager, A + B, hold=True)
    manager.set_expiry(hit.lease, 100)
    hit.release()
    assert [manager.index.expiry_of(p) for p in range(2)] == [100, 100]
    manager.set_now(200)
    manager.check_invariants()


# What Python may do between two steps


@pytest.mark.parametrize("allocations", range(8))
def test_a_dropped_lease_that_is_collected_during_a_publication_does_no_harm(allocations: int) -> None:
    manager = hybrid(12)
    later = Run(manager, A + B)
    dropped = Run(manager, A + B)
    manager.publish(dropped.lease, dropped.chain, 2 * P, make_record=False)
    reservation = later.reserve(2 * P)
    publish, lease, tokens = manager.publish_hybrid, later.lease, later.chain
    was, thresholds = gc.isenabled(), gc.get_threshold()
    gc.collect()
    gc.disable()
    try:
        cycle: list[object] = [dropped.lease]
        cycle.append(cycle)
        del dropped, cycle
        gc.set_threshold(gc.get_count()[0] + allocations, 1, 1)
        gc.enable()
        result = publish(lease, tokens, 2 * P, reservation)
    finally:
        gc.set_threshold(*thresholds)
        gc.disable()
        if was:
            gc.enable()
    manager.check_invariants()
    assert result.published_block_count == 2
    gc.collect()
    manager.check_invariants()
    assert manager.num_live_leases == 1


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_lease_cannot_be_copied(make: object) -> None:
    manager = vanilla(8)
    run = Run(manager, A + B)
    with pytest.raises(TypeError, match="neither copied nor pickled"):
        make(run.lease)  # type: ignore[operator]
    run.release()
    manager.check_invariants()
    assert sorted(manager.pools.base.free_list()) == list(range(8))


def test_a_plan_cannot_be_changed_through_the_pickle_protocol() -> None:
    plan = vanilla(8).plan(chain(A))
    assert not hasattr(plan, "__setstate_cython__")
    with pytest.raises(TypeError):
        copy.copy(plan)


def test_a_lease_that_no_manager_made_has_no_pages() -> None:
    lease = CacheRequestLease.__new__(CacheRequestLease)
    assert (lease.valid, lease.num_base_pages, lease.base_pages.tolist()) == (False, 0, [])
    lease.release()


# Numbers at the border


@pytest.mark.parametrize("min_tokens", [INT64_MAX, INT64_MAX - 1, 2**62])
@pytest.mark.parametrize("reserve_pages", [0, 1, INT64_MAX])
def test_more_tokens_than_an_address_space_are_refused(min_tokens: int, reserve_pages: int) -> None:
    manager = ContextCacheManager(1, ResourceDemand(8))
    result = manager.acquire_vanilla(chain([1], 1), min_tokens=min_tokens, reserve_pages=reserve_pages)
    assert result.status is AcquireStatus.INSUFFICIENT_CAPACITY
    assert (result.lease, manager.num_live_leases, manager.pools.base.free_count) == (None, 0, 8)


@pytest.mark.parametrize(
    ("extra", "draft_extra"),
    [(INT64_MAX, 0), (0, INT64_MAX), (-INT64_MAX - 1, 0), (INT64_MAX, INT64_MAX), (2**31, 0), (2**31 - 1, 0)],
)
def test_look_ahead_that_does_not_fit_a_length_is_an_error_and_not_covered(extra: int, draft_extra: int) -> None:
    manager = vanilla(8)
    run = Run(manager, A)
    with pytest.raises(InvalidArgumentError):
        manager.ensure_coverage([run.lease], np.array([1]), extra, draft_extra)
    assert run.lease.num_base_pages == 1


@pytest.mark.parametrize("record_id", [2**64, 2**70, -1, 0, "1", None, 1.0])
def test_no_record_has_such_an_id(record_id: object) -> None:
    manager = vanilla(8)
    cached(manager, A)
    assert record_id not in manager.records  # type: ignore[operator]
    with pytest.raises(InvalidArgumentError, match="not in the store"):
        manager.evict_record(record_id)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="not in the store"):
        manager.record(record_id)  # type: ignore[arg-type]


@pytest.mark.parametrize("slots", [(2**40, None), (-1, None), (0, 2**40), (0, -1), (2**31, 2**31)])
def test_no_lease_holds_such_a_reservation(slots: tuple[int, int | None]) -> None:
    manager = hybrid(8)
    run = Run(manager, A)
    assert manager.reserve_hybrid_snapshots(run.lease, False) == HybridSnapshotReservation(0, None)
    for call in (manager.mark_snapshots_written, manager.retire_hybrid_snapshot_reservation):
        with pytest.raises(InvalidArgumentError, match="does not hold"):
            call(run.lease, HybridSnapshotReservation(*slots))


# What counts as evicted


def test_a_replaced_checkpoint_and_the_block_that_goes_with_it_are_not_counted_as_reclaimed() -> None:
    manager = mtp(12)
    checkpointed(manager, A + B)  # plain: hangs at block 1
    assert manager.index.size == 2
    before = manager.metrics()
    paired = Run(manager, A + B, speculative=True)
    paired.checkpoint(2 * P)  # hangs at block 0 and stands for the same tokens
    assert (manager.index.size, len(manager.records)) == (1, 1)
    assert manager.metrics() == before
    assert not manager.index.evicted(paired.chain.hash_at(1))
    plan = manager.plan(chain(A + C))
    assert plan.known_token_length == P
    manager.check_invariants()
