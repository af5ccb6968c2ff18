"""C interface of the page ledger: one pool as plain arrays, and the inline moves on it.

The inline functions check nothing: their callers inside `_core` know that the page exists and that the move
is legal.  The Python methods of `PagePool` check everything.
"""

cimport cython
from libc.stdint cimport int32_t
from libcpp.vector cimport vector

from edgellm._core.types cimport page_id_t


cdef struct pool_t:
    int32_t capacity
    int32_t free_head       # ring place of the page handed out next
    int32_t free_count
    int32_t* active         # [capacity] references held by leases
    int32_t* cache          # [capacity] references held by the index
    page_id_t* ring         # [capacity] circular FIFO of free pages


cdef inline bint pool_is_free(const pool_t* pool, page_id_t page) noexcept nogil:
    return pool.active[page] == 0 and pool.cache[page] == 0


cdef inline void pool_push_free(pool_t* pool, page_id_t page) noexcept nogil:
    """Put a page that just lost its last reference behind all other free pages."""
    cdef int32_t place = pool.free_head + pool.free_count
    if place >= pool.capacity:
        place -= pool.capacity
    pool.ring[place] = page
    pool.free_count += 1


cdef inline page_id_t pool_take(pool_t* pool) noexcept nogil:
    """Hand out the page that has been free longest, with one active reference; one must be free."""
    cdef page_id_t page = pool.ring[pool.free_head]
    pool.free_head += 1
    if pool.free_head == pool.capacity:
        pool.free_head = 0
    pool.free_count -= 1
    pool.active[page] = 1
    return page


cdef inline void pool_untake(pool_t* pool, page_id_t page) noexcept nogil:
    """Undo the latest `pool_take`: the page is the first to be handed out again."""
    pool.free_head = (pool.free_head if pool.free_head else pool.capacity) - 1
    pool.ring[pool.free_head] = page
    pool.free_count += 1
    pool.active[page] = 0


cdef inline void pool_pin(pool_t* pool, page_id_t page) noexcept nogil:
    pool.active[page] += 1


cdef inline bint pool_unpin(pool_t* pool, page_id_t page) noexcept nogil:
    """Drop an active reference; True when no lease holds the page any more."""
    pool.active[page] -= 1
    if pool.active[page] != 0:
        return False
    if pool.cache[page] == 0:
        pool_push_free(pool, page)
    return True


cdef inline void pool_add_cache(pool_t* pool, page_id_t page) noexcept nogil:
    pool.cache[page] += 1


cdef inline bint pool_drop_cache(pool_t* pool, page_id_t page) noexcept nogil:
    """Drop a cache reference; True when that freed the page."""
    pool.cache[page] -= 1
    if not pool_is_free(pool, page):
        return False
    pool_push_free(pool, page)
    return True


@cython.final
cdef class PagePool:
    """See page_ledger.pyx.  `core` points into the vectors, which never change size."""

    cdef pool_t core
    cdef bint sealed            # owned by a manager: the Python mutators are off
    cdef vector[int32_t] _active
    cdef vector[int32_t] _cache
    cdef vector[page_id_t] _ring

    cdef page_id_t checked(self, object page) except -1
    cdef int check_mutable(self) except -1


@cython.final
cdef class ResourcePools:
    cdef readonly PagePool base
    cdef readonly PagePool draft
    cdef readonly PagePool recurrent
    cdef readonly PagePool partial

    cdef void seal(self) noexcept
