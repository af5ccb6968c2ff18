"""`RankRuntimeSession`: the session over one `LLMRankRuntime`.

All residents live in one long-lived request of the context cache; each of its sequences is one resident, in
resident order.  A step is one ragged forward over whatever the plan names; with checkpoints, one more for every
length worth keeping that its chunks cross (`rank_prefill`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.cache.advances import OneTokenAdvances
from edgellm.cache.types import (
    ContextCacheBatchAdmission,
    ContextCacheCoordinatorStatus,
    ContextCacheLookupPolicy,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
)
from edgellm.decoding.base import DecodingSeat
from edgellm.errors import AdmissionError, BrokenInvariantError, InvalidArgumentError
from edgellm.log import get_logger
from edgellm.runtime.lowering import BatchLowering
from edgellm.sampling.state import SamplingState
from edgellm.session._decode_lane import row_indices, sampling_states
from edgellm.session._step_plan import StepPlan
from edgellm.session.cache_status import require_ok
from edgellm.session.core import SessionCore
from edgellm.session.frame import OneTokenOutcomes, Reservation, RowOutcome, SessionState, Step
from edgellm.session.growth import GrowthReserve, PageReserve
from edgellm.session.rank_decode import (
    common_length,
    common_lengths,
    draft_limits,
    new_token,
    one_token_advances,
    one_token_column,
    run_advances,
    spread_tokens,
)
from edgellm.session.rank_prefill import CheckpointedPrefill
from edgellm.session.types import AdmissionStatus, FinishReason, SequenceWork

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from edgellm.cache.metrics import ContextCacheMetrics
    from edgellm.cache.request import RequestHandle
    from edgellm.cache.types import Hash128
    from edgellm.decoding.base import StepTokens
    from edgellm.request import LLMGenerationRequest
    from edgellm.runtime.lowering import LoweredStep
    from edgellm.runtime.rank_runtime import LLMRankRuntime
    from edgellm.session.resident import Resident
    from edgellm.session.types import ResidentRef, SessionOptions

_logger = get_logger(__name__)
_OK = ContextCacheCoordinatorStatus.OK
_NORMAL_ENDS = frozenset({FinishReason.END_ID, FinishReason.LENGTH, FinishReason.STOP_WORDS})


class RankRuntimeSession(SessionCore):
    """Made by `LLMRankRuntime.open_session()` only; holds the runtime's one-request latch until it closes."""

    def __init__(self, runtime: LLMRankRuntime, options: SessionOptions) -> None:
        compact, reason = runtime.resolve_compact(options)
        super().__init__(geometry=runtime.geometry, tokenizer=runtime.tokenizer, compact=compact, compact_reason=reason)
        self._runtime = runtime
        self._coordinator = runtime.coordinator
        self._lowering = BatchLowering(max_sequences=runtime.geometry.max_batch_size, page_rows=runtime.page_table.rows)
        self._speculates = runtime.decoder.is_speculative
        self._request = self._open_container()
        self._tracks_common = self._coordinator.tracks_common(self._speculates, required=True)
        self._checkpoints = self._open_checkpoints()
        self._drafts_trail = self._coordinator.runs_paired_draft(self._speculates)
        counts_pages = runtime.reserve_growth and self._coordinator.profile.has_attention
        self._growth = GrowthReserve(runtime.coordinator.manager, runtime.geometry) if counts_pages else None
        # A step that runs ahead is plain decoding; a speculative round has pages for all that it might keep.
        runs_ahead = getattr(runtime.executor, "runs_ahead", False) and not self._speculates
        self._early_growth = self._growth if runs_ahead else None
        self._step_prepared = False
        self._published_before = 0
        self._accepted: dict[int, int] = {}  # slot to the length of its accepted run, where that is above 1

    def _open_container(self) -> RequestHandle:
        """A fresh container; a cache that an earlier failure poisoned is recovered first, if its stream drains."""
        coordinator = self._coordinator
        if coordinator.poisoned and coordinator.recover():
            _logger.warning("the context cache was recovered: everything that an earlier failure held is back")
        batch = ContextCacheBatchAdmission(
            token_state_contract=self._runtime.decoder.token_state_contract(), speculative_request=self._speculates
        )
        result = coordinator.begin_request(batch, self._geometry.headroom, coordinator.stream)
        if result.status is not _OK or result.admission is None:
            raise BrokenInvariantError(
                f"the context cache refuses new requests ({result.status.value}) and its stream cannot be drained; "
                f"rebuild the runtime"
            )
        return result.admission.request

    def _open_checkpoints(self) -> CheckpointedPrefill | None:
        if not self._coordinator.profile.uses_checkpoint_reuse:
            return None
        return CheckpointedPrefill(
            self._coordinator,
            self._request,
            self._runtime.decoder,
            mtp=self._coordinator.runs_paired_draft(self._speculates),
        )

    def requires_uniform_sampling(self, request: LLMGenerationRequest) -> bool:
        decoder = self._runtime.decoder
        speculates = decoder.is_speculative and not request.disable_spec_decode
        return speculates and not decoder.capabilities().per_row_sampling

    def context_cache_metrics(self) -> ContextCacheMetrics | None:
        return self._runtime.context_cache_metrics()

    def next_block_identity(self, ref: ResidentRef) -> Hash128 | None:
        self._check_thread("next_block_identity")
        resident = self._seated(ref, "next_block_identity")
        if resident is None or not resident.prompt_remaining:
            return None
        sequence = self._request.sequence(resident.index)
        block = resident.committed // self._geometry.page_size
        if sequence.lookup_policy is ContextCacheLookupPolicy.BYPASS or block >= sequence.chain.num_blocks:
            return None
        return sequence.chain.hash_at(block)

    # ---- admission --------------------------------------------------------------------------------------

    def _check_decoder(self, request: LLMGenerationRequest) -> None:
        self._runtime.check_decoder(request)

    def _make_sampling(self, request: LLMGenerationRequest, prompt: npt.NDArray[np.int32]) -> SamplingState:
        structured = request.sampling.structured
        guide = None if structured is None else self._runtime.guidance.start(structured)
        try:
            return SamplingState(
                request.sampling, prompt, self._geometry.vocab_size, self._tokenizer.eos_token_ids, guide=guide
            )
        except InvalidArgumentError as error:
            raise AdmissionError(str(error)) from error

    def _reserve(self, resident: Resident) -> Reservation:
        if self._coordinator.poisoned:
            self._coordinator.recover()  # a wait that failed may succeed now; then nobody need lose the session
        growth, reserve = self._growth, PageReserve()
        if growth is not None:
            if not growth.may_fit(resident, self._request, self._order):
                return Reservation(AdmissionStatus.NO_CAPACITY, reason=_PRESSURE)
            reserve = growth.pages_to_reserve(resident, self._request, self._order)
        result = self._coordinator.admit_sequence(
            self._request,
            self._cache_admission(resident),
            self._geometry.headroom,
            reserve_pages=reserve.base,
            draft_reserve_pages=reserve.draft,
        )
        if result.status is ContextCacheCoordinatorStatus.POISONED:
            raise BrokenInvariantError("the context cache is poisoned by an earlier device failure")
        if result.status is not _OK:
            if result.insufficient_capacity:
                return Reservation(AdmissionStatus.NO_CAPACITY, reason=_PRESSURE)
            return Reservation(AdmissionStatus.REJECTED, reason="the context cache cannot hold the prompt")
        try:
            self._take_seat(resident, self._request.num_sequences - 1, result.prefill_start)
        except Exception as error:
            self._unreserve(resident)
            raise BrokenInvariantError(f"the decoder could not seat {resident.ref}: {error}") from error
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

    def _take_seat(self, resident: Resident, index: int, length: int) -> None:
        """Tell the decoder who is in a slot and how much of its state was taken over, and place its checkpoints."""
        hidden = None
        if self._checkpoints is not None:
            self._checkpoints.place(resident.ref.slot, index)
            hidden = self._checkpoints.restored_hidden(index) if length else None
        runtime = self._runtime
        runtime.decoder.seat(
            runtime.executor,
            DecodingSeat(resident.ref.slot, resident.request_id, resident.prompt, length, hidden),
        )

    def _leave_seat(self, residents: Sequence[Resident]) -> None:
        self._runtime.decoder.unseat([resident.ref.slot for resident in residents])
        if self._checkpoints is not None:
            for resident in residents:
                self._checkpoints.forget(resident.ref.slot)

    def _unreserve(self, resident: Resident) -> None:
        self._leave_seat([resident])
        if not self._coordinator.retract_sequence_admission(self._request):
            raise BrokenInvariantError("an admission could not be retracted; the context cache is poisoned")

    # ---- execution --------------------------------------------------------------------------------------

    def _prepare_rows(self, step: Step) -> None:
        """Share what others published meanwhile, then grow; a row without a page fails alone."""
        self._published_before = self._published()
        decoding = step.rows
        if step.descriptors.has_context:
            for resident, descriptor in zip(step.rows, step.descriptors, strict=True):
                if descriptor.work is SequenceWork.CONTEXT:
                    self._share_prefix(resident)
            decoding = [
                resident
                for resident, descriptor in zip(step.rows, step.descriptors, strict=True)
                if descriptor.work is SequenceWork.DECODE
            ]
        while True:
            slots = None if decoding is self._order else row_indices(decoding)
            early = self._early_growth if slots is None else None
            ahead = () if early is None else early.slots_ahead(self._request, self._order)
            status = self._coordinator.prepare_decode_step(self._request, self._geometry.headroom, slots, ahead)
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
        published = self._published()
        if resident.seen_publications == published:
            return
        resident.seen_publications = published
        state_length = self._coordinator.rebind_prefill(self._request, resident.index)
        if state_length > resident.state_length:
            resident.state_length = state_length
            resident.reuse = self._request.sequence(resident.index).reuse_report
            self._take_seat(resident, resident.index, state_length)

    def _published(self) -> int:
        """Moves with everything that became visible: blocks, and checkpoints on blocks that were there before."""
        counters = self._coordinator.counters
        checkpoints = 0 if self._checkpoints is None else counters.committed_publications
        return counters.published_blocks + checkpoints

    def _fail_growth(self, resident: Resident) -> None:
        geometry = self._geometry
        resident.end(
            FinishReason.ERROR,
            f"no free page for token {resident.committed + 1}: all {geometry.num_pages} pages of the KV pool are in "
            f"use; raise kv_budget or lower max_batch_size",
        )

    def _run(self, step: Step) -> list[RowOutcome] | OneTokenOutcomes:
        if self._checkpoints is not None and step.descriptors.has_context:
            self._run_pieces(step, self._checkpoints)
        lowered = self._lowering.lower(step.rows, step.descriptors)
        if not lowered.plan_row:
            return [RowOutcome(descriptor.query_length) for descriptor in step.descriptors]
        tokens = self._forward(step, lowered)
        if not step.descriptors.has_context:
            column = one_token_column(tokens)
            if column is not None:
                self._accepted = {}
                if any(tokens.proposed):
                    self._note_runs(step, lowered, tokens)
                return OneTokenOutcomes(column, tokens.errors)
        outcomes = [RowOutcome(descriptor.query_length) for descriptor in step.descriptors]
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
        if self._speculates:
            self._note_runs(step, lowered, tokens)
        if self._checkpoints is not None:
            self._capture_ends(step, lowered, outcomes, self._checkpoints)
        return outcomes

    def _forward(self, step: Step, lowered: LoweredStep) -> StepTokens:
        runtime, batch = self._runtime, lowered.batch
        if self._speculates:
            batch.max_drafts = draft_limits(step.rows, step.descriptors, lowered.plan_row)
            batch.draft_page_rows = runtime.draft_page_rows
        states = sampling_states(step.rows, lowered.selected)
        return runtime.decoder.run_step(runtime.executor, batch, runtime.sampler, states)

    def _run_pieces(self, step: Step, checkpoints: CheckpointedPrefill) -> None:
        """Run chunks as far as the last checkpoint that they cross; each piece is published before the next."""
        while True:
            pieces, parts = checkpoints.pieces(step.rows, step.descriptors)
            if not pieces:
                return
            rows = [resident for resident, _ in pieces]
            plan = StepPlan(parts)
            part = Step(plan=plan, shape=step.shape, rows=rows, descriptors=plan)
            self._forward(part, self._lowering.lower(rows, plan))
            checkpoints.capture(pieces)
            self._coordinator.stream.synchronize()
            checkpoints.report(pieces)

    def _capture_ends(
        self, step: Step, lowered: LoweredStep, outcomes: Sequence[RowOutcome], checkpoints: CheckpointedPrefill
    ) -> None:
        """Chunks that end where a checkpoint belongs; the step's commit publishes them."""
        ends = []
        for index in lowered.plan_row:
            resident, descriptor = step.rows[index], step.descriptors[index]
            end = descriptor.past_length + descriptor.query_length
            ran = descriptor.work is SequenceWork.CONTEXT and not outcomes[index].error
            if ran and checkpoints.is_boundary(resident, end):
                ends.append((resident, end))
        checkpoints.capture(ends)

    def _note_runs(self, step: Step, lowered: LoweredStep, tokens: StepTokens) -> None:
        """Remember how long accepted runs are: the session may keep less of them."""
        self._accepted = {}
        for row, index in enumerate(lowered.plan_row):
            resident = step.rows[index]
            if tokens.proposed:
                resident.proposed_drafts += tokens.proposed[row]
            if step.descriptors[index].work is SequenceWork.DECODE and tokens.committed[row] > 1:
                self._accepted[resident.ref.slot] = tokens.committed[row]

    def _commit(self, step: Step) -> bool:
        """Move the cache's ledger and publish; nothing was visible before this."""
        if step.one_token_each is not None:
            self._complete_decode(step, step.one_token_each)
            return self._published() > self._published_before
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
                new_token(resident)
        if self._accepted:
            self._settle(decoded)
        ended = [resident for resident in complete if resident.reason in _NORMAL_ENDS]
        kept = self._complete_drafts(ended)
        self._complete_step(decoded, [resident.index for resident in ended])
        if self._checkpoints is not None:
            self._checkpoints.publish_ends(kept)
        return self._published() > self._published_before

    def _commit_chunk(self, resident: Resident) -> None:
        """A chunk that ran; one that sharing covered entirely has nothing to report."""
        if resident.state_length != resident.committed:
            return
        common = common_length(resident, self._runtime.decoder) if self._tracks_common else None
        require_ok(
            self._coordinator.advance_prefill(self._request, resident.index, resident.committed, common),
            "advance_prefill",
        )
        if self._checkpoints is not None:
            self._checkpoints.publish_boundary(resident, resident.committed)

    def _commit_prompt(self, resident: Resident) -> None:
        advance = ContextCacheSequenceAdvance(resident.generated[:1], resident.committed)
        common = common_length(resident, self._runtime.decoder) if self._tracks_common else None
        require_ok(
            self._coordinator.finalize_sequence_admission(self._request, resident.index, advance, common),
            "finalize_sequence_admission",
        )
        if self._checkpoints is not None:
            self._checkpoints.publish_boundary(resident, resident.committed)

    def _settle(self, decoded: Sequence[Resident]) -> None:
        """Sequences that ended inside an accepted run: their state goes back to what was kept of it."""
        accepted, self._accepted = self._accepted, {}
        slots, kept = [], []
        for resident in decoded:
            run = accepted.get(resident.ref.slot, 1)
            new = len(resident.generated) - resident.reported
            resident.accepted_drafts += max(0, min(new, run - 1))
            if 0 < new < run:
                slots.append(resident.ref.slot)
                kept.append(new)
        if slots:
            self._runtime.decoder.settle(self._runtime.executor, slots, kept)

    def _complete_drafts(self, ended: Sequence[Resident]) -> list[Resident]:
        """Those of the ended sequences whose answers are kept, once their draft state, which trails, is written.

        All of it in one pass; none of them where the decoder does not do this.
        """
        if not self._drafts_trail:
            return []
        may_keep = self._request.impl.lengths.publishes_generated
        kept = [resident for resident in ended if may_keep[resident.index]]
        slots, lengths = [resident.ref.slot for resident in kept], [resident.committed for resident in kept]
        if not kept or not self._runtime.decoder.complete_drafts(slots, lengths):
            return []
        if self._tracks_common:
            self._coordinator.stream.synchronize()  # a common length is of state that exists
        return kept

    def _complete_decode(self, step: Step, token_ids: npt.NDArray[np.int32]) -> None:
        """`_complete_step` where every row decoded one token; those that ended did so normally."""
        self._step_prepared = False
        if step.rows is not self._order:
            token_ids = spread_tokens(len(self._order), row_indices(step.rows), token_ids)
        ended = row_indices(step.rows, ended_only=True)
        kept = self._complete_drafts([self._order[index] for index in ended]) if ended else []
        commons = None
        if self._tracks_common:
            commons = common_lengths(self._order, step.rows, self._runtime.decoder)
        require_ok(
            self._coordinator.complete_decode_step(self._request, OneTokenAdvances(token_ids), ended, commons),
            "complete_decode_step",
        )
        if kept and self._checkpoints is not None:
            self._checkpoints.publish_ends(kept)

    def _complete_step(self, decoded: Sequence[Resident], ended: Sequence[int]) -> None:
        if not self._step_prepared:
            return
        self._step_prepared = False
        order, commons = self._order, None
        advances: Sequence[ContextCacheSequenceAdvance] = (
            run_advances(order, decoded) if self._speculates else one_token_advances(order, decoded)
        )
        if self._tracks_common:
            commons = common_lengths(order, decoded, self._runtime.decoder)
        require_ok(
            self._coordinator.complete_decode_step(self._request, advances, ended, commons), "complete_decode_step"
        )

    def _retire(self, retired: Sequence[Resident], old_to_new: Sequence[int], survivors: int) -> None:
        require_ok(
            self._coordinator.begin_batch_compaction(self._request, old_to_new, survivors), "begin_batch_compaction"
        )
        require_ok(self._coordinator.compact_batch(self._request), "compact_batch")
        self._leave_seat(retired)

    # ---- ending -----------------------------------------------------------------------------------------

    def _on_compact_refused(self, failure: str) -> None:
        self._runtime.refuse_compact(failure)

    def _release_everything(self) -> None:
        try:
            self._leave_seat(self._order)
            if self._ended_in is SessionState.OPEN:
                status = self._coordinator.finish(self._request)
                if status is not _OK:
                    _logger.error("closing the session: the context cache answered %s", status.value)
            else:
                self._request.abandon()
        finally:
            self._runtime.session_closed(self)


_PRESSURE = "not enough free KV pages now; retry when a resident has finished"
