"""Rules of admission and of responses that are written once, or that hold whatever else fails."""

from __future__ import annotations

import copy
import pickle

import pytest

from edgellm.engine.compatibility import compatible
from edgellm.errors import INPUT_TOO_LONG_MARKER, AdmissionError, ContractViolation, InputTooLongError
from edgellm.request import LLMGenerationRequest
from edgellm.sampling.logprobs import TokenLogprobs
from edgellm.sampling.params import SamplingParams
from edgellm.session.sampling_agreement import SEED_FIELDS, UNIFORM_SAMPLING_FIELDS, sampling_agrees
from edgellm.session.types import AdmissionStatus, BatchResult, FinishReason, SessionOptions
from edgellm.streaming import StreamChannel
from edgellm.testing.scripted_session import Script, ScriptedRuntime
from edgellm.testing.session_driver import SessionDriver

OTHER = {
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.5,
    "repetition_penalty": 1.5,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "seed": 11,
}


def request(**sampling) -> LLMGenerationRequest:
    return LLMGenerationRequest(prompt="hello", sampling=SamplingParams(**sampling))


def drive_of(**options) -> SessionDriver:
    return SessionDriver(ScriptedRuntime(**options).open_session(SessionOptions(allow_compact_execution=True)))


def facts(drive: SessionDriver) -> tuple:
    session = drive.session
    rows = [(row.ref, row.committed, list(row.generated)) for row in session._order]
    return rows, session._slots.available(), session._next_step_id, set(session._runtime.leased)


@pytest.mark.parametrize("name", UNIFORM_SAMPLING_FIELDS + SEED_FIELDS)
def test_behaviour_32_scheduler_and_session_agree_on_every_field(name):
    left, right = request(), request(**{name: OTHER[name]})
    assert not sampling_agrees(left, right)
    assert not sampling_agrees(right, left)
    assert not compatible(left, right, uniform_sampling=True)
    drive = drive_of(uniform_sampling=True)
    drive.admit(left)
    before = facts(drive)
    with pytest.raises(ContractViolation, match=f"sampling.{name}"):
        drive.admit(right)
    assert facts(drive) == before


def test_a_seeds_value_is_per_sequence():
    assert sampling_agrees(request(seed=1), request(seed=2))


def test_malformed_sampling_is_an_admission_error_also_beside_uniform_residents():
    drive = drive_of(uniform_sampling=True)
    drive.admit(request())
    before = facts(drive)
    with pytest.raises(AdmissionError, match=r"pass an edgellm\.SamplingParams"):
        drive.admit(LLMGenerationRequest(prompt="x", sampling={"temperature": 0.5}))
    assert facts(drive) == before


def test_behaviour_22_a_seat_that_fails_leaves_the_channel_for_another_try():
    script = Script()
    drive = drive_of(script=script)
    script.seat_failures.append(MemoryError("no room"))
    channel = StreamChannel.create()
    wanted = LLMGenerationRequest(prompt="hello", stream_channel=channel)
    before = facts(drive)
    result = drive.admit(wanted)
    assert (result.status, result.reason) == (AdmissionStatus.REJECTED, "seating failed: no room")
    assert facts(drive) == before
    assert not channel.is_attached()
    assert drive.admit(wanted).status is AdmissionStatus.ADMITTED


def test_a_used_channel_is_rejected_and_nothing_of_the_sequence_is_left():
    drive = drive_of()
    channel = StreamChannel.create()
    channel.attach()
    before = facts(drive)
    result = drive.admit(LLMGenerationRequest(prompt="hello", stream_channel=channel))
    assert result.status is AdmissionStatus.REJECTED
    assert "already serves" in result.reason
    assert facts(drive) == before


def test_behaviour_12_the_marker_is_there_once_also_after_a_pickle():
    error = InputTooLongError("9 tokens, the limit is 8")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == f"{INPUT_TOO_LONG_MARKER}: 9 tokens, the limit is 8"


def test_materialize_shares_nothing_with_the_snapshot():
    drive = drive_of()
    entries = [TokenLogprobs(70, -1.0), TokenLogprobs(71, -2.0)]
    snapshot = BatchResult([9, 70, 71], [9], 2, FinishReason.LENGTH, logprobs=list(entries))
    first, second = (drive.session.materialize(snapshot, ()) for _ in range(2))
    assert first == second
    first.logprobs.clear()
    first.token_ids.clear()
    assert second.logprobs == snapshot.logprobs == entries
    assert drive.session.materialize(snapshot, ()) == second


def test_a_session_is_never_copied():
    session = drive_of().session
    for copier in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be copied"):
            copier(session)
