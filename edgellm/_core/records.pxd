"""C interface of the record store: endpoints in arrays, their LRU order as index links."""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint64_t
from libcpp.unordered_map cimport unordered_map
from libcpp.vector cimport vector

from edgellm._core.types cimport block_hash_t, node_id_t


cdef enum:
    NO_RECORD = -1


cdef struct record_t:
    uint64_t id             # 0: this place is unused
    block_hash_t terminal   # hash of the last full block
    int64_t exact_length    # tokens of a recurrent checkpoint; 0 without one
    node_id_t node          # tree node of the last full block
    int32_t block_count
    int32_t recurrent_slot  # -1: none
    int32_t partial_slot    # -1: none
    int32_t lru_prev        # places; -1 at the ends
    int32_t lru_next
    int32_t node_next       # next record of the same node; also links unused places


@cython.final
cdef class RecordStore:
    """See records.pyx.  A *place* is an index into `_records`; it is reused, a record id never is."""

    cdef bint sealed            # owned by a manager: the Python mutators are off
    cdef vector[record_t] _records
    cdef vector[int32_t] _head_at_node
    cdef unordered_map[uint64_t, int32_t] _place_of
    cdef int32_t _unused
    cdef int32_t _lru_front
    cdef int32_t _lru_back
    cdef uint64_t _last_id
    cdef readonly Py_ssize_t size
    cdef readonly object max_records
    cdef Py_ssize_t limit       # max_records, or -1 without a limit

    cdef inline int32_t head_at(self, node_id_t node) noexcept nogil:
        """Place of a record that ends at `node`, or NO_RECORD."""
        return self._head_at_node[node] if node < <node_id_t>self._head_at_node.size() else NO_RECORD

    cdef inline uint64_t id_at(self, int32_t place) noexcept nogil:
        return self._records[place].id

    cdef inline node_id_t node_at(self, int32_t place) noexcept nogil:
        return self._records[place].node

    cdef inline int32_t front(self) noexcept nogil:
        """Place of the least recently used record, or NO_RECORD."""
        return self._lru_front

    cdef int reserve_nodes(self, Py_ssize_t count) except -1
    cdef int32_t find_at(self, node_id_t node, int64_t exact_length) noexcept nogil
    cdef int32_t place_of(self, uint64_t record_id) noexcept nogil
    cdef int32_t add(self, record_t record) except -1
    cdef void touch_at(self, int32_t place) noexcept nogil
    cdef void erase_at(self, int32_t place) noexcept nogil
    cdef int32_t erase_node(self, node_id_t node) noexcept nogil
    cdef void clear(self) noexcept nogil
    cdef void _link_back(self, int32_t place) noexcept nogil
    cdef void _unlink(self, int32_t place) noexcept nogil
    cdef int32_t _checked(self, object record_id) except -1
    cdef int _check_mutable(self) except -1
