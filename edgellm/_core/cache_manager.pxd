"""C interface of the context-cache manager."""

cimport cython
from libc.stdint cimport int64_t

from edgellm._core.block_hash cimport TokenChain
from edgellm._core.cache_state cimport CacheRequestLease, CacheState
from edgellm._core.leasing cimport lease_options_t
from edgellm._core.planners cimport ReusePlan
from edgellm._core.publication cimport request_t


@cython.final
cdef class AcquireResult:
    cdef readonly CacheRequestLease lease
    cdef readonly object status
    cdef readonly ReusePlan plan


@cython.final
cdef class PublishResult:
    cdef readonly object status
    cdef readonly object record
    cdef readonly Py_ssize_t published_block_count
    cdef readonly Py_ssize_t new_block_count
    cdef readonly Py_ssize_t published_draft_block_count
    cdef readonly Py_ssize_t new_draft_block_count
    cdef readonly Py_ssize_t retained_tail_tokens


@cython.final
cdef class ContextCacheManager(CacheState):
    cdef ReusePlan make_plan(self, TokenChain chain, object lookup_policy, bint speculative)
    cdef int check_mode(self, CacheRequestLease lease, bint paired, str call) except -1
    cdef int fill_options(
        self, lease_options_t* options, int64_t min_tokens, int64_t draft_min_tokens, int64_t reserve_pages,
        int64_t draft_reserve_pages, object priority, int64_t expiry
    ) except -1
    cdef AcquireResult acquire_as(
        self, object mode, TokenChain chain, object lookup_policy, bint speculative, int64_t min_tokens,
        int64_t draft_min_tokens, int64_t reserve_pages
    )
    cdef PublishResult publish_as(
        self, CacheRequestLease lease, TokenChain chain, int64_t length, bint make_record, bint retain_tail
    )
    cdef PublishResult publish_checkpoint_as(
        self, CacheRequestLease lease, TokenChain chain, int64_t exact_length, object reservation, object kind,
        object keep_lengths
    )
    cdef Py_ssize_t reservation_of(self, CacheRequestLease lease, object reservation) except -1
    cdef int append_one(
        self, CacheRequestLease lease, TokenChain chain, int token, bint publish, Py_ssize_t lookahead
    ) except -1
