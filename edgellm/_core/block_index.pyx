"""Block index: a tree of published blocks, found by hash, believed only after comparing.

A node is (hash, parent, page, copy of the block's token ids).  The roots are *namespaces*, one for each distinct
request-constant identity, compared byte for byte.  A lookup walks down from the namespace: the hash table proposes
candidates, and a candidate is believed only when its parent is the node the walk stands on *and* its token ids (and
media digests) are equal.  So identity is verified by induction, and a hash collision costs a probe, never a wrong page;
blocks that collide live side by side.

Nodes that no lease holds sit in one LRU list.  A child always stands before its ancestors there (see
`cache_manager`), so the front of the list is always a leaf and eviction needs no search.

The table is open addressing with linear probing and backward-shift deletion: no tombstones, no rehash, sized once.
"""

cimport cython
from cython.operator cimport dereference as deref
from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy
from libcpp.pair cimport pair
from libcpp.string cimport string
from libcpp.unordered_map cimport unordered_map
from libcpp.vector cimport vector

from edgellm._core.block_hash cimport TokenChain, from_hash128, to_hash128
from edgellm._core.types cimport block_hash_t, node_id_t, token_t

import numpy as np

from edgellm.errors import ContractViolation, InvalidArgumentError, InvariantError

DEFAULT_HASH_MASK = (1 << 128) - 1


# How many evictions are remembered at most; small enough to stay in a core's cache.
cdef uint64_t MAX_EVICTED_HASHES = 1 << 16


cdef uint64_t _table_size(int32_t capacity) noexcept nogil:
    """A power of two that keeps the table at most half full."""
    cdef uint64_t size = 64
    while size < 2 * <uint64_t>capacity:
        size *= 2
    return size


@cython.final
cdef class BlockIndex:
    """The tree of published blocks.  Single writer; not thread safe.

    Args:
        page_size: tokens per block, 1 or more.
        capacity: pages in the base pool; also the most nodes there can be.
        hash_mask: 128-bit mask on every hash the *table* sees; tests pass 0 or 1 so that everything collides.
    """

    def __cinit__(self, page_size, capacity, hash_mask=DEFAULT_HASH_MASK):
        if not 0 < page_size < 2**31 or not 0 <= capacity < 2**30:
            raise InvalidArgumentError(
                f"page size {page_size} must be 1 or more and capacity {capacity} 0 or more pages")
        if not 0 <= hash_mask <= DEFAULT_HASH_MASK:
            raise InvalidArgumentError(f"hash mask {hash_mask:#x} must be a 128-bit mask")
        self.core.page_size = page_size
        self.core.capacity = capacity
        self.core.mask_hi = hash_mask >> 64
        self.core.mask_lo = hash_mask & 0xFFFFFFFFFFFFFFFF
        cdef uint64_t table_size = _table_size(self.core.capacity)
        self.core.table_mask = table_size - 1
        self._nodes.resize(<size_t>self.core.capacity + 1)
        self._tokens.resize(<size_t>self.core.capacity * <size_t>self.core.page_size)
        self._table.resize(table_size)
        self.core.evicted_mask = min(table_size, MAX_EVICTED_HASHES) - 1
        self._evicted.resize(self.core.evicted_mask + 1)
        self.core.nodes = self._nodes.data()
        self.core.tokens = self._tokens.data()
        self.core.table = self._table.data()
        self.core.evicted = self._evicted.data()
        self.clear()

    cdef void clear(self) noexcept nogil:
        """Forget every node, namespace and media entry; the memory of evictions stays."""
        cdef size_t i
        for i in range(self._nodes.size()):
            self._nodes[i].indexed = 0
            self._nodes[i].child_count = 0
        for i in range(self._table.size()):
            self._table[i].node = NO_NODE
        self._nodes[self.core.capacity].lru_prev = self.core.capacity
        self._nodes[self.core.capacity].lru_next = self.core.capacity
        self.core.size = self.core.lru_size = 0
        self._namespaces.clear()
        self._namespace_keys.clear()
        self._unused_namespaces.clear()
        self._namespace_of.clear()
        self._media.clear()
        self._unused_media.clear()

    # Namespaces

    cdef node_id_t find_namespace(self, bytes key) except? -1:
        """Root of the namespace, or NO_NODE when nothing is published in it."""
        cdef string name = key
        cdef unordered_map[string, int32_t].iterator found = self._namespace_of.find(name)
        return NO_NODE if found == self._namespace_of.end() else -2 - deref(found).second

    cdef node_id_t open_namespace(self, bytes key) except? -1:
        """Root of the namespace, made when missing; `close_namespace_if_empty` undoes that."""
        cdef node_id_t root = self.find_namespace(key)
        cdef string name = key
        cdef namespace_t fresh
        cdef int32_t place
        if root != NO_NODE:
            return root
        fresh.child_count = 0
        fresh.used = 1
        if self._unused_namespaces.empty():
            # Room on the unused list first: closing a namespace must not need memory.
            self._unused_namespaces.reserve(self._namespaces.size() + 1)
            self._namespace_keys.push_back(string())
            self._namespaces.push_back(fresh)
            self._namespaces.back().used = 0
            self._unused_namespaces.push_back(<int32_t>self._namespaces.size() - 1)
        place = self._unused_namespaces.back()
        self._namespace_keys[place] = name
        self._namespace_of.insert(pair[string, int32_t](name, place))
        self._unused_namespaces.pop_back()
        self._namespaces[place] = fresh
        return -2 - place

    cdef void close_namespace_if_empty(self, node_id_t root) noexcept nogil:
        cdef int32_t place = -2 - root
        if self._namespaces[place].child_count == 0 and self._namespaces[place].used:
            self._namespaces[place].used = 0
            self._namespace_of.erase(self._namespace_keys[place])
            self._unused_namespaces.push_back(place)

    # Media digests of blocks that have some

    cdef int32_t stage_media(self, TokenChain chain, Py_ssize_t block_idx) except? -1:
        """Keep a block's media bytes for a node that is about to be added; NO_MEDIA for a text block."""
        cdef string data
        cdef int32_t place
        if not chain.has_media or not chain.block_has_media(block_idx):
            return NO_MEDIA
        data = chain.block_media_bytes(block_idx)
        if self._unused_media.empty():
            self._unused_media.reserve(self._media.size() + 1)
            self._media.push_back(data)
            return <int32_t>self._media.size() - 1
        place = self._unused_media.back()
        self._media[place] = data
        self._unused_media.pop_back()
        return place

    cdef void drop_media(self, int32_t place) noexcept nogil:
        if place != NO_MEDIA:
            self._media[place].clear()
            self._unused_media.push_back(place)

    # Nodes

    cdef node_id_t find(
        self, node_id_t parent, block_hash_t value, const token_t* tokens, const string* media
    ) noexcept nogil:
        """The child of `parent` with exactly this content, or NO_NODE.  `media` is NULL for a text block."""
        cdef index_t* core = &self.core
        cdef uint64_t lo = value.lo & core.mask_lo
        cdef uint64_t hi = value.hi & core.mask_hi
        cdef uint32_t tag = <uint32_t>lo
        cdef uint64_t place = lo & core.table_mask
        cdef size_t token_bytes = <size_t>core.page_size * sizeof(token_t)
        cdef node_id_t node
        cdef node_t* entry
        while True:
            node = core.table[place].node
            if node == NO_NODE:
                return NO_NODE
            entry = &core.nodes[node]
            if (core.table[place].tag == tag and entry.parent == parent
                    and (entry.hash.lo & core.mask_lo) == lo and (entry.hash.hi & core.mask_hi) == hi
                    and memcmp(core.tokens + <size_t>node * core.page_size, tokens, token_bytes) == 0
                    and (entry.media == NO_MEDIA if media == NULL
                         else entry.media != NO_MEDIA and self._media[entry.media] == media[0])):
                return node
            place = (place + 1) & core.table_mask

    cdef Py_ssize_t _match_text(
        self, TokenChain chain, node_id_t parent, Py_ssize_t first, Py_ssize_t limit, node_id_t* out
    ) noexcept nogil:
        cdef const block_hash_t* hashes = chain.hashes.data()
        cdef Py_ssize_t i = first
        cdef node_id_t node
        while i < limit:
            if i + PREFETCH_BLOCKS < limit:
                prefetch_bucket(&self.core, hashes[i + PREFETCH_BLOCKS])
            node = self.find(parent, hashes[i], chain.block_tokens(i), NULL)
            if node == NO_NODE:
                break
            out[i - first] = parent = node
            i += 1
        return i - first

    cdef Py_ssize_t match(
        self, TokenChain chain, node_id_t parent, Py_ssize_t first, Py_ssize_t limit, node_id_t* out
    ) except -1:
        """Walk down from `parent` along blocks first..limit-1; no side effect.

        Args:
            parent: node of block first-1, or the namespace root; NO_NODE finds nothing.
            out: room for limit - first nodes.
        Returns:
            How many leading blocks were found.
        """
        cdef Py_ssize_t i = first
        cdef node_id_t node
        cdef string media
        if parent == NO_NODE:
            return 0
        if not chain.has_media:
            with nogil:
                i = self._match_text(chain, parent, first, limit, out)
            return i
        while i < limit:
            if chain.block_has_media(i):
                media = chain.block_media_bytes(i)
                node = self.find(parent, chain.hashes[i], chain.block_tokens(i), &media)
            else:
                node = self.find(parent, chain.hashes[i], chain.block_tokens(i), NULL)
            if node == NO_NODE:
                break
            out[i - first] = parent = node
            i += 1
        return i - first

    cdef void add(
        self, node_id_t node, node_id_t parent, block_hash_t value, const token_t* tokens, int32_t media
    ) noexcept nogil:
        """Index page `node` below `parent`; not in the LRU list.  The caller knows that the content is new there."""
        cdef node_t* entry = &self._nodes[node]
        cdef uint64_t place = value.lo & self.core.mask_lo & self.core.table_mask
        while self._table[place].node != NO_NODE:
            place = (place + 1) & self.core.table_mask
        self._table[place].tag = <uint32_t>(value.lo & self.core.mask_lo)
        self._table[place].node = node
        entry.hash = value
        entry.parent = parent
        entry.child_count = 0
        entry.media = media
        entry.indexed = 1
        memcpy(self.core.tokens + <size_t>node * self.core.page_size, tokens,
               <size_t>self.core.page_size * sizeof(token_t))
        if parent >= 0:
            self._nodes[parent].child_count += 1
        else:
            self._namespaces[-2 - parent].child_count += 1
        self.core.size += 1

    cdef void _erase_bucket(self, node_id_t node) noexcept nogil:
        """Take a node out of the table and close the gap, so that probing still finds what lies behind it."""
        cdef uint64_t mask = self.core.table_mask
        cdef uint64_t gap = self._nodes[node].hash.lo & self.core.mask_lo & mask
        cdef uint64_t place
        cdef uint64_t home
        while self._table[gap].node != node:
            gap = (gap + 1) & mask
        place = (gap + 1) & mask
        while self._table[place].node != NO_NODE:
            home = self._table[place].tag & mask
            # An entry may move back to the gap unless its home lies behind the gap.
            if ((place - home) & mask) >= ((place - gap) & mask):
                self._table[gap] = self._table[place]
                gap = place
            place = (place + 1) & mask
        self._table[gap].node = NO_NODE

    cdef void remove(self, node_id_t node) noexcept nogil:
        """Take a childless node out of the tree and remember its hash as evicted; not out of the LRU list."""
        cdef node_t* entry = &self._nodes[node]
        self._erase_bucket(node)
        self._evicted[entry.hash.lo & self.core.evicted_mask] = entry.hash.lo
        entry.indexed = 0
        self.drop_media(entry.media)
        entry.media = NO_MEDIA
        if entry.parent >= 0:
            self._nodes[entry.parent].child_count -= 1
        else:
            self._namespaces[-2 - entry.parent].child_count -= 1
            self.close_namespace_if_empty(entry.parent)
        self.core.size -= 1

    # Python interface

    cdef node_id_t _checked(self, object page) except -1:
        if not isinstance(page, int) or not 0 <= page < self.core.capacity:
            raise InvalidArgumentError(f"page {page!r} is not an integer from 0 to {self.core.capacity - 1}")
        return page

    cdef int _check_mutable(self) except -1:
        if self.sealed:
            raise ContractViolation("this index belongs to a manager, which alone may change it; read it only")
        return 0

    @property
    def page_size(self):
        return self.core.page_size

    @property
    def capacity(self):
        return self.core.capacity

    @property
    def size(self):
        """Indexed blocks."""
        return self.core.size

    @property
    def lru_size(self):
        """Indexed blocks that no lease holds: what eviction can take."""
        return self.core.lru_size

    @property
    def num_namespaces(self):
        return self._namespace_of.size()

    def __len__(self):
        return self.core.size

    def __contains__(self, page):
        return bool(self._nodes[self._checked(page)].indexed)

    def lookup_prefix(self, TokenChain chain not None):
        """Pages of the longest leading run of indexed blocks (a new list).  No side effect, no recency touch."""
        if chain.page_size != self.core.page_size:
            raise InvalidArgumentError(f"the chain has page size {chain.page_size}, the index {self.core.page_size}")
        cdef vector[node_id_t] found
        found.resize(chain.hashes.size())
        cdef Py_ssize_t count = self.match(
            chain, self.find_namespace(chain.key_bytes), 0, chain.block_count(), found.data())
        return [found[i] for i in range(count)]

    def insert(self, TokenChain chain not None, block_idx, page):
        """Index `page` as block `block_idx` of `chain`; the first committer wins.

        Returns:
            `(canonical page, inserted)`; an indexed block keeps its page.
        Raises:
            InvalidArgumentError: bad index or page, the blocks in front are not indexed, or the page is indexed as
                another block.  Nothing was changed.
        """
        self._check_mutable()
        cdef node_id_t node = self._checked(page)
        if not 0 <= block_idx < chain.block_count():
            raise InvalidArgumentError(f"block {block_idx} is not a full block of a chain with {chain.block_count()}")
        path = self.lookup_prefix(chain)
        if len(path) > block_idx:
            return path[block_idx], False
        if len(path) < block_idx:
            raise InvalidArgumentError(
                f"block {block_idx} needs its {block_idx} leading blocks; {len(path)} are indexed")
        if self._nodes[node].indexed:
            raise InvalidArgumentError(f"page {page} is indexed as another block; erase it first")
        cdef int32_t media = self.stage_media(chain, block_idx)
        cdef node_id_t parent = path[block_idx - 1] if block_idx else self.open_namespace(chain.key_bytes)
        self.add(node, parent, chain.hashes[<size_t>block_idx], chain.block_tokens(block_idx), media)
        return page, True

    def erase_page(self, page):
        """Take a leaf out of the index; a page that is not indexed is left alone.

        Raises:
            InvalidArgumentError: the block has children.  Erase those first.
        """
        self._check_mutable()
        cdef node_id_t node = self._checked(page)
        if not self._nodes[node].indexed:
            return
        if self._nodes[node].child_count:
            raise InvalidArgumentError(
                f"block of page {page} has {self._nodes[node].child_count} children; erase them first")
        self.remove(node)

    def hash_of(self, page):
        """The hash a page is indexed under, or None."""
        cdef node_id_t node = self._checked(page)
        return to_hash128(self._nodes[node].hash) if self._nodes[node].indexed else None

    def parent_of(self, page):
        """Page of the parent block, or None for a first block or an unknown page."""
        cdef node_id_t node = self._checked(page)
        return self._nodes[node].parent if self._nodes[node].indexed and self._nodes[node].parent >= 0 else None

    def child_count(self, page):
        return self._nodes[self._checked(page)].child_count

    def tokens_of(self, page):
        """Copy of an indexed block's token ids, (page_size,) int32, or None."""
        cdef node_id_t node = self._checked(page)
        if not self._nodes[node].indexed:
            return None
        cdef size_t first = <size_t>node * self.core.page_size
        return np.array([self._tokens[first + i] for i in range(self.core.page_size)], dtype=np.int32)

    def path_of(self, page):
        """Pages from the first block down to this one, or an empty list for an unknown page."""
        cdef node_id_t node = self._checked(page)
        path = []
        while self._nodes[node].indexed:
            path.append(node)
            if self._nodes[node].parent < 0:
                break
            node = self._nodes[node].parent
        return path[::-1]

    def evicted(self, value):
        """Whether a block with this `Hash128` was evicted, as far as the bounded memory reaches."""
        return bool(self.was_evicted(from_hash128(value)))

    def eviction_order(self):
        """Pages that no lease holds, next victim first (a new list)."""
        cdef node_id_t node = lru_front(&self.core)
        order = []
        while node != self.core.capacity:
            order.append(node)
            node = self._nodes[node].lru_next
        return order

    def check_invariants(self):
        """Recount the tree.

        Raises:
            InvariantError: table, tree, namespaces and LRU list do not describe the same nodes.
        Cost: O(capacity + table).
        """
        nodes = [n for n in range(self.core.capacity) if self._nodes[n].indexed]
        in_table = sorted(self._table[i].node for i in range(self._table.size()) if self._table[i].node != NO_NODE)
        if nodes != in_table or len(nodes) != self.core.size:
            raise InvariantError(f"nodes {nodes}, table {in_table} and size {self.core.size} disagree")
        self._check_links(nodes)
        self._check_lru(nodes)

    def _check_links(self, nodes):
        """Every node is found by its own content, and the child counts are right."""
        children = {}
        cdef node_id_t node
        cdef node_t* entry
        cdef const string* media
        for node in nodes:
            entry = &self._nodes[node]
            media = NULL
            if entry.media != NO_MEDIA:
                media = &self._media[entry.media]
            if self.find(entry.parent, entry.hash, &self._tokens[<size_t>node * self.core.page_size], media) != node:
                raise InvariantError(f"block of page {node} is not found by its own content")
            if entry.parent >= 0 and not self._nodes[entry.parent].indexed:
                raise InvariantError(f"parent {entry.parent} of page {node} is not indexed")
            children[entry.parent] = children.get(entry.parent, 0) + 1
        for node in nodes:
            if self._nodes[node].child_count != children.get(node, 0):
                raise InvariantError(
                    f"page {node} counts {self._nodes[node].child_count} children, not {children.get(node, 0)}")
        roots = {-2 - i: self._namespaces[i].child_count for i in range(<Py_ssize_t>self._namespaces.size())
                 if self._namespaces[i].used}
        if roots != {k: v for k, v in children.items() if k < 0} or len(roots) != <Py_ssize_t>self._namespace_of.size():
            raise InvariantError(f"namespaces {roots} do not match the first blocks {children}")

    def _check_lru(self, nodes):
        """The LRU list holds indexed nodes once each, every child in front of its parent."""
        order = self.eviction_order()
        place = {n: i for i, n in enumerate(order)}
        if len(place) != len(order) or len(order) != self.core.lru_size or not place.keys() <= set(nodes):
            raise InvariantError(f"LRU list {order} is not a set of {self.core.lru_size} indexed pages")
        for node in nodes:
            parent = self._nodes[node].parent
            if parent in place and (node not in place or place[node] > place[parent]):
                raise InvariantError(f"page {parent} may be evicted before its child {node}")
