from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libcpp.vector cimport vector


cdef struct plan_row_t:
    uint64_t request_id
    uint64_t epoch
    int32_t slot
    int32_t query_length
    int32_t past_length
    uint8_t context
    uint8_t select


cdef struct delta_row_t:
    uint64_t epoch
    int32_t slot
    int32_t count           # its tokens follow those of the delta before


cdef class LazySequence:
    cdef list _items
    cdef list items(self)
    cdef list build(self)
    cdef Py_ssize_t size(self) noexcept


cdef class StepPlan(LazySequence):
    cdef vector[plan_row_t] rows
    cdef object describe(self, Py_ssize_t index)
    cdef object identity_of(self, Py_ssize_t index)


cdef class PlanIdentities(LazySequence):
    cdef StepPlan _plan


cdef class StepDeltas(LazySequence):
    cdef vector[delta_row_t] rows
    cdef vector[int64_t] tokens
