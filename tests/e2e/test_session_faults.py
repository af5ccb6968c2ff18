"""Faults found by attacking the session: each stays fixed here, on the toy model, recounted at the end."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from edgellm._core.block_hash import TokenChain
from edgellm._core.page_table import KVPageTable
from edgellm.builtin.base_endpoint import BaseEndpointPolicy, serves
from edgellm.cache.advances import OneTokenAdvances, apply_advance
from edgellm.cache.binding import RowBinder
from edgellm.cache.types import ReuseStopReason
from edgellm.engine.engine import RequestEngine
from edgellm.errors import AdmissionError, ContractViolation, InvalidArgumentError
from edgellm.hookspecs import hookimpl
from edgellm.plugins import Plugins, load_plugins
from edgellm.request import LLMGenerationRequest
from edgellm.sampling.params import SamplingParams
from edgellm.session.frame import SessionState
from edgellm.session.types import AdmissionStatus, FinishReason, SessionOptions
from edgellm.testing.recount import recount, require_baseline
from edgellm.testing.session_driver import SessionDriver
from edgellm.testing.toy import toy_generate
from edgellm.testing.toy_runtime import TOY_VOCAB_SIZE, ToyRuntime

Open = Callable[..., tuple[ToyRuntime, SessionDriver]]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Opens a toy runtime with a compact session; all of them must be at baseline at the end."""
    made: list[tuple[ToyRuntime, SessionDriver]] = []

    def make(**geometry: object) -> tuple[ToyRuntime, SessionDriver]:
        runtime = ToyRuntime(**{"page_size": 4, "max_kv_capacity": 64, **geometry})  # type: ignore[arg-type]
        driver = SessionDriver(runtime.open_session(SessionOptions(allow_compact_execution=True)))
        made.append((runtime, driver))
        return made[-1]

    yield make
    for runtime, driver in made:
        driver.session.close()
        require_baseline(runtime.coordinator)


def request(prompt: object, max_tokens: int, **fields: object) -> LLMGenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return LLMGenerationRequest(prompt_token_ids=prompt, sampling=sampling, **fields)  # type: ignore[arg-type]


def cold(prompt: list[int], max_tokens: int) -> list[int]:
    return toy_generate(prompt, max_tokens, TOY_VOCAB_SIZE)


def test_a_repeated_prompt_needs_no_more_pages_than_the_first_time(opened: Open) -> None:
    """A full match recomputes its last block: holding that copy beside the cached page starved the answer."""
    _, drive = opened(num_pages=4)
    prompt = list(range(10, 18))
    for number in (1, 2, 3):
        assert drive.admit(request(prompt, 7)).status is AdmissionStatus.ADMITTED
        drive.run()
        assert drive.finished[number].terminal_reason is FinishReason.LENGTH
        assert drive.finished[number].generated_ids == cold(prompt, 7)


@pytest.mark.parametrize("num_pages", range(8, 24))
def test_everybody_admitted_runs_to_the_end_when_twins_share_blocks(opened: Open, num_pages: int) -> None:
    """Twins in flight publish the same blocks; what they hold twice must not eat pages promised to others."""
    _, drive = opened(num_pages=num_pages, page_size=2)
    twin, other = list(range(10, 15)), list(range(100, 112))
    drive.admit(request(twin, 12))
    for _ in range(7):
        drive.step_all()
    drive.admit(request(twin, 12))
    while 1 in drive.live:
        drive.step_all()
    drive.admit(request(other, 4))
    drive.run()
    for number, snapshot in drive.finished.items():
        assert snapshot.terminal_reason is FinishReason.LENGTH, (number, snapshot.error_message)
        prompt = snapshot.raw_input_ids
        assert snapshot.generated_ids == cold(prompt, len(snapshot.generated_ids))


def test_prompts_given_as_arrays_wait_like_any_other(opened: Open) -> None:
    """Two refused requests with array prompts were compared with `==` and lost the session."""
    _, drive = opened(num_pages=11)
    drive.admit(request(np.arange(10, 20), 16))
    drive.step_all()
    assert drive.admit(request(np.arange(30, 40), 6)).status is AdmissionStatus.ADMITTED
    for _ in range(2):
        assert drive.admit(request(np.arange(50, 60), 16)).status is AdmissionStatus.NO_CAPACITY
        assert drive.admit(request(np.arange(60, 70), 16)).status is AdmissionStatus.NO_CAPACITY
    drive.run()
    assert drive.admit(request(np.arange(50, 60), 16)).status is AdmissionStatus.ADMITTED
    drive.run()


@pytest.mark.parametrize("salt", ["\ud800", 7, b"x", "s" * 5000])
def test_a_malformed_salt_refuses_its_own_request_only(opened: Open, salt: object) -> None:
    _, drive = opened()
    drive.admit(request([1, 2, 3], 4))
    drive.step_all()
    with pytest.raises(AdmissionError, match="cache_salt"):
        drive.admit(request([5, 6, 7], 6, cache_salt=salt))
    assert drive.session.state is SessionState.OPEN
    drive.run()
    assert drive.finished[1].generated_ids == cold([1, 2, 3], 4)


def test_a_refusal_for_lack_of_pages_evicts_nothing_and_counts_nothing(opened: Open) -> None:
    runtime, drive = opened(num_pages=12)
    old = list(range(10, 26))
    drive.admit(request(old, 1))
    drive.run()
    drive.admit(request(list(range(100, 108)), 12))
    drive.step_all()
    index, counters = runtime.coordinator.manager.index, runtime.coordinator.counters
    chain = TokenChain(4, runtime.key_extras(request(old, 1)))
    chain.extend(old)
    before = (len(index.lookup_prefix(chain)), counters.admitted_sequences, recount(runtime.coordinator))
    refused = 0
    for length in range(1, 40):
        result = drive.session.admit(request(list(range(200, 200 + length)), 20), 1000 + length)
        if result.status is AdmissionStatus.NO_CAPACITY:
            refused += 1
            assert (
                len(index.lookup_prefix(chain)),
                counters.admitted_sequences,
                recount(runtime.coordinator),
            ) == before
        else:
            before = (len(index.lookup_prefix(chain)), counters.admitted_sequences, recount(runtime.coordinator))
    assert refused > 10


def test_an_interrupt_inside_admission_loses_the_session_and_no_page(opened: Open, monkeypatch) -> None:
    runtime, drive = opened()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(drive.session, "_seat", interrupt)
    with pytest.raises(KeyboardInterrupt):
        drive.admit(request([1, 2, 3], 4))
    assert drive.session.state is SessionState.LOST
    drive.session.close()
    require_baseline(runtime.coordinator)


def test_an_interrupt_while_closing_quarantines_what_may_still_run() -> None:
    armed = [False]

    def synchronize(_: object) -> bool:
        if armed[0]:
            armed[0] = False
            raise KeyboardInterrupt
        return True

    runtime = ToyRuntime(synchronizer=synchronize)
    drive = SessionDriver(runtime.open_session(SessionOptions(allow_compact_execution=True)))
    drive.admit(request([1, 2, 3], 40))
    drive.step_all()
    armed[0] = True
    with pytest.raises(KeyboardInterrupt):
        drive.session.close()
    gc.collect()
    assert runtime.coordinator.metrics().quarantined_requests == 1
    assert recount(runtime.coordinator).leased > 0
    assert runtime.coordinator.recover()
    require_baseline(runtime.coordinator)
    runtime.close()


def test_the_report_of_a_follower_says_full_when_it_got_everything(opened: Open) -> None:
    _, drive = opened()
    prompt = list(range(10, 27))
    drive.admit(request(prompt, 3))
    drive.admit(request(prompt, 3))
    drive.step(drive.context(1, 16))
    drive.run()
    reuse = drive.finished[2].reuse
    assert (reuse.reused_tokens, reuse.stop_reason, reuse.stop_position) == (16, ReuseStopReason.FULL, 16)
    assert drive.finished[2].generated_ids == cold(prompt, 3)


class RaisingTerminalize(BaseEndpointPolicy):
    def on_terminalize(self, request):
        raise SystemExit(3)


class Forgetful(BaseEndpointPolicy):
    """Does not apply the step's advances: publishes nothing, and would stop all progress."""

    def on_decode_completed(self, request, advances, publishable_completed_slots, common_state_lengths):
        return None


def plugins_with(policy: type[BaseEndpointPolicy]) -> Plugins:
    class Plugin:
        EDGELLM_API = ((1, 1), (1, 3))

        @hookimpl
        def edgellm_register_publication_policies(self, register):
            register(name="broken", factory=policy, serves=serves, priority=10)

    return load_plugins(autoload=False, extra=[("broken", Plugin())])


@pytest.mark.parametrize("policy", [RaisingTerminalize, Forgetful])
def test_a_policy_that_raises_or_forgets_harms_no_text_and_leaks_nothing(opened: Open, policy) -> None:
    runtime, drive = opened(plugins=plugins_with(policy))
    prompts = [list(range(start, start + 13)) for start in (10, 40, 70, 100)]
    for count, prompt in enumerate(prompts, start=3):
        drive.admit(request(prompt, 3 * count))
    drive.run()
    for number, prompt in enumerate(prompts, start=1):
        assert drive.finished[number].terminal_reason is FinishReason.LENGTH
        assert drive.finished[number].generated_ids == cold(prompt, 3 * (number + 2))
    assert runtime.coordinator.metrics().policy_failures >= 1


def test_a_done_callback_that_exits_does_not_end_the_engine() -> None:
    with RequestEngine(ToyRuntime()) as engine:

        def leave() -> None:
            raise SystemExit(1)

        handle = engine.submit(request([1, 2, 3], 4))
        handle.add_done_callback(leave)
        assert handle.get(10).token_ids == cold([1, 2, 3], 4)
        assert engine.submit(request([4, 5, 6], 4)).get(10).token_ids == cold([4, 5, 6], 4)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_engine_refuses_work_in_a_forked_child() -> None:
    with RequestEngine(ToyRuntime()) as engine:
        child = os.fork()
        if child == 0:
            try:
                engine.submit(request([1, 2, 3], 4))
            except ContractViolation:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert engine.submit(request([1, 2, 3], 4)).get(10).token_ids == cold([1, 2, 3], 4)


class HalfWay(BaseEndpointPolicy):
    """Advances the sequences one by one and raises in the middle."""

    def on_decode_completed(self, request, advances, publishable_completed_slots, common_state_lengths):
        lengths = request.impl.lengths.committed
        advances = OneTokenAdvances(advances.token_ids, lengths[: len(advances)].copy())
        for slot in range(len(advances) // 2 + 1):
            if advances.token_ids[slot] >= 0:
                apply_advance(request.impl, slot, advances[slot])
        raise ValueError("half-way")


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_a_policy_that_raises_half_way_leaves_no_sequence_behind(opened: Open, page_size: int) -> None:
    runtime, drive = opened(plugins=plugins_with(HalfWay), page_size=page_size, num_pages=128)
    prompts = [list(range(start, start + 9)) for start in (10, 40, 70)]
    for prompt in prompts:
        drive.admit(request(prompt, 12))
    drive.run()
    for number, prompt in enumerate(prompts, start=1):
        assert drive.finished[number].generated_ids == cold(prompt, 12)
    assert runtime.coordinator.metrics().policy_failures >= 1


def test_a_session_is_not_closed_from_inside_its_own_step(opened: Open) -> None:
    _, drive = opened()
    refused = []

    def close(_: list[int]) -> None:
        try:
            drive.session.close()
        except ContractViolation as error:
            refused.append(str(error))

    drive.admit(request([1, 2, 3], 3, token_callback=close))
    drive.run()
    assert len(refused) == 3
    assert drive.finished[1].generated_ids == cold([1, 2, 3], 3)


class FailingMirror:
    """A device copy of the page table whose next upload fails when told so."""

    def __init__(self) -> None:
        self.fail = False
        self.rows: dict[int, list[int]] = {}

    def upload_rows(self, rows, slots) -> None:
        if self.fail:
            self.fail = False
            raise RuntimeError("copy failed")
        self.rows.update({slot: rows[slot].tolist() for slot in slots})


def test_rows_that_could_not_be_sent_are_sent_the_next_time() -> None:
    table, mirror = KVPageTable(3, 4, 16), FailingMirror()
    binder = RowBinder(table, mirror)
    table.set_rows([(0, [1, 2]), (2, [5])])
    mirror.fail = True
    with pytest.raises(RuntimeError, match="copy failed"):
        binder.upload()
    table.set_rows([(1, [7])])
    binder.upload()
    assert mirror.rows == {slot: table.row(slot).tolist() for slot in range(3)}
    table.check_invariants()
    with pytest.raises(InvalidArgumentError, match="3"):
        table.mark_dirty([0, 3])
    assert table.take_dirty() == []


def test_a_row_that_cannot_follow_its_moved_pages_fails_the_step(opened: Open, monkeypatch) -> None:
    """A lease gave pages back for canonical ones: running on the old row would read what is somebody else's."""
    runtime, drive = opened()
    prompt = list(range(10, 27))
    drive.admit(request(prompt, 3))
    drive.admit(request(prompt, 3))

    def refuse(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(runtime.coordinator.rows, "bind", refuse)
    result = drive.step_all()
    assert not result.ok
    assert "could not be rewritten" in result.failure
    assert drive.session.state is SessionState.LOST


def test_an_empty_session_gets_its_policy_back(opened: Open) -> None:
    """One failure must not stop publication for the session's life."""
    failing = [True]

    class RaisesOnce(BaseEndpointPolicy):
        def on_sequence_finalized(self, request, slot):
            if failing.pop() if failing else False:
                raise ValueError("once")
            super().on_sequence_finalized(request, slot)

    _, drive = opened(plugins=plugins_with(RaisesOnce))
    prompt = list(range(10, 27))
    for number, reused in ((1, 0), (2, 0), (3, 16)):
        drive.admit(request(prompt, 3))
        drive.run()
        assert drive.finished[number].reuse.reused_tokens == reused
        assert drive.finished[number].generated_ids == cold(prompt, 3)


@pytest.mark.parametrize(
    ("field", "value"), [("priority", None), ("priority", "high"), ("priority", True), ("sampling", 5)]
)
def test_what_the_engine_reads_is_checked_before_anything_is_queued(field: str, value: object) -> None:
    with RequestEngine(ToyRuntime()) as engine:
        wrong = request([1, 2, 3], 4)
        setattr(wrong, field, value)
        with pytest.raises(InvalidArgumentError, match=field):
            engine.submit(wrong)
        assert engine.submit(request([1, 2, 3], 4)).get(10).token_ids == cold([1, 2, 3], 4)
