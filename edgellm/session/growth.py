"""`GrowthReserve`: admit only what can run to its end.

A sequence leases pages for its prompt at admission and grows while it decodes.  Without a rule, admitting
one sequence too many would starve another in mid-answer.  So a sequence is admitted only while the pages
that are free or may be evicted cover what all residents, the newcomer included, may still ask for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgellm.cache.manager_view import ManagerView
    from edgellm.cache.request import RequestHandle
    from edgellm.session.frame import SessionGeometry
    from edgellm.session.resident import Resident


class GrowthReserve:
    """Counts pages; owns none.  A sequence alone in the pool always passes, since its budget is cut to the pool."""

    def __init__(self, manager: ManagerView, geometry: SessionGeometry) -> None:
        self._manager = manager
        self._page_size = geometry.page_size
        self._extra = geometry.headroom.base_extra_tokens

    def may_fit(self, newcomer: Resident, request: RequestHandle, order: Sequence[Resident]) -> bool:
        """False when an attempt is pointless: too little even if the whole prompt were shared.  Cheap."""
        private = self._pages_at_end(newcomer) - newcomer.prompt_length // self._page_size
        return self._debt(request, order) + private <= self._manager.available_pages

    def pages_to_reserve(self, newcomer: Resident, request: RequestHandle, order: Sequence[Resident]) -> int:
        """Pages that must stay available behind the newcomer's lease: what all, it included, may still ask for."""
        leased = -(-(newcomer.prompt_length + self._extra) // self._page_size)
        return self._debt(request, order) + max(0, self._pages_at_end(newcomer) - leased)

    def _pages_at_end(self, resident: Resident) -> int:
        """Pages the sequence holds when it generated its whole budget (its last token never gets state)."""
        tokens = resident.prompt_length + self._extra + max(0, resident.rule.max_new_tokens - 2)
        return -(-tokens // self._page_size)

    def _debt(self, request: RequestHandle, order: Sequence[Resident]) -> int:
        leases = request.impl.leases
        return sum(
            max(0, self._pages_at_end(resident) - leases[resident.index].num_base_pages)
            for resident in order
            if not resident.terminal
        )
