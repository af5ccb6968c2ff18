"""Endpoint helpers for speculative requests: common lengths, frozen prefills, paired endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgellm.cache.advances import took_part
from edgellm.cache.endpoints import publish_blocks, require_slot
from edgellm.cache.types import HOLD_COMMITTED_STATE_LENGTH, ContextCacheSequenceAdvance, PublicationPoint
from edgellm.errors import ContractViolation, InvalidArgumentError

if TYPE_CHECKING:
    from edgellm.cache.coordinator import ContextCacheCoordinator
    from edgellm.cache.request import Impl


def publish_spec_endpoint(
    coordinator: ContextCacheCoordinator, impl: Impl, slot: int, common: int, point: PublicationPoint
) -> None:
    """Publish the blocks of one sequence that lie below `common`, base and (paired leases) draft.

    Skips as `publish_ready_endpoint` does.  Draft state that borrows base pages publishes base blocks only.

    Raises:
        ContractViolation: the slot is out of range.
        InvalidArgumentError: `common` is beyond what base and draft have in common, or behind what is published.
    """
    require_slot(impl, slot)
    low = int(impl.lengths.offered_blocks[slot]) * coordinator.page_size
    high = int(impl.lengths.common[slot])
    if coordinator.profile.uses_checkpoint_reuse and common < low:
        return  # a boundary checkpoint, published in the middle of its step, went further
    if not low <= common <= high:
        raise InvalidArgumentError(
            f"slot {slot}: common length {common} must be from {low} (published) to {high} (materialised)"
        )
    publish_blocks(coordinator, impl, slot, common, point)


def set_common_lengths(impl: Impl, common_state_lengths: Sequence[int] | None) -> None:
    """Set the common length of every sequence; -1 leaves one alone, None takes all committed lengths.

    Raises:
        ContractViolation: None, and the draft has state of its own, which trails the base.  Nothing was changed.
        InvalidArgumentError: an entry goes back or is beyond the committed length.  Nothing was changed.
    """
    lengths, size = impl.lengths, impl.lengths.size
    if common_state_lengths is None:
        if impl.tracks_common and impl.owner.profile.owns_paged_spec_state:
            raise ContractViolation("common_state_lengths is None, and the draft has pages of its own; pass the step's")
        lengths.common[:size] = lengths.committed[:size]
        return
    check_common_lengths(impl, common_state_lengths, lengths.committed[:size].tolist())
    for slot, common in enumerate(common_state_lengths):
        if common != HOLD_COMMITTED_STATE_LENGTH:
            lengths.common[slot] = common


def check_common_lengths(impl: Impl, common_state_lengths: Sequence[int], committed: Sequence[int]) -> None:
    """One entry per sequence, monotone and at most `committed` (as it will be after the step); -1 holds.

    Raises:
        InvalidArgumentError: the first wrong entry.
    """
    if len(common_state_lengths) != len(impl.sequences):
        raise InvalidArgumentError(
            f"{len(common_state_lengths)} common_state_lengths for {len(impl.sequences)} sequences; pass one for each"
        )
    for slot, (common, high) in enumerate(zip(common_state_lengths, committed, strict=True)):
        low = int(impl.lengths.common[slot])
        if common != HOLD_COMMITTED_STATE_LENGTH and not low <= common <= high:
            raise InvalidArgumentError(
                f"slot {slot}: common length {common} must be from {low} (it never goes back) to {high} (committed)"
            )


def freeze_prefill(impl: Impl, slot: int) -> None:
    """Remember the common length of `slot` for publication once it is proven complete.  Nothing for bypass."""
    require_slot(impl, slot)
    if impl.lengths.publishes[slot]:
        impl.sequences[slot].frozen_spec_prefill_length = int(impl.lengths.common[slot])


def publish_frozen(
    coordinator: ContextCacheCoordinator, impl: Impl, advances: Sequence[ContextCacheSequenceAdvance] | None
) -> None:
    """Publish frozen prefills and forget them; of a sequence that has ended already, its endpoint.

    Args:
        advances: of the completed step, or None after a wait.  Whoever was prefilled as a batch was initialised
            before the batch's first step, so any step proves them; a joiner is proven by a step it took part in.
    """
    for slot, sequence in enumerate(impl.sequences):
        frozen = sequence.frozen_spec_prefill_length
        if frozen is None:
            continue
        if advances is not None and sequence.joined and not took_part(advances, slot):
            continue
        sequence.frozen_spec_prefill_length = None
        ended = bool(impl.lengths.ended[slot])
        point = PublicationPoint.DECODE_END if ended and advances is None else PublicationPoint.PREFILL_END
        publish_blocks(coordinator, impl, slot, min(frozen, int(impl.lengths.common[slot])), point)
