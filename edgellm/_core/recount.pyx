"""The recount: pools, trees, records and leases of a cache must tell the same story.

Nothing here is fast or changes anything; it is what tests and debug builds call after each operation.
"""

from libc.stdint cimport int32_t

from edgellm._core.block_hash cimport hash_equal
from edgellm._core.block_index cimport NO_NODE, is_listed, is_tail, node_t
from edgellm._core.cache_state cimport CacheRequestLease, CacheState
from edgellm._core.lru cimport CLASS_EXPIRED, LIFETIME_TIMED, NUM_CLASSES, lru_class, lru_t
from edgellm._core.page_ledger cimport PagePool
from edgellm._core.records cimport NO_RECORD, record_t
from edgellm._core.types cimport node_id_t, page_id_t

from edgellm.errors import InvariantError


# Counts only

cdef int _check_sizes(str what, const lru_t* lru, int32_t size) except -1:
    cdef int32_t total = 0
    cdef int i
    for i in range(NUM_CLASSES):
        total += lru.sizes[i]
    if total != lru.size or not 0 <= lru.size <= size:
        raise InvariantError(f"{lru.size} of {size} {what} are evictable, {total} by class")
    return 0


cdef int _check_pool_counts(str what, PagePool pool, int32_t cached, int32_t evictable, bint idle) except -1:
    if pool.core.free_count + cached > pool.core.capacity:
        raise InvariantError(
            f"{what}: {pool.core.free_count} free and {cached} cached are more than {pool.core.capacity}")
    if idle and (pool.core.free_count + cached != pool.core.capacity or evictable != cached):
        raise InvariantError(
            f"{what}: without a lease {pool.core.free_count} free, {cached} cached and {evictable} evictable do not "
            f"make {pool.core.capacity}")
    return 0


def check_counts(CacheState state not None):
    """Compare counts of pools, indexes and orders; raises `InvariantError`.  Cost: O(1)."""
    cdef bint idle = state.live.size() == 0
    cdef int32_t checkpoints = <int32_t>state.records.checkpoint_count
    _check_sizes("base blocks", &state.tree.lru, state.tree.size)
    _check_sizes("draft blocks", &state.drafts.core.lru, state.drafts.core.size)
    _check_sizes("checkpoints", &state.records.checkpoints, checkpoints)
    _check_pool_counts("base pages", state.pools.base, state.tree.size, state.tree.lru.size, idle)
    _check_pool_counts("draft pages", state.pools.draft, state.drafts.core.size, state.drafts.core.lru.size, idle)
    _check_pool_counts("recurrent snapshots", state.pools.recurrent, checkpoints, state.records.checkpoints.size, idle)
    if state.records.limit >= 0 and state.records.size > state.records.limit:
        raise InvariantError(f"{state.records.size} records, the limit is {state.records.limit}")


# Everything

def check_invariants(CacheState state not None):
    """Recount everything; raises `InvariantError`.  Cost: O(capacity + table + leased pages)."""
    # Held until the end: collecting a dropped lease in between would change what was counted already.
    leases = []
    for k in range(<Py_ssize_t>state.live.size()):
        leases.append(<CacheRequestLease>state.live[k])
    check_counts(state)
    state.pools.check_invariants()
    state.index.check_invariants()
    state.drafts.check_invariants()
    state.records.check_invariants()
    held = [[0] * pool.capacity for pool in (
        state.pools.base, state.pools.draft, state.pools.recurrent, state.pools.partial)]
    serials = set()
    for k, lease in enumerate(leases):
        _check_lease(state, lease, k, held, serials)
    _check_base(state, held[0])
    _check_drafts(state, held[1])
    _check_records(state)
    _check_snapshots(state, held[2], held[3])


def _check_lease(CacheState state, CacheRequestLease lease, place, held, serials):
    """One lease: where it is registered, its two paths, and its references, which are added to `held`."""
    if not lease.valid or lease.live_place != place or lease.manager is not state or lease.serial in serials:
        raise InvariantError(f"lease at place {place} is not a valid lease of this manager")
    serials.add(lease.serial)
    pages, drafts = list(lease.pages), list(lease.draft_pages)
    _check_base_path(state, lease, pages)
    _check_draft_path(state, lease, pages, drafts)
    _check_tail(state, lease, pages)
    for pool, items in ((0, pages), (1, drafts)):
        for page in items:
            held[pool][page] += 1
    if lease.tail_page >= 0:
        held[0][lease.tail_page] += 1
    if lease.draft_tail_page >= 0:
        held[1][lease.draft_tail_page] += 1
    snapshots = [(r.recurrent_slot, r.partial_slot) for r in lease.reservations]
    if lease.recurrent_slot >= 0:
        snapshots.append((lease.recurrent_slot, lease.partial_slot))
    for recurrent, partial in snapshots:
        held[2][recurrent] += 1
        if partial >= 0:
            held[3][partial] += 1


def _check_base_path(CacheState state, CacheRequestLease lease, pages):
    """Distinct pages; the published ones are a path of the tree, and no other one is indexed but a retained tail."""
    path = pages[:lease.published_block_count]
    if len(set(pages)) != len(pages) or not 0 <= lease.published_block_count <= len(pages):
        raise InvariantError(f"a lease holds pages {pages}, {lease.published_block_count} of them published")
    if path and state.index.path_of(path[len(path) - 1]) != path:
        raise InvariantError(f"published pages {path} of a lease are not a path of the tree")
    for i, page in enumerate(pages):
        if page not in state.index or i < len(path):
            continue
        if not (lease.sealed and i == len(path) and is_tail(state.tree, page)
                and state.index.path_of(page) == pages[:i + 1]):
            raise InvariantError(f"page {page} is indexed, but not as block {i} of the lease that holds it")


def _check_draft_path(CacheState state, CacheRequestLease lease, pages, drafts):
    """Likewise for draft pages, which describe the base pages of the same lease."""
    cdef page_id_t draft
    path = drafts[:lease.published_draft_block_count]
    if len(set(drafts)) != len(drafts) or (drafts and not lease.paired):
        raise InvariantError(f"a {lease.mode.value} lease holds draft pages {drafts}")
    if not 0 <= len(path) <= lease.published_block_count or len(path) != lease.published_draft_block_count:
        raise InvariantError(f"{len(path)} draft blocks of a lease are published, {lease.published_block_count} blocks")
    if path and state.drafts.path_of(path[len(path) - 1]) != path:
        raise InvariantError(f"published draft pages {path} of a lease are not a path of one lineage")
    for i, draft in enumerate(drafts):
        if not state.drafts.is_draft(draft):
            continue
        if i >= len(path) + lease.sealed or state.drafts.core.nodes[draft].base != pages[i]:
            raise InvariantError(f"draft page {draft} is a draft node, but not of block {i} of its lease")


def _check_tail(CacheState state, CacheRequestLease lease, pages):
    """What is shared or copied is within the lease; a tail source hangs where the copy goes."""
    if not 0 <= lease.shared_block_count <= len(pages) or not (
            0 <= lease.shared_draft_block_count <= <Py_ssize_t>lease.draft_pages.size()):
        raise InvariantError(
            f"a lease of {len(pages)} pages shares {lease.shared_block_count}, {lease.shared_draft_block_count} drafts")
    if not 0 <= lease.tail_token_count < state.page_size or (lease.tail_page >= 0 and not lease.tail_token_count):
        raise InvariantError(f"a lease copies {lease.tail_token_count} tokens from page {lease.tail_page}")
    if lease.tail_page < 0 or not state.tree.nodes[lease.tail_page].indexed:
        return
    depth = state.tree.branches[lease.tail_page].depth
    if state.index.path_of(lease.tail_page)[:depth - 1] != pages[:depth - 1] or (
            state.tree.branches[lease.tail_page].token_count < lease.tail_token_count):
        raise InvariantError(f"tail source {lease.tail_page} of a lease does not go on from its pages {pages}")


def _check_retention(CacheState state, node_id_t page):
    """A block that nobody holds is kept at least as long as its children."""
    cdef node_t* node = &state.tree.nodes[page]
    cdef node_t* parent
    if node.parent <= NO_NODE or not is_listed(state.tree, node.parent):
        return
    parent = &state.tree.nodes[node.parent]
    if parent.priority < node.priority or parent.lifetime < node.lifetime or (
            parent.lifetime == LIFETIME_TIMED
            and state.tree.branches[node.parent].expiry < state.tree.branches[page].expiry):
        raise InvariantError(f"page {node.parent} is kept less long than its child {page}")


def _check_base(CacheState state, held):
    """Reference counts are what leases and tree say; exactly the unheld nodes are evictable, and each of some use."""
    cdef node_id_t page
    for page in range(state.base.capacity):
        indexed = bool(state.tree.nodes[page].indexed)
        if state.base.active[page] != held[page] or state.base.cache[page] != indexed:
            raise InvariantError(
                f"page {page} has {state.base.active[page]} active and {state.base.cache[page]} cache references, "
                f"leases hold {held[page]} and the index {int(indexed)}")
        listed = indexed and is_listed(state.tree, page)
        if (indexed and held[page] == 0) != listed:
            raise InvariantError(f"page {page} (indexed {indexed}, held {held[page]}) is evictable: {listed}")
        if (state.checkpointed and listed and state.tree.nodes[page].child_count == 0
                and state.records.head_at(page) == NO_RECORD):
            raise InvariantError(f"block of page {page} leads to no checkpoint and is held by nobody")
        if indexed:
            _check_retention(state, page)


def _check_drafts(CacheState state, held):
    """The same for draft pages; a held draft node has a held base node."""
    cdef page_id_t page
    cdef bint node
    for page in range(state.draft.capacity):
        node = state.drafts.is_draft(page)
        if state.draft.active[page] != held[page] or state.draft.cache[page] != node:
            raise InvariantError(
                f"draft page {page} has {state.draft.active[page]} active and {state.draft.cache[page]} cache "
                f"references, leases hold {held[page]} and the index {int(node)}")
        if not node:
            continue
        if (held[page] == 0) != state.drafts.is_listed(page):
            raise InvariantError(f"draft page {page} (held {held[page]}) is evictable: {state.drafts.is_listed(page)}")
        base = state.drafts.core.nodes[page].base
        if not state.tree.nodes[base].indexed or (held[page] and state.base.active[base] == 0):
            raise InvariantError(f"draft page {page} describes page {base}, which is not indexed or not held")
        _check_draft_node(state, page)
        if (state.checkpointed and held[page] == 0 and state.drafts.core.nodes[page].child_count == 0
                and state.draft_records[page] == 0):
            raise InvariantError(f"draft page {page} leads to no checkpoint and is held by nobody")


def _check_draft_node(CacheState state, page_id_t draft):
    """A draft node has the tokens, the place in the path and at most the life of the block it describes."""
    cdef node_id_t base = state.drafts.core.nodes[draft].base
    cdef page_id_t parent = state.drafts.core.nodes[draft].parent
    cdef node_id_t above = state.tree.nodes[base].parent
    if state.drafts.core.nodes[draft].token_count != state.tree.branches[base].token_count:
        raise InvariantError(f"draft node {draft} has other tokens than the block of page {base}")
    if (above >= 0) != (parent >= 0) or (parent >= 0 and state.drafts.core.nodes[parent].base != above):
        raise InvariantError(f"draft node {draft} follows {parent}, which does not describe page {above}")
    if parent >= 0 and state.drafts.is_listed(parent) and (
            state.drafts.core.nodes[parent].priority < state.drafts.core.nodes[draft].priority):
        raise InvariantError(f"draft node {parent} is kept less long than {draft}, which follows it")
    if state.drafts.is_listed(draft) and lru_class(&state.tree.lru, base) == CLASS_EXPIRED and (
            lru_class(&state.drafts.core.lru, draft) != CLASS_EXPIRED):
        raise InvariantError(f"draft node {draft} has not expired with page {base}")


def _check_records(CacheState state):
    """Every record stands where it says; the claims on draft nodes and namespaces are counted right."""
    claims = [0] * state.draft.capacity
    roots = {}
    for record_id in state.records.lru_to_mru():
        _check_record(state, record_id)
        place = state.records.place_of(record_id)
        draft = state.records.record_at(place).draft_node
        node = state.records.node_at(place)
        if draft >= 0:
            claims[draft] += 1
        if node < 0:
            roots[-2 - node] = roots.get(-2 - node, 0) + 1
    if claims != list(state.draft_records):
        raise InvariantError(f"checkpoints claim draft nodes {claims}, counted were {list(state.draft_records)}")
    for i in range(<Py_ssize_t>state.index._namespaces.size()):
        if state.index._namespaces[i].record_count != roots.get(i, 0):
            raise InvariantError(f"namespace {i} counts {state.index._namespaces[i].record_count} records, {roots}")


def _check_record(CacheState state, record_id):
    """One record: its node is as deep as it says and carries its hash, its draft node is of that block."""
    cdef const record_t* record = state.records.record_at(state.records.place_of(record_id))
    if record.node >= 0:
        if len(state.index.path_of(record.node)) != record.block_count or is_tail(state.tree, record.node):
            raise InvariantError(f"record {record_id} does not describe its node {record.node}")
    elif (record.block_count or -2 - record.node >= <Py_ssize_t>state.index._namespaces.size()
          or not state.index._namespaces[-2 - record.node].used):
        raise InvariantError(f"record {record_id} hangs at an unused namespace {-2 - record.node}")
    if record.exact_length == 0:
        if state.index.hash_of(record.node) != state.records.key(record_id).terminal_hash:
            raise InvariantError(f"record {record_id} has another hash than its node {record.node}")
        return
    _check_terminal(state, record_id)
    if not state.checkpointed or record.block_count != (record.exact_length - record.mtp) // state.page_size:
        # A checkpoint that lost its draft side keeps its place, one block higher at a page boundary.
        if record.mtp or record.block_count != (record.exact_length - 1) // state.page_size:
            raise InvariantError(f"checkpoint {record_id} at {record.exact_length} hangs at block {record.block_count}")
    if record.draft_node >= 0 and not record.mtp:
        raise InvariantError(f"checkpoint {record_id} claims draft node {record.draft_node} without a draft side")
    if record.mtp and record.block_count and (
            record.draft_node < 0 or state.drafts.core.nodes[record.draft_node].base != record.node):
        raise InvariantError(f"checkpoint {record_id} has draft node {record.draft_node}, not one of {record.node}")


def _check_terminal(CacheState state, record_id):
    """The hash of a checkpoint is that of its block and the tokens behind it (text only)."""
    cdef const record_t* record = state.records.record_at(state.records.place_of(record_id))
    cdef int32_t slot = record.recurrent_slot
    cdef Py_ssize_t count = state.records._checkpoints[slot].tail_count
    if state.records._tail_media[slot].empty() and not hash_equal(record.terminal, state.index.text_hash(
            record.node, state.records._tails.data() + <size_t>slot * state.page_size, count)):
        raise InvariantError(f"checkpoint {record_id} has another hash than its tokens")


def _check_snapshots(CacheState state, held, held_partial):
    """Slots are referenced by exactly the leases that hold them and the checkpoint that keeps them."""
    kept = [0] * state.recurrent.capacity
    kept_partial = [0] * state.partial.capacity
    for record_id in state.records.lru_to_mru():
        place = state.records.place_of(record_id)
        if not state.records.is_checkpoint(place):
            continue
        slot = state.records.record_at(place).recurrent_slot
        kept[slot] += 1
        if state.records.record_at(place).partial_slot >= 0:
            kept_partial[state.records.record_at(place).partial_slot] += 1
        if state.records.is_listed(place) != (held[slot] == 0):
            raise InvariantError(
                f"checkpoint {record_id} (held {held[slot]}) is evictable: {state.records.is_listed(place)}")
    _check_slots("recurrent", state.pools.recurrent, held, kept)
    _check_slots("partial", state.pools.partial, held_partial, kept_partial)


def _check_slots(what, PagePool pool, held, kept):
    for slot in range(pool.core.capacity):
        if pool.core.active[slot] != held[slot] or pool.core.cache[slot] != kept[slot]:
            raise InvariantError(
                f"{what} snapshot {slot} has {pool.core.active[slot]} active and {pool.core.cache[slot]} cache "
                f"references, leases hold {held[slot]} and checkpoints {kept[slot]}")
