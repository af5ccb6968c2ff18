"""C interface of recurrent checkpoints: snapshot slots are reserved, published, superseded and restored from."""

from libc.stdint cimport int32_t, int64_t, uint8_t
from libcpp.vector cimport vector

from edgellm._core.block_hash cimport TokenChain
from edgellm._core.cache_state cimport CacheRequestLease, CacheState, reservation_t
from edgellm._core.publication cimport published_t


cdef bint snapshots_fit(CacheState state, bint needs_partial) noexcept nogil
cdef int reserve(CacheState state, CacheRequestLease lease, bint needs_partial) except -1
cdef Py_ssize_t find_reservation(CacheRequestLease lease, int32_t recurrent_slot, int32_t partial_slot) noexcept nogil
cdef void retire(CacheState state, CacheRequestLease lease, Py_ssize_t which) noexcept nogil
cdef int publish_checkpoint(
    CacheState state, CacheRequestLease lease, TokenChain chain, int64_t exact_length,
    const reservation_t* reservation, int kind, const vector[int64_t]* keep, published_t* out
) except -1
cdef int64_t resume_deeper(CacheState state, CacheRequestLease lease, TokenChain chain, int64_t committed) except -1
