"""Reference of `logprobs`: one row at a time in float64."""

from __future__ import annotations

import math

import torch

MAX_TOP = 64


def logprobs_workspace(num_rows: int, vocab_size: int) -> int:
    """The reference needs none."""
    return 0


def logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    chosen: torch.Tensor,
    top_values: torch.Tensor,
    top_ids: torch.Tensor,
    workspace: torch.Tensor,
    *,
    row_index: torch.Tensor | None = None,
    token_index: torch.Tensor | None = None,
) -> None:
    """As `edgellm.kernels.cu.logprobs.logprobs`, on any device."""
    num_rows, num_top = top_ids.shape
    for row in range(num_rows):
        values = logits[row if row_index is None else int(row_index[row])].double()
        token = int(token_ids[row if token_index is None else int(token_index[row])])
        log_total = float(values.max()) + math.log(float((values - values.max()).exp().sum()))
        chosen[row] = values[token] - log_total if token >= 0 else math.nan
        order = values.sort(descending=True, stable=True).indices[:num_top]
        top_values[row], top_ids[row] = -math.inf, -1
        top_values[row, : len(order)] = values[order] - log_total
        top_ids[row, : len(order)] = order.to(torch.int32)
