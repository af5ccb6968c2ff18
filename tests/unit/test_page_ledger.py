"""Page ledger: exact ids, free-list order and refusals (behaviours 13 to 18)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from edgellm._core.page_ledger import PagePool, ResourcePools
from edgellm.cache.types import ResourceDemand, ResourceId, ResourceType
from edgellm.errors import InvalidArgumentError

BASE = ResourceType.BASE_KV_PAGE
DRAFT = ResourceType.DRAFT_KV_PAGE


def test_fresh_pool_hands_out_ids_in_order() -> None:
    pool = PagePool(3)
    assert (pool.capacity, pool.free_count, pool.free_list()) == (3, 3, [0, 1, 2])
    assert pool.allocate(2) == [0, 1]
    assert [pool.active_ref(p) for p in range(3)] == [1, 1, 0]
    assert [pool.cache_ref(p) for p in range(3)] == [0, 0, 0]


def test_13_free_list_is_first_in_first_out() -> None:
    pool = PagePool(3)
    pool.allocate(3)
    for page in (1, 0, 2):
        pool.release_active_ref(page)
    assert pool.free_list() == [1, 0, 2]
    assert pool.allocate(3) == [1, 0, 2]


def test_free_list_wraps_around_its_ring() -> None:
    pool = PagePool(3)
    for _ in range(7):
        first, second = pool.allocate(2) or []
        pool.release_active_ref(second)
        pool.release_active_ref(first)
        pool.check_invariants()
    assert pool.free_list() == [2, 1, 0]  # seven rounds over a ring of three


def test_14_allocation_takes_all_types_or_none() -> None:
    pools = ResourcePools(ResourceDemand(base_kv_pages=2))
    assert pools.allocate(ResourceDemand(base_kv_pages=1, draft_kv_pages=1)) is None
    assert (pools.free_count(BASE), pools.free_count(DRAFT)) == (2, 0)
    assert pools.base.free_list() == [0, 1]


def test_15_page_is_free_only_without_both_kinds_of_reference() -> None:
    pool = PagePool(2)
    pool.allocate(1)
    pool.add_cache_ref(0)
    pool.release_active_ref(0)
    assert not pool.is_free(0)
    assert pool.free_list() == [1]
    pool.release_cache_ref(0)
    assert pool.is_free(0)
    assert pool.free_list() == [1, 0]


@pytest.mark.parametrize("call", [PagePool.add_active_ref, PagePool.add_cache_ref])
def test_16_free_page_takes_no_reference(call: Callable[[PagePool, int], None]) -> None:
    pool = PagePool(1)
    with pytest.raises(InvalidArgumentError, match="page 0: a free page takes no reference"):
        call(pool, 0)
    assert pool.free_list() == [0]
    pool.check_invariants()


@pytest.mark.parametrize("call", [PagePool.release_active_ref, PagePool.release_cache_ref])
def test_16_release_without_a_reference_is_refused(call: Callable[[PagePool, int], None]) -> None:
    pool = PagePool(1)
    with pytest.raises(InvalidArgumentError, match=r"no \w+ reference to release"):
        call(pool, 0)
    assert (pool.active_ref(0), pool.cache_ref(0), pool.free_list()) == (0, 0, [0])


def test_17_allocate_into_fills_storage_or_leaves_it() -> None:
    pools = ResourcePools(ResourceDemand(base_kv_pages=2, draft_kv_pages=1))
    demand = ResourceDemand(base_kv_pages=2, draft_kv_pages=1)
    short = np.full(2, -7, dtype=np.int32)
    with pytest.raises(InvalidArgumentError, match="out holds 2 ids but the demand is 3 units"):
        pools.allocate_into(demand, short)
    out = np.full(3, -7, dtype=np.int32)
    assert pools.allocate_into(demand, out) is True
    assert out.tolist() == [0, 1, 0]
    out[:] = -7
    assert pools.allocate_into(demand, out) is False
    assert out.tolist() == [-7, -7, -7]


def test_18_negative_demands_and_bad_ids() -> None:
    pools = ResourcePools(ResourceDemand(base_kv_pages=2))
    negative = ResourceDemand(base_kv_pages=-1)
    assert pools.can_allocate(negative) is False
    for call in (pools.allocate, lambda d: pools.allocate_into(d, np.empty(0, dtype=np.int32))):
        with pytest.raises(InvalidArgumentError, match="0 or more in every pool"):
            call(negative)
    with pytest.raises(InvalidArgumentError, match="cannot allocate -1 pages"):
        pools.base.allocate(-1)
    for bad in (2, -1, 10**12, "0", None, 0.0):
        with pytest.raises(InvalidArgumentError, match="ids are integers from 0 to 1"):
            pools.base.active_ref(bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="0 or more"):
        ResourcePools(negative)


def test_resource_ids_come_grouped_by_type_in_enum_order() -> None:
    pools = ResourcePools(ResourceDemand(2, 1, 1, 1))
    got = pools.allocate(ResourceDemand(2, 1, 1, 1))
    assert got is not None
    assert [(r.type.name, r.index) for r in got] == [
        ("BASE_KV_PAGE", 0),
        ("BASE_KV_PAGE", 1),
        ("DRAFT_KV_PAGE", 0),
        ("RECURRENT_SNAPSHOT", 0),
        ("PARTIAL_KV_SNAPSHOT", 0),
    ]
    assert ResourceId(BASE, 0) != ResourceId(DRAFT, 0)
    pools.add_cache_ref(got[2])
    pools.release_active_ref(got[2])
    assert (pools.active_ref(got[2]), pools.cache_ref(got[2]), pools.free_count(DRAFT)) == (0, 1, 0)
    pools.release_cache_ref(got[2])
    assert pools.free_count(DRAFT) == pools.capacity(DRAFT) == 1
    assert pools.capacities == ResourceDemand(2, 1, 1, 1)
    pools.check_invariants()


@pytest.mark.parametrize("capacity", [-1, 2**31, 1.5, True, "4"])
def test_bad_capacity_is_refused(capacity: object) -> None:
    with pytest.raises(InvalidArgumentError, match="pool capacity"):
        PagePool(capacity)  # type: ignore[arg-type]


def test_empty_pool_works() -> None:
    pool = PagePool(0)
    assert pool.free_list() == pool.allocate(0) == []
    assert pool.allocate(1) is None
    pool.check_invariants()
