"""What is kept, for how long, and what the reuse report says about what was not."""

from __future__ import annotations

import sys
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from coordinator_rig import HEADROOM, OK, VOCAB, Rig

from edgellm._core.block_hash import TokenChain
from edgellm.cache.acquire import expiry_of
from edgellm.cache.types import (
    ContextCacheCommitPolicy,
    ContextCacheLookupPolicy,
    Retention,
    RetentionPriority,
    ReuseReport,
    ReuseStopReason,
)
from edgellm.errors import InvalidArgumentError
from edgellm.testing.recount import recount, require_baseline
from edgellm.testing.toy import toy_generate

PREFILL_ONLY = ContextCacheCommitPolicy.PREFILL_STATE_ONLY
LOW, HIGH = RetentionPriority.LOW, RetentionPriority.HIGH


def prompt(length, seed=1):
    return [(seed * 31 + 7 * i * i + i) % VOCAB for i in range(length)]


def reused(rig, tokens):
    """What a prompt would reuse now; changes nothing."""
    chain = TokenChain(rig.page_size)
    chain.extend(tokens)
    return rig.manager.plan(chain, ContextCacheLookupPolicy.USE_CACHE).reuse_token_length


def test_low_priority_goes_before_older_normal_context():
    rig = Rig(num_pages=8)
    rig.run(prompt(9), 1)
    rig.run(prompt(9, 2), 1, retention=Retention(LOW))
    rig.run(prompt(17, 3), 1)  # 5 pages of 4 free ones: one has to go
    assert (reused(rig, prompt(9)), reused(rig, prompt(9, 2))) == (8, 4)


def test_high_priority_stays_while_anything_else_can_go():
    rig = Rig(num_pages=8)
    rig.run(prompt(9), 1, retention=Retention(HIGH))
    rig.run(prompt(9, 2), 1)
    rig.run(prompt(21, 3), 1)
    assert (reused(rig, prompt(9)), reused(rig, prompt(9, 2))) == (8, 0)


def test_a_shared_block_keeps_the_highest_priority_it_was_given():
    rig = Rig(num_pages=8)
    rig.run(prompt(9), 1, retention=Retention(HIGH))
    rig.run(prompt(9), 1, retention=Retention(LOW))
    rig.run(prompt(9, 2), 1)
    rig.run(prompt(21, 3), 1)
    assert reused(rig, prompt(9)) == 8


def test_expired_context_goes_first():
    rig = Rig(num_pages=8)
    rig.run(prompt(9), 1)
    rig.run(prompt(9, 2), 1, retention=Retention(ttl_seconds=10))
    rig.clock.seconds = 9
    assert reused(rig, prompt(9, 2)) == 8
    rig.clock.seconds = 11
    rig.run(prompt(17, 3), 1)
    assert (reused(rig, prompt(9)), reused(rig, prompt(9, 2))) == (8, 4)
    recount(rig.coordinator)


def test_what_has_not_expired_is_kept_by_recency():
    rig = Rig(num_pages=8)
    rig.run(prompt(9), 1)
    rig.run(prompt(9, 2), 1, retention=Retention(ttl_seconds=10))
    rig.clock.seconds = 5
    rig.run(prompt(17, 3), 1)
    assert (reused(rig, prompt(9)), reused(rig, prompt(9, 2))) == (4, 8)


def test_time_to_live_counts_from_the_end_of_the_request():
    """An answer that takes longer than its own time to live is not expired when it ends."""
    rig = Rig(num_pages=8, capacity=24)
    rig.run(prompt(9), 1)
    request = rig.begun(rig.admission(prompt(9, 2), 0, retention=Retention(ttl_seconds=10)))
    rig.prefill(request)
    rig.clock.seconds = 15
    rig.coordinator.finish(request)
    rig.run(prompt(17, 3), 1)
    assert (reused(rig, prompt(9)), reused(rig, prompt(9, 2))) == (4, 8)
    rig.clock.seconds = 26
    rig.run(prompt(17, 4), 1)
    assert reused(rig, prompt(9, 2)) == 0


def test_growth_takes_expired_context_first_as_well():
    rig = Rig(num_pages=6, capacity=24)
    rig.run(prompt(5), 1)
    rig.run(prompt(5, 2), 1, retention=Retention(ttl_seconds=1))
    request = rig.begun(rig.admission(prompt(15, 3), 0))
    rig.prefill(request)
    rig.clock.seconds = 2
    rig.decode(request)
    rig.decode(request)
    rig.coordinator.finish(request)
    assert (reused(rig, prompt(5)), reused(rig, prompt(5, 2))) == (4, 0)


@pytest.mark.parametrize("retention", [Retention(ttl_seconds=0), Retention(ttl_seconds=-1), Retention(1), "high"])
def test_nonsense_retention_is_refused(retention):
    rig = Rig()
    with pytest.raises(InvalidArgumentError):
        rig.begin(rig.admission(prompt(3), 0, retention=retention))
    assert rig.coordinator.active_requests == 0


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (np.float16(60), 60.0),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (7, 7.0),
        (Fraction(1, 4), 0.25),
        (10**400, sys.float_info.max),
        (Fraction(-(10**400)), -sys.float_info.max),
        (2.5, 2.5),
    ],
)
def test_a_time_to_live_is_kept_as_a_float(given, kept):
    retention = Retention(ttl_seconds=given)
    assert type(retention.ttl_seconds) is float
    assert retention.ttl_seconds == kept
    assert retention == replace(retention) == Retention(ttl_seconds=kept)


@pytest.mark.parametrize("given", [None, True, "60", [60], Decimal(60), np.array([1.0, 2.0])])
def test_what_is_no_number_stays_for_admission_to_refuse(given):
    assert Retention(ttl_seconds=given).ttl_seconds is given


@pytest.mark.parametrize("ttl", [np.float16(60), np.float16(6e4), 10**400, 1e308, 5e-324])
def test_any_time_to_live_gives_an_expiry_of_64_bits(ttl):
    rig = Rig()
    assert 0 < expiry_of(rig.coordinator, Retention(ttl_seconds=ttl)) < 2**63


@pytest.mark.parametrize("fields", [{"checkpoint_boundaries": [4]}, {"checkpoint_boundaries": [0]}])
def test_boundaries_lie_in_the_prompt(fields):
    rig = Rig()
    with pytest.raises(InvalidArgumentError, match="from 1 to the prompt's 3"):
        rig.begin(rig.admission(prompt(3), 0, **fields))
    with pytest.raises(InvalidArgumentError, match="replay_tail_length is 4"):
        rig.begin(rig.admission(prompt(3), 0, replay_tail_length=4))


# --- why not more ---------------------------------------------------------------------------------------------


def test_withheld_answers_are_a_policy():
    rig = Rig()
    text, _ = rig.run(prompt(8), 9, commit=PREFILL_ONLY)
    _, report = rig.run([*prompt(8), *text, 1], 1)
    assert report == ReuseReport(18, 8, 8, ReuseStopReason.POLICY, 8)
    _, other = rig.run([*prompt(8), 90, 91, 92, 93, 94], 1)
    assert other.stop_reason is ReuseStopReason.NO_RECORD


def test_a_salted_request_without_a_namespace_says_so():
    rig = Rig()
    rig.run(prompt(9), 1)
    _, salted = rig.run(prompt(9), 1, salt=5)
    assert (salted.reused_tokens, salted.stop_reason) == (0, ReuseStopReason.SALT)
    _, again = rig.run([*prompt(5), 90, 91], 1, salt=5)
    assert (again.reused_tokens, again.stop_reason) == (5, ReuseStopReason.NO_RECORD)


def test_a_volatile_generation_prompt_is_told_from_other_ends():
    rig = Rig()
    rig.run(prompt(10), 3, replay_tail_length=3)  # tokens 7, 8, 9 will not come again
    _, report = rig.run([*prompt(7), 1, 2, 3], 1)
    assert (report.reused_tokens, report.stop_reason) == (7, ReuseStopReason.TEMPLATE_TAIL)
    _, earlier = rig.run([*prompt(5), 1, 2, 3], 1)
    assert (earlier.reused_tokens, earlier.stop_reason) == (5, ReuseStopReason.NO_RECORD)


# --- reuse inside a page --------------------------------------------------------------------------------------


def test_a_prompt_that_parts_inside_a_page_computes_only_what_differs():
    rig = Rig()
    rig.run(prompt(12), 1)
    tokens = [*prompt(10), 90, 91, 92]
    request = rig.begun(rig.admission(tokens, 0))
    sequence = request.sequence(0)
    assert sequence.reuse_token_length == 10
    before = rig.executor.tokens_computed
    source = sequence.lease.tail_source
    assert rig.manager.pools.base.active_ref(source) == 1
    text = rig.prefill(request)
    assert rig.executor.tokens_computed == before + 3
    assert rig.manager.pools.base.active_ref(source) == 0  # let go with the copy
    assert sequence.lease.tail_source is None
    assert text == toy_generate(tokens, 1, VOCAB)
    metrics = rig.coordinator.metrics()
    assert (metrics.tail_copies, metrics.tail_copied_tokens) == (1, 2)
    rig.coordinator.finish(request)
    require_baseline(rig.coordinator)


def test_an_ended_sequence_leaves_its_unfilled_page():
    rig = Rig()
    first = prompt(6)
    text, _ = rig.run(first, 4)  # 9 tokens have state: two blocks and one token
    assert rig.manager.index.tail_count == 1
    turn = [*first, *text, 3]
    again, report = rig.run(turn, 3)
    assert report.reused_tokens == 9
    assert again == toy_generate(turn, 3, VOCAB)


def test_a_cancelled_sequence_leaves_no_unfilled_page():
    rig = Rig()
    handle = rig.container()
    rig.join(handle, prompt(6), 0)
    rig.chunk(handle, 0, 6)
    rig.decode(handle)
    rig.retire(handle, 0)
    assert rig.manager.index.tail_count == 0
    rig.coordinator.finish(handle)


def test_a_sequence_that_ended_takes_part_in_nothing_more():
    rig = Rig()
    handle = rig.container()
    for slot in (0, 1):
        rig.join(handle, prompt(6, slot + 1), slot)
        rig.chunk(handle, slot, 6)
    rig.decode(handle, completed=[0])
    assert handle.impl.lengths.ended[:2].tolist() == [True, False]
    from edgellm.cache.advances import HOLD_TOKEN, OneTokenAdvances
    from edgellm.errors import ContractViolation

    with pytest.raises(ContractViolation, match="was reported as ended"):
        rig.coordinator.prepare_decode_step(handle, HEADROOM, [0])
    assert rig.coordinator.prepare_decode_step(handle, HEADROOM) is OK
    with pytest.raises(InvalidArgumentError, match="was reported as ended"):
        rig.coordinator.complete_decode_step(handle, OneTokenAdvances([1, 1]))
    assert rig.coordinator.complete_decode_step(handle, OneTokenAdvances([HOLD_TOKEN, 1])) is OK
    rig.coordinator.finish(handle)
    require_baseline(rig.coordinator)


def test_a_joiner_that_parts_inside_a_page_starts_behind_its_copy():
    rig = Rig()
    handle = rig.container()
    rig.join(handle, prompt(9), 0)
    rig.chunk(handle, 0, 9)
    tokens = [*prompt(6), 90, 91]
    result = rig.join(handle, tokens, 1)
    assert result.prefill_start == 6
    assert handle.sequence(1).lease.tail_source is None
    assert [rig.chunk(handle, 1, 2)] == toy_generate(tokens, 1, VOCAB)
    rig.coordinator.finish(handle)
    require_baseline(rig.coordinator)


def test_a_failed_copy_takes_the_joiner_back():
    rig = Rig()
    handle = rig.container()
    rig.join(handle, prompt(9), 0)
    rig.chunk(handle, 0, 9)
    free = rig.free()
    cache, copy = rig.coordinator.resources.base_cache, rig.executor.kv_cache.copy_pages

    def explode(sources, targets):
        raise OSError("copy failed")

    cache.copy_pages = explode
    with pytest.raises(OSError, match="copy failed"):
        rig.join(handle, [*prompt(6), 90], 1)
    cache.copy_pages = copy
    assert rig.free() == free
    assert not rig.coordinator.poisoned
    recount(rig.coordinator)
    assert rig.join(handle, [*prompt(6), 90], 1).prefill_start == 6
    rig.coordinator.finish(handle)
