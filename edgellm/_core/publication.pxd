"""C interface of publication: what a sequence computed enters the tree."""

from libc.stdint cimport uint64_t

from edgellm._core.block_hash cimport TokenChain
from edgellm._core.cache_state cimport CacheRequestLease, CacheState
from edgellm._core.types cimport node_id_t, page_id_t


cdef struct request_t:
    Py_ssize_t count        # leading full blocks to publish
    Py_ssize_t tail         # tokens behind them whose page is retained, 0 for none
    bint drafts             # the draft pages go along
    bint endpoint           # remember the endpoint of the last block
    bint need_root          # something will hang at the namespace root


cdef struct staged_t:
    Py_ssize_t found        # blocks behind the published ones that others published; in `state.scratch`
    Py_ssize_t first        # the lease's own pages that will be indexed: blocks first..end-1
    Py_ssize_t end
    node_id_t root          # namespace root, where one is needed, or NO_NODE


cdef struct published_t:
    uint64_t record_id      # 0: none
    bint existing_record
    Py_ssize_t new_blocks
    Py_ssize_t new_drafts
    Py_ssize_t tail_tokens  # retained


cdef int stage(
    CacheState state, CacheRequestLease lease, TokenChain chain, const request_t* request, staged_t* staged
) except -1
cdef int unstage(CacheState state, const staged_t* staged) except -1
cdef node_id_t endpoint(
    CacheState state, CacheRequestLease lease, Py_ssize_t count, const staged_t* staged
) noexcept nogil
cdef void commit(
    CacheState state, CacheRequestLease lease, TokenChain chain, const request_t* request, const staged_t* staged,
    published_t* out
) noexcept nogil
cdef int publish(
    CacheState state, CacheRequestLease lease, TokenChain chain, const request_t* request, published_t* out
) except -1
cdef Py_ssize_t find_path(CacheState state, CacheRequestLease lease, TokenChain chain, Py_ssize_t limit) except -1
cdef void adopt(CacheState state, CacheRequestLease lease, Py_ssize_t found) noexcept nogil
cdef void adopt_draft(CacheState state, CacheRequestLease lease, Py_ssize_t block_idx, page_id_t draft) noexcept nogil
cdef Py_ssize_t look_again(CacheState state, CacheRequestLease lease, TokenChain chain) except -1
