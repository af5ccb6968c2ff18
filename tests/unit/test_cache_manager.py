"""The manager on attention models: exact pages, references and orders (behaviours 67 to 92).

Where the block tree changes a numbered behaviour, the new rule is tested under the same number; docs/block-tree.md
lists them with the reasons.
"""

from __future__ import annotations

import gc

import numpy as np
import pytest
from manager_rig import A, B, C, D, P, Run, cached, chain, snapshot, vanilla

from edgellm._core.block_hash import TokenChain
from edgellm._core.block_index import DEFAULT_HASH_MASK
from edgellm._core.cache_manager import CacheRequestLease, ContextCacheManager
from edgellm.cache.types import (
    AcquireStatus,
    ContextCacheLookupPolicy,
    ContextCacheManagerMetrics,
    Hash128,
    PublishStatus,
    ResourceDemand,
    RetentionPriority,
    ReusePlanKind,
    ReusePlanMode,
    ReuseStopReason,
    SpecReuseContract,
)
from edgellm.errors import ContractViolation, InvalidArgumentError

LOW, NORMAL, HIGH = RetentionPriority.LOW, RetentionPriority.NORMAL, RetentionPriority.HIGH


# Acquire and release


def test_cold_acquire_takes_fresh_pages() -> None:
    manager = vanilla(4)
    cold = Run(manager, range(9))
    assert cold.result.status is AcquireStatus.ACQUIRED
    assert (cold.pages, cold.path, cold.lease.shared_block_count) == ([0, 1, 2], [], 0)
    assert cold.lease.base_pages.dtype == np.int32
    assert manager.available_pages == 1
    cold.lease.release()
    assert manager.pools.base.free_list() == [3, 2, 1, 0]
    manager.check_invariants()


def test_67_hit_shares_pages_and_release_counts_once() -> None:
    manager = vanilla(6)
    cached(manager, range(8))
    hit = Run(manager, range(9))
    assert (hit.pages, hit.path, hit.lease.shared_block_count) == ([0, 1, 2], [0, 1], 2)
    assert [manager.pools.base.active_ref(p) for p in range(3)] == [1, 1, 1]
    assert [manager.pools.base.cache_ref(p) for p in range(3)] == [1, 1, 0]
    hit.lease.release()
    hit.lease.release()
    manager.release(hit.lease)
    assert hit.lease.valid is False
    assert (hit.pages, hit.lease.num_base_pages, hit.lease.published_block_count) == ([], 0, 0)
    assert [manager.pools.base.active_ref(p) for p in range(3)] == [0, 0, 0]
    assert manager.pools.base.free_list() == [3, 4, 5, 2]
    assert manager.index.eviction_order() == [1, 0]
    manager.check_invariants()


def test_68_refused_acquire_changes_nothing() -> None:
    manager = vanilla(4)
    cached(manager, [*A, *B])
    holder = Run(manager, [*C, *D])
    before = snapshot(manager)
    refused = manager.acquire_vanilla(chain([*A, *B, *C, 1]))
    assert (refused.lease, refused.status) == (None, AcquireStatus.INSUFFICIENT_CAPACITY)
    assert refused.plan.reuse_token_length == 8
    assert snapshot(manager) == before
    holder.lease.release()


def test_68_huge_demand_is_refused_not_an_error() -> None:
    manager = vanilla(4)
    for min_tokens in (17, 10**15):
        assert manager.acquire_vanilla(chain(range(3)), min_tokens=min_tokens).lease is None
    with pytest.raises(InvalidArgumentError, match="min_tokens -1"):
        manager.acquire_vanilla(chain(range(3)), min_tokens=-1)


def test_69_hit_block_is_held_while_the_rest_of_its_record_goes() -> None:
    """Reference: the hit page leaves the index with its record.  Tree: it stays, only the blocks below it go."""
    manager = vanilla(4)
    record = cached(manager, [*A, *B, *C])
    hit = Run(manager, [*A, *D, *D, 1])
    assert hit.pages == [0, 3, 2, 1]
    assert record not in manager.records
    assert 0 in manager.index
    assert manager.metrics() == ContextCacheManagerMetrics(evicted_records=1, reclaimed_base_kv_pages=2)
    manager.check_invariants()


def test_70_hit_refreshes_blocks_but_not_records() -> None:
    """Reference: a vanilla hit refreshes nothing.  Tree: recency is a block's, so the hit block outlives the other."""
    manager = vanilla(3)
    first, second = cached(manager, A), cached(manager, B)
    assert manager.index.eviction_order() == [0, 1]
    Run(manager, [*A, 9]).lease.release()
    assert manager.records.lru_to_mru() == [first, second]
    assert manager.index.eviction_order() == [1, 0]


def test_worked_example_9_hit_cannot_feed_itself() -> None:
    manager = vanilla(2)
    record = cached(manager, A)
    assert manager.acquire_vanilla(chain([*A, *B, 1])).lease is None
    assert manager.records.lru_to_mru() == [record]
    assert manager.index.eviction_order() == [0]


def test_coverage_is_leased_up_front() -> None:
    manager = vanilla(4)
    assert Run(manager, range(7), min_tokens=9).pages == [0, 1, 2]
    assert Run(manager, range(3), min_tokens=1).pages == [3]  # never lowers the demand


def test_bypass_takes_private_pages() -> None:
    manager = vanilla(4)
    cached(manager, range(8))
    result = manager.acquire_vanilla(chain(range(8)), lookup_policy=ContextCacheLookupPolicy.BYPASS)
    assert result.lease is not None
    assert (result.lease.shared_block_count, result.lease.base_pages.tolist()) == (0, [2, 3])
    assert result.plan.stop_reason is ReuseStopReason.BYPASS


def test_stale_or_foreign_plan_is_refused() -> None:
    manager, other = vanilla(4), vanilla(4)
    plan = manager.plan(chain(range(9)))
    with pytest.raises(ContractViolation, match="another manager"):
        other.acquire(plan)
    lease = manager.acquire(plan).lease
    assert lease is not None
    with pytest.raises(ContractViolation, match="changed since the plan was made"):
        manager.acquire(plan)
    stale = manager.plan(chain(range(4)))
    lease.release()
    with pytest.raises(ContractViolation, match="changed since the plan was made"):
        manager.acquire(stale)
    assert manager.num_live_leases == 0


def test_dropped_lease_gives_itself_back() -> None:
    manager = vanilla(4)
    sequence = Run(manager, range(8))
    sequence.publish()
    del sequence
    gc.collect()
    assert (manager.num_live_leases, manager.available_pages) == (0, 4)
    assert manager.index.eviction_order() == [1, 0]
    manager.check_invariants()


def test_lease_keeps_its_manager_alive() -> None:
    lease = Run(vanilla(4), range(8)).lease
    gc.collect()
    assert lease.manager.available_pages == 2
    with lease as same:
        assert same is lease
    assert lease.valid is False
    with pytest.raises(ContractViolation, match=r"ContextCacheManager\.acquire"):
        CacheRequestLease()


# Growth


def test_71_growth_of_a_vanilla_lease() -> None:
    manager = vanilla(4)
    sequence = Run(manager, range(5))
    before = snapshot(manager)
    assert manager.grow_base_pages(sequence.lease, 0) is True
    for refused in (3, 4, 5, 10**9, 10**30):
        assert manager.grow_base_pages(sequence.lease, refused) is False
    with pytest.raises(InvalidArgumentError, match="cannot grow by -1 pages"):
        manager.grow_base_pages(sequence.lease, -1)
    assert snapshot(manager) == before
    assert manager.grow_base_pages(sequence.lease, 2) is True
    assert sequence.pages == [0, 1, 2, 3]


def test_73_foreign_and_released_leases_are_refused() -> None:
    manager, other = vanilla(4), vanilla(4)
    sequence = Run(manager, range(5))
    calls = [
        lambda m, s: m.grow_base_pages(s.lease, 1),
        lambda m, s: m.ensure_base_pages(s.lease, 1),
        lambda m, s: m.ensure_coverage([s.lease], [1], 1),
        lambda m, s: m.publish(s.lease, s.chain, 4, make_record=True),
        lambda m, s: m.append_tokens([s.lease], [s.chain], np.zeros(1, np.int32), True),
        lambda m, s: m.rebind(s.lease, s.chain),
    ]
    for call in calls:
        with pytest.raises(InvalidArgumentError, match="belongs to another manager"):
            call(other, sequence)
    with pytest.raises(InvalidArgumentError, match="belongs to another manager"):
        other.release(sequence.lease)
    sequence.lease.release()
    for call in calls:
        with pytest.raises(InvalidArgumentError, match="not valid any more"):
            call(manager, sequence)
    assert sequence.chain.num_tokens == 5


def test_74_growth_evicts_lru_leaves_and_leaves_leases_alone() -> None:
    manager = vanilla(5)
    held = Run(manager, [*A, 1])
    held.publish()
    cached(manager, B)
    cached(manager, C)
    assert manager.grow_base_pages(held.lease, 2) is True
    assert held.pages == [0, 1, 4, 2]
    assert manager.index.eviction_order() == [3]
    assert manager.metrics() == ContextCacheManagerMetrics(evicted_records=1, reclaimed_base_kv_pages=1)
    manager.check_invariants()


def test_ensure_base_pages_covers_tokens() -> None:
    manager = vanilla(4)
    sequence = Run(manager, range(5))
    assert manager.ensure_base_pages(sequence.lease, 8) is True
    assert sequence.pages == [0, 1]
    assert manager.ensure_base_pages(sequence.lease, 9) is True
    assert sequence.pages == [0, 1, 2]
    assert manager.ensure_base_pages(sequence.lease, 17) is False
    assert manager.ensure_base_pages(sequence.lease, 2**62) is False
    with pytest.raises(InvalidArgumentError, match="must be 0 or more"):
        manager.ensure_base_pages(sequence.lease, -1)
    assert sequence.pages == [0, 1, 2]


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_ensure_coverage_stops_at_the_first_refusal(kind: type) -> None:
    manager = vanilla(5)
    leases = [Run(manager, range(n)).lease for n in (3, 4, 8)]
    assert manager.ensure_coverage(leases, kind([3, 3, 7]), 1) == -1
    assert [lease.num_base_pages for lease in leases] == [1, 1, 2]
    assert manager.ensure_coverage(leases, kind([3, 4, 8]), 1) == 2
    assert [lease.num_base_pages for lease in leases] == [1, 2, 2]
    with pytest.raises(InvalidArgumentError, match="3 leases need as many lengths, got 2"):
        manager.ensure_coverage(leases, kind([3, 4]), 1)
    with pytest.raises(InvalidArgumentError, match="length -2 with 1 more"):
        manager.ensure_coverage(leases, kind([30, 4, -2]), 1)
    with pytest.raises(TypeError):
        manager.ensure_coverage([*leases[:2], None], kind([3, 4, 8]), 1)  # type: ignore[list-item]
    assert [lease.num_base_pages for lease in leases] == [1, 2, 2]


# Publication


def test_79_cold_publication() -> None:
    manager = vanilla(4)
    sequence = Run(manager, range(9))
    done = sequence.publish()
    assert (done.status, done.record) == (PublishStatus.PUBLISHED, 1)
    assert (done.published_block_count, done.new_block_count) == (2, 2)
    assert [manager.pools.base.cache_ref(p) for p in range(3)] == [1, 1, 0]
    record = manager.record(1)
    assert (record.id, record.node, record.base_page_path) == (1, 1, (0, 1))
    assert record.key.full_block_count == 2
    assert record.key.terminal_hash == sequence.chain.hash_at(1) == manager.index.hash_of(1)
    assert (record.draft_page_path, record.recurrent_snapshot_slot, record.exact_checkpoint_length) == (None,) * 3
    assert (sequence.pages, sequence.lease.shared_block_count) == ([0, 1, 2], 0)


def test_80_only_full_blocks_of_resident_state_are_published() -> None:
    manager = vanilla(4)
    sequence = Run(manager, range(9))
    before = snapshot(manager)
    for too_short in (0, 3, -1):
        with pytest.raises(InvalidArgumentError, match="complete no block of 4 tokens"):
            sequence.publish(too_short)
    assert snapshot(manager) == before
    assert sequence.publish(6).published_block_count == 1
    assert manager.record(1).base_page_path == (0,)
    assert 1 not in manager.index


def test_80_more_blocks_than_pages_are_refused() -> None:
    manager = vanilla(4)
    sequence = Run(manager, range(4))
    sequence.chain.extend(range(4, 12))
    with pytest.raises(InvalidArgumentError, match="holds 1 pages but 3 blocks"):
        sequence.publish()
    assert manager.index.size == 0


def test_81_first_producer_stays_canonical_and_the_later_one_takes_its_page_over() -> None:
    manager = vanilla(5)
    first = Run(manager, [*A, 9])
    second = Run(manager, [*A, *B])
    assert (first.pages, second.pages) == ([0, 1], [2, 3])
    first.publish()
    done = second.publish()
    assert (done.status, done.new_block_count) == (PublishStatus.PUBLISHED, 1)
    assert manager.record(done.record).base_page_path == (0, 3)
    assert (second.pages, second.path, second.lease.rebound_page_count) == ([0, 3], [0, 3], 1)
    assert (first.pages, first.lease.rebound_page_count) == ([0, 1], 0)
    assert manager.pools.base.active_ref(0) == 2
    assert manager.pools.base.free_list() == [4, 2]  # the second copy of block 0 is free at once
    first.lease.release()
    assert manager.index.eviction_order() == []  # block 0 is held by the second and does not go before its child
    second.lease.release()
    assert manager.pools.base.free_list() == [4, 2, 1]
    assert manager.index.eviction_order() == [3, 0]
    manager.check_invariants()


def test_82_same_endpoint_again_is_touched() -> None:
    manager = vanilla(8)
    sequences = [Run(manager, [*A, 9]) for _ in range(2)]
    assert sequences[0].publish().record == 1
    assert cached(manager, B) == 2
    done = sequences[1].publish()
    assert (done.status, done.record, done.new_block_count) == (PublishStatus.EXISTING_RECORD, 1, 0)
    assert manager.records.lru_to_mru() == [2, 1]
    assert sequences[1].pages[0] == sequences[0].pages[0]
    assert manager.pools.base.cache_ref(sequences[0].pages[0]) == 1


def test_84_chain_that_differs_from_the_lease_is_refused() -> None:
    manager = vanilla(6)
    cached(manager, [*A, *B])
    hit = Run(manager, [*A, *B, *C])
    before = snapshot(manager)
    for other in ([*A, *C, *C], [*B, *B, *C], [*A]):
        calls = [
            lambda c: manager.rebind(hit.lease, c),
            lambda c: manager.append_tokens([hit.lease], [c], np.zeros(1, np.int32), True),
        ]
        if len(other) > P:
            calls.append(lambda c: manager.publish(hit.lease, c, 12, make_record=True))
        for call in calls:
            with pytest.raises(InvalidArgumentError, match="differs from the lease"):
                call(chain(other))
    with pytest.raises(InvalidArgumentError, match="page size 2, the cache 4"):
        manager.publish(hit.lease, chain(A, 2), 4, make_record=True)
    assert snapshot(manager) == before


def test_87_record_limit_evicts_the_lru_front_but_not_what_others_need() -> None:
    manager = vanilla(8, max_records=2)
    cached(manager, [*A, *B])
    cached(manager, C)
    assert cached(manager, [*A, *D]) == 3
    assert manager.records.lru_to_mru() == [2, 3]
    assert 0 in manager.index
    assert 1 not in manager.index
    assert manager.record(3).base_page_path == (0, 3)
    assert manager.metrics() == ContextCacheManagerMetrics(evicted_records=1, reclaimed_base_kv_pages=1)
    manager.check_invariants()


def test_88_record_limit_zero_retains_nothing() -> None:
    manager = vanilla(4, max_records=0)
    sequence = Run(manager, range(8))
    done = sequence.publish()
    assert (done.status, done.record, done.published_block_count) == (PublishStatus.PUBLISHED, None, 0)
    manager.append_tokens([sequence.lease], [sequence.chain], np.zeros(1, np.int32), True)
    assert (manager.records.size, manager.index.size) == (0, 0)
    assert [manager.pools.base.active_ref(p) for p in sequence.pages] == [1, 1, 1]


def test_chunks_publish_without_a_record() -> None:
    manager = vanilla(4)
    sequence = Run(manager, range(12))
    assert sequence.publish(5, make_record=False).new_block_count == 1
    assert (manager.records.size, sequence.path) == (0, [0])
    assert sequence.publish(8, make_record=False).new_block_count == 1
    done = sequence.publish(12)
    assert (done.record, done.new_block_count, done.published_block_count) == (1, 1, 3)
    # An earlier endpoint of the same lease may still get a record of its own.
    assert sequence.publish(4).record == 2
    assert manager.record(2).base_page_path == (0,)


@pytest.mark.parametrize("hash_mask", [DEFAULT_HASH_MASK, 0], ids=["hashed", "all-collide"])
def test_media_identity_reaches_through_the_manager(hash_mask: int) -> None:
    manager = vanilla(6, hash_mask=hash_mask)

    def prompt(digest: Hash128) -> TokenChain:
        return chain([5, 0, 6, 7, 8], media=[None, digest, None, None, None])

    cat, dog = Hash128(1, 1), Hash128(2, 2)
    lease = manager.acquire_vanilla(prompt(cat)).lease
    assert lease is not None
    manager.publish(lease, prompt(cat), 5, make_record=True)
    lease.release()
    assert manager.plan(prompt(dog)).reuse_token_length == 0
    other = manager.acquire_vanilla(prompt(dog)).lease
    assert other is not None
    manager.publish(other, prompt(dog), 5, make_record=True)
    assert [manager.plan(prompt(d)).base_page_bindings.tolist() for d in (cat, dog)] == [[0], [2]]
    assert manager.plan(chain([5, 0, 6, 7, 8])).reuse_token_length == 0
    other.release()
    manager.evict_all()
    manager.check_invariants()
    assert manager.plan(prompt(cat)).stop_reason is ReuseStopReason.EVICTED


# Eviction


def test_91_record_evicted_under_a_live_lease() -> None:
    manager = vanilla(4)
    sequence = Run(manager, range(8))
    manager.evict_record(sequence.publish().record)
    assert (manager.index.size, manager.records.size) == (0, 0)
    assert manager.metrics() == ContextCacheManagerMetrics(evicted_records=1, reclaimed_base_kv_pages=0)
    assert (sequence.pages, sequence.path) == ([0, 1], [])
    manager.check_invariants()
    sequence.lease.release()
    assert manager.pools.base.free_list() == [2, 3, 1, 0]
    assert manager.metrics().reclaimed_base_kv_pages == 0


def test_91_sole_holder_may_publish_again() -> None:
    manager = vanilla(4)
    sequence = Run(manager, range(8))
    manager.evict_record(sequence.publish().record)
    done = sequence.publish()
    assert (done.record, done.new_block_count) == (2, 2)
    assert manager.record(2).base_page_path == (0, 1)


def test_91_page_that_several_leases_hold_is_not_indexed_again() -> None:
    manager = vanilla(8)
    first = Run(manager, [*A, 9])
    record = first.publish().record
    second = Run(manager, [*A, *B])
    manager.evict_record(record)
    done = second.publish()
    assert (done.status, done.record, done.published_block_count) == (PublishStatus.PUBLISHED, None, 0)
    manager.check_invariants()
    first.lease.release()
    assert second.publish().new_block_count == 2
    manager.check_invariants()


def test_92_shared_block_survives_the_record_of_one_branch() -> None:
    manager = vanilla(4)
    first = cached(manager, [*A, *B])
    cached(manager, [*A, *C])
    manager.evict_record(first)
    assert manager.index.lookup_prefix(chain([*A, *B])) == [0]
    assert manager.metrics() == ContextCacheManagerMetrics(evicted_records=1, reclaimed_base_kv_pages=1)
    assert manager.pools.base.free_list() == [3, 1]


def test_evict_record_keeps_blocks_with_records_or_children() -> None:
    manager = vanilla(4)
    short, long = cached(manager, A), cached(manager, [*A, *B])
    manager.evict_record(short)
    assert manager.index.size == 2
    manager.evict_record(long)
    assert manager.index.size == 0
    with pytest.raises(InvalidArgumentError, match="not in the store"):
        manager.evict_record(long)
    for call in (manager.record, manager.evict_record):
        with pytest.raises(InvalidArgumentError, match="not in the store"):
            call(77)


def test_a_page_taken_over_stays_leased_when_its_record_is_evicted() -> None:
    manager = vanilla(5)
    first = Run(manager, [*A, 9])
    second = Run(manager, [*A, 8])
    record = first.publish().record
    second.publish(make_record=False)
    first.lease.release()
    manager.evict_record(record)  # held by `second` only
    assert (second.pages, second.path) == ([0, 3], [])
    assert manager.pools.base.free_list() == [4, 2, 1]
    manager.check_invariants()
    second.lease.release()
    assert manager.pools.base.free_list() == [4, 2, 1, 3, 0]


def test_a_full_match_costs_no_more_pages_than_a_cold_run() -> None:
    """The recomputed last block of a full match takes the canonical page over instead of holding both."""
    manager = vanilla(3)
    cached(manager, [*A, *B])
    again = Run(manager, [*A, *B])
    assert manager.grow_base_pages(again.lease, 1)
    again.publish()
    assert manager.available_pages == 0
    again.lease.release()
    assert manager.available_pages == 3


def test_pages_promised_to_others_are_not_given_away() -> None:
    manager = vanilla(6)
    cached(manager, [*A, *B])
    before = snapshot(manager)
    prompt = chain([*A, *C, 1])
    refused = manager.acquire_vanilla(prompt, reserve_pages=4)
    assert (refused.status, refused.lease) == (AcquireStatus.INSUFFICIENT_CAPACITY, None)
    assert snapshot(manager) == before
    granted = manager.acquire_vanilla(prompt, reserve_pages=3)
    assert granted.status is AcquireStatus.ACQUIRED
    assert manager.available_pages == 3
    for call in ({"reserve_pages": -1}, {"min_tokens": -1}):
        with pytest.raises(InvalidArgumentError, match="-1"):
            manager.acquire_vanilla(prompt, **call)


def test_evict_all_forgets_everything_and_leaves_leases() -> None:
    manager = vanilla(8)
    held = Run(manager, [*A, *B])
    held.publish()
    cached(manager, C)
    cached(manager, D)
    assert manager.evict_all() == 4
    assert (manager.index.size, manager.index.num_namespaces, manager.records.size) == (0, 0, 0)
    assert (held.pages, held.path) == ([0, 1], [])
    assert manager.metrics() == ContextCacheManagerMetrics(evicted_records=3, reclaimed_base_kv_pages=2)
    manager.check_invariants()
    held.lease.release()
    assert manager.pools.base.free_count == 8
    assert manager.plan(chain([*A, 1])).stop_reason is ReuseStopReason.EVICTED


def test_eviction_takes_leaves_before_their_prefix() -> None:
    manager = vanilla(4)
    cached(manager, [*A, *B, *C])
    assert manager.index.eviction_order() == [2, 1, 0]
    hit = Run(manager, [*A, *D, 1, 2])
    assert hit.pages == [0, 3, 2]
    hit.lease.release()
    assert manager.index.eviction_order() == [1, 0]
    assert Run(manager, [*D, *D, *D]).pages == [2, 3, 1]
    assert manager.index.eviction_order() == [0]
    manager.check_invariants()


# Decode path


def test_append_grows_extends_and_publishes_committed_blocks() -> None:
    manager = vanilla(8)
    one, two = Run(manager, [*A, 1, 2, 3]), Run(manager, [*B])
    one.publish(make_record=False)
    two.publish(make_record=False)
    leases, chains = [one.lease, two.lease], [one.chain, two.chain]
    assert manager.append_tokens(leases, chains, np.array([7, 8], np.int32), True) == -1
    assert (one.chain.token_ids().tolist(), two.chain.token_ids().tolist()) == ([*A, 1, 2, 3, 7], [*B, 8])
    assert (one.pages, two.pages) == ([0, 1], [2, 3])
    # Block 1 of `one` is full, but the newest token's state is not written yet.
    assert (one.lease.published_block_count, two.lease.published_block_count) == (1, 1)
    assert manager.append_tokens(leases, chains, np.array([5, 6], np.int32), True) == -1
    assert (one.pages, two.pages) == ([0, 1, 4], [2, 3])
    assert one.path == [0, 1]
    assert manager.index.lookup_prefix(one.chain) == [0, 1]
    assert manager.records.size == 0
    manager.check_invariants()


def test_append_publishes_at_once_without_lookahead_and_never_when_not_asked() -> None:
    manager = vanilla(8)
    now, never = Run(manager, [1, 2, 3]), Run(manager, [5, 6, 7])
    manager.append_tokens([now.lease], [now.chain], np.array([4], np.int32), True, lookahead=0)
    for _ in range(2):
        manager.append_tokens([never.lease], [never.chain], np.array([4], np.int32), False)
    assert (now.path, never.path) == ([0], [])


def test_append_stops_at_the_first_refusal() -> None:
    manager = vanilla(4)
    sequences = [Run(manager, range(n)) for n in (3, 4, 8)]
    leases, chains = [s.lease for s in sequences], [s.chain for s in sequences]
    assert manager.append_tokens(leases, chains, np.array([9, 9, 9], np.int32), True) == 1
    assert [c.num_tokens for c in chains] == [4, 4, 8]
    assert [lease.num_base_pages for lease in leases] == [1, 1, 2]
    manager.check_invariants()


def test_append_checks_everything_first() -> None:
    manager = vanilla(8)
    sequences = [Run(manager, range(3)), Run(manager, range(5))]
    leases, chains = [s.lease for s in sequences], [s.chain for s in sequences]
    tokens = np.array([1, 2], np.int32)
    before = snapshot(manager)
    with pytest.raises(InvalidArgumentError, match="token -2 of sequence 1"):
        manager.append_tokens(leases, chains, np.array([1, -2], np.int32), True)
    with pytest.raises(InvalidArgumentError, match="2 leases need as many chains and tokens"):
        manager.append_tokens(leases, chains[:1], tokens, True)
    with pytest.raises(InvalidArgumentError, match="2 leases need as many chains and tokens"):
        manager.append_tokens(leases, chains, tokens[:1], True)
    with pytest.raises(InvalidArgumentError, match="look-ahead of 0 or more"):
        manager.append_tokens(leases, chains, tokens, True, lookahead=-1)
    with pytest.raises(InvalidArgumentError, match="page size 2, the cache 4"):
        manager.append_tokens(leases, [chains[0], chain([1], 2)], tokens, True)
    with pytest.raises(TypeError):
        manager.append_tokens([leases[0], "lease"], chains, tokens, True)  # type: ignore[list-item]
    assert [c.num_tokens for c in chains] == [3, 5]
    assert snapshot(manager) == before


# Looking again


def test_rebind_shares_what_a_producer_published_meanwhile() -> None:
    manager = vanilla(8)
    prompt = [*A, *B, 1]
    producer, follower = Run(manager, prompt), Run(manager, prompt)
    assert follower.pages == [3, 4, 5]
    assert manager.rebind(follower.lease, follower.chain) == 0
    producer.publish(4, make_record=False)
    assert manager.rebind(follower.lease, follower.chain) == 4
    assert (follower.pages, follower.lease.shared_block_count) == ([0, 4, 5], 1)
    producer.publish(9)
    assert manager.rebind(follower.lease, follower.chain) == 8
    assert (follower.pages, follower.path) == ([0, 1, 5], [0, 1])
    assert manager.pools.base.free_list() == [6, 7, 3, 4]
    manager.check_invariants()


def test_rebind_leaves_at_least_one_token_to_compute() -> None:
    manager = vanilla(8)
    producer, follower = Run(manager, [*A, *B]), Run(manager, [*A, *B])
    producer.publish()
    assert manager.rebind(follower.lease, follower.chain) == 4
    assert follower.pages == [0, 3]


def test_rebind_goes_on_behind_blocks_that_were_taken_over() -> None:
    manager = vanilla(8)
    producer, follower = Run(manager, [*A, *B, 1]), Run(manager, [*A, *B, 1])
    producer.publish(4, make_record=False)
    follower.publish(4, make_record=False)
    producer.publish(8, make_record=False)
    assert manager.rebind(follower.lease, follower.chain) == 8
    assert (follower.pages, follower.path) == ([0, 1, 5], [0, 1])
    manager.check_invariants()


# The rest


def test_pools_index_and_records_of_a_manager_are_read_only() -> None:
    manager = vanilla(4)
    record = cached(manager, A)
    before = snapshot(manager)
    calls = [
        lambda: manager.pools.base.allocate(1),
        lambda: manager.pools.base.add_cache_ref(0),
        lambda: manager.pools.base.release_cache_ref(0),
        lambda: manager.pools.allocate(ResourceDemand(base_kv_pages=1)),
        lambda: manager.index.erase_page(0),
        lambda: manager.index.insert(chain(B), 0, 1),
        lambda: manager.records.erase(record),
        lambda: manager.records.touch(record),
    ]
    for call in calls:
        with pytest.raises(ContractViolation, match="belongs to a manager"):
            call()
    assert snapshot(manager) == before


def test_vanilla_requests_ignore_a_speculative_contract() -> None:
    contract = SpecReuseContract(owns_paged_spec_state=True, future_dependency_tokens=1)
    manager = ContextCacheManager(P, ResourceDemand(4, 4), spec_reuse_contract=contract)
    assert manager.spec_reuse_contract is contract
    cached(manager, range(8))
    assert manager.plan(chain(range(9))).reuse_token_length == 8
    with pytest.raises(InvalidArgumentError, match="SpecReuseContract or None"):
        ContextCacheManager(P, ResourceDemand(4), spec_reuse_contract=7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("page_size", "capacity", "options"),
    [(0, 4, {}), (-1, 4, {}), (4, -1, {}), (4, 4, {"max_records": -1}), (4, 4, {"hash_mask": -1})],
)
def test_bad_sizes_are_refused(page_size: int, capacity: int, options: dict[str, int]) -> None:
    with pytest.raises(InvalidArgumentError):
        ContextCacheManager(page_size, ResourceDemand(base_kv_pages=capacity), **options)


def test_plan_kind_of_a_second_identical_prompt() -> None:
    """Worked example 2: the recomputed page goes free with the lease, the endpoint is only touched."""
    manager = vanilla(4)
    cached(manager, range(8))
    again = Run(manager, range(8))
    assert again.result.plan.kind is ReusePlanKind.FULL_INPUT_REWIND
    assert again.pages == [0, 2]
    assert again.publish().status is PublishStatus.EXISTING_RECORD
    assert again.path == [0, 1]
    again.lease.release()
    assert manager.pools.base.free_list() == [3, 2]
    assert manager.index.eviction_order() == [1, 0]


# Copied tails


def test_67_tail_source_is_held_until_its_copy_is_enqueued() -> None:
    manager = vanilla(6)
    cached(manager, [*A, *B])
    hit = Run(manager, [*A, *B], hold=True)
    assert (hit.pages, hit.lease.tail_source, hit.lease.tail_token_count) == ([0, 2], 1, 3)
    assert manager.pools.base.active_ref(1) == 1
    assert manager.index.eviction_order() == []
    manager.release_tail_source(hit.lease)
    manager.release_tail_source(hit.lease)
    assert (hit.lease.tail_source, manager.pools.base.active_ref(1)) == (None, 0)
    assert manager.index.eviction_order() == [1]
    hit.release()
    assert manager.index.eviction_order() == [1, 0]
    manager.check_invariants()


def test_67_release_lets_go_of_a_tail_source_that_was_never_copied() -> None:
    manager = vanilla(6)
    cached(manager, [*A, *B])
    Run(manager, [*A, *B], hold=True).release()
    assert manager.index.eviction_order() == [1, 0]
    manager.check_invariants()


def test_68_short_of_pages_the_tail_is_given_up_not_the_hit() -> None:
    """Holding the page that is copied would leave one page too few: whole pages only, and never cold."""
    manager = vanilla(3)
    cached(manager, [*A, *B])
    run = Run(manager, [*A, 11, 11, 1, 2, 3], hold=True)
    assert (run.pages, run.lease.tail_source) == ([0, 2, 1], None)
    assert (run.plan.reuse_token_length, run.plan.tail_token_count, run.plan.matched_token_length) == (4, 0, 6)
    assert run.plan.kind is ReusePlanKind.STANDARD
    manager.check_invariants()


def test_68_hit_without_tail_fits_wherever_a_cold_run_fits() -> None:
    """What makes a cold retry pointless: for every pool size and demand."""
    for pages in range(2, 8):
        for tokens in ([*A, *B, 1], [*A, *B], [*A, 11, 11, 5], [*A, *C, 1]):
            for cover in range(0, 28, 3):
                manager = vanilla(pages)
                cached(manager, [*A, *B])
                prompt = chain(tokens)
                cold = manager.acquire_vanilla(prompt, min_tokens=cover, lookup_policy=ContextCacheLookupPolicy.BYPASS)
                fits = cold.lease is not None
                manager = vanilla(pages)
                cached(manager, [*A, *B])
                assert (manager.acquire_vanilla(prompt, min_tokens=cover).lease is not None) >= fits


# Retained tails


def test_ended_sequence_leaves_its_unfilled_page() -> None:
    manager = vanilla(6)
    run = Run(manager, [*A, 1, 2])
    done = run.publish(tail=True)
    assert (done.published_block_count, done.new_block_count, done.retained_tail_tokens) == (1, 1, 2)
    assert (run.lease.sealed, manager.index.token_count_of(1), manager.index.tail_count) == (True, 2, 1)
    run.release()
    assert manager.index.eviction_order() == [1, 0]
    again = Run(manager, [*A, 1, 2, 3], hold=True)
    assert (again.pages, again.lease.tail_source, again.plan.reuse_token_length) == ([0, 2], 1, 6)
    manager.check_invariants()


def test_tail_of_a_sequence_shorter_than_a_page() -> None:
    manager = vanilla(4)
    run = Run(manager, [1, 2, 3])
    done = run.publish(tail=True)
    assert (done.status, done.record, done.retained_tail_tokens) == (PublishStatus.PUBLISHED, None, 3)
    run.release()
    assert manager.plan(chain([1, 2, 9])).reuse_token_length == 2
    manager.evict_all()
    assert (manager.index.num_namespaces, manager.pools.base.free_count) == (0, 4)


def test_sealed_lease_may_only_be_released() -> None:
    manager = vanilla(6)
    run = Run(manager, [*A, 1, 2])
    run.publish(tail=True)
    before = snapshot(manager)
    calls = [
        lambda: run.publish(),
        lambda: manager.grow_base_pages(run.lease, 1),
        lambda: manager.ensure_base_pages(run.lease, 1),
        lambda: manager.ensure_coverage([run.lease], [6], 1),
        lambda: manager.append_tokens([run.lease], [run.chain], np.ones(1, np.int32), True),
        lambda: manager.rebind(run.lease, run.chain),
    ]
    for call in calls:
        with pytest.raises(ContractViolation, match="sealed"):
            call()
    assert snapshot(manager) == before
    run.release()


def test_tail_that_says_nothing_new_is_not_retained() -> None:
    manager = vanilla(8)
    cached(manager, [*A, 1, 2, 3, 4])
    covered = Run(manager, [*A, 1, 2])
    done = covered.publish(tail=True)
    assert (done.retained_tail_tokens, covered.lease.sealed) == (0, False)
    covered.release()
    cached(manager, [*A, 5, 6, 7], tail=True)
    assert Run(manager, [*A, 5, 6]).publish(tail=True).retained_tail_tokens == 0
    assert manager.index.tail_count == 1


def test_longer_tail_and_full_block_supersede_a_shorter_tail() -> None:
    manager = vanilla(8)
    cached(manager, [*A, 1], tail=True)
    cached(manager, [*A, 1, 2], tail=True)
    assert manager.index.tail_count == 1
    cached(manager, [*A, 9], tail=True)  # another branch stays
    cached(manager, [*A, 1, 2, 3, 4])
    assert manager.index.tail_count == 1
    assert manager.metrics() == ContextCacheManagerMetrics()  # nothing was evicted
    assert manager.plan(chain([*A, 9, 9])).reuse_token_length == 5
    manager.check_invariants()


def test_tail_somebody_copies_from_is_not_superseded() -> None:
    manager = vanilla(8)
    cached(manager, [*A, 1, 2], tail=True)
    copying = Run(manager, [*A, 1, 2, 5], hold=True)
    assert copying.lease.tail_source == 1
    cached(manager, [*A, 1, 2, 3], tail=True)
    assert manager.index.tail_count == 2
    copying.release()
    assert manager.index.tail_count == 2
    manager.check_invariants()


def test_tail_with_media_is_not_retained() -> None:
    manager = vanilla(6)
    run = Run(manager, chain([*A, 1, 0], media=[None] * 5 + [Hash128(1, 1)]))
    assert run.publish(tail=True).retained_tail_tokens == 0


def test_tail_needs_all_blocks_in_front_of_it() -> None:
    """A page that left the index while others held it ends the run of published blocks; no tail hangs in the air."""
    manager = vanilla(8)
    first = Run(manager, [*A, 9])
    record = first.publish().record
    second = Run(manager, [*A, *B, 1])
    manager.evict_record(record)
    assert second.publish(tail=True).retained_tail_tokens == 0
    manager.check_invariants()


def test_rebind_never_returns_less_than_was_copied() -> None:
    manager = vanilla(8)
    cached(manager, [*A, *B])
    run = Run(manager, [*A, 11, 11, 5, 5, 5])
    assert manager.rebind(run.lease, run.chain) == 6
    assert run.pages == [0, 2, 3]


# Retention


def order(manager: ContextCacheManager) -> list[int]:
    return manager.index.eviction_order()


def test_low_priority_goes_first_and_high_last() -> None:
    manager = vanilla(8)
    cached(manager, A, priority=HIGH)
    cached(manager, B)
    cached(manager, C, priority=LOW)
    assert order(manager) == [2, 1, 0]


def test_shared_prefix_takes_the_highest_priority_it_was_given() -> None:
    manager = vanilla(8)
    cached(manager, [*A, *B], priority=LOW)
    cached(manager, [*A, *C], priority=HIGH)
    cached(manager, [*A, *D], priority=NORMAL)
    classes = [manager.index.priority_of(p) for p in range(4)]
    assert classes == [HIGH, LOW, HIGH, NORMAL]
    assert order(manager) == [1, 3, 2, 0]
    manager.check_invariants()


def test_expired_blocks_go_before_everything_else_but_are_not_hidden() -> None:
    manager = vanilla(8)
    cached(manager, A)
    cached(manager, [*B, *C], priority=HIGH, expiry=100)
    assert order(manager) == [0, 2, 1]
    manager.set_now(99)
    assert order(manager) == [0, 2, 1]
    manager.set_now(100)
    assert order(manager) == [2, 1, 0]
    assert manager.plan(chain([*B, *C, 1])).reuse_token_length == 8
    manager.check_invariants()


def test_expiry_is_the_later_one_and_never_beats_all() -> None:
    manager = vanilla(8)
    cached(manager, A, expiry=100)
    cached(manager, [*A, 1], expiry=50)
    manager.set_now(60)
    assert manager.index.expiry_of(0) == 100
    cached(manager, [*A, 1])
    manager.set_now(200)
    assert manager.expire() == 0
    assert order(manager) == [0]


def test_expire_frees_what_expired() -> None:
    manager = vanilla(8)
    cached(manager, [*A, *B], expiry=100)
    held = Run(manager, [*A, 1])
    manager.set_now(100)
    assert manager.expire() == 1  # block A is held
    assert manager.index.size == 1
    held.release()
    manager.set_now(100)
    assert manager.expire() == 0  # the lease gave it a longer life
    cached(manager, C, expiry=50)
    assert manager.expire() == 1  # already over when it was released
    manager.check_invariants()


def test_bad_retention_is_refused() -> None:
    manager = vanilla(4)
    plan = manager.plan(chain(A))
    with pytest.raises(InvalidArgumentError, match="must be a RetentionPriority"):
        manager.acquire(plan, priority=1)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="expiry -1"):
        manager.acquire(plan, expiry=-1)
    with pytest.raises(InvalidArgumentError, match="must be 0 ns or more"):
        manager.set_now(-1)
    lease = manager.acquire(plan, priority=HIGH, expiry=7).lease
    assert lease is not None
    assert (lease.priority, lease.expiry, lease.volatile_from) == (HIGH, 7, -1)
    with pytest.raises(InvalidArgumentError, match="position -2"):
        manager.set_volatile_from(lease, -2)


def test_volatile_offset_is_kept_by_the_blocks_that_contain_or_follow_it() -> None:
    manager = vanilla(8)
    run = Run(manager, [*A, *B, *C, 1])
    manager.set_volatile_from(run.lease, 6)
    run.publish(tail=True)
    assert [manager.index.volatile_from_of(p) for p in run.pages] == [None, 2, 0, 0]


def test_counts_are_checked_cheaply() -> None:
    manager = vanilla(6)
    run = Run(manager, [*A, *B])
    run.publish()
    manager.check_counts()
    run.release()
    manager.check_counts()


def test_vanilla_lease_is_refused_by_the_calls_of_other_flavours() -> None:
    manager = vanilla(6)
    run = Run(manager, [*A, 1])
    assert run.lease.mode is ReusePlanMode.VANILLA
    before = snapshot(manager)
    for call in (
        lambda: manager.publish_spec(run.lease, run.chain, 4, make_record=True),
        lambda: manager.grow_spec_pages(run.lease, 1, 1),
        lambda: manager.reserve_hybrid_snapshots(run.lease, False),
        lambda: manager.rebind_checkpoint(run.lease, run.chain, 0),
        lambda: manager.acquire_hybrid(run.chain),
        lambda: manager.acquire_spec(run.chain),
    ):
        with pytest.raises(InvalidArgumentError):
            call()
    assert snapshot(manager) == before
