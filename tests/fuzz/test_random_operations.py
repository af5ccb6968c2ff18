"""Many random cache operations; longer runs on demand.

EDGELLM_FUZZ_OPERATIONS=1000000 EDGELLM_FUZZ_SEED=7 pytest tests/fuzz/test_random_operations.py
"""

from __future__ import annotations

import os
import random

import pytest
from cache_model import Lockstep

from edgellm.testing.cache_workout import FLAVOURS
from edgellm.testing.random_operations import Shape, main, random_step, random_workout, run_flavour

OPERATIONS = int(os.environ.get("EDGELLM_FUZZ_OPERATIONS", "5000"))
SEED = int(os.environ.get("EDGELLM_FUZZ_SEED", "20240601"))
RESTART_EVERY = 600  # operations on one cache before it must come back empty and another shape is drawn
LARGE_POOL = 100_000


@pytest.mark.parametrize("name", FLAVOURS)
def test_random_operations_keep_manager_and_model_equal(name: str) -> None:
    """Behaviour 96 and 172: exact state after every operation, everything free at the end."""
    rng = random.Random(f"{SEED}/{name}")
    done = 0
    while done < OPERATIONS:
        work = random_workout(rng, FLAVOURS[name], 16, kind=Lockstep)
        shape = Shape.of(work.page_size, 16)
        while work.operations < min(RESTART_EVERY, OPERATIONS - done):
            random_step(rng, shape, work)
        done += work.operations
        work.finish()


@pytest.mark.parametrize("name", FLAVOURS)
def test_small_pools_with_a_full_recount_after_each_operation(name: str) -> None:
    report = run_flavour(FLAVOURS[name], OPERATIONS, SEED, 16)
    assert report.operations >= OPERATIONS
    assert report.leaks == report.missing_pages == 0
    assert len(report.kinds) > 10


@pytest.mark.parametrize("name", ["vanilla", "spec", "hybrid-mtp"])
def test_a_large_pool_with_counts_in_between(name: str) -> None:
    report = run_flavour(FLAVOURS[name], min(OPERATIONS, 2000), SEED, LARGE_POOL)
    assert report.leaks == report.missing_pages == 0


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = (run_flavour(FLAVOURS["spec"], 500, 3, 12) for _ in range(2))
    assert first.kinds == second.kinds
    assert first.operations == second.operations


def test_command_line_reports_operations_leaks_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--operations", "300", "--seed", "5", "--flavour", "hybrid", "--pages", "8"]) == 0
    text = capsys.readouterr().out
    assert "hybrid: " in text
    assert " 0 leaks" in text
    assert "seed 5" in text


def test_a_checkpoint_without_a_page_behind_it_is_not_resumed() -> None:
    """Found by the long run: after 46,725 operations a lease without a draft page of its own went on from one."""
    report = run_flavour(FLAVOURS["hybrid-mtp"], 47_000, 1, 16)
    assert report.leaks == 0
