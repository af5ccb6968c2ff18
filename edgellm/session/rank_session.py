"""`RankRuntimeSession`: the session over one `LLMRankRuntime`.

All residents live in one long-lived request of the context cache; each of its sequences is one resident, in
resident order.  A step is one ragged forward over whatever the plan names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edgellm.cache.advances import HOLD_TOKEN, OneTokenAdvances, completed_token
from edgellm.cache.types import (
    ContextCacheBatchAdmission,
    ContextCacheCoordinatorStatus,
    ContextCacheLookupPolicy,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
)
from edgellm.errors import AdmissionError, BrokenInvariantError, InvalidArgumentError
from edgellm.log import get_logger
from edgellm.runtime.lowering import BatchLowering
from edgellm.sampling.state import SamplingState
from edgellm.session.core import SessionCore
from edgellm.session.frame import Reservation, RowOutcome, SessionState, Step
from edgellm.session.growth import GrowthReserve
from edgellm.session.types import AdmissionStatus, FinishReason, SequenceWork

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from edgellm.cache.metrics import ContextCacheMetrics
    from edgellm.cache.request import RequestHandle
    from edgellm.cache.types import Hash128
    from edgellm.request import LLMGenerationRequest
    from edgellm.runtime.rank_runtime import LLMRankRuntime
    from edgellm.session.resident import Resident
    from edgellm.session.types import ResidentRef, SessionOptions

_logger = get_logger(__name__)
_OK = ContextCacheCoordinatorStatus.OK
_NORMAL_ENDS = frozenset({FinishReason.END_ID, FinishReason.LENGTH, FinishReason.STOP_WORDS})
_WITHDRAWN = frozenset({FinishReason.CANCELLED, FinishReason.ERROR})


class RankRuntimeSession(SessionCore):
    """Made by `LLMRankRuntime.open_session()` only; holds the runtime's one-request latch until it closes."""

    def __init__(self, runtime: LLMRankRuntime, options: SessionOptions) -> None:
        compact, reason = runtime.resolve_compact(options)
        super().__init__(geometry=runtime.geometry, tokenizer=runtime.tokenizer, compact=compact, compact_reason=reason)
        self._runtime = runtime
        self._coordinator = runtime.coordinator
        self._lowering = BatchLowering(max_sequences=runtime.geometry.max_batch_size, page_rows=runtime.page_table.rows)
        self._request = self._open_container()
        self._growth = GrowthReserve(runtime.coordinator.manager, runtime.geometry) if runtime.reserve_growth else None
        self._step_prepared = False

    def _open_container(self) -> RequestHandle:
        batch = ContextCacheBatchAdmission(token_state_contract=self._runtime.decoder.token_state_contract())
        headroom = self._geometry.headroom
        result = self._coordinator.begin_request(batch, headroom, self._coordinator.stream)
        if result.status is not _OK or result.admission is None:
            raise BrokenInvariantError(
                f"the context cache refuses new requests ({result.status.value}); recover or rebuild the runtime"
            )
        return result.admission.request

    def requires_uniform_sampling(self, request: LLMGenerationRequest) -> bool:
        decoder = self._runtime.decoder
        speculates = decoder.is_speculative and not request.disable_spec_decode
        return speculates and not decoder.capabilities().per_row_sampling

    def context_cache_metrics(self) -> ContextCacheMetrics | None:
        return self._runtime.context_cache_metrics()

    def next_block_identity(self, ref: ResidentRef) -> Hash128 | None:
        self._check_thread("next_block_identity")
        resident = self._seats[ref.slot] if 0 <= ref.slot < len(self._seats) else None
        if resident is None or resident.ref != ref or not resident.prompt_remaining:
            return None
        sequence = self._request.sequence(resident.index)
        block = resident.committed // self._geometry.page_size
        if sequence.lookup_policy is ContextCacheLookupPolicy.BYPASS or block >= sequence.chain.num_blocks:
            return None
        return sequence.chain.hash_at(block)

    # ---- admission --------------------------------------------------------------------------------------

    def _make_sampling(self, request: LLMGenerationRequest, prompt: npt.NDArray[np.int32]) -> SamplingState:
        try:
            return SamplingState(request.sampling, prompt, self._geometry.vocab_size, self._tokenizer.eos_token_ids)
        except InvalidArgumentError as error:
            raise AdmissionError(str(error)) from error

    def _reserve(self, resident: Resident) -> Reservation:
        growth, reserve = self._growth, 0
        if growth is not None:
            if not growth.may_fit(resident, self._request, self._order):
                return Reservation(AdmissionStatus.NO_CAPACITY, reason=_PRESSURE)
            reserve = growth.pages_to_reserve(resident, self._request, self._order)
        result = self._coordinator.admit_sequence(
            self._request, self._cache_admission(resident), self._geometry.headroom, reserve_pages=reserve
        )
        if result.status is ContextCacheCoordinatorStatus.POISONED:
            raise BrokenInvariantError("the context cache is poisoned by an earlier device failure")
        if result.status is not _OK:
            if result.insufficient_capacity:
                return Reservation(AdmissionStatus.NO_CAPACITY, reason=_PRESSURE)
            return Reservation(AdmissionStatus.REJECTED, reason="the context cache cannot hold the prompt")
        return Reservation(AdmissionStatus.ADMITTED, prefill_start=result.prefill_start, reuse=result.reuse)

    def _cache_admission(self, resident: Resident) -> ContextCacheSequenceAdmission:
        request, prompt = resident.request, resident.tokenized
        return ContextCacheSequenceAdmission(
            token_ids=resident.prompt,
            resident=resident.ref,
            key_extras=self._runtime.key_extras(request),
            lookup_policy=request.lookup_policy,
            commit_policy=request.commit_policy,
            replay_tail_length=prompt.replay_tail_length,
            retention=request.retention,
            checkpoint_boundaries=prompt.checkpoint_boundaries,
            salted=request.cache_salt is not None,
        )

    def _unreserve(self, resident: Resident) -> None:
        if not self._coordinator.retract_sequence_admission(self._request):
            raise BrokenInvariantError("an admission could not be retracted; the context cache is poisoned")

    # ---- execution --------------------------------------------------------------------------------------

    def _prepare_rows(self, step: Step) -> None:
        """Share what others published meanwhile, then grow; a row without a page fails alone."""
        for resident, descriptor in zip(step.rows, step.descriptors, strict=True):
            if descriptor.work is SequenceWork.CONTEXT:
                self._share_prefix(resident)
        decoding = [
            resident
            for resident, descriptor in zip(step.rows, step.descriptors, strict=True)
            if descriptor.work is SequenceWork.DECODE
        ]
        while True:
            slots = [resident.index for resident in decoding]
            status = self._coordinator.prepare_decode_step(self._request, self._geometry.headroom, slots)
            if status is _OK:
                break
            refused = self._request.refused_slot
            if refused is None:
                raise BrokenInvariantError(f"the context cache refused a step ({status.value})")
            if not any(resident.terminal for resident in self._order):
                self._fail_growth(self._order[refused])
            self._evict()  # pages of ended sequences (cancelled ones too) may be all that is missing
            decoding = [resident for resident in decoding if not resident.terminal]
        self._step_prepared = True
        if all(resident.terminal for resident in step.rows):
            self._complete_step([], [])

    def _share_prefix(self, resident: Resident) -> None:
        """Take over blocks of the prompt that became findable since this sequence last looked."""
        published = self._coordinator.counters.published_blocks
        if resident.seen_publications == published:
            return
        resident.seen_publications = published
        state_length = self._coordinator.rebind_prefill(self._request, resident.index)
        if state_length > resident.state_length:
            resident.state_length = state_length
            resident.reuse = self._request.sequence(resident.index).reuse_report

    def _fail_growth(self, resident: Resident) -> None:
        geometry = self._geometry
        resident.end(
            FinishReason.ERROR,
            f"no free page for token {resident.committed + 1}: all {geometry.num_pages} pages of the KV pool are in "
            f"use; raise kv_budget or lower max_batch_size",
        )

    def _run(self, step: Step) -> list[RowOutcome]:
        lowered = self._lowering.lower(step.rows, step.descriptors)
        outcomes = [RowOutcome(descriptor.query_length) for descriptor in step.descriptors]
        if not lowered.plan_row:
            return outcomes
        states = [self._sampling_state(step.rows[index]) for index in lowered.selected]
        runtime = self._runtime
        tokens = runtime.decoder.run_step(runtime.executor, lowered.batch, runtime.sampler, states)
        for row, index in enumerate(lowered.plan_row):
            if step.descriptors[index].work is SequenceWork.DECODE:
                outcomes[index].committed = tokens.committed[row]
        for logits_row, index in enumerate(lowered.selected):
            outcome = outcomes[index]
            error = tokens.errors.get(logits_row)
            if error is not None:
                outcome.error = error
            else:
                outcome.token_ids = tokens.token_ids[logits_row]
                outcome.logprobs = tokens.logprobs[logits_row]
        return outcomes

    def _sampling_state(self, resident: Resident) -> SamplingState:
        if resident.sampling is None:
            raise BrokenInvariantError(f"{resident.ref} has no sampling state")
        return resident.sampling

    def _commit(self, step: Step) -> bool:
        """Move the cache's ledger and publish; nothing was visible before this."""
        published = self._coordinator.counters.published_blocks
        decoded: list[Resident] = []
        complete: list[Resident] = []  # those whose prompt is: they decode, or may end on their first token
        for resident, descriptor in zip(step.rows, step.descriptors, strict=True):
            if descriptor.work is SequenceWork.DECODE:
                decoded.append(resident)
                complete.append(resident)
            elif resident.prompt_remaining:
                self._commit_chunk(resident)
            elif resident.generated:
                self._commit_prompt(resident)
                complete.append(resident)
            else:
                _new_token(resident)
        ended = [resident.index for resident in complete if resident.reason in _NORMAL_ENDS]
        self._complete_step(decoded, ended)
        return self._coordinator.counters.published_blocks > published

    def _commit_chunk(self, resident: Resident) -> None:
        """A chunk that ran; one that sharing covered entirely has nothing to report."""
        if resident.state_length == resident.committed:
            self._require_ok(
                self._coordinator.advance_prefill(self._request, resident.index, resident.committed), "advance_prefill"
            )

    def _commit_prompt(self, resident: Resident) -> None:
        advance = ContextCacheSequenceAdvance(resident.generated[:1], resident.committed)
        self._require_ok(
            self._coordinator.finalize_sequence_admission(self._request, resident.index, advance),
            "finalize_sequence_admission",
        )

    def _complete_step(self, decoded: Sequence[Resident], ended: Sequence[int]) -> None:
        if not self._step_prepared:
            return
        self._step_prepared = False
        token_ids = np.full(len(self._order), HOLD_TOKEN, dtype=np.int32)
        for resident in decoded:
            token_ids[resident.index] = _new_token(resident)
        self._require_ok(
            self._coordinator.complete_decode_step(self._request, OneTokenAdvances(token_ids), ended),
            "complete_decode_step",
        )

    def _require_ok(self, status: ContextCacheCoordinatorStatus, call: str) -> None:
        if status is not _OK:
            raise BrokenInvariantError(f"{call}: the context cache answered {status.value}")

    def _retire(self, retired: Sequence[Resident], old_to_new: Sequence[int], survivors: int) -> None:
        self._require_ok(
            self._coordinator.begin_batch_compaction(self._request, old_to_new, survivors), "begin_batch_compaction"
        )
        self._require_ok(self._coordinator.compact_batch(self._request), "compact_batch")

    # ---- ending -----------------------------------------------------------------------------------------

    def _on_compact_refused(self, failure: str) -> None:
        self._runtime.refuse_compact(failure)

    def _release_everything(self) -> None:
        try:
            if self._ended_in is SessionState.OPEN:
                status = self._coordinator.finish(self._request)
                if status is not _OK:
                    _logger.error("closing the session: the context cache answered %s", status.value)
            else:
                self._request.abandon()
        finally:
            self._runtime.session_closed(self)


def _new_token(resident: Resident) -> int:
    """What this step gave a resident whose prompt is complete; a hold for one that leaves unfinished."""
    new = resident.generated[resident.reported :]  # a step's tokens are reported when it is over
    return completed_token(resident.index, new, withdrawn=resident.reason in _WITHDRAWN)


_PRESSURE = "not enough free KV pages now; retry when a resident has finished"
