"""Operands of the Mamba-2 scan as a mixer has them, with poison wherever nothing may be read or written."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from edgellm.kernels.cu.state_rows import StateRows
from edgellm.kernels.ref.mamba2 import mamba2 as reference

NAN = float("nan")
# Norm of the error over norm of the result: token after token, one rounding of out; chunk by chunk, rounded operands.
SCAN_TOLERANCE = {torch.float32: 3e-6, torch.float16: 3.2e-4, torch.bfloat16: 2.5e-3}
CHUNK_TOLERANCE = {torch.float16: 6e-4, torch.bfloat16: 4.5e-3}


@dataclass(frozen=True)
class ScanShape:
    """G groups, H heads, P head_dim, N state_dim."""

    groups: int
    heads: int
    head_dim: int
    state_dim: int

    @property
    def state(self) -> tuple[int, int, int]:
        return self.heads, self.head_dim, self.state_dim


@dataclass
class ScanCase:
    """Some sequences; a length with slot -1 is padding, and padding tokens stand behind the last one."""

    shape: ScanShape
    dtype: torch.dtype
    lengths: list[int]
    slots: list[int]
    checkpoints: list[int] | None = None
    device: str = "cpu"
    seed: int = 0
    padding: int = 3
    x: torch.Tensor = field(init=False)
    dt: torch.Tensor = field(init=False)
    b: torch.Tensor = field(init=False)
    c: torch.Tensor = field(init=False)
    a: torch.Tensor = field(init=False)
    d: torch.Tensor = field(init=False)
    state: torch.Tensor = field(init=False)
    out: torch.Tensor = field(init=False)
    checkpoint: torch.Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        shape, generator = self.shape, torch.Generator().manual_seed(self.seed)
        tokens = sum(self.lengths) + self.padding
        inner, group = shape.heads * shape.head_dim, shape.groups * shape.state_dim
        real = self.real_tokens()
        wide = torch.full((tokens, inner + 2 * group + 8), NAN)
        wide[real, : inner + 2 * group] = torch.randn(len(real), inner + 2 * group, generator=generator)
        x, b, c, _ = torch.split(wide.to(self.dtype).to(self.device), [inner, group, group, 8], dim=1)
        self.x = x.view(tokens, shape.heads, shape.head_dim)
        self.b, self.c = (part.view(tokens, shape.groups, shape.state_dim) for part in (b, c))
        self.dt = torch.full((tokens, shape.heads), NAN)
        self.dt[real] = torch.nn.functional.softplus(torch.randn(len(real), shape.heads, generator=generator) - 2)
        self.dt = self.dt.to(self.device)
        self.a = (-4 * torch.rand(shape.heads, generator=generator) - 0.05).to(self.device)
        self.d = torch.randn(shape.heads, generator=generator).to(self.device)
        state = torch.full((max(self.slots) + 3, *shape.state), NAN)
        live = [slot for slot in self.slots if slot >= 0]
        state[live] = torch.randn(len(live), *shape.state, generator=generator)
        self.state = state.to(self.device)
        self.out = torch.full_like(self.x, NAN, memory_format=torch.contiguous_format)
        kept = None if self.checkpoints is None else sum(self.lengths) + 2
        self.checkpoint = None if kept is None else torch.full((kept, *shape.state), NAN, device=self.device)

    def real_tokens(self) -> list[int]:
        """Tokens of sequences that are no padding."""
        starts = [0, *accumulate(self.lengths)]
        return [
            token
            for start, length, slot in zip(starts, self.lengths, self.slots, strict=False)
            if slot >= 0
            for token in range(start, start + length)
        ]

    def rows(self) -> StateRows:
        def whole(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        kept = None if self.checkpoints is None else whole(self.checkpoints)
        return StateRows(whole([0, *accumulate(self.lengths)]), whole(self.slots), kept)

    def arguments(self) -> dict[str, Any]:
        """Those of the operator, by name."""
        names = ("x", "dt", "a", "b", "c", "d", "state", "out", "checkpoint")
        return {name: getattr(self, name) for name in names} | {"rows": self.rows()}

    def expected(self) -> dict[str, torch.Tensor]:
        """out, state and checkpoint in float64, of what they are now; poison where nothing is written."""
        given = {
            name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in self.arguments().items()
        }
        for name in ("state", "out", "checkpoint"):
            given[name] = None if given[name] is None else given[name].double()
        reference(**given)
        return {name: given[name] for name in ("out", "state", "checkpoint") if given[name] is not None}


def norm_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Of what is not poison; infinite where poison is in other places."""
    actual, expected = actual.double().cpu(), expected.double()
    if not torch.equal(actual.isnan(), expected.isnan()):
        return float("inf")
    good = ~expected.isnan()
    return float((actual - expected)[good].norm() / expected[good].norm())
