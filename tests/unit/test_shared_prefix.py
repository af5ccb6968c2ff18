"""Groups of decode rows that share a prefix: which are found, how a step carries them, and that results stay."""

from __future__ import annotations

import ast
import inspect
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ragged import ragged_batch
from test_core_stubs import built_names, built_parameters, declared_names, same_parameters, stub_parameters

from edgellm.errors import InvariantError
from edgellm.models.config import KVLayer, ModelConfig, RopeConfig
from edgellm.models.device_attention import AttentionMode
from edgellm.models.device_ops import reference_ops
from edgellm.models.registry import Architecture
from edgellm.runtime import _shared_prefix, shared_prefix
from edgellm.runtime.batch import RaggedBatch
from edgellm.runtime.device import CpuDevice
from edgellm.runtime.executor_cuda import CudaExecutor, ExecutorLimits
from edgellm.runtime.kv_cache import KVCache
from edgellm.runtime.shared_prefix import MAX_GROUPS, MIN_SHARED_ROWS, SharedPrefixes, sharing_pays
from edgellm.runtime.sharing_counts import SharingCounts
from edgellm.testing.random_model import random_model

PAGE_SIZE = 16
LONG = 6_000  # tokens that pay for four rows


@pytest.fixture(autouse=True)
def _small_groups_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts stay short."""
    monkeypatch.setattr(shared_prefix, "MIN_SAVED_TOKENS", 16_384)


def table_of(rows: list[tuple[list[Any], int]]) -> tuple[np.ndarray, list[int]]:
    """A page table and the rows' pasts: each row is a path of (name, tokens) that rows with equal paths share, and how
    many tokens of its own it has behind it."""
    ids: dict[Any, int] = {}
    pages: list[list[int]] = []
    for path, own in rows:
        found, at = [], ()
        for name, tokens in path:
            at = (*at, name)
            found += [ids.setdefault((at, page), len(ids)) for page in range(tokens // PAGE_SIZE)]
        found += [ids.setdefault((object(), page), len(ids)) for page in range(own // PAGE_SIZE + 1)]
        pages.append(found)
    table = np.full((len(rows) + 2, max(map(len, pages)) + 1), -1, np.int32)
    for slot, found in enumerate(pages):
        table[slot, : len(found)] = found
    pasts = [sum(tokens // PAGE_SIZE * PAGE_SIZE for _, tokens in path) + own for path, own in rows]
    return table, pasts


def decode_batch(rows: list[tuple[list[Any], int]]) -> RaggedBatch:
    table, pasts = table_of(rows)
    return ragged_batch([(slot, past, [1]) for slot, past in enumerate(pasts)], table)


def find(batch: RaggedBatch, rows: int | None = None) -> SharedPrefixes | None:
    return SharedPrefixes.of(batch, batch.num_sequences if rows is None else rows, batch.page_rows, PAGE_SIZE)


def groups_of(prefixes: SharedPrefixes | None) -> list[tuple[int, list[int]]]:
    """(tokens, rows) of each group."""
    if prefixes is None:
        return []
    starts = prefixes.group_start.tolist()
    groups = [prefixes.members[a:b].tolist() for a, b in pairwise(starts)]
    assert all(groups[: prefixes.count])
    assert not any(groups[prefixes.count :])
    assert np.count_nonzero(prefixes.shared) == starts[-1]
    return [(int(prefixes.shared[rows[0]]), rows) for rows in groups[: prefixes.count]]


# ---- which groups there are -----------------------------------------------------------------------------------------


def test_sharing_pays_where_enough_is_not_read_again() -> None:
    assert not sharing_pays(MIN_SHARED_ROWS - 1, 1 << 20)
    assert sharing_pays(MIN_SHARED_ROWS, LONG)
    assert sharing_pays(17, 1024)
    assert not sharing_pays(17, 1008)
    assert not sharing_pays(64, 0)


def test_what_was_measured_to_pay_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    slower = [(8, 2_048), (8, 4_096), (16, 1_024), (16, 4_096), (32, 1_024)]
    faster = [(8, 16_384), (16, 16_384), (32, 4_096), (64, 2_048), (256, 2_048)]
    assert [sharing_pays(*shape) for shape in slower + faster] == [False] * 5 + [True] * 5
    assert find(decode_batch([([("prompt", LONG)], 1)] * 11)) is None
    assert groups_of(find(decode_batch([([("prompt", LONG)], 1)] * 12))) == [(LONG, list(range(12)))]


def test_all_rows_with_one_prefix() -> None:
    rows = [([("prompt", LONG)], own) for own in (1, 0, 15, 16, 700)]
    assert groups_of(find(decode_batch(rows))) == [(LONG // 16 * 16, [0, 1, 2, 3, 4])]


def test_rows_without_a_group_and_rows_in_front() -> None:
    rows = [([("prompt", LONG)], own) for own in (1, 1, 1, 1)]
    batch = decode_batch([([], 500), rows[0], ([("other", LONG)], 3), *rows[1:], ([], 40)])
    assert groups_of(find(batch)) == [(LONG, [1, 3, 4, 5])]
    assert groups_of(find(batch, 5)) == []  # the first member is no row of these
    batch = decode_batch([([], 500), *rows, *rows])
    assert groups_of(find(batch, 8)) == [(LONG, list(range(8)))]
    assert groups_of(find(batch, 7)) == [(LONG, list(range(7)))]


def test_too_few_rows_or_tokens_are_no_group() -> None:
    assert find(decode_batch([([("prompt", LONG)], 1)] * 3)) is None
    assert find(decode_batch([([("prompt", 5_000)], 1)] * 4)) is None
    assert find(decode_batch([([], 9_000)] * 20)) is None


def test_a_page_that_the_step_writes_is_not_shared() -> None:
    """Rows that lease one page more than is full: the page of the new token is each row's own."""
    batch = decode_batch([([("prompt", LONG)], 0)] * 4)
    batch.page_rows[:4, : LONG // 16 + 1] = np.arange(LONG // 16 + 1)
    assert groups_of(find(batch)) == [(LONG, [0, 1, 2, 3])]


def test_of_nested_prefixes_the_one_that_saves_most() -> None:
    few, many = [("system", 1_024), ("document", 16_000)], [("system", 1_024)]
    rows = [(few, 5)] * 4 + [(many, 5)] * 20
    assert groups_of(find(decode_batch(rows))) == [(17_024, [0, 1, 2, 3]), (1_024, list(range(4, 24)))]
    rows = [([("system", 8_000), ("document", 320)], 5)] * 4 + [([("system", 8_000)], 5)] * 20
    assert groups_of(find(decode_batch(rows))) == [(8_000, list(range(24)))]


def test_more_groups_than_there_is_room_for_leave_the_smallest_out() -> None:
    rows = [([(name, LONG + 16 * (name % 40))], 3) for name in range(MAX_GROUPS + 3) for _ in range(4)]
    found = groups_of(find(decode_batch(rows)))
    assert len(found) == MAX_GROUPS
    assert [rows[0] // 4 for _, rows in found] == list(range(3, MAX_GROUPS + 3))


def test_random_trees_against_a_plain_model() -> None:
    rng = np.random.default_rng(0)
    sizes = 0
    for _ in range(120):
        rows = []
        for _ in range(int(rng.integers(1, 40))):
            path = [("system", 1_600)] if rng.random() < 0.8 else []
            if rng.random() < 0.8:
                name = int(rng.integers(3))
                path += [(name, (400, 3_000, 12_000)[name])]
            rows.append((path, int(rng.integers(0, 60))))
        batch = decode_batch(rows)
        found = groups_of(find(batch))
        assert found == plain_groups(batch)
        sizes += sum(len(members) for _, members in found)
    assert sizes > 300


def plain_groups(batch: RaggedBatch) -> list[tuple[int, list[int]]]:
    """The same choice by lists of pages."""
    pages = [batch.page_rows[row, : past // PAGE_SIZE].tolist() for row, past in enumerate(batch.past_len.tolist())]
    left, groups = list(range(len(pages))), []
    for leader in range(len(pages)):
        if leader not in left:
            continue
        common = {row: common_pages(pages[leader], pages[row]) for row in left if row >= leader}
        best, best_rows = 0, []
        for depth in sorted(set(common.values()) - {0}, reverse=True):
            rows = [row for row in common if common[row] >= depth]
            saves = (len(rows) - 1) * depth
            if saves > (len(best_rows) - 1) * best and sharing_pays(len(rows), depth * PAGE_SIZE):
                best, best_rows = depth, rows
        if best:
            groups.append((best * PAGE_SIZE, best_rows))
            left = [row for row in left if row not in best_rows]
    return groups


def common_pages(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_tables_without_room_are_a_broken_invariant() -> None:
    batch = decode_batch([([], 3)] * 4)
    small, room = np.zeros(3, np.int32), np.zeros(4, np.int32)
    with pytest.raises(InvariantError, match="4 rows do not fit"):
        _shared_prefix.find_shared_prefixes(
            batch.past_len, batch.state_index, batch.page_rows, 0, 16, 1, small, room, np.zeros(3, np.int32)
        )


def test_what_is_saved_is_counted() -> None:
    counts = SharingCounts()
    prefixes = find(decode_batch([([("a", LONG)], 1)] * 5 + [([("b", 16_000)], 1)] * 4))
    assert prefixes is not None
    counts.count(prefixes)
    counts.count(prefixes)
    assert counts == SharingCounts(steps=2, groups=4, rows=18, tokens_saved=2 * (4 * LONG + 3 * 16_000))


def test_the_stub_declares_the_module() -> None:
    stub_path = Path(_shared_prefix.__file__).with_name("_shared_prefix.pyi")
    stub = declared_names(ast.parse(stub_path.read_text(encoding="utf-8")).body)
    assert set(stub) == set(built_names(_shared_prefix))
    for name, declared in stub.items():
        if isinstance(declared, ast.FunctionDef):
            built = inspect.signature(getattr(_shared_prefix, name))
            assert same_parameters(stub_parameters(declared), built_parameters(built)), name


# ---- steps ----------------------------------------------------------------------------------------------------------

SLOTS, PAGES = 10, 160
CONFIG = ModelConfig(
    architecture=Architecture.LLAMA,
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    max_positions=PAGES * PAGE_SIZE,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=10000.0),
    tied_embeddings=True,
)


def shared_table(prefix_pages: int) -> np.ndarray:
    """Every slot's first pages are the same, then come pages of its own."""
    own = PAGES - prefix_pages
    table = np.tile(np.arange(prefix_pages, dtype=np.int32), (SLOTS, 1))
    rest = prefix_pages + np.arange(SLOTS * own, dtype=np.int32).reshape(SLOTS, own)
    return np.ascontiguousarray(np.concatenate([table, rest], axis=1))


def make_executor(*, shares: bool, config: ModelConfig = CONFIG, mode: AttentionMode = AttentionMode.SPLIT) -> Any:
    """Over pages of random keys and values, as if they had been computed."""
    model = random_model(config, seed=3, spread=0.25)
    cache = KVCache.for_model(config, num_pages=SLOTS * PAGES, page_size=PAGE_SIZE)
    generator = torch.Generator().manual_seed(5)
    for layer in range(config.num_layers):
        pages = cache.pages(layer)
        pages.copy_(torch.randn(pages.shape, generator=generator))
    limits = ExecutorLimits(num_slots=SLOTS, pages_per_slot=PAGES, step_tokens=32)
    return CudaExecutor(
        model, cache, device=CpuDevice(), ops=reference_ops(), limits=limits, mode=mode, shares_prefixes=shares
    )


def test_steps_with_groups_give_the_logits_of_steps_without() -> None:
    """Decode steps of rows that come and go, beside prompt chunks too, and rows that have nothing in common."""
    table = shared_table(150)
    prefix = 150 * PAGE_SIZE
    together, apart = make_executor(shares=True), make_executor(shares=False)
    rows = [(slot, prefix + slot, [slot + 1]) for slot in range(8)]
    steps = [
        rows,
        [(slot, past + 1, [3]) for slot, past, _ in rows],
        [(slot, past + 2, [4]) for slot, past, _ in rows[:7]],
        [(9, 0, [1, 2, 3, 4, 5]), *((slot, past + 3, [5]) for slot, past, _ in rows)],
        rows[:3],
    ]
    for step in steps:
        batch = ragged_batch(step, table)
        torch.testing.assert_close(together.forward(batch), apart.forward(batch), atol=1e-5, rtol=1e-5)
    assert together.sharing == SharingCounts(steps=3, groups=3, rows=24, tokens_saved=21 * prefix)  # 7 rows: not enough
    assert apart.sharing == SharingCounts()
    kinds = [kind for kind in together._steps.kinds if kind.shares_prefixes]
    assert len(kinds) == 2  # 8 decode rows, and 10 beside a prompt
    assert not any(kind.shares_prefixes for kind in apart._steps.kinds)


def test_the_shared_pages_are_read_as_the_first_row_has_them() -> None:
    """What a step carries is what attention uses: with groups, other pages under later rows change nothing."""
    table = shared_table(150)
    executor = make_executor(shares=True)
    rows = [(slot, 150 * PAGE_SIZE, [7]) for slot in range(8)]
    batch = ragged_batch(rows, table)
    prefixes = executor._inputs.shared_prefixes(batch, 8)
    assert groups_of(prefixes) == [(150 * PAGE_SIZE, list(range(8)))]
    expected = executor.forward(batch).clone()
    step = executor._inputs.views(next(kind.shape for kind in executor._steps.kinds if kind.shares_prefixes))
    assert step.shared.tolist() == [150 * PAGE_SIZE] * 8
    assert step.members.tolist() == list(range(8))
    assert step.group_start.tolist() == [0] + [8] * MAX_GROUPS
    executor.kv_cache.pages(0)[150 * PAGES :].fill_(float("nan"))  # pages of nobody in this step
    torch.testing.assert_close(executor.forward(batch), expected)


def test_a_step_computed_ahead_shares_too() -> None:
    table = shared_table(150)
    together, apart = make_executor(shares=True), make_executor(shares=False)
    rows = [(slot, 150 * PAGE_SIZE, [slot]) for slot in range(8)]
    first = ragged_batch(rows, table)
    for executor in (together, apart):
        executor.forward(first)
        executor.run_ahead(first, torch.arange(8, dtype=torch.int32))
        executor.ran_ahead_with(list(range(8)))
    following = ragged_batch([(slot, past + 1, [slot]) for slot, past, _ in rows], table)
    torch.testing.assert_close(together.forward(following), apart.forward(following), atol=1e-5, rtol=1e-5)
    assert together.sharing.steps == 2


@pytest.mark.parametrize("why", ["deterministic", "window", "heads"])
def test_where_rows_never_attend_in_groups(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(CONFIG, head_dim=32) if why == "heads" else CONFIG
    if why == "window":
        monkeypatch.setattr(ModelConfig, "kv_layers", property(lambda _: (KVLayer(1, 64, window=100),) * 2))
    mode = AttentionMode.DETERMINISTIC if why == "deterministic" else AttentionMode.SPLIT
    executor = make_executor(shares=True, config=config, mode=mode)
    executor.forward(ragged_batch([(slot, 150 * PAGE_SIZE, [7]) for slot in range(8)], shared_table(150)))
    assert executor.sharing == SharingCounts()
    assert not any(kind.shares_prefixes for kind in executor._steps.kinds)
