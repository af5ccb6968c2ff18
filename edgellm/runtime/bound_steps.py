"""`BoundSteps`: the kinds of steps that an executor runs, each bound to the memory it runs in.

A kind runs in the same memory every time, so that its launches can be captured once and replayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from edgellm.kernels.cu.state_rows import StateRows
from edgellm.models.device_buffers import GraphScratch
from edgellm.runtime.device_step_state import DeviceStepState

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from edgellm.models.device_attention import DeviceAttention
    from edgellm.models.device_buffers import GraphBuffers
    from edgellm.models.device_step import DeviceFamilyGraph
    from edgellm.models.step import HiddenRequest, KeepHidden
    from edgellm.runtime.cuda_graphs import StepRunner
    from edgellm.runtime.recurrent_state_device import DeviceRecurrentState
    from edgellm.runtime.step_inputs import StepInputs, StepShape, StepTensors


@dataclass(frozen=True, slots=True)
class StepKind:
    """What decides which launches a step consists of.

    Attributes:
        shape: with padding.
        hidden: hidden rows are wanted.
        keeps_checkpoints: recurrent state is kept after each token of some rows.
        shares_prefixes: some decode rows attend in groups; which do is data.
    """

    shape: StepShape
    hidden: bool = False
    keeps_checkpoints: bool = False
    shares_prefixes: bool = False


@dataclass(slots=True)
class BoundStep:
    """A kind of step with its memory.

    Attributes:
        step: its inputs.
        hidden: (T, width) padding included; None where the kind has none.
    """

    step: StepTensors
    buffers: GraphBuffers
    hidden: torch.Tensor | None
    launch: Callable[[], None]


class BoundSteps:
    """Owns the scratch memory; borrows the rest.

    Args:
        runner: told to forget what it captured where memory moves.
    """

    def __init__(
        self,
        graph: DeviceFamilyGraph,
        inputs: StepInputs,
        attention: DeviceAttention,
        recurrent: DeviceRecurrentState | None,
        runner: StepRunner,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._graph = graph
        self._inputs = inputs
        self._attention = attention
        self._recurrent = recurrent
        self._runner = runner
        self._scratch = GraphScratch(graph, dtype, device)
        self._request: HiddenRequest | None = None
        self._keep: KeepHidden | None = None
        self._kept: dict[StepKind, BoundStep] = {}

    @property
    def kinds(self) -> list[StepKind]:
        """Those that are kept."""
        return list(self._kept)

    @property
    def gives_hidden(self) -> bool:
        """Whether hidden rows were requested."""
        return self._request is not None

    def request_hidden(self, request: HiddenRequest, keep: KeepHidden | None = None) -> None:
        """From now on kinds with hidden rows give these, and end with `keep`."""
        self._request, self._keep = request, keep
        self._scratch.request_hidden(request.width(self._graph.config.hidden_size))
        self.forget()

    def bind(self, kind: StepKind, *, keep: bool) -> BoundStep:
        """A kind with its memory, which is reserved; `keep` it for the next step of that kind."""
        bound = self._kept.get(kind)
        if bound is None:
            bound = self._new(kind)
            if keep:
                self._kept[kind] = bound
        return bound

    def reserve(self, shape: StepShape) -> None:
        """Make room for a step."""
        moved = True  # where memory runs out, some of it may have
        try:
            moved = self._inputs.reserve(shape) | self._scratch.reserve(
                tokens=shape.tokens, rows=shape.rows, logits=shape.logits
            )
        finally:
            if moved:
                self.forget()

    def forget(self) -> None:
        """Memory moved: everything that holds addresses is void."""
        self._kept.clear()
        self._runner.clear()

    def _new(self, kind: StepKind) -> BoundStep:
        shape = kind.shape
        step = self._inputs.views(shape)
        buffers = self._scratch.buffers(tokens=shape.tokens, logits=shape.logits)
        starts = step.checkpoint_start if kind.keeps_checkpoints else None
        rows = StateRows(step.query_start, step.slots, starts)
        attend = self._attention.bind(step, shape, shares_prefixes=kind.shares_prefixes)
        state = DeviceStepState(attend, rows, self._recurrent, kind.keeps_checkpoints)
        hidden = self._scratch.hidden_rows(shape.tokens) if kind.hidden else None
        request = self._request if kind.hidden else None
        launch = partial(self._graph.forward, step, buffers, state, hidden, request)
        if hidden is not None and self._keep is not None:
            launch = partial(_launch_and_keep, launch, self._keep, step, hidden)
        return BoundStep(step, buffers, hidden, launch)


def _launch_and_keep(launch: Callable[[], None], keep: KeepHidden, step: StepTensors, hidden: torch.Tensor) -> None:
    launch()
    keep(step, hidden)
