"""`ToyBatchDriver`: the blocking path, one `begin_request` with its sequences, over the same toy machine and checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgellm.cache.request import RequestHandle
from edgellm.cache.types import ContextCacheBatchAdmission, ContextCacheSequenceAdvance
from edgellm.session.types import ResidentRef
from edgellm.testing.recount import require_baseline
from edgellm.testing.toy_driver import Status, ToyDriver
from edgellm.testing.toy_machine import Row, RowResult
from edgellm.testing.toy_sequence import ToySequence, check_state


class ToyBatchDriver(ToyDriver):
    """Steps, drafts, checks and poison are those of `ToyDriver`; admission and prefill are the batch's."""

    def _open(self) -> RequestHandle:
        return RequestHandle()  # nothing is open between batches

    def begin(
        self, *prompts: Sequence[int], each: Sequence[dict[str, Any]] = (), **batch: Any
    ) -> list[ToySequence] | None:
        """Admit a batch; None when it found no room (or the coordinator is poisoned).

        Args:
            each: options per sequence, see `ToyDriver.admission`.
            batch: fields of `ContextCacheBatchAdmission`.
        """
        residents = [self._take_slot() for _ in prompts]
        chosen = [*each, *({} for _ in range(len(prompts) - len(each)))]
        admissions = [
            self.admission(prompt, resident, **options)
            for prompt, resident, options in zip(prompts, residents, chosen, strict=True)
        ]
        admission = ContextCacheBatchAdmission(
            sequences=admissions, **{"speculative_request": self.speculative, **self._batch, **batch}
        )
        try:
            result = self._call("begin_request", admission, self.headroom, self.machine.device.stream)
        except BaseException:
            self._return_slots(residents)
            raise
        if result.admission is None:
            self._return_slots(residents)
            return None
        self.request = result.admission.request
        return [self._seat(*place, index) for index, place in enumerate(zip(prompts, residents, strict=True))]

    def _return_slots(self, residents: Sequence[ResidentRef]) -> None:
        for resident in residents:
            self._return_slot(resident)

    def prefill_batch(self) -> dict[int, list[int]]:
        """Run every prompt of the batch; request id to its first token."""
        sequences = list(self.live.values())
        self._require_ok(self._call("prepare_prefill", self.request))
        for sequence in sequences:
            self._after_seating(sequence)
        last = self._run_prompts(sequences)
        self._require_ok(self._call("enqueue_prefill_captures", self.request))
        self.check_staged(sequences)
        produced = {}
        for sequence in sequences:
            produced[sequence.request_id] = [last[sequence.request_id].next_tokens[-1]]
            sequence.accept(produced[sequence.request_id])
            self._catch_up(sequence)
        advances = [ContextCacheSequenceAdvance(produced[s.request_id], s.committed) for s in sequences]
        commons = [s.drafted for s in sequences] if self.paired and not self.mtp else None
        self._require_ok(self._call("finalize_prefill_publication", self.request, advances, commons))
        for sequence in sequences:
            sequence.finalized = True
            check_state(self.machine, sequence)
        return produced

    def _run_prompts(self, sequences: Sequence[ToySequence]) -> dict[int, RowResult]:
        """Whole prompts at once; with MTP in pieces, a boundary is published between them."""
        last: dict[int, RowResult] = {}
        while running := [s for s in sequences if s.prompt_remaining]:
            rows = [self._prompt_row(sequence) for sequence in running]
            for sequence, row, result in zip(running, rows, self.machine.forward(rows), strict=True):
                if self.paired:
                    sequence.hiddens.update(enumerate(result.hiddens, row.past))
                sequence.committed = row.past + len(row.tokens)
                last[sequence.request_id] = result
                self._catch_up(sequence)
                if self.mtp and self._wants_checkpoint(sequence):
                    self._publish_boundary(sequence, result)
        return last

    def _prompt_row(self, sequence: ToySequence) -> Row:
        end = sequence.chunk_end(sequence.prompt_remaining, stop_at_boundaries=self.mtp)
        return Row(sequence.slot, sequence.committed, tuple(sequence.tokens[sequence.committed : end]))

    def finish_batch(self) -> Status:
        """End the request normally, whoever is still in it."""
        status: Status = self._call("finish", self.request)
        self._leave()
        return status

    def close(self) -> None:
        if self.request.valid():
            self._require_ok(self.finish_batch())
        self._require_ok(self.coordinator.shutdown())
        require_baseline(self.coordinator)
        self.coordinator.close()

    def abandon_batch(self) -> None:
        """Drop the request's handle as a caller that died would."""
        self.request.abandon()
        self._leave()
