"""Streams that are asked for late: whenever `stream()` comes, its reader gets what it would have got before."""

import gc
import threading
import weakref

import pytest
from stream_reading import drained, joined

from edgellm.engine.command_queue import EngineChannel, ShutdownMode
from edgellm.engine.config import EngineConfig
from edgellm.engine.engine import RequestEngine
from edgellm.engine.metrics import EngineMetrics
from edgellm.engine.records import RequestHandle, RequestRecord, TerminalStatus
from edgellm.errors import ContractViolation, InvalidArgumentError, RequestCancelled, RequestFailed, SubmitError
from edgellm.request import LLMGenerationRequest, LLMGenerationResponse
from edgellm.sampling.params import SamplingParams
from edgellm.session.types import FinishReason, RequestId, ResidentRef, SessionOptions
from edgellm.streaming import StreamChannel, StreamChunk
from edgellm.testing.scripted_session import Script, ScriptedRuntime, ScriptedSession
from edgellm.testing.session_driver import SessionDriver
from edgellm.testing.toy_tokenizer import EOS_ID, ToyTokenizer

WAIT = 20
ENCODE = ToyTokenizer().encode


def ask(prompt: str = "hello", *, channel: StreamChannel | None = None, **sampling) -> LLMGenerationRequest:
    sampling.setdefault("max_tokens", 6)
    return LLMGenerationRequest(prompt=prompt, sampling=SamplingParams(**sampling), stream_channel=channel)


def drive_script(*scripts: list[int]) -> SessionDriver:
    tokens = {number + 1: script for number, script in enumerate(scripts)}
    runtime = ScriptedRuntime(script=Script(tokens=tokens), max_batch_size=4)
    return SessionDriver(runtime.open_session(SessionOptions(allow_compact_execution=True)))


def ref_of(drive: SessionDriver, request_id: int) -> ResidentRef:
    return drive.live[request_id].identity.resident


# ---- the session's side -------------------------------------------------------------------------------


@pytest.mark.parametrize("late_after", [0, 1, 2, 5, 9])
@pytest.mark.parametrize("stop", [(), ("llo w",), ("zz",)])
def test_a_stream_attached_later_carries_what_an_early_one_carried(late_after, stop):
    script = ENCODE("hé€llo world!")
    drive = drive_script(script, script)
    early, late = StreamChannel.create(), StreamChannel.create()
    for channel in (early, None):
        drive.admit(ask(channel=channel, stop=stop, max_tokens=len(script)))
    for _ in range(late_after):
        drive.step_all()
    assert drive.session.attach_stream(ref_of(drive, 2), late)
    first = drained(late)
    assert len(first) == (late_after > 0)  # everything so far is one chunk
    so_far = joined(drained(early))[:2] if late_after else ([], "")
    if late_after:
        assert joined(first)[:2] == so_far
    drive.run()
    rest_early, rest_late = joined(drained(early)), joined(drained(late))
    assert rest_early == rest_late
    assert late.reason() is early.reason()
    text = so_far[1] + rest_late[1]
    assert text == drive.response(2).text
    assert "llo w" not in text or stop != ("llo w",)


def test_a_stream_attached_while_the_prompt_is_incomplete_misses_nothing():
    drive = drive_script(ENCODE("abc"))
    drive.admit(ask("a long prompt", max_tokens=3))
    drive.step(drive.context(1, 4))
    channel = StreamChannel.create()
    drive.session.attach_stream(ref_of(drive, 1), channel)
    assert drained(channel) == []
    drive.run()
    assert joined(drained(channel)) == (ENCODE("abc"), "abc", FinishReason.LENGTH)


def test_the_first_chunk_keeps_log_probabilities_and_respects_the_interval():
    drive = drive_script(ENCODE("abcdef"))
    drive.admit(ask(logprobs=0))
    drive.step_all()
    drive.step_all()
    resident = drive.session._order[0]
    resident.logprobs[:] = ["first", "second"]  # the scripted model has none
    channel = StreamChannel.create(stream_interval=3)
    drive.session.attach_stream(ref_of(drive, 1), channel)
    assert drained(channel) == []  # two tokens are below the interval
    drive.run()
    chunks = drained(channel)
    assert [len(chunk.token_ids) for chunk in chunks] == [3, 3]
    assert chunks[0].logprobs[:2] == ["first", "second"]


def test_attaching_is_refused_and_changes_nothing():
    drive = drive_script(ENCODE("abcdef"))
    first = StreamChannel.create()
    drive.admit(ask(channel=first))
    drive.step_all()
    used = StreamChannel.create()
    used.attach()
    session = drive.session
    with pytest.raises(ContractViolation, match="has a stream"):
        session.attach_stream(ref_of(drive, 1), StreamChannel.create())
    with pytest.raises(ContractViolation, match="not a live resident"):
        session.attach_stream(ResidentRef(3, 1), StreamChannel.create())
    drive.admit(ask())
    with pytest.raises(ContractViolation, match="already serves"):
        session.attach_stream(ref_of(drive, 2), used)
    resident = session._order[1]
    assert (resident.channel, resident.text, resident.pending_text) == (None, None, "")
    session.close()
    with pytest.raises(ContractViolation, match="closed"):
        session.attach_stream(ref_of(drive, 2), StreamChannel.create())


def test_a_session_that_cannot_attach_says_so():
    assert super(ScriptedSession, drive_script().session).attach_stream.__func__ is not None
    from edgellm.session.base import RuntimeSession

    assert RuntimeSession.attach_stream(drive_script().session, ResidentRef(0, 1), StreamChannel.create()) is False


def test_text_held_back_for_a_stop_string_is_delivered_when_the_session_closes():
    drive = drive_script(ENCODE("abcd"))
    channel = StreamChannel.create()
    drive.admit(ask(channel=channel, stop=("bcX",), max_tokens=9))
    for _ in range(3):
        drive.step_all()
    assert joined(drained(channel))[:2] == (ENCODE("abc"), "a")
    drive.session.close()
    assert joined(drained(channel)) == ([], "bc", FinishReason.ERROR)


def test_an_unread_row_decodes_no_text_and_pushes_nothing(monkeypatch):
    drive = drive_script(ENCODE("abcdef"))
    drive.admit(ask())
    pushed = []
    monkeypatch.setattr(StreamChannel, "push", lambda *_: pushed.append(1))
    monkeypatch.setattr("edgellm.tokenization.detokenizer.IncrementalDetokenizer.push", lambda *_: pushed.append(2))
    drive.run()
    assert pushed == []
    assert drive.response(1).text == "abcdef"


# ---- a scripted order of record, caller and actor -------------------------------------------------------


class Desk:
    """One record with the engine channel's side of it; the test plays the actor."""

    def __init__(self) -> None:
        self.channel = EngineChannel(EngineConfig(), EngineMetrics())
        request_id = self.channel.next_id()
        self.record = RequestRecord(
            request_id=request_id,
            request=ask(),
            note_cancel=self.channel.note_cancel,
            note_stream=self.channel.note_stream,
        )
        self.handle = RequestHandle(self.record)
        self.channel.accept(self.record)

    def end(self, status=TerminalStatus.COMPLETED, text="answer", **kwargs) -> None:
        reason = FinishReason.END_ID if status is TerminalStatus.COMPLETED else FinishReason.ERROR
        response = LLMGenerationResponse(text, ENCODE(text), reason, 1) if text else None
        self.channel.terminate(self.record, status, "why", response, **kwargs)


def test_nobody_streams_nothing_is_made():
    desk = Desk()
    desk.end()
    assert desk.record.channel is None
    assert not desk.channel.take_stream_note()
    assert desk.handle.get(0).text == "answer"


def test_asked_before_admission_the_request_carries_it():
    desk = Desk()
    stream = desk.handle.stream()
    assert desk.channel.take_stream_note()
    desk.record.settle_stream()
    assert desk.record.request.stream_channel is stream
    assert desk.handle.stream() is stream
    assert not desk.channel.take_stream_note()


@pytest.mark.parametrize("asked", ["before", "after"])
def test_never_attached_it_is_filled_from_the_response_once(asked):
    desk = Desk()
    if asked == "before":
        stream = desk.handle.stream()
    desk.end()
    if asked == "after":
        stream = desk.handle.stream()
    assert drained(stream) == [StreamChunk(ENCODE("answer"), "answer", True, FinishReason.END_ID)]
    assert stream.is_exhausted()
    assert desk.handle.stream() is stream
    with pytest.raises(ContractViolation):
        stream.attach()


def test_attached_it_is_not_filled_a_second_time():
    desk = Desk()
    stream = desk.handle.stream()
    stream.attach()
    stream.push(StreamChunk(ENCODE("ans"), "ans"))
    desk.end()  # a session that forgot to finish it
    assert joined(drained(stream)) == (ENCODE("ans"), "ans", FinishReason.END_ID)


def test_a_failed_request_streams_what_is_known_of_it():
    desk = Desk()
    desk.end(TerminalStatus.EXECUTION_ERROR, "par")
    with pytest.raises(RequestFailed, match="why"):
        desk.handle.get(0)
    assert joined(drained(desk.handle.stream())) == (ENCODE("par"), "par", FinishReason.ERROR)
    nothing = Desk()
    nothing.end(TerminalStatus.CANCELLED, "")
    assert joined(drained(nothing.handle.stream())) == ([], "", FinishReason.CANCELLED)


def test_a_cancel_before_the_seal_wins_and_one_after_it_has_no_effect():
    early, late = Desk(), Desk()
    early.handle.cancel()
    with pytest.raises(RequestCancelled):
        early.handle.get(0)  # released at once, without an outcome
    early.end()
    assert early.record.status is TerminalStatus.CANCELLED  # and so it stays
    assert late.record.seal(TerminalStatus.COMPLETED) is TerminalStatus.COMPLETED
    late.handle.cancel()
    assert not late.record.cancelled
    late.end()
    assert late.handle.get(0).text == "answer"


def test_a_stream_of_a_cancelled_request_is_over_at_once():
    desk = Desk()
    desk.handle.cancel()
    stream = desk.handle.stream()
    assert stream.is_cancelled()
    assert stream.wait_pop(WAIT) is None


def test_cancelling_a_late_stream_cancels_the_request():
    desk = Desk()
    desk.handle.stream().cancel()
    assert desk.record.cancelled
    assert desk.channel.take_cancel_note()


def test_two_threads_that_ask_get_one_stream_and_nothing_is_lost_or_doubled():
    for _ in range(300):
        desk, got, gate = Desk(), [], threading.Barrier(3)

        def ask_for_it(desk=desk, got=got, gate=gate) -> None:
            gate.wait()
            got.append(desk.handle.stream())

        callers = [threading.Thread(target=ask_for_it) for _ in range(2)]
        for caller in callers:
            caller.start()
        gate.wait()
        desk.end()
        for caller in callers:
            caller.join()
        assert got[0] is got[1]
        assert joined(list(got[0])) == (ENCODE("answer"), "answer", FinishReason.END_ID)


def test_only_one_side_ends_a_stream_that_is_asked_for_at_the_outcome(monkeypatch):
    """The actor comes to the end of the stream while a caller, who came after the outcome, makes it."""
    desk = Desk()
    desk.end(end_stream=False)
    attach = StreamChannel.attach

    def actor_comes_first(channel):
        monkeypatch.setattr(StreamChannel, "attach", attach)
        desk.record.end_stream()
        attach(channel)

    monkeypatch.setattr(StreamChannel, "attach", actor_comes_first)
    assert joined(list(desk.handle.stream())) == (ENCODE("answer"), "answer", FinishReason.END_ID)
    desk.record.end_stream()
    assert desk.handle.stream().is_exhausted()


def test_the_actor_goes_on_when_an_outcome_cannot_be_published(monkeypatch, caplog):
    broken = []

    def fail(record):
        broken.append(record.id)
        raise ContractViolation("the stream ends twice")

    monkeypatch.setattr(RequestRecord, "end_stream", fail)
    with RequestEngine(ScriptedRuntime()) as engine:
        for _ in range(3):
            assert engine.submit(ask()).get(WAIT)
            assert engine.running()
            assert engine.closed_because() == ""
    assert broken == [1, 2, 3]
    assert caplog.text.count("ending request") == 3
    assert "the stream ends twice" in caplog.text


def test_a_request_whose_outcome_cannot_be_given_fails_alone(monkeypatch, caplog):
    with RequestEngine(ScriptedRuntime()) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine._actor, "_complete", lambda outcome: 1 // 0)
            with pytest.raises(RequestFailed, match="could not be published: ZeroDivisionError"):
                engine.submit(ask()).get(WAIT)
        assert engine.submit(ask()).get(WAIT)
        assert engine.pending() == 0
    assert "publishing the outcome" in caplog.text


# ---- channels that the caller brings --------------------------------------------------------------------


def test_a_brought_channel_is_claimed_at_submit_and_free_again_when_that_fails():
    channel = StreamChannel.create()
    runtime = ScriptedRuntime()
    with RequestEngine(runtime, EngineConfig(max_pending_requests=1)) as engine:
        handle = engine.submit(ask(channel=channel))
        assert handle.stream() is channel
        with pytest.raises(InvalidArgumentError, match="another request"):
            engine.submit(ask(channel=channel))
        with pytest.raises(ContractViolation, match="before submitting"):
            channel.set_skip_special_tokens(False)
        handle.get(WAIT)
    spare = StreamChannel.create()
    with pytest.raises(SubmitError):
        engine.submit(ask(channel=spare))
    with RequestEngine(ScriptedRuntime()) as another:
        assert another.submit(ask(channel=spare)).get(WAIT).text == "".join(chunk.text for chunk in spare)


def test_a_channel_keeps_nothing_of_submits_that_were_refused(monkeypatch):
    channel, refused = StreamChannel.create(), []
    engine = RequestEngine(ScriptedRuntime())
    engine.shutdown()
    accept = engine._channel.accept
    monkeypatch.setattr(
        engine._channel, "accept", lambda record, **kwargs: (refused.append(weakref.ref(record)), accept(record))
    )
    for _ in range(3):
        with pytest.raises(SubmitError):
            engine.submit(ask(channel=channel))
    gc.collect()
    assert [record() for record in refused] == [None] * 3
    with RequestEngine(ScriptedRuntime()) as another:
        handle = another.submit(ask(channel=channel))
        channel.cancel()
        with pytest.raises(RequestCancelled):
            handle.get(WAIT)


# ---- the engine -----------------------------------------------------------------------------------------


class Steps:
    """A token source that waits for the test before every token."""

    def __init__(self, text: str, *, free: bool = False) -> None:
        self.tokens = [*ENCODE(text), EOS_ID]
        self.reached = threading.Semaphore(0)
        self.go = threading.Semaphore(10_000 if free else 0)

    def __call__(self, prompt, index: int) -> int:
        self.reached.release()
        assert self.go.acquire(timeout=WAIT)
        return self.tokens[min(index, len(self.tokens) - 1)]


@pytest.mark.parametrize("held", range(6))
def test_stream_asked_for_inside_step_n_delivers_everything(held):
    """Scripted order: the caller asks while the actor is inside the step of token `held`, the last one included."""
    steps = Steps("añb!")
    engine = RequestEngine(ScriptedRuntime(script=Script(next_token=steps)))
    handle = engine.submit(ask(max_tokens=50))
    for _ in range(held):
        assert steps.reached.acquire(timeout=WAIT)
        steps.go.release()
    assert steps.reached.acquire(timeout=WAIT)
    stream = handle.stream()
    for _ in range(100):
        steps.go.release()
    chunks = list(stream)
    assert joined(chunks) == (steps.tokens, "añb!", FinishReason.END_ID)
    assert handle.get(WAIT).text == "añb!"
    assert len(chunks) == max(1, len(steps.tokens) - held)
    engine.shutdown()


def test_stream_asked_for_in_a_step_that_fails_still_delivers_what_was_generated():
    steps = Steps("abcdef")
    script = Script(next_token=steps)
    engine = RequestEngine(ScriptedRuntime(script=script), EngineConfig(max_replays=0))
    handle = engine.submit(ask(max_tokens=50))
    for _ in range(3):
        assert steps.reached.acquire(timeout=WAIT)
        steps.go.release()
    assert steps.reached.acquire(timeout=WAIT)
    stream = handle.stream()
    script.steps.append(RuntimeError("the device fell off"))
    steps.go.release()
    assert joined(list(stream)) == (ENCODE("abcd"), "abcd", FinishReason.ERROR)
    with pytest.raises(RequestFailed, match="fell off"):
        handle.get(WAIT)
    engine.shutdown()


def test_text_held_back_for_a_stop_string_survives_the_loss_of_the_session():
    steps = Steps("abcdef")
    script = Script(next_token=steps)
    engine = RequestEngine(ScriptedRuntime(script=script), EngineConfig(max_replays=0))
    handle = engine.submit(ask(max_tokens=50, channel=StreamChannel.create(), stop=("bcdX",)))
    for _ in range(3):
        assert steps.reached.acquire(timeout=WAIT)
        steps.go.release()
    assert steps.reached.acquire(timeout=WAIT)
    script.steps.append(RuntimeError("the device fell off"))
    steps.go.release()
    assert joined(list(handle.stream())) == (ENCODE("abcd"), "abcd", FinishReason.ERROR)
    engine.shutdown()


def test_a_cancelling_shutdown_ends_streams_as_cancelled_with_all_their_text():
    steps = Steps("abcdef")
    engine = RequestEngine(ScriptedRuntime(script=Script(next_token=steps)))
    early = engine.submit(ask(max_tokens=50, channel=StreamChannel.create(), stop=("cdX",)))
    for _ in range(3):
        assert steps.reached.acquire(timeout=WAIT)
        steps.go.release()
    assert steps.reached.acquire(timeout=WAIT)
    ender = threading.Thread(target=engine.shutdown, args=(ShutdownMode.CANCEL,))
    ender.start()
    while engine._channel.shutdown_mode is None:
        pass
    steps.go.release()
    ender.join(WAIT)
    assert joined(list(early.stream())) == (ENCODE("abcd"), "abcd", FinishReason.CANCELLED)
    with pytest.raises(RequestCancelled):
        early.get(0)


def test_a_readmitted_request_keeps_the_stream_that_was_asked_for_late():
    script = Script()
    runtime = ScriptedRuntime(script=script, max_batch_size=2)
    script.refuse_compact()
    engine = RequestEngine(runtime, EngineConfig(max_batch_size=2))
    handles = [engine.submit(ask(f"prompt {number}", max_tokens=5)) for number in range(2)]
    streams = [handle.stream() for handle in handles]
    for handle, stream in zip(handles, streams, strict=True):
        response = handle.get(WAIT)
        assert joined(list(stream)) == (response.token_ids, response.text, response.finish_reason)
    engine.shutdown()


def test_streams_asked_for_at_any_moment_by_many_threads_equal_their_responses():
    engine = RequestEngine(ScriptedRuntime(max_batch_size=4), EngineConfig(max_batch_size=4))
    failures = []

    def caller(seed: int) -> None:
        for number in range(60):
            handle = engine.submit(ask(f"{seed} {number}", max_tokens=1 + (seed * 7 + number) % 12))
            for _ in range((seed * 31 + number * 17) % 400):
                handle.ready()  # lets an amount of time pass that differs from round to round
            got = joined(list(handle.stream(stream_interval=1 + number % 3)))
            response = handle.get(WAIT)
            if got != (response.token_ids, response.text, response.finish_reason):
                failures.append((seed, number, got, response))

    threads = [threading.Thread(target=caller, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    engine.shutdown()
    assert RequestId(240) == engine.metrics().completed
