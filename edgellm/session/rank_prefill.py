"""Prompts on deployments with checkpoints: where their chunks end, what is kept there, and who hears of it.

Recurrent state cannot be cut back, so a checkpoint is taken where the state *stands*.  A planned chunk that crosses a
length worth keeping is run in pieces inside its step: planners need not know of checkpoints, and what ran is what was
planned.  Decode rows run with the last pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgellm.errors import BrokenInvariantError
from edgellm.session.cache_status import require_ok
from edgellm.session.types import ScheduledSequenceDescriptor, SequenceWork

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgellm.cache.coordinator import ContextCacheCoordinator
    from edgellm.cache.request import RequestHandle
    from edgellm.decoding.base import DecodingStrategy
    from edgellm.session.resident import Resident

Piece = tuple["Resident", int]  # a prompt, and the length at which its piece ends


class CheckpointedPrefill:
    """Boundaries of the residents' prompts, by slot.

    Args:
        mtp: checkpoints carry draft state and a hidden row, and the runtime publishes them one by one.
    """

    def __init__(
        self, coordinator: ContextCacheCoordinator, request: RequestHandle, decoder: DecodingStrategy, *, mtp: bool
    ) -> None:
        self._coordinator = coordinator
        self._request = request
        self._decoder = decoder
        self.mtp = mtp
        self._boundaries: dict[int, tuple[int, ...]] = {}

    def place(self, slot: int, index: int) -> None:
        """Ask where the prompt of execution row `index` wants checkpoints; again after it took state over."""
        self._boundaries[slot] = self._coordinator.checkpoint_boundaries(self._request, index)

    def forget(self, slot: int) -> None:
        self._boundaries.pop(slot, None)

    def pieces(
        self, rows: Sequence[Resident], descriptors: Sequence[ScheduledSequenceDescriptor]
    ) -> tuple[list[Piece], list[ScheduledSequenceDescriptor]]:
        """The next round of pieces: every chunk that still crosses a boundary, up to the first one.

        Returns:
            Pieces, and their descriptors in the same order; both empty when the chunks can run to their ends.
        """
        pieces, parts = [], []
        for resident, descriptor in zip(rows, descriptors, strict=True):
            if descriptor.work is SequenceWork.CONTEXT:
                length = self._first_inside(resident, descriptor.past_length + descriptor.query_length)
                if length:
                    pieces.append((resident, length))
                    parts.append(_part(descriptor, length))
        return pieces, parts

    def _first_inside(self, resident: Resident, end: int) -> int:
        start = resident.state_length
        return next((length for length in self._boundaries[resident.ref.slot] if start < length < end), 0)

    def is_boundary(self, resident: Resident, length: int) -> bool:
        return length in self._boundaries[resident.ref.slot]

    def capture(self, ends: Sequence[Piece]) -> None:
        """Enqueue the checkpoints of prompts whose state stands at `length` now, before they are reported."""
        if self.mtp or not ends:
            return
        slots, lengths = [resident.index for resident, _ in ends], [length for _, length in ends]
        require_ok(
            self._coordinator.enqueue_prefill_captures(self._request, slots, lengths), "enqueue_prefill_captures"
        )

    def report(self, pieces: Sequence[Piece]) -> None:
        """Pieces ran and were waited for: publish what they completed."""
        for resident, length in pieces:
            require_ok(self._coordinator.advance_prefill(self._request, resident.index, length), "advance_prefill")
            resident.state_length = length
            self.publish_boundary(resident, length)

    def publish_boundary(self, resident: Resident, length: int) -> None:
        """MTP: publish the checkpoint at `length`, where the state stands and the ledger knows it."""
        if self.mtp and self.is_boundary(resident, length):
            self._publish(resident, length)

    def publish_ends(self, ended: Sequence[Resident]) -> None:
        """MTP: answers ended, the ledger knows it, and their draft state is complete: publish a checkpoint of each."""
        if self.mtp:
            for resident in ended:
                self._publish(resident, resident.committed)

    def _publish(self, resident: Resident, length: int) -> None:
        hidden = self._decoder.boundary_hidden(resident.ref.slot)
        if hidden is None:
            raise BrokenInvariantError(
                f"decoder {self._decoder.name!r} has no hidden row at token {length} of {resident.ref}; an MTP "
                f"checkpoint needs it"
            )
        rows = self._spread(hidden.unsqueeze(0))
        require_ok(
            self._coordinator.publish_hybrid_mtp_endpoint(self._request, resident.index, length, rows, 0),
            "publish_hybrid_mtp_endpoint",
        )

    def restored_hidden(self, index: int) -> Any:
        """(hidden_width,) the hidden row that the checkpoint of execution row `index` saved; None without MTP."""
        if not self.mtp:
            return None
        row = self._decoder.new_hidden_row()
        require_ok(
            self._coordinator.restore_hybrid_mtp_boundary_hidden(self._request, index, self._spread(row), 0),
            "restore_hybrid_mtp_boundary_hidden",
        )
        return row[0]

    def _spread(self, row: Any) -> Any:
        """(1, hidden) seen as (sequences, 1, hidden), without a copy: only one sequence's row is touched."""
        return row.unsqueeze(0).expand(self._request.num_sequences, 1, row.shape[1])


def _part(descriptor: ScheduledSequenceDescriptor, length: int) -> ScheduledSequenceDescriptor:
    """The chunk as far as `length`; it ends no prompt."""
    return ScheduledSequenceDescriptor(
        descriptor.identity, SequenceWork.CONTEXT, length - descriptor.past_length, descriptor.past_length, False
    )
