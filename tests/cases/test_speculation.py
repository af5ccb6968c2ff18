"""Cases 16 to 20: acceptance that follows the request, whole rollbacks, draft pages that come back, and the junction.

Acceptance is scripted per request, or follows from the draft state itself, so that a wrong entry changes it.
"""

from __future__ import annotations

import pytest

from edgellm.cache.types import ContextCacheConfig, ContextCacheLookupPolicy, ReuseStopReason
from edgellm.testing.toy_drafter import ScriptedDrafter, StateDrafter
from edgellm.testing.toy_driver import DECODE
from edgellm.testing.toy_model import SoloRun
from edgellm.testing.toy_sequence import solo_fingerprint

SPECULATIVE = ["eagle", "dflash", "shared-kv", "hybrid-lookup", "mtp"]
BYPASS = ContextCacheLookupPolicy.BYPASS


def config(interval=None):
    return ContextCacheConfig(checkpoint_interval_tokens=interval, policy_deadline_seconds=None)


def require_plain_state(driver, sequence):
    """State, text and positions are those of plain decoding at the same token."""
    twin = SoloRun(driver.model, sequence.prompt)
    twin.extend(twin.continuation(len(sequence.generated)))
    assert sequence.tokens == twin.tokens
    assert driver.fingerprint(sequence) == solo_fingerprint(twin, sequence.committed)
    if driver.paired:
        assert sequence.drafted <= sequence.committed


@pytest.mark.parametrize("leaving", range(4))
@pytest.mark.parametrize("flavour", SPECULATIVE)
def test_case_16_accepted_counts_follow_the_request(open_toy, tokens, flavour, leaving):
    """vllm-project/vllm #51571: four requests accept 1, 3, 2, 0; one leaves and another takes its row in the gap.

    Expect: every text and state is that of plain decoding; counts are those scripted for the request, never a
    neighbour's; nobody loses the draft width.
    """
    script = {1: (1,), 2: (3,), 3: (2,), 4: (0,), 5: (2, 0, 3)}
    driver = open_toy(flavour, num_pages=96, drafter=ScriptedDrafter(script), recurrent_slots=12, partial_slots=12)
    sequences = [driver.admit(tokens(50 + n, 7 + n)) for n in range(4)]
    for sequence in sequences:
        driver.prefill(sequence, 4)
    driver.step()
    gone = sequences.pop(leaving)
    slot = gone.slot
    driver.step(finish=[gone])
    newcomer = driver.admit(tokens(60, 6), request_id=5)
    while newcomer.slot != slot:  # free rows are handed out in turn; take the one that was left
        driver.cancel(newcomer)
        newcomer = driver.admit(tokens(60, 6), request_id=5)
    driver.mixed_step([(newcomer, 6), *((sequence, DECODE) for sequence in sequences)])
    for _ in range(3):
        driver.step()
    for sequence in (*sequences, newcomer):
        require_plain_state(driver, sequence)
        accepts = script[sequence.request_id]
        expected = [1 + accepts[min(n, len(accepts) - 1)] for n in range(len(sequence.rounds))]
        assert sequence.rounds == expected
        assert len(sequence.generated) == 1 + sum(expected)
    driver.finish(*driver.live.values())


@pytest.mark.parametrize("restored", [False, True])
@pytest.mark.parametrize("accepted", range(4))
@pytest.mark.parametrize("flavour", SPECULATIVE)
def test_case_17_a_rollback_restores_all_of_the_state(open_toy, tokens, flavour, accepted, restored):
    """ggml-org/llama.cpp PR #28123: K = 3, rejection at each position, twice in a row, also right after a restore.

    Expect: conv window, recurrent state, pages, draft entries and the position of the next token are those of a plain
    run at that token.
    """
    drafter = ScriptedDrafter(default=accepted)
    driver = open_toy(flavour, num_pages=96, drafter=drafter, draft_tokens=3, config=config(4))
    prompt = tokens(70, 13)
    if restored:
        earlier = driver.admit(prompt)
        driver.prefill(earlier)
        driver.step(finish=[earlier])
    sequence = driver.admit([*prompt, 3, 4, 5])
    assert (sequence.reuse.reused_tokens > 0) == restored
    driver.prefill(sequence)
    for number in range(1, 4):
        driver.step()
        assert sequence.rounds == [accepted + 1] * number
        assert sequence.committed == len(sequence.prompt) + (accepted + 1) * number
        assert len(sequence.tokens) == sequence.committed + 1
        if driver.paired:
            assert sequence.drafted == sequence.committed - (accepted + 1)
        require_plain_state(driver, sequence)
    driver.finish(sequence)


@pytest.mark.parametrize("flavour", SPECULATIVE)
def test_case_17_rejections_at_every_position_in_turn(open_toy, tokens, flavour):
    """The same in one run: 0, 0, 1, 1, 2, 2, 3, 3, and back."""
    drafter = ScriptedDrafter({1: (0, 0, 1, 1, 2, 2, 3, 3, 2, 1, 0, 3)})
    driver = open_toy(flavour, num_pages=96, drafter=drafter, draft_tokens=3)
    sequence = driver.admit(tokens(71, 5))
    driver.prefill(sequence, 2)
    for _ in range(12):
        driver.step()
        require_plain_state(driver, sequence)
    assert sequence.rounds == [1, 1, 2, 2, 3, 3, 4, 4, 3, 2, 1, 4]


@pytest.mark.parametrize("lookup", [BYPASS, None])
@pytest.mark.parametrize("flavour", SPECULATIVE)
def test_case_18_pages_reserved_for_drafts_come_back(open_toy, tokens, flavour, lookup):
    """sgl-project/sglang-jax #1147: 100 requests of 37 output tokens in turn, ended in four ways; publication off.

    Expect: the pools are back at the same numbers after each, and no more pages are held than
    ceil((L + out + K + 1) / B) + 1.
    """
    block, length, output, k = 4, 11, 37, 3
    driver = open_toy(flavour, page_size=block, num_pages=32, draft_tokens=k, recurrent_slots=3, partial_slots=3)
    most = -(-(length + output + k + 1) // block) + 1
    before = driver.recount()
    for number in range(100):
        sequence = driver.admit(tokens(80 + number, length), lookup=lookup)
        driver.prefill(sequence, 5)
        ending = number % 4
        while len(sequence.generated) < output:
            driver.step()
            lease = driver.request.impl.leases[0]
            assert max(lease.num_base_pages, lease.num_draft_pages) <= most + (k + 1) // block
            if ending >= 2 and len(sequence.generated) > 9 + number % 11:
                break
        end = [driver.finish, driver.finish, driver.cancel, driver.abort][ending]  # length, stop string, cancel, error
        end(sequence)
        counted = driver.recount()
        assert all(pool.leased == 0 for pool in counted.pools)
        if lookup is BYPASS:
            assert counted == before


@pytest.mark.parametrize("spacing", [4, 8, 12])
@pytest.mark.parametrize("count", range(1, 5))
def test_case_19_looking_ahead_costs_no_checkpoint(open_toy, tokens, spacing, count):
    """vllm-project/vllm #53670, #54360: prompts of nS + 1 tokens, each sent twice, with MTP and without.

    Expect: with MTP at most one attention block less is reused, and not nothing for n = 1.
    """
    reused = {}
    for flavour in ("hybrid", "mtp"):
        driver = open_toy(flavour, num_pages=64, config=config(spacing))
        prompt = tokens(90 + count, count * spacing + 1)
        for _ in range(2):
            sequence = driver.admit(prompt)
            driver.prefill(sequence)
            driver.step(finish=[sequence])
        reused[flavour] = sequence.reuse.reused_tokens
    assert reused["hybrid"] == count * spacing
    assert reused["mtp"] >= reused["hybrid"] - driver.deployment.page_size
    assert reused["mtp"] == count * spacing  # the junction is rebuilt from the saved hidden row, so nothing is lost


@pytest.mark.parametrize("count", range(1, 5))
def test_case_19_the_replayed_length_is_reported(open_toy, tokens, count):
    """The same without recurrent layers: another next token costs an EAGLE request one token, and it is said."""
    driver = open_toy("eagle", num_pages=64)
    shared = tokens(95, 4 * count)
    for last in (1, 2):
        sequence = driver.admit([*shared, last, 9, 9])
        driver.prefill(sequence)
        driver.step(finish=[sequence])
    assert sequence.reuse.reused_tokens == 4 * count - 1
    assert sequence.reuse.matched_tokens == 4 * count
    assert sequence.reuse.stop_reason is ReuseStopReason.LOOKAHEAD_REPLAY
    metrics = driver.coordinator.metrics()
    assert (metrics.spec_replays, metrics.spec_replayed_tokens) == (1, 1)


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("block", [1, 2, 16])
@pytest.mark.parametrize("flavour", ["eagle", "mtp"])
def test_case_20_the_junction_entry_is_computed_with_its_own_next_token(open_toy, tokens, flavour, block, chunk):
    """sgl-project/sglang PR #10846: prefix + a is published, prefix + b asks; B = 1, 2, 16, whole and in chunks.

    Expect: the draft entry at the last shared position, the first proposals and the acceptance over 200 tokens are
    those of the cold twin.
    """
    options = {"page_size": block, "max_kv_capacity": 320, "num_pages": 3 * (320 // block + 1), "check": False}
    options |= {"drafter": StateDrafter(), "config": config()}
    shared, a, b = tokens(97, 33), tokens(98, 6), tokens(99, 6)
    driver, cold = open_toy(flavour, **options), open_toy(flavour, **options)
    first = driver.admit(shared + a, checkpoint_boundaries=[33])
    driver.prefill(first, chunk)
    driver.step()
    driver.step(finish=[first])
    warm, twin = driver.admit(shared + b), cold.admit(shared + b, lookup=BYPASS)
    assert warm.reuse.reused_tokens >= 32
    for runner, sequence in ((driver, warm), (cold, twin)):
        runner.prefill(sequence, chunk)
        while len(sequence.generated) < 200:
            runner.step()
        runner.recount()
    entries = [r.machine.draft_state(s.slot, 38)[:38].tolist() for r, s in ((driver, warm), (cold, twin))]
    assert entries[0] == entries[1]
    assert warm.proposals[0] == twin.proposals[0]
    assert warm.proposals == twin.proposals
    assert warm.rounds == twin.rounds
    assert min(warm.rounds) < max(warm.rounds)  # some proposals were right and some wrong, by the draft state
