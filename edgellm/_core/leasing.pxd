"""C interface of leasing: plans become leases, leases grow."""

from libc.stdint cimport int64_t

from edgellm._core.cache_state cimport CacheRequestLease, CacheState
from edgellm._core.planners cimport ReusePlan


cdef struct lease_options_t:
    Py_ssize_t min_pages        # pages the lease has at least
    Py_ssize_t min_draft_pages
    Py_ssize_t reserve_pages    # base pages that must stay available
    Py_ssize_t reserve_draft_pages
    int priority
    int64_t expiry


cdef inline int64_t pages_for(int64_t tokens, int64_t page_size) noexcept nogil:
    return tokens // page_size + (tokens % page_size != 0)


cdef inline bint has_pages(CacheRequestLease lease, int64_t num_pages, int64_t num_draft_pages) noexcept nogil:
    """Whether the lease has that many pages of each kind already."""
    return num_pages <= <int64_t>lease.pages.size() and num_draft_pages <= <int64_t>lease.draft_pages.size()


cdef bint plan_fits(CacheState state, ReusePlan plan, const lease_options_t* options) noexcept nogil
cdef CacheRequestLease make_lease(CacheState state, ReusePlan plan, const lease_options_t* options)
cdef bint growth_fits(
    CacheState state, CacheRequestLease lease, int64_t num_pages, int64_t num_draft_pages
) noexcept nogil
cdef int grow_to(CacheState state, CacheRequestLease lease, int64_t num_pages, int64_t num_draft_pages) except -1
cdef void undo_growth(CacheState state, CacheRequestLease lease, Py_ssize_t num_pages) noexcept nogil
