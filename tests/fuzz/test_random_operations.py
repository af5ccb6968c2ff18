"""Many random cache operations with all observables compared after each; longer runs on demand.

EDGELLM_FUZZ_OPERATIONS=1000000 EDGELLM_FUZZ_SEED=7 pytest tests/fuzz/test_random_operations.py
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
from cache_model import CacheDriver

from edgellm._core.block_index import DEFAULT_HASH_MASK

OPERATIONS = int(os.environ.get("EDGELLM_FUZZ_OPERATIONS", "3000"))
SEED = int(os.environ.get("EDGELLM_FUZZ_SEED", "20240601"))
RESTART_EVERY = 1000  # operations on one cache before it must come back empty and another shape is drawn


def random_prompt(rng: random.Random, driver: CacheDriver) -> tuple[int, list[int]]:
    if driver.live and rng.random() < 0.5:
        base = rng.choice(driver.live)
        cut = rng.randint(0, len(base.tokens))
        return base.namespace, base.tokens[:cut] + rng.choices((0, 1), k=rng.randint(0, 6))
    return rng.randint(0, 1), rng.choices((0, 1), k=rng.randint(0, 24))


def acquire(rng: random.Random, driver: CacheDriver) -> None:
    namespace, tokens = random_prompt(rng, driver)
    driver.acquire(namespace, tokens, min_tokens=len(tokens) + rng.randint(0, 3), bypass=rng.random() < 0.1)


def grow(rng: random.Random, driver: CacheDriver) -> None:
    driver.grow(rng.randrange(len(driver.live)), rng.randint(0, 3))


def ensure_coverage(rng: random.Random, driver: CacheDriver) -> None:
    driver.ensure_coverage(rng.sample(range(len(driver.live)), rng.randint(1, len(driver.live))), rng.randint(0, 4))


def publish(rng: random.Random, driver: CacheDriver) -> None:
    which = rng.randrange(len(driver.live))
    length = len(driver.live[which].tokens)
    driver.publish(which, rng.choice((length, rng.randint(0, length))), make_record=rng.random() < 0.5)


def append(rng: random.Random, driver: CacheDriver) -> None:
    which = rng.sample(range(len(driver.live)), rng.randint(1, len(driver.live)))
    driver.append(which, rng.randint(0, 1), publish=rng.random() < 0.7, lookahead=rng.randint(0, 1))


def rebind(rng: random.Random, driver: CacheDriver) -> None:
    driver.rebind(rng.randrange(len(driver.live)))


def release(rng: random.Random, driver: CacheDriver) -> None:
    driver.release(rng.randrange(len(driver.live)))


def evict_record(rng: random.Random, driver: CacheDriver) -> None:
    if driver.model.records:
        driver.evict_record(rng.randrange(len(driver.model.records)))


def evict_all(rng: random.Random, driver: CacheDriver) -> None:
    if rng.random() < 0.1:
        driver.evict_all()


WITHOUT_LIVE: list[Callable[[random.Random, CacheDriver], None]] = [acquire, evict_record, evict_all]
WITH_LIVE = [
    acquire,
    acquire,
    grow,
    ensure_coverage,
    publish,
    publish,
    publish,
    append,
    append,
    append,
    rebind,
    release,
    release,
    evict_record,
    evict_all,
]


@pytest.mark.parametrize("hash_mask", [DEFAULT_HASH_MASK, 0, 1], ids=["hashed", "all-collide", "two-buckets"])
def test_random_operations_keep_manager_and_model_equal(hash_mask: int) -> None:
    """Behaviour 96 and 172: exact state after every operation, everything free at the end."""
    rng = random.Random(f"{SEED}/{hash_mask}")
    done = 0
    while done < OPERATIONS:
        driver = CacheDriver(
            rng.choice((2, 4)), rng.randint(4, 24), max_records=rng.choice((None, None, 1, 3, 0)), hash_mask=hash_mask
        )
        for _ in range(min(RESTART_EVERY, OPERATIONS - done)):
            rng.choice(WITH_LIVE if driver.live else WITHOUT_LIVE)(rng, driver)
            done += 1
        driver.finish()
