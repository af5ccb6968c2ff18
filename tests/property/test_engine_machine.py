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

from edgellm.cache.types import ContextCacheLookupPolicy
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

FATES = [AdmissionStatus.NO_CAPACITY, AdmissionStatus.REJECTED, RuntimeError("lease died")]


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.script = Script()
        self.runtime = ScriptedRuntime(script=self.script, max_batch_size=3, max_input_length=32, page_size=4)
        options = SchedulingOptions(
            scheduling_policy="priority", preemption="pause", max_pause_steps=2, priority_reserved_slots=1
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

    @rule(
        length=st.integers(0, 40),
        max_tokens=st.integers(1, 6),
        priority=st.integers(-1, 1),
        bypass=st.booleans(),
        exclusive=st.booleans(),
    )
    def submit(self, length: int, max_tokens: int, priority: int, bypass: bool, exclusive: bool) -> None:
        request = LLMGenerationRequest(
            prompt="a" * length,
            sampling=SamplingParams(max_tokens=max_tokens),
            priority=priority,
            lookup_policy=ContextCacheLookupPolicy.BYPASS if bypass else ContextCacheLookupPolicy.USE_CACHE,
            token_callback=(lambda ids: None) if exclusive else None,
            stream_channel=StreamChannel.create(),
        )
        try:
            request_id = self.channel.reserve()
        except SubmitError:
            assert self.channel.pending == 8
            return
        record = RequestRecord(
            request_id=request_id,
            request=request,
            channel=request.stream_channel,
            note_cancel=self.channel.note_cancel,
        )
        try:
            self.channel.post(record)
        except SubmitError:
            self.channel.unreserve()
            assert len(self.channel.queue) == 4
            return
        self.records.append(record)
        self.requests[request_id] = request
        self.outcomes[request_id] = 0

        def ended() -> None:
            self.outcomes[request_id] += 1

        record.add_done_callback(ended)

    @precondition(lambda self: self.records)
    @rule(data=st.data(), through_stream=st.booleans())
    def cancel(self, data: st.DataObject, through_stream: bool) -> None:
        record = data.draw(st.sampled_from(self.records))
        if through_stream:
            record.channel.cancel()
        else:
            self.channel.cancel_record(record.id)

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
        if self.actor.queued() or self.actor.resident():
            self.actor._boundary()

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
        assert record.channel.is_finished()
        streamed = [token for chunk in record.channel for token in chunk.token_ids]
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
