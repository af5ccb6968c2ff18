"""Models of a given shape with random weights, made where they will run: for tests and benchmarks without a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from edgellm.kernels.packed_weight import PackedWeight
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
    packed: bool = False,
) -> LoadedModel:
    """A model whose matrices are normal with standard deviation `spread`.

    Norm weights lie in [0.5, 1.5] and biases are normal too, so that leaving one out shows.

    Args:
        packed: linear layers are packed as the config's quantisation says, of about the same spread.
    """
    device = torch.device(device)
    weights, targets = empty_weights(config, dtype, device, packed=packed)
    generator = torch.Generator(device).manual_seed(seed)
    for name, target in targets.items():
        if isinstance(target, PackedWeight):
            _fill_packed(target, spread, generator)
        elif "norm" in name:
            target.uniform_(0.5, 1.5, generator=generator)
        else:
            target.normal_(0.0, 0.3 if name.endswith("bias") else spread, generator=generator)
    return LoadedModel(config, weights, Path("random"), f"random-{seed}-{config!r}-{dtype}")


def _fill_packed(target: PackedWeight, spread: float, generator: torch.Generator) -> None:
    """Random bits, but no e4m3 numbers of 2 and more nor NaN; scales that make the deviation about `spread`."""
    target.packed.random_(0, 256, generator=generator)
    if target.zeros is None:
        target.packed.bitwise_and_(0xBF)
    else:
        target.zeros.random_(0, 256, generator=generator)
    mean = spread / (0.5 if target.zeros is None else 6.0)
    target.scales.uniform_(0.8 * mean, 1.2 * mean, generator=generator)
