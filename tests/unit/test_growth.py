"""Growth before a step: in the pool that is short, for who takes part, and rows that follow whatever happens."""

from __future__ import annotations

import pytest
from coordinator_rig import HEADROOM, OK, VOCAB, Rig, all_policies

from edgellm.cache.types import ContextCacheConfig, ContextCacheCoordinatorStatus, DecodingKvHeadroom
from edgellm.errors import InvalidArgumentError
from edgellm.testing.recount import recount
from edgellm.testing.toy_driver import FLAVOURS, ToyDriver

REQUEST_FAILED = ContextCacheCoordinatorStatus.REQUEST_FAILED


def prompt(length, seed=1):
    return [(seed * 31 + 7 * i * i + i) % VOCAB for i in range(length)]


def covered(request):
    lengths = request.impl.lengths
    return list(
        zip(lengths.coverage[: lengths.size].tolist(), lengths.draft_coverage[: lengths.size].tolist(), strict=True)
    )


@pytest.mark.parametrize(
    ("headroom", "expected"),
    [((6, 6), (12, 12)), ((7, 1), (16, 12)), ((1, 7), (12, 16)), ((7, 7), (16, 16)), ((6, 10), (12, 16))],
)
def test_each_pool_grows_by_its_own_headroom(headroom, expected):
    config = ContextCacheConfig(policy_deadline_seconds=None)
    driver = ToyDriver(FLAVOURS["eagle"], policies=all_policies(), config=config)
    driver.prefill(driver.admit([token % 50 for token in prompt(6)]))
    assert covered(driver.request) == [(12, 12)]  # 6 tokens and 4 of headroom in pages of 4
    assert driver.coordinator.prepare_decode_step(driver.request, DecodingKvHeadroom(*headroom)) is OK
    assert covered(driver.request) == [expected]
    recount(driver.coordinator)


def test_a_row_may_be_filled_to_its_last_position():
    rig = Rig(capacity=32)
    handle = rig.container()
    rig.join(handle, prompt(27), 0)
    rig.chunk(handle, 0, 27)
    assert covered(handle) == [(28, 0)]
    assert rig.coordinator.prepare_decode_step(handle, DecodingKvHeadroom(10)) is REQUEST_FAILED
    assert (handle.refused_slot, covered(handle)) == (0, [(28, 0)])
    assert rig.coordinator.prepare_decode_step(handle, DecodingKvHeadroom(9)) is OK
    assert covered(handle) == [(36, 0)] == [(rig.coordinator.row_capacity_tokens, 0)]


def ended_and_live(rig):
    """Two sequences at the end of their coverage; the first has ended, with its unfilled page retained."""
    handle = rig.container()
    for slot in (0, 1):
        rig.join(handle, prompt(6, slot + 1), slot)
        rig.chunk(handle, slot, 6)
    rig.decode(handle, completed=[0])
    return handle


def test_a_sequence_that_ended_does_not_grow():
    rig = Rig()
    handle = ended_and_live(rig)
    assert covered(handle) == [(8, 0), (8, 0)]
    assert rig.coordinator.prepare_decode_step(handle, DecodingKvHeadroom(3)) is OK
    assert covered(handle) == [(8, 0), (12, 0)]
    assert handle.impl.leases[0].num_base_pages == 2


@pytest.mark.parametrize("failing", [1, 2, 3, 4])
def test_when_memory_runs_out_the_rows_of_those_that_grew_follow(failing):
    """Wherever the manager runs out: rows, coverage and leases agree, and the step may be prepared again."""
    rig = Rig()
    handle = rig.container()
    for slot in (0, 1):
        rig.join(handle, prompt(7, slot + 1), slot)
        rig.chunk(handle, slot, 7)
    rig.coordinator._manager._fail_after(failing)
    raised = False
    try:
        assert rig.coordinator.prepare_decode_step(handle, DecodingKvHeadroom(2)) is OK
    except MemoryError:
        raised = True
    rig.coordinator._manager._fail_after(0)
    assert raised is (failing <= 3)
    pages = [lease.num_base_pages for lease in handle.impl.leases]
    assert covered(handle) == [(4 * count, 0) for count in pages]
    assert [len(rig.row(slot)) for slot in (0, 1)] == pages
    recount(rig.coordinator)
    if raised:
        assert rig.coordinator.prepare_decode_step(handle, DecodingKvHeadroom(2)) is OK
        assert covered(handle) == [(12, 0), (12, 0)]


def test_a_refused_growth_names_who_and_binds_those_before_it():
    rig = Rig(num_pages=5, capacity=16)
    handle = rig.container()
    for slot in (0, 1):
        rig.join(handle, prompt(7, slot + 1), slot, lookup=None)
        rig.chunk(handle, slot, 7)
    assert rig.coordinator.prepare_decode_step(handle, DecodingKvHeadroom(2)) is REQUEST_FAILED
    assert handle.refused_slot == 1
    assert covered(handle) == [(12, 0), (8, 0)]
    assert [len(rig.row(slot)) for slot in (0, 1)] == [3, 2]
    assert not handle.impl.has_pending_device_work()
    assert rig.coordinator.metrics().growth_refusals == 1
    assert rig.coordinator.prepare_decode_step(handle, DecodingKvHeadroom(2)) is REQUEST_FAILED
    assert rig.coordinator.metrics().growth_refusals == 2
    assert rig.coordinator.prepare_decode_step(handle, HEADROOM, [0]) is OK
    assert handle.refused_slot is None
    recount(rig.coordinator)


@pytest.mark.parametrize(("reserve", "fits"), [(0, True), (3, True), (4, False), (2**62, False)])
def test_draft_pages_promised_to_others_stay_available(reserve, fits):
    driver = ToyDriver(FLAVOURS["eagle"], policies=all_policies(), num_pages=32, num_draft_pages=6)
    resident = driver._take_slot()
    admission = driver.admission([token % 50 for token in prompt(6)], resident)  # 3 draft pages with headroom
    with pytest.raises(InvalidArgumentError, match="draft_reserve_pages is -1"):
        driver.coordinator.admit_sequence(driver.request, admission, driver.headroom, draft_reserve_pages=-1)
    result = driver.coordinator.admit_sequence(driver.request, admission, driver.headroom, draft_reserve_pages=reserve)
    assert (result.status is OK) is fits
    assert result.insufficient_capacity is not fits
    assert recount(driver.coordinator).draft.free == (3 if fits else 6)
