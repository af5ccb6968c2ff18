"""Numbered session behaviours about what this runtime has only as a seam: encoders, pruned media, graphs, allocation.

There is no encoder and no pruner: content that needs one is refused, and the rule behind the number is tested where it
would apply (preparation of a prompt, a step that runs fewer positions than planned).
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest

from edgellm.engine.coordinator import RequestCoordinator
from edgellm.engine.metrics import EngineMetrics
from edgellm.engine.records import RequestRecord
from edgellm.errors import AdmissionError, ContractViolation, SessionLostError, StepDeviceError
from edgellm.request import LLMGenerationRequest
from edgellm.sampling.params import SamplingParams
from edgellm.session.frame import RowOutcome, Step
from edgellm.session.plan_check import StepShape
from edgellm.session.types import AdmissionResult, AdmissionStatus, RequestId, SequenceWork, SessionOptions
from edgellm.testing.recount import recount
from edgellm.testing.scripted_session import Script, ScriptedRuntime, ScriptedSession
from edgellm.testing.session_driver import SessionDriver
from edgellm.testing.toy import toy_generate
from edgellm.testing.toy_runtime import TOY_VOCAB_SIZE, ToyRuntime
from edgellm.testing.toy_tokenizer import ToyTokenizer


def request(prompt: str = "hello!", max_tokens: int = 8, **fields: Any) -> LLMGenerationRequest:
    return LLMGenerationRequest(prompt=prompt, sampling=SamplingParams(max_tokens=max_tokens), **fields)


def toy_request(prompt: list[int], max_tokens: int) -> LLMGenerationRequest:
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    return LLMGenerationRequest(prompt_token_ids=prompt, sampling=params)


def opened(runtime: ScriptedRuntime | ToyRuntime) -> SessionDriver:
    return SessionDriver(runtime.open_session(SessionOptions(allow_compact_execution=True)))


def of_kind(session: type[ScriptedSession], **options: Any) -> SessionDriver:
    """A driver over a scripted session with another mechanism."""

    class Runtime(ScriptedRuntime):
        def open_session(self, options: SessionOptions | None = None) -> ScriptedSession:
            return session(self, compact=True, reason="")

    return opened(Runtime(**options))


class Encoder(ToyTokenizer):
    """Prepares prompts; fails on those that name a broken picture."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if "picture" in text:
            raise RuntimeError("the picture is damaged")
        return super().encode(text, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (request("a picture"), "the picture is damaged"),
        (
            LLMGenerationRequest(messages=[{"role": "user", "content": [{"type": "image", "image": "x.png"}]}]),
            "no encoder is loaded",
        ),
        (
            LLMGenerationRequest(messages=[{"role": "user", "content": [{"type": "audio", "audio": "x.wav"}]}]),
            "no encoder is loaded",
        ),
    ],
    ids=["preparation_raises", "image", "audio"],
)
def test_behaviour_17_a_prompt_that_cannot_be_prepared_is_refused_and_residents_run_on_unchanged(
    bad: LLMGenerationRequest, match: str
) -> None:
    texts = []
    for refused in (False, True):
        runtime = ScriptedRuntime(tokenizer=Encoder())
        drive = opened(runtime)
        drive.admit(request())
        drive.step(drive.context(1))
        if refused:
            before = drive.session.residents(), set(runtime.leased), drive.live[1].committed
            with pytest.raises(AdmissionError, match=match):
                drive.session.admit(bad, RequestId(2))
            assert (drive.session.residents(), set(runtime.leased), drive.live[1].committed) == before
        step = drive.step(drive.decode(1))
        assert step.step_id == 2
        drive.run()
        texts.append((step.deltas[0][1].token_ids, drive.finished[1].generated_ids))
        drive.session.close()
    assert texts[0] == texts[1]


def test_behaviour_18_a_device_in_error_during_admission_loses_the_session() -> None:
    runtime = ScriptedRuntime(script=Script())
    drive = opened(runtime)
    drive.admit(request())
    runtime.script.admissions.append(StepDeviceError("the stream is in error"))
    with pytest.raises(SessionLostError, match="the stream is in error"):
        drive.session.admit(request(), RequestId(2))
    with pytest.raises(ContractViolation, match="the stream is in error"):
        drive.session.execute([drive.context(1)])
    with pytest.raises(ContractViolation, match="the stream is in error"):
        drive.session.admit(request(), RequestId(3))
    drive.session.close()
    assert runtime.leased == set()


class Pruning(ScriptedSession):
    """Drops four positions of every whole prompt, as a pruner of media would."""

    def _run(self, step: Step) -> list[RowOutcome]:
        outcomes = list(super()._run(step))
        return [
            RowOutcome(outcome.committed - 4, outcome.token_ids) if entry.work is SequenceWork.CONTEXT else outcome
            for outcome, entry in zip(outcomes, step.descriptors, strict=True)
        ]


def test_behaviour_57_a_pruned_prompt_commits_what_ran_and_the_next_row_starts_there() -> None:
    drive = of_kind(Pruning)
    drive.admit(request("a" * 10))
    planned = drive.context(1)
    step = drive.step(planned)
    assert (planned.query_length, step.execution[0].query_length) == (10, 6)
    assert drive.session.residents() == [drive.live[1].identity.resident]
    row = drive.decode(1)
    assert row.past_length == 6
    wrong = type(row)(row.identity, row.work, row.query_length, 10, row.select_last_token_logits)
    with pytest.raises(ContractViolation, match=r"10.*6|6.*10"):
        drive.session.execute([wrong])
    assert drive.step(row).execution[0].past_length == 6
    drive.run()
    assert len(drive.finished[1].generated_ids) == 8
    drive.session.close()


class SecondFails:
    """A session whose second materialise raises."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.calls = 0

    def materialize(self, result: Any, stop_strings: Sequence[str]) -> Any:
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("the answer cannot be built")
        return self._session.materialize(result, stop_strings)


def test_behaviour_64_a_materialise_that_raises_on_the_second_finisher_leaves_the_table_unchanged() -> None:
    runtime = ScriptedRuntime()
    session = runtime.open_session(SessionOptions(allow_compact_execution=True))
    table = RequestCoordinator(EngineMetrics())
    drive = SessionDriver(session)
    for number, max_tokens in ((1, 1), (2, 1), (3, 5)):
        asked = request(max_tokens=max_tokens)
        record = RequestRecord(request_id=RequestId(number), request=asked, note_cancel=lambda: None)
        admission = drive.admit(asked)
        assert isinstance(admission, AdmissionResult)
        assert admission.status is AdmissionStatus.ADMITTED
        table.add(record, asked, admission, exclusive=False)
    plan = [drive.context(number) for number in (1, 2, 3)]
    result = session.execute(plan)
    assert len(result.finished) == 2
    before = [(entry.identity, entry.committed, entry.prompt_remaining) for entry in table.lengths]
    failing = SecondFails(session)
    with pytest.raises(RuntimeError, match="cannot be built"):
        table.commit(result, plan, failing)  # type: ignore[arg-type]
    assert failing.calls == 2
    assert [(entry.identity, entry.committed, entry.prompt_remaining) for entry in table.lengths] == before
    assert [seat.record.first_token_at for seat in table.seats()] == [0.0, 0.0, 0.0]
    assert [outcome.record.id for outcome in table.commit(result, plan, session)] == [1, 2]
    assert [seat.record.id for seat in table.seats()] == [3]
    session.close()


class Graphs(ScriptedSession):
    """Says that decode steps of the whole cohort were replayed from a graph."""

    def _run(self, step: Step) -> Any:
        step.graph_launched = step.shape is StepShape.FULL_COHORT_DECODE
        return super()._run(step)


def test_behaviour_66_graph_launched_reports_what_the_mechanism_did_and_changes_no_token() -> None:
    texts = []
    for kind in (Graphs, ScriptedSession):
        drive = of_kind(kind, max_batch_size=2)
        for prompt in ("abc", "defg"):
            drive.admit(request(prompt, 4))
        launched = [drive.step(drive.context(1), drive.context(2)).graph_launched]
        launched.append(drive.step(drive.decode(1), drive.decode(2)).graph_launched)
        launched.append(drive.step(drive.decode(2)).graph_launched)
        assert launched == [False, kind is Graphs, False]
        drive.run()
        texts.append([drive.finished[number].generated_ids for number in (1, 2)])
        drive.session.close()
    assert texts[0] == texts[1]


def test_behaviour_66_the_cpu_runtime_launches_no_graph() -> None:
    runtime = ToyRuntime(page_size=4)
    drive = opened(runtime)
    drive.admit(toy_request([5, 6, 7], 4))
    drive.run()
    assert [result.graph_launched for result in drive.results] == [False] * 4
    assert drive.finished[1].generated_ids == toy_generate([5, 6, 7], 4, TOY_VOCAB_SIZE)
    drive.session.close()
    runtime.close()


def test_behaviour_89_a_thousand_steps_allocate_no_state_memory_and_no_growing_host_memory() -> None:
    runtime = ToyRuntime(page_size=4, max_batch_size=4, num_pages=64)
    drive = opened(runtime)
    pages = runtime.executor.kv_cache.pages
    address, size = pages.__array_interface__["data"][0], pages.nbytes
    total = recount(runtime.coordinator).total
    number = 0

    def steps(count: int) -> None:
        nonlocal number
        for _ in range(count):
            while len(drive.live) < 4:
                number += 1
                drive.admit(toy_request([100 + number % 7] * (3 + number % 5), 3 + number % 11))
            drive.step_all(4)
            drive.results.clear()
            for done in list(drive.finished):
                del drive.finished[done], drive.deltas[done]

    steps(300)
    tracemalloc.start()
    steps(20)
    warm = tracemalloc.get_traced_memory()[0]
    steps(1000)
    grown = tracemalloc.get_traced_memory()[0] - warm
    tracemalloc.stop()
    assert runtime.executor.kv_cache.pages is pages
    assert (pages.__array_interface__["data"][0], pages.nbytes) == (address, size)
    assert recount(runtime.coordinator).total == total
    assert number > 300
    assert grown < 200_000  # a step that kept 200 bytes would show
    drive.run()
    drive.session.close()
    runtime.close()
