"""How many nodes of a tree get a row: what rows cost, what drafts promise, and what they keep."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from edgellm.decoding.draft_tree import DraftTable
from edgellm.decoding.tree_sizes import TreeSizes

TREE = np.array([0.9, 0.7, 0.5, 0.1, 0.05, 0.01])


def taught(fixed: float, per_row: float) -> TreeSizes:
    """Sizes that saw steps of 1 to 16 rows."""
    sizes = TreeSizes()
    for _ in range(4):
        for rows in (1, 2, 4, 8, 16):
            sizes.times.observe(rows, fixed + per_row * rows)
    return sizes


def test_before_anything_was_measured_all_that_may_is_proposed() -> None:
    assert TreeSizes().counts([0, 1], [TREE, TREE[:2]], 4, num_rows=2) == [4, 2]


def test_free_rows_are_all_used() -> None:
    assert taught(5.0, 0.0).counts([0], [TREE], 99, num_rows=1) == [6]


def test_dear_rows_leave_the_best_node_alone() -> None:
    assert taught(0.0, 1.0).counts([0, 1], [TREE, TREE], 99, num_rows=2) == [1, 1]


def test_a_sequence_without_a_tree_gets_none() -> None:
    assert taught(5.0, 0.0).counts([0, 1], [TREE[:0], TREE], 99, num_rows=2) == [0, 6]


def rate(trees: list[np.ndarray], counts: tuple[int, ...], rows: int, fixed: float, per_row: float) -> float:
    expected = rows + sum(tree[:count].sum() for tree, count in zip(trees, counts, strict=True))
    return expected / (fixed + per_row * (rows + sum(counts)))


@pytest.mark.parametrize("per_row", [0.01, 0.05, 0.2, 0.5])
def test_the_chosen_nodes_give_the_most_tokens_a_second(per_row: float) -> None:
    trees = [TREE, np.array([0.6, 0.55, 0.3, 0.3]), np.array([0.99, 0.98, 0.97])]
    counts = taught(1.0, per_row).counts([0, 1, 2], trees, 5, num_rows=4)
    options = itertools.product(*(range(1, min(5, len(tree)) + 1) for tree in trees))
    best = max(rate(trees, option, 4, 1.0, per_row) for option in options)
    assert rate(trees, tuple(counts), 4, 1.0, per_row) == pytest.approx(best, rel=1e-6)


def grown(level: list[float]) -> DraftTable:
    """Three levels, behind each node of which the candidates have these probabilities."""
    table = DraftTable(len(level))
    for _ in range(3):
        shape = (len(table.frontier), len(level))
        table.grow(np.zeros(shape, np.int64), np.broadcast_to(np.log(level), shape).astype(np.float32))
    return table


@pytest.mark.parametrize(("level", "chain"), [([0.9, 0.05, 0.05], True), ([0.4, 0.35, 0.25], False)])
def test_a_tree_whose_branches_do_not_pay_is_a_chain(level: list[float], chain: bool) -> None:
    table = grown(level)
    (count,) = taught(1.0, 0.12).counts([0], [table.chances()], 39, num_rows=1)
    assert count > 1
    assert table.best(count).is_chain is chain


def test_time_that_went_into_drafting_makes_rows_worth_more() -> None:
    sizes = taught(1.0, 0.2)
    (few,), (more,) = (sizes.counts([0], [TREE], 99, num_rows=1, spent=spent) for spent in (0.0, 5.0))
    assert few < more


def test_promises_that_are_not_kept_cost_a_sequence_its_rows() -> None:
    sizes = taught(1.0, 0.2)
    sizes.seat(0)
    sizes.seat(1)
    for _ in range(40):
        sizes.observe_tree(0, TREE.tolist(), 0)
        sizes.observe_tree(1, TREE.tolist(), 3)
    assert sizes.worth(0) < 0.1
    assert sizes.worth(1) > 1.0
    bad, good = sizes.counts([0, 1], [TREE, TREE], 99, num_rows=2)
    assert (bad, good) == (1, 3)
    sizes.unseat(0)
    sizes.seat(0)
    assert sizes.worth(0) == 1.0


def test_a_round_without_a_tree_says_nothing() -> None:
    sizes = TreeSizes()
    sizes.observe_tree(0, [], 0)
    assert sizes.worth(0) == 1.0
