"""`StepPlanner`: who takes part in the next step, and with how many tokens.

Pure and deterministic in the residents' lengths, plus one counter that it keeps on them: how many steps in
a row each was paused.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from edgellm.engine.config import Preemption, SchedulingPolicy
from edgellm.session._ledger import LengthRow, with_prompt_left
from edgellm.session._step_plan import StepPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgellm.cache.types import Hash128
    from edgellm.engine.config import SchedulingOptions, StepLimits
    from edgellm.session.types import SequenceIdentity

_BY_ARRIVAL = attrgetter("arrival")
_BY_PRIORITY = attrgetter("priority", "arrival")


class LengthLedger(LengthRow):
    """Lengths of one resident as the engine mirrors them, in tokens.

    Attributes:
        committed: positions with materialised state; only grows.
        prompt_remaining: prompt tokens that no step has consumed.
        exclusive: it runs in plans of its own.
        cancelled: somebody asked for its end; it needs one more step to leave.
        paused_steps: steps in a row that it was paused.
        next_block: identity of the prompt block it would compute next, or None where it can share nothing.
    """

    __slots__ = ("arrival", "cancelled", "next_block", "paused_steps", "priority")

    def __init__(
        self,
        *,
        identity: SequenceIdentity,
        arrival: int,
        committed: int,
        prompt_remaining: int,
        priority: int = 0,
        exclusive: bool = False,
        cancelled: bool = False,
    ) -> None:
        super().__init__(identity, committed=committed, prompt_remaining=prompt_remaining, exclusive=exclusive)
        self.arrival = arrival
        self.priority = priority
        self.cancelled = cancelled
        self.paused_steps = 0
        self.next_block: Hash128 | None = None


class _Draft:
    """A plan being made: who takes part, and with how many tokens."""

    __slots__ = ("_lengths", "_seats")

    def __init__(self) -> None:
        self._seats: list[LengthLedger] = []
        self._lengths: list[int] = []

    def add(self, seat: LengthLedger, length: int = 1) -> None:
        self._seats.append(seat)
        self._lengths.append(length)

    def plan(self) -> StepPlan:
        return StepPlan.of(self._seats, self._lengths)


class StepPlanner:
    """Plans steps for one session.

    Every plan passes the session's validation, and the first unfinished prompt in order always progresses:
    beside decode rows both budget and chunk limit are at least a page, so its chunk either ends the prompt
    or reaches the next page boundary.

    Attributes:
        num_paused: residents that the latest plan left out by pausing.
    """

    def __init__(self, limits: StepLimits, options: SchedulingOptions) -> None:
        self.limits = limits
        self._by_priority = options.scheduling_policy is SchedulingPolicy.PRIORITY
        self._order = _BY_PRIORITY if self._by_priority else _BY_ARRIVAL
        self._pauses = options.preemption is Preemption.PAUSE and limits.mixed
        self._max_pause_steps = options.max_pause_steps
        self.num_paused = 0

    def plan(self, residents: list[LengthLedger], *, prompt_tokens: int | None = None) -> StepPlan:
        """The next step.

        Args:
            residents: all residents in resident order.
            prompt_tokens: most prompt tokens of a compact step, below the configured budget; the first prompt in
                order gets a page (or its end) all the same.
        Returns:
            Never empty while anybody is resident.
        Effects: `paused_steps` of the residents.  Cost: O(residents), plus sorting unfinished prompts; in C while
            all decode.
        """
        self.num_paused = 0
        everybody_decodes = StepPlan.full_cohort(residents)
        if everybody_decodes is not None:
            self._clear_pauses(residents)
            return everybody_decodes
        prompts = with_prompt_left(residents)
        if residents[0].exclusive:
            return _whole_prompt(residents[0])
        prompts.sort(key=self._order)
        if not self.limits.compact:
            return _whole_prompt(prompts[0])
        if self.limits.mixed:
            return self._mixed(residents, prompts, prompt_tokens)
        return self._prefill_first(residents, prompts, prompt_tokens)

    def _mixed(self, residents: list[LengthLedger], prompts: list[LengthLedger], prompt_tokens: int | None) -> StepPlan:
        if self._pauses:
            residents, prompts = self._without_paused(residents, prompts)
        draft, rows = _Draft(), 0
        for seat in residents:
            if not seat.prompt_remaining:
                draft.add(seat)
                rows += not seat.cancelled
        active = self._add_cancelled(draft, prompts)
        if rows:
            budget, cap = self.limits.max_num_tokens - rows, self.limits.max_chunk_tokens
        else:
            budget, cap = self.limits.max_prompt_step_tokens, self.limits.max_input_length
        self._fill(draft, active, budget=self._bounded(budget, prompt_tokens), cap=cap)
        return draft.plan()

    def _bounded(self, budget: int, prompt_tokens: int | None) -> int:
        return budget if prompt_tokens is None else min(budget, max(prompt_tokens, self.limits.page_size))

    def _prefill_first(
        self, residents: Sequence[LengthLedger], prompts: list[LengthLedger], prompt_tokens: int | None
    ) -> StepPlan:
        draft = _Draft()
        for seat in residents:
            if seat.cancelled and not seat.prompt_remaining:
                draft.add(seat)
        active = self._add_cancelled(draft, prompts)
        if self._by_priority and active:
            active = [seat for seat in active if seat.priority == active[0].priority]
        budget = self._bounded(self.limits.max_prompt_step_tokens, prompt_tokens)
        self._fill(draft, active, budget=budget, cap=self.limits.max_input_length)
        return draft.plan()

    @staticmethod
    def _add_cancelled(draft: _Draft, prompts: list[LengthLedger]) -> list[LengthLedger]:
        """Plan the least work for cancelled prompts, so that the session sees the flag; returns the others.

        A session observes cancellation of participants only.  One token is never run: the flag is polled
        before the step.
        """
        active = []
        for seat in prompts:
            if seat.cancelled:
                draft.add(seat)
            else:
                active.append(seat)
        return active

    def _fill(self, draft: _Draft, prompts: list[LengthLedger], *, budget: int, cap: int) -> None:
        """Give prompts, in order, what fits; a chunk that does not end its prompt ends on a page boundary.

        A prompt whose next block is computed in this step already waits for its producer: it finds the block in
        the next one.

        The step limit needs no check of its own: nobody gets more than S_in, so B residents stay within B * S_in.
        """
        page = self.limits.page_size
        longest = min(cap, self.limits.max_input_length)
        being_computed: set[Hash128] = set()
        for index, seat in enumerate(prompts):
            if budget <= 0:
                return
            if seat.next_block in being_computed:
                continue
            fits = min(seat.prompt_remaining, longest, budget)
            length = fits
            if fits < seat.prompt_remaining:
                length = (seat.committed + fits) // page * page - seat.committed
            if length <= 0 and index == 0:
                # A deployment whose steps are shorter than a page cannot align; the head moves all the same.
                length = fits
            if length > 0:
                draft.add(seat, length)
                budget -= length
                if seat.next_block is not None and length >= page:
                    being_computed.add(seat.next_block)

    def _without_paused(
        self, residents: list[LengthLedger], prompts: list[LengthLedger]
    ) -> tuple[list[LengthLedger], list[LengthLedger]]:
        """Both lists without the residents that are less urgent than the first unfinished prompt."""
        head = next((seat for seat in prompts if not seat.cancelled), None)
        if head is None:
            self._clear_pauses(residents)
            return residents, prompts
        paused = set()
        for seat in residents:
            if seat.priority > head.priority and not seat.cancelled and self._may_pause(seat):
                seat.paused_steps += 1
                paused.add(seat.ref)
            else:
                seat.paused_steps = 0
        self.num_paused = len(paused)
        if not paused:
            return residents, prompts
        return [s for s in residents if s.ref not in paused], [s for s in prompts if s.ref not in paused]

    def _may_pause(self, seat: LengthLedger) -> bool:
        return not self._max_pause_steps or seat.paused_steps < self._max_pause_steps

    def _clear_pauses(self, residents: Sequence[LengthLedger]) -> None:
        if self._pauses:
            for seat in residents:
                seat.paused_steps = 0


def _whole_prompt(seat: LengthLedger) -> StepPlan:
    return StepPlan.of([seat], [seat.prompt_remaining])
