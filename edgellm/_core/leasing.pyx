"""Leasing: how a plan becomes a lease, and how a lease grows.  A refusal changes nothing.

What is about to be shared is held before anything is evicted, so a hit is never eaten by its own request; feasibility
is known from counts alone.
"""

from cpython.ref cimport PyObject
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy
from libcpp.vector cimport vector

from edgellm._core.block_index cimport NO_NODE
from edgellm._core.cache_state cimport CacheRequestLease, CacheState, make_room
from edgellm._core.draft_index cimport NO_DRAFT
from edgellm._core.page_ledger cimport pool_untake
from edgellm._core.planners cimport ReusePlan
from edgellm._core.records cimport NO_RECORD
from edgellm._core.types cimport page_id_t


cdef inline Py_ssize_t _total_pages(ReusePlan plan, const lease_options_t* options) noexcept nogil:
    return max(plan.total_pages, options.min_pages)


cdef inline Py_ssize_t _total_drafts(ReusePlan plan, const lease_options_t* options) noexcept nogil:
    return max(plan.total_pages, options.min_draft_pages) if plan.paired else 0


cdef Py_ssize_t _unheld(const int32_t* active, const int32_t* pages, size_t num_pages, int32_t tail) noexcept nogil:
    """How many of the pages that a plan is about to hold are evictable now."""
    cdef Py_ssize_t count = tail >= 0 and active[tail] == 0
    cdef size_t i
    for i in range(num_pages):
        count += active[pages[i]] == 0
    return count


cdef bint plan_fits(CacheState state, ReusePlan plan, const lease_options_t* options) noexcept nogil:
    """Whether free pages and what eviction can take beside the plan's own pages suffice."""
    cdef Py_ssize_t fresh = _total_pages(plan, options) - <Py_ssize_t>plan.bindings.size()
    cdef Py_ssize_t room = state.available() - _unheld(
        state.base.active, plan.bindings.data(), plan.bindings.size(), plan.tail_page)
    if fresh + options.reserve_pages > room:
        return False
    if not plan.paired:
        return True
    fresh = _total_drafts(plan, options) - <Py_ssize_t>plan.draft_bindings.size()
    room = state.available_drafts() - _unheld(
        state.draft.active, plan.draft_bindings.data(), plan.draft_bindings.size(), plan.draft_tail_page)
    return fresh + options.reserve_draft_pages <= room


cdef void _hold(CacheState state, CacheRequestLease lease, ReusePlan plan) noexcept nogil:
    """Hold everything the plan shares, copies from or restores from."""
    state.pin_nodes(plan.bindings.data(), <Py_ssize_t>plan.bindings.size())
    state.pin_drafts(plan.draft_bindings.data(), <Py_ssize_t>plan.draft_bindings.size())
    if plan.tail_page != NO_NODE:
        state.pin_nodes(&plan.tail_page, 1)
    if plan.draft_tail_page != NO_DRAFT:
        state.pin_drafts(&plan.draft_tail_page, 1)
    if plan.record_place != NO_RECORD:
        state.records.set_superseded(plan.record_place, False)
        state.records.touch_at(plan.record_place)
        state.pin_snapshots(plan.recurrent_slot, plan.partial_slot)


cdef int _begin_with(vector[page_id_t]* out, const int32_t* shared, size_t num_shared, Py_ssize_t total) except -1:
    """A lease's pages begin with the shared ones and have room for all, and for some growth."""
    out.reserve(total + total // 8 + 4)
    out.resize(num_shared)
    if num_shared:
        memcpy(out.data(), shared, num_shared * sizeof(int32_t))
    return 0


cdef CacheRequestLease make_lease(CacheState state, ReusePlan plan, const lease_options_t* options):
    """The lease of a plan that fits: its bindings first, then private pages.

    Raises:
        MemoryError: nothing was changed.
    """
    cdef CacheRequestLease lease = CacheRequestLease.__new__(CacheRequestLease)
    cdef Py_ssize_t total = _total_pages(plan, options)
    cdef Py_ssize_t drafts = _total_drafts(plan, options)
    state.step()
    _begin_with(&lease.pages, plan.bindings.data(), plan.bindings.size(), total)
    if plan.paired:
        state.step()
        _begin_with(&lease.draft_pages, plan.draft_bindings.data(), plan.draft_bindings.size(), drafts)
    state.step()
    state.live.push_back(<PyObject*>lease)
    # From here on nothing fails.
    state.last_serial += 1
    lease.serial = state.last_serial
    lease.live_place = state.live.size() - 1
    lease.manager = state
    lease.mode = plan.mode
    lease.paired = plan.paired
    lease.shared_block_count = lease.published_block_count = <Py_ssize_t>plan.bindings.size()
    lease.shared_draft_block_count = lease.published_draft_block_count = <Py_ssize_t>plan.draft_bindings.size()
    lease.tail_page = plan.tail_page
    lease.draft_tail_page = plan.draft_tail_page
    lease.tail_token_count = plan.tail_token_count
    lease.reuse_length = plan.reuse_token_length
    lease.recurrent_slot = plan.recurrent_slot
    lease.partial_slot = plan.partial_slot
    lease.retention = options.priority
    lease.expiry = options.expiry
    lease.volatile_from = -1
    lease.valid = True
    _hold(state, lease, plan)
    state.take_pages(&lease.pages, total - <Py_ssize_t>plan.bindings.size())
    state.take_drafts(&lease.draft_pages, drafts - <Py_ssize_t>plan.draft_bindings.size())
    state.version += 1
    return lease


cdef bint growth_fits(
    CacheState state, CacheRequestLease lease, int64_t num_pages, int64_t num_draft_pages
) noexcept nogil:
    """Whether the lease can have that many pages in all."""
    return (num_pages - <int64_t>lease.pages.size() <= state.available()
            and num_draft_pages - <int64_t>lease.draft_pages.size() <= state.available_drafts())


cdef int grow_to(CacheState state, CacheRequestLease lease, int64_t num_pages, int64_t num_draft_pages) except -1:
    """Give the lease at least that many pages of each kind: 1 when it has them, 0 when refused (nothing changed)."""
    cdef int64_t short = num_pages - <int64_t>lease.pages.size()
    cdef int64_t draft_short = num_draft_pages - <int64_t>lease.draft_pages.size()
    if short <= 0 and draft_short <= 0:
        return 1
    if not growth_fits(state, lease, num_pages, num_draft_pages):
        return 0
    state.step()
    if short > 0:
        make_room(&lease.pages, num_pages)
    if draft_short > 0:
        make_room(&lease.draft_pages, num_draft_pages)
    state.take_pages(&lease.pages, short)
    state.take_drafts(&lease.draft_pages, draft_short)
    state.version += 1
    return 1


cdef void undo_growth(CacheState state, CacheRequestLease lease, Py_ssize_t num_pages) noexcept nogil:
    """Give the base pages behind the first `num_pages` back to where `grow_to` took them from, right after it.

    What was evicted for them stays evicted.
    """
    while <Py_ssize_t>lease.pages.size() > num_pages:
        pool_untake(state.base, lease.pages.back())
        lease.pages.pop_back()
