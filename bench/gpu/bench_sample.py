"""Microseconds to choose tokens on the device, against torch (softmax, sort, multinomial) and flashinfer.

Kernel times are of replayed CUDA graphs, the median of many; `step` is `Sampler.sample` as a decode step calls it, on
the wall clock, with its upload, its download and its wait.

    python bench/gpu/bench_sample.py [--rows 1 8 64] [--vocab 49152 151936]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from types import ModuleType

import torch

from edgellm.kernels.cu.logprobs import logprobs, logprobs_workspace
from edgellm.kernels.cu.sample import SampleRows, sample, sample_workspace
from edgellm.sampling.params import SamplingParams
from edgellm.sampling.sampler import Sampler, SamplingState

REPEATS = 30
SETTINGS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "plain draw": {},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
    "T 100, top-p 0.9": {"temperature": 100.0, "top_p": 0.9},
}


def graph_us(run: Callable[[], object]) -> float:
    """Median time of one call, replayed."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return statistics.median(times)


def wall_us(run: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def sample_rows(num_rows: int, setting: dict[str, float]) -> SampleRows:
    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((num_rows,), setting.get(name, default), dtype=dtype, device="cuda")

    return SampleRows(
        temperature=column("temperature", 1.0, torch.float64),
        top_k=column("top_k", 0, torch.int32),
        top_p=column("top_p", 1.0, torch.float64),
        min_p=column("min_p", 0.0, torch.float64),
        seed=column("seed", 7, torch.int64),
        position=torch.arange(num_rows, device="cuda"),
    )


def ours(logits: torch.Tensor, setting: dict[str, float]) -> Callable[[], object]:
    num_rows, vocab_size = logits.shape
    rows, token_ids = sample_rows(num_rows, setting), torch.zeros(num_rows, dtype=torch.int32, device="cuda")
    workspace = torch.zeros(sample_workspace(num_rows, vocab_size), dtype=torch.uint8, device="cuda")
    filters = "top_k" in setting or "top_p" in setting
    draws = setting.get("temperature") != 0.0
    return lambda: sample(logits, rows, token_ids, workspace, filters=filters, draws=draws)


def by_torch(logits: torch.Tensor, setting: dict[str, float]) -> Callable[[], object]:
    """What engines without kernels of their own do."""

    def run() -> torch.Tensor:
        if setting.get("temperature") == 0.0:
            return logits.argmax(dim=1)
        values, ids = logits.sort(dim=1, descending=True)
        if "top_k" in setting:
            values[:, int(setting["top_k"]) :] = -float("inf")
        probabilities = (values / setting.get("temperature", 1.0)).softmax(dim=1)
        if "top_p" in setting:
            probabilities[probabilities.cumsum(1) - probabilities > setting["top_p"]] = 0.0
        if "min_p" in setting:
            probabilities[probabilities < setting["min_p"] * probabilities[:, :1]] = 0.0
        return ids.gather(1, torch.multinomial(probabilities, 1))

    return run


def flashinfer_sampling() -> ModuleType | None:
    """flashinfer's module if it is installed and its kernels can be built here."""
    try:
        from flashinfer import sampling

        sampling.top_p_sampling_from_probs(torch.full((1, 8), 0.125, device="cuda"), 0.9)
    except Exception as error:  # it compiles on first use, and raises whatever its tools raise
        print(f"without flashinfer: {type(error).__name__}: {str(error)[:200]}")
        return None
    return sampling


def by_flashinfer(
    sampling: ModuleType | None, logits: torch.Tensor, setting: dict[str, float]
) -> Callable[[], object] | None:
    top_k, top_p, min_p = setting.get("top_k"), setting.get("top_p"), setting.get("min_p")
    if sampling is None or setting.get("temperature") == 0.0:
        return None
    if top_k and top_p:
        return lambda: sampling.top_k_top_p_sampling_from_probs(logits.softmax(1), int(top_k), top_p)
    if top_k:
        return lambda: sampling.top_k_sampling_from_probs(logits.softmax(1), int(top_k))
    if top_p:
        return lambda: sampling.top_p_sampling_from_probs(logits.softmax(1), top_p)
    if min_p:
        return lambda: sampling.min_p_sampling_from_probs(logits.softmax(1), min_p)
    return lambda: sampling.sampling_from_probs(logits.softmax(1))


def step_us(logits: torch.Tensor, setting: dict[str, float]) -> float:
    num_rows, vocab_size = logits.shape
    known = {"top_k": int} | dict.fromkeys(("temperature", "top_p", "min_p"), float)
    params = SamplingParams(seed=7, **{name: known[name](value) for name, value in setting.items()})
    states = [SamplingState(params, [0] * (row + 1), vocab_size) for row in range(num_rows)]
    sampler = Sampler()
    sampler.sample(logits, states)
    return wall_us(lambda: sampler.sample(logits, states))


def logprobs_us(logits: torch.Tensor, num_top: int) -> float:
    num_rows, vocab_size = logits.shape
    token_ids = torch.zeros(num_rows, dtype=torch.int32, device="cuda")
    chosen = torch.zeros(num_rows, dtype=torch.float64, device="cuda")
    values = torch.zeros(num_rows, num_top, dtype=torch.float64, device="cuda")
    ids = torch.zeros(num_rows, num_top, dtype=torch.int32, device="cuda")
    workspace = torch.zeros(logprobs_workspace(num_rows, vocab_size), dtype=torch.uint8, device="cuda")
    return graph_us(lambda: logprobs(logits, token_ids, chosen, values, ids, workspace))


def model_like_logits(num_rows: int, vocab_size: int) -> torch.Tensor:
    """Normal numbers with a few tokens far above the rest, as a language model's rows have them."""
    logits = torch.randn(num_rows, vocab_size, device="cuda") * 2.5
    favourites = torch.randint(vocab_size, (num_rows, 40), device="cuda")
    return logits.scatter(1, favourites, torch.rand(num_rows, 40, device="cuda") * 8 + 9)


def measure(name: str, logits: torch.Tensor, setting: dict[str, float], label: str, peers: ModuleType | None) -> None:
    mine, torch_us = graph_us(ours(logits, setting)), wall_us(by_torch(logits, setting))
    peer = by_flashinfer(peers, logits, setting)
    other = f"{wall_us(peer):9.1f}" if peer is not None else "        -"
    num_rows, vocab_size = logits.shape
    step = step_us(logits, setting)
    print(
        f"{label:10} {name:20} V={vocab_size:6} rows={num_rows:3}  kernels {mine:7.1f} us  step {step:7.1f}"
        f"  torch {torch_us:8.1f}  flashinfer {other}  torch/ours {torch_us / mine:6.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--vocab", type=int, nargs="+", default=[49_152, 151_936])
    options = parser.parse_args()
    torch.manual_seed(1)
    peers = flashinfer_sampling()
    for vocab_size in options.vocab:
        for num_rows in options.rows:
            kinds = {
                "model-like": model_like_logits(num_rows, vocab_size),
                "normal": torch.randn(num_rows, vocab_size, device="cuda"),
            }
            for label, logits in kinds.items():
                for name, setting in SETTINGS.items():
                    measure(name, logits, setting, label, peers)
            print(
                f"logprobs   top 20               V={vocab_size:6} rows={num_rows:3}  {logprobs_us(logits, 20):7.1f} us"
            )


if __name__ == "__main__":
    main()
