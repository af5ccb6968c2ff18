"""`Backlog`: accepted requests that wait for a seat, in the order in which they get one."""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

from edgellm.engine.config import SchedulingPolicy

if TYPE_CHECKING:
    from edgellm.engine.records import RequestRecord


class Backlog:
    """Ordered by arrival, or by (priority, arrival) under the priority policy.

    A readmitted record keeps its arrival, so it returns to its old place before everything later.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._by_priority = policy is SchedulingPolicy.PRIORITY
        self._records: list[RequestRecord] = []

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: RequestRecord) -> None:
        insort(self._records, record, key=self._key)

    def head(self) -> RequestRecord:
        return self._records[0]

    def first_urgent(self) -> RequestRecord | None:
        """The first record with priority < 0, who may take a reserved seat."""
        return next((record for record in self._records if record.priority < 0), None)

    def remove(self, record: RequestRecord) -> None:
        self._records.remove(record)

    def take_cancelled(self) -> list[RequestRecord]:
        """Remove and return every cancelled record."""
        cancelled = [record for record in self._records if record.cancelled]
        if cancelled:
            self._records = [record for record in self._records if not record.cancelled]
        return cancelled

    def take_all(self) -> list[RequestRecord]:
        """Remove and return everything."""
        records, self._records = self._records, []
        return records

    def _key(self, record: RequestRecord) -> tuple[int, int]:
        return (record.priority if self._by_priority else 0, record.arrival)
