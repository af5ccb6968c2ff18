"""Faults that users of other runtimes reported, as small exact tests on the integer toy model.

Each test names the public thread (repository and number) it comes from.  The toy model's text depends on every byte of
paged state, and free pages are poisoned, so a stale page cannot stay unnoticed.
"""

from __future__ import annotations

import random

import pytest

from edgellm._core.block_hash import TokenChain, hash_opaque_identity
from edgellm._core.cache_manager import ContextCacheManager
from edgellm.cache.types import AdapterKey, BlockKeyExtras, ContextCacheLookupPolicy, ResourceDemand, ReuseStopReason
from edgellm.errors import InvariantError
from edgellm.request import CancelToken, LLMGenerationRequest
from edgellm.sampling.params import SamplingParams
from edgellm.session.types import AdmissionStatus, FinishReason, SessionOptions
from edgellm.testing.recount import recount, require_baseline
from edgellm.testing.session_driver import SessionDriver
from edgellm.testing.toy import toy_generate
from edgellm.testing.toy_runtime import TOY_VOCAB_SIZE, ToyRuntime

PAGE = 4


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, TOY_VOCAB_SIZE), k=count)


def request(prompt: list[int], max_tokens: int = 1, **kwargs) -> LLMGenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return LLMGenerationRequest(prompt_token_ids=prompt, sampling=sampling, **kwargs)


@pytest.fixture
def open_driver():
    """Opens drivers over fresh toy runtimes; every one must be at baseline when the test ends."""
    opened = []

    def open_one(**geometry) -> SessionDriver:
        runtime = ToyRuntime(page_size=PAGE, **geometry)
        session = runtime.open_session(SessionOptions(allow_compact_execution=True))
        opened.append((runtime, session))
        driver = SessionDriver(session)
        driver.runtime = runtime
        return driver

    yield open_one
    for runtime, session in opened:
        session.close()
        require_baseline(runtime.coordinator)


def run_alone(driver: SessionDriver, prompt: list[int], max_tokens: int = 1, **kwargs):
    """Run one request to its end; (generated tokens, reuse report)."""
    driver.admit(request(prompt, max_tokens, **kwargs))
    number = next(reversed(driver.live))
    driver.run()
    snapshot = driver.finished[number]
    return snapshot.generated_ids, snapshot.reuse


def cold(prompt: list[int], max_tokens: int = 1) -> list[int]:
    return toy_generate(prompt, max_tokens, TOY_VOCAB_SIZE)


def test_case_01_a_recycled_page_is_not_findable_any_more(open_driver):
    """GeeeekExplorer/nano-vllm #163."""
    driver = open_driver(num_pages=5, max_kv_capacity=20)
    first, other = tokens(1, 8), tokens(2, 16)
    assert run_alone(driver, first)[0] == cold(first)
    driver.admit(request(other, 1))
    driver.step_all()
    index = driver.runtime.coordinator.manager.index
    chain = TokenChain(PAGE, driver.runtime.key_extras(request(first)))
    chain.extend(first)
    assert driver.runtime.coordinator.manager.plan(chain, ContextCacheLookupPolicy.USE_CACHE).matched_token_length == 0
    driver.run()
    index.check_invariants()
    generated, reuse = run_alone(driver, first)
    assert generated == cold(first)
    assert reuse.reused_tokens == 0
    assert reuse.stop_reason is ReuseStopReason.EVICTED


@pytest.mark.parametrize("length", [PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1, 4 * PAGE])
def test_case_02_a_prompt_that_is_fully_cached_still_computes_a_token(open_driver, length):
    """GeeeekExplorer/nano-vllm #144."""
    driver = open_driver(num_pages=32)
    prompt = tokens(length, length)
    first, _ = run_alone(driver, prompt)
    before = driver.runtime.executor.tokens_computed
    second, reuse = run_alone(driver, prompt)
    computed = driver.runtime.executor.tokens_computed - before
    assert first == second == cold(prompt)
    assert computed == length - reuse.reused_tokens >= 1
    assert reuse.reused_tokens == length - 1


def test_case_03_the_tokens_to_run_are_counted_after_the_hit_is_known(open_driver):
    """GeeeekExplorer/nano-vllm PR #211, PR #233: a request leaves after three tokens and comes back to its own blocks.

    Here nobody is preempted in mid-answer: a request is admitted only when the pool covers its growth.  So the
    first request is made to leave, and comes back with what it had generated.
    """
    driver = open_driver(num_pages=9, max_kv_capacity=32)
    one, two = tokens(1, 15), tokens(2, 14)
    leave = CancelToken()
    driver.admit(request(one, 10), cancel_token=leave)
    assert driver.admit(request(two, 10)).status is AdmissionStatus.NO_CAPACITY
    while len(driver.deltas[1]) < 3:
        driver.step_all()
    so_far = list(driver.deltas[1])
    leave.cancel()
    driver.step_all()
    assert driver.finished[1].terminal_reason is FinishReason.CANCELLED
    resumed = one + so_far
    before = driver.runtime.executor.tokens_computed
    admitted = driver.admit(request(resumed, 7))
    assert admitted.prefill_start == 16
    driver.step_all()
    assert driver.runtime.executor.tokens_computed - before == len(resumed) - 16
    driver.run()
    assert so_far + driver.finished[2].generated_ids == cold(one, 10)
    assert run_alone(driver, two, 10)[0] == cold(two, 10)


def test_case_04_a_hash_is_not_visible_before_its_page_is_written(open_driver):
    """vllm-project/vllm #41838: two requests of one admission round share a prefix."""
    driver = open_driver(num_pages=32)
    prefix = tokens(7, 3 * PAGE)
    one, two = prefix + tokens(8, 5), prefix + tokens(9, 6)
    assert driver.admit(request(one, 4)).prefill_start == 0
    assert driver.admit(request(two, 4)).prefill_start == 0
    pages_of_one = set(driver.session._request.impl.leases[0].base_pages.tolist())
    pages_of_two = set(driver.session._request.impl.leases[1].base_pages.tolist())
    assert not pages_of_one & pages_of_two
    result = driver.step(driver.context(1, PAGE))
    assert result.published_prefix
    driver.run(chunk=PAGE)
    assert driver.finished[1].generated_ids == cold(one, 4)
    assert driver.finished[2].generated_ids == cold(two, 4)


def test_case_09_leaves_are_evicted_before_their_ancestors():
    """llm-d/llm-d-inference-sim #704."""
    manager = ContextCacheManager(PAGE, ResourceDemand(base_kv_pages=3))
    chain = _chain(tokens(1, 3 * PAGE))
    _publish_and_release(manager, chain)
    other = _chain(tokens(2, PAGE))
    lease = manager.acquire_vanilla(other, min_tokens=PAGE).lease
    lease.release()
    longer = _chain([*tokens(1, 3 * PAGE), 5])
    assert manager.plan(longer, ContextCacheLookupPolicy.USE_CACHE).reuse_token_length == 2 * PAGE
    manager.check_invariants()


def test_case_09_a_block_with_live_children_is_never_chosen():
    """llm-d/llm-d-inference-sim #704, the branch: 1 -> 2 and 1 -> 2'."""
    manager = ContextCacheManager(PAGE, ResourceDemand(base_kv_pages=3))
    root = tokens(1, PAGE)
    for branch in (2, 3):
        _publish_and_release(manager, _chain(root + tokens(branch, PAGE)))
    reusable = []
    for wanted in (1, 2, 3):
        other = _chain(tokens(40 + wanted, wanted * PAGE))
        manager.acquire_vanilla(other, min_tokens=wanted * PAGE).lease.release()
        manager.check_invariants()
        reusable.append(
            [
                manager.plan(
                    _chain(root + tokens(branch, PAGE) + [5]), ContextCacheLookupPolicy.USE_CACHE
                ).reuse_token_length
                for branch in (2, 3)
            ]
        )
    assert reusable == [[PAGE, 2 * PAGE], [PAGE, PAGE], [0, 0]]


def _chain(token_ids: list[int], extras: BlockKeyExtras | None = None) -> TokenChain:
    chain = TokenChain(PAGE, extras or BlockKeyExtras())
    chain.extend(token_ids)
    return chain


def _publish_and_release(manager: ContextCacheManager, chain: TokenChain) -> None:
    lease = manager.acquire_vanilla(chain, min_tokens=chain.num_tokens).lease
    manager.publish(lease, chain, chain.num_tokens, make_record=True)
    lease.release()


def _salted(salt: str) -> BlockKeyExtras:
    return BlockKeyExtras(isolation_digest=hash_opaque_identity(salt.encode()))


KEY_PAIRS = {
    "adapter against salt": (
        BlockKeyExtras(adapter=AdapterKey(7, 0)),
        BlockKeyExtras(isolation_digest=hash_opaque_identity(b"7")),
    ),
    "adapter absent against zero": (BlockKeyExtras(), BlockKeyExtras(adapter=AdapterKey(0, 0))),
    "adapter generation": (BlockKeyExtras(adapter=AdapterKey(7, 0)), BlockKeyExtras(adapter=AdapterKey(7, 1))),
    "empty salt against no salt": (BlockKeyExtras(), _salted("")),
    "two salts": (_salted("ab"), _salted("a")),
}


@pytest.mark.parametrize("pair", KEY_PAIRS.values(), ids=KEY_PAIRS.keys())
def test_case_10_fields_of_the_key_do_not_run_together(pair):
    """vllm-project/vllm #44701; tinfoilsh/confidential-model-router PR #386."""
    manager = ContextCacheManager(PAGE, ResourceDemand(base_kv_pages=16))
    prompt = tokens(3, 2 * PAGE + 1)
    mine, other = (_chain(prompt, extras) for extras in pair)
    assert mine.hash_at(0) != other.hash_at(0)
    _publish_and_release(manager, mine)
    assert manager.plan(_chain(prompt, pair[0]), ContextCacheLookupPolicy.USE_CACHE).reuse_token_length == 2 * PAGE
    assert manager.plan(other, ContextCacheLookupPolicy.USE_CACHE).matched_token_length == 0


@pytest.mark.parametrize(
    ("mine", "theirs"), [(None, ""), (None, "X"), ("ab", "a"), ("a", "b"), ("ab\x00c", "ab"), ("", "\x00")]
)
def test_case_10_tenants_hit_their_own_blocks_and_nobody_elses(open_driver, mine, theirs):
    """The same through requests: the salt is what the caller gives."""
    driver = open_driver(num_pages=32)
    prompt = tokens(3, 2 * PAGE + 1)
    assert run_alone(driver, prompt, cache_salt=mine)[1].reused_tokens == 0
    assert run_alone(driver, prompt, cache_salt=theirs)[1].reused_tokens == 0
    generated, reuse = run_alone(driver, prompt, cache_salt=mine)
    assert reuse.reused_tokens == 2 * PAGE
    assert generated == cold(prompt)


def test_recount_notices_a_leak():
    """The checks above can fail: a lease that is not given back is reported."""
    runtime = ToyRuntime(page_size=PAGE, num_pages=8, max_kv_capacity=16)
    session = runtime.open_session(SessionOptions(allow_compact_execution=True))
    SessionDriver(session).admit(request(tokens(1, 5)))
    assert recount(runtime.coordinator).leased == 2
    with pytest.raises(InvariantError):
        require_baseline(runtime.coordinator)
    session.close()
    require_baseline(runtime.coordinator)
