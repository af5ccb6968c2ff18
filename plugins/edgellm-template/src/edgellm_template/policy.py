"""A publication policy to copy: prompts become reusable, answers do not.

Completed prompt chunks and whole prompts are published; what the model generates is not.
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

EDGELLM_API = ((1, 1), (1, 3))  # lowest and highest hook API this plugin was written for
PRIORITY = -10  # below the built-in policy, so that installing this copy changes nothing; yours takes 10


class PromptOnlyPolicy(PublicationPolicy):
    """One object per request handle.  `slot` is a sequence's place in the request."""

    @property
    def name(self) -> str:
        return "template-prompt-only"

    def on_prefill_chunk(self, request: RequestHandle, slot: int) -> None:
        self.publish_ready_endpoint(request, slot, PublicationPoint.PREFILL_CHUNK)

    def on_sequence_finalized(self, request: RequestHandle, slot: int) -> None:
        self.publish_ready_endpoint(request, slot, PublicationPoint.PREFILL_END)

    def on_prefill_finalized(
        self,
        request: RequestHandle,
        advances: Sequence[ContextCacheSequenceAdvance],
        common_state_lengths: Sequence[int] | None,
    ) -> None:
        self.apply(request, advances)
        self.mark_resolved(request)
        for slot in range(request.num_sequences):
            self.publish_ready_endpoint(request, slot, PublicationPoint.PREFILL_END)

    def on_decode_completed(
        self,
        request: RequestHandle,
        advances: Sequence[ContextCacheSequenceAdvance],
        publishable_completed_slots: Sequence[int],
        common_state_lengths: Sequence[int] | None,
    ) -> ContextCacheCoordinatorStatus:
        self.apply(request, advances)  # the ledger moves whether or not anything is published
        self.mark_resolved(request)
        return ContextCacheCoordinatorStatus.OK


def serves(profile: ContextCacheDeploymentProfile, speculative_request: bool) -> bool:
    return profile.has_attention and not profile.uses_checkpoint_reuse and not speculative_request


@hookimpl
def edgellm_register_publication_policies(register: PolicyRegistrar) -> None:
    register("template-prompt-only", PromptOnlyPolicy, serves, PRIORITY)
