"""Binding leases to rows of the page table, and sending changed rows to the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from edgellm.errors import InvariantError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from edgellm._core.page_table import KVPageTable
    from edgellm.cache.request import SequenceState


class PageTableMirror(Protocol):
    """A device copy of the page table (absent where the executor reads the host rows)."""

    def upload_rows(self, rows: npt.NDArray[np.int32], slots: list[int]) -> None:
        """Copy the named rows of `rows`, (num_slots, pages_per_slot), to the device in stream order."""
        ...


class RowBinder:
    """The only writer of the base page table.  Rows are keyed by resident slot, never by batch position."""

    def __init__(self, table: KVPageTable, mirror: PageTableMirror | None = None) -> None:
        self.table = table
        self._mirror = mirror

    def bind(self, sequences: Iterable[SequenceState]) -> None:
        """Write the leases' pages into their rows: all of them or, on an error, none."""
        self.table.set_rows([(sequence.resident.slot, sequence.lease.base_pages) for sequence in sequences])

    def rebind(self, sequence: SequenceState) -> None:
        """Write and upload a row whose lease has given some of its pages back for canonical ones.

        Raises:
            InvariantError: the row could not be written or sent.  It may still name pages that are not the
                sequence's any more: nothing may run on it.
        """
        try:
            self.bind([sequence])
            self.upload()
        except Exception as error:
            raise InvariantError(
                f"the row of slot {sequence.resident.slot} could not be rewritten after its pages moved: {error}"
            ) from error

    def extend(self, sequence: SequenceState, start: int, page_ids: npt.NDArray[np.int32]) -> None:
        """Write newly leased pages behind the `start` pages already in the row."""
        self.table.set_row_tail(sequence.resident.slot, start, page_ids)

    def clear(self, sequences: Iterable[SequenceState]) -> None:
        """Empty the sequences' rows."""
        for sequence in sequences:
            self.table.clear_row(sequence.resident.slot)

    def upload(self) -> None:
        """Send the rows that changed since the last upload.  Nothing changed: nothing is sent."""
        slots = self.table.take_dirty()
        if not slots or self._mirror is None:
            return
        try:
            self._mirror.upload_rows(self.table.rows, slots)
        except BaseException:
            self.table.mark_dirty(slots)
            raise
