"""Binding leases to rows of the page tables, and sending changed rows to the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from edgellm.cache.types import ReusePlanMode
from edgellm.errors import InvariantError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from edgellm._core.cache_manager import CacheRequestLease
    from edgellm._core.page_table import KVPageTable
    from edgellm.cache.request import SequenceState

_PAIRED = (ReusePlanMode.SPEC, ReusePlanMode.HYBRID_MTP)


class PageTableMirror(Protocol):
    """A device copy of a page table (absent where the executor reads the host rows)."""

    def upload_rows(self, rows: npt.NDArray[np.int32], slots: list[int]) -> None:
        """Copy the named rows of `rows`, (num_slots, pages_per_slot), to the device in stream order."""
        ...


def base_pages(lease: CacheRequestLease) -> npt.NDArray[np.int32]:
    return lease.base_pages


def draft_pages(lease: CacheRequestLease) -> npt.NDArray[np.int32]:
    return lease.draft_pages


class RowBinder:
    """The only writer of one page table.  Rows are keyed by resident slot, never by batch position."""

    def __init__(
        self,
        table: KVPageTable,
        mirror: PageTableMirror | None = None,
        pages_of: Callable[[CacheRequestLease], npt.NDArray[np.int32]] = base_pages,
    ) -> None:
        self.table = table
        self.pages_of = pages_of
        self._mirror = mirror

    def bind(self, sequences: Iterable[SequenceState]) -> None:
        """Write the leases' pages into their rows: all of them or, on an error, none."""
        self.table.set_rows([(sequence.resident.slot, self.pages_of(sequence.lease)) for sequence in sequences])

    def extend(self, sequence: SequenceState, start: int) -> int:
        """Write the pages behind the `start` already in the row; returns how many pages the lease has."""
        pages = self.pages_of(sequence.lease)
        self.table.set_row_tail(sequence.resident.slot, start, pages[start:])
        return len(pages)

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


class Rows:
    """Base and draft rows of one deployment together: none for pure recurrent models, a draft only where paired."""

    def __init__(self, base: RowBinder | None, draft: RowBinder | None) -> None:
        self.base = base
        self.draft = draft
        self._tables = [binder for binder in (base, draft) if binder is not None]

    @property
    def table(self) -> KVPageTable:
        """The base page table."""
        if self.base is None:
            raise InvariantError("a pure recurrent deployment has no page table")
        return self.base.table

    def bind(self, sequences: Sequence[SequenceState]) -> None:
        """Write every lease into its rows."""
        for binder in self._tables:
            binder.bind(sequences if binder is not self.draft else _paired(sequences))

    def clear(self, sequences: Sequence[SequenceState]) -> None:
        for binder in self._tables:
            binder.clear(sequences)

    def upload(self) -> None:
        for binder in self._tables:
            binder.upload()

    def rebind_moved(self, sequence: SequenceState, rebound_base: int, rebound_draft: int) -> bool:
        """Write a sequence's rows again when its lease gave pages back for canonical ones since those counts.

        Returns:
            Whether it had.
        Raises:
            InvariantError: a row could not be written or sent.  It may still name pages that are not the
                sequence's any more: nothing may run on it.
        """
        lease = sequence.lease
        if (lease.rebound_page_count, lease.rebound_draft_page_count) == (rebound_base, rebound_draft):
            return False
        try:
            self.bind([sequence])
            self.upload()
        except Exception as error:
            raise InvariantError(
                f"the row of slot {sequence.resident.slot} could not be rewritten after its pages moved: {error}"
            ) from error
        return True


def _paired(sequences: Sequence[SequenceState]) -> list[SequenceState]:
    return [sequence for sequence in sequences if sequence.lease.mode in _PAIRED]
