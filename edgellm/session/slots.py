"""`ResidentSlotPool`: who owns which slot, and which residency of it."""

from __future__ import annotations

from edgellm.errors import InvalidArgumentError, InvariantError
from edgellm.session.types import ResidentRef

_MAX_EPOCH = 2**64 - 1


class ResidentSlotPool:
    """Hands out `ResidentRef`s; a ref is never handed out twice.

    The first refs come lowest slot first, later ones last released first, so that two ranks that make the
    same calls hold equal refs.  A slot may be released only after all device work on its row completed.
    """

    __slots__ = ("_epochs", "_free", "_live")

    def __init__(self, capacity: int) -> None:
        """Raises: InvalidArgumentError: `capacity` is below 1."""
        if capacity < 1:
            raise InvalidArgumentError(f"the slot pool has capacity {capacity}; it needs at least 1")
        self._epochs = [1] * capacity
        self._live = [False] * capacity
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def capacity(self) -> int:
        return len(self._epochs)

    def available(self) -> int:
        """Slots that `acquire` could still hand out."""
        return len(self._free)

    def acquire(self) -> ResidentRef | None:
        """A ref to a free slot, or None when every slot is taken."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._live[slot] = True
        return ResidentRef(slot, self._epochs[slot])

    def contains(self, ref: ResidentRef) -> bool:
        """Whether `ref` is the live owner of its slot."""
        return 0 <= ref.slot < len(self._epochs) and self._live[ref.slot] and self._epochs[ref.slot] == ref.epoch

    def release(self, ref: ResidentRef) -> bool:
        """Free `ref`'s slot under a new epoch; False (and no change) when `ref` is not the live owner."""
        if not self.contains(ref):
            return False
        if ref.epoch >= _MAX_EPOCH:
            raise InvariantError(f"slot {ref.slot} used up its {_MAX_EPOCH} epochs; open a new session")
        self._live[ref.slot] = False
        self._epochs[ref.slot] += 1
        self._free.append(ref.slot)
        return True

    def check_invariants(self) -> None:
        """Recount: a slot is free exactly when it is not live.

        Raises:
            InvariantError: the free list and the live flags disagree.
        """
        free = sorted(self._free)
        dead = [slot for slot, live in enumerate(self._live) if not live]
        if free != dead:
            raise InvariantError(f"slot pool: the free list holds {free} but the slots without owner are {dead}")
