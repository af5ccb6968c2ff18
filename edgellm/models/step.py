"""What a model's graph is given for one step, and what it returns.

A graph computes rows: (T, hidden) of all sequences of a step together.  What a row remembers of earlier tokens is not
the graph's: attention and recurrent layers reach it through `StepState`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from edgellm.kernels.cpu.recurrent_rows import RecurrentRows
    from edgellm.models.config import ModelConfig
    from edgellm.runtime.step_inputs import StepTensors


@dataclass(frozen=True, slots=True)
class HiddenRequest:
    """Hidden rows that somebody wants of every token, concatenated in this order.

    Attributes:
        layers: l in [0, num_layers] is the residual stream that enters layer l; num_layers, what leaves the last.
        normed: what leaves the last layer, after the final norm, comes behind them.
    """

    layers: tuple[int, ...] = ()
    normed: bool = False

    def width(self, hidden_size: int) -> int:
        """Elements of one row."""
        return (len(self.layers) + self.normed) * hidden_size


class KeepHidden(Protocol):
    """What somebody does with the hidden rows of every step that gives any, on the device and as its last part."""

    def __call__(self, step: StepTensors, hidden: torch.Tensor) -> None:
        """May be captured with the step: allocates nothing, reads nothing back, and finds in memory of its own what it
        needs beside.

        Args:
            hidden: (T, width of the request), padding included.
        """
        ...


@dataclass(slots=True)
class GraphOutput:
    """Attributes:
    logits: (L, vocab_size) float32.
    hidden: (T, width of the request) of the model's dtype; None where nobody asked.
    """

    logits: torch.Tensor
    hidden: torch.Tensor | None = None


class RecurrentStep(Protocol):
    """Recurrent and conv state of a step's sequences."""

    @property
    def rows(self) -> RecurrentRows: ...

    def piece(self, layer: int, name: str) -> torch.Tensor:
        """(slots, *shape) live state, read and updated in place."""
        ...

    def checkpoint(self, layer: int, name: str) -> torch.Tensor | None:
        """(checkpoint rows, *shape); None where no sequence of the step needs any."""
        ...


class StepState(Protocol):
    """What the sequences of a step remember."""

    def attend(self, kv_layer: int, qkv: torch.Tensor, out: torch.Tensor, chosen: torch.Tensor | None = None) -> None:
        """Write K and V of the rows to their pages, then attend.

        Args:
            kv_layer: counts the layers that own K and V, from 0.
            qkv: (T, q_size + 2 * kv_size), Q and K rotated; or (T, q_size), which attends to the K and V that an
                earlier layer of the pass wrote there.
            out: (T, q_size), to be filled.
            chosen: (C,) int64, token rows of the step that the C rows of qkv and out are, in a layer without K and V of
                its own; None is all T.
        """
        ...

    @property
    def recurrent(self) -> RecurrentStep: ...


class Graph(Protocol):
    """A model's forward pass over rows.  Owns its scratch memory, so one pass at a time."""

    @property
    def config(self) -> ModelConfig: ...

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logits_index: torch.Tensor,
        step: StepState,
        hidden_request: HiddenRequest | None = None,
    ) -> GraphOutput:
        """One pass.

        Args:
            token_ids: (T,) int32 or int64, each in [0, vocab_size).
            positions: (T,) absolute positions.
            logits_index: (L,) int64, rows whose logits are wanted.
        Returns:
            New tensors.
        """
        ...


class HiddenRows:
    """Collects the hidden rows of a `HiddenRequest` while a graph runs through its layers."""

    def __init__(self, request: HiddenRequest | None, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> None:
        import torch

        self._request = request if request is not None and request.width(hidden_size) else None
        self._size = hidden_size
        self.rows: torch.Tensor | None = None
        if self._request is not None:
            self.rows = torch.empty((num_tokens, self._request.width(hidden_size)), dtype=dtype)

    def enters(self, layer: int, hidden: torch.Tensor) -> None:
        """The residual stream (T, hidden_size) in front of `layer`; behind the last, call with num_layers."""
        if self._request is None or self.rows is None:
            return
        for place, wanted in enumerate(self._request.layers):
            if wanted == layer:
                self.rows[:, place * self._size : (place + 1) * self._size] = hidden

    @property
    def wants_normed(self) -> bool:
        return self._request is not None and self._request.normed

    def normed(self, hidden: torch.Tensor) -> None:
        """What leaves the last layer, after the final norm."""
        if self.rows is not None:
            self.rows[:, -self._size :] = hidden
