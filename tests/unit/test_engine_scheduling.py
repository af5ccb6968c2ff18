"""Who gets a seat when the first cannot: skip-ahead and its bound, aging, neighbours; and the step-time budget."""

import logging
import threading
import time

import pytest
from engine_rig import WAIT, admitted, ask, first_residency, held, wait_until

from edgellm.cache.types import ContextCacheCommitPolicy
from edgellm.engine.config import EngineConfig, SchedulingOptions
from edgellm.engine.metrics import NUM_BUCKETS, LatencyStat, StallReason, bucket_of, bucket_start
from edgellm.errors import InvalidArgumentError
from edgellm.request import LLMGenerationRequest
from edgellm.sampling.params import SamplingParams
from edgellm.session.types import AdmissionStatus, SequenceWork
from edgellm.testing.scripted_session import Script, ScriptedRuntime

PROMPT_ONLY = ContextCacheCommitPolicy.PREFILL_STATE_ONLY


def scheduling(**options) -> EngineConfig:
    return EngineConfig(scheduling=SchedulingOptions(**options))


# ---- skip-ahead ---------------------------------------------------------------------------------------


def test_behaviour_14_with_skip_ahead_compatible_requests_pass_an_incompatible_head(start, brake):
    runtime = ScriptedRuntime(script=Script(next_token=brake))
    engine = start(runtime)
    first = held(engine, brake)
    other = engine.submit(ask(commit_policy=PROMPT_ONLY))
    behind = [engine.submit(ask()) for _ in range(2)]
    brake.release()
    for handle in (first, other, *behind):
        handle.get(WAIT)
    assert first_residency(runtime) == [1, 3, 4, 2]
    metrics = engine.metrics()
    assert metrics.overtakes == 2
    assert metrics.stalls[StallReason.INCOMPATIBLE] > 0
    assert metrics.stalls[StallReason.OVERTAKEN] == 0


@pytest.mark.parametrize("bound", [1, 3])
def test_behaviour_14_nobody_passes_a_head_that_was_overtaken_up_to_the_bound(start, brake, bound):
    runtime = ScriptedRuntime(script=Script(next_token=brake))
    engine = start(runtime, scheduling(max_overtakes=bound))
    held(engine, brake)
    head = engine.submit(ask(commit_policy=PROMPT_ONLY))
    behind = [engine.submit(ask(max_tokens=2)) for _ in range(6)]
    brake.release()
    for handle in (head, *behind):
        handle.get(WAIT)
    passed = list(range(3, 3 + bound))
    assert first_residency(runtime)[: bound + 2] == [1, *passed, 2]
    metrics = engine.metrics()
    assert metrics.overtakes == bound
    assert metrics.stalls[StallReason.OVERTAKEN] > 0


def test_behaviour_16_a_request_that_fits_passes_one_that_found_no_room(start, brake):
    script = Script(next_token=brake)
    runtime = ScriptedRuntime(script=script)
    engine = start(runtime, scheduling(max_overtakes=1))
    first = held(engine, brake)
    script.admissions.extend([AdmissionStatus.NO_CAPACITY, None, AdmissionStatus.NO_CAPACITY])
    second, third, fourth = engine.submit(ask()), engine.submit(ask()), engine.submit(ask())
    brake.release()
    for handle in (first, second, third, fourth):
        handle.get(WAIT)
    # The head is tried at every boundary; 3 passes it, and then nobody does.
    assert admitted(runtime) == [1, 2, 3, 2, 2, 4]
    assert engine.metrics().stalls[StallReason.NO_CAPACITY] == 2
    assert engine.metrics().overtakes == 1


def test_one_that_found_no_room_behind_the_head_is_tried_again_only_when_something_changed(start, brake):
    script = Script(next_token=brake)
    runtime = ScriptedRuntime(script=script)
    engine = start(runtime)
    first = held(engine, brake)
    other = engine.submit(ask(commit_policy=PROMPT_ONLY))
    script.admissions.append(AdmissionStatus.NO_CAPACITY)
    third = engine.submit(ask())
    brake.release()
    for handle in (first, other, third):
        handle.get(WAIT)
    assert admitted(runtime).count(3) == 2


def test_behaviour_18_an_exclusive_head_is_passed_up_to_the_bound_and_then_runs_alone(start, brake):
    runtime = ScriptedRuntime(script=Script(next_token=brake))
    engine = start(runtime, scheduling(max_overtakes=2))
    first = held(engine, brake)
    alone = engine.submit(ask(max_tokens=3, token_callback=lambda ids: None))
    behind = [engine.submit(ask()) for _ in range(4)]
    brake.release()
    for handle in (first, alone, *behind):
        handle.get(WAIT)
    assert first_residency(runtime)[:4] == [1, 3, 4, 2]
    for entry in runtime.log:
        if entry[0] == "execute" and any(d.identity.request_id == alone.id for d in entry[1]):
            assert len(entry[1]) == 1


def test_behaviour_19_an_urgent_request_in_a_reserved_seat_overtakes_nobody(start, brake):
    runtime = ScriptedRuntime(script=Script(next_token=brake), max_batch_size=2)
    engine = start(runtime, scheduling(scheduling_policy="fcfs", priority_reserved_slots=1))
    first = held(engine, brake)
    waiting = engine.submit(ask())
    urgent = engine.submit(ask(priority=-1))
    brake.release()
    for handle in (first, waiting, urgent):
        handle.get(WAIT)
    assert first_residency(runtime) == [1, 3, 2]
    assert engine.metrics().overtakes == 0
    assert engine.metrics().stalls[StallReason.RESERVED] > 0


# ---- aging --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("aging", "order"), [(None, [1, 3, 2]), (1e-4, [1, 2, 3])])
def test_aging_lets_an_old_request_come_before_a_more_urgent_young_one(start, brake, aging, order):
    runtime = ScriptedRuntime(script=Script(next_token=brake), max_batch_size=1)
    engine = start(runtime, scheduling(scheduling_policy="priority", priority_aging_seconds=aging))
    held(engine, brake).cancel()
    old = engine.submit(ask(priority=5))
    time.sleep(0.01)
    young = engine.submit(ask(priority=0))
    brake.release()
    old.get(WAIT)
    young.get(WAIT)
    assert first_residency(runtime) == order


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"priority_aging_seconds": 1.0}, "priority_aging_seconds is 1.0 with scheduling_policy fcfs"),
        ({"step_time_budget_ms": 0}, "step_time_budget_ms is 0"),
        ({"step_time_budget_ms": float("inf")}, "step_time_budget_ms is inf"),
        ({"max_overtakes": -1}, "max_overtakes is -1"),
        ({"prefix_aware": 1}, "prefix_aware is 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        SchedulingOptions(**options)


# ---- neighbours ---------------------------------------------------------------------------------------


def talk(system: str, question: str, **kwargs) -> LLMGenerationRequest:
    return LLMGenerationRequest(prompt=system * 30 + question, sampling=SamplingParams(max_tokens=2), **kwargs)


@pytest.mark.parametrize(("aware", "order"), [(True, [1, 3, 5, 2, 4]), (False, [1, 2, 3, 4, 5])])
def test_requests_that_share_a_prefix_with_a_resident_are_seated_next_to_it(start, brake, aware, order):
    runtime = ScriptedRuntime(
        script=Script(next_token=brake), max_batch_size=2, max_kv_capacity=1024, max_input_length=1024
    )
    engine = start(runtime, scheduling(prefix_aware=aware))
    brake.hold()
    handles = [engine.submit(LLMGenerationRequest(prompt="sys-alpha " * 30, sampling=SamplingParams(max_tokens=40)))]
    assert brake.entered.wait(WAIT)
    handles += [engine.submit(talk(system, "?")) for system in ("sys-bravo ", "sys-alpha ") * 2]
    brake.release()
    for handle in handles:
        handle.get(WAIT)
    assert first_residency(runtime) == order
    assert engine.metrics().prefix_overtakes == (3 if aware else 0)


def test_neighbours_pass_nobody_more_often_than_the_bound(start, brake):
    runtime = ScriptedRuntime(
        script=Script(next_token=brake), max_batch_size=2, max_kv_capacity=1024, max_input_length=1024
    )
    engine = start(runtime, scheduling(max_overtakes=2))
    brake.hold()
    handles = [engine.submit(LLMGenerationRequest(prompt="sys-alpha " * 30, sampling=SamplingParams(max_tokens=60)))]
    assert brake.entered.wait(WAIT)
    handles.append(engine.submit(talk("sys-bravo ", "?")))
    handles += [engine.submit(talk("sys-alpha ", str(i))) for i in range(5)]
    brake.release()
    for handle in handles:
        handle.get(WAIT)
    assert first_residency(runtime) == [1, 3, 4, 2, 5, 6, 7]


def test_neighbours_keep_to_their_priority(start, brake):
    runtime = ScriptedRuntime(
        script=Script(next_token=brake), max_batch_size=2, max_kv_capacity=1024, max_input_length=1024
    )
    engine = start(runtime, scheduling(scheduling_policy="priority"))
    brake.hold()
    handles = [engine.submit(LLMGenerationRequest(prompt="sys-alpha " * 30, sampling=SamplingParams(max_tokens=40)))]
    assert brake.entered.wait(WAIT)
    handles.append(engine.submit(talk("sys-bravo ", "?")))
    handles.append(engine.submit(talk("sys-alpha ", "?", priority=1)))
    brake.release()
    for handle in handles:
        handle.get(WAIT)
    assert first_residency(runtime) == [1, 2, 3]


# ---- step-time budget ---------------------------------------------------------------------------------


class Metered:
    """A scripted session whose steps take as long as their work says, by a clock that nothing else moves."""

    def __init__(self, runtime: ScriptedRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
        self.durations: list[tuple[int, int, float]] = []  # decode rows, prompt tokens, seconds
        self._now = 0.0
        session = runtime.sessions[-1]
        execute = session.execute

        def slow(plan):
            chunks = [d.query_length for d in plan if d.work is SequenceWork.CONTEXT]
            rows = len(plan) - len(chunks)
            seconds = 0.002 + 0.0001 * rows + 0.0001 * sum(chunks)
            self._now += seconds
            self.durations.append((rows, sum(chunks), seconds))
            return execute(plan)

        session.execute = slow
        monkeypatch.setattr("edgellm.engine.step_clock.time", self)

    def perf_counter(self) -> float:
        return self._now


def test_the_step_time_budget_bounds_prompt_chunks_beside_decode_rows_and_alone(start, brake, monkeypatch):
    runtime = ScriptedRuntime(
        script=Script(next_token=brake), max_batch_size=2, max_kv_capacity=8192, max_input_length=4096, page_size=16
    )
    engine = start(runtime, EngineConfig(step_token_budget=4096, scheduling=SchedulingOptions(step_time_budget_ms=20)))
    meter = Metered(runtime, monkeypatch)
    first = held(engine, brake)
    beside = engine.submit(ask("p" * 3000, max_tokens=1))
    brake.release()
    beside.get(WAIT)
    first.get(WAIT)
    engine.submit(ask("q" * 3000, max_tokens=1)).get(WAIT)
    prompts = [step for step in meter.durations if step[1]][1:]  # the first is of the request that decodes
    tried = [tokens for _, tokens, _ in prompts]
    assert tried[0] == 16  # a page first
    assert all(later <= 2 * max(tried[: i + 1]) for i, later in enumerate(tried[1:]))
    assert max(seconds for _, _, seconds in prompts) <= 0.020
    for most in (max(t for rows, t, _ in prompts if rows), max(t for rows, t, _ in prompts if not rows)):
        assert most in (144, 160, 176)  # 18 ms hold 176 tokens, and a margin is kept
    metrics = engine.metrics()
    assert metrics.budget_steps == len(prompts) + 1
    assert (metrics.steps_over_budget, metrics.budget_unreachable) == (0, 0)
    assert metrics.budget_measured_us == pytest.approx(sum(t for _, n, t in meter.durations if n) * 1e6, abs=100)
    assert metrics.budget_predicted_us == pytest.approx(metrics.budget_measured_us, rel=0.5)


def test_a_budget_that_no_step_can_keep_is_said_once_and_counted(start, caplog):
    engine = start(ScriptedRuntime(page_size=8), scheduling(step_time_budget_ms=0.001))
    with caplog.at_level(logging.WARNING, "edgellm"):
        for _ in range(3):
            engine.submit(ask("x" * 40, max_tokens=20)).get(WAIT)
    (warning,) = [r.getMessage() for r in caplog.records if "step_time_budget_ms" in r.getMessage()]
    assert warning.startswith(
        "step_time_budget_ms is 0.001 and cannot be kept: a step with one page of a prompt (8 tokens)"
    )
    assert "raise the budget" in warning
    metrics = engine.metrics()
    assert metrics.budget_steps == metrics.steps_over_budget == 15  # five pages of each prompt
    assert 5 <= metrics.budget_unreachable <= 10  # not those before anything was known


def test_a_budget_that_steps_keep_is_not_warned_of(start, caplog):
    engine = start(ScriptedRuntime(page_size=8), scheduling(step_time_budget_ms=60_000))
    with caplog.at_level(logging.WARNING, "edgellm"):
        for _ in range(3):
            engine.submit(ask("x" * 40, max_tokens=20)).get(WAIT)
    assert not [record for record in caplog.records if "step_time_budget_ms" in record.getMessage()]
    assert engine.metrics().budget_unreachable == 0


def test_without_a_budget_nothing_is_learned_or_counted(start):
    engine = start(ScriptedRuntime())
    engine.submit(ask("x" * 40)).get(WAIT)
    metrics = engine.metrics()
    assert metrics.budget_steps == metrics.steps_over_budget == metrics.budget_predicted_us == 0


def test_a_budget_needs_compact_steps():
    from edgellm.engine.engine import RequestEngine

    with pytest.raises(InvalidArgumentError, match="step_time_budget_ms is 5, but the session runs prompts whole"):
        RequestEngine(ScriptedRuntime(compact=False), scheduling(step_time_budget_ms=5))


# ---- counters -----------------------------------------------------------------------------------------


def test_gaps_between_tokens_and_step_durations_are_counted_per_row(start):
    engine = start(ScriptedRuntime())
    handles = [engine.submit(ask(f"p{i}", max_tokens=6)) for i in range(3)]
    for handle in handles:
        handle.get(WAIT)
    metrics = engine.metrics()
    assert metrics.inter_token.count == 3 * 5 == metrics.decode_tokens
    assert metrics.step_duration.count == metrics.steps_context + metrics.steps_decode
    assert metrics.time_to_first_token.count == metrics.queue_latency.count == 3
    assert sum(metrics.inter_token.buckets) == metrics.inter_token.count
    assert (
        0 < metrics.inter_token.quantile_us(0.5) <= metrics.inter_token.quantile_us(0.99) <= metrics.inter_token.max_us
    )


def test_a_gap_covers_the_time_between_two_steps(start, brake):
    engine = start(ScriptedRuntime(script=Script(next_token=brake)))
    handle = held(engine, brake)
    brake.hold_at(len("held"), 5)
    brake.release()
    wait_until(lambda: brake.trapped, "never came to the trap")
    time.sleep(0.05)
    brake.release()
    handle.get(WAIT)
    assert engine.metrics().inter_token.max_us >= 50_000


def test_buckets_are_log_spaced_and_cover_every_latency():
    for bucket in range(NUM_BUCKETS - 1):
        assert bucket_of(bucket_start(bucket)) == bucket == bucket_of(bucket_start(bucket + 1) - 1)
    assert bucket_of(10**15) == NUM_BUCKETS - 1
    assert all(bucket_start(i + 1) <= 1.25 * bucket_start(i) for i in range(8, NUM_BUCKETS - 1))


def test_quantiles_are_estimated_within_a_bucket():
    stat = LatencyStat()
    assert stat.quantile_us(0.5) == 0.0
    for micros in range(1, 10_001):
        stat.record((micros + 0.5) / 1e6)
    for quantile in (0.1, 0.5, 0.9, 0.99):
        assert stat.quantile_us(quantile) == pytest.approx(quantile * 10_000, rel=0.02)
    assert stat.quantile_us(1) == stat.max_us == 10_000
    weighted = LatencyStat()
    weighted.record(0.001, 5)
    assert (weighted.count, weighted.total_us, weighted.mean_us) == (5, 5000, 1000)


# ---- endings ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_actor_ends_its_requests_with_the_cause(brake):
    from edgellm.engine.engine import RequestEngine
    from edgellm.errors import RequestFailed, SubmitError

    engine = RequestEngine(ScriptedRuntime(script=Script(next_token=brake), max_batch_size=1))
    first = held(engine, brake)
    waiting = engine.submit(ask())

    def die() -> None:
        raise SystemError("out of everything")

    engine._actor._drain = die
    brake.release()
    for handle in (first, waiting):
        with pytest.raises(RequestFailed, match="ended unexpectedly: SystemError: out of everything"):
            handle.get(WAIT)
    engine._thread.join(WAIT)
    with pytest.raises(SubmitError, match="out of everything"):
        engine.submit(ask())
    assert engine.metrics().failed == 2
    engine.shutdown()


def test_the_exit_hook_goes_with_the_thread(monkeypatch):
    from edgellm.engine import engine as module

    hooks: list[object] = []
    monkeypatch.setattr(module.atexit, "register", hooks.append)
    monkeypatch.setattr(module.atexit, "unregister", hooks.remove)
    engine = module.RequestEngine(ScriptedRuntime())
    assert len(hooks) == 1
    thread = engine._thread
    del engine  # collected, never shut down
    thread.join(WAIT)
    assert hooks == []


def test_submit_after_an_interrupt_says_what_ended_the_engine():
    from edgellm.engine.engine import RequestEngine
    from edgellm.errors import SubmitError

    def work(engine: RequestEngine) -> None:
        with engine:
            raise KeyboardInterrupt

    engine = RequestEngine(ScriptedRuntime())
    with pytest.raises(KeyboardInterrupt):
        work(engine)
    with pytest.raises(SubmitError, match="shutting down, left by KeyboardInterrupt"):
        engine.submit(ask())
    assert threading.current_thread() is threading.main_thread()
