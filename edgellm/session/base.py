"""`RuntimeSession`: what a scheduler drives.

Abstract so that admission, cancellation, recovery and shutdown can be tested against a scripted session
without a device.  The scheduler decides who runs and when; the session checks the decision against the
residents it holds, runs it, and reports what happened.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from edgellm.session.types import (
    AdmissionResult,
    BatchResult,
    RequestId,
    ResidentRef,
    ScheduledSequenceDescriptor,
    SessionCapabilities,
    StepResult,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgellm.cache.metrics import ContextCacheMetrics
    from edgellm.cache.types import Hash128
    from edgellm.request import CancelToken, LLMGenerationRequest, LLMGenerationResponse
    from edgellm.streaming import StreamChannel


class RuntimeSession(ABC):
    """One runtime held open for the life of an engine; sequences enter and leave one at a time.

    An empty session idles; it is not torn down between requests, and the first sequence into an empty
    session takes the same path as the tenth into a full one.

    Threading: one thread drives a session; every method is called from it.  Nothing is re-entrant.
    """

    @abstractmethod
    def admit(
        self, request: LLMGenerationRequest, request_id: RequestId, cancel_token: CancelToken | None = None
    ) -> AdmissionResult:
        """Validate, tokenise, lease and seat one request.  Its context step is not run here.

        Raises:
            UnsupportedRequestError: a kind of request this session never serves.  Nothing was modified.
            AdmissionError, InputTooLongError: validation, templating or tokenising failed, or the prompt
                is too long.  Nothing was modified.
            ContractViolation: call order, exclusivity, a request id that is 0 or already resident, or a request id or
                cancel token of a wrong type.
            SessionLostError: the reservation failed on the device; do not drive the session further.
        """

    @abstractmethod
    def execute(self, plan: Sequence[ScheduledSequenceDescriptor]) -> StepResult:
        """Run one step over the sequences named by `plan`; everything in the result happened together.

        Raises:
            ContractViolation: the plan disagrees with the residents or their committed lengths.  The
                session is untouched.
            StepDeviceError: a device failure inside the step; same meaning as `ok == False`.
        """

    @abstractmethod
    def materialize(self, result: BatchResult, stop_strings: Sequence[str]) -> LLMGenerationResponse:
        """Turn a finished snapshot into a response: decode, then trim the earliest stop string.  Pure.

        Raises:
            InvalidArgumentError: `result` is no snapshot, or `stop_strings` no list of texts.
        """

    @abstractmethod
    def residents(self) -> list[ResidentRef]:
        """Refs of every live resident, in resident (execution) order."""

    def copy_residents(self, out: list[ResidentRef]) -> None:
        """`residents()` written into `out`, reusing the list object."""
        out[:] = self.residents()

    def release_for_readmission(self, ref: ResidentRef) -> None:
        """After a compact refusal: detach `ref`'s stream channel unfinished so its request can move.

        Raises:
            ContractViolation: `ref` is unknown, its prompt completed, or no step was refused.
        """
        if ref not in self.residents():
            from edgellm.errors import ContractViolation

            raise ContractViolation(
                f"release_for_readmission: {ref} is not a resident; residents are {self.residents()}"
            )

    def release_for_replay(self, ref: ResidentRef) -> bool:
        """After the session was lost or refused a step: let `ref`'s request begin again in another session.

        Its stream is given back empty.  The resident itself stays until the session closes, and produces nothing.

        Returns:
            False when something of it was shown already (a chunk was read, a callback was called), or the session
            cannot tell (the default).  Nothing was changed.
        Raises:
            ContractViolation: `ref` is unknown, or the session can still run.
        """
        return False

    def attach_stream(self, ref: ResidentRef, channel: StreamChannel) -> bool:
        """Give a resident that brought no stream one now; what it generated so far is pushed as one chunk.

        From then on text and ids are those of a stream that was there from the start.

        Returns:
            False: this session attaches streams at admission only (the default); nothing was changed.
        Raises:
            ContractViolation: `ref` is no resident or has a stream, or the channel was used.  Nothing was changed.
        """
        return False

    @abstractmethod
    def idle(self) -> bool:
        """True when nobody is resident.  The session waits; it is not finished."""

    @abstractmethod
    def exclusive_resident(self) -> bool:
        """True while a resident requires the session to itself."""

    @abstractmethod
    def requires_exclusive_admission(self, request: LLMGenerationRequest) -> bool:
        """Whether `request` would need the session to itself.  Pure."""

    def requires_uniform_sampling(self, request: LLMGenerationRequest) -> bool:
        """Whether `request` would run on a decoder with one sampling setting per batch.  Pure."""
        return False

    def next_block_identity(self, ref: ResidentRef) -> Hash128 | None:
        """Identity of the prompt block that begins where `ref`'s computed prefix ends.  Pure.

        Two residents with equal identities would compute the same block: one of them may wait a step and
        share it.  None when nothing can be shared there: prompt complete, no full block left, cache bypassed,
        or a session without a context cache (the default).

        Raises:
            ContractViolation: `ref` is none of an admission's.  One that has left gives None.
        """
        return None

    def capabilities(self) -> SessionCapabilities:
        """What this deployment can execute; the default is single-cohort execution only."""
        return SessionCapabilities(reason="this session does not report compact execution")

    def context_cache_metrics(self) -> ContextCacheMetrics | None:
        """Context-cache counters over the runtime's life; None without a context cache."""
        return None

    def close(self) -> None:  # noqa: B027 - a session without resources has nothing to do
        """Finish attached channels, return every lease, release the runtime.  Idempotent; safe after any failure.

        Raises:
            ContractViolation: called from inside another call of the session; nothing was closed.
        """
