"""Decode steps: growing what the next step writes, and completing a step that ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from edgellm.cache import admission as admitting
from edgellm.cache import policy_calls, snapshots
from edgellm.cache.advances import check_completed_slots, check_decode_advances
from edgellm.cache.growth import grow_for_step
from edgellm.cache.policy_step import PolicyStep
from edgellm.cache.prefill import check_common
from edgellm.cache.types import (
    ContextCacheCoordinatorStatus,
    ContextCacheLookupPolicy,
    ContextCacheSequenceAdvance,
    DecodingKvHeadroom,
)

if TYPE_CHECKING:
    from edgellm.cache.coordinator import ContextCacheCoordinator
    from edgellm.cache.request import Impl, RequestHandle

Status = ContextCacheCoordinatorStatus


def prepare_step(
    coordinator: ContextCacheCoordinator,
    impl: Impl,
    headroom: DecodingKvHeadroom,
    slots: Sequence[int] | None,
    ahead: Sequence[int],
) -> Status:
    """Lease and upload what the participants write beyond their pages; see the coordinator's docstring."""
    admitting.check_headroom(headroom, paired=coordinator.runs_paired_draft(impl.speculative_request))
    impl.refused_slot = grow_for_step(coordinator, impl, headroom, slots)
    if impl.refused_slot is not None:
        coordinator.counters.growth_refusals += 1
        return Status.REQUEST_FAILED
    if ahead:
        grow_for_step(coordinator, impl, replace(headroom, base_extra_tokens=headroom.base_extra_tokens + 1), ahead)
    impl.mark_device_work_enqueued()
    coordinator.rows.upload()
    return Status.OK


def complete_step(
    coordinator: ContextCacheCoordinator,
    request: RequestHandle,
    advances: Sequence[ContextCacheSequenceAdvance],
    completed_slots: Sequence[int],
    common_state_lengths: Sequence[int] | None,
) -> Status:
    """Apply and publish through the policy, then note what ended."""
    impl = request.impl
    check_decode_advances(impl, advances)
    check_completed_slots(impl, completed_slots)
    tracked = impl.speculative_request and coordinator.tracks_common(True, required=True)
    if common_state_lengths is not None or tracked:
        check_common(coordinator, impl, common_state_lengths, PolicyStep(impl, advances))
    for slot in completed_slots:
        impl.lengths.ended[slot] = True
    status = policy_calls.call_decode_completed(
        coordinator,
        request,
        advances,
        lambda policy: policy.on_decode_completed(request, advances, completed_slots, common_state_lengths),
        common_state_lengths,
    )
    for slot in completed_slots:
        _note_withheld(coordinator, impl, slot)
    _drop_unreached(coordinator, impl)
    return status


def _drop_unreached(coordinator: ContextCacheCoordinator, impl: Impl) -> None:
    """Checkpoints that were captured behind chunks which came to nothing: no later step may publish them."""
    if not coordinator.profile.uses_checkpoint_reuse:
        return
    for slot, sequence in enumerate(impl.sequences):
        staged = sequence.staged_hybrid_publication
        if staged is not None and staged.checkpoint.exact_length > int(impl.lengths.committed[slot]):
            snapshots.drop_staged(coordinator, sequence)


def _note_withheld(coordinator: ContextCacheCoordinator, impl: Impl, slot: int) -> None:
    """A sequence that ended with computed blocks unpublished: the first of them is where a lookup will stop.

    Its commit policy, its publication policy or a fault of the latter kept them back; a bypass leaves no trace.
    """
    lengths = impl.lengths
    if impl.sequences[slot].lookup_policy is ContextCacheLookupPolicy.BYPASS:
        return
    first = impl.leases[slot].published_block_count
    if first < int(lengths.committed[slot]) // coordinator.page_size:
        coordinator._manager.note_withheld(impl.chains[slot], first)
