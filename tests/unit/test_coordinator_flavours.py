"""The coordinator with checkpoints and with draft state: behaviours M and N by their numbers.

The toy driver plays the runtime and compares every text and every byte of state with a solo run; it also checks all
invariants after every call.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from coordinator_rig import OK, all_policies

from edgellm.cache.request import Phase
from edgellm.cache.types import (
    BlockKeyExtras,
    CheckpointKind,
    ContextCacheBatchAdmission,
    ContextCacheConfig,
    ContextCacheCoordinatorStatus,
    ContextCacheLookupPolicy,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    DecodingKvHeadroom,
    DecodingTokenStateContract,
    Hash128,
    ReuseStopReason,
)
from edgellm.errors import CallerError, ContractViolation, InvalidArgumentError, PluginError, SessionLostError
from edgellm.session.types import ResidentRef
from edgellm.testing.recount import recount
from edgellm.testing.toy_batch_driver import ToyBatchDriver
from edgellm.testing.toy_driver import FLAVOURS, ToyDriver
from edgellm.testing.toy_model import HIDDEN_WIDTH

POISONED = ContextCacheCoordinatorStatus.POISONED
REQUEST_FAILED = ContextCacheCoordinatorStatus.REQUEST_FAILED
BYPASS = ContextCacheLookupPolicy.BYPASS
Advance = ContextCacheSequenceAdvance
VOCAB = 50


def prompt(length, seed=1):
    return [(seed * 31 + 7 * i * i + i) % VOCAB for i in range(length)]


def driver_for(flavour, kind=ToyDriver, **options):
    config = {"policy_deadline_seconds": None, "checkpoint_interval_tokens": options.pop("interval", None)}
    return kind(FLAVOURS[flavour], policies=all_policies(), config=ContextCacheConfig(**config), **options)


def batch_for(flavour, **options):
    return driver_for(flavour, ToyBatchDriver, **options)


def metrics(driver):
    return driver.coordinator.metrics()


def state_of(driver, sequence):
    return driver.request.sequence(driver.index(sequence))


class Journal:
    """Records the calls of a snapshot storage."""

    def __init__(self, driver):
        self.calls = []
        self._target = driver.coordinator.resources.snapshot_storage
        driver.coordinator.resources.snapshot_storage = self

    def __getattr__(self, name):
        member = getattr(self._target, name)
        if not callable(member):
            return member

        def call(*args, **kwargs):
            self.calls.append((name, *args, *sorted(kwargs.items())))
            return member(*args, **kwargs)

        return call

    def take(self):
        calls, self.calls = self.calls, []
        return calls


def serve(driver, tokens, num_tokens=1, **options):
    """One sequence from admission to its normal end; returns its reuse report."""
    sequence = driver.admit(tokens, **options)
    driver.prefill(sequence)
    while len(driver.text(sequence)) < num_tokens:
        driver.step([sequence])
    driver.finish(sequence)
    return sequence.reuse


# --- M: checkpoints ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flavour", ["hybrid", "recurrent"])
def test_129_cold_zeroes_and_a_hit_restores(flavour):
    driver = driver_for(flavour)
    journal = Journal(driver)
    first = driver.admit(prompt(9))
    assert journal.take() == [("zero_recurrent", first.slot)]
    driver.prefill(first)
    assert metrics(driver).hybrid_restores == 0
    driver.finish(first)
    journal.take()
    second = driver.admit([*prompt(9), 41, 42])
    lease = state_of(driver, second).lease
    calls = journal.take()
    assert calls[0][0] == "restore_recurrent"
    assert calls[0][2] == second.slot
    assert (second.committed, metrics(driver).hybrid_restores) == (9, 1)
    partial = [call for call in calls if call[0] == "restore_partial_kv"]
    if flavour == "hybrid":  # the page that holds token 8 is number 9 // 4
        (call,) = partial
        assert call[2:] == (("base_page", int(lease.base_pages[2])), ("draft_page", None), ("valid_token_count", 1))
    else:
        assert partial == []
    assert (lease.recurrent_snapshot_slot, lease.partial_kv_snapshot_slot) == (None, None)  # unpinned at once
    driver.prefill(second)
    driver.close()


def test_130_a_prompt_end_is_captured_without_a_wait():
    driver = batch_for("hybrid")
    (sequence,) = driver.begin(prompt(9))
    driver.prefill_batch()
    assert driver.sync.calls == 0
    assert state_of(driver, sequence).published_exact_length == 9
    (record,) = [driver.coordinator.manager.record(r) for r in driver.coordinator.manager.records.lru_to_mru()]
    assert record.exact_checkpoint_length == 9
    assert len(record.base_page_path) == 2
    driver.finish_batch()
    (again,) = driver.begin([*prompt(9), 3])
    assert again.committed == 9
    driver.prefill_batch()
    assert state_of(driver, again).lease.recurrent_snapshot_slot is None
    assert state_of(driver, again).published_exact_length == 10
    driver.close()


def test_131_decode_ends_wait_once_for_all_of_them_and_not_at_all_for_none():
    driver = driver_for("hybrid")
    first, second = driver.admit(prompt(6)), driver.admit(prompt(7, 2))
    driver.prefill(first)
    driver.prefill(second)
    waits = driver.sync.calls
    driver.step()
    assert (driver.sync.calls, metrics(driver).hybrid_capture_synchronizations) == (waits, 0)
    driver.step(finish=[first, second])
    assert metrics(driver).hybrid_capture_synchronizations == 1
    assert driver.sync.calls == waits + 2  # one for both captures, one for the compaction
    assert serve(driver, [*first.tokens[:-1], 3, 4]).reused_tokens == 8
    driver.close()


def test_132_busy_snapshots_are_skipped_and_counted():
    driver = driver_for("hybrid", recurrent_slots=1, partial_slots=1)
    serve(driver, prompt(9))
    manager = driver.coordinator._manager
    from edgellm._core.block_hash import TokenChain

    chain = TokenChain(4, BlockKeyExtras())
    chain.extend([*prompt(9), 1])
    holder = manager.acquire(manager.plan(chain)).lease  # pins the only checkpoint
    assert holder.recurrent_snapshot_slot == 0
    driver.check = False  # that lease is nobody's sequence
    serve(driver, prompt(9, 2))
    assert metrics(driver).hybrid_snapshot_pressure_skips >= 1
    assert metrics(driver).current_records == 1
    holder.release()
    driver.check = True
    assert serve(driver, [*prompt(9), 1]).reused_tokens == 9
    driver.close()


def test_133_a_failed_wait_for_captures_poisons_and_the_drop_quarantines():
    driver = driver_for("hybrid")
    sequence = driver.admit(prompt(6))
    driver.prefill(sequence)
    driver.step()
    driver.sync.failing = True
    with pytest.raises(SessionLostError, match="poisoned"):
        driver.step(finish=[sequence])
    state = driver.request.impl.sequences[0]
    assert (state.num_tokens, state.committed_state_length) == (len(sequence.tokens), sequence.committed)
    driver.request.abandon()
    assert metrics(driver).quarantined_requests == 1
    assert driver.coordinator.poisoned
    recount(driver.coordinator)
    driver.sync.failing = False
    assert driver.coordinator.shutdown() is OK
    recount(driver.coordinator)


def test_134_an_mtp_checkpoint_brings_back_state_pages_and_hidden_row():
    driver = driver_for("mtp")
    first = driver.admit(prompt(9))
    driver.prefill(first)  # the driver publishes at the policy's boundaries
    assert metrics(driver).current_records >= 1
    waits = driver.sync.calls
    second = driver.admit([*prompt(9), 41, 42])  # the driver compares the restored row with its twin's
    assert second.committed == 9
    assert driver.sync.calls == waits  # a restore waits for nothing
    assert metrics(driver).hybrid_restores == 1
    row = driver.machine.draft_table.row(second.slot).tolist()
    pages = state_of(driver, second).lease.draft_pages.tolist()
    assert row[: len(pages)] == pages
    driver.prefill(second)
    for _ in range(4):
        driver.step()
    driver.close()


def hidden_rows(driver, rows=1):
    return torch.zeros((len(driver.request.impl.sequences), rows, HIDDEN_WIDTH), dtype=torch.int64)


def test_135_boundaries_that_publish_nothing_and_those_that_are_errors():
    driver = driver_for("mtp")
    sequence = driver.admit(prompt(9))
    driver.prefill(sequence)
    bypass = driver.admit(prompt(9, 2), lookup=BYPASS)
    driver.prefill(bypass)
    journal, rows = Journal(driver), hidden_rows(driver)
    publish = driver.coordinator.publish_hybrid_mtp_endpoint
    assert publish(driver.request, 0, 0, rows, 0) is OK
    assert publish(driver.request, 0, state_of(driver, sequence).published_exact_length, rows, 0) is OK
    assert publish(driver.request, 1, 9, rows, 0) is OK
    assert journal.take() == []
    for arguments in ((0, 99, rows, 0), (0, 9, rows, -1), (7, 9, rows, 0)):
        with pytest.raises(CallerError):
            publish(driver.request, *arguments)
    driver.close()
    plain = driver_for("hybrid")
    plain.prefill(plain.admit(prompt(6)))
    with pytest.raises(PluginError, match="edgellm-hybrid"):
        plain.coordinator.publish_hybrid_mtp_endpoint(plain.request, 0, 6, None, 0)
    plain.close()


def test_136_nothing_to_restore_is_an_error():
    driver = driver_for("mtp")
    cold = driver.admit(prompt(9))
    restore = driver.coordinator.restore_hybrid_mtp_boundary_hidden
    with pytest.raises(ContractViolation, match="no checkpoint is bound"):
        restore(driver.request, 0, hidden_rows(driver), 0)
    driver.prefill(cold)
    hit = driver.admit([*prompt(9), 3, 4])
    assert restore(driver.request, 1, hidden_rows(driver), 0) is OK  # again: the pin is still there
    with pytest.raises(InvalidArgumentError, match="destination_row is -1"):
        restore(driver.request, 1, hidden_rows(driver), -1)
    driver.prefill(hit)  # its own boundary publication releases the pin
    with pytest.raises(ContractViolation, match="no checkpoint is bound"):
        restore(driver.request, 1, hidden_rows(driver), 0)
    driver.close()


def test_137_prefill_captures_of_an_mtp_request_are_a_no_op():
    driver = driver_for("mtp")
    sequence = driver.admit(prompt(9))
    assert driver.coordinator.prepare_decode_step(driver.request, driver.headroom, []) is OK
    journal = Journal(driver)
    assert driver.coordinator.enqueue_prefill_captures(driver.request) is OK
    assert driver.coordinator.enqueue_prefill_captures(driver.request, [0], [4]) is OK
    assert journal.take() == []
    assert state_of(driver, sequence).staged_hybrid_publication is None
    assert driver.coordinator.complete_decode_step(driver.request, [Advance()]) is OK
    driver.close()


@pytest.mark.parametrize(
    ("flavour", "left"), [("eagle", "frozen_spec_prefill_length"), ("hybrid", "staged_hybrid_publication")]
)
def test_138_a_staged_or_frozen_endpoint_forbids_compaction(flavour, left):
    """No policy can leave one behind (the calls before it check that); if one ever stayed, its lease would be lost."""
    driver = driver_for(flavour)
    sequence, other = driver.admit(prompt(6)), driver.admit(prompt(7, 2))
    driver.prefill(sequence)
    driver.prefill(other)
    assert driver.coordinator.begin_batch_compaction(driver.request, [0, -1], 1) is OK
    setattr(state_of(driver, sequence), left, 4)
    rows = driver.machine.base_table.rows.copy()
    with pytest.raises(ContractViolation, match="staged endpoint"):
        driver.coordinator.compact_batch(driver.request)
    assert (driver.machine.base_table.rows == rows).all()
    assert driver.request.num_sequences == 2
    setattr(state_of(driver, sequence), left, None)
    assert driver.coordinator.compact_batch(driver.request) is OK
    assert driver.coordinator.finish(driver.request) is OK


def test_138_captures_are_checked_before_anything_is_reserved():
    driver = driver_for("hybrid")
    driver.admit(prompt(9))
    enqueue = driver.coordinator.enqueue_prefill_captures
    with pytest.raises(ContractViolation, match="none is pending"):
        enqueue(driver.request, [0], [4])
    driver.coordinator.prepare_decode_step(driver.request, driver.headroom, [])
    for slots, lengths in (([0], [10]), ([0], [0]), ([0, 0], [4, 4]), ([0], [4, 5]), ([1], [4]), ([0], None)):
        with pytest.raises(CallerError):
            enqueue(driver.request, slots, lengths)
    assert driver.coordinator.manager.pools.recurrent.free_count == 8
    driver.coordinator.complete_decode_step(driver.request, [Advance()])
    driver.close()


def test_chunk_ends_become_checkpoints_of_their_kind():
    driver = driver_for("hybrid", interval=8)
    sequence = driver.admit(prompt(26), checkpoint_boundaries=[6, 22])
    boundaries = driver.coordinator.checkpoint_boundaries(driver.request, 0)
    assert 6 in boundaries
    driver.prefill(sequence)
    assert driver.coordinator.checkpoint_boundaries(driver.request, 0) == ()
    records = driver.coordinator.manager.records
    kinds = {records.exact_length(r): records.kind(r) for r in records.lru_to_mru()}
    assert sorted(kinds) == sorted(boundaries)
    assert kinds[6] is CheckpointKind.ANCHOR  # the first of several: shared instructions
    assert kinds[22] is CheckpointKind.TAIL
    assert kinds[16] is CheckpointKind.LADDER
    driver.close()


def test_a_prompt_in_flight_resumes_from_its_producers_checkpoint():
    driver = driver_for("hybrid")
    first, second = driver.admit(prompt(9)), driver.admit([*prompt(9), 41, 42])
    assert second.committed == 0
    driver.prefill(first)
    restores = metrics(driver).hybrid_restores
    driver.prefill_chunk(second, 2)
    assert metrics(driver).hybrid_restores == restores + 1
    assert metrics(driver).rebound_tokens == 9
    assert second.reuse.reused_tokens == 9
    assert second.finalized
    driver.close()


def test_127_a_hybrid_batch_takes_live_joiners():
    driver = batch_for("hybrid")
    driver.begin(prompt(6))
    driver.prefill_batch()
    assert driver.coordinator.supports_live_sequence_admission()
    joiner = driver.admit(prompt(7, 2))
    driver.prefill(joiner)
    driver.step()
    driver.close()


# --- N: draft state ------------------------------------------------------------------------------------------


def test_139_a_prefill_is_frozen_until_its_first_verification():
    driver = batch_for("eagle")
    (sequence,) = driver.begin(prompt(9))
    driver.prefill_batch()
    impl = driver.request.impl
    assert (impl.has_pending_device_work(), impl.awaiting_first_spec_completion()) == (True, True)
    assert state_of(driver, sequence).frozen_spec_prefill_length == 9
    assert (metrics(driver).published_blocks, metrics(driver).publication_attempts) == (0, 0)
    driver.step()
    assert (impl.has_pending_device_work(), impl.awaiting_first_spec_completion()) == (False, False)
    assert state_of(driver, sequence).frozen_spec_prefill_length is None
    assert metrics(driver).spec_pair_publications == 1
    assert metrics(driver).published_blocks >= 2
    driver.close()


@pytest.mark.parametrize(("successor", "start", "replayed"), [("same", 8, 0), ("other", 7, 1)])
def test_140_looking_ahead_costs_a_token_where_the_next_one_differs(successor, start, replayed):
    """Lifted: the reference gives a whole page up."""
    driver = batch_for("eagle")
    driver.begin(prompt(9))
    driver.prefill_batch()
    driver.step()
    driver.finish_batch()
    follow = [prompt(9)[8] if successor == "same" else 49, 48, 47]
    (sequence,) = driver.begin([*prompt(8), *follow])
    assert sequence.committed == start
    assert (metrics(driver).spec_replays, metrics(driver).spec_replayed_tokens) == (int(replayed > 0), replayed)
    if replayed:
        assert sequence.reuse.stop_reason is ReuseStopReason.LOOKAHEAD_REPLAY
    driver.prefill_batch()
    assert (metrics(driver).tail_copies, metrics(driver).tail_copied_tokens) == (int(start % 4 > 0), start % 4)
    driver.step()
    driver.close()


def eagle_at_rest(length=5):
    """An EAGLE request whose prompt is finalized, driven by hand."""
    driver = batch_for("eagle")
    driver.begin(prompt(length))
    driver.prefill_batch()
    assert driver.coordinator.prepare_decode_step(driver.request, driver.headroom) is OK
    return driver, driver.coordinator, driver.request


def test_141_only_what_base_and_draft_have_in_common_is_published():
    driver, coordinator, request = eagle_at_rest()
    step = [Advance([1, 2, 3, 4], 9)]
    for wrong in ([4], [10], [5, 5], [-2]):
        with pytest.raises(InvalidArgumentError):
            coordinator.complete_decode_step(request, step, [0], wrong)
    assert request.sequence(0).committed_state_length == 5
    assert coordinator.complete_decode_step(request, step, [0], [5]) is OK
    sequence = request.sequence(0)
    assert (sequence.common_state_length, sequence.committed_state_length) == (5, 9)
    assert (sequence.published_full_block_count, metrics(driver).published_blocks) == (1, 1)
    driver.close()


def test_142_a_request_that_ends_on_its_prefill_token_publishes_its_frozen_prefill():
    driver = batch_for("eagle")
    driver.begin(prompt(9))
    driver.prefill_batch()
    waits = driver.sync.calls
    assert driver.finish_batch() is OK
    assert driver.sync.calls == waits + 2
    assert (metrics(driver).spec_pair_publications, metrics(driver).published_blocks) == (1, 2)
    driver.close()


def test_143_a_dropped_handle_publishes_nothing():
    driver = batch_for("eagle")
    driver.begin(prompt(9))
    driver.prefill_batch()
    waits = driver.sync.calls
    driver.abandon_batch()
    assert driver.sync.calls == waits + 1
    assert metrics(driver).published_blocks == 0
    assert recount(driver.coordinator).free == 64
    driver.close()


def test_144_media_in_one_sequence_bypasses_the_speculative_batch():
    driver = batch_for("eagle")
    media = [None] * 6 + [Hash128(3, 4)] + [None] * 2
    sequences = driver.begin(prompt(9), prompt(9, 2), each=[{}, {"media": media}])
    assert [state_of(driver, s).lookup_policy for s in sequences] == [BYPASS, BYPASS]
    driver.prefill_batch()
    driver.step()
    assert metrics(driver).published_blocks == 0
    driver.close()
    hybrid = batch_for("mtp")  # checkpoints carry the media's identity
    sequences = hybrid.begin(prompt(9), prompt(9, 2), each=[{}, {"media": media}])
    assert [state_of(hybrid, s).lookup_policy for s in sequences] == [ContextCacheLookupPolicy.USE_CACHE] * 2
    hybrid.finish_batch()
    hybrid.close()


def test_145_a_vanilla_request_reuses_base_pages_and_touches_no_draft_row():
    driver = batch_for("eagle")
    driver.begin(prompt(9))
    driver.prefill_batch()
    driver.step()
    driver.finish_batch()
    coordinator = driver.coordinator
    admission = ContextCacheSequenceAdmission([*prompt(8), 49, 48], ResidentRef(0, 99))
    result = coordinator.begin_request(
        ContextCacheBatchAdmission([admission]), DecodingKvHeadroom(1), driver.machine.device.stream
    )
    sequence = result.admission.request.sequence(0)
    assert sequence.reuse_token_length == 8
    assert sequence.lease.num_draft_pages == 0
    coordinator.prepare_prefill(result.admission.request)
    assert driver.machine.draft_table.row(0).tolist() == [-1] * driver.deployment.pages_per_slot
    assert coordinator.metrics().spec_replays == 0
    assert coordinator.finish(result.admission.request) is OK
    driver.close()


def test_146_headroom_is_leased_in_both_pools():
    driver = batch_for("eagle", page_size=128, num_pages=8, num_draft_pages=8, max_kv_capacity=512)
    admission = ContextCacheSequenceAdmission(np.arange(127, dtype=np.int32) % VOCAB, ResidentRef(0, 1))
    result = driver.coordinator.begin_request(
        ContextCacheBatchAdmission([admission], speculative_request=True),
        DecodingKvHeadroom(2, 130),
        driver.machine.device.stream,
    )
    lease = result.admission.request.sequence(0).lease
    assert (lease.num_base_pages, lease.num_draft_pages) == (2, 3)
    assert driver.coordinator.finish(result.admission.request) is OK
    driver.close()


def test_147_common_lengths_exactly_where_a_paired_draft_lives():
    driver, coordinator, request = eagle_at_rest()
    step = [Advance([1, 2], 7)]
    with pytest.raises(InvalidArgumentError, match="common_state_lengths is None"):
        coordinator.complete_decode_step(request, step)
    assert coordinator.complete_decode_step(request, step, (), [6]) is OK
    driver.close()
    for flavour in ("attention", "hybrid", "mtp"):
        driver = driver_for(flavour)
        driver.prefill(driver.admit(prompt(5)))
        driver.coordinator.prepare_decode_step(driver.request, driver.headroom)
        with pytest.raises(InvalidArgumentError, match="without draft state"):
            driver.coordinator.complete_decode_step(driver.request, [Advance([1], 6)], (), [6])
        assert driver.coordinator.complete_decode_step(driver.request, [Advance()]) is OK
        driver.close()


def test_147_a_draft_that_borrows_base_state_has_it_in_common():
    driver = batch_for("shared-kv")
    (sequence,) = driver.begin(prompt(9))
    driver.prefill_batch()
    assert state_of(driver, sequence).common_state_length == 9
    driver.step()
    state = state_of(driver, sequence)
    assert state.common_state_length == state.committed_state_length == sequence.committed
    assert state.lease.num_draft_pages == 0
    assert metrics(driver).spec_pair_publications == 0
    assert metrics(driver).published_endpoints == 1
    driver.close()


def test_148_compaction_terminalises_first_and_survivors_keep_their_draft_rows():
    driver = batch_for("eagle")
    first, second = driver.begin(prompt(9), prompt(6, 2))
    driver.prefill_batch()
    assert driver.request.impl.awaiting_first_spec_completion()
    rows = driver.machine.draft_table.row(second.slot).tolist()
    waits = driver.sync.calls
    assert driver.coordinator.begin_batch_compaction(driver.request, [-1, 0], 1) is OK
    assert driver.sync.calls == waits + 1
    assert metrics(driver).spec_pair_publications == 2
    assert not driver.request.impl.awaiting_first_spec_completion()
    assert driver.coordinator.compact_batch(driver.request) is OK
    assert driver.machine.draft_table.row(second.slot).tolist() == rows
    assert set(driver.machine.draft_table.row(first.slot).tolist()) == {-1}
    driver.live.pop(first.request_id)
    driver.step()
    driver.close()


# --- draft state in a container --------------------------------------------------------------------------------


def test_a_joiner_freezes_its_prompt_until_its_own_first_step():
    driver = driver_for("eagle")
    first = driver.admit(prompt(9))
    driver.prefill(first)
    before = metrics(driver).spec_pair_publications
    assert state_of(driver, first).frozen_spec_prefill_length == 9
    assert driver.request.impl.phase is Phase.EXECUTING
    second = driver.admit(prompt(6, 2))
    driver.prefill(second)  # its chunk steps are no step of the first
    driver.step([second])
    assert state_of(driver, first).frozen_spec_prefill_length == 9
    assert state_of(driver, second).frozen_spec_prefill_length is None
    driver.step([first])
    assert state_of(driver, first).frozen_spec_prefill_length is None
    assert metrics(driver).spec_pair_publications == before + 2
    driver.close()


def test_a_cancelled_joiner_is_terminalised_by_compaction():
    driver = driver_for("eagle")
    first = driver.admit(prompt(9))
    driver.prefill(first)
    waits = driver.sync.calls
    driver.cancel(first)
    assert driver.sync.calls == waits + 2  # one proves the draft, one lets the lease go
    assert metrics(driver).spec_pair_publications == 1
    driver.close()


def test_a_sequence_that_ends_on_its_prompt_waits_for_proof_before_its_endpoint_is_published():
    driver = driver_for("eagle")
    sequence = driver.admit(prompt(10))
    driver.prefill(sequence)
    driver._idle_step([sequence])  # reported as ended; nothing verified its draft
    assert metrics(driver).spec_pair_publications == 0
    assert metrics(driver).published_blocks == 2  # those its chunk completed
    driver._retire([sequence])
    assert metrics(driver).spec_pair_publications == 1
    assert driver.coordinator.manager.index.tail_count == 1
    again = driver.admit(prompt(10))
    assert again.committed == 9
    driver.close()


def test_127_a_joiner_of_a_speculative_batch_has_its_own_frozen_prompt():
    driver = batch_for("eagle")
    (founder,) = driver.begin(prompt(9))
    driver.prefill_batch()
    driver.step()
    joiner = driver.admit(prompt(6, 2))
    driver.prefill(joiner)
    driver.step([founder])
    assert state_of(driver, joiner).frozen_spec_prefill_length == 6
    driver.step([joiner])
    assert state_of(driver, joiner).frozen_spec_prefill_length is None
    assert metrics(driver).spec_pair_publications == 2
    driver.close()


@pytest.mark.parametrize("flavour", sorted(FLAVOURS))
@pytest.mark.parametrize("seed", range(2))
def test_156_random_requests_of_every_flavour_keep_every_invariant(flavour, seed):
    """Tight pools, chunks of any length, cancellations, HOLD rows; the driver checks all after every call."""
    rng = np.random.default_rng(seed)
    driver = driver_for(flavour, num_pages=22, max_batch=3, recurrent_slots=3, partial_slots=2, interval=8)
    admitted = 0
    for _ in range(60):
        live = list(driver.live.values())
        action = int(rng.integers(6))
        if action <= 1:
            tokens = prompt(int(rng.integers(1, 20)), int(rng.integers(1, 3)))
            admitted += driver.admit(tokens) is not None
        elif action <= 4 and live:
            work = [
                (sequence, 0 if sequence.finalized else int(rng.integers(1, 9)))
                for sequence in live
                if rng.integers(3) and len(sequence.tokens) < 40
            ]
            if driver.mixed_step(work) is None:
                driver.cancel(driver.refused)
        elif live:
            leaving = live[int(rng.integers(len(live)))]
            ending = driver.finish if leaving.finalized and rng.integers(2) else driver.cancel
            ending(leaving)
    assert admitted > 5
    counters = metrics(driver)
    plans = counters.standard_plans + counters.no_reusable_prefix_plans + counters.full_input_rewind_plans
    assert plans == counters.admitted_sequences == admitted
    assert counters.publication_attempts == counters.committed_publications + counters.existing_publications
    assert counters.policy_failures == 0
    driver.close()


@pytest.mark.parametrize("flavour", sorted(FLAVOURS))
def test_turns_of_a_chat_share_what_they_can(flavour):
    driver = driver_for(flavour, interval=8)
    history = prompt(9)
    for turn in range(4):
        sequence = driver.admit(history, checkpoint_boundaries=[len(history)])
        if turn:
            assert sequence.committed >= 8
        driver.prefill(sequence, chunk=5)
        for _ in range(3):
            driver.step()
        driver.finish(sequence)
        history = [*sequence.tokens, turn, turn + 1]
    driver.close()


@pytest.mark.parametrize("flavour", sorted(FLAVOURS))
def test_a_repeated_prompt_computes_little(flavour):
    driver = driver_for(flavour, interval=8)
    tokens = prompt(15)
    cold = serve(driver, tokens, 3)
    warm = serve(driver, tokens, 3)
    assert cold.reused_tokens == 0
    expected = {"attention": 14, "eagle": 14, "dflash": 14, "shared-kv": 14}
    assert warm.reused_tokens == expected.get(flavour, warm.reused_tokens)
    assert warm.reused_tokens > 0
    driver.close()


@pytest.mark.parametrize("flavour", sorted(FLAVOURS))
def test_disabled_caches_run_cold_and_publish_nothing(flavour):
    driver = ToyDriver(FLAVOURS[flavour], policies=all_policies(), config=ContextCacheConfig(enabled=False))
    for _ in range(2):
        report = serve(driver, prompt(9), 3)
        assert (report.reused_tokens, report.stop_reason) == (0, ReuseStopReason.DISABLED)
    assert metrics(driver).published_blocks == metrics(driver).current_records == 0
    driver.close()


def test_fully_committed_speculation_is_refused_tokens_it_did_not_commit():
    driver = batch_for("shared-kv", token_state_contract=DecodingTokenStateContract.FULLY_COMMITTED)
    driver.begin(prompt(6))
    coordinator, request = driver.coordinator, driver.request
    coordinator.prepare_prefill(request)
    assert coordinator.finalize_prefill_publication(request, [Advance([], 6)]) is OK
    coordinator.prepare_decode_step(request, driver.headroom)
    with pytest.raises(InvalidArgumentError):
        coordinator.complete_decode_step(request, [Advance([1, 2], 7)])
    assert coordinator.complete_decode_step(request, [Advance([1, 2], 8)], [0]) is OK
    assert request.sequence(0).published_full_block_count == 2
    driver.finish_batch()
    driver.close()
