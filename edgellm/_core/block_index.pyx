"""Block index: a tree of published blocks, found by hash, believed only after comparing.

A node is (hash, parent, page, copy of the block's token ids).  The roots are *namespaces*, one for each distinct
request-constant identity, compared byte for byte.  A lookup walks down from the namespace: the hash table proposes
candidates, and a candidate is believed only when its parent is the node the walk stands on *and* its token ids (and
media digests) are equal.  So identity is verified by induction, and a hash collision costs a probe, never a wrong page;
blocks that collide live side by side.

Beside the full blocks there are *tails*: the unfilled last block of a sequence that ended.  A tail is a leaf in its
parent's list of tails and has no place in the table; a lookup compares its tokens one by one (`find_partial`).

Nodes that no lease holds sit in LRU lists by class (see `lru.pxd`).  A child always stands before its ancestors there,
because an ancestor never ranks lower or expires earlier (see `cache_manager`), so the front is always a leaf and
eviction needs no search.

The table is open addressing with linear probing and backward-shift deletion: no tombstones, no rehash, sized once.
"""

cimport cython
from cython.operator cimport dereference as deref
from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy
from libcpp.pair cimport pair
from libcpp.string cimport string
from libcpp.unordered_map cimport unordered_map
from libcpp.vector cimport vector

from edgellm._core.block_hash cimport TokenChain, from_hash128, hash_equal, hash_text_block, to_hash128
from edgellm._core.expiry_heap cimport expires_before
from edgellm._core.lru cimport (
    CLASS_EXPIRED,
    CLASS_LOW,
    LIFETIME_TIMED,
    LIFETIME_UNSET,
    NUM_CLASSES,
    lru_append,
    lru_class,
    lru_clear,
    lru_front,
    lru_init,
    lru_links_agree,
    lru_next,
)
from edgellm._core.types cimport block_hash_t, node_id_t, token_t

import numpy as np

from edgellm._core.block_hash import CHAIN_ROOT as _CHAIN_ROOT
from edgellm.cache.types import RetentionPriority
from edgellm.errors import ContractViolation, InvalidArgumentError, InvariantError

DEFAULT_HASH_MASK = (1 << 128) - 1
cdef block_hash_t _ROOT = from_hash128(_CHAIN_ROOT)


# How many evictions are remembered at most; small enough to stay in a core's cache.
cdef uint64_t MAX_EVICTED_HASHES = 1 << 16


cdef uint64_t _table_size(int32_t capacity) noexcept nogil:
    """A power of two that keeps the table at most half full."""
    cdef uint64_t size = 64
    while size < 2 * <uint64_t>capacity:
        size *= 2
    return size


# Media of a range of tokens, in the form of `TokenChain.block_media`: offset in the range, hi, lo (u64 each)

cdef size_t _media_from(TokenChain chain, Py_ssize_t position) noexcept nogil:
    """Index of the chain's first media entry at or after `position`."""
    cdef size_t low = 0
    cdef size_t high = chain._media.size()
    cdef size_t middle
    while low < high:
        middle = (low + high) // 2
        if chain._media[middle].position < position:
            low = middle + 1
        else:
            high = middle
    return low


cdef Py_ssize_t text_length(TokenChain chain, Py_ssize_t first, Py_ssize_t limit) noexcept nogil:
    """How many tokens from `first` on are text, up to position `limit`; 0 when `limit` is not behind `first`."""
    cdef size_t i
    if limit <= first:
        return 0
    if chain.has_media:
        i = _media_from(chain, first)
        if i < chain._media.size() and chain._media[i].position < limit:
            return chain._media[i].position - first
    return limit - first


cdef bint media_range_equal(
    TokenChain chain, Py_ssize_t first, Py_ssize_t count, const string* stored
) noexcept nogil:
    """Whether the chain's tokens [first, first + count) have exactly the media that `media_range` once stored."""
    cdef size_t i = _media_from(chain, first)
    cdef size_t end = _media_from(chain, first + count)
    cdef const char* data = stored.data()
    cdef uint64_t words[3]
    if stored.size() != (end - i) * sizeof(words):
        return False
    while i < end:
        words[0] = <uint64_t>(chain._media[i].position - first)
        words[1] = chain._media[i].digest.hi
        words[2] = chain._media[i].digest.lo
        if memcmp(data, words, sizeof(words)) != 0:
            return False
        data += sizeof(words)
        i += 1
    return True


cdef int media_range(TokenChain chain, Py_ssize_t first, Py_ssize_t count, string* out) except -1:
    """Media of tokens [first, first + count) into `out`; empty for text."""
    cdef size_t i = _media_from(chain, first)
    cdef size_t end = _media_from(chain, first + count)
    cdef uint64_t words[3]
    out.clear()
    out.reserve((end - i) * sizeof(words))
    while i < end:
        words[0] = <uint64_t>(chain._media[i].position - first)
        words[1] = chain._media[i].digest.hi
        words[2] = chain._media[i].digest.lo
        out.append(<const char*>words, sizeof(words))
        i += 1
    return 0


cdef int _raise_not_listed(object page, bint want) except -1:
    raise InvalidArgumentError(f"page {page} is {'not ' if want else ''}evictable; "
                               f"{'unpin' if want else 'pin'} it first")


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
        self._nodes.resize(self.core.capacity)
        self._links.resize(<size_t>self.core.capacity + NUM_CLASSES)
        self._branches.resize(self.core.capacity)
        self._tokens.resize(<size_t>self.core.capacity * <size_t>self.core.page_size)
        self._table.resize(table_size)
        self.core.evicted_mask = min(table_size, MAX_EVICTED_HASHES) - 1
        self._evicted.resize(self.core.evicted_mask + 1)
        self._withheld.resize(self.core.evicted_mask + 1)
        self._expiries.resize(self.core.capacity)
        self._expiry_places.resize(self.core.capacity)
        self.core.nodes = self._nodes.data()
        self.core.branches = self._branches.data()
        self.core.tokens = self._tokens.data()
        self.core.table = self._table.data()
        self.core.evicted = self._evicted.data()
        self.core.withheld = self._withheld.data()
        self.core.expiries.entries = self._expiries.data()
        self.core.expiries.places = self._expiry_places.data()
        lru_init(&self.core.lru, self._links.data(), self.core.capacity)
        self.clear()

    cdef void clear(self) noexcept nogil:
        """Forget every node, namespace and media entry; the memory of evicted and withheld blocks stays."""
        cdef size_t i
        for i in range(self._nodes.size()):
            self._nodes[i].indexed = 0
            self._nodes[i].child_count = 0
            self._nodes[i].expiring = 0
        for i in range(self._table.size()):
            self._table[i].node = NO_NODE
        lru_clear(&self.core.lru)
        self.core.size = self.core.tail_count = self.core.expiries.size = 0
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
        fresh.child_count = fresh.record_count = 0
        fresh.first_child = fresh.first_tail = NO_NODE
        fresh.used = 1
        if self._unused_namespaces.empty():
            # Room on the unused list first: closing a namespace must not need memory.
            if self._unused_namespaces.capacity() <= self._namespaces.size():
                self._unused_namespaces.reserve(2 * self._namespaces.size() + 1)
            self._namespace_keys.push_back(string())
            self._namespaces.push_back(fresh)
            self._namespaces.back().used = 0
            self._unused_namespaces.push_back(<int32_t>self._namespaces.size() - 1)
        place = self._unused_namespaces.back()
        self._namespace_keys[place].assign(name)
        self._namespace_of.insert(pair[string, int32_t](name, place))
        self._unused_namespaces.pop_back()
        self._namespaces[place] = fresh
        return -2 - place

    cdef void close_namespace_if_empty(self, node_id_t root) noexcept nogil:
        """Forget a namespace that has no child, tail or record."""
        cdef int32_t place = -2 - root
        cdef namespace_t* space = &self._namespaces[place]
        if space.used and space.child_count == 0 and space.record_count == 0:
            space.used = 0
            self._namespace_of.erase(self._namespace_keys[place])
            self._unused_namespaces.push_back(place)

    # Media digests of blocks that have some

    cdef int32_t stage_media(self, TokenChain chain, Py_ssize_t block_idx) except? -1:
        """Keep a block's media bytes for a node that is about to be added; NO_MEDIA for a text block."""
        return self.stage_media_range(chain, block_idx * self.core.page_size, self.core.page_size)

    cdef int32_t stage_media_range(self, TokenChain chain, Py_ssize_t first, Py_ssize_t count) except? -1:
        """The same for tokens [first, first + count)."""
        cdef string data
        cdef int32_t place
        if text_length(chain, first, first + count) == count:
            return NO_MEDIA
        media_range(chain, first, count, &data)
        if self._unused_media.empty():
            if self._unused_media.capacity() <= self._media.size():
                self._unused_media.reserve(2 * self._media.size() + 1)
            self._media.push_back(data)
            return <int32_t>self._media.size() - 1
        place = self._unused_media.back()
        self._media[place].swap(data)
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
                media_range(chain, i * self.core.page_size, self.core.page_size, &media)
                node = self.find(parent, chain.hashes[i], chain.block_tokens(i), &media)
            else:
                node = self.find(parent, chain.hashes[i], chain.block_tokens(i), NULL)
            if node == NO_NODE:
                break
            out[i - first] = parent = node
            i += 1
        return i - first

    # Tokens of an unfilled block: siblings are compared one by one, a bounded number of them

    cdef int32_t common_length(self, node_id_t node, const token_t* tokens, int32_t limit) noexcept nogil:
        """How many leading tokens of a text node are the first of `tokens[:limit]`; 0 for a node with media."""
        cdef const token_t* own = self.core.tokens + <size_t>node * self.core.page_size
        cdef int32_t count = 0
        if self.core.nodes[node].media != NO_MEDIA:
            return 0
        if limit > self.core.branches[node].token_count:
            limit = self.core.branches[node].token_count
        while count < limit and own[count] == tokens[count]:
            count += 1
        return count

    cdef int32_t _collect(
        self, node_id_t node, const token_t* tokens, int32_t limit, partial_t* out, int32_t count
    ) noexcept nogil:
        """Append the matching nodes of one list to `out[:count]`; the new count."""
        cdef int32_t length
        cdef int32_t seen = 0
        while node != NO_NODE and seen < MAX_SIBLINGS:
            length = self.common_length(node, tokens, limit)
            if length > 0:
                out[count].node = node
                out[count].length = length
                count += 1
            node = self.core.branches[node].older
            seen += 1
        return count

    cdef int32_t partial_matches(
        self, node_id_t parent, const token_t* tokens, int32_t limit, partial_t* out
    ) noexcept nogil:
        """Children, then tails, of a node or root that begin like `tokens[:limit]`, newest first; text only.

        Args:
            limit: tokens to compare, at most page_size; all of them text.
            out: room for 2 * MAX_SIBLINGS.
        Returns:
            How many were written; each has one token or more in common.
        """
        cdef int32_t count = 0
        if parent == NO_NODE or limit <= 0:
            return 0
        count = self._collect(self.first_child(parent), tokens, limit, out, count)
        return self._collect(self.first_tail(parent), tokens, limit, out, count)

    cdef partial_t find_partial(
        self, TokenChain chain, node_id_t parent, Py_ssize_t first_token, Py_ssize_t limit
    ) noexcept nogil:
        """The child or tail that has most leading tokens in common with the chain from `first_token` on.

        Args:
            parent: node of the block in front, or the namespace root; NO_NODE finds nothing.
            limit: token position to stop at, at most the chain's length.
        Returns:
            Node and common length; NO_NODE and 0 without one.  Of equal lengths: children first, the newest first.
        """
        cdef partial_t found[2 * MAX_SIBLINGS]
        cdef partial_t best
        cdef Py_ssize_t length = text_length(chain, first_token, min(limit, first_token + self.core.page_size))
        cdef int32_t count = self.partial_matches(parent, chain.tokens.data() + first_token, <int32_t>length, found)
        cdef int32_t i
        best.node = NO_NODE
        best.length = 0
        for i in range(count):
            if found[i].length > best.length:
                best = found[i]
        return best

    cdef node_id_t find_cover(self, node_id_t parent, const token_t* tokens, int32_t count) noexcept nogil:
        """A child or tail that starts with all of these text tokens, or NO_NODE: keeping them again is useless."""
        cdef partial_t found[2 * MAX_SIBLINGS]
        cdef int32_t matches = self.partial_matches(parent, tokens, count, found)
        cdef int32_t i
        for i in range(matches):
            if found[i].length == count:
                return found[i].node
        return NO_NODE

    cdef node_id_t find_prefix_tail(self, node_id_t parent, const token_t* tokens, int32_t count) noexcept nogil:
        """A listed tail of fewer than `count` tokens that are the first of `tokens`, or NO_NODE.

        Once `tokens` are indexed below `parent` such a tail serves nobody.
        """
        cdef node_id_t node = NO_NODE if parent == NO_NODE else self.first_tail(parent)
        cdef int32_t seen = 0
        cdef int32_t length
        while node != NO_NODE and seen < MAX_SIBLINGS:
            length = self.core.branches[node].token_count
            if length < count and is_listed(&self.core, node) and self.common_length(node, tokens, count) == length:
                return node
            node = self.core.branches[node].older
            seen += 1
        return NO_NODE

    cdef void path_into(self, node_id_t node, node_id_t* out) noexcept nogil:
        """The nodes from the first block down to `node`, as many as its depth."""
        cdef int32_t i = self.core.branches[node].depth
        while i > 0:
            i -= 1
            out[i] = node
            node = self.core.nodes[node].parent

    # Moves that cannot fail

    cdef void _attach(self, node_id_t node, node_id_t parent, int32_t count, int32_t media) noexcept nogil:
        """Make an unindexed page the newest child or tail of `parent`; unlisted, with nobody's retention yet."""
        cdef node_t* entry = &self._nodes[node]
        cdef branch_t* branch = &self._branches[node]
        cdef node_id_t* head
        entry.parent = parent
        entry.media = media
        entry.child_count = 0
        entry.indexed = 1
        entry.priority = 0
        entry.lifetime = LIFETIME_UNSET
        branch.token_count = count
        branch.first_child = branch.first_tail = branch.newer = NO_NODE
        branch.volatile_from = NO_VOLATILE
        if parent >= 0:
            self._nodes[parent].child_count += 1
            branch.depth = self._branches[parent].depth + 1
            head = &self._branches[parent].first_child
            if count != self.core.page_size:
                head = &self._branches[parent].first_tail
        else:
            self._namespaces[-2 - parent].child_count += 1
            branch.depth = 1
            head = &self._namespaces[-2 - parent].first_child
            if count != self.core.page_size:
                head = &self._namespaces[-2 - parent].first_tail
        branch.older = head[0]
        if head[0] != NO_NODE:
            self._branches[head[0]].newer = node
        head[0] = node
        self.core.size += 1

    cdef void _detach(self, node_id_t node) noexcept nogil:
        """Undo `_attach`; closes a namespace that was left empty."""
        cdef node_t* entry = &self._nodes[node]
        cdef branch_t* branch = &self._branches[node]
        cdef node_id_t parent = entry.parent
        if branch.older != NO_NODE:
            self._branches[branch.older].newer = branch.newer
        if branch.newer != NO_NODE:
            self._branches[branch.newer].older = branch.older
        elif parent >= 0:
            if is_tail(&self.core, node):
                self._branches[parent].first_tail = branch.older
            else:
                self._branches[parent].first_child = branch.older
        elif is_tail(&self.core, node):
            self._namespaces[-2 - parent].first_tail = branch.older
        else:
            self._namespaces[-2 - parent].first_child = branch.older
        entry.indexed = 0
        self.drop_media(entry.media)
        entry.media = NO_MEDIA
        self.core.size -= 1
        if parent >= 0:
            self._nodes[parent].child_count -= 1
        else:
            self._namespaces[-2 - parent].child_count -= 1
            self.close_namespace_if_empty(parent)

    cdef void add(
        self, node_id_t node, node_id_t parent, block_hash_t value, const token_t* tokens, int32_t media
    ) noexcept nogil:
        """Index page `node` as a full block below `parent`; unlisted.  The caller knows that it is new there."""
        cdef uint64_t place = value.lo & self.core.mask_lo & self.core.table_mask
        while self._table[place].node != NO_NODE:
            place = (place + 1) & self.core.table_mask
        self._table[place].tag = <uint32_t>(value.lo & self.core.mask_lo)
        self._table[place].node = node
        self._nodes[node].hash = value
        memcpy(self.core.tokens + <size_t>node * self.core.page_size, tokens,
               <size_t>self.core.page_size * sizeof(token_t))
        self._attach(node, parent, self.core.page_size, media)

    cdef void add_tail(
        self, node_id_t node, node_id_t parent, const token_t* tokens, int32_t count, int32_t media
    ) noexcept nogil:
        """Index page `node` as a tail of 0 < count < page_size tokens below `parent`; unlisted."""
        self._nodes[node].hash.hi = 0
        self._nodes[node].hash.lo = 0
        memcpy(self.core.tokens + <size_t>node * self.core.page_size, tokens, <size_t>count * sizeof(token_t))
        self.core.tail_count += 1
        self._attach(node, parent, count, media)

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
        """Take an unlisted leaf out of the tree; the hash of a full block is remembered as evicted."""
        cdef uint64_t lo = self._nodes[node].hash.lo
        cdef uint64_t place = lo & self.core.evicted_mask
        if is_tail(&self.core, node):
            self.core.tail_count -= 1
        else:
            self._erase_bucket(node)
            self._evicted[place] = lo
            if self.core.any_withheld and self._withheld[place] == lo:
                self._withheld[place] = 0
        self._detach(node)

    cdef node_id_t demote_next(self, int64_t now) noexcept nogil:
        """Tell the time, and move the next listed node whose time is over to the EXPIRED class.

        Call it until it returns NO_NODE.  Of equal expiries the deeper block goes first, so that children keep standing
        in front of their ancestors.  A time before the last one told counts as that.
        """
        cdef node_id_t node
        if now > self.core.now:
            self.core.now = now
        if self.core.expiries.size == 0 or self.core.expiries.entries[0].expiry > self.core.now:
            return NO_NODE
        node = self.core.expiries.entries[0].item
        unlist_node(&self.core, node)
        lru_append(&self.core.lru, node, CLASS_EXPIRED)
        return node

    cdef void note_withheld(self, block_hash_t value) noexcept nogil:
        """Remember that a block was computed but not published by policy."""
        cdef uint64_t place = value.lo & self.core.evicted_mask
        self._withheld[place] = value.lo
        self.core.any_withheld = True
        if self._evicted[place] == value.lo:
            self._evicted[place] = 0

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
        """Indexed blocks, tails included."""
        return self.core.size

    @property
    def tail_count(self):
        """Indexed tails: unfilled last blocks."""
        return self.core.tail_count

    @property
    def lru_size(self):
        """Indexed blocks that no lease holds: what eviction can take."""
        return self.core.lru.size

    @property
    def class_sizes(self):
        """Evictable blocks by class: expired, superseded, low, normal, high priority."""
        return tuple(self.core.lru.sizes[i] for i in range(NUM_CLASSES))

    @property
    def now(self):
        """The latest time told, ns."""
        return self.core.now

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

    cdef node_id_t _checked_parent(self, TokenChain chain, Py_ssize_t block_idx) except? -1:
        """Node of block `block_idx - 1`, or the namespace root, NO_NODE when that is not open; raises on a gap."""
        cdef list path = self.lookup_prefix(chain)
        if not 0 <= block_idx <= len(path):
            raise InvalidArgumentError(
                f"block {block_idx} needs its {block_idx} leading blocks; {len(path)} are indexed")
        return path[block_idx - 1] if block_idx else self.find_namespace(chain.key_bytes)

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

    def insert_tail(self, TokenChain chain not None, page):
        """Index the tokens after the chain's last full block as a tail; all of its full blocks must be indexed.

        Raises:
            InvalidArgumentError: bad page, no such tokens, or a full block is missing.  Nothing was changed.
        """
        self._check_mutable()
        cdef node_id_t node = self._checked(page)
        cdef Py_ssize_t first = chain.block_count() * self.core.page_size
        cdef Py_ssize_t count = chain.token_count() - first
        cdef int32_t media
        cdef node_id_t parent = self._checked_parent(chain, chain.block_count())
        if count == 0:
            raise InvalidArgumentError(f"the chain of {chain.token_count()} tokens ends with a full block; no tail")
        if self._nodes[node].indexed:
            raise InvalidArgumentError(f"page {page} is indexed as another block; erase it first")
        media = self.stage_media_range(chain, first, count)
        if first == 0:
            parent = self.open_namespace(chain.key_bytes)
        self.add_tail(node, parent, chain.tokens.data() + first, <int32_t>count, media)

    def pin_page(self, page):
        """Somebody holds an evictable block: it leaves the eviction order.

        Raises:
            InvalidArgumentError: it is not evictable.
        """
        self._check_mutable()
        cdef node_id_t node = self._checked(page)
        if not is_listed(&self.core, node):
            _raise_not_listed(page, True)
        unlist_node(&self.core, node)

    def unpin_page(self, page, *, priority=RetentionPriority.NORMAL, expiry=0):
        """Nobody holds a block any more: make it evictable, keeping it at least as long as asked.

        Args:
            priority: `RetentionPriority`; the highest one ever asked for counts.
            expiry: ns of the clock of `set_now`, the latest counts; 0 is never.
        Raises:
            InvalidArgumentError: not indexed, evictable already, or a bad value.
        """
        self._check_mutable()
        cdef node_id_t node = self._checked(page)
        cdef int64_t until = expiry
        if not self._nodes[node].indexed or until < 0:
            raise InvalidArgumentError(f"page {page} must be indexed and its expiry {expiry} 0 or more")
        if is_listed(&self.core, node):
            _raise_not_listed(page, False)
        raise_retention(&self.core, node, RetentionPriority(priority), until)
        list_node(&self.core, node)

    def set_now(self, now):
        """Tell the time in ns; evictable blocks that expired go before all others.

        Returns:
            Their pages, in that order.
        """
        self._check_mutable()
        demoted = []
        cdef node_id_t node = self.demote_next(now)
        while node != NO_NODE:
            demoted.append(node)
            node = self.demote_next(now)
        return demoted

    def set_volatile_from(self, page, offset):
        """Mark the tokens of an indexed block from `offset` on as belonging to a volatile template tail; -1: none."""
        self._check_mutable()
        cdef node_id_t node = self._checked(page)
        if not self._nodes[node].indexed or not -1 <= offset < self._branches[node].token_count:
            raise InvalidArgumentError(f"page {page} must be indexed and offset {offset} inside its block, or -1")
        self._branches[node].volatile_from = offset

    def hold_namespace(self, TokenChain chain not None):
        """A record hangs at the root of the chain's namespace, which is opened when missing."""
        self._check_mutable()
        self.hold_root(self.open_namespace(chain.key_bytes))

    def drop_namespace(self, TokenChain chain not None):
        """Undo one `hold_namespace`."""
        self._check_mutable()
        cdef node_id_t root = self.find_namespace(chain.key_bytes)
        if root == NO_NODE or self._namespaces[-2 - root].record_count == 0:
            raise InvalidArgumentError("no record holds this namespace")
        self.drop_root(root)

    def remember_withheld(self, value):
        """Remember that the block with this `Hash128` was computed but not published by policy."""
        self._check_mutable()
        self.note_withheld(from_hash128(value))

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
        if is_listed(&self.core, node):
            unlist_node(&self.core, node)
        self.remove(node)

    def partial_match(self, TokenChain chain not None, block_idx, limit=None):
        """Where the chain goes on after `block_idx` leading blocks, token by token.

        Args:
            block_idx: leading blocks, all of them indexed.
            limit: token position to stop at; None is the end of the chain.
        Returns:
            `(page, tokens in common)` of the best child or tail, or None.
        Raises:
            InvalidArgumentError: a leading block is missing, or a limit outside the chain.
        """
        cdef Py_ssize_t end = chain.token_count() if limit is None else limit
        cdef node_id_t parent = self._checked_parent(chain, block_idx)
        if not 0 <= end <= chain.token_count():
            raise InvalidArgumentError(f"limit {limit} is outside the chain of {chain.token_count()} tokens")
        cdef partial_t best = self.find_partial(chain, parent, <Py_ssize_t>block_idx * self.core.page_size, end)
        return (best.node, best.length) if best.node != NO_NODE else None

    def partial_candidates(self, TokenChain chain not None, block_idx):
        """All `(page, tokens in common)` of `partial_match`: children, then tails, newest first (a new list)."""
        cdef partial_t found[2 * MAX_SIBLINGS]
        cdef node_id_t parent = self._checked_parent(chain, block_idx)
        cdef Py_ssize_t first = <Py_ssize_t>block_idx * self.core.page_size
        cdef Py_ssize_t length = text_length(chain, first, min(chain.token_count(), first + self.core.page_size))
        cdef int32_t count = self.partial_matches(parent, chain.tokens.data() + first, <int32_t>length, found)
        return [(found[i].node, found[i].length) for i in range(count)]

    def cover_of(self, TokenChain chain not None):
        """Page of a block that starts with all tokens after the chain's last full block, or None; text only."""
        cdef node_id_t parent = self._checked_parent(chain, chain.block_count())
        cdef Py_ssize_t first = chain.block_count() * self.core.page_size
        cdef Py_ssize_t count = chain.token_count() - first
        cdef node_id_t node = NO_NODE
        if count > 0 and text_length(chain, first, first + count) == count:
            node = self.find_cover(parent, chain.tokens.data() + first, <int32_t>count)
        return None if node == NO_NODE else node

    def prefix_tail_of(self, TokenChain chain not None, block_idx):
        """Page of an evictable tail that is a proper prefix of the chain's tokens in block `block_idx`, or None."""
        cdef node_id_t parent = self._checked_parent(chain, block_idx)
        cdef Py_ssize_t first = <Py_ssize_t>block_idx * self.core.page_size
        cdef Py_ssize_t count = text_length(chain, first, min(chain.token_count(), first + self.core.page_size))
        cdef node_id_t node = self.find_prefix_tail(parent, chain.tokens.data() + first, <int32_t>count)
        return None if node == NO_NODE else node

    def hash_of(self, page):
        """The hash a page is indexed under, or None; a tail has none."""
        cdef node_id_t node = self._checked(page)
        if not self._nodes[node].indexed or is_tail(&self.core, node):
            return None
        return to_hash128(self._nodes[node].hash)

    def parent_of(self, page):
        """Page of the parent block, or None for a first block or an unknown page."""
        cdef node_id_t node = self._checked(page)
        return self._nodes[node].parent if self._nodes[node].indexed and self._nodes[node].parent >= 0 else None

    def child_count(self, page):
        """Full children and tails."""
        return self._nodes[self._checked(page)].child_count

    cdef list _siblings(self, node_id_t node):
        out = []
        while node != NO_NODE:
            out.append(node)
            node = self._branches[node].older
        return out

    cdef node_id_t _checked_node(self, object parent) except? -1:
        """A page, or a chain for the root of its namespace; NO_NODE when that is not in the tree."""
        if isinstance(parent, TokenChain):
            return self.find_namespace((<TokenChain>parent).key_bytes)
        cdef node_id_t node = self._checked(parent)
        return node if self._nodes[node].indexed else NO_NODE

    def children_of(self, parent):
        """Pages of the full children of a page, or of the root of a chain's namespace, newest first (a new list)."""
        cdef node_id_t node = self._checked_node(parent)
        return [] if node == NO_NODE else self._siblings(self.first_child(node))

    def tails_of(self, parent):
        """Pages of the tails of a page, or of the root of a chain's namespace, newest first (a new list)."""
        cdef node_id_t node = self._checked_node(parent)
        return [] if node == NO_NODE else self._siblings(self.first_tail(node))

    def token_count_of(self, page):
        """Tokens an indexed block holds (fewer than page_size: a tail), or None."""
        cdef node_id_t node = self._checked(page)
        return self._branches[node].token_count if self._nodes[node].indexed else None

    def depth_of(self, page):
        """Blocks from the first one to this one, both included, or None."""
        cdef node_id_t node = self._checked(page)
        return self._branches[node].depth if self._nodes[node].indexed else None

    def priority_of(self, page):
        """`RetentionPriority` of an indexed block, or None."""
        cdef node_id_t node = self._checked(page)
        return RetentionPriority(self._nodes[node].priority) if self._nodes[node].indexed else None

    def expiry_of(self, page):
        """When an indexed block expires, ns; 0 is never; None when unknown or nobody has asked yet."""
        cdef node_id_t node = self._checked(page)
        if not self._nodes[node].indexed or self._nodes[node].lifetime == LIFETIME_UNSET:
            return None
        return self._branches[node].expiry if self._nodes[node].lifetime == LIFETIME_TIMED else 0

    def class_of(self, page):
        """Class of an evictable block (0 expired, 1 superseded, 2 low, 3 normal, 4 high), or None for a held one."""
        cdef node_id_t node = self._checked(page)
        return lru_class(&self.core.lru, node) if is_listed(&self.core, node) else None

    def volatile_from_of(self, page):
        """First place in an indexed block that belongs to a volatile template tail, or None."""
        cdef node_id_t node = self._checked(page)
        if not self._nodes[node].indexed or self._branches[node].volatile_from == NO_VOLATILE:
            return None
        return self._branches[node].volatile_from

    def tokens_of(self, page):
        """Copy of an indexed block's token ids, (token_count,) int32, or None."""
        cdef node_id_t node = self._checked(page)
        if not self._nodes[node].indexed:
            return None
        cdef size_t first = <size_t>node * self.core.page_size
        return np.array([self._tokens[first + i] for i in range(self._branches[node].token_count)], dtype=np.int32)

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

    def withheld(self, value):
        """Whether a block with this `Hash128` was computed but not published, as far as the memory reaches."""
        return bool(self.was_withheld(from_hash128(value)))

    def eviction_order(self):
        """Pages that no lease holds, next victim first, lowest class first (a new list)."""
        cdef node_id_t node = lru_front(&self.core.lru)
        order = []
        while node >= 0:
            order.append(node)
            node = lru_next(&self.core.lru, node)
        return order

    # Recount

    def check_invariants(self):
        """Recount the tree.

        Raises:
            InvariantError: table, tree, lists, namespaces and eviction order do not describe the same nodes.
        Cost: O(capacity + table).
        """
        nodes = [n for n in range(self.core.capacity) if self._nodes[n].indexed]
        full = [n for n in nodes if not is_tail(&self.core, n)]
        in_table = sorted(self._table[i].node for i in range(self._table.size()) if self._table[i].node != NO_NODE)
        if full != in_table or len(nodes) != self.core.size or len(nodes) - len(full) != self.core.tail_count:
            raise InvariantError(
                f"nodes {nodes}, full ones {full}, table {in_table}, size {self.core.size} and "
                f"{self.core.tail_count} tails disagree")
        self._check_lists(nodes)
        for node in nodes:
            self._check_node(node)
        self._check_media(nodes)
        self._check_lru(nodes)
        self._check_expiries()

    cdef block_hash_t text_hash(self, node_id_t parent, const token_t* tokens, Py_ssize_t count) noexcept nogil:
        """The hash of `count` text tokens behind `parent`, made anew; that of `parent` itself for no token."""
        cdef node_id_t root = parent
        cdef int32_t steps = 0
        cdef block_hash_t above
        cdef const string* key
        above = _ROOT
        if parent >= 0:
            above = self._nodes[parent].hash
        if count == 0:
            return above
        while root >= 0 and steps <= self.core.size:
            root = self._nodes[root].parent
            steps += 1
        if root >= NO_NODE:
            return above        # a cycle, which leads to no namespace
        key = &self._namespace_keys[-2 - root]
        return hash_text_block(above, tokens, count, <const uint64_t*>key.data(), key.size() // sizeof(uint64_t))

    cdef int _check_node(self, node_id_t node) except -1:
        """A node is found by its own content, below an indexed parent that has children of this depth."""
        cdef node_t* entry = &self._nodes[node]
        cdef const string* media = NULL
        cdef int32_t above = 0
        if entry.media != NO_MEDIA:
            media = &self._media[entry.media]
        if not 0 < self._branches[node].token_count <= self.core.page_size:
            raise InvariantError(f"block of page {node} has {self._branches[node].token_count} tokens")
        if is_tail(&self.core, node):
            if entry.child_count:
                raise InvariantError(f"tail {node} has {entry.child_count} children")
        elif self.find(entry.parent, entry.hash, &self._tokens[<size_t>node * self.core.page_size], media) != node:
            raise InvariantError(f"block of page {node} is not found by its own content")
        if entry.parent >= 0:
            above = self._branches[entry.parent].depth
            if not self._nodes[entry.parent].indexed or is_tail(&self.core, entry.parent):
                raise InvariantError(f"parent {entry.parent} of page {node} is not an indexed full block")
        if self._branches[node].depth != above + 1:
            raise InvariantError(f"page {node} has depth {self._branches[node].depth} below one of {above}")
        if not -1 <= self._branches[node].volatile_from < self._branches[node].token_count:
            raise InvariantError(f"page {node} is volatile from {self._branches[node].volatile_from}")
        if not is_tail(&self.core, node) and entry.media == NO_MEDIA and not hash_equal(entry.hash, self.text_hash(
                entry.parent, &self._tokens[<size_t>node * self.core.page_size], self.core.page_size)):
            raise InvariantError(f"the hash of page {node} is not that of its tokens")
        return 0

    def _check_lists(self, nodes):
        """Lists of children and tails, their counts, and namespaces: every node is in the one list it belongs to."""
        cdef node_id_t parent
        cdef node_id_t node
        roots = [-2 - i for i in range(<Py_ssize_t>self._namespaces.size()) if self._namespaces[i].used]
        if len(roots) != <Py_ssize_t>self._namespace_of.size() or any(
                self.find_namespace(self._namespace_keys[-2 - <node_id_t>root]) != root for root in roots):
            raise InvariantError(f"namespaces {roots} in use, {self._namespace_of.size()} in the map, or other ones")
        places = [-2 - root for root in roots] + list(self._unused_namespaces)
        if sorted(places) != list(range(<Py_ssize_t>self._namespaces.size())):
            raise InvariantError(f"namespaces in use and unused are not {self._namespaces.size()} places: {places}")
        seen = []
        for parent in [*roots, *nodes]:
            children = self._siblings(self.first_child(parent))
            tails = self._siblings(self.first_tail(parent))
            siblings = children + tails
            for i, node in enumerate(siblings):
                newer = NO_NODE if i in (0, len(children)) else siblings[i - 1]
                if (self._nodes[node].parent != parent or is_tail(&self.core, node) != (i >= len(children))
                        or self._branches[node].newer != newer):
                    raise InvariantError(f"node {node} is in a list of {parent} where it does not belong")
            if len(siblings) != self.child_count_of(parent):
                raise InvariantError(f"{parent} counts {self.child_count_of(parent)} children, not {len(siblings)}")
            if parent < 0 and not siblings and self._namespaces[-2 - parent].record_count == 0:
                raise InvariantError(f"namespace {parent} is empty but open")
            seen += siblings
        if sorted(seen) != nodes:
            raise InvariantError(f"nodes {nodes}, but the lists of children and tails hold {sorted(seen)}")

    def _check_media(self, nodes):
        """Every kept media entry belongs to one node, the others are unused."""
        kept = sorted(self._nodes[n].media for n in nodes if self._nodes[n].media != NO_MEDIA)
        unused = list(self._unused_media)
        if sorted(kept + unused) != list(range(<Py_ssize_t>self._media.size())):
            raise InvariantError(f"media places {kept} in use and {unused} unused are not {self._media.size()} places")

    def _check_lru(self, nodes):
        """Evictable nodes stand once each in the class they belong to, every child in front of its parent."""
        if not lru_links_agree(&self.core.lru):
            raise InvariantError("the eviction order does not lead back the way it leads on")
        order = self.eviction_order()
        place = {n: i for i, n in enumerate(order)}
        if len(place) != len(order) or len(order) != self.core.lru.size or not place.keys() <= set(nodes):
            raise InvariantError(f"eviction order {order} is not a set of {self.core.lru.size} indexed pages")
        classes = [self.class_of(n) for n in order]
        if None in classes or classes != sorted(classes) or tuple(map(classes.count, range(NUM_CLASSES))) != (
                self.class_sizes):
            raise InvariantError(f"eviction order {order} has classes {classes}, counted {self.class_sizes}")
        for n in range(self.core.capacity):
            if is_listed(&self.core, n) != (n in place):
                raise InvariantError(f"page {n} is marked as evictable {is_listed(&self.core, n)}, wrongly")
        for node in nodes:
            parent = self._nodes[node].parent
            if parent in place and (node not in place or place[node] > place[parent]):
                raise InvariantError(f"page {parent} may be evicted before its child {node}")

    def _check_expiries(self):
        """The heap holds exactly the evictable nodes that will expire; those that did are in class 0."""
        cdef node_id_t node
        cdef node_t* entry
        held = {self._expiries[i].item: i for i in range(self.core.expiries.size)}
        for node in range(self.core.capacity):
            entry = &self._nodes[node]
            timed = is_listed(&self.core, node) and entry.lifetime == LIFETIME_TIMED
            over = timed and self._branches[node].expiry <= self.core.now
            if bool(entry.expiring) != (node in held) or bool(entry.expiring) != (timed and not over):
                raise InvariantError(f"page {node} (timed {timed}, over {over}) has the wrong place among the expiries")
            cls = lru_class(&self.core.lru, node)
            if over != (cls == CLASS_EXPIRED) or (
                    is_listed(&self.core, node) and not over and cls != CLASS_LOW + entry.priority):
                raise InvariantError(f"page {node} of priority {entry.priority} has class {cls}, over {over}")
            if node in held and (self._expiry_places[node] != held[node]
                                 or self._expiries[held[node]].expiry != self._branches[node].expiry
                                 or self._expiries[held[node]].rank != self._branches[node].depth):
                raise InvariantError(f"page {node} expires at another time than the heap says")
        for i in range(1, self.core.expiries.size):
            if expires_before(&self._expiries[i], &self._expiries[(i - 1) // 2]):
                raise InvariantError(f"expiry at place {i} is before that of its parent")
