"""Scratch memory of the device graphs: what is planned is what is allocated, and when memory moves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from edgellm.models.device_buffers import GraphScratch

CPU = torch.device("cpu")
HALF = torch.bfloat16


def make_graph(*, float_hidden: bool = False) -> Any:
    rows, floats = {"normed": 8, "qkv": 24}, {"angles": 4}
    (floats if float_hidden else rows)["hidden"] = 8
    return SimpleNamespace(
        config=SimpleNamespace(hidden_size=8, vocab_size=50),
        row_widths=rows,
        float_widths=floats,
        workspace_bytes=lambda *, tokens, rows: 16 * tokens + rows,
    )


def held_bytes(scratch: GraphScratch) -> int:
    tensors = [*scratch._flat.values(), *scratch._selected, scratch._hidden, scratch._workspace]
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("float_hidden", [False, True])
@pytest.mark.parametrize(("tokens", "rows", "logits"), [(20, 3, 3), (5, 9, 40)])
def test_planned_bytes_are_those_allocated(tokens: int, rows: int, logits: int, float_hidden: bool) -> None:
    graph = make_graph(float_hidden=float_hidden)
    scratch = GraphScratch(graph, HALF, CPU)
    scratch.request_hidden(24)
    scratch.reserve(tokens=tokens, rows=rows, logits=logits)
    sizes: dict[str, int] = {"tokens": tokens, "rows": rows, "logits": logits}
    assert held_bytes(scratch) == GraphScratch.bytes_for(graph, HALF, hidden_width=24, **sizes)


def test_buffers_have_their_types_and_shapes() -> None:
    scratch = GraphScratch(make_graph(float_hidden=True), HALF, CPU)
    scratch.request_hidden(16)
    scratch.reserve(tokens=5, rows=2, logits=9)
    buffers = scratch.buffers(tokens=4, logits=9)
    assert {name: (tuple(buffers[name].shape), buffers[name].dtype) for name in ("hidden", "qkv", "angles")} == {
        "hidden": ((4, 8), torch.float32),
        "qkv": ((4, 24), HALF),
        "angles": ((4, 4), torch.float32),
    }
    assert buffers.rows("normed", 9).shape == (9, 8)  # as many as there are logits rows
    assert (buffers.selected.dtype, buffers.selected_normed.dtype) == (torch.float32, HALF)
    assert (tuple(buffers.logits.shape), buffers.logits.dtype) == ((9, 50), torch.float32)
    assert scratch.hidden_rows(4).shape == (4, 16)
    assert not buffers.workspace.any()


def test_memory_moves_only_for_what_is_larger() -> None:
    scratch = GraphScratch(make_graph(), HALF, CPU)
    assert scratch.reserve(tokens=8, rows=2, logits=2)
    before = scratch.buffers(tokens=8, logits=2)
    assert not scratch.reserve(tokens=3, rows=2, logits=1)
    again = scratch.buffers(tokens=8, logits=2)
    for name in ("hidden", "normed", "qkv", "angles"):
        assert before[name].data_ptr() == again[name].data_ptr()
    assert before.logits.data_ptr() == again.logits.data_ptr()
    assert scratch.reserve(tokens=3, rows=2, logits=3)
    assert scratch.buffers(tokens=8, logits=2)["qkv"].data_ptr() == before["qkv"].data_ptr()
    assert scratch.reserve(tokens=3, rows=99, logits=1)
    assert len(scratch.buffers(tokens=8, logits=2).workspace) == 16 * 8 + 99
