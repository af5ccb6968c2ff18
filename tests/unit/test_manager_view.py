"""The view of the cache manager answers every question as the manager does, and changes nothing."""

from __future__ import annotations

import inspect

import pytest
from coordinator_rig import Rig, all_policies

from edgellm._core.block_hash import TokenChain
from edgellm.cache import manager_view
from edgellm.cache.manager_view import ManagerView, PoolsView, ReadOnly
from edgellm.cache.types import BaseStateKind, ContextCacheLookupPolicy, ResourceDemand, ResourceType, ReusePlanMode
from edgellm.errors import ContractViolation, InvariantError
from edgellm.testing.toy_driver import FLAVOURS, ToyDriver

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5]


@pytest.fixture
def rig():
    rig = Rig(page_size=4, num_pages=16)
    rig.run(TOKENS, 2)
    return rig


def test_numbers_are_the_managers_own(rig):
    view, manager = rig.manager, rig.coordinator._manager
    assert (view.page_size, view.base_state_kind) == (4, BaseStateKind.ATTENTION_ONLY)
    assert (view.available_pages, view.num_live_leases) == (16, 0)
    request = rig.begun(rig.admission([7, 7, 7], 0))
    assert (view.available_pages, view.num_live_leases) == (15, 1)
    assert view.metrics() == manager.metrics()
    request.abandon()
    (record,) = view.records.lru_to_mru()
    assert view.record(record) == manager.record(record)
    assert view.record(record).key.full_block_count == 2


def test_pools_are_told_apart_by_kind(rig):
    pools = rig.manager.pools
    assert pools.capacities == ResourceDemand(base_kv_pages=16)
    assert [pools.capacity(kind) for kind in ResourceType] == [16, 0, 0, 0]
    assert pools.free_count(ResourceType.BASE_KV_PAGE) == 13  # two blocks and the unfilled last page are kept
    assert [pools.pool(kind).capacity for kind in ResourceType] == [16, 0, 0, 0]
    assert (pools.base.free_count, pools.draft.capacity) == (13, 0)
    assert (pools.recurrent.capacity, pools.partial.capacity) == (0, 0)
    assert pools.base.free_list() == rig.coordinator._manager.pools.base.free_list()


def test_a_plan_through_the_view_is_pure(rig):
    chain = TokenChain(4)
    chain.extend([*TOKENS, 50])
    before = rig.manager.metrics()
    assert rig.manager.plan(chain, ContextCacheLookupPolicy.USE_CACHE).reuse_token_length == 9
    assert rig.manager.plan(chain, ContextCacheLookupPolicy.BYPASS).reuse_token_length == 0
    assert rig.manager.plan(chain, ContextCacheLookupPolicy.USE_CACHE, speculative=False).matched_token_length == 9
    assert rig.manager.metrics() == before


def test_the_index_and_the_records_can_be_looked_at(rig):
    view, manager = rig.manager, rig.coordinator._manager
    assert (view.index.size, view.index.tail_count) == (manager.index.size, 1)
    assert view.drafts.size == 0
    assert len(view.records) == 1
    (record,) = view.records.lru_to_mru()
    assert record in view.records
    assert record + 1 not in view.records


@pytest.mark.parametrize(
    ("part", "name"),
    [("base", "acquire"), ("index", "insert"), ("records", "evict"), ("drafts", "insert")],
)
def test_nothing_that_changes_the_cache_is_reachable(rig, part, name):
    target = rig.manager.pools.base if part == "base" else getattr(rig.manager, part)
    kind = type(target._target).__name__
    with pytest.raises(ContractViolation, match=rf"^{kind}\.{name} is not for reading; the view offers \['"):
        getattr(target, name)


@pytest.mark.parametrize("part", ["base", "index", "records", "drafts"])
def test_every_name_that_the_view_offers_exists(rig, part):
    target = rig.manager.pools.base if part == "base" else getattr(rig.manager, part)
    for name in target._allowed:
        assert hasattr(target._target, name), f"{type(target._target).__name__} has no {name}"


def test_checks_reach_the_manager(rig, monkeypatch):
    class Failing:
        def check_invariants(self):
            raise InvariantError("all")

        def check_counts(self):
            raise InvariantError("counts")

    view = ManagerView(Failing())
    with pytest.raises(InvariantError, match=r"^all$"):
        view.check_invariants()
    with pytest.raises(InvariantError, match=r"^counts$"):
        view.check_counts()
    rig.manager.check_invariants()
    rig.manager.check_counts()


def test_the_view_has_no_state_of_its_own():
    for kind in (ManagerView, PoolsView, ReadOnly):
        assert "__dict__" not in dir(kind), kind
        assert kind.__module__ == manager_view.__name__
        assert all(not name.startswith("set") for name, _ in inspect.getmembers(kind))


def test_a_plan_through_the_view_is_that_of_a_speculative_request_where_asked():
    driver = ToyDriver(FLAVOURS["eagle"], policies=all_policies())
    driver.prefill(driver.admit(TOKENS))
    driver.step()
    chain = TokenChain(4)
    chain.extend([*TOKENS[:8], 50, 51])
    plans = [driver.coordinator.manager.plan(chain, ContextCacheLookupPolicy.USE_CACHE, speculative=s) for s in (0, 1)]
    assert [(plan.mode, plan.reuse_token_length) for plan in plans] == [
        (ReusePlanMode.VANILLA, 8),
        (ReusePlanMode.SPEC, 7),  # the draft of token 7 looked at another token 8
    ]


def test_the_metrics_show_every_pool_and_what_was_evicted():
    driver = ToyDriver(FLAVOURS["mtp"], policies=all_policies(), num_pages=12, num_draft_pages=11, recurrent_slots=3)
    for seed in range(6):
        sequence = driver.admit([(seed + 1) * token % 50 for token in range(1, 18)])
        driver.prefill(sequence)
        driver.finish(sequence)
    shown, manager = driver.coordinator.metrics(), driver.coordinator._manager
    gauges = (shown.base_kv_pages, shown.draft_kv_pages, shown.recurrent_snapshots, shown.partial_kv_snapshots)
    assert [gauge.capacity for gauge in gauges] == [12, 11, 3, 8]
    assert [gauge.free for gauge in gauges] == [manager.pools.free_count(kind) for kind in ResourceType]
    evicted = manager.metrics()
    names = [f"reclaimed_{kind}" for kind in ("base_kv_pages", "draft_kv_pages", "recurrent_snapshots")]
    for name in ("evicted_records", "reclaimed_partial_kv_snapshots", *names):
        assert getattr(shown, name) == getattr(evicted, name) > 0, name
    assert shown.current_records == len(manager.records) > 0
    driver.close()
