"""`PublicationPolicy`: decides when committed state becomes findable by other sequences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from edgellm.cache.advances import apply_advances
from edgellm.cache.types import ContextCacheCoordinatorStatus, ContextCacheSequenceAdvance
from edgellm.errors import PluginError

if TYPE_CHECKING:
    from edgellm.cache.coordinator import ContextCacheCoordinator
    from edgellm.cache.request import RequestHandle


class PublicationPolicy(ABC):
    """One object per request handle, built by the factory a plugin registered and called directly.

    When a hook is called, its arguments were checked by the coordinator.  A hook moves the length ledger
    through `edgellm.cache.advances.apply_advances` and publishes through `edgellm.cache.endpoints`; it
    touches no lease, row or pool.  A hook that raises is switched off for its request, which then goes on
    unpublished until it is empty (a batch request ends): its text and every other request are unaffected.
    """

    def __init__(self, coordinator: ContextCacheCoordinator) -> None:
        self.coordinator = coordinator

    @property
    @abstractmethod
    def name(self) -> str:
        """Short name for logs and reports."""

    @abstractmethod
    def on_prefill_finalized(
        self,
        request: RequestHandle,
        advances: Sequence[ContextCacheSequenceAdvance],
        common_state_lengths: Sequence[int] | None,
    ) -> None:
        """Apply the post-prefill advances and publish (or arm) every ready endpoint."""

    @abstractmethod
    def on_decode_completed(
        self,
        request: RequestHandle,
        advances: Sequence[ContextCacheSequenceAdvance],
        publishable_completed_slots: Sequence[int],
        common_state_lengths: Sequence[int] | None,
    ) -> ContextCacheCoordinatorStatus:
        """Apply the post-decode advances, publish completed blocks and the endpoints of ended sequences."""

    def on_prefill_chunk(self, request: RequestHandle, slot: int) -> None:  # noqa: B027 (a default, not a duty)
        """A prompt chunk of `slot` is committed (the ledger has moved); publish what it completed.

        Default: nothing is visible before the prompt ends.
        """

    def on_sequence_finalized(self, request: RequestHandle, slot: int) -> None:  # noqa: B027 (a default, not a duty)
        """The prompt of a joined sequence is complete (the ledger has moved); publish its endpoint.

        Default: nothing.
        """

    def on_terminalize(self, request: RequestHandle) -> ContextCacheCoordinatorStatus:
        """Before compaction and finish: publish what only waited for the stream.  Default: nothing."""
        return ContextCacheCoordinatorStatus.OK

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


class LedgerOnlyPolicy(PublicationPolicy):
    """Moves the ledger and publishes nothing: what a request falls back to when its policy raised."""

    @property
    def name(self) -> str:
        return "ledger-only"

    def on_prefill_finalized(
        self,
        request: RequestHandle,
        advances: Sequence[ContextCacheSequenceAdvance],
        common_state_lengths: Sequence[int] | None,
    ) -> None:
        request.impl.mark_device_work_resolved_without_sync()
        apply_advances(request.impl, advances)

    def on_decode_completed(
        self,
        request: RequestHandle,
        advances: Sequence[ContextCacheSequenceAdvance],
        publishable_completed_slots: Sequence[int],
        common_state_lengths: Sequence[int] | None,
    ) -> ContextCacheCoordinatorStatus:
        apply_advances(request.impl, advances)
        request.impl.mark_device_work_resolved_without_sync()
        return ContextCacheCoordinatorStatus.OK
