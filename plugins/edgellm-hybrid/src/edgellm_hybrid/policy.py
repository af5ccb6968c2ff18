"""The publication policies of models with recurrent state: plain requests, prompt lookup and MTP on hybrids.

Recurrent state cannot be cut back, so reuse begins at *checkpoints* alone: copies of the state at chosen lengths.
Blocks of attention layers are published as they complete all the same; they are what checkpoints stand on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from edgellm.cache.policy import PublicationPolicy
from edgellm.cache.types import (
    ContextCacheCoordinatorStatus,
    ContextCacheDeploymentProfile,
    ContextCacheSequenceAdvance,
    PublicationPoint,
)
from edgellm.hookspecs import hookimpl
from edgellm_hybrid.placement import place_checkpoints

if TYPE_CHECKING:
    from edgellm.cache.coordinator import ContextCacheCoordinator
    from edgellm.cache.policy import CheckpointContext
    from edgellm.cache.request import RequestHandle
    from edgellm.plugins import PolicyRegistrar

EDGELLM_API = ((1, 1), (1, 3))

Status = ContextCacheCoordinatorStatus


class HybridSnapshotPolicy(PublicationPolicy):
    """Publishes the checkpoints that were captured behind prompt chunks, and captures one where an answer ends.

    Args:
        dense: a checkpoint at every multiple of `checkpoint_interval_tokens`, not only on the ladder.
    """

    def __init__(self, coordinator: ContextCacheCoordinator, *, dense: bool = False) -> None:
        super().__init__(coordinator)
        self.dense = dense

    @property
    def name(self) -> str:
        return "hybrid-snapshot"

    def plan_checkpoints(self, context: CheckpointContext) -> Sequence[int]:
        return place_checkpoints(context, dense=self.dense)

    def on_prefill_finalized(
        self,
        request: RequestHandle,
        advances: Sequence[ContextCacheSequenceAdvance],
        common_state_lengths: Sequence[int] | None,
    ) -> None:
        self.mark_resolved(request)  # the runtime's own wait made prompt and captures complete
        self.apply(request, advances)
        for slot in range(request.num_sequences):
            self.on_sequence_finalized(request, slot)

    def on_prefill_chunk(self, request: RequestHandle, slot: int) -> None:
        self.publish_staged(request, slot)
        self.publish_ready_endpoint(request, slot, PublicationPoint.PREFILL_CHUNK)

    def on_sequence_finalized(self, request: RequestHandle, slot: int) -> None:
        self.release_restored(request, slot)
        self.publish_staged(request, slot)
        self.publish_ready_endpoint(request, slot, PublicationPoint.PREFILL_END)

    def on_decode_completed(
        self,
        request: RequestHandle,
        advances: Sequence[ContextCacheSequenceAdvance],
        publishable_completed_slots: Sequence[int],
        common_state_lengths: Sequence[int] | None,
    ) -> Status:
        self.apply(request, advances)
        for slot in publishable_completed_slots:
            if self._wants_end(request, slot):
                committed = request.sequence(slot).committed_state_length
                self.reserve_hybrid_capture(request, slot, committed, PublicationPoint.DECODE_END)
        status = self.capture_staged(request)  # one wait for all that ended; none when nothing did
        if status is not Status.OK:
            return status
        for slot in publishable_completed_slots:
            self.publish_staged(request, slot)
        self.publish_generated(request, publishable_completed_slots)
        return Status.OK

    def _wants_end(self, request: RequestHandle, slot: int) -> bool:
        """An answer's end is kept in conversations (the caller named boundaries), behind a prompt whose end is the
        last thing that was kept, and two intervals past the last checkpoint."""
        sequence = request.sequence(slot)
        last = max(sequence.wanted_checkpoints, default=0)
        stable = int(sequence.lengths.prompt[slot]) - sequence.replay_tail_length
        if sequence.template_boundaries or last >= stable:
            return True
        interval = self.coordinator.config.checkpoint_interval_tokens
        return interval is not None and sequence.committed_state_length - last >= 2 * interval


class HybridMtpPolicy(HybridSnapshotPolicy):
    """Publishes checkpoints at the stable predecessor boundary and behind answers, with draft state and hidden row.

    The runtime calls for each of them (`publish_hybrid_mtp_endpoint`), because only it has the hidden rows.  Blocks
    become visible with the checkpoints that stand on them: only there is the draft known to reach as far.
    """

    @property
    def name(self) -> str:
        return "hybrid-mtp"

    def on_prefill_chunk(self, request: RequestHandle, slot: int) -> None:
        """Nothing: the boundary that ends the chunk follows."""

    def on_sequence_finalized(self, request: RequestHandle, slot: int) -> None:
        self.release_restored(request, slot)

    def on_decode_completed(
        self,
        request: RequestHandle,
        advances: Sequence[ContextCacheSequenceAdvance],
        publishable_completed_slots: Sequence[int],
        common_state_lengths: Sequence[int] | None,
    ) -> Status:
        """Publishes nothing generated: the draft trails the base by the last accepted span.

        Where an answer ends, the runtime lets the draft catch up and calls for a checkpoint there.
        """
        self.apply(request, advances)
        self.mark_resolved(request)
        return Status.OK

    def publish_mtp_boundary(
        self,
        request: RequestHandle,
        slot: int,
        resident_state_length: int,
        base_hidden_states: Any,
        boundary_hidden_row: int,
    ) -> Status:
        generated = resident_state_length > int(request.sequence(slot).lengths.prompt[slot])
        if generated and not self._wants_end(request, slot):
            return Status.OK
        return self.publish_boundary(request, slot, resident_state_length, base_hidden_states, boundary_hidden_row)

    def restore_mtp_boundary(
        self, request: RequestHandle, slot: int, base_hidden_states: Any, destination_row: int
    ) -> Status:
        return self.restore_boundary(request, slot, base_hidden_states, destination_row)


def serves_snapshots(profile: ContextCacheDeploymentProfile, speculative_request: bool) -> bool:
    """Plain requests, and on hybrids those whose decoder keeps no state of its own (prompt lookup)."""
    plain = not speculative_request or (profile.is_hybrid and not profile.owns_paged_spec_state)
    return profile.uses_checkpoint_reuse and plain


def serves_mtp(profile: ContextCacheDeploymentProfile, speculative_request: bool) -> bool:
    return speculative_request and profile.is_hybrid and profile.owns_paged_spec_state


@hookimpl
def edgellm_register_publication_policies(register: PolicyRegistrar) -> None:
    register("hybrid-snapshot", HybridSnapshotPolicy, serves_snapshots)
    register("hybrid-mtp", HybridMtpPolicy, serves_mtp)
