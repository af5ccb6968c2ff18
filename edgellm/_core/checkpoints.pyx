"""Recurrent checkpoints: snapshot slots are reserved, published, superseded and restored from.

A checkpoint of L tokens hangs at the node of block f-1 (at the namespace root for f = 0) and holds the tokens behind
that block.  f = L // P; with MTP f = (L-1) // P, because the draft entry of token L-1 is written again with the next
token, so the page that holds it is always private.

Which snapshot goes first: what expired, then what a deeper checkpoint superseded, oldest mark first; then what hangs
at the next leaf that the pages' eviction order would take.  So snapshots and pages agree about what is worth keeping.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t
from libcpp.vector cimport vector

from edgellm._core.block_hash cimport TokenChain, from_hash128
from edgellm._core.block_index cimport NO_NODE
from edgellm._core.cache_state cimport CacheRequestLease, CacheState, reservation_t
from edgellm._core.lru cimport lru_front, lru_next
from edgellm._core.page_ledger cimport pool_add_cache, pool_take
from edgellm._core.publication cimport (
    adopt,
    adopt_draft,
    commit,
    endpoint,
    find_path,
    published_t,
    request_t,
    stage,
    staged_t,
    unstage,
)
from edgellm._core.records cimport MAX_RECORDS_AT_NODE, NO_RECORD, NO_SLOT, empty_record, record_t
from edgellm._core.types cimport block_hash_t, node_id_t, page_id_t

from edgellm.cache.types import CheckpointKind

cdef int _TAIL = CheckpointKind.TAIL
cdef int _LADDER = CheckpointKind.LADDER

cdef enum:
    # Nodes of the eviction order, leaves or not, that are looked at for a fitting checkpoint; then age decides.
    MAX_VICTIM_STEPS = 64


# Reservation

cdef bint snapshots_fit(CacheState state, bint needs_partial) noexcept nogil:
    """Whether slots are free or a checkpoint that nobody holds can be evicted for them."""
    if state.recurrent.free_count == 0 and state.records.checkpoints.size == 0:
        return False
    return not needs_partial or state.partial.free_count > 0 or state.records.partials.size > 0


cdef int32_t _victim_at(CacheState state, node_id_t node, bint needs_partial) noexcept nogil:
    """The oldest checkpoint of an unheld leaf (among its newest few), or NO_RECORD."""
    cdef int32_t place = state.records.head_at(node)
    cdef int32_t found = NO_RECORD
    cdef int _i
    for _i in range(MAX_RECORDS_AT_NODE):
        if place == NO_RECORD:
            break
        if not needs_partial or state.records.record_at(place).partial_slot != NO_SLOT:
            found = place
        place = state.records.next_at(place)
    return found


cdef int32_t _victim(CacheState state, bint needs_partial) noexcept nogil:
    """The checkpoint that goes next for a recurrent slot, or for a partial one; there is one."""
    cdef int32_t oldest = state.records.partial_victim() if needs_partial else state.records.checkpoint_victim()
    cdef int32_t place = state.records.stale_partial_victim() if needs_partial else state.records.stale_victim()
    cdef node_id_t node
    cdef int _i
    if place != NO_RECORD:
        return place
    if state.records.node_at(oldest) < 0:
        return oldest       # within the first block: no node stands for it, and it saves little
    node = lru_front(&state.tree.lru)
    for _i in range(MAX_VICTIM_STEPS):
        if node == NO_NODE:
            break
        if state.tree.nodes[node].child_count == 0:
            place = _victim_at(state, node, needs_partial)
            if place != NO_RECORD:
                return place
        node = lru_next(&state.tree.lru, node)
    return oldest


cdef int reserve(CacheState state, CacheRequestLease lease, bint needs_partial) except -1:
    """Take snapshot slots for a capture: 1, or 0 under pressure (nothing changed then).

    The last entry of `lease.reservations` names them.
    """
    cdef reservation_t reservation
    if not snapshots_fit(state, needs_partial):
        return 0
    state.step()
    lease.reservations.reserve(lease.reservations.size() + 1)
    while needs_partial and state.partial.free_count == 0:
        state.evict_checkpoint(_victim(state, True))
    while state.recurrent.free_count == 0:
        state.evict_checkpoint(_victim(state, False))
    reservation.recurrent_slot = pool_take(state.recurrent)
    reservation.partial_slot = pool_take(state.partial) if needs_partial else NO_SLOT
    reservation.written = False
    lease.reservations.push_back(reservation)
    state.version += 1
    return 1


cdef Py_ssize_t find_reservation(CacheRequestLease lease, int32_t recurrent_slot, int32_t partial_slot) noexcept nogil:
    """Which of the lease's reservations has exactly these slots, or -1."""
    cdef size_t i
    for i in range(lease.reservations.size()):
        if (lease.reservations[i].recurrent_slot == recurrent_slot
                and lease.reservations[i].partial_slot == partial_slot):
            return i
    return -1


cdef void retire(CacheState state, CacheRequestLease lease, Py_ssize_t which) noexcept nogil:
    """Let go of a reservation: published slots stay with their checkpoint, others are free."""
    cdef reservation_t reservation = lease.reservations[which]
    lease.reservations[which] = lease.reservations.back()
    lease.reservations.pop_back()
    state.unpin_snapshots(reservation.recurrent_slot, reservation.partial_slot, lease.retention, lease.expiry)
    state.version += 1


# Publication

cdef node_id_t _node_after(
    CacheState state, CacheRequestLease lease, TokenChain chain, Py_ssize_t blocks, const staged_t* staged
) except? -1:
    """Node or page of block blocks-1 of a staged publication; the root (NO_NODE without one) for no block."""
    return endpoint(state, lease, blocks, staged) if blocks else state.index.find_namespace(chain.key_bytes)


cdef int32_t _same_key(
    CacheState state, CacheRequestLease lease, TokenChain chain, int64_t exact_length, bint mtp,
    const staged_t* staged
) except? -1:
    """The checkpoint that stands for the same tokens already, or NO_RECORD.

    At a page boundary a plain one hangs one block deeper than one with MTP, so the other place is looked at as well.
    """
    cdef Py_ssize_t blocks = <Py_ssize_t>((exact_length - mtp) // state.page_size)
    cdef node_id_t node = _node_after(state, lease, chain, blocks, staged)
    cdef int32_t place = state.records.find_checkpoint(node, chain, exact_length, blocks * state.page_size)
    cdef node_id_t other = NO_NODE
    if place != NO_RECORD or exact_length % state.page_size:
        return place
    if not mtp:
        blocks -= 1
        other = _node_after(state, lease, chain, blocks, staged)
    elif node < NO_NODE or state.tree.nodes[node].indexed:
        state.index.match(chain, node, blocks, blocks + 1, &other)
        blocks += 1
    return state.records.find_checkpoint(other, chain, exact_length, blocks * state.page_size)


cdef bint _drafts_are_private(CacheState state, CacheRequestLease lease, Py_ssize_t count) noexcept nogil:
    """Whether each unpublished draft page in front of a checkpoint may become a draft node."""
    cdef Py_ssize_t i
    for i in range(lease.published_draft_block_count, count):
        if state.draft.active[lease.draft_pages[i]] != 1:
            return False
    return True


cdef int32_t _prepare(
    CacheState state, CacheRequestLease lease, TokenChain chain, int64_t exact_length, block_hash_t terminal,
    const reservation_t* reservation, int kind, node_id_t node
) except -1:
    """Make the record; the last thing that can fail."""
    cdef record_t record = empty_record()
    cdef Py_ssize_t blocks = <Py_ssize_t>((exact_length - lease.paired) // state.page_size)
    state.step()
    record.terminal = terminal
    record.exact_length = exact_length
    record.node = node
    record.block_count = <int32_t>blocks
    record.recurrent_slot = reservation.recurrent_slot
    record.partial_slot = reservation.partial_slot
    record.mtp = lease.paired
    record.kind = <uint8_t>kind
    record.owner = lease.serial
    state.step()
    return state.records.add_checkpoint(record, chain, blocks * state.page_size)


cdef void _claim(CacheState state, CacheRequestLease lease, int32_t place) noexcept nogil:
    """Give a new checkpoint what it keeps: its slots, its draft node, its namespace.  The reservation holds it."""
    cdef const record_t* record = state.records.record_at(place)
    cdef page_id_t draft
    if record.node < NO_NODE:
        state.index.hold_root(record.node)
    pool_add_cache(state.recurrent, record.recurrent_slot)
    if record.partial_slot != NO_SLOT:
        pool_add_cache(state.partial, record.partial_slot)
    if lease.paired and record.block_count:
        draft = lease.draft_pages[record.block_count - 1]
        state.records._records[place].draft_node = draft
        state.draft_records[draft] += 1
    state.records.raise_retention(place, lease.retention, lease.expiry)


cdef void _supersede(
    CacheState state, int32_t place, TokenChain chain, const vector[int64_t]* keep
) noexcept nogil:
    """Mark the shallower checkpoints on the path that the one at `place` makes less useful."""
    cdef node_id_t node = state.records.node_at(place)
    cdef Py_ssize_t blocks = state.records.record_at(place).block_count
    cdef int32_t other
    cdef int _i
    while True:
        other = state.records.head_at(node) if state.index.child_count_of(node) <= 1 else NO_RECORD
        for _i in range(MAX_RECORDS_AT_NODE):
            if other == NO_RECORD:
                break
            if _is_superseded_by(state, other, place, chain, blocks * state.page_size, keep):
                state.records.set_superseded(other, True)
            other = state.records.next_at(other)
        if node < NO_NODE:
            return
        node = state.tree.nodes[node].parent
        blocks -= 1


cdef bint _is_superseded_by(
    CacheState state, int32_t other, int32_t place, TokenChain chain, Py_ssize_t first, const vector[int64_t]* keep
) noexcept nogil:
    """Whether a deeper checkpoint makes `other` less useful: an end or a rung of another request that did not part
    here, or an earlier end of the same request; never a length that the policy wants to keep."""
    cdef const record_t* old = state.records.record_at(other)
    cdef const record_t* new = state.records.record_at(place)
    cdef size_t i
    if old.exact_length >= new.exact_length or (old.kind != _TAIL and old.kind != _LADDER):
        return False
    if old.owner == new.owner and not (old.kind == _TAIL and new.kind == _TAIL):
        return False
    if not state.records._tail_matches(other, chain, first):
        return False
    for i in range(keep.size()):
        if keep[0][i] == old.exact_length:
            return False
    return True


cdef int publish_checkpoint(
    CacheState state, CacheRequestLease lease, TokenChain chain, int64_t exact_length,
    const reservation_t* reservation, int kind, const vector[int64_t]* keep, published_t* out
) except -1:
    """Publish the blocks in front of a checkpoint, and the checkpoint.  The caller checked all arguments."""
    cdef request_t request
    cdef staged_t staged
    cdef int32_t old = NO_RECORD
    cdef int32_t place = NO_RECORD
    # Before the look at the tree: Python objects may make Python collect a dropped lease, which changes the tree.
    cdef block_hash_t terminal = from_hash128(chain.prefix_hash(exact_length))
    request.count = <Py_ssize_t>((exact_length - lease.paired) // state.page_size)
    request.tail = 0
    request.drafts = lease.paired
    request.endpoint = False
    request.need_root = request.count == 0
    stage(state, lease, chain, &request, &staged)
    try:
        if staged.end >= request.count and (not lease.paired or _drafts_are_private(state, lease, request.count)):
            old = _same_key(state, lease, chain, exact_length, lease.paired, &staged)
            if old == NO_RECORD or (lease.paired and not state.records.record_at(old).mtp):
                place = _prepare(state, lease, chain, exact_length, terminal, reservation, kind,
                                 endpoint(state, lease, request.count, &staged) if request.count else staged.root)
    except BaseException:
        unstage(state, &staged)
        raise
    commit(state, lease, chain, &request, &staged, out)
    if place != NO_RECORD:
        _claim(state, lease, place)
        _settle_new(state, place, old, chain, keep)
        out.record_id = state.records.id_at(place)
    elif old != NO_RECORD:
        state.records.touch_at(old)
        out.record_id = state.records.id_at(old)
        out.existing_record = True
    if staged.root != NO_NODE:
        state.index.close_namespace_if_empty(staged.root)
    return 0


cdef void _settle_new(
    CacheState state, int32_t place, int32_t replaced, TokenChain chain, const vector[int64_t]* keep
) noexcept nogil:
    """What a new checkpoint means for the old ones: one is replaced, some are superseded, one may be too many."""
    cdef node_id_t node
    if replaced != NO_RECORD:
        node = state.records.node_at(replaced)
        state.erase_record(replaced, False)
        state.trim_node(node, False)
    _supersede(state, place, chain, keep)
    if state.records.limit >= 0 and state.records.size > state.records.limit:
        state.evict_checkpoint(state.records.front())


# Restoring, later than at admission

cdef int32_t _deeper_checkpoint(
    CacheState state, CacheRequestLease lease, TokenChain chain, int64_t committed, Py_ssize_t found,
    Py_ssize_t* blocks
) except? -2:
    """The deepest usable checkpoint behind `committed` on the path of `found` more blocks (in scratch)."""
    cdef Py_ssize_t start = lease.published_block_count
    cdef node_id_t root = state.index.find_namespace(chain.key_bytes)
    cdef node_id_t node
    cdef int32_t place
    blocks[0] = start + found
    while root != NO_NODE and blocks[0] >= start:
        if blocks[0] > start:
            node = state.scratch[blocks[0] - start - 1]
        else:
            node = lease.pages[start - 1] if start else root
        place = state.records.longest_checkpoint(
            node, chain, blocks[0] * state.page_size, chain.token_count(), lease.paired)
        if place != NO_RECORD:
            return place if state.records.record_at(place).exact_length > committed else NO_RECORD
        blocks[0] -= 1
    return NO_RECORD


cdef int64_t resume_deeper(CacheState state, CacheRequestLease lease, TokenChain chain, int64_t committed) except -1:
    """Share the pages in front of a deeper checkpoint and hold its snapshots; the caller checked the arguments.

    Returns:
        The checkpoint's length, or `committed` when there is none.
    """
    cdef Py_ssize_t limit = min((chain.token_count() - 1) // state.page_size, <Py_ssize_t>lease.pages.size() - 1)
    cdef Py_ssize_t i, found
    cdef Py_ssize_t blocks = 0
    cdef int32_t place
    cdef const record_t* record
    state.check_overlap(lease, chain, lease.published_block_count)
    if lease.paired:
        limit = min(limit, <Py_ssize_t>lease.draft_pages.size() - 1)
    if limit < lease.published_block_count:
        return committed        # no page of its own behind the published blocks to restore the unfilled one into
    found = find_path(state, lease, chain, limit)
    place = _deeper_checkpoint(state, lease, chain, committed, found, &blocks)
    if place == NO_RECORD:
        return committed
    record = state.records.record_at(place)
    if lease.paired:
        state.step()
        state.draft_scratch.resize(blocks)
        if blocks:
            state.drafts.path_into(record.draft_node, blocks, state.draft_scratch.data())
    adopt(state, lease, blocks - lease.published_block_count)
    if lease.paired:
        # Deepest first: what the lease leaves of another lineage is listed children before parents.
        for i in range(blocks - 1, -1, -1):
            adopt_draft(state, lease, i, state.draft_scratch[i])
        lease.published_draft_block_count = lease.shared_draft_block_count = blocks
    lease.shared_block_count = blocks
    lease.reuse_length = <Py_ssize_t>record.exact_length
    lease.recurrent_slot = record.recurrent_slot
    lease.partial_slot = record.partial_slot
    state.records.set_superseded(place, False)
    state.records.touch_at(place)
    state.pin_snapshots(lease.recurrent_slot, lease.partial_slot)
    state.version += 1
    return record.exact_length
