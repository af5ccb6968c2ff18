"""`StepGraphs`: steps of the same shape are captured once as a CUDA graph and replayed.

A graph is legal for a shape only as long as the buffers it was captured with stay where they are: whoever moves one
calls `clear`.  A capture that fails turns graphs off for good, with the reason in the log; the step has run eagerly
by then, so nothing is lost.  All graphs share one memory pool, because one runs at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from edgellm.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

logger = get_logger(__name__)

MAX_GRAPHS = 256


class StepRunner(Protocol):
    """Runs the launches of a step, maybe by replaying what was captured of an earlier one."""

    def run(self, key: Hashable, launch: Callable[[], None]) -> None:
        """Do what `launch` does; `key` names everything that decides which launches these are."""
        ...

    def clear(self) -> None:
        """Buffers moved: forget what was captured."""
        ...


class EagerRunner:
    """Launches every time: devices without graphs, and tests of the padding."""

    def run(self, key: Hashable, launch: Callable[[], None]) -> None:
        launch()

    def clear(self) -> None:
        return


class StepGraphs:
    """Graphs of one device.  Not thread-safe; `run` captures on a side stream and replays on torch's current one.

    Args:
        max_graphs: shapes beyond so many run eagerly.
    """

    def __init__(self, device: torch.device, *, max_graphs: int = MAX_GRAPHS) -> None:
        self._device = device
        self._max_graphs = max_graphs
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._refusal = ""

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def refusal(self) -> str:
        """Why nothing is captured any more; empty while graphs work."""
        return self._refusal

    def run(self, key: Hashable, launch: Callable[[], None]) -> None:
        """Replay the graph of `key`; the first time launch eagerly, then capture.

        Raises:
            RuntimeError: a launch or a replay failed.  A failed capture does not raise.
        """
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        launch()
        if not self._refusal and len(self._graphs) < self._max_graphs:
            self._capture(key, launch)

    def clear(self) -> None:
        if self._graphs:
            torch.cuda.current_stream(self._device).synchronize()  # one of them may be running
        self._graphs.clear()
        self._pool = None  # torch gives a pool up with its last graph

    def _capture(self, key: Hashable, launch: Callable[[], None]) -> None:
        """The eager launch before has compiled kernels and made library handles, which capturing must not do."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                _record(graph, self._pool, launch)
        except Exception as error:  # whatever it is, the step itself is done
            self._refusal = f"{type(error).__name__}: {error}"
            _end_capture_of_random_numbers(self._stream)
            logger.warning("CUDA graphs are off, every step is launched kernel by kernel: %s", self._refusal)
            return
        finally:
            current.wait_stream(self._stream)
        self._graphs[key] = graph


def _end_capture_of_random_numbers(stream: torch.cuda.Stream) -> None:
    """After a failed capture torch takes its random generator for captured still; a capture that succeeds ends that."""
    try:
        with torch.cuda.stream(stream):
            value = torch.zeros(1, device=stream.device)

            def launch() -> None:
                value.add_(1)

            _record(torch.cuda.CUDAGraph(), None, launch)
    except Exception as error:
        logger.debug("torch's random numbers on %s may be unusable: %s", stream.device, error)


def _record(graph: torch.cuda.CUDAGraph, pool: Any, launch: Callable[[], None]) -> None:
    """Capture `launch`; a capture that was begun is always ended, so that the stream can be used again."""
    # thread_local: other threads of the process may allocate and copy meanwhile.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        launch()
    except BaseException:
        try:
            graph.capture_end()
        except RuntimeError as error:
            logger.debug("ending a failed capture: %s", error)
        raise
    graph.capture_end()
