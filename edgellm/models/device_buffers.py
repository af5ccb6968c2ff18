"""Scratch memory of the device graphs: the row buffers that a graph names, the logits rows, and one workspace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from edgellm.models.device_step import HIDDEN

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edgellm.models.device_step import DeviceFamilyGraph


class GraphBuffers:
    """Views of `GraphScratch` for one step; see `edgellm.models.device_step.StepBuffers`."""

    def __init__(
        self,
        flat: Mapping[str, torch.Tensor],
        widths: Mapping[str, int],
        *,
        tokens: int,
        selected: torch.Tensor,
        selected_normed: torch.Tensor,
        logits: torch.Tensor,
        workspace: torch.Tensor,
    ) -> None:
        self._flat = flat
        self._widths = widths
        self._tokens = tokens
        self.selected = selected
        self.selected_normed = selected_normed
        self.logits = logits
        self.workspace = workspace

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.rows(name, self._tokens)

    def rows(self, name: str, count: int) -> torch.Tensor:
        width = self._widths[name]
        return self._flat[name][: count * width].view(count, width)


class GraphScratch:
    """Memory of a graph's passes, allocated for the largest step so far.

    Args:
        dtype: of the model.
    """

    def __init__(self, graph: DeviceFamilyGraph, dtype: torch.dtype, device: torch.device) -> None:
        self._graph = graph
        self._dtype = dtype
        self._device = device
        self._widths = {**graph.row_widths, **graph.float_widths}
        self._hidden_width = 0
        self._tokens = self._rows = self._logits = 0
        self._flat: dict[str, torch.Tensor] = {}
        self._selected: list[torch.Tensor] = []
        self._hidden = self._workspace = torch.empty(0)

    @staticmethod
    def bytes_for(
        graph: DeviceFamilyGraph, dtype: torch.dtype, *, tokens: int, rows: int, logits: int, hidden_width: int = 0
    ) -> int:
        """Bytes that steps of so many tokens, sequences and logits rows take; `reserve` says what is counted."""
        config = graph.config
        most = max(tokens, logits)
        token_bytes = sum(graph.row_widths.values()) * dtype.itemsize + sum(graph.float_widths.values()) * 4
        selected_size = 4 if HIDDEN in graph.float_widths else dtype.itemsize
        logit_bytes = config.hidden_size * (selected_size + dtype.itemsize) + config.vocab_size * 4
        workspace = graph.workspace_bytes(tokens=tokens, rows=rows)
        return most * token_bytes + logits * logit_bytes + tokens * hidden_width * dtype.itemsize + workspace

    def request_hidden(self, width: int) -> None:
        """From now on steps have room for hidden rows of `width` elements; the caller forgets its buffers."""
        self._hidden_width = width
        self._hidden = self._empty(self._tokens * width, self._dtype)

    def reserve(self, *, tokens: int, rows: int, logits: int) -> bool:
        """Make room for a step; True when buffers moved, so that captured graphs are void."""
        if tokens <= self._tokens and rows <= self._rows and logits <= self._logits:
            return False
        try:
            self._make_room(tokens, rows, logits)
        except BaseException:
            self._tokens = self._rows = self._logits = 0  # some are gone, so the next step makes all of them
            raise
        return True

    def buffers(self, *, tokens: int, logits: int) -> GraphBuffers:
        """Views for a step of these sizes; the same memory every time."""
        selected, selected_normed, logit_rows = (rows[:logits] for rows in self._selected)
        return GraphBuffers(
            self._flat,
            self._widths,
            tokens=tokens,
            selected=selected,
            selected_normed=selected_normed,
            logits=logit_rows,
            workspace=self._workspace,
        )

    def hidden_rows(self, tokens: int) -> torch.Tensor:
        """(tokens, width) of the hidden rows that were requested; the same memory every time."""
        return self._hidden[: tokens * self._hidden_width].view(tokens, self._hidden_width)

    def _make_room(self, tokens: int, rows: int, logits: int) -> None:
        most = max(tokens, logits), max(self._tokens, self._logits)
        # Old buffers go first: both together may not fit.
        if most[0] > most[1]:
            self._flat = {}
            self._flat = {name: self._empty(most[0] * width, self._dtype_of(name)) for name, width in self._all()}
        if tokens > self._tokens:
            self._hidden = torch.empty(0)
            self._hidden = self._empty(tokens * self._hidden_width, self._dtype)
        if logits > self._logits:
            self._reserve_logits(logits)
        self._tokens, self._rows = max(tokens, self._tokens), max(rows, self._rows)
        self._logits = max(logits, self._logits)
        self._reserve_workspace()

    def _all(self) -> list[tuple[str, int]]:
        return list(self._widths.items())

    def _dtype_of(self, name: str) -> torch.dtype:
        return torch.float32 if name in self._graph.float_widths else self._dtype

    def _reserve_logits(self, count: int) -> None:
        config = self._graph.config
        self._selected = []
        widths = ((config.hidden_size, self._dtype_of(HIDDEN)), (config.hidden_size, self._dtype))
        self._selected = [
            self._empty(count * width, dtype).view(count, width)
            for width, dtype in (*widths, (config.vocab_size, torch.float32))
        ]

    def _reserve_workspace(self) -> None:
        num_bytes = self._graph.workspace_bytes(tokens=self._tokens, rows=self._rows)
        if num_bytes > len(self._workspace):
            self._workspace = torch.empty(0)
            self._workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def _empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, device=self._device)
