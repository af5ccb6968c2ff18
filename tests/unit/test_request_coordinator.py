"""`RequestCoordinator`: a step result is applied whole or not at all."""

import pytest

from edgellm.engine.coordinator import RequestCoordinator
from edgellm.engine.metrics import EngineMetrics
from edgellm.engine.records import RequestRecord, TerminalStatus
from edgellm.errors import ContractViolation
from edgellm.request import LLMGenerationRequest, LLMGenerationResponse
from edgellm.sampling.params import SamplingParams
from edgellm.session.types import (
    AdmissionResult,
    AdmissionStatus,
    BatchResult,
    FinishReason,
    ResidentRef,
    ScheduledSequenceDescriptor,
    SequenceIdentity,
    SequenceWork,
    StepId,
    StepResult,
    TokenDelta,
)
from edgellm.streaming import StreamChannel


class Materializer:
    """The one session method that commit calls."""

    def __init__(self, fail_on: int = 0) -> None:
        self.fail_on = fail_on
        self.stops: list[tuple[str, ...]] = []

    def materialize(self, result: BatchResult, stop_strings: tuple[str, ...]) -> LLMGenerationResponse:
        self.stops.append(stop_strings)
        if len(self.stops) == self.fail_on:
            raise ValueError("cannot decode")
        return LLMGenerationResponse("text", result.generated_ids, result.terminal_reason, len(result.raw_input_ids))


def make_record(request_id: int) -> RequestRecord:
    return RequestRecord(
        request_id=request_id,
        request=LLMGenerationRequest(sampling=SamplingParams(stop=f"stop{request_id}")),
        channel=StreamChannel.create(),
        note_cancel=lambda: None,
    )


@pytest.fixture
def table():
    """Three residents in slots 0 to 2: prompt of 10 tokens each, 4 of them reused in slot 2."""
    coordinator = RequestCoordinator(EngineMetrics())
    for slot, start in ((0, 0), (1, 0), (2, 4)):
        record = make_record(slot + 1)
        admission = AdmissionResult(
            AdmissionStatus.ADMITTED, ref=ResidentRef(slot, 1), prompt_length=10, prefill_start=start
        )
        coordinator.add(record, record.request, admission, exclusive=False)
    return coordinator


def chunk(slot: int, query: int, past: int) -> ScheduledSequenceDescriptor:
    identity = SequenceIdentity(slot + 1, ResidentRef(slot, 1))
    return ScheduledSequenceDescriptor(identity, SequenceWork.CONTEXT, query, past, True)


def finished(slot: int, reason: FinishReason = FinishReason.LENGTH, message: str = ""):
    result = BatchResult(
        token_ids=[1, 2, 3], raw_input_ids=[1, 2], generate_length=1, terminal_reason=reason, error_message=message
    )
    return ResidentRef(slot, 1), result


def state(table: RequestCoordinator):
    return [(s.ref.slot, s.committed, s.prompt_remaining) for s in table.lengths]


START = [(0, 0, 10), (1, 0, 10), (2, 4, 6)]


def test_the_mirror_follows_execution(table):
    plan = [chunk(0, 4, 0), chunk(2, 6, 4)]
    result = StepResult(ok=True, step_id=StepId(1), execution=plan, deltas=[(ResidentRef(2, 1), TokenDelta([7]))])
    assert table.commit(result, plan, Materializer()) == []
    assert state(table) == [(0, 4, 6), (1, 0, 10), (2, 10, 0)]
    stamped = [seat.record.first_token_at > 0 for seat in table.seats()]
    assert stamped == [False, False, True]


def test_a_chunk_that_ran_fewer_positions_than_planned_still_consumes_the_prompt(table):
    plan = [chunk(0, 10, 0)]
    result = StepResult(ok=True, step_id=StepId(1), execution=[chunk(0, 7, 0)])
    table.commit(result, plan, Materializer())
    assert state(table)[0] == (0, 7, 0)


def test_a_failed_step_moves_nothing_but_honours_its_finished_entries(table):
    plan = [chunk(0, 4, 0)]
    result = StepResult(ok=False, execution=plan, finished=[finished(1, FinishReason.CANCELLED)])
    (outcome,) = table.commit(result, plan, Materializer())
    assert (outcome.record.id, outcome.status) == (2, TerminalStatus.CANCELLED)
    assert state(table) == [START[0], START[2]]
    assert [o.record.id for o in table.fail_everything("broken")] == [1, 3]
    assert len(table) == 0


def test_outcomes_carry_response_error_or_cancel(table):
    table.seats()[2].record.cancel()
    result = StepResult(
        ok=True,
        finished=[finished(0), finished(1, FinishReason.ERROR, "dead end"), finished(2)],
    )
    session = Materializer()
    outcomes = table.commit(result, [], session)
    assert [(o.status, o.message) for o in outcomes] == [
        (TerminalStatus.COMPLETED, ""),
        (TerminalStatus.EXECUTION_ERROR, "dead end"),
        (TerminalStatus.CANCELLED, ""),
    ]
    assert [o.response.token_ids for o in outcomes] == [[3], [3], [3]]  # of the others: what they had generated
    assert session.stops == [("stop1",), ("stop2",), ("stop3",)]
    assert state(table) == []


@pytest.mark.parametrize(
    ("result", "match"),
    [
        (StepResult(ok=True, execution=[chunk(0, 4, 0), chunk(1, 4, 2)]), "committed length is 0"),
        (StepResult(ok=True, execution=[chunk(3, 4, 0)]), "the engine knows nobody"),
        (StepResult(ok=True, finished=[finished(0), finished(0)]), "twice"),
        (StepResult(ok=True, finished=[(ResidentRef(0, 2), finished(0)[1])]), "epoch=2"),
        (StepResult(ok=True, execution=[chunk(1, 4, 0)]), "ran a chunk of -1 planned tokens"),
    ],
)
def test_a_result_that_contradicts_the_table_changes_nothing(table, result, match):
    with pytest.raises(ContractViolation, match=match):
        table.commit(result, [chunk(0, 4, 0)], Materializer())
    assert state(table) == START
    assert len(table) == 3


def test_a_materialize_that_raises_on_the_second_finisher_leaves_the_table_unchanged(table):
    plan = [chunk(2, 6, 4)]
    result = StepResult(ok=True, execution=plan, finished=[finished(0), finished(1)])
    with pytest.raises(ValueError, match="cannot decode"):
        table.commit(result, plan, Materializer(fail_on=2))
    assert state(table) == START


@pytest.mark.parametrize(
    ("admission", "match"),
    [
        (AdmissionResult(AdmissionStatus.ADMITTED, ref=ResidentRef(0, 2), prompt_length=3), "already seated"),
        (AdmissionResult(AdmissionStatus.ADMITTED, ref=ResidentRef(5, 0), prompt_length=3), "invalid"),
        (AdmissionResult(AdmissionStatus.ADMITTED, ref=ResidentRef(5, 1), prompt_length=3, prefill_start=3), "3, 3"),
    ],
)
def test_impossible_admissions_are_refused(table, admission, match):
    record = make_record(9)
    with pytest.raises(ContractViolation, match=match):
        table.add(record, record.request, admission, exclusive=False)
    assert state(table) == START


def test_draft_tokens_are_counted_when_their_request_ends(table):
    def counted():
        return table._metrics.proposed_draft_tokens, table._metrics.accepted_draft_tokens

    ended = [finished(0), finished(1), finished(2, FinishReason.CANCELLED)]
    for proposed, (_, snapshot) in zip((8, 4, 2), ended, strict=True):
        snapshot.proposed_draft_tokens, snapshot.accepted_draft_tokens = proposed, proposed // 2
    table.commit(StepResult(ok=True, finished=ended[:1]), [], Materializer())
    assert counted() == (8, 4)
    with pytest.raises(ValueError, match="cannot decode"):  # whole or not at all
        table.commit(StepResult(ok=False, finished=ended[1:]), [], Materializer(fail_on=1))
    assert counted() == (8, 4)
    table.commit(StepResult(ok=False, finished=ended[1:]), [], Materializer())
    assert counted() == (14, 7)
