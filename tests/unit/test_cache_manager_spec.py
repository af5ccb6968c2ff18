"""The manager with paged draft state: pairs, lineages and both pools (behaviours 67 to 92 for speculative leases)."""

from __future__ import annotations

import pytest
from manager_rig import A, B, C, D, P, Run, cached, chain, lease_state, snapshot, spec, vanilla

from edgellm._core.cache_manager import ContextCacheManager
from edgellm.cache.types import (
    AcquireStatus,
    ContextCacheLookupPolicy,
    PublishStatus,
    ResourceDemand,
    RetentionPriority,
    ReusePlanMode,
    SpecReuseContract,
)
from edgellm.errors import ContractViolation, InvalidArgumentError


def test_67_hit_shares_pairs() -> None:
    manager = spec(8, future=0)
    cached(manager, [*A, *B], speculative=True)
    hit = Run(manager, [*A, *B, 1], speculative=True)
    assert (hit.pages, hit.drafts, hit.lease.mode) == ([0, 1, 2], [0, 1, 2], ReusePlanMode.SPEC)
    assert (hit.lease.shared_block_count, hit.lease.shared_draft_block_count) == (2, 2)
    assert [manager.pools.draft.active_ref(p) for p in range(3)] == [1, 1, 1]
    hit.release()
    hit.release()
    assert [manager.pools.draft.active_ref(p) for p in range(3)] == [0, 0, 0]
    assert manager.drafts.eviction_order() == [1, 0]
    manager.check_invariants()


def test_67_tail_is_copied_in_pairs() -> None:
    manager = spec(8)
    cached(manager, [*A, *B, 5], speculative=True)
    hit = Run(manager, [*A, *B, 6], speculative=True, hold=True)
    assert (hit.lease.tail_source, hit.lease.draft_tail_source, hit.lease.tail_token_count) == (1, 1, 3)
    assert (hit.pages, hit.drafts) == ([0, 3, 4], [0, 3, 4])
    manager.release_tail_source(hit.lease)
    assert (hit.lease.tail_source, hit.lease.draft_tail_source) == (None, None)
    assert (manager.index.eviction_order(), manager.drafts.eviction_order()) == ([1], [1])


def test_68_short_draft_pool_refuses_the_whole_lease() -> None:
    manager = spec(8, 2)
    before = snapshot(manager)
    refused = manager.acquire_spec(chain([*A, *B, 1]))
    assert (refused.lease, refused.status) == (None, AcquireStatus.INSUFFICIENT_CAPACITY)
    assert snapshot(manager) == before
    assert manager.acquire_spec(chain([*A, 1]), draft_min_tokens=9).lease is None
    assert manager.acquire_spec(chain([*A, 1]), draft_min_tokens=8).lease is not None


def test_68_tail_is_given_up_when_either_pool_is_short() -> None:
    manager = spec(8, 3)
    cached(manager, [*A, *B, 5], speculative=True)
    run = Run(manager, [*A, *B, 6], speculative=True, hold=True)
    assert (run.lease.tail_source, run.lease.draft_tail_source, run.plan.reuse_token_length) == (None, None, 4)
    assert (run.drafts, run.lease.shared_draft_block_count) == ([0, 2, 1], 1)
    manager.check_invariants()


def test_68_hit_without_tail_fits_wherever_a_cold_run_fits() -> None:
    for drafts in range(3, 8):
        for tokens in ([*A, *B, 5], [*A, *B, 6], [*A, *B], [*A, *C, 1]):
            for cover in range(0, 28, 4):
                fits = []
                for policy in (ContextCacheLookupPolicy.BYPASS, ContextCacheLookupPolicy.USE_CACHE):
                    manager = spec(7, drafts)
                    cached(manager, [*A, *B, 5], speculative=True)
                    options = {"min_tokens": cover, "draft_min_tokens": cover, "lookup_policy": policy}
                    fits.append(manager.acquire_spec(chain(tokens), **options).lease is not None)
                assert fits[1] >= fits[0]


def test_70_hit_refreshes_the_draft_path() -> None:
    manager = spec(8, future=0)
    cached(manager, A, speculative=True)
    cached(manager, B, speculative=True)
    Run(manager, [*A, 9], speculative=True).release()
    assert manager.drafts.eviction_order() == [1, 0]


def test_coverage_of_draft_pages_is_their_own() -> None:
    """Worked example 8: draft pages may be more than base pages."""
    manager = spec(16)
    run = Run(manager, [1] * 7, speculative=True, min_tokens=9, draft_min_tokens=14)
    assert (run.lease.num_base_pages, run.lease.num_draft_pages) == (3, 4)
    assert manager.ensure_coverage([run.lease], [7], 6, 10) == -1
    assert (run.lease.num_base_pages, run.lease.num_draft_pages) == (4, 5)


def test_72_growth_takes_from_both_pools_or_from_none() -> None:
    manager = spec(4, 3)
    run = Run(manager, [1] * 5, speculative=True)
    before = snapshot(manager)
    assert manager.grow_spec_pages(run.lease, 2, 2) is False
    assert manager.ensure_coverage([run.lease], [8], 1, 8) == 0
    assert manager.grow_spec_pages(run.lease, 10**9, 0) is False
    assert manager.grow_spec_pages(run.lease, 0, 0) is True
    assert snapshot(manager) == before
    for bad in ((-1, 0), (0, -1)):
        with pytest.raises(InvalidArgumentError, match="must be 0 or more"):
            manager.grow_spec_pages(run.lease, *bad)
    assert manager.grow_spec_pages(run.lease, 2, 1) is True
    assert (run.pages, run.drafts) == ([0, 1, 2, 3], [0, 1, 2])


def test_72_refused_pair_leaves_earlier_growth() -> None:
    manager = spec(8, 4)
    first, second = (Run(manager, [n] * 3, speculative=True) for n in (1, 2))
    assert manager.ensure_coverage([first.lease, second.lease], [3, 3], 2, 6) == 1
    assert (first.drafts, second.drafts) == ([0, 2, 3], [1])
    assert (first.pages, second.pages) == ([0, 2], [1])


def test_73_calls_of_another_flavour_are_refused() -> None:
    manager = spec(8)
    run = Run(manager, [*A, 1], speculative=True)
    before = snapshot(manager)
    for call in (
        lambda: manager.grow_base_pages(run.lease, 1),
        lambda: manager.publish(run.lease, run.chain, 4, make_record=True),
        lambda: manager.publish_hybrid(run.lease, run.chain, 4, None),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidArgumentError, match="not for a spec lease"):
            call()
    assert snapshot(manager) == before


def test_74_draft_pages_are_evicted_and_their_blocks_stay() -> None:
    manager = spec(8, 3)
    cached(manager, [*A, *B, 5], speculative=True)
    Run(manager, [*C, 1, 2, 3, 4], speculative=True)
    assert (manager.index.size, manager.drafts.size) == (2, 1)
    assert manager.metrics().reclaimed_draft_kv_pages == 1
    # The lineage is cut at its leaf; what is left is a path.
    assert manager.plan(chain([*A, *B, 5]), speculative=True).matched_token_length == 4


def test_79_publication_names_both_pages() -> None:
    manager = spec(8)
    run = Run(manager, [*A, *B, 5], speculative=True)
    done = run.publish()
    assert (done.status, done.record) == (PublishStatus.PUBLISHED, 1)
    assert (done.new_block_count, done.new_draft_block_count, done.published_draft_block_count) == (2, 2, 2)
    record = manager.record(1)
    assert (record.base_page_path, record.draft_page_path) == ((0, 1), (0, 1))
    assert [manager.drafts.successor_of(d) for d in (0, 1)] == [B[0], 5]
    assert [manager.drafts.base_of(d) for d in (0, 1)] == [0, 1]
    assert manager.drafts.parent_of(1) == 0


def test_80_only_common_state_is_published() -> None:
    manager = spec(8)
    run = Run(manager, [*A, *B, 5], speculative=True)
    with pytest.raises(InvalidArgumentError, match="complete no block"):
        run.publish(3)
    assert (run.publish(7).published_draft_block_count, manager.drafts.size) == (1, 1)
    run.chain.extend([5] * 8)
    manager.grow_spec_pages(run.lease, 2, 0)
    with pytest.raises(InvalidArgumentError, match="holds 3 draft pages but 4 blocks"):
        run.publish(16)


def test_81_same_lineage_is_held_once() -> None:
    """Two identical prompts in flight: the later one takes both canonical pages over."""
    manager = spec(8)
    first, second = (Run(manager, [*A, 5], speculative=True) for _ in range(2))
    first.publish()
    done = second.publish()
    assert (done.status, done.new_draft_block_count) == (PublishStatus.EXISTING_RECORD, 0)
    assert (second.pages, second.drafts) == ([0, 3], [0, 3])
    assert (second.lease.rebound_page_count, second.lease.rebound_draft_page_count) == (1, 1)
    assert manager.drafts.size == 1


def test_81_another_next_token_is_another_lineage() -> None:
    manager = spec(8)
    for last in (5, 6):
        cached(manager, [*A, last], speculative=True)
    assert manager.index.size == 1
    assert manager.drafts.drafts_of(0) == [2, 0]  # newest first
    # The newest one is used, and it is followed by the same token or costs one token.
    assert manager.plan(chain([*A, 6]), speculative=True).draft_page_bindings.tolist() == [2]
    assert manager.plan(chain([*A, 5]), speculative=True).draft_tail_source == 2


def test_81_without_look_ahead_the_next_token_does_not_matter() -> None:
    manager = spec(8, future=0)
    for last in (5, 6):
        cached(manager, [*A, last], speculative=True)
    assert manager.drafts.drafts_of(0) == [0]
    assert manager.drafts.successor_of(0) is None


def test_83_base_only_endpoint_gets_draft_state() -> None:
    manager = spec(8)
    assert cached(manager, [*A, 5]) == 1
    run = Run(manager, [*A, 5], speculative=True)
    done = run.publish()
    assert (done.status, done.record) == (PublishStatus.PUBLISHED, 1)
    assert (run.pages[0], manager.record(1).base_page_path) == (0, (0,))
    assert manager.record(1).draft_page_path == (run.drafts[0],)
    again = Run(manager, [*A, 5])
    assert again.publish().status is PublishStatus.EXISTING_RECORD
    assert Run(manager, [*A, 5], speculative=True).publish().status is PublishStatus.EXISTING_RECORD


def test_29_draft_state_is_attached_to_an_endpoint_and_touches_it() -> None:
    """Changed: other draft state is no error but another lineage beside the first."""
    manager = spec(8)
    first, other = cached(manager, [*A, 5]), cached(manager, [*B, 5])
    order = manager.records.lru_to_mru
    assert (order(), manager.record(1).draft_page_path) == ([first, other], None)
    cached(manager, [*A, 5], speculative=True)
    assert order() == [other, first]
    (draft,) = manager.record(1).draft_page_path or ()
    cached(manager, [*B, 5])
    run = Run(manager, [*A, 5], speculative=True)
    run.chain.extend([7] * 8)
    before = snapshot(manager)
    with pytest.raises(InvalidArgumentError, match="holds 2 pages but 3 blocks"):
        run.publish(12)
    assert snapshot(manager) == before
    assert run.publish(5).status is PublishStatus.EXISTING_RECORD
    run.release()
    assert (order(), manager.record(1).draft_page_path) == ([other, first], (draft,))
    cached(manager, [*A, 6], speculative=True)
    newest, *older = manager.drafts.drafts_of(0)
    assert older == [draft]
    assert manager.record(1).draft_page_path == (newest,)


def test_84_and_85_chain_that_differs_from_the_lease_is_refused() -> None:
    """Look-ahead is a matter of tokens, so there is no replay dependency: what is checked is the chain."""
    manager = spec(12)
    cached(manager, [*A, *B, 5], speculative=True)
    hit = Run(manager, [*A, *B, 6], speculative=True)
    before = snapshot(manager)
    for other in ([*B, *B, 6], [*C, *B, 5]):
        with pytest.raises(InvalidArgumentError, match="differs from the lease"):
            manager.publish_spec(hit.lease, chain(other), 8, make_record=True)
    assert snapshot(manager) == before


def test_85_draft_path_is_the_lease_s_own_where_it_looked_further() -> None:
    """The block that was computed again up to its last token has another next token: a draft node of its own."""
    manager = spec(12)
    cached(manager, [*A, *B, 5], speculative=True)
    run = Run(manager, [*A, *B, *C], speculative=True)
    assert (run.plan.reuse_token_length, run.drafts) == (7, [0, 3, 4])
    run.publish()
    assert (run.pages, run.drafts) == ([0, 1, 4], [0, 3, 4])
    assert manager.drafts.drafts_of(1) == [3, 1]
    assert manager.drafts.path_of(4) == [0, 3, 4]
    assert manager.drafts.path_of(1) == [0, 1]


def test_86_base_path_is_canonical_draft_path_is_one_lineage() -> None:
    manager = spec(12)
    cached(manager, [*A, *B, *C])  # base only: 0 1 2
    run = Run(manager, [*A, *B, *C], speculative=True)
    done = run.publish()
    record = manager.record(done.record)
    assert (record.base_page_path, record.draft_page_path) == ((0, 1, 2), (0, 1, 2))
    assert (run.pages, run.lease.rebound_page_count, run.lease.rebound_draft_page_count) == ([0, 1, 2], 3, 0)


def test_90_draft_page_that_left_the_index_under_several_leases_ends_the_lineage() -> None:
    manager = spec(12, future=0)
    first = Run(manager, [*A, 9], speculative=True)
    record = first.publish().record
    second = Run(manager, [*A, *B], speculative=True)
    manager.evict_record(record)
    assert (first.lease.published_draft_block_count, second.lease.published_draft_block_count) == (0, 0)
    manager.check_invariants()
    assert second.publish().published_draft_block_count == 0
    first.release()
    assert second.publish().new_draft_block_count == 2
    manager.check_invariants()


def test_91_draft_pages_leave_with_their_block_and_stay_leased() -> None:
    manager = spec(8)
    run = Run(manager, [*A, 5], speculative=True)
    manager.evict_record(run.publish().record)
    assert (manager.index.size, manager.drafts.size, manager.metrics().reclaimed_draft_kv_pages) == (0, 0, 0)
    run.release()
    assert manager.pools.draft.free_count == 8


def test_ended_sequence_leaves_a_pair() -> None:
    manager = spec(8)
    run = Run(manager, [*A, 1, 2, 3], speculative=True)
    done = run.publish(6, tail=True)
    assert (done.retained_tail_tokens, run.lease.sealed) == (2, True)
    assert (manager.drafts.base_of(1), manager.drafts.token_count_of(1), manager.drafts.parent_of(1)) == (1, 2, 0)
    with pytest.raises(ContractViolation, match="sealed"):
        manager.grow_spec_pages(run.lease, 1, 1)
    run.release()
    assert manager.drafts.eviction_order() == [1, 0]
    manager.check_invariants()


def test_superseded_tail_takes_its_draft_node_along() -> None:
    manager = spec(8, future=0)
    cached(manager, [*A, 1], tail=True, speculative=True)
    assert manager.drafts.size == 2
    cached(manager, [*A, 1, 2], tail=True, speculative=True)
    assert (manager.index.tail_count, manager.drafts.size) == (1, 2)
    manager.check_invariants()


def test_rebind_takes_pairs_of_the_same_lineage() -> None:
    manager = spec(12)
    tokens = [*A, *B, *C, 5]
    producer, follower = (Run(manager, tokens, speculative=True) for _ in range(2))
    producer.publish(8, make_record=False)
    assert manager.rebind(follower.lease, follower.chain) == 8
    assert (follower.pages[:2], follower.drafts[:2]) == ([0, 1], [0, 1])
    assert (follower.lease.published_block_count, follower.lease.published_draft_block_count) == (2, 2)
    manager.check_invariants()


def test_rebind_stops_where_the_lineage_ends() -> None:
    manager = spec(12)
    follower = Run(manager, [*A, *B, *C, 5], speculative=True)
    cached(manager, [*A, *B, 9], speculative=True)  # block B is followed by another token here
    assert manager.rebind(follower.lease, follower.chain) == 4
    assert (follower.lease.published_block_count, follower.lease.published_draft_block_count) == (1, 1)
    manager.check_invariants()


def test_contract_without_draft_pages_makes_vanilla_leases() -> None:
    manager = ContextCacheManager(P, ResourceDemand(8), spec_reuse_contract=SpecReuseContract(False, 0))
    lease = manager.acquire_spec(chain([*A, 1])).lease
    assert lease is not None
    assert (lease.mode, lease.num_draft_pages) == (ReusePlanMode.VANILLA, 0)
    assert manager.publish(lease, chain([*A, 1]), 4, make_record=True).record == 1


def test_vanilla_requests_on_a_speculative_deployment_take_no_draft_pages() -> None:
    manager = spec(8)
    cached(manager, [*A, 5], speculative=True)
    run = Run(manager, [*A, 6])
    assert (run.lease.mode, run.drafts, run.plan.reuse_token_length) == (ReusePlanMode.VANILLA, [], 4)
    assert manager.acquire_vanilla(chain([*D, 1]), draft_min_tokens=100).lease is not None


def test_priority_and_expiry_reach_the_draft_nodes() -> None:
    manager = spec(8, future=0)
    cached(manager, A, speculative=True, priority=RetentionPriority.HIGH, expiry=10)
    cached(manager, B, speculative=True)
    cached(manager, C, speculative=True, priority=RetentionPriority.LOW)
    assert manager.drafts.eviction_order() == [2, 1, 0]
    manager.set_now(10)
    assert manager.drafts.eviction_order() == [0, 2, 1]
    assert manager.expire() == 1
    assert (manager.drafts.size, manager.index.size) == (2, 2)
    manager.check_invariants()


def test_a_refused_publication_leaves_the_lease_as_it_was() -> None:
    manager = spec(8)
    run = Run(manager, [*A, 5], speculative=True)
    before = (snapshot(manager), lease_state(run.lease))
    with pytest.raises(InvalidArgumentError):
        run.publish(-1)
    assert (snapshot(manager), lease_state(run.lease)) == before


def test_manager_of_a_plain_model_has_an_empty_draft_index() -> None:
    manager = vanilla(4)
    assert (manager.drafts.capacity, manager.available_draft_pages) == (0, 0)
