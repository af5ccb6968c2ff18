"""The rules of plan validation exist twice, in C for good plans and in Python with messages: both say the same."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from edgellm.engine.step_planner import LengthLedger
from edgellm.errors import ContractViolation
from edgellm.session._plan_check import COMPACT, FULL_COHORT_DECODE, LOOK_CLOSER, WHOLE_PROMPT, quick_shape
from edgellm.session._step_plan import StepPlan
from edgellm.session.plan_check import PlanLimits, StepShape, check_plan
from edgellm.session.types import (
    RequestId,
    ResidentRef,
    ScheduledSequenceDescriptor,
    SequenceIdentity,
    SequenceWork,
)

CASES = 6000
CODES = {
    StepShape.FULL_COHORT_DECODE: FULL_COHORT_DECODE,
    StepShape.WHOLE_PROMPT: WHOLE_PROMPT,
    StepShape.COMPACT: COMPACT,
}
# V16 is polled at execution; the others are reached by damaged plans below.
RULES = {"V1", "V2", "V3", "V4", "V5", "V6", "V7", "V8", "V9", "V11", "V12", "V13", "V14", "V15"}


class Case:
    """Random residents and limits, and a plan that is legal, or was."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.limits = PlanLimits(
            max_batch_size=rng.randint(1, 5),
            max_input_length=rng.randint(1, 8),
            max_kv_capacity=rng.choice([4, 12, 64]),
            compact=rng.random() < 0.6,
        )
        count = rng.choice([1, 1, 2, 3, 5])
        slots = rng.sample(range(6), count)
        decoding = rng.random() < 0.5
        self.order = [self.resident(slot, decoding) for slot in slots]
        if count == 1 and rng.random() < 0.3:
            self.order[0].exclusive = True
        self.seats: list[LengthLedger | None] = [None] * 6
        for seat in self.order:
            self.seats[seat.ref.slot] = seat

    def resident(self, slot: int, decoding: bool) -> LengthLedger:
        return LengthLedger(
            identity=SequenceIdentity(RequestId(100 + slot), ResidentRef(slot, self.rng.randint(1, 3))),
            arrival=slot,
            committed=self.rng.randint(0, 12),
            prompt_remaining=0 if decoding else self.rng.choice([0, 1, 2, 8, 9]),
        )

    def row(self, seat: LengthLedger) -> ScheduledSequenceDescriptor:
        left = seat.prompt_remaining
        if not left:
            return ScheduledSequenceDescriptor(seat.identity, SequenceWork.DECODE, 1, seat.committed)
        query = left if self.rng.random() < 0.6 else self.rng.randint(1, left)
        return ScheduledSequenceDescriptor(seat.identity, SequenceWork.CONTEXT, query, seat.committed, query == left)

    def plan(self) -> list[ScheduledSequenceDescriptor]:
        rows = [self.row(seat) for seat in self.order]
        if self.rng.random() < 0.3:
            self.rng.shuffle(rows)
        if self.rng.random() < 0.4:
            rows = rows[: self.rng.randint(0, len(rows))]
        if rows and self.rng.random() < 0.5:
            index = self.rng.randrange(len(rows))
            rows[index] = self.damaged(rows[index])
            if self.rng.random() < 0.2:
                rows.append(rows[index])
        return rows

    def damaged(self, row: ScheduledSequenceDescriptor) -> ScheduledSequenceDescriptor:
        ref = row.identity.resident
        name = self.rng.randrange(6)
        if name == 0:
            return replace(
                row, past_length=row.past_length + self.rng.choice([-1, 1, 2**30, -(2**31) - row.past_length])
            )
        if name == 1:
            return replace(row, query_length=self.rng.choice([0, -1, 2, 9, row.query_length + 1, 2**31 - 1]))
        if name == 2:
            return replace(row, select_last_token_logits=not row.select_last_token_logits)
        if name == 3:
            other = SequenceWork.DECODE if row.work is SequenceWork.CONTEXT else SequenceWork.CONTEXT
            return replace(row, work=other)
        if name == 4:
            slot = self.rng.choice([-1, 6, (ref.slot + 1) % 6, 2**31 - 1, ref.slot])
            epoch = self.rng.choice([ref.epoch, 0, ref.epoch + 1, 2**64 - 1])
            return replace(row, identity=SequenceIdentity(row.identity.request_id, ResidentRef(slot, epoch)))
        request_id = self.rng.choice([0, 101, 2**64 - 1])
        return replace(row, identity=SequenceIdentity(RequestId(request_id), ref))


def verdict(case: Case, plan: Sequence[ScheduledSequenceDescriptor]) -> StepShape | str:
    """The shape of a valid plan, or the message of the first broken rule."""
    try:
        return check_plan(plan, seats=case.seats, order=case.order, limits=case.limits)
    except ContractViolation as error:
        return str(error)


def code_of(case: Case, plan: StepPlan) -> int:
    limits = case.limits
    return quick_shape(
        plan,
        case.seats,
        case.order,
        limits.max_batch_size,
        limits.max_input_length,
        limits.max_kv_capacity,
        limits.compact,
    )


def test_plan_rules_hold_in_c_and_in_python_for_random_plans() -> None:
    """Behaviours 33 to 47; the plan as a list is checked in Python alone."""
    seen: Counter[object] = Counter()
    for number in range(CASES):
        case = Case(random.Random(number))
        plan = case.plan()
        packed = StepPlan(plan)
        before = [(seat.committed, seat.prompt_remaining) for seat in case.order]
        said, code = verdict(case, plan), code_of(case, packed)
        assert code == (LOOK_CLOSER if isinstance(said, str) else CODES[said]), f"case {number}: Python says {said}"
        assert verdict(case, packed) == said
        assert before == [(seat.committed, seat.prompt_remaining) for seat in case.order]
        seen[said if isinstance(said, StepShape) else said[: re.match(r"V\d+", said).end()]] += 1  # type: ignore[union-attr]
    assert set(seen) == RULES | set(StepShape), f"reached: {seen}"
    assert min(seen[shape] for shape in StepShape) > 50
