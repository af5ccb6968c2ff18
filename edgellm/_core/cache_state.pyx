"""The state of one cache: pools, indexes, leases, and the moves on them that cannot fail.

How the tree stays evictable in O(1).  The leading pages of a lease, as many as it has published blocks, are the pages
of a root-contiguous path of nodes: blocks it shares and blocks it published.  Where another sequence published a block
first, the lease takes over that canonical page and gives its own copy back, so equal content is held once.  A held
node therefore has held ancestors.  Release lets go of the deepest block first and each node that nobody holds any more
is listed as the most recently used one of its class; priority and lifetime of a node are never below those of its
descendants.  So a child always stands before its ancestors, and the front is always a leaf.  Draft nodes follow the
same rules in their own pool and order; a held draft node has a held base node.

Where reuse starts at checkpoints only, a node that nobody holds serves as the prefix of a checkpoint or not at all:
without child and record it leaves the index at once (*trim*).
"""

cimport cython
from cpython.ref cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memcpy
from libcpp.vector cimport vector

from edgellm._core.block_hash cimport TokenChain
from edgellm._core.block_index cimport (
    NO_NODE,
    PREFETCH_BLOCKS,
    BlockIndex,
    index_t,
    is_listed,
    list_node,
    prefetch_victim,
    raise_retention,
    unlist_node,
)
from edgellm._core.draft_index cimport NO_DRAFT, DraftIndex
from edgellm._core.lru cimport CLASS_EXPIRED, lru_class, lru_front, lru_next
from edgellm._core.page_ledger cimport (
    ResourcePools,
    pool_t,
    pool_drop_cache,
    pool_pin,
    pool_take,
    pool_unpin,
)
from edgellm._core.records cimport NO_RECORD, NO_SLOT, RecordStore
from edgellm._core.types cimport node_id_t, page_id_t

import numpy as np

from edgellm._core.block_index import DEFAULT_HASH_MASK as _DEFAULT_HASH_MASK
from edgellm.cache.types import BaseStateKind, RetentionPriority, SpecReuseContract
from edgellm.errors import ContractViolation, InvalidArgumentError


cdef int make_room(vector[page_id_t]* items, size_t count) except -1:
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
        mode: `ReusePlanMode`.
        shared_block_count, shared_draft_block_count: leading blocks whose pages came from the cache before they were
            computed here.
        published_block_count, published_draft_block_count: leading blocks that are in the index; their pages are those
            of the index.
        rebound_page_count, rebound_draft_page_count: pages that were replaced by canonical ones so far.  When one
            moved, that page-table row of the sequence must be written again, before its next step.
        tail_token_count: tokens of `tail_source` that go into the first private page.
        volatile_from: position from which published blocks are marked volatile, or -1.
        expiry: time at which what it leaves behind expires, ns of the manager's clock; 0 is never.
        sealed: its unfilled last page was retained; only `release` is allowed.
        valid: False once released.
    """

    def __init__(self):
        raise ContractViolation("leases are made by ContextCacheManager.acquire")

    def __reduce__(self):
        raise TypeError("a lease is neither copied nor pickled: its pages would be given back twice")

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
    def priority(self):
        """`RetentionPriority` of what it leaves behind."""
        return RetentionPriority(self.retention)

    @property
    def num_base_pages(self):
        """Base pages with memory behind them: none for a pure recurrent model."""
        return <Py_ssize_t>self.pages.size() if self.valid and self.manager.has_attention else 0

    @property
    def base_pages(self):
        """(pages,) int32, logical order; a copy.  What the page-table row of the sequence holds."""
        if not self.valid or not self.manager.has_attention:
            return np.empty(0, dtype=np.int32)
        return _as_array(&self.pages)

    @property
    def num_draft_pages(self):
        return <Py_ssize_t>self.draft_pages.size()

    @property
    def draft_pages(self):
        """(draft pages,) int32, logical order; a copy."""
        return _as_array(&self.draft_pages)

    @property
    def tail_source(self):
        """Base page to copy `tail_token_count` tokens from into page `shared_block_count`, or None; held until
        `manager.release_tail_source`."""
        return None if self.tail_page == NO_NODE else self.tail_page

    @property
    def draft_tail_source(self):
        """Likewise in the draft pool, or None."""
        return None if self.draft_tail_page == NO_DRAFT else self.draft_tail_page

    @property
    def recurrent_snapshot_slot(self):
        """Recurrent snapshot to restore from, or None; held until `manager.release_restored_hybrid_snapshots`."""
        return None if self.recurrent_slot == NO_SLOT else self.recurrent_slot

    @property
    def partial_kv_snapshot_slot(self):
        """Partial-page snapshot to restore from, or None."""
        return None if self.partial_slot == NO_SLOT else self.partial_slot


cdef class CacheState:
    """Pools, block tree, draft tree and records of one cache.  Single writer; not thread safe.

    The base of `ContextCacheManager`, which describes the arguments.
    """

    def __cinit__(
        self, page_size, capacities, *, max_records=None, base_state_kind=BaseStateKind.ATTENTION_ONLY,
        spec_reuse_contract=None, hash_mask=_DEFAULT_HASH_MASK
    ):
        if spec_reuse_contract is not None and not isinstance(spec_reuse_contract, SpecReuseContract):
            raise InvalidArgumentError(
                f"spec_reuse_contract {spec_reuse_contract!r} must be a SpecReuseContract or None")
        if not isinstance(base_state_kind, BaseStateKind):
            raise InvalidArgumentError(f"base_state_kind {base_state_kind!r} must be a BaseStateKind")
        if spec_reuse_contract is not None and spec_reuse_contract.future_dependency_tokens < 0:
            raise InvalidArgumentError(f"{spec_reuse_contract} looks ahead a negative number of tokens")
        self.owns_draft = spec_reuse_contract is not None and spec_reuse_contract.owns_paged_spec_state
        if self.owns_draft and base_state_kind is BaseStateKind.PURE_RECURRENT:
            raise InvalidArgumentError("a pure recurrent model has no paged draft state; use a contract without it")
        self.pools = ResourcePools(capacities)
        self.index = BlockIndex(page_size, capacities.base_kv_pages, hash_mask)
        self.drafts = DraftIndex(capacities.draft_kv_pages, capacities.base_kv_pages)
        self.records = RecordStore(
            max_records, checkpoint_capacity=capacities.recurrent_snapshot_slots, page_size=page_size)
        self.records.reserve_nodes(capacities.base_kv_pages)
        self.draft_records.resize(self.pools.draft.core.capacity, 0)
        self.pools.seal()
        self.index.sealed = self.drafts.sealed = self.records.sealed = True
        self.page_size = page_size
        self.spec_reuse_contract = spec_reuse_contract
        self.base_state_kind = base_state_kind
        self.has_attention = base_state_kind is not BaseStateKind.PURE_RECURRENT
        self.checkpointed = base_state_kind is not BaseStateKind.ATTENTION_ONLY
        self.future_tokens = 0 if spec_reuse_contract is None else spec_reuse_contract.future_dependency_tokens
        self.base = &self.pools.base.core
        self.draft = &self.pools.draft.core
        self.recurrent = &self.pools.recurrent.core
        self.partial = &self.pools.partial.core
        self.tree = &self.index.core

    @property
    def available_pages(self):
        """Base pages a lease could be given now: free or evictable."""
        return self.available()

    @property
    def available_draft_pages(self):
        """Draft pages a lease could be given now: free or evictable."""
        return self.available_drafts()

    @property
    def num_live_leases(self):
        return self.live.size()

    # Refusals

    cdef int refuse_lease(self, CacheRequestLease lease) except -1:
        if lease is None or not lease.valid:
            raise InvalidArgumentError("the lease is not valid any more (released); nothing was changed")
        if lease.manager is not self:
            raise InvalidArgumentError("the lease belongs to another manager; nothing was changed")
        raise ContractViolation(
            "the lease is sealed: its unfilled last page was retained for others, so it may only be released")

    cdef int refuse_chain(self, TokenChain chain) except -1:
        if chain is None:
            raise InvalidArgumentError("a TokenChain is needed, got None")
        raise InvalidArgumentError(
            f"the chain has page size {chain.page_size}, the cache {self.page_size}; make them equal")

    cdef int refuse_prefix(self, Py_ssize_t count) except -1:
        raise InvalidArgumentError(
            f"the chain differs from the lease within its first {count} published blocks; pass the chain the lease was "
            "acquired for")

    # Fault injection

    cdef int fail_once(self) except -1:
        self.fail_in -= 1
        if self.fail_in == 0:
            raise MemoryError("injected fault")
        return 0

    def _fail_after(self, Py_ssize_t passes):
        """Make the `passes`-th allocation from now raise MemoryError, once; 0 takes that back.  For tests."""
        if passes < 0:
            raise InvalidArgumentError(f"cannot fail after {passes} allocations; the number must be 0 or more")
        self.fail_in = passes

    @property
    def _allocation_points(self):
        """How often a place that may run out of memory was passed so far."""
        return self.allocation_points

    # Holding

    cdef void pin_nodes(self, const node_id_t* nodes, Py_ssize_t count) noexcept nogil:
        """One more active reference on each node; those that were evictable leave the eviction order."""
        cdef index_t* tree = self.tree
        cdef pool_t* base = self.base
        cdef Py_ssize_t i
        for i in range(count):
            if base.active[nodes[i]] == 0:
                unlist_node(tree, nodes[i])
            pool_pin(base, nodes[i])

    cdef void pin_drafts(self, const page_id_t* drafts, Py_ssize_t count) noexcept nogil:
        """Likewise for draft nodes."""
        cdef Py_ssize_t i
        for i in range(count):
            if self.draft.active[drafts[i]] == 0:
                self.drafts.unlist_draft(drafts[i])
            pool_pin(self.draft, drafts[i])

    cdef void unpin_node(self, node_id_t node) noexcept nogil:
        """One active reference less; the last one makes an indexed page evictable and any other page free."""
        if pool_unpin(self.base, node) and self.tree.nodes[node].indexed:
            self.settle_node(node)

    cdef void settle_node(self, node_id_t node) noexcept nogil:
        """Nobody holds an indexed page any more: it is evictable, or gone where it leads to no checkpoint."""
        if self.checkpointed and self.tree.nodes[node].child_count == 0 and self.records.head_at(node) == NO_RECORD:
            self.drop_node(node, False)
            return
        list_node(self.tree, node)
        if self.owns_draft and lru_class(&self.tree.lru, node) == CLASS_EXPIRED:
            self.drafts.expire_at(node)

    cdef void unpin_draft(self, page_id_t draft) noexcept nogil:
        """Likewise for a draft page; its base node is still held."""
        if not pool_unpin(self.draft, draft) or not self.drafts.is_draft(draft):
            return
        if self.checkpointed and self.drafts.core.nodes[draft].child_count == 0 and self.draft_records[draft] == 0:
            self.drop_draft(draft, False)
        else:
            self.drafts.list_draft(draft, False)

    cdef void pin_snapshots(self, int32_t recurrent_slot, int32_t partial_slot) noexcept nogil:
        """Hold the snapshots of a checkpoint; it cannot be evicted meanwhile."""
        if self.recurrent.active[recurrent_slot] == 0:
            self.records.unlist_checkpoint(self.records._checkpoints[recurrent_slot].place)
        pool_pin(self.recurrent, recurrent_slot)
        if partial_slot != NO_SLOT:
            pool_pin(self.partial, partial_slot)

    cdef void unpin_snapshots(
        self, int32_t recurrent_slot, int32_t partial_slot, int priority, int64_t expiry
    ) noexcept nogil:
        """Let go of snapshots: a checkpoint that nobody holds is evictable, slots without a checkpoint are free."""
        cdef int32_t place
        if partial_slot != NO_SLOT:
            pool_unpin(self.partial, partial_slot)
        if self.recurrent.cache[recurrent_slot]:
            place = self.records._checkpoints[recurrent_slot].place
            self.records.raise_retention(place, priority, expiry)
            if pool_unpin(self.recurrent, recurrent_slot):
                self.records.list_checkpoint(place)
        else:
            pool_unpin(self.recurrent, recurrent_slot)

    # Taking; feasibility and room are the caller's business

    cdef void take_pages(self, vector[page_id_t]* out, Py_ssize_t count) noexcept nogil:
        """Append `count` base pages to `out`, evicting what is missing."""
        cdef node_id_t ahead = lru_front(&self.tree.lru)
        cdef Py_ssize_t _i
        if self.base.free_count < count:
            # Victims lie all over the table: ask for their entries some steps early.
            for _i in range(PREFETCH_BLOCKS):
                prefetch_victim(self.tree, ahead)
                ahead = lru_next(&self.tree.lru, ahead)
        while self.base.free_count < count:
            prefetch_victim(self.tree, ahead)
            ahead = lru_next(&self.tree.lru, ahead)
            self.evict_node(lru_front(&self.tree.lru))
        while count > 0:
            out.push_back(pool_take(self.base))
            count -= 1

    cdef void take_drafts(self, vector[page_id_t]* out, Py_ssize_t count) noexcept nogil:
        """Append `count` draft pages to `out`, evicting what is missing."""
        while self.draft.free_count < count:
            self.evict_draft(lru_front(&self.drafts.core.lru))
        while count > 0:
            out.push_back(pool_take(self.draft))
            count -= 1

    # Dropping.  *Evicting* is counted as reclaimed; trimming and superseding are not

    cdef void drop_draft(self, page_id_t draft, bint counted) noexcept nogil:
        """Take a childless draft node out of the index; checkpoints that need it serve plain requests only."""
        cdef int32_t place
        if self.drafts.is_listed(draft):
            self.drafts.unlist_draft(draft)
        if self.draft_records[draft]:
            place = self.records.head_at(self.drafts.core.nodes[draft].base)
            while place != NO_RECORD:
                if self.records._records[place].draft_node == draft:
                    self.records._records[place].draft_node = NO_DRAFT
                    self.records._records[place].mtp = 0
                place = self.records.next_at(place)
            self.draft_records[draft] = 0
        self.drafts.remove(draft)
        if pool_drop_cache(self.draft, draft) and counted:
            self.reclaimed_draft_pages += 1

    cdef void drop_node(self, node_id_t node, bint counted) noexcept nogil:
        """Take a childless node without records out of the index, with its draft nodes.

        One that is not counted was of no use any more: it is not remembered as evicted.
        """
        cdef page_id_t draft, parent
        cdef uint64_t* memory
        cdef uint64_t remembered
        while self.owns_draft and self.drafts.newest_at(node) != NO_DRAFT:
            draft = self.drafts.newest_at(node)
            parent = self.drafts.core.nodes[draft].parent
            self.drop_draft(draft, counted)
            if self.checkpointed:
                self.trim_draft(parent)
        if is_listed(self.tree, node):
            unlist_node(self.tree, node)
        if counted:
            self.index.remove(node)
            self.reclaimed_base_pages += pool_drop_cache(self.base, node)
            return
        memory = &self.tree.evicted[self.tree.nodes[node].hash.lo & self.tree.evicted_mask]
        remembered = memory[0]
        self.index.remove(node)
        memory[0] = remembered
        pool_drop_cache(self.base, node)

    cdef void drop_tails_before(self, node_id_t parent, const int32_t* tokens, int32_t count) noexcept nogil:
        """Drop the unheld tails of `parent` that say no more than the first of `count` tokens."""
        cdef node_id_t tail
        if self.tree.tail_count == 0 or self.index.first_tail(parent) == NO_NODE:
            return
        tail = self.index.find_prefix_tail(parent, tokens, count)
        while tail != NO_NODE:
            self.drop_node(tail, False)
            tail = self.index.find_prefix_tail(parent, tokens, count)

    cdef void erase_record(self, int32_t place, bint counted) noexcept nogil:
        """Forget a record with its snapshots and its claim on a draft node; its node stays."""
        cdef node_id_t node = self.records.node_at(place)
        cdef bint checkpoint = self.records.is_checkpoint(place)
        cdef int32_t recurrent_slot = self.records.record_at(place).recurrent_slot
        cdef int32_t partial_slot = self.records.record_at(place).partial_slot
        cdef page_id_t draft = self.records.record_at(place).draft_node
        self.records.erase_at(place)
        self.evicted_records += counted
        if not checkpoint:
            return
        if pool_drop_cache(self.recurrent, recurrent_slot) and counted:
            self.reclaimed_recurrent += 1
        if partial_slot != NO_SLOT and pool_drop_cache(self.partial, partial_slot) and counted:
            self.reclaimed_partial += 1
        if draft != NO_DRAFT:
            self.draft_records[draft] -= 1
            self.trim_draft(draft)
        if node < NO_NODE:
            self.index.drop_root(node)

    cdef void trim_node(self, node_id_t node, bint counted) noexcept nogil:
        """From `node` upwards, drop what nobody holds and what leads to no checkpoint any more.

        `counted`: it goes because something below or on it was evicted.
        """
        cdef node_id_t parent
        while (node >= 0 and self.base.active[node] == 0 and self.tree.nodes[node].child_count == 0
               and self.records.head_at(node) == NO_RECORD):
            parent = self.tree.nodes[node].parent
            self.drop_node(node, counted)
            node = parent

    cdef void trim_draft(self, page_id_t draft) noexcept nogil:
        """Likewise for draft nodes."""
        cdef page_id_t parent
        while (draft != NO_DRAFT and self.draft.active[draft] == 0 and self.draft_records[draft] == 0
               and self.drafts.core.nodes[draft].child_count == 0):
            parent = self.drafts.core.nodes[draft].parent
            self.drop_draft(draft, True)
            draft = parent

    cdef void evict_node(self, node_id_t node) noexcept nogil:
        """Drop an unheld leaf with its records and draft nodes; its page becomes free."""
        cdef node_id_t parent = self.tree.nodes[node].parent
        while self.records.head_at(node) != NO_RECORD:
            self.erase_record(self.records.head_at(node), True)
        self.drop_node(node, True)
        if self.checkpointed:
            self.trim_node(parent, True)

    cdef void evict_draft(self, page_id_t draft) noexcept nogil:
        """Drop an unheld draft leaf; its page becomes free, its base node stays."""
        cdef page_id_t parent = self.drafts.core.nodes[draft].parent
        self.drop_draft(draft, True)
        if self.checkpointed:
            self.trim_draft(parent)

    cdef void evict_checkpoint(self, int32_t place) noexcept nogil:
        """Drop an unheld checkpoint, with the blocks that lead to it only and that nobody holds."""
        cdef node_id_t node = self.records.node_at(place)
        self.erase_record(place, True)
        self.trim_node(node, True)

    cdef void drop_record(self, int32_t place) noexcept:
        """Forget a record; blocks that no record and no child needs any more leave the index with it, held or not."""
        cdef node_id_t node = self.records.node_at(place)
        cdef node_id_t parent
        cdef bint leased = False
        self.erase_record(place, True)
        while node >= 0 and self.tree.nodes[node].child_count == 0 and self.records.head_at(node) == NO_RECORD:
            parent = self.tree.nodes[node].parent
            leased = leased or self.base.active[node] != 0
            self.drop_node(node, True)
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
            while lease.published_draft_block_count and not self.drafts.is_draft(
                    lease.draft_pages[lease.published_draft_block_count - 1]):
                lease.published_draft_block_count -= 1

    # Releasing

    cdef void release_tail(self, CacheRequestLease lease) noexcept nogil:
        """Let go of the pages that the first private pages are copied from."""
        if lease.draft_tail_page != NO_DRAFT:
            if self.drafts.is_draft(lease.draft_tail_page):
                self.drafts.raise_priority(lease.draft_tail_page, lease.retention)
            self.unpin_draft(lease.draft_tail_page)
            lease.draft_tail_page = NO_DRAFT
        if lease.tail_page != NO_NODE:
            if self.tree.nodes[lease.tail_page].indexed:
                raise_retention(self.tree, lease.tail_page, lease.retention, lease.expiry)
            self.unpin_node(lease.tail_page)
            lease.tail_page = NO_NODE

    cdef void release_restored(self, CacheRequestLease lease) noexcept nogil:
        """Let go of the snapshots that were restored from."""
        if lease.recurrent_slot != NO_SLOT:
            self.unpin_snapshots(lease.recurrent_slot, lease.partial_slot, lease.retention, lease.expiry)
            lease.recurrent_slot = lease.partial_slot = NO_SLOT

    cdef void release_pages(
        self, const page_id_t* pages, Py_ssize_t count, int priority, int64_t expiry
    ) noexcept nogil:
        """Let go of a lease's base pages, deepest first."""
        cdef index_t* tree = self.tree
        cdef pool_t* base = self.base
        cdef bint plain = not self.checkpointed and not self.owns_draft
        cdef page_id_t page
        while count > 0:
            count -= 1
            page = pages[count]
            if not tree.nodes[page].indexed:
                pool_unpin(base, page)
                continue
            raise_retention(tree, page, priority, expiry)
            if not pool_unpin(base, page):
                continue
            if plain:
                list_node(tree, page)
            else:
                self.settle_node(page)

    cdef void release_lease(self, CacheRequestLease lease) noexcept:
        """Let go of everything, deepest block first (that order keeps the eviction order leaf-first)."""
        cdef Py_ssize_t i
        cdef page_id_t page
        cdef CacheRequestLease last = <CacheRequestLease>self.live.back()
        self.release_restored(lease)
        for i in range(<Py_ssize_t>lease.reservations.size()):
            self.unpin_snapshots(
                lease.reservations[i].recurrent_slot, lease.reservations[i].partial_slot, lease.retention, lease.expiry)
        self.release_tail(lease)
        for i in range(<Py_ssize_t>lease.draft_pages.size() - 1, -1, -1):
            page = lease.draft_pages[i]
            if self.drafts.is_draft(page):
                self.drafts.raise_priority(page, lease.retention)
            self.unpin_draft(page)
        self.release_pages(lease.pages.data(), <Py_ssize_t>lease.pages.size(), lease.retention, lease.expiry)
        lease.reservations.clear()
        lease.pages.clear()
        lease.draft_pages.clear()
        lease.published_block_count = lease.published_draft_block_count = 0
        lease.valid = False
        self.live[lease.live_place] = <PyObject*>last
        last.live_place = lease.live_place
        self.live.pop_back()
        self.version += 1
