"""Plans and deltas as packed entries: they read, compare and travel like the lists they stand for."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace

import pytest

from edgellm.engine.step_planner import LengthLedger
from edgellm.errors import ContractViolation
from edgellm.session._finish import FinishRule
from edgellm.session._ledger import ResidentRow
from edgellm.session._step_plan import PlanIdentities, StepPlan, report
from edgellm.session.types import (
    FinishReason,
    RequestId,
    ResidentRef,
    ScheduledSequenceDescriptor,
    SequenceIdentity,
    SequenceWork,
    TokenDelta,
)

U64 = 2**64 - 1
I32 = 2**31 - 1


def identity(slot: int, epoch: int = 1, request_id: int | None = None) -> SequenceIdentity:
    return SequenceIdentity(RequestId(slot + 1 if request_id is None else request_id), ResidentRef(slot, epoch))


def decode(slot: int, past: int = 5) -> ScheduledSequenceDescriptor:
    return ScheduledSequenceDescriptor(identity(slot), SequenceWork.DECODE, 1, past)


def chunk(slot: int, query: int, past: int = 0, *, select: bool = False) -> ScheduledSequenceDescriptor:
    return ScheduledSequenceDescriptor(identity(slot), SequenceWork.CONTEXT, query, past, select)


def seat(slot: int, committed: int, left: int = 0) -> LengthLedger:
    return LengthLedger(identity=identity(slot), arrival=slot, committed=committed, prompt_remaining=left)


ENTRIES = [decode(2), chunk(0, 7, 3), chunk(1, 4, select=True)]


def test_a_plan_reads_like_the_list_it_was_made_of() -> None:
    plan = StepPlan(ENTRIES)
    assert isinstance(plan, Sequence)
    assert len(plan) == 3
    assert [plan[0], plan[-1], plan[1:]] == [ENTRIES[0], ENTRIES[-1], ENTRIES[1:]]
    assert list(plan) == ENTRIES
    assert list(reversed(plan)) == ENTRIES[::-1]
    assert plan.index(ENTRIES[1]) == 1
    assert plan.count(ENTRIES[1]) == 1
    assert ENTRIES[2] in plan
    assert repr(plan) == repr(ENTRIES)
    with pytest.raises(IndexError):
        plan[3]


def test_a_plan_equals_lists_in_both_directions() -> None:
    plan = StepPlan(ENTRIES)
    assert plan == ENTRIES
    assert plan == ENTRIES
    assert plan == StepPlan(ENTRIES)
    assert plan != ENTRIES[:2]
    assert plan != StepPlan(ENTRIES[::-1])
    assert plan != tuple(ENTRIES)
    with pytest.raises(TypeError, match="unhashable"):
        hash(plan)


@pytest.mark.parametrize(
    "other",
    [
        replace(decode(2), past_length=6),
        replace(decode(2), query_length=2),
        replace(decode(2), select_last_token_logits=False),
        replace(decode(2), work=SequenceWork.CONTEXT),
        replace(decode(2), identity=identity(3, request_id=3)),
        replace(decode(2), identity=identity(2, epoch=2)),
        replace(decode(2), identity=identity(2, request_id=9)),
    ],
)
def test_plans_differ_in_every_field(other: ScheduledSequenceDescriptor) -> None:
    assert StepPlan([decode(2)]) != StepPlan([other])


def test_a_plan_made_of_ledgers_builds_the_descriptors_of_the_rules() -> None:
    seats = [seat(2, 5), seat(0, 3, left=9), seat(1, 0, left=4)]
    plan = StepPlan.of(seats, [1, 7, 4])
    assert plan[1] == ENTRIES[1]  # one entry, before anybody looked at all of them
    assert plan == ENTRIES
    assert plan == StepPlan(ENTRIES)
    assert (plan.num_tokens, plan.has_context) == (12, True)


def test_full_cohort_is_one_decode_row_each_or_nothing() -> None:
    plan = StepPlan.full_cohort([seat(1, 8), seat(0, 5)])
    assert plan is not None
    assert plan == [decode(1, 8), decode(0, 5)]
    assert (plan.num_tokens, plan.has_context) == (2, False)
    assert StepPlan.full_cohort([seat(1, 8), seat(0, 5, left=1)]) is None
    assert StepPlan.full_cohort([]) == []


def test_take_keeps_the_named_entries() -> None:
    plan = StepPlan(ENTRIES)
    assert plan.take([0, 2]) == [ENTRIES[0], ENTRIES[2]]
    with pytest.raises(IndexError, match="not an entry 3"):
        plan.take([3])


def test_identities_are_a_view_in_plan_order() -> None:
    names = [entry.identity for entry in ENTRIES]
    assert StepPlan(ENTRIES).identities == names
    lazily = StepPlan.of([seat(2, 5), seat(0, 3, left=9)], [1, 7]).identities
    assert len(lazily) == 2
    assert names[:2] == lazily


def test_widths_are_kept_to_their_last_value() -> None:
    entry = ScheduledSequenceDescriptor(identity(I32, U64, U64), SequenceWork.CONTEXT, I32, -(2**31), False)
    assert StepPlan([entry]).take([0]) == [entry]


@pytest.mark.parametrize(
    "entry",
    [
        replace(decode(0), query_length=I32 + 1),
        replace(decode(0), past_length=-(2**31) - 1),
        replace(decode(0), identity=identity(I32 + 1)),
        replace(decode(0), identity=identity(0, epoch=U64 + 1)),
        replace(decode(0), identity=identity(0, epoch=-1)),
        replace(decode(0), identity=identity(0, request_id=U64 + 1)),
    ],
)
def test_integers_that_do_not_fit_are_refused_and_never_wrapped(entry: ScheduledSequenceDescriptor) -> None:
    with pytest.raises(ContractViolation, match="does not fit a plan"):
        StepPlan([decode(1), entry])


def test_a_ledger_beyond_32_bits_is_refused() -> None:
    with pytest.raises(ContractViolation, match=f"past_length is {I32 + 1}"):
        StepPlan.full_cohort([seat(0, I32 + 1)])
    with pytest.raises(ContractViolation, match="1 residents are planned with 2 lengths"):
        StepPlan.of([seat(0, 1)], [1, 1])
    with pytest.raises(ContractViolation, match="does not fit"):
        LengthLedger(identity=identity(0, epoch=U64 + 1), arrival=0, committed=0, prompt_remaining=0)


def test_plans_travel_to_other_ranks() -> None:
    plan = StepPlan.of([seat(2, 5), seat(0, 3, left=9)], [1, 7])
    copy = pickle.loads(pickle.dumps(plan))
    assert type(copy) is StepPlan
    assert copy == plan
    assert pickle.loads(pickle.dumps(plan.identities)) == plan.identities


def resident(slot: int, generated: list[int], *, reported: int = 0) -> ResidentRow:
    row = ResidentRow(identity(slot), rule=FinishRule((), 100))
    row.generated, row.reported = generated, reported
    return row


def test_report_hands_out_what_is_new_once_and_leaves_finishers_out() -> None:
    several, nothing, ended, one = (
        resident(3, [7, 8, 9], reported=1),
        resident(0, [4], reported=1),
        resident(1, [5]),
        resident(2, [6]),
    )
    ended.terminal, ended.reason = True, FinishReason.LENGTH
    deltas, finished = report([several, nothing, ended, one])
    assert len(deltas) == 2
    assert deltas == [(ResidentRef(3, 1), TokenDelta([8, 9])), (ResidentRef(2, 1), TokenDelta([6]))]
    assert finished == [ended]
    assert [row.reported for row in (several, nothing, ended, one)] == [3, 1, 0, 1]
    several.generated.append(1)  # what was handed out does not change
    assert deltas[0] == (ResidentRef(3, 1), TokenDelta([8, 9]))
    assert report([several])[0] == [(ResidentRef(3, 1), TokenDelta([1]))]
    assert pickle.loads(pickle.dumps(deltas)) == deltas


def test_a_view_of_identities_is_made_by_its_plan_only():
    with pytest.raises(TypeError, match=r"take StepPlan\.identities"):
        PlanIdentities()
