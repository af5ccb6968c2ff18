"""Manager and model side by side: every operation runs on both, and the whole observable state must be equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cache_model.checkpoints import CacheModel
from cache_model.manager import Published
from cache_model.parts import Lease, Plan, Pool
from edgellm._core.block_hash import MEDIA_TOKEN_ID
from edgellm._core.planners import plan_eviction
from edgellm.cache.types import (
    AcquireStatus,
    CheckpointKind,
    HybridSnapshotReservation,
    ResourceDemand,
    ResourceType,
    RetentionPriority,
)
from edgellm.testing.cache_workout import CacheWorkout, LiveSequence, StagedCheckpoint


def same(what: str, actual: object, expected: object) -> None:
    assert actual == expected, f"{what}: the manager has {actual}, the model {expected}"


class Lockstep(CacheWorkout):
    """A `CacheWorkout` whose manager must do exactly what the model does."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.model = CacheModel(self.flavour, self.page_size, self.capacities, self.max_records, self.memory_place)
        self.planned: Plan | None = None
        self.check(None)

    def memory_place(self, namespace: int, symbols: Sequence[int]) -> int:
        """Where the index remembers an evicted or withheld block: it has as many places as its table."""
        places = 64
        while places < min(2 * self.capacities.base_kv_pages, 1 << 16):
            places *= 2
        return self.chain(namespace, symbols).hash_at(len(symbols) // self.page_size - 1).lo % places

    def observe(self, event: str, *facts: Any) -> None:
        getattr(self, f"after_{event}")(*facts)

    # One method for each operation: run the model, compare what the call returned

    def after_plan(self, namespace: int, symbols: Sequence[int], speculative: bool, bypass: bool, plan: Any) -> None:
        self.planned = self.model.plan(namespace, tuple(symbols), speculative, bypass)
        self.planned_for = namespace
        self.compare_plan(plan, self.planned)

    def after_acquire(
        self,
        sequence: LiveSequence | None,
        result: Any,
        extra: int,
        draft_extra: int,
        reserve: int,
        priority: RetentionPriority,
        expiry: int,
    ) -> None:
        assert self.planned is not None
        length = self.planned.num_tokens
        wanted = length + extra if extra else 0, length + draft_extra if draft_extra else 0
        lease = self.model.acquire(self.planned_for, self.planned, *wanted, reserve, int(priority), expiry)
        assert (sequence is not None) == (lease is not None)
        assert (result.status is AcquireStatus.ACQUIRED) == (lease is not None)
        if sequence is not None:
            sequence.model = lease
            self.compare_plan(result.plan, self.planned)

    def after_release_sources(self, sequence: LiveSequence) -> None:
        self.model.release_tail(sequence.model)
        self.model.release_restored(sequence.model)

    def after_release(self, sequence: LiveSequence) -> None:
        self.model.release(sequence.model)

    def after_grow(self, sequence: LiveSequence, base: int, draft: int, grown: bool) -> None:
        lease: Lease = sequence.model
        assert grown == self.model.grow_to(lease, len(lease.pages) + base, len(lease.draft_pages) + draft)

    def after_ensure_coverage(self, sequences: list[LiveSequence], extra: int, draft_extra: int, refused: int) -> None:
        expected = -1
        for k, sequence in enumerate(sequences):
            length = len(sequence.symbols)
            pages, draft_pages = (-(-(length + more) // self.page_size) for more in (extra, draft_extra))
            if not self.model.grow_to(sequence.model, pages, draft_pages):
                expected = k
                break
        assert refused == expected

    def after_append(self, sequences: list[LiveSequence], served: int, publish: bool, lookahead: int) -> None:
        """The sequences that were served have the token in `symbols` already."""
        for k, sequence in enumerate(sequences):
            granted = self.append_page(sequence, k < served)
            assert granted == (k < served)
            if not granted:
                break
            self.publish_appended(sequence, publish, lookahead)

    def append_page(self, sequence: LiveSequence, has_token: bool) -> bool:
        length = len(sequence.symbols) - has_token
        return self.model.grow_to(sequence.model, length // self.page_size + 1, 0)

    def publish_appended(self, sequence: LiveSequence, publish: bool, lookahead: int) -> None:
        resident = len(sequence.symbols) - lookahead
        if publish and resident // self.page_size > sequence.model.published:
            self.model.publish(sequence.model, tuple(sequence.symbols), resident, False)

    def after_append_failed(self, sequences: list[LiveSequence], served: int, publish: bool, lookahead: int) -> None:
        """The one at hand has its page or not, its token or not, and was published or not: never half of one."""
        for k, sequence in enumerate(sequences[: served + 1]):
            pages = len(self.manager_pages(sequence))
            if k < served or pages > len(sequence.model.pages):
                assert self.append_page(sequence, k < served)
            if k < served - 1 or sequence.lease.published_block_count > sequence.model.published:
                self.publish_appended(sequence, publish, lookahead)

    def manager_pages(self, sequence: LiveSequence) -> list[int]:
        """Index pages of a recurrent sequence cannot be seen; they come with its tokens."""
        if self.flavour.index_only:
            return [0] * (-(-len(sequence.symbols) // self.page_size))
        return sequence.lease.base_pages.tolist()

    def after_publish(
        self, sequence: LiveSequence, resident: int, make_record: bool, retain_tail: bool, result: Any
    ) -> None:
        expected = self.model.publish(sequence.model, tuple(sequence.symbols), resident, make_record, retain_tail)
        self.compare_result(result, expected)

    def compare_result(self, result: Any, expected: Published) -> None:
        actual = (result.status, result.record, result.published_block_count)
        assert actual == (expected.status, expected.record, expected.published)
        assert (result.new_block_count, result.new_draft_block_count) == (expected.new, expected.new_drafts)

    def after_rebind(self, sequence: LiveSequence, length: int) -> None:
        assert length == self.model.rebind(sequence.model, tuple(sequence.symbols))

    def after_reserve(
        self, sequence: LiveSequence, partial: bool, reservation: HybridSnapshotReservation | None
    ) -> None:
        assert reservation == self.model.reserve(sequence.model, partial)

    def after_publish_checkpoint(
        self,
        sequence: LiveSequence,
        staged: StagedCheckpoint,
        kind: CheckpointKind,
        keep_lengths: Sequence[int],
        result: Any,
    ) -> None:
        expected = self.model.publish_checkpoint(
            sequence.model, tuple(sequence.symbols), staged.length, staged.reservation, kind, keep_lengths
        )
        self.compare_result(result, expected)

    def after_retire(self, sequence: LiveSequence, staged: StagedCheckpoint) -> None:
        self.model.retire(sequence.model, staged.reservation)

    def after_rebind_checkpoint(self, sequence: LiveSequence, committed: int, length: int) -> None:
        assert length == self.model.rebind_checkpoint(sequence.model, tuple(sequence.symbols), committed)

    def after_evict_record(self, record: int) -> None:
        self.model.evict_record(record)

    def after_evict_all(self, count: int) -> None:
        assert count == self.model.evict_all()

    def after_time(self) -> None:
        self.model.set_now(self.now)

    def after_expire(self, count: int) -> None:
        assert count == self.model.expire()

    def after_withheld(self, sequence: LiveSequence, block: int) -> None:
        self.model.note_withheld(sequence.namespace, tuple(sequence.symbols[: (block + 1) * self.page_size]))

    def after_volatile(self, sequence: LiveSequence, position: int) -> None:
        sequence.model.volatile_from = position

    # Equality

    def compare_plan(self, plan: Any, expected: Plan) -> None:
        actual = {
            "mode": plan.mode,
            "num_tokens": plan.num_tokens,
            "matched": plan.matched_token_length,
            "reuse": plan.reuse_token_length,
            "known": plan.known_token_length,
            "kind": plan.kind,
            "stop": (plan.stop_reason, plan.stop_position),
            "bindings": (plan.base_page_bindings.tolist(), plan.draft_page_bindings.tolist()),
            "tail": (plan.tail_source, plan.draft_tail_source, plan.tail_token_count),
            "replayed": plan.replayed_token_count,
            "record": plan.hybrid_record,
            "snapshots": (plan.recurrent_snapshot_binding, plan.partial_kv_snapshot_binding),
            "namespace": plan.namespace_known,
            "demand": plan.demand,
        }
        wanted = self.describe_plan(expected)
        different = {name: (actual[name], wanted[name]) for name in wanted if actual[name] != wanted[name]}
        assert not different, f"plan and model differ: {different}"

    def describe_plan(self, plan: Plan) -> dict[str, Any]:
        total = -(-plan.num_tokens // self.page_size)
        nodes, drafts = ([] if self.flavour.index_only else plan.nodes), plan.drafts
        record = plan.record
        return {
            "mode": plan.mode,
            "num_tokens": plan.num_tokens,
            "matched": plan.matched,
            "reuse": plan.reuse,
            "known": plan.known,
            "kind": plan.kind,
            "stop": (plan.reason, plan.position),
            "bindings": ([n.page for n in nodes], [d.page for d in drafts]),
            "tail": (
                plan.tail.page if plan.tail else None,
                plan.draft_tail.page if plan.draft_tail else None,
                plan.tail_count,
            ),
            "replayed": plan.replayed,
            "record": record.id if record else None,
            "snapshots": (record.recurrent, record.partial) if record else (None, None),
            "namespace": plan.namespace_known,
            "demand": ResourceDemand(
                0 if self.flavour.index_only else total - len(nodes),
                total - len(drafts) if plan.mode.value in ("spec", "hybrid_mtp") else 0,
            ),
        }

    def check(self, touched: LiveSequence | None) -> None:
        super().check(touched)
        manager, model = self.manager, self.model
        for kind, pool in zip(ResourceType, model.pools(), strict=True):
            self.compare_pool(kind, pool)
        same("next victims", manager.index.eviction_order(), [n.page for n in model.unused])
        same("next draft victims", manager.drafts.eviction_order(), [d.page for d in model.unused_drafts])
        assert sorted(p for p in range(model.base.capacity) if p in manager.index) == sorted(
            n.page for n in model.nodes
        )
        assert manager.available_pages == len(model.base.free) + len(model.unused)
        assert manager.num_live_leases == len(model.leases)
        same("records", manager.records.lru_to_mru(), [r.id for r in model.records])
        same("unused checkpoints", manager.records.checkpoint_order(), [r.id for r in model.unused_records])
        self.compare_tree()
        self.compare_metrics()
        for sequence in self.live:
            if sequence.model is not None:
                self.compare_lease(sequence)

    def compare_pool(self, kind: ResourceType, pool: Pool) -> None:
        real = self.manager.pools.pool(kind)
        same(f"{kind.name} free list", real.free_list(), list(pool.free))
        for unit in range(pool.capacity):
            assert (real.active_ref(unit), real.cache_ref(unit)) == (pool.active[unit], unit in pool.cached), (
                kind,
                unit,
            )

    def compare_tree(self) -> None:
        index, drafts = self.manager.index, self.manager.drafts
        for node in self.model.nodes:
            assert index.path_of(node.page) == [n.page for n in node.path]
            tokens = [MEDIA_TOKEN_ID if symbol < 0 else symbol for symbol in node.block]
            assert index.tokens_of(node.page).tolist() == tokens
        for draft in self.model.drafts:
            assert draft.page in drafts
        for record in self.model.records:
            real = self.manager.record(record.id)
            path = record.node.path if record.node and not self.flavour.index_only else []
            assert list(real.base_page_path) == [n.page for n in path]
            assert real.exact_checkpoint_length == (record.length or None)
            assert (real.recurrent_snapshot_slot, real.partial_kv_snapshot_slot) == (record.recurrent, record.partial)

    def compare_metrics(self) -> None:
        metrics = self.manager.metrics()
        assert (
            metrics.evicted_records,
            metrics.reclaimed_base_kv_pages,
            metrics.reclaimed_draft_kv_pages,
            metrics.reclaimed_recurrent_snapshots,
            metrics.reclaimed_partial_kv_snapshots,
        ) == (self.model.evicted_records, *(pool.reclaimed for pool in self.model.pools()))

    def compare_lease(self, sequence: LiveSequence) -> None:
        lease, expected = sequence.lease, sequence.model
        assert lease.mode is expected.mode
        assert lease.base_pages.tolist() == ([] if self.flavour.index_only else expected.pages)
        assert lease.draft_pages.tolist() == expected.draft_pages
        assert (lease.shared_block_count, lease.shared_draft_block_count) == (expected.shared, expected.shared_draft)
        assert lease.published_block_count == expected.published
        assert lease.published_draft_block_count == len(expected.draft_nodes)
        assert (lease.rebound_page_count, lease.rebound_draft_page_count) == (expected.rebound, expected.rebound_draft)
        assert lease.tail_source == (expected.tail.page if expected.tail else None)
        assert lease.draft_tail_source == (expected.draft_tail.page if expected.draft_tail else None)
        assert lease.sealed == expected.sealed
        assert (lease.priority, lease.expiry) == (expected.priority, expected.expiry)

    def forecast_matches(self, count: int) -> list[int]:
        """Victims that the planner names for `count` base pages; they are the front of the eviction order."""
        plan = plan_eviction(ResourceDemand(base_kv_pages=count), self.manager.pools, self.manager.index)
        assert list(plan.victims) == self.manager.index.eviction_order()[: len(plan.victims)]
        return list(plan.victims)
