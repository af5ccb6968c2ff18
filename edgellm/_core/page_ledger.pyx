"""Page ledger: fixed pools, two kinds of reference for each page, and FIFO free lists.

A page is free exactly when it has neither an *active* reference (a lease reads or writes it now) nor a *cache*
reference (the block index wants to keep it).  Pages go to the tail of the free list and leave from its head, so the
time between free and reuse is as long as it can be.  Initially the list is 0, 1, ..., n-1.
"""

cimport cython
from libc.stdint cimport INT32_MAX, int32_t

from edgellm._core.types cimport page_id_t

from edgellm.cache.types import ResourceDemand, ResourceId, ResourceType
from edgellm.errors import ContractViolation, InvalidArgumentError, InvariantError


cdef int _raise_bad_page(object page, int32_t capacity) except -1:
    raise InvalidArgumentError(f"page {page!r} is not in this pool; ids are integers from 0 to {capacity - 1}")


cdef int _raise_reference(str what, page_id_t page) except -1:
    raise InvalidArgumentError(f"page {page}: {what}; nothing was changed")


@cython.final
cdef class PagePool:
    """One pool of `capacity` pages with reference counts.  Single writer; not thread safe.

    Every method with a page id raises `InvalidArgumentError` for an id outside the pool and then changes nothing.
    """

    def __cinit__(self, capacity):
        if not isinstance(capacity, int) or isinstance(capacity, bool) or not 0 <= capacity <= INT32_MAX // 2:
            raise InvalidArgumentError(
                f"pool capacity {capacity!r} must be an integer from 0 to {INT32_MAX // 2} pages")
        cdef int32_t n = capacity
        cdef int32_t i
        self._active.resize(n, 0)
        self._cache.resize(n, 0)
        self._ring.resize(n)
        for i in range(n):
            self._ring[i] = i
        self.core.capacity = n
        self.core.free_head = 0
        self.core.free_count = n
        self.core.active = self._active.data()
        self.core.cache = self._cache.data()
        self.core.ring = self._ring.data()

    @property
    def capacity(self):
        return self.core.capacity

    @property
    def free_count(self):
        return self.core.free_count

    cdef page_id_t checked(self, object page) except -1:
        """The id as a C integer, or `InvalidArgumentError`."""
        if not isinstance(page, int) or not 0 <= page < self.core.capacity:
            _raise_bad_page(page, self.core.capacity)
        return page

    cdef int check_mutable(self) except -1:
        if self.sealed:
            raise ContractViolation("this pool belongs to a manager, which alone may change it; read it only")
        return 0

    def active_ref(self, page):
        """How many lease references `page` has."""
        return self.core.active[self.checked(page)]

    def cache_ref(self, page):
        """How many cache references `page` has."""
        return self.core.cache[self.checked(page)]

    def is_free(self, page):
        return pool_is_free(&self.core, self.checked(page))

    def free_list(self):
        """Ids of the free pages in the order in which they will be handed out (a new list)."""
        cdef int32_t i
        return [self.core.ring[(self.core.free_head + i) % self.core.capacity] for i in range(self.core.free_count)]

    def allocate(self, count):
        """Hand out `count` pages with one active reference each.

        Returns:
            The ids, longest-free first, or None when fewer are free (nothing changes then).
        Raises:
            InvalidArgumentError: `count` is negative.
        """
        self.check_mutable()
        if count < 0:
            raise InvalidArgumentError(f"cannot allocate {count} pages; the count must be 0 or more")
        if count > self.core.free_count:
            return None
        return [pool_take(&self.core) for _ in range(count)]

    def add_active_ref(self, page):
        """Add a lease reference to a page that is in use; a free page only comes back through `allocate`."""
        self.check_mutable()
        cdef page_id_t p = self.checked(page)
        if pool_is_free(&self.core, p):
            _raise_reference("a free page takes no reference, allocate it instead", p)
        if self.core.active[p] == INT32_MAX:
            _raise_reference(f"active references are at their limit of {INT32_MAX}", p)
        pool_pin(&self.core, p)

    def add_cache_ref(self, page):
        """Add a cache reference to a page that is in use."""
        self.check_mutable()
        cdef page_id_t p = self.checked(page)
        if pool_is_free(&self.core, p):
            _raise_reference("a free page takes no reference, allocate it instead", p)
        if self.core.cache[p] == INT32_MAX:
            _raise_reference(f"cache references are at their limit of {INT32_MAX}", p)
        pool_add_cache(&self.core, p)

    def release_active_ref(self, page):
        """Drop a lease reference; the page goes to the tail of the free list when it was the last of either kind."""
        self.check_mutable()
        cdef page_id_t p = self.checked(page)
        if self.core.active[p] == 0:
            _raise_reference("it has no active reference to release", p)
        pool_unpin(&self.core, p)

    def release_cache_ref(self, page):
        """Drop a cache reference; the page goes to the tail of the free list when it was the last of either kind."""
        self.check_mutable()
        cdef page_id_t p = self.checked(page)
        if self.core.cache[p] == 0:
            _raise_reference("it has no cache reference to release", p)
        pool_drop_cache(&self.core, p)

    def check_invariants(self):
        """Recount the pool.

        Raises:
            InvariantError: a count is negative, or the free list is not exactly the set of unreferenced pages.
        Cost: O(capacity).
        """
        listed = self.free_list()
        if len(set(listed)) != len(listed):
            raise InvariantError(f"a page is on the free list twice: {sorted(listed)}")
        free = {p for p in range(self.core.capacity) if pool_is_free(&self.core, p)}
        if free != set(listed):
            raise InvariantError(f"free list and references disagree about pages {sorted(free ^ set(listed))}")
        for p in range(self.core.capacity):
            if self.core.active[p] < 0 or self.core.cache[p] < 0:
                raise InvariantError(
                    f"page {p} has {self.core.active[p]} active and {self.core.cache[p]} cache references")


@cython.final
cdef class ResourcePools:
    """The four typed pools, driven together.  Single writer; not thread safe."""

    def __cinit__(self, capacities):
        if not capacities.is_non_negative():
            raise InvalidArgumentError(f"pool capacities must be 0 or more, got {capacities}")
        self.base = PagePool(capacities.base_kv_pages)
        self.draft = PagePool(capacities.draft_kv_pages)
        self.recurrent = PagePool(capacities.recurrent_snapshot_slots)
        self.partial = PagePool(capacities.partial_kv_snapshot_slots)

    cdef void seal(self) noexcept:
        """From now on only the owner changes the pools."""
        self.base.sealed = self.draft.sealed = self.recurrent.sealed = self.partial.sealed = True

    def pool(self, kind):
        """The pool of one `ResourceType`."""
        return (self.base, self.draft, self.recurrent, self.partial)[ResourceType(kind)]

    @property
    def capacities(self):
        return ResourceDemand(*(p.capacity for p in (self.base, self.draft, self.recurrent, self.partial)))

    def capacity(self, kind):
        return self.pool(kind).capacity

    def free_count(self, kind):
        return self.pool(kind).free_count

    def can_allocate(self, demand):
        """Whether every pool has enough free units now; False for a negative demand.  Pure."""
        return demand.is_non_negative() and all(demand.get(kind) <= self.free_count(kind) for kind in ResourceType)

    def _check_demand(self, demand):
        if not demand.is_non_negative():
            raise InvalidArgumentError(f"a demand must be 0 or more in every pool, got {demand}")

    def allocate(self, demand):
        """Hand out units of all pools in one step, each with one active reference.

        Returns:
            `ResourceId`s grouped by type in enum order, or None when any pool is short (nothing changes then).
        Raises:
            InvalidArgumentError: the demand is negative somewhere.
        """
        self._check_demand(demand)
        if not self.can_allocate(demand):
            return None
        return [
            ResourceId(kind, index) for kind in ResourceType for index in self.pool(kind).allocate(demand.get(kind))]

    def allocate_into(self, demand, int32_t[::1] out):
        """`allocate` into the caller's storage, without allocating memory.

        Args:
            out: int32, as long as the demand has units in all; ids in enum order of their types.
        Returns:
            False when any pool is short; `out` is untouched then.
        Raises:
            InvalidArgumentError: negative demand, or `out` has another size.
        """
        self._check_demand(demand)
        cdef Py_ssize_t place = 0
        cdef int32_t _i
        cdef PagePool pool
        wanted = sum(demand.as_tuple())
        if out.shape[0] != wanted:
            raise InvalidArgumentError(
                f"out holds {out.shape[0]} ids but the demand is {wanted} units; make them equal")
        self.base.check_mutable()
        if not self.can_allocate(demand):
            return False
        for kind in ResourceType:
            pool = self.pool(kind)
            for _i in range(<int32_t>demand.get(kind)):
                out[place] = pool_take(&pool.core)
                place += 1
        return True

    def active_ref(self, resource):
        return self.pool(resource.type).active_ref(resource.index)

    def cache_ref(self, resource):
        return self.pool(resource.type).cache_ref(resource.index)

    def add_active_ref(self, resource):
        self.pool(resource.type).add_active_ref(resource.index)

    def add_cache_ref(self, resource):
        self.pool(resource.type).add_cache_ref(resource.index)

    def release_active_ref(self, resource):
        self.pool(resource.type).release_active_ref(resource.index)

    def release_cache_ref(self, resource):
        self.pool(resource.type).release_cache_ref(resource.index)

    def check_invariants(self):
        """Recount all four pools; raises `InvariantError`."""
        for kind in ResourceType:
            self.pool(kind).check_invariants()
