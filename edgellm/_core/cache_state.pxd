"""C interface of the cache's state: pools, indexes and leases, and the moves on them that cannot fail."""

cimport cython
from cpython.ref cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint64_t
from libcpp.vector cimport vector

from edgellm._core.block_hash cimport TokenChain, hash_equal
from edgellm._core.block_index cimport BlockIndex, index_t
from edgellm._core.draft_index cimport DraftIndex
from edgellm._core.page_ledger cimport ResourcePools, pool_t
from edgellm._core.records cimport RecordStore
from edgellm._core.types cimport node_id_t, page_id_t


cdef struct reservation_t:
    int32_t recurrent_slot
    int32_t partial_slot        # or NO_SLOT
    bint written                # the captures were enqueued


@cython.final
@cython.no_gc       # holds the manager; the manager holds leases only as bare pointers, so there is no cycle
cdef class CacheRequestLease:
    """See cache_state.pyx.

    pages:       the sequence's base pages in logical order; one active reference each.  The first
                 `published_block_count` are the tree nodes of its leading blocks.
    draft_pages: likewise in the draft pool; the first `published_draft_block_count` are one path of draft nodes.
    """

    cdef readonly CacheState manager
    cdef vector[page_id_t] pages
    cdef vector[page_id_t] draft_pages
    cdef vector[reservation_t] reservations
    cdef node_id_t tail_page            # pinned until the copy is enqueued, or NO_NODE
    cdef page_id_t draft_tail_page      # or NO_DRAFT
    cdef int32_t recurrent_slot         # snapshots to restore from, or NO_SLOT
    cdef int32_t partial_slot
    cdef bint paired                    # has draft pages
    cdef int retention                  # RetentionPriority as a number
    cdef uint64_t serial                # names the lease among all that this manager ever made
    cdef Py_ssize_t reuse_length        # tokens whose state it began with
    cdef readonly object mode
    cdef readonly Py_ssize_t shared_block_count
    cdef readonly Py_ssize_t shared_draft_block_count
    cdef readonly Py_ssize_t published_block_count
    cdef readonly Py_ssize_t published_draft_block_count
    cdef readonly Py_ssize_t rebound_page_count
    cdef readonly Py_ssize_t rebound_draft_page_count
    cdef readonly Py_ssize_t tail_token_count
    cdef readonly Py_ssize_t volatile_from
    cdef readonly int64_t expiry
    cdef readonly bint sealed
    cdef readonly bint valid
    cdef size_t live_place


cdef class CacheState:
    cdef readonly int32_t page_size
    cdef readonly ResourcePools pools
    cdef readonly BlockIndex index
    cdef readonly DraftIndex drafts
    cdef readonly RecordStore records
    cdef readonly object spec_reuse_contract
    cdef readonly object base_state_kind
    cdef bint has_attention             # base pages hold K and V
    cdef bint checkpointed              # reuse starts at checkpoints only
    cdef bint owns_draft                # the contract has draft pages of its own
    cdef Py_ssize_t future_tokens       # of the contract; 0 without one
    cdef pool_t* base
    cdef pool_t* draft
    cdef pool_t* recurrent
    cdef pool_t* partial
    cdef index_t* tree
    cdef uint64_t version               # moves with every change, so that a stale plan is noticed
    cdef vector[PyObject*] live         # every valid lease; not owned
    cdef vector[node_id_t] scratch
    cdef vector[page_id_t] draft_scratch
    cdef vector[int32_t] media_scratch
    cdef vector[int32_t] draft_records  # [draft capacity] MTP checkpoints that name a draft node
    cdef int64_t evicted_records
    cdef int64_t reclaimed_base_pages
    cdef int64_t reclaimed_draft_pages
    cdef int64_t reclaimed_recurrent
    cdef int64_t reclaimed_partial
    cdef uint64_t last_serial
    cdef Py_ssize_t allocation_points   # passes of places that may run out of memory
    cdef Py_ssize_t fail_in             # tests: the pass from now that fails, 0 for none

    cdef inline Py_ssize_t available(self) noexcept nogil:
        """Base pages a lease could be given now: free ones and all that eviction can take."""
        return <Py_ssize_t>self.base.free_count + self.tree.lru.size

    cdef inline Py_ssize_t available_drafts(self) noexcept nogil:
        """Draft pages a lease could be given now."""
        return <Py_ssize_t>self.draft.free_count + self.drafts.core.lru.size

    cdef inline int step(self) except -1:
        """Passed by every preparation that may run out of memory; a test may make it do so once."""
        self.allocation_points += 1
        if self.fail_in > 0:
            self.fail_once()
        return 0

    cdef inline int check_lease(self, CacheRequestLease lease) except -1:
        """A valid lease of this manager."""
        if lease is None or not lease.valid or lease.manager is not self:
            self.refuse_lease(lease)
        return 0

    cdef inline int check_open(self, CacheRequestLease lease) except -1:
        """A valid lease of this manager that may still grow and publish."""
        if lease is None or not lease.valid or lease.manager is not self or lease.sealed:
            self.refuse_lease(lease)
        return 0

    cdef inline int check_chain(self, TokenChain chain) except -1:
        """A chain in pages of this manager's size."""
        if chain is None or chain.page_size != self.page_size:
            self.refuse_chain(chain)
        return 0

    cdef inline int check_overlap(self, CacheRequestLease lease, TokenChain chain, Py_ssize_t count) except -1:
        """The first `count` blocks of lease and chain are the same: a chained hash speaks for its whole prefix."""
        if count > 0 and (chain.block_count() < count or not hash_equal(
                self.tree.nodes[lease.pages[count - 1]].hash, chain.hashes[count - 1])):
            self.refuse_prefix(count)
        return 0

    cdef int fail_once(self) except -1
    cdef int refuse_lease(self, CacheRequestLease lease) except -1
    cdef int refuse_chain(self, TokenChain chain) except -1
    cdef int refuse_prefix(self, Py_ssize_t count) except -1
    # Holding; what runs once for each page is final, so that it is called directly

    @cython.final
    cdef void pin_nodes(self, const node_id_t* nodes, Py_ssize_t count) noexcept nogil
    cdef void pin_drafts(self, const page_id_t* drafts, Py_ssize_t count) noexcept nogil

    @cython.final
    cdef void settle_node(self, node_id_t node) noexcept nogil
    cdef void unpin_node(self, node_id_t node) noexcept nogil

    @cython.final
    cdef void unpin_draft(self, page_id_t draft) noexcept nogil
    cdef void pin_snapshots(self, int32_t recurrent_slot, int32_t partial_slot) noexcept nogil
    cdef void unpin_snapshots(
        self, int32_t recurrent_slot, int32_t partial_slot, int priority, int64_t expiry
    ) noexcept nogil
    # Taking
    cdef void take_pages(self, vector[page_id_t]* out, Py_ssize_t count) noexcept nogil
    cdef void take_drafts(self, vector[page_id_t]* out, Py_ssize_t count) noexcept nogil
    # Dropping

    @cython.final
    cdef void drop_draft(self, page_id_t draft, bint counted) noexcept nogil

    @cython.final
    cdef void drop_node(self, node_id_t node, bint counted) noexcept nogil
    cdef void drop_tails_before(self, node_id_t parent, const int32_t* tokens, int32_t count) noexcept nogil
    cdef void erase_record(self, int32_t place, bint counted) noexcept nogil
    cdef void trim_node(self, node_id_t node, bint counted) noexcept nogil
    cdef void trim_draft(self, page_id_t draft) noexcept nogil

    @cython.final
    cdef void evict_node(self, node_id_t node) noexcept nogil
    cdef void evict_draft(self, page_id_t draft) noexcept nogil
    cdef void evict_checkpoint(self, int32_t place) noexcept nogil
    cdef void drop_record(self, int32_t place) noexcept
    cdef void forget_unpublished(self) noexcept
    # Releasing
    cdef void release_pages(
        self, const page_id_t* pages, Py_ssize_t count, int priority, int64_t expiry
    ) noexcept nogil
    cdef void release_tail(self, CacheRequestLease lease) noexcept nogil
    cdef void release_restored(self, CacheRequestLease lease) noexcept nogil
    cdef void release_lease(self, CacheRequestLease lease) noexcept


cdef int make_room(vector[page_id_t]* items, size_t count) except -1
