"""How a budget is divided between pages and checkpoints of recurrent state."""

from __future__ import annotations

from typing import Any

import pytest

from edgellm.errors import InvalidArgumentError
from edgellm.memory import MemoryBudget
from edgellm.runtime.state_budget import StatePools, StateSizes, divide

MIB = 1 << 20
ATTENTION = StateSizes(base_page=MIB)
PAIRED = StateSizes(base_page=MIB, draft_page=MIB)
HYBRID = StateSizes(base_page=MIB, state=3 * MIB, hidden=MIB)
RECURRENT = StateSizes(base_page=0, state=4 * MIB)


def divided(budget: Any, sizes: StateSizes, free: int = 1000 * MIB, batch: int = 2) -> StatePools:
    return divide(budget, sizes, page_size=16, free_bytes=free, default_tokens=1600, max_batch_size=batch)


def test_attention_models_buy_pages_alone() -> None:
    assert divided("100MiB", ATTENTION) == StatePools(num_pages=100, num_snapshots=0)
    assert divided(160, ATTENTION) == StatePools(num_pages=10, num_snapshots=0)
    assert divided(None, ATTENTION) == StatePools(num_pages=100, num_snapshots=0)


def test_a_draft_with_pages_of_its_own_takes_its_part() -> None:
    assert divided("100MiB", PAIRED).num_pages == 50


def test_a_hybrid_gives_an_eighth_to_checkpoints() -> None:
    pools = divided("800MiB", HYBRID)
    assert HYBRID.snapshot == 5 * MIB
    assert pools.num_pages == pytest.approx(700, abs=1)
    assert pools.num_snapshots == pytest.approx(20, abs=1)
    assert pools.num_pages * MIB + pools.num_snapshots * HYBRID.snapshot <= 800 * MIB


def test_every_seat_has_two_checkpoints_at_least() -> None:
    assert divided(64, HYBRID, batch=3).num_snapshots == 6
    assert divided(64, RECURRENT, batch=3).num_snapshots == 6


def test_live_state_and_the_least_checkpoints_must_fit_too() -> None:
    with pytest.raises(InvalidArgumentError, match="are free"):
        divided("100MiB", HYBRID, free=110 * MIB)
    assert divided("80MiB", HYBRID, free=110 * MIB).num_pages == 69


def test_a_model_without_pages_buys_checkpoints() -> None:
    assert divided("100MiB", RECURRENT) == StatePools(num_pages=0, num_snapshots=25)
    assert divided(None, RECURRENT) == StatePools(num_pages=0, num_snapshots=8)


def test_checkpoints_that_do_not_fit_are_refused_by_that_name() -> None:
    with pytest.raises(InvalidArgumentError, match=r"25 checkpoints of this model's state take 100.0 MiB"):
        divided("100MiB", RECURRENT, free=50 * MIB)


def test_the_budget_is_told_in_words() -> None:
    hybrid = MemoryBudget(
        bytes_per_page=MIB, num_pages=4, page_size=16, max_model_len=32, snapshot_slots=6, snapshot_bytes=30 * MIB,
        state_bytes=6 * MIB,
    )  # fmt: skip
    assert "4 pages" in hybrid.describe()
    assert "recurrent state 6.0 MiB, 6 checkpoints of it 30.0 MiB" in hybrid.describe()
    recurrent = MemoryBudget(
        bytes_per_page=0, num_pages=0, page_size=16, max_model_len=32, snapshot_slots=1, snapshot_bytes=MIB,
        state_bytes=MIB,
    )  # fmt: skip
    assert recurrent.describe() == "recurrent state 1.0 MiB, 1 checkpoint of it 1.0 MiB"
