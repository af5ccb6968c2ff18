"""Host time of a speculative round beside that of a plain step: kernels and graphs that do nothing, on the CPU.

    export PYTHONPATH=.:tests:$(echo plugins/*/src | tr ' ' ':')
    python bench/bench_round_host.py [--batches 1 8] [--drafts eagle shared_kv mtp] [--profile idle]

Everything above the kernels is the real code of a GPU deployment: engine, session, pages, lowering, staging, the device
passes of the draft, the device sampler.  A launch, a copy to the device and a wait cost what they cost on the CPU,
which is less than on a GPU.  All tokens are 0, so every proposal is kept.  Rounds are timed from one `run_step` to the
next, in CPU time; plain and speculative engines take turns, and ratios are of the best means.
"idle" is a draft that proposes nothing.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import tempfile
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import thread_time
from typing import Any

import torch
from reference_placement import ReferencePlacement, make_engine
from tiny_drafts import PAIRS, TinyPair

import edgellm.plugins
import edgellm_eagle.plugin
import edgellm_hybrid.plugin
import edgellm_shared_kv.plugin
from edgellm import Engine, SamplingParams, SpeculativeOptions
from edgellm.decoding.draft_memory import launching_nothing
from edgellm.models.device_attention import AttentionMode
from edgellm.sampling.device_sampler import DeviceSampler, SamplingOps
from edgellm.sampling.sampler import Sampler

TOKENS = 120
ROUNDS = 5
NUM_DRAFTS = 4
WAYS = {"eagle": "eagle", "mtp": "mtp", "shared_kv": "shared_kv"}


class NullRunner:
    """A graph runner whose replays take no time."""

    def run(self, key: Hashable, launch: Callable[[], None]) -> None:
        return

    def clear(self) -> None:
        return


class NullPlacement(ReferencePlacement):
    mode = AttentionMode.SPLIT

    def build_executor(self, *given: Any, **named: Any) -> Any:
        executor = super().build_executor(*given, **named)
        executor._ops = launching_nothing(executor._ops)  # what drafts compute with
        return executor


class ZeroSampler(Sampler):
    """The device sampler, its kernels replaced by none: token 0."""

    __slots__ = ("_device",)

    def __init__(self) -> None:
        super().__init__()
        nothing = partial(_nothing)
        ops = SamplingOps(nothing, lambda rows, vocab: 16, nothing, lambda rows, vocab: 16, nothing)
        self._device = DeviceSampler(torch.device("cpu"), ops)

    def sample(self, logits: torch.Tensor, rows: Any, *, beside: Any = None) -> Any:
        return self._device.sample(logits, rows, beside)


def _nothing(*given: Any, **named: Any) -> None:
    for tensor in given[2:3]:
        tensor.zero_()


class Idle:
    """Lengths that never propose."""

    def __init__(self, lengths: Any) -> None:
        self._lengths = lengths
        self._rounds = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lengths, name)

    def limits(self, slots: Any, most: Any, other_rows: int = 0) -> list[int]:
        self._lengths.limits(slots, most, other_rows)
        return [0] * len(slots)

    def rest(self, slots: Any, most: Any) -> bool:
        self._rounds += 1
        return self._rounds % 8 != 0

    def stay_idle(self, slots: Any, most: Any) -> bool:
        return True


class Timed:
    """An engine whose rounds are timed."""

    def __init__(self, pair: TinyPair, batch: int, way: str) -> None:
        speculative = None
        if way != "plain":
            adaptive = way == "idle"
            speculative = SpeculativeOptions(
                decoder=pair.decoder, draft=pair.draft, adaptive=adaptive, num_drafts=NUM_DRAFTS
            )
        self.batch = batch
        self.engine: Engine = make_engine(
            pair.model, NullPlacement, kv_budget=8192, max_batch_size=batch, page_size=32, speculative=speculative
        )
        runtime: Any = self.engine._frontend.open_runtime("bench")
        self.runtime = runtime
        runtime.sampler = ZeroSampler()
        _silence(runtime)
        if way == "idle":
            runtime.decoder._lengths = Idle(runtime.decoder._lengths)
        self.seconds: list[float] = []
        self._before: float | None = None
        self._run_step = runtime.decoder.run_step
        runtime.decoder.run_step = self._timed

    def _timed(self, executor: Any, batch: Any, sampler: Any, rows: Any) -> Any:
        now = thread_time()
        if batch.num_tokens != self.batch or not (batch.past_len > 0).all():
            self._before = None
        else:
            if self._before is not None:
                self.seconds.append(now - self._before)
            self._before = now
        return self._run_step(executor, batch, sampler, rows)

    def run(self) -> float:
        """Mean seconds of a round."""
        self.seconds.clear()
        self._before = None
        params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        self.engine.generate([f"prompt {number}" for number in range(self.batch)], params, use_cache=False)
        return statistics.fmean(self.seconds)


@torch.inference_mode()
def _silence(runtime: Any) -> None:
    """No launch does anything from now on."""
    runtime.executor._runner = NullRunner()
    runtime.executor._steps._runner = NullRunner()
    for name in ("_passes", "_rounds"):
        staging = getattr(getattr(runtime.decoder, name, None), "_staging", None)
        if staging is not None:
            staging._runner = NullRunner()
    for memory in (getattr(getattr(runtime.decoder, "_passes", None), "_rows", None),):
        if memory is not None:
            memory.chains.zero_()
    if hasattr(getattr(runtime.decoder, "_rounds", None), "_chains"):
        runtime.decoder._rounds._chains.zero_()


@contextmanager
def engines(pair: TinyPair, batch: int) -> Iterator[dict[str, Timed]]:
    made = {way: Timed(pair, batch, way) for way in ("plain", "idle", "drafts")}
    try:
        yield made
    finally:
        for timed in made.values():
            timed.engine.shutdown()


def measure(pair: TinyPair, batch: int) -> dict[str, float]:
    """Seconds of a round, the best mean of `ROUNDS` turns."""
    with engines(pair, batch) as made:
        found: dict[str, list[float]] = {way: [] for way in made}
        for _ in range(ROUNDS):
            for way, timed in made.items():
                found[way].append(timed.run())
    return {way: min(seconds) for way, seconds in found.items()}


def profile(pair: TinyPair, batch: int, way: str) -> None:
    timed = Timed(pair, batch, way)
    timed.run()
    profiler, execute = cProfile.Profile(), None
    actor_step = _actor_class()._step

    def step(self: Any) -> Any:
        profiler.enable()
        try:
            return actor_step(self)
        finally:
            profiler.disable()

    _actor_class()._step = step
    for _ in range(6):
        timed.run()
    del execute
    _actor_class()._step = actor_step
    pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
    timed.engine.shutdown()


def _actor_class() -> Any:
    import edgellm.engine.actor as actor

    return next(found for found in vars(actor).values() if isinstance(found, type) and hasattr(found, "_boundary"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--drafts", nargs="+", default=["eagle", "shared_kv", "mtp"])
    parser.add_argument("--profile", choices=("plain", "idle", "drafts"))
    options = parser.parse_args()
    plugins = [("e", edgellm_eagle.plugin), ("h", edgellm_hybrid.plugin), ("s", edgellm_shared_kv.plugin)]
    load = partial(edgellm.plugins.load_plugins, extra=plugins, autoload=False, strict=True)()
    edgellm.plugins.load_plugins = lambda: load
    print(f"{'draft':10} {'N':>2} {'plain us':>9} {'idle us':>9} {'ratio':>6} {'drafts us':>9} {'ratio':>6}")
    for name in options.drafts:
        with tempfile.TemporaryDirectory() as folder:
            pair = PAIRS[name](Path(folder))
            for batch in options.batches:
                if options.profile:
                    profile(pair, batch, options.profile)
                    continue
                us = {way: seconds * 1e6 for way, seconds in measure(pair, batch).items()}
                idle, drafts = us["idle"] / us["plain"], us["drafts"] / us["plain"]
                print(
                    f"{name:10} {batch:2} {us['plain']:9.0f} {us['idle']:9.0f} {idle:6.2f} "
                    f"{us['drafts']:9.0f} {drafts:6.2f}"
                )


if __name__ == "__main__":
    main()
