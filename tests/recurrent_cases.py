"""Random inputs of the recurrent kernels: one class a kernel, each with the names that kernel and reference share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from edgellm.kernels.cpu.recurrent_rows import RecurrentRows


def ragged_rows(
    lengths: Sequence[int],
    *,
    seed: int,
    verified: Sequence[int] = (),
    num_slots: int = 9,
    slots: Sequence[int] | None = None,
) -> RecurrentRows:
    """Sequences of these lengths in slots drawn from `num_slots`; the verified ones have checkpoints, last in front."""
    chosen = np.random.default_rng(seed).permutation(num_slots)[: len(lengths)] if slots is None else np.array(slots)
    checkpoints, used = np.full(len(lengths), -1), 0
    for i in reversed(verified):
        checkpoints[i] = used
        used += lengths[i]
    return RecurrentRows(np.cumsum([0, *lengths]), chosen, checkpoints)


@dataclass(frozen=True)
class RecurrentCase:
    """One size of one kernel."""

    kind: ClassVar[str]
    value_name: ClassVar[str]  # the input that `out` is like
    token_names: ClassVar[tuple[str, ...]]

    @property
    def label(self) -> str:
        return f"{self.kind}-{'-'.join(str(int(value)) for value in vars(self).values())}"

    @property
    def state_shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    @property
    def is_small(self) -> bool:
        return int(np.prod(self.state_shape)) < 5000

    def state(self, num_slots: int, *, seed: int) -> torch.Tensor:
        return torch.randn(num_slots, *self.state_shape, generator=torch.Generator().manual_seed(seed))

    def inputs(self, num_tokens: int, dtype: torch.dtype, *, seed: int) -> dict[str, Any]:
        """Every tensor argument but state, checkpoint and out."""
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        return {}

    def tokens(self, inputs: dict[str, Any], part: slice) -> dict[str, Any]:
        """The inputs of some of the tokens."""
        return {name: value[part] if name in self.token_names else value for name, value in inputs.items()}

    def spread(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """The same rows as columns of a wider matrix full of NaN; weights as they are."""
        if name not in self.token_names:
            return value
        matrix = torch.full((value.shape[0], value[0].numel() + 7), float("nan"), dtype=value.dtype)
        rows = matrix[:, 3:-4].view(value.shape)
        return rows.copy_(value)


@dataclass(frozen=True)
class ConvCase(RecurrentCase):
    kind = "conv"
    value_name = "x"
    token_names = ("x",)
    channels: int
    width: int
    with_bias: bool = False
    silu: bool = True

    @classmethod
    def random(cls, rng: np.random.Generator) -> ConvCase:
        return cls(int(rng.integers(1, 600)), int(rng.integers(1, 9)), bool(rng.integers(2)), bool(rng.integers(2)))

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.channels, self.width - 1

    def inputs(self, num_tokens: int, dtype: torch.dtype, *, seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        return {
            "x": torch.randn(num_tokens, self.channels, generator=generator).to(dtype),
            "weight": torch.randn(self.channels, self.width, generator=generator),
            "bias": torch.randn(self.channels, generator=generator) if self.with_bias else None,
        }

    def options(self) -> dict[str, Any]:
        return {"silu": self.silu}


@dataclass(frozen=True)
class DeltaCase(RecurrentCase):
    kind = "delta"
    value_name = "v"
    token_names = ("q", "k", "v", "decay", "beta")
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    l2norm: bool = True

    @classmethod
    def random(cls, rng: np.random.Generator) -> DeltaCase:
        key_heads = int(rng.integers(1, 4))
        sizes = (int(rng.integers(1, 150)), int(rng.integers(1, 150)))
        return cls(key_heads, key_heads * int(rng.integers(1, 4)), *sizes, bool(rng.integers(2)))

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.heads, self.key_dim, self.value_dim

    def inputs(self, num_tokens: int, dtype: torch.dtype, *, seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        # About unit length where the kernel does not normalise, as the rule needs to stay bounded.
        size = 1.0 if self.l2norm else self.key_dim**-0.5
        keys, gates = (num_tokens, self.key_heads, self.key_dim), (num_tokens, self.heads)
        return {
            "q": (torch.randn(keys, generator=generator) * size).to(dtype),
            "k": (torch.randn(keys, generator=generator) * size).to(dtype),
            "v": torch.randn(num_tokens, self.heads, self.value_dim, generator=generator).to(dtype),
            "decay": -torch.rand(gates, generator=generator).square() * 3,
            "beta": torch.rand(gates, generator=generator),
        }

    def options(self) -> dict[str, Any]:
        return {"scale": self.key_dim**-0.5, "l2norm": self.l2norm}


@dataclass(frozen=True)
class MambaCase(RecurrentCase):
    kind = "mamba"
    value_name = "x"
    token_names = ("x", "dt", "b", "c")
    groups: int
    heads: int
    head_dim: int
    state_dim: int

    @classmethod
    def random(cls, rng: np.random.Generator) -> MambaCase:
        groups = int(rng.integers(1, 4))
        return cls(groups, groups * int(rng.integers(1, 4)), int(rng.integers(1, 80)), int(rng.integers(1, 200)))

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.heads, self.head_dim, self.state_dim

    def inputs(self, num_tokens: int, dtype: torch.dtype, *, seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        rows = (num_tokens, self.groups, self.state_dim)
        return {
            "x": torch.randn(num_tokens, self.heads, self.head_dim, generator=generator).to(dtype),
            "dt": torch.nn.functional.softplus(torch.randn(num_tokens, self.heads, generator=generator) - 2),
            "a": -torch.rand(self.heads, generator=generator) * 4 - 0.1,
            "b": torch.randn(rows, generator=generator).to(dtype),
            "c": (torch.randn(rows, generator=generator) * self.state_dim**-0.5).to(dtype),
            "d": torch.randn(self.heads, generator=generator),
        }
