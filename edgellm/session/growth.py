"""`GrowthReserve`: admit only what can run to its end.

A sequence leases pages for its prompt at admission and grows while it decodes.  Without a rule, admitting
one sequence too many would starve another in mid-answer.  So a sequence is admitted only while the pages
that are free or may be evicted cover what all residents, the newcomer included, may still ask for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.cache.types import ResourceType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgellm._core.cache_manager import ContextCacheManager
    from edgellm.cache.request import RequestHandle
    from edgellm.request import LLMGenerationRequest
    from edgellm.session.frame import SessionGeometry
    from edgellm.session.resident import Resident


class GrowthReserve:
    """Counts pages; owns none.  A sequence alone in the pool always passes, since its budget is cut to the pool."""

    def __init__(self, manager: ContextCacheManager, geometry: SessionGeometry) -> None:
        self._manager = manager
        self._page_size = geometry.page_size
        self._extra = geometry.headroom.base_extra_tokens
        self._refused: tuple[LLMGenerationRequest, int, int] | None = None

    def pages_at_end(self, resident: Resident) -> int:
        """Pages the sequence holds when it generated its whole budget (its last token never gets state)."""
        tokens = resident.prompt_length + self._extra + max(0, resident.rule.max_new_tokens - 2)
        return -(-tokens // self._page_size)

    def may_fit(self, newcomer: Resident, request: RequestHandle, order: Sequence[Resident]) -> bool:
        """False when an attempt is pointless: too little even if the whole prompt were shared, or nothing
        changed since the same request was refused."""
        available, debt = self._available(), self._debt(request, order)
        if self._refused is not None and self._refused == (newcomer.request, available, debt):
            return False
        private = self.pages_at_end(newcomer) - newcomer.prompt_length // self._page_size
        return debt + private <= available

    def covered(self, newcomer: Resident, request: RequestHandle, order: Sequence[Resident]) -> bool:
        """Whether everybody can grow to the end, now that the newcomer (the request's tail) holds its lease."""
        held = request.impl.leases[-1].num_base_pages
        debt = self._debt(request, order) + max(0, self.pages_at_end(newcomer) - held)
        return debt <= self._available()

    def refuse(self, newcomer: Resident, request: RequestHandle, order: Sequence[Resident]) -> None:
        """Remember a refusal, after the newcomer's lease went back."""
        self._refused = (newcomer.request, self._available(), self._debt(request, order))

    def _available(self) -> int:
        manager = self._manager
        return manager.pools.free_count(ResourceType.BASE_KV_PAGE) + manager.index.lru_size

    def _debt(self, request: RequestHandle, order: Sequence[Resident]) -> int:
        leases = request.impl.leases
        return sum(
            max(0, self.pages_at_end(resident) - leases[resident.index].num_base_pages)
            for resident in order
            if not resident.terminal
        )
