"""Plan validation: behaviours 33 to 47 of the session specification, over a scripted session."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgellm.errors import ContractViolation
from edgellm.request import LLMGenerationRequest
from edgellm.sampling.params import SamplingParams
from edgellm.session.plan_check import PlanLimits, StepShape, check_plan
from edgellm.session.types import (
    RequestId,
    ResidentRef,
    SequenceIdentity,
    SequenceWork,
    SessionOptions,
)
from edgellm.testing.scripted_session import ScriptedRuntime
from edgellm.testing.session_driver import SessionDriver


def driver(*, compact: bool = True, **geometry: int) -> SessionDriver:
    runtime = ScriptedRuntime(**geometry)  # type: ignore[arg-type]
    return SessionDriver(runtime.open_session(SessionOptions(allow_compact_execution=compact)))


def request(length: int = 6, *, max_tokens: int = 20, **fields: object) -> LLMGenerationRequest:
    return LLMGenerationRequest(
        prompt_token_ids=list(range(100, 100 + length)),
        sampling=SamplingParams(max_tokens=max_tokens),
        **fields,  # type: ignore[arg-type]
    )


def decoding(count: int, *, compact: bool = True, **geometry: int) -> SessionDriver:
    """A session with `count` residents that all decode."""
    drive = driver(compact=compact, **geometry)
    for number in range(1, count + 1):
        drive.admit(request())
        drive.step(drive.context(number))
    return drive


def violates(drive: SessionDriver, *plan: object, match: str) -> None:
    """The plan is refused with a message that matches, and nothing moved (behaviour 46)."""
    session = drive.session
    residents = session.residents()
    ledgers = [(r.committed, r.prompt_remaining, list(r.generated)) for r in session._order]  # type: ignore[attr-defined]
    next_step = session._next_step_id  # type: ignore[attr-defined]
    with pytest.raises(ContractViolation, match=match):
        session.execute(plan)  # type: ignore[arg-type]
    assert session.residents() == residents
    assert ledgers == [(r.committed, r.prompt_remaining, list(r.generated)) for r in session._order]  # type: ignore[attr-defined]
    assert session._next_step_id == next_step  # type: ignore[attr-defined]


def test_behaviour_33_empty_plan() -> None:
    violates(decoding(1), match="V1 plan size: the plan is empty")


def test_behaviour_34_more_descriptors_than_the_batch_size() -> None:
    drive = decoding(2, max_batch_size=2)
    violates(drive, *[drive.decode(1)] * 3, match="names 3 sequences, the limit is max_batch_size 2")


def test_behaviour_35_unknown_slot_stale_epoch_and_foreign_request_id() -> None:
    drive = decoding(2)
    row = drive.decode(1)

    def named(request_id: int, slot: int, epoch: int) -> object:
        return replace(row, identity=SequenceIdentity(RequestId(request_id), ResidentRef(slot, epoch)))

    violates(drive, named(1, 3, 1), match="V3 live resident: request 1 .slot 3, epoch 1.: slot 3 has no resident")
    violates(drive, named(1, 9, 1), match=r"V2 identity.*in \[0, 4\)")
    violates(drive, named(1, 0, 0), match="V2 identity")
    violates(drive, named(0, 0, 1), match="V2 identity")
    violates(drive, named(1, 0, 2), match="V3 live resident.*in epoch 1, the plan says 2")
    violates(drive, named(2, 0, 1), match="V3 live resident.*belongs to request 1, the plan says 2")


def test_behaviour_36_a_sequence_named_twice() -> None:
    drive = decoding(2)
    violates(drive, drive.decode(1), drive.decode(1), match="V4 .*slot 0 is named twice")


@pytest.mark.parametrize("off", [-1, 1])
def test_behaviour_37_past_length_off_by_one_names_both_numbers(off: int) -> None:
    drive = decoding(1)
    row = drive.decode(1)
    wrong = replace(row, past_length=row.past_length + off)
    violates(drive, wrong, match=f"V6 .*past_length is {6 + off}, the committed length is 6")


def test_behaviour_38_work_that_does_not_match_the_state() -> None:
    drive = decoding(1)
    drive.admit(request())
    violates(drive, drive.decode(2), match="V7 work: request 2 .*work is decode, but 6 prompt tokens are left")
    row = replace(drive.decode(1), work=SequenceWork.CONTEXT)
    violates(drive, row, match="V7 work: request 1 .*work is context, but the prompt is complete")


def test_behaviour_39_decode_row_with_two_tokens_or_without_logits() -> None:
    drive = decoding(1)
    violates(drive, replace(drive.decode(1), query_length=2), match="V8 decode row.*query_length 2")
    violates(
        drive, replace(drive.decode(1), select_last_token_logits=False), match="V8 .*select_last_token_logits False"
    )


def test_behaviour_40_logits_are_selected_exactly_on_the_final_chunk() -> None:
    drive = driver()
    drive.admit(request(6))
    violates(
        drive, replace(drive.context(1), select_last_token_logits=False), match="V9 chunk.*is False for 6 of 6 tokens"
    )
    violates(
        drive, replace(drive.context(1, 4), select_last_token_logits=True), match="V9 chunk.*is True for 4 of 6 tokens"
    )


def test_behaviour_41_chunk_longer_than_what_is_left() -> None:
    drive = driver()
    drive.admit(request(6))
    violates(drive, replace(drive.context(1), query_length=7), match="V9 chunk.*is 7, only 6 prompt tokens are left")


@pytest.mark.parametrize("lengths", [(0, 0), (-1, 0), (1, -1)])
def test_v5_lengths_out_of_range(lengths: tuple[int, int]) -> None:
    drive = decoding(1)
    row = replace(drive.decode(1), query_length=lengths[0], past_length=lengths[1])
    violates(drive, row, match="V5 lengths")


def test_v5_past_plus_query_beyond_the_capacity() -> None:
    drive = driver(max_kv_capacity=16)
    drive.admit(request(6))
    row = replace(drive.context(1), past_length=0, query_length=17)
    violates(drive, row, match="V5 lengths.*past 0 . query 17 exceeds the capacity of 16")
    row = replace(drive.context(1), past_length=2**31 - 1)
    violates(drive, row, match="V5 lengths")


def test_behaviour_42_single_cohort_decode_names_everybody_in_order() -> None:
    drive = decoding(3, compact=False)
    violates(drive, drive.decode(1), drive.decode(2), match=r"V15 full cohort.*slots \[0, 1\].*slots \[0, 1, 2\]")
    violates(drive, drive.decode(2), drive.decode(1), drive.decode(3), match=r"V15 .*slots \[1, 0, 2\]")
    assert drive.step(drive.decode(1), drive.decode(2), drive.decode(3)).ok


def test_behaviour_43_single_cohort_decode_while_an_admission_is_pending() -> None:
    drive = decoding(2, compact=False)
    drive.admit(request())
    violates(drive, drive.decode(1), drive.decode(2), match="V12 pending admission: request 3")
    violates(drive, drive.decode(1), match="V12 pending admission")
    violates(drive, drive.context(3), drive.decode(1), match="V12 pending admission.*names 2 sequences")
    assert drive.step(drive.context(3)).ok


def test_behaviour_44_single_cohort_chunk_shorter_than_the_prompt() -> None:
    drive = driver(compact=False)
    drive.admit(request(6))
    violates(drive, drive.context(1, 4), match="V11 context step.*6 tokens are left, not 4")


def test_behaviour_45_compact_step_or_chunk_too_large() -> None:
    drive = driver(max_batch_size=2, max_input_length=8)
    drive.admit(request(20))
    violates(drive, drive.context(1, 9), match="V13 chunk length.*is 9, the limit is max_input_length 8")
    drive.admit(request(8))
    assert drive.step(drive.context(1, 8), drive.context(2)).ok


def test_behaviour_45_sum_of_a_step_is_bounded_by_t_max() -> None:
    """B x S_in can only be exceeded by rows whose sum is larger, so the limit is checked on the function."""
    drive = driver()
    drive.admit(request(6))
    drive.admit(request(6))
    session = drive.session
    limits = PlanLimits(max_batch_size=1, max_input_length=6, max_kv_capacity=256, compact=True)
    with pytest.raises(ContractViolation, match="V1 plan size"):
        check_plan(
            [drive.context(1), drive.context(2)],
            seats=session._seats,  # type: ignore[attr-defined]
            order=session._order,  # type: ignore[attr-defined]
            limits=limits,
        )
    assert limits.max_step_tokens == 6


def test_behaviour_46_a_correct_plan_runs_after_a_violation_with_the_next_step_id() -> None:
    drive = decoding(2)
    last = drive.results[-1].step_id
    violates(drive, replace(drive.decode(1), past_length=99), match="V6")
    result = drive.step(drive.decode(1), drive.decode(2))
    assert result.ok
    assert result.step_id == last + 1


def test_behaviour_47_full_cohort_in_order_is_not_compact_and_permuted_is() -> None:
    drive = decoding(2)
    assert drive.step(drive.decode(1), drive.decode(2)).compact is False
    assert drive.step(drive.decode(2), drive.decode(1)).compact is True
    assert drive.step(drive.decode(2)).compact is True


def test_shapes_are_named() -> None:
    drive = decoding(2)
    drive.admit(request(6))
    session = drive.session
    limits = session._limits()  # type: ignore[attr-defined]

    def shape(*plan: object) -> StepShape:
        return check_plan(plan, seats=session._seats, order=session._order, limits=limits)  # type: ignore[attr-defined,arg-type]

    assert shape(drive.decode(1), drive.decode(2)) is StepShape.COMPACT
    drive.step(drive.context(3))
    assert shape(drive.decode(1), drive.decode(2), drive.decode(3)) is StepShape.FULL_COHORT_DECODE
    single = driver(compact=False)
    single.admit(request(6))
    assert (
        check_plan(
            [single.context(1)],
            seats=single.session._seats,  # type: ignore[attr-defined]
            order=single.session._order,  # type: ignore[attr-defined]
            limits=single.session._limits(),  # type: ignore[attr-defined]
        )
        is StepShape.WHOLE_PROMPT
    )


def test_behaviour_30_exclusive_resident_runs_its_whole_prompt_alone_and_not_compact() -> None:
    drive = driver()
    drive.admit(request(6, token_callback=lambda token_ids: None))
    violates(drive, drive.context(1, 4), match="V14 exclusive resident.*6 tokens are left, not 4")
    assert drive.step(drive.context(1)).compact is False
    assert drive.step(drive.decode(1)).compact is False
