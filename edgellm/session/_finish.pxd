from libc.stdint cimport int32_t, int64_t
from libcpp.vector cimport vector


cdef class FinishRule:
    cdef readonly object end_ids
    cdef readonly int64_t max_new_tokens
    cdef vector[int32_t] _sorted_ends
    cdef bint ends_with(self, int32_t token_id) noexcept
