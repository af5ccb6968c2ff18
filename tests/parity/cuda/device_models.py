"""Executors over random models on a GPU, and what to compare them by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from edgellm.models.config import ModelConfig, RopeConfig
from edgellm.models.device_ops import cuda_ops
from edgellm.models.loader import LoadedModel
from edgellm.models.registry import Architecture
from edgellm.models.weights import tensors_of
from edgellm.runtime.batch import RaggedBatch
from edgellm.runtime.device_cuda import CudaDevice
from edgellm.runtime.executor_cuda import CudaExecutor, ExecutorLimits, attention_mode
from edgellm.runtime.kv_cache import KVCache
from edgellm.testing.random_model import random_model

PAGE_SIZE = 16
PAGES_PER_SLOT = 24
NUM_SLOTS = 12


def small_config(**changes: Any) -> ModelConfig:
    """A Qwen3 of four layers with heads that the tensor-core kernels serve."""
    values: dict[str, Any] = {
        "architecture": Architecture.QWEN3,
        "vocab_size": 1031,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_layers": 4,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 64,
        "max_positions": 1024,
        "rms_norm_eps": 1e-6,
        "rope": RopeConfig(theta=10000.0),
        "tied_embeddings": False,
        "qk_norm": True,
    }
    return ModelConfig(**(values | changes))


@torch.inference_mode()
def small_model(dtype: torch.dtype, *, device: str = "cuda", **changes: Any) -> LoadedModel:
    """Weights are drawn on the CPU in float32, so that every device and dtype has the same ones, rounded."""
    config = small_config(**changes)
    source = random_model(config, dtype=torch.float32, seed=17, spread=0.08)
    model = random_model(config, dtype=dtype, device=device)
    for target, values in zip(tensors_of(model.weights), tensors_of(source.weights), strict=True):
        target.copy_(values)
    return model


def make_executor(
    model: LoadedModel,
    *,
    kv_dtype: torch.dtype | None = None,
    deterministic: bool = False,
    graphs: bool = True,
    pad: bool = True,
    page_size: int = PAGE_SIZE,
    num_slots: int = NUM_SLOTS,
    pages_per_slot: int = PAGES_PER_SLOT,
    shares_prefixes: bool = True,
) -> CudaExecutor:
    kv_cache = KVCache.for_model(
        model.config,
        num_pages=num_slots * pages_per_slot,
        page_size=page_size,
        dtype=kv_dtype or model.dtype,
        device="cuda",
    )
    kv_cache.fill_poison()
    return CudaExecutor(
        model,
        kv_cache,
        device=CudaDevice("cuda"),
        ops=cuda_ops(deterministic=deterministic),
        limits=ExecutorLimits(num_slots=num_slots, pages_per_slot=pages_per_slot, step_tokens=64),
        mode=attention_mode(model.dtype, deterministic=deterministic),
        graphs=graphs,
        pad=pad,
        shares_prefixes=shares_prefixes,
    )


class OnHost:
    """An executor whose logits are the caller's, on the host."""

    def __init__(self, executor: CudaExecutor) -> None:
        self.executor = executor

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        return self.executor.forward(batch).cpu()


def random_steps(
    seed: int, vocab_size: int, *, steps: int, longest: int = 90
) -> list[list[tuple[int, int, list[int]]]]:
    """Steps as a session plans them: chunks first, then sequences that add one token; slots are taken over."""
    rng = np.random.default_rng(seed)
    lengths = dict.fromkeys(range(NUM_SLOTS), 0)
    planned = []
    for _ in range(steps):
        slots = rng.permutation(NUM_SLOTS)[: rng.integers(1, NUM_SLOTS + 1)].tolist()
        chunks, singles = [], []
        for slot in slots:
            count = int(rng.choice([1, 1, 1, 2, 7, 16, 33, longest]))
            if lengths[slot] + count > PAGE_SIZE * PAGES_PER_SLOT:
                lengths[slot], count = 0, 1
            row = (slot, lengths[slot], rng.integers(0, vocab_size, count).tolist())
            (singles if count == 1 else chunks).append(row)
            lengths[slot] += count
        planned.append(chunks + singles)
    return planned


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    difference = actual.double().cpu() - expected.double().cpu()
    return float(difference.norm() / expected.double().cpu().norm())


def prompts(lengths: Sequence[int], vocab_size: int, *, seed: int = 5) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]
