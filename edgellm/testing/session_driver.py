"""`SessionDriver`: drives any `RuntimeSession` the way a scheduler would, and checks its results on the way.

It keeps the scheduler's mirror of the ledger, builds descriptors from it, and advances it from
`StepResult.execution` only.  A result that contradicts the mirror raises `InvariantError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edgellm.errors import InvariantError
from edgellm.session.types import (
    AdmissionResult,
    AdmissionStatus,
    BatchResult,
    RequestId,
    ResidentRef,
    ScheduledSequenceDescriptor,
    SequenceIdentity,
    SequenceWork,
    StepResult,
)

if TYPE_CHECKING:
    from edgellm.request import CancelToken, LLMGenerationRequest, LLMGenerationResponse
    from edgellm.session.base import RuntimeSession


@dataclass(slots=True)
class Mirror:
    """The scheduler's copy of one resident's ledger; lengths in tokens."""

    identity: SequenceIdentity
    request: LLMGenerationRequest
    committed: int
    prompt_remaining: int
    tokens: list[int] = field(default_factory=list)


class SessionDriver:
    """Attributes:
    live: request id to mirror, in order of admission.
    finished: request id to snapshot.
    deltas: request id to every token that deltas carried.
    results: every step result, in order.
    """

    def __init__(self, session: RuntimeSession) -> None:
        self.session = session
        self.live: dict[int, Mirror] = {}
        self.finished: dict[int, BatchResult] = {}
        self.deltas: dict[int, list[int]] = {}
        self.results: list[StepResult] = []
        self._stops: dict[int, tuple[str, ...]] = {}
        self._next_id = 1

    def admit(
        self,
        request: LLMGenerationRequest,
        *,
        request_id: int | None = None,
        cancel_token: CancelToken | None = None,
    ) -> AdmissionResult:
        """Admit under the next id (or `request_id`); only an ADMITTED request is mirrored."""
        number = self._next_id if request_id is None else request_id
        result = self.session.admit(request, RequestId(number), cancel_token)
        if result.status is AdmissionStatus.ADMITTED:
            self._next_id = max(self._next_id, number + 1)
            self.live[number] = Mirror(
                SequenceIdentity(RequestId(number), result.ref),
                request,
                committed=result.prefill_start,
                prompt_remaining=result.prompt_length - result.prefill_start,
            )
            self.deltas[number] = []
            self._stops[number] = request.sampling.stop_strings
        return result

    def context(self, request_id: int, tokens: int | None = None) -> ScheduledSequenceDescriptor:
        """The next chunk of a prompt: `tokens` of it, or all that is left."""
        mirror = self.live[request_id]
        query = mirror.prompt_remaining if tokens is None else min(tokens, mirror.prompt_remaining)
        return ScheduledSequenceDescriptor(
            mirror.identity, SequenceWork.CONTEXT, query, mirror.committed, query == mirror.prompt_remaining
        )

    def decode(self, request_id: int) -> ScheduledSequenceDescriptor:
        mirror = self.live[request_id]
        return ScheduledSequenceDescriptor(mirror.identity, SequenceWork.DECODE, 1, mirror.committed)

    def work(self, request_id: int, chunk: int | None = None) -> ScheduledSequenceDescriptor:
        """A chunk while the prompt is incomplete, else a decode row."""
        return self.context(request_id, chunk) if self.live[request_id].prompt_remaining else self.decode(request_id)

    def step(self, *plan: ScheduledSequenceDescriptor) -> StepResult:
        """Execute one plan and advance the mirror from what ran."""
        result = self.session.execute(plan)
        self.results.append(result)
        if result.ok:
            self._apply(plan, result)
        return result

    def step_all(self, chunk: int | None = None) -> StepResult:
        """One step over every live request: chunks and decode rows together."""
        return self.step(*(self.work(request_id, chunk) for request_id in self.live))

    def run(self, chunk: int | None = None, *, limit: int = 10_000) -> None:
        """Step until nobody is live.

        Raises:
            InvariantError: a step failed, or `limit` steps did not suffice.
        """
        for _ in range(limit):
            if not self.live:
                return
            result = self.step_all(chunk)
            if not result.ok:
                raise InvariantError(f"a step failed: {result.failure}")
        raise InvariantError(f"{len(self.live)} requests are still live after {limit} steps")

    def response(self, request_id: int) -> LLMGenerationResponse:
        return self.session.materialize(self.finished[request_id], self._stops[request_id])

    def _apply(self, plan: Sequence[ScheduledSequenceDescriptor], result: StepResult) -> None:
        if [descriptor.identity for descriptor in plan] != result.participants:
            raise InvariantError("participants do not mirror the plan")
        if (result.step_id == 0) != (not result.execution):
            raise InvariantError(f"step id {result.step_id} with {len(result.execution)} executed sequences")
        planned = {descriptor.identity: descriptor for descriptor in plan}
        for executed in result.execution:
            mirror = self.live[executed.identity.request_id]
            if executed.past_length != mirror.committed:
                raise InvariantError(f"executed from {executed.past_length}, the mirror is at {mirror.committed}")
            mirror.committed += executed.query_length
            if executed.work is SequenceWork.CONTEXT:
                mirror.prompt_remaining -= planned[executed.identity].query_length
        by_ref = {mirror.identity.resident: request_id for request_id, mirror in self.live.items()}
        for ref, delta in result.deltas:
            self._mirror_of(ref, by_ref).tokens += delta.token_ids
            self.deltas[by_ref[ref]] += delta.token_ids
        for ref, snapshot in result.finished:
            mirror = self._mirror_of(ref, by_ref)
            if snapshot.generated_ids[: len(mirror.tokens)] != mirror.tokens:
                raise InvariantError("a snapshot contradicts the deltas before it")
            self.finished[by_ref[ref]] = snapshot
            del self.live[by_ref.pop(ref)]

    def _mirror_of(self, ref: ResidentRef, by_ref: dict[ResidentRef, int]) -> Mirror:
        if ref not in by_ref:
            raise InvariantError(f"{ref} is not live: reported twice in one step, or after it finished")
        return self.live[by_ref[ref]]
