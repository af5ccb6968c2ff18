"""The context-cache manager: the only component that changes pools, index and records, always as a transaction.

Every operation first does all that can fail (checks, room in vectors, a new namespace or record), then changes state
by moves that cannot fail.  A refusal or an exception therefore leaves everything as it was.

How the tree stays evictable in O(1).  The leading pages of a lease, as many as it has published blocks, are the pages
of a root-contiguous path of nodes: blocks it shares and blocks it published.  Where another sequence published a block
first, the lease takes over that canonical page and gives its own copy back, so equal content is held once.  A held
node therefore has held ancestors.  Release lets go of the deepest block first and each node that nobody holds any more
goes to the MRU end of one list; so a child always stands before its ancestors, and the front is always a leaf.
"""

cimport cython
from cpython.ref cimport PyObject
from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.string cimport memcpy
from libcpp.vector cimport vector

from edgellm._core.block_hash cimport TokenChain, hash_equal
from edgellm._core.block_index cimport (
    NO_MEDIA,
    NO_NODE,
    PREFETCH_BLOCKS,
    BlockIndex,
    lru_append,
    lru_front,
    lru_unlink,
    prefetch_bucket,
)
from edgellm._core.page_ledger cimport (
    ResourcePools,
    pool_add_cache,
    pool_drop_cache,
    pool_pin,
    pool_take,
    pool_unpin,
)
from edgellm._core.planners cimport ReusePlan, make_vanilla_plan
from edgellm._core.records cimport NO_RECORD, RecordStore, record_t
from edgellm._core.types cimport node_id_t, page_id_t

import numpy as np

from edgellm._core.block_index import DEFAULT_HASH_MASK as _DEFAULT_HASH_MASK
from edgellm.cache.types import (
    AcquireStatus,
    CacheRecord,
    ContextCacheLookupPolicy,
    ContextCacheManagerMetrics,
    PublishStatus,
    SpecReuseContract,
)
from edgellm.errors import ContractViolation, InvalidArgumentError, InvariantError

cdef object _USE_CACHE = ContextCacheLookupPolicy.USE_CACHE
cdef object _ACQUIRED = AcquireStatus.ACQUIRED
cdef object _INSUFFICIENT = AcquireStatus.INSUFFICIENT_CAPACITY
cdef object _PUBLISHED = PublishStatus.PUBLISHED
cdef object _EXISTING = PublishStatus.EXISTING_RECORD

cdef enum:
    STEP_PAGES = 1
    STEP_PATH = 2
    STEP_MEDIA = 3
    STEP_NAMESPACE = 4
    STEP_RECORD = 5

_STEP_NAMES = {"pages": STEP_PAGES, "path": STEP_PATH, "media": STEP_MEDIA, "namespace": STEP_NAMESPACE,
               "record": STEP_RECORD}


cdef int _raise_lease(str problem) except -1:
    raise InvalidArgumentError(f"the lease {problem}; nothing was changed")


cdef int _raise_page_size(Py_ssize_t chain, Py_ssize_t cache) except -1:
    raise InvalidArgumentError(f"the chain has page size {chain}, the cache {cache}; make them equal")


cdef int _raise_other_prefix(Py_ssize_t count) except -1:
    raise InvalidArgumentError(
        f"the chain differs from the lease within its first {count} published blocks; pass the chain the lease was "
        "acquired for")


cdef inline int _make_room(vector[page_id_t]* items, size_t count) except -1:
    """Capacity for `count` items, growing by doubling, so that later push_backs cannot fail."""
    if items.capacity() < count:
        items.reserve(max(count, 2 * items.capacity()))
    return 0


cdef object _as_array(const vector[page_id_t]* items):
    """A copy as (n,) int32."""
    out = np.empty(<Py_ssize_t>items.size(), dtype=np.int32)
    cdef int32_t[::1] view = out
    if items.size():
        memcpy(&view[0], items.data(), items.size() * sizeof(int32_t))
    return out


@cython.final
@cython.no_gc
cdef class CacheRequestLease:
    """The right of one sequence to its pages.  Made by the manager only.

    Pages before `shared_block_count` belong to others as well and must never be written.  `release()` gives everything
    back exactly once; a lease that is dropped unreleased gives itself back, but nothing should depend on that.

    Attributes:
        manager: the manager that made it.
        shared_block_count: leading blocks whose pages came from the cache before they were computed here.
        published_block_count: leading blocks that are in the index; their pages are those of the index.
        rebound_page_count: pages that were replaced by canonical ones so far.  When it moved, the page-table row of
            the sequence must be written again, before its next step.
        valid: False once released.
    """

    def __init__(self):
        raise ContractViolation("leases are made by ContextCacheManager.acquire")

    def __dealloc__(self):
        if self.valid:
            self.manager.release_lease(self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.release()

    def release(self):
        """Drop every reference the lease holds; a second call does nothing."""
        if self.valid:
            self.manager.release_lease(self)

    @property
    def mode(self):
        return "vanilla"

    @property
    def num_base_pages(self):
        return <Py_ssize_t>self.pages.size()

    @property
    def base_pages(self):
        """(pages,) int32, logical order; a copy.  What the page-table row of the sequence holds."""
        return _as_array(&self.pages)


@cython.final
cdef class AcquireResult:
    """Attributes: lease (None when refused), status (`AcquireStatus`), plan."""


@cython.final
cdef class PublishResult:
    """What a publication did.

    Attributes:
        status: `PublishStatus`.
        record: id of the endpoint's record, or None when none was asked for or kept.
        published_block_count: leading blocks of the lease that the index knows now.
        new_block_count: how many of them this call added.
    """


@cython.final
cdef class ContextCacheManager:
    """Pools, block tree and records of one cache, with the vanilla operations.  Single writer; not thread safe.

    Args:
        page_size: tokens per page, 1 or more.
        capacities: `ResourceDemand` with the size of each pool.
        max_records: most endpoint records; None bounds them by pages only, 0 retains nothing.
        spec_reuse_contract: kept for the speculative flavour; vanilla requests ignore it.
        hash_mask: 128-bit mask on the hashes the index sees; for tests.
    Raises:
        InvalidArgumentError: a size is out of range.
    """

    def __cinit__(
        self, page_size, capacities, *, max_records=None, spec_reuse_contract=None, hash_mask=_DEFAULT_HASH_MASK
    ):
        if spec_reuse_contract is not None and not isinstance(spec_reuse_contract, SpecReuseContract):
            raise InvalidArgumentError(
                f"spec_reuse_contract {spec_reuse_contract!r} must be a SpecReuseContract or None")
        self.pools = ResourcePools(capacities)
        self.index = BlockIndex(page_size, capacities.base_kv_pages, hash_mask)
        self.records = RecordStore(max_records)
        self.records.reserve_nodes(capacities.base_kv_pages)
        self.pools.seal()
        self.index.sealed = True
        self.records.sealed = True
        self.page_size = page_size
        self.spec_reuse_contract = spec_reuse_contract
        self.base = &self.pools.base.core
        self.tree = &self.index.core

    # Checks

    cdef int check_lease(self, CacheRequestLease lease) except -1:
        if lease is None or not lease.valid:
            _raise_lease("is not valid any more (released)")
        if lease.manager is not self:
            _raise_lease("belongs to another manager")
        return 0

    cdef int check_chain(self, TokenChain chain) except -1:
        if chain is None:
            raise InvalidArgumentError("a TokenChain is needed, got None")
        if chain.page_size != self.page_size:
            _raise_page_size(chain.page_size, self.page_size)
        return 0

    cdef int check_overlap(self, CacheRequestLease lease, TokenChain chain, Py_ssize_t count) except -1:
        """The first `count` blocks of lease and chain are the same: a chained hash speaks for its whole prefix."""
        if count > 0 and (chain.block_count() < count or not hash_equal(
                self.tree.nodes[lease.pages[count - 1]].hash, chain.hashes[count - 1])):
            _raise_other_prefix(count)
        return 0

    cdef int step(self, int which) except -1:
        """A named point of preparation; a test may make it fail once."""
        if self.fault == which:
            self.fault = 0
            raise MemoryError("injected fault")
        return 0

    def _inject_fault(self, name):
        """Make the preparation step `name` raise MemoryError the next time it is passed.  For tests."""
        self.fault = _STEP_NAMES[name]

    # Moves that cannot fail

    cdef void pin(self, page_id_t page) noexcept nogil:
        """One more active reference; a node that was evictable leaves the LRU list."""
        if self.base.active[page] == 0:
            lru_unlink(self.tree, page)
        pool_pin(self.base, page)

    cdef void unpin(self, page_id_t page) noexcept nogil:
        """One active reference less; the last one makes an indexed page evictable and any other page free."""
        if pool_unpin(self.base, page) and self.tree.nodes[page].indexed:
            lru_append(self.tree, page)

    cdef void evict_node(self, node_id_t node) noexcept nogil:
        """Drop an unpinned leaf with its records; its page becomes free."""
        lru_unlink(self.tree, node)
        self.evicted_records += self.records.erase_node(node)
        self.index.remove(node)
        pool_drop_cache(self.base, node)
        self.reclaimed_base_pages += 1

    cdef void take_pages(self, vector[page_id_t]* out, Py_ssize_t count) noexcept nogil:
        """Append `count` pages to `out`, evicting what is missing; feasibility and room are the caller's business."""
        cdef node_id_t ahead = lru_front(self.tree)
        cdef Py_ssize_t _i
        if self.base.free_count < count:
            # Victims lie all over the table: ask for their entries some steps early.
            for _i in range(PREFETCH_BLOCKS):
                prefetch_bucket(self.tree, self.tree.nodes[ahead].hash)
                ahead = self.tree.nodes[ahead].lru_next
        while self.base.free_count < count:
            prefetch_bucket(self.tree, self.tree.nodes[ahead].hash)
            ahead = self.tree.nodes[ahead].lru_next
            self.evict_node(lru_front(self.tree))
        while count > 0:
            out.push_back(pool_take(self.base))
            count -= 1

    # Acquire and release

    def plan(self, TokenChain chain not None, lookup_policy=ContextCacheLookupPolicy.USE_CACHE):
        """Plan the reuse of a whole prompt; changes nothing.

        Returns:
            `ReusePlan`, to be acquired before anything else changes this manager.
        Raises:
            InvalidArgumentError: page sizes differ or the policy is unknown.
        """
        cdef ReusePlan plan = make_vanilla_plan(self.index, chain, chain.token_count(), lookup_policy)
        plan.owner = self
        plan.version = self.version
        return plan

    def acquire(self, ReusePlan plan not None, *, int64_t min_tokens=0, int64_t reserve_pages=0):
        """Turn a plan into a lease, evicting least recently used leaves when pages are short.

        Args:
            min_tokens: the lease covers at least this many tokens (prompt plus headroom).
            reserve_pages: pages that must still be free or evictable afterwards (promised to others).
        Returns:
            `AcquireResult`; with `INSUFFICIENT_CAPACITY` nothing was changed.
        Raises:
            ContractViolation: the manager changed since the plan was made, or another manager made it.
            InvalidArgumentError: negative `min_tokens` or `reserve_pages`.
        """
        if plan.owner is not self:
            raise ContractViolation("the plan was made by another manager; plan again with this one")
        if plan.version != self.version:
            raise ContractViolation("the cache changed since the plan was made; plan again and acquire at once")
        if min_tokens < 0 or reserve_pages < 0:
            raise InvalidArgumentError(
                f"min_tokens {min_tokens} and reserve_pages {reserve_pages} must be 0 or more")
        cdef AcquireResult result = AcquireResult.__new__(AcquireResult)
        cdef Py_ssize_t shared = <Py_ssize_t>plan.bindings.size()
        cdef int64_t covered = min_tokens // self.page_size + (min_tokens % self.page_size != 0)
        cdef int64_t total = max(<int64_t>plan.total_pages, covered)
        cdef Py_ssize_t evictable = self.tree.lru_size
        cdef Py_ssize_t i
        result.plan = plan
        for i in range(shared):
            evictable -= self.base.active[plan.bindings[i]] == 0
        if total - shared + min(reserve_pages, INT32_MAX) > self.base.free_count + evictable:
            result.status = _INSUFFICIENT
            return result
        result.lease = self.make_lease(plan, total)
        result.status = _ACQUIRED
        return result

    cdef CacheRequestLease make_lease(self, ReusePlan plan, Py_ssize_t total):
        """A lease of `total` pages, the plan's bindings first; feasibility is the caller's business."""
        cdef CacheRequestLease lease = CacheRequestLease.__new__(CacheRequestLease)
        cdef Py_ssize_t shared = <Py_ssize_t>plan.bindings.size()
        cdef Py_ssize_t i
        self.step(STEP_PAGES)
        lease.pages.reserve(total + total // 8 + 4)
        self.live.push_back(<PyObject*>lease)
        lease.live_place = self.live.size() - 1
        lease.manager = self
        lease.shared_block_count = shared
        lease.published_block_count = shared
        lease.valid = True
        for i in range(shared):
            self.pin(plan.bindings[i])
            lease.pages.push_back(plan.bindings[i])
        self.take_pages(&lease.pages, total - shared)
        self.version += 1
        return lease

    def acquire_vanilla(
        self, TokenChain chain not None, *, lookup_policy=ContextCacheLookupPolicy.USE_CACHE, int64_t min_tokens=0,
        int64_t reserve_pages=0
    ):
        """`plan` and `acquire` in one step."""
        return self.acquire(self.plan(chain, lookup_policy), min_tokens=min_tokens, reserve_pages=reserve_pages)

    cdef void release_lease(self, CacheRequestLease lease) noexcept:
        """Let go of everything, deepest block first (that order keeps the LRU list leaf-first)."""
        cdef Py_ssize_t i = <Py_ssize_t>lease.pages.size() - 1
        cdef CacheRequestLease last = <CacheRequestLease>self.live.back()
        while i >= 0:
            self.unpin(lease.pages[i])
            i -= 1
        lease.pages.clear()
        lease.published_block_count = 0
        lease.valid = False
        self.live[lease.live_place] = <PyObject*>last
        last.live_place = lease.live_place
        self.live.pop_back()
        self.version += 1

    def release(self, CacheRequestLease lease not None):
        """Release a lease of this manager; a second time does nothing.

        Raises:
            InvalidArgumentError: the lease belongs to another manager.
        """
        if lease.manager is not self:
            _raise_lease("belongs to another manager")
        lease.release()

    # Growth

    cdef int grow_to(self, CacheRequestLease lease, Py_ssize_t num_pages) except -1:
        """Give the lease at least `num_pages` pages: 1 when it has them, 0 when refused (nothing changed)."""
        cdef Py_ssize_t short = num_pages - <Py_ssize_t>lease.pages.size()
        if short <= 0:
            return 1
        if short > self.available():
            return 0
        self.step(STEP_PAGES)
        _make_room(&lease.pages, num_pages)
        self.take_pages(&lease.pages, short)
        self.version += 1
        return 1

    def grow_base_pages(self, CacheRequestLease lease not None, additional):
        """Append `additional` private pages.

        Returns:
            False when free and evictable pages do not suffice; nothing was changed or evicted then.
        Raises:
            InvalidArgumentError: negative amount, or a released or foreign lease.
        """
        self.check_lease(lease)
        if additional < 0:
            raise InvalidArgumentError(f"cannot grow by {additional} pages; the amount must be 0 or more")
        if additional > self.base.capacity:
            return False
        return bool(self.grow_to(lease, <Py_ssize_t>lease.pages.size() + <Py_ssize_t>additional))

    def ensure_base_pages(self, CacheRequestLease lease not None, int64_t min_tokens):
        """Grow until the lease covers `min_tokens` tokens; False when refused (nothing was changed then)."""
        self.check_lease(lease)
        if min_tokens < 0:
            raise InvalidArgumentError(f"min_tokens {min_tokens} must be 0 or more")
        return bool(self.grow_to(lease, min_tokens // self.page_size + (min_tokens % self.page_size != 0)))

    def ensure_coverage(self, list leases not None, lengths, int64_t extra):
        """Grow each lease to cover its length plus `extra` look-ahead tokens, in order.

        Args:
            leases: valid leases of this manager.
            lengths: as many committed lengths in tokens, 0 or more.
            extra: tokens beyond the committed length that the next forward may write.
        Returns:
            Index of the first refused lease (unchanged, as are those after it; earlier growth stays), or -1.
        Raises:
            InvalidArgumentError: sizes differ, a negative number, or a bad lease.  Nothing was changed.
        Cost: O(leases); pages are looked at only for leases that must grow.
        """
        cdef Py_ssize_t k
        cdef int64_t tokens
        if len(lengths) != len(leases):
            raise InvalidArgumentError(f"{len(leases)} leases need as many lengths, got {len(lengths)}")
        self.scratch.resize(len(leases))
        for k in range(len(leases)):
            self.check_lease(<CacheRequestLease?>leases[k])
            tokens = <int64_t>lengths[k] + extra
            if tokens < 0 or tokens > INT32_MAX:
                raise InvalidArgumentError(
                    f"length {lengths[k]} with {extra} more must be from 0 to {INT32_MAX} tokens")
            self.scratch[k] = <int32_t>((tokens + self.page_size - 1) // self.page_size)
        for k in range(len(leases)):
            if not self.grow_to(<CacheRequestLease>leases[k], self.scratch[k]):
                return k
        return -1

    # Publication

    cdef Py_ssize_t find_path(self, CacheRequestLease lease, TokenChain chain, Py_ssize_t limit) except -1:
        """Walk on from the lease's published blocks into `scratch`, over blocks others published; their number."""
        cdef Py_ssize_t start = lease.published_block_count
        cdef node_id_t parent
        if limit <= start:
            return 0
        self.step(STEP_PATH)
        self.scratch.resize(limit - start)
        parent = lease.pages[start - 1] if start else self.index.find_namespace(chain.key_bytes)
        return self.index.match(chain, parent, start, limit, self.scratch.data())

    cdef Py_ssize_t publishable(self, CacheRequestLease lease, Py_ssize_t first, Py_ssize_t count) except -1:
        """End of the run of blocks from `first` whose pages may be indexed for this lease.

        A page that left the index while several leases held it must not come back for one of them: the others do not
        hold the path to it.  Such a page ends the run.
        """
        cdef Py_ssize_t i
        for i in range(first, count):
            if self.tree.nodes[lease.pages[i]].indexed:
                raise InvariantError(f"page {lease.pages[i]} is indexed already, but not as block {i} of this lease")
            if self.base.active[lease.pages[i]] != 1:
                return i
        return max(first, count)

    cdef int stage_media(self, TokenChain chain, Py_ssize_t first, Py_ssize_t end) except -1:
        """Keep the media bytes of the blocks that will be added; `media_scratch` has one place for each."""
        cdef Py_ssize_t i
        self.media_scratch.assign(max(<Py_ssize_t>0, end - first), NO_MEDIA)
        if not chain.has_media:
            return 0
        try:
            for i in range(first, end):
                self.step(STEP_MEDIA)
                self.media_scratch[i - first] = self.index.stage_media(chain, i)
        except BaseException:
            self._unstage_media()
            raise
        return 0

    def _unstage_media(self):
        """Give back what `stage_media` kept."""
        for i in range(<Py_ssize_t>self.media_scratch.size()):
            self.index.drop_media(self.media_scratch[i])
        self.media_scratch.clear()

    cdef int32_t prepare_record(
        self, CacheRequestLease lease, TokenChain chain, Py_ssize_t count, Py_ssize_t found
    ) except -1:
        """Make a new record at the endpoint of `count` blocks; the last thing that can fail."""
        cdef record_t record
        self.step(STEP_RECORD)
        record.terminal = chain.hashes[count - 1]
        record.node = self.endpoint(lease, count, found)
        record.block_count = <int32_t>count
        record.exact_length = 0
        record.recurrent_slot = record.partial_slot = -1
        return self.records.add(record)

    cdef int publish_blocks(
        self, CacheRequestLease lease, TokenChain chain, Py_ssize_t count, bint want_record, published_t* out
    ) except -1:
        """Index the lease's first `count` blocks; see `publish`.  The caller checked lease, chain and count."""
        cdef Py_ssize_t start = lease.published_block_count
        cdef Py_ssize_t found, first, end
        cdef int32_t place = NO_RECORD
        cdef node_id_t root = NO_NODE
        out.record_id = out.new_blocks = 0
        out.existing_record = False
        self.check_overlap(lease, chain, min(count, start))
        found = self.find_path(lease, chain, count)
        first = start + found
        end = self.publishable(lease, first, count)
        self.stage_media(chain, first, end)
        try:
            if first == 0 and end > 0:
                self.step(STEP_NAMESPACE)
                root = self.index.open_namespace(chain.key_bytes)
            if want_record and end >= count:
                place = self.records.find_at(self.endpoint(lease, count, found), 0)
                out.existing_record = place != NO_RECORD
                if place == NO_RECORD:
                    place = self.prepare_record(lease, chain, count, found)
        except BaseException:
            self._unstage_media()
            if root != NO_NODE:
                self.index.close_namespace_if_empty(root)
            raise
        # From here on nothing fails.
        self.adopt(lease, found)
        self.add_blocks(lease, chain, first, end, root)
        out.new_blocks = max(<Py_ssize_t>0, end - first)
        if place != NO_RECORD:
            out.record_id = self.records.id_at(place)
            if out.existing_record:
                self.records.touch_at(place)
            elif self.records.limit >= 0 and self.records.size > self.records.limit:
                self.drop_record(self.records.front())
        self.version += 1
        return 0

    cdef node_id_t endpoint(self, CacheRequestLease lease, Py_ssize_t count, Py_ssize_t found) noexcept nogil:
        """Node that block count-1 has, or will have once the found and the new blocks are taken in."""
        cdef Py_ssize_t start = lease.published_block_count
        if start < count <= start + found:
            return self.scratch[count - 1 - start]
        return lease.pages[count - 1]

    cdef void adopt(self, CacheRequestLease lease, Py_ssize_t found) noexcept nogil:
        """Take the `found` canonical pages in `scratch` for the next blocks and give the lease's own copies back."""
        cdef Py_ssize_t i
        cdef page_id_t own
        for i in range(found):
            own = lease.pages[lease.published_block_count]
            if own != self.scratch[i]:
                self.pin(self.scratch[i])
                lease.pages[lease.published_block_count] = self.scratch[i]
                self.unpin(own)
                lease.rebound_page_count += 1
            lease.published_block_count += 1

    cdef void add_blocks(
        self, CacheRequestLease lease, TokenChain chain, Py_ssize_t first, Py_ssize_t end, node_id_t root
    ) noexcept nogil:
        """Index the lease's own pages as blocks first..end-1, below its published blocks or below `root`."""
        cdef Py_ssize_t i
        for i in range(first, end):
            if i + PREFETCH_BLOCKS < end:
                prefetch_bucket(self.tree, chain.hashes[i + PREFETCH_BLOCKS])
            self.index.add(lease.pages[i], lease.pages[i - 1] if i else root, chain.hashes[i], chain.block_tokens(i),
                           self.media_scratch[i - first])
            pool_add_cache(self.base, lease.pages[i])
            lease.published_block_count = i + 1

    def publish(self, CacheRequestLease lease not None, TokenChain chain not None, int64_t resident_state_length, *,
                bint make_record):
        """Make the full blocks of committed state findable, and remember the endpoint when asked.

        A block that another sequence published first keeps that page; this lease takes it over and gives its own copy
        back (`lease.rebound_page_count` moves then), so equal content is held once.

        Args:
            chain: the sequence's tokens; its published blocks are those of the lease.
            resident_state_length: tokens whose state is written and final on the device.
            make_record: remember the endpoint of the last full block (prefill end, decode end).
        Returns:
            `PublishResult`.  After an eviction of records under live leases, a page that several leases still hold
            cannot be published again; the result then has fewer blocks and no record.
        Raises:
            InvalidArgumentError: bad lease or chain, no full block, more blocks than leased pages, or a chain that
                differs from what the lease shares.  Nothing was changed.
            InvariantError: a private page of the lease is indexed already.  Nothing was changed.
        """
        self.check_lease(lease)
        self.check_chain(chain)
        cdef Py_ssize_t count = min(chain.block_count(), <Py_ssize_t>(resident_state_length // self.page_size))
        if resident_state_length < 0 or count <= 0:
            raise InvalidArgumentError(
                f"{resident_state_length} resident tokens of a chain with {chain.block_count()} full blocks complete "
                f"no block of {self.page_size} tokens; publish later")
        if count > <Py_ssize_t>lease.pages.size():
            raise InvalidArgumentError(
                f"the lease holds {lease.pages.size()} pages but {count} blocks were to be published")
        cdef PublishResult result = PublishResult.__new__(PublishResult)
        cdef published_t done
        result.status = _PUBLISHED
        if self.records.limit == 0:
            return result
        self.publish_blocks(lease, chain, count, make_record, &done)
        if done.existing_record:
            result.status = _EXISTING
        if done.record_id:
            result.record = done.record_id
        result.published_block_count = min(count, lease.published_block_count)
        result.new_block_count = done.new_blocks
        return result

    cdef int append_one(
        self, CacheRequestLease lease, TokenChain chain, int32_t token, bint publish, Py_ssize_t lookahead
    ) except -1:
        """One token for one sequence: 1, or 0 when its page was refused (nothing changed)."""
        cdef Py_ssize_t length = chain.token_count()
        cdef published_t done
        if not self.grow_to(lease, length // self.page_size + 1):
            return 0
        chain.append_token(token)
        cdef Py_ssize_t count = (length + 1 - lookahead) // self.page_size
        if publish and length + 1 > lookahead and count > lease.published_block_count:
            self.publish_blocks(lease, chain, count, False, &done)
        return 1

    def append_tokens(self, list leases not None, list chains not None, const int32_t[::1] tokens, bint publish, *,
                      Py_ssize_t lookahead=1):
        """Append one token to each sequence: make sure of its page, extend the chain, publish what it completes.

        Args:
            leases: valid leases of this manager.
            chains: the chain of each lease.
            tokens: (len(leases),) int32, 0 or more.
            publish: publish full blocks of committed state (no record).
            lookahead: newest tokens whose state is not written yet; 1 where the appended token runs in the next
                step, 0 where its state is already final.
        Returns:
            Index of the first sequence whose page was refused (it and those after it are unchanged), or -1.
        Raises:
            InvalidArgumentError: sizes differ, bad token, bad lease, or a chain of another prefix.  Nothing changed.
            MemoryError: the sequences in front are done; the one at hand has its token, and publishes later.
        Cost: O(sequences), amortised; allocates only where a vector grows.
        """
        cdef Py_ssize_t k
        cdef Py_ssize_t count = len(leases)
        cdef CacheRequestLease lease
        cdef TokenChain chain
        if len(chains) != count or tokens.shape[0] != count or lookahead < 0:
            raise InvalidArgumentError(
                f"{count} leases need as many chains and tokens and a look-ahead of 0 or more, got {len(chains)}, "
                f"{tokens.shape[0]} and {lookahead}")
        publish = publish and self.records.limit != 0
        for k in range(count):
            lease = <CacheRequestLease?>leases[k]
            chain = <TokenChain?>chains[k]
            self.check_lease(lease)
            self.check_chain(chain)
            if tokens[k] < 0:
                raise InvalidArgumentError(f"token {tokens[k]} of sequence {k} must be 0 or more")
            self.check_overlap(lease, chain, lease.published_block_count)
        for k in range(count):
            if not self.append_one(<CacheRequestLease>leases[k], <TokenChain>chains[k], tokens[k], publish, lookahead):
                return k
        return -1

    def rebind(self, CacheRequestLease lease not None, TokenChain chain not None):
        """Look again: let the lease share blocks that others published since, in place of its own private pages.

        For a sequence that is still in prefill, between two chunks, with no device work on the replaced pages.  At
        least the last token of the chain stays to be computed.

        Returns:
            Leading tokens whose state exists now (shared, published, or rebound); never less than before.
        Raises:
            InvalidArgumentError: bad lease or chain, or a chain of another prefix.  Nothing was changed.
        """
        self.check_lease(lease)
        self.check_chain(chain)
        cdef Py_ssize_t limit = min((chain.token_count() - 1) // self.page_size, <Py_ssize_t>lease.pages.size())
        cdef Py_ssize_t found
        self.check_overlap(lease, chain, lease.published_block_count)
        found = self.find_path(lease, chain, limit)
        if found:
            self.adopt(lease, found)
            lease.shared_block_count = lease.published_block_count
            self.version += 1
        return lease.published_block_count * self.page_size

    # Eviction

    cdef void drop_record(self, int32_t place) noexcept:
        """Forget a record; blocks that no record and no child needs any more leave the index with it."""
        cdef node_id_t node = self.records.node_at(place)
        cdef node_id_t parent
        cdef bint leased = False
        self.records.erase_at(place)
        self.evicted_records += 1
        while node >= 0 and self.tree.nodes[node].child_count == 0 and self.records.head_at(node) == NO_RECORD:
            parent = self.tree.nodes[node].parent
            if self.base.active[node] == 0:
                lru_unlink(self.tree, node)
            else:
                leased = True
            self.index.remove(node)
            self.reclaimed_base_pages += pool_drop_cache(self.base, node)
            node = parent
        if leased:
            self.forget_unpublished()

    cdef void forget_unpublished(self) noexcept:
        """Blocks that left the index are not published any more; their pages stay leased."""
        cdef size_t k
        cdef CacheRequestLease lease
        for k in range(self.live.size()):
            lease = <CacheRequestLease>self.live[k]
            while lease.published_block_count and not self.tree.nodes[
                    lease.pages[lease.published_block_count - 1]].indexed:
                lease.published_block_count -= 1

    def evict_record(self, record_id):
        """Forget one record now, with the blocks that only it kept.

        A block with children or another record stays.  A page that a lease holds leaves the index at once and stays
        leased; it is not counted as reclaimed.

        Raises:
            InvalidArgumentError: unknown id.
        """
        self.drop_record(self.records._checked(record_id))
        self.version += 1

    def evict_all(self):
        """Forget every record and block; leased pages stay leased and are free after their release.

        Returns:
            How many blocks left the index.
        Cost: O(capacity).
        """
        cdef Py_ssize_t count = self.tree.size
        cdef size_t k
        cdef node_id_t node
        cdef CacheRequestLease lease
        self.evicted_records += self.records.size
        self.records.clear()
        for k in range(self.live.size()):
            lease = <CacheRequestLease>self.live[k]
            lease.published_block_count = 0
        while self.tree.lru_size:
            self.evict_node(lru_front(self.tree))
        for node in range(self.tree.capacity):
            if self.tree.nodes[node].indexed:
                self.index.remove(node)
                pool_drop_cache(self.base, node)
        self.version += 1
        return count

    # Reading

    @property
    def available_pages(self):
        """Base pages a lease could be given now: free or evictable."""
        return self.available()

    @property
    def num_live_leases(self):
        return self.live.size()

    def record(self, record_id):
        """`CacheRecord` snapshot of a record.

        Raises:
            InvalidArgumentError: unknown id.
        """
        node = self.records.node(record_id)
        path = tuple(self.index.path_of(node))
        return CacheRecord(id=record_id, key=self.records.key(record_id), node=node, base_page_path=path)

    def metrics(self):
        """`ContextCacheManagerMetrics`, cumulative."""
        return ContextCacheManagerMetrics(
            evicted_records=self.evicted_records, reclaimed_base_kv_pages=self.reclaimed_base_pages)

    # Recount

    def check_invariants(self):
        """Recount everything: pools, tree, records and leases must tell the same story.

        Raises:
            InvariantError: they do not; stop using this manager.
        Cost: O(capacity + table + leased pages).
        """
        self.pools.check_invariants()
        self.index.check_invariants()
        self.records.check_invariants()
        held = [0] * self.base.capacity
        for k in range(<Py_ssize_t>self.live.size()):
            self._check_lease_state(<CacheRequestLease>self.live[k], k, held)
        self._check_pages(held)
        self._check_records()

    def _check_lease_state(self, CacheRequestLease lease, place, held):
        """One lease: distinct pages, published blocks that are a path of the tree, references added to `held`."""
        pages = list(lease.pages)
        path = pages[:lease.published_block_count]
        if not lease.valid or lease.live_place != place or lease.manager is not self:
            raise InvariantError(f"lease at place {place} is not a valid lease of this manager")
        if len(set(pages)) != len(pages) or not 0 <= lease.published_block_count <= len(pages):
            raise InvariantError(f"a lease holds pages {pages}, {lease.published_block_count} of them published")
        if path and self.index.path_of(path[len(path) - 1]) != path:
            raise InvariantError(f"published pages {path} of a lease are not a path of the tree")
        for i, page in enumerate(pages):
            held[page] += 1
            if page in self.index and i >= len(path):
                raise InvariantError(f"page {page} is indexed, but not as block {i} of the lease that holds it")

    def _check_pages(self, held):
        """Reference counts are what leases and tree say; exactly the unheld nodes are evictable."""
        evictable = set(self.index.eviction_order())
        for page in range(self.base.capacity):
            indexed = page in self.index
            if self.base.active[page] != held[page] or self.base.cache[page] != indexed:
                raise InvariantError(
                    f"page {page} has {self.base.active[page]} active and {self.base.cache[page]} cache references, "
                    f"leases hold {held[page]} and the index {int(indexed)}")
            if (indexed and held[page] == 0) != (page in evictable):
                raise InvariantError(
                    f"page {page} (indexed {indexed}, held {held[page]}) has the wrong place in the LRU list")

    def _check_records(self):
        """Every record ends at an indexed node that is as deep as it says and carries its hash."""
        if self.records.limit >= 0 and self.records.size > self.records.limit:
            raise InvariantError(f"{self.records.size} records, the limit is {self.records.limit}")
        for record_id in self.records.lru_to_mru():
            key = self.records.key(record_id)
            node = self.records.node(record_id)
            if len(self.index.path_of(node)) != key.full_block_count or self.index.hash_of(node) != key.terminal_hash:
                raise InvariantError(f"record {record_id} does not describe its node {node}")
