"""Models of every family on a GPU: transformers' tokens, the CPU graphs' logits, graphs, one's bits, loading."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device_models import OnHost, relative_error
from parity.family_models import MODELS, SOME, WIDE
from ragged import GreedySequence, permuted_page_rows, ragged_batch, run_greedy

from edgellm.models.device_ops import cuda_ops
from edgellm.models.loader import LoadedModel, load_model
from edgellm.models.step import HiddenRequest
from edgellm.models.weights import tensors_of
from edgellm.runtime.device_cuda import CudaDevice
from edgellm.runtime.executor_cpu import CpuExecutor
from edgellm.runtime.executor_cuda import CudaExecutor, ExecutorLimits, attention_mode
from edgellm.runtime.kv_cache import KVCache
from edgellm.runtime.recurrent_state import RecurrentState
from edgellm.runtime.recurrent_state_device import DeviceRecurrentState

pytestmark = pytest.mark.gpu

PAGE_SIZE = 16
PAGES_PER_SLOT = 8
NUM_SLOTS = 5
NUM_NEW = 16
# float32 logits have a spread of about one.  Delta nets enlarge the rounding of heads that nearly cancel in a few rows,
# and transformers runs whole sequences by chunks, whose products are rounded otherwise still.
TOLERANCE = 3e-3
MEAN_TOLERANCE = 5e-5
NEAR_TIE = 0.03
# transformers before 5.24 does not normalise the groups of a Mamba-2 mixer apart.
ONE_GROUP = [name for name in SOME if name != "mamba2-biases"]
LOADED = (
    "qwen-next-moe",
    "qwen-next-moe-step",
    "qwen-3.5-moe-packed",
    "mamba2-sharded",
    "granite-experts",
    "gemma4-towers",
)
BF16_ERROR = 0.06  # norm-wise, of logits against float32
FP8_ERROR = 0.25  # three bits of mantissa in every key and value; Gemma4 does not scale its scores down


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_cache(model: LoadedModel, device: str, kv_dtype: torch.dtype | None = None) -> KVCache:
    kv_cache = KVCache.for_model(
        model.config,
        num_pages=NUM_SLOTS * PAGES_PER_SLOT,
        page_size=PAGE_SIZE,
        dtype=kv_dtype or model.dtype,
        device=device,
    )
    kv_cache.fill_poison()
    return kv_cache


def cpu_executor(folder: Path, dtype: str = "float32") -> CpuExecutor:
    model = load_model(folder, dtype=dtype)
    pieces = model.config.recurrent_pieces
    recurrent = RecurrentState(pieces, NUM_SLOTS) if pieces else None
    return CpuExecutor(model, make_cache(model, "cpu"), recurrent=recurrent)


def make_executor(
    model: LoadedModel,
    *,
    deterministic: bool = False,
    graphs: bool = True,
    verify_tokens: int = 1,
    kv_dtype: torch.dtype | None = None,
) -> CudaExecutor:
    device, ops = CudaDevice("cuda"), cuda_ops(deterministic=deterministic)
    limits = ExecutorLimits(
        num_slots=NUM_SLOTS, pages_per_slot=PAGES_PER_SLOT, step_tokens=64, verify_tokens=verify_tokens
    )
    recurrent = None
    if model.config.recurrent_pieces:
        recurrent = DeviceRecurrentState(
            model.config.recurrent_pieces,
            NUM_SLOTS,
            device=device.torch_device,
            checkpoint_rows=limits.checkpoint_rows,
            scatter=ops.scatter_state,
        )
    return CudaExecutor(
        model,
        make_cache(model, "cuda", kv_dtype),
        device=device,
        ops=ops,
        limits=limits,
        mode=attention_mode(model.dtype, deterministic=deterministic),
        recurrent=recurrent,
        graphs=graphs,
    )


def random_steps(vocab_size: int, seed: int, count: int) -> list[list[tuple[int, int, list[int]]]]:
    """Steps as a session plans them: some sequences get a chunk, then others one token each."""
    rng = np.random.default_rng(seed)
    lengths, steps = dict.fromkeys(range(NUM_SLOTS), 0), []
    for _ in range(count):
        chunks, singles = [], []
        for slot in rng.permutation(NUM_SLOTS)[: rng.integers(1, NUM_SLOTS + 1)].tolist():
            added = int(min(rng.choice([1, 1, 1, 2, 5, 17, 70]), PAGE_SIZE * PAGES_PER_SLOT - lengths[slot]))
            if added < 1:
                lengths[slot], added = 0, 2  # the sequence ended, and another took its slot
            row = (slot, lengths[slot], rng.integers(0, vocab_size, added).tolist())
            (singles if added == 1 else chunks).append(row)
            lengths[slot] += added
        steps.append(chunks + singles)
    return steps


def run(executor: Any, steps: list[Any], *, seed: int = 1) -> list[torch.Tensor]:
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=seed)
    return [executor.forward(ragged_batch(rows, page_rows)).cpu() for rows in steps]


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=1e-4)
    assert (ours - theirs).abs().mean() < MEAN_TOLERANCE


@pytest.mark.parametrize("name", ONE_GROUP)
@torch.no_grad()
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """float32, chunks of several sizes beside decode rows; every token the best of one pass over all before it."""
    reference = MODELS[name](tmp_path)
    model = load_model(tmp_path, dtype="float32", device="cuda")
    rng = np.random.default_rng(5)
    sequences = [
        GreedySequence(slot, rng.integers(1, model.config.vocab_size - 1, length).tolist(), chunk, NUM_NEW)
        for slot, chunk, length in zip([2, 0, 3, 1], [1000, 7, 3, 13], [1, 29, 17, 40], strict=True)
    ]
    run_greedy(OnHost(make_executor(model)), sequences, permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=2))  # type: ignore[arg-type]
    best = 0
    for sequence in sequences:
        known = [*sequence.prompt, *sequence.tokens[:-1]]
        rows = reference(torch.tensor([known]), use_cache=False).logits[0, len(sequence.prompt) - 1 :].float()
        chosen = rows.gather(1, torch.tensor(sequence.tokens)[:, None])[:, 0]
        assert bool((chosen >= rows.max(dim=1).values - NEAR_TIE).all())
        best += int((rows.argmax(dim=1) == torch.tensor(sequence.tokens)).sum())
    assert best >= 4 * NUM_NEW - 1
    assert len({token for sequence in sequences for token in sequence.tokens}) > 4


@pytest.mark.parametrize("name", MODELS)
def test_float32_logits_are_those_of_the_cpu_graph(name: str, tmp_path: Path) -> None:
    MODELS[name](tmp_path)
    model = load_model(tmp_path, dtype="float32", device="cuda")
    steps = random_steps(model.config.vocab_size, 7, 6)
    for ours, theirs in zip(run(make_executor(model), steps), run(cpu_executor(tmp_path), steps), strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", WIDE)
def test_bfloat16_stays_close_to_float32(name: str, deterministic: bool, tmp_path: Path) -> None:
    """As close as the CPU graph in bfloat16, or a few per cent."""
    WIDE[name](tmp_path)
    model = load_model(tmp_path, dtype="bfloat16", device="cuda")
    steps = random_steps(model.config.vocab_size, 9, 6)
    exact, rounded = (torch.cat(run(cpu_executor(tmp_path, dtype), steps)) for dtype in ("float32", "bfloat16"))
    logits = torch.cat(run(make_executor(model, deterministic=deterministic), steps))
    assert logits.dtype == torch.float32
    error, theirs = relative_error(logits, exact), relative_error(rounded, exact)
    assert 0.0 < error < max(BF16_ERROR, 1.5 * theirs), (error, theirs)


@pytest.mark.parametrize("name", ["qwen-next-moe", "gemma4-shared"])
def test_fp8_pages_stay_close_to_float32(name: str, tmp_path: Path) -> None:
    WIDE[name](tmp_path)
    model = load_model(tmp_path, dtype="bfloat16", device="cuda")
    steps = random_steps(model.config.vocab_size, 9, 6)
    exact = torch.cat(run(cpu_executor(tmp_path), steps))
    logits = torch.cat(run(make_executor(model, kv_dtype=torch.float8_e4m3fn), steps))
    assert 0.0 < relative_error(logits, exact) < FP8_ERROR


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", WIDE)
def test_graphs_give_the_bits_of_eager_steps(name: str, dtype: str, tmp_path: Path) -> None:
    """The first use of a shape is eager, the later ones are replays over other inputs and other state."""
    WIDE[name](tmp_path)
    model = load_model(tmp_path, dtype=dtype, device="cuda")
    steps = random_steps(model.config.vocab_size, 11, 24)
    graphed = make_executor(model)
    for ours, theirs in zip(run(graphed, steps), run(make_executor(model, graphs=False), steps), strict=True):
        assert torch.equal(ours, theirs)
    assert not graphed.runner.refusal  # type: ignore[attr-defined]
    assert 0 < len(graphed.runner) < len(steps)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", WIDE)
def test_deterministic_logits_do_not_depend_on_chunks_or_batch(name: str, tmp_path: Path) -> None:
    WIDE[name](tmp_path)
    model = load_model(tmp_path, dtype="bfloat16", device="cuda")
    prompt = np.random.default_rng(3).integers(0, model.config.vocab_size, 90).tolist()
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=4)
    executor = make_executor(model, deterministic=True)
    found = []
    for slot, chunks in enumerate(([90], [70, 20], [33, 33, 24], [89, 1])):
        past = 0
        for count in chunks:
            rows = [(slot, past, prompt[past : past + count])]
            beside = [] if slot < 2 else [(4, past, prompt[past : past + count])]
            logits = executor.forward(ragged_batch([*beside, *rows], page_rows))
            past += count
        found.append(logits[-1].cpu())
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("name", ["qwen-next-moe", "mamba2-plain", "granite-experts", "gemma4-shared"])
def test_hidden_rows_and_all_logits_are_those_of_the_cpu_graph(name: str, tmp_path: Path) -> None:
    MODELS[name](tmp_path)
    model = load_model(tmp_path, dtype="float32", device="cuda")
    request = HiddenRequest(layers=(0, 2, model.config.num_layers), normed=True)
    found = []
    for executor in (make_executor(model, verify_tokens=11), cpu_executor(tmp_path)):
        executor.request_hidden(request)
        rng = np.random.default_rng(6)
        rows = [(3, 0, rng.integers(0, 190, 11).tolist()), (1, 0, [5])]
        batch = ragged_batch(rows, permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=6))
        batch.logits_index = np.arange(12, dtype=np.int64)
        batch.logits_to_seq = np.array([0] * 11 + [1], np.int32)
        found.append(executor.forward_verify(batch))
    close(found[0].logits.cpu(), found[1].logits)
    assert found[0].hidden is not None
    torch.testing.assert_close(found[0].hidden.cpu(), found[1].hidden, atol=TOLERANCE, rtol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name",
    [
        "qwen-next-moe",
        "qwen-next-moe-step",
        "qwen-3.5-moe-packed",
        "mamba2-sharded",
        "granite-experts",
        "gemma4-towers",
    ],
)
def test_weights_are_loaded_as_the_host_would(name: str, dtype: str, tmp_path: Path) -> None:
    """Interleaved rows, packed experts, float32 parts of 16-bit models."""
    MODELS[name](tmp_path)
    host, device = (load_model(tmp_path, dtype=dtype, device=where) for where in ("cpu", "cuda"))
    pairs = list(zip(tensors_of(device.weights), tensors_of(host.weights), strict=True))
    assert len(pairs) > 20
    for ours, theirs in pairs:
        assert ours.is_cuda
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours.cpu(), theirs)
    assert device.fingerprint == host.fingerprint
