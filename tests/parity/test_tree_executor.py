"""Trees through the CPU executor: rows have the logits of their paths, branches the state of plain decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ragged import permuted_page_rows, ragged_batch
from tiny_model import write_tiny_llama

from edgellm.decoding.chain import widen
from edgellm.decoding.draft_tree import DraftTree, mark_trees
from edgellm.errors import ContractViolation, InvalidArgumentError
from edgellm.kernels.ref.commit_rows import commit_rows
from edgellm.models.loader import load_model
from edgellm.runtime.executor_cpu import CpuExecutor
from edgellm.runtime.kv_cache import KVCache

PAGE, PAGES, VOCAB = 4, 8, 257
#  0 - 1 - 3 - 6      Behind token 0 of the row itself.
#    \   \ 4 - 7
#     2 - 5
TREE = DraftTree([11, 12, 13, 14, 15, 16, 17], [0, 0, 1, 1, 2, 3, 4], [1.0] * 7)
PATHS = {6: [0, 1, 3, 6], 7: [0, 1, 4, 7], 5: [0, 2, 5], 2: [0, 2]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_model(write_tiny_llama(tmp_path_factory.mktemp("llama")))


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def new_executor(model: Any) -> CpuExecutor:
    kv_cache = KVCache.for_model(model.config, num_pages=2 * PAGES, page_size=PAGE)
    kv_cache.fill_poison()
    return CpuExecutor(model, kv_cache)


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(1, VOCAB, length).tolist()


def after(executor: CpuExecutor, rows: np.ndarray, tokens: list[int]) -> None:
    """Slots 0 and 1 hold the tokens, the second one those of another order."""
    batch = ragged_batch([(0, 0, tokens), (1, 0, tokens[::-1])], rows)
    executor.forward(batch)


def state_of(executor: CpuExecutor, rows: np.ndarray, length: int) -> list[torch.Tensor]:
    return [executor.kv_cache.gather(layer, rows[0], length) for layer in range(2)]


def decoded(executor: CpuExecutor, rows: np.ndarray, past: int, tokens: list[int]) -> list[torch.Tensor]:
    """Logits of plain steps, one token each."""
    return [executor.forward(ragged_batch([(0, past + place, [token])], rows))[0] for place, token in enumerate(tokens)]


def marked(rows: np.ndarray, length: int = 6) -> Any:
    """The tree behind token 10 of slot 0, which has so many tokens."""
    batch = ragged_batch([(0, length, [10])], rows)
    return mark_trees(widen(batch, [TREE]), [TREE])


@pytest.mark.parametrize("length", [1, 3, 13])
@pytest.mark.parametrize("leaf", PATHS)
def test_a_branch_has_the_logits_and_the_state_of_plain_decoding_to_the_bit(model: Any, length: int, leaf: int) -> None:
    """Few rows, so that the linear layers take them one by one too."""
    rows, tokens, path = permuted_page_rows(2, PAGES, seed=length), prompt(length), PATHS[leaf]
    plain, branching = new_executor(model), new_executor(model)
    after(plain, rows, tokens)
    after(branching, rows, tokens)
    wanted = decoded(plain, rows, length, [[10, *TREE.token_ids][node] for node in path])

    forward = branching.forward_verify(marked(rows, length))
    assert all(torch.equal(forward.logits[node], logits) for node, logits in zip(path, wanted, strict=True))

    branching.commit_rows([0], [length], [path])
    end = length + len(path)
    for ours, theirs in zip(state_of(branching, rows, end), state_of(plain, rows, end), strict=True):
        assert torch.equal(ours, theirs)
    again = decoded(branching, rows, end, [33])
    assert torch.equal(again[0], decoded(plain, rows, end, [33])[0])


def test_trees_beside_chains_and_chunks_have_the_logits_of_plain_decoding(model: Any) -> None:
    rows, tokens = permuted_page_rows(2, PAGES, seed=9), prompt(9)
    for leaf, path in PATHS.items():
        plain, branching = new_executor(model), new_executor(model)
        after(plain, rows, tokens)
        after(branching, rows, tokens)
        wanted = decoded(plain, rows, 9, [[10, *TREE.token_ids][node] for node in path])
        batch = ragged_batch([(1, 9, [9]), (0, 9, [10])], rows)
        proposals = [[21, 22], TREE]
        forward = branching.forward_verify(mark_trees(widen(batch, proposals), proposals))
        torch.testing.assert_close(forward.logits[3 + leaf], wanted[-1], atol=1e-4, rtol=1e-4)


def test_committed_rows_are_those_of_the_reference(model: Any) -> None:
    rows, tokens = permuted_page_rows(2, PAGES, seed=2), prompt(6)
    executor = new_executor(model)
    after(executor, rows, tokens)
    batch = ragged_batch([(1, 6, [9]), (0, 6, [10])], rows)
    executor.forward_verify(mark_trees(widen(batch, [TREE, TREE]), [TREE, TREE]))
    expected = executor.kv_cache.storage.clone()
    commit_rows(
        expected,
        torch.from_numpy(rows),
        torch.tensor([1, -1, 0], dtype=torch.int32),
        torch.tensor([6, 6, 6], dtype=torch.int32),
        torch.tensor([[0, 2, 5, 0], [0, 1, 0, 0], [0, 1, 4, 7]], dtype=torch.int32),
        torch.tensor([3, 2, 4], dtype=torch.int32),
    )
    executor.commit_rows([1, 0], [6, 6], [[0, 2, 5], [0, 1, 4, 7]])
    torch.testing.assert_close(executor.kv_cache.storage, expected, rtol=0, atol=0, equal_nan=True)


def set_bits(batch: Any, row: int, bits: int) -> None:
    batch.tree_mask[row, 0] = bits


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda batch: set_bits(batch, 3, 0b0011), "does not see itself"),
        (lambda batch: set_bits(batch, 1, 0b0111), "one behind it"),
        (lambda batch: set_bits(batch, 3, 0b1001), "positions do not continue"),
        (lambda batch: batch.positions.__setitem__(2, 8), "positions do not continue"),
        (lambda batch: setattr(batch, "tree_mask", batch.tree_mask[:-1]), "tree_mask is"),
        (lambda batch: setattr(batch, "tree_mask", batch.tree_mask.astype(np.int64)), "int32 is needed"),
    ],
)
def test_a_tree_that_contradicts_itself_is_refused(model: Any, change: Any, message: str) -> None:
    rows = permuted_page_rows(2, PAGES, seed=1)
    executor = new_executor(model)
    after(executor, rows, prompt(6))
    batch = marked(rows)
    change(batch)
    with pytest.raises(ContractViolation, match=message):
        executor.forward_verify(batch)


def test_moves_that_leave_the_pool_are_refused(model: Any) -> None:
    cache = new_executor(model).kv_cache
    one, beyond = np.array([0], np.int64), np.array([2 * PAGES * PAGE], np.int64)
    for pair in ((one, beyond), (beyond, one), (one, np.array([1, 2], np.int64))):
        with pytest.raises(InvalidArgumentError):
            cache.move_tokens(*pair)


def test_a_commit_before_any_step(model: Any) -> None:
    with pytest.raises(ContractViolation, match="no forward ran"):
        new_executor(model).commit_rows([0], [0], [[0]])


def test_recurrent_state_does_not_branch(tmp_path: Path) -> None:
    from tiny_model import write_tiny_qwen_hybrid

    from edgellm.runtime.recurrent_state import RecurrentState

    hybrid = load_model(write_tiny_qwen_hybrid(tmp_path))
    cache = KVCache.for_model(hybrid.config, num_pages=2 * PAGES, page_size=PAGE)
    executor = CpuExecutor(hybrid, cache, recurrent=RecurrentState(hybrid.config.recurrent_pieces, 2))
    rows = permuted_page_rows(2, PAGES, seed=1)
    executor.forward(ragged_batch([(0, 0, prompt(6))], rows))
    with pytest.raises(ContractViolation, match="trees branch"):
        executor.forward_verify(marked(rows))
