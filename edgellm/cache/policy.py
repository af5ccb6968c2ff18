"""`PublicationPolicy`: decides when committed state becomes findable by other sequences.

A policy says *when*; the helpers of the base class do it.  They check every length against the ledger, so a
policy can publish too little but never more than is committed (or, with draft state, common to base and draft).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgellm.cache import boundary, endpoints, snapshots, spec_endpoints
from edgellm.cache.policy_step import apply_step
from edgellm.cache.types import ContextCacheCoordinatorStatus, ContextCacheSequenceAdvance, PublicationPoint
from edgellm.errors import ContractViolation, PluginError

if TYPE_CHECKING:
    from edgellm.cache.coordinator import ContextCacheCoordinator
    from edgellm.cache.request import Impl, RequestHandle

Status = ContextCacheCoordinatorStatus


@dataclass(frozen=True, slots=True)
class CheckpointContext:
    """What a policy knows when it places the recurrent checkpoints of one prompt.  Lengths in tokens.

    Attributes:
        num_tokens: the whole prompt, n.
        reuse_token_length: where prefill begins; checkpoints up to there exist or are of no use.
        known_token_length: leading tokens that the cache has seen in this order: a branch point when longer than
            the reuse, and a place where the next prompt may leave as well.
        interval: wished distance of checkpoints, or None.
        template_boundaries: ends of system prompt, history, ... as the caller named them, ascending.
        replay_tail_length: tokens of the volatile generation prompt at the end of the input.
    """

    num_tokens: int
    reuse_token_length: int
    known_token_length: int
    page_size: int
    interval: int | None
    template_boundaries: tuple[int, ...]
    replay_tail_length: int


class PublicationPolicy(ABC):
    """One object per request handle, built by the factory a plugin registered and called directly.

    `slot` is the place of a sequence in the request's execution order.  When a hook is called its arguments were
    checked, and the runtime has waited for the work it is about.  A hook moves the length ledger with `apply` and
    publishes with the other helpers; it touches no lease, row or pool.  A hook that raises, returns nonsense, leaves
    a step incomplete or takes too long too often is charged to the sequences it was called for: they go on
    unpublished, a new policy object serves the others.  Text is never affected.
    """

    def __init__(self, coordinator: ContextCacheCoordinator) -> None:
        self.coordinator = coordinator

    @property
    @abstractmethod
    def name(self) -> str:
        """Short name for logs and reports."""

    # --- hooks -------------------------------------------------------------------------------------------

    @abstractmethod
    def on_prefill_finalized(
        self,
        request: RequestHandle,
        advances: Sequence[ContextCacheSequenceAdvance],
        common_state_lengths: Sequence[int] | None,
    ) -> None:
        """The prompts of a batch are complete: `apply` the advances, then publish (or arm) every ready endpoint.

        Must end with the work resolved (`mark_resolved`) or, with draft state, armed (`begin_draft_init`).
        """

    @abstractmethod
    def on_decode_completed(
        self,
        request: RequestHandle,
        advances: Sequence[ContextCacheSequenceAdvance],
        publishable_completed_slots: Sequence[int],
        common_state_lengths: Sequence[int] | None,
    ) -> ContextCacheCoordinatorStatus:
        """`apply` the advances, publish completed blocks and the endpoints of ended sequences.

        Called for a step of prompt chunks alone too; then every advance holds.  Must end resolved.
        """

    def on_prefill_chunk(self, request: RequestHandle, slot: int) -> None:  # noqa: B027 (a default, not a duty)
        """A prompt chunk of `slot` is committed (the ledger has moved); publish what it completed.

        Default: nothing is visible before the prompt ends.
        """

    def on_sequence_finalized(self, request: RequestHandle, slot: int) -> None:  # noqa: B027 (a default, not a duty)
        """The prompt of a joined sequence is complete (the ledger has moved); publish (or freeze) its endpoint.

        Default: nothing.
        """

    def on_terminalize(self, request: RequestHandle) -> ContextCacheCoordinatorStatus:
        """Before compaction and finish: publish what only waited for the stream.  Default: nothing."""
        return Status.OK

    def plan_checkpoints(self, context: CheckpointContext) -> Sequence[int]:
        """Lengths in (0, n] at which this prompt should have a recurrent checkpoint.

        Prompt chunks end at those behind the reuse, and a checkpoint is taken there.  Those up to the reuse are not
        taken again, but say that a checkpoint which is there stays wanted: this prompt's deeper ones do not supersede
        it.  Called once per admitted sequence of a checkpoint deployment.  Default: none.
        """
        return ()

    def publish_mtp_boundary(
        self,
        request: RequestHandle,
        slot: int,
        resident_state_length: int,
        base_hidden_states: Any,
        boundary_hidden_row: int,
    ) -> ContextCacheCoordinatorStatus:
        """Hybrid with MTP only: publish the checkpoint at the stable predecessor boundary."""
        raise PluginError(f"policy {self.name!r} has no MTP boundary; hybrid MTP needs edgellm-hybrid")

    def restore_mtp_boundary(
        self, request: RequestHandle, slot: int, base_hidden_states: Any, destination_row: int
    ) -> ContextCacheCoordinatorStatus:
        """Hybrid with MTP only: restore the saved boundary hidden row."""
        raise PluginError(f"policy {self.name!r} has no MTP boundary; hybrid MTP needs edgellm-hybrid")

    def _own(self, request: RequestHandle) -> Impl:
        """The request a helper is used for: while a hook runs, only the one it was called for."""
        impl, hook_request = request.impl, self.coordinator.hook_request
        if hook_request is not None and impl is not hook_request:
            raise ContractViolation("a policy hook serves the request it was called for, and no other")
        return impl

    # --- helpers for authors: the ledger -----------------------------------------------------------------

    def apply(self, request: RequestHandle, advances: Sequence[ContextCacheSequenceAdvance]) -> None:
        """Move the ledger by the step's advances: append accepted tokens, set committed lengths.  Once per step.

        Raises:
            ContractViolation: these are not the advances that the hook was given, or they were applied before.
        """
        apply_step(self._own(request), advances)

    def mark_resolved(self, request: RequestHandle) -> None:
        """The step's work is complete: the runtime has waited for it (or a verification round did).

        For hooks that are given advances, and `on_terminalize`: a hook about one sequence ends no step.
        """
        self._own(request).mark_device_work_resolved_without_sync()

    def synchronize(self, request: RequestHandle) -> ContextCacheCoordinatorStatus:
        """Wait for the request's stream.  OK, or POISONED when the wait failed; return that from the hook."""
        return endpoints.synchronize(self.coordinator, self._own(request))

    # --- helpers for authors: blocks and endpoints -------------------------------------------------------

    def publish_ready_endpoint(self, request: RequestHandle, slot: int, point: PublicationPoint) -> None:
        """Publish the committed full blocks of one sequence; see `endpoints.publish_ready_endpoint`."""
        endpoints.publish_ready_endpoint(self.coordinator, self._own(request), slot, point)

    def publish_generated(self, request: RequestHandle, completed: Sequence[int]) -> None:
        """After a decode step: endpoints of the ended sequences, and every block that became full.

        Right for every flavour; with draft state it stops at the common length.
        """
        endpoints.publish_generated(self.coordinator, self._own(request), completed)

    # --- helpers for authors: draft state ----------------------------------------------------------------

    def publish_spec_endpoint(self, request: RequestHandle, slot: int, common: int, point: PublicationPoint) -> None:
        """Publish base and draft blocks up to `common`; see `spec_endpoints.publish_spec_endpoint`."""
        spec_endpoints.publish_spec_endpoint(self.coordinator, self._own(request), slot, common, point)

    def set_common(self, request: RequestHandle, common_state_lengths: Sequence[int] | None) -> None:
        """Set the common lengths after `apply`; None takes the committed ones (a draft that borrows base state)."""
        spec_endpoints.set_common_lengths(self._own(request), common_state_lengths)

    def freeze_prefill(self, request: RequestHandle, slot: int) -> None:
        """Remember the common length of `slot` now, to be published when a verification proves it complete."""
        spec_endpoints.freeze_prefill(self._own(request), slot)

    def begin_draft_init(self, request: RequestHandle) -> None:
        """A batch's ordered draft initialisation awaits its first verification round; the work stays pending."""
        self._own(request).begin_spec_draft_init()

    def end_draft_init(self, request: RequestHandle) -> None:
        """The first verification round (or a wait) proved the draft initialisation complete."""
        self._own(request).end_spec_draft_init()

    def publish_frozen(
        self, request: RequestHandle, advances: Sequence[ContextCacheSequenceAdvance] | None = None
    ) -> None:
        """Publish frozen prefills at `min(frozen, common)` and forget them.

        Args:
            advances: of a completed step; in a container only those who took part in it are proven complete.  None
                means the stream was waited for: everybody.
        """
        spec_endpoints.publish_frozen(self.coordinator, self._own(request), advances)

    # --- helpers for authors: recurrent checkpoints -------------------------------------------------------

    def release_restored(self, request: RequestHandle, slot: int) -> None:
        """Unpin the checkpoint `slot` was restored from; its copies are ordered before anything that follows."""
        snapshots.release_restored(self.coordinator, self._own(request), slot)

    def reserve_hybrid_capture(self, request: RequestHandle, slot: int, length: int, point: PublicationPoint) -> bool:
        """Reserve snapshot slots for a checkpoint at `length`, the committed one; see
        `snapshots.reserve_hybrid_capture`."""
        return snapshots.reserve_hybrid_capture(self.coordinator, self._own(request), slot, length, point)

    def capture_staged(self, request: RequestHandle) -> ContextCacheCoordinatorStatus:
        """Copy every reserved checkpoint and wait once for all of them; nothing reserved costs nothing.

        Returns:
            OK (a step's work is resolved), or POISONED when the wait failed: return that from the hook.
        """
        return snapshots.capture_staged(self.coordinator, self._own(request))

    def publish_staged(self, request: RequestHandle, slot: int) -> None:
        """Publish the captured checkpoint of `slot`, when there is one."""
        snapshots.publish_staged(self.coordinator, self._own(request), slot)

    # --- helpers for authors: hybrid with MTP -------------------------------------------------------------

    def publish_boundary(
        self, request: RequestHandle, slot: int, length: int, base_hidden_states: Any, boundary_hidden_row: int
    ) -> ContextCacheCoordinatorStatus:
        """Capture, wait and publish the MTP checkpoint at `length`; see `boundary.publish_boundary`."""
        return boundary.publish_boundary(
            self.coordinator, self._own(request), slot, length, base_hidden_states, boundary_hidden_row
        )

    def restore_boundary(
        self, request: RequestHandle, slot: int, base_hidden_states: Any, destination_row: int
    ) -> ContextCacheCoordinatorStatus:
        """Copy the saved hidden row to `[slot, destination_row, :]`, in stream order, without waiting."""
        return boundary.restore_boundary(
            self.coordinator, self._own(request), slot, base_hidden_states, destination_row
        )


class LedgerOnlyPolicy(PublicationPolicy):
    """Moves the ledger and publishes nothing: the last resort when a policy cannot be built again."""

    @property
    def name(self) -> str:
        return "ledger-only"

    def on_prefill_finalized(
        self,
        request: RequestHandle,
        advances: Sequence[ContextCacheSequenceAdvance],
        common_state_lengths: Sequence[int] | None,
    ) -> None:
        self.mark_resolved(request)
        self.apply(request, advances)

    def on_decode_completed(
        self,
        request: RequestHandle,
        advances: Sequence[ContextCacheSequenceAdvance],
        publishable_completed_slots: Sequence[int],
        common_state_lengths: Sequence[int] | None,
    ) -> ContextCacheCoordinatorStatus:
        self.apply(request, advances)
        self.mark_resolved(request)
        self.end_draft_init(request)
        return Status.OK
