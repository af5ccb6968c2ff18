"""A runtime and session without a device: scripted admissions, tokens, refusals and failures.

`ScriptedRuntime` stands where `LLMRankRuntime` stands (`open_session`, `close`, one session at a time, a
compact refusal that outlives the session).  `ScriptedSession` is a `SessionCore`: plans are validated by the
same `plan_check` code, and cancellation, streams, finish decisions, deltas and eviction are the real ones.
Only the model and the page pool are played from a `Script`.

    script = Script(tokens={1: [70, 71, EOS_ID]})
    runtime = ScriptedRuntime(script=script, max_batch_size=2)
    session = runtime.open_session(SessionOptions(allow_compact_execution=True))
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from edgellm.cache.types import DecodingKvHeadroom, ReuseReport, ReuseStopReason
from edgellm.errors import CompactRefusedError, ContractViolation
from edgellm.session.core import SessionCore
from edgellm.session.frame import Reservation, RowOutcome, SessionGeometry, Step
from edgellm.session.types import AdmissionStatus, FinishReason, SequenceWork, SessionOptions
from edgellm.testing.toy_tokenizer import ToyTokenizer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from edgellm.request import LLMGenerationRequest
    from edgellm.session.resident import Resident

    NextToken = Callable[[npt.NDArray[np.int32], int], int]

_FIRST_LETTER_ID = 2 + ord("a")


def letters(prompt: npt.NDArray[np.int32], index: int) -> int:
    """Default script: lower-case letters that depend on the whole prompt and on the position; never ends."""
    return _FIRST_LETTER_ID + (int(prompt.astype("int64").sum()) + len(prompt) + index) % 26


@dataclass(slots=True)
class Script:
    """What happens.  Queues are consumed front to back; an empty queue means "as usual".

    Attributes:
        tokens: per request id, the ids it generates; once they are used up, `next_token` goes on.
        next_token: (prompt, index of the generated token) to id, for everybody else.
        admissions: outcome of the next admissions that reach the reservation: None admits, a status refuses
            (`NO_CAPACITY`, `REJECTED`), an exception is raised there.
        seat_failures: exceptions raised while seating, after the reservation (None: no failure).
        cached_prefix: (prompt) to reused tokens; cut to at most prompt length - 1.
        steps: for the next steps that run rows: None runs, an exception is raised by the forward.
        row_errors: request id to (number of generated tokens, message): the row fails, before it runs, once
            it has generated so many.
        commits_per_decode: request id to how many tokens one decode row accepts (speculation); default 1.
        published: step ordinals (from 1) that publish a prefix.
    """

    tokens: dict[int, Sequence[int]] = field(default_factory=dict)
    next_token: NextToken = letters
    admissions: deque[AdmissionStatus | Exception | None] = field(default_factory=deque)
    seat_failures: deque[Exception | None] = field(default_factory=deque)
    cached_prefix: Callable[[npt.NDArray[np.int32]], int] = lambda prompt: 0
    steps: deque[Exception | None] = field(default_factory=deque)
    row_errors: dict[int, tuple[int, str]] = field(default_factory=dict)
    commits_per_decode: dict[int, int] = field(default_factory=dict)
    published: set[int] = field(default_factory=set)

    def refuse_compact(self, message: str = "operator attention refused a mixed batch") -> None:
        """Let the next compact step be declined with a healthy device."""
        self.steps.append(CompactRefusedError(message))

    def token(self, request_id: int, prompt: npt.NDArray[np.int32], index: int) -> int:
        scripted = self.tokens.get(request_id, ())
        return int(scripted[index]) if index < len(scripted) else self.next_token(prompt, index)


class ScriptedRuntime:
    """Stands in for `LLMRankRuntime`; pass it to an engine as its runtime or `open_session` as its factory.

    Attributes:
        script: may be changed at any time; it is read at every call.
        log: what was called, in order: ("open", options), ("admit", request id), ("execute", plan),
            ("retire", request ids), ("close",).
        sessions: every session that was opened, the latest last.
        leased: request ids that hold a reservation; empty when nothing leaked.
    """

    def __init__(
        self,
        *,
        script: Script | None = None,
        max_batch_size: int = 4,
        max_input_length: int = 64,
        max_kv_capacity: int = 256,
        page_size: int = 4,
        num_pages: int = 1024,
        compact: bool = True,
        compact_reason: str = "this deployment has no ragged operators",
        uniform_sampling: bool = False,
        tokenizer: ToyTokenizer | None = None,
    ) -> None:
        self.script = script if script is not None else Script()
        self.tokenizer = tokenizer if tokenizer is not None else ToyTokenizer()
        self.geometry = SessionGeometry(
            max_batch_size=max_batch_size,
            max_input_length=max_input_length,
            max_kv_capacity=max_kv_capacity,
            page_size=page_size,
            num_pages=num_pages,
            headroom=DecodingKvHeadroom(),
            vocab_size=self.tokenizer.vocab_size,
        )
        self.uniform_sampling = uniform_sampling
        self.compact = compact
        self.compact_reason = "" if compact else compact_reason
        self.log: list[tuple[Any, ...]] = []
        self.sessions: list[ScriptedSession] = []
        self.leased: set[int] = set()
        self.steps_run = 0
        self._open: ScriptedSession | None = None

    def open_session(self, options: SessionOptions | None = None) -> ScriptedSession:
        """Raises: ContractViolation: a session is open already."""
        if self._open is not None:
            raise ContractViolation("open_session: a session is open on this runtime; close it first")
        options = options if options is not None else SessionOptions()
        compact = self.compact and options.allow_compact_execution
        reason = self.compact_reason
        if not compact and not reason:
            reason = "compact execution was not requested (SessionOptions.allow_compact_execution)"
        self.log.append(("open", options))
        self._open = ScriptedSession(self, compact=compact, reason=reason)
        self.sessions.append(self._open)
        return self._open

    def session_closed(self, session: ScriptedSession) -> None:
        if self._open is session:
            self._open = None

    def close(self) -> None:
        if self._open is not None:
            self._open.close()


class ScriptedSession(SessionCore):
    """`SessionCore` over a `Script`."""

    def __init__(self, runtime: ScriptedRuntime, *, compact: bool, reason: str) -> None:
        super().__init__(geometry=runtime.geometry, tokenizer=runtime.tokenizer, compact=compact, compact_reason=reason)
        self._runtime = runtime

    def admit(self, request: LLMGenerationRequest, request_id: Any, cancel_token: Any = None) -> Any:
        self._runtime.log.append(("admit", request_id))
        return super().admit(request, request_id, cancel_token)

    def execute(self, plan: Any) -> Any:
        self._runtime.log.append(("execute", list(plan)))
        return super().execute(plan)

    def requires_uniform_sampling(self, request: LLMGenerationRequest) -> bool:
        return self._runtime.uniform_sampling and not request.disable_spec_decode

    def _reserve(self, resident: Resident) -> Reservation:
        script = self._runtime.script
        outcome = script.admissions.popleft() if script.admissions else None
        if isinstance(outcome, Exception):
            raise outcome
        if outcome is not None and outcome is not AdmissionStatus.ADMITTED:
            return Reservation(outcome, reason=f"scripted {outcome.value}")
        start = max(0, min(script.cached_prefix(resident.prompt), resident.prompt_length - 1))
        self._runtime.leased.add(resident.request_id)
        return Reservation(AdmissionStatus.ADMITTED, prefill_start=start, reuse=_report(resident, start))

    def _unreserve(self, resident: Resident) -> None:
        self._runtime.leased.discard(resident.request_id)

    def _seat(self, resident: Resident) -> None:
        failures = self._runtime.script.seat_failures
        failure = failures.popleft() if failures else None
        if failure is not None:
            raise failure
        super()._seat(resident)

    def _prepare_rows(self, step: Step) -> None:
        if not self._runtime.script.row_errors:
            return
        for resident in step.rows:
            after, message = self._runtime.script.row_errors.get(resident.request_id, (-1, ""))
            if len(resident.generated) == after:
                resident.end(FinishReason.ERROR, message)

    def _run(self, step: Step) -> list[RowOutcome]:
        script = self._runtime.script
        failure = script.steps.popleft() if script.steps else None
        if failure is not None:
            raise failure
        outcomes = []
        for resident, descriptor in zip(step.rows, step.descriptors, strict=True):
            count = 1
            if descriptor.work is SequenceWork.DECODE:
                count = script.commits_per_decode.get(resident.request_id, 1)
            first = len(resident.generated)
            token_ids = (
                [script.token(resident.request_id, resident.prompt, first + i) for i in range(count)]
                if descriptor.select_last_token_logits
                else []
            )
            committed = descriptor.query_length if descriptor.work is SequenceWork.CONTEXT else count
            outcomes.append(RowOutcome(committed, token_ids))
        return outcomes

    def _commit(self, step: Step) -> bool:
        self._runtime.steps_run += 1
        return self._runtime.steps_run in self._runtime.script.published

    def _retire(self, retired: Sequence[Resident], old_to_new: Sequence[int], survivors: int) -> None:
        request_ids = [resident.request_id for resident in retired]
        self._runtime.log.append(("retire", request_ids))
        self._runtime.leased.difference_update(request_ids)

    def _on_compact_refused(self, failure: str) -> None:
        self._runtime.compact = False
        self._runtime.compact_reason = failure

    def _release_everything(self) -> None:
        self._runtime.log.append(("close",))
        self._runtime.leased.difference_update(resident.request_id for resident in self._order)
        self._runtime.session_closed(self)


def _report(resident: Resident, reused: int) -> ReuseReport:
    reason = ReuseStopReason.FULL if reused == resident.prompt_length - 1 else ReuseStopReason.NO_RECORD
    return ReuseReport(resident.prompt_length, reused, reused, reason, reused)
