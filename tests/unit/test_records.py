"""Record store: endpoints, LRU order, ids (behaviours 26, 27, 30 as far as they concern attention-only records).

The tree changes two of them.  A record names its endpoint node instead of carrying pages, so 26 (pages) becomes "node
and block count", and "the same key again" (27) means the same node.
"""

from __future__ import annotations

import pytest

from edgellm._core.records import RecordStore
from edgellm.cache.types import CacheRecordKey, Hash128
from edgellm.errors import InvalidArgumentError


def key(value: int, count: int = 1) -> CacheRecordKey:
    return CacheRecordKey(Hash128(value, value + 1), count)


def test_ids_count_from_one_in_lru_order() -> None:
    store = RecordStore()
    assert [store.insert(node, key(node)) for node in (5, 3, 8)] == [(1, True), (2, True), (3, True)]
    assert store.lru_to_mru() == [1, 2, 3]
    assert (store.size, len(store), store.max_records) == (3, 3, None)
    assert (store.node(2), store.key(2)) == (3, key(3))
    store.touch(1)
    assert store.lru_to_mru() == [2, 3, 1]
    store.check_invariants()


def test_26_record_without_an_endpoint_is_refused() -> None:
    store = RecordStore()
    with pytest.raises(InvalidArgumentError, match="at least one full block"):
        store.insert(0, key(1, 0))
    with pytest.raises(InvalidArgumentError, match="0 or more"):
        store.insert(-1, key(1))
    with pytest.raises(InvalidArgumentError, match="0 or more"):
        store.insert(0, key(1, -1))
    with pytest.raises(InvalidArgumentError, match="needs a recurrent snapshot"):
        store.insert(0, key(1), exact_length=6)
    with pytest.raises(InvalidArgumentError, match="only a recurrent checkpoint has snapshots"):
        store.insert(0, key(1), recurrent_slot=0)
    assert (store.size, store.lru_to_mru()) == (0, [])
    store.check_invariants()


def test_27_same_endpoint_again_is_only_touched() -> None:
    store = RecordStore()
    store.insert(4, key(4, 2))
    store.insert(5, key(5))
    assert store.insert(4, key(4, 2)) == (1, False)
    assert store.lru_to_mru() == [2, 1]
    assert (store.size, store.node(1), store.key(1)) == (2, 4, key(4, 2))


def test_same_node_with_another_hash_is_refused() -> None:
    store = RecordStore()
    store.insert(4, key(4))
    with pytest.raises(InvalidArgumentError, match="another terminal hash"):
        store.insert(4, key(7))
    assert store.key(1) == key(4)


def test_endpoints_of_one_node_differ_by_checkpoint_length() -> None:
    store = RecordStore()
    store.insert(2, key(2))
    store.insert(2, key(2), exact_length=6, recurrent_slot=0)
    store.insert(2, key(2), exact_length=7, recurrent_slot=1, partial_slot=0)
    assert store.records_at(2) == [3, 2, 1]
    assert [store.exact_length(r) for r in (1, 2, 3)] == [None, 6, 7]
    store.erase(2)
    assert store.records_at(2) == [3, 1]
    assert store.records_at(99) == []
    store.check_invariants()


def test_30_ids_are_never_used_again() -> None:
    store = RecordStore()
    store.insert(0, key(0))
    store.insert(1, key(1))
    store.erase(2)
    assert store.insert(1, key(1)) == (3, True)
    assert 2 not in store
    assert 3 in store
    assert store.lru_to_mru() == [1, 3]


@pytest.mark.parametrize("victim", [1, 2, 3])
def test_erasing_keeps_the_order_of_the_others(victim: int) -> None:
    store = RecordStore()
    for node in range(3):
        store.insert(node, key(node))
    store.erase(victim)
    assert store.lru_to_mru() == [r for r in (1, 2, 3) if r != victim]
    store.check_invariants()


@pytest.mark.parametrize("bad", [0, 2, -1, "1", None])
def test_unknown_id_is_refused(bad: object) -> None:
    store = RecordStore()
    store.insert(0, key(0))
    for call in (store.erase, store.touch, store.key, store.node):
        with pytest.raises(InvalidArgumentError, match="not in the store"):
            call(bad)  # type: ignore[arg-type]
    assert store.lru_to_mru() == [1]


@pytest.mark.parametrize("limit", [-1, 1.5, "3"])
def test_bad_limit_is_refused(limit: object) -> None:
    with pytest.raises(InvalidArgumentError, match="max_records"):
        RecordStore(limit)  # type: ignore[arg-type]


def test_store_does_not_enforce_its_limit() -> None:
    store = RecordStore(1)
    store.insert(0, key(0))
    store.insert(1, key(1))
    assert (store.size, store.max_records) == (2, 1)
