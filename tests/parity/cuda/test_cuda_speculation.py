"""Verification on a GPU: plain decoding's bits and text, graphs that change nothing, and nothing that waits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from device_models import small_config
from helped_drafts import HelpedDraft
from ragged import permuted_page_rows, ragged_batch
from tiny_drafts import TinyPair, write_hybrid_lookup_pair, write_lookup_pair
from verify_steps import VerifyPlan, verifying

import edgellm_hybrid.plugin
import edgellm_lookup.decoder
import edgellm_shared_kv.plugin
from edgellm import LLM, SamplingParams, SpeculativeOptions
from edgellm.models.device_ops import cuda_ops
from edgellm.models.loader import LoadedModel, load_model
from edgellm.models.step import HiddenRequest
from edgellm.outputs import RequestOutput
from edgellm.plugins import load_plugins
from edgellm.runtime.cuda_graphs import StepGraphs
from edgellm.runtime.device_cuda import CudaDevice
from edgellm.runtime.executor_cpu import CpuExecutor
from edgellm.runtime.executor_cuda import CudaExecutor, ExecutorLimits, attention_mode
from edgellm.runtime.kv_cache import KVCache
from edgellm.runtime.recurrent_state import RecurrentState
from edgellm.runtime.recurrent_state_device import DeviceRecurrentState
from edgellm.testing.random_model import random_model

pytestmark = pytest.mark.gpu

PAGE_SIZE, PAGES_PER_SLOT, NUM_SLOTS = 16, 8, 5
VERIFY_TOKENS = 5
REQUEST = HiddenRequest(layers=(0, 2), normed=True)
# Shapes that the tensor cores take; the tiny model's own go through plain loops.
WRITERS = {"lookup": write_lookup_pair, "hybrid": write_hybrid_lookup_pair}
WIDE: dict[str, dict[str, Any]] = {
    "lookup": {"head_dim": 64, "hidden_size": 128},
    "hybrid": {"head_dim": 64, "hidden_size": 128, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
}


@pytest.fixture(scope="module", params=WRITERS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return WRITERS[request.param](tmp_path_factory.mktemp(request.param), **WIDE[request.param])


# ---- executors --------------------------------------------------------------------------------------------------


class Bench:
    """An executor on the GPU, or on the CPU for comparisons, with the live state of its slots."""

    def __init__(self, model: LoadedModel, *, deterministic: bool = False, graphs: bool = True, pad: bool = True):
        config = model.config
        pages = {"num_pages": NUM_SLOTS * PAGES_PER_SLOT, "page_size": PAGE_SIZE, "dtype": model.dtype}
        self.page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=2)
        self.state: RecurrentState | None = None
        if model.weights.embedding.device.type == "cpu":
            self.state = RecurrentState(config.recurrent_pieces, NUM_SLOTS) if config.recurrent_pieces else None
            self.executor: Any = CpuExecutor(model, KVCache.for_model(config, **pages), recurrent=self.state)
            return
        device, ops = CudaDevice("cuda"), cuda_ops(deterministic=deterministic)
        limits = ExecutorLimits(
            num_slots=NUM_SLOTS, pages_per_slot=PAGES_PER_SLOT, step_tokens=64, verify_tokens=VERIFY_TOKENS
        )
        if config.recurrent_pieces:
            self.state = DeviceRecurrentState(
                config.recurrent_pieces,
                NUM_SLOTS,
                device=device.torch_device,
                checkpoint_rows=limits.checkpoint_rows,
                scatter=ops.scatter_state,
            )
        kv_cache = KVCache.for_model(config, device=device.torch_device, **pages)
        kv_cache.fill_poison()
        self.executor = CudaExecutor(
            model,
            kv_cache,
            device=device,
            ops=ops,
            limits=limits,
            mode=attention_mode(model.dtype, deterministic=deterministic),
            recurrent=self.state,
            graphs=graphs,
            pad=pad,
        )

    @property
    def slabs(self) -> list[torch.Tensor]:
        return [] if self.state is None else self.state.slabs

    def clear(self, slot: int) -> None:
        for slab in self.slabs:
            slab[slot].zero_()

    def verify(self, rows: Sequence[tuple[int, int, list[int]]], verified: Sequence[int]) -> list[torch.Tensor]:
        """Logits and hidden rows, on the host."""
        output = self.executor.forward_verify(verifying(ragged_batch(rows, self.page_rows), verified))
        return [rows.cpu().float() for rows in (output.logits, output.hidden) if rows is not None]


def model_of(pair: TinyPair, dtype: str, device: str = "cuda") -> LoadedModel:
    return load_model(pair.model, dtype=dtype, device=device)


@torch.inference_mode()
def check_same(one: Bench, other: Bench, model: LoadedModel, *, tolerance: float, steps: int = 20) -> None:
    """Random steps with rewinds: the same logits, hidden rows and live state."""

    def begin(slot: int) -> None:
        one.clear(slot)
        other.clear(slot)

    plan = VerifyPlan(NUM_SLOTS, PAGE_SIZE * PAGES_PER_SLOT, VERIFY_TOKENS, model.config.vocab_size, begin)
    for _ in range(steps):
        rows, verified = plan.step(proposals=bool(plan.rng.random() < 0.8))
        ours, theirs = one.verify(rows, verified), other.verify(rows, verified)
        assert len(ours) == len(theirs) == 2
        slots, kept = plan.take_back(rows, verified)
        for bench in (one, other):
            bench.executor.rewind(slots, kept)
        for mine, wanted in zip([*ours, *one.slabs], [*theirs, *other.slabs], strict=True):
            torch.testing.assert_close(mine.cpu(), wanted.cpu(), atol=tolerance, rtol=tolerance)


def test_float32_equals_the_cpu_executor(pair: TinyPair) -> None:
    device, cpu = Bench(model_of(pair, "float32")), Bench(model_of(pair, "float32", "cpu"))
    for bench in (device, cpu):
        bench.executor.request_hidden(REQUEST)
    check_same(device, cpu, model_of(pair, "float32", "cpu"), tolerance=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_graphs_and_padding_change_no_bit_in_deterministic_mode(pair: TinyPair, dtype: str) -> None:
    model = model_of(pair, dtype)
    captured = Bench(model, deterministic=True)
    eager = Bench(model, deterministic=True, graphs=False, pad=False)
    for bench in (captured, eager):
        bench.executor.request_hidden(REQUEST)
    captured.executor.warm_up()
    graphs = captured.executor.runner
    assert isinstance(graphs, StepGraphs)
    assert graphs.refusal == ""
    before = len(graphs)
    check_same(captured, eager, model, tolerance=0.0)
    assert graphs.refusal == ""
    assert len(graphs) - before < 15  # steps with a chunk beside; the others were there


def test_graphs_change_no_bit_of_fast_steps(pair: TinyPair) -> None:
    """Both padded: the same launches, captured or not."""
    model = model_of(pair, "bfloat16")
    captured, eager = Bench(model), Bench(model, graphs=False)
    for bench in (captured, eager):
        bench.executor.request_hidden(REQUEST)
    check_same(captured, eager, model, tolerance=0.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@torch.inference_mode()
def test_verified_rows_have_the_bits_of_decode_rows(pair: TinyPair, dtype: str) -> None:
    """Deterministic mode: five tokens at once, beside another row, and one after the other; and what is taken back."""
    model = model_of(pair, dtype)
    prompt, tokens = list(range(3, 40)), [9, 200, 31, 31, 5]
    single, wide = Bench(model, deterministic=True), Bench(model, deterministic=True)
    for bench in (single, wide):
        bench.verify([(2, 0, prompt)], [])
    expected, states = [], []
    for place, token in enumerate(tokens):
        expected.append(single.verify([(2, len(prompt) + place, [token])], [])[0])
        states.append([slab[2].clone() for slab in single.slabs])
    (logits,) = wide.verify([(4, 0, [7, 8]), (2, len(prompt), tokens)], [0, 1])
    assert torch.equal(logits[2:], torch.cat(expected))
    for kept in (5, 2):
        wide.executor.rewind([2], [kept])
        assert all(torch.equal(slab[2], state) for slab, state in zip(wide.slabs, states[kept - 1], strict=True))


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the device is an error, as far as torch knows."""
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that it does not know everything
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_verification_and_the_way_back_never_wait(pair: TinyPair) -> None:
    bench = Bench(model_of(pair, "bfloat16"))
    bench.executor.request_hidden(REQUEST)
    bench.executor.warm_up()
    rows = [(2, 0, [1, 2, 3, 4, 5]), (1, 0, [6, 7])]
    for attempt in range(3):
        batch = verifying(ragged_batch(rows, bench.page_rows), [0, 1])
        with no_waiting():
            output = bench.executor.forward_verify(batch)
            bench.executor.rewind([2, 1], [1 + attempt, 1])
        assert output.hidden is not None
        assert bool(output.logits.isfinite().all())


def test_the_shape_of_a_large_model_verifies_in_graphs() -> None:
    """Heads of 128 dimensions, more rows than one tile: graphs and eager launches agree to the bit."""
    config = small_config(head_dim=128, num_layers=2, qk_norm=True)
    model = random_model(config, dtype=torch.bfloat16, device="cuda", seed=3, spread=0.05)
    captured, eager = Bench(model, deterministic=True), Bench(model, deterministic=True, graphs=False, pad=False)
    for bench in (captured, eager):
        bench.executor.request_hidden(REQUEST)
    check_same(captured, eager, model, tolerance=0.0, steps=10)


# ---- text -------------------------------------------------------------------------------------------------------

EXTRA = (("lookup", edgellm_lookup.decoder), ("hybrid", edgellm_hybrid.plugin), ("shared-kv", edgellm_shared_kv.plugin))
PROMPTS = [
    [1 + (index * 31 + place * 7) % 250 for place in range(length)] for index, length in enumerate((5, 41, 70, 18, 133))
]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture
def plugins_of_this_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_plugins(extra=EXTRA, autoload=False, strict=True)
    monkeypatch.setattr("edgellm.plugins.load_plugins", lambda: loaded)


def ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [list(output.token_ids) for output in outputs]


@pytest.mark.usefixtures("plugins_of_this_tree")
@pytest.mark.parametrize(("dtype", "deterministic"), [("float32", False), ("bfloat16", True)])
def test_the_text_is_that_of_plain_decoding(pair: TinyPair, dtype: str, deterministic: bool) -> None:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    options: dict[str, Any] = {
        "device": "cuda",
        "dtype": dtype,
        "deterministic": deterministic,
        "kv_budget": 4096,
        "page_size": PAGE_SIZE,
        "max_batch_size": NUM_SLOTS,
    }
    with LLM(pair.model, **options) as plain:
        wanted = ids(plain.generate(prompts, GREEDY))
    speculative = SpeculativeOptions(decoder=pair.decoder, num_drafts=4, adaptive=False)
    with LLM(pair.model, speculative=speculative, **options) as llm:
        assert ("state while verifying" in llm.memory_budget.describe()) == ("hybrid" in str(pair.model))
        HelpedDraft(llm, list(zip(PROMPTS, wanted, strict=True)))
        alone = [llm.generate([prompt], GREEDY, use_cache=False)[0] for prompt in prompts]
        together = llm.generate(prompts, GREEDY)
        again = llm.generate(prompts, GREEDY)
    assert ids(alone) == ids(together) == ids(again) == wanted
    accepted = sum(output.accepted_draft_tokens for output in together)
    assert sum(output.proposed_draft_tokens for output in together) > accepted > 6 * len(PROMPTS)


@pytest.mark.usefixtures("plugins_of_this_tree")
def test_prompt_lookup_as_it_is(pair: TinyPair) -> None:
    """Its own proposals: a text that repeats comes out of fewer steps."""
    params = SamplingParams(max_tokens=60, temperature=0.0, logit_bias={66: 100.0})
    lookup = SpeculativeOptions(decoder="prompt_lookup", adaptive=False)
    with LLM(pair.model, device="cuda", dtype="bfloat16", kv_budget=4096, speculative=lookup) as llm:
        output = llm.generate("abc", params)[0]
    assert output.token_ids == [66] * 60
    assert output.proposed_draft_tokens == output.accepted_draft_tokens > 45
