"""A heap of expiry times over an id space: every item at most once, any item removable, never allocates after set-up.

The first item to expire is in front; of equal times the higher rank (the deeper block), so that a child always expires
before its ancestors.
"""

from libc.stdint cimport int32_t, int64_t


cdef struct expiry_t:
    int64_t expiry          # ns of the caller's clock
    int32_t rank            # of equal times the higher rank goes first, then the lower item
    int32_t item


cdef struct expiry_heap_t:
    int32_t size
    expiry_t* entries       # [capacity]
    int32_t* places         # [capacity] place of each item in `entries`; meaningless for an item that is not in


cdef inline bint expires_before(const expiry_t* a, const expiry_t* b) noexcept nogil:
    if a.expiry != b.expiry:
        return a.expiry < b.expiry
    if a.rank != b.rank:
        return a.rank > b.rank
    return a.item < b.item


cdef inline void heap_put(expiry_heap_t* heap, int32_t place, expiry_t entry) noexcept nogil:
    heap.entries[place] = entry
    heap.places[entry.item] = place


cdef inline void heap_settle(expiry_heap_t* heap, int32_t place, expiry_t entry) noexcept nogil:
    """Put `entry` into the hole at `place`, moving up or down what has to."""
    cdef int32_t child
    while place > 0 and expires_before(&entry, &heap.entries[(place - 1) // 2]):
        heap_put(heap, place, heap.entries[(place - 1) // 2])
        place = (place - 1) // 2
    while True:
        child = 2 * place + 1
        if child + 1 < heap.size and expires_before(&heap.entries[child + 1], &heap.entries[child]):
            child += 1
        if child >= heap.size or not expires_before(&heap.entries[child], &entry):
            break
        heap_put(heap, place, heap.entries[child])
        place = child
    heap_put(heap, place, entry)


cdef inline void heap_push(expiry_heap_t* heap, int32_t item, int64_t expiry, int32_t rank) noexcept nogil:
    """Add an item that is not in the heap."""
    cdef expiry_t entry
    entry.expiry = expiry
    entry.rank = rank
    entry.item = item
    heap.size += 1
    heap_settle(heap, heap.size - 1, entry)


cdef inline void heap_remove(expiry_heap_t* heap, int32_t item) noexcept nogil:
    """Take out an item that is in the heap."""
    cdef int32_t place = heap.places[item]
    heap.size -= 1
    if place != heap.size:
        heap_settle(heap, place, heap.entries[heap.size])
