from libc.stdint cimport int32_t, int64_t, uint64_t

from edgellm.session._finish cimport FinishRule


cdef class CancelToken:
    cdef bint flag


cdef class LengthRow:
    cdef readonly object identity
    cdef readonly object ref
    cdef readonly uint64_t request_id
    cdef uint64_t epoch
    cdef int32_t slot
    cdef public int64_t committed
    cdef public int64_t prompt_remaining
    cdef public bint exclusive


cdef class ResidentRow(LengthRow):
    cdef readonly FinishRule rule
    cdef readonly object cancel_token
    cdef public list generated
    cdef public int64_t state_length
    cdef public int64_t iterations
    cdef public int64_t reported
    cdef public int64_t index
    cdef public bint terminal
    cdef public object reason
    cdef public object channel
    cdef public object text
    cdef public object logprobs
    cdef public object sampling
    cdef bint needs_text_lane(self) noexcept
    cdef bint wants_to_leave(self) except -1
    cdef int take(self, int32_t token_id) except -1
