"""C interface of the block index: the tree, its hash table and its LRU list as plain arrays.

A node is named by the page it holds (`node id == page id`): a page backs at most one node and a node exactly one
page.  A parent below 0 is a namespace root: `-2 - namespace`.  -1 is no node.
"""

cimport cython
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp
from libcpp.string cimport string
from libcpp.unordered_map cimport unordered_map
from libcpp.vector cimport vector

from edgellm._core.block_hash cimport TokenChain
from edgellm._core.types cimport block_hash_t, node_id_t, page_id_t, token_t


cdef extern from *:
    """
    #if defined(__GNUC__) || defined(__clang__)
    #define edgellm_prefetch(p) __builtin_prefetch(p)
    #else
    #define edgellm_prefetch(p) ((void)(p))
    #endif
    """
    void edgellm_prefetch(const void* p) noexcept nogil


cdef enum:
    NO_NODE = -1
    NO_MEDIA = -1
    # How many blocks ahead a walk asks for table entries: enough to cover a cache miss, few enough to stay cached.
    PREFETCH_BLOCKS = 8


cdef struct node_t:
    block_hash_t hash
    node_id_t parent
    int32_t child_count
    int32_t lru_prev        # node ids; `capacity` is the list's sentinel; meaningless while not listed
    int32_t lru_next
    int32_t media           # place of the block's media bytes, or NO_MEDIA
    uint8_t indexed


cdef struct bucket_t:
    uint32_t tag            # low word of the masked hash: its home place, and most of a comparison
    node_id_t node          # NO_NODE: empty


cdef struct namespace_t:
    int32_t child_count
    uint8_t used


cdef struct index_t:
    int32_t page_size
    int32_t capacity
    int32_t size            # indexed nodes
    int32_t lru_size        # nodes in the LRU list
    uint64_t mask_hi
    uint64_t mask_lo
    uint64_t table_mask
    uint64_t evicted_mask
    node_t* nodes           # [capacity + 1]
    token_t* tokens         # [capacity, page_size]
    bucket_t* table         # [table_mask + 1]
    uint64_t* evicted       # [evicted_mask + 1] low hash words of evicted blocks, newest in each place


cdef inline void lru_append(index_t* index, node_id_t node) noexcept nogil:
    """Make an unlisted node the most recently used one."""
    cdef node_t* nodes = index.nodes
    cdef int32_t last = nodes[index.capacity].lru_prev
    nodes[node].lru_prev = last
    nodes[node].lru_next = index.capacity
    nodes[last].lru_next = node
    nodes[index.capacity].lru_prev = node
    index.lru_size += 1


cdef inline void lru_unlink(index_t* index, node_id_t node) noexcept nogil:
    cdef node_t* nodes = index.nodes
    nodes[nodes[node].lru_prev].lru_next = nodes[node].lru_next
    nodes[nodes[node].lru_next].lru_prev = nodes[node].lru_prev
    index.lru_size -= 1


cdef inline node_id_t lru_front(const index_t* index) noexcept nogil:
    """The next victim; always a leaf.  `capacity` when the list is empty."""
    return index.nodes[index.capacity].lru_next


cdef inline void prefetch_bucket(const index_t* index, block_hash_t value) noexcept nogil:
    edgellm_prefetch(&index.table[value.lo & index.mask_lo & index.table_mask])


@cython.final
cdef class BlockIndex:
    """See block_index.pyx.  `core` points into the vectors, which never change size."""

    cdef index_t core
    cdef bint sealed            # owned by a manager: the Python mutators are off
    cdef vector[node_t] _nodes
    cdef vector[token_t] _tokens
    cdef vector[bucket_t] _table
    cdef vector[uint64_t] _evicted
    cdef vector[namespace_t] _namespaces
    cdef vector[string] _namespace_keys
    cdef vector[int32_t] _unused_namespaces
    cdef unordered_map[string, int32_t] _namespace_of
    cdef vector[string] _media
    cdef vector[int32_t] _unused_media

    cdef inline bint was_evicted(self, block_hash_t value) noexcept nogil:
        """Whether a block with this hash was evicted, as far as the bounded memory of evictions reaches."""
        return self.core.evicted[value.lo & self.core.evicted_mask] == value.lo

    cdef node_id_t find_namespace(self, bytes key) except? -1
    cdef node_id_t open_namespace(self, bytes key) except? -1
    cdef void close_namespace_if_empty(self, node_id_t root) noexcept nogil
    cdef node_id_t find(
        self, node_id_t parent, block_hash_t value, const token_t* tokens, const string* media
    ) noexcept nogil
    cdef Py_ssize_t match(
        self, TokenChain chain, node_id_t parent, Py_ssize_t first, Py_ssize_t limit, node_id_t* out
    ) except -1
    cdef Py_ssize_t _match_text(
        self, TokenChain chain, node_id_t parent, Py_ssize_t first, Py_ssize_t limit, node_id_t* out
    ) noexcept nogil
    cdef int32_t stage_media(self, TokenChain chain, Py_ssize_t block_idx) except? -1
    cdef void drop_media(self, int32_t place) noexcept nogil
    cdef void add(
        self, node_id_t node, node_id_t parent, block_hash_t value, const token_t* tokens, int32_t media
    ) noexcept nogil
    cdef void remove(self, node_id_t node) noexcept nogil
    cdef void clear(self) noexcept nogil
    cdef void _erase_bucket(self, node_id_t node) noexcept nogil
    cdef node_id_t _checked(self, object page) except -1
    cdef int _check_mutable(self) except -1
