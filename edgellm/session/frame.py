"""`SessionFrame`: state, queries, driving rules and ending of a session; what a mechanism must supply.

The rules of a session are written once, in three layers: this frame, admission (`admission.py`) and
execution (`core.py`).  A subclass of `SessionCore` supplies the mechanism: `RankRuntimeSession` leases pages
and runs a model, the scripted session of `edgellm.testing` plays a script.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from edgellm.errors import ContractViolation, InvariantError
from edgellm.foreign import describe_value
from edgellm.log import get_logger
from edgellm.session._ledger import still_running
from edgellm.session._slots import ResidentSlotPool
from edgellm.session._step_plan import StepPlan
from edgellm.session.base import RuntimeSession
from edgellm.session.channels import attach_late, finish_unfinished
from edgellm.session.materialize import materialize_result
from edgellm.session.plan_check import PlanLimits, StepShape
from edgellm.session.resident import Resident
from edgellm.session.text import TextPipeline
from edgellm.session.types import (
    AdmissionStatus,
    BatchResult,
    ResidentRef,
    ScheduledSequenceDescriptor,
    SessionCapabilities,
    StepId,
)
from edgellm.streaming import StreamChannel
from edgellm.tokenization.detokenizer import IncrementalDetokenizer
from edgellm.tokenization.stop_strings import StopStringMatcher

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from edgellm.cache.types import DecodingKvHeadroom, ReuseReport
    from edgellm.request import LLMGenerationRequest, LLMGenerationResponse
    from edgellm.sampling.logprobs import TokenLogprobs
    from edgellm.sampling.state import SamplingState

_logger = get_logger(__name__)
NO_STEP = StepId(0)
_Session = TypeVar("_Session", bound="SessionFrame")


class SessionState(Enum):
    """OPEN is drivable; LOST and REFUSED (after a compact refusal) only answer queries and close."""

    OPEN = "open"
    LOST = "lost"
    REFUSED = "refused"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class SessionGeometry:
    """What a session is opened over; lengths in tokens, counts in pages."""

    max_batch_size: int
    max_input_length: int
    max_kv_capacity: int
    page_size: int
    num_pages: int
    headroom: DecodingKvHeadroom
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """What the mechanism granted one sequence before it is seated."""

    status: AdmissionStatus
    prefill_start: int = 0
    reuse: ReuseReport | None = None
    reason: str = ""


@dataclass(slots=True)
class RowOutcome:
    """What one executed row gained: positions, and tokens when it selected logits.

    A non-empty `error` ends this row; the others of the step are unaffected.
    """

    committed: int
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] | None = None
    error: str = ""


@dataclass(slots=True)
class OneTokenOutcomes:
    """Outcomes of a step of decode rows: each committed one position and got one token, without log-probabilities.

    Attributes:
        token_ids: (n,) int32, in the order of the step's rows; -1 exactly where `errors` names the row.
        errors: row index to reason; such a row ends, the others are unaffected.
    """

    token_ids: npt.NDArray[np.int32]
    errors: dict[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True)
class Step:
    """One step on its way: the rows that run, in plan order, and what became of them.

    Attributes:
        plan: what was asked for.
        rows, descriptors: the residents that run and what each does, one entry each; `rows` is not to be modified.
        execution: what ran.
        one_token_each: the tokens of `rows`, (n,) int32, where all of them decoded exactly one and none failed; else
            None.  Set before `_commit`.
    """

    plan: StepPlan
    shape: StepShape
    rows: list[Resident]
    descriptors: StepPlan
    step_id: StepId = NO_STEP
    execution: Sequence[ScheduledSequenceDescriptor] = ()
    one_token_each: npt.NDArray[np.int32] | None = None
    published_prefix: bool = False
    graph_launched: bool = False

    def keep_running(self) -> None:
        """Leave out the rows that have ended."""
        kept = still_running(self.rows)
        if kept is not None:
            self.rows = [self.rows[index] for index in kept]
            self.descriptors = self.descriptors.take(kept)


class SessionFrame(RuntimeSession):
    """Seats and states of a session; see the module text."""

    def __init__(
        self, *, geometry: SessionGeometry, tokenizer: Any, compact: bool, compact_reason: str, capacity: int = 0
    ) -> None:
        """
        Args:
            compact: whether compact steps are available; `compact_reason` says why not.
            capacity: rows of the slot pool; 0 means `geometry.max_batch_size`.
        """
        self._geometry = geometry
        self._tokenizer = tokenizer
        self._compact = compact
        self._compact_reason = compact_reason
        self._slots = ResidentSlotPool(max(capacity, geometry.max_batch_size))
        self._seats: list[Resident | None] = [None] * self._slots.capacity
        self._order: list[Resident] = []
        self._next_step_id = 1
        self._plan_limits: PlanLimits | None = None  # made on first use
        self._state = SessionState.OPEN
        self._state_reason = ""
        self._ended_in = SessionState.OPEN
        self._thread = threading.current_thread()
        self._driving = ""

    # ---- mechanism, supplied by a subclass --------------------------------------------------------------

    def _check_decoder(self, request: LLMGenerationRequest) -> None:
        """Refuse what the deployment's decoder cannot run.

        Raises:
            UnsupportedRequestError: it cannot; nothing was changed.
        """

    @abstractmethod
    def _reserve(self, resident: Resident) -> Reservation:
        """Lease what the sequence needs and bind its row.

        Raises:
            CallerError: refused for good; nothing was changed.  Any other exception loses the session.
        """

    @abstractmethod
    def _unreserve(self, resident: Resident) -> None:
        """Undo the latest `_reserve`; the resident never ran.  Raising loses the session."""

    @abstractmethod
    def _prepare_rows(self, step: Step) -> None:
        """Before the step runs: grow what its rows need.  Ends rows that cannot run with ERROR."""

    @abstractmethod
    def _run(self, step: Step) -> list[RowOutcome] | OneTokenOutcomes:
        """Execute the step's rows; one outcome a row, in the order of `step.rows`."""

    @abstractmethod
    def _commit(self, step: Step) -> bool:
        """After tokens and finish decisions: record advances, publish.  Whether something became visible."""

    @abstractmethod
    def _retire(self, retired: Sequence[Resident], old_to_new: Sequence[int], survivors: int) -> None:
        """Give back what `retired` held.

        Args:
            old_to_new: per resident in resident order its new index, -1 for the retired; order-preserving.
        """

    @abstractmethod
    def _release_everything(self) -> None:
        """At close: return every lease and whatever was acquired by opening."""

    def _make_sampling(self, request: LLMGenerationRequest, prompt: npt.NDArray[np.int32]) -> SamplingState | None:
        """What the sampler remembers of the sequence, or None where no sampler runs.

        Raises:
            AdmissionError: the sampling parameters do not fit the model.
        """
        return None

    def _make_text(self, request: LLMGenerationRequest, channel: StreamChannel | None) -> TextPipeline | None:
        """Incremental text of one request, or None where nobody reads it before the end."""
        params = request.sampling
        if channel is None and not params.stop_strings:
            return None
        skip = params.skip_special_tokens
        if channel is not None and channel.skip_special_tokens is not None:
            skip = channel.skip_special_tokens
        return TextPipeline(
            IncrementalDetokenizer(self._tokenizer, skip_special_tokens=skip),
            StopStringMatcher(params.stop_strings, include_stop=params.include_stop_str_in_output)
            if params.stop_strings
            else None,
        )

    # ---- queries ----------------------------------------------------------------------------------------

    def residents(self) -> list[ResidentRef]:
        self._check_thread("residents")
        return [resident.ref for resident in self._order]

    def copy_residents(self, out: list[ResidentRef]) -> None:
        self._check_thread("copy_residents")
        if not isinstance(out, list):
            raise ContractViolation(f"copy_residents: out is {describe_value(out)}; pass a list")
        out[:] = [resident.ref for resident in self._order]

    def idle(self) -> bool:
        return not self._order

    def exclusive_resident(self) -> bool:
        return any(resident.exclusive for resident in self._order)

    def requires_exclusive_admission(self, request: LLMGenerationRequest) -> bool:
        return request.token_callback is not None

    def capabilities(self) -> SessionCapabilities:
        geometry = self._geometry
        return SessionCapabilities(
            compact=self._compact,
            reason=self._compact_reason,
            max_batch_size=geometry.max_batch_size,
            max_input_length=geometry.max_input_length,
            kv_page_size=geometry.page_size,
        )

    def materialize(self, result: BatchResult, stop_strings: Sequence[str]) -> LLMGenerationResponse:
        return materialize_result(result, stop_strings, self._tokenizer)

    @property
    def state(self) -> SessionState:
        return self._state

    def _on_compact_refused(self, failure: str) -> None:
        """Remember, for the runtime's life, that compact steps are unavailable."""

    # ---- streams ----------------------------------------------------------------------------------------

    def attach_stream(self, ref: ResidentRef, channel: StreamChannel) -> bool:
        self._check_thread("attach_stream")
        if self._driving or self._state is SessionState.CLOSED:
            where = f"inside {self._driving}" if self._driving else "closed"
            raise ContractViolation(f"attach_stream: the session is {where}; attach between two steps")
        if not isinstance(channel, StreamChannel):
            raise ContractViolation(f"attach_stream: channel is {describe_value(channel)}; pass StreamChannel.create()")
        resident = self._live(ref, "attach_stream")
        if resident.channel is not None or resident.released:
            raise ContractViolation(f"attach_stream: request {resident.request_id} has a stream, or was released")
        attach_late(resident, channel, self._make_text(resident.request, channel))
        return True

    def _live(self, ref: ResidentRef, call: str) -> Resident:
        resident = self._seated(ref, call)
        if resident is None:
            raise ContractViolation(f"{call}: {ref} is not a live resident")
        return resident

    def _seated(self, ref: ResidentRef, call: str) -> Resident | None:
        """The resident of `ref`; None when it is gone.

        Raises:
            ContractViolation: `ref` is none of an admission's.
        """
        if not (isinstance(ref, ResidentRef) and isinstance(ref.slot, int) and isinstance(ref.epoch, int)):
            raise ContractViolation(f"{call}: ref is {describe_value(ref)}; pass the ResidentRef of an admission")
        resident = self._seats[ref.slot] if 0 <= ref.slot < len(self._seats) else None
        return resident if resident is not None and resident.ref == ref else None

    # ---- ending -----------------------------------------------------------------------------------------

    def release_for_readmission(self, ref: ResidentRef) -> None:
        self._check_thread("release_for_readmission")
        if self._state is not SessionState.REFUSED:
            raise ContractViolation(
                f"release_for_readmission: the session is {self._state.value}; only after a refused compact step "
                f"can a request move to another session"
            )
        resident = self._live(ref, "release_for_readmission")
        if not resident.prompt_remaining or resident.generated:
            raise ContractViolation(
                f"release_for_readmission: {ref} completed its prompt; fail request {resident.request_id} instead"
            )
        if resident.released:
            raise ContractViolation(f"release_for_readmission: {ref} was released already")
        if resident.channel is not None:
            resident.channel.detach()
        resident.released = True

    def release_for_replay(self, ref: ResidentRef) -> bool:
        self._check_thread("release_for_replay")
        if self._state not in (SessionState.LOST, SessionState.REFUSED):
            raise ContractViolation(
                f"release_for_replay: the session is {self._state.value}; only after it was lost can a request begin "
                f"again in another one"
            )
        resident = self._live(ref, "release_for_replay")
        if resident.request.token_callback is not None and resident.generated:
            return False
        if resident.released or (resident.channel is not None and not resident.channel.rewind()):
            return False
        resident.released = True
        return True

    def close(self) -> None:
        """See `RuntimeSession.close`.

        Raises:
            ContractViolation: a call of this session is running (here or on another thread); nothing was closed.
        """
        if self._state is SessionState.CLOSED:
            return
        if self._driving:
            raise ContractViolation(f"close: the session is inside {self._driving}; close it after that returns")
        self._ended_in = self._state
        self._state = SessionState.CLOSED
        for resident in self._order:
            finish_unfinished(resident)
        try:
            self._release_everything()
        except Exception:
            _logger.exception("closing the session: not everything could be released")
        for resident in self._order:
            self._seats[resident.ref.slot] = None
            self._slots.release(resident.ref)
        self._order = []

    def __copy__(self) -> NoReturn:
        raise TypeError("a session owns its runtime's pages and cannot be copied; open another one")

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError("a session owns its runtime's pages and cannot be copied; open another one")

    def __enter__(self: _Session) -> _Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- rules of driving -------------------------------------------------------------------------------

    def _check_thread(self, call: str) -> None:
        current = threading.current_thread()
        if current is not self._thread:
            raise ContractViolation(
                f"{call}: the session is driven by thread {self._thread.name!r} (id {self._thread.ident}), this call "
                f"comes from {current.name!r} (id {current.ident}); drive it from the thread that opened it"
            )

    @contextmanager
    def _drive(self, call: str) -> Iterator[None]:
        self._check_thread(call)
        if self._driving:
            raise ContractViolation(f"{call}: called from inside {self._driving}; sessions are not re-entrant")
        if self._state is not SessionState.OPEN:
            raise ContractViolation(
                f"{call}: the session is {self._state.value}"
                f"{f' ({self._state_reason})' if self._state_reason else ''}; close it and open a new one"
            )
        self._driving = call
        try:
            yield
        finally:
            self._driving = ""

    def _lose(self, reason: str) -> None:
        if self._state is SessionState.OPEN:
            self._state, self._state_reason = SessionState.LOST, reason

    def check_invariants(self) -> None:
        """Recount seats, slots and order.

        Raises:
            InvariantError: they disagree.
        """
        self._slots.check_invariants()
        seated = {resident.ref.slot for resident in self._seats if resident is not None}
        ordered = [resident.ref.slot for resident in self._order]
        if seated != set(ordered) or len(ordered) != len(set(ordered)):
            raise InvariantError(f"session: slots {sorted(seated)} are seated, resident order has {ordered}")
        for resident in self._order:
            if not self._slots.contains(resident.ref):
                raise InvariantError(f"session: {resident.ref} is seated but does not own its slot")
