"""`Sampler`: chooses one token per logits row, each row by its own parameters.

Order of operations of a row, the one documented for users:

1. logit bias is added;
2. log-probabilities are taken (they know bias, but neither grammar, penalties, temperature nor filters);
3. `structured`: tokens that may not follow in the grammar are excluded, whatever their bias;
4. repetition penalty, then frequency and presence penalties;
5. `min_tokens`: end tokens and stop token ids are excluded;
6. temperature 0: the largest logit wins, the lowest id among equals.  Otherwise
7. temperature, 8. top-k, 9. top-p over what top-k left, 10. min-p,
11. one draw by inverse CDF in token-id order, from the number that (seed, position) determine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from edgellm.errors import InvalidArgumentError
from edgellm.sampling.filters import draw, min_p_indices, top_k_ids, top_p_indices, weights_of
from edgellm.sampling.logprobs import TokenLogprobs
from edgellm.sampling.penalties import apply_output_penalties, apply_repetition
from edgellm.sampling.state import SamplingState

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import torch

    FloatArray = npt.NDArray[np.float64]

__all__ = ["NO_TOKEN", "SampleResult", "Sampler", "SamplingState"]

NO_TOKEN = -1


@dataclass(slots=True)
class SampleResult:
    """What one call chose; rows in the order they were given.

    Attributes:
        token_ids: one id per row; `NO_TOKEN` (-1) in rows that failed.
        logprobs: per row, None where the request did not ask.
        errors: row to reason, for rows whose logits or grammar allow no choice (NaN, +inf, nothing left, a dead
            end).  Other rows are unaffected.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    errors: dict[int, str] = field(default_factory=dict)


class Sampler:
    """Stateless; everything a row remembers is in its `SamplingState`.  Safe to share between threads."""

    __slots__ = ()

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingState]) -> SampleResult:
        """Choose one token per row.  Reads the states, records nothing: call `state.record` afterwards.

        Args:
            logits: (L, vocab_size) float32, any device; not modified.  -inf excludes a token.
            rows: L states; the same state may not appear twice at one position.
        Raises:
            InvalidArgumentError: shapes disagree.
        Cost: plain greedy rows take one argmax; rows that sample O(vocab) each on the host.
        Ordering: waits for the device when logits are not on the CPU.
        """
        _check_shapes(logits, rows)
        result = SampleResult([NO_TOKEN] * len(rows), [None] * len(rows))
        plain = [row for row, state in enumerate(rows) if state.plain_greedy]
        if plain:
            _choose_plain(logits, plain, result)
        if len(plain) < len(rows):
            taken = set(plain)
            others = [row for row in range(len(rows)) if row not in taken]
            for row, values in zip(others, _host_rows(logits, others), strict=True):
                _choose_one(values, rows[row], row, result)
        return result


def _check_shapes(logits: torch.Tensor, rows: Sequence[SamplingState]) -> None:
    if logits.ndim != 2 or logits.shape[0] != len(rows):
        raise InvalidArgumentError(
            f"logits have shape {tuple(logits.shape)}; sampling {len(rows)} rows needs ({len(rows)}, vocab_size)"
        )
    width = logits.shape[1]
    for row, state in enumerate(rows):
        if state.vocab_size != width:
            raise InvalidArgumentError(
                f"row {row} was set up for a vocabulary of {state.vocab_size} tokens, the logits have {width}; "
                "build its SamplingState with the executor's vocab_size"
            )


def _host_rows(logits: torch.Tensor, rows: list[int]) -> npt.NDArray[np.float32]:
    """(len(rows), V) float32 on the host; a view where that is possible."""
    selected = logits.detach()
    if len(rows) != logits.shape[0]:
        selected = selected[rows]
    array: npt.NDArray[np.float32] = selected.float().cpu().numpy()
    return array


def _choose_plain(logits: torch.Tensor, rows: list[int], result: SampleResult) -> None:
    """The argmax of each row, found where the logits are; the lowest id among equals."""
    if logits.device.type == "cpu":
        array = logits.detach().float().numpy()
        ids = array.argmax(axis=1).tolist() if len(rows) == len(array) else [int(array[row].argmax()) for row in rows]
        largest = [float(array[row, token_id]) for row, token_id in zip(rows, ids, strict=True)]
    else:
        selected = logits.detach() if len(rows) == logits.shape[0] else logits.detach()[rows]
        values, indices = selected.max(dim=1)
        ids, largest = indices.tolist(), values.tolist()
    for row, token_id, value in zip(rows, ids, largest, strict=True):
        # argmax lands on a NaN when there is one, and on +inf before any finite value.
        if math.isfinite(value):
            result.token_ids[row] = token_id
        else:
            result.errors[row] = _bad_logits(value)


def _choose_one(values: npt.NDArray[np.float32], state: SamplingState, row: int, result: SampleResult) -> None:
    """The whole pipeline for one row of raw logits."""
    largest = float(values.max())
    if not math.isfinite(largest):
        result.errors[row] = _bad_logits(largest)
        return
    logits = values.astype(np.float64)
    params = state.params
    bias_ids, bias_values = state.bias
    if len(bias_ids):
        logits[bias_ids] += bias_values
    snapshot = logits
    if params.logprobs is not None and _edits_logits(state):
        logits = logits.copy()
    if state.guide is not None:
        reason = state.guide.restrict(logits)
        if reason:
            result.errors[row] = reason
            return
    _apply_penalties(logits, state)
    if state.end_tokens_masked:
        logits[state.masked_ids] = -np.inf
        if not math.isfinite(float(logits.max())):
            what = "logits leave" if state.guide is None else "grammar leaves"
            result.errors[row] = f"min_tokens={params.min_tokens} excludes every token that the {what}"
            return
    token_id = int(logits.argmax()) if params.greedy else _draw_token(logits, state)
    result.token_ids[row] = token_id
    if params.logprobs is not None:
        result.logprobs[row] = _logprobs_of(snapshot, token_id, params.logprobs)


def _edits_logits(state: SamplingState) -> bool:
    counted = state.seen is not None or state.output is not None
    return counted or state.guide is not None or state.end_tokens_masked


def _apply_penalties(logits: FloatArray, state: SamplingState) -> None:
    params = state.params
    if state.seen is not None:
        apply_repetition(logits, state.seen, params.repetition_penalty)
    if state.output is not None:
        apply_output_penalties(
            logits, state.output, presence=params.presence_penalty, frequency=params.frequency_penalty
        )


def _draw_token(logits: FloatArray, state: SamplingState) -> int:
    params = state.params
    ids: npt.NDArray[np.int64] | None = None
    if 0 < params.top_k < len(logits):
        ids = top_k_ids(logits, params.top_k)
        logits = logits[ids]
    weights = weights_of(logits, params.temperature)
    if params.top_p < 1.0:
        kept = top_p_indices(weights, params.top_p)
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    if params.min_p > 0.0:
        kept = min_p_indices(weights, params.min_p)
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    index = draw(weights, state.uniform())
    return index if ids is None else int(ids[index])


def _logprobs_of(logits: FloatArray, token_id: int, num_top: int) -> TokenLogprobs:
    """Log-softmax at the chosen token and at the `num_top` most likely ones, descending, lower id first."""
    largest = float(logits.max())
    with np.errstate(under="ignore"):
        log_total = largest + math.log(float(np.exp(logits - largest).sum()))
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        ids = top_k_ids(logits, num_top)
        order = np.argsort(-logits[ids], kind="stable")
        pairs = zip(ids[order].tolist(), logits[ids[order]].tolist(), strict=True)
        top = tuple((top_id, value - log_total) for top_id, value in pairs if value != -math.inf)
    return TokenLogprobs(token_id, float(logits[token_id]) - log_total, top)


def _bad_logits(largest: float) -> str:
    found = "NaN" if math.isnan(largest) else "+inf" if largest > 0 else "no finite value"
    return f"the model's logits contain {found}: no token can be chosen; check the weights and the dtype"
