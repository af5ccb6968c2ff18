"""Memory that runs out, and room that is kept for what must not fail."""

from __future__ import annotations

import pytest
from coordinator_rig import HEADROOM, OK, VOCAB, Rig, all_policies

from edgellm.cache.types import ContextCacheConfig, ContextCacheCoordinatorStatus
from edgellm.testing.recount import recount, require_baseline
from edgellm.testing.toy_driver import FLAVOURS, ToyDriver

POISONED = ContextCacheCoordinatorStatus.POISONED


def prompt(length, seed=1):
    return [(seed * 31 + 7 * i * i + i) % VOCAB for i in range(length)]


class Exhausted(list):
    """A list that has no memory for one more."""

    def append(self, item):
        raise MemoryError


@pytest.mark.parametrize("column", ["sequences", "leases", "chains"])
def test_a_joiner_without_memory_leaves_nothing_behind(column):
    rig = Rig()
    handle = rig.container()
    rig.join(handle, prompt(6), 0)
    whole = getattr(handle.impl, column)
    setattr(handle.impl, column, Exhausted(whole))
    free = rig.free()
    with pytest.raises(MemoryError):
        rig.join(handle, prompt(6, 2), 1)
    setattr(handle.impl, column, whole)
    assert (handle.num_sequences, handle.impl.lengths.size, rig.free()) == (1, 1, free)
    recount(rig.coordinator)
    assert rig.join(handle, prompt(6, 2), 1).status is OK
    rig.coordinator.finish(handle)
    require_baseline(rig.coordinator)


def test_room_in_the_quarantine_is_reserved_with_every_request():
    rig = Rig()
    quarantine = rig.coordinator._quarantine
    handles = [rig.begun(rig.admission(prompt(4, slot + 1), slot)) for slot in range(3)]
    assert len(quarantine._room) == 3
    quarantine._room = FixedRoom(quarantine._room)
    rig.sync.failing = True
    for handle in handles:
        assert rig.coordinator.finish(handle) is POISONED
    assert len(quarantine) == 3
    rig.sync.failing = False
    assert rig.coordinator.shutdown() is OK
    assert len(quarantine._room) == 0
    require_baseline(rig.coordinator)


class FixedRoom(list):
    """Room that may be filled and given back, and cannot grow."""

    def append(self, item):
        raise MemoryError


def test_a_refused_batch_gives_its_room_back():
    rig = Rig(num_pages=2, capacity=16)
    assert rig.begin(rig.admission(prompt(12), 0)).admission is None
    assert len(rig.coordinator._quarantine._room) == 0


def passes_of(rig, call):
    """How often `call` passes a place of the manager that may run out of memory."""
    manager = rig.coordinator._manager
    before = manager._allocation_points
    call()
    return manager._allocation_points - before


@pytest.mark.parametrize("stage", ["join", "chunk", "decode"])
def test_memory_that_runs_out_in_the_manager_costs_publication_at_most(stage):
    """Every allocation of one step is made to fail once: the text and the books stay right."""
    passes, failed = 0, 0
    while True:
        rig = Rig()
        handle = rig.container()
        manager = rig.coordinator._manager
        rig.join(handle, prompt(7), 0)
        rig.chunk(handle, 0, 7)
        passes += 1
        raised = False
        manager._fail_after(passes)
        try:
            if stage == "join":
                rig.join(handle, [*prompt(6), 90, 91], 1)
            elif stage == "chunk":
                rig.join(handle, prompt(9, 2), 1)
                rig.chunk(handle, 1, 9)
            else:
                rig.decode(handle)
                rig.decode(handle, completed=[0])
        except MemoryError:
            raised = True
        left = manager._allocation_points
        manager._fail_after(0)
        faults = rig.coordinator.metrics().policy_failures
        recount(rig.coordinator)
        if handle.impl.has_pending_device_work():
            handle.impl.mark_device_work_resolved_without_sync()
        rig.coordinator.finish(handle)
        require_baseline(rig.coordinator)
        if not raised and not faults:
            break
        failed += 1
        assert left > 0
        assert passes < 200
    assert failed >= 1


def life_of_three(driver):
    """Chunks, a hit, decode steps, an end and a next turn: most of what a manager can be asked for."""
    first = driver.admit(prompt(14))
    driver.prefill(first, chunk=6)
    second = driver.admit([*prompt(10), 41, 42, 43])
    driver.prefill(second, chunk=5)
    driver.step()
    driver.step()
    driver.step(finish=[first])
    third = driver.admit([*first.tokens, 3, 4])
    driver.prefill(third)
    driver.step()
    driver.finish(third)


@pytest.mark.parametrize("flavour", sorted(FLAVOURS))
def test_memory_that_runs_out_anywhere_loses_no_page_of_any_flavour(flavour):
    failures, number = 0, 0
    while True:
        number += 3 if number else 2
        driver = ToyDriver(
            FLAVOURS[flavour],
            policies=all_policies(),
            config=ContextCacheConfig(policy_deadline_seconds=None, checkpoint_interval_tokens=8),
            num_pages=20,
            recurrent_slots=3,
            partial_slots=2,
        )
        manager = driver.coordinator._manager
        before = manager._allocation_points
        manager._fail_after(number)
        raised = False
        try:
            life_of_three(driver)
        except MemoryError:
            raised = True
        passes = manager._allocation_points - before
        manager._fail_after(0)
        faults = driver.coordinator.metrics().policy_failures
        failures += raised or faults > 0
        recount(driver.coordinator)
        driver.request.abandon()
        assert driver.coordinator.shutdown() is OK
        require_baseline(driver.coordinator)
        if passes < number:
            assert not raised
            assert faults == 0
            break
    assert failures >= 8


def test_a_poison_without_quarantine_is_lifted_once_the_stream_is_idle():
    rig = Rig()
    rig.coordinator._quarantine.poison("test")
    rig.sync.failing = True
    assert rig.coordinator.recover() is False
    rig.sync.failing = False
    assert rig.coordinator.recover() is True
    request = rig.begun(rig.admission(prompt(3), 0), headroom=HEADROOM)
    rig.coordinator.finish(request)
