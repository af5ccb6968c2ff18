"""Admission: argument checks, effective policies, lookup, plan and lease of one sequence."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgellm._core.block_hash import TokenChain
from edgellm.cache.request import SequenceState
from edgellm.cache.results import AcquireSequenceResult
from edgellm.cache.types import (
    AcquireStatus,
    ContextCacheBatchAdmission,
    ContextCacheCommitPolicy,
    ContextCacheLookupPolicy,
    ContextCacheSequenceAdmission,
    DecodingKvHeadroom,
    DecodingTokenStateContract,
    ReusePlanKind,
    ReuseReport,
    ReuseStopReason,
)
from edgellm.errors import InputTooLongError, InvalidArgumentError, UnsupportedRequestError

if TYPE_CHECKING:
    from edgellm.cache.coordinator import ContextCacheCoordinator
    from edgellm.cache.request import Impl


def check_batch(coordinator: ContextCacheCoordinator, batch: ContextCacheBatchAdmission) -> None:
    """Errors of a whole batch that need no state."""
    _require_member("lookup_policy", batch.lookup_policy, ContextCacheLookupPolicy)
    _require_member("commit_policy", batch.commit_policy, ContextCacheCommitPolicy)
    _require_member("token_state_contract", batch.token_state_contract, DecodingTokenStateContract)
    if batch.speculative_request and not coordinator.profile.is_speculative:
        raise UnsupportedRequestError(
            "the request is speculative and this deployment has no speculative decoder; set speculative_request=False"
        )
    limit = coordinator.deployment.max_batch_size
    if len(batch.sequences) > limit:
        raise InvalidArgumentError(f"the batch has {len(batch.sequences)} sequences, the limit is {limit}; split it")


def _require_member(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise InvalidArgumentError(f"{name} is {value!r}; pass a {kind.__name__}")


def check_headroom(headroom: DecodingKvHeadroom, *, paired: bool) -> None:
    """Base look-ahead is always positive; draft look-ahead exists exactly with a paired draft working set."""
    if headroom.base_extra_tokens <= 0:
        raise InvalidArgumentError(
            f"base_extra_tokens is {headroom.base_extra_tokens}; at least 1 is needed for the look-ahead token"
        )
    if headroom.draft_extra_tokens < 0 or (headroom.draft_extra_tokens > 0) != paired:
        wanted = "positive for a request with a paired draft" if paired else "0 for a request without a paired draft"
        raise InvalidArgumentError(f"draft_extra_tokens is {headroom.draft_extra_tokens}; it must be {wanted}")


def check_sequences(
    coordinator: ContextCacheCoordinator,
    admissions: Sequence[ContextCacheSequenceAdmission],
    headroom: DecodingKvHeadroom,
) -> None:
    """`check_sequence` for a batch, and no resident slot named twice."""
    slots: set[int] = set()
    for admission in admissions:
        check_sequence(coordinator, admission, headroom)
        if admission.resident.slot in slots:
            raise InvalidArgumentError(f"slot {admission.resident.slot} is named twice in one batch; give each its own")
        slots.add(admission.resident.slot)


def check_sequence(
    coordinator: ContextCacheCoordinator, admission: ContextCacheSequenceAdmission, headroom: DecodingKvHeadroom
) -> None:
    """Errors of one sequence: tokens, media, policies, row width, resident slot."""
    num_tokens = len(admission.token_ids)
    if num_tokens == 0:
        raise InvalidArgumentError("token_ids is empty; a sequence needs at least 1 token")
    num_media = len(admission.per_position_media_hash)
    if num_media not in (0, num_tokens):
        raise InvalidArgumentError(f"{num_media} media digests for {num_tokens} tokens; pass none or one per token")
    if admission.lookup_policy is not None:
        _require_member("lookup_policy", admission.lookup_policy, ContextCacheLookupPolicy)
    if admission.commit_policy is not None:
        _require_member("commit_policy", admission.commit_policy, ContextCacheCommitPolicy)
    room = coordinator.row_capacity_tokens
    if num_tokens + headroom.base_extra_tokens > room:
        raise InputTooLongError(
            f"{num_tokens} tokens and {headroom.base_extra_tokens} of headroom exceed the {room} of a page-table row; "
            "shorten the prompt or raise max_kv_capacity"
        )
    coordinator.check_resident_free(admission.resident)


def effective_lookup_policy(
    batch_policy: ContextCacheLookupPolicy,
    override: ContextCacheLookupPolicy | None,
    *,
    forced_bypass: bool,
) -> ContextCacheLookupPolicy:
    """Forced bypass, else the sequence's own wish, else the batch's."""
    if forced_bypass:
        return ContextCacheLookupPolicy.BYPASS
    return batch_policy if override is None else override


def batch_is_forced_to_bypass(coordinator: ContextCacheCoordinator, batch: ContextCacheBatchAdmission) -> bool:
    """A disabled cache, a batch that asks for bypass, or speculation beside media: nobody looks up or publishes."""
    if not coordinator.config.enabled or batch.lookup_policy is ContextCacheLookupPolicy.BYPASS:
        return True
    return batch.speculative_request and any(_has_media(sequence) for sequence in batch.sequences)


def _has_media(admission: ContextCacheSequenceAdmission) -> bool:
    return any(digest is not None and not digest.is_zero() for digest in admission.per_position_media_hash)


def acquire_sequence(
    coordinator: ContextCacheCoordinator,
    admission: ContextCacheSequenceAdmission,
    *,
    lookup_policy: ContextCacheLookupPolicy,
    headroom: DecodingKvHeadroom,
    speculative_request: bool,
    reserve_pages: int = 0,
) -> AcquireSequenceResult:
    """Look up, plan and lease; on pressure once more without the hit (its pins may be what is in the way).

    Raises:
        PluginError: the flavour of state has no planner in this build.
    """
    coordinator.require_base_flavour(speculative_request)
    started = time.perf_counter_ns()
    manager = coordinator.manager
    chain = TokenChain(coordinator.page_size, admission.key_extras, admission.per_position_media_hash)
    chain.extend(admission.token_ids)
    min_tokens = chain.num_tokens + headroom.base_extra_tokens
    plan = manager.plan(chain, lookup_policy)
    known_tokens = plan.matched_token_length
    acquired = manager.acquire(plan, min_tokens=min_tokens, reserve_pages=reserve_pages)
    forced_cold = False
    if acquired.status is AcquireStatus.INSUFFICIENT_CAPACITY and _depends_on_cache(plan):
        plan = manager.plan(chain, ContextCacheLookupPolicy.BYPASS)
        acquired = manager.acquire(plan, min_tokens=min_tokens, reserve_pages=reserve_pages)
        forced_cold = acquired.status is AcquireStatus.ACQUIRED
    return AcquireSequenceResult(
        chain=chain,
        plan=plan,
        lease=acquired.lease,
        status=acquired.status,
        forced_cold=forced_cold,
        known_tokens=known_tokens,
        planning_ns=time.perf_counter_ns() - started,
    )


def _depends_on_cache(plan: object) -> bool:
    return plan.reuse_token_length > 0 or plan.kind is ReusePlanKind.FULL_INPUT_REWIND  # type: ignore[attr-defined]


def build_sequence(
    coordinator: ContextCacheCoordinator,
    admission: ContextCacheSequenceAdmission,
    acquired: AcquireSequenceResult,
    *,
    lookup_policy: ContextCacheLookupPolicy,
    commit_policy: ContextCacheCommitPolicy,
    replay_tail_length: int,
    joined: bool,
) -> SequenceState:
    """The sequence's state around its new lease."""
    if acquired.lease is None:
        raise InvalidArgumentError("the sequence has no lease; only acquired sequences can be built")
    return SequenceState(
        lease=acquired.lease,
        chain=acquired.chain,
        resident=admission.resident,
        key_extras=admission.key_extras,
        per_position_media_hash=admission.per_position_media_hash,
        lookup_policy=lookup_policy,
        commit_policy=admission.commit_policy or commit_policy,
        replay_tail_length=replay_tail_length,
        reuse_report=reuse_report(coordinator, acquired, lookup_policy),
        joined=joined,
    )


def reuse_report(
    coordinator: ContextCacheCoordinator, acquired: AcquireSequenceResult, lookup_policy: ContextCacheLookupPolicy
) -> ReuseReport:
    """What was reused and why not more.  A forced-cold hit counts as evicted: it was known and had to go."""
    plan = acquired.plan
    reason, position = plan.stop_reason, plan.stop_position
    if not coordinator.config.enabled:
        reason, position = ReuseStopReason.DISABLED, 0
    elif acquired.forced_cold:
        reason, position = ReuseStopReason.EVICTED, 0
    elif lookup_policy is ContextCacheLookupPolicy.BYPASS:
        reason, position = ReuseStopReason.BYPASS, 0
    return ReuseReport(
        prompt_tokens=acquired.chain.num_tokens,
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
    bypass = sequence.lookup_policy is ContextCacheLookupPolicy.BYPASS
    counters.lookup_bypass_sequences += bypass or acquired.forced_cold
    counters.forced_cold_sequences += acquired.forced_cold
    counters.standard_plans += plan.kind is ReusePlanKind.STANDARD
    counters.no_reusable_prefix_plans += plan.kind is ReusePlanKind.NO_REUSABLE_PREFIX
    counters.full_input_rewind_plans += plan.kind is ReusePlanKind.FULL_INPUT_REWIND
    counters.matched_tokens += plan.matched_token_length
    counters.reused_tokens += plan.reuse_token_length


def acquire_into(
    coordinator: ContextCacheCoordinator,
    impl: Impl,
    admission: ContextCacheSequenceAdmission,
    lookup_policy: ContextCacheLookupPolicy,
    headroom: DecodingKvHeadroom,
    *,
    joined: bool,
    reserve_pages: int = 0,
) -> AcquireSequenceResult | None:
    """Lease one sequence and append it to the request; None on insufficient capacity, nothing changed."""
    acquired = acquire_sequence(
        coordinator,
        admission,
        lookup_policy=lookup_policy,
        headroom=headroom,
        speculative_request=impl.speculative_request,
        reserve_pages=reserve_pages,
    )
    if acquired.lease is None:
        return None
    try:
        sequence = build_sequence(
            coordinator,
            admission,
            acquired,
            lookup_policy=lookup_policy,
            commit_policy=impl.commit_policy,
            replay_tail_length=impl.replay_tail_length,
            joined=joined,
        )
        impl.append_sequence(sequence, coverage=sequence.lease.num_base_pages * coordinator.page_size)
    except BaseException:
        acquired.lease.release()
        raise
    coordinator.occupy(impl, sequence.resident)
    return acquired


def acquire_batch(
    coordinator: ContextCacheCoordinator,
    impl: Impl,
    batch: ContextCacheBatchAdmission,
    headroom: DecodingKvHeadroom,
) -> bool:
    """Lease every sequence in order; False when one of them found no room (the caller destroys `impl`).

    Metrics move only once all are in, so a refused batch leaves none behind.
    """
    forced_bypass = batch_is_forced_to_bypass(coordinator, batch)
    check_sequences(coordinator, batch.sequences, headroom)
    acquired_all = []
    for admission in batch.sequences:
        lookup = effective_lookup_policy(batch.lookup_policy, admission.lookup_policy, forced_bypass=forced_bypass)
        acquired = acquire_into(coordinator, impl, admission, lookup, headroom, joined=False)
        if acquired is None:
            return False
        acquired_all.append(acquired)
    for sequence, acquired in zip(impl.sequences, acquired_all, strict=True):
        count_admission(coordinator, sequence, acquired)
    return True
