"""Prefill: binding an admitted batch, chunks, captures, and the end of the prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from edgellm.cache import copies, policy_calls, snapshots
from edgellm.cache.advances import check_prefill_advance, require_count
from edgellm.cache.joining import check_single_common
from edgellm.cache.policy_step import PolicyStep
from edgellm.cache.spec_endpoints import check_common_lengths
from edgellm.cache.types import ContextCacheCoordinatorStatus, ContextCacheSequenceAdvance, PublicationPoint
from edgellm.errors import ContractViolation, InvalidArgumentError

if TYPE_CHECKING:
    from edgellm.cache.coordinator import ContextCacheCoordinator
    from edgellm.cache.request import Impl, RequestHandle

Status = ContextCacheCoordinatorStatus


def prepare_prefill(coordinator: ContextCacheCoordinator, impl: Impl) -> None:
    """Bind every row, then enqueue copies and restores.  The request is pending before anything is enqueued."""
    impl.begin_prefill()
    coordinator.rows.bind(impl.sequences)
    coordinator.rows.upload()
    copies.copy_tails(coordinator, impl.sequences)
    if coordinator.profile.uses_checkpoint_reuse:
        for slot in range(len(impl.sequences)):
            snapshots.prepare_state(coordinator, impl, slot)


def enqueue_captures(
    coordinator: ContextCacheCoordinator,
    impl: Impl,
    slots: Sequence[int] | None,
    state_lengths: Sequence[int] | None,
) -> None:
    """Reserve and enqueue the checkpoints of prompt ends (no arguments) or of chunk ends."""
    paired = coordinator.runs_paired_draft(impl.speculative_request)  # MTP: the runtime publishes them one by one
    if not coordinator.profile.uses_checkpoint_reuse or paired:
        return
    for slot, length in _captures(impl, slots, state_lengths):
        point = PublicationPoint.PREFILL_END
        if length < int(impl.lengths.prompt[slot]):
            point = PublicationPoint.PREFILL_CHUNK
        if snapshots.reserve_capture(coordinator, impl, slot, length, point):
            try:
                snapshots.enqueue_capture(coordinator, impl, slot)
            except BaseException:  # nothing stays reserved that was not copied
                snapshots.drop_staged(coordinator, impl.sequences[slot])
                raise


def _captures(impl: Impl, slots: Sequence[int] | None, state_lengths: Sequence[int] | None) -> list[tuple[int, int]]:
    """Checked (slot, length) pairs."""
    if slots is None or state_lengths is None:
        if slots is not state_lengths:
            raise InvalidArgumentError("pass slots and lengths together, or neither")
        unfinished = np.flatnonzero(~impl.lengths.finalized[: impl.lengths.size]).tolist()
        return [(slot, int(impl.lengths.prompt[slot])) for slot in unfinished]
    if len(slots) != len(state_lengths) or len(set(slots)) != len(slots):
        raise InvalidArgumentError(f"slots {list(slots)} and lengths {list(state_lengths)}: pass one length for each")
    for slot, length in zip(slots, state_lengths, strict=True):
        if not 0 <= slot < len(impl.sequences):
            raise ContractViolation(f"slot {slot} is out of range; the request has {len(impl.sequences)} sequences")
        if impl.lengths.finalized[slot]:
            raise ContractViolation(f"the prompt of slot {slot} is complete; its state is captured when it ends")
        low, high = int(impl.lengths.committed[slot]), int(impl.lengths.prompt[slot])
        if not low < length <= high:
            raise InvalidArgumentError(f"slot {slot}: chunk end {length} must be above {low}, at most {high}")
    return list(zip(slots, state_lengths, strict=True))


def advance_prefill(
    coordinator: ContextCacheCoordinator,
    request: RequestHandle,
    slot: int,
    committed: int,
    common_state_length: int | None,
) -> Status:
    """A prompt chunk ran: move the committed length without a token, and let the policy publish."""
    impl, sequence = request.impl, request.sequence(slot)
    if sequence.finalized:
        raise ContractViolation(f"the prompt of slot {slot} is complete; advance_prefill serves incomplete prompts")
    low, high = sequence.committed_state_length, sequence.num_tokens
    if not low <= committed <= high:
        raise InvalidArgumentError(f"slot {slot}: committed {committed} must be from {low} to {high}, its prompt")
    check_single_common(impl, slot, common_state_length, committed)
    impl.lengths.committed[slot] = committed
    if common_state_length is not None:
        impl.lengths.common[slot] = common_state_length
    elif not impl.tracks_common or not coordinator.profile.owns_paged_spec_state:
        impl.lengths.common[slot] = committed
    impl.lengths.proven[slot] = impl.lengths.common[slot]
    return policy_calls.call_slot_hook(
        coordinator, request, slot, lambda policy: policy.on_prefill_chunk(request, slot)
    )


def finalize_prefill(
    coordinator: ContextCacheCoordinator,
    request: RequestHandle,
    advances: Sequence[ContextCacheSequenceAdvance],
    common_state_lengths: Sequence[int] | None,
) -> Status:
    """The prompts of a batch are complete."""
    impl = request.impl
    if impl.is_container:
        raise ContractViolation("a container's prompts end one by one; use finalize_sequence_admission")
    require_count(impl, advances)
    for slot, advance in enumerate(advances):
        if impl.lengths.finalized[slot]:
            raise ContractViolation(f"the prompt of slot {slot} was finalized before; a prompt ends once")
        check_prefill_advance(impl, slot, advance)
    check_common(coordinator, impl, common_state_lengths, PolicyStep(impl, advances))
    impl.lengths.finalized[: impl.lengths.size] = True
    return policy_calls.call_prefill_finalized(
        coordinator,
        request,
        advances,
        lambda policy: policy.on_prefill_finalized(request, advances, common_state_lengths),
        common_state_lengths,
    )


def check_common(
    coordinator: ContextCacheCoordinator, impl: Impl, common: Sequence[int] | None, step: PolicyStep
) -> None:
    """Common lengths are given exactly where a paired draft lives (a draft that borrows base state may give them).

    A step in which everybody holds needs none.

    Raises:
        InvalidArgumentError: missing, superfluous, or out of range.  Nothing was changed.
    """
    if common is None:
        moved = bool((step.committed != impl.lengths.committed[: impl.lengths.size]).any())
        if moved and coordinator.tracks_common(impl.speculative_request, required=True):
            raise InvalidArgumentError("common_state_lengths is None; a request with a paired draft gives one for each")
        return
    if not coordinator.tracks_common(impl.speculative_request):
        raise InvalidArgumentError("common_state_lengths is given for a request without draft state; pass None")
    check_common_lengths(impl, common, step.committed.tolist())
