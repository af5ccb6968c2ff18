"""`Deadlines`: which requests have run out of time."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgellm.engine.records import RequestRecord


_PURGE_FLOOR = 64  # ended records are dropped whenever the heap has doubled


class Deadlines:
    """A heap of the accepted requests with a deadline; belongs to the actor.

    Looked at once a boundary, so a deadline takes effect at most a step late.  A parked actor need not wake for
    one: nothing waits then.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, RequestRecord]] = []
        self._purge_at = _PURGE_FLOOR

    def __len__(self) -> int:
        """Records held, of which some may have an outcome already."""
        return len(self._heap)

    def add(self, record: RequestRecord) -> None:
        """Watch a record; nothing to do for one without a deadline."""
        deadline = record.deadline
        if deadline is None:
            return
        heapq.heappush(self._heap, (deadline, int(record.id), record))
        if len(self._heap) >= self._purge_at:
            self._heap = [entry for entry in self._heap if not entry[2].outcome_published]
            heapq.heapify(self._heap)
            self._purge_at = max(_PURGE_FLOOR, 2 * len(self._heap))

    def expire(self, now: float) -> int:
        """End every record whose deadline has passed, as a cancel does.

        Args:
            now: seconds of `time.perf_counter()`.
        Returns:
            How many.
        """
        heap, expired = self._heap, 0
        while heap and (heap[0][0] <= now or heap[0][2].outcome_published):
            record = heapq.heappop(heap)[2]
            if not record.outcome_published:
                record.expire()
                expired += 1
        return expired
