"""The context-cache coordinator, attention-only and base policy: behaviours K, L and O by their numbers."""

from __future__ import annotations

import gc
import logging
import threading

import numpy as np
import pytest
from coordinator_rig import HEADROOM, OK, VOCAB, Rig, all_policies

from edgellm.builtin.base_endpoint import BaseEndpointPolicy
from edgellm.cache.advances import HOLD_TOKEN, OneTokenAdvances
from edgellm.cache.coordinator import ContextCacheCoordinator
from edgellm.cache.request import Phase, RequestHandle
from edgellm.cache.types import (
    ContextCacheBatchAdmission,
    ContextCacheCommitPolicy,
    ContextCacheConfig,
    ContextCacheCoordinatorStatus,
    ContextCacheDeploymentProfile,
    ContextCacheLookupPolicy,
    ContextCachePhysicalResources,
    ContextCacheSequenceAdvance,
    DecodingKvHeadroom,
    DecodingTokenStateContract,
    Hash128,
    ReuseReport,
    ReuseStopReason,
    SpecReuseContract,
)
from edgellm.errors import (
    CallerError,
    ContractViolation,
    InputTooLongError,
    InvalidArgumentError,
    InvariantError,
    PluginError,
)
from edgellm.plugins import PolicyRegistration
from edgellm.runtime.device import CpuDevice
from edgellm.session.types import ResidentRef
from edgellm.testing.recount import count_pages, recount, require_baseline
from edgellm.testing.toy import toy_generate

POISONED = ContextCacheCoordinatorStatus.POISONED
REQUEST_FAILED = ContextCacheCoordinatorStatus.REQUEST_FAILED
BYPASS = ContextCacheLookupPolicy.BYPASS
USE_CACHE = ContextCacheLookupPolicy.USE_CACHE
PREFILL_ONLY = ContextCacheCommitPolicy.PREFILL_STATE_ONLY
FULLY_COMMITTED = DecodingTokenStateContract.FULLY_COMMITTED
Advance = ContextCacheSequenceAdvance


def prompt(length, seed=1):
    return [(seed * 31 + 7 * i * i + i) % VOCAB for i in range(length)]


def ledger_of(coordinator, request):
    """Everything a failed call must leave alone."""
    impl = request.impl
    return (
        impl.phase,
        impl.has_pending_device_work(),
        [(s.num_tokens, s.committed_state_length, s.published_full_block_count, s.finalized) for s in impl.sequences],
        coordinator.rows.table.rows.tolist(),
        count_pages(coordinator.manager),
        coordinator.manager.pools.base.free_list(),
        coordinator.metrics(),
    )


# --- K: coordinator, vanilla ---------------------------------------------------------------------------------


def test_104_one_block_is_published_at_prefill_end_and_reused():
    rig = Rig(page_size=128, num_pages=8, capacity=256)
    shared = prompt(129)
    rig.run(shared, 1)
    metrics = rig.coordinator.metrics()
    assert (metrics.publication_attempts, metrics.committed_publications, metrics.published_blocks) == (1, 1, 1)
    _, report = rig.run([*shared[:128], 5, 6], 1)
    assert (report.prompt_tokens, report.reused_tokens, report.matched_tokens) == (130, 128, 128)
    assert report.stop_position == 128
    require_baseline(rig.coordinator)


def test_105_a_fully_cached_prompt_computes_one_token():
    """Lifted: the reference gives the last page up; here its other 127 tokens are copied."""
    rig = Rig(page_size=128, num_pages=8, capacity=256)
    rig.run(prompt(128), 1)
    before = rig.coordinator.metrics()
    request = rig.begun(rig.admission(prompt(128), 0))
    after = rig.coordinator.metrics()
    assert request.sequence(0).reuse_token_length == 127
    assert after.matched_tokens - before.matched_tokens == 128
    assert after.full_input_rewind_plans - before.full_input_rewind_plans == 1
    assert after.hit_sequences - before.hit_sequences == 1
    report = request.sequence(0).reuse_report
    assert (report.reused_tokens, report.matched_tokens, report.stop_reason) == (127, 128, ReuseStopReason.FULL)
    computed = rig.executor.tokens_computed
    assert rig.prefill(request) == toy_generate(prompt(128), 1, VOCAB)
    assert rig.executor.tokens_computed == computed + 1
    assert rig.coordinator.finish(request) is OK


def test_106_batch_bypass_neither_looks_up_nor_publishes():
    rig = Rig()
    rig.run(prompt(9), 3)
    before = rig.coordinator.metrics()
    request = rig.begun(rig.admission(prompt(9), 0), lookup_policy=BYPASS)
    shared = set(rig.manager.index.eviction_order())
    assert request.sequence(0).reuse_report == ReuseReport(9, 0, 0, ReuseStopReason.BYPASS, 0)
    assert not shared & set(request.sequence(0).lease.base_pages.tolist())
    rig.prefill(request)
    for step in range(8):
        rig.decode(request, completed=[0] if step == 7 else [])
    assert rig.coordinator.finish(request) is OK
    after = rig.coordinator.metrics()
    assert after.publication_attempts == before.publication_attempts
    assert after.published_blocks == before.published_blocks
    assert after.lookup_bypass_sequences - before.lookup_bypass_sequences == 1


def test_107_a_sequence_may_override_the_batch_to_bypass_but_not_back():
    rig = Rig()
    request = rig.begun(rig.admission(prompt(9), 0), rig.admission(prompt(9, 2), 1, lookup=BYPASS))
    rig.prefill(request)
    assert [s.published_full_block_count for s in request.impl.sequences] == [2, 0]
    rig.coordinator.finish(request)
    assert rig.begin(rig.admission(prompt(9), 0)).admission.prefill_starts == [8]
    gc.collect()
    forced = rig.begun(rig.admission(prompt(9), 0, lookup=USE_CACHE), lookup_policy=BYPASS)
    assert forced.sequence(0).reuse_report == ReuseReport(9, 0, 0, ReuseStopReason.BYPASS, 0)
    attempts = rig.coordinator.metrics().publication_attempts
    rig.prefill(forced)
    assert forced.sequence(0).published_full_block_count == 0
    assert rig.coordinator.metrics().publication_attempts == attempts
    rig.coordinator.finish(forced)


@pytest.mark.parametrize(("commit", "expected_reuse"), [(None, 14), (PREFILL_ONLY, 10)])
def test_108_generated_blocks_are_published_as_the_commit_policy_says(commit, expected_reuse):
    rig = Rig()
    first = prompt(10)
    generated, _ = rig.run(first, 5, commit=commit)
    assert generated == toy_generate(first, 5, VOCAB)
    assert len(rig.manager.records) == (2 if commit is None else 1)
    turn_two = first + generated + [3, 4]
    again, report = rig.run(turn_two, 4)
    assert report.reused_tokens == expected_reuse
    assert again == toy_generate(turn_two, 4, VOCAB)


def test_109_no_publication_attempt_without_a_new_full_block():
    rig = Rig()
    rig.run(prompt(9), 3)  # committed 11 at the end: still two blocks
    metrics = rig.coordinator.metrics()
    assert metrics.publication_attempts == 1
    assert metrics.published_blocks == 2
    rig.run(prompt(3, 5), 1)  # no full block at all
    assert rig.coordinator.metrics().publication_attempts == 1


def test_110_isolation_digests_never_share_prompt_or_generated_blocks():
    rig = Rig(num_pages=24)
    first = prompt(10)
    generated, _ = rig.run(first, 6, salt=1)
    for salt in (2, None):
        other, report = rig.run(first + generated, 2, salt=salt)
        assert (report.reused_tokens, report.matched_tokens) == (0, 0)
        assert other == toy_generate(first + generated, 2, VOCAB)
    _, report = rig.run(first + generated, 2, salt=1)
    assert report.reused_tokens == 15


@pytest.mark.parametrize(
    "advances",
    [
        [Advance([1, 2], 9)],
        [Advance([1], 8)],
        [],
        [Advance([1], 9), Advance([1], 9)],
        [Advance(None, 9)],
        [Advance([], 9)],
        [Advance([-4], 9)],
    ],
)
def test_111_a_wrong_prefill_advance_changes_nothing_and_a_correct_retry_succeeds(advances):
    rig = Rig()
    request = rig.begun(rig.admission(prompt(9), 0))
    rig.coordinator.prepare_prefill(request)
    (token,) = rig.forward(request, [(0, 9)])
    before = ledger_of(rig.coordinator, request)
    with pytest.raises(InvalidArgumentError):
        rig.coordinator.finalize_prefill_publication(request, advances)
    assert ledger_of(rig.coordinator, request) == before
    assert rig.coordinator.finalize_prefill_publication(request, [Advance([token], 9)]) is OK
    assert request.sequence(0).published_full_block_count == 2
    rig.coordinator.finish(request)


def test_112_fully_committed_contract():
    rig = Rig()
    request = rig.begun(rig.admission(prompt(9), 0), token_state_contract=FULLY_COMMITTED)
    rig.coordinator.prepare_prefill(request)
    with pytest.raises(InvalidArgumentError, match="exactly 0"):
        rig.coordinator.finalize_prefill_publication(request, [Advance([1], 9)])
    assert rig.coordinator.finalize_prefill_publication(request, [Advance([], 9)]) is OK
    assert rig.coordinator.prepare_decode_step(request, DecodingKvHeadroom(4)) is OK
    with pytest.raises(InvalidArgumentError, match=r"9 \+ 3 accepted is 12"):
        rig.coordinator.complete_decode_step(request, [Advance([1, 2, 3], 11)])
    with pytest.raises(InvalidArgumentError, match="OneTokenAdvances serve look-ahead"):
        rig.coordinator.complete_decode_step(request, OneTokenAdvances([1]))
    assert rig.coordinator.complete_decode_step(request, [Advance([1, 2, 3], 12)], [0]) is OK
    sequence = request.sequence(0)
    assert (sequence.num_tokens, sequence.committed_state_length, sequence.published_full_block_count) == (12, 12, 3)
    recount(rig.coordinator)
    rig.coordinator.finish(request)


def test_113_hold_leaves_a_slot_and_concrete_without_tokens_is_an_error():
    rig = Rig()
    request = rig.begun(rig.admission(prompt(5), 0), rig.admission(prompt(6), 1))
    rig.prefill(request)
    rig.coordinator.prepare_decode_step(request, HEADROOM)
    before = ledger_of(rig.coordinator, request)
    with pytest.raises(InvalidArgumentError, match="accepted nothing but reports committed 6"):
        rig.coordinator.complete_decode_step(request, [Advance([3], 6), Advance([], 6)])
    assert ledger_of(rig.coordinator, request) == before
    assert rig.coordinator.complete_decode_step(request, [Advance([3], 6), Advance()]) is OK
    assert [(s.num_tokens, s.committed_state_length) for s in request.impl.sequences] == [(7, 6), (7, 6)]
    recount(rig.coordinator)
    rig.coordinator.finish(request)


@pytest.mark.parametrize("completed", [[0, 0], [2], [-1]])
def test_114_wrong_completed_slots_are_an_error_before_mutation(completed):
    rig = Rig()
    request = rig.begun(rig.admission(prompt(7), 0), rig.admission(prompt(7, 2), 1))
    rig.prefill(request)
    rig.coordinator.prepare_decode_step(request, HEADROOM)
    before = ledger_of(rig.coordinator, request)
    with pytest.raises(InvalidArgumentError, match="completed slot"):
        rig.coordinator.complete_decode_step(request, OneTokenAdvances([1, 1]), completed)
    assert ledger_of(rig.coordinator, request) == before
    rig.coordinator.complete_decode_step(request, OneTokenAdvances([1, 1]), [0])
    rig.coordinator.finish(request)


def test_114_a_cancelled_sequence_leaves_no_endpoint():
    rig = Rig()
    request = rig.begun(rig.admission(prompt(7), 0), rig.admission(prompt(7, 2), 1))
    rig.prefill(request)
    records = len(rig.manager.records)
    rig.decode(request, completed=[0])  # the second was cancelled: not listed
    assert len(rig.manager.records) == records + 1
    assert rig.coordinator.metrics().publication_attempts == 3
    rig.coordinator.finish(request)


def test_115_a_refused_batch_keeps_nothing_not_even_metrics():
    rig = Rig(num_pages=4, capacity=16)
    rig.run(prompt(12), 1)  # retains three blocks
    keeper = rig.begun(rig.admission(prompt(2, 9), 3))  # leases the fourth page
    rig.prefill(keeper)
    # Hits 2 of 3 blocks: two pins, one evictable; 10 + 1 tokens need 1 more page: fits warm.
    warm = rig.begun(rig.admission(prompt(10), 0))
    assert warm.sequence(0).reuse_token_length == 8
    rig.coordinator.finish(warm)
    before = rig.coordinator.metrics()
    # The first finds room, the second does not, warm or cold: the first's lease and counts go as well.
    refused = rig.begin(rig.admission(prompt(10), 0), rig.admission(prompt(9, 4), 1))
    assert (refused.status, refused.admission) == (REQUEST_FAILED, None)
    assert rig.coordinator.metrics() == before
    assert rig.coordinator.active_requests == 1
    rig.coordinator.finish(keeper)
    recount(rig.coordinator)


@pytest.mark.parametrize("seed", range(4))
def test_115_what_is_refused_warm_is_refused_cold(seed):
    """Changed: a hit evicts leaves only and pins what it needs anyway, so there is no forced cold run to try."""
    rng = np.random.default_rng(seed)
    rig = Rig(page_size=2, num_pages=int(rng.integers(5, 9)), batch=3, capacity=12)
    refused = 0
    for _ in range(120):
        held = [rig.begin(rig.admission(prompt(int(rng.integers(1, 10)), int(rng.integers(1, 3))), 0))]
        tokens = prompt(int(rng.integers(1, 12)), int(rng.integers(1, 3)))
        result = rig.begin(rig.admission(tokens, 1))
        if result.status is REQUEST_FAILED:
            refused += 1
            assert rig.begin(rig.admission(tokens, 1), lookup_policy=BYPASS).status is REQUEST_FAILED
        for entry in [*held, result]:
            if entry.admission is not None:
                rig.prefill(entry.admission.request)
                rig.coordinator.finish(entry.admission.request)
    metrics = rig.coordinator.metrics()
    assert refused > 5
    assert (metrics.forced_cold_sequences, metrics.lookup_bypass_sequences) == (0, 0)


def test_116_headroom_is_leased_up_front_and_covered_steps_upload_nothing():
    rig = Rig(page_size=128, num_pages=8, capacity=256)
    request = rig.begun(rig.admission(prompt(127), 0), headroom=DecodingKvHeadroom(2))
    assert request.sequence(0).lease.num_base_pages == 2
    rig.prefill(request)
    uploads = len(rig.mirror.uploads)
    rig.decode(request)
    rig.decode(request)
    assert request.sequence(0).lease.num_base_pages == 2
    assert len(rig.mirror.uploads) == uploads == 1
    rig.coordinator.finish(request)


def test_116_growth_uploads_only_the_row_that_grew():
    rig = Rig()
    request = rig.begun(rig.admission(prompt(3), 2), rig.admission(prompt(5), 0))
    rig.prefill(request)
    rig.decode(request)
    assert rig.mirror.uploads == [[0, 2]]
    rig.decode(request)  # the first sequence writes position 4: its second page
    assert rig.mirror.uploads == [[0, 2], [2]]
    assert rig.row(2) == request.sequence(0).lease.base_pages.tolist()
    rig.coordinator.finish(request)


def test_117_refused_growth_names_the_slot_and_leaves_the_request_executing():
    """Lifted: the reference ends the whole request; here one sequence leaves and the others go on."""
    rig = Rig(num_pages=4, capacity=16)
    request = rig.begun(rig.admission(prompt(7), 0), rig.admission(prompt(7, 2), 1))
    rig.prefill(request)
    tokens = [rig.decode(request) for _ in range(1)]
    assert tokens
    status = rig.coordinator.prepare_decode_step(request, HEADROOM)
    assert (status, request.refused_slot) == (REQUEST_FAILED, 0)
    assert request.impl.phase is Phase.EXECUTING
    assert not request.impl.has_pending_device_work()
    assert rig.coordinator.metrics().growth_refusals == 1
    recount(rig.coordinator)
    assert rig.retire(request, 1) is OK
    rig.decode(request)
    assert rig.coordinator.finish(request) is OK
    require_baseline(rig.coordinator)


def test_117_a_full_row_is_refused_the_same_way():
    rig = Rig(num_pages=16, capacity=8)  # rows of 3 pages: 12 places
    request = rig.begun(rig.admission(prompt(11), 0))
    rig.prefill(request)
    rig.decode(request)
    assert rig.coordinator.prepare_decode_step(request, HEADROOM) is REQUEST_FAILED
    assert request.refused_slot == 0
    assert rig.coordinator.finish(request) is OK
    require_baseline(rig.coordinator)


def test_117_earlier_growth_stays_with_its_lease():
    rig = Rig(num_pages=3, capacity=16)
    request = rig.begun(rig.admission(prompt(3), 0), rig.admission(prompt(3, 2), 1))
    rig.prefill(request)
    rig.decode(request)
    assert rig.coordinator.prepare_decode_step(request, HEADROOM) is REQUEST_FAILED
    assert request.refused_slot == 1
    assert [s.lease.num_base_pages for s in request.impl.sequences] == [2, 1]
    recount(rig.coordinator)
    rig.coordinator.finish(request)


def test_118_bad_admissions_raise_and_leave_no_active_request():
    rig = Rig(capacity=8)
    good = rig.admission(prompt(4), 0)
    bad = [
        (InputTooLongError, [rig.admission(prompt(12), 0)]),
        (InvalidArgumentError, [good, rig.admission(prompt(4), 0)]),
        (InvalidArgumentError, [rig.admission(prompt(4), 0, epoch=0)]),
        (InvalidArgumentError, [rig.admission(prompt(4), 9)]),
        (InvalidArgumentError, [rig.admission([], 0)]),
        (InvalidArgumentError, [rig.admission(prompt(4), slot) for slot in range(5)]),
    ]
    for error, sequences in bad:
        with pytest.raises(error):
            rig.begin(*sequences)
    with pytest.raises(InvalidArgumentError, match="another stream"):
        rig.coordinator.begin_request(ContextCacheBatchAdmission([good]), HEADROOM, CpuDevice().stream)
    for headroom in (DecodingKvHeadroom(0), DecodingKvHeadroom(1, 1), DecodingKvHeadroom(1, -1)):
        with pytest.raises(InvalidArgumentError):
            rig.begin(good, headroom=headroom)
    with pytest.raises(InvalidArgumentError, match="ContextCacheLookupPolicy"):
        rig.begin(good, lookup_policy="use_cache")
    with pytest.raises(CallerError, match="speculative"):
        rig.begin(good, speculative_request=True)
    assert rig.coordinator.active_requests == 0
    assert rig.free() == 16
    assert rig.coordinator.shutdown() is OK


def test_118_media_lists_must_match_the_tokens():
    rig = Rig()
    admission = rig.admission(prompt(4), 0)
    admission.per_position_media_hash = [Hash128(1, 2)] * 3
    with pytest.raises(InvalidArgumentError, match="3 media digests for 4 tokens"):
        rig.begin(admission)


def test_118_a_slot_of_another_live_request_is_refused():
    rig = Rig()
    first = rig.begun(rig.admission(prompt(4), 0))
    with pytest.raises(InvalidArgumentError, match="occupied"):
        rig.begin(rig.admission(prompt(4), 0))
    rig.coordinator.finish(first)
    second = rig.begun(rig.admission(prompt(4), 0))
    rig.coordinator.finish(second)


def test_119_calls_out_of_order_are_errors():
    rig = Rig()
    request = rig.begun(rig.admission(prompt(5), 0))
    coordinator = rig.coordinator
    with pytest.raises(ContractViolation):
        coordinator.enqueue_prefill_captures(request)
    with pytest.raises(ContractViolation):
        coordinator.complete_decode_step(request, OneTokenAdvances([1]))
    with pytest.raises(ContractViolation):
        coordinator.prepare_decode_step(request, HEADROOM)
    coordinator.prepare_prefill(request)
    before = ledger_of(coordinator, request)
    with pytest.raises(ContractViolation):
        coordinator.prepare_prefill(request)
    assert ledger_of(coordinator, request) == before
    tokens = rig.forward(request, [(0, 5)])
    assert coordinator.finalize_prefill_publication(request, [Advance(tokens, 5)]) is OK
    with pytest.raises(ContractViolation):
        coordinator.prepare_prefill(request)
    with pytest.raises(ContractViolation, match="none is pending"):
        coordinator.complete_decode_step(request, OneTokenAdvances([1]))
    for slots in ([1], [-1]):
        with pytest.raises(ContractViolation, match="the request has 1 sequences"):
            coordinator.prepare_decode_step(request, HEADROOM, slots)
    coordinator.prepare_decode_step(request, HEADROOM)
    with pytest.raises(ContractViolation, match="settled"):
        coordinator.prepare_decode_step(request, HEADROOM)
    other = Rig().coordinator
    with pytest.raises(ContractViolation, match="another coordinator"):
        other.complete_decode_step(request, OneTokenAdvances([1]))
    coordinator.finish(request)
    with pytest.raises(ContractViolation, match="empty"):
        coordinator.prepare_decode_step(request, HEADROOM)


def test_120_two_live_requests_keep_to_their_own_rows():
    rig = Rig()
    first = rig.begun(rig.admission(prompt(5), 2))
    second = rig.begun(rig.admission(prompt(6, 3), 0))
    texts = {id(first): rig.prefill(first)}
    texts[id(second)] = rig.prefill(second)
    for _ in range(4):
        for request in (second, first):
            texts[id(request)] += rig.decode(request)
    assert texts[id(first)] == toy_generate(prompt(5), 5, VOCAB)
    assert texts[id(second)] == toy_generate(prompt(6, 3), 5, VOCAB)
    assert rig.row(1) == rig.row(3) == []
    assert not set(rig.row(0)) & set(rig.row(2))
    rig.coordinator.finish(first)
    assert rig.row(2) == []
    rig.coordinator.finish(second)
    require_baseline(rig.coordinator)


# --- L: live admission ---------------------------------------------------------------------------------------


def founder(rig, length=6, slot=0):
    request = rig.begun(rig.admission(prompt(length), slot))
    rig.prefill(request)
    return request


def test_121_a_joiner_shares_the_founders_page_and_binds_only_its_row():
    rig = Rig()
    request = founder(rig)
    rig.decode(request)
    row = rig.table.row(0).tolist()
    rig.mirror.uploads.clear()
    result = rig.join(request, [*prompt(4), 50, 51, 52], 1)
    assert (result.status, result.prefill_start, result.insufficient_capacity) == (OK, 4, False)
    assert result.reuse.reused_tokens == 4
    assert rig.row(1)[0] == rig.row(0)[0]
    assert rig.table.row(0).tolist() == row
    assert rig.mirror.uploads == [[1]]
    recount(rig.coordinator)
    rig.coordinator.finish(request)


def test_122_no_capacity_is_transient_and_a_retry_succeeds():
    rig = Rig(num_pages=5)
    request = founder(rig, 6)
    assert rig.join(request, prompt(7, 2), 1).status is OK
    before = ledger_of(rig.coordinator, request)
    refused = rig.join(request, prompt(7, 3), 2)
    assert (refused.status, refused.insufficient_capacity, refused.reuse) == (REQUEST_FAILED, True, None)
    assert ledger_of(rig.coordinator, request) == before
    never = rig.join(request, prompt(21, 3), 2)
    assert (never.status, never.insufficient_capacity) == (REQUEST_FAILED, False)
    rig.decode(request, hold=[1])
    rig.retire(request, 1)
    assert rig.join(request, prompt(7, 3), 2).status is OK
    rig.coordinator.finish(request)
    require_baseline(rig.coordinator)


def test_123_a_ghost_holds_while_the_founder_decodes():
    rig = Rig()
    request = founder(rig)
    rig.join(request, prompt(7, 2), 1)
    first = rig.decode(request, hold=[1])
    assert first[1] == HOLD_TOKEN
    ghost = request.sequence(1)
    assert (ghost.num_tokens, ghost.committed_state_length, ghost.finalized) == (7, 0, False)
    rig.coordinator.prepare_decode_step(request, HEADROOM)
    with pytest.raises(InvalidArgumentError, match="finalize its prompt first"):
        rig.coordinator.complete_decode_step(request, OneTokenAdvances([1, 1]))
    rig.coordinator.finish(request)


def test_124_finalize_publishes_and_refuses_a_wrong_advance():
    rig = Rig()
    request = founder(rig)
    rig.join(request, prompt(9, 2), 1)
    rig.coordinator.prepare_decode_step(request, HEADROOM, [])
    (token,) = rig.forward(request, [(1, 9)])
    before = ledger_of(rig.coordinator, request)
    for wrong in (Advance([token, token], 9), Advance([token], 8), Advance([], 9), Advance()):
        with pytest.raises(InvalidArgumentError):
            rig.coordinator.finalize_sequence_admission(request, 1, wrong)
    assert ledger_of(rig.coordinator, request) == before
    attempts = rig.coordinator.metrics().publication_attempts
    assert rig.coordinator.finalize_sequence_admission(request, 1, Advance([token], 9)) is OK
    assert rig.coordinator.metrics().publication_attempts == attempts + 1
    assert request.sequence(1).published_full_block_count == 2
    with pytest.raises(ContractViolation, match="finalized before"):
        rig.coordinator.finalize_sequence_admission(request, 1, Advance([token], 10))
    rig.coordinator.complete_decode_step(request, OneTokenAdvances([HOLD_TOKEN, HOLD_TOKEN]))
    recount(rig.coordinator)
    rig.coordinator.finish(request)


def test_125_retract_gives_everything_back_and_the_seat_is_usable_again():
    rig = Rig()
    request = founder(rig)
    free = rig.free()
    rig.join(request, prompt(9, 2), 1)
    assert rig.coordinator.retract_sequence_admission(request) is True
    assert rig.free() == free
    assert rig.row(1) == []
    recount(rig.coordinator)
    assert rig.join(request, prompt(9, 2), 1).status is OK
    assert rig.coordinator.retract_sequence_admission(request) is True
    assert rig.coordinator.retract_sequence_admission(request) is False  # only the founder is left
    assert rig.coordinator.poisoned
    assert rig.join(request, prompt(3), 1).status is POISONED
    assert rig.coordinator.finish(request) is OK


def test_125_a_founder_is_never_retracted():
    rig = Rig()
    request = rig.begun(rig.admission(prompt(9), 0), rig.admission(prompt(9), 1))
    rig.coordinator.prepare_prefill(request)
    assert rig.coordinator.retract_sequence_admission(request) is False
    assert request.num_sequences == 2
    rig.coordinator.finish(request)


def test_125_a_container_may_retract_its_first_joiner_but_not_a_seated_one():
    rig = Rig()
    request = rig.container()
    rig.join(request, prompt(9), 0)
    assert rig.coordinator.retract_sequence_admission(request) is True
    assert rig.coordinator.active_requests == 1
    rig.join(request, prompt(9), 0)
    rig.chunk(request, 0, 4)
    assert rig.coordinator.retract_sequence_admission(request) is False
    assert rig.coordinator.retract_sequence_admission(RequestHandle()) is False
    rig.coordinator.finish(request)


def test_126_shared_pages_outlive_the_founder():
    rig = Rig()
    request = founder(rig)
    rig.join(request, [*prompt(4), 50, 51], 1)
    row = rig.table.row(1).tolist()
    shared = rig.row(1)[0]
    assert rig.manager.pools.base.active_ref(shared) == 2
    rig.retire(request, 0)
    assert rig.manager.pools.base.active_ref(shared) == 1
    assert rig.table.row(1).tolist() == row
    assert rig.row(0) == []
    token = rig.chunk(request, 0, 2)
    assert [token] == toy_generate([*prompt(4), 50, 51], 1, VOCAB)
    rig.coordinator.finish(request)


def test_127_admission_needs_a_settled_executing_request():
    rig = Rig()
    request = rig.begun(rig.admission(prompt(6), 0))
    with pytest.raises(ContractViolation, match="executing"):
        rig.join(request, prompt(3), 1)
    rig.prefill(request)
    rig.coordinator.prepare_decode_step(request, HEADROOM)
    with pytest.raises(ContractViolation, match="settled"):
        rig.join(request, prompt(3), 1)
    rig.coordinator.complete_decode_step(request, OneTokenAdvances([1]))
    rig.coordinator.begin_batch_compaction(request, [0], 1)
    with pytest.raises(ContractViolation):
        rig.join(request, prompt(3), 1)
    rig.coordinator.compact_batch(request)
    with pytest.raises(InvalidArgumentError, match="occupied"):
        rig.join(request, prompt(3), 0)
    assert rig.join(request, prompt(3), 1).status is OK
    rig.coordinator.finish(request)


def test_127_flavours_that_are_missing_are_named():
    """Lifted: sequences join requests of every flavour; only what nobody serves is refused."""
    speculative = ContextCacheDeploymentProfile(spec_reuse_contract=SpecReuseContract(False, 0))
    with pytest.raises(
        PluginError, match=r"install package edgellm-shared-kv .*pip install \./plugins/edgellm-shared-kv\)$"
    ):
        Rig(profile=speculative)
    rig = Rig(profile=speculative, policies=all_policies())
    assert rig.coordinator.supports_live_sequence_admission() is True
    request = rig.begun(speculative_request=True)
    assert rig.join(request, prompt(3), 0).status is OK
    rig.coordinator.finish(request)
    vanilla = founder(rig)  # a plain request on a speculative deployment
    assert rig.join(vanilla, prompt(3), 1).status is OK
    with pytest.raises(PluginError, match="edgellm-hybrid"):
        rig.coordinator.publish_hybrid_mtp_endpoint(vanilla, 0, 4, None, 0)
    with pytest.raises(PluginError, match="edgellm-hybrid"):
        rig.coordinator.restore_hybrid_mtp_boundary_hidden(vanilla, 0, None, 0)
    rig.coordinator.finish(vanilla)
    assert rig.coordinator.active_requests == 0


def test_128_a_fault_while_binding_pops_the_joiner_and_clears_its_row():
    rig = Rig()
    request = founder(rig)
    before = ledger_of(rig.coordinator, request)
    rig.mirror.failures = 1
    with pytest.raises(OSError, match="upload failed"):
        rig.join(request, prompt(9, 2), 1)
    after = ledger_of(rig.coordinator, request)
    assert [*after[:5], *after[6:]] == [*before[:5], *before[6:]]
    assert not rig.coordinator.poisoned
    recount(rig.coordinator)
    assert rig.join(request, prompt(9, 2), 1).status is OK
    assert rig.coordinator.retract_sequence_admission(request)
    rig.mirror.failures = 2
    with pytest.raises(OSError, match="upload failed"):
        rig.join(request, prompt(9, 2), 1)
    assert rig.coordinator.poisoned
    assert rig.begin(rig.admission(prompt(3), 2)).status is POISONED
    assert rig.coordinator.finish(request) is OK


# --- O: compaction, ending, poison ---------------------------------------------------------------------------


def test_149_survivors_rows_are_untouched_and_the_retired_lease_goes_after_the_wait():
    rig = Rig()
    request = rig.begun(*(rig.admission(prompt(5, seed), slot) for slot, seed in ((3, 1), (0, 2), (1, 3))))
    firsts = rig.prefill(request)
    rows = rig.table.rows.copy()
    leases = [sequence.lease for sequence in request.impl.sequences]
    rig.coordinator.begin_batch_compaction(request, [0, -1, 1], 2)
    assert all(lease.valid for lease in leases)
    waits = rig.sync.calls
    assert rig.coordinator.compact_batch(request) is OK
    assert rig.sync.calls == waits + 1
    assert [lease.valid for lease in leases] == [True, False, True]
    assert (rig.table.rows[[3, 1]] == rows[[3, 1]]).all()
    assert rig.row(0) == []
    assert [s.resident.slot for s in request.impl.sequences] == [3, 1]
    recount(rig.coordinator)
    tokens = rig.decode(request)
    assert [firsts[0], tokens[0]] == toy_generate(prompt(5, 1), 2, VOCAB)
    assert [firsts[2], tokens[1]] == toy_generate(prompt(5, 3), 2, VOCAB)
    rig.coordinator.finish(request)


@pytest.mark.parametrize(
    ("mapping", "size"),
    [([1, 0, 2], 3), ([0, 2, -1], 2), ([0, 0, 1], 2), ([0, 1], 2), ([0, 1, 2, 3], 4), ([0, -1, 1], 3), ([0, -2, 1], 2)],
)
def test_150_a_wrong_mapping_is_an_error_before_any_work(mapping, size):
    rig = Rig()
    request = rig.begun(*(rig.admission(prompt(5, slot + 1), slot) for slot in range(3)))
    rig.prefill(request)
    before = ledger_of(rig.coordinator, request)
    with pytest.raises(InvalidArgumentError):
        rig.coordinator.begin_batch_compaction(request, mapping, size)
    assert ledger_of(rig.coordinator, request) == before
    with pytest.raises(ContractViolation):
        rig.coordinator.compact_batch(request)
    rig.coordinator.finish(request)


def test_150_the_mapping_reaches_the_device_tensor():
    import torch

    rig = Rig()
    request = rig.begun(*(rig.admission(prompt(5, slot + 1), slot) for slot in range(3)))
    rig.prefill(request)
    mapping = torch.full((4,), 9, dtype=torch.int32)
    rig.coordinator.begin_batch_compaction(request, [-1, 0, 1], 2, mapping)
    assert mapping.tolist() == [-1, 0, 1, 9]
    rig.coordinator.compact_batch(request)
    rig.coordinator.finish(request)


def test_151_retiring_all_finishes_a_batch_and_idles_a_container():
    rig = Rig()
    batch = founder(rig)
    assert rig.retire(batch, 0) is OK
    assert batch.impl.phase is Phase.FINISHING
    assert rig.coordinator.finish(batch) is OK
    container = rig.container()
    rig.join(container, prompt(6), 0)
    rig.chunk(container, 0, container.sequence(0).num_tokens - container.sequence(0).committed_state_length)
    assert rig.retire(container, 0) is OK
    assert container.impl.phase is Phase.EXECUTING
    assert container.num_sequences == 0
    assert rig.join(container, prompt(6), 0).status is OK
    assert rig.coordinator.finish(container) is OK
    require_baseline(rig.coordinator)


def test_152_finish_is_idempotent():
    rig = Rig()
    request = founder(rig)
    assert rig.coordinator.finish(request) is OK
    assert not request.valid()
    assert rig.coordinator.finish(request) is OK
    assert rig.coordinator.finish(RequestHandle()) is OK
    assert rig.coordinator.active_requests == 0


@pytest.mark.parametrize("way", ["finish", "drop", "compact", "raise"])
def test_153_a_failed_drain_quarantines_and_poisons_but_others_go_on(way):
    rig = Rig()
    other = founder(rig, 6, slot=0)
    request = founder(rig, 7, slot=1)
    rig.coordinator.prepare_decode_step(request, HEADROOM) if way in ("drop", "raise") else None
    leased = request.sequence(0).lease.base_pages.tolist()
    rig.sync.failing = True
    rig.sync.raises = way == "raise"
    if way == "finish":
        assert rig.coordinator.finish(request) is POISONED
    elif way == "compact":
        assert rig.retire(request, 0) is POISONED
    else:
        request.abandon()
    assert not request.valid()
    assert rig.coordinator.poisoned
    assert rig.coordinator.metrics().quarantined_requests == 1
    assert rig.coordinator.active_requests == 2
    assert all(rig.manager.pools.base.active_ref(page) >= 1 for page in leased)
    if way != "compact":
        recount(rig.coordinator)
    assert rig.begin(rig.admission(prompt(3), 2)).status is POISONED
    assert rig.join(other, prompt(3), 2).status is POISONED
    rig.sync.failing = False
    rig.decode(other) if way != "compact" else None
    assert rig.coordinator.finish(other) is OK
    assert rig.coordinator.shutdown() is OK
    require_baseline(rig.coordinator)


def test_153_poison_gates_finalize_but_not_the_running_sequences():
    rig = Rig()
    request = founder(rig)
    rig.join(request, prompt(9, 2), 1)
    rig.coordinator._quarantine.poison("test")
    assert rig.coordinator.finalize_sequence_admission(request, 1, Advance([1], 9)) is POISONED
    rig.decode(request, hold=[1])
    assert rig.coordinator.finish(request) is OK


def test_154_shutdown_drains_the_quarantine_and_may_be_retried():
    rig = Rig()
    handles = [founder(rig, 6, slot) for slot in (0, 1)]
    rig.sync.failing = True
    for handle in handles:
        assert rig.coordinator.finish(handle) is POISONED
    assert rig.coordinator.shutdown() is POISONED
    assert rig.coordinator.metrics().quarantined_requests == 2
    rig.sync.failing = False
    assert rig.coordinator.shutdown() is OK
    counted = require_baseline(rig.coordinator)
    assert counted.leased == 0
    assert rig.begin(rig.admission(prompt(3), 0)).status is POISONED  # shutdown is end of life
    assert rig.coordinator.recover() is True
    again = rig.begun(rig.admission(prompt(3), 0))
    rig.coordinator.finish(again)
    rig.coordinator.close()


def test_154_recover_refuses_while_a_stream_still_fails():
    rig = Rig()
    request = founder(rig)
    rig.sync.failing = True
    rig.coordinator.finish(request)
    assert rig.coordinator.recover() is False
    assert rig.coordinator.poisoned
    rig.sync.failing = False
    assert rig.coordinator.recover() is True
    assert not rig.coordinator.poisoned
    require_baseline(rig.coordinator)


def test_155_shutdown_and_close_notice_live_requests():
    rig = Rig()
    request = founder(rig)
    assert rig.coordinator.shutdown() is REQUEST_FAILED
    with pytest.raises(InvariantError, match="1 requests alive"):
        rig.coordinator.close()
    rig.coordinator.finish(request)
    assert rig.coordinator.shutdown() is OK
    rig.coordinator.close()
    rig.coordinator.close()


def test_155_a_forgotten_handle_is_abandoned_by_the_next_call(caplog):
    """The collector may run in any thread: it only marks the request, and nobody waits for a stream in there."""
    rig = Rig()
    request = founder(rig)
    rig.coordinator.prepare_decode_step(request, HEADROOM)
    waits, handles = rig.sync.calls, [request]
    del request
    with caplog.at_level(logging.ERROR):
        collector = threading.Thread(target=handles.clear)
        collector.start()
        collector.join()
        gc.collect()
    assert "dropped while its request was live" in caplog.text
    assert rig.sync.calls == waits
    recount(rig.coordinator)
    assert rig.coordinator.shutdown() is OK
    assert rig.sync.calls == waits + 1
    require_baseline(rig.coordinator)


def test_155_handles_are_never_copied():
    import copy
    import pickle

    rig = Rig()
    request = founder(rig)
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="never copied"):
            duplicate(request)
    rig.coordinator.finish(request)


def test_155_abandon_drains_only_what_is_pending_and_publishes_nothing():
    rig = Rig()
    with rig.begun(rig.admission(prompt(9), 0)) as request:
        pass
    assert not request.valid()
    assert rig.sync.calls == 0
    with rig.begun(rig.admission(prompt(9), 0)) as request:
        rig.coordinator.prepare_prefill(request)
        rig.forward(request, [(0, 9)])
    assert rig.sync.calls == 1
    assert rig.coordinator.metrics().published_blocks == 0
    assert require_baseline(rig.coordinator).free == 16


@pytest.mark.parametrize("seed", range(6))
def test_156_random_legal_and_illegal_calls_keep_every_invariant(seed):
    rng = np.random.default_rng(seed)
    rig = Rig(page_size=2, num_pages=18, batch=3, capacity=12, max_records=[None, 2, 0][seed % 3])
    coordinator = rig.coordinator
    handle = rig.container()
    texts: dict[int, list[int]] = {}
    prompts: dict[int, list[int]] = {}
    for _ in range(250):
        action = rng.integers(7)
        occupied = [s.resident.slot for s in handle.impl.sequences]
        if action <= 1:
            slot = int(rng.integers(3))
            tokens = prompt(int(rng.integers(1, 11)), int(rng.integers(1, 4)))
            if slot in occupied:
                with pytest.raises(CallerError):
                    rig.join(handle, tokens, slot)
            elif rig.join(handle, tokens, slot).status is OK:
                prompts[slot], texts[slot] = tokens, []
        elif action <= 4 and occupied:
            refused = random_step(rig, handle, rng, texts)
            if refused is not None:
                rig.retire(handle, refused)
        elif action == 5 and occupied:
            index = int(rng.integers(len(occupied)))
            with pytest.raises(CallerError):
                coordinator.advance_prefill(handle, index, 99)
            if not handle.sequence(index).finalized:
                coordinator.rebind_prefill(handle, index)
        elif occupied:
            index = int(rng.integers(len(occupied)))
            slot = occupied[index]
            expected = toy_generate(prompts[slot], len(texts[slot]), VOCAB)
            assert texts[slot] == expected
            rig.retire(handle, index)
        recount(coordinator)
    metrics = coordinator.metrics()
    plans = metrics.standard_plans + metrics.no_reusable_prefix_plans + metrics.full_input_rewind_plans
    assert plans == metrics.admitted_sequences > 20
    assert metrics.publication_attempts == metrics.committed_publications + metrics.existing_publications
    assert coordinator.finish(handle) is OK
    require_baseline(coordinator)
    rig.coordinator._manager.evict_all()
    assert count_pages(rig.manager).free == 18


def random_step(rig, handle, rng, texts):
    """A ragged step: chunks of random length and decode rows of a random subset; the refused slot or None."""
    coordinator, work, decoding = rig.coordinator, [], []
    for index, sequence in enumerate(handle.impl.sequences):
        if rng.integers(4) == 0:
            continue
        left = sequence.num_tokens - sequence.committed_state_length
        if sequence.finalized:
            if sequence.num_tokens >= 12 or handle.impl.lengths.ended[index]:
                continue
            decoding.append(index)
            work.append((index, 1))
        else:
            work.append((index, int(rng.integers(1, left + 1))))
    if coordinator.prepare_decode_step(handle, HEADROOM, decoding) is REQUEST_FAILED:
        return handle.refused_slot
    chosen = dict(zip([i for i, _ in work], rig.forward(handle, work), strict=True)) if work else {}
    tokens = [HOLD_TOKEN] * handle.num_sequences
    completed = []
    for index, length in work:
        sequence = handle.sequence(index)
        slot = sequence.resident.slot
        if sequence.finalized:
            tokens[index] = chosen[index]
            texts[slot].append(chosen[index])
            completed += [index] if rng.integers(3) == 0 else []
            continue
        committed = sequence.committed_state_length + length
        assert coordinator.advance_prefill(handle, index, committed) is OK
        if committed == sequence.num_tokens:
            coordinator.finalize_sequence_admission(handle, index, Advance([chosen[index]], committed))
            texts[slot].append(chosen[index])
    assert coordinator.complete_decode_step(handle, OneTokenAdvances(tokens), completed) is OK
    return None


# --- chunks, rebinding and the container ---------------------------------------------------------------------


def test_container_first_and_tenth_take_one_path_and_reuse_each_other():
    rig = Rig(num_pages=24)
    handle = rig.container()
    assert handle.impl.phase is Phase.EXECUTING
    assert rig.coordinator.active_requests == 1
    history = prompt(6)
    for turn in range(4):
        result = rig.join(handle, history, turn % 4)
        assert result.prefill_start == (0 if turn == 0 else len(history) - 3)
        sequence = handle.sequence(0)
        text = [rig.chunk(handle, 0, sequence.num_tokens - sequence.committed_state_length)]
        for step in range(3):
            text += rig.decode(handle, completed=[0] if step == 2 else [])
        assert text == toy_generate(history, 4, VOCAB)
        rig.retire(handle, 0)
        history = history + text + [turn, turn]
    rig.coordinator.finish(handle)
    require_baseline(rig.coordinator)


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 13])
def test_chunks_publish_the_blocks_they_complete_and_give_the_same_text(chunk):
    rig = Rig()
    handle = rig.container()
    tokens = prompt(13)
    rig.join(handle, tokens, 0)
    sequence, token = handle.sequence(0), None
    while not sequence.finalized:
        token = rig.chunk(handle, 0, min(chunk, sequence.num_tokens - sequence.committed_state_length))
        assert sequence.published_full_block_count == sequence.committed_state_length // 4
    assert [token] == toy_generate(tokens, 1, VOCAB)
    metrics = rig.coordinator.metrics()
    assert metrics.published_blocks == 3
    assert metrics.publication_attempts == 1
    assert len(rig.manager.records) == 1
    rig.coordinator.finish(handle)


def test_a_chunk_moves_no_token_and_cannot_go_back_or_beyond():
    rig = Rig()
    handle = rig.container()
    rig.join(handle, prompt(9), 0)
    rig.chunk(handle, 0, 5)
    for wrong in (4, 10):
        with pytest.raises(InvalidArgumentError, match="must be from 5 to 9"):
            rig.coordinator.advance_prefill(handle, 0, wrong)
    rig.chunk(handle, 0, 4)
    assert handle.sequence(0).num_tokens == 10
    with pytest.raises(ContractViolation, match="is complete"):
        rig.coordinator.advance_prefill(handle, 0, 9)
    with pytest.raises(ContractViolation, match="out of range"):
        rig.coordinator.advance_prefill(handle, 1, 9)
    rig.coordinator.finish(handle)


def test_identical_prompts_in_flight_share_one_producer():
    rig = Rig()
    handle = rig.container()
    tokens = prompt(14)
    rig.join(handle, tokens, 0)
    late = rig.join(handle, [*tokens[:12], 60, 61], 1)
    assert late.prefill_start == 0  # nothing is visible before it is written
    rig.chunk(handle, 0, 9)
    computed = rig.executor.tokens_computed
    free = rig.free()
    assert rig.coordinator.rebind_prefill(handle, 1) == 8
    assert rig.row(1)[:2] == rig.row(0)[:2]
    assert rig.free() == free + 2
    recount(rig.coordinator)
    sequence = handle.sequence(1)
    assert (sequence.committed_state_length, sequence.reuse_report.reused_tokens) == (8, 8)
    assert rig.coordinator.metrics().rebound_tokens == 8
    assert rig.coordinator.rebind_prefill(handle, 1) == 8  # nothing new
    token = rig.chunk(handle, 1, 6)
    assert rig.executor.tokens_computed == computed + 6
    assert [token] == toy_generate([*tokens[:12], 60, 61], 1, VOCAB)
    assert [rig.chunk(handle, 0, 5)] == toy_generate(tokens, 1, VOCAB)
    with pytest.raises(ContractViolation, match="incomplete prompts"):
        rig.coordinator.rebind_prefill(handle, 1)
    rig.coordinator.finish(handle)
    require_baseline(rig.coordinator)


def test_a_bypass_joiner_never_rebinds():
    rig = Rig()
    handle = rig.container()
    rig.join(handle, prompt(9), 0)
    rig.join(handle, prompt(9), 1, lookup=BYPASS)
    rig.chunk(handle, 0, 9)
    assert rig.coordinator.rebind_prefill(handle, 1) == 0
    rig.coordinator.finish(handle)


def test_joiners_choose_their_own_policies():
    """Fixed: the reference ignores a joiner's override and takes the founder's policies."""
    rig = Rig(num_pages=32)
    handle = rig.container()
    rig.join(handle, prompt(9), 0)
    rig.chunk(handle, 0, 9)
    bypass = rig.join(handle, prompt(9), 1, lookup=BYPASS)
    assert bypass.reuse == ReuseReport(9, 0, 0, ReuseStopReason.BYPASS, 0)
    prefill_only = rig.join(handle, [*prompt(8), 1, 2, 3], 2, commit=PREFILL_ONLY)
    assert prefill_only.prefill_start == 8
    rig.chunk(handle, 1, 9)
    rig.chunk(handle, 2, 3)
    for _ in range(6):
        rig.decode(handle)
    # 9+6, 9+6, 11+6 committed: generated blocks of the first only; nothing of the bypass.
    assert [s.published_full_block_count for s in handle.impl.sequences] == [3, 0, 2]
    rig.coordinator.finish(handle)


def test_generated_blocks_become_visible_before_their_sequence_ends():
    rig = Rig()
    handle = rig.container()
    rig.join(handle, prompt(6), 0)
    text = [rig.chunk(handle, 0, 6)]
    for _ in range(6):
        text += rig.decode(handle)
    assert rig.coordinator.metrics().published_blocks == 3
    assert len(rig.manager.records) == 1
    result = rig.join(handle, prompt(6) + text[:7], 1)
    assert result.prefill_start == 12
    rig.coordinator.finish(handle)


# --- reports, metrics, configuration -------------------------------------------------------------------------


def test_reuse_reports_say_why_matching_stopped():
    rig = Rig(num_pages=6, capacity=24)
    _, cold = rig.run(prompt(9), 1)
    assert cold == ReuseReport(9, 0, 0, ReuseStopReason.NO_RECORD, 0)
    _, branch = rig.run([*prompt(6), 90, 91, 92], 1)
    assert branch == ReuseReport(9, 6, 6, ReuseStopReason.NO_RECORD, 6)
    rig.run(prompt(20, 7), 1)  # pushes everything else out
    _, evicted = rig.run(prompt(9), 1)
    assert evicted == ReuseReport(9, 0, 0, ReuseStopReason.EVICTED, 0)


def test_disabled_cache_still_manages_pages_and_says_so():
    rig = Rig(enabled=False)
    for _ in range(2):
        text, report = rig.run(prompt(9), 3)
        assert text == toy_generate(prompt(9), 3, VOCAB)
        assert report == ReuseReport(9, 0, 0, ReuseStopReason.DISABLED, 0)
    assert rig.coordinator.metrics().published_blocks == 0
    assert require_baseline(rig.coordinator).free == 16


def test_max_records_zero_retains_nothing():
    rig = Rig(max_records=0)
    rig.run(prompt(9), 3)
    _, report = rig.run(prompt(9), 3)
    assert report.reused_tokens == 0
    metrics = rig.coordinator.metrics()
    assert (metrics.committed_publications, metrics.current_records, metrics.published_blocks) == (2, 0, 0)


def test_metrics_is_a_copy_with_gauges():
    rig = Rig()
    rig.run(prompt(9), 1)
    metrics = rig.coordinator.metrics()
    assert metrics.base_kv_pages == (14, 16)
    assert metrics.draft_kv_pages == (0, 0)
    assert metrics.current_records == 1
    metrics.admitted_sequences = 77
    assert rig.coordinator.metrics().admitted_sequences == 1
    assert metrics.as_dict()["base_kv_pages"] == (14, 16)


@pytest.mark.parametrize("repeat", [1, 2])
@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9, 16])
def test_same_prompt_twice_computes_at_least_one_token_and_the_same_text(length, repeat):
    rig = Rig()
    for _ in range(repeat + 1):
        text, report = rig.run(prompt(length), 2)
        assert text == toy_generate(prompt(length), 2, VOCAB)
        assert report.reused_tokens <= length - 1
    assert report.reused_tokens == length - 1


def test_recycled_pages_are_not_findable():
    rig = Rig(num_pages=5, capacity=20)
    rig.run(prompt(8), 1)
    rig.run(prompt(16, 5), 1)
    text, report = rig.run(prompt(8), 1)
    assert (text, report.reused_tokens) == (toy_generate(prompt(8), 1, VOCAB), 0)


# --- plugins: a factory that raises --------------------------------------------------------------------------


def test_a_factory_that_raises_leaks_nothing():
    built = []

    def explode(coordinator):
        if built:
            raise RuntimeError("no policy today")
        built.append(coordinator)
        return BaseEndpointPolicy(coordinator)

    rig = Rig(policies=[PolicyRegistration("x", explode, lambda profile, spec: True, 0, "test")])
    with pytest.raises(PluginError, match="no policy today"):
        rig.begin(rig.admission(prompt(3), 0))
    assert rig.coordinator.active_requests == 0


# --- construction --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_pages": 99}, "num_pages is 16 and the deployment says 99"),
        ({"max_batch_size": 3}, "num_slots is 4 and the deployment says 3"),
        ({"max_kv_capacity": 64}, "pages_per_slot is 9 and the deployment says 17"),
        ({"page_size": 8}, "says"),
        ({"num_pages": 0}, "num_pages is 0"),
    ],
)
def test_geometry_must_agree(change, words):
    from dataclasses import replace

    rig = Rig()
    resources = ContextCachePhysicalResources(rig.executor.kv_cache, rig.table)
    with pytest.raises(InvalidArgumentError, match=words):
        ContextCacheCoordinator(
            ContextCacheConfig(),
            replace(rig.deployment, **change),
            ContextCacheDeploymentProfile(),
            resources,
            rig.device.stream,
        )


def test_draft_resources_exactly_with_a_paged_draft():
    rig = Rig()
    for resources in (
        ContextCachePhysicalResources(rig.executor.kv_cache, rig.table, draft_cache=object()),
        ContextCachePhysicalResources(rig.executor.kv_cache, rig.table, draft_page_table=rig.table),
    ):
        with pytest.raises(InvalidArgumentError, match="neither a draft"):
            ContextCacheCoordinator(
                ContextCacheConfig(), rig.deployment, ContextCacheDeploymentProfile(), resources, rig.device.stream
            )


def test_one_token_advances_read_like_single_ones():
    advances = OneTokenAdvances([5, HOLD_TOKEN, 7], committed_before=[3, 4, 5])
    assert len(advances) == 3
    assert list(advances) == [Advance([5], 4), Advance(), Advance([7], 6)]
    assert advances[-1] == Advance([7], 6)
    assert advances[:2] == [Advance([5], 4), Advance()]
    with pytest.raises(InvalidArgumentError, match="committed_before"):
        OneTokenAdvances([5])[0]
    with pytest.raises(InvalidArgumentError, match="shape"):
        OneTokenAdvances([[5]])


def test_resident_epochs_and_slots_are_the_schedulers():
    rig = Rig()
    request = rig.begun(rig.admission(prompt(3), 2, epoch=41))
    assert request.sequence(0).resident == ResidentRef(2, 41)
    rig.coordinator.prepare_prefill(request)
    assert rig.row(2) == request.sequence(0).lease.base_pages.tolist()
    rig.coordinator.finish(request)
