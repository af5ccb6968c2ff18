"""The publication policy of drafters that keep no KV of their own: shared-KV assistants and prompt lookup.

Where the base model has state such a drafter has all it needs, so base blocks are all there is to publish.  Work of
the drafter may still be queued behind a prompt, so a prompt's end is frozen until a verification (or a wait) proves
it done.
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


class SharedKvSpecPolicy(PublicationPolicy):
    """Publishes base blocks up to the committed length, or up to the common one where the runtime reports it."""

    @property
    def name(self) -> str:
        return "shared-kv-spec"

    def on_prefill_finalized(
        self,
        request: RequestHandle,
        advances: Sequence[ContextCacheSequenceAdvance],
        common_state_lengths: Sequence[int] | None,
    ) -> None:
        self.apply(request, advances)
        self.set_common(request, common_state_lengths)
        for slot in range(request.num_sequences):
            self.freeze_prefill(request, slot)
        self.begin_draft_init(request)

    def on_prefill_chunk(self, request: RequestHandle, slot: int) -> None:
        self.publish_ready_endpoint(request, slot, PublicationPoint.PREFILL_CHUNK)

    def on_sequence_finalized(self, request: RequestHandle, slot: int) -> None:
        self.freeze_prefill(request, slot)

    def on_decode_completed(
        self,
        request: RequestHandle,
        advances: Sequence[ContextCacheSequenceAdvance],
        publishable_completed_slots: Sequence[int],
        common_state_lengths: Sequence[int] | None,
    ) -> Status:
        self.apply(request, advances)
        self.set_common(request, common_state_lengths)
        self.mark_resolved(request)  # the runtime waits for every verification
        self.end_draft_init(request)
        self.publish_frozen(request, advances)
        self.publish_generated(request, publishable_completed_slots)
        return Status.OK

    def on_terminalize(self, request: RequestHandle) -> Status:
        """Sequences that end before their first verification: wait once, then publish what was frozen."""
        impl = request.impl
        frozen = any(sequence.frozen_spec_prefill_length is not None for sequence in impl.sequences)
        if not (frozen or impl.awaiting_first_spec_completion()):
            return Status.OK
        status = self.synchronize(request)
        if status is Status.OK:
            self.publish_frozen(request)
            self.end_draft_init(request)
        return status


def serves(profile: ContextCacheDeploymentProfile, speculative_request: bool) -> bool:
    owns_no_state = profile.is_speculative and not profile.owns_paged_spec_state
    return speculative_request and owns_no_state and not profile.uses_checkpoint_reuse


@hookimpl
def edgellm_register_publication_policies(register: PolicyRegistrar) -> None:
    register("shared-kv-spec", SharedKvSpecPolicy, serves)
