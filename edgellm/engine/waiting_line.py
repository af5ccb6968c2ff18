"""`WaitingLine`: accepted requests that wait for room under `max_pending_requests`."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgellm.engine.command_queue import EngineChannel
    from edgellm.engine.records import RequestRecord


class WaitingLine:
    """First come, first served; belongs to the actor.

    The channel counts who stands in line, because the limit holds for the others only.
    """

    def __init__(self, channel: EngineChannel) -> None:
        self._channel = channel
        self._records: deque[RequestRecord] = deque()

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: RequestRecord) -> None:
        self._records.append(record)

    def take_with_room(self) -> list[RequestRecord]:
        """Remove and return those that may go on now."""
        taken = []
        while self._records and self._channel.take_room():
            taken.append(self._records.popleft())
        return taken

    def take_cancelled(self) -> list[RequestRecord]:
        """Remove and return every cancelled record."""
        cancelled = [record for record in self._records if record.cancelled]
        if cancelled:
            self._records = deque(record for record in self._records if not record.cancelled)
            self._channel.leave_line(len(cancelled))
        return cancelled

    def take_all(self) -> list[RequestRecord]:
        """Remove and return everything."""
        records, self._records = list(self._records), deque()
        self._channel.leave_line(len(records))
        return records
