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
import threading
from typing import TYPE_CHECKING

import numpy as np

from edgellm.errors import InvalidArgumentError
from edgellm.foreign import call_foreign
from edgellm.sampling.filters import draw, min_p_indices, top_k_ids, top_p_indices, weights_of
from edgellm.sampling.logprobs import TokenLogprobs
from edgellm.sampling.penalties import apply_output_penalties, apply_repetition
from edgellm.sampling.result import NO_TOKEN, SampleResult, bad_logits, min_tokens_leaves_nothing, sampling_failed
from edgellm.sampling.state import SamplingState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    import torch

    from edgellm.sampling.device_sampler import DeviceSampler

    FloatArray = npt.NDArray[np.float64]

__all__ = ["NO_TOKEN", "SampleResult", "Sampler", "SamplingState"]


class Sampler:
    """Keeps no state of any row: that is in its `SamplingState`.  Safe to share between threads."""

    __slots__ = ("_device_samplers", "_lock")

    def __init__(self) -> None:
        self._device_samplers: dict[torch.device, DeviceSampler] = {}
        self._lock = threading.Lock()

    def sample(
        self,
        logits: torch.Tensor,
        rows: Sequence[SamplingState],
        *,
        beside: Callable[[torch.Tensor], None] | None = None,
    ) -> SampleResult:
        """Choose one token per row.  Reads the states, records nothing: call `state.record` afterwards.

        Args:
            logits: (L, vocab_size) float32, any device; not modified.  -inf excludes a token.
            rows: L states; the same state may not appear twice at one position.
            beside: called with the (L,) int32 chosen ids, on a CUDA device with those there, once they are enqueued and
                before the host waits for them; what it enqueues runs beside the host's next work.  Not always called.
        Raises:
            InvalidArgumentError: shapes disagree.
            KernelError: logits are on a CUDA device and its kernels cannot be had.
            StepDeviceError: logits are on a CUDA device and it fails, or its memory runs out.
        Cost: on the CPU, plain greedy rows take one argmax, rows that sample O(vocab) each.  On a CUDA device, a few
            kernels for all rows and one small copy back.
        Ordering: waits for the device when logits are not on the CPU.
        Devices: sums of weights round otherwise on a CUDA device than on the CPU, so a drawn token may differ where the
            random number is within 1e-12 of a boundary; nothing else does.
        """
        _check_shapes(logits, rows)
        if logits.device.type == "cuda":
            return self._on_device(logits.device).sample(logits.detach(), rows, beside)
        result = SampleResult.nothing_yet(rows)
        plain = [row for row, state in enumerate(rows) if state.plain_greedy]
        if plain:
            _choose_plain(logits, plain, result)
        if len(plain) < len(rows):
            taken = set(plain)
            others = [row for row in range(len(rows)) if row not in taken]
            for row, values in zip(others, _host_rows(logits, others), strict=True):
                error = call_foreign(_choose_one, values, rows[row], row, result)  # a grammar is code that is not ours
                if error is not None:
                    result.fail(row, sampling_failed(error))
        if beside is not None and not result.errors:
            beside(_as_tensor(result.token_ids))
        return result

    def _on_device(self, device: torch.device) -> DeviceSampler:
        found = self._device_samplers.get(device)
        if found is None:
            from edgellm.sampling.device_sampler import DeviceSampler, kernel_ops  # needs torch

            with self._lock:
                found = self._device_samplers.setdefault(device, DeviceSampler(device, kernel_ops()))
        return found


def _as_tensor(token_ids: list[int]) -> torch.Tensor:
    import torch

    return torch.tensor(token_ids, dtype=torch.int32)


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
            result.errors[row] = bad_logits(value)


def _choose_one(values: npt.NDArray[np.float32], state: SamplingState, row: int, result: SampleResult) -> None:
    """The whole pipeline for one row of raw logits."""
    largest = float(values.max())
    if not math.isfinite(largest):
        result.errors[row] = bad_logits(largest)
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
            result.errors[row] = min_tokens_leaves_nothing(state)
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
