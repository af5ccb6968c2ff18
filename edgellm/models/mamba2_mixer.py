"""The Mamba-2 mixer over the rows of a step: projection, causal convolution, selective scan, gated norm, projection.

Dao and Gu, "Transformers are SSMs" (2024).  What a sequence remembers is the step's: `state`, (heads, head_dim,
state_size), and `conv`, the last inputs of the convolution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from edgellm.errors import UnsupportedModelError
from edgellm.kernels.cpu.causal_conv import causal_conv
from edgellm.kernels.cpu.elementwise import rms_norm
from edgellm.kernels.cpu.linear import linear
from edgellm.kernels.cpu.mamba2 import mamba2
from edgellm.models.config import StatePiece

if TYPE_CHECKING:
    from edgellm.models.families import NewTensor
    from edgellm.models.row_buffers import RowBuffers
    from edgellm.models.step import RecurrentStep


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerShape:
    """Sizes of a mixer, the same in every layer of a model.

    Attributes:
        hidden_size: of the rows that enter and leave.
        num_heads, head_dim: of the scan; their product is the inner size.
        state_size: columns of a head's state.
        num_groups: of heads that share input and output vectors, and of channels that are normalised together.
        conv_kernel: inputs that the convolution sees, the newest one included.
        projection_bias, conv_bias: which parts carry a bias.
        norm_eps: of the gated norm.
        step_limits: least and greatest time step.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_kernel: int
    projection_bias: bool
    conv_bias: bool
    norm_eps: float
    step_limits: tuple[float, float] = (0.0, math.inf)

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_dim", "state_size", "num_groups"):
            if getattr(self, name) < 1:
                raise UnsupportedModelError(f"the mixer's {name} is {getattr(self, name)}; it must be at least 1")
        if self.conv_kernel < 2:
            raise UnsupportedModelError(f"the mixer's conv_kernel is {self.conv_kernel}; at least 2 is needed")
        if self.num_heads % self.num_groups:
            raise UnsupportedModelError(
                f"{self.num_heads} heads of the mixer are no multiple of its {self.num_groups} groups; "
                "check that config.json belongs to the model"
            )

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Elements of B, and of C, of one token."""
        return self.num_groups * self.state_size

    @property
    def conv_channels(self) -> int:
        """x, B and C."""
        return self.inner_size + 2 * self.group_size

    @property
    def projected_size(self) -> int:
        """Gate, x, B, C and one time step a head."""
        return self.inner_size + self.conv_channels + self.num_heads

    def pieces(self, layer: int) -> tuple[StatePiece, StatePiece]:
        """What a sequence remembers in one layer."""
        return (
            StatePiece(layer, "conv", (self.conv_channels, self.conv_kernel - 1)),
            StatePiece(layer, "state", (self.num_heads, self.head_dim, self.state_size)),
        )

    def buffer_widths(self) -> dict[str, int]:
        """The row buffers that `Mamba2Mixer.forward` works in."""
        return {"projected": self.projected_size, "convolved": self.conv_channels, "scanned": self.inner_size}


@dataclass(slots=True)
class MixerWeights:
    """One mixer; D hidden, I inner, C conv channels, W conv kernel, H heads, P projected size.

    Attributes:
        in_proj: (P, D), rows gate, x, B, C, time step.  in_proj_bias: (P,) or None.
        conv: (C, 1, W), the newest input last.  conv_bias: (C,) or None.
        step_bias, log_decay, skip: (H,), called dt_bias, A_log and D in files.
        norm: (I,).
        out_proj: (D, I).  out_proj_bias: (D,) or None.
    """

    in_proj: torch.Tensor
    conv: torch.Tensor
    step_bias: torch.Tensor
    log_decay: torch.Tensor
    skip: torch.Tensor
    norm: torch.Tensor
    out_proj: torch.Tensor
    in_proj_bias: torch.Tensor | None = None
    conv_bias: torch.Tensor | None = None
    out_proj_bias: torch.Tensor | None = None


_STORED_NAMES = {
    "in_proj.weight": "in_proj",
    "in_proj.bias": "in_proj_bias",
    "conv1d.weight": "conv",
    "conv1d.bias": "conv_bias",
    "dt_bias": "step_bias",
    "A_log": "log_decay",
    "D": "skip",
    "norm.weight": "norm",
    "out_proj.weight": "out_proj",
    "out_proj.bias": "out_proj_bias",
}


def allocate_mixer(shape: MixerShape, new: NewTensor, prefix: str, targets: dict[str, torch.Tensor]) -> MixerWeights:
    """Empty weights of one mixer; adds its stored names, which begin with `prefix`, to `targets`."""
    weights = MixerWeights(
        in_proj=new(shape.projected_size, shape.hidden_size),
        conv=new(shape.conv_channels, 1, shape.conv_kernel),
        step_bias=new(shape.num_heads),
        log_decay=new(shape.num_heads),
        skip=new(shape.num_heads),
        norm=new(shape.inner_size),
        out_proj=new(shape.hidden_size, shape.inner_size),
        in_proj_bias=new(shape.projected_size) if shape.projection_bias else None,
        conv_bias=new(shape.conv_channels) if shape.conv_bias else None,
        out_proj_bias=new(shape.hidden_size) if shape.projection_bias else None,
    )
    for stored, name in _STORED_NAMES.items():
        target = getattr(weights, name)
        if target is not None:
            targets[prefix + stored] = target
    return weights


class Mamba2Mixer:
    """One layer's mixer; borrows its weights."""

    def __init__(self, shape: MixerShape, weights: MixerWeights, layer: int) -> None:
        self._shape = shape
        self._weights = weights
        self._layer = layer
        self._conv = weights.conv[:, 0].float().contiguous()
        self._conv_bias = None if weights.conv_bias is None else weights.conv_bias.float()
        self._step_bias = weights.step_bias.float()
        self._decay = -torch.exp(weights.log_decay.float())
        self._skip = weights.skip.float()
        self._norm = weights.norm.float()
        self._group_ones = torch.ones(shape.inner_size // shape.num_groups)

    def forward(self, rows: torch.Tensor, recurrent: RecurrentStep, buffers: RowBuffers) -> torch.Tensor:
        """Everything but the last projection; moves the state of every sequence of the step on.

        Args:
            rows: (T, hidden_size), normed.
            buffers: has the widths of `MixerShape.buffer_widths`.
        Returns:
            (T, inner_size), to be given to `project`; may lie in `buffers`.
        """
        shape = self._shape
        projected = linear(rows, self._weights.in_proj, buffers["projected"], bias=self._weights.in_proj_bias)
        gate, conv_input, steps = torch.split(
            projected, [shape.inner_size, shape.conv_channels, shape.num_heads], dim=1
        )
        convolved = buffers["convolved"]
        causal_conv(
            conv_input,
            self._conv,
            self._conv_bias,
            recurrent.piece(self._layer, "conv"),
            recurrent.rows,
            convolved,
            silu=True,
            checkpoint=recurrent.checkpoint(self._layer, "conv"),
        )
        scanned = buffers["scanned"]
        self._scan(convolved, self._time_steps(steps), recurrent, scanned)
        return self._gated_norm(scanned, gate)

    def project(self, rows: torch.Tensor, out: torch.Tensor, *, accumulate: bool = False) -> torch.Tensor:
        """The last projection of what `forward` returned; arguments and result as `kernels.cpu.linear.linear`."""
        weights = self._weights
        return linear(rows, weights.out_proj, out, bias=weights.out_proj_bias, accumulate=accumulate)

    def _time_steps(self, steps: torch.Tensor) -> torch.Tensor:
        """(T, heads) float32; the limits hold for every token, however the prompt is cut."""
        positive = functional.softplus(steps.float() + self._step_bias)
        least, greatest = self._shape.step_limits
        return positive.clamp_(least, greatest) if least > 0 or greatest < math.inf else positive

    def _scan(
        self, convolved: torch.Tensor, steps: torch.Tensor, recurrent: RecurrentStep, scanned: torch.Tensor
    ) -> None:
        shape = self._shape
        x, b, c = torch.split(convolved, [shape.inner_size, shape.group_size, shape.group_size], dim=1)
        heads = (len(convolved), shape.num_heads, shape.head_dim)
        groups = (len(convolved), shape.num_groups, shape.state_size)
        mamba2(
            x.view(heads),
            steps,
            self._decay,
            b.view(groups),
            c.view(groups),
            self._skip,
            recurrent.piece(self._layer, "state"),
            recurrent.rows,
            scanned.view(heads),
            checkpoint=recurrent.checkpoint(self._layer, "state"),
        )

    def _gated_norm(self, scanned: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """RMS norm of scanned * silu(gate) over each group's channels, in float32 until the end."""
        gated = functional.silu(gate.float()).mul_(scanned)
        eps, groups = self._shape.norm_eps, self._shape.num_groups
        if groups == 1:
            rms_norm(gated, self._norm, eps, gated)
        else:
            by_group = gated.view(-1, len(self._group_ones))
            rms_norm(by_group, self._group_ones, eps, by_group)
            gated.mul_(self._norm)
        return gated.to(scanned.dtype)
