"""Many callers on a GPU in too small a pool: cancels, deadlines, eviction, and poison in every free page.

What completes must be, to the token, what the same prompt gives alone; the same run passes on the CPU.
"""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellm import Engine, SamplingParams
from edgellm.cache.types import ResourceType
from edgellm.errors import RequestCancelled, RequestTimedOut
from edgellm.testing.recount import recount

PAGE_SIZE = 16
POOL_TOKENS = 1024
VOCAB = 257
CALLERS = 6
PREFIXES = 4


class PoisonedFreePages:
    """An executor that fills every page that nobody leases or retains with NaN before each step."""

    def __init__(self, runtime: Any) -> None:
        self._inner = runtime.executor
        self._pools = runtime.coordinator.manager.pools
        self.poisoned = 0
        self.bad_rows = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, batch: Any) -> Any:
        free = np.array(self._pools.pool(ResourceType.BASE_KV_PAGE).free_list(), np.int32)
        if len(free):
            self._inner.kv_cache.fill_poison(free)
            self.poisoned += len(free)
        logits = self._inner.forward(batch)
        self.bad_rows += int(logits.isnan().any(dim=-1).sum())
        return logits


def make_prompts(dice: random.Random, count: int) -> list[list[int]]:
    """Some share one of a few beginnings, some do not; none fits more than a few times into the pool."""
    prefixes = [[dice.randrange(1, VOCAB) for _ in range(dice.randrange(40, 150))] for _ in range(PREFIXES)]
    return [
        [*(dice.choice(prefixes) if dice.random() < 0.6 else []), *(dice.randrange(1, VOCAB) for _ in range(tail))]
        for tail in (dice.randrange(1, 70) for _ in range(count))
    ]


def run_callers(engine: Engine, jobs: list[tuple[list[int], int]], dice: random.Random, alone: list[list[int]]) -> int:
    """Submit every job from one of several threads; returns how many completed.  Raises what differs."""
    plans = [(index, dice.random(), dice.uniform(0.0, 0.02)) for index in range(len(jobs))]
    completed, lock = [0], threading.Lock()

    def one(plan: tuple[int, float, float]) -> None:
        index, fate, pause = plan
        prompt, length = jobs[index]
        params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
        timeout = pause if fate > 0.85 else None
        request = engine.submit(prompt, params, timeout_seconds=timeout, stream=fate < 0.5)
        seen: list[int] = []
        try:
            if fate < 0.5:
                for chunk in request.stream().chunks():
                    seen += chunk.token_ids
                    if fate < 0.2 and len(seen) > 3:
                        request.cancel()
            elif fate < 0.65:
                time.sleep(pause)
                request.cancel()
            output = request.get(60.0)
        except (RequestCancelled, RequestTimedOut):
            assert seen == alone[index][: len(seen)]
            return
        assert list(output.token_ids) == alone[index][: len(output.token_ids)]
        if len(output.token_ids) == length:
            with lock:
                completed[0] += 1

    with ThreadPoolExecutor(CALLERS) as pool:
        for _ in pool.map(one, plans):
            pass
    return completed[0]


def stress(folder: Path, *, device: str, requests: int, seed: int, **options: Any) -> None:
    dice = random.Random(seed)
    jobs = [(prompt, dice.randrange(4, 40)) for prompt in make_prompts(dice, requests)]
    with Engine(
        folder, device=device, kv_budget=POOL_TOKENS, page_size=PAGE_SIZE, max_batch_size=6, **options
    ) as engine:
        runtime = engine._runtime
        assert runtime is not None
        runtime.executor = watch = PoisonedFreePages(runtime)  # type: ignore[assignment]
        alone = [
            list(engine.generate([prompt], SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True),
                                 use_cache=False)[0].token_ids)
            for prompt, length in jobs
        ]  # fmt: skip
        completed = run_callers(engine, jobs, dice, alone)
        deadline = time.monotonic() + 10
        while (engine.metrics().pending or engine.metrics().resident) and time.monotonic() < deadline:
            time.sleep(0.005)
        metrics = engine.metrics()
        assert recount(runtime.coordinator).leased == 0
    assert completed > requests // 4
    assert watch.poisoned > 0
    assert watch.bad_rows == 0
    assert metrics.engine.cancelled > 0
    assert metrics.engine.failed == 0
    assert metrics.engine.session_reopens == 0
    assert metrics.cache.reused_tokens > 0
    assert metrics.cache.evicted_records > 0


def test_the_stress_run_itself_on_the_cpu(tiny_model_dir: Path) -> None:
    stress(tiny_model_dir, device="cpu", requests=24, seed=1, dtype="float32")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
def test_float32_answers_are_those_of_a_solo_run(tiny_model_dir: Path, seed: int) -> None:
    stress(tiny_model_dir, device="cuda", requests=150, seed=seed, dtype="float32")


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_deterministic_16_bit_answers_are_those_of_a_solo_run(
    tmp_path_factory: pytest.TempPathFactory, kv_dtype: str
) -> None:
    from tiny_model import write_tiny_llama

    folder = write_tiny_llama(tmp_path_factory.mktemp("half"), head_dim=64, hidden_size=128)
    options = {"dtype": "bfloat16", "kv_dtype": kv_dtype, "deterministic": True}
    stress(folder, device="cuda", requests=150, seed=7, **options)
