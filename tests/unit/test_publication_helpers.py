"""What the helpers behind `PublicationPolicy` count, log and record."""

from __future__ import annotations

import logging

import pytest
from coordinator_rig import HEADROOM, OK, VOCAB, Rig, all_policies

from edgellm.cache import snapshots, spec_endpoints
from edgellm.cache.types import ContextCacheConfig, ContextCacheSequenceAdvance, PublicationPoint
from edgellm.errors import InvalidArgumentError
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
