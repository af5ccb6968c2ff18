"""The device graphs of every family with reference operators, on the CPU: equal to the CPU graphs, whatever the step.

Those equal transformers (`test_qwen_hybrid.py` and its neighbours), so what is left is how rows, buffers, padding and
state are laid out, and which operator gets what.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity.family_models import MODELS, SOME, WIDE
from ragged import GreedySequence, permuted_page_rows, ragged_batch, run_greedy
from reference_placement import ReferencePlacement, make_engine
from tiny_model import write_byte_tokenizer

from edgellm import SamplingParams
from edgellm.models.device_attention import AttentionMode
from edgellm.models.device_ops import DeviceOps, reference_ops
from edgellm.models.loader import LoadedModel, load_model
from edgellm.models.step import HiddenRequest
from edgellm.runtime.device import CpuDevice
from edgellm.runtime.executor_cpu import CpuExecutor
from edgellm.runtime.executor_cuda import CudaExecutor, ExecutorLimits
from edgellm.runtime.kv_cache import KVCache
from edgellm.runtime.placement import CpuPlacement
from edgellm.runtime.recurrent_state import RecurrentState
from edgellm.runtime.recurrent_state_device import DeviceRecurrentState

PAGE_SIZE = 4
PAGES_PER_SLOT = 16
NUM_SLOTS = 5
# Logits have a spread of about one; delta nets enlarge the rounding of heads that nearly cancel in a few rows.
TOLERANCE = 2e-3
MEAN_TOLERANCE = 2e-5


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return saved(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=SOME)
def some(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return saved(request.param, tmp_path_factory.mktemp("model"))


def saved(name: str, folder: Path, dtype: str = "float32") -> LoadedModel:
    MODELS[name](folder)
    return load_model(folder, dtype=dtype)


def make_cache(model: LoadedModel) -> KVCache:
    pages = NUM_SLOTS * PAGES_PER_SLOT
    kv_cache = KVCache.for_model(model.config, num_pages=pages, page_size=PAGE_SIZE, dtype=model.dtype)
    kv_cache.fill_poison()
    return kv_cache


def cpu_executor(model: LoadedModel) -> CpuExecutor:
    pieces = model.config.recurrent_pieces
    return CpuExecutor(model, make_cache(model), recurrent=RecurrentState(pieces, NUM_SLOTS) if pieces else None)


def device_executor(
    model: LoadedModel,
    mode: AttentionMode = AttentionMode.SPLIT,
    *,
    pad: bool = True,
    verify_tokens: int = 1,
    ops: DeviceOps | None = None,
) -> CudaExecutor:
    ops = ops or reference_ops()
    limits = ExecutorLimits(
        num_slots=NUM_SLOTS, pages_per_slot=PAGES_PER_SLOT, step_tokens=16, verify_tokens=verify_tokens
    )
    recurrent = None
    if model.config.recurrent_pieces:
        recurrent = DeviceRecurrentState(
            model.config.recurrent_pieces,
            NUM_SLOTS,
            device=torch.device("cpu"),
            checkpoint_rows=limits.checkpoint_rows,
            scatter=ops.scatter_state,
        )
    return CudaExecutor(
        model,
        make_cache(model),
        device=CpuDevice(),
        ops=ops,
        limits=limits,
        mode=mode,
        recurrent=recurrent,
        pad=pad,
    )


def random_steps(vocab_size: int, seed: int, count: int) -> list[list[tuple[int, int, list[int]]]]:
    """Steps as a session plans them: some sequences get a chunk, then others one token each."""
    rng = np.random.default_rng(seed)
    lengths, steps = dict.fromkeys(range(NUM_SLOTS), 0), []
    for _ in range(count):
        chunks, singles = [], []
        for slot in rng.permutation(NUM_SLOTS)[: rng.integers(1, NUM_SLOTS + 1)].tolist():
            added = int(min(rng.choice([1, 1, 2, 5, 13]), PAGE_SIZE * PAGES_PER_SLOT - lengths[slot]))
            row = (slot, lengths[slot], rng.integers(0, vocab_size, added).tolist())
            (singles if added == 1 else chunks).append(row)
            lengths[slot] += added
        steps.append(chunks + singles)
    return steps


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=1e-4)
    assert (ours - theirs).abs().mean() < MEAN_TOLERANCE


def check_random_steps(model: LoadedModel, mode: AttentionMode, *, pad: bool, count: int) -> None:
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=1)
    cpu, device = cpu_executor(model), device_executor(model, mode, pad=pad)
    for rows in random_steps(model.config.vocab_size, 7, count):
        batch = ragged_batch(rows, page_rows)
        close(device.forward(batch), cpu.forward(batch))


def test_random_ragged_steps_give_the_logits_of_the_cpu_graph(model: LoadedModel) -> None:
    """Chunks beside decode rows, padded to buckets."""
    check_random_steps(model, AttentionMode.SPLIT, pad=True, count=6)


@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize("mode", [AttentionMode.EXACT, AttentionMode.DETERMINISTIC])
def test_every_mode_gives_the_logits_of_the_cpu_graph(some: LoadedModel, mode: AttentionMode, pad: bool) -> None:
    check_random_steps(some, mode, pad=pad, count=4)


def test_greedy_tokens_are_those_of_the_cpu_graph(some: LoadedModel) -> None:
    """Prompts of several windows in chunks, beside each other, then decode steps of every bucket."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(1, some.config.vocab_size - 1, length).tolist() for length in (1, 27, 9, 22)]

    def run(executor: Any) -> list[list[int]]:
        sequences = [
            GreedySequence(slot=slot, prompt=prompt, chunk=chunk, num_new=10)
            for slot, prompt, chunk in zip([2, 0, 4, 1], prompts, [100, 7, 3, 9], strict=True)
        ]
        run_greedy(executor, sequences, permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=2))
        return [sequence.tokens for sequence in sequences]

    tokens = run(device_executor(some))
    assert tokens == run(cpu_executor(some))
    assert len({token for row in tokens for token in row}) > 4


def test_all_logits_and_hidden_rows_are_those_of_the_cpu_graph(some: LoadedModel) -> None:
    """Beside another sequence, so that rows of padding stand between."""
    rng = np.random.default_rng(6)
    prompt, other = (rng.integers(0, some.config.vocab_size, length).tolist() for length in (11, 1))
    request = HiddenRequest(layers=(0, 2, some.config.num_layers), normed=True)
    found = []
    for executor in (device_executor(some, verify_tokens=11), cpu_executor(some)):
        executor.request_hidden(request)
        batch = ragged_batch([(3, 0, prompt), (1, 0, other)], permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=6))
        batch.logits_index = np.arange(12, dtype=np.int64)
        batch.logits_to_seq = np.array([0] * 11 + [1], np.int32)
        found.append(executor.forward_verify(batch))
    close(found[0].logits, found[1].logits)
    assert found[0].hidden is not None
    assert found[0].hidden.shape == (12, request.width(some.config.hidden_size))
    # What enters a layer is wide where norms are behind the sublayers.
    torch.testing.assert_close(found[0].hidden, found[1].hidden, atol=TOLERANCE, rtol=1e-3)


def test_heads_of_512_take_their_kernel(tmp_path: Path) -> None:
    """Beside layers of another head size, whose decode rows have an operator of their own."""
    WIDE["gemma4-shared"](tmp_path)
    model = load_model(tmp_path)
    calls: dict[str, list[int]] = {"paged_attention_wide": [], "paged_attention_exact": [], "paged_decode": []}
    plain = reference_ops()

    def counted(name: str) -> Any:
        def op(query: torch.Tensor, *places: Any, **options: Any) -> None:
            calls[name].append(len(query))
            getattr(plain, name)(query, *places, **options)

        return op

    ops = dataclasses.replace(plain, **{name: counted(name) for name in calls})
    device, cpu = device_executor(model, ops=ops, pad=False), cpu_executor(model)
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=4)
    for rows in ([(0, 0, [3, 4, 5, 6, 7])], [(1, 0, [8, 9, 2]), (0, 5, [1])], [(0, 6, [2]), (1, 3, [2])]):
        batch = ragged_batch(rows, page_rows)
        close(device.forward(batch), cpu.forward(batch))
    # One full layer owns K and V, another reads them: of a chunk only the rows with logits, one by one.
    assert calls["paged_attention_wide"] == [5, 1, 3, 1, 2, 2, 2]
    assert not calls["paged_attention_exact"]
    assert calls["paged_decode"] == [1, 1, 1, 1, 2, 2, 2, 2, 2, 2]


def test_a_config_names_the_width_of_every_row_that_its_linear_layers_and_experts_read(some: LoadedModel) -> None:
    """A deployment refuses widths that its kernels do not serve by what the config says."""
    read: dict[str, set[int]] = {"linear": set(), "gated": set(), "experts": set()}
    plain = reference_ops()

    def noted(name: str) -> Any:
        def op(rows: torch.Tensor, weight: torch.Tensor, *places: Any, **options: Any) -> Any:
            read[name].add(rows.shape[1])
            return getattr(plain, name)(rows, weight, *places, **options)

        return op

    executor = device_executor(some, ops=dataclasses.replace(plain, **{name: noted(name) for name in read}))
    executor.forward(ragged_batch([(0, 0, [3, 4, 5])], permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=3)))
    assert read["linear"] | read["gated"] == {width for _, width in some.config.linear_widths}
    assert read["experts"] <= {width for _, width in some.config.expert_widths}
    assert bool(read["experts"]) == bool(some.config.expert_widths)


def test_layers_that_own_no_kv_run_rows_with_logits_alone(tmp_path: Path) -> None:
    """Nothing that later tokens read comes from the last three layers, so a chunk without logits ends before them."""
    model = saved("gemma4-shared", tmp_path)
    calls: list[int] = []

    def counted(qkv: torch.Tensor, *places: Any, **options: Any) -> None:
        calls.append(len(qkv))
        plain.rope_kv_write(qkv, *places, **options)

    plain = reference_ops()
    ops = dataclasses.replace(plain, rope_kv_write=counted)
    executor = device_executor(model, ops=ops, pad=False)
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=8)
    batch = ragged_batch([(0, 0, [*range(1, 21)])], page_rows)
    batch.logits_index, batch.logits_to_seq = np.zeros(0, np.int64), np.zeros(0, np.int32)
    assert executor.forward(batch).shape == (0, model.config.vocab_size)
    assert calls == [20] * 3
    calls.clear()
    mixed = ragged_batch([(0, 20, [5, 6, 7]), (1, 0, [8, 9])], page_rows)
    executor.forward(mixed)
    assert calls == [5] * 3 + [2] * 3
    calls.clear()
    executor.forward(ragged_batch([(0, 23, [4]), (1, 2, [3])], page_rows))
    assert calls == [2] * 6


@pytest.mark.parametrize("name", ["qwen-next-moe", "mamba2-plain", "granite-experts", "gemma4-shared"])
def test_bfloat16_stays_close_to_the_cpu_graph(name: str, tmp_path: Path) -> None:
    """A residual stream of float32 beside rows of bfloat16, float32 totals of experts."""
    model = saved(name, tmp_path, "bfloat16")
    exact = cpu_executor(load_model(tmp_path, dtype="float32"))
    cpu, device = cpu_executor(model), device_executor(model)
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=8)
    for rows in random_steps(model.config.vocab_size, 9, 4):
        batch = ragged_batch(rows, page_rows)
        expected = exact.forward(batch)
        theirs, ours = ((executor.forward(batch) - expected).norm() for executor in (cpu, device))
        assert 0.0 < ours < max(2.0 * theirs, 0.1 * expected.norm())


@pytest.mark.parametrize(
    "name", ["gemma3", "gemma4-shared", "granite-experts", "mamba2-one-group-tied", "qwen-next-moe"]
)
def test_served_answers_are_those_of_the_cpu_executor(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More prompts than seats, chunks beside decode rows, a shared beginning, and the same prompts three times."""
    monkeypatch.setenv("EDGELLM_PLUGINS", "hybrid")
    changes = {} if name.startswith("gemma") else {"eos_token_id": 0, "bos_token_id": 0}
    MODELS[name](tmp_path, vocab_size=write_byte_tokenizer(tmp_path), **changes)
    prompts = [[1 + (31 * idx + 7 * place) % 250 for place in range(length)] for idx, length in enumerate((5, 41, 70))]
    prompts.append([*prompts[2][:50], 9, 9, 9])
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    found, reused = [], []
    for placement in (ReferencePlacement, CpuPlacement):
        with make_engine(tmp_path, placement, kv_budget=1024, max_batch_size=3, max_model_len=128) as engine:
            found.append([[output.token_ids for output in engine.generate(prompts, params)] for _ in range(3)])
            reused.append(engine.metrics().cache.reused_tokens)
    assert found[0] == found[1]
    assert found[0][0] == found[0][1] == found[0][2]
    assert reused[0] == reused[1] > 0
