"""Whole models on a GPU: transformers' tokens, the CPU executor's logits, graphs, reuse, deterministic mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device_models import (
    NUM_SLOTS,
    PAGE_SIZE,
    PAGES_PER_SLOT,
    OnHost,
    make_executor,
    prompts,
    random_steps,
    relative_error,
    small_model,
)
from parity.test_tiny_models import VARIANTS, check, make_reference
from ragged import GreedySequence, permuted_page_rows, ragged_batch, run_greedy

from edgellm.models.loader import load_model
from edgellm.models.weights import tensors_of
from edgellm.runtime.cuda_graphs import StepGraphs
from edgellm.runtime.executor_cpu import CpuExecutor
from edgellm.runtime.executor_cuda import full_precision
from edgellm.runtime.kv_cache import KVCache

pytestmark = pytest.mark.gpu

# Heads of 20 dimensions are the one shape of these that the float32 kernels refuse.
TINY = [name for name in VARIANTS if name != "llama-head-dim"]
HALF = [torch.bfloat16, torch.float16]
# Norm-wise error of logits against float32 on the CPU: rounding of rows and weights over four layers.
HALF_ERROR = {torch.bfloat16: 0.03, torch.float16: 0.006}
FP8_ERROR = 0.12  # three bits of mantissa in every key and value


@pytest.mark.parametrize("name", TINY)
def test_greedy_tokens_and_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    """float32, chunks of several sizes and decode rows in the same steps."""
    reference = make_reference(name, tmp_path)
    model = load_model(tmp_path, dtype="float32", device="cuda")
    sequences = [
        GreedySequence(slot=slot, prompt=prompt, chunk=chunk, num_new=12)
        for slot, chunk, prompt in zip([2, 0, 3, 1], [1000, 7, 3, 13], prompts([1, 29, 17, 40], 199), strict=True)
    ]
    executor = OnHost(make_executor(model))
    run_greedy(executor, sequences, permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=2))  # type: ignore[arg-type]
    for sequence in sequences:
        check(sequence, reference)


def cpu_logits(steps: list[Any], page_rows: np.ndarray, **changes: Any) -> list[torch.Tensor]:
    model = small_model(torch.float32, device="cpu", **changes)
    pages = NUM_SLOTS * PAGES_PER_SLOT
    executor = CpuExecutor(model, KVCache.for_model(model.config, num_pages=pages, page_size=PAGE_SIZE))
    return [executor.forward(ragged_batch(rows, page_rows)) for rows in steps]


def run(executor: Any, steps: list[Any], page_rows: np.ndarray) -> list[torch.Tensor]:
    return [executor.forward(ragged_batch(rows, page_rows)).cpu() for rows in steps]


@pytest.mark.parametrize("shape", [{"head_dim": 64}, {"head_dim": 128, "num_heads": 6, "num_kv_heads": 1}])
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_stays_close_to_float32(dtype: torch.dtype, shape: dict[str, int]) -> None:
    steps = random_steps(3, 1031, steps=12)
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=3)
    expected = cpu_logits(steps, page_rows, **shape)
    for deterministic in (False, True):
        actual = run(make_executor(small_model(dtype, **shape), deterministic=deterministic), steps, page_rows)
        errors = [relative_error(*pair) for pair in zip(actual, expected, strict=True)]
        assert max(errors) < HALF_ERROR[dtype], errors


def test_float32_equals_the_cpu_executor() -> None:
    steps = random_steps(4, 1031, steps=12)
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=4)
    actual = run(make_executor(small_model(torch.float32)), steps, page_rows)
    for ours, theirs in zip(actual, cpu_logits(steps, page_rows), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", HALF)
def test_fp8_pages_stay_close_to_float32(dtype: torch.dtype) -> None:
    steps = random_steps(5, 1031, steps=10)
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=5)
    executor = make_executor(small_model(dtype), kv_dtype=torch.float8_e4m3fn)
    errors = [
        relative_error(*pair)
        for pair in zip(run(executor, steps, page_rows), cpu_logits(steps, page_rows), strict=True)
    ]
    assert 0.0 < max(errors) < FP8_ERROR, errors


@pytest.mark.parametrize("page_size", [32, 64, 128])
def test_larger_pages_give_the_same_logits(page_size: int) -> None:
    pages_per_slot = PAGE_SIZE * PAGES_PER_SLOT // page_size
    steps = random_steps(6, 1031, steps=6)
    model = small_model(torch.bfloat16)
    executor = make_executor(model, page_size=page_size, pages_per_slot=pages_per_slot)
    actual = run(executor, steps, permuted_page_rows(NUM_SLOTS, pages_per_slot, seed=6))
    expected = run(make_executor(model), steps, permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=6))
    assert max(relative_error(*pair) for pair in zip(actual, expected, strict=True)) < HALF_ERROR[torch.bfloat16]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_give_the_bits_of_eager_steps(dtype: torch.dtype, deterministic: bool) -> None:
    """Every step twice: the first use of a shape is eager, the later ones are replays over other inputs."""
    model = small_model(dtype)
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=7)
    eager = make_executor(model, deterministic=deterministic, graphs=False)
    graphed = make_executor(model, deterministic=deterministic)
    graphed.warm_up()
    assert not graphed.runner.refusal  # type: ignore[attr-defined]
    for rows in random_steps(7, 1031, steps=30):
        batch = ragged_batch(rows, page_rows)
        assert torch.equal(graphed.forward(batch), eager.forward(batch))
    assert len(graphed.runner) > 10  # type: ignore[arg-type]
    assert not graphed.runner.refusal  # type: ignore[attr-defined]


def test_a_warm_up_writes_no_state() -> None:
    executor = make_executor(small_model(torch.bfloat16))
    executor.warm_up()
    assert all(bool(executor.kv_cache.pages(layer).isnan().all()) for layer in range(4))


def last_logits(executor: Any, prompt: list[int], chunks: list[int], slot: int, page_rows: np.ndarray) -> torch.Tensor:
    """Logits of the prompt's last token, run alone in chunks of these sizes."""
    past, logits = 0, None
    for count in chunks:
        logits = executor.forward(ragged_batch([(slot, past, prompt[past : past + count])], page_rows)).cpu()
        past += count
    assert past == len(prompt)
    assert logits is not None
    return logits[0]


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_deterministic_logits_do_not_depend_on_chunks_batch_or_reuse(dtype: torch.dtype) -> None:
    model = small_model(dtype)
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=8)
    (prompt,) = prompts([300], 1031)
    executor = make_executor(model, deterministic=True)
    expected = last_logits(executor, prompt, [300], 0, page_rows)
    for slot, chunks in enumerate(([1, 299], [128, 172], [256, 43, 1], [100, 100, 100], [299, 1]), start=1):
        assert torch.equal(last_logits(executor, prompt, chunks, slot, page_rows), expected), chunks
    # Beside others, in every position of the batch, as a chunk and as a decode row.
    for others in (1, 3, 9):
        rows = [(slot, 0, fill) for slot, fill in enumerate(prompts([37] * others, 1031, seed=others), start=1)]
        batch = ragged_batch([*rows, (0, 290, prompt[290:])], page_rows)
        assert torch.equal(executor.forward(batch)[-1].cpu(), expected), others
        singles = [(slot, past, [7]) for slot, past, _ in [(s, 37, 0) for s, _, _ in rows]]
        batch = ragged_batch([*singles, (0, 299, prompt[299:])], page_rows)
        assert torch.equal(executor.forward(batch)[-1].cpu(), expected), others
    # A second sequence on pages that the first one wrote.
    page_rows[11, :12] = page_rows[0, :12]
    batch = ragged_batch([(11, 192, prompt[192:])], page_rows)
    assert torch.equal(executor.forward(batch)[0].cpu(), expected)


def test_copied_pages_and_shared_pages_give_the_same_logits() -> None:
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=9)
    (prompt,) = prompts([77], 1031)
    executor = make_executor(small_model(torch.bfloat16))
    expected = last_logits(executor, prompt, [76, 1], 0, page_rows)
    executor.copy_pages(page_rows[0, :5], page_rows[3, :5])
    executor.kv_cache.fill_poison(page_rows[0])
    assert torch.equal(executor.forward(ragged_batch([(3, 76, prompt[76:])], page_rows))[0].cpu(), expected)


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
def test_rows_that_share_a_prefix_attend_to_it_together(
    kv_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Close to each row by itself; replays have the bits of eager steps while rows leave, come, and share nothing."""
    monkeypatch.setattr("edgellm.runtime.shared_prefix.MIN_SAVED_TOKENS", 16_384)
    model = small_model(torch.bfloat16, max_positions=4096)
    pages_per_slot, prefix = 160, 150 * PAGE_SIZE
    page_rows = permuted_page_rows(NUM_SLOTS, pages_per_slot, seed=13)
    page_rows[1:11, :150] = page_rows[0, :150]
    (prompt,) = prompts([prefix], 1031)

    def make(**options: Any) -> Any:
        executor = make_executor(model, kv_dtype=kv_dtype, pages_per_slot=pages_per_slot, **options)
        executor.forward(ragged_batch([(0, 0, prompt)], page_rows))
        return executor

    apart, eager, graphed = make(shares_prefixes=False), make(graphs=False), make()
    graphed.warm_up()
    rows = [(slot, prefix, [slot + 1]) for slot in range(11)]
    steps = [[(slot, past + i, [i + slot]) for slot, past, _ in rows[: 11 - i // 2]] for i in range(6)]
    steps += [[(11, 0, [5, 6, 7]), *((slot, past + 6, [3]) for slot, past, _ in rows[:9])]]
    steps += [[(slot, past + 7, [2]) for slot, past, _ in rows[:3]]]
    for step in steps:
        batch = ragged_batch(step, page_rows)
        expected, together = apart.forward(batch).cpu(), eager.forward(batch).cpu()
        assert relative_error(together, expected) < HALF_ERROR[torch.bfloat16]
        assert torch.equal(graphed.forward(batch).cpu(), together)
    assert not graphed.runner.refusal
    assert (graphed.sharing.steps, apart.sharing.steps) == (7, 0)
    assert graphed.sharing.tokens_saved == (10 + 10 + 9 + 9 + 8 + 8 + 8) * prefix


def test_a_step_larger_than_any_before_runs() -> None:
    """More tokens and more logits than memory was reserved for; what was captured is captured again."""
    model = small_model(torch.bfloat16)
    executor = make_executor(model)
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=10)
    (prompt,) = prompts([370], 1031)
    before = last_logits(executor, prompt[:40], [39, 1], 0, page_rows)
    batch = ragged_batch([(1, 0, prompt)], page_rows)
    batch.logits_index = np.arange(len(prompt), dtype=np.int64)
    batch.logits_to_seq = np.zeros(len(prompt), np.int32)
    everywhere = executor.forward(batch).cpu()
    assert relative_error(everywhere[39], before) < HALF_ERROR[torch.bfloat16]
    assert torch.equal(last_logits(executor, prompt[:40], [39, 1], 2, page_rows), before)


def test_weights_are_loaded_as_the_host_would(tmp_path: Path) -> None:
    """Through pinned pieces, sharded, converted: bit by bit what `torch` converts on the CPU."""
    make_reference("qwen3-tied-sharded", tmp_path)
    host = load_model(tmp_path, dtype="bfloat16", device="cpu")
    device = load_model(tmp_path, dtype="bfloat16", device="cuda")
    for ours, theirs in zip(tensors_of(device.weights), tensors_of(host.weights), strict=True):
        assert torch.equal(ours.cpu(), theirs)


def test_a_step_that_cannot_be_captured_runs_eagerly_from_then_on(caplog: pytest.LogCaptureFixture) -> None:
    graphs = StepGraphs(torch.device("cuda", 0))
    counter = torch.zeros(1, device="cuda")

    def launch() -> None:
        counter.add_(1)
        torch.cuda.synchronize()  # not allowed while a stream is captured

    for _ in range(3):
        graphs.run("key", launch)
    assert counter.item() == 3
    assert len(graphs) == 0
    assert graphs.refusal
    assert [record.message for record in caplog.records if "CUDA graphs are off" in record.message][1:] == []
    assert 0 <= torch.rand(1, device="cuda").item() < 1  # the device and torch's generator still work


def test_full_precision_is_restored_and_float32_products_are_exact() -> None:
    a = torch.randn(256, 256, device="cuda", dtype=torch.float64)
    b = torch.randn(256, 256, device="cuda", dtype=torch.float64)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        loose = (a.float() @ b.float()).double() - a @ b
        with full_precision():
            exact = (a.float() @ b.float()).double() - a @ b
        again = (a.float() @ b.float()).double() - a @ b
    finally:
        torch.set_float32_matmul_precision(before)
    assert exact.abs().max() < 1e-3 < loose.abs().max()
    assert torch.equal(loose, again)
