"""Random traffic through coordinators of every flavour, with failed drains, poison and recovery; longer on demand.

EDGELLM_FUZZ_TRAFFIC=100000 EDGELLM_FUZZ_SEED=7 pytest tests/fuzz/test_random_traffic.py
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
from plugin_policies import all_policies

from edgellm.testing.random_traffic import run_traffic
from edgellm.testing.toy_driver import FLAVOURS

OPERATIONS = int(os.environ.get("EDGELLM_FUZZ_TRAFFIC", "300"))
SEED = int(os.environ.get("EDGELLM_FUZZ_SEED", "20240601"))


@pytest.fixture(autouse=True)
def failed_drains_are_no_news() -> Iterator[None]:
    logger = logging.getLogger("edgellm")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


@pytest.mark.parametrize("name", FLAVOURS)
def test_random_traffic_leaves_every_text_right_and_every_page_accounted_for(name: str) -> None:
    """Behaviour 173: cancellation and injected drain failure at any time; no leak, and the poison is lifted."""
    kinds, drains, _ = run_traffic(name, OPERATIONS, SEED, all_policies())
    assert kinds.total() >= OPERATIONS
    assert drains >= 1
    assert kinds["fail_drain_and_recover"] > 0
    assert kinds["packed_step"] > 0
