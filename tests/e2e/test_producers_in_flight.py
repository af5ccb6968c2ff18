"""Prompts that share blocks in flight: one sequence computes a block, the others wait a step and share it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from edgellm.cache.types import ContextCacheLookupPolicy, ReuseStopReason
from edgellm.engine.config import EngineConfig
from edgellm.engine.engine import RequestEngine
from edgellm.request import LLMGenerationRequest
from edgellm.sampling.params import SamplingParams
from edgellm.testing.recount import require_baseline
from edgellm.testing.toy import toy_generate
from edgellm.testing.toy_runtime import TOY_VOCAB_SIZE, ToyRuntime

PAGE = 4
NUM_TOKENS = 3
USE, BYPASS = ContextCacheLookupPolicy.USE_CACHE, ContextCacheLookupPolicy.BYPASS


@pytest.fixture
def runtime() -> Iterator[ToyRuntime]:
    made = ToyRuntime(page_size=PAGE, num_pages=256, max_kv_capacity=256, max_input_length=256, max_batch_size=8)
    yield made
    require_baseline(made.coordinator)


def request(prompt: list[int], **fields: object) -> LLMGenerationRequest:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    return LLMGenerationRequest(prompt_token_ids=prompt, sampling=sampling, **fields)  # type: ignore[arg-type]


def run_together(runtime: ToyRuntime, requests: list[LLMGenerationRequest]) -> list[tuple[list[int], int, object]]:
    """Everybody is queued before the first step; (tokens, reused tokens, stop reason) of each."""
    with RequestEngine(runtime, EngineConfig(idle_wait=5.0)) as engine:
        blocker = engine.submit(request([7] * 200))
        handles = [engine.submit(one) for one in requests]
        responses = [handle.get(30) for handle in handles]
        blocker.get(30)
    return [(r.token_ids, r.reuse.reused_tokens, r.reuse.stop_reason) for r in responses]


def prompt_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, TOY_VOCAB_SIZE), k=length)


@pytest.mark.parametrize("length", [PAGE + 1, 6 * PAGE - 1, 6 * PAGE, 6 * PAGE + 1, 101])
def test_copies_of_one_prompt_are_computed_once(runtime: ToyRuntime, length: int) -> None:
    prompt = prompt_of(1, length)
    before = runtime.executor.tokens_computed
    results = run_together(runtime, [request(prompt) for _ in range(5)])
    reusable = (length - 1) // PAGE * PAGE
    assert sorted(reused for _, reused, _ in results) == [0] + [reusable] * 4
    assert all(tokens == toy_generate(prompt, NUM_TOKENS, TOY_VOCAB_SIZE) for tokens, _, _ in results)
    assert [reason for _, reused, reason in results if reused] == [ReuseStopReason.FULL] * 4
    decoded = 6 * (NUM_TOKENS - 1)
    assert runtime.executor.tokens_computed - before == 200 + length + 4 * (length - reusable) + decoded


def test_branches_share_the_trunk_and_compute_their_own_tails(runtime: ToyRuntime) -> None:
    trunk = prompt_of(1, 5 * PAGE)
    prompts = [trunk + prompt_of(10 + branch, 7) for branch in range(4)]
    results = run_together(runtime, [request(prompt) for prompt in prompts])
    assert sorted(reused for _, reused, _ in results) == [0] + [5 * PAGE] * 3
    for prompt, (tokens, _, _) in zip(prompts, results, strict=True):
        assert tokens == toy_generate(prompt, NUM_TOKENS, TOY_VOCAB_SIZE)


def test_salts_and_bypass_do_not_wait_for_each_other(runtime: ToyRuntime) -> None:
    prompt = prompt_of(1, 33)
    fields = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}, {}]
    results = run_together(runtime, [request(prompt, **one) for one in fields])
    assert [reused for _, reused, _ in results] == [0, 0, 0, 32, 32]
    assert all(tokens == toy_generate(prompt, NUM_TOKENS, TOY_VOCAB_SIZE) for tokens, _, _ in results)
    bypassed = run_together(
        ToyRuntime(page_size=PAGE, num_pages=256, max_kv_capacity=256, max_input_length=256),
        [request(prompt, lookup_policy=BYPASS) for _ in range(2)],
    )
    assert [reused for _, reused, _ in bypassed] == [0, 0]


def test_a_cancelled_producer_is_replaced(runtime: ToyRuntime) -> None:
    """The follower takes over where the producer stopped; nobody waits for somebody who left."""
    prompt = prompt_of(1, 240)
    with RequestEngine(runtime, EngineConfig(step_token_budget=16)) as engine:
        blocker = engine.submit(request([7] * 8))
        producer, follower = (engine.submit(request(prompt)) for _ in range(2))
        producer.cancel()
        assert follower.get(30).token_ids == toy_generate(prompt, NUM_TOKENS, TOY_VOCAB_SIZE)
        blocker.get(30)
