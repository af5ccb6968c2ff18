"""C interface of the block index: the tree, its hash table, its lists and its eviction order as plain arrays.

A node is named by the page it holds (`node id == page id`): a page backs at most one node and a node exactly one
page.  A parent below 0 is a namespace root: `-2 - namespace`.  -1 is no node.

A *full* node holds page_size tokens and is in the hash table.  A *tail* holds fewer (`token_count`), is always a leaf
and is in its parent's list of tails only.
"""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp
from libcpp.string cimport string
from libcpp.unordered_map cimport unordered_map
from libcpp.vector cimport vector

from edgellm._core.block_hash cimport TokenChain
from edgellm._core.expiry_heap cimport expiry_heap_t, expiry_t, heap_push, heap_remove
from edgellm._core.lru cimport (
    CLASS_EXPIRED,
    LIFETIME_FOREVER,
    LIFETIME_TIMED,
    LIFETIME_UNSET,
    lru_append,
    lru_link_t,
    lru_listed,
    lru_t,
    lru_unlink,
    retention_class,
)
from edgellm._core.types cimport block_hash_t, node_id_t, page_id_t, token_t


cdef extern from *:
    """
    #if defined(__GNUC__) || defined(__clang__)
    /* The empty statement keeps the compiler from deleting a function that only prefetches as one without effect. */
    #define edgellm_prefetch(p) do { __builtin_prefetch(p); __asm__ volatile(""); } while (0)
    #else
    #define edgellm_prefetch(p) ((void)(p))
    #endif
    """
    void edgellm_prefetch(const void* p) noexcept nogil


cdef enum:
    NO_NODE = -1
    NO_MEDIA = -1
    NO_VOLATILE = -1
    # How many blocks ahead a walk asks for table entries: enough to cover a cache miss, few enough to stay cached.
    PREFETCH_BLOCKS = 8
    # How many siblings of one list (children, tails) are looked at, newest first.
    MAX_SIBLINGS = 64


cdef struct node_t:
    # What a walk reads, small enough for two in a cache line.
    block_hash_t hash       # of a full node; a tail has none
    node_id_t parent
    int32_t media           # place of the block's media bytes, or NO_MEDIA
    int32_t child_count     # full children and tails; 0: a leaf
    uint8_t indexed
    uint8_t priority        # RetentionPriority
    uint8_t lifetime        # LIFETIME_...; `branch_t.expiry` counts only when it is TIMED
    uint8_t expiring        # in the expiry heap


cdef struct branch_t:
    # The part of a node that a walk does not read.
    node_id_t first_child   # newest full child, or NO_NODE
    node_id_t first_tail    # newest tail, or NO_NODE
    node_id_t newer         # siblings in the parent's list of children, or of tails
    node_id_t older
    int32_t depth           # blocks from the root, this one included: 1 for a first block
    int32_t volatile_from   # first place in the block that belongs to a volatile template tail, or NO_VOLATILE
    int32_t token_count     # page_size, or less for a tail
    int64_t expiry          # ns


cdef struct bucket_t:
    uint32_t tag            # low word of the masked hash: its home place, and most of a comparison
    node_id_t node          # NO_NODE: empty


cdef struct namespace_t:
    node_id_t first_child   # newest first block, or NO_NODE
    node_id_t first_tail
    int32_t child_count     # first blocks and tails at the root
    int32_t record_count    # records at the root (counted by the manager: `hold_root`, `drop_root`)
    uint8_t used


cdef struct partial_t:
    node_id_t node          # NO_NODE: nothing matches
    int32_t length          # leading tokens it has in common with what was asked for; 1 or more with a node


cdef struct index_t:
    int32_t page_size
    int32_t capacity
    int32_t size            # indexed nodes, tails included
    int32_t tail_count      # tails among them
    int64_t now             # the caller's clock as last told to `demote_next`, ns
    uint64_t mask_hi
    uint64_t mask_lo
    uint64_t table_mask
    uint64_t evicted_mask
    lru_t lru               # nodes that no lease holds, and no others: what eviction can take
    expiry_heap_t expiries  # listed nodes that will expire
    node_t* nodes           # [capacity]
    branch_t* branches      # [capacity]
    token_t* tokens         # [capacity, page_size]
    bucket_t* table         # [table_mask + 1]
    uint64_t* evicted       # [evicted_mask + 1] low hash words of evicted blocks, newest in each place
    uint64_t* withheld      # likewise: computed, but not published by policy
    bint any_withheld


cdef inline void prefetch_bucket(const index_t* index, block_hash_t value) noexcept nogil:
    edgellm_prefetch(&index.table[value.lo & index.mask_lo & index.table_mask])


cdef inline void prefetch_victim(const index_t* index, node_id_t node) noexcept nogil:
    """Ask for what evicting a listed node will touch; nothing for NO_NODE."""
    if node >= 0:
        edgellm_prefetch(&index.branches[node])
        prefetch_bucket(index, index.nodes[node].hash)


cdef inline void raise_retention(index_t* index, node_id_t node, int priority, int64_t expiry) noexcept nogil:
    """Keep an unlisted node at least as long as asked: the higher priority, the later expiry (0: for ever)."""
    cdef node_t* entry = &index.nodes[node]
    if priority > entry.priority:
        entry.priority = <uint8_t>priority
    if entry.lifetime == LIFETIME_FOREVER:
        return
    if expiry == 0:
        entry.lifetime = LIFETIME_FOREVER
    elif entry.lifetime == LIFETIME_UNSET or expiry > index.branches[node].expiry:
        entry.lifetime = LIFETIME_TIMED
        index.branches[node].expiry = expiry


cdef inline void list_node(index_t* index, node_id_t node) noexcept nogil:
    """Nobody holds the node any more: it may be evicted, as the most recently used one of its class."""
    cdef node_t* entry = &index.nodes[node]
    cdef int cls = CLASS_EXPIRED
    if entry.lifetime == LIFETIME_TIMED:
        cls = retention_class(entry.priority, LIFETIME_TIMED, index.branches[node].expiry, index.now)
        if cls != CLASS_EXPIRED:
            heap_push(&index.expiries, node, index.branches[node].expiry, index.branches[node].depth)
            entry.expiring = 1
    else:
        cls = retention_class(entry.priority, LIFETIME_FOREVER, 0, 0)
    lru_append(&index.lru, node, cls)


cdef inline void unlist_node(index_t* index, node_id_t node) noexcept nogil:
    """Somebody holds the node, or it is about to be removed."""
    if index.nodes[node].expiring:
        heap_remove(&index.expiries, node)
        index.nodes[node].expiring = 0
    lru_unlink(&index.lru, node)


cdef inline bint is_listed(const index_t* index, node_id_t node) noexcept nogil:
    return lru_listed(&index.lru, node)


cdef inline bint is_tail(const index_t* index, node_id_t node) noexcept nogil:
    return index.branches[node].token_count != index.page_size


cdef Py_ssize_t text_length(TokenChain chain, Py_ssize_t first, Py_ssize_t limit) noexcept nogil
cdef bint media_range_equal(
    TokenChain chain, Py_ssize_t first, Py_ssize_t count, const string* stored
) noexcept nogil
cdef int media_range(TokenChain chain, Py_ssize_t first, Py_ssize_t count, string* out) except -1


@cython.final
cdef class BlockIndex:
    """See block_index.pyx.  `core` points into the vectors, which never change size."""

    cdef index_t core
    cdef bint sealed            # owned by a manager: the Python mutators are off
    cdef vector[node_t] _nodes
    cdef vector[branch_t] _branches
    cdef vector[lru_link_t] _links
    cdef vector[token_t] _tokens
    cdef vector[bucket_t] _table
    cdef vector[uint64_t] _evicted
    cdef vector[uint64_t] _withheld
    cdef vector[expiry_t] _expiries
    cdef vector[int32_t] _expiry_places
    cdef vector[namespace_t] _namespaces
    cdef vector[string] _namespace_keys
    cdef vector[int32_t] _unused_namespaces
    cdef unordered_map[string, int32_t] _namespace_of
    cdef vector[string] _media
    cdef vector[int32_t] _unused_media

    cdef inline bint was_evicted(self, block_hash_t value) noexcept nogil:
        """Whether a block with this hash was evicted, as far as the bounded memory of evictions reaches."""
        return self.core.evicted[value.lo & self.core.evicted_mask] == value.lo

    cdef inline bint was_withheld(self, block_hash_t value) noexcept nogil:
        """Whether a block with this hash was computed but not published; the later of withheld and evicted holds."""
        return self.core.any_withheld and self.core.withheld[value.lo & self.core.evicted_mask] == value.lo

    cdef inline node_id_t first_child(self, node_id_t parent) noexcept nogil:
        """Newest full child of a node or root; go on with `branches[child].older`.  NO_NODE at the end."""
        return self.core.branches[parent].first_child if parent >= 0 else self._namespaces[-2 - parent].first_child

    cdef inline node_id_t first_tail(self, node_id_t parent) noexcept nogil:
        """Newest tail of a node or root; go on with `branches[tail].older`.  NO_NODE at the end."""
        return self.core.branches[parent].first_tail if parent >= 0 else self._namespaces[-2 - parent].first_tail

    cdef inline int32_t child_count_of(self, node_id_t parent) noexcept nogil:
        """Full children and tails of a node or root."""
        return self.core.nodes[parent].child_count if parent >= 0 else self._namespaces[-2 - parent].child_count

    cdef inline void hold_root(self, node_id_t root) noexcept nogil:
        """A record hangs at the namespace root: the namespace stays while it does."""
        self._namespaces[-2 - root].record_count += 1

    cdef inline void drop_root(self, node_id_t root) noexcept nogil:
        """Undoes one `hold_root`; closes a namespace that nothing needs any more."""
        self._namespaces[-2 - root].record_count -= 1
        self.close_namespace_if_empty(root)

    # Namespaces
    cdef node_id_t find_namespace(self, bytes key) except? -1
    cdef node_id_t open_namespace(self, bytes key) except? -1
    cdef void close_namespace_if_empty(self, node_id_t root) noexcept nogil
    # Media bytes of blocks that have some
    cdef int32_t stage_media(self, TokenChain chain, Py_ssize_t block_idx) except? -1
    cdef int32_t stage_media_range(self, TokenChain chain, Py_ssize_t first, Py_ssize_t count) except? -1
    cdef void drop_media(self, int32_t place) noexcept nogil
    # Looking
    cdef node_id_t find(
        self, node_id_t parent, block_hash_t value, const token_t* tokens, const string* media
    ) noexcept nogil
    cdef Py_ssize_t match(
        self, TokenChain chain, node_id_t parent, Py_ssize_t first, Py_ssize_t limit, node_id_t* out
    ) except -1
    cdef Py_ssize_t _match_text(
        self, TokenChain chain, node_id_t parent, Py_ssize_t first, Py_ssize_t limit, node_id_t* out
    ) noexcept nogil
    cdef int32_t common_length(self, node_id_t node, const token_t* tokens, int32_t limit) noexcept nogil
    cdef int32_t _collect(
        self, node_id_t node, const token_t* tokens, int32_t limit, partial_t* out, int32_t count
    ) noexcept nogil
    cdef int32_t partial_matches(
        self, node_id_t parent, const token_t* tokens, int32_t limit, partial_t* out
    ) noexcept nogil
    cdef partial_t find_partial(
        self, TokenChain chain, node_id_t parent, Py_ssize_t first_token, Py_ssize_t limit
    ) noexcept nogil
    cdef node_id_t find_cover(self, node_id_t parent, const token_t* tokens, int32_t count) noexcept nogil
    cdef node_id_t find_prefix_tail(self, node_id_t parent, const token_t* tokens, int32_t count) noexcept nogil
    cdef void path_into(self, node_id_t node, node_id_t* out) noexcept nogil
    # Moves that cannot fail
    cdef void add(
        self, node_id_t node, node_id_t parent, block_hash_t value, const token_t* tokens, int32_t media
    ) noexcept nogil
    cdef void add_tail(
        self, node_id_t node, node_id_t parent, const token_t* tokens, int32_t count, int32_t media
    ) noexcept nogil
    cdef void remove(self, node_id_t node) noexcept nogil
    cdef node_id_t demote_next(self, int64_t now) noexcept nogil
    cdef void note_withheld(self, block_hash_t value) noexcept nogil
    cdef void clear(self) noexcept nogil
    cdef void _attach(self, node_id_t node, node_id_t parent, int32_t count, int32_t media) noexcept nogil
    cdef void _detach(self, node_id_t node) noexcept nogil
    cdef void _erase_bucket(self, node_id_t node) noexcept nogil
    # Python border
    cdef node_id_t _checked(self, object page) except -1
    cdef node_id_t _checked_parent(self, TokenChain chain, Py_ssize_t block_idx) except? -1
    cdef node_id_t _checked_node(self, object parent) except? -1
    cdef list _siblings(self, node_id_t node)
    cdef int _check_node(self, node_id_t node) except -1
    cdef block_hash_t text_hash(self, node_id_t parent, const token_t* tokens, Py_ssize_t count) noexcept nogil
    cdef int _check_mutable(self) except -1
