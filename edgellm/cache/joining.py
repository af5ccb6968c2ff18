"""Sequences that join an executing request: admit, finalize, retract."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.cache import acquire, copies, policy_calls, snapshots
from edgellm.cache import admission as admitting
from edgellm.cache.advances import apply_advance, check_prefill_advance
from edgellm.cache.results import AdmitSequenceResult
from edgellm.cache.types import (
    ContextCacheCoordinatorStatus,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    DecodingKvHeadroom,
    ReusePlanMode,
)
from edgellm.errors import ContractViolation, InvalidArgumentError
from edgellm.log import get_logger

if TYPE_CHECKING:
    from edgellm.cache.coordinator import ContextCacheCoordinator
    from edgellm.cache.request import Impl, RequestHandle, SequenceState

logger = get_logger(__name__)

Status = ContextCacheCoordinatorStatus


def admit_sequence(
    coordinator: ContextCacheCoordinator,
    impl: Impl,
    admission: ContextCacheSequenceAdmission,
    headroom: DecodingKvHeadroom,
    reserve_pages: int,
    draft_reserve_pages: int = 0,
) -> AdmitSequenceResult:
    """Look up, lease, bind exactly the joiner's rows, and enqueue the copies that put it at its prefill start."""
    admitting.check_headroom(headroom, paired=coordinator.runs_paired_draft(impl.speculative_request))
    for name, pages in (("reserve_pages", reserve_pages), ("draft_reserve_pages", draft_reserve_pages)):
        if not admitting.is_integer(pages) or pages < 0:
            raise InvalidArgumentError(f"{name} is {pages!r}; pass an integer of 0 or more")
    if coordinator.poisoned:
        return AdmitSequenceResult(Status.POISONED)
    limit = coordinator.deployment.max_batch_size
    if len(impl.sequences) >= limit:
        raise ContractViolation(
            f"the request has {len(impl.sequences)} sequences, the limit is {limit}; retire one first"
        )
    admitting.check_sequence(coordinator, admission, headroom)
    forced = not coordinator.config.enabled
    forced = forced or admitting.media_forces_bypass(coordinator, admission, impl.speculative_request)
    lookup = admitting.effective_lookup_policy(impl.lookup_policy, admission.lookup_policy, forced_bypass=forced)
    acquired = acquire.acquire_into(
        coordinator,
        impl,
        admission,
        lookup,
        headroom,
        joined=True,
        reserve_pages=reserve_pages,
        draft_reserve_pages=draft_reserve_pages,
    )
    if acquired is None:
        may_fit = _may_ever_fit(coordinator, len(admission.token_ids), headroom)
        return AdmitSequenceResult(Status.REQUEST_FAILED, insufficient_capacity=may_fit)
    sequence = impl.sequences[-1]
    try:
        _bind(coordinator, impl, sequence)
    except BaseException:
        _undo_joiner(coordinator, impl, sequence)
        raise
    acquire.count_admission(coordinator, sequence, acquired)
    return AdmitSequenceResult(Status.OK, False, sequence.reuse_token_length, sequence.reuse_report)


def _may_ever_fit(coordinator: ContextCacheCoordinator, num_tokens: int, headroom: DecodingKvHeadroom) -> bool:
    """Whether the pools, all of them free, hold the sequence."""
    deployment = coordinator.deployment
    if not coordinator.profile.has_attention:
        return True
    fits = num_tokens + headroom.base_extra_tokens <= deployment.num_pages * deployment.page_size
    if headroom.draft_extra_tokens > 0:
        fits = fits and num_tokens + headroom.draft_extra_tokens <= deployment.num_draft_pages * deployment.page_size
    return fits


def _bind(coordinator: ContextCacheCoordinator, impl: Impl, sequence: SequenceState) -> None:
    impl.mark_copies_enqueued()
    coordinator.rows.bind([sequence])
    coordinator.rows.upload()
    copies.copy_tails(coordinator, [sequence])
    if coordinator.profile.uses_checkpoint_reuse:
        snapshots.prepare_state(coordinator, impl, sequence.index)


def _undo_joiner(coordinator: ContextCacheCoordinator, impl: Impl, sequence: SequenceState) -> None:
    """Take back a joiner that could not be bound; poison when its rows cannot be cleared either."""
    acquire.drop_tail(coordinator, impl)
    try:
        coordinator.rows.clear([sequence])
        coordinator.rows.upload()
    except Exception:
        logger.exception("the row of slot %d could not be cleared", sequence.resident.slot)
        coordinator._quarantine.poison("a page-table row could not be cleared")


def finalize_sequence_admission(
    coordinator: ContextCacheCoordinator,
    request: RequestHandle,
    slot: int,
    advance: ContextCacheSequenceAdvance,
    common_state_length: int | None,
) -> Status:
    """Record the look-ahead token of a complete prompt, and let the policy publish (or freeze) its endpoint."""
    impl, sequence = request.impl, request.sequence(slot)
    if coordinator.poisoned:
        return Status.POISONED
    if sequence.finalized:
        raise ContractViolation(f"slot {slot} was finalized before; a prompt ends once")
    check_prefill_advance(impl, slot, advance)
    check_single_common(impl, slot, common_state_length, advance.committed_state_length)
    apply_advance(impl, slot, advance)
    impl.lengths.finalized[slot] = True
    common = advance.committed_state_length if common_state_length is None else common_state_length
    impl.lengths.common[slot] = impl.lengths.proven[slot] = common
    impl.lengths.draft_unproven[slot] = impl.leases[slot].mode is ReusePlanMode.SPEC
    return policy_calls.call_slot_hook(
        coordinator, request, slot, lambda policy: policy.on_sequence_finalized(request, slot)
    )


def check_single_common(impl: Impl, slot: int, common: int | None, committed: int) -> None:
    """A common length given for one sequence: only with draft state of its own, monotone, at most `committed`."""
    if common is None:
        return
    if not impl.tracks_common:
        raise InvalidArgumentError("common_state_length is given for a request without draft state; pass None")
    low = int(impl.lengths.common[slot])
    if not low <= common <= committed:
        raise InvalidArgumentError(
            f"slot {slot}: common length {common} must be from {low} (it never goes back) to {committed} (committed)"
        )


def retract_sequence_admission(coordinator: ContextCacheCoordinator, request: RequestHandle) -> bool:
    """Undo the most recent admission.  Never raises; False means poisoned."""
    try:
        impl = request.impl
        if impl.compaction_outstanding():
            raise ContractViolation("a compaction is outstanding, and its mapping names the last sequence")
        tail = impl.sequences[-1]
        if not tail.joined or tail.finalized or tail.committed_state_length != tail.reuse_token_length:
            raise ContractViolation("the last sequence was seated or founded the request; it leaves by compaction")
        acquire.drop_tail(coordinator, impl)
        coordinator.rows.clear([tail])
        coordinator.rows.upload()
    except Exception:
        logger.exception("an admission could not be retracted")
        coordinator._quarantine.poison("an admission could not be retracted")
        return False
    return True
