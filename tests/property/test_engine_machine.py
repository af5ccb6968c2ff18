"""The engine under random arrivals, cancels, refusals and failures: every accepted request ends exactly once.

The state machine drives the actor's boundaries on the test's own thread, so a failing run replays; the soak
below it does the same with real threads.
"""

import contextlib
import random
import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edgellm.cache.types import ContextCacheCommitPolicy
from edgellm.engine.actor import EngineActor
from edgellm.engine.command_queue import EngineChannel
from edgellm.engine.config import EngineConfig, SchedulingOptions
from edgellm.engine.engine import RequestEngine, ShutdownMode
from edgellm.engine.metrics import EngineMetrics
from edgellm.engine.records import RequestRecord, TerminalStatus
from edgellm.errors import RequestCancelled, RequestFailed, StepDeviceError, SubmitError
from edgellm.request import LLMGenerationRequest
from edgellm.sampling.params import SamplingParams
from edgellm.session.types import AdmissionStatus, SessionOptions
from edgellm.streaming import StreamChannel
from edgellm.testing.scripted_session import Script, ScriptedRuntime, letters

MAX_OVERTAKES = 2
SEATS = 3
PROMPT_ONLY = ContextCacheCommitPolicy.PREFILL_STATE_ONLY
FAR = 1e6  # seconds: no deadline comes by itself
FATES = [AdmissionStatus.NO_CAPACITY, AdmissionStatus.REJECTED, RuntimeError("lease died")]


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.script = Script()
        self.runtime = ScriptedRuntime(script=self.script, max_batch_size=SEATS, max_input_length=32, page_size=4)
        options = SchedulingOptions(
            scheduling_policy="priority",
            preemption="pause",
            max_pause_steps=2,
            priority_reserved_slots=1,
            max_overtakes=MAX_OVERTAKES,
        )
        config = EngineConfig(command_queue_capacity=4, max_pending_requests=8, step_token_budget=4, scheduling=options)
        self.channel = EngineChannel(config, EngineMetrics())
        self.actor = EngineActor(
            channel=self.channel,
            config=config,
            open_session=lambda: self.runtime.open_session(SessionOptions(allow_compact_execution=True)),
            device_healthy=None,
            close_runtime=self.runtime.close,
        )
        self.actor._open()
        self.records: list[RequestRecord] = []
        self.requests: dict[int, LLMGenerationRequest] = {}
        self.outcomes: dict[int, int] = {}
        self.passed: dict[int, int] = {}  # request id to later ones that got a seat before it
        self.read: dict[int, list[int]] = {}

    @rule(
        letter=st.sampled_from("ab"),
        length=st.integers(0, 40),
        max_tokens=st.integers(1, 6),
        priority=st.integers(-1, 1),
        prompt_only=st.booleans(),
        exclusive=st.booleans(),
        timed=st.booleans(),
        streamed=st.booleans(),
    )
    def submit(
        self,
        letter: str,
        length: int,
        max_tokens: int,
        priority: int,
        prompt_only: bool,
        exclusive: bool,
        timed: bool,
        streamed: bool,
    ) -> None:
        request = LLMGenerationRequest(
            prompt=letter * length,
            sampling=SamplingParams(max_tokens=max_tokens),
            priority=priority,
            commit_policy=PROMPT_ONLY if prompt_only else ContextCacheCommitPolicy.INCLUDING_GENERATED_TOKENS,
            token_callback=(lambda ids: None) if exclusive else None,
            stream_channel=StreamChannel.create() if streamed else None,
            timeout_seconds=FAR if timed else None,
        )
        request_id = self.channel.next_id()
        record = RequestRecord(
            request_id=request_id,
            request=request,
            channel=request.stream_channel,
            note_cancel=self.channel.note_cancel,
            note_stream=self.channel.note_stream,
        )
        try:
            self.channel.accept(record)
        except SubmitError:
            assert not record.accepted
            assert self.channel.pending == 8 or len(self.channel.queue) == 4
            return
        self.records.append(record)
        self.requests[request_id] = request
        self.outcomes[request_id] = 0
        self.passed[request_id] = 0
        self.read[request_id] = []

        def ended() -> None:
            self.outcomes[request_id] += 1

        record.add_done_callback(ended)

    @precondition(lambda self: self.records)
    @rule(data=st.data(), through_stream=st.booleans())
    def cancel(self, data: st.DataObject, through_stream: bool) -> None:
        record = data.draw(st.sampled_from(self.records))
        if through_stream and record.channel is not None:
            record.channel.cancel()
        else:
            self.channel.cancel_record(record.id)

    @precondition(lambda self: self.records)
    @rule(data=st.data())
    def ask_for_the_stream(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.records)).open_stream()

    @precondition(lambda self: self.records)
    @rule(data=st.data())
    def read_a_chunk(self, data: st.DataObject) -> None:
        record = data.draw(st.sampled_from(self.records))
        chunk = None if record.channel is None else record.channel.try_pop()
        if chunk is not None:
            self.read[record.id] += chunk.token_ids

    @precondition(lambda self: any(record.deadline is not None for record in self.records))
    @rule(data=st.data())
    def time_passes(self, data: st.DataObject) -> None:
        """The clock stands at the deadline of a request: that one ends, and those whose deadline was earlier."""
        timed = [record for record in self.records if record.deadline is not None]
        now = data.draw(st.sampled_from(timed)).deadline
        due = [record for record in timed if record.deadline <= now]
        alive = [r for r in due if not (r.outcome_published or r.cancelled) and r.id in self.drained]
        self.actor._deadlines.expire(now)
        assert all(record.timed_out for record in alive)
        self.boundary()
        assert all(record.status is TerminalStatus.CANCELLED for record in alive)

    @property
    def drained(self) -> set[int]:
        """Requests that the actor has taken from the command queue, and that have no outcome."""
        waiting = {record.id for record in self.actor._backlog.records}
        return waiting | {seat.record.id for seat in self.actor._coordinator.seats()}

    @rule(fate=st.sampled_from(FATES))
    def next_admission_goes_wrong(self, fate: object) -> None:
        self.script.admissions.append(fate)

    @rule()
    def next_step_is_refused(self) -> None:
        self.script.refuse_compact()

    @rule()
    def next_step_fails(self) -> None:
        self.script.steps.append(StepDeviceError("kernel fault"))

    @precondition(lambda self: self.records)
    @rule(data=st.data(), after=st.integers(0, 3))
    def a_row_fails(self, data: st.DataObject, after: int) -> None:
        self.script.row_errors[data.draw(st.sampled_from(self.records)).id] = (after, "row fault")

    @rule(count=st.integers(1, 4))
    def run(self, count: int) -> None:
        for _ in range(count):
            self.boundary()

    def boundary(self) -> None:
        self.actor._drain()
        before = {seat.record.id for seat in self.actor._coordinator.seats()}
        admissions = len(self.runtime.log)
        if self.actor.queued() or self.actor.resident():
            self.actor._boundary()
        self.count_overtakes(before, self.runtime.log[admissions:])

    def count_overtakes(self, before: set[int], log: list[tuple[object, ...]]) -> None:
        """Who was given a seat while somebody before it in order still waits."""
        waiting = list(self.actor._backlog.records)
        ran = {d.identity.request_id for entry in log if entry[0] == "execute" for d in entry[1]}
        seated = ({seat.record.id for seat in self.actor._coordinator.seats()} | ran) - before
        by_id = {record.id: record for record in self.records}
        for record in waiting:
            later = [n for n in seated if (by_id[n].priority, by_id[n].arrival) > (record.priority, record.arrival)]
            if not record.readmitted and not record.replays and record.id not in seated:
                self.passed[record.id] += len(later)

    @invariant()
    def nobody_is_passed_more_often_than_allowed(self) -> None:
        assert all(count <= MAX_OVERTAKES for count in self.passed.values())
        assert all(record.overtaken <= MAX_OVERTAKES for record in self.records)

    @invariant()
    def the_mirror_is_the_sessions_truth(self) -> None:
        session = self.actor._session
        seats = self.actor._coordinator.seats()
        if session is None:
            assert seats == []
            return
        assert [seat.lengths.ref for seat in seats] == session.residents()
        truth = [(resident.committed, resident.prompt_remaining) for resident in session._order]
        assert [(seat.lengths.committed, seat.lengths.prompt_remaining) for seat in seats] == truth
        assert session._slots.available() == SEATS - len(seats)

    @invariant()
    def pending_counts_exactly_the_open_requests(self) -> None:
        open_requests = [record for record in self.records if not record.outcome_published]
        assert self.channel.pending == len(open_requests)
        assert len(open_requests) == len(self.channel.queue) + self.actor.queued() + self.actor.resident()
        assert all(count <= 1 for count in self.outcomes.values())
        metrics = self.channel.metrics
        assert metrics.submitted == len(self.records)
        assert metrics.completed + metrics.cancelled + metrics.failed == len(self.records) - len(open_requests)

    @invariant()
    def leases_belong_to_residents(self) -> None:
        if self.actor._session is not None:
            self.actor._session.check_invariants()
        assert self.runtime.leased == {seat.record.id for seat in self.actor._coordinator.seats()}

    def teardown(self) -> None:
        for _ in range(2000):
            if not self.channel.pending:
                break
            self.boundary()
        assert self.channel.pending == 0
        assert self.runtime.leased == set()
        assert all(count == 1 for count in self.outcomes.values())
        for record in self.records:
            self.check_outcome(record)
        self.actor._final_sweep()

    def check_outcome(self, record: RequestRecord) -> None:
        channel = record.open_stream()
        assert channel.is_finished()
        streamed = [*self.read[record.id], *(token for chunk in channel for token in chunk.token_ids)]
        request = self.requests[record.id]
        prompt = self.runtime.tokenizer.encode(request.prompt)
        solo = [letters(np.array(prompt, np.int32), i) for i in range(request.sampling.max_tokens)]
        if record.status is TerminalStatus.COMPLETED:
            assert record.response.token_ids == solo
            assert streamed == solo
        else:
            assert streamed == solo[: len(streamed)]
        if record.status is TerminalStatus.EXECUTION_ERROR:
            assert record.error_message
        if record.partial is not None:
            assert record.partial.token_ids == solo[: len(record.partial.token_ids)]


EngineMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestEngineMachine = EngineMachine.TestCase


@pytest.mark.parametrize("compact", [True, False])
def test_behaviours_11_and_12_soak_every_accepted_request_has_exactly_one_outcome(compact):
    script = Script(row_errors=dict.fromkeys(range(5, 400, 17), (1, "row fault")))
    runtime = ScriptedRuntime(script=script, max_batch_size=4, max_input_length=64, compact=compact)
    engine = RequestEngine(runtime, EngineConfig(step_token_budget=8, max_pending_requests=64))
    ends: dict[int, list[str]] = {}
    handles = []

    def client(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            request = LLMGenerationRequest(
                prompt="b" * rng.randint(0, 40), sampling=SamplingParams(max_tokens=rng.randint(1, 12))
            )
            try:
                handle = engine.submit(request)
            except SubmitError:
                continue
            ends[handle.id] = []
            handle.add_done_callback(lambda mine=ends[handle.id]: mine.append("ended"))
            handles.append(handle)
            if rng.random() < 0.3:
                handle.cancel()
            elif rng.random() < 0.3:
                with contextlib.suppress(RequestCancelled, RequestFailed):
                    handle.get(30)

    clients = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(60)
    engine.shutdown(ShutdownMode.DRAIN)
    assert len(handles) > 100
    assert all(handle.ready() for handle in handles)
    assert all(handle.stream().is_finished() for handle in handles)
    assert set(map(tuple, ends.values())) == {("ended",)}
    metrics = engine.metrics()
    assert metrics.submitted == len(handles)
    assert metrics.completed + metrics.cancelled + metrics.failed == len(handles)
    assert min(metrics.completed, metrics.cancelled, metrics.failed) > 0
    assert runtime.leased == set()
