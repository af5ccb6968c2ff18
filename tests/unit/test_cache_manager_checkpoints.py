"""The manager with recurrent checkpoints: hybrid, pure recurrent, hybrid with MTP (behaviours 67 to 95 for these)."""

from __future__ import annotations

import numpy as np
import pytest
from manager_rig import A, B, C, D, Run, cached, chain, checkpointed, hybrid, mtp, pure, snapshot, vanilla

from edgellm.cache.types import (
    CheckpointKind,
    ContextCacheManagerMetrics,
    HybridSnapshotReservation,
    PublishStatus,
    RetentionPriority,
    ReusePlanMode,
)
from edgellm.errors import ContractViolation, InvalidArgumentError

TAIL, LADDER, BRANCH, ANCHOR = CheckpointKind.TAIL, CheckpointKind.LADDER, CheckpointKind.BRANCH, CheckpointKind.ANCHOR


# Acquisition


def test_67_hit_holds_pages_and_snapshots() -> None:
    manager = hybrid(8)
    (record,) = checkpointed(manager, [*A, 5, 6])
    hit = Run(manager, [*A, 5, 6, 7], hold=True)
    assert (hit.pages, hit.lease.mode, hit.lease.shared_block_count) == ([0, 2], ReusePlanMode.HYBRID, 1)
    assert (hit.lease.recurrent_snapshot_slot, hit.lease.partial_kv_snapshot_slot) == (0, 0)
    assert (manager.pools.recurrent.active_ref(0), manager.pools.partial.active_ref(0)) == (1, 1)
    assert manager.records.checkpoint_order() == []  # cannot be evicted now
    hit.release()
    assert manager.records.checkpoint_order() == [record]
    manager.check_invariants()


def test_69_pages_of_the_hit_are_no_victims_for_its_own_request() -> None:
    manager = hybrid(3)
    checkpointed(manager, [*A, 5, 6])
    checkpointed(manager, [*B, 5, 6])
    hit = Run(manager, [*A, 5, 6, 7, 7, 7], hold=True)
    assert hit.pages == [0, 1, 2]
    assert len(manager.records) == 1
    assert manager.metrics() == ContextCacheManagerMetrics(1, 1, 0, 1, 1)


def test_70_hit_makes_its_checkpoint_the_most_recent() -> None:
    manager = hybrid(8)
    first, second = checkpointed(manager, [*A, 5]) + checkpointed(manager, [*B, 5])
    assert manager.records.lru_to_mru() == manager.records.checkpoint_order() == [first, second]
    Run(manager, [*A, 5, 6]).release()
    assert manager.records.lru_to_mru() == manager.records.checkpoint_order() == [second, first]


def test_73_calls_of_another_flavour_are_refused() -> None:
    manager, both = hybrid(8), mtp(8)
    run, pair = Run(manager, [*A, 1]), Run(both, [*A, 1], speculative=True)
    before = snapshot(manager), snapshot(both)
    for call in (
        lambda: manager.grow_spec_pages(run.lease, 1, 0),
        lambda: manager.rebind(run.lease, run.chain),
        lambda: manager.publish_spec(run.lease, run.chain, 4, make_record=True),
        lambda: both.grow_base_pages(pair.lease, 1),
        lambda: both.publish_spec(pair.lease, pair.chain, 4, make_record=True),
        lambda: both.publish_hybrid(run.lease, run.chain, 4, HybridSnapshotReservation(0)),
        lambda: manager.acquire_vanilla(run.chain),
        lambda: manager.acquire_hybrid_mtp(run.chain),
    ):
        with pytest.raises(InvalidArgumentError):
            call()
    assert (snapshot(manager), snapshot(both)) == before


# Reservations


def test_75_reservation_takes_both_slots_or_none() -> None:
    manager = hybrid(8, 2, 1)
    run = Run(manager, [*A, 1])
    assert manager.reserve_hybrid_snapshots(run.lease, True) == HybridSnapshotReservation(0, 0)
    before = snapshot(manager)
    assert manager.reserve_hybrid_snapshots(run.lease, True) is None
    assert snapshot(manager) == before
    assert manager.reserve_hybrid_snapshots(run.lease, False) == HybridSnapshotReservation(1, None)
    assert manager.reserve_hybrid_snapshots(run.lease, False) is None
    assert [manager.pools.recurrent.active_ref(s) for s in (0, 1)] == [1, 1]
    run.release()
    assert (manager.pools.recurrent.free_list(), manager.pools.partial.free_list()) == ([0, 1], [0])


def test_76_pure_recurrent_has_no_partial_pages() -> None:
    manager = pure(8)
    run = Run(manager, [*A, 1])
    with pytest.raises(InvalidArgumentError, match="has no partial pages"):
        manager.reserve_hybrid_snapshots(run.lease, True)
    plain = vanilla(4)
    with pytest.raises(InvalidArgumentError, match="has no snapshots"):
        plain.reserve_hybrid_snapshots(Run(plain, A).lease, False)


def test_77_restored_snapshots_are_let_go_once() -> None:
    manager = hybrid(8)
    (record,) = checkpointed(manager, [*A, 5, 6])
    hit = Run(manager, [*A, 5, 6, 7], hold=True)
    for _ in range(2):
        manager.release_restored_hybrid_snapshots(hit.lease)
        assert manager.pools.recurrent.active_ref(0) == 0
        assert (hit.lease.recurrent_snapshot_slot, hit.lease.partial_kv_snapshot_slot) == (None, None)
    assert manager.records.checkpoint_order() == [record]


def test_78_retired_slots_are_free_unless_published() -> None:
    manager = hybrid(8)
    run = Run(manager, [*A, 5, 6])
    unused = run.reserve(6)
    manager.retire_hybrid_snapshot_reservation(run.lease, unused)
    assert manager.pools.recurrent.free_list() == [1, 2, 3, 0]
    run.checkpoint(6)
    assert manager.pools.recurrent.cache_ref(1) == 1
    assert manager.pools.recurrent.free_list() == [2, 3, 0]
    for bad in (unused, HybridSnapshotReservation(2, 2), HybridSnapshotReservation(1, None)):
        with pytest.raises(InvalidArgumentError, match="does not hold"):
            manager.retire_hybrid_snapshot_reservation(run.lease, bad)


def test_a_lease_s_reservation_is_not_another_s() -> None:
    manager = hybrid(8)
    first, second = Run(manager, [*A, 5]), Run(manager, [*B, 5])
    reservation = first.reserve(5)
    for call in (manager.retire_hybrid_snapshot_reservation, manager.mark_snapshots_written):
        with pytest.raises(InvalidArgumentError, match="does not hold"):
            call(second.lease, reservation)
    with pytest.raises(InvalidArgumentError, match="does not hold"):
        second.publish_reserved(5, reservation)


def test_unwritten_snapshots_are_never_published() -> None:
    manager = hybrid(8)
    run = Run(manager, [*A, 5])
    reservation = manager.reserve_hybrid_snapshots(run.lease, True)
    assert reservation is not None
    before = snapshot(manager)
    with pytest.raises(InvalidArgumentError, match="was not written"):
        run.publish_reserved(5, reservation)
    assert snapshot(manager) == before
    manager.mark_snapshots_written(run.lease, reservation)
    assert run.publish_reserved(5, reservation).record == 1


# Publication


def test_79_full_blocks_of_a_hybrid_sequence_are_visible_but_start_nothing() -> None:
    manager = hybrid(8)
    run = Run(manager, [*A, *B, 1])
    assert run.publish(make_record=False).new_block_count == 2
    plan = manager.plan(chain([*A, *B, 1, 2]))
    assert (plan.reuse_token_length, plan.known_token_length) == (0, 8)
    twin = Run(manager, [*A, *B, 1])
    twin.publish(make_record=False)
    assert twin.pages == [0, 1, 5]
    run.release()
    twin.release()
    assert manager.index.size == 0  # they led to no checkpoint
    manager.check_invariants()


def test_85_and_86_mtp_checkpoint_has_one_lineage_over_canonical_pages() -> None:
    manager = mtp(12)
    checkpointed(manager, [*A, *B, 1])  # plain: base pages 0 1
    run = Run(manager, [*A, *B, 2], speculative=True)
    record = manager.record(run.checkpoint(9).record)
    assert (record.base_page_path, record.draft_page_path) == ((0, 1), (0, 1))
    assert (run.pages[:2], run.drafts[:2]) == ([0, 1], [0, 1])


def test_87_record_limit_evicts_the_least_recent_checkpoint() -> None:
    manager = hybrid(12, max_records=2)
    first, second = checkpointed(manager, [*A, 1]) + checkpointed(manager, [*B, 1])
    (third,) = checkpointed(manager, [*C, 1])
    assert manager.records.lru_to_mru() == [second, third]
    assert first not in manager.records
    assert manager.index.size == 2
    manager.check_invariants()


def test_88_record_limit_zero_retains_nothing() -> None:
    manager = hybrid(8, max_records=0)
    run = Run(manager, [*A, 1])
    done = run.checkpoint(5)
    assert (done.status, done.record, manager.index.size) == (PublishStatus.PUBLISHED, None, 0)
    run.release()
    assert manager.pools.recurrent.free_count == 4


def test_91_evicted_checkpoint_leaves_at_once_and_its_leased_pages_stay() -> None:
    manager = hybrid(8)
    run = Run(manager, [*A, 5, 6])
    reservation = run.reserve(6)
    record = run.publish_reserved(6, reservation).record
    manager.evict_record(record)
    assert (manager.index.size, run.lease.published_block_count) == (0, 0)
    assert manager.metrics() == ContextCacheManagerMetrics(evicted_records=1)  # slots and page are held
    manager.retire_hybrid_snapshot_reservation(run.lease, reservation)
    assert manager.pools.recurrent.free_count == 4
    run.release()
    manager.check_invariants()


def test_93_checkpoint_key_and_second_publication() -> None:
    manager = hybrid(8)
    run = Run(manager, [*A, 5, 6])
    reservation = run.reserve(6)
    done = run.publish_reserved(6, reservation)
    assert (done.status, done.record, done.published_block_count) == (PublishStatus.PUBLISHED, 1, 1)
    record = manager.record(1)
    assert (record.key.full_block_count, record.exact_checkpoint_length) == (1, 6)
    assert record.key.terminal_hash == run.chain.prefix_hash(6)
    assert (record.base_page_path, record.recurrent_snapshot_slot, record.partial_kv_snapshot_slot) == ((0,), 0, 0)
    again = run.reserve(6)
    done = run.publish_reserved(6, again)
    assert (done.status, done.record) == (PublishStatus.EXISTING_RECORD, 1)
    assert manager.pools.recurrent.active_ref(1) == 1  # still with the lease
    manager.retire_hybrid_snapshot_reservation(run.lease, again)
    assert manager.pools.recurrent.is_free(1)
    manager.retire_hybrid_snapshot_reservation(run.lease, reservation)
    assert manager.records.checkpoint_order() == [1]


def test_94_bad_checkpoints_are_refused() -> None:
    manager = hybrid(8)
    run = Run(manager, [*A, *B, 1])
    with_partial, without = run.reserve(6), run.reserve(8)
    before = snapshot(manager)
    for length, reservation, message in (
        (0, with_partial, "1 to 9 tokens"),
        (-4, with_partial, "1 to 9 tokens"),
        (10, with_partial, "1 to 9 tokens"),
        (6, without, "needs a partial-page slot"),
        (8, with_partial, "has no partial-page slot"),
        (6, HybridSnapshotReservation(3, 3), "does not hold"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            run.publish_reserved(length, reservation)
    with pytest.raises(InvalidArgumentError, match="must be a CheckpointKind"):
        run.publish_reserved(6, with_partial, kind=2)
    with pytest.raises(InvalidArgumentError, match="not a HybridSnapshotReservation"):
        run.publish_reserved(6, (0, 0))  # type: ignore[arg-type]
    run.chain.extend([1] * 12)
    with pytest.raises(InvalidArgumentError, match="holds 3 base"):
        run.publish_reserved(20, without)
    assert snapshot(manager) == before


def test_94_checkpoint_of_other_tokens_is_refused() -> None:
    manager = hybrid(8)
    run = Run(manager, [*A, *B, 1])
    run.publish(make_record=False)
    reservation = run.reserve(8)
    before = snapshot(manager)
    with pytest.raises(InvalidArgumentError, match="differs from the lease"):
        manager.publish_hybrid(run.lease, chain([*A, *C]), 8, reservation)
    assert snapshot(manager) == before


def test_95_each_flavour_has_its_own_publication() -> None:
    manager, both, plain = hybrid(8), mtp(8), vanilla(4)
    run, pair = Run(manager, [*A, 1]), Run(both, [*A, 1], speculative=True)
    ours, theirs = run.reserve(5), pair.reserve(5)
    for call in (
        lambda: manager.publish(run.lease, run.chain, 4, make_record=True),
        lambda: manager.publish(run.lease, run.chain, 5, make_record=False, retain_tail=True),
        lambda: manager.publish_hybrid_mtp(run.lease, run.chain, 5, ours),
        lambda: both.publish_hybrid(pair.lease, pair.chain, 5, theirs),
        lambda: plain.publish_hybrid(Run(plain, [*A, 1]).lease, run.chain, 5, ours),
    ):
        with pytest.raises(InvalidArgumentError, match="is not for a"):
            call()


def test_tokens_of_a_hybrid_sequence_publish_as_blocks_complete() -> None:
    manager = hybrid(8)
    run = Run(manager, [*A, 1, 2, 3])
    assert manager.append_tokens([run.lease], [run.chain], np.array([4], np.int32), True, lookahead=0) == -1
    assert run.path == [0, 1]
    with pytest.raises(InvalidArgumentError, match="with a record or a tail"):
        run.publish()


def test_mtp_sequence_publishes_base_blocks_first_and_draft_blocks_with_the_checkpoint() -> None:
    manager = mtp(8)
    run = Run(manager, [*A, *B, 1, 2], speculative=True)
    run.publish(make_record=False)
    assert (run.lease.published_block_count, run.lease.published_draft_block_count) == (2, 0)
    done = run.checkpoint(9)
    assert (done.new_block_count, done.new_draft_block_count) == (0, 2)
    assert [manager.drafts.successor_of(d) for d in run.drafts[:2]] == [B[0], 1]
    assert manager.records.draft_node(done.record) == run.drafts[1]


@pytest.mark.parametrize("length", [6, 8])
def test_mtp_checkpoint_replaces_a_plain_one(length: int) -> None:
    """At a page boundary the two hang at different blocks."""
    manager = mtp(12)
    tokens = [*A, *B, 1]
    (plain,) = checkpointed(manager, tokens, length)
    assert manager.plan(chain(tokens), speculative=True).reuse_token_length == 0
    (both,) = checkpointed(manager, tokens, length, speculative=True)
    assert (plain in manager.records, both in manager.records) == (False, True)
    assert manager.metrics().evicted_records == 0
    assert manager.plan(chain(tokens), speculative=True).hybrid_record == both
    assert manager.plan(chain(tokens)).hybrid_record == both
    # The other way round the plain one says nothing new.
    run = Run(manager, tokens)
    done = run.checkpoint(length)
    assert (done.status, done.record) == (PublishStatus.EXISTING_RECORD, both)
    run.release()
    manager.check_invariants()


def test_checkpoint_that_lost_its_draft_node_serves_plain_requests() -> None:
    manager = mtp(12)
    tokens = [*A, 5, 6]
    (record,) = checkpointed(manager, tokens, speculative=True)
    other = Run(manager, [*B, *C, 1], speculative=True)
    assert manager.grow_spec_pages(other.lease, 0, 9) is True  # evicts the draft page
    assert (manager.drafts.size, record in manager.records, manager.records.mtp(record)) == (0, True, False)
    other.release()
    assert manager.plan(chain([*tokens, 7]), speculative=True).reuse_token_length == 0
    assert manager.plan(chain([*tokens, 7])).reuse_token_length == 6
    (again,) = checkpointed(manager, tokens, speculative=True)
    assert record not in manager.records
    assert manager.plan(chain([*tokens, 7]), speculative=True).hybrid_record == again
    manager.check_invariants()


# What goes first


def test_trim_drops_what_leads_to_no_checkpoint() -> None:
    manager = hybrid(12)
    run = Run(manager, [*A, *B, *C, 1])
    run.publish(make_record=False)
    run.checkpoint(4)
    assert manager.index.size == 3
    run.release()
    assert manager.index.size == 1
    assert manager.metrics() == ContextCacheManagerMetrics()
    assert manager.plan(chain([*A, *B, 1])).stop_reason.value == "no_record"  # not: evicted
    manager.check_invariants()


def test_evicted_checkpoint_takes_its_branch_along() -> None:
    manager = hybrid(12, 2)
    checkpointed(manager, [*A, *B, *C], 12)
    checkpointed(manager, [*A, *D], 8)
    run = Run(manager, [1])
    assert manager.reserve_hybrid_snapshots(run.lease, False) is not None
    assert manager.index.lookup_prefix(chain([*A, *B, *C])) == [0]
    assert manager.metrics() == ContextCacheManagerMetrics(1, 2, 0, 1, 0)
    run.release()
    manager.check_invariants()


def test_page_pressure_takes_leaves_with_their_checkpoints() -> None:
    manager = hybrid(4)
    checkpointed(manager, [*A, *B], 4, 8)
    Run(manager, [*C, *C, *C])
    assert manager.records.lru_to_mru() == [1]
    assert manager.index.lookup_prefix(chain([*A, *B])) == [0]
    assert manager.metrics() == ContextCacheManagerMetrics(1, 1, 0, 1, 0)
    manager.check_invariants()


def test_next_turn_supersedes_the_end_of_the_last_one() -> None:
    manager = hybrid(12)
    (first,) = checkpointed(manager, [*A, 1])
    (second,) = checkpointed(manager, [*A, 1, *B, 2])
    assert [manager.records.superseded(r) for r in (first, second)] == [True, False]
    assert manager.records.checkpoint_order() == [first, second]
    Run(manager, [*A, 1, 9])  # a hit clears the mark
    assert manager.records.superseded(first) is False
    assert manager.records.checkpoint_order() == [second, first]


@pytest.mark.parametrize(
    ("kind", "keep", "marked"),
    [(TAIL, (), True), (LADDER, (), True), (LADDER, (4,), False), (BRANCH, (), False), (ANCHOR, (), False)],
)
def test_what_a_deeper_checkpoint_supersedes(kind: CheckpointKind, keep: tuple[int, ...], marked: bool) -> None:
    manager = hybrid(12)
    run = Run(manager, [*A, *B])
    first = run.checkpoint(4, kind).record
    run.release()
    run = Run(manager, [*A, *B, *C])
    run.checkpoint(12, LADDER, keep)
    assert manager.records.superseded(first) is marked


def test_a_request_supersedes_of_its_own_only_an_earlier_end() -> None:
    manager = hybrid(12)
    run = Run(manager, [*A, *B, *C, 1])
    ladder, end = run.checkpoint(4, LADDER).record, run.checkpoint(8, TAIL).record
    run.checkpoint(12, LADDER)
    assert [manager.records.superseded(r) for r in (ladder, end)] == [False, False]
    run.checkpoint(13, TAIL)
    assert [manager.records.superseded(r) for r in (ladder, end)] == [False, True]


def test_a_branching_block_keeps_its_checkpoint() -> None:
    manager = hybrid(12)
    (first,) = checkpointed(manager, A)
    checkpointed(manager, [*A, *B])
    assert manager.records.superseded(first) is True
    Run(manager, [*A, 1]).release()
    checkpointed(manager, [*A, *C])  # two children now
    assert manager.records.superseded(first) is False


def test_snapshot_victims_superseded_then_the_next_leaf() -> None:
    manager = hybrid(12, 3)
    (kept,) = checkpointed(manager, [*D, 1])
    (old,) = checkpointed(manager, A)
    (new,) = checkpointed(manager, [*A, *B])
    run = Run(manager, [1])
    manager.reserve_hybrid_snapshots(run.lease, False)
    assert manager.records.lru_to_mru() == [kept, new]  # `old` was superseded
    manager.reserve_hybrid_snapshots(run.lease, False)
    assert manager.records.lru_to_mru() == [new]  # the block of `kept` is the next leaf
    assert old not in manager.records
    manager.check_invariants()


def test_snapshot_victims_follow_the_order_of_leaves_not_of_checkpoints() -> None:
    """The end of a long branch goes before its older start, whatever was made first."""
    manager = hybrid(12, 2)
    branch = Run(manager, [*A, *B])
    start, end = branch.checkpoint(4, LADDER).record, branch.checkpoint(8).record
    branch.release()
    run = Run(manager, [1])
    manager.reserve_hybrid_snapshots(run.lease, False)
    assert manager.records.lru_to_mru() == [start]
    assert end not in manager.records


def test_partial_slot_is_taken_from_a_checkpoint_that_has_one() -> None:
    manager = hybrid(12, 4, 1)
    aligned, within = checkpointed(manager, A) + checkpointed(manager, [*B, 1])
    run = Run(manager, [1])
    manager.reserve_hybrid_snapshots(run.lease, True)
    assert manager.records.lru_to_mru() == [aligned]
    assert within not in manager.records


def test_expired_checkpoints_go_first_and_are_freed_on_demand() -> None:
    manager = hybrid(12)
    (timed,) = checkpointed(manager, [*A, 1], expiry=10, priority=RetentionPriority.HIGH)
    (other,) = checkpointed(manager, [*B, 1])
    manager.set_now(10)
    assert manager.records.checkpoint_order() == [timed, other]
    assert manager.expire() == 2  # the checkpoint and its block
    assert manager.records.lru_to_mru() == [other]
    manager.check_invariants()


# Looking again


def test_rebind_checkpoint_restores_what_another_sequence_kept_meanwhile() -> None:
    manager = hybrid(16)
    tokens = [*A, *B, *C, 1]
    producer, follower = Run(manager, tokens), Run(manager, tokens)
    assert manager.rebind_checkpoint(follower.lease, follower.chain, 4) == 4
    producer.checkpoint(6)
    producer.checkpoint(10)
    assert manager.rebind_checkpoint(follower.lease, follower.chain, 10) == 10
    assert manager.rebind_checkpoint(follower.lease, follower.chain, 7) == 10
    assert (follower.pages[:2], follower.lease.shared_block_count) == ([0, 1], 2)
    assert (follower.lease.recurrent_snapshot_slot, follower.lease.partial_kv_snapshot_slot) == (1, 1)
    with pytest.raises(InvalidArgumentError, match="release them first"):
        manager.rebind_checkpoint(follower.lease, follower.chain, 7)
    with pytest.raises(InvalidArgumentError, match="from 0 to 13"):
        manager.rebind_checkpoint(producer.lease, producer.chain, 14)
    follower.release()
    manager.check_invariants()


def test_rebind_checkpoint_takes_the_lineage_of_the_checkpoint() -> None:
    manager = mtp(24)
    tokens = [*A, *B, *C, 1]
    follower = Run(manager, tokens, speculative=True)
    follower.checkpoint(5)
    producer = Run(manager, [*A, *B, 7], speculative=True)
    producer.checkpoint(9)
    other = Run(manager, tokens, speculative=True)
    other.checkpoint(12)
    assert manager.rebind_checkpoint(follower.lease, follower.chain, 5) == 12
    assert follower.drafts[:2] == manager.drafts.path_of(follower.drafts[1])
    assert follower.lease.published_draft_block_count == 2
    for run in (follower, producer, other):
        run.release()
    manager.check_invariants()


# Pure recurrent


def test_pure_recurrent_leases_show_no_pages() -> None:
    manager = pure(8)
    run = Run(manager, [*A, *B, 1])
    assert (run.pages, run.lease.num_base_pages) == ([], 0)
    assert manager.ensure_coverage([run.lease], [9], 1) == -1
    done = run.checkpoint(6)
    assert (done.record, manager.record(done.record).base_page_path) == (1, ())
    assert manager.record(1).key.full_block_count == 1
    run.release()
    hit = Run(manager, [*A, 11, 11, 5], hold=True)
    assert (hit.plan.reuse_token_length, hit.lease.recurrent_snapshot_slot, hit.pages) == (6, 0, [])
    hit.release()
    manager.check_invariants()


def test_pure_recurrent_takes_index_pages_as_it_publishes() -> None:
    manager = pure(8)
    run = Run(manager, [1, 2])
    run.chain.extend([3] * 10)
    assert run.checkpoint(12).record == 1
    assert run.publish(12, make_record=False).published_block_count == 3
    manager.check_invariants()


def test_first_page_checkpoints_hang_at_the_namespace() -> None:
    manager = hybrid(8, 2)
    (record,) = checkpointed(manager, [1, 2])
    assert (manager.index.size, manager.index.num_namespaces) == (0, 1)
    assert manager.record(record).base_page_path == ()
    assert manager.plan(chain([1, 2, 3])).hybrid_record == record
    manager.evict_record(record)
    assert manager.index.num_namespaces == 0
    manager.check_invariants()


def test_first_page_checkpoints_do_not_outlive_everything() -> None:
    """No leaf stands for them, so they go by age as soon as one is the oldest."""
    manager = hybrid(8, 2)
    (short,) = checkpointed(manager, [1, 2])
    (long,) = checkpointed(manager, [*A, 1])
    run = Run(manager, [9])
    manager.reserve_hybrid_snapshots(run.lease, False)
    assert (short in manager.records, long in manager.records) == (False, True)


def test_evict_all_under_live_leases() -> None:
    manager = mtp(12)
    run = Run(manager, [*A, *B, 1], speculative=True)
    run.checkpoint(9)
    hit = Run(manager, [*A, *B, 1, 2], speculative=True, hold=True)
    assert manager.evict_all() == 2
    assert (manager.index.size, manager.drafts.size, len(manager.records)) == (0, 0, 0)
    manager.check_invariants()
    hit.release()
    run.release()
    assert all(
        pool.free_count == pool.capacity
        for pool in (manager.pools.base, manager.pools.draft, manager.pools.recurrent, manager.pools.partial)
    )


def test_hybrid_has_no_endpoint_records() -> None:
    manager = hybrid(8)
    with pytest.raises(InvalidArgumentError):
        cached(manager, [*A, 1])
    with pytest.raises(ContractViolation, match="belongs to a manager"):
        manager.records.erase(1)
