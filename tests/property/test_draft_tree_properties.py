"""Draft tables and trees: what is chosen hangs together, and masks and positions say who stands before whom."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.decoding.draft_tree import DraftTable, DraftTree, depth_of, mark_trees, pack_mask
from edgellm.runtime.batch import RaggedBatch
from edgellm.runtime.tree_rows import words_for


@st.composite
def tables(draw: st.DrawFn) -> DraftTable:
    """Tables of up to five levels; scores are drawn from a few values, so that ties abound."""
    top_k, levels = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    choices = np.array(draw(st.lists(st.sampled_from([0.0, -0.1, -1.0, -3.0, -np.inf, np.nan]), min_size=1)))
    table = DraftTable(top_k)
    for _ in range(levels):
        shape = (len(table.frontier), top_k)
        table.grow(rng.integers(0, 50, shape), np.sort(rng.choice(choices, shape))[:, ::-1].astype(np.float32))
    return table


@st.composite
def draft_trees(draw: st.DrawFn, most: int = 70) -> DraftTree:
    size = draw(st.integers(0, most))
    parents = [draw(st.integers(0, node)) for node in range(size)]
    return DraftTree(list(range(size)), parents, [1.0] * size)


@given(tables())
def test_entries_follow_their_predecessors_and_never_outscore_them(table: DraftTable) -> None:
    for entry in range(1, len(table.scores)):
        parent = table.parents[entry]
        assert 0 <= parent < entry
        assert not table.scores[entry] > table.scores[parent]
    assert len(table.frontier) <= table.top_k
    assert len(table.token_ids) == len(table.scores) == len(table.parents)


@given(tables(), st.integers(0, 200))
def test_the_best_are_the_best_and_hang_together(table: DraftTable, count: int) -> None:
    tree = table.best(count)
    assert len(tree) == min(count, len(table.scores) - 1)
    assert all(0 <= parent <= number for number, parent in enumerate(tree.parents))
    chosen = table.ranked()[: len(tree)]
    rest = set(range(1, len(table.scores))) - set(chosen.tolist())
    scores = np.nan_to_num(np.array(table.scores), nan=-np.inf)
    assert not any(scores[entry] > scores[chosen].min() for entry in rest if len(chosen))
    np.testing.assert_array_equal(np.sort(tree.chances), np.sort(table.chances()[: len(tree)]))


@given(tables())
def test_a_frontier_holds_the_best_of_its_level(table: DraftTable) -> None:
    before = len(table.scores)
    shape = (len(table.frontier), table.top_k)
    table.grow(np.zeros(shape, np.int64), -np.abs(np.sin(np.arange(shape[0] * shape[1]))).reshape(shape))
    scores = np.nan_to_num(np.array(table.scores[before:]), nan=-np.inf)
    kept = [entry - before for entry in table.frontier]
    assert len(kept) == min(table.top_k, len(scores))
    assert sorted(scores[kept]) == sorted(np.sort(scores)[len(scores) - len(kept) :])


@given(draft_trees())
def test_a_mask_row_is_the_node_and_its_ancestors(tree: DraftTree) -> None:
    words = words_for(len(tree) + 1)
    bits = np.unpackbits(tree.mask(words).view(np.uint8), axis=1, bitorder="little").astype(bool)
    assert tree.mask(words).shape == (len(tree) + 1, words)
    for node in range(len(tree) + 1):
        way = {node}
        while node:
            node = tree.parents[node - 1]
            way.add(node)
        assert set(np.flatnonzero(bits[max(way)]).tolist()) == way
    assert (bits.sum(axis=1) - 1).tolist() == tree.depths()
    assert tree.depth == max(tree.depths())
    assert tree.is_chain == (tree.depth == len(tree))


@given(draft_trees(), st.data())
def test_a_child_proposes_the_token_behind_its_node(tree: DraftTree, data: st.DataObject) -> None:
    node = data.draw(st.integers(0, len(tree)))
    children = {tree.token_ids[n]: n + 1 for n, parent in enumerate(tree.parents) if parent == node}
    for token in range(-1, len(tree) + 1):
        assert tree.child(node, token) == children.get(token)


@settings(max_examples=50)
@given(st.lists(st.one_of(draft_trees(20), st.lists(st.integers(0, 9), max_size=4)), min_size=1, max_size=5))
def test_marking_sets_positions_and_bits_of_trees_alone(proposals: list[DraftTree | list[int]]) -> None:
    counts = np.array([1 + len(proposal) for proposal in proposals], np.int32)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    past = np.arange(len(counts), dtype=np.int32) * 7
    wide = RaggedBatch(
        token_ids=np.zeros(starts[-1], np.int32),
        positions=np.concatenate([past[i] + np.arange(n) for i, n in enumerate(counts)]).astype(np.int32),
        query_start=starts,
        query_len=counts,
        past_len=past,
        state_index=np.arange(len(counts), dtype=np.int32),
        page_rows=np.zeros((len(counts), 1), np.int32),
        logits_index=np.arange(starts[-1]),
        logits_to_seq=np.repeat(np.arange(len(counts)), counts).astype(np.int32),
    )
    marked = mark_trees(wide, proposals)
    branching = [isinstance(proposal, DraftTree) and depth_of(proposal) < len(proposal) for proposal in proposals]
    if not any(branching):
        assert marked is wide
        return
    assert marked.tree_mask is not None
    assert marked.places.tolist() == wide.positions.tolist()
    for row, branches in enumerate(branching):
        rows = slice(starts[row], starts[row + 1])
        bits = np.unpackbits(marked.tree_mask[rows].view(np.uint8), axis=1, bitorder="little").sum(axis=1)
        if branches:
            assert (marked.positions[rows] - past[row] + 1).tolist() == bits.tolist()
        else:
            assert not bits.any()
            assert marked.positions[rows].tolist() == wide.positions[rows].tolist()


@pytest.mark.parametrize(("bits", "words"), [(1, 1), (32, 1), (33, 2), (128, 4)])
def test_words_for(bits: int, words: int) -> None:
    assert words_for(bits) == words
    packed = pack_mask([1 << (bits - 1)], words).view(np.uint32)
    assert packed[0, -1] == 1 << (bits - 1) % 32
