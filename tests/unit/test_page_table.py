"""Page table rows.  An entry is one page id (K and V live in one page), so there is no V id to derive or to check."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm._core.page_table import KVPageTable
from edgellm.errors import InvalidArgumentError


def table_of(*, sparse_window: bool = False) -> KVPageTable:
    """3 slots of 4 pages over a pool of 10."""
    return KVPageTable(3, 4, 10, sparse_window=sparse_window)


def snapshot(table: KVPageTable) -> list[list[int]]:
    return table.rows.tolist()


def test_a_new_table_maps_nothing_and_is_clean() -> None:
    table = table_of()
    assert table.rows.shape == (3, 4)
    assert table.rows.dtype == np.int32
    assert (table.rows == -1).all()
    assert table.take_dirty() == []
    table.check_invariants()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ((0, [1]), "twice"),
        ((3, [1]), "slot 3"),
        ((-1, [1]), "slot -1"),
        ((2, [1, 10]), "page 10"),
        ((2, [-2]), "page -2"),
        ((2, [1, 2, 3, 4, 5]), "5 pages exceed the 4"),
        ((2, [7, 7]), "already in this row"),
        ((2, None), "page ids"),
        ((2, [1.5]), "page ids"),
    ],
)
def test_97_one_bad_update_among_three_changes_no_row(bad: tuple[int, list[int]], message: str) -> None:
    table = table_of()
    table.set_rows([(0, [3, 4]), (1, [5])])
    table.take_dirty()
    before = snapshot(table)
    with pytest.raises(InvalidArgumentError, match=message):
        table.set_rows([(0, [1, 2]), (1, [6, 7]), bad])
    assert snapshot(table) == before
    assert table.take_dirty() == []
    table.check_invariants()


def test_98_a_shorter_row_has_an_unused_tail_and_entries_are_plain_page_ids() -> None:
    table = table_of()
    table.set_rows([(1, [4, 5, 6])])
    assert table.row(1).tolist() == [4, 5, 6, -1]
    table.set_rows([(1, [9])])
    assert table.row(1).tolist() == [9, -1, -1, -1]
    assert table.row_length(1) == 1
    assert table.rows[0].tolist() == [-1] * 4
    table.check_invariants()


def test_99_a_dense_row_refuses_a_live_id_after_an_unused_entry() -> None:
    table = table_of()
    for row in ([-1, 2], [1, -1, 2]):
        with pytest.raises(InvalidArgumentError, match="unused entry"):
            table.set_rows([(0, row)])
    table.set_rows([(0, [1, -1, -1])])
    assert table.row_length(0) == 1


def test_99_a_sparse_window_row_may_begin_with_unused_entries() -> None:
    table = table_of(sparse_window=True)
    table.set_rows([(0, [-1, -1, 3, 4])])
    assert table.row(0).tolist() == [-1, -1, 3, 4]
    assert table.row_length(0) == 4
    with pytest.raises(InvalidArgumentError, match="already in this row"):
        table.set_rows([(1, [-1, 3, 3])])
    with pytest.raises(InvalidArgumentError, match="between live pages"):
        table.set_rows([(1, [2, -1, 3])])
    table.set_rows([(1, [-1, -1])])
    assert table.row_length(1) == 0
    table.check_invariants()


def test_100_only_the_changed_row_is_handed_to_the_upload_and_only_once() -> None:
    table = table_of()
    table.set_rows([(0, [1]), (1, [2]), (2, [3])])
    assert table.take_dirty() == [0, 1, 2]
    table.set_rows([(2, [3, 4])])
    assert table.num_dirty == 1
    assert table.take_dirty() == [2]
    assert table.take_dirty() == []
    assert table.num_dirty == 0


def test_writing_what_is_already_there_does_not_make_a_row_dirty() -> None:
    table = table_of()
    table.set_rows([(1, [2, 3])])
    table.take_dirty()
    table.set_rows([(1, np.array([2, 3], np.int32))])
    table.set_row_tail(1, 1, [3])
    table.clear_row(0)
    assert table.take_dirty() == []


def test_a_row_changed_twice_is_dirty_once() -> None:
    table = table_of()
    table.set_rows([(2, [1])])
    table.set_row_tail(2, 1, [5])
    table.clear_row(0)
    assert table.take_dirty() == [2]


def test_an_empty_update_clears_the_row() -> None:
    table = table_of()
    table.set_rows([(0, [1, 2]), (1, [3])])
    table.take_dirty()
    table.set_rows([(0, [])])
    table.clear_row(1)
    assert (table.rows == -1).all()
    assert table.take_dirty() == [0, 1]


def test_growth_appends_at_the_end_of_a_row() -> None:
    table = table_of()
    table.set_rows([(1, [7])])
    table.set_row_tail(1, 1, [8, 9])
    assert table.row(1).tolist() == [7, 8, 9, -1]
    table.set_row_tail(1, 2, [])
    assert table.row(1).tolist() == [7, 8, -1, -1]
    table.set_row_tail(0, 0, np.array([0, 1, 2, 3], np.int32))
    assert table.row_length(0) == 4
    table.check_invariants()


@pytest.mark.parametrize(
    ("slot", "start", "page_ids", "message"),
    [
        (1, 2, [3], "start 2 is not in"),
        (1, -1, [3], "start -1 is not in"),
        (1, 1, [2, 3, 4, 5], "5 pages exceed"),
        (1, 1, [10], "page 10"),
        (1, 1, [7], "already in this row"),
        (3, 0, [1], "slot 3"),
    ],
)
def test_refused_growth_changes_nothing(slot: int, start: int, page_ids: list[int], message: str) -> None:
    table = table_of()
    table.set_rows([(1, [7])])
    table.take_dirty()
    with pytest.raises(InvalidArgumentError, match=message):
        table.set_row_tail(slot, start, page_ids)
    assert snapshot(table) == [[-1] * 4, [7, -1, -1, -1], [-1] * 4]
    assert table.take_dirty() == []


def test_rows_is_a_live_view_without_a_copy_that_cannot_be_written() -> None:
    table = table_of()
    rows, row = table.rows, table.row(1)
    table.set_rows([(1, [6])])
    assert rows[1, 0] == 6
    assert row[0] == 6
    assert np.shares_memory(rows, table.rows)
    with pytest.raises(ValueError, match="read-only"):
        rows[0, 0] = 1
    del table
    assert rows[1, 0] == 6


def test_gather_rows_copies_rows_in_the_order_asked_for() -> None:
    table = table_of()
    table.set_rows([(0, [1]), (2, [3, 4])])
    gathered = table.gather_rows([2, 0])
    assert gathered.tolist() == [[3, 4, -1, -1], [1, -1, -1, -1]]
    gathered[0, 0] = 9
    assert table.row(2)[0] == 3
    assert table.gather_rows([]).shape == (0, 4)
    with pytest.raises(InvalidArgumentError, match="slot 5"):
        table.gather_rows([5])


@pytest.mark.parametrize("sizes", [(0, 4, 10), (3, 0, 10), (3, 4, 0), (-1, 4, 10), (3, 4, 1 << 31), (3, 4.0, 10)])
def test_impossible_geometry_is_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidArgumentError, match="must be an integer from 1"):
        KVPageTable(*sizes)
