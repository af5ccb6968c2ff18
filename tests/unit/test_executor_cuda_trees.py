"""Trees on the CUDA executor with reference operators: masks, places, positions, and branches that are kept.

Everything is compared with `CpuExecutor`, step by step, over random steps with chunks, chains and trees.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ragged import permuted_page_rows, ragged_batch
from tiny_drafts import write_tiny_gemma4
from tiny_model import write_tiny_llama
from tree_steps import TreePlan, commit, random_tree

from edgellm.decoding.chain import widen
from edgellm.decoding.draft_tree import DraftTree, mark_trees
from edgellm.errors import ContractViolation
from edgellm.models.device_attention import AttentionMode
from edgellm.models.device_ops import reference_ops
from edgellm.models.loader import LoadedModel, load_model
from edgellm.models.step import HiddenRequest
from edgellm.runtime.device import CpuDevice
from edgellm.runtime.executor_cpu import CpuExecutor
from edgellm.runtime.executor_cuda import CudaExecutor, ExecutorLimits
from edgellm.runtime.kv_cache import KVCache
from edgellm.runtime.step_inputs import StepInputs, StepShape
from edgellm.runtime.tree_commit import TreeCommit

PAGE_SIZE, PAGES_PER_SLOT, NUM_SLOTS, VOCAB = 4, 18, 4, 250
VERIFY_TOKENS = 12
TOLERANCE = 2e-4
REQUEST = HiddenRequest(layers=(0, 1), normed=False)
KINDS = {"llama": write_tiny_llama, "windows and shared KV": write_tiny_gemma4}


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(KINDS[request.param](tmp_path_factory.mktemp("model")), dtype="float32")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(write_tiny_llama(tmp_path_factory.mktemp("llama")), dtype="float32")


def make_cache(model: LoadedModel) -> KVCache:
    kv_cache = KVCache.for_model(model.config, num_pages=NUM_SLOTS * PAGES_PER_SLOT, page_size=PAGE_SIZE)
    kv_cache.fill_poison()
    return kv_cache


def on_device(model: LoadedModel, mode: AttentionMode = AttentionMode.EXACT, **options: Any) -> CudaExecutor:
    limits = ExecutorLimits(
        num_slots=NUM_SLOTS,
        pages_per_slot=PAGES_PER_SLOT,
        step_tokens=16,
        verify_tokens=VERIFY_TOKENS,
        trees=options.pop("trees", True),
    )
    return CudaExecutor(
        model, make_cache(model), device=CpuDevice(), ops=reference_ops(), limits=limits, mode=mode, **options
    )


def plan(page_rows: np.ndarray, seed: int) -> TreePlan:
    """Chunks of up to 40 tokens: longer than one word of a mask."""
    most = PAGE_SIZE * PAGES_PER_SLOT
    return TreePlan(page_rows, most=most, tree=VERIFY_TOKENS - 1, chunk=40, vocab=VOCAB, seed=seed)


def state_of(executor: Any, page_rows: np.ndarray, slot: int, length: int) -> list[torch.Tensor]:
    cache = executor.kv_cache
    return [cache.gather(layer, page_rows[slot], length) for layer in range(cache.num_layers)]


# ---- the executor -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", AttentionMode)
@pytest.mark.parametrize("pad", [False, True])
def test_random_steps_with_trees_are_those_of_the_cpu_executor(
    model: LoadedModel, mode: AttentionMode, pad: bool
) -> None:
    """What was not written is poison; what is committed is compared."""
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=4)
    cpu, device = CpuExecutor(model, make_cache(model)), on_device(model, mode, pad=pad)
    for executor in (cpu, device):
        executor.request_hidden(REQUEST)
    steps, trees, long_rows = plan(page_rows, seed=list(AttentionMode).index(mode)), 0, 0
    for _ in range(16):
        step = steps.step()
        expected, actual = (executor.forward_verify(step.batch) for executor in (cpu, device))
        torch.testing.assert_close(actual.logits, expected.logits, atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(actual.hidden, expected.hidden, atol=TOLERANCE, rtol=TOLERANCE)
        for executor in (cpu, device):
            commit(executor, step)
        trees += len(step.branches)
        long_rows += bool(step.branches) and int(step.batch.query_len.max()) > 32
    assert trees > 8
    assert long_rows
    for slot, length in enumerate(steps.lengths):
        if length:
            ours, theirs = (state_of(executor, page_rows, slot, length) for executor in (device, cpu))
            for mine, wanted in zip(ours, theirs, strict=True):
                torch.testing.assert_close(mine, wanted, atol=TOLERANCE, rtol=TOLERANCE)


def tree_batch(page_rows: np.ndarray, past: int = 5, size: int = 9) -> Any:
    tree = random_tree(np.random.default_rng(3), size, VOCAB)
    return mark_trees(widen(ragged_batch([(2, past, [7])], page_rows), [tree]), [tree])


def test_a_way_through_a_tree_is_what_its_tokens_alone_are(llama: LoadedModel) -> None:
    """Logits and state of each path against the same tokens one by one."""
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=4)
    tree, prompt = DraftTree([4, 5, 6, 7], [0, 0, 1, 2], [1.0] * 4), [9, 8, 7, 6, 5]
    for path in ([0, 1, 3], [0, 2, 4]):
        branching, plain = on_device(llama), on_device(llama)
        for executor in (branching, plain):
            executor.forward(ragged_batch([(1, 0, prompt)], page_rows))
        batch: Any = mark_trees(widen(ragged_batch([(1, 5, [3])], page_rows), [tree]), [tree])
        logits = branching.forward_verify(batch).logits.clone()
        branching.commit_rows([1], [5], [path])
        for place, node in enumerate(path):
            token = [3, *tree.token_ids][node]
            alone = plain.forward(ragged_batch([(1, 5 + place, [token])], page_rows))
            torch.testing.assert_close(logits[node : node + 1], alone, atol=1e-5, rtol=1e-5)
        for ours, theirs in zip(*(state_of(one, page_rows, 1, 8) for one in (branching, plain)), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_twins_have_one_position_and_places_of_their_own(llama: LoadedModel) -> None:
    executor = on_device(llama)
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=4)
    twins = DraftTree([4, 4], [0, 0], [1.0] * 2)
    batch: Any = mark_trees(widen(ragged_batch([(2, 0, [7])], page_rows), [twins]), [twins])
    logits = executor.forward_verify(batch).logits
    assert torch.equal(logits[1], logits[2])


def test_trees_and_chains_of_one_bucket_run_in_the_same_memory(llama: LoadedModel) -> None:
    """What was captured at the start serves both."""
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=4)
    executor = on_device(llama)
    executor.warm_up()
    kinds = executor._steps.kinds
    assert {kind.shape.mask_words for kind in kinds} == {0, 1}
    executor.forward_verify(tree_batch(page_rows, past=0))
    chain = widen(ragged_batch([(0, 0, [7]), (1, 0, [3])], page_rows), [[4, 5], []])
    executor.forward_verify(chain)
    assert executor._steps.kinds == kinds


def test_an_executor_of_chains_has_no_masks_until_it_needs_them(llama: LoadedModel) -> None:
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=4)
    executor = on_device(llama, trees=False)
    executor.warm_up()
    assert {kind.shape.mask_words for kind in executor._steps.kinds} == {0}
    expected = on_device(llama).forward_verify(tree_batch(page_rows, past=0)).logits
    torch.testing.assert_close(executor.forward_verify(tree_batch(page_rows, past=0)).logits, expected)


def test_warming_up_and_padding_write_nothing(llama: LoadedModel) -> None:
    executor = on_device(llama)
    executor.warm_up()
    assert executor.kv_cache.storage.isnan().all()
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=4)
    executor.forward_verify(tree_batch(page_rows, past=0))
    written = ~executor.kv_cache.storage.isnan().all(dim=(0, 2, 3, 5))
    assert int(written.sum()) == 10
    executor.commit_rows([2], [0], [[0, 1]])
    assert int((~executor.kv_cache.storage.isnan().all(dim=(0, 2, 3, 5))).sum()) == 10


# ---- what is refused --------------------------------------------------------------------------------------------


def begin_before(batch: Any) -> None:
    """The bits speak of one token more in front, which all see."""
    batch.tree_mask, batch.tree_start = batch.tree_mask * 2 + 1, batch.past_len - 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda batch: batch.tree_mask.__setitem__((3, 0), 3), "does not see itself"),
        (lambda batch: batch.positions.__setitem__(2, 30), "positions do not continue"),
        (lambda batch: setattr(batch, "tree_mask", batch.tree_mask[:-1]), "tree_mask is"),
        (begin_before, "every token of a tree is in its step"),
        (lambda batch: batch.page_rows.__setitem__((2, 1), -1), "entries outside"),
        (lambda batch: setattr(batch, "query_len", batch.query_len[:0]), "belong together"),
    ],
)
def test_a_tree_that_contradicts_itself_is_refused(llama: LoadedModel, change: Any, message: str) -> None:
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=4)
    executor = on_device(llama)
    executor.forward(ragged_batch([(2, 0, [1, 2, 3, 4, 5])], page_rows))
    batch = tree_batch(page_rows.copy())
    change(batch)
    with pytest.raises(ContractViolation, match=message):
        executor.forward_verify(batch)


def test_a_way_that_is_longer_than_a_window_is_refused(tmp_path: Path) -> None:
    """Masked attention never drops a token of the tree; windows of 16 tokens, ways of 16 and 17."""
    executor = on_device(load_model(write_tiny_gemma4(tmp_path), dtype="float32"))
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=4)
    for depth in (15, 16):
        tree = DraftTree([*range(1, depth + 2)], [*range(depth), 0], [1.0] * (depth + 1))
        batch: Any = mark_trees(widen(ragged_batch([(2, 0, [7])], page_rows), [tree]), [tree])
        if depth == 15:
            executor.forward_verify(batch)
            continue
        with pytest.raises(ContractViolation, match=r"a way of 17 tokens .* window of 16"):
            executor.forward_verify(batch)


def test_branches_that_contradict_themselves_are_refused(llama: LoadedModel) -> None:
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=4)
    executor = on_device(llama)
    with pytest.raises(ContractViolation, match="no forward ran"):
        executor.commit_rows([0], [0], [[0]])
    executor.forward_verify(tree_batch(page_rows, past=0))
    before = executor.kv_cache.storage.clone()
    for slots, past, rows, message in (
        ([NUM_SLOTS], [0], [[0]], "slots"),
        ([2, 2], [0, 0], [[0], [0]], "different ones"),
        ([2], [0, 1], [[0]], "one of each"),
        ([2], [0], [[0, 2, 1]], "do not rise"),
        ([2], [0], [[-1, 2]], "do not rise"),
    ):
        with pytest.raises(ContractViolation, match=message):
            executor.commit_rows(slots, past, rows)
    executor.commit_rows([], [], [])
    assert torch.equal(executor.kv_cache.storage.nan_to_num(7.0), before.nan_to_num(7.0))


def test_longer_branches_than_were_expected_take_more_memory(llama: LoadedModel) -> None:
    executor, page_rows = on_device(llama), permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=4)
    executor.forward_verify(tree_batch(page_rows, past=0, size=40))
    before = state_of(executor, page_rows, 2, 41)
    executor.commit_rows([2], [0], [[0, *range(2, 41)]])
    for layer, moved in enumerate(state_of(executor, page_rows, 2, 40)):
        assert torch.equal(moved, torch.cat((before[layer][:, :, :1], before[layer][:, :, 2:]), dim=2))


# ---- staging ----------------------------------------------------------------------------------------------------


def step_inputs() -> StepInputs:
    return StepInputs(
        device=torch.device("cpu"),
        num_slots=NUM_SLOTS,
        pages_per_slot=PAGES_PER_SLOT,
        page_size=PAGE_SIZE,
        num_pages=NUM_SLOTS * PAGES_PER_SLOT,
        update_table=lambda table, slots, rows: None,
    )


def test_the_words_of_a_step_with_a_tree_a_chain_and_a_chunk() -> None:
    inputs = step_inputs()
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=4)
    proposals = [[], [21, 22], DraftTree([4, 5, 6], [0, 0, 2], [1.0] * 3)]
    rows = [(3, 2, list(range(1, 34))), (0, 9, [20]), (1, 6, [10])]
    batch: Any = mark_trees(widen(ragged_batch(rows, page_rows), proposals), proposals)
    shape = StepShape(48, 5, 0, 16, mask_words=1, has_long_rows=True)
    inputs.reserve(shape)
    inputs.stage(batch, shape)
    step = inputs.views(shape)
    tree = step.tree
    assert tree is not None
    assert step.slots.tolist() == [3, 0, 1, -1, -1]
    assert tree.slots.tolist() == [-1, 0, 1, -1, -1]
    assert tree.long_slots.tolist() == [3, -1, -1, -1, -1]
    assert tree.places[33:].tolist() == [9, 10, 11, 6, 7, 8, 9] + [0] * 8
    assert step.positions[33:40].tolist() == [9, 10, 11, 6, 7, 7, 8]
    assert tree.mask.flatten().tolist() == [0] * 33 + [1, 3, 7] + [1, 3, 5, 13] + [0] * 8
    assert step.checkpoint_start.tolist() == [-1] * 5
    inputs.stage_padding(shape)
    assert tree.slots.tolist() == tree.long_slots.tolist() == [-1] * 5
    assert not tree.mask.any()


def test_masks_are_widened_to_the_words_of_the_step() -> None:
    inputs = step_inputs()
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=4)
    proposals = [[*range(1, 40)], DraftTree([4, 5], [0, 0], [1.0] * 2)]
    batch: Any = mark_trees(widen(ragged_batch([(0, 9, [20]), (1, 6, [10])], page_rows), proposals), proposals)
    shape = StepShape(43, 2, 0, 43, mask_words=2)
    inputs.reserve(shape)
    inputs.stage(batch, shape)
    tree = inputs.views(shape).tree
    assert tree is not None
    chain = [[low - (1 << 32 if low >> 31 else 0), 0] for low in ((2 << j) - 1 for j in range(32))]
    chain += [[-1, (2 << j) - 1] for j in range(8)]
    assert tree.mask.tolist() == [*chain, [1, 0], [3, 0], [5, 0]]
    assert tree.slots.tolist() == [0, 1]


@pytest.mark.parametrize("page_size", [4, 16])
def test_a_commit_moves_the_tokens_of_every_shape_of_layers(page_size: int) -> None:
    cache = KVCache(
        num_layers=3, num_pages=8, num_kv_heads=2, page_size=page_size, head_dim=8, shapes=[(2, 8), (1, 16), (2, 8)]
    )
    for _, storage in cache.storages:
        storage.normal_()
    table = torch.from_numpy(permuted_page_rows(2, 4, seed=1))
    commit_of = TreeCommit(cache, table, reference_ops().commit_rows, 5)
    before = [cache.gather(layer, table[1].numpy(), 13) for layer in range(3)]
    other = [cache.gather(layer, table[0].numpy(), 13) for layer in range(3)]
    commit_of.stage([1], [3], [[0, 2, 5, 9]])
    commit_of.launch()
    for layer in range(3):
        moved = cache.gather(layer, table[1].numpy(), 13)
        wanted = [0, 1, 2, 3, 5, 8, 12, *range(7, 13)]
        assert torch.equal(moved, before[layer][:, :, wanted])
        assert torch.equal(cache.gather(layer, table[0].numpy(), 13), other[layer])
