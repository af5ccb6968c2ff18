"""`RequestEngine` over the scripted session: admission, cancellation, recovery, shutdown, waking."""

import asyncio
import copy
import gc
import threading
import time

import pytest
from engine_rig import WAIT, admitted, ask, first_residency, held, wait_until

from edgellm.cache.types import ContextCacheCommitPolicy
from edgellm.engine.config import EngineConfig, SchedulingOptions
from edgellm.engine.engine import RequestEngine, ShutdownMode
from edgellm.engine.metrics import StallReason
from edgellm.errors import (
    ContractViolation,
    InvalidArgumentError,
    RequestCancelled,
    RequestFailed,
    StepDeviceError,
    SubmitError,
    UnsupportedRequestError,
)
from edgellm.request import LLMGenerationRequest
from edgellm.session.types import AdmissionStatus, FinishReason, SequenceWork, SessionOptions
from edgellm.streaming import StreamChannel
from edgellm.testing.scripted_session import Script, ScriptedRuntime

# ---- submit, get, stream ------------------------------------------------------------------------------


def test_a_request_completes_with_text_stream_and_timings(start):
    engine = start(ScriptedRuntime())
    handle = engine.submit(ask("abc", max_tokens=5))
    response = handle.get(WAIT)
    assert len(response.token_ids) == 5
    assert response.finish_reason is FinishReason.LENGTH
    chunks = list(handle.stream())
    assert "".join(chunk.text for chunk in chunks) == response.text
    assert [t for chunk in chunks for t in chunk.token_ids] == response.token_ids
    assert 0 < response.queue_ms <= response.time_to_first_token_ms <= response.total_ms < WAIT * 1e3
    assert handle.ready()
    assert handle.id == 1


def test_the_callers_request_object_is_not_modified_and_may_be_submitted_again(start):
    engine = start(ScriptedRuntime())
    request = ask()
    first, second = engine.submit(request), engine.submit(request)
    assert request.stream_channel is None
    assert first.get(WAIT).token_ids == second.get(WAIT).token_ids


def test_a_channel_of_the_caller_is_adopted_and_serves_once(start):
    engine = start(ScriptedRuntime())
    channel = StreamChannel.create()
    handle = engine.submit(ask(stream_channel=channel))
    assert handle.stream() is channel
    handle.get(WAIT)
    with pytest.raises(InvalidArgumentError, match="its own channel"):
        engine.submit(ask(stream_channel=channel))
    assert engine.pending() == 0


def test_handles_refuse_to_be_copied(start):
    handle = start(ScriptedRuntime()).submit(ask())
    for copier in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="one owner"):
            copier(handle)


@pytest.mark.parametrize(
    "kind",
    [
        {"num_sequences": 2},
        {"adapter_name": "a"},
        {"speech_output": True},
        {"save_system_prompt_kv_cache": True},
        {"trajectory": True},
    ],
)
def test_permanent_refusals_are_no_submit_error_and_take_no_reservation(start, kind):
    engine = start(ScriptedRuntime(), EngineConfig(max_pending_requests=1))
    with pytest.raises(UnsupportedRequestError, match=next(iter(kind))) as refusal:
        engine.submit(ask(**kind))
    assert not isinstance(refusal.value, SubmitError)
    assert engine.pending() == 0
    assert engine.metrics().refused == 0


def test_handle_request_returns_none_on_failure_and_the_response_otherwise(start):
    engine = start(ScriptedRuntime())
    assert len(engine.handle_request(ask(max_tokens=3)).token_ids) == 3
    assert engine.handle_request(ask(prompt="")) is None
    assert engine.handle_request(ask(num_sequences=2)) is None


def test_get_async_and_async_stream(start):
    engine = start(ScriptedRuntime())

    async def both():
        handle = engine.submit(ask(max_tokens=6))
        ids = [token async for chunk in handle.stream() for token in chunk.token_ids]
        return ids, await handle.get_async()

    ids, response = asyncio.run(both())
    assert ids == response.token_ids


def test_cancelling_the_awaiting_task_cancels_the_request(start, brake):
    engine = start(ScriptedRuntime(script=Script(next_token=brake)))
    handle = held(engine, brake)

    async def give_up():
        await asyncio.wait_for(handle.get_async(), 0.01)

    with pytest.raises((asyncio.TimeoutError, TimeoutError)):
        asyncio.run(give_up())
    brake.release()
    with pytest.raises(RequestCancelled):
        handle.get(WAIT)
    wait_until(lambda: engine.metrics().cancelled == 1, "the request was never cancelled")


# ---- queue and reservations ---------------------------------------------------------------------------


def test_behaviour_2_a_full_command_queue_raises_and_leaves_the_pending_count(start, brake):
    engine = start(ScriptedRuntime(script=Script(next_token=brake)), EngineConfig(command_queue_capacity=2))
    held(engine, brake)
    others = [engine.submit(ask()) for _ in range(2)]
    with pytest.raises(SubmitError, match="command queue"):
        engine.submit(ask())
    assert engine.pending() == 3
    brake.release()
    assert [len(handle.get(WAIT).token_ids) for handle in others] == [4, 4]
    assert engine.metrics().refused == 1


def test_behaviour_3_the_fourth_submit_raises_while_the_queue_has_room(start, brake):
    engine = start(ScriptedRuntime(script=Script(next_token=brake)), EngineConfig(max_pending_requests=3))
    held(engine, brake)
    for _ in range(2):
        engine.submit(ask())
    with pytest.raises(SubmitError, match="max_pending_requests is 3"):
        engine.submit(ask())


def test_behaviour_4_an_error_between_reservation_and_post_gives_the_reservation_back(start, monkeypatch):
    engine = start(ScriptedRuntime(), EngineConfig(max_pending_requests=1))

    def out_of_memory(**kwargs):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("edgellm.engine.engine.RequestRecord", out_of_memory)
        with pytest.raises(MemoryError):
            engine.submit(ask())
    assert engine.pending() == 0
    assert engine.handle_request(ask()) is not None


def test_behaviour_5_a_submit_that_races_shutdown_raises_or_reaches_an_outcome():
    accepted = refused = 0
    for round_number in range(350):
        mode = ShutdownMode.DRAIN if round_number % 2 else ShutdownMode.CANCEL
        engine = RequestEngine(ScriptedRuntime())
        handles, refusals, go = [], [], threading.Event()

        def submit(engine=engine, handles=handles, refusals=refusals, go=go):
            go.wait()
            for _ in range(10):
                try:
                    handles.append(engine.submit(ask(max_tokens=1)))
                except SubmitError:
                    refusals.append(1)

        threads = [threading.Thread(target=submit) for _ in range(3)]
        for thread in threads:
            thread.start()
        go.set()
        while len(handles) + len(refusals) < round_number % 29:
            time.sleep(0)
        engine.shutdown(mode)
        for thread in threads:
            thread.join(WAIT)
        for handle in handles:
            assert handle.ready()
            assert handle.stream().is_finished()
        assert engine.pending() == 0
        accepted += len(handles)
        refused += len(refusals)
    assert accepted + refused == 350 * 30
    assert accepted > 0
    assert refused > 0


def test_behaviour_6_cancel_by_id_before_the_actor_drains_keeps_it_from_the_session(start, brake):
    runtime = ScriptedRuntime(script=Script(next_token=brake))
    engine = start(runtime)
    held(engine, brake)
    handle = engine.submit(ask())
    engine.cancel(handle.id)
    brake.release()
    with pytest.raises(RequestCancelled):
        handle.get(WAIT)
    wait_until(handle.ready, "no outcome")
    assert handle.stream().reason() is FinishReason.CANCELLED
    assert admitted(runtime) == [1]


def test_behaviour_9_get_after_cancel_returns_while_the_actor_sits_in_a_step(start, brake):
    engine = start(ScriptedRuntime(script=Script(next_token=brake)))
    handle = held(engine, brake)
    handle.cancel()
    started = time.monotonic()
    with pytest.raises(RequestCancelled):
        handle.get()
    assert time.monotonic() - started < 5
    assert not handle.ready()
    brake.release()
    wait_until(handle.ready, "the step's end did not publish the outcome")


# ---- admission ----------------------------------------------------------------------------------------


def test_behaviour_13_seats_are_granted_in_arrival_order(start, brake):
    runtime = ScriptedRuntime(script=Script(next_token=brake), max_batch_size=2)
    engine = start(runtime)
    held(engine, brake).cancel()
    handles = [engine.submit(ask(f"p{i}", max_tokens=2 + i % 3)) for i in range(8)]
    brake.release()
    for handle in handles:
        handle.get(WAIT)
    assert first_residency(runtime) == list(range(1, 10))


def test_priority_policy_seats_the_most_urgent_first(start, brake):
    runtime = ScriptedRuntime(script=Script(next_token=brake), max_batch_size=1)
    engine = start(runtime, EngineConfig(scheduling=SchedulingOptions(scheduling_policy="priority")))
    held(engine, brake).cancel()
    handles = [engine.submit(ask(priority=priority)) for priority in (3, 0, -1, 0)]
    brake.release()
    for handle in handles:
        handle.get(WAIT)
    assert first_residency(runtime) == [1, 4, 3, 5, 2]


def test_behaviour_14_an_incompatible_head_waits_and_nobody_overtakes_it(start, brake):
    runtime = ScriptedRuntime(script=Script(next_token=brake))
    engine = start(runtime, EngineConfig(scheduling=SchedulingOptions(max_overtakes=0)))
    first = held(engine, brake)
    other = engine.submit(ask(commit_policy=ContextCacheCommitPolicy.PREFILL_STATE_ONLY))
    behind = engine.submit(ask())
    brake.release()
    assert [len(h.get(WAIT).token_ids) for h in (first, other, behind)] == [50, 4, 4]
    assert admitted(runtime) == [1, 2, 3]
    assert engine.metrics().stalls[StallReason.INCOMPATIBLE] > 0
    # The one behind is the resident's match, yet it runs only after the head in front of it.
    assert first_residency(runtime) == [1, 2, 3]


def test_uniform_sampling_is_compared_only_when_the_session_needs_it(start, brake):
    for uniform, stalls in ((False, 0), (True, 1)):
        runtime = ScriptedRuntime(script=Script(next_token=brake), uniform_sampling=uniform)
        engine = start(runtime)
        first = held(engine, brake, temperature=0.5)
        second = engine.submit(ask(temperature=0.9))
        brake.release()
        first.get(WAIT)
        second.get(WAIT)
        assert min(1, engine.metrics().stalls[StallReason.INCOMPATIBLE]) == stalls


def test_behaviour_16_no_capacity_keeps_the_heads_place_until_a_resident_finishes(start, brake):
    script = Script(next_token=brake)
    runtime = ScriptedRuntime(script=script)
    engine = start(runtime, EngineConfig(scheduling=SchedulingOptions(max_overtakes=0)))
    first = held(engine, brake)
    script.admissions.extend([AdmissionStatus.NO_CAPACITY] * 3)
    second, third = engine.submit(ask()), engine.submit(ask())
    brake.release()
    for handle in (first, second, third):
        handle.get(WAIT)
    assert admitted(runtime) == [1, 2, 2, 2, 2, 3]
    assert engine.metrics().stalls[StallReason.NO_CAPACITY] == 3


def test_behaviour_17_no_capacity_on_an_idle_session_ends_the_head(start):
    script = Script()
    script.admissions.append(AdmissionStatus.NO_CAPACITY)
    engine = start(ScriptedRuntime(script=script))
    with pytest.raises(RequestFailed, match="does not fit an empty session"):
        engine.submit(ask()).get(WAIT)
    assert engine.handle_request(ask()) is not None


def test_rejected_and_malformed_requests_fail_alone(start):
    script = Script()
    script.admissions.append(AdmissionStatus.REJECTED)
    engine = start(ScriptedRuntime(script=script))
    with pytest.raises(RequestFailed, match="scripted rejected"):
        engine.submit(ask()).get(WAIT)
    with pytest.raises(RequestFailed, match="exactly one of"):
        engine.submit(LLMGenerationRequest()).get(WAIT)
    with pytest.raises(RequestFailed, match="EDGELLM_INPUT_TOO_LONG"):
        engine.submit(ask("x" * 300)).get(WAIT)
    assert engine.handle_request(ask()) is not None


def test_behaviour_18_an_exclusive_head_waits_for_idle_runs_alone_and_the_next_waits_for_it(start, brake):
    runtime = ScriptedRuntime(script=Script(next_token=brake))
    engine = start(runtime, EngineConfig(scheduling=SchedulingOptions(max_overtakes=0)))
    first = held(engine, brake)
    tokens = []
    alone = engine.submit(ask(max_tokens=3, token_callback=tokens.extend))
    behind = engine.submit(ask())
    brake.release()
    response = alone.get(WAIT)
    first.get(WAIT)
    behind.get(WAIT)
    assert tokens == response.token_ids
    for entry in runtime.log:
        if entry[0] == "execute" and any(d.identity.request_id == alone.id for d in entry[1]):
            assert len(entry[1]) == 1
    stalls = engine.metrics().stalls
    assert stalls[StallReason.FOUNDER_ONLY] > 0
    assert stalls[StallReason.EXCLUSIVE] > 0


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_behaviour_19_reserved_slots_are_taken_by_urgent_requests_only(start, brake, policy):
    runtime = ScriptedRuntime(script=Script(next_token=brake), max_batch_size=4)
    options = SchedulingOptions(scheduling_policy=policy, priority_reserved_slots=2)
    engine = start(runtime, EngineConfig(scheduling=options))
    held(engine, brake)
    ordinary = [engine.submit(ask(max_tokens=30)) for _ in range(2)]
    urgent = engine.submit(ask(max_tokens=30, priority=-1))
    brake.release()
    urgent.get(WAIT)
    # Under fcfs the urgent one passes those whom the reservation stops, and nobody else.
    seated = [1, ordinary[0].id, urgent.id] if policy == "fcfs" else [1, urgent.id]
    assert admitted(runtime)[: len(seated)] == seated
    assert engine.metrics().stalls[StallReason.RESERVED] > 0
    ordinary[1].get(WAIT)


def test_behaviour_20_a_head_cancelled_between_drain_and_admission_is_never_admitted(start, brake, monkeypatch):
    runtime = ScriptedRuntime(script=Script(next_token=brake))
    engine = start(runtime)
    first = held(engine, brake)
    waiting = engine.submit(ask())
    actor = engine._actor
    drain = actor._drain

    def drain_then_cancel():
        drain()
        if engine.queued():
            waiting.cancel()

    monkeypatch.setattr(actor, "_drain", drain_then_cancel)
    brake.release()
    wait_until(waiting.ready, "no outcome")
    first.get(WAIT)
    assert admitted(runtime) == [1]
    assert engine.metrics().cancelled == 1


def test_chunked_prefill_shares_steps_with_decode(start, brake):
    runtime = ScriptedRuntime(script=Script(next_token=brake), max_input_length=64, page_size=4)
    engine = start(runtime, EngineConfig(step_token_budget=8))
    first = held(engine, brake)
    second = engine.submit(ask("x" * 30, max_tokens=2))
    brake.release()
    second.get(WAIT)
    first.get(WAIT)
    chunks = [
        (d.past_length, d.query_length, d.select_last_token_logits, len(entry[1]))
        for entry in runtime.log
        if entry[0] == "execute"
        for d in entry[1]
        if d.identity.request_id == second.id and d.work is SequenceWork.CONTEXT
    ]
    assert chunks == [(0, 8, False, 2), (8, 8, False, 2), (16, 8, False, 2), (24, 6, True, 2)]
    metrics = engine.metrics()
    assert metrics.prefill_tokens == 4 + 30
    assert metrics.chunks == 5
    assert metrics.steps_compact >= 4


def test_single_cohort_sessions_are_served_prefill_first(start, brake):
    runtime = ScriptedRuntime(script=Script(next_token=brake), compact=False)
    engine = start(runtime)
    first = held(engine, brake)
    others = [engine.submit(ask(f"p{i}")) for i in range(5)]
    brake.release()
    for handle in [first, *others]:
        handle.get(WAIT)
    for entry in runtime.log:
        if entry[0] == "execute" and any(d.work is SequenceWork.CONTEXT for d in entry[1]):
            assert len(entry[1]) == 1


def test_a_reused_prefix_starts_the_mirror_behind_it(start):
    runtime = ScriptedRuntime(script=Script(cached_prefix=lambda prompt: 12))
    engine = start(runtime)
    engine.submit(ask("x" * 30, max_tokens=2)).get(WAIT)
    plans = [entry[1][0] for entry in runtime.log if entry[0] == "execute"]
    assert [(d.past_length, d.query_length) for d in plans] == [(12, 18), (30, 1)]


def test_speculative_rows_advance_the_mirror_by_what_ran(start):
    runtime = ScriptedRuntime(script=Script(commits_per_decode={1: 3}))
    engine = start(runtime)
    assert len(engine.submit(ask("abcd", max_tokens=8)).get(WAIT).token_ids) == 8
    plans = [entry[1][0] for entry in runtime.log if entry[0] == "execute"]
    assert [d.past_length for d in plans] == [0, 4, 7, 10]


# ---- cancellation while seated ------------------------------------------------------------------------


def test_cancel_while_decoding_evicts_in_the_next_step_and_leaves_others_alone(start, brake):
    runtime = ScriptedRuntime(script=Script(next_token=brake))
    engine = start(runtime)
    first = held(engine, brake)
    other = engine.submit(ask("other", max_tokens=20))
    first.cancel()
    brake.release()
    response = other.get(WAIT)
    assert len(response.token_ids) == 20
    assert engine.metrics().cancelled == 1
    assert len(list(first.stream())) < 50


def test_cancel_through_the_stream_counts_like_any_other(start, brake):
    engine = start(ScriptedRuntime(script=Script(next_token=brake)))
    handle = held(engine, brake)
    handle.stream().cancel()
    brake.release()
    with pytest.raises(RequestCancelled):
        handle.get(WAIT)
    wait_until(lambda: engine.metrics().cancelled == 1, "not cancelled")


def test_cancel_wins_over_a_natural_finish_in_the_same_step(start, brake):
    engine = start(ScriptedRuntime(script=Script(next_token=brake)))
    brake.hold()
    handle = engine.submit(ask(max_tokens=1))
    assert brake.entered.wait(WAIT)
    handle.cancel()
    brake.release()
    wait_until(handle.ready, "no outcome")
    with pytest.raises(RequestCancelled):
        handle.get(WAIT)
    assert engine.metrics().completed == 0


def test_behaviour_31_a_cancelled_paused_resident_leaves_in_the_next_step(start, brake):
    runtime = ScriptedRuntime(script=Script(next_token=brake), page_size=4)
    options = SchedulingOptions(scheduling_policy="priority", preemption="pause", max_prompt_step_tokens=4)
    engine = start(runtime, EngineConfig(scheduling=options))
    paused = held(engine, brake, priority=1)
    urgent = engine.submit(ask("u" * 40, max_tokens=1, priority=0))
    execute, steps = runtime.sessions[-1].execute, []

    def count_steps(plan):
        steps.append([(d.identity.request_id, d.query_length) for d in plan])
        if len(steps) == 3:
            paused.cancel()
        return execute(plan)

    runtime.sessions[-1].execute = count_steps
    brake.release()
    urgent.get(WAIT)
    assert steps[:5] == [[(2, 4)], [(2, 4)], [(2, 4)], [(1, 1), (2, 4)], [(2, 4)]]
    assert engine.metrics().paused_resident_steps == 3


# ---- recovery -----------------------------------------------------------------------------------------


def test_behaviours_35_and_36_prompts_survive_a_refused_compact_step_and_decoders_fail(start, brake):
    script = Script(next_token=brake)
    runtime = ScriptedRuntime(script=script, max_batch_size=4, max_input_length=64, page_size=4)
    engine = start(runtime, EngineConfig(step_token_budget=8, max_replays=0))
    first = held(engine, brake)
    second = engine.submit(ask("second", max_tokens=40))
    brake.hold_at(len("second"), 3)
    brake.release()
    wait_until(lambda: brake.trapped, "never came to the trap")
    long = [engine.submit(ask("y" * 40, max_tokens=3)), engine.submit(ask("z" * 40, max_tokens=3))]
    late = engine.submit(ask("late", max_tokens=3))
    script.steps.extend([None, None])
    script.refuse_compact("ragged attention refused")
    brake.release()
    for decoder in (first, second):
        with pytest.raises(RequestFailed, match="ragged attention refused"):
            decoder.get(WAIT)
    responses = [handle.get(WAIT) for handle in (*long, late)]
    assert [len(response.token_ids) for response in responses] == [3, 3, 3]
    for handle, response in zip((*long, late), responses, strict=True):
        chunks = list(handle.stream())
        assert [t for chunk in chunks for t in chunk.token_ids] == response.token_ids
        assert [chunk.finished for chunk in chunks].count(True) == 1
    metrics = engine.metrics()
    assert metrics.session_reopens == 1
    assert metrics.readmitted == 2
    closed = [entry[0] for entry in runtime.log].index("close")
    assert [entry[1] for entry in runtime.log[closed:] if entry[0] == "admit"] == [3, 4, 5]
    assert not runtime.sessions[-1].capabilities().compact


@pytest.mark.parametrize("fault", [StepDeviceError("ecc"), RuntimeError("kernel fault")])
def test_behaviour_38_a_failed_step_fails_its_residents_once_and_the_backlog_continues(start, brake, fault):
    script = Script(next_token=brake)
    runtime = ScriptedRuntime(script=script, max_batch_size=2)
    engine = start(runtime, EngineConfig(max_replays=0))
    first = held(engine, brake)
    second = engine.submit(ask(max_tokens=30))
    third = engine.submit(ask())
    script.steps.extend([None, None, fault])
    brake.release()
    for handle in (first, second):
        with pytest.raises(RequestFailed, match=str(fault)):
            handle.get(WAIT)
        assert handle.stream().reason() is FinishReason.ERROR
    assert len(third.get(WAIT).token_ids) == 4
    metrics = engine.metrics()
    assert (metrics.failed, metrics.completed, metrics.session_reopens) == (2, 1, 1)


def test_behaviour_37_a_session_lost_in_admission_fails_residents_and_that_request_only(start, brake):
    script = Script(next_token=brake)
    runtime = ScriptedRuntime(script=script)
    engine = start(runtime, EngineConfig(max_replays=0))
    first = held(engine, brake)
    script.admissions.append(RuntimeError("lease died"))
    second, third = engine.submit(ask()), engine.submit(ask())
    brake.release()
    for handle in (first, second):
        with pytest.raises(RequestFailed, match="lease died"):
            handle.get(WAIT)
    assert len(third.get(WAIT).token_ids) == 4
    assert engine.metrics().session_reopens == 1


def test_an_isolated_row_error_fails_one_request_with_its_message(start):
    runtime = ScriptedRuntime(script=Script(row_errors={1: (2, "grammar dead end")}))
    engine = start(runtime)
    first, second = engine.submit(ask()), engine.submit(ask())
    with pytest.raises(RequestFailed, match="grammar dead end"):
        first.get(WAIT)
    assert len(second.get(WAIT).token_ids) == 4
    assert engine.metrics().session_reopens == 0


def test_an_exception_in_commit_fails_everybody_and_the_engine_goes_on(start, brake, monkeypatch):
    runtime = ScriptedRuntime(script=Script(next_token=brake))
    engine = start(runtime)
    first = held(engine, brake)
    second = engine.submit(ask(max_tokens=1))
    broken = runtime.sessions[-1]

    def refuse(result, stop_strings):
        raise ValueError("cannot decode")

    monkeypatch.setattr(broken, "materialize", refuse)
    brake.release()
    for handle in (first, second):
        with pytest.raises(RequestFailed, match="cannot decode"):
            handle.get(WAIT)
    assert engine.handle_request(ask()) is not None


def test_behaviour_39_an_unhealthy_device_refuses_submits_and_fails_the_backlog(start, brake):
    script = Script(next_token=brake)
    runtime = ScriptedRuntime(script=script, max_batch_size=1)
    engine = start(runtime, device_healthy=lambda: False)
    first = held(engine, brake)
    waiting = engine.submit(ask())
    script.steps.append(StepDeviceError("gone"))
    brake.release()
    with pytest.raises(RequestFailed, match="gone"):
        first.get(WAIT)
    with pytest.raises(RequestFailed, match="unhealthy"):
        waiting.get(WAIT)
    assert "unhealthy" in engine.closed_because()
    with pytest.raises(SubmitError, match="unhealthy"):
        engine.submit(ask())
    assert engine.running()


def test_a_contract_violation_of_the_planner_does_not_hang_callers(start, brake, monkeypatch):
    runtime = ScriptedRuntime(script=Script(next_token=brake))
    engine = start(runtime)
    first = held(engine, brake)
    planner = engine._actor._planner
    monkeypatch.setattr(planner, "plan", lambda residents: [])
    brake.release()
    with pytest.raises(RequestFailed, match="the plan is empty"):
        first.get(WAIT)
    assert engine.handle_request(ask()) is not None


# ---- start, shutdown, idling --------------------------------------------------------------------------


def test_configuration_errors_are_raised_by_the_constructor():
    with pytest.raises(InvalidArgumentError, match="max_batch_size is 9"):
        RequestEngine(ScriptedRuntime(max_batch_size=4), EngineConfig(max_batch_size=9))
    with pytest.raises(InvalidArgumentError, match="mixed"):
        RequestEngine(
            ScriptedRuntime(compact=False),
            EngineConfig(scheduling=SchedulingOptions(ifb_scheduling_mode="mixed")),
        )
    with pytest.raises(ContractViolation, match="session is open"):
        RequestEngine(_opened())
    with pytest.raises(InvalidArgumentError, match="session factory"):
        RequestEngine(object())


def _opened() -> ScriptedRuntime:
    runtime = ScriptedRuntime()
    runtime.open_session(SessionOptions())
    return runtime


def test_a_session_factory_may_stand_in_place_of_the_runtime(start):
    runtime = ScriptedRuntime()
    engine = start(lambda: runtime.open_session(SessionOptions(allow_compact_execution=True)))
    assert engine.handle_request(ask()) is not None


def test_behaviour_40_drain_serves_everything_accepted_and_the_second_mode_is_ignored(brake):
    engine = RequestEngine(ScriptedRuntime(script=Script(next_token=brake), max_batch_size=2))
    first = held(engine, brake)
    others = [engine.submit(ask()) for _ in range(6)]
    stopper = threading.Thread(target=engine.shutdown, args=(ShutdownMode.DRAIN,))
    stopper.start()
    wait_until(lambda: engine.closed_because() != "", "shutdown never began")
    with pytest.raises(SubmitError, match="shutting down"):
        engine.submit(ask())
    brake.release()
    engine.shutdown(ShutdownMode.CANCEL)
    stopper.join(WAIT)
    assert [len(h.get(0).token_ids) for h in (first, *others)] == [50] + [4] * 6
    assert not engine.running()


def test_behaviour_40_cancel_ends_after_the_current_step_and_leaves_no_stream_open(brake):
    runtime = ScriptedRuntime(script=Script(next_token=brake), max_batch_size=2)
    engine = RequestEngine(runtime)
    handles = [held(engine, brake)] + [engine.submit(ask()) for _ in range(5)]
    stopper = threading.Thread(target=engine.shutdown, args=(ShutdownMode.CANCEL,))
    stopper.start()
    wait_until(lambda: engine.closed_because() != "", "shutdown never began")
    steps = sum(entry[0] == "execute" for entry in runtime.log)
    brake.release()
    stopper.join(WAIT)
    assert sum(entry[0] == "execute" for entry in runtime.log) == steps
    for handle in handles:
        with pytest.raises(RequestCancelled):
            handle.get(0)
        assert handle.stream().reason() is FinishReason.CANCELLED
    assert runtime.leased == set()
    assert engine.pending() == 0


def test_shutdown_on_the_engines_own_thread_is_refused(start, brake):
    engine = start(ScriptedRuntime(script=Script(next_token=brake)))
    handle = held(engine, brake)
    errors = []

    def stop():
        try:
            engine.shutdown()
        except ContractViolation as error:
            errors.append(str(error))

    handle.add_done_callback(stop)
    brake.release()
    handle.get(WAIT)
    wait_until(lambda: errors, "the callback never ran")
    assert "own thread" in errors[0]
    assert engine.handle_request(ask()) is not None


def test_handles_outlive_the_engine(brake):
    engine = RequestEngine(ScriptedRuntime())
    handle = engine.submit(ask())
    engine.shutdown()
    del engine
    assert len(handle.get(0).token_ids) == 4
    handle.cancel()


def test_behaviour_41_a_collected_engine_with_work_in_flight_warns_and_cancels(brake):
    engine = RequestEngine(ScriptedRuntime(script=Script(next_token=brake)))
    handle = held(engine, brake)
    thread = engine._thread
    engines = [engine]
    del engine
    with pytest.warns(ResourceWarning, match="1 requests in flight"):
        engines.clear()
    brake.release()
    thread.join(WAIT)
    assert not thread.is_alive()
    with pytest.raises(RequestCancelled):
        handle.get(0)


def test_a_collected_idle_engine_stops_without_a_warning():
    engine = RequestEngine(ScriptedRuntime())
    thread = engine._thread
    del engine
    gc.collect()
    thread.join(WAIT)
    assert not thread.is_alive()


def test_behaviour_42_a_parked_actor_wakes_at_most_once_per_idle_wait(start):
    engine = start(ScriptedRuntime(), EngineConfig(idle_wait=0.05))
    started, before = time.monotonic(), engine.metrics().actor_wakeups
    time.sleep(0.5)
    wakeups = engine.metrics().actor_wakeups - before
    elapsed = time.monotonic() - started  # of at least the time in which they were counted
    assert wakeups <= elapsed / 0.05 + 1


def test_behaviour_42_a_submit_wakes_the_parked_actor_without_waiting_for_the_backstop(start):
    engine = start(ScriptedRuntime(), EngineConfig(idle_wait=60.0))
    engine.handle_request(ask())
    waits = [engine.submit(ask(max_tokens=1)).get(WAIT).queue_ms for _ in range(20)]
    # Well below a millisecond on a quiet machine; the bound leaves room for a busy one, and none for the backstop.
    assert max(waits) < 5000


def test_metrics_are_a_copy(start):
    engine = start(ScriptedRuntime())
    engine.metrics().stalls[StallReason.RESERVED] = 99
    engine.metrics().submitted = 99
    assert engine.metrics().stalls[StallReason.RESERVED] == 0
    assert engine.metrics().submitted == 0
