"""Lookup, plan and lease of one sequence, its state around the lease, its reuse report and its counts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from edgellm._core.block_hash import TokenChain
from edgellm.cache import admission as admitting
from edgellm.cache.checkpoint_plan import place_checkpoints
from edgellm.cache.request import SequenceState
from edgellm.cache.results import AcquireSequenceResult
from edgellm.cache.types import (
    ContextCacheBatchAdmission,
    ContextCacheLookupPolicy,
    ContextCacheSequenceAdmission,
    DecodingKvHeadroom,
    Retention,
    ReusePlanKind,
    ReuseReport,
    ReuseStopReason,
)
from edgellm.errors import InvalidArgumentError

if TYPE_CHECKING:
    from edgellm._core.planners import ReusePlan
    from edgellm.cache.coordinator import ContextCacheCoordinator
    from edgellm.cache.request import Impl

_LAST_NANOSECOND = 2**63 - 1  # the manager counts expiry in 64 bits
_LONGEST_TTL_SECONDS = 2**63 // 10**9


def acquire_sequence(
    coordinator: ContextCacheCoordinator,
    admission: ContextCacheSequenceAdmission,
    *,
    lookup_policy: ContextCacheLookupPolicy,
    headroom: DecodingKvHeadroom,
    speculative_request: bool,
    reserve_pages: int = 0,
    draft_reserve_pages: int = 0,
) -> AcquireSequenceResult:
    """Look up, plan and lease.  A refusal changed nothing; there is no second, cold attempt.

    A hit pins pages that the same prompt would need cold as well, and evicts leaves only, so whatever fits cold fits
    with the hit (the manager gives up a copied tail by itself where that is what is missing).
    """
    started = time.perf_counter_ns()
    manager, retention = coordinator._manager, admission.retention
    chain = TokenChain(coordinator.page_size, admission.key_extras, admission.per_position_media_hash)
    chain.extend(admission.token_ids)
    coordinator.tell_time()
    plan = manager.plan(chain, lookup_policy, speculative=speculative_request)
    paged, paired = coordinator.profile.has_attention, headroom.draft_extra_tokens > 0
    acquired = manager.acquire(
        plan,
        min_tokens=chain.num_tokens + headroom.base_extra_tokens if paged else 0,
        draft_min_tokens=chain.num_tokens + headroom.draft_extra_tokens if paired else 0,
        reserve_pages=reserve_pages,
        draft_reserve_pages=draft_reserve_pages,
        priority=retention.priority,
        expiry=expiry_of(coordinator, retention),
    )
    return AcquireSequenceResult(
        chain=chain,
        plan=acquired.plan,
        lease=acquired.lease,
        status=acquired.status,
        planning_ns=time.perf_counter_ns() - started,
    )


def expiry_of(coordinator: ContextCacheCoordinator, retention: Retention) -> int:
    """When a sequence's context expires, in nanoseconds of the coordinator's clock; 0 is never."""
    if retention.ttl_seconds is None:
        return 0
    coordinator.expiry_in_use = True
    lifetime = round(min(retention.ttl_seconds, _LONGEST_TTL_SECONDS) * 1e9)
    return max(1, min(coordinator.clock() + lifetime, _LAST_NANOSECOND))


def build_sequence(
    coordinator: ContextCacheCoordinator,
    impl: Impl,
    admission: ContextCacheSequenceAdmission,
    acquired: AcquireSequenceResult,
    lookup_policy: ContextCacheLookupPolicy,
    *,
    joined: bool,
) -> SequenceState:
    """The sequence's state around its new lease."""
    if acquired.lease is None:
        raise InvalidArgumentError("the sequence has no lease; only acquired sequences can be built")
    tail = admission.replay_tail_length
    if tail is None:  # the batch's is meant for all of its prompts, and may be more than a short one has
        tail = min(impl.replay_tail_length, acquired.chain.num_tokens)
    return SequenceState(
        lease=acquired.lease,
        chain=acquired.chain,
        resident=admission.resident,
        key_extras=admission.key_extras,
        per_position_media_hash=admission.per_position_media_hash,
        lookup_policy=lookup_policy,
        commit_policy=admission.commit_policy or impl.commit_policy,
        replay_tail_length=tail,
        reuse_report=reuse_report(coordinator, admission, acquired.plan, lookup_policy),
        joined=joined,
        retention=admission.retention,
        template_boundaries=tuple(sorted(set(admission.checkpoint_boundaries))),
    )


def reuse_report(
    coordinator: ContextCacheCoordinator,
    admission: ContextCacheSequenceAdmission,
    plan: ReusePlan,
    lookup_policy: ContextCacheLookupPolicy,
) -> ReuseReport:
    """What was reused and why not more: the planner's answer, and what only the coordinator knows laid over it."""
    reason, position = plan.stop_reason, plan.stop_position
    if not coordinator.config.enabled:
        reason, position = ReuseStopReason.DISABLED, 0
    elif lookup_policy is ContextCacheLookupPolicy.BYPASS:
        reason, position = ReuseStopReason.BYPASS, 0
    elif reason is ReuseStopReason.NO_RECORD and admission.salted and not plan.namespace_known:
        reason = ReuseStopReason.SALT
    return ReuseReport(
        prompt_tokens=plan.num_tokens,
        reused_tokens=plan.reuse_token_length,
        matched_tokens=plan.matched_token_length,
        stop_reason=reason,
        stop_position=position,
    )


def count_admission(
    coordinator: ContextCacheCoordinator, sequence: SequenceState, acquired: AcquireSequenceResult
) -> None:
    """Classify one admitted sequence; called only once nothing can refuse it any more."""
    counters, plan = coordinator.counters, acquired.plan
    counters.admitted_sequences += 1
    counters.planning_nanoseconds += acquired.planning_ns
    counters.hit_sequences += plan.matched_token_length > 0
    counters.media_aware_sequences += any(
        digest is not None and not digest.is_zero() for digest in sequence.per_position_media_hash
    )
    counters.lookup_bypass_sequences += sequence.lookup_policy is ContextCacheLookupPolicy.BYPASS
    counters.standard_plans += plan.kind is ReusePlanKind.STANDARD
    counters.no_reusable_prefix_plans += plan.kind is ReusePlanKind.NO_REUSABLE_PREFIX
    counters.full_input_rewind_plans += plan.kind is ReusePlanKind.FULL_INPUT_REWIND
    counters.matched_tokens += plan.matched_token_length
    counters.reused_tokens += plan.reuse_token_length
    counters.spec_replays += plan.replayed_token_count > 0
    counters.spec_replayed_tokens += plan.replayed_token_count


def acquire_into(
    coordinator: ContextCacheCoordinator,
    impl: Impl,
    admission: ContextCacheSequenceAdmission,
    lookup_policy: ContextCacheLookupPolicy,
    headroom: DecodingKvHeadroom,
    *,
    joined: bool,
    reserve_pages: int = 0,
    draft_reserve_pages: int = 0,
) -> AcquireSequenceResult | None:
    """Lease one sequence and append it to the request; None on insufficient capacity, nothing changed."""
    acquired = acquire_sequence(
        coordinator,
        admission,
        lookup_policy=lookup_policy,
        headroom=headroom,
        speculative_request=impl.speculative_request,
        reserve_pages=reserve_pages,
        draft_reserve_pages=draft_reserve_pages,
    )
    if acquired.lease is None:
        return None
    try:
        sequence = build_sequence(coordinator, impl, admission, acquired, lookup_policy, joined=joined)
        _append(coordinator, impl, sequence)
    except BaseException:
        acquired.lease.release()
        raise
    coordinator._occupied[sequence.resident.slot] = impl
    try:
        place_checkpoints(coordinator, impl, sequence, acquired.plan)
    except BaseException:
        drop_tail(coordinator, impl)
        raise
    return acquired


def _append(coordinator: ContextCacheCoordinator, impl: Impl, sequence: SequenceState) -> None:
    lease, page_size = sequence.lease, coordinator.page_size
    if sequence.replay_tail_length:
        position = sequence.chain.num_tokens - sequence.replay_tail_length
        coordinator._manager.set_volatile_from(lease, position)
    paged = coordinator.profile.has_attention
    impl.append_sequence(
        sequence,
        coverage=lease.num_base_pages * page_size if paged else coordinator.row_capacity_tokens,
        draft_coverage=lease.num_draft_pages * page_size,
    )


def drop_tail(coordinator: ContextCacheCoordinator, impl: Impl) -> SequenceState:
    """Take the last sequence out of its request and give its lease back; its rows are the caller's."""
    sequence = impl.pop_sequence()
    coordinator._occupied.pop(sequence.resident.slot, None)
    let_go(coordinator, sequence)
    return sequence


def let_go(coordinator: ContextCacheCoordinator, sequence: SequenceState) -> None:
    """Give a sequence's lease back; a time to live counts from here.  Never raises for a lease that is gone."""
    lease = sequence.lease
    if lease.valid and sequence.retention.ttl_seconds is not None:
        coordinator._manager.set_expiry(lease, expiry_of(coordinator, sequence.retention))
    lease.release()


def acquire_batch(
    coordinator: ContextCacheCoordinator,
    impl: Impl,
    batch: ContextCacheBatchAdmission,
    headroom: DecodingKvHeadroom,
) -> bool:
    """Lease every sequence in order; False when one of them found no room (the caller destroys `impl`).

    Metrics move only once all are in, so a refused batch leaves none behind.
    """
    forced_bypass = admitting.batch_is_forced_to_bypass(coordinator, batch)
    admitting.check_sequences(coordinator, batch.sequences, headroom)
    acquired_all = []
    for admission in batch.sequences:
        lookup = admitting.effective_lookup_policy(
            batch.lookup_policy, admission.lookup_policy, forced_bypass=forced_bypass
        )
        acquired = acquire_into(coordinator, impl, admission, lookup, headroom, joined=False)
        if acquired is None:
            return False
        acquired_all.append(acquired)
    for sequence, acquired in zip(impl.sequences, acquired_all, strict=True):
        count_admission(coordinator, sequence, acquired)
    return True
