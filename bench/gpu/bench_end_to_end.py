"""End to end on a GPU with random weights: decode rate, 64 requests at once, time to the first token cold and warm.

Peers in the same run: transformers' eager decode captured in a CUDA graph over a static cache, and its continuous
batching.  Run: PYTHONPATH=.:bench/gpu python bench/gpu/bench_end_to_end.py --model 0.6B [--peers] [--seconds 120]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from random_engine import RandomEngine, make_engine, qwen3_config

from edgellm import SamplingParams
from edgellm.runtime.batch import RaggedBatch
from edgellm.runtime.bound_steps import StepKind

READ_GBPS = 4548.0  # what one H200 reads at best; other cards: --read-gbps
PAST = 512
NEW = 128


def say(model: str, what: str, **values: float) -> None:
    """One line: model, test, values."""
    shown = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
    print(f"{model:5} {what:62} {shown}", flush=True)


def prompt_of(length: int, seed: int, vocab: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, vocab, length).tolist()


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


class Ours:
    """Measurements of one engine."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        self.options = options
        self.vocab = qwen3_config(name).vocab_size
        started = time.perf_counter()
        self.random: RandomEngine = make_engine(
            name,
            device=options.device,
            dtype=options.dtype,
            max_batch_size=options.max_batch_size,
            max_model_len=options.longest + 512,
            kv_budget=options.kv_tokens,
            page_size=options.page_size,
            **({"deterministic": True} if options.deterministic else {}),
        )
        self.engine = self.random.engine
        say(name, "built: weights, pool, kernels, graphs", s=time.perf_counter() - started)
        print(f"{name:5} {self.engine.memory_budget.describe()}")

    def weight_fraction(self, tokens_per_second: float) -> float:
        """Of the rate at which the weights can be read at all, at batch 1."""
        return tokens_per_second * self.random.read_bytes / 1e9 / self.options.read_gbps

    def decode(self, batch: int) -> None:
        """Tokens per second of `batch` answers of equal length, engine and sampling included."""
        prompts = [prompt_of(PAST, seed, self.vocab) for seed in range(batch)]
        rates = []
        for _ in range(2):
            outputs = self.engine.generate(prompts, greedy(NEW), use_cache=False)
            started = max(output.timings.time_to_first_token_ms for output in outputs)
            ended = min(output.timings.total_ms for output in outputs)
            rates.append(batch * (NEW - 1) / (ended - started) * 1e3)
        rate = max(rates)
        say(
            self.name,
            f"decode, batch {batch}, past {PAST}, engine and all",
            tok_s=rate,
            ms_per_step=batch / rate * 1e3,
            **({"of_weight_read": self.weight_fraction(rate)} if batch == 1 else {}),
        )

    def executor_decode(self, batch: int, steps: int = 64) -> None:
        """The executor alone: forward, argmax, read; and the GPU's share of a step."""
        runtime = self.engine._runtime
        assert runtime is not None
        executor, table = runtime.executor, runtime.page_table
        rows = np.full((table.num_slots, table.pages_per_slot), -1, np.int32)
        pages = -(-(PAST + steps + 1) // self.options.page_size)
        for slot in range(batch):
            rows[slot, :pages] = np.arange(slot * pages, (slot + 1) * pages)
        tokens = [3] * batch
        step_times = []
        for step in range(steps):
            started = time.perf_counter()
            logits = executor.forward(decode_batch(tokens, PAST + step, rows))
            tokens = logits.argmax(dim=-1).tolist()
            step_times.append(time.perf_counter() - started)
        wall = statistics.median(step_times[8:]) * 1e3
        values = {"ms_per_step": wall, "tok_s": batch / wall * 1e3}
        if torch.cuda.is_available():
            values["gpu_ms"] = self.gpu_time(executor, batch)
            values["host_ms"] = self.host_time(executor, decode_batch(tokens, PAST + steps, rows))
        say(self.name, f"executor and argmax alone, batch {batch}, past {PAST}", **values)

    def gpu_time(self, executor: Any, batch: int) -> float:
        """Milliseconds of one replay of the batch's graph."""
        graphs = executor.runner._graphs
        kinds = [kind for kind in graphs if isinstance(kind, StepKind) and kind.shape.tokens == kind.shape.rows]
        graph = graphs[next(kind for kind in kinds if kind.shape.tokens == batch)]
        times = []
        for _ in range(3):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(20):
                graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 20)
        return statistics.median(times)

    def host_time(self, executor: Any, batch: RaggedBatch) -> float:
        """Milliseconds that `forward` keeps the host."""
        times = []
        for _ in range(50):
            started = time.perf_counter()
            executor.forward(batch)
            times.append(time.perf_counter() - started)
            torch.cuda.synchronize()
        return statistics.median(times) * 1e3

    def many(self, requests: int = 64) -> None:
        """Requests that arrive together, prompts of 128 to 1,024 tokens; then the same prompts again."""
        dice = random.Random(0)
        prompts = [prompt_of(dice.randint(128, 1024), 1000 + index, self.vocab) for index in range(requests)]
        for round_name in ("cold", "the same prompts again"):
            started = time.perf_counter()
            outputs = self.engine.generate(prompts, greedy(NEW))
            seconds = time.perf_counter() - started
            first = sorted(output.timings.time_to_first_token_ms for output in outputs)
            say(
                self.name,
                f"{requests} requests x {NEW} tokens, {sum(map(len, prompts))} prompt tokens, {round_name}",
                out_tok_s=requests * NEW / seconds,
                s=seconds,
                ttft_ms_p50=first[len(first) // 2],
                ttft_ms_max=first[-1],
            )

    def first_token(self, length: int, rounds: int = 15) -> None:
        """A long prompt cold; then by turns a short cold one, the long one and 93 new tokens, the long one again."""
        self._ttft(prompt_of(length, 1, self.vocab))  # compiles what this length needs
        prompt = prompt_of(length, 2, self.vocab)
        cold = self._ttft(prompt)
        times = [
            (
                self._ttft(prompt_of(100, 50_000 + seed, self.vocab)),
                self._ttft([*prompt, 5 + seed, *range(7, 99)]),
                self._ttft(prompt),
            )
            for seed in range(rounds)
        ]
        short, warm, again = map(statistics.median, zip(*times, strict=True))
        say(
            self.name,
            f"first token: {length} cold, {length} + 93 warm, {length} again, 100 cold",
            cold_ms=cold,
            warm_ms=warm,
            again_ms=again,
            short_ms=short,
            warm_over_short=warm / short,
            again_over_short=again / short,
        )

    def _ttft(self, prompt: list[int]) -> float:
        (output,) = self.engine.generate([{"prompt_token_ids": prompt}], greedy(2))
        return output.timings.time_to_first_token_ms

    def close(self) -> None:
        self.engine.shutdown()
        del self.engine, self.random
        torch.cuda.empty_cache()


def decode_batch(tokens: list[int], past: int, page_rows: np.ndarray) -> RaggedBatch:
    """One decode row a sequence, slots 0, 1, ..."""
    count = len(tokens)
    return RaggedBatch(
        token_ids=np.array(tokens, np.int32),
        positions=np.full(count, past, np.int32),
        query_start=np.arange(count + 1, dtype=np.int32),
        query_len=np.ones(count, np.int32),
        past_len=np.full(count, past, np.int32),
        state_index=np.arange(count, dtype=np.int32),
        page_rows=page_rows,
        logits_index=np.arange(count, dtype=np.int64),
        logits_to_seq=np.arange(count, dtype=np.int32),
    )


def run_ours(name: str, options: argparse.Namespace, left: Callable[[], float]) -> None:
    ours = Ours(name, options)
    try:
        tests: list[tuple[Callable[..., None], Any]] = [
            *((ours.executor_decode, batch) for batch in options.batches),
            *((ours.decode, batch) for batch in options.batches),
            (ours.many, options.requests),
            *((ours.first_token, length) for length in (4096, options.longest) if length <= options.longest),
        ]
        for test, argument in tests:
            if options.only and test.__name__ not in options.only:
                continue
            if left() < 5:
                say(name, f"time is up before {test.__name__}")
                break
            test(argument)
    finally:
        ours.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [f"{size}{kind}" for size in ("0.6B", "8B", "tiny") for kind in ("", "-int4", "-fp8")]
    parser.add_argument("--model", choices=names, nargs="+", default=["0.6B"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--seconds", type=float, default=120.0, help="Stop starting tests after so long.")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--longest", type=int, default=16_384)
    parser.add_argument("--max-batch-size", type=int, default=64)
    parser.add_argument("--kv-tokens", type=int, default=131_072)
    parser.add_argument("--page-size", type=int, default=32)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--only", nargs="+", help="Tests by name: executor_decode, decode, many, first_token.")
    parser.add_argument("--peers", action="store_true", help="Measure transformers in the same run.")
    parser.add_argument("--read-gbps", type=float, default=READ_GBPS)
    options = parser.parse_args()
    ends = time.perf_counter() + options.seconds
    if torch.cuda.is_available():
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name in options.model:
        run_ours(name, options, lambda: ends - time.perf_counter())
        if options.peers:
            from transformers_peer import run_peers

            run_peers(name, options, lambda: ends - time.perf_counter(), say)


if __name__ == "__main__":
    main()
