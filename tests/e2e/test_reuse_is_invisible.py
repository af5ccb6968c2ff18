"""What reuse must never change: the text, the bytes of shared pages, and who sees whose pages.

The toy driver compares every text and every byte of state with a solo run after every step; here the same prompt is
run cold and in every kind of warm, in every flavour, and on a small real model through the public API.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plugin_policies import all_policies
from toy_parts import wait_until_idle

from edgellm import LLM, SamplingParams
from edgellm.cache.types import ContextCacheConfig, ContextCacheLookupPolicy
from edgellm.errors import InvariantError
from edgellm.testing.toy_drafter import ScriptedDrafter
from edgellm.testing.toy_driver import DECODE, FLAVOURS, ToyDriver
from edgellm.testing.toy_model import solo_run
from edgellm.testing.toy_sequence import ToySequence

P = 4
ALL = list(FLAVOURS)
SMALL = {"num_pages": 26, "max_kv_capacity": 64, "recurrent_slots": 5, "partial_slots": 4}
NUM_TOKENS = 10


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, 40_000), k=count)


def driver_for(flavour: str, **options: Any) -> ToyDriver:
    config = ContextCacheConfig(checkpoint_interval_tokens=None, policy_deadline_seconds=None)
    return ToyDriver(FLAVOURS[flavour], policies=all_policies(), page_size=P, config=config, **options)


def generate(driver: ToyDriver, sequence: ToySequence, chunk: int = 8) -> list[int]:
    driver.prefill(sequence, chunk)
    while len(sequence.generated) < NUM_TOKENS:
        driver.step()
    return driver.text(sequence)[:NUM_TOKENS]


# --- 169: the text ---------------------------------------------------------------------------------------------

PROMPT = tokens(5, 21)
WANTED = {
    "hit": [*PROMPT[:16], 5, 6, 7],  # parts from the first at a page boundary
    "rewind": PROMPT,  # known to the end
    "copied_tail": [*PROMPT[:18], 5, 6],  # parts within a page
    "longer": [*PROMPT, 5, 6],
    "evicted": PROMPT,
    "in_flight": [*PROMPT, 5, 6],
    "bypass": PROMPT,
}
# Tokens that are not computed again.  A draft that looks ahead gives one token up where the next one differs, and
# recurrent state can be resumed at its checkpoints alone.
BOUNDARIES = [16, 18]
PLAIN = {"hit": 16, "rewind": 20, "copied_tail": 18, "longer": 21, "evicted": 0, "in_flight": 20, "bypass": 0}
AHEAD = {**PLAIN, "hit": 15, "copied_tail": 17, "longer": 20, "rewind": 20}
CHECKPOINTS = {"hit": 16, "rewind": 18, "copied_tail": 18, "longer": 18, "evicted": 0, "in_flight": 18, "bypass": 0}
REUSED = {
    "attention": PLAIN,
    "dflash": PLAIN,
    "shared-kv": PLAIN,
    "eagle": AHEAD,
    "hybrid": CHECKPOINTS,
    "hybrid-lookup": CHECKPOINTS,
    "recurrent": CHECKPOINTS,
    "mtp": CHECKPOINTS,
}


@pytest.mark.parametrize("warm", WANTED)
@pytest.mark.parametrize("flavour", ALL)
def test_169_cold_and_warm_give_the_same_tokens(flavour: str, warm: str) -> None:
    cold = driver_for(flavour)
    wanted = WANTED[warm]
    sequence = cold.admit(wanted)
    assert sequence is not None
    text = generate(cold, sequence)
    assert sequence.reuse.reused_tokens == 0
    assert text == solo_run(wanted, NUM_TOKENS, cold.model)
    cold.close()

    driver = driver_for(flavour)
    first = driver.admit(PROMPT, checkpoint_boundaries=BOUNDARIES)
    assert first is not None
    if warm != "in_flight":
        generate(driver, first)
        driver.finish(first)
    if warm == "evicted":
        driver.coordinator._manager.evict_all()
    lookup = ContextCacheLookupPolicy.BYPASS if warm == "bypass" else None
    second = driver.admit(wanted, lookup=lookup, checkpoint_boundaries=BOUNDARIES)
    assert second is not None
    if warm == "in_flight":
        driver.prefill(first, 8)
    assert generate(driver, second) == text
    assert second.reuse.reused_tokens == REUSED[flavour][warm]
    driver.close()


# --- 170: the bytes of shared pages ------------------------------------------------------------------------------


class SharedPages:
    """Watches a driver: what the index can give to others is never written, and keeps its bytes as long as it is there.

    Attributes:
        checked: comparisons of a page with its own bytes of an earlier moment.
    """

    def __init__(self, driver: ToyDriver) -> None:
        self.driver, self.checked = driver, 0
        manager = driver.coordinator.manager
        self.stores = {"base": (driver.machine.base, manager.index)}
        if driver.machine.draft is not None:
            self.stores["draft"] = (driver.machine.draft, manager.drafts)
        self.known: dict[tuple[str, int], tuple[object, bytes]] = {}
        for name, (store, index) in self.stores.items():
            if driver.model.has_attention or name == "draft":
                self._guard(store, index)
        call = driver._call

        def watched(method: str, *args: Any, **kwargs: Any) -> Any:
            self.compare()
            result = call(method, *args, **kwargs)
            self.compare()
            return result

        driver._call = watched  # type: ignore[method-assign]

    def _guard(self, store: Any, index: Any) -> None:
        write, poison_from, copy_pages = store.write, store.poison_from, store.copy_pages

        def require_private(page: int, place: int) -> None:
            if page >= 0 and page in index and place < index.token_count_of(page):
                raise InvariantError(f"place {place} of page {page} is written, and others may read it")

        def guarded_write(row: Any, position: int, value: int) -> None:
            require_private(row[position // P], position % P)
            write(row, position, value)

        def guarded_poison(row: Any, length: int) -> None:
            for block in range(length // P, len(row)):
                require_private(row[block], length % P if block == length // P else 0)
            poison_from(row, length)

        def guarded_copy(sources: Any, targets: Any) -> None:
            for page in np.asarray(targets).tolist():
                require_private(page, 0)
            copy_pages(sources, targets)

        store.write, store.poison_from, store.copy_pages = guarded_write, guarded_poison, guarded_copy

    def compare(self) -> None:
        now: dict[tuple[str, int], tuple[object, bytes]] = {}
        index = self.driver.coordinator.manager.index
        for name, (store, nodes) in self.stores.items():
            for page in range(store.num_pages):
                if page in nodes:
                    base = page if name == "base" else nodes.base_of(page)
                    identity = (index.hash_of(base), index.token_count_of(base), tuple(nodes.path_of(page)))
                    now[name, page] = identity, store.pages[page, : nodes.token_count_of(page)].tobytes()
        for key, (identity, content) in now.items():
            if key in self.known and self.known[key][0] == identity:
                self.checked += 1
                if self.known[key][1] != content:
                    raise InvariantError(f"the bytes of {key} changed while others could reuse it")
        self.known = now


def wander(driver: ToyDriver, rng: random.Random, shared: list[int], steps: int, **admission: Any) -> None:
    """Prompts that share their beginning, in chunks beside decode rows; some end, some are cancelled."""
    for _ in range(steps):
        if driver.live and rng.random() < 0.05:
            driver.cancel(rng.choice(list(driver.live.values())))
        if rng.random() < 0.4 and len(driver.live) < driver.deployment.max_batch_size:
            prompt = shared[: rng.randrange(1, len(shared))] + rng.choices(range(3), k=rng.randrange(6))
            options = {name: rng.choice(values) for name, values in admission.items()}
            driver.admit(prompt, checkpoint_boundaries=[rng.randrange(1, len(prompt) + 1)], **options)
        work = [(s, DECODE if s.finalized else rng.randrange(1, 11)) for s in driver.live.values()]
        work = [entry for entry in work if rng.random() < 0.8]
        ending = [sequence for sequence, count in work if count == DECODE and rng.random() < 0.2]
        if driver.mixed_step(work, finish=ending) is None:
            assert driver.refused is not None
            driver.cancel(driver.refused)


@pytest.mark.parametrize("drafter", ["by_state", "always_wrong"])
@pytest.mark.parametrize("flavour", [name for name in ALL if name != "recurrent"])
def test_170_shared_pages_keep_their_bytes_whoever_reuses_them(flavour: str, drafter: str) -> None:
    """Look-ahead writes and rejected drafts included: the second drafter has every proposal refused."""
    options = {} if drafter == "by_state" else {"drafter": ScriptedDrafter(default=0)}
    driver = driver_for(flavour, **SMALL, **options)
    watch = SharedPages(driver)
    wander(driver, random.Random(11), tokens(11, 30), 120)
    metrics = driver.coordinator.metrics()
    assert metrics.reused_tokens > 100
    assert metrics.reclaimed_base_kv_pages > 0  # pages came and went
    assert watch.checked > 5000
    driver.close()


@pytest.mark.parametrize("flavour", ["hybrid", "recurrent", "mtp"])
def test_170_snapshots_keep_their_bytes_whoever_restores_them(flavour: str) -> None:
    driver, rng = driver_for(flavour, **SMALL), random.Random(12)
    shared, seen, compared = tokens(12, 30), {}, 0
    records, storage = driver.coordinator.manager.records, driver.machine.storage
    assert storage is not None
    for _ in range(120):
        wander(driver, rng, shared, 1)
        now = {}
        for record in records.lru_to_mru():
            slot, partial = records.recurrent_slot(record), records.partial_slot(record)
            if slot is not None:
                page = None if partial is None else storage.partial_fingerprint(partial)
                now[record] = storage.fingerprint(slot), page
        for record in seen.keys() & now.keys():
            compared += 1
            assert seen[record] == now[record]
        seen = now
    assert driver.coordinator.metrics().hybrid_restores > 5
    assert compared > 100
    driver.close()


def spoil(driver: ToyDriver, watch: SharedPages, how: str, row: list[int]) -> None:
    base = driver.machine.base
    if how == "write":
        base.write(row, 7, 1)
    elif how == "copy":
        base.copy_pages(np.array([row[0]], np.int32), np.array([row[1]], np.int32))
    else:
        base.pages[row[1], 3] ^= 1
        watch.compare()


@pytest.mark.parametrize("how", ["write", "copy", "silent"])
def test_170_the_watch_sees_a_write_to_a_shared_page(how: str) -> None:
    driver = driver_for("attention", check=False)
    watch = SharedPages(driver)
    first = driver.admit(tokens(13, 9))
    assert first is not None
    driver.prefill(first)
    row = driver.machine.base_row(first.slot)
    with pytest.raises(InvariantError, match=r"others may read it|changed while others"):
        spoil(driver, watch, how, row)
    driver.request.impl.mark_device_work_synchronized()


# --- 171: tenants ------------------------------------------------------------------------------------------------


class Tenants:
    """Watches a driver: a page belongs to one tenant from its allocation until it is free, in rows and in the index."""

    def __init__(self, driver: ToyDriver) -> None:
        self.driver, self.rows_seen = driver, 0
        self.of_slot: dict[object, int | None] = {}
        call = driver._call

        def watched(method: str, *args: Any, **kwargs: Any) -> Any:
            result = call(method, *args, **kwargs)
            self.check()
            return result

        driver._call = watched  # type: ignore[method-assign]

    def check(self) -> None:
        manager = self.driver.coordinator.manager
        owner: dict[int, object] = {}
        draft_owner: dict[int, object] = {}
        for state in self.driver.request.impl.sequences:
            tenant = state.key_extras.isolation_digest
            slot = state.resident.slot
            for block, page in enumerate(self.driver.machine.base_row(slot)):
                if page < 0:
                    continue
                self.rows_seen += 1
                assert owner.setdefault(page, tenant) == tenant
                if page in manager.index and manager.index.token_count_of(page) == P:
                    # A block's hash covers the tenant's digest: no other tenant's chain has it.
                    assert manager.index.hash_of(page) == state.chain.hash_at(block)
            for block, page in enumerate(self.driver.machine.draft_row(slot)):
                if page < 0:
                    continue
                assert draft_owner.setdefault(page, tenant) == tenant
                if page in manager.drafts and manager.drafts.token_count_of(page) == P:
                    assert manager.index.hash_of(manager.drafts.base_of(page)) == state.chain.hash_at(block)


@pytest.mark.parametrize("flavour", [name for name in ALL if name != "recurrent"])
def test_171_tenants_never_meet_in_a_row(flavour: str) -> None:
    """Equal prompts under three digests (one absent), with eviction: no page is in rows of two of them."""
    driver = driver_for(flavour, **SMALL)
    watch = Tenants(driver)
    wander(driver, random.Random(14), tokens(14, 30), 200, salt=[None, 1, 2])
    metrics = driver.coordinator.metrics()
    assert metrics.reused_tokens > 0  # within a tenant
    assert metrics.reclaimed_base_kv_pages > 0
    assert watch.rows_seen > 1000
    driver.close()


@pytest.mark.parametrize("flavour", ALL)
def test_171_a_tenant_reuses_its_own_context_only(flavour: str) -> None:
    driver = driver_for(flavour, recurrent_slots=16, partial_slots=16)
    reused = []
    for salt in (1, 2, None, 1, 2, None):
        sequence = driver.admit(PROMPT, salt=salt, checkpoint_boundaries=BOUNDARIES)
        assert sequence is not None
        assert generate(driver, sequence) == solo_run(PROMPT, NUM_TOKENS, driver.model)
        driver.finish(sequence)
        reused.append(sequence.reuse.reused_tokens)
    assert reused == [0] * 3 + [REUSED[flavour]["rewind"]] * 3
    driver.close()


def test_171_the_watch_sees_a_page_of_another_tenant() -> None:
    driver = driver_for("attention", check=False)
    watch = Tenants(driver)
    for salt in (1, 2):
        sequence = driver.admit(tokens(15, 9), salt=salt)
        assert sequence is not None
        driver.prefill(sequence)
    first, second = driver.live.values()
    watch.check()
    stolen, *_ = driver.machine.base_row(first.slot)
    own = [page for page in driver.machine.base_row(second.slot) if page >= 0]
    driver.machine.base_table.set_rows([(second.slot, [stolen, *own[1:]])])
    with pytest.raises(AssertionError):
        watch.check()


# --- 169 and 170 on a real model ---------------------------------------------------------------------------------

TEXT = "The light is lit at sunset and put out at sunrise, every day."
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
LOGITS_TOLERANCE = 1e-4  # float32; a chunk and a single row add up in another order


class Logits:
    """Rows of logits by the position that they were computed at; one list per position."""

    def __init__(self, executor: Any) -> None:
        self.rows: dict[int, list[torch.Tensor]] = {}
        forward = executor.forward

        def recorded(batch: Any) -> torch.Tensor:
            logits = forward(batch)
            for position, row in zip(batch.positions[batch.logits_index].tolist(), logits, strict=True):
                self.rows.setdefault(position, []).append(row.clone())
            return logits

        executor.forward = recorded

    def take(self) -> dict[int, list[torch.Tensor]]:
        rows, self.rows = self.rows, {}
        return rows


def indexed_bytes(model: LLM) -> dict[object, bytes]:
    """Block hash and page of everything that can be reused, and its bytes over all layers."""
    runtime: Any = model._runtime
    index, kv = runtime.coordinator.manager.index, runtime.executor.kv_cache
    found: dict[object, bytes] = {}
    for page in range(index.capacity):
        count = index.token_count_of(page) if page in index else 0
        if count:
            layers = [kv.pages(layer)[page, :, :, :count].contiguous() for layer in range(kv.num_layers)]
            found[index.hash_of(page), page, count] = b"".join(layer.numpy().tobytes() for layer in layers)
    return found


@pytest.fixture
def llama(tiny_model_dir: Path) -> Iterator[LLM]:
    with LLM(tiny_model_dir, dtype="float32", kv_budget=512, page_size=8, max_batch_size=4) as model:
        yield model


def test_169_a_real_model_gives_the_same_tokens_and_logits(llama: LLM) -> None:
    """Cold, full rewind, copied tail, whole pages, after eviction, and beside a producer in flight."""
    runtime: Any = llama._runtime
    logits = Logits(runtime.executor)
    prompts = {"rewind": TEXT, "copied tail": TEXT[:45] + "!?", "whole pages": TEXT[:40] + "!?"}
    cold = {}
    for name, prompt in prompts.items():
        (output,) = llama.generate(prompt, GREEDY, use_cache=False)
        cold[name] = output.token_ids, logits.take()
        assert len(set(output.token_ids)) > 2

    def check(name: str, reused: int, copies: int = 1) -> None:
        outputs = llama.generate([prompts[name]] * copies, GREEDY)
        wait_until_idle(llama)
        text, rows = cold[name]
        assert [output.token_ids for output in outputs] == [text] * copies
        assert max(output.reuse.reused_tokens for output in outputs) == reused
        warm = logits.take()
        assert warm.keys() == rows.keys()
        for position, found in warm.items():
            assert len(found) == copies
            for row in found:
                torch.testing.assert_close(row, rows[position][0], atol=LOGITS_TOLERANCE, rtol=LOGITS_TOLERANCE)

    check("rewind", 0)
    check("rewind", len(TEXT) - 1)
    check("copied tail", 45)
    check("whole pages", 40)
    runtime.coordinator._manager.evict_all()
    check("whole pages", 0)
    runtime.coordinator._manager.evict_all()
    check("rewind", len(TEXT) // 8 * 8 - (len(TEXT) % 8 == 0) * 8, copies=3)


def test_170_a_real_model_leaves_shared_pages_as_they_are(llama: LLM) -> None:
    llama.generate(TEXT, GREEDY)
    wait_until_idle(llama)
    before = indexed_bytes(llama)
    assert len(before) >= len(TEXT) // 8
    for cut in (len(TEXT), 45, 40, 23):
        llama.generate([TEXT[:cut] + tail for tail in ("", "!?", " yes")], GREEDY)
    wait_until_idle(llama)
    after = indexed_bytes(llama)
    assert len(after) > len(before)
    kept = before.keys() & after.keys()
    assert len(kept) >= len(TEXT) // 8
    assert {key: after[key] for key in kept} == {key: before[key] for key in kept}
