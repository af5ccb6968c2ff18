"""Models of a given shape with random weights, made where they will run: for tests and benchmarks without a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from edgellm.models.loader import LoadedModel
from edgellm.models.weights import empty_weights

if TYPE_CHECKING:
    from edgellm.models.config import ModelConfig


@torch.inference_mode()
def random_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    spread: float = 0.02,
) -> LoadedModel:
    """A model whose matrices are normal with standard deviation `spread`.

    Norm weights lie in [0.5, 1.5] and biases are normal too, so that leaving one out shows.
    """
    device = torch.device(device)
    weights, targets = empty_weights(config, dtype, device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, target in targets.items():
        if "norm" in name:
            target.uniform_(0.5, 1.5, generator=generator)
        else:
            target.normal_(0.0, 0.3 if name.endswith("bias") else spread, generator=generator)
    return LoadedModel(config, weights, Path("random"), f"random-{seed}-{config!r}-{dtype}")
