"""`Backlog`: accepted requests that wait for a seat, in the order in which they get one."""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

from edgellm.engine.config import SchedulingPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgellm.engine.records import RequestRecord


class Backlog:
    """Ordered by arrival, or by (priority, arrival) under the priority policy.

    With aging, waiting improves a record's place: it is worth one priority per `aging_seconds`.  All records age
    alike, so the order of two never changes and `priority + submitted_at / aging_seconds` sorts them for good.

    A readmitted record keeps its arrival, so it returns to its old place before everything later.
    """

    def __init__(self, policy: SchedulingPolicy, aging_seconds: float | None = None) -> None:
        self._by_priority = policy is SchedulingPolicy.PRIORITY
        self._aging_seconds = aging_seconds
        self._records: list[RequestRecord] = []

    def __len__(self) -> int:
        return len(self._records)

    @property
    def records(self) -> Sequence[RequestRecord]:
        """All records in order; read-only, and stale once one is added or removed."""
        return self._records

    def add(self, record: RequestRecord) -> None:
        insort(self._records, record, key=self._key)

    def head(self) -> RequestRecord:
        return self._records[0]

    def remove(self, record: RequestRecord) -> None:
        self._records.remove(record)

    def same_class(self, first: RequestRecord, second: RequestRecord) -> bool:
        """Whether only their arrival orders them."""
        return not self._by_priority or first.priority == second.priority

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

    def _key(self, record: RequestRecord) -> tuple[float, int]:
        priority: float = record.priority if self._by_priority else 0
        if self._aging_seconds is not None:
            priority += record.submitted_at / self._aging_seconds
        return (priority, record.arrival)
