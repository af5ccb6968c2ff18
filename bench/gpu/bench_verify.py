"""What verifying proposals costs beside plain decoding, with random weights: 2, 5 or 8 tokens a row, and rewind.

Run: PYTHONPATH=.:bench/gpu python bench/gpu/bench_verify.py [--models 0.6B hybrid] [--batches 1 8]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from random_engine import qwen3_config

from edgellm.assembly import LoadOptions
from edgellm.cache.types import DeploymentConfig
from edgellm.models.config import ModelConfig, config_from_hf
from edgellm.runtime.batch import RaggedBatch
from edgellm.runtime.placement import DraftSizes, place
from edgellm.testing.random_model import random_model

PAST = 512
VERIFY_TOKENS = 8
# About two thousand million parameters: 18 gated delta nets and 6 attention layers.
HYBRID: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
# For a dry run without a GPU: the shape alone.
TINY: dict[str, Any] = {
    **HYBRID,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "layer_types": HYBRID["layer_types"][:4],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


def config_of(name: str) -> ModelConfig:
    if name in ("hybrid", "tiny-hybrid"):
        return config_from_hf(HYBRID if name == "hybrid" else TINY)
    return qwen3_config(name)


def make_executor(name: str, options: argparse.Namespace) -> tuple[Any, int]:
    """An executor that verifies up to `VERIFY_TOKENS` tokens a row, and pages of a slot; prints where memory goes."""
    batch = max(options.batches)
    load = LoadOptions("random", device=options.device, dtype=options.dtype, max_batch_size=batch, kv_budget=16_384)
    placement, config = place(load.device, load.placement_options()), config_of(name)
    model = random_model(config, dtype=getattr(torch, options.dtype), device=options.device)
    draft = DraftSizes(verify_tokens=VERIFY_TOKENS)
    budget = placement.size_pool(model, 2048, draft)
    print(f"{name:12} {budget.describe()}")
    deployment = DeploymentConfig(
        max_batch_size=batch,
        max_input_length=2048,
        max_kv_capacity=2048,
        page_size=budget.page_size,
        num_pages=budget.num_pages,
    )
    return placement.build_executor(model, budget, deployment, draft), deployment.pages_per_slot


def verify_batch(rows: int, tokens: int, page_size: int, table: tuple[int, int]) -> RaggedBatch:
    """`rows` rows of `tokens` tokens behind PAST, all of whose logits are wanted; slots 0, 1, ..."""
    count = rows * tokens
    needed = -(-(PAST + VERIFY_TOKENS) // page_size)
    starts = np.arange(0, count + 1, tokens, dtype=np.int32)
    pages = np.full(table, -1, np.int32)
    pages[:rows, :needed] = np.arange(rows * needed).reshape(rows, needed)
    return RaggedBatch(
        token_ids=np.arange(2, count + 2, dtype=np.int32),
        positions=np.tile(np.arange(PAST, PAST + tokens, dtype=np.int32), rows),
        query_start=starts,
        query_len=np.full(rows, tokens, np.int32),
        past_len=np.full(rows, PAST, np.int32),
        state_index=np.arange(rows, dtype=np.int32),
        page_rows=pages,
        logits_index=np.arange(count, dtype=np.int64),
        logits_to_seq=np.repeat(np.arange(rows, dtype=np.int32), tokens),
    )


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    """Of one call, the best of three rounds; host and device overlap as they do in a session."""
    times = []
    for _ in range(4):
        started = time.perf_counter()
        for _ in range(repeats):
            work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append((time.perf_counter() - started) / repeats * 1e3)
    return min(times[1:])


def run(name: str, options: argparse.Namespace) -> None:
    executor, pages_per_slot = make_executor(name, options)
    page_size, table = executor.kv_cache.page_size, (max(options.batches), pages_per_slot)
    for rows in options.batches:
        plain = 0.0
        for tokens in (1, 2, 5, VERIFY_TOKENS):
            batch = verify_batch(rows, tokens, page_size, table)
            taken = milliseconds(lambda batch=batch: executor.forward_verify(batch), options.repeats)
            plain = plain or taken
            print(
                f"{name:12} batch {rows:2}, {tokens} tokens a row: {taken:.3f} ms a step, "
                f"{taken / plain:.2f} of a plain one",
                flush=True,
            )
        slots, kept = list(range(rows)), [3] * rows
        back = milliseconds(lambda slots=slots, kept=kept: executor.rewind(slots, kept), options.repeats)
        print(f"{name:12} batch {rows:2}, rewind: {back:.3f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["0.6B", "hybrid"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=40)
    options = parser.parse_args()
    for name in options.models:
        run(name, options)


if __name__ == "__main__":
    main()
