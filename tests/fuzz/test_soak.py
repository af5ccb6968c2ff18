"""Behaviour 173: many mixed requests with cancellation and drain failures; a short run here, the long one on demand.

The long run: `pytest -m slow tests/fuzz/test_soak.py --log-cli-level=INFO`.  EDGELLM_FUZZ_SEED=7 draws another one.
"""

from __future__ import annotations

import logging
import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
from plugin_policies import all_policies

from edgellm.cache.metrics import ContextCacheMetrics
from edgellm.testing.random_traffic import ANY_TIME, LIVE, TrafficDriver, random_driver
from edgellm.testing.recount import recount
from edgellm.testing.toy_driver import FLAVOURS

SHORT, LONG = 400, 100_000
REQUESTS_OF_ONE_SHAPE = 500
RECOUNT_EVERY = 25  # operations; the texts and what was given back are checked at each
_logger = logging.getLogger(__name__)
SEED = int(os.environ.get("EDGELLM_FUZZ_SEED", "20240601"))


@pytest.fixture(autouse=True)
def failed_drains_are_no_news() -> Iterator[None]:
    logger = logging.getLogger("edgellm")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


def check_sums(metrics: ContextCacheMetrics) -> None:
    """Every relation that holds between counters, whatever happened."""
    plans = metrics.standard_plans + metrics.no_reusable_prefix_plans + metrics.full_input_rewind_plans
    assert plans == metrics.admitted_sequences
    assert metrics.publication_attempts == metrics.committed_publications + metrics.existing_publications
    assert metrics.hit_sequences <= metrics.admitted_sequences
    assert metrics.reused_tokens <= metrics.matched_tokens
    assert metrics.forced_cold_sequences == metrics.policy_failures == 0


def soak_one_shape(rng: random.Random, driver: TrafficDriver, requests: int, done: Counter[str]) -> ContextCacheMetrics:
    """Random operations until `requests` were admitted; then everything must come back."""
    coordinator, operations = driver.coordinator, 0
    lose = driver.lose_container

    def counted() -> None:
        done["failed drains"] += 1
        lose()

    driver.lose_container = counted  # type: ignore[method-assign]
    while coordinator.counters.admitted_sequences < requests:
        steps = ANY_TIME | LIVE if driver.live else ANY_TIME
        step = rng.choices(list(steps), list(steps.values()))[0]
        step(rng, driver)
        operations += 1
        done[step.__name__] += 1
        if operations % RECOUNT_EVERY == 0:
            driver.recount()
    driver.recount()
    driver.close()  # requires that nothing is leased any more
    metrics = coordinator.metrics()
    coordinator._manager.evict_all()
    empty = recount(coordinator)
    assert [pool.free for pool in empty.pools] == [pool.total for pool in empty.pools]
    return metrics


def soak(flavour: str, requests: int) -> tuple[Counter[str], Counter[str]]:
    """Operations by name, and the counters of all deployments added up."""
    rng = random.Random(f"{SEED}/{flavour}/soak")
    done: Counter[str] = Counter()
    total: Counter[str] = Counter()
    while total["admitted_sequences"] < requests:
        some = min(REQUESTS_OF_ONE_SHAPE, requests - total["admitted_sequences"])
        metrics = soak_one_shape(rng, random_driver(rng, flavour, all_policies(), check=False), some, done)
        check_sums(metrics)
        total.update({field.name: _number(getattr(metrics, field.name)) for field in fields(metrics)})
    return done, total


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def check_everything_happened(done: Counter[str], total: Counter[str], requests: int) -> None:
    assert total["admitted_sequences"] >= requests
    assert done["cancel"] > 0
    assert done["failed drains"] > 0
    assert total["reused_tokens"] > 0
    assert total["publication_attempts"] > 0
    assert total["evicted_records"] > 0


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_173_mixed_requests_leave_nothing_behind(flavour: str) -> None:
    done, total = soak(flavour, SHORT)
    check_everything_happened(done, total, SHORT)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_173_a_hundred_thousand_mixed_requests_leave_nothing_behind() -> None:
    all_done: Counter[str] = Counter()
    all_total: Counter[str] = Counter()
    for flavour in FLAVOURS:
        requests = -(-LONG // len(FLAVOURS))
        done, total = soak(flavour, requests)
        check_everything_happened(done, total, requests)
        all_done += done
        all_total += total
    assert all_total["admitted_sequences"] >= LONG
    _logger.info("%s", {**all_done, **all_total})
