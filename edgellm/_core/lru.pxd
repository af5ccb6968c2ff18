"""Least-recently-used lists in classes, as links by item id, all inline: what goes first when room is short.

The items are the ids 0..capacity-1; the array of links has NUM_CLASSES entries more, the sentinels of the lists.
Eviction takes the front of the lowest class that has items.  Nothing here checks or allocates anything.
"""

from libc.stdint cimport int32_t, int64_t


cdef enum:
    # The classes, first to go first.
    CLASS_EXPIRED = 0       # past its time to live
    CLASS_SUPERSEDED = 1    # something better replaced it (checkpoints)
    CLASS_LOW = 2           # CLASS_LOW + RetentionPriority
    CLASS_NORMAL = 3
    CLASS_HIGH = 4
    NUM_CLASSES = 5
    UNLISTED = 255          # class of an item that is in no list
    NO_ITEM = -1


cdef enum:
    # Lifetimes.  One is never shortened: TIMED may get later or become FOREVER.
    LIFETIME_UNSET = 0      # nobody asked yet; counts as FOREVER when it is listed all the same
    LIFETIME_TIMED = 1      # expires at `expiry`
    LIFETIME_FOREVER = 2


cdef struct lru_link_t:
    int32_t prev            # item or sentinel; meaningless while unlisted
    int32_t next
    int32_t cls             # class of the list it is in, or UNLISTED; no byte: a store to one makes C reload all else


cdef struct lru_t:
    lru_link_t* links       # [capacity + NUM_CLASSES]; `capacity + cls` is the sentinel of class `cls`
    int32_t capacity        # items
    int32_t size            # items in all lists
    int32_t sizes[NUM_CLASSES]


cdef inline void lru_clear(lru_t* lru) noexcept nogil:
    """Empty every list and mark every item unlisted."""
    cdef int32_t i
    for i in range(lru.capacity):
        lru.links[i].cls = UNLISTED
    for i in range(NUM_CLASSES):
        lru.links[lru.capacity + i].prev = lru.capacity + i
        lru.links[lru.capacity + i].next = lru.capacity + i
        lru.links[lru.capacity + i].cls = i
        lru.sizes[i] = 0
    lru.size = 0


cdef inline void lru_init(lru_t* lru, lru_link_t* links, int32_t capacity) noexcept nogil:
    """Bind the lists to an array of `capacity + NUM_CLASSES` links."""
    lru.links = links
    lru.capacity = capacity
    lru_clear(lru)


cdef inline int lru_class(const lru_t* lru, int32_t item) noexcept nogil:
    """Class of a listed item, or UNLISTED."""
    return lru.links[item].cls


cdef inline bint lru_listed(const lru_t* lru, int32_t item) noexcept nogil:
    return lru.links[item].cls != UNLISTED


cdef inline void lru_append(lru_t* lru, int32_t item, int cls) noexcept nogil:
    """Make an unlisted item the most recently used one of class `cls`."""
    cdef lru_link_t* links = lru.links
    cdef int32_t sentinel = lru.capacity + cls
    cdef int32_t last = links[sentinel].prev
    links[item].prev = last
    links[item].next = sentinel
    links[item].cls = cls
    links[last].next = item
    links[sentinel].prev = item
    lru.sizes[cls] += 1
    lru.size += 1


cdef inline void lru_unlink(lru_t* lru, int32_t item) noexcept nogil:
    """Take a listed item out of its list."""
    cdef lru_link_t* links = lru.links
    links[links[item].prev].next = links[item].next
    links[links[item].next].prev = links[item].prev
    lru.sizes[links[item].cls] -= 1
    lru.size -= 1
    links[item].cls = UNLISTED


cdef inline int32_t lru_front_from(const lru_t* lru, int cls) noexcept nogil:
    """First item of the lowest non-empty class from `cls` on, or NO_ITEM."""
    while cls < NUM_CLASSES:
        if lru.sizes[cls]:
            return lru.links[lru.capacity + cls].next
        cls += 1
    return NO_ITEM


cdef inline int32_t lru_front(const lru_t* lru) noexcept nogil:
    """The next victim, or NO_ITEM."""
    return lru_front_from(lru, 0)


cdef inline int32_t lru_next(const lru_t* lru, int32_t item) noexcept nogil:
    """The victim after a listed `item`, across classes, or NO_ITEM; NO_ITEM stays NO_ITEM."""
    cdef int32_t after
    if item == NO_ITEM:
        return NO_ITEM
    after = lru.links[item].next
    return after if after < lru.capacity else lru_front_from(lru, after - lru.capacity + 1)


cdef inline bint lru_links_agree(const lru_t* lru) noexcept nogil:
    """Whether each list leads back the way it leads on, over items of its own class and as many as were counted."""
    cdef int32_t item, after, seen
    cdef int cls
    for cls in range(NUM_CLASSES):
        item = lru.capacity + cls
        seen = 0
        while True:
            after = lru.links[item].next
            if not 0 <= after < lru.capacity + NUM_CLASSES or lru.links[after].prev != item:
                return False
            if lru.links[after].cls != cls or seen > lru.sizes[cls]:
                return False
            if after >= lru.capacity:
                break
            seen += 1
            item = after
        if seen != lru.sizes[cls]:
            return False
    return True


cdef inline int retention_class(int priority, int lifetime, int64_t expiry, int64_t now) noexcept nogil:
    """Class in which something unused is listed."""
    return CLASS_EXPIRED if lifetime == LIFETIME_TIMED and expiry <= now else CLASS_LOW + priority
