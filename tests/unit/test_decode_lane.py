"""The decode lane in C: same ledgers, tokens and finish decisions as the row-by-row path."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgellm.engine.step_planner import LengthLedger
from edgellm.errors import InvariantError
from edgellm.request import CancelToken, LLMGenerationRequest
from edgellm.sampling.params import SamplingParams
from edgellm.session._decode_lane import (
    advance_mirror,
    moved_seat,
    named_rows,
    row_indices,
    sampling_states,
    take_tokens,
    token_column,
)
from edgellm.session._finish import FinishRule
from edgellm.session._ledger import (
    ResidentRow,
    poll_cancelled,
    renumber,
    split_ended,
    still_running,
    with_prompt_left,
    with_readers,
)
from edgellm.session._step_plan import StepPlan
from edgellm.session.frame import OneTokenOutcomes, RowOutcome, Step
from edgellm.session.types import FinishReason, RequestId, ResidentRef, SequenceIdentity, SessionOptions, StepResult
from edgellm.streaming import StreamChannel
from edgellm.testing.scripted_session import Script, ScriptedRuntime, ScriptedSession
from edgellm.testing.session_driver import SessionDriver

END = 1


def row(slot: int, *, committed: int = 5, limit: int = 10, ends: tuple[int, ...] = (END,)) -> ResidentRow:
    made = ResidentRow(SequenceIdentity(RequestId(slot + 1), ResidentRef(slot, 1)), rule=FinishRule(ends, limit))
    made.committed = made.state_length = committed
    return made


def tokens(*ids: int) -> Any:
    return np.array(ids, dtype=np.int32)


class Records:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def record(self, token_id: int) -> None:
        if token_id == 66:
            raise ValueError("beyond the vocabulary")
        self.seen.append(token_id)


def test_tokens_ledger_and_finish_decisions() -> None:
    plain, ended, full = row(0), row(1), row(2, limit=1)
    rows = [plain, ended, full]
    assert take_tokens(rows, StepPlan.full_cohort(rows), tokens(70, END, 71)) == ([], [])
    assert [r.generated for r in rows] == [[70], [END], [71]]
    assert [r.committed for r in rows] == [6, 6, 6]
    assert [r.state_length for r in rows] == [6, 6, 6]
    assert [r.iterations for r in rows] == [1, 1, 1]
    assert [r.reason for r in rows] == [FinishReason.NOT_FINISHED, FinishReason.END_ID, FinishReason.LENGTH]
    assert [r.terminal for r in rows] == [False, True, True]


def test_rows_with_readers_and_failed_rows_are_handed_back_with_their_ledger_moved() -> None:
    rows = [row(0), row(1), row(2), row(3), row(4), row(5)]
    rows[1].text = object()  # type: ignore[assignment]
    rows[2].channel = StreamChannel.create()
    rows[3].logprobs = []
    rows[4].exclusive = True
    left, failed = take_tokens(rows, StepPlan.full_cohort(rows), tokens(70, 71, 72, 73, 74, -1))
    assert (left, failed) == ([1, 2, 3, 4, 5], [])
    assert [r.generated for r in rows] == [[70], [], [], [], [], []]
    assert [r.committed for r in rows] == [6] * 6
    assert with_readers(rows) == rows[1:5]


def test_a_sampling_state_that_raises_fails_its_row_alone() -> None:
    rows = [row(0), row(1)]
    states = [Records(), Records()]
    rows[0].sampling, rows[1].sampling = states  # type: ignore[assignment]
    left, failed = take_tokens(rows, StepPlan.full_cohort(rows), tokens(66, 70))
    assert left == []
    assert [(r, str(error)) for r, error in failed] == [(rows[0], "beyond the vocabulary")]
    assert [state.seen for state in states] == [[], [70]]
    assert sampling_states(rows, [1, 0]) == states[::-1]


def test_what_is_no_decode_step_changes_nothing() -> None:
    rows = [row(0), row(1)]
    plan = StepPlan.full_cohort(rows)
    with pytest.raises(InvariantError, match="2 rows ran with 1 tokens over a plan of 2"):
        take_tokens(rows, plan, tokens(70))
    rows[1].prompt_remaining = 3
    with pytest.raises(InvariantError, match="runs a prompt"):
        take_tokens(rows, StepPlan.of(rows, [1, 1]), tokens(70, 71))
    assert [(r.committed, r.generated) for r in rows] == [(5, []), (5, [])]
    with pytest.raises(InvariantError, match="no sampling state"):
        sampling_states(rows, [0])


def test_end_ids_of_every_width() -> None:
    rule = FinishRule({7, -3, 2**31 - 1, 2**40, 5}, 3)
    decided = {t: rule.decide(t, 1, False) for t in (5, 6, 7, -3, 2**31 - 1)}
    assert decided == {
        5: FinishReason.END_ID,
        6: FinishReason.NOT_FINISHED,
        7: FinishReason.END_ID,
        -3: FinishReason.END_ID,
        2**31 - 1: FinishReason.END_ID,
    }
    assert rule.decide(6, 3, False) is FinishReason.LENGTH
    assert rule.decide(7, 3, True) is FinishReason.STOP_WORDS
    assert rule.end_ids == {7, -3, 2**31 - 1, 2**40, 5}


def test_a_moved_seat_is_found() -> None:
    rows = [row(0), row(2)]
    plan = StepPlan.full_cohort(rows)
    seats: list[ResidentRow | None] = [rows[0], None, rows[1]]
    assert moved_seat(rows, plan, seats) is None
    assert named_rows(plan, seats) == rows
    rows[0].committed = 6
    assert moved_seat(rows, plan, seats) is rows[0]
    rows[0].committed = 5
    assert moved_seat(rows, plan, [rows[0], None, row(2)]) is rows[1]
    assert moved_seat(rows, plan, [rows[0]]) is rows[1]
    with pytest.raises(InvariantError, match="slot 2, which is empty"):
        named_rows(plan, [rows[0], None, None])


def mirror(slot: int, committed: int, left: int = 0) -> LengthLedger:
    name = SequenceIdentity(RequestId(slot + 1), ResidentRef(slot, 1))
    return LengthLedger(identity=name, arrival=slot, committed=committed, prompt_remaining=left)


def test_the_mirror_advances_whole_or_not_at_all() -> None:
    seats = [mirror(0, 5), mirror(2, 7)]
    plan = StepPlan.full_cohort(seats)
    assert plan is not None
    assert advance_mirror(seats, plan)
    assert [s.committed for s in seats] == [6, 8]
    assert not advance_mirror(seats, plan)  # past lengths of before
    assert not advance_mirror(seats[::-1], StepPlan.full_cohort(seats))  # type: ignore[arg-type]
    assert not advance_mirror(seats, plan.take([0]))
    prompt = [mirror(0, 5, left=3)]
    assert not advance_mirror(prompt, StepPlan.of(prompt, [3]))
    assert with_prompt_left([*seats, *prompt]) == prompt
    assert [s.committed for s in [*seats, *prompt]] == [6, 8, 5]


def test_columns_hold_exactly_one_token_a_row() -> None:
    column = token_column([[4], [-1], [9]])
    assert column is not None
    assert (column.dtype, column.tolist()) == (np.dtype(np.int32), [4, -1, 9])
    assert token_column([[4], []]) is None
    assert token_column([[4], [5, 6]]) is None
    assert len(token_column([])) == 0  # type: ignore[arg-type]


def test_cancelled_rows_end_and_compaction_keeps_the_order() -> None:
    rows = [row(slot) for slot in range(4)]
    token, channel = CancelToken(), StreamChannel.create()
    rows[1] = ResidentRow(rows[1].identity, rule=rows[1].rule, cancel_token=token)
    rows[3].channel = channel
    renumber(rows)
    assert (poll_cancelled(rows), still_running(rows)) == (0, None)
    token.cancel()
    channel.cancel()
    assert rows[1].cancel_requested
    assert poll_cancelled(rows) == 2
    assert [r.reason for r in rows] == [FinishReason.NOT_FINISHED, FinishReason.CANCELLED] * 2
    assert still_running(rows) == [0, 2]
    assert row_indices(rows, ended_only=True) == [1, 3]
    ended, running, old_to_new = split_ended(rows)
    assert (ended, running, old_to_new) == ([rows[1], rows[3]], [rows[0], rows[2]], [0, -1, 1, -1])
    renumber(running)
    assert row_indices(running) == [0, 1]


def test_v16_a_row_that_ended_earlier_is_a_broken_invariant() -> None:
    rows = [row(0)]
    rows[0].terminal = True
    with pytest.raises(InvariantError, match="V16"):
        poll_cancelled(rows)


# ---- both lanes over one script -------------------------------------------------------------------------


class LaneSession(ScriptedSession):
    """Reports decode steps as `OneTokenOutcomes`."""

    lane_steps = 0

    def _run(self, step: Step) -> list[RowOutcome] | OneTokenOutcomes:
        outcomes = super()._run(step)
        assert isinstance(outcomes, list)
        if step.descriptors.has_context:
            return outcomes
        self.lane_steps += 1
        errors = {i: "a dead end" for i, r in enumerate(step.rows) if r.request_id == 5 and len(r.generated) == 3}
        column = [-1 if i in errors else outcome.token_ids[0] for i, outcome in enumerate(outcomes)]
        return OneTokenOutcomes(np.array(column, dtype=np.int32), errors)


class RowSession(ScriptedSession):
    def _run(self, step: Step) -> list[RowOutcome] | OneTokenOutcomes:
        outcomes = super()._run(step)
        assert isinstance(outcomes, list)
        for resident, outcome in zip(step.rows, outcomes, strict=True):
            if not step.descriptors.has_context and resident.request_id == 5 and len(resident.generated) == 3:
                outcome.token_ids, outcome.error = (), "a dead end"
        return outcomes


def play(kind: type[ScriptedSession]) -> tuple[list[StepResult], list[list[Any]], int]:
    """Eight requests with every kind of reader, one cancelled, one that fails; all results and streams."""
    runtime = ScriptedRuntime(script=Script(tokens={2: [80, 81, END]}), max_batch_size=8)
    session = runtime.open_session(SessionOptions(allow_compact_execution=True))
    session.__class__ = kind  # type: ignore[assignment]
    drive = SessionDriver(session)
    token, channels = CancelToken(), [StreamChannel.create() for _ in range(2)]
    for number in range(1, 9):
        params = SamplingParams(
            max_tokens=3 + number % 4, stop="cde" if number == 4 else None, logprobs=1 if number == 7 else None
        )
        request = LLMGenerationRequest(prompt_token_ids=[90 + number] * 3, sampling=params)
        if number in (3, 6):
            request.stream_channel = channels[number == 6]
        drive.admit(request, cancel_token=token if number == 8 else None)
        drive.step(drive.context(number))
    while drive.live:
        if len(drive.results) == 9:
            token.cancel()
        if len(drive.results) == 10:
            channels[1].cancel()
        drive.step_all()
    session.check_invariants()
    assert session.idle()
    session.close()
    return drive.results, [list(channel) for channel in channels], getattr(session, "lane_steps", 0)


def test_the_lane_gives_the_results_and_streams_of_the_row_path() -> None:
    lane, lane_streams, lane_steps = play(LaneSession)
    rows, row_streams, _ = play(RowSession)
    assert lane_steps >= 4
    assert lane == rows
    assert lane_streams == row_streams
    reasons = {ref.slot: snapshot.terminal_reason for result in lane for ref, snapshot in result.finished}
    assert reasons[1] is FinishReason.END_ID
    assert reasons[4] is FinishReason.ERROR
    assert reasons[7] is FinishReason.CANCELLED


def test_outcomes_that_contradict_themselves_lose_the_session() -> None:
    class Wrong(ScriptedSession):
        def _run(self, step: Step) -> list[RowOutcome] | OneTokenOutcomes:
            if step.descriptors.has_context:
                return super()._run(step)
            return OneTokenOutcomes(np.array([-1], dtype=np.int32))

    runtime = ScriptedRuntime()
    session = runtime.open_session(SessionOptions(allow_compact_execution=True))
    session.__class__ = Wrong
    drive = SessionDriver(session)
    drive.admit(LLMGenerationRequest(prompt_token_ids=[90, 91], sampling=SamplingParams(max_tokens=5)))
    drive.step(drive.context(1))
    result = drive.step(drive.decode(1))
    assert not result.ok
    assert "row 0 has token -1 and error ''" in result.failure
