"""`ToyDriver` and the recount: every flavour under random traffic, and the checks themselves can fail."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest
from plugin_policies import all_policies

from edgellm.cache.types import ContextCacheConfig, ContextCacheLookupPolicy, ResourceType
from edgellm.errors import InvariantError, SessionLostError
from edgellm.testing.recount import count_all, count_pages, recount, require_baseline
from edgellm.testing.toy import PoisonReadError
from edgellm.testing.toy_batch_driver import ToyBatchDriver
from edgellm.testing.toy_driver import DECODE, FLAVOURS, ToyDriver

BYPASS = ContextCacheLookupPolicy.BYPASS
ALL = list(FLAVOURS)
SMALL = {"num_pages": 22, "max_kv_capacity": 64, "recurrent_slots": 5, "partial_slots": 4}


def tokens(seed, count):
    return random.Random(seed).choices(range(3, 40_000), k=count)


@pytest.fixture
def open_driver():
    opened = []

    def open_one(flavour, kind=ToyDriver, **options):
        driver = kind(FLAVOURS[flavour], **{"policies": all_policies(), **options})
        opened.append(driver)
        return driver

    yield open_one
    for driver in opened:
        driver.close()


def wander(driver, rng, shared, steps):
    """Random admissions, packed steps of chunks and decode rows, ends and cancellations."""
    for _ in range(steps):
        if driver.live and rng.random() < 0.05:
            driver.cancel(rng.choice(list(driver.live.values())))
        if rng.random() < 0.4 and len(driver.live) < driver.deployment.max_batch_size:
            prompt = shared[: rng.randrange(1, len(shared))] + rng.choices(range(3), k=rng.randrange(6))
            named = sorted({rng.randrange(1, len(prompt) + 1) for _ in range(2)})
            driver.admit(prompt, lookup=BYPASS if rng.random() < 0.1 else None, checkpoint_boundaries=named)
        work = [(s, DECODE if s.finalized else rng.randrange(1, 11)) for s in driver.live.values()]
        work = [entry for entry in work if rng.random() < 0.8]
        rng.shuffle(work)
        ending = [sequence for sequence, count in work if count == DECODE and rng.random() < 0.15]
        if driver.mixed_step(work, finish=ending) is None:
            driver.cancel(driver.refused)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("flavour", ALL)
def test_random_traffic_gives_every_sequence_its_own_text(open_driver, flavour, seed):
    driver = open_driver(flavour, **SMALL)
    wander(driver, random.Random(seed), tokens(seed, 30), 400)
    metrics = driver.coordinator.metrics()
    assert metrics.reused_tokens > 0
    assert metrics.policy_failures == 0
    if driver.profile.uses_checkpoint_reuse:
        assert metrics.hybrid_restores > 0


@pytest.mark.parametrize("flavour", ["eagle", "dflash", "mtp"])
def test_plain_requests_on_a_speculative_deployment(open_driver, flavour):
    driver = open_driver(flavour, speculative=False, **SMALL)
    wander(driver, random.Random(3), tokens(3, 30), 200)
    assert driver.coordinator.metrics().reused_tokens > 0
    assert count_pages(driver.coordinator.manager, ResourceType.DRAFT_KV_PAGE).leased == 0


@pytest.mark.parametrize("flavour", ["eagle", "dflash", "shared-kv", "mtp"])
def test_plain_and_speculative_requests_share_what_they_can(open_driver, flavour):
    """Two containers on one coordinator, one of each kind, over the same prompts."""
    driver = open_driver(flavour, **SMALL)
    plain, rng, shared = driver.beside(speculative=False), random.Random(9), tokens(9, 30)
    first = driver.admit(shared, checkpoint_boundaries=[16])
    driver.prefill(first)
    driver.step(finish=[first])
    second = plain.admit([*shared[:17], 1, 2])
    assert second.reuse.reused_tokens >= 16  # base state is base state, whoever computed it
    plain.prefill(second)
    plain.step(finish=[second])
    for _ in range(30):
        wander(rng.choice([driver, plain]), rng, shared, 4)
    plain.close()


@pytest.mark.parametrize("max_records", [0, 2])
@pytest.mark.parametrize("flavour", ALL)
def test_few_records_or_none_are_no_fault(open_driver, flavour, max_records):
    config = ContextCacheConfig(max_records=max_records, policy_deadline_seconds=None)
    driver = open_driver(flavour, config=config, **SMALL)
    wander(driver, random.Random(6), tokens(6, 30), 120)
    assert driver.coordinator.metrics().policy_failures == 0


@pytest.mark.parametrize("page_size", [1, 2, 3, 16])
@pytest.mark.parametrize("flavour", ALL)
def test_other_page_sizes(open_driver, flavour, page_size):
    pages = 5 * (64 // page_size + 1) // 3
    driver = open_driver(flavour, page_size=page_size, **{**SMALL, "num_pages": pages})
    wander(driver, random.Random(4), tokens(4, 30), 120)


@pytest.mark.parametrize("flavour", ALL)
def test_the_batch_path(open_driver, flavour):
    driver = open_driver(flavour, kind=ToyBatchDriver, num_pages=40)
    prompts = [tokens(6, 13), tokens(7, 9)]
    reused = []
    for number in range(3):
        prompts = [[*prompt, number, number] for prompt in prompts]
        batch = driver.begin(*prompts)
        reused.append([sequence.reuse.reused_tokens for sequence in batch])
        driver.prefill_batch()
        for _ in range(3):
            driver.step()
        driver.step(finish=[batch[0]])
        driver.step(finish=[batch[1]])
        assert driver.finish_batch().value == "ok"
        require_baseline(driver.coordinator)
    assert reused[0] == [0, 0]
    assert all(count >= 9 for count in (*reused[1], *reused[2]))


@pytest.mark.parametrize("flavour", ALL)
def test_random_batches_with_failing_waits(open_driver, flavour):
    """Batches end by finish or by being dropped, at every stage; some waits fail, and everything is recovered."""
    driver, rng = open_driver(flavour, kind=ToyBatchDriver, **SMALL), random.Random(7)
    shared, quarantined = tokens(7, 30), 0
    for _ in range(60):
        prompts = [shared[: rng.randrange(1, 20)] + rng.choices(range(3), k=rng.randrange(4)) for _ in range(2)]
        named = [{"checkpoint_boundaries": [length for length in (5, 9) if length <= len(prompts[0])]}]
        batch = driver.begin(*prompts, each=named if rng.random() < 0.5 else [])
        if batch is None:
            continue
        if rng.random() < 0.9:
            driver.prefill_batch()
            for _ in range(rng.randrange(4)):
                assert driver.step() is not None
            if rng.random() < 0.5:
                driver.step(finish=[batch[0]])
        driver.sync.failing = rng.random() < 0.6
        driver.sync.raises = rng.random() < 0.5
        if rng.random() < 0.5:
            driver.finish_batch()
        else:
            driver.abandon_batch()
        quarantined += driver.coordinator.metrics().quarantined_requests
        driver.sync.failing = False
        assert driver.coordinator.recover()
        require_baseline(driver.coordinator)
    assert quarantined > 3


@pytest.mark.parametrize("flavour", ALL)
def test_random_traffic_with_failing_waits(open_driver, flavour):
    """A wait may fail in the middle of anything; the container is lost, its pages are held, and all is recovered."""
    driver, rng, shared, lost = open_driver(flavour, **SMALL), random.Random(8), tokens(8, 30), 0
    for _ in range(40):
        wander(driver, rng, shared, 6)
        driver.sync.failing = True
        driver.sync.raises = rng.random() < 0.5
        with contextlib.suppress(SessionLostError):
            wander(driver, rng, shared, 3)
            driver.cancel(*driver.live.values())
        lost += driver.coordinator.poisoned
        driver.request.abandon()
        held = recount(driver.coordinator).leased
        assert held == 0 or driver.coordinator.metrics().quarantined_requests == 1
        driver.sync.failing = False
        driver.restart()
        assert recount(driver.coordinator).leased == 0
    assert lost > 20


@pytest.mark.parametrize("flavour", ALL)
def test_an_abandoned_batch_gives_everything_back(open_driver, flavour):
    driver = open_driver(flavour, kind=ToyBatchDriver, num_pages=40)
    for steps in (-1, 0, 2):
        driver.begin(tokens(8, 13), tokens(9, 7))
        if steps >= 0:
            driver.prefill_batch()
        for _ in range(steps):
            driver.step()
        driver.abandon_batch()
        require_baseline(driver.coordinator)


@pytest.mark.parametrize("flavour", ALL)
def test_a_failed_drain_quarantines_and_is_recovered(flavour):
    driver = ToyDriver(FLAVOURS[flavour], policies=all_policies(), num_pages=40)
    sequence = driver.admit(tokens(10, 9))
    driver.prefill(sequence)
    driver.sync.failing = True
    with pytest.raises(SessionLostError):
        driver.cancel(sequence)
    driver.request.abandon()  # nothing to do where the compaction itself gave the request up
    assert driver.coordinator.poisoned
    leased = recount(driver.coordinator).base.leased
    assert leased > 0 or flavour == "recurrent"
    driver.sync.failing = False
    assert driver.coordinator.shutdown().value == "ok"
    require_baseline(driver.coordinator)


def test_a_refused_step_names_the_sequence(open_driver):
    driver = open_driver("attention", num_pages=4, max_kv_capacity=32)
    sequence = driver.admit(tokens(11, 14))
    driver.prefill(sequence)
    assert driver.step() is not None
    assert driver.step() is not None
    assert driver.step() is None
    assert driver.refused is sequence
    assert driver.admit(tokens(12, 4)) is None
    assert driver.last_admission.insufficient_capacity


# --- the checks can fail -------------------------------------------------------------------------------------------


def test_a_page_that_was_overwritten_is_noticed(open_driver):
    driver = open_driver("attention")
    first = driver.admit(tokens(13, 9))
    driver.prefill(first)
    page = driver.machine.base_row(first.slot)[0]
    kept = driver.machine.base.pages[page].copy()
    driver.machine.base.pages[page, 1] ^= 4
    with pytest.raises(InvariantError):
        driver.step()
    driver.machine.base.pages[page] = kept
    driver.request.impl.mark_device_work_synchronized()


def test_a_page_freed_too_early_is_noticed(open_driver):
    driver = open_driver("attention")
    first = driver.admit(tokens(14, 9))
    driver.prefill(first)
    page = driver.machine.base_row(first.slot)[0]
    kept = driver.machine.base.pages[page].copy()
    driver.machine.base.poison([page])
    with pytest.raises(PoisonReadError):
        driver.step()
    driver.machine.base.pages[page] = kept
    driver.request.impl.mark_device_work_synchronized()


@pytest.mark.parametrize("what", ["value", "window"])
def test_a_capture_of_another_state_is_noticed(open_driver, what):
    """Break the storage the way kernels have: half of the state is captured."""
    driver = open_driver("hybrid")
    storage = driver.machine.storage
    capture = storage.capture_recurrent

    def broken(snapshot_slot, resident_slot):
        capture(snapshot_slot, resident_slot)
        storage._recurrent[0 if what == "value" else 1][snapshot_slot] += 1

    storage.capture_recurrent = broken
    sequence = driver.admit(tokens(15, 9), checkpoint_boundaries=[8])
    with pytest.raises(InvariantError, match="the capture at 8 is another state"):
        driver.prefill(sequence)
    driver.request.impl.mark_device_work_synchronized()


@pytest.mark.parametrize("what", ["value", "window"])
def test_half_a_restore_is_noticed(what):
    driver = ToyDriver(FLAVOURS["hybrid"], policies=all_policies())
    sequence = driver.admit(tokens(16, 9), checkpoint_boundaries=[8])
    driver.prefill(sequence)
    driver.cancel(sequence)
    storage, live = driver.machine.storage, driver.machine
    restore = storage.restore_recurrent

    def broken(snapshot_slot, resident_slot):
        restore(snapshot_slot, resident_slot)
        (live.recurrent if what == "value" else live.conv)[resident_slot] += 1

    storage.restore_recurrent = broken
    with pytest.raises(InvariantError, match="recurrent state" if what == "value" else "conv window"):
        driver.admit([*tokens(16, 8), 1, 2])


def test_the_recount_sees_every_pool(open_driver):
    driver = open_driver("mtp", num_pages=20, recurrent_slots=5, partial_slots=4)
    sequence = driver.admit(tokens(17, 9))
    manager, lease = driver.coordinator._manager, driver.request.impl.leases[0]
    reservation = manager.reserve_hybrid_snapshots(lease, True)
    counted = count_all(driver.coordinator.manager)
    assert [pool.total for pool in counted.pools] == [20, 20, 5, 4]
    assert [pool.leased for pool in counted.pools] == [4, 4, 1, 1]
    assert all(sum(pool[:3]) == pool.total for pool in counted.pools)
    for kind in ResourceType:
        assert count_pages(driver.coordinator.manager, kind) == counted.pools[kind]
    with pytest.raises(InvariantError, match="1 requests are still alive"):
        require_baseline(driver.coordinator)
    manager.retire_hybrid_snapshot_reservation(lease, reservation)
    driver.cancel(sequence)
    assert [pool.leased for pool in driver.recount().pools] == [0, 0, 0, 0]


def test_poison_reaches_snapshot_slots(open_driver):
    driver = open_driver("hybrid", recurrent_slots=3, partial_slots=3)
    sequence = driver.admit(tokens(18, 9))
    driver.prefill(sequence)
    free = driver.coordinator.manager.pools.pool(ResourceType.RECURRENT_SNAPSHOT).free_list()
    assert free
    driver.machine.storage.restore_recurrent(free[0], sequence.slot)
    with pytest.raises(PoisonReadError):
        driver.step()
    driver.machine.set_recurrent_state(sequence.slot, sequence.twin.recurrents[sequence.committed])
    driver.request.impl.mark_device_work_synchronized()
    assert np.array_equal(driver.machine.base_state(sequence.slot, 9), np.array(sequence.twin.values[:9], np.uint64))
