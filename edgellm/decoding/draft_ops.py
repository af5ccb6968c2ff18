"""`DraftOps`: the row operators that draft models are written against.

One form calls the CPU kernels, one the operators of the device (`DeviceOps`).  Which one depends on where the target
computes; a head never asks.  Results are new tensors.  The device form never waits, so that a chain of draft passes
can be captured in a CUDA graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from edgellm.models.config import RopeConfig
    from edgellm.models.device_ops import DeviceOps
    from edgellm.models.device_step import StepBuffers
    from edgellm.models.moe import MoeConfig, MoeWeights
    from edgellm.runtime.device import Device
    from edgellm.runtime.kv_cache import KVCache

    Angles = Callable[[torch.Tensor], torch.Tensor]
    AddExperts = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

GELU = "gelu"


def draft_ops(ops: DeviceOps | None, device: torch.device) -> DraftOps:
    """The operators beside an executor that computes with `ops`; None is an executor on the CPU.

    Args:
        device: of the weights.
    """
    return CpuDraftOps() if ops is None else DeviceDraftOps(ops, device)


class DraftExecutor(Protocol):
    """What drafts need of an executor that computes on a device."""

    @property
    def device(self) -> Device: ...

    @property
    def ops(self) -> DeviceOps: ...

    @property
    def kv_cache(self) -> KVCache: ...

    @property
    def table_shape(self) -> tuple[int, int]:
        """(num_slots, pages_per_slot) of its page table; a draft's has the same."""
        ...


def device_executor(executor: object) -> DraftExecutor | None:
    """The executor, where it computes with `DeviceOps`; None where with the CPU's kernels."""
    return cast("DraftExecutor", executor) if hasattr(executor, "ops") else None


class DraftOps(ABC):
    """Rows (T, D) have the weights' dtype and are contiguous; weights of norms are float32."""

    @abstractmethod
    def embed(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """(T, D) rows of a (V, D) table, for (T,) int32 ids."""

    @abstractmethod
    def rms_norm(self, rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """rows / sqrt(mean(rows^2) + eps) * weight."""

    @abstractmethod
    def linear(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        residual: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """(T, M) rows weight^T + bias + residual.

        Args:
            weight: (M, D), dtype of rows.
            residual: (T, M), dtype of rows; not written to.
            dtype: of the result: float32, or that of rows (None).
        """

    @abstractmethod
    def gated(self, rows: torch.Tensor, gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
        """(T, F): the activation of the gate times up, for a (2F, D) weight of rows gate, up.

        Args:
            activation: "silu", or "gelu" in its tanh form.
        """

    @abstractmethod
    def gate_(self, rows: torch.Tensor, gate: torch.Tensor) -> None:
        """rows *= sigmoid(gate), both (T, D).  Writes rows."""

    @abstractmethod
    def rotary(self, rope: RopeConfig, rotating: int) -> Angles:
        """From (T,) int32 positions to (2, T, rotating / 2) float32 angles, for heads that turn in so many elements."""

    @abstractmethod
    def experts(self, config: MoeConfig, weights: MoeWeights) -> AddExperts:
        """From normed rows and the residual stream, (T, D) each, to the stream with what experts make of the rows."""


class CpuDraftOps(DraftOps):
    """float32 or bfloat16 rows on the CPU."""

    def embed(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return table.index_select(0, token_ids)

    def rms_norm(self, rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        from edgellm.kernels.cpu.elementwise import rms_norm

        out = torch.empty_like(rows)
        rms_norm(rows, weight, eps, out)
        return out

    def linear(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        residual: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        from edgellm.kernels.cpu.linear import linear

        product = linear(rows, weight, rows.new_empty((len(rows), len(weight)), dtype=dtype), bias=bias)
        return product if residual is None else product.add_(residual)

    def gated(self, rows: torch.Tensor, gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
        from edgellm.kernels.cpu.elementwise import gelu_mul, silu_mul

        product, inner = self.linear(rows, gate_up), len(gate_up) // 2
        out = rows.new_empty((len(rows), inner))
        if activation == GELU:
            gelu_mul(product[:, :inner], product[:, inner:], out)
        else:
            silu_mul(product, out)
        return out

    def gate_(self, rows: torch.Tensor, gate: torch.Tensor) -> None:
        from edgellm.kernels.cpu.gates import gate_

        gate_(rows, gate)

    def rotary(self, rope: RopeConfig, rotating: int) -> Angles:
        from edgellm.models.rope import RotaryAngles

        return RotaryAngles(rope, rotating)

    def experts(self, config: MoeConfig, weights: MoeWeights) -> AddExperts:
        from edgellm.models.moe import MoeBlock

        block = MoeBlock(config, weights)

        def add(normed: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
            total = stream.clone()
            block.add(normed, total)
            return total

        return add


class DeviceDraftOps(DraftOps):
    """Rows on the device that `ops` compute on.

    Args:
        device: of weights and rows.
    """

    def __init__(self, ops: DeviceOps, device: torch.device) -> None:
        self._ops = ops
        self._device = device

    def embed(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        out = table.new_empty((len(token_ids), table.shape[1]))
        self._ops.embedding(token_ids, table, out)
        return out

    def rms_norm(self, rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(rows)
        self._ops.rms_norm(rows, weight, eps, out)
        return out

    def linear(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        residual: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        out = rows.new_empty((len(rows), len(weight)), dtype=dtype)
        self._ops.linear(rows, weight, out, bias, residual=residual)
        return out

    def gated(self, rows: torch.Tensor, gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
        out = rows.new_empty((len(rows), len(gate_up) // 2))
        if activation == GELU:
            gate, up = self.linear(rows, gate_up).chunk(2, dim=1)
            self._ops.gelu_mul(gate, up, out)
            return out
        self._ops.gated(rows, gate_up, out, None, rows.new_empty((len(rows), len(gate_up))))
        return out

    def gate_(self, rows: torch.Tensor, gate: torch.Tensor) -> None:
        self._ops.gate_(rows, gate)

    def rotary(self, rope: RopeConfig, rotating: int) -> Angles:
        from edgellm.models.rope import inverse_frequencies

        inv_freq, scale = inverse_frequencies(rope, rotating)
        inv_freq = inv_freq.to(self._device)

        def angles(positions: torch.Tensor) -> torch.Tensor:
            out = inv_freq.new_empty((2, len(positions), len(inv_freq)))
            self._ops.rotary_angles(positions, inv_freq, scale, out)
            return out

        return angles

    def experts(self, config: MoeConfig, weights: MoeWeights) -> AddExperts:
        from edgellm.models.device_moe import DeviceMoe

        ops, block = self._ops, DeviceMoe(self._ops, config, weights)

        def add(normed: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
            hidden_size, dtype = normed.shape[1], normed.dtype
            needed = DeviceMoe.workspace_bytes(ops, config, hidden_size, dtype, tokens=len(normed))
            widths, floats = DeviceMoe.widths(config), DeviceMoe.float_widths(config, hidden_size)
            total = stream.clone()
            block.add(normed, total, cast("StepBuffers", _NewRows(normed, widths, floats, needed)))
            return total

        return add


class _NewRows:
    """Row buffers of one pass, new; as much of `StepBuffers` as a block of experts reads.

    Args:
        like: (T, D) rows that give number, type and device.
        widths, float_widths: of the buffers of that type, and of float32 ones.
        workspace_bytes: zeroed.
    """

    def __init__(
        self, like: torch.Tensor, widths: Mapping[str, int], float_widths: Mapping[str, int], workspace_bytes: int
    ) -> None:
        self._rows = {name: like.new_empty((len(like), width)) for name, width in widths.items()}
        for name, width in float_widths.items():
            self._rows[name] = like.new_empty((len(like), width), dtype=torch.float32)
        self.workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=like.device)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._rows[name]
