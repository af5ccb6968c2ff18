"""What a model's graph on the device is given for one step: buffers, state, and what the sequences remember.

The protocols that `edgellm.models.device_<family>` is written against and that the CUDA executor fills in.  A pass
reads device tensors, works in memory that was allocated before, and never waits: the same calls run eagerly or inside
a CUDA graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from edgellm.kernels.cu.state_rows import StateRows
    from edgellm.models.config import ModelConfig
    from edgellm.models.step import HiddenRequest
    from edgellm.runtime.step_inputs import StepTensors

HIDDEN = "hidden"  # name of the row buffer that holds the residual stream


class StepBuffers(Protocol):
    """Scratch memory of one pass over T tokens with L logits rows; contents are whatever was there."""

    def __getitem__(self, name: str) -> torch.Tensor:
        """(T, width) of a buffer that the graph named, C-contiguous."""
        ...

    def rows(self, name: str, count: int) -> torch.Tensor:
        """Its first `count` rows, up to the larger of T and L (in a padded step L may be the larger)."""
        ...

    @property
    def selected(self) -> torch.Tensor:
        """(L, hidden_size) of the type of the buffer "hidden": room for the rows whose logits are wanted."""
        ...

    @property
    def selected_normed(self) -> torch.Tensor:
        """(L, hidden_size) of the model's type."""
        ...

    @property
    def logits(self) -> torch.Tensor:
        """(L, vocab_size) float32, to be filled."""
        ...

    @property
    def workspace(self) -> torch.Tensor:
        """uint8, as many bytes as the graph's `workspace_bytes` said; zero at first, then whatever operators left."""
        ...


class Attend(Protocol):
    def __call__(self, *rows: Any, **layer: Any) -> None:
        """Norm and rotate Q and K, write K and V of the rows to their pages, then attend.

        Args:
            rows: kv_layer, qkv, angles, out.
            kv_layer: counts the layers that own K and V, from 0.
            qkv: (T, q_size + 2 * kv_size), Q is rotated in place.
            angles: (2, T, rotary_dim / 2) float32; None rotates nothing.
            out: (T, q_size), to be filled.
            layer: `query_norm` and `key_norm`, (head_dim,) float32, and whatever else a layer differs in; see
                `DeviceAttention.bind`.
        """
        ...


class DeviceState(Protocol):
    """What the sequences of a step remember."""

    @property
    def attend(self) -> Attend: ...

    @property
    def rows(self) -> StateRows:
        """Rows of the step, padding included."""
        ...

    def piece(self, layer: int, name: str) -> torch.Tensor:
        """(slots, *shape) live state, read and updated in place."""
        ...

    def checkpoint(self, layer: int, name: str) -> torch.Tensor | None:
        """(checkpoint rows, *shape); None where no row of the step keeps any."""
        ...


class DeviceFamilyGraph(Protocol):
    """A model's forward pass on the device.  Holds weights, no scratch; pure launches.

    Attributes:
        row_widths: elements a row of each (T, width) buffer of the model's type.
        float_widths: the same of float32 buffers.  One of the two names "hidden", the residual stream.
    """

    @property
    def config(self) -> ModelConfig: ...

    @property
    def row_widths(self) -> Mapping[str, int]: ...

    @property
    def float_widths(self) -> Mapping[str, int]: ...

    def workspace_bytes(self, *, tokens: int, rows: int) -> int:
        """Bytes that its operators want beside the buffers, for steps of up to so many tokens and rows."""
        ...

    def forward(
        self,
        step: StepTensors,
        buffers: StepBuffers,
        state: DeviceState,
        hidden: torch.Tensor | None = None,
        request: HiddenRequest | None = None,
    ) -> None:
        """One pass; fills `buffers.logits`.  Padding tokens compute rows that nobody reads.

        Args:
            hidden: (T, width of the request) of the model's type, to be filled; None where nobody asked.
            request: which rows these are.
        """
        ...


class HiddenTaps:
    """Copies the rows of a `HiddenRequest` while a graph runs through its layers; the device's `HiddenRows`.

    Args:
        out: (T, width of the request); None taps nothing.
    """

    def __init__(self, request: HiddenRequest | None, out: torch.Tensor | None, hidden_size: int) -> None:
        self._layers = request.layers if request is not None else ()
        self._size = hidden_size
        self._out = out
        self.wants_normed = out is not None and request is not None and request.normed

    def enters(self, layer: int, hidden: torch.Tensor) -> None:
        """The residual stream (T, hidden_size) in front of `layer`; behind the last, call with num_layers."""
        if self._out is None:
            return
        for place, wanted in enumerate(self._layers):
            if wanted == layer:
                self._out[:, place * self._size : (place + 1) * self._size].copy_(hidden)

    def normed(self, rows: torch.Tensor) -> None:
        """(T, hidden_size): what leaves the last layer, after the final norm."""
        if self._out is not None:
            self._out[:, -self._size :].copy_(rows)
