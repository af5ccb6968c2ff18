"""The publication policy of drafters that own KV pages: EAGLE, DFlash, JetSpec, DSpark.

A prefix is reusable only where base and draft both have state, so everything goes by the *common* length.  When a
prompt is complete its draft pass is still queued behind it; only the first verification (or a wait) proves it
done.  Until then the length is frozen: remembered, not published.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgellm.cache.policy import PublicationPolicy
from edgellm.cache.types import (
    ContextCacheCoordinatorStatus,
    ContextCacheDeploymentProfile,
    ContextCacheSequenceAdvance,
    PublicationPoint,
)
from edgellm.hookspecs import hookimpl

if TYPE_CHECKING:
    from edgellm.cache.request import RequestHandle
    from edgellm.plugins import PolicyRegistrar

EDGELLM_API = ((1, 1), (1, 3))

Status = ContextCacheCoordinatorStatus


class EagleSpecPolicy(PublicationPolicy):
    """Publishes pairs of base and draft blocks, never beyond what both models have."""

    @property
    def name(self) -> str:
        return "eagle-spec"

    def on_prefill_finalized(
        self,
        request: RequestHandle,
        advances: Sequence[ContextCacheSequenceAdvance],
        common_state_lengths: Sequence[int] | None,
    ) -> None:
        self._advance(request, advances, common_state_lengths)
        for slot in range(request.num_sequences):
            self.freeze_prefill(request, slot)
        self.begin_draft_init(request)

    def on_prefill_chunk(self, request: RequestHandle, slot: int) -> None:
        common = request.sequence(slot).common_state_length
        self.publish_spec_endpoint(request, slot, common, PublicationPoint.PREFILL_CHUNK)

    def on_sequence_finalized(self, request: RequestHandle, slot: int) -> None:
        self.freeze_prefill(request, slot)

    def on_decode_completed(
        self,
        request: RequestHandle,
        advances: Sequence[ContextCacheSequenceAdvance],
        publishable_completed_slots: Sequence[int],
        common_state_lengths: Sequence[int] | None,
    ) -> Status:
        self._advance(request, advances, common_state_lengths)
        self.mark_resolved(request)  # the runtime waits for every verification
        self.end_draft_init(request)
        self.publish_frozen(request, advances)
        self.publish_generated(request, publishable_completed_slots)
        return Status.OK

    def on_terminalize(self, request: RequestHandle) -> Status:
        """Sequences that end before their first verification: wait once, then publish what was frozen."""
        if not _awaits_proof(request):
            return Status.OK
        status = self.synchronize(request)
        if status is Status.OK:
            self.publish_frozen(request)
            self.end_draft_init(request)
        return status

    def _advance(
        self,
        request: RequestHandle,
        advances: Sequence[ContextCacheSequenceAdvance],
        common_state_lengths: Sequence[int] | None,
    ) -> None:
        self.apply(request, advances)
        if common_state_lengths is not None:  # without them nothing new is known to be in the draft
            self.set_common(request, common_state_lengths)


def _awaits_proof(request: RequestHandle) -> bool:
    impl = request.impl
    return impl.awaiting_first_spec_completion() or any(
        sequence.frozen_spec_prefill_length is not None for sequence in impl.sequences
    )


def serves(profile: ContextCacheDeploymentProfile, speculative_request: bool) -> bool:
    return speculative_request and profile.owns_paged_spec_state and not profile.uses_checkpoint_reuse


@hookimpl
def edgellm_register_publication_policies(register: PolicyRegistrar) -> None:
    register("eagle-spec", EagleSpecPolicy, serves)
