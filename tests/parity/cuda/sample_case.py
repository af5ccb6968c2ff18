"""Rows of logits and parameters for the sampling kernels, and the host's answer to them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from edgellm.kernels.cu.sample import SampleRows
from edgellm.sampling.filters import draw, min_p_indices, top_k_ids, top_p_indices, weights_of
from edgellm.sampling.philox import uniform


@dataclass(slots=True)
class Setting:
    """One row's parameters."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0


def sample_rows(settings: list[Setting], device: str | torch.device = "cpu") -> SampleRows:
    seeds = np.array([one.seed for one in settings], np.uint64).view(np.int64)
    return SampleRows(
        temperature=torch.tensor([one.temperature for one in settings], dtype=torch.float64, device=device),
        top_k=torch.tensor([one.top_k for one in settings], dtype=torch.int32, device=device),
        top_p=torch.tensor([one.top_p for one in settings], dtype=torch.float64, device=device),
        min_p=torch.tensor([one.min_p for one in settings], dtype=torch.float64, device=device),
        seed=torch.from_numpy(seeds).to(device),
        position=torch.tensor([one.position for one in settings], dtype=torch.int64, device=device),
    )


def host_choice(values: np.ndarray, setting: Setting) -> int:
    """The id that `Sampler` chooses, or minus the status."""
    largest = float(values.max())
    if not math.isfinite(largest):
        return -1 if math.isnan(largest) else -2 if largest > 0 else -3
    logits = values.astype(np.float64)
    if setting.temperature == 0.0:
        return int(logits.argmax())
    ids = np.arange(len(logits))
    if 0 < setting.top_k < len(logits):
        ids = top_k_ids(logits, setting.top_k)
    weights = weights_of(logits[ids], setting.temperature)
    if setting.top_p < 1.0:
        kept = top_p_indices(weights, setting.top_p)
        ids, weights = ids[kept], weights[kept]
    kept = min_p_indices(weights, setting.min_p)
    ids, weights = ids[kept], weights[kept]
    return int(ids[draw(weights, uniform(setting.seed, setting.position))])


def random_settings(rng: np.random.Generator, count: int, vocab_size: int) -> list[Setting]:
    """Every filter alone and together, from none to nearly everything."""
    top_ks = [0, 0, 0, -1, 1, 2, 40, 511, 512, 513, 2049, 5000, vocab_size - 1, vocab_size, 2**31 - 1]
    return [
        Setting(
            temperature=float(rng.choice([0.0, 1e-6, 0.3, 0.7, 1.0, 1.0, 1.5, 10.0, 1e4])),
            top_k=int(rng.choice(top_ks)),
            top_p=float(rng.choice([1.0, 1.0, 1e-9, 0.3, 0.5, 0.9, 0.95, 0.999, 0.999999])),
            min_p=float(rng.choice([0.0, 0.0, 0.0, 1e-4, 0.1, 1.0])),
            seed=int(rng.integers(2**64, dtype=np.uint64)),
            position=int(rng.integers(2**40)),
        )
        for _ in range(count)
    ]


def random_logits(rng: np.random.Generator, kind: str, shape: tuple[int, int]) -> np.ndarray:
    """float32 rows: smooth, with many ties, with tokens left out, flat, with one far away, or of tiny numbers."""
    values = rng.normal(size=shape) * 3.0
    if kind == "ties":
        values = np.round(values * 4) / 4
    elif kind == "excluded":
        values[rng.random(shape) < 0.7] = -np.inf
        values[:, 0] = 0.5
    elif kind == "flat":
        values = np.full(shape, 1.25)
    elif kind == "outlier":
        values[:, -1] -= 6e4
    elif kind == "tiny":
        values = values * 1e-39
    elif kind == "peaked":
        values = values * 5.0
    return values.astype(np.float32)


KINDS = ("smooth", "ties", "excluded", "flat", "outlier", "tiny", "peaked")
