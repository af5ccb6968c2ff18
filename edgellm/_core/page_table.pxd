"""C interface of the page table."""

cimport cython
from libc.stdint cimport int32_t, uint8_t, uint64_t
from libcpp.vector cimport vector

from edgellm._core.types cimport page_id_t, slot_t


@cython.final
cdef class KVPageTable:
    """See page_table.pyx.

    data: num_slots * pages_per_slot entries, row after row; entries at or past lengths[slot] are -1.
    """

    cdef readonly int32_t num_slots
    cdef readonly int32_t pages_per_slot
    cdef readonly int32_t num_pages
    cdef readonly bint sparse_window
    cdef page_id_t* data            # memory of _array
    cdef vector[int32_t] lengths
    cdef object _array
    cdef object _read_only
    cdef vector[uint8_t] _is_dirty
    cdef int32_t _num_dirty
    cdef vector[uint64_t] _seen_in  # per page, the number of the check that met it last
    cdef uint64_t _check_number

    cdef int write_row_tail(self, slot_t slot, Py_ssize_t start, const page_id_t* page_ids, Py_ssize_t count) except -1
    cdef int _check_row(
        self, slot_t slot, Py_ssize_t start, const page_id_t* page_ids, Py_ssize_t count
    ) except -1
    cdef void _apply(self, slot_t slot, Py_ssize_t start, const page_id_t* page_ids, Py_ssize_t count) noexcept nogil
    cdef slot_t _checked_slot(self, object slot) except -1
