"""Page table: which page holds block i of the sequence in a slot.  Host rows and a dirty set; no device.

A row entry is one page id, which stands for K and V together: the KV layout keeps both inside a page, so there is no
second id to derive.  The device seam uploads the rows that `take_dirty` names.
"""

cimport cython
from libc.stdint cimport int32_t
from libc.string cimport memcmp, memcpy
from libcpp.vector cimport vector

from edgellm._core.types cimport page_id_t, slot_t

import numpy as np

from edgellm.errors import InvalidArgumentError, InvariantError

cdef page_id_t UNUSED = -1


cdef struct row_update_t:
    slot_t slot
    size_t first    # index of its first id among the collected ids
    size_t count


cdef int _raise_page(slot_t slot, Py_ssize_t block_idx, page_id_t page_id, int32_t num_pages) except -1:
    raise InvalidArgumentError(
        f"slot {slot}, block {block_idx}: page {page_id} is not in [0, {num_pages}); pass ids of this table's pool"
    )


cdef int _raise_gap(slot_t slot, Py_ssize_t block_idx, page_id_t page_id, bint sparse_window) except -1:
    where = "between live pages" if sparse_window else "before it (only a sparse-window table allows leading ones)"
    raise InvalidArgumentError(f"slot {slot}, block {block_idx}: page {page_id} has an unused entry {where}")


cdef int _raise_duplicate(slot_t slot, Py_ssize_t block_idx, page_id_t page_id) except -1:
    raise InvalidArgumentError(
        f"slot {slot}, block {block_idx}: page {page_id} is already in this row; a page holds one block of a sequence"
    )


cdef int _append_ids(vector[page_id_t]* out, object page_ids) except -1:
    """Append the ids of a contiguous int32 buffer (no Python object per id) or of any sequence of int."""
    cdef const page_id_t[::1] view
    if isinstance(page_ids, np.ndarray) and page_ids.dtype == np.int32 and page_ids.ndim == 1:
        view = np.ascontiguousarray(page_ids)
        if view.shape[0] > 0:
            out.insert(out.end(), &view[0], &view[0] + view.shape[0])
        return 0
    try:
        for page_id in page_ids:
            out.push_back(<page_id_t>page_id.__index__())
    except (AttributeError, OverflowError, TypeError):
        raise InvalidArgumentError(f"page ids are {page_ids!r}; pass a sequence of int32 page ids") from None
    return 0


@cython.final
cdef class KVPageTable:
    """Rows of page ids, one row a slot: `rows[slot, block_idx]` is a page id or -1 (unused).

    Args:
        num_slots: rows.
        pages_per_slot: entries a row.
        num_pages: size of the pool; live ids are in [0, num_pages).
        sparse_window: rows may begin with unused entries (pages behind a sliding window that were given back).

    Every row starts empty.  Holds ids only: who owns the pages is the ledger's business.  Single-writer, not
    thread-safe.  Every refusal leaves rows and dirty set as they were.
    """

    def __cinit__(self, num_slots, pages_per_slot, num_pages, *, sparse_window=False):
        for name, value in (("num_slots", num_slots), ("pages_per_slot", pages_per_slot), ("num_pages", num_pages)):
            if not isinstance(value, int) or not 0 < value < 1 << 31:
                raise InvalidArgumentError(f"{name} is {value!r}; it must be an integer from 1 to {(1 << 31) - 1}")
        cdef page_id_t[:, ::1] view
        self.num_slots = num_slots
        self.pages_per_slot = pages_per_slot
        self.num_pages = num_pages
        self.sparse_window = sparse_window
        self._array = np.full((num_slots, pages_per_slot), UNUSED, dtype=np.int32)
        self._read_only = self._array.view()
        self._read_only.flags.writeable = False
        view = self._array
        self.data = &view[0, 0]
        self.lengths.resize(num_slots, 0)
        self._is_dirty.resize(num_slots, 0)
        self._num_dirty = 0
        self._seen_in.resize(num_pages, 0)
        self._check_number = 0

    # C interface

    cdef int write_row_tail(self, slot_t slot, Py_ssize_t start, const page_id_t* page_ids, Py_ssize_t count) except -1:
        """Entries from `start` on become `page_ids`; what was behind them is cleared.

        Raises InvalidArgumentError, nothing changed: see `set_row_tail`.
        """
        self._check_row(slot, start, page_ids, count)
        self._apply(slot, start, page_ids, count)
        return 0

    cdef int _check_row(
        self, slot_t slot, Py_ssize_t start, const page_id_t* page_ids, Py_ssize_t count
    ) except -1:
        """Would row `slot` be legal with these entries from `start` on?  Raises where not."""
        cdef const page_id_t* row = self.data + <Py_ssize_t>slot * self.pages_per_slot
        cdef bint live_seen = False
        cdef bint gap = False
        cdef page_id_t page_id
        cdef Py_ssize_t i
        if start < 0 or start > self.lengths[slot]:
            raise InvalidArgumentError(
                f"slot {slot}: start {start} is not in [0, {self.lengths[slot]}], the length of the row"
            )
        if start + count > self.pages_per_slot:
            raise InvalidArgumentError(
                f"slot {slot}: {start + count} pages exceed the {self.pages_per_slot} of a row; "
                "shorten the sequence or build the table with a larger pages_per_slot"
            )
        self._check_number += 1
        for i in range(start + count):
            page_id = row[i] if i < start else page_ids[i - start]
            if page_id == UNUSED:
                gap = True
                continue
            if page_id < 0 or page_id >= self.num_pages:
                _raise_page(slot, i, page_id, self.num_pages)
            if gap and (live_seen or not self.sparse_window):
                _raise_gap(slot, i, page_id, self.sparse_window)
            if self._seen_in[page_id] == self._check_number:
                _raise_duplicate(slot, i, page_id)
            self._seen_in[page_id] = self._check_number
            live_seen = True
            gap = False
        return 0

    cdef void _apply(self, slot_t slot, Py_ssize_t start, const page_id_t* page_ids, Py_ssize_t count) noexcept nogil:
        """Write a checked tail; the row is dirty only where an entry changed."""
        cdef page_id_t* row = self.data + <Py_ssize_t>slot * self.pages_per_slot
        cdef Py_ssize_t length = start + count
        cdef bint changed = False
        cdef Py_ssize_t i
        if count > 0 and memcmp(row + start, page_ids, <size_t>count * sizeof(page_id_t)) != 0:
            memcpy(row + start, page_ids, <size_t>count * sizeof(page_id_t))
            changed = True
        for i in range(length, self.lengths[slot]):
            changed = changed or row[i] != UNUSED
            row[i] = UNUSED
        while length > 0 and row[length - 1] == UNUSED:
            length -= 1
        self.lengths[slot] = <int32_t>length
        if changed and not self._is_dirty[slot]:
            self._is_dirty[slot] = 1
            self._num_dirty += 1

    cdef slot_t _checked_slot(self, object slot) except -1:
        if not 0 <= slot < self.num_slots:
            raise InvalidArgumentError(f"slot {slot} is not in [0, {self.num_slots})")
        return slot

    # Python interface

    def set_rows(self, updates):
        """Replace whole rows: every update is checked first, then all are applied.

        Args:
            updates: iterable of (slot, page_ids); page_ids is a (n,) int32 array or a sequence of int, -1 for unused.
                An empty one clears the row.
        Raises:
            InvalidArgumentError: a slot out of range or named twice, more ids than a row holds, an id outside the pool,
                a page twice in a row, or an unused entry before a live one (sparse-window tables allow leading ones).
        Effects: rows and dirty set; nothing on raise.  Cost: O(ids).
        """
        cdef vector[page_id_t] ids
        cdef vector[row_update_t] rows
        cdef row_update_t update
        cdef size_t i
        slots = set()
        for slot, page_ids in updates:
            update.slot = self._checked_slot(slot)
            if update.slot in slots:
                raise InvalidArgumentError(f"slot {slot} appears twice in one call; merge its updates")
            slots.add(update.slot)
            update.first = ids.size()
            _append_ids(&ids, page_ids)
            update.count = ids.size() - update.first
            rows.push_back(update)
        for i in range(rows.size()):
            self._check_row(rows[i].slot, 0, ids.data() + rows[i].first, <Py_ssize_t>rows[i].count)
        for i in range(rows.size()):
            self._apply(rows[i].slot, 0, ids.data() + rows[i].first, <Py_ssize_t>rows[i].count)

    def set_row_tail(self, slot, start, page_ids):
        """Replace the entries of one row from `start` on (growth); what was behind the new ones is cleared.

        Args:
            start: 0 <= start <= row_length(slot).
            page_ids: (n,) int32 array or a sequence of int.
        Raises:
            InvalidArgumentError: as `set_rows`, or start past the row's length.  Nothing was changed.
        """
        cdef vector[page_id_t] ids
        cdef slot_t row = self._checked_slot(slot)
        _append_ids(&ids, page_ids)
        self.write_row_tail(row, start, ids.data(), <Py_ssize_t>ids.size())

    def clear_row(self, slot):
        """Make every entry of the row unused.  Raises InvalidArgumentError when slot is out of range."""
        self._apply(self._checked_slot(slot), 0, NULL, 0)

    def row(self, slot):
        """(pages_per_slot,) int32 read-only view of one row, no copy."""
        return self._read_only[self._checked_slot(slot)]

    def row_length(self, slot):
        """Entries up to the last live one."""
        return self.lengths[self._checked_slot(slot)]

    @property
    def rows(self):
        """(num_slots, pages_per_slot) int32 read-only view that follows later changes, no copy."""
        return self._read_only

    def gather_rows(self, slots):
        """(len(slots), pages_per_slot) int32 copy of the named rows, in that order (a subset batch)."""
        return self._array[[self._checked_slot(slot) for slot in slots]]

    @property
    def num_dirty(self):
        """Rows changed since the last `take_dirty`."""
        return self._num_dirty

    def take_dirty(self):
        """Slots whose rows changed since the last call, ascending; the caller uploads them.  Clears the dirty set."""
        cdef int32_t slot
        out = []
        if self._num_dirty == 0:
            return out
        for slot in range(self.num_slots):
            if self._is_dirty[slot]:
                out.append(slot)
                self._is_dirty[slot] = 0
        self._num_dirty = 0
        return out

    def mark_dirty(self, slots):
        """Put rows back into the dirty set: what `take_dirty` gave could not be sent.

        Raises:
            InvalidArgumentError: a slot is out of range.  Nothing was changed.
        """
        for slot in [self._checked_slot(slot) for slot in slots]:
            self._num_dirty += not self._is_dirty[slot]
            self._is_dirty[slot] = 1

    def check_invariants(self):
        """Recheck every row and the dirty count.  Raises InvariantError.  Cost: O(num_slots * pages_per_slot)."""
        cdef int32_t slot
        cdef Py_ssize_t length, i
        cdef const page_id_t* row
        for slot in range(self.num_slots):
            row = self.data + <Py_ssize_t>slot * self.pages_per_slot
            length = self.lengths[slot]
            try:
                self._check_row(slot, 0, row, length)
            except InvalidArgumentError as error:
                raise InvariantError(str(error)) from error
            if length > 0 and row[length - 1] == UNUSED:
                raise InvariantError(f"slot {slot}: length {length} ends in an unused entry")
            for i in range(length, self.pages_per_slot):
                if row[i] != UNUSED:
                    raise InvariantError(f"slot {slot}: page {row[i]} at {i}, past the row's length {length}")
        num_dirty = sum(self._is_dirty)
        if num_dirty != self._num_dirty:
            raise InvariantError(f"{num_dirty} dirty rows, {self._num_dirty} counted")
