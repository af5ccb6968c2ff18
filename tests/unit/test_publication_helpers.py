"""What the helpers behind `PublicationPolicy` count, log and record."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
from coordinator_rig import HEADROOM, OK, VOCAB, Rig, all_policies

from edgellm.cache import boundary, endpoints, rebind, snapshots, spec_endpoints
from edgellm.cache.advances import HOLD_TOKEN, OneTokenAdvances
from edgellm.cache.policy_step import PolicyStep
from edgellm.cache.types import (
    ContextCacheCommitPolicy,
    ContextCacheConfig,
    ContextCacheLookupPolicy,
    ContextCacheSequenceAdvance,
    HybridCheckpointKey,
    PublicationPoint,
    ReuseReport,
    ReuseStopReason,
)
from edgellm.errors import ContractViolation, InvalidArgumentError
from edgellm.testing.toy_batch_driver import ToyBatchDriver
from edgellm.testing.toy_driver import FLAVOURS, ToyDriver


def driver_for(flavour, **options):
    config = ContextCacheConfig(policy_deadline_seconds=None)
    return ToyDriver(FLAVOURS[flavour], policies=all_policies(), config=config, **options)


def prompt(length, seed=1):
    return [(seed * 31 + 7 * i * i + i) % 50 for i in range(length)]


def rig_prompt(length, seed=1):
    return [(seed * 31 + 7 * i * i + i) % VOCAB for i in range(length)]


def test_snapshot_pressure_counts_every_skip_and_logs_at_powers_of_two(caplog):
    driver = driver_for("hybrid")
    with caplog.at_level(logging.WARNING):
        for _ in range(9):
            snapshots.count_pressure(driver.coordinator)
    assert driver.coordinator.metrics().hybrid_snapshot_pressure_skips == 9
    logged = [record.args[0] for record in caplog.records if "were skipped" in record.msg]
    assert logged == [1, 2, 4, 8]


def test_a_spec_endpoint_at_prompt_end_is_a_record_and_blocks_of_a_chunk_are_not():
    driver = driver_for("eagle")
    driver.admit(prompt(12))
    coordinator, impl = driver.coordinator, driver.request.impl
    assert coordinator.prepare_decode_step(driver.request, driver.headroom, []) is OK
    assert coordinator.advance_prefill(driver.request, 0, 12, 12) is OK  # the policy publishes the chunk's blocks
    assert coordinator.metrics().current_records == 0
    blocks = int(impl.lengths.offered_blocks[0])
    spec_endpoints.publish_spec_endpoint(coordinator, impl, 0, 12, PublicationPoint.PREFILL_CHUNK)
    assert coordinator.metrics().current_records == 0
    spec_endpoints.publish_spec_endpoint(coordinator, impl, 0, 12, PublicationPoint.PREFILL_END)
    assert coordinator.metrics().current_records == 1
    (record,) = coordinator.manager.records.lru_to_mru()
    assert coordinator.manager.record(record).key.full_block_count == 3
    assert blocks == int(impl.lengths.offered_blocks[0]) == 3


def test_publications_are_counted_one_by_one():
    rig = Rig(page_size=4)
    handle = rig.container()
    for slot, length in ((0, 9), (1, 13)):
        rig.join(handle, rig_prompt(length, slot + 1), slot)
        rig.chunk(handle, slot, 8)  # two blocks, without an endpoint
        rig.chunk(handle, slot, length - 8)
    counted = rig.coordinator.metrics()
    assert (counted.published_blocks, counted.block_publications) == (5, 3)
    assert (counted.published_endpoints, counted.publication_attempts) == (2, 2)
    assert (counted.committed_publications, counted.existing_publications) == (2, 0)
    rig.join(handle, rig_prompt(9), 2)
    rig.chunk(handle, 2, 1)
    counted = rig.coordinator.metrics()
    assert (counted.published_endpoints, counted.publication_attempts) == (3, 3)
    assert (counted.committed_publications, counted.existing_publications) == (2, 1)
    rig.join(handle, rig_prompt(13, 2), 3)
    rig.chunk(handle, 3, 1)
    counted = rig.coordinator.metrics()
    assert (counted.published_endpoints, counted.existing_publications) == (4, 2)


def test_every_wait_for_captures_is_counted():
    driver = driver_for("hybrid")
    for number in (1, 2, 3):
        sequence = driver.admit(prompt(6, number), checkpoint_boundaries=[4])  # so its end is kept
        driver.prefill(sequence)
        driver.step(finish=[sequence])
        assert driver.coordinator.metrics().hybrid_capture_synchronizations == number
    driver.close()


def test_common_lengths_of_a_step_are_refused_without_draft_state_and_required_with_it():
    rig = Rig()
    handle = rig.container()
    rig.join(handle, rig_prompt(6), 0)
    rig.chunk(handle, 0, 6)
    assert rig.coordinator.prepare_decode_step(handle, HEADROOM) is OK
    advances = [ContextCacheSequenceAdvance([1], 7)]
    with pytest.raises(InvalidArgumentError, match="common_state_lengths"):
        rig.coordinator.complete_decode_step(handle, advances, (), [7])
    assert handle.sequence(0).committed_state_length == 6
    assert rig.coordinator.complete_decode_step(handle, advances) is OK
    driver = driver_for("eagle")
    driver.prefill(driver.admit(prompt(6)))
    assert driver.coordinator.prepare_decode_step(driver.request, driver.headroom) is OK
    with pytest.raises(InvalidArgumentError, match="common_state_lengths"):
        driver.coordinator.complete_decode_step(driver.request, [ContextCacheSequenceAdvance([1], 7)])
    assert driver.request.sequence(0).committed_state_length == 6
    assert driver.coordinator.metrics().policy_failures == 0


def stop_reason(rig, tokens):
    request = rig.begun(rig.admission(tokens, 3))
    reason = request.sequence(0).reuse_report.stop_reason
    request.abandon()
    return reason


def test_only_a_whole_block_that_a_commit_policy_kept_back_counts_as_withheld():
    only_prompt = {"commit": ContextCacheCommitPolicy.PREFILL_STATE_ONLY}
    for steps, expected in ((2, ReuseStopReason.NO_RECORD), (4, ReuseStopReason.POLICY)):
        rig = Rig(page_size=4)
        generated, _ = rig.run(rig_prompt(6), steps, **only_prompt)  # state for one token less than was generated
        assert stop_reason(rig, [*rig_prompt(6), *generated, 1]) is expected


def test_what_a_bypassing_request_computed_was_not_withheld():
    rig = Rig(page_size=4)
    generated, _ = rig.run(rig_prompt(6), 4, lookup=ContextCacheLookupPolicy.BYPASS)
    assert stop_reason(rig, [*rig_prompt(6), *generated, 1]) is ReuseStopReason.NO_RECORD


def test_a_publication_that_moves_no_page_sends_no_row():
    rig = Rig(page_size=4)
    handle = rig.container()
    rig.join(handle, rig_prompt(6), 0)
    rig.chunk(handle, 0, 6)
    uploads = len(rig.mirror.uploads)
    rig.decode(handle)
    rig.decode(handle)  # token 8 completes the second block: it is published, and its page stays where it is
    assert handle.sequence(0).published_full_block_count == 2
    assert rig.mirror.uploads[uploads:] == []
    assert rig.coordinator.metrics().block_publications == 2  # of the chunk, and this one


def test_nothing_is_published_from_a_sealed_lease():
    rig = Rig(page_size=4)
    handle = rig.container()
    rig.join(handle, rig_prompt(6), 0)
    rig.chunk(handle, 0, 6)
    rig.decode(handle, completed=[0])
    lengths = handle.impl.lengths
    assert (handle.impl.leases[0].sealed, bool(lengths.sealed[0])) == (True, True)
    before = rig.coordinator.metrics()
    lengths.recorded_blocks[0] = 0  # as if its endpoint were still to be recorded
    endpoints.publish_ready_endpoint(rig.coordinator, handle.impl, 0, PublicationPoint.DECODE_END)
    assert rig.coordinator.metrics() == before


class Prompt:
    """What `checkpoint_kind` and `lengths_to_keep` look at: a prompt of 20 tokens, 3 of them volatile."""

    index, replay_tail_length, branch_point = 1, 3, 12
    lengths = SimpleNamespace(prompt=[0, 20])

    def __init__(self, *boundaries, wanted=()):
        self.template_boundaries, self.wanted_checkpoints = boundaries, wanted


@pytest.mark.parametrize(
    ("boundaries", "kinds"),
    [
        ((), {4: "LADDER", 12: "BRANCH", 16: "LADDER", 17: "TAIL", 18: "TAIL", 20: "TAIL"}),
        ((6,), {4: "LADDER", 6: "TAIL", 12: "BRANCH", 17: "TAIL"}),
        ((6, 9, 12), {6: "ANCHOR", 9: "TAIL", 12: "TAIL", 16: "LADDER"}),
    ],
)
def test_the_kind_of_a_checkpoint_says_how_long_it_is_worth_keeping(boundaries, kinds):
    prompt = Prompt(*boundaries)
    assert {length: snapshots.checkpoint_kind(prompt, length).name for length in kinds} == kinds


def test_a_prompt_keeps_its_own_checkpoints_except_those_at_ends():
    assert snapshots.lengths_to_keep(Prompt(6, 9, wanted=(4, 6, 9, 12, 20))) == (4, 6, 12)


def test_a_policy_reserves_where_the_state_stands_and_is_told_whether_it_did():
    driver = driver_for("hybrid")
    for number in (1, 2):
        driver.admit(prompt(9, number), commit=ContextCacheCommitPolicy.PREFILL_STATE_ONLY)
    coordinator, impl, reserve = driver.coordinator, driver.request.impl, snapshots.reserve_hybrid_capture
    assert reserve(coordinator, impl, 0, 0, PublicationPoint.PREFILL_CHUNK) is False  # nothing is there yet
    with pytest.raises(InvalidArgumentError, match=r"^slot 0: a checkpoint at 4, and its state stands at 0$"):
        reserve(coordinator, impl, 0, 4, PublicationPoint.PREFILL_CHUNK)
    impl.lengths.committed[:2] = 4
    assert reserve(coordinator, impl, 0, 4, PublicationPoint.DECODE_END) is False  # answers are not to be kept
    assert reserve(coordinator, impl, 0, 4, PublicationPoint.PREFILL_CHUNK) is True
    assert impl.sequences[0].staged_hybrid_publication.point is PublicationPoint.PREFILL_CHUNK
    impl.hook_slot = 0
    with pytest.raises(
        ContractViolation, match=r"^slot 1: its state may be ahead of its ledger here; capture it after"
    ):
        reserve(coordinator, impl, 1, 4, PublicationPoint.PREFILL_CHUNK)
    impl.hook_slot = 1
    assert reserve(coordinator, impl, 1, 4, PublicationPoint.PREFILL_CHUNK) is True
    assert coordinator.manager.pools.recurrent.free_count == 6


def test_a_checkpoint_is_published_once_it_is_captured_and_committed():
    driver = driver_for("hybrid")
    driver.admit(prompt(9))
    coordinator, impl = driver.coordinator, driver.request.impl
    sequence = impl.sequences[0]
    assert coordinator.prepare_decode_step(driver.request, driver.headroom, []) is OK
    assert snapshots.reserve_capture(coordinator, impl, 0, 8, PublicationPoint.PREFILL_CHUNK) is True
    impl.lengths.committed[0] = 8
    with pytest.raises(ContractViolation, match=r"at 8 is not complete \(captured: False, committed: 8\)"):
        snapshots.publish_staged(coordinator, impl, 0)
    snapshots.enqueue_capture(coordinator, impl, 0)
    impl.lengths.committed[0] = 7
    with pytest.raises(ContractViolation, match=r"at 8 is not complete \(captured: True, committed: 7\)"):
        snapshots.publish_staged(coordinator, impl, 0)
    impl.lengths.committed[0] = impl.lengths.common[0] = impl.lengths.proven[0] = 8
    snapshots.publish_staged(coordinator, impl, 0)
    assert (sequence.published_exact_length, sequence.published_full_block_count) == (8, 2)
    counted = coordinator.metrics()
    assert (counted.published_endpoints, counted.committed_publications, counted.block_publications) == (1, 1, 0)
    snapshots.publish_staged(coordinator, impl, 0)  # nothing is staged any more
    assert coordinator.metrics() == counted


def checkpoints(driver):
    """(length, kind, superseded) of every checkpoint, by length."""
    records = driver.coordinator.manager.records
    return sorted((records.exact_length(r), records.kind(r).name, records.superseded(r)) for r in records.lru_to_mru())


@pytest.mark.parametrize("flavour", ["hybrid", "mtp"])
def test_a_longer_prompt_keeps_the_rungs_it_wants_itself(flavour):
    config = ContextCacheConfig(policy_deadline_seconds=None, checkpoint_interval_tokens=8)
    driver = ToyDriver(FLAVOURS[flavour], policies=all_policies(), config=config)
    driver.prefill(driver.admit(prompt(20)))
    (first,) = checkpoints(driver)
    assert first == (16, "LADDER", False)
    driver.prefill(driver.admit([*prompt(20), *prompt(8, 3)]))
    kept = {length: superseded for length, _, superseded in checkpoints(driver)}
    assert kept[16] is False
    assert max(kept) == 24
    assert not any(superseded for length, superseded in kept.items() if length in (16, 24))


def test_boundaries_are_counted_as_waits_and_as_endpoints():
    config = ContextCacheConfig(policy_deadline_seconds=None, checkpoint_interval_tokens=8)
    driver = ToyDriver(FLAVOURS["mtp"], policies=all_policies(), config=config)
    sequence = driver.admit(prompt(20), checkpoint_boundaries=[5, 9])
    wanted = sequence.boundaries
    driver.prefill(sequence)
    counted = driver.coordinator.metrics()
    assert wanted[:2] == (5, 9)
    assert (counted.published_endpoints, counted.hybrid_capture_synchronizations) == (len(wanted), len(wanted))
    assert [(length, kind) for length, kind, _ in checkpoints(driver)][:2] == [(5, "ANCHOR"), (9, "TAIL")]
    state = driver.request.sequence(0)
    assert state.published_exact_length == wanted[-1]
    assert state.published_full_block_count >= (wanted[-1] - 1) // 4


@pytest.mark.parametrize(
    ("known", "reason", "matched", "stop"),
    [
        (8, ReuseStopReason.NO_RECORD, 10, 9),
        (11, ReuseStopReason.NO_RECORD, 11, 11),
        (12, ReuseStopReason.FULL, 12, 12),  # 14 tokens: nothing is left behind the third block to share
        (13, ReuseStopReason.FULL, 13, 13),
    ],
)
def test_a_reuse_report_follows_what_a_producer_in_flight_gave(known, reason, matched, stop):
    report = ReuseReport(14, 4, 10, ReuseStopReason.NO_RECORD, 9)
    expected = replace(
        report, reused_tokens=4 + known - 4, matched_tokens=matched, stop_reason=reason, stop_position=stop
    )
    assert rebind._report_after(report, known - 4, known, 4) == expected


@pytest.mark.parametrize(("length", "complete"), [(12, 8), (13, 12)])
def test_a_prompt_of_whole_blocks_computes_its_last_one(length, complete):
    for known, reason in ((complete, ReuseStopReason.FULL), (complete - 1, ReuseStopReason.EVICTED)):
        report = ReuseReport(length, 0, 0, ReuseStopReason.EVICTED, 0)
        assert rebind._report_after(report, known, known, 4).stop_reason is reason


def test_a_joiner_reports_what_it_took_over_in_flight():
    rig = Rig(page_size=4)
    handle = rig.container()
    for slot in (0, 1):
        rig.join(handle, rig_prompt(14), slot)
    rig.chunk(handle, 0, 9)
    assert rig.coordinator.rebind_prefill(handle, 1) == 8
    assert handle.sequence(1).reuse_report == ReuseReport(14, 8, 8, ReuseStopReason.NO_RECORD, 8)
    rig.chunk(handle, 0, 5)
    assert rig.coordinator.rebind_prefill(handle, 1) == 12
    assert handle.sequence(1).reuse_report == ReuseReport(14, 12, 12, ReuseStopReason.FULL, 12)
    assert rig.coordinator.metrics().rebound_tokens == 12


def test_a_step_must_be_applied_before_its_state_is_captured_and_the_prompt_be_complete():
    driver = driver_for("hybrid")
    for number in (1, 2):
        driver.admit(prompt(9, number))
    driver.prefill(next(iter(driver.live.values())))
    coordinator, impl, reserve = driver.coordinator, driver.request.impl, snapshots.reserve_hybrid_capture
    impl.step = PolicyStep(impl, OneTokenAdvances([HOLD_TOKEN] * 2))
    impl.lengths.committed[1] = 4
    impl.sequences[0].published_exact_length = 0
    message = "its state may be ahead of its ledger here"
    for applied, slot in ((False, 0), (False, 1), (True, 1)):
        impl.step.applied = applied
        with pytest.raises(ContractViolation, match=message):
            reserve(coordinator, impl, slot, 9 if slot == 0 else 4, PublicationPoint.DECODE_END)
    assert reserve(coordinator, impl, 0, 9, PublicationPoint.DECODE_END) is True
    impl.step = None


def test_a_capture_of_an_answer_stands_at_what_is_committed():
    driver = driver_for("hybrid")
    driver.prefill(driver.admit(prompt(6)))
    impl = driver.request.impl
    impl.sequences[0].published_exact_length = 0
    assert (impl.sequences[0].committed_state_length, impl.sequences[0].num_tokens) == (6, 7)
    with pytest.raises(InvalidArgumentError, match=r"^slot 0: a checkpoint at 7 must be from 6 to 6$"):
        snapshots.reserve_capture(driver.coordinator, impl, 0, 7, PublicationPoint.DECODE_END)


def test_under_snapshot_pressure_nothing_is_staged():
    driver = driver_for("hybrid", recurrent_slots=1)
    driver.admit(prompt(9))
    coordinator, impl = driver.coordinator, driver.request.impl
    held = coordinator._manager.reserve_hybrid_snapshots(impl.leases[0], False)
    assert snapshots.reserve_capture(coordinator, impl, 0, 8, PublicationPoint.PREFILL_CHUNK) is False
    assert impl.sequences[0].staged_hybrid_publication is None
    assert coordinator.metrics().hybrid_snapshot_pressure_skips == 1
    coordinator._manager.retire_hybrid_snapshot_reservation(impl.leases[0], held)


def test_a_staged_capture_is_copied_once():
    driver = driver_for("hybrid")
    driver.admit(prompt(9))
    coordinator, impl = driver.coordinator, driver.request.impl
    assert snapshots.reserve_capture(coordinator, impl, 0, 8, PublicationPoint.PREFILL_CHUNK) is True
    storage, copies = coordinator.resources.snapshot_storage, []
    counting = SimpleNamespace(
        capture_recurrent=lambda *where: copies.append(where), capture_partial_kv=storage.capture_partial_kv
    )
    coordinator.resources.snapshot_storage = counting
    for _ in range(2):
        snapshots.enqueue_capture(coordinator, impl, 0)
    snapshots.enqueue_capture(coordinator, impl, 0)
    coordinator.resources.snapshot_storage = storage
    assert len(copies) == 1
    assert impl.sequences[0].staged_hybrid_publication.captured


def test_a_verification_proves_the_draft_of_who_took_part_in_it():
    driver = driver_for("eagle")
    for number in (1, 2):
        driver.prefill(driver.admit(prompt(6, number)))
    unproven = driver.request.impl.lengths.draft_unproven
    assert unproven[:2].tolist() == [True, True]
    driver.step([driver.live[2]])
    assert unproven[:2].tolist() == [True, False]
    driver.step()
    assert unproven[:2].tolist() == [False, False]
    driver.close()


def test_restores_are_counted():
    driver = driver_for("hybrid")
    first = driver.admit(prompt(9))
    driver.prefill(first)
    for count in (1, 2):
        driver.admit([*prompt(9), count])
        assert driver.coordinator.metrics().hybrid_restores == count


def test_a_checkpoint_is_known_by_exactly_its_tokens():
    driver = driver_for("hybrid")
    driver.admit(prompt(9))
    sequence = driver.request.impl.sequences[0]
    assert snapshots.exact_key(sequence, 6) == HybridCheckpointKey(sequence.chain.prefix_hash(6), 6)
    assert snapshots.exact_key(sequence, 6) != HybridCheckpointKey(sequence.chain.prefix_hash(7), 6)


def test_answers_that_are_not_to_be_kept_are_skipped_before_their_lengths_are_checked():
    driver = driver_for("hybrid")
    driver.admit(prompt(9), commit=ContextCacheCommitPolicy.PREFILL_STATE_ONLY)
    coordinator, impl = driver.coordinator, driver.request.impl
    for reserve in (snapshots.reserve_hybrid_capture, snapshots.reserve_capture):
        assert reserve(coordinator, impl, 0, 99, PublicationPoint.DECODE_END) is False
        with pytest.raises(InvalidArgumentError, match="a checkpoint at 99"):
            reserve(coordinator, impl, 0, 99, PublicationPoint.PREFILL_END)


def test_a_capture_that_was_copied_is_only_waited_for():
    driver = driver_for("hybrid")
    driver.admit(prompt(9))
    coordinator, impl = driver.coordinator, driver.request.impl
    assert coordinator.prepare_decode_step(driver.request, driver.headroom, []) is OK
    assert snapshots.reserve_capture(coordinator, impl, 0, 8, PublicationPoint.PREFILL_CHUNK) is True
    snapshots.enqueue_capture(coordinator, impl, 0)
    waits = driver.sync.calls
    assert snapshots.capture_staged(coordinator, impl) is OK  # its ledger stands at 0, and nothing is copied again
    assert driver.sync.calls == waits + 1
    assert impl.has_pending_device_work() is False


def test_a_wait_in_the_middle_of_a_step_leaves_it_pending():
    driver = driver_for("mtp")
    driver.admit(prompt(9))
    coordinator, impl = driver.coordinator, driver.request.impl
    assert coordinator.prepare_decode_step(driver.request, driver.headroom, []) is OK
    assert impl.has_pending_device_work() is True
    assert boundary._wait(coordinator, impl) is OK
    assert impl.has_pending_device_work() is True
    impl.mark_device_work_resolved_without_sync()
    assert boundary._wait(coordinator, impl) is OK
    assert impl.has_pending_device_work() is False


def test_a_boundary_behind_a_whole_block_offers_that_block():
    driver = driver_for("mtp")
    sequence = driver.admit(prompt(20), checkpoint_boundaries=[5])
    driver.prefill_chunk(sequence, 5)
    state = driver.request.sequence(0)
    assert (state.published_exact_length, int(driver.request.impl.lengths.offered_blocks[0])) == (5, 1)
    driver.close()


def test_a_speculative_batch_is_unproven_until_its_first_verification():
    driver = ToyBatchDriver(
        FLAVOURS["eagle"], policies=all_policies(), config=ContextCacheConfig(policy_deadline_seconds=None)
    )
    driver.begin(prompt(6), prompt(7, 2))
    driver.prefill_batch()
    unproven = driver.request.impl.lengths.draft_unproven
    assert unproven[:2].tolist() == [True, True]
    driver.step()
    assert unproven[:2].tolist() == [False, False]
    driver.close()
