"""Whole session runs over the integer toy model: the text never depends on cache, batch, chunking or timing."""

from __future__ import annotations

import random
from typing import Any

import pytest

from edgellm.cache.types import ContextCacheConfig, ContextCacheLookupPolicy
from edgellm.request import CancelToken, LLMGenerationRequest
from edgellm.sampling.params import SamplingParams
from edgellm.session.types import AdmissionStatus, FinishReason, SessionOptions
from edgellm.testing.recount import recount, require_baseline
from edgellm.testing.session_driver import SessionDriver
from edgellm.testing.toy import toy_generate
from edgellm.testing.toy_runtime import TOY_VOCAB_SIZE, ToyRuntime


def opened(runtime: ToyRuntime) -> SessionDriver:
    return SessionDriver(runtime.open_session(SessionOptions(allow_compact_execution=True)))


def request(prompt: list[int], max_tokens: int, **fields: Any) -> LLMGenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return LLMGenerationRequest(prompt_token_ids=prompt, sampling=sampling, **fields)


def twin(prompt: list[int], count: int) -> list[int]:
    return toy_generate(prompt, count, TOY_VOCAB_SIZE)


@pytest.mark.parametrize("chunk", [1, 7, 4, 13], ids=["1", "7", "P", "3P+1"])
@pytest.mark.parametrize("enabled", [True, False], ids=["cache", "no_cache"])
def test_sixteen_requests_arriving_at_random_equal_their_solo_runs(chunk: int, enabled: bool) -> None:
    """Half of them are cancelled at random; afterwards every page is back without further traffic."""
    choice = random.Random(chunk)
    runtime = ToyRuntime(num_pages=64, config=ContextCacheConfig(enabled=enabled))
    drive = opened(runtime)
    shared = [choice.randrange(2, 500) for _ in range(18)]
    waiting = []
    for _ in range(16):
        tail = [choice.randrange(2, 500) for _ in range(choice.randrange(1, 20))]
        waiting.append((shared[: choice.randrange(0, 19)] + tail, choice.randrange(1, 16)))
    expected: dict[int, tuple[list[int], int]] = {}
    tokens: dict[int, CancelToken] = {}
    doomed = set(choice.sample(range(1, 17), 8))
    while waiting or drive.live:
        if waiting and choice.random() < 0.4:
            number, token = drive._next_id, CancelToken()
            if drive.admit(request(*waiting[0]), cancel_token=token).status is AdmissionStatus.ADMITTED:
                expected[number], tokens[number] = waiting.pop(0), token
        for number in doomed.intersection(drive.live):
            if choice.random() < 0.2:
                tokens[number].cancel()
        if drive.live:
            assert drive.step_all(chunk).ok
            recount(runtime.coordinator)
    for number, (prompt, count) in expected.items():
        snapshot = drive.finished[number]
        assert snapshot.generated_ids == twin(prompt, len(snapshot.generated_ids))
        if snapshot.terminal_reason is not FinishReason.CANCELLED:
            assert len(snapshot.generated_ids) == count
            assert snapshot.terminal_reason is FinishReason.LENGTH
    assert recount(runtime.coordinator).leased == 0
    drive.session.close()
    require_baseline(runtime.coordinator)
    runtime.close()


def test_reuse_on_off_and_after_eviction_give_identical_tokens() -> None:
    prompt = list(range(100, 141))
    runtime = ToyRuntime(num_pages=24)
    drive = opened(runtime)
    answers, starts = [], []
    for fields in ({}, {}, {"lookup_policy": ContextCacheLookupPolicy.BYPASS}):
        number = drive._next_id
        starts.append(drive.admit(request(prompt, 10, **fields)).prefill_start)
        drive.run(chunk=9)
        answers.append(drive.finished[number].generated_ids)
    for start in (200, 260, 320):
        drive.admit(request(list(range(start, start + 60)), 10))
        drive.run(chunk=16)
    number = drive._next_id
    starts.append(drive.admit(request(prompt, 10)).prefill_start)
    drive.run()
    answers.append(drive.finished[number].generated_ids)
    assert starts == [0, 40, 0, 0]
    assert answers == [twin(prompt, 10)] * 4
    metrics = drive.session.context_cache_metrics()
    assert metrics is not None
    assert metrics.reclaimed_base_kv_pages > 0
    drive.session.close()
    require_baseline(runtime.coordinator)


def test_turns_of_a_chat_reuse_all_of_their_history() -> None:
    """Turn n starts where the committed state of turn n - 1 ends, within a page or not."""
    runtime = ToyRuntime(num_pages=64, max_kv_capacity=200)
    drive = opened(runtime)
    history = list(range(100, 130))
    committed = 0
    for turn in range(1, 6):
        result = drive.admit(request(history, 11))
        assert result.prefill_start == committed
        drive.run(chunk=8)
        response = drive.response(turn)
        assert response.token_ids == twin(history, 11)
        assert response.reuse is not None
        assert response.reuse.prompt_tokens == len(history)
        assert response.reuse.reused_tokens == result.prefill_start
        committed = len(history) + 10
        history = [*history, *response.token_ids, 300 + turn, 301 + turn]
    drive.session.close()
    require_baseline(runtime.coordinator)


def test_ten_thousand_cancelled_requests_leak_nothing() -> None:
    """Cancelled before, during and after the prompt, in one session."""
    runtime = ToyRuntime(num_pages=48)
    drive = opened(runtime)
    choice = random.Random(3)
    for _ in range(2500):
        tokens = [CancelToken() for _ in range(4)]
        for token in tokens:
            length = choice.randrange(1, 20)
            prompt = [choice.randrange(2, 40) for _ in range(length)]
            assert drive.admit(request(prompt, 8), cancel_token=token).status is AdmissionStatus.ADMITTED
        for steps_before in range(choice.randrange(0, 3)):
            drive.step_all(chunk=6 + steps_before)
        for token in tokens:
            token.cancel()
        drive.step_all()
        assert not drive.live
        drive.finished.clear()
        drive.results.clear()
    assert recount(runtime.coordinator).leased == 0
    drive.session.close()
    require_baseline(runtime.coordinator)
