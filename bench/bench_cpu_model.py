"""Tokens per second of `LLM.generate` on the default model, against transformers' `generate` in the same process.

    pytest bench/bench_cpu_model.py                        # times; ratios in extra_info
    pytest bench/bench_cpu_model.py --benchmark-disable    # smoke test: equal tokens

Peer: transformers on the same file, float32 weights, and with weights left packed where its kernels for that are
installed; the faster of the two counts.  llama.cpp is timed beside them where llama-cpp-python is installed (batch 1,
weights quantised as in the file).  `prefill` is a long prompt and one new token, `decode` a short prompt and many.
All get the same prompts; ours and float32 must choose the same tokens (near ties apart) before anything is timed.  The
peers' round is the `setup` of ours, so the rounds alternate.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch

from edgellm import LLM, SamplingParams
from edgellm.fetch import DEFAULT_MODEL, PACKAGED_MODELS, ensure_model

pytestmark = pytest.mark.model

BATCH_SIZES = (1, 8)
PROMPT_TOKENS = {"prefill": {1: 512, 8: 128}, "decode": {1: 16, 8: 16}}
NEW_TOKENS = {"prefill": 1, "decode": 32}
ROUNDS = 3
LOWEST_RATIO = 1.0
LLAMA_CPP = "llama_cpp"


class Ours:
    """What a user gets: `LLM.generate`, engine and sampler included; reuse off, so that every round computes all."""

    def __init__(self, path: Path) -> None:
        self.llm = LLM(path, dtype="float32", kv_budget=8 * 1024, max_batch_size=8)

    def generate(self, prompts: np.ndarray, num_new: int) -> np.ndarray:
        """(B, num_new) greedy tokens of (B, n) prompts."""
        params = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True)
        outputs = self.llm.generate([row.tolist() for row in prompts], params, use_cache=False)
        return np.array([output.token_ids for output in outputs])


class LlamaCpp:
    """llama.cpp through llama-cpp-python, where that is installed; one sequence, quantised weights as in the file."""

    def __init__(self, path: Path) -> None:
        from llama_cpp import Llama

        self.model = Llama(
            str(path), n_ctx=2048, n_batch=512, n_threads=torch.get_num_threads(), logits_all=False, verbose=False
        )

    def generate(self, prompts: np.ndarray, num_new: int) -> np.ndarray:
        self.model.reset()
        tokens = self.model.generate(prompts[0].tolist(), temp=0.0, reset=True)
        return np.array([[next(tokens) for _ in range(num_new)]])


class Transformers:
    """`generate` of transformers, greedy, never stopping early."""

    def __init__(self, path: Path, **options: Any) -> None:
        from transformers import AutoModelForCausalLM

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **options).eval()
        self.form = type(self.model.model.layers[0].self_attn.q_proj).__name__

    def generate(self, prompts: np.ndarray, num_new: int) -> np.ndarray:
        ids = torch.from_numpy(prompts)
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_new,
                min_new_tokens=num_new,
                do_sample=False,
                pad_token_id=2,
            )
        return out[:, ids.shape[1] :].numpy()


@pytest.fixture(scope="module")
def default_model() -> Path:
    """The default model's GGUF file; fetched on first use."""
    return ensure_model(PACKAGED_MODELS[DEFAULT_MODEL])


@pytest.fixture(scope="module")
def ours(default_model: Path) -> Iterator[Ours]:
    ours = Ours(default_model)
    yield ours
    ours.llm.close()


@pytest.fixture(scope="module")
def peers(default_model: Path) -> dict[str, Any]:
    """Float32, the packed form where it differs, and llama.cpp where it is installed."""
    plain = Transformers(default_model, dtype=torch.float32)
    packed = Transformers(default_model)
    found: dict[str, Any] = {"float32": plain}
    if packed.form != plain.form:
        found["packed"] = packed
    if importlib.util.find_spec("llama_cpp") is not None:
        found[LLAMA_CPP] = LlamaCpp(default_model)
    return found


def make_prompts(batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(batch).integers(100, 40000, (batch, length))


def share_of_equal_tokens(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Share of steps up to each row's first difference: a near tie ends a row's comparison."""
    differs = ours != theirs
    first = np.where(differs.any(1), differs.argmax(1), ours.shape[1])
    return float(first.sum()) / ours.size


@pytest.mark.parametrize("batch", BATCH_SIZES)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_tokens_per_second(benchmark: Any, ours: Ours, peers: dict[str, Any], phase: str, batch: int) -> None:
    prompts, num_new = make_prompts(batch, PROMPT_TOKENS[phase][batch]), NEW_TOKENS[phase]
    expected = peers["float32"].generate(prompts, num_new)
    # Random prompts leave the first choice open; with min_new_tokens the end token is barred for the peer only.
    if benchmark.disabled:
        assert share_of_equal_tokens(benchmark(ours.generate, prompts, num_new), expected) > 0.8
        return
    assert share_of_equal_tokens(ours.generate(prompts, num_new), expected) > 0.8
    if batch > 1:
        peers = {name: peer for name, peer in peers.items() if name != LLAMA_CPP}
    times: dict[str, list[float]] = {name: [] for name in (*peers, "ours")}

    def peer_round() -> None:
        for name, peer in peers.items():
            start = perf_counter()
            peer.generate(prompts, num_new)
            times[name].append(perf_counter() - start)

    def our_round() -> None:
        start = perf_counter()
        ours.generate(prompts, num_new)
        times["ours"].append(perf_counter() - start)

    benchmark.pedantic(our_round, setup=peer_round, rounds=ROUNDS, iterations=1)
    tokens = prompts.size if phase == "prefill" else batch * num_new
    rates = {name: tokens / min(seconds) for name, seconds in times.items()}
    ratio = rates["ours"] / max(rate for name, rate in rates.items() if name not in ("ours", LLAMA_CPP))
    benchmark.extra_info.update(
        {f"{name}_tokens_per_s": round(rate, 1) for name, rate in rates.items()},
        ratio=round(ratio, 2),
        ratio_llama_cpp=round(rates["ours"] / rates[LLAMA_CPP], 2) if LLAMA_CPP in rates else None,
        batch=batch,
        threads=torch.get_num_threads(),
        dtype="float32",
    )
    assert ratio >= LOWEST_RATIO
