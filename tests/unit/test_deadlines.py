"""`timeout_seconds`: a request ends wherever it is, at most a step late, and says so."""

import asyncio
import gc
import threading
import time
from types import SimpleNamespace

import pytest
from engine_rig import WAIT, admitted, ask, held, wait_until

from edgellm.engine.config import EngineConfig, SchedulingOptions
from edgellm.engine.deadlines import Deadlines
from edgellm.engine.engine import RequestEngine, ShutdownMode
from edgellm.engine.records import RequestRecord
from edgellm.errors import InvalidArgumentError, RequestCancelled, RequestTimedOut
from edgellm.request import LLMGenerationResponse
from edgellm.session.types import FinishReason, RequestId
from edgellm.testing.scripted_session import Script, ScriptedRuntime


class ActorTime:
    """The actor's `time`; `pass_deadlines` lets every deadline pass, so that no test races one."""

    ahead = 0.0

    def perf_counter(self) -> float:
        return time.perf_counter() + self.ahead

    def pass_deadlines(self) -> None:
        self.ahead = 1e6


FAR = 1e5  # seconds: no deadline passes by itself


@pytest.fixture
def clock(monkeypatch):
    clock = ActorTime()
    monkeypatch.setattr("edgellm.engine.actor.time", clock)
    return clock


@pytest.mark.parametrize("bad", [0, -1.0, float("nan"), float("inf"), "1", True])
def test_timeouts_are_finite_numbers_above_0(start, bad):
    engine = start(ScriptedRuntime())
    with pytest.raises(InvalidArgumentError, match="timeout_seconds is"):
        engine.submit(ask(timeout_seconds=bad))
    assert engine.pending() == 0


def test_a_timeout_is_a_cancel_that_says_why(start, brake):
    engine = start(ScriptedRuntime(script=Script(next_token=brake)))
    handle = held(engine, brake, timeout_seconds=0.02)
    time.sleep(0.03)
    brake.release()
    with pytest.raises(RequestTimedOut, match=r"request 1 timed out 0\.02 s after its submit") as raised:
        handle.get(WAIT)
    assert isinstance(raised.value, RequestCancelled)
    wait_until(handle.ready, "no outcome")
    metrics = engine.metrics()
    assert (metrics.timed_out, metrics.cancelled, metrics.completed) == (1, 1, 0)
    assert handle.stream().reason() is FinishReason.CANCELLED


def test_a_timeout_says_how_far_the_request_got(start, brake):
    """Without a seat, in its prompt, and with so many tokens."""
    engine = start(ScriptedRuntime(max_batch_size=1, script=Script(next_token=brake)))
    first = held(engine, brake, timeout_seconds=0.03)  # its prompt is in the step that the brake holds
    waiting = engine.submit(ask(timeout_seconds=0.02))
    time.sleep(0.05)
    brake.release()
    with pytest.raises(RequestTimedOut, match=r"after its submit, waiting for a seat; raise timeout_seconds"):
        waiting.get(WAIT)
    with pytest.raises(RequestTimedOut, match=r"0\.03 s after its submit, (computing|generating|with)"):
        first.get(WAIT)


def test_progress_names_each_stage():
    record = RequestRecord(request_id=RequestId(1), request=ask(timeout_seconds=1.0), note_cancel=lambda: None)
    record.submitted_at = 10.0
    assert record.progress().startswith("waiting for a seat;")
    record.seated_at = 10.25
    assert record.progress().startswith("computing its prompt, after 0.25 s without a seat;")
    record.first_token_at = 10.5
    assert record.progress().startswith("generating (its first token came after 0.5 s);")
    record.partial = LLMGenerationResponse("ab", [4, 5], FinishReason.CANCELLED, prompt_tokens=3)
    assert record.progress().startswith("with 2 tokens generated (its first token came after 0.5 s);")


def test_a_request_that_ends_in_time_is_untouched(start):
    engine = start(ScriptedRuntime())
    assert len(engine.submit(ask(timeout_seconds=60.0)).get(WAIT).token_ids) == 4
    assert engine.metrics().timed_out == 0


def test_one_still_in_the_command_queue_never_reaches_the_session(start, brake):
    runtime = ScriptedRuntime(script=Script(next_token=brake))
    engine = start(runtime)
    first = held(engine, brake)
    late = engine.submit(ask(timeout_seconds=0.01))
    time.sleep(0.02)
    brake.release()
    with pytest.raises(RequestTimedOut):
        late.get(WAIT)
    first.get(WAIT)
    assert admitted(runtime) == [1]


def test_one_in_the_backlog_ends_while_others_run(start, brake, clock):
    runtime = ScriptedRuntime(script=Script(next_token=brake), max_batch_size=1)
    engine = start(runtime)
    first = held(engine, brake)
    late = engine.submit(ask(timeout_seconds=FAR))
    brake.hold_at(len("held"), 2)
    brake.release()
    wait_until(lambda: brake.trapped, "never came to the trap")
    assert engine.queued() == 1
    clock.pass_deadlines()
    brake.release()
    with pytest.raises(RequestTimedOut):
        late.get(WAIT)
    assert len(first.get(WAIT).token_ids) == 50
    assert admitted(runtime) == [1]


def test_one_between_two_chunks_of_its_prompt_runs_no_further_chunk(start, brake, clock):
    runtime = ScriptedRuntime(script=Script(next_token=brake), max_input_length=64, page_size=4)
    engine = start(runtime, EngineConfig(step_token_budget=4))
    first = held(engine, brake)
    late = engine.submit(ask("x" * 60, timeout_seconds=FAR))
    brake.hold_at(len("held"), 4)
    brake.release()
    wait_until(lambda: brake.trapped, "never came to the trap")
    clock.pass_deadlines()
    steps = len([entry for entry in runtime.log if entry[0] == "execute"])
    brake.release()
    with pytest.raises(RequestTimedOut):
        late.get(WAIT)
    first.get(WAIT)
    after = [entry[1] for entry in runtime.log if entry[0] == "execute"][steps:]
    late_rows = [d for plan in after for d in plan if d.identity.request_id == late.id]
    assert [d.query_length for d in late_rows] == [1]  # the least plan, in which the session sees the flag


def test_a_timeout_while_decoding_takes_effect_in_the_next_step(start, brake):
    runtime = ScriptedRuntime(script=Script(next_token=brake))
    engine = start(runtime)
    handle = held(engine, brake, timeout_seconds=0.05)
    time.sleep(0.06)
    steps = sum(entry[0] == "execute" for entry in runtime.log)
    brake.release()
    wait_until(handle.ready, "no outcome")
    assert sum(entry[0] == "execute" for entry in runtime.log) == steps + 1
    assert runtime.leased == set()
    with pytest.raises(RequestTimedOut):
        handle.get(0)


def test_a_cancel_that_came_first_keeps_its_name(start, brake):
    engine = start(ScriptedRuntime(script=Script(next_token=brake)))
    handle = held(engine, brake, timeout_seconds=0.02)
    handle.cancel()
    time.sleep(0.03)
    brake.release()
    wait_until(handle.ready, "no outcome")
    with pytest.raises(RequestCancelled) as raised:
        handle.get(WAIT)
    assert not isinstance(raised.value, RequestTimedOut)
    assert engine.metrics().timed_out == 0


def test_get_async_raises_it_too(start, brake):
    engine = start(ScriptedRuntime(script=Script(next_token=brake)))
    handle = held(engine, brake, timeout_seconds=0.02)
    time.sleep(0.03)
    brake.release()
    with pytest.raises(RequestTimedOut):
        asyncio.run(handle.get_async())


def test_a_paused_resident_times_out(start, brake, clock):
    """In the middle of the pause: the actor is held in the third chunk of the prompt that it waits for."""
    runtime = ScriptedRuntime(script=Script(next_token=brake), page_size=4, max_input_length=64)
    options = SchedulingOptions(scheduling_policy="priority", preemption="pause", max_prompt_step_tokens=4)
    engine = start(runtime, EngineConfig(scheduling=options))
    paused = held(engine, brake, priority=1, timeout_seconds=FAR)
    urgent = engine.submit(ask("u" * 60, max_tokens=1, priority=0))
    session, reached, go = runtime.sessions[-1], threading.Event(), threading.Event()
    execute = session.execute

    def held_in_the_third_chunk(plan):
        if [(row.identity.request_id, row.past_length) for row in plan] == [(urgent.id, 8)]:
            reached.set()
            assert go.wait(WAIT)
        return execute(plan)

    session.execute = held_in_the_third_chunk
    brake.release()
    assert reached.wait(WAIT)
    assert engine.metrics().paused_resident_steps >= 2
    clock.pass_deadlines()
    go.set()
    with pytest.raises(RequestTimedOut):
        paused.get(WAIT)
    assert len(urgent.get(WAIT).token_ids) == 1


def test_drain_still_ends_what_ran_out_of_time(brake):
    engine = RequestEngine(ScriptedRuntime(script=Script(next_token=brake), max_batch_size=1))
    first = held(engine, brake)
    late = engine.submit(ask(timeout_seconds=0.01))
    time.sleep(0.02)
    brake.release()
    engine.shutdown(ShutdownMode.DRAIN)
    assert len(first.get(0).token_ids) == 50
    with pytest.raises(RequestTimedOut):
        late.get(0)


def test_the_heap_expires_in_order_and_forgets_what_has_ended():
    deadlines, expired = Deadlines(), []

    def record(number, deadline, ended=False):
        return SimpleNamespace(
            id=number, deadline=deadline, outcome_published=ended, expire=lambda: expired.append(number)
        )

    for number, deadline in ((1, 3.0), (2, 1.0), (3, None), (4, 2.0), (5, 9.0)):
        deadlines.add(record(number, deadline))
    assert len(deadlines) == 4
    assert deadlines.expire(0.5) == 0
    assert deadlines.expire(2.0) == 2
    assert expired == [2, 4]
    for number in range(10, 2000):
        deadlines.add(record(number, 100.0, ended=True))
    assert len(deadlines) <= 64
    assert deadlines.expire(3.0) == 1
    gc.collect()
    assert expired == [2, 4, 1]
