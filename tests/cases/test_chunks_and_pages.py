"""Cases 05 to 08: chunks that outlive their owner, policies that publish nothing, duplicates, and double frees.

Each test names the public thread it comes from.  Every run is on the toy model: text and state are compared with a
twin that ran alone, whatever nobody holds is poison, and all pools are recounted after every call.
"""

from __future__ import annotations

import random

import pytest

from edgellm._core.block_hash import TokenChain
from edgellm.cache.policy import LedgerOnlyPolicy
from edgellm.cache.types import (
    BlockKeyExtras,
    ContextCacheCommitPolicy,
    ContextCacheLookupPolicy,
    ResourceType,
    ReuseStopReason,
)
from edgellm.plugins import PolicyRegistration
from edgellm.testing.toy_driver import DECODE

B = 4  # tokens of a block
ALL = ["attention", "eagle", "dflash", "shared-kv", "hybrid", "recurrent", "mtp"]
ATTENTION = ["attention", "eagle", "dflash", "shared-kv"]
BYPASS = ContextCacheLookupPolicy.BYPASS


def known_tokens(driver, prompt):
    """What a plain lookup of `prompt` would match."""
    chain = TokenChain(driver.deployment.page_size, BlockKeyExtras())
    chain.extend(prompt)
    plan = driver.coordinator.manager.plan(chain, ContextCacheLookupPolicy.USE_CACHE, speculative=driver.speculative)
    return plan.known_token_length


def occupy(driver, num_pages, seed=99):
    """An unrelated sequence that takes that many base pages, looks nothing up and publishes nothing."""
    length = num_pages * B - driver.headroom.base_extra_tokens
    return driver.admit(random.Random(seed).choices(range(50, 999), k=length), lookup=BYPASS)


@pytest.mark.parametrize("recycled", [False, True])
@pytest.mark.parametrize("flavour", ALL)
def test_case_05_chunks_of_a_cancelled_prompt_are_whole_or_gone(open_toy, tokens, flavour, recycled):
    """sgl-project/sglang #38319: two chunks are published, their owner is cancelled, another prompt recycles pages.

    Expect: the first prompt again reuses whole chunks that the index owns, or nothing; never a page that is free too.
    """
    driver = open_toy(flavour, num_pages=14, max_kv_capacity=64, recurrent_slots=3, partial_slots=3)
    prompt = tokens(5, 8 * B)
    first = driver.admit(prompt, checkpoint_boundaries=[2 * B, 4 * B])
    driver.prefill_chunk(first, 2 * B)
    driver.prefill_chunk(first, 2 * B)
    assert first.committed == 4 * B
    driver.cancel(first)
    if recycled:
        other = driver.admit(tokens(6, 10 * B))
        driver.prefill(other, 2 * B)
        driver.cancel(other)
    again = driver.admit(prompt)
    assert again.reuse.reused_tokens in ((0, B, 2 * B, 3 * B, 4 * B) if recycled else (4 * B,))
    driver.prefill(again, 2 * B)
    driver.step(finish=[again])


class NothingPolicy(LedgerOnlyPolicy):
    """A custom policy that publishes nothing at all."""


def custom(build):
    return [PolicyRegistration("custom", build, lambda profile, speculative: True, 100, "tests", "tests 0")]


SETTINGS = {
    "none": {"lookup": BYPASS},
    "prefill only": {"commit": ContextCacheCommitPolicy.PREFILL_STATE_ONLY},
    "with output": {"commit": ContextCacheCommitPolicy.INCLUDING_GENERATED_TOKENS},
    "custom": {},
}


@pytest.mark.parametrize("flavour", ALL)
def test_case_06_not_publishing_does_not_stop_progress(open_toy, tokens, flavour):
    """sgl-project/sglang #36855: a prompt of five chunks in a pool of exactly enough pages, under every policy.

    Expect: 5 prefill steps, no page more than the tokens need, the same text, everything back, nothing indexed under
    *none* and *custom*.
    """
    prompt, texts = tokens(7, 5 * 2 * B), set()
    per_step = 4 if flavour in ("eagle", "dflash", "shared-kv", "mtp") else 1  # tokens that one step may add
    num_pages = -(-(len(prompt) + 3 * per_step) // B)
    for name, admission in SETTINGS.items():
        options = {"policies": custom(NothingPolicy)} if name == "custom" else {}
        driver = open_toy(flavour, num_pages=num_pages, max_kv_capacity=num_pages * B, draft_tokens=3, **options)
        sequence = driver.admit(prompt, **admission)
        steps, peak = 0, 0
        while not sequence.finalized:
            driver.prefill_chunk(sequence, 2 * B)
            steps += 1
            peak = max(peak, driver.recount().leased)
        for _ in range(3):
            assert driver.step() is not None
            peak = max(peak, driver.recount().leased)
        texts.add(tuple(driver.text(sequence)[:4]))
        driver.finish(sequence)
        placed = [length for length in sequence.boundaries if length % (2 * B)]
        assert steps == 5 + len(placed)
        longest = len(sequence.tokens) + driver.headroom.base_extra_tokens
        if driver.profile.has_attention:
            assert peak <= -(-longest // B)
        counted = driver.recount()
        assert all(pool.leased == 0 for pool in counted.pools)
        if name in ("none", "custom"):
            assert len(driver.coordinator.manager.index) == 0
            assert all(pool.free == pool.total for pool in counted.pools)
        else:
            assert known_tokens(driver, prompt) > 0
    assert len(texts) == 1


@pytest.mark.parametrize("first_out", [0, 1])
@pytest.mark.parametrize("flavour", ATTENTION)
def test_case_07_a_block_that_two_requests_computed_has_one_entry(open_toy, tokens, flavour, first_out):
    """ovg-project/kvcached #401, onnxruntime-genai PR #2573: cold runs of one prompt overlap and end in either order.

    Expect: one canonical entry per key, and while blocks are evicted one by one the rest stays reachable: a lookup
    never loses more than the block that went.
    """
    driver = open_toy(flavour, num_pages=24, max_kv_capacity=96, look_again=False)
    prompt = tokens(8, 4 * B)
    pair = [driver.admit(prompt), driver.admit(prompt)]
    assert [sequence.reuse.reused_tokens for sequence in pair] == [0, 0]
    for _ in range(4):
        driver.mixed_step([(sequence, B) for sequence in pair])
    driver.step()
    driver.step(finish=[pair[first_out]])
    manager = driver.coordinator.manager
    driver.step(finish=[pair[1 - first_out]])
    longest = max(pair, key=lambda sequence: sequence.committed)
    counted = driver.recount()
    assert counted.leased == 0
    assert counted.retained == len(manager.index) <= -(-longest.committed // B) + 1
    known = known_tokens(driver, longest.tokens)
    assert known >= 4 * B
    losses = []
    while known:
        taken = occupy(driver, driver.recount().free + 1)
        now = known_tokens(driver, longest.tokens)
        losses.append(known - now)
        known = now
        driver.cancel(taken)
    assert max(losses) <= B
    assert driver.recount().retained == 0


@pytest.mark.parametrize("flavour", ATTENTION)
def test_case_07_the_twin_of_an_evicted_duplicate_stays(open_toy, tokens, flavour):
    """The variant: the first producer leaves and its blocks are wanted by others while the second still decodes.

    Expect: what the second stands on is never evicted, and its own children stay reachable.
    """
    driver = open_toy(flavour, num_pages=14, max_kv_capacity=52, look_again=False)
    prompt = tokens(9, 3 * B)
    first, second = driver.admit(prompt), driver.admit(prompt)
    for _ in range(3):
        driver.mixed_step([(first, B), (second, B)])
    driver.step(finish=[first])
    for seed in range(4):
        taken = occupy(driver, driver.coordinator.manager.available_pages, seed)
        driver.cancel(taken)
        driver.step()
        assert known_tokens(driver, second.tokens) >= 3 * B
    driver.finish(second)
    again = driver.admit(second.tokens)
    assert again.reuse.reused_tokens >= len(second.tokens) - 1 - driver.draft_tokens - 2
    driver.prefill(again)


OPERATIONS = {"attention": 10_000, "eagle": 600, "dflash": 300, "shared-kv": 300, "hybrid": 600, "mtp": 600}


@pytest.mark.parametrize("flavour", OPERATIONS)
def test_case_08_no_page_is_free_twice(open_toy, tokens, flavour):
    """NVIDIA/TensorRT-LLM #12560: random lease, release, publish, evict, pin and cancel on 16 pages.

    Expect: the recount holds after every call (the driver does it), and draining the pool yields 16 distinct pages.
    """
    driver = open_toy(flavour, num_pages=16, max_batch=3, max_kv_capacity=64, recurrent_slots=4, partial_slots=3)
    rng = random.Random(12560)
    shared = tokens(10, 24)
    for _ in range(OPERATIONS[flavour]):
        random_operation(driver, rng, shared)
    if driver.live:
        driver.cancel(*driver.live.values())
    taken = occupy(driver, 16)
    pages = driver.request.impl.leases[0].base_pages.tolist()
    assert sorted(pages) == list(range(16))
    assert driver.recount().leased == 16
    driver.cancel(taken)
    assert driver.coordinator.manager.pools.pool(ResourceType.BASE_KV_PAGE).free_count == 16


def random_operation(driver, rng, shared):
    """Admit, step, finish or cancel."""
    chance = rng.random()
    if chance < 0.3 and len(driver.live) < driver.deployment.max_batch_size:
        prompt = shared[: rng.randrange(1, len(shared))] + rng.choices(range(3), k=rng.randrange(5))
        driver.admit(prompt, lookup=BYPASS if rng.random() < 0.1 else None)
        return
    if chance < 0.36 and driver.live:
        driver.cancel(rng.choice(list(driver.live.values())))
        return
    work = [(s, DECODE if s.finalized else rng.randrange(1, 9)) for s in driver.live.values() if rng.random() < 0.8]
    rng.shuffle(work)
    ending = [sequence for sequence, count in work if count == DECODE and rng.random() < 0.2]
    if driver.mixed_step(work, finish=ending) is None:
        driver.cancel(driver.refused)


def test_case_05_the_report_says_that_chunks_were_evicted(open_toy, tokens):
    """The reason beside a lost chunk: evicted, at the position where the chain ends."""
    driver = open_toy("attention", num_pages=10, max_kv_capacity=36)
    prompt = tokens(11, 4 * B)
    first = driver.admit(prompt)
    driver.prefill_chunk(first, 2 * B)
    driver.cancel(first)
    driver.cancel(occupy(driver, 9))
    again = driver.admit(prompt)
    assert (again.reuse.reused_tokens, again.reuse.stop_reason) == (B, ReuseStopReason.EVICTED)
    assert again.reuse.stop_position == B
