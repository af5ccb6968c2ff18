"""What the tests of the context-cache manager share: managers of each flavour, a prompt with its lease, snapshots.

Page size 4; A, B, C, D are four blocks of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgellm._core.block_hash import TokenChain
from edgellm._core.cache_manager import CacheRequestLease, ContextCacheManager, PublishResult
from edgellm.cache.types import (
    BaseStateKind,
    BlockKeyExtras,
    CheckpointKind,
    ContextCacheLookupPolicy,
    Hash128,
    HybridSnapshotReservation,
    ResourceDemand,
    ReusePlanMode,
    SpecReuseContract,
)

P = 4
A, B, C, D = [10] * P, [11] * P, [12] * P, [13] * P
USE = ContextCacheLookupPolicy.USE_CACHE
BYPASS = ContextCacheLookupPolicy.BYPASS


def chain(tokens: Sequence[int], page_size: int = P, media: Sequence[Hash128 | None] = ()) -> TokenChain:
    out = TokenChain(page_size, BlockKeyExtras(), media)
    out.extend(tokens)
    return out


def vanilla(pages: int, **options: Any) -> ContextCacheManager:
    return ContextCacheManager(P, ResourceDemand(pages), **options)


def spec(pages: int, drafts: int | None = None, *, future: int = 1, **options: Any) -> ContextCacheManager:
    """EAGLE-like with future 1, DFlash-like with 0."""
    demand = ResourceDemand(pages, pages if drafts is None else drafts)
    return ContextCacheManager(P, demand, spec_reuse_contract=SpecReuseContract(True, future), **options)


def hybrid(pages: int, recurrent: int = 4, partial: int = 4, **options: Any) -> ContextCacheManager:
    demand = ResourceDemand(pages, 0, recurrent, partial)
    return ContextCacheManager(P, demand, base_state_kind=BaseStateKind.HYBRID, **options)


def pure(pages: int, recurrent: int = 4, **options: Any) -> ContextCacheManager:
    demand = ResourceDemand(pages, 0, recurrent, 0)
    return ContextCacheManager(P, demand, base_state_kind=BaseStateKind.PURE_RECURRENT, **options)


def mtp(pages: int, recurrent: int = 4, partial: int = 4, **options: Any) -> ContextCacheManager:
    return ContextCacheManager(
        P,
        ResourceDemand(pages, pages, recurrent, partial),
        base_state_kind=BaseStateKind.HYBRID,
        spec_reuse_contract=SpecReuseContract(True, 1),
        **options,
    )


class Run:
    """A prompt with its lease.  Copies from tail and snapshots count as done at once unless `hold` is set."""

    def __init__(
        self,
        manager: ContextCacheManager,
        tokens: Sequence[int] | TokenChain,
        *,
        speculative: bool = False,
        policy: ContextCacheLookupPolicy = USE,
        hold: bool = False,
        **options: Any,
    ) -> None:
        self.manager = manager
        self.chain = tokens if isinstance(tokens, TokenChain) else chain(tokens)
        self.result = manager.acquire(manager.plan(self.chain, policy, speculative=speculative), **options)
        assert self.result.lease is not None
        self.lease: CacheRequestLease = self.result.lease
        if not hold:
            manager.release_tail_source(self.lease)
            manager.release_restored_hybrid_snapshots(self.lease)

    @property
    def plan(self) -> Any:
        return self.result.plan

    @property
    def pages(self) -> list[int]:
        return self.lease.base_pages.tolist()

    @property
    def drafts(self) -> list[int]:
        return self.lease.draft_pages.tolist()

    @property
    def path(self) -> list[int]:
        return self.pages[: self.lease.published_block_count]

    def publish(self, length: int | None = None, *, make_record: bool = True, tail: bool = False) -> PublishResult:
        length = self.chain.num_tokens if length is None else length
        call = self.manager.publish_spec if self.lease.mode is ReusePlanMode.SPEC else self.manager.publish
        return call(self.lease, self.chain, length, make_record=make_record, retain_tail=tail)

    def reserve(self, length: int) -> HybridSnapshotReservation:
        """Slots for a checkpoint of `length` tokens, captured."""
        attention = self.manager.base_state_kind is BaseStateKind.HYBRID
        partial = self.lease.mode is ReusePlanMode.HYBRID_MTP or (attention and length % P != 0)
        reservation = self.manager.reserve_hybrid_snapshots(self.lease, partial)
        assert reservation is not None
        self.manager.mark_snapshots_written(self.lease, reservation)
        return reservation

    def publish_reserved(self, length: int, reservation: HybridSnapshotReservation, **options: Any) -> PublishResult:
        both = self.lease.mode is ReusePlanMode.HYBRID_MTP
        call = self.manager.publish_hybrid_mtp if both else self.manager.publish_hybrid
        return call(self.lease, self.chain, length, reservation, **options)

    def checkpoint(
        self, length: int | None = None, kind: CheckpointKind = CheckpointKind.TAIL, keep: Sequence[int] = ()
    ) -> PublishResult:
        """Reserve, capture, publish and retire."""
        length = self.chain.num_tokens if length is None else length
        reservation = self.reserve(length)
        done = self.publish_reserved(length, reservation, kind=kind, keep_lengths=keep)
        self.manager.retire_hybrid_snapshot_reservation(self.lease, reservation)
        return done

    def release(self) -> None:
        self.lease.release()


def cached(manager: ContextCacheManager, tokens: Sequence[int], *, tail: bool = False, **options: Any) -> int | None:
    """Prefill, publish with record, release; the record id."""
    run = Run(manager, tokens, **options)
    record = run.publish(tail=tail).record
    run.release()
    return record


def checkpointed(manager: ContextCacheManager, tokens: Sequence[int], *lengths: int, **options: Any) -> list[int]:
    """Prefill, keep a checkpoint at each length, release; the record ids."""
    run = Run(manager, tokens, **options)
    records = [run.checkpoint(length).record for length in lengths or (len(tokens),)]
    run.release()
    assert None not in records
    return records  # type: ignore[return-value]


def snapshot(manager: ContextCacheManager) -> tuple[object, ...]:
    """Everything observable: what "unchanged" means."""
    manager.check_invariants()
    pools = manager.pools
    index, drafts, records = manager.index, manager.drafts, manager.records
    checkpoints = [r for r in records.lru_to_mru() if records.exact_length(r)]
    return (
        [pool.free_list() for pool in (pools.base, pools.draft, pools.recurrent, pools.partial)],
        [
            (pool.active_ref(p), pool.cache_ref(p))
            for pool in (pools.base, pools.draft, pools.recurrent, pools.partial)
            for p in range(pool.capacity)
        ],
        (index.eviction_order(), [index.path_of(p) for p in range(index.capacity)], index.num_namespaces),
        (drafts.eviction_order(), [drafts.path_of(p) for p in range(drafts.capacity)]),
        [manager.record(r) for r in records.lru_to_mru()],
        [(records.kind(r), records.superseded(r)) for r in checkpoints],
        manager.metrics(),
        manager.num_live_leases,
    )


def lease_state(lease: CacheRequestLease) -> tuple[object, ...]:
    """Everything observable of a lease."""
    return (
        lease.base_pages.tolist(),
        lease.draft_pages.tolist(),
        (lease.shared_block_count, lease.published_block_count, lease.rebound_page_count),
        (lease.shared_draft_block_count, lease.published_draft_block_count, lease.rebound_draft_page_count),
        (lease.tail_source, lease.draft_tail_source, lease.tail_token_count),
        (lease.recurrent_snapshot_slot, lease.partial_kv_snapshot_slot, lease.sealed, lease.valid),
    )
