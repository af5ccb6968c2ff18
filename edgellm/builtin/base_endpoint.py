"""The base publication policy: attention-only state without a draft.

Chunks publish the full blocks they complete, the prompt's end and the sequence's end become retained
endpoints, generated blocks publish as they complete (commit policy permitting).
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


class BaseEndpointPolicy(PublicationPolicy):
    """Publishes whatever is committed: base state alone is all there is."""

    @property
    def name(self) -> str:
        return "base-endpoint"

    def on_prefill_finalized(
        self,
        request: RequestHandle,
        advances: Sequence[ContextCacheSequenceAdvance],
        common_state_lengths: Sequence[int] | None,
    ) -> None:
        self.mark_resolved(request)  # the runtime's own prefill wait made it complete
        self.apply(request, advances)
        for slot in range(request.num_sequences):
            self.publish_ready_endpoint(request, slot, PublicationPoint.PREFILL_END)

    def on_prefill_chunk(self, request: RequestHandle, slot: int) -> None:
        self.publish_ready_endpoint(request, slot, PublicationPoint.PREFILL_CHUNK)

    def on_sequence_finalized(self, request: RequestHandle, slot: int) -> None:
        self.publish_ready_endpoint(request, slot, PublicationPoint.PREFILL_END)

    def on_decode_completed(
        self,
        request: RequestHandle,
        advances: Sequence[ContextCacheSequenceAdvance],
        publishable_completed_slots: Sequence[int],
        common_state_lengths: Sequence[int] | None,
    ) -> ContextCacheCoordinatorStatus:
        self.apply(request, advances)
        self.mark_resolved(request)
        self.publish_generated(request, publishable_completed_slots)
        return ContextCacheCoordinatorStatus.OK


def serves(profile: ContextCacheDeploymentProfile, speculative_request: bool) -> bool:
    return profile.has_attention and not profile.uses_checkpoint_reuse and not speculative_request


@hookimpl
def edgellm_register_publication_policies(register: PolicyRegistrar) -> None:
    register("base-endpoint", BaseEndpointPolicy, serves)
