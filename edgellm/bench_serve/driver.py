"""Plays a workload against an engine: at its arrival times, or with a fixed number of clients."""

from __future__ import annotations

import asyncio
from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING

from edgellm.bench_serve.measure import Outcome, Sample
from edgellm.errors import AdmissionError, EdgeLLMError, InvalidArgumentError, SubmitError
from edgellm.sampling.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edgellm.async_engine import AsyncEngine
    from edgellm.bench_serve.workload import PlannedRequest

REFUSALS = (AdmissionError, InvalidArgumentError, SubmitError)


async def play(
    engine: AsyncEngine,
    workload: Sequence[PlannedRequest],
    *,
    clients: int | None = None,
    timeout_seconds: float | None = None,
    on_done: Callable[[Sample], None] | None = None,
) -> list[Sample]:
    """Send every request and read its stream to the end.

    Args:
        clients: so many send one request after the other, in order (closed loop); None sends each at its arrival,
            whatever runs (open loop).
        timeout_seconds: of each request.
        on_done: called as each request ends.
    Returns:
        One sample a request, in the workload's order.
    Raises:
        InvalidArgumentError: fewer than 1 client.
    """
    if clients is not None and clients < 1:
        raise InvalidArgumentError(f"--clients is {clients}; it must be at least 1")
    await engine.start()
    start = perf_counter()
    samples = [Sample(due=0.0 if clients else request.arrival) for request in workload]
    waiting = deque(zip(workload, samples, strict=True))

    async def ask(request: PlannedRequest, sample: Sample) -> None:
        await _ask(engine, request, sample, start, timeout_seconds)
        if on_done is not None:
            on_done(sample)

    async def client() -> None:
        while waiting:
            request, sample = waiting.popleft()
            sample.due = perf_counter() - start
            await ask(request, sample)

    async def arrive(request: PlannedRequest, sample: Sample) -> None:
        await asyncio.sleep(start + request.arrival - perf_counter())
        await ask(request, sample)

    running = [client() for _ in range(clients)] if clients else [arrive(*entry) for entry in waiting]
    await asyncio.gather(*running)
    return samples


async def warm_up(engine: AsyncEngine, requests: int, vocab_size: int) -> None:
    """Run some requests that leave nothing in the cache: first steps touch weights and scratch memory."""
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    for index in range(requests):
        await engine.generate([(7 * index + step) % vocab_size for step in range(16)], params, use_cache=False)


async def _ask(
    engine: AsyncEngine, request: PlannedRequest, sample: Sample, start: float, timeout_seconds: float | None
) -> None:
    params = SamplingParams(max_tokens=request.output_tokens, temperature=0.0, ignore_eos=True)
    stream = engine.stream(request.prompt, params, timeout_seconds=timeout_seconds)
    sample.sent = perf_counter() - start
    try:
        async for chunk in stream.chunks():
            now = perf_counter() - start
            sample.token_times += [now] * len(chunk.token_ids)
        sample.finished = perf_counter() - start
        output = await stream.output()
    except EdgeLLMError as error:
        sample.finished = perf_counter() - start
        refused = isinstance(error, REFUSALS) and not sample.token_times
        sample.outcome = Outcome.REFUSED if refused else Outcome.FAILED
        sample.error = f"{type(error).__name__}: {error}"
        return
    sample.outcome = Outcome.COMPLETED
    sample.prompt_tokens = output.reuse.prompt_tokens
    sample.reused_tokens = output.reuse.reused_tokens
    sample.queue_seconds = output.timings.queue_ms / 1000.0
