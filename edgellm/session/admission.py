"""`SessionAdmission`: from a request to a seated resident, or to a refusal that changed nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from edgellm.errors import (
    AdmissionError,
    CallerError,
    ContractViolation,
    InputTooLongError,
    InvalidArgumentError,
    SessionLostError,
)
from edgellm.foreign import describe_value
from edgellm.log import get_logger
from edgellm.memory import pool_remedy
from edgellm.request import CancelToken, LLMGenerationRequest
from edgellm.sampling.params import SamplingParams
from edgellm.session.finish import FinishRule
from edgellm.session.frame import SessionFrame
from edgellm.session.prompt import TokenizedPrompt, build_prompt
from edgellm.session.request_check import check_request, check_supported, read_foreign
from edgellm.session.resident import Resident
from edgellm.session.sampling_agreement import sampling_difference
from edgellm.session.types import AdmissionResult, AdmissionStatus, RequestId, SequenceIdentity

_logger = get_logger(__name__)
_T = TypeVar("_T")
_LAST_ID = 2**64 - 1


@dataclass(slots=True)
class _Candidate:
    """A request that was checked and tokenised, before anything is held for it.

    Attributes:
        budget: tokens that it may generate; 0 when there is no room, and `limit` says why.
    """

    request: LLMGenerationRequest
    prompt: TokenizedPrompt
    budget: int
    limit: str
    exclusive: bool
    uniform: bool


class SessionAdmission(SessionFrame):
    """The stages of admission, in order; every one that can allocate comes before the channel attach."""

    def admit(
        self, request: LLMGenerationRequest, request_id: RequestId, cancel_token: CancelToken | None = None
    ) -> AdmissionResult:
        with self._drive("admit"):
            _check_arguments(request, request_id, cancel_token)
            exclusive = self.requires_exclusive_admission(request)
            self._check_call_order(request_id, exclusive)
            candidate = _read_request(lambda: self._examine(request, exclusive))
            if candidate.budget <= 0:
                return AdmissionResult(
                    AdmissionStatus.REJECTED, reason=candidate.limit, prompt_length=len(candidate.prompt)
                )
            ref = self._slots.acquire() if len(self._order) < self._geometry.max_batch_size else None
            if ref is None:
                return AdmissionResult(AdmissionStatus.NO_CAPACITY, reason="every slot is taken; retry later")
            try:
                identity = SequenceIdentity(request_id, ref)
                resident = _read_request(lambda: self._make_resident(candidate, identity, cancel_token))
                return self._reserve_and_seat(resident)
            except Exception:
                raise
            except BaseException:
                self._lose(f"the admission of request {request_id} was interrupted; what it leased is unknown")
                raise
            finally:
                if self._seats[ref.slot] is None:
                    self._slots.release(ref)

    def _examine(self, request: LLMGenerationRequest, exclusive: bool) -> _Candidate:
        """Stages A1 to A4; pure but for the tokenizer."""
        check_supported(request)
        self._check_decoder(request)
        uniform = self.requires_uniform_sampling(request)
        self._check_uniform(request, uniform)
        check_request(request, vocab_size=self._geometry.vocab_size)
        prompt = build_prompt(request, self._tokenizer, vocab_size=self._geometry.vocab_size)
        budget, limit = self._generate_budget(request, len(prompt))
        return _Candidate(request, prompt, budget, limit, exclusive, uniform)

    def _make_resident(
        self, candidate: _Candidate, identity: SequenceIdentity, cancel_token: CancelToken | None
    ) -> Resident:
        """What the session will keep for the sequence; nothing is leased yet."""
        request, prompt = candidate.request, candidate.prompt
        resident = Resident(
            identity=identity,
            request=request,
            prompt=prompt,
            rule=FinishRule.of(
                request.sampling, eos_token_ids=self._tokenizer.eos_token_ids, max_new_tokens=candidate.budget
            ),
            cancel_token=cancel_token,
            text=self._make_text(request, request.stream_channel),
            exclusive=candidate.exclusive,
            uniform=candidate.uniform,
        )
        resident.sampling = self._make_sampling(request, prompt.token_ids)
        return resident

    def _check_call_order(self, request_id: RequestId, exclusive: bool) -> None:
        """Stage A0."""
        for resident in self._order:
            if resident.request_id == request_id:
                raise ContractViolation(f"admit: request {request_id} is resident already, as {resident.ref}")
            if resident.exclusive:
                raise ContractViolation(
                    f"admit: request {resident.request_id} has the session to itself; admit {request_id} after it ended"
                )
            if not self._compact and resident.prompt_remaining:
                raise ContractViolation(
                    f"admit: request {resident.request_id} was admitted and its context step has not run; "
                    f"execute it before admitting request {request_id}"
                )
        if exclusive and self._order:
            raise ContractViolation(
                f"admit: request {request_id} needs the session to itself, {len(self._order)} sequences are resident; "
                f"ask requires_exclusive_admission first and wait until the session is idle"
            )

    def _check_uniform(self, request: LLMGenerationRequest, uniform: bool) -> None:
        """Stage A2: residents that share one sampling setting must share it with the newcomer."""
        sampling: Any = request.sampling
        if not isinstance(sampling, SamplingParams):
            return  # refused by the checks of the request that follow
        for resident in self._order:
            if not (uniform or resident.uniform):
                continue
            difference = sampling_difference(sampling, resident.request.sampling)
            if difference:
                raise ContractViolation(
                    f"admit: the decoder takes one set of sampling parameters per batch, and that of resident request "
                    f"{resident.request_id} is another: {difference}"
                )

    def _generate_budget(self, request: LLMGenerationRequest, length: int) -> tuple[int, str]:
        """Stage A4: tokens the sequence may generate, and what bounds them.

        Raises:
            InputTooLongError: the prompt alone exceeds the KV capacity or the whole page pool.
        """
        geometry = self._geometry
        ahead, pool_tokens = geometry.headroom.write_ahead, geometry.num_pages * geometry.page_size
        context = max(0, geometry.max_kv_capacity - ahead)
        if length > context:
            raise InputTooLongError(
                f"the prompt has {length} tokens, the model context is {context} (max_model_len); shorten the prompt"
            )
        if length + 1 + ahead > pool_tokens:
            pages = -(-(length + 1 + ahead) // geometry.page_size)
            raise InputTooLongError(
                f"the prompt has {length} tokens and never fits: it needs {pages} pages of {geometry.page_size} "
                f"tokens, the whole KV pool has {geometry.num_pages}; {pool_remedy(ahead)} or shorten the prompt"
            )
        requested = request.sampling.max_tokens
        # The last generated token never gets state, so an answer may fill the limit.
        room = min(context, pool_tokens - ahead) - length
        if room <= 0:
            return 0, (
                f"the prompt has {length} tokens; together with an answer of at least 1 it exceeds the {context} "
                "that a sequence may reach; shorten the prompt"
            )
        if room < requested:
            limit = "max_model_len" if room == context - length else "the KV pool"
            _logger.warning(
                "max_tokens %d is cut to %d: a prompt of %d tokens leaves no more of %s", requested, room, length, limit
            )
        return min(requested, room), ""

    def _reserve_and_seat(self, resident: Resident) -> AdmissionResult:
        """Stages A6 to A9; on any refusal nothing of the sequence is left."""
        try:
            reservation = self._reserve(resident)
        except CallerError as error:
            return AdmissionResult(AdmissionStatus.REJECTED, reason=str(error), prompt_length=resident.prompt_length)
        except Exception as error:
            self._lose(f"the reservation of request {resident.request_id} failed: {error}")
            raise SessionLostError(self._state_reason) from error
        if reservation.status is not AdmissionStatus.ADMITTED:
            return AdmissionResult(reservation.status, reason=reservation.reason, prompt_length=resident.prompt_length)
        resident.start_at(reservation.prefill_start, reservation.reuse)
        self._check_uncached_length(resident)
        try:
            self._seat(resident)
        except Exception as error:
            self._roll_back(resident)
            return AdmissionResult(
                AdmissionStatus.REJECTED, reason=f"seating failed: {error}", prompt_length=resident.prompt_length
            )
        return AdmissionResult(
            AdmissionStatus.ADMITTED,
            ref=resident.ref,
            prompt_length=resident.prompt_length,
            prefill_start=resident.prefill_start,
        )

    def _check_uncached_length(self, resident: Resident) -> None:
        """Stage A7: a prompt that cannot be split has at most S_in uncached tokens."""
        uncached, limit = resident.prompt_remaining, self._geometry.max_input_length
        if uncached > limit and (resident.exclusive or not self._compact):
            self._roll_back(resident)
            raise InputTooLongError(
                f"{uncached} of the prompt's {resident.prompt_length} tokens are not cached, one step takes {limit} "
                f"(max_input_length); shorten the prompt, or raise the limit or allow compact execution"
            )

    def _seat(self, resident: Resident) -> None:
        """Stage A9: the channel attach is the visible commit point and comes last."""
        self._seats[resident.ref.slot] = resident
        resident.index = len(self._order)
        self._order.append(resident)
        try:
            if resident.channel is not None:
                resident.channel.attach()
        except BaseException:
            self._order.pop()
            self._seats[resident.ref.slot] = None
            raise

    def _roll_back(self, resident: Resident) -> None:
        try:
            self._unreserve(resident)
        except Exception as error:
            self._lose(f"rolling back the admission of request {resident.request_id} failed: {error}")
            raise SessionLostError(self._state_reason) from error


def _check_arguments(request: object, request_id: object, cancel_token: object) -> None:
    """Types and ranges of what `admit` is called with; a wrong one would harm the residents later."""
    if not isinstance(request, LLMGenerationRequest):
        raise ContractViolation(f"admit: request is {describe_value(request)}; pass an LLMGenerationRequest")
    if isinstance(request_id, bool) or not isinstance(request_id, int) or not 0 < request_id <= _LAST_ID:
        raise ContractViolation(
            f"admit: request id is {describe_value(request_id)}; ids are integers of 64 bits that start at 1 and are "
            "never reused"
        )
    if cancel_token is not None and not isinstance(cancel_token, CancelToken):
        raise ContractViolation(f"admit: cancel_token is {describe_value(cancel_token)}; pass a CancelToken, or None")


def _read_request(read: Callable[[], _T]) -> _T:
    """`read_foreign` for a session, whose refusals of a malformed request are all of one kind."""
    try:
        return read_foreign(read)
    except InvalidArgumentError as error:
        raise AdmissionError(str(error)) from error
