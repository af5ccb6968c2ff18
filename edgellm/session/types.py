"""Value types of the session: identities, plans, admissions and step results.

Plain values without pointers, so that they can be logged, compared and sent to other ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NewType

from edgellm.argument_check import check_flag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgellm.cache.types import ReuseReport
    from edgellm.sampling.logprobs import TokenLogprobs

RequestId = NewType("RequestId", int)
StepId = NewType("StepId", int)


@dataclass(frozen=True, slots=True)
class ResidentRef:
    """`(slot, epoch)`: one residency of one slot, never reused.  Epoch 0 is never live."""

    slot: int = -1
    epoch: int = 0


class SequenceWork(Enum):
    CONTEXT = "context"
    DECODE = "decode"


class FinishReason(str, Enum):
    """How a sequence ended.  A member equals its value: "length"."""

    NOT_FINISHED = "not_finished"
    END_ID = "end_id"
    LENGTH = "length"
    STOP_WORDS = "stop_words"
    CANCELLED = "cancelled"
    ERROR = "error"

    @property
    def openai(self) -> str | None:
        """The OpenAI name: `stop`, `length`, `cancelled`, `error`, or None while unfinished."""
        return _OPENAI_FINISH_REASON[self]


_OPENAI_FINISH_REASON = {
    FinishReason.NOT_FINISHED: None,
    FinishReason.END_ID: "stop",
    FinishReason.STOP_WORDS: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "cancelled",
    FinishReason.ERROR: "error",
}


@dataclass(frozen=True, slots=True)
class SequenceIdentity:
    request_id: RequestId
    resident: ResidentRef


@dataclass(frozen=True, slots=True)
class ScheduledSequenceDescriptor:
    """One participant of a step: what it does (`work`), from where (`past_length`), how far."""

    identity: SequenceIdentity
    work: SequenceWork
    query_length: int
    past_length: int
    select_last_token_logits: bool = True


class AdmissionStatus(Enum):
    ADMITTED = "admitted"
    NO_CAPACITY = "no_capacity"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class AdmissionResult:
    """What became of one admission; `[prefill_start, prompt_length)` is the context work left."""

    status: AdmissionStatus
    ref: ResidentRef = ResidentRef()
    reason: str = ""
    prompt_length: int = 0
    prefill_start: int = 0


@dataclass(slots=True)
class TokenDelta:
    token_ids: list[int]


@dataclass(slots=True)
class BatchResult:
    """Snapshot of a finished sequence: everything a response needs.

    `generate_length` counts generated tokens; they are the last `generate_length` of `token_ids`.
    """

    token_ids: list[int]
    raw_input_ids: list[int]
    generate_length: int
    terminal_reason: FinishReason
    iterations: int = 0
    effective_prefill_length: int = 0
    pruned_prefill_tokens: int = 0
    accepted_draft_tokens: int = 0
    proposed_draft_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    reuse: ReuseReport | None = None
    stop_match: str | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    error_message: str = ""

    @property
    def generated_ids(self) -> list[int]:
        return self.token_ids[len(self.token_ids) - self.generate_length :]


@dataclass(slots=True)
class StepResult:
    """What one step did: the single commit unit (see `RuntimeSession.execute`).

    The three sequences equal lists; their items may be built when somebody looks.
    """

    ok: bool = False
    work: SequenceWork = SequenceWork.CONTEXT
    step_id: StepId = StepId(0)
    participants: Sequence[SequenceIdentity] = field(default_factory=list)
    execution: Sequence[ScheduledSequenceDescriptor] = field(default_factory=list)
    deltas: Sequence[tuple[ResidentRef, TokenDelta]] = field(default_factory=list)
    finished: list[tuple[ResidentRef, BatchResult]] = field(default_factory=list)
    published_prefix: bool = False
    graph_launched: bool = False
    compact: bool = False
    compact_refused: bool = False
    failure: str = ""


@dataclass(frozen=True, slots=True)
class SessionCapabilities:
    compact: bool = False
    reason: str = ""
    max_batch_size: int = 0
    max_input_length: int = 0
    kv_page_size: int = 128


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """
    Raises:
        InvalidArgumentError: no flag.
    """

    allow_compact_execution: bool = False

    def __post_init__(self) -> None:
        check_flag("allow_compact_execution", self.allow_compact_execution)
