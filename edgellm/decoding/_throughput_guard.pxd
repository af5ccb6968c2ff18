from libc.stdint cimport int32_t
from libcpp.vector cimport vector


cdef enum RoundKind:
    UNMEASURED, IDLE, PROPOSING


cdef struct Pace:
    # Sums over measured rounds of one kind, with weights that fade, and stalls since the latest one.
    double rounds
    double tokens
    double seconds
    double tokens_tokens
    double tokens_seconds
    double seconds_seconds
    int32_t stalls


cdef struct Bucket:
    # Of rounds with about as many residents.  `closed` while proposing is not known to be faster; `since` counts
    # measured rounds with proposals since the latest without, `gap` those before a sample.
    Pace idle
    Pace proposing
    bint closed
    int32_t since
    int32_t gap


cdef class ThroughputGuard:
    cdef vector[Bucket] _buckets
    cdef Bucket *_bucket  # of this round
    cdef Py_ssize_t _count  # residents of this round
    cdef bint _changed  # whether there were more or fewer in the round before
    cdef RoundKind _kind, _kind_before  # of this round and the one before
    cdef int32_t _sample_left, _trial_left  # rounds, this one included

    cdef bint enter(self, Py_ssize_t count) noexcept nogil
    cdef bint is_closed(self) noexcept nogil
    cdef bint is_sampling(self) noexcept nogil
    cdef bint is_trying(self) noexcept nogil
    cdef bint holds_back(self) noexcept nogil
    cdef bint holds_back_next(self) noexcept nogil
    cdef void begin_trial(self) noexcept nogil
    cdef void note(self, bint proposes) noexcept nogil
    cdef void observe(self, double tokens, double seconds) noexcept nogil
    cdef void _leave(self) noexcept nogil
    cdef void _go_on(self, bint nothing_kept) noexcept nogil
    cdef void _add(self, RoundKind kind, double tokens, double seconds) noexcept nogil
    cdef void _judge(self, RoundKind kind) noexcept nogil
    cdef void _end_trial(self) noexcept nogil
