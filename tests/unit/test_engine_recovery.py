"""Requests that begin again after their session was lost: who may, how often, and what nobody sees twice."""

import pytest
from engine_rig import WAIT, admitted, ask, held, wait_until

from edgellm.engine.config import EngineConfig
from edgellm.engine.engine import RequestEngine, ShutdownMode
from edgellm.errors import (
    ContractViolation,
    InvalidArgumentError,
    RequestCancelled,
    RequestFailed,
    StepDeviceError,
    SubmitError,
)
from edgellm.request import LLMGenerationRequest
from edgellm.sampling.params import SamplingParams
from edgellm.session.types import FinishReason
from edgellm.streaming import StreamChannel, StreamChunk
from edgellm.testing.scripted_session import Script, ScriptedRuntime
from edgellm.testing.toy import toy_generate
from edgellm.testing.toy_runtime import TOY_VOCAB_SIZE, ToyRuntime


def solo(request) -> list[int]:
    with RequestEngine(ScriptedRuntime()) as engine:
        return engine.submit(request).get(WAIT).token_ids


@pytest.mark.parametrize("fault", [StepDeviceError("ecc"), RuntimeError("kernel fault")])
def test_behaviour_38_after_a_failed_step_unseen_requests_begin_again(start, brake, fault):
    script = Script(next_token=brake)
    runtime = ScriptedRuntime(script=script)
    engine = start(runtime)
    first = held(engine, brake)
    second = engine.submit(ask("second", max_tokens=30))
    script.steps.extend([None, None, fault])
    brake.release()
    assert first.get(WAIT).token_ids == solo(ask("held", max_tokens=50))
    assert second.get(WAIT).token_ids == solo(ask("second", max_tokens=30))
    metrics = engine.metrics()
    assert (metrics.replayed, metrics.session_reopens, metrics.completed, metrics.failed) == (2, 1, 2, 0)
    assert admitted(runtime) == [1, 2, 1, 2]


def test_behaviour_38_a_request_whose_stream_was_read_fails_and_its_neighbour_begins_again(start, brake):
    script = Script(next_token=brake)
    engine = start(ScriptedRuntime(script=script))
    brake.hold()
    seen = engine.submit(ask("seen", max_tokens=30))
    stream = seen.stream()
    assert brake.entered.wait(WAIT)
    unread = engine.submit(ask("unread", max_tokens=30))
    channel = unread.stream()
    brake.hold_at(len("seen"), 3)
    brake.release()
    wait_until(lambda: brake.trapped, "never came to the trap")
    assert stream.try_pop() is not None
    script.steps.append(StepDeviceError("ecc"))
    brake.release()
    with pytest.raises(RequestFailed, match="ecc"):
        seen.get(WAIT)
    response = unread.get(WAIT)
    assert [token for chunk in channel for token in chunk.token_ids] == response.token_ids
    assert response.token_ids == solo(ask("unread", max_tokens=30))
    assert engine.metrics().replayed == 1


def test_a_request_whose_callback_was_called_fails(start, brake):
    script = Script(next_token=brake)
    engine = start(ScriptedRuntime(script=script))
    tokens: list[int] = []
    script.steps.extend([None, None, StepDeviceError("ecc")])
    handle = engine.submit(ask(max_tokens=9, token_callback=tokens.extend))
    with pytest.raises(RequestFailed, match="ecc"):
        handle.get(WAIT)
    assert len(tokens) == 2
    assert engine.metrics().replayed == 0


def test_a_request_begins_again_at_most_max_replays_times(start):
    script = Script()
    script.steps.extend([StepDeviceError("first"), StepDeviceError("second"), StepDeviceError("third")])
    engine = start(ScriptedRuntime(script=script), EngineConfig(max_replays=2))
    with pytest.raises(RequestFailed, match="third"):
        engine.submit(ask()).get(WAIT)
    assert engine.metrics().replayed == 2
    assert engine.handle_request(ask()) is not None


def test_a_cancelled_request_does_not_begin_again(start, brake):
    script = Script(next_token=brake)
    runtime = ScriptedRuntime(script=script)
    engine = start(runtime)
    first = held(engine, brake)

    def fail_after_cancel(prompt, index):
        first.cancel()
        raise StepDeviceError("ecc")

    script.next_token = fail_after_cancel
    brake.release()
    with pytest.raises(RequestCancelled):
        first.get(WAIT)
    wait_until(first.ready, "no outcome")
    assert engine.metrics().replayed == 0
    assert admitted(runtime) == [1]


def test_behaviour_37_a_session_lost_in_admission_begins_again_and_the_suspect_is_tried_alone(start, brake):
    script = Script(next_token=brake)
    runtime = ScriptedRuntime(script=script)
    engine = start(runtime)
    first = held(engine, brake)
    script.admissions.extend([RuntimeError("lease died"), None, None, RuntimeError("lease died")])
    second, third = engine.submit(ask()), engine.submit(ask())
    brake.release()
    assert len(first.get(WAIT).token_ids) == 50
    assert len(third.get(WAIT).token_ids) == 4
    with pytest.raises(RequestFailed, match="lease died"):
        second.get(WAIT)
    # 1 and 3 were seated when the suspect waited; its second loss took nobody with it.
    assert admitted(runtime) == [1, 2, 1, 3, 2]
    metrics = engine.metrics()
    assert (metrics.replayed, metrics.failed, metrics.session_reopens) == (2, 1, 1)
    assert engine.handle_request(ask()) is not None


def test_behaviour_35_after_a_refused_compact_step_unseen_decoders_begin_again_too(start, brake):
    script = Script(next_token=brake)
    runtime = ScriptedRuntime(script=script, max_batch_size=4, max_input_length=64, page_size=4)
    engine = start(runtime, EngineConfig(step_token_budget=8))
    first = held(engine, brake)
    second = engine.submit(ask("y" * 40, max_tokens=3))
    script.steps.append(None)
    script.refuse_compact("ragged attention refused")
    brake.release()
    assert len(first.get(WAIT).token_ids) == 50
    assert len(second.get(WAIT).token_ids) == 3
    metrics = engine.metrics()
    assert (metrics.readmitted, metrics.replayed, metrics.failed) == (1, 1, 0)
    assert not runtime.sessions[-1].capabilities().compact


def test_behaviour_36_the_stream_of_a_request_that_began_again_has_each_token_once(start, brake):
    script = Script(next_token=brake)
    engine = start(ScriptedRuntime(script=script))
    channel = StreamChannel.create()
    brake.hold()
    handle = engine.submit(ask("once", max_tokens=20, stream_channel=channel))
    assert brake.entered.wait(WAIT)
    script.steps.extend([None, None, StepDeviceError("ecc")])
    brake.release()
    response = handle.get(WAIT)
    chunks = list(channel)
    assert [token for chunk in chunks for token in chunk.token_ids] == response.token_ids
    assert "".join(chunk.text for chunk in chunks) == response.text
    assert channel.reason() is FinishReason.LENGTH


def test_behaviour_39_with_an_unhealthy_device_nothing_begins_again(start):
    script = Script()
    script.steps.append(StepDeviceError("gone"))
    engine = start(ScriptedRuntime(script=script), device_healthy=lambda: False)
    with pytest.raises(RequestFailed, match="gone"):
        engine.submit(ask()).get(WAIT)
    assert engine.metrics().replayed == 0
    wait_until(lambda: engine.metrics().failed == 1, "no outcome")


def test_a_passing_failure_to_open_a_session_does_not_end_the_engine(start):
    script = Script()
    runtime = ScriptedRuntime(script=script)
    opened = []

    def open_session():
        from edgellm.session.types import SessionOptions

        opened.append(None)
        if len(opened) in (2, 3):
            raise RuntimeError("the stream did not drain")
        return runtime.open_session(SessionOptions(allow_compact_execution=True))

    engine = start(open_session)
    script.steps.append(StepDeviceError("ecc"))
    assert len(engine.submit(ask()).get(WAIT).token_ids) == 4
    assert len(opened) == 4
    assert engine.metrics().session_reopens == 1


def test_an_engine_that_cannot_reopen_gives_up_after_max_reopen_attempts(start):
    script = Script()
    runtime = ScriptedRuntime(script=script)
    engine = start(runtime, EngineConfig(max_reopen_attempts=2, max_replays=0))
    attempts = []

    def refuse():
        attempts.append(None)
        raise RuntimeError("the stream did not drain")

    engine._actor._open_session = refuse
    script.steps.append(StepDeviceError("ecc"))
    with pytest.raises(RequestFailed, match="ecc"):
        engine.submit(ask()).get(WAIT)
    with pytest.raises((RequestFailed, SubmitError), match="did not drain"):
        engine.submit(ask()).get(WAIT)
    assert len(attempts) == 2


def test_a_contract_violation_of_the_engine_is_not_repeated(start, monkeypatch):
    engine = start(ScriptedRuntime())
    monkeypatch.setattr(engine._actor._planner, "plan", lambda residents: [])
    with pytest.raises(RequestFailed, match="the plan is empty"):
        engine.submit(ask()).get(WAIT)
    assert engine.metrics().replayed == 0


def test_only_a_session_that_ended_lets_go_of_requests(brake):
    runtime = ScriptedRuntime(script=Script(next_token=brake))
    engine = RequestEngine(runtime)
    held(engine, brake)
    session = runtime.sessions[-1]
    session._check_thread = lambda call: None
    with pytest.raises(ContractViolation, match="the session is open"):
        session.release_for_replay(session.residents()[0])
    brake.release()
    engine.shutdown(ShutdownMode.CANCEL)


def test_a_channel_rewinds_until_a_chunk_was_read():
    channel = StreamChannel.create(max_pending_chunks=1)
    channel.attach()
    for token in range(3):
        channel.push(StreamChunk([token], "x"))
    assert channel.rewind()
    assert not channel.is_attached()
    channel.attach()
    channel.push(StreamChunk([7], "y"))
    assert channel.try_pop().token_ids == [7]
    assert not channel.rewind()
    channel.finish(FinishReason.LENGTH)
    unread = StreamChannel.create()
    unread.finish(FinishReason.LENGTH)
    assert not unread.rewind()


@pytest.mark.parametrize("bad", [{"max_replays": -1}, {"max_reopen_attempts": 0}])
def test_limits_of_recovery_are_checked(bad):
    with pytest.raises(InvalidArgumentError, match=next(iter(bad))):
        EngineConfig(**bad)


def test_a_wait_that_failed_once_ends_neither_the_engine_nor_an_unseen_request():
    healthy = [True]
    runtime = ToyRuntime(page_size=4, max_kv_capacity=64, synchronizer=lambda stream: healthy[0])
    forward, calls = runtime.executor.forward, []

    def fail_once(batch):
        calls.append(None)
        if len(calls) == 3:
            healthy[0] = False  # neither can the stream be drained when the session closes
            raise StepDeviceError("ecc")
        return forward(batch)

    runtime.executor.forward = fail_once
    opens = runtime.open_session

    def open_session(options=None):
        session = None
        try:
            session = opens(options)
        finally:
            healthy[0] = True  # the next attempt finds the device well
        return session

    runtime.open_session = open_session
    with RequestEngine(runtime) as engine:
        request = LLMGenerationRequest(
            prompt_token_ids=[5, 6, 7], sampling=SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        )
        assert engine.submit(request).get(WAIT).token_ids == toy_generate([5, 6, 7], 6, TOY_VOCAB_SIZE)
        metrics = engine.metrics()
        assert (metrics.replayed, metrics.session_reopens, metrics.failed) == (1, 1, 0)
    assert not runtime.coordinator.poisoned
