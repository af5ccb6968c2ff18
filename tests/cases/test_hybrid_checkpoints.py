"""Cases 11 to 14: where recurrent checkpoints are, which one is restored, and that only written ones are published.

The driver compares every capture and every restored state with a run of the same tokens alone: recurrent value, conv
window of four, pages, and with MTP the draft entries and the boundary hidden row.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from plugin_policies import all_policies

from edgellm._core.block_hash import TokenChain
from edgellm._core.cache_manager import ContextCacheManager
from edgellm.cache.types import (
    BaseStateKind,
    BlockKeyExtras,
    ContextCacheConfig,
    ResourceDemand,
    ReuseStopReason,
)
from edgellm.errors import InvalidArgumentError
from edgellm.testing.toy_driver import DECODE
from edgellm.testing.toy_model import SoloRun
from edgellm.testing.toy_sequence import checkpoint_fingerprint
from edgellm_hybrid.placement import place_checkpoints
from edgellm_hybrid.policy import HybridMtpPolicy, HybridSnapshotPolicy

B = 4
CHECKPOINTED = ["hybrid", "hybrid-lookup", "recurrent", "mtp"]


def config(interval, **more):
    return ContextCacheConfig(checkpoint_interval_tokens=interval, policy_deadline_seconds=None, **more)


@pytest.mark.parametrize("flavour", CHECKPOINTED)
def test_case_11_a_shared_prefix_is_found_at_the_latest_by_the_third_request(open_toy, tokens, flavour):
    """vllm-project/vllm #45238: three prompts share 3B tokens and differ in the 2B behind them; interval B.

    Expect: the second says "no checkpoint" and names the boundary where the prompts part, and takes one there itself;
    the third reuses 3B.
    """
    driver = open_toy(flavour, num_pages=64, config=config(B))
    shared = tokens(1, 3 * B)
    reports = [run_to_the_end(driver, shared + tokens(2 + n, 2 * B)).reuse for n in range(3)]
    assert reports[0].reused_tokens == 0
    if reports[1].reused_tokens != 3 * B:
        assert (reports[1].stop_reason, reports[1].stop_position) == (ReuseStopReason.NO_CHECKPOINT, 3 * B)
    assert reports[2].reused_tokens == 3 * B


@pytest.mark.parametrize("flavour", CHECKPOINTED)
def test_case_11_a_boundary_that_the_caller_names_is_found_at_once(open_toy, tokens, flavour):
    """The usual way: the shared prefix is a system prompt, and the caller says where it ends (aligned or not)."""
    for length in (3 * B, 3 * B + 1, 4 * B - 1):
        driver = open_toy(flavour, num_pages=64, config=config(None))
        shared = tokens(1, length)
        run_to_the_end(driver, shared + tokens(2, 2 * B), checkpoint_boundaries=[length])
        assert run_to_the_end(driver, shared + tokens(3, 2 * B)).reuse.reused_tokens == length


def run_to_the_end(driver, prompt, chunk=None, **options):
    sequence = driver.admit(prompt, **options)
    driver.prefill(sequence, chunk)
    driver.step(finish=[sequence])
    return sequence


@pytest.mark.parametrize("sizes", list(itertools.permutations((16, 48, 8))), ids=str)
@pytest.mark.parametrize("flavour", CHECKPOINTED)
def test_case_12_the_checkpoint_is_found_by_tokens_whatever_the_sizes(open_toy, tokens, flavour, sizes):
    """vllm-project/vllm #53142, #55600: attention block, checkpoint spacing and drafter block all differ.

    Expect: a prefix of 10 spacings restores the state of exactly that many tokens; likewise for 1 to 12 spacings.
    """
    block, spacing, draft_tokens = sizes
    longest = 12 * spacing + 20
    driver = open_toy(
        flavour,
        page_size=block,
        num_pages=6 * (longest // block + 2),
        max_kv_capacity=longest + 64,
        draft_tokens=draft_tokens if flavour == "mtp" else 3,
        recurrent_slots=40,
        partial_slots=40,
        config=config(None),
        check=False,
    )
    prefix = tokens(21, 12 * spacing)
    ends = [spacing * count for count in range(1, 13)]
    first = driver.admit([*prefix, 1, 2], checkpoint_boundaries=ends)
    driver.prefill(first, spacing * 5 // 2)
    driver.step(finish=[first])
    for count in (10, *range(1, 13)):
        length = count * spacing
        again = driver.admit(prefix[:length] + tokens(100 + count, 9))
        assert again.reuse.reused_tokens == length
        twin = SoloRun(driver.model, prefix[:length])
        assert driver.machine.storage.live_fingerprint(again.slot) == checkpoint_fingerprint(twin, length)
        driver.recount()
        driver.prefill(again)
        driver.step()
        driver.recount()
        driver.cancel(again)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("flavour", CHECKPOINTED)
def test_case_13_packed_prompts_capture_their_own_states(open_toy, tokens, flavour, order):
    """sgl-project/sglang #31833: three prompts of 1.3, 2.7 and 4.1 chunks in one packed prefill, in every order.

    Expect: every checkpoint equals the one of a solo run at that length, and is found again.
    """
    chunk = 10
    driver = open_toy(flavour, num_pages=96, recurrent_slots=24, partial_slots=24, config=config(None))
    prompts = [tokens(30 + n, length) for n, length in enumerate((13, 27, 41))]
    boundaries = [list(range(chunk, len(prompt), chunk)) for prompt in prompts]
    packed = [driver.admit(prompts[n], checkpoint_boundaries=boundaries[n]) for n in order]
    while unfinished := [sequence for sequence in packed if not sequence.finalized]:
        driver.mixed_step([(sequence, chunk) for sequence in unfinished])
    driver.cancel(*packed)
    for n in order:
        for length in boundaries[n]:
            again = driver.admit([*prompts[n][:length], 7, 8, 9])
            assert again.reuse.reused_tokens == length
            found = driver.machine.storage.live_fingerprint(again.slot)
            assert found == checkpoint_fingerprint(SoloRun(driver.model, prompts[n]), length)
            driver.cancel(again)


@pytest.mark.parametrize("flavour", CHECKPOINTED)
def test_case_13_no_checkpoint_where_no_chunk_ended(open_toy, tokens, flavour):
    """The other way out: chunks that do not end at the wished places leave no checkpoint there, and say so."""
    driver = open_toy(flavour, num_pages=96, config=config(None), stop_at_boundaries=False)
    prompt = tokens(33, 27)
    sequence = driver.admit(prompt, checkpoint_boundaries=[10, 16])
    driver.prefill(sequence, 8)
    driver.cancel(sequence)
    assert driver.admit([*prompt[:12], 1, 2]).reuse.reused_tokens == 0
    again = driver.admit([*prompt[:17], 1, 2])
    assert again.reuse.reused_tokens == 16


@pytest.mark.parametrize("finishing", [False, True])
@pytest.mark.parametrize("flavour", CHECKPOINTED)
def test_case_14_mixed_steps_publish_only_what_they_wrote(open_toy, tokens, flavour, finishing):
    """sgl-project/sglang #39342: r0 decodes while r1's prompt crosses two boundaries; r0 may end at one of them.

    Expect: r2, which repeats r1's prefix, starts from a state that was written; texts as without mixing.
    """
    driver = open_toy(flavour, num_pages=96, config=config(None))
    r0 = driver.admit(tokens(40, 9))
    driver.prefill(r0)
    prompt = tokens(41, 4 * B)
    r1 = driver.admit(prompt, checkpoint_boundaries=[B, 2 * B])
    driver.mixed_step([(r0, DECODE), (r1, B)])
    driver.mixed_step([(r1, B), (r0, DECODE)], finish=[r0] if finishing else [])
    r2 = driver.admit(prompt[: 2 * B] + tokens(42, 5))
    assert r2.reuse.reused_tokens == 2 * B
    while not (r1.finalized and r2.finalized):
        driver.mixed_step([(s, DECODE if s.finalized else 3) for s in driver.live.values()])
    driver.step()
    driver.finish(*driver.live.values())


def test_case_14_a_slot_without_a_written_stamp_cannot_be_published():
    """The rule itself, at the manager: reserve, publish without the stamp, and nothing has changed."""
    manager = ContextCacheManager(
        B,
        ResourceDemand(base_kv_pages=8, recurrent_snapshot_slots=2, partial_kv_snapshot_slots=2),
        base_state_kind=BaseStateKind.HYBRID,
    )
    chain = TokenChain(B, BlockKeyExtras())
    chain.extend(np.arange(6, dtype=np.int32))
    lease = manager.acquire_hybrid(chain, min_tokens=7).lease
    reservation = manager.reserve_hybrid_snapshots(lease, True)
    with pytest.raises(InvalidArgumentError):
        manager.publish_hybrid(lease, chain, 6, reservation)
    manager.check_invariants()
    assert len(manager.records) == 0
    manager.mark_snapshots_written(lease, reservation)
    manager.publish_hybrid(lease, chain, 6, reservation)
    assert len(manager.records) == 1
    manager.retire_hybrid_snapshot_reservation(lease, reservation)
    lease.release()
    manager.check_invariants()


def test_the_policies_under_test_are_the_plugins():
    """These cases run on what users install."""
    names = {registration.name: registration.factory for registration in all_policies()}
    assert names["hybrid-snapshot"] is HybridSnapshotPolicy
    assert names["hybrid-mtp"] is HybridMtpPolicy
    assert callable(place_checkpoints)
