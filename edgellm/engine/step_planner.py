"""`StepPlanner`: who takes part in the next step, and with how many tokens.

Pure and deterministic in the residents' lengths, plus one counter that it keeps on them: how many steps in
a row each was paused.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from edgellm.engine.config import Preemption, SchedulingPolicy
from edgellm.session.types import ScheduledSequenceDescriptor, SequenceWork

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgellm.cache.types import Hash128
    from edgellm.engine.config import SchedulingOptions, StepLimits
    from edgellm.session.types import RequestId, ResidentRef, SequenceIdentity

_BY_ARRIVAL = attrgetter("arrival")
_BY_PRIORITY = attrgetter("priority", "arrival")


class LengthLedger:
    """Lengths of one resident as the engine mirrors them, in tokens.

    Attributes:
        committed: positions with materialised state; only grows.
        prompt_remaining: prompt tokens that no step has consumed.
        exclusive: it runs in plans of its own.
        cancelled: somebody asked for its end; it needs one more step to leave.
        paused_steps: steps in a row that it was paused.
        next_block: identity of the prompt block it would compute next, or None where it can share nothing.
    """

    __slots__ = (
        "arrival",
        "cancelled",
        "committed",
        "exclusive",
        "identity",
        "next_block",
        "paused_steps",
        "priority",
        "prompt_remaining",
    )

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
        self.identity = identity
        self.arrival = arrival
        self.priority = priority
        self.committed = committed
        self.prompt_remaining = prompt_remaining
        self.exclusive = exclusive
        self.cancelled = cancelled
        self.paused_steps = 0
        self.next_block: Hash128 | None = None

    @property
    def ref(self) -> ResidentRef:
        return self.identity.resident

    @property
    def request_id(self) -> RequestId:
        return self.identity.request_id


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

    def plan(self, residents: Sequence[LengthLedger]) -> list[ScheduledSequenceDescriptor]:
        """The next step.

        Args:
            residents: all residents in resident order.
        Returns:
            Never empty while anybody is resident.
        Effects: `paused_steps` of the residents.  Cost: O(residents), plus sorting unfinished prompts.
        """
        self.num_paused = 0
        if not residents:
            return []
        prompts = [seat for seat in residents if seat.prompt_remaining]
        if not prompts:
            self._clear_pauses(residents)
            return [_decode_row(seat) for seat in residents]
        if residents[0].exclusive:
            return [_chunk(residents[0], residents[0].prompt_remaining)]
        prompts.sort(key=self._order)
        if not self.limits.compact:
            return [_chunk(prompts[0], prompts[0].prompt_remaining)]
        if self.limits.mixed:
            return self._mixed(residents, prompts)
        return self._prefill_first(residents, prompts)

    def _mixed(
        self, residents: Sequence[LengthLedger], prompts: list[LengthLedger]
    ) -> list[ScheduledSequenceDescriptor]:
        if self._pauses:
            residents, prompts = self._without_paused(residents, prompts)
        plan = [_decode_row(seat) for seat in residents if not seat.prompt_remaining]
        decoding = any(not (seat.prompt_remaining or seat.cancelled) for seat in residents)
        active = self._add_cancelled(plan, prompts)
        if decoding:
            rows = sum(1 for seat in residents if not (seat.prompt_remaining or seat.cancelled))
            budget, cap = self.limits.max_num_tokens - rows, self.limits.max_chunk_tokens
        else:
            budget, cap = self.limits.max_prompt_step_tokens, self.limits.max_input_length
        self._fill(plan, active, budget=budget, cap=cap)
        return plan

    def _prefill_first(
        self, residents: Sequence[LengthLedger], prompts: list[LengthLedger]
    ) -> list[ScheduledSequenceDescriptor]:
        plan = [_decode_row(seat) for seat in residents if seat.cancelled and not seat.prompt_remaining]
        active = self._add_cancelled(plan, prompts)
        if self._by_priority and active:
            active = [seat for seat in active if seat.priority == active[0].priority]
        self._fill(plan, active, budget=self.limits.max_prompt_step_tokens, cap=self.limits.max_input_length)
        return plan

    @staticmethod
    def _add_cancelled(plan: list[ScheduledSequenceDescriptor], prompts: list[LengthLedger]) -> list[LengthLedger]:
        """Plan the least work for cancelled prompts, so that the session sees the flag; returns the others.

        A session observes cancellation of participants only.  One token is never run: the flag is polled
        before the step.
        """
        plan.extend(_chunk(seat, 1) for seat in prompts if seat.cancelled)
        return [seat for seat in prompts if not seat.cancelled]

    def _fill(
        self, plan: list[ScheduledSequenceDescriptor], prompts: list[LengthLedger], *, budget: int, cap: int
    ) -> None:
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
                plan.append(_chunk(seat, length))
                budget -= length
                if seat.next_block is not None and length >= page:
                    being_computed.add(seat.next_block)

    def _without_paused(
        self, residents: Sequence[LengthLedger], prompts: list[LengthLedger]
    ) -> tuple[list[LengthLedger], list[LengthLedger]]:
        """Both lists without the residents that are less urgent than the first unfinished prompt."""
        head = next((seat for seat in prompts if not seat.cancelled), None)
        if head is None:
            self._clear_pauses(residents)
            return list(residents), prompts
        paused = set()
        for seat in residents:
            if seat.priority > head.priority and not seat.cancelled and self._may_pause(seat):
                seat.paused_steps += 1
                paused.add(seat.ref)
            else:
                seat.paused_steps = 0
        self.num_paused = len(paused)
        if not paused:
            return list(residents), prompts
        return [s for s in residents if s.ref not in paused], [s for s in prompts if s.ref not in paused]

    def _may_pause(self, seat: LengthLedger) -> bool:
        return not self._max_pause_steps or seat.paused_steps < self._max_pause_steps

    def _clear_pauses(self, residents: Sequence[LengthLedger]) -> None:
        if self._pauses:
            for seat in residents:
                seat.paused_steps = 0


def _decode_row(seat: LengthLedger) -> ScheduledSequenceDescriptor:
    return ScheduledSequenceDescriptor(seat.identity, SequenceWork.DECODE, 1, seat.committed, True)


def _chunk(seat: LengthLedger, length: int) -> ScheduledSequenceDescriptor:
    return ScheduledSequenceDescriptor(
        seat.identity, SequenceWork.CONTEXT, length, seat.committed, length == seat.prompt_remaining
    )
