"""`GrowthReserve`: admit only what can run to its end.

A sequence leases pages for its prompt at admission and grows while it decodes.  Without a rule, admitting
one sequence too many would starve another in mid-answer.  So a sequence is admitted only while the pages
that are free or may be evicted cover what all residents, the newcomer included, may still ask for: pages of
the base model, and of the draft model where that has its own, each with the headroom of its own.

Snapshot slots are not counted: an admission needs none (a checkpoint it starts from is there already), and a
checkpoint that finds no slot is skipped and counted, which costs a later prompt some reuse and nobody an answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgellm.cache.manager_view import ManagerView
    from edgellm.cache.request import RequestHandle
    from edgellm.session.frame import SessionGeometry
    from edgellm.session.resident import Resident


class PageReserve(NamedTuple):
    """Pages that must stay available behind a newcomer's lease."""

    base: int = 0
    draft: int = 0


class GrowthReserve:
    """Counts pages; owns none.  A sequence alone in the pool always passes, since its budget is cut to the pool."""

    def __init__(self, manager: ManagerView, geometry: SessionGeometry) -> None:
        self._manager = manager
        self._page_size = geometry.page_size
        self._extra = geometry.headroom.base_extra_tokens
        self._draft_extra = geometry.headroom.draft_extra_tokens  # 0 without draft pages

    def may_fit(self, newcomer: Resident, request: RequestHandle, order: Sequence[Resident]) -> bool:
        """False when an attempt is pointless: too little even if the whole prompt were shared.  Cheap."""
        shared = newcomer.prompt_length // self._page_size
        private = self._pages_at_end(newcomer, self._extra) - shared
        if self._debt(request, order) + private > self._manager.available_pages:
            return False
        if not self._draft_extra:
            return True
        private = self._pages_at_end(newcomer, self._draft_extra) - shared
        return self._draft_debt(request, order) + private <= self._manager.available_draft_pages

    def pages_to_reserve(self, newcomer: Resident, request: RequestHandle, order: Sequence[Resident]) -> PageReserve:
        """What must stay available behind the newcomer's lease: what all, it included, may still ask for."""
        base = self._debt(request, order) + self._growth(newcomer, self._extra)
        if not self._draft_extra:
            return PageReserve(base)
        return PageReserve(base, self._draft_debt(request, order) + self._growth(newcomer, self._draft_extra))

    def slots_ahead(self, request: RequestHandle, order: Sequence[Resident]) -> list[int]:
        """Slots that need a page for the step behind the next one, and will come to it if they end by their length.

        What they lease early is among what is reserved for them, so nobody's growth is in danger.
        """
        lengths = request.impl.lengths
        size, ahead = lengths.size, self._extra + 1
        short = (lengths.committed[:size] + ahead > lengths.coverage[:size]) & ~lengths.ended[:size]
        if not short.any():
            return []
        slots: list[int] = short.nonzero()[0].tolist()
        return [
            slot
            for slot in slots
            if not order[slot].terminal
            and int(lengths.committed[slot]) + ahead <= self._tokens_at_end(order[slot], self._extra)
        ]

    def _growth(self, newcomer: Resident, extra: int) -> int:
        """Pages that the sequence may ask for beyond those that its admission leases."""
        leased = -(-(newcomer.prompt_length + extra) // self._page_size)
        return max(0, self._pages_at_end(newcomer, extra) - leased)

    def _pages_at_end(self, resident: Resident, extra: int) -> int:
        """Pages the sequence holds when it generated its whole budget."""
        return -(-self._tokens_at_end(resident, extra) // self._page_size)

    @staticmethod
    def _tokens_at_end(resident: Resident, extra: int) -> int:
        """Positions that its pages cover then; its last token never gets state."""
        return resident.prompt_length + extra + max(0, resident.rule.max_new_tokens - 2)

    def _debt(self, request: RequestHandle, order: Sequence[Resident]) -> int:
        leases = request.impl.leases
        return sum(
            max(0, self._pages_at_end(resident, self._extra) - leases[resident.index].num_base_pages)
            for resident in order
            if not resident.terminal
        )

    def _draft_debt(self, request: RequestHandle, order: Sequence[Resident]) -> int:
        leases = request.impl.leases
        return sum(
            max(0, self._pages_at_end(resident, self._draft_extra) - leases[resident.index].num_draft_pages)
            for resident in order
            if not resident.terminal
        )
