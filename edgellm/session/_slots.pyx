"""`ResidentSlotPool`: who owns which slot, and which residency of it."""

cimport cython
from cpython.object cimport PyObject_GenericSetAttr
from libc.stdint cimport UINT64_MAX, int32_t, int64_t, uint8_t, uint64_t
from libcpp.vector cimport vector

from edgellm.errors import InvalidArgumentError, InvariantError
from edgellm.session.types import ResidentRef


cdef object ref_of(int32_t slot, uint64_t epoch):
    """`ResidentRef(slot, epoch)`, set as a frozen dataclass sets itself but without its Python constructor."""
    ref = ResidentRef.__new__(ResidentRef)
    PyObject_GenericSetAttr(ref, "slot", slot)
    PyObject_GenericSetAttr(ref, "epoch", epoch)
    return ref


@cython.final
cdef class ResidentSlotPool:
    """Hands out `ResidentRef`s; a ref is never handed out twice.

    The first refs come lowest slot first, later ones last released first, so that two ranks that make the
    same calls hold equal refs.  A slot may be released only after all device work on its row completed.

    Threads: belongs to the session's thread.  Cost: no call but `check_invariants` depends on the capacity.
    """

    cdef vector[uint64_t] _epochs
    cdef vector[uint8_t] _live
    cdef vector[int32_t] _free

    def __init__(self, capacity):
        """Raises: InvalidArgumentError: `capacity` is below 1."""
        if capacity < 1:
            raise InvalidArgumentError(f"the slot pool has capacity {capacity}; it needs at least 1")
        cdef int32_t slots = capacity
        cdef int32_t slot
        self._epochs.assign(slots, 1)
        self._live.assign(slots, 0)
        self._free.clear()
        self._free.reserve(slots)
        for slot in range(slots - 1, -1, -1):
            self._free.push_back(slot)

    cdef int32_t owned_slot(self, ref) except -2:
        """The slot that `ref` is the live owner of, or -1."""
        cdef int64_t slot
        cdef uint64_t epoch
        try:
            slot = ref.slot
            epoch = ref.epoch
        except OverflowError:  # made up by a caller: no slot and no epoch is so large, or negative
            return -1
        if slot < 0 or slot >= <int64_t>self._epochs.size() or not self._live[slot] or self._epochs[slot] != epoch:
            return -1
        return <int32_t>slot

    @property
    def capacity(self):
        return self._epochs.size()

    def available(self):
        """Slots that `acquire` could still hand out."""
        return self._free.size()

    def acquire(self):
        """A ref to a free slot, or None when every slot is taken."""
        if self._free.empty():
            return None
        cdef int32_t slot = self._free.back()
        ref = ref_of(slot, self._epochs[slot])
        self._free.pop_back()
        self._live[slot] = 1
        return ref

    def contains(self, ref):
        """Whether `ref` is the live owner of its slot."""
        return self.owned_slot(ref) >= 0

    def release(self, ref):
        """Free `ref`'s slot under a new epoch; False (and no change) when `ref` is not the live owner."""
        cdef int32_t slot = self.owned_slot(ref)
        if slot < 0:
            return False
        if self._epochs[slot] == UINT64_MAX:
            raise InvariantError(f"slot {slot} used up its {UINT64_MAX} epochs; open a new session")
        self._live[slot] = 0
        self._epochs[slot] += 1
        self._free.push_back(slot)
        return True

    def check_invariants(self):
        """Recount: a slot is free exactly when it is not live.

        Raises:
            InvariantError: the free list and the live flags disagree.
        """
        free = sorted(self._free)
        dead = [slot for slot, live in enumerate(self._live) if not live]
        if free != dead:
            raise InvariantError(f"slot pool: the free list holds {free} but the slots without owner are {dead}")
