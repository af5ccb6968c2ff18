"""Reference of `sample`: one row at a time, sorted where sorting says what is meant, sums in float64."""

from __future__ import annotations

import math

import torch

from edgellm.kernels.cu.sample import SampleRows, SampleStatus

_MASK32 = 0xFFFFFFFF


def sample_workspace(num_rows: int, vocab_size: int) -> int:
    """The reference needs none."""
    return 0


def sample(
    logits: torch.Tensor,
    rows: SampleRows | None,
    token_ids: torch.Tensor,
    workspace: torch.Tensor,
    *,
    status: torch.Tensor | None = None,
    row_index: torch.Tensor | None = None,
    filters: bool = True,
    draws: bool = True,
) -> None:
    """As `edgellm.kernels.cu.sample.sample`, on any device."""
    sources = range(logits.shape[0]) if row_index is None else row_index.tolist()
    for row, source in enumerate(sources):
        values = logits[source].double()
        found = _status_of(values)
        chosen = -int(found)
        if found is SampleStatus.CHOSEN:
            chosen = _first_largest(values) if rows is None or not draws else _choose(values, rows, row, filters)
        token_ids[row] = chosen
        if status is not None:
            status[row] = int(found)


def _status_of(values: torch.Tensor) -> SampleStatus:
    if values.isnan().any():
        return SampleStatus.NAN
    largest = float(values.max())
    if largest == math.inf:
        return SampleStatus.INFINITY
    return SampleStatus.NOTHING_LEFT if largest == -math.inf else SampleStatus.CHOSEN


def _first_largest(values: torch.Tensor) -> int:
    return int((values == values.max()).nonzero()[0])


def _choose(values: torch.Tensor, rows: SampleRows, row: int, filters: bool) -> int:
    temperature, top_k, top_p = float(rows.temperature[row]), int(rows.top_k[row]), float(rows.top_p[row])
    if temperature == 0.0:
        return _first_largest(values)
    ids = torch.arange(len(values), device=values.device)
    if filters and 0 < top_k < len(values):
        ids = _most_likely_first(values)[:top_k].sort().values
    weights = ((values[ids] - values.max()) / temperature).exp()
    if filters and top_p < 1.0:
        kept = _smallest_share(weights, top_p)
        ids, weights = ids[kept], weights[kept]
    kept = (weights >= float(rows.min_p[row]) * weights.max()).nonzero()[:, 0]
    ids, weights = ids[kept], weights[kept]
    return int(ids[_draw(weights, uniform(int(rows.seed[row]), int(rows.position[row])))])


def _most_likely_first(values: torch.Tensor) -> torch.Tensor:
    """Indices in descending order of values; of equal ones the lower index first."""
    return values.sort(descending=True, stable=True).indices


def _smallest_share(weights: torch.Tensor, top_p: float) -> torch.Tensor:
    """Indices, ascending, of the fewest most likely tokens whose share reaches `top_p`."""
    order = _most_likely_first(weights)
    short = weights[order].cumsum(0) < top_p * weights.cumsum(0)[-1]
    return order[: int(short.sum()) + 1].sort().values


def _draw(weights: torch.Tensor, number: float) -> int:
    running = weights.cumsum(0)
    passed = (running > number * running[-1]) | (running >= running[-1])
    return int(passed.nonzero()[0])


def uniform(seed: int, position: int) -> float:
    """Philox4x32-10 of (seed, position, purpose 0): one number of [0, 1) with 53 bits."""
    word = [position & _MASK32, position >> 32 & _MASK32, 0, 0]
    key = [seed & _MASK32, seed >> 32 & _MASK32]
    for _ in range(10):
        first, second = word[0] * 0xD2511F53, word[2] * 0xCD9E8D57
        word = [second >> 32 ^ word[1] ^ key[0], second & _MASK32, first >> 32 ^ word[3] ^ key[1], first & _MASK32]
        key = [key[0] + 0x9E3779B9 & _MASK32, key[1] + 0xBB67AE85 & _MASK32]
    return ((word[0] >> 5) * 2**26 + (word[1] >> 6)) * 2.0**-53
