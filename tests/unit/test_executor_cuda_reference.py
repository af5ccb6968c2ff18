"""The CUDA executor on the CPU with reference operators: everything above the kernels, equal to `CpuExecutor`.

Buckets, padding, staging, page-table updates, ragged batches and growth are the same code as on a GPU.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from ragged import GreedySequence, permuted_page_rows, ragged_batch, run_greedy

from edgellm.errors import ContractViolation, InvalidArgumentError, StepDeviceError
from edgellm.models.config import ModelConfig, RopeConfig
from edgellm.models.device_attention import AttentionMode
from edgellm.models.device_ops import reference_ops
from edgellm.models.loader import LoadedModel
from edgellm.models.registry import Architecture
from edgellm.runtime.device import CpuDevice
from edgellm.runtime.executor_cpu import CpuExecutor
from edgellm.runtime.executor_cuda import CudaExecutor, ExecutorLimits, attention_mode
from edgellm.runtime.kv_cache import KVCache
from edgellm.runtime.step_buckets import StepBuckets, decode_buckets, row_buckets
from edgellm.runtime.step_inputs import StepShape, split_rows
from edgellm.testing.random_model import random_model

PAGE_SIZE = 4
PAGES_PER_SLOT = 10
NUM_SLOTS = 5
TOLERANCE = 1e-4

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "max_positions": 64,
    "rms_norm_eps": 1e-6,
    "rope": RopeConfig(theta=10000.0),
    "tied_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architecture": Architecture.LLAMA},
    "llama-biases": {"architecture": Architecture.LLAMA, "qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "qwen2": {"architecture": Architecture.QWEN2, "qkv_bias": True, "tied_embeddings": True},
    "qwen3": {
        "architecture": Architecture.QWEN3,
        "qk_norm": True,
        "head_dim": 16,
        "num_kv_heads": 1,
        "rope": RopeConfig(theta=10000.0, kind="yarn", factor=4.0, original_max_positions=16),
    },
}


def make_model(name: str) -> LoadedModel:
    # Wide weights make logits that differ, so that greedy tokens are not one repeated token.
    return random_model(ModelConfig(**(BASE | FAMILIES[name])), seed=3, spread=0.25)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> LoadedModel:
    return make_model(request.param)


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    return make_model("llama")


def make_cache(model: LoadedModel) -> KVCache:
    kv_cache = KVCache.for_model(model.config, num_pages=NUM_SLOTS * PAGES_PER_SLOT, page_size=PAGE_SIZE)
    kv_cache.fill_poison()
    return kv_cache


def make_executor(
    model: LoadedModel, mode: AttentionMode = AttentionMode.SPLIT, *, pad: bool = True, step_tokens: int = 16
) -> CudaExecutor:
    limits = ExecutorLimits(num_slots=NUM_SLOTS, pages_per_slot=PAGES_PER_SLOT, step_tokens=step_tokens)
    return CudaExecutor(
        model, make_cache(model), device=CpuDevice(), ops=reference_ops(), limits=limits, mode=mode, pad=pad
    )


def random_rows(rng: np.random.Generator, lengths: dict[int, int]) -> list[tuple[int, int, list[int]]]:
    """A step as the session plans it: some sequences get a chunk, then others one token each; lengths advance."""
    slots = rng.permutation(NUM_SLOTS)[: rng.integers(1, NUM_SLOTS + 1)].tolist()
    chunks, singles = [], []
    for slot in slots:
        room = PAGE_SIZE * PAGES_PER_SLOT - lengths[slot]
        count = int(min(rng.choice([1, 1, 2, 5, 11]), room))
        if count < 1:
            lengths[slot], count = 0, 1  # the sequence ended and another took its slot
        row = (slot, lengths[slot], rng.integers(0, BASE["vocab_size"], count).tolist())
        (singles if count == 1 else chunks).append(row)
        lengths[slot] += count
    return chunks + singles


@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize("mode", AttentionMode)
def test_random_ragged_steps_give_the_logits_of_the_cpu_executor(
    model: LoadedModel, mode: AttentionMode, pad: bool
) -> None:
    rng = np.random.default_rng(7)
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=1)
    cpu, device = CpuExecutor(model, make_cache(model)), make_executor(model, mode, pad=pad)
    lengths = dict.fromkeys(range(NUM_SLOTS), 0)
    for _ in range(12):
        batch = ragged_batch(random_rows(rng, lengths), page_rows)
        expected, actual = cpu.forward(batch), device.forward(batch)
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("mode", AttentionMode)
def test_greedy_tokens_equal_those_of_the_cpu_executor(model: LoadedModel, mode: AttentionMode) -> None:
    """From the second step on chunks and decode rows share steps, in every bucket up to four sequences."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, BASE["vocab_size"], length).tolist() for length in (1, 17, 9, 22)]

    def run(executor: Any) -> list[list[int]]:
        sequences = [
            GreedySequence(slot=slot, prompt=prompt, chunk=chunk, num_new=8)
            for slot, prompt, chunk in zip([2, 0, 3, 1], prompts, [100, 7, 3, 9], strict=True)
        ]
        run_greedy(executor, sequences, permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=2))
        return [sequence.tokens for sequence in sequences]

    tokens = run(make_executor(model, mode))
    assert tokens == run(CpuExecutor(model, make_cache(model)))
    assert len({token for row in tokens for token in row}) > 3


def test_changed_page_rows_reach_the_device(llama: LoadedModel) -> None:
    """Growth, a slot that goes to another sequence, and rows that move behind the executor's back."""
    cpu, device = CpuExecutor(llama, make_cache(llama)), make_executor(llama)
    page_rows = np.full((NUM_SLOTS, PAGES_PER_SLOT), -1, np.int32)
    steps = [
        ([(1, 0, [5, 6, 7])], {1: [7]}),
        ([(1, 3, [8])], {1: [7]}),
        ([(1, 4, [9])], {1: [7, 21]}),
        ([(1, 5, [10]), (3, 0, [11])], {1: [7, 21], 3: [0]}),
        ([(3, 0, [1] * 9), (1, 0, [12])], {1: [30], 3: [2, 4, 3]}),
        ([(4, 0, list(range(40)))], {4: list(range(40, 50))}),
    ]
    for rows, pages in steps:
        page_rows[:] = -1
        for slot, ids in pages.items():
            page_rows[slot, : len(ids)] = ids
        batch = ragged_batch(rows, page_rows)
        torch.testing.assert_close(device.forward(batch), cpu.forward(batch), atol=TOLERANCE, rtol=TOLERANCE)


def test_a_row_is_sent_only_when_it_changed(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor(llama)
    sent: list[list[int]] = []
    update = executor._inputs._update_table

    def count(table: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        sent.append(slots.tolist())
        update(table, slots, rows)

    monkeypatch.setattr(executor._inputs, "_update_table", count)
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=3)
    executor.forward(ragged_batch([(2, 0, [1, 2, 3]), (4, 0, [4])], page_rows))
    executor.forward(ragged_batch([(2, 3, [1]), (4, 1, [4])], page_rows))
    executor.forward(ragged_batch([(2, 4, [1]), (4, 2, [4])], page_rows))  # slot 2 reads its second page
    page_rows[4, 5] = page_rows[0, 0]  # behind what slot 4 reads
    executor.forward(ragged_batch([(2, 5, [1]), (4, 3, [4])], page_rows))
    assert sent == [[2, 4], [2]]


def test_more_changed_rows_than_one_copy_holds(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgellm.runtime.step_inputs._UPDATE_WORDS", 1)
    cpu, device = CpuExecutor(llama, make_cache(llama)), make_executor(llama)
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=4)
    batch = ragged_batch([(slot, 0, [slot] * 33) for slot in range(NUM_SLOTS)], page_rows)
    torch.testing.assert_close(device.forward(batch), cpu.forward(batch), atol=TOLERANCE, rtol=TOLERANCE)


def test_a_step_larger_than_any_before_takes_more_memory_and_goes_on(llama: LoadedModel) -> None:
    cpu, device = CpuExecutor(llama, make_cache(llama)), make_executor(llama, step_tokens=4)
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=5)
    for past, count in ((0, 3), (3, 30), (33, 1)):
        batch = ragged_batch([(1, past, list(range(count)))], page_rows)
        if count > 1:
            batch.logits_index = np.arange(count, dtype=np.int64)
            batch.logits_to_seq = np.zeros(count, np.int32)
        torch.testing.assert_close(device.forward(batch), cpu.forward(batch), atol=TOLERANCE, rtol=TOLERANCE)


def test_copied_page_gives_the_same_logits(llama: LoadedModel) -> None:
    cpu, device = CpuExecutor(llama, make_cache(llama)), make_executor(llama)
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=6)
    prompt = list(range(18))
    for executor in (cpu, device):
        executor.forward(ragged_batch([(0, 0, prompt)], page_rows))
        executor.copy_pages(page_rows[0, :5], page_rows[3, :5])
        executor.kv_cache.fill_poison(page_rows[0])
    batch = ragged_batch([(3, 18, [3])], page_rows)
    torch.testing.assert_close(device.forward(batch), cpu.forward(batch), atol=TOLERANCE, rtol=TOLERANCE)


def test_no_logits_wanted(llama: LoadedModel) -> None:
    executor = make_executor(llama)
    batch = ragged_batch([(0, 0, [1, 2, 3])], permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=7))
    batch.logits_index, batch.logits_to_seq = np.zeros(0, np.int64), np.zeros(0, np.int32)
    assert executor.forward(batch).shape == (0, BASE["vocab_size"])
    assert not executor.kv_cache.gather(1, batch.page_rows[0], 3).isnan().any()


def test_padding_writes_nothing(llama: LoadedModel) -> None:
    """A warm-up runs every bucket with padding alone."""
    executor = make_executor(llama)
    assert executor.warm_up() == len(StepBuckets.of(NUM_SLOTS, decode_apart=True).at_start())
    assert all(bool(executor.kv_cache.pages(layer).isnan().all()) for layer in range(2))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(1, 0, [1] * 9)], r"slot 1 reads and writes positions \[0, 9\).*outside \[0, 50\); grow the row"),
        ([(2, 8, [1])], r"slot 2 reads and writes positions \[0, 9\).*99"),
        ([(0, 40, [1])], "position 40 needs block 10, but a page row has 10 blocks of 4 tokens"),
        ([(0, 0, [1, 97])], r"token id 97 is not in \[0, 97\)"),
        ([(5, 0, [1])], r"slots \[5\] are not all in \[0, 5\)"),
    ],
)
def test_refused_and_nothing_written(llama: LoadedModel, rows: list[tuple[int, int, list[int]]], message: str) -> None:
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=8)
    page_rows[1, 2:], page_rows[2, 2] = -1, 99
    executor = make_executor(llama)
    with pytest.raises(ContractViolation, match=message):
        executor.forward(ragged_batch(rows, page_rows))
    assert all(bool(executor.kv_cache.pages(layer).isnan().all()) for layer in range(2))


def test_a_page_table_of_another_shape_is_refused(llama: LoadedModel) -> None:
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT - 1, seed=9)
    with pytest.raises(ContractViolation, match=r"page table is \(5, 9\).*built for \(5, 10\)"):
        make_executor(llama).forward(ragged_batch([(0, 0, [1])], page_rows))


def test_a_failed_step_is_a_device_error_and_the_table_is_sent_again(llama: LoadedModel) -> None:
    executor = make_executor(llama)
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=10)
    batch = ragged_batch([(0, 0, [1, 2])], page_rows)
    expected = executor.forward(batch).clone()

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("no memory")

    update, executor._inputs._update_table = executor._inputs._update_table, fail
    page_rows[0, 0] = page_rows[1, 0]
    with pytest.raises(StepDeviceError, match="forward pass of 2 tokens failed: no memory; close the session"):
        executor.forward(batch)
    executor._inputs._update_table = update
    assert torch.equal(executor.forward(batch), expected)


def test_pages_that_cannot_be_copied_are_named_and_the_executor_goes_on(llama: LoadedModel) -> None:
    executor = make_executor(llama)
    batch = ragged_batch([(0, 0, [1, 2])], permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=10))
    expected = executor.forward(batch).clone()
    limit = executor.kv_cache.num_pages
    with pytest.raises(InvalidArgumentError, match=rf"target pages \[{limit}\] are not all in \[0, {limit}\)"):
        executor.copy_pages(np.array([0], np.int32), np.array([limit], np.int32))
    assert torch.equal(executor.forward(batch), expected)


def test_a_device_that_fails_under_a_copy_is_a_device_error(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make_executor(llama)

    def fail() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(executor, "_on_device", fail)
    with pytest.raises(StepDeviceError, match="copying pages failed: CUDA error") as caught:
        executor.copy_pages(np.array([0], np.int32), np.array([1], np.int32))
    assert isinstance(caught.value.__cause__, RuntimeError)


def fail_at_allocation(executor: CudaExecutor, number: int, patch: pytest.MonkeyPatch) -> None:
    """Let allocation `number`, from 0, of those that make room for a step fail."""
    calls = itertools.count()
    reserve = executor._steps.reserve

    def counted(make: Any) -> Any:
        def call(*args: Any, **options: Any) -> torch.Tensor:
            if next(calls) == number:
                raise torch.cuda.OutOfMemoryError("no memory")
            return make(*args, **options)

        return call

    def reserve_failing(shape: StepShape) -> None:
        with pytest.MonkeyPatch.context() as inside:
            for name in ("empty", "zeros"):
                inside.setattr(torch, name, counted(getattr(torch, name)))
            reserve(shape)

    patch.setattr(executor._steps, "reserve", reserve_failing)


@pytest.mark.parametrize("pad", [True, False])
def test_memory_that_runs_out_in_a_large_step_leaves_the_executor_usable(
    llama: LoadedModel, pad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every allocation in turn: what moved before it must not be taken for what is there."""
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=12)
    small = ragged_batch([(0, 0, [1, 2])], page_rows)
    large = ragged_batch([(slot, 0, [*range(1, 31)]) for slot in range(NUM_SLOTS)], page_rows)
    expected = [make_executor(llama, pad=pad).forward(batch).clone() for batch in (small, large)]
    for number in itertools.count():
        executor = make_executor(llama, pad=pad)
        executor.forward(small)
        with monkeypatch.context() as patch, contextlib.suppress(StepDeviceError):
            fail_at_allocation(executor, number, patch)
            executor.forward(large)
            break
        for batch, logits in zip((small, large), expected, strict=True):
            assert torch.equal(executor.forward(batch), logits)
    assert number > 8


def test_cache_of_another_shape_is_refused(llama: LoadedModel) -> None:
    other = KVCache(num_layers=3, num_pages=1, num_kv_heads=2, page_size=4, head_dim=8)
    limits = ExecutorLimits(num_slots=1, pages_per_slot=1, step_tokens=4)
    with pytest.raises(InvalidArgumentError, match=r"3 x \(2, 8\).*the model 2 x \(2, 8\)"):
        CudaExecutor(llama, other, device=CpuDevice(), ops=reference_ops(), limits=limits, mode=AttentionMode.EXACT)


class CountedSteps:
    """Runs launches and counts them."""

    def __init__(self) -> None:
        self.launched = 0

    def run(self, key: object, launch: Any) -> None:
        self.launched += 1
        launch()

    def clear(self) -> None:
        return


def decode_rows(slots: list[int], lengths: dict[int, int], tokens: dict[int, int]) -> list[tuple[int, int, list[int]]]:
    return [(slot, lengths[slot], [tokens[slot]]) for slot in slots]


# What the session asks for after the step that was computed ahead, of slots 0, 1 and 2: (rows, launches it takes).
AFTER: dict[str, tuple[Any, int]] = {
    "the same rows": (lambda lengths, tokens: decode_rows([0, 1, 2], lengths, tokens), 0),
    "one has ended": (lambda lengths, tokens: decode_rows([0, 2], lengths, tokens), 0),
    "another order": (lambda lengths, tokens: decode_rows([2, 0, 1], lengths, tokens), 0),
    "a chunk beside": (lambda lengths, tokens: [(4, 0, [5, 6, 7]), *decode_rows([0, 1, 2], lengths, tokens)], 1),
    "a chunk beside some": (lambda lengths, tokens: [(4, 0, [5, 6]), *decode_rows([2, 1], lengths, tokens)], 1),
    "one more row": (lambda lengths, tokens: decode_rows([0, 1, 2, 3], lengths, tokens), 1),
    "another token": (lambda lengths, tokens: decode_rows([0, 1, 2], lengths, tokens | {1: 9}), 1),
    "another length": (lambda lengths, tokens: decode_rows([0, 1, 2], lengths | {0: 4}, tokens), 1),
    "a chunk alone": (lambda lengths, tokens: [(4, 0, [5, 6, 7])], 1),
}


@pytest.mark.parametrize("mode", [AttentionMode.SPLIT, AttentionMode.EXACT])
@pytest.mark.parametrize("what", AFTER)
def test_a_step_computed_ahead_is_used_where_it_is_the_one_asked_for(
    llama: LoadedModel, what: str, mode: AttentionMode
) -> None:
    cpu, device = CpuExecutor(llama, make_cache(llama)), make_executor(llama, mode)
    device._runner = counted = CountedSteps()  # type: ignore[assignment]
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=12)
    start = [(0, 0, list(range(9))), (1, 0, list(range(20, 25))), (2, 0, [30, 31]), (3, 0, [40, 41])]
    for executor in (cpu, device):
        executor.forward(ragged_batch(start, page_rows))
    lengths = {0: 9, 1: 5, 2: 2, 3: 2}
    batch = ragged_batch(decode_rows([0, 1, 2], lengths, {0: 1, 1: 2, 2: 3}), page_rows)
    expected = cpu.forward(batch)
    logits = device.forward(batch)
    chosen = logits.argmax(dim=-1).to(torch.int32)
    device.run_ahead(batch, chosen)
    device.ran_ahead_with(chosen.tolist())
    lengths = {slot: length + (slot != 3) for slot, length in lengths.items()}
    tokens = dict(zip([0, 1, 2], expected.argmax(dim=-1).tolist(), strict=True)) | {3: 8}
    assert chosen.tolist() == list(tokens.values())[:3]
    rows, launches = AFTER[what]
    following = ragged_batch(rows(lengths, tokens), page_rows)
    before = counted.launched
    torch.testing.assert_close(device.forward(following), cpu.forward(following), atol=TOLERANCE, rtol=TOLERANCE)
    assert counted.launched - before == launches
    again = ragged_batch([(2, lengths[2] + 1, [4]), (0, lengths[0] + 1, [5])], page_rows)
    if what == "the same rows":
        torch.testing.assert_close(device.forward(again), cpu.forward(again), atol=TOLERANCE, rtol=TOLERANCE)


def test_steps_in_a_row_move_on_without_an_upload(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until rows change, or one of them needs a page that the device does not know yet."""
    cpu, device = CpuExecutor(llama, make_cache(llama)), make_executor(llama, AttentionMode.SPLIT)
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=16)
    later = page_rows[1, 2:].copy()
    page_rows[1, 2:] = -1
    staged: list[tuple[int, int]] = []
    number = 0
    stage = device._inputs.stage

    def counted(batch: Any, *given: Any, **named: Any) -> None:
        staged.append((number, batch.num_sequences))
        stage(batch, *given, **named)

    monkeypatch.setattr(device._inputs, "stage", counted)
    lengths = dict.fromkeys(range(3), PAGE_SIZE)
    batch = ragged_batch([(slot, 0, [slot + 1] * length) for slot, length in lengths.items()], page_rows)
    for number in range(9):
        expected, logits = cpu.forward(batch), device.forward(batch)
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=TOLERANCE)
        chosen = expected.argmax(dim=-1).to(torch.int32)
        device.run_ahead(batch, chosen)
        device.ran_ahead_with(chosen.tolist())
        tokens = dict(zip(lengths, chosen.tolist(), strict=True))
        if number == 4:
            page_rows[1, 2:] = later
        if number == 7:  # one row ends
            del tokens[0], lengths[0]
        batch = ragged_batch([(slot, lengths[slot], [token]) for slot, token in tokens.items()], page_rows)
        lengths = {slot: length + 1 for slot, length in lengths.items()}
    # Prompts, and the step behind them; slot 1 lacked a page when the fifth step was to run ahead; a row has ended.
    assert staged == [(0, 3), (0, 3), (5, 3), (8, 2)]


def test_a_step_computed_ahead_is_dropped_when_its_pages_move(llama: LoadedModel) -> None:
    executor = make_executor(llama)
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=13)
    batch = ragged_batch([(0, 0, [1, 2, 3])], page_rows)
    executor.forward(batch)
    executor.run_ahead(batch, torch.tensor([4], dtype=torch.int32))
    executor.ran_ahead_with([4])
    executor.copy_pages(page_rows[0, :1], page_rows[1, :1])
    page_rows[0, 0] = page_rows[1, 0]
    following = ragged_batch([(0, 3, [4])], page_rows)
    reference = make_executor(llama)
    reference.forward(ragged_batch([(0, 0, [1, 2, 3])], page_rows))
    torch.testing.assert_close(executor.forward(following), reference.forward(following))


def test_nothing_is_computed_ahead_without_a_page_or_with_a_prompt_unfinished(llama: LoadedModel) -> None:
    executor = make_executor(llama)
    executor._runner = counted = CountedSteps()  # type: ignore[assignment]
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=14)
    page_rows[0, 1:] = -1
    full = ragged_batch([(0, 0, [1, 2, 3, 4])], page_rows)
    last = ragged_batch([(1, PAGE_SIZE * PAGES_PER_SLOT - 1, [1])], page_rows)
    unfinished = ragged_batch([(2, 0, [1, 2]), (3, 0, [3])], page_rows)
    unfinished.logits_index, unfinished.logits_to_seq = np.array([2]), np.array([1], np.int32)
    for batch in (full, last, unfinished):
        logits = executor.forward(batch)
        before = counted.launched
        executor.run_ahead(batch, torch.zeros(len(logits), dtype=torch.int32))
        assert counted.launched == before


def test_buckets_of_rows() -> None:
    assert decode_buckets(1) == (1,)
    assert decode_buckets(5) == (1, 2, 4, 5)
    assert decode_buckets(8) == (1, 2, 4, 8)
    assert decode_buckets(100) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100)
    assert decode_buckets(1024)[-4:] == (832, 896, 960, 1024)
    assert [row_buckets(count) for count in (1, 8, 9, 100)] == [(1,), (1, 8), (1, 8, 9), (1, 8, 32, 100)]


def test_padded_shapes() -> None:
    apart = StepBuckets.of(20, decode_apart=True)
    assert apart.padded(StepShape(0, 0, 9, 9)) == StepShape(0, 0, 16, 16)
    assert apart.padded(StepShape(40, 3, 2, 5)) == StepShape(64, 8, 8, 16)
    assert apart.padded(StepShape(40, 9, 0, 9)) == StepShape(64, 20, 0, 20)
    assert apart.padded(StepShape(40, 3, 9, 9)) == StepShape(64, 8, 20, 20)
    assert apart.padded(StepShape(300, 3, 0, 0)) == StepShape(384, 8, 0, 0)
    assert apart.padded(StepShape(100, 1, 1, 2)) == StepShape(128, 1, 1, 2)
    assert apart.padded(StepShape(2049, 1, 0, 1)) is None
    assert apart.padded(StepShape(40, 1, 0, 40)) is None
    together = StepBuckets.of(20, decode_apart=False)
    assert together.padded(StepShape(9, 9, 0, 9)) == StepShape(16, 16, 0, 16)
    assert together.padded(StepShape(30, 9, 0, 9)) == StepShape(32, 20, 0, 20)


@pytest.mark.parametrize("decode_apart", [True, False])
def test_what_is_captured_at_start_is_what_steps_run_as(decode_apart: bool) -> None:
    buckets = StepBuckets.of(20, decode_apart=decode_apart)
    shapes = buckets.at_start()
    assert len(set(shapes)) == len(shapes)
    for exact in (StepShape(2048, 1, 0, 0), StepShape(2048, 1, 0, 1), StepShape(100, 1, 0, 1)):
        assert buckets.padded(exact) in shapes
    for rows in range(1, 21):
        exact = StepShape(0, 0, rows, rows) if decode_apart else StepShape(rows, rows, 0, rows)
        assert buckets.padded(exact) in shapes


def test_verified_steps_are_padded_in_tokens_rows_and_logits() -> None:
    buckets = StepBuckets.of(20, decode_apart=True, verify_tokens=5)
    assert buckets.padded(StepShape(5, 1, 0, 5)) == StepShape(8, 1, 0, 8)
    assert buckets.padded(StepShape(37, 9, 0, 37)) == StepShape(48, 20, 0, 48)
    assert buckets.padded(StepShape(300, 3, 0, 9)) == StepShape(384, 8, 0, 16)  # beside a chunk
    assert buckets.padded(StepShape(100, 20, 0, 100)) == StepShape(100, 20, 0, 100)
    assert buckets.padded(StepShape(101, 20, 0, 101)) is None
    assert StepBuckets.of(20, decode_apart=True).verified_at_start() == []


@pytest.mark.parametrize("num_slots", [1, 3, 8, 20])
def test_every_verification_without_a_prompt_is_captured_at_start(num_slots: int) -> None:
    buckets = StepBuckets.of(num_slots, decode_apart=True, verify_tokens=5)
    shapes = buckets.verified_at_start()
    met = {
        buckets.padded(StepShape(tokens, rows, 0, tokens))
        for rows in range(1, num_slots + 1)
        for tokens in range(rows + 1, 5 * rows + 1)
    }
    assert met == set(shapes)
    assert len(set(shapes)) == len(shapes)


def test_rows_of_one_token_at_the_tail_are_decode_rows() -> None:
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=11)
    batch = ragged_batch([(0, 0, [1]), (1, 0, [1, 2]), (2, 3, [1]), (3, 4, [1])], page_rows)
    assert split_rows(batch, decode_apart=True) == StepShape(3, 2, 2, 4)
    assert split_rows(batch, decode_apart=False) == StepShape(5, 4, 0, 4)


def test_float32_takes_the_exact_kernels() -> None:
    assert attention_mode(torch.float32, deterministic=False) is AttentionMode.EXACT
    assert attention_mode(torch.float32, deterministic=True) is AttentionMode.EXACT
    assert attention_mode(torch.bfloat16, deterministic=False) is AttentionMode.SPLIT
    assert attention_mode(torch.float16, deterministic=True) is AttentionMode.DETERMINISTIC
