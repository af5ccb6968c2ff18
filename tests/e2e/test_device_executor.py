"""Engine, session, cache and the CUDA executor together, its kernels replaced by their references, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import edgellm_lookup.decoder
from edgellm import Engine, SamplingParams
from edgellm.assembly import LoadOptions, connect
from edgellm.errors import RequestCancelled, UnsupportedModelError
from edgellm.models.device_ops import reference_ops
from edgellm.plugins import load_plugins
from edgellm.runtime.device import CpuDevice
from edgellm.runtime.executor_cuda import CudaExecutor, ExecutorLimits, attention_mode
from edgellm.runtime.kv_cache import KVCache
from edgellm.runtime.placement import CpuPlacement
from edgellm.testing.recount import recount
from edgellm.tokenization.tokenizer import load_tokenizer

PAGE_SIZE = 8
KV_TOKENS = 384


class ReferencePlacement(CpuPlacement):
    """The CPU with the CUDA executor on it; steps of at most 32 prompt tokens, so that prompts run in chunks."""

    step_tokens = 32

    def build_executor(
        self, model: Any, budget: Any, deployment: Any, draft: Any = None, draft_cache: Any = None
    ) -> Any:
        kv_cache = KVCache.for_model(model.config, num_pages=budget.num_pages, page_size=budget.page_size)
        kv_cache.fill_poison()
        limits = ExecutorLimits(
            num_slots=deployment.max_batch_size, pages_per_slot=deployment.pages_per_slot, step_tokens=40
        )
        mode = attention_mode(model.dtype, deterministic=False)
        return CudaExecutor(model, kv_cache, device=CpuDevice(), ops=reference_ops(), limits=limits, mode=mode)


@pytest.fixture(scope="module")
def engines(tiny_model_dir: Path) -> Iterator[tuple[Engine, Engine]]:
    """(over the CUDA executor with references, over the CPU executor); the same weights and options."""
    options = LoadOptions(
        tiny_model_dir, device="cpu", dtype="float32", kv_budget=KV_TOKENS, page_size=PAGE_SIZE, max_batch_size=3
    )
    made = []
    for placement in (ReferencePlacement(options.placement_options()), CpuPlacement(options.placement_options())):
        model = placement.load_model(tiny_model_dir, None)
        made.append(Engine.from_parts(connect(options, placement, model, load_tokenizer(tiny_model_dir))))
    yield made[0], made[1]
    for engine in made:
        engine.shutdown()


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


PROMPTS = [
    [1 + (index * 31 + place * 7) % 250 for place in range(length)] for index, length in enumerate((5, 41, 70, 18))
]


def test_batched_chunked_and_reused_answers_equal_those_of_the_cpu_executor(engines: tuple[Engine, Engine]) -> None:
    """More prompts than seats, chunks beside decode rows, a shared beginning, and the same prompts again."""
    prompts = [*PROMPTS, [*PROMPTS[2][:50], 9, 9, 9]]
    ours, theirs = (
        [[output.token_ids for output in engine.generate(prompts, greedy(12))] for _ in range(2)] for engine in engines
    )
    assert ours == theirs
    assert ours[0] == ours[1]
    reused = engines[0].metrics().cache.reused_tokens
    assert reused == engines[1].metrics().cache.reused_tokens > 0


def test_sampling_and_logprobs_pass_through(engines: tuple[Engine, Engine]) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.9, top_p=0.8, seed=11, logprobs=2, ignore_eos=True)
    ours, theirs = (engine.generate(PROMPTS[:2], params) for engine in engines)
    assert [output.token_ids for output in ours] == [output.token_ids for output in theirs]
    assert all(output.logprobs is not None and len(output.logprobs) == 8 for output in ours)


def test_a_cancelled_stream_gives_its_pages_back(engines: tuple[Engine, Engine]) -> None:
    engine = engines[0]
    request = engine.submit(PROMPTS[1], greedy(200), stream=True)
    chunks = request.stream().chunks()
    assert next(chunks).token_ids
    request.cancel()
    with pytest.raises(RequestCancelled):
        request.get(30.0)
    engine.generate([PROMPTS[0]], greedy(2))  # the cancel is seen at a step boundary before this one ends
    assert engine._runtime is not None
    assert recount(engine._runtime.coordinator).leased == 0


def test_a_decoder_that_verifies_is_refused_where_the_executor_cannot(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_plugins(extra=(("lookup", edgellm_lookup.decoder),), autoload=False, strict=True)
    monkeypatch.setattr("edgellm.plugins.load_plugins", lambda: loaded)
    options = LoadOptions(tiny_model_dir, device="cpu", kv_budget=KV_TOKENS, speculative="prompt_lookup")
    placement = ReferencePlacement(options.placement_options())
    model = placement.load_model(tiny_model_dir, None)
    with pytest.raises(UnsupportedModelError, match=r"CudaExecutor cannot verify.*device='cpu'"):
        connect(options, placement, model, load_tokenizer(tiny_model_dir))
