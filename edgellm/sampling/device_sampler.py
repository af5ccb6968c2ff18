"""`DeviceSampler`: `Sampler.sample` for logits on a device, by a few kernels for all rows and one copy back.

Rows and their order of operations are those of `sampler.py`.  Parameters of all rows go up in one copy; rows whose
logits are changed (bias, grammar, penalties, excluded tokens) are copied to float64 and changed there; then every row
is sampled, and log-probabilities are taken where they were asked for; one copy brings ids, flags and log-probabilities
back.  A step of plain greedy rows is one kernel and four bytes a row.  Which functions do the work is a table, so that
the references run in place of the kernels where there is no GPU.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from edgellm.errors import EdgeLLMError, StepDeviceError
from edgellm.foreign import call_foreign
from edgellm.kernels.cu.logit_edit import EditFlag, IdLists, LogitEdits
from edgellm.kernels.cu.sample import SampleRows, SampleStatus
from edgellm.sampling.device_staging import Staging
from edgellm.sampling.guidance import NOTHING_ALLOWED
from edgellm.sampling.logprobs import TokenLogprobs
from edgellm.sampling.result import SampleResult, bad_logits, min_tokens_leaves_nothing, sampling_failed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from edgellm.sampling.guidance import Guide
    from edgellm.sampling.state import SamplingState

    Array = npt.NDArray[Any]
    Lists = list[tuple[Array, Array | None]]
    Beside = Callable[[torch.Tensor], None]

_LARGEST_OF = {
    SampleStatus.NAN: math.nan,
    SampleStatus.INFINITY: math.inf,
    SampleStatus.NOTHING_LEFT: -math.inf,
}
# Lists of ids that grow by a token a step are padded to this, so that the layout of the upload seldom changes.
_LIST_STEP = 256


@dataclass(frozen=True, slots=True)
class SamplingOps:
    """The functions of `edgellm.kernels.cu` (or of `ref`) that a `DeviceSampler` calls."""

    sample: Callable[..., None]
    sample_workspace: Callable[[int, int], int]
    logprobs: Callable[..., None]
    logprobs_workspace: Callable[[int, int], int]
    logit_edit: Callable[..., None]


def kernel_ops() -> SamplingOps:
    """The CUDA kernels."""
    from edgellm.kernels.cu import logit_edit, logprobs, sample

    return SamplingOps(
        sample.sample, sample.sample_workspace, logprobs.logprobs, logprobs.logprobs_workspace, logit_edit.logit_edit
    )


def reference_ops() -> SamplingOps:
    """The references, for tensors on any device."""
    from edgellm.kernels.ref import logit_edit, logprobs, sample

    return SamplingOps(
        sample.sample, sample.sample_workspace, logprobs.logprobs, logprobs.logprobs_workspace, logit_edit.logit_edit
    )


class DeviceSampler:
    """Samples rows on one device.  Its memory grows to what the largest step needs and is reused.

    Threads: one step at a time, others wait.  Every step ends with a wait for the current stream.
    """

    def __init__(self, device: torch.device, ops: SamplingOps) -> None:
        self.ops = ops
        self.going_up = Staging(device)
        self.coming_back = Staging(device)
        self._device = device
        self._lock = threading.Lock()
        self._scratch: dict[tuple[str, int], torch.Tensor] = {}

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingState], beside: Beside | None = None) -> SampleResult:
        """As `Sampler.sample`, for logits on this device whose shape has been checked.

        Raises:
            StepDeviceError: out of memory, a failed launch, or an error of earlier work that the device reports now.
        """
        if not rows:
            return SampleResult.nothing_yet(rows)
        # Memory that was made in inference mode may not be written outside it, whoever calls.
        with self._lock, _device_errors(len(rows)), torch.inference_mode(), self._current():
            logits = _readable(logits)
            if all(state.plain_greedy for state in rows):
                return self._sample_greedy(logits, rows, beside)
            return _Step(self, logits, rows).run(beside)

    def _sample_greedy(
        self, logits: torch.Tensor, rows: Sequence[SamplingState], beside: Beside | None
    ) -> SampleResult:
        layout = self.coming_back.layout((("i", (len(rows),)),))
        self.ops.sample(logits, None, layout.device[0], self.sample_workspace(len(rows), logits.shape[1]))
        enqueue = None if beside is None else partial(beside, layout.device[0])
        token_ids = self.coming_back.download(layout, enqueue)[0].tolist()
        result = SampleResult(token_ids, [None] * len(rows))
        if min(token_ids) < 0:
            for row, token_id in enumerate(token_ids):
                if token_id < 0:
                    result.fail(row, _reason(token_id))
        return result

    def _current(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    # ---- memory -------------------------------------------------------------------------------------------------

    def sample_workspace(self, num_rows: int, vocab_size: int) -> torch.Tensor:
        return self._zeroed("sample", vocab_size, self.ops.sample_workspace(num_rows, vocab_size))

    def logprobs_workspace(self, num_rows: int, vocab_size: int) -> torch.Tensor:
        return self._zeroed("logprobs", vocab_size, self.ops.logprobs_workspace(num_rows, vocab_size))

    def edited_rows(self, name: str, num_rows: int, vocab_size: int) -> torch.Tensor:
        """(num_rows, vocab_size) float64, contents undefined."""
        found = self._scratch.get((name, vocab_size))
        if found is None or found.shape[0] < num_rows:
            found = torch.empty(num_rows, vocab_size, dtype=torch.float64, device=self._device)
            self._scratch[name, vocab_size] = found
        return found[:num_rows]

    def _zeroed(self, name: str, vocab_size: int, num_bytes: int) -> torch.Tensor:
        """Bytes that were zero when they were made and are the kernels' own since."""
        found = self._scratch.get((name, vocab_size))
        if found is None or found.numel() < num_bytes:
            found = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
            self._scratch[name, vocab_size] = found
        return found


@contextmanager
def _device_errors(num_rows: int) -> Iterator[None]:
    """What torch raises about the device, as an error of the step; our own errors pass."""
    try:
        yield
    except EdgeLLMError:
        raise
    except (RuntimeError, MemoryError) as error:
        raise StepDeviceError(
            f"sampling {num_rows} rows failed: {error}; close the session, and lower max_batch_size or kv_budget if "
            "memory ran out"
        ) from error


def _readable(logits: torch.Tensor) -> torch.Tensor:
    """Logits as the kernels read them: a supported type, neighbouring elements in a row."""
    if logits.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        logits = logits.float()
    row_stride, stride = logits.stride()
    apart = stride == 1 and (row_stride >= logits.shape[1] or logits.shape[0] == 1)
    return logits if apart else logits.contiguous()


def _reason(token_id: int) -> str:
    """What a negative id says."""
    return bad_logits(_LARGEST_OF[SampleStatus(-token_id)])


class _Step:
    """One step that is more than plain greedy.

    Attributes:
        order: row at each place: rows whose logits stay as they are come first, then the edited ones.
        reported: places that asked for log-probabilities; those with a bias, `num_biased` of them, come last.
        arrays, uploaded: what goes to the device, by name, before and after.
        failures: rows whose grammar is at its end in itself, with the reason.
    """

    def __init__(self, sampler: DeviceSampler, logits: torch.Tensor, rows: Sequence[SamplingState]) -> None:
        self.sampler = sampler
        self.logits = logits
        self.rows = rows
        self.edited = [row for row, state in enumerate(rows) if _is_edited(state)]
        edited = set(self.edited)
        self.order = [row for row in range(len(rows)) if row not in edited] + self.edited
        self.num_raw = len(rows) - len(edited)
        reported = [place for place, row in enumerate(self.order) if rows[row].params.logprobs is not None]
        self.reported = sorted(reported, key=lambda place: _has_bias(rows[self.order[place]]))
        self.num_biased = sum(_has_bias(rows[self.order[place]]) for place in reported)
        self.arrays: dict[str, Array] = {}
        self.uploaded: dict[str, torch.Tensor] = {}
        self.failures: dict[int, str] = {}

    def run(self, beside: Beside | None) -> SampleResult:
        self._put_parameters()
        if self.edited:
            self._put_edits([self.rows[row] for row in self.edited])
        if self.reported:
            self._put_reported()
        self.uploaded = self.sampler.going_up.upload(self.arrays)
        layout = self.sampler.coming_back.layout(self._result_shapes())
        token_ids, flags, *records = layout.device
        if self.edited:
            self._sample(self._edit(flags), token_ids, self.num_raw, len(self.order))
        if self.num_raw:
            self._sample(self.logits, token_ids, 0, self.num_raw, self.uploaded.get("raw rows"))
        if len(self.reported) > self.num_biased:
            self._report_raw(token_ids, records)
        if self.num_biased:
            self._report_biased(token_ids, records)
        # Ids lie in the order of places; who wants them beside the wait wants them in that of rows.
        in_order = beside is not None and self.order == list(range(len(self.order)))
        enqueue = partial(beside, token_ids) if beside is not None and in_order else None
        return self._result(*self.sampler.coming_back.download(layout, enqueue))

    # ---- what goes up -------------------------------------------------------------------------------------------

    def _put_parameters(self) -> None:
        states = [self.rows[row] for row in self.order]
        params = [state.params for state in states]
        self.arrays.update(
            temperature=np.array([one.temperature for one in params], np.float64),
            top_k=np.array([one.top_k for one in params], np.int32),
            top_p=np.array([one.top_p for one in params], np.float64),
            min_p=np.array([one.min_p for one in params], np.float64),
            seed=np.array([state.seed for state in states], np.uint64).view(np.int64),
            position=np.array([state.position for state in states], np.int64),
        )

    def _put_edits(self, states: list[SamplingState]) -> None:
        self.arrays["edited rows"] = np.array(self.edited, np.int32)
        if self.num_raw:
            self.arrays["raw rows"] = np.array(self.order[: self.num_raw], np.int32)
        if any(map(_has_bias, states)):
            self._put_lists("bias", [state.bias for state in states])
        self._put_masks(states)
        if any(state.seen is not None for state in states):
            self._put_lists("seen", [_seen(state) for state in states])
            self._put_numbers("repetition", [state.params.repetition_penalty for state in states])
        if any(state.output is not None for state in states):
            self._put_lists("output", [_output(state) for state in states])
            self._put_numbers("presence", [state.params.presence_penalty for state in states])
            self._put_numbers("frequency", [state.params.frequency_penalty for state in states])
        if any(state.end_tokens_masked for state in states):
            self._put_lists("excluded", [_excluded(state) for state in states])

    def _put_lists(self, name: str, lists: Lists) -> None:
        start = np.zeros(len(lists) + 1, np.int32)
        np.cumsum([len(ids) for ids, _ in lists], out=start[1:])
        size = int(start[-1])
        ids = np.zeros(-(-size // _LIST_STEP) * _LIST_STEP, np.int32)
        np.concatenate([part for part, _ in lists], out=ids[:size], casting="same_kind")
        self.arrays[f"{name} start"], self.arrays[f"{name} ids"] = start, ids
        parts = [part for _, part in lists if part is not None]
        if parts:
            values = self.arrays[f"{name} values"] = np.zeros(len(ids), parts[0].dtype)
            np.concatenate(parts, out=values[:size])

    def _put_numbers(self, name: str, numbers: list[float]) -> None:
        self.arrays[name] = np.array(numbers, np.float64)

    def _put_masks(self, states: list[SamplingState]) -> None:
        words_per_row = -(-self.logits.shape[1] // 32)
        masks: list[Array] = []
        index = np.full(len(states), -1, np.int32)
        for number, state in enumerate(states):
            if state.guide is None:
                continue
            words, reason = _allowed_words(state.guide)
            if reason:
                self.failures[self.edited[number]] = reason
                continue
            index[number] = len(masks)
            masks.append(words[:words_per_row].copy())
        if masks:
            self.arrays["mask"], self.arrays["mask index"] = np.stack(masks), index

    def _put_reported(self) -> None:
        rows = [self.order[place] for place in self.reported]
        self.arrays["reported rows"] = np.array(rows, np.int32)
        self.arrays["reported places"] = np.array(self.reported, np.int32)
        if self.num_biased:
            self._put_lists("reported bias", [self.rows[row].bias for row in rows[-self.num_biased :]])

    # ---- what runs ----------------------------------------------------------------------------------------------

    def _edit(self, flags: torch.Tensor) -> torch.Tensor:
        """The edited rows, in float64."""
        of = self.uploaded.get
        edits = LogitEdits(
            bias=self._lists("bias"),
            mask=of("mask"),
            mask_index=of("mask index"),
            seen=self._lists("seen"),
            repetition=of("repetition"),
            output=self._lists("output"),
            presence=of("presence"),
            frequency=of("frequency"),
            excluded=self._lists("excluded"),
        )
        out = self.sampler.edited_rows("edited", len(self.edited), self.logits.shape[1])
        flags.zero_()
        self.sampler.ops.logit_edit(self.logits, edits, out, flags, row_index=self.uploaded["edited rows"])
        return out

    def _lists(self, name: str) -> IdLists | None:
        start = self.uploaded.get(f"{name} start")
        if start is None:
            return None
        return IdLists(start, self.uploaded[f"{name} ids"], self.uploaded.get(f"{name} values"))

    def _sample(
        self, logits: torch.Tensor, token_ids: torch.Tensor, first: int, end: int, row_index: torch.Tensor | None = None
    ) -> None:
        drawn = [self.rows[row].params for row in self.order[first:end] if not self.rows[row].params.greedy]
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
        whole = end - first == len(self.order)
        parameters = [self.uploaded[name] if whole else self.uploaded[name][first:end] for name in names]
        self.sampler.ops.sample(
            logits,
            SampleRows(*parameters),
            token_ids if whole else token_ids[first:end],
            self.sampler.sample_workspace(end - first, logits.shape[1]),
            row_index=row_index,
            filters=any(one.top_k > 0 or one.top_p < 1.0 for one in drawn),
            draws=bool(drawn),
        )

    def _report_raw(self, token_ids: torch.Tensor, records: list[torch.Tensor]) -> None:
        """Log-probabilities of rows without a bias."""
        size = len(self.reported) - self.num_biased
        self.sampler.ops.logprobs(
            self.logits,
            token_ids,
            *(record[:size] for record in records),
            self.sampler.logprobs_workspace(size, self.logits.shape[1]),
            row_index=self.uploaded["reported rows"][:size],
            token_index=self.uploaded["reported places"][:size],
        )

    def _report_biased(self, token_ids: torch.Tensor, records: list[torch.Tensor]) -> None:
        """Log-probabilities know the bias and nothing else: such rows have theirs from copies of their own."""
        first, vocab_size = len(self.reported) - self.num_biased, self.logits.shape[1]
        biased = self.sampler.edited_rows("biased", self.num_biased, vocab_size)
        self.sampler.ops.logit_edit(
            self.logits,
            LogitEdits(bias=self._lists("reported bias")),
            biased,
            torch.zeros(self.num_biased, dtype=torch.int32, device=biased.device),  # flags that nobody reads
            row_index=self.uploaded["reported rows"][first:],
        )
        self.sampler.ops.logprobs(
            biased,
            token_ids,
            *(record[first:] for record in records),
            self.sampler.logprobs_workspace(self.num_biased, vocab_size),
            token_index=self.uploaded["reported places"][first:],
        )

    # ---- what comes back ----------------------------------------------------------------------------------------

    def _result_shapes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Token ids by place, flags of edited rows; of reported places the chosen token's value, top values and ids."""
        size = len(self.reported)
        num_top = max((self.rows[self.order[place]].params.logprobs or 0 for place in self.reported), default=0)
        ids, flags = ("i", (len(self.order),)), ("i", (len(self.edited),))
        return (ids, flags, ("d", (size,)), ("d", (size, num_top)), ("i", (size, num_top)))

    def _result(self, token_ids: Array, flags: Array, chosen: Array, top_values: Array, top_ids: Array) -> SampleResult:
        result = SampleResult.nothing_yet(self.rows)
        for row, token_id in zip(self.order, token_ids.tolist(), strict=True):
            result.token_ids[row] = token_id
            if token_id < 0:
                result.fail(row, _reason(token_id))
        for row, bits in zip(self.edited, flags.tolist(), strict=True):
            reason = self._failure(row, EditFlag(bits))
            if reason:
                result.fail(row, reason)
        for number, place in enumerate(self.reported):
            row = self.order[place]
            if row not in result.errors:
                num_top = self.rows[row].params.logprobs or 0
                pairs = zip(top_ids[number, :num_top].tolist(), top_values[number, :num_top].tolist(), strict=True)
                top = tuple((top_id, value) for top_id, value in pairs if value != -math.inf)
                result.logprobs[row] = TokenLogprobs(result.token_ids[row], float(chosen[number]), top)
        return result

    def _failure(self, row: int, flags: EditFlag) -> str:
        """Why an edited row has no token, in the order in which the host finds out; "" when it has one."""
        if EditFlag.RAW_NAN in flags:
            return bad_logits(math.nan)
        if EditFlag.RAW_INFINITY in flags:
            return bad_logits(math.inf)
        if EditFlag.RAW_FINITE not in flags:
            return bad_logits(-math.inf)
        if row in self.failures:
            return self.failures[row]
        state = self.rows[row]
        if state.guide is not None and EditFlag.LEFT_BY_GRAMMAR not in flags:
            return NOTHING_ALLOWED
        if state.end_tokens_masked and EditFlag.LEFT_AT_LAST not in flags:
            return min_tokens_leaves_nothing(state)
        return ""


_NO_IDS: Array = np.empty(0, np.int64)
_NO_COUNTS: Array = np.empty(0, np.int32)


def _allowed_words(guide: Guide) -> tuple[Array, str]:
    """As `Guide.allowed_words`; what it raises is the reason, since it concerns its row alone."""
    found: list[tuple[Array, str]] = []
    error = call_foreign(lambda: found.append(guide.allowed_words()))
    return found[0] if error is None else (_NO_COUNTS, sampling_failed(error))


def _is_edited(state: SamplingState) -> bool:
    counted = state.seen is not None or state.output is not None
    return counted or _has_bias(state) or state.guide is not None or state.end_tokens_masked


def _has_bias(state: SamplingState) -> bool:
    return len(state.bias[0]) > 0


def _seen(state: SamplingState) -> tuple[Array, None]:
    return (_NO_IDS if state.seen is None else state.seen.ids), None


def _output(state: SamplingState) -> tuple[Array, Array]:
    if state.output is None:
        return _NO_IDS, _NO_COUNTS
    return state.output.ids, state.output.counts_of(state.output.ids)


def _excluded(state: SamplingState) -> tuple[Array, None]:
    return (state.masked_ids if state.end_tokens_masked else _NO_IDS), None
