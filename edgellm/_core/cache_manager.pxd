"""C interface of the context-cache manager and its leases."""

cimport cython
from cpython.ref cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint64_t
from libcpp.vector cimport vector

from edgellm._core.block_hash cimport TokenChain
from edgellm._core.block_index cimport BlockIndex, index_t
from edgellm._core.page_ledger cimport ResourcePools, pool_t
from edgellm._core.planners cimport ReusePlan
from edgellm._core.records cimport RecordStore
from edgellm._core.types cimport node_id_t, page_id_t


@cython.final
@cython.no_gc       # holds the manager; the manager holds leases only as bare pointers, so there is no cycle
cdef class CacheRequestLease:
    """See cache_manager.pyx.

    pages: the sequence's base pages in logical order; one active reference each.  The first `published_block_count`
           are the tree nodes of its leading blocks.
    """

    cdef readonly ContextCacheManager manager
    cdef vector[page_id_t] pages
    cdef readonly Py_ssize_t shared_block_count
    cdef readonly Py_ssize_t published_block_count
    cdef readonly Py_ssize_t rebound_page_count
    cdef readonly bint valid
    cdef size_t live_place


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


cdef struct published_t:
    uint64_t record_id      # 0: none
    Py_ssize_t new_blocks
    bint existing_record


@cython.final
cdef class ContextCacheManager:
    cdef readonly int32_t page_size
    cdef readonly ResourcePools pools
    cdef readonly BlockIndex index
    cdef readonly RecordStore records
    cdef readonly object spec_reuse_contract
    cdef pool_t* base
    cdef index_t* tree
    cdef uint64_t version               # moves with every change, so that a stale plan is noticed
    cdef vector[PyObject*] live         # every valid lease; not owned
    cdef vector[node_id_t] scratch
    cdef vector[int32_t] media_scratch
    cdef int64_t evicted_records
    cdef int64_t reclaimed_base_pages
    cdef int fault                      # tests: the preparation step that fails next, 0 for none

    cdef inline Py_ssize_t available(self) noexcept nogil:
        """Pages a lease could be given now: free ones and all that eviction can take."""
        return <Py_ssize_t>self.base.free_count + self.tree.lru_size

    cdef int check_lease(self, CacheRequestLease lease) except -1
    cdef int check_chain(self, TokenChain chain) except -1
    cdef int check_overlap(self, CacheRequestLease lease, TokenChain chain, Py_ssize_t count) except -1
    cdef void pin(self, page_id_t page) noexcept nogil
    cdef void unpin(self, page_id_t page) noexcept nogil
    cdef void evict_node(self, node_id_t node) noexcept nogil
    cdef void take_pages(self, vector[page_id_t]* out, Py_ssize_t count) noexcept nogil
    cdef int grow_to(self, CacheRequestLease lease, Py_ssize_t num_pages) except -1
    cdef CacheRequestLease make_lease(self, ReusePlan plan, Py_ssize_t total)
    cdef void release_lease(self, CacheRequestLease lease) noexcept
    cdef int publish_blocks(
        self, CacheRequestLease lease, TokenChain chain, Py_ssize_t count, bint want_record, published_t* out
    ) except -1
    cdef Py_ssize_t find_path(self, CacheRequestLease lease, TokenChain chain, Py_ssize_t limit) except -1
    cdef Py_ssize_t publishable(self, CacheRequestLease lease, Py_ssize_t first, Py_ssize_t count) except -1
    cdef int stage_media(self, TokenChain chain, Py_ssize_t first, Py_ssize_t end) except -1
    cdef int32_t prepare_record(
        self, CacheRequestLease lease, TokenChain chain, Py_ssize_t count, Py_ssize_t found
    ) except -1
    cdef node_id_t endpoint(self, CacheRequestLease lease, Py_ssize_t count, Py_ssize_t found) noexcept nogil
    cdef void add_blocks(
        self, CacheRequestLease lease, TokenChain chain, Py_ssize_t first, Py_ssize_t end, node_id_t root
    ) noexcept nogil
    cdef void adopt(self, CacheRequestLease lease, Py_ssize_t found) noexcept nogil
    cdef void drop_record(self, int32_t place) noexcept
    cdef void forget_unpublished(self) noexcept
    cdef int step(self, int which) except -1
    cdef int append_one(
        self, CacheRequestLease lease, TokenChain chain, int32_t token, bint publish, Py_ssize_t lookahead
    ) except -1
