"""One long prompt enters beside running streams: how long do the streams wait between two tokens?

    python bench/long_prompt_beside_streams.py                      # the default model, 8 streams, 6,000 tokens
    python bench/long_prompt_beside_streams.py --budget-ms 300 --repeat 3

Each round runs the same traffic with and without the step-time budget, in turn, on engines that differ in nothing
else.  Gaps between two tokens of the streams are those of a caller (a task of an event loop), cut into three phases:
before the prompt is submitted, until its first token, and after.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
from dataclasses import dataclass, field
from time import perf_counter

import torch

from edgellm import AsyncEngine, SamplingParams, __version__
from edgellm.bench_serve.measure import Spread
from edgellm.fetch import DEFAULT_MODEL

PHASES = ("before", "during", "after")
VOCAB = 40_000


@dataclass(slots=True)
class Round:
    """Gaps in seconds by phase, and seconds to the first token of the long prompt."""

    gaps: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    first_token: float = 0.0


def make_engine(options: argparse.Namespace, budget: float | None) -> AsyncEngine:
    return AsyncEngine(
        options.model,
        kv_budget=options.prompt + options.streams * (options.stream_prompt + options.answer) + 2048,
        page_size=options.page_size,
        max_batch_size=options.streams + 1,
        max_model_len=min(8192, options.prompt + 512),
        step_time_budget_ms=budget,
    )


async def play(engine: AsyncEngine, options: argparse.Namespace, seed: int) -> Round:
    rng = random.Random(seed)
    result = Round()
    marks = {"submitted": float("inf"), "first": float("inf")}
    decoding = asyncio.Event()
    started = 0

    async def stream(prompt: list[int]) -> None:
        nonlocal started
        params = SamplingParams(max_tokens=options.answer, temperature=0.0, ignore_eos=True)
        last = 0.0
        async for chunk in engine.stream(prompt, params, use_cache=False).chunks():
            now = perf_counter()
            if last and chunk.token_ids:
                phase = 0 if now <= marks["submitted"] else 1 if last < marks["first"] else 2
                # A gap counts where it ends; all streams must be decoding.
                if decoding.is_set():
                    result.gaps[PHASES[phase]].append(now - last)
            elif chunk.token_ids:
                started += 1
                if started == options.streams:
                    decoding.set()
            last = now if chunk.token_ids else last
            if marks["first"] < now - options.tail_seconds:
                break

    async def long_prompt() -> None:
        await decoding.wait()
        await asyncio.sleep(options.lead_seconds)
        marks["submitted"] = perf_counter()
        prompt = [rng.randrange(3, VOCAB) for _ in range(options.prompt)]
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        async for _ in engine.stream(prompt, params, use_cache=False).chunks():
            break
        marks["first"] = perf_counter()
        result.first_token = marks["first"] - marks["submitted"]

    prompts = [[rng.randrange(3, VOCAB) for _ in range(options.stream_prompt)] for _ in range(options.streams)]
    await asyncio.gather(long_prompt(), *(stream(prompt) for prompt in prompts))
    return result


async def measure(options: argparse.Namespace) -> None:
    budgets = [None, options.budget_ms]
    engines = {budget: make_engine(options, budget) for budget in budgets}
    rounds: dict[float | None, list[Round]] = {budget: [] for budget in budgets}
    try:
        for engine in engines.values():
            await engine.start()
            params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
            await engine.generate(list(range(3, 3 + 600)), params, use_cache=False)  # first steps touch the weights
        for number in range(options.repeat):
            for budget in budgets:
                rounds[budget].append(await play(engines[budget], options, seed=number))
        for budget in budgets:
            report(budget, rounds[budget], engines[budget])
    finally:
        for engine in engines.values():
            await engine.shutdown(drain=False)


def report(budget: float | None, rounds: list[Round], engine: AsyncEngine) -> None:
    print(f"\n{'no budget' if budget is None else f'step-time budget {budget:g} ms'}")
    print(f"  {'gaps of the streams, ms':24s} {'count':>6s} {'p50':>8s} {'p90':>8s} {'p99':>8s} {'max':>8s}")
    for phase in PHASES:
        spread = Spread.of([gap for one in rounds for gap in one.gaps[phase]])
        print(
            f"  {phase:24s} {spread.count:6d} {spread.p50:8.1f} {spread.p90:8.1f} {spread.p99:8.1f} {spread.max:8.1f}"
        )
    print(f"  first token of the long prompt, s: {', '.join(f'{one.first_token:.1f}' for one in rounds)}")
    metrics = engine.metrics().engine
    if metrics.budget_steps:
        print(
            f"  steps under the budget: {metrics.budget_steps}, {metrics.steps_over_budget} took longer than it; "
            f"expected {metrics.budget_predicted_us / 1e6:.1f} s in all, took {metrics.budget_measured_us / 1e6:.1f} s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--stream-prompt", type=int, default=64)
    parser.add_argument("--answer", type=int, default=2000, help="tokens a stream may generate at most")
    parser.add_argument("--prompt", type=int, default=6000)
    parser.add_argument("--budget-ms", type=float, default=500.0)
    parser.add_argument("--page-size", type=int, default=16, help="a step takes at least a page of the prompt")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--lead-seconds", type=float, default=3.0)
    parser.add_argument("--tail-seconds", type=float, default=3.0)
    options = parser.parse_args()
    print(
        f"edgellm {__version__}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, load average {os.getloadavg()[0]:.1f}"
    )
    print(f"{options.streams} streams, a prompt of {options.prompt} tokens, model {options.model}")
    asyncio.run(measure(options))


if __name__ == "__main__":
    main()
