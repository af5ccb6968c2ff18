"""`ToyDriver`: plays the runtime over a real coordinator, for every flavour of state, without a session.

One long-lived container; sequences join, run their prompt in chunks, decode or verify drafts, roll back, and leave by
compaction.  Prompt chunks and decode rows may share a step.  The text of every sequence is compared with its twin
token by token; with `check` so is every byte of state, and every invariant after every call.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from edgellm.cache.advances import HOLD_TOKEN, OneTokenAdvances
from edgellm.cache.coordinator import ContextCacheCoordinator
from edgellm.cache.types import (
    BaseStateKind,
    BlockKeyExtras,
    ContextCacheBatchAdmission,
    ContextCacheCommitPolicy,
    ContextCacheConfig,
    ContextCacheCoordinatorStatus,
    ContextCacheDeploymentProfile,
    ContextCacheLookupPolicy,
    ContextCachePhysicalResources,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    DecodingKvHeadroom,
    DeploymentConfig,
    Hash128,
    Retention,
    SpecReuseContract,
)
from edgellm.errors import ContractViolation, InvariantError, SessionLostError
from edgellm.session.types import ResidentRef
from edgellm.testing.recount import Recount, recount, require_baseline
from edgellm.testing.toy_drafter import DraftView, StateDrafter, ToyDrafter, TruthTeller
from edgellm.testing.toy_machine import Row, RowResult, ToyMachine
from edgellm.testing.toy_model import HIDDEN_WIDTH, TOY_VOCAB, SoloRun, ToyModel
from edgellm.testing.toy_sequence import ToySequence, check_state, checkpoint_fingerprint, state_fingerprint

if TYPE_CHECKING:
    from edgellm.cache.request import RequestHandle
    from edgellm.cache.results import AdmitSequenceResult
    from edgellm.plugins import PolicyRegistration
    from edgellm.runtime.device import Stream

Status = ContextCacheCoordinatorStatus
FLAVOURS = {
    "attention": ContextCacheDeploymentProfile(),
    "eagle": ContextCacheDeploymentProfile(BaseStateKind.ATTENTION_ONLY, SpecReuseContract(True, 1)),
    "dflash": ContextCacheDeploymentProfile(BaseStateKind.ATTENTION_ONLY, SpecReuseContract(True, 0)),
    "shared-kv": ContextCacheDeploymentProfile(BaseStateKind.ATTENTION_ONLY, SpecReuseContract(False, 0)),
    "hybrid": ContextCacheDeploymentProfile(BaseStateKind.HYBRID),
    "hybrid-lookup": ContextCacheDeploymentProfile(BaseStateKind.HYBRID, SpecReuseContract(False, 0)),
    "recurrent": ContextCacheDeploymentProfile(BaseStateKind.PURE_RECURRENT),
    "mtp": ContextCacheDeploymentProfile(BaseStateKind.HYBRID, SpecReuseContract(True, 1)),
}
DECODE = 0  # in a mixed step: a decode (or verify) row instead of a number of prompt tokens


class FlakySynchronizer:
    """A stream wait that can be told to fail; counts its calls."""

    def __init__(self) -> None:
        self.failing = False
        self.raises = False
        self.calls = 0

    def __call__(self, stream: Stream) -> bool:
        self.calls += 1
        if self.failing and self.raises:
            raise OSError("device lost")
        return not self.failing


class ToyDriver:
    """Args:
        profile: flavour of the deployment; the request is speculative where it is.
        speculative: False runs plain requests on a speculative deployment.
        policies: registered publication policies; None loads the installed plugins.
        drafter: proposes tokens; the default's proposals depend on the draft state it reads.
        draft_tokens: K, proposals of one round.
        recurrent_slots, partial_slots: snapshot slots of checkpoint deployments.
        check: after every coordinator call, check invariants and recount; after every step, compare state.
        look_again: before each chunk, take over what others published meanwhile (where the flavour can).
        stop_at_boundaries: end chunks where the policy wants checkpoints.

    Attributes:
        sync: the stream wait, `sync.failing = True` makes drains fail.
        refused: the sequence that could get no page when a step returned None.
        last_admission: the coordinator's last answer to `admit`.
    """

    def __init__(
        self,
        profile: ContextCacheDeploymentProfile | None = None,
        *,
        page_size: int = 4,
        num_pages: int = 64,
        num_draft_pages: int | None = None,
        max_batch: int = 4,
        max_kv_capacity: int = 128,
        config: ContextCacheConfig | None = None,
        policies: Iterable[PolicyRegistration] | None = None,
        drafter: ToyDrafter | None = None,
        draft_tokens: int = 3,
        speculative: bool | None = None,
        recurrent_slots: int = 8,
        partial_slots: int = 8,
        vocab_size: int = TOY_VOCAB,
        check: bool = True,
        look_again: bool = True,
        stop_at_boundaries: bool = True,
        **batch: Any,
    ) -> None:
        self.profile = profile or ContextCacheDeploymentProfile()
        self.drafter = drafter or StateDrafter()
        self._round = draft_tokens
        self._serve(self.profile.is_speculative if speculative is None else speculative)
        self.check, self.look_again, self.stop_at_boundaries = check, look_again, stop_at_boundaries
        self.model = ToyModel.of(self.profile, vocab_size)
        self.deployment = DeploymentConfig(
            max_batch_size=max_batch,
            max_input_length=max_kv_capacity,
            max_kv_capacity=max_kv_capacity,
            page_size=page_size,
            num_pages=num_pages,
            num_draft_pages=self._draft_pages(num_pages, num_draft_pages),
        )
        self.machine = ToyMachine(
            self.profile, self.deployment, self.model, recurrent_slots=recurrent_slots, partial_slots=partial_slots
        )
        self.sync = FlakySynchronizer()
        self.coordinator = self._build_coordinator(config or ContextCacheConfig(policy_deadline_seconds=None), policies)
        self.live: dict[int, ToySequence] = {}
        self.refused: ToySequence | None = None
        self.last_admission: AdmitSequenceResult | None = None
        self._batch = batch
        self._free_slots = deque(reversed(range(max_batch)))
        self._occupied: set[int] = set()
        self._epochs = itertools.count(1)
        self._next_id = 1
        self._steps = 0
        self._owns_coordinator = True
        self.request = self._open()

    def _serve(self, speculative: bool) -> None:
        """What kind of requests this driver's container holds."""
        self.speculative = speculative
        self.paired = speculative and self.profile.owns_paged_spec_state
        self.mtp = self.paired and self.profile.is_hybrid
        self.draft_tokens = self._round if speculative else 0

    def beside(self, *, speculative: bool) -> ToyDriver:
        """A driver of a second container on the same coordinator and machine; close it before this one.

        Plain and speculative requests of one deployment live in two containers; their steps take turns.
        """
        other = copy(self)
        other._serve(speculative)
        other.live, other.refused, other._owns_coordinator = {}, None, False
        other.request = other._open()
        return other

    def _draft_pages(self, num_pages: int, num_draft_pages: int | None) -> int:
        if not self.profile.owns_paged_spec_state:
            return 0
        return num_pages if num_draft_pages is None else num_draft_pages

    def _build_coordinator(
        self, config: ContextCacheConfig, policies: Iterable[PolicyRegistration] | None
    ) -> ContextCacheCoordinator:
        machine = self.machine
        return ContextCacheCoordinator(
            config,
            self.deployment,
            self.profile,
            ContextCachePhysicalResources(
                base_cache=machine.base,
                base_page_table=machine.base_table,
                draft_cache=machine.draft,
                draft_page_table=machine.draft_table,
                snapshot_storage=machine.storage,
            ),
            machine.device.stream,
            self.sync,
            policies,
        )

    def _open(self) -> RequestHandle:
        admission = ContextCacheBatchAdmission(speculative_request=self.speculative, **self._batch)
        result = self.coordinator.begin_request(admission, self.headroom, self.machine.device.stream)
        if result.admission is None:
            raise SessionLostError(f"the container could not be opened: {result.status.value}")
        return result.admission.request

    # --- queries -----------------------------------------------------------------------------------------

    @property
    def headroom(self) -> DecodingKvHeadroom:
        """Positions behind the committed length that one step may write."""
        return DecodingKvHeadroom(self.draft_tokens + 1, self.draft_tokens + 1 if self.paired else 0)

    def index(self, sequence: ToySequence) -> int:
        """Its place in the execution order now."""
        for index, state in enumerate(self.request.impl.sequences):
            if state.resident == sequence.resident:
                return index
        raise ContractViolation(f"request {sequence.request_id} is not in the container")

    def text(self, sequence: ToySequence) -> list[int]:
        """Tokens generated so far."""
        return list(sequence.generated)

    def fingerprint(self, sequence: ToySequence) -> str:
        """Of the state that the device holds; compare with `solo_fingerprint`."""
        return state_fingerprint(self.machine, sequence)

    def recount(self) -> Recount:
        """Every invariant, every pool, and the state of every live sequence."""
        counted = recount(self.coordinator)
        for sequence in self.live.values():
            check_state(self.machine, sequence)
        return counted

    # --- admission and end -------------------------------------------------------------------------------

    def admission(
        self,
        tokens: Sequence[int],
        resident: ResidentRef,
        *,
        salt: int | None = None,
        lookup: ContextCacheLookupPolicy | None = None,
        commit: ContextCacheCommitPolicy | None = None,
        media: Sequence[Hash128 | None] = (),
        retention: Retention | None = None,
        checkpoint_boundaries: Sequence[int] = (),
        replay_tail_length: int | None = None,
    ) -> ContextCacheSequenceAdmission:
        return ContextCacheSequenceAdmission(
            token_ids=np.asarray(tokens, np.int32),
            resident=resident,
            key_extras=BlockKeyExtras(isolation_digest=None if salt is None else Hash128(7, salt)),
            per_position_media_hash=media,
            lookup_policy=lookup,
            commit_policy=commit,
            replay_tail_length=replay_tail_length,
            retention=retention or Retention(),
            checkpoint_boundaries=checkpoint_boundaries,
        )

    def admit(
        self, tokens: Sequence[int], *, request_id: int | None = None, reserve_pages: int = 0, **options: Any
    ) -> ToySequence | None:
        """Join one sequence; None when it was refused (`last_admission` says why).

        Args:
            options: see `admission`.
        """
        if not self._free_slots:
            return None
        resident = self._take_slot()
        try:
            self.last_admission = result = self._call(
                "admit_sequence",
                self.request,
                self.admission(tokens, resident, **options),
                self.headroom,
                reserve_pages=reserve_pages,
            )
        except BaseException:
            self._return_slot(resident)
            raise
        if result.status is not Status.OK:
            self._return_slot(resident)
            return None
        sequence = self._seat(tokens, resident, len(self.request.impl.sequences) - 1, request_id)
        self._after_seating(sequence)
        return sequence

    def _take_slot(self) -> ResidentRef:
        resident = ResidentRef(self._free_slots.popleft(), next(self._epochs))
        self._occupied.add(resident.slot)
        return resident

    def _return_slot(self, resident: ResidentRef) -> None:
        self._occupied.discard(resident.slot)
        self._free_slots.append(resident.slot)

    def _seat(
        self, tokens: Sequence[int], resident: ResidentRef, index: int, request_id: int | None = None
    ) -> ToySequence:
        state = self.request.sequence(index)
        number = self._next_id if request_id is None else request_id
        self._next_id = max(self._next_id, number) + 1
        start = state.reuse_token_length
        sequence = ToySequence(
            request_id=number,
            resident=resident,
            prompt=tuple(int(token_id) for token_id in tokens),
            twin=SoloRun(self.model, tokens),
            committed=start,
            drafted=start if self.paired else 0,
            reuse=state.reuse_report,
            boundaries=tuple(self.coordinator.checkpoint_boundaries(self.request, index)),
        )
        self.live[number] = sequence
        return sequence

    def _after_seating(self, sequence: ToySequence) -> None:
        """With MTP the junction entry is computed again, from the hidden row that the checkpoint saved."""
        if self.mtp and sequence.committed:
            rows = torch.zeros((len(self.request.impl.sequences), 1, HIDDEN_WIDTH), dtype=torch.int64)
            index = self.index(sequence)
            self._require_ok(self._call("restore_hybrid_mtp_boundary_hidden", self.request, index, rows, 0))
            first, second = (int(value) & (1 << 64) - 1 for value in rows[index, 0].tolist())
            sequence.drafted = sequence.committed - 1
            sequence.hiddens[sequence.drafted] = (first, second)
            if (first, second) != sequence.twin.hiddens[sequence.drafted]:
                raise InvariantError(f"request {sequence.request_id}: the restored hidden row is not its own")
        if self.check:
            check_state(self.machine, sequence)

    def cancel(self, *sequences: ToySequence) -> None:
        """Sequences leave without having ended normally: nothing more of them is published."""
        self._retire(sequences)

    def finish(self, *sequences: ToySequence) -> None:
        """Sequences end normally at rest, and leave."""
        self._idle_step(sequences)
        self._retire(sequences)

    def abort(self, *sequences: ToySequence) -> None:
        """A step is prepared, fails for `sequences` before anything ran, and they leave."""
        if self._prepare([sequence for sequence in sequences if sequence.finalized]):
            self._complete({}, [])
        self._retire(sequences)

    def _idle_step(self, completed: Sequence[ToySequence]) -> None:
        self._require_ok(self._call("prepare_decode_step", self.request, self.headroom, []))
        self._complete({}, completed)

    def _retire(self, sequences: Sequence[ToySequence]) -> None:
        leaving = {self.index(sequence) for sequence in sequences}
        mapping, survivors = [], 0
        for index in range(len(self.request.impl.sequences)):
            mapping.append(-1 if index in leaving else survivors)
            survivors += index not in leaving
        self._require_ok(self._call("begin_batch_compaction", self.request, mapping, survivors))
        self._require_ok(self._call("compact_batch", self.request))
        for sequence in sequences:
            sequence.live = False
            del self.live[sequence.request_id]
            self._return_slot(sequence.resident)

    def restart(self) -> None:
        """After a lost session: drop the container as it is, recover, and open a new one."""
        self.request.abandon()
        self._leave()
        if not self.coordinator.recover():
            raise SessionLostError("the coordinator could not be recovered")
        self.request = self._open()

    def _leave(self) -> None:
        """Everybody is gone: the request ended, or its handle did."""
        for sequence in self.live.values():
            sequence.live = False
            self._return_slot(sequence.resident)
        self.live.clear()

    def close(self) -> None:
        """Cancel whoever is live, finish the container, and require that everything came back."""
        if self.live:
            self.cancel(*self.live.values())
        self._require_ok(self.coordinator.finish(self.request))
        if not self._owns_coordinator:
            return
        self._require_ok(self.coordinator.shutdown())
        require_baseline(self.coordinator)
        self.coordinator.close()

    # --- steps -------------------------------------------------------------------------------------------

    def prefill_chunk(self, sequence: ToySequence, num_tokens: int) -> bool:
        """A step of one prompt chunk; whether it completed the prompt."""
        self.mixed_step([(sequence, num_tokens)])
        return sequence.finalized

    def prefill(self, sequence: ToySequence, chunk: int | None = None) -> int:
        """The rest of a prompt in chunks; how many there were."""
        steps = 0
        while not sequence.finalized:
            self.prefill_chunk(sequence, chunk or len(sequence.prompt))
            steps += 1
        return steps

    def step(
        self, sequences: Iterable[ToySequence] | None = None, *, finish: Sequence[ToySequence] = ()
    ) -> dict[int, list[int]] | None:
        """Decode (or draft and verify) `sequences`, by default everybody whose prompt is complete; the rest hold."""
        ready = [sequence for sequence in self.live.values() if sequence.finalized]
        return self.mixed_step([(sequence, DECODE) for sequence in sequences or ready], finish=finish)

    def mixed_step(
        self, work: Sequence[tuple[ToySequence, int]], *, finish: Sequence[ToySequence] = ()
    ) -> dict[int, list[int]] | None:
        """One step over prompt chunks (a number of tokens) and decode rows (`DECODE`), packed in this order.

        Args:
            finish: sequences that end normally in this very step, and leave after it.
        Returns:
            Request id to its new tokens; None when a sequence could get no page (`refused`), nothing ran.
        """
        work = [(sequence, count) for sequence, count in work if sequence.live]
        if self.look_again:
            self._look_again([sequence for sequence, count in work if count != DECODE])
        decoding = [sequence for sequence, count in work if count == DECODE]
        if not self._prepare(decoding):
            return None
        proposals = {sequence.request_id: self._draft(sequence) for sequence in decoding}
        rows = [self._row(sequence, count, proposals.get(sequence.request_id, [])) for sequence, count in work]
        ran = list(zip([sequence for sequence, _ in work], rows, self.machine.forward(rows), strict=True))
        produced = {s.request_id: self._verify(s, row, result) for s, row, result in ran if s.request_id in proposals}
        chunks = [(s, row, result) for s, row, result in ran if s.request_id not in proposals]
        self._end_chunks(chunks, produced)
        accepted = {number: tokens for number, tokens in produced.items() if number in proposals}
        self._complete(accepted, finish)
        if self.check:
            for sequence in self.live.values():
                check_state(self.machine, sequence)
        if finish:
            self._retire(finish)
        return produced

    def _look_again(self, sequences: Sequence[ToySequence]) -> None:
        for sequence in sequences:
            known = self._call("rebind_prefill", self.request, self.index(sequence))
            if known > sequence.committed:
                sequence.committed = known
                sequence.hiddens.clear()
                sequence.drafted = known if self.paired else 0
                sequence.reuse = self.request.sequence(self.index(sequence)).reuse_report
                self._after_seating(sequence)

    def _prepare(self, decoding: Sequence[ToySequence]) -> bool:
        places = [self.index(sequence) for sequence in decoding]
        status = self._call("prepare_decode_step", self.request, self.headroom, places)
        if status is Status.REQUEST_FAILED:
            refused = self.request.impl.sequences[self.request.refused_slot or 0].resident
            self.refused = next(sequence for sequence in self.live.values() if sequence.resident == refused)
            return False
        self._require_ok(status)
        return True

    def _row(self, sequence: ToySequence, count: int, proposals: list[int]) -> Row:
        past = sequence.committed
        if count == DECODE:
            return Row(sequence.slot, past, (sequence.tokens[past], *proposals))
        end = sequence.chunk_end(count, stop_at_boundaries=self.stop_at_boundaries)
        return Row(sequence.slot, past, tuple(sequence.tokens[past:end]))

    # --- draft and verify --------------------------------------------------------------------------------

    def _draft(self, sequence: ToySequence) -> list[int]:
        """Materialise the draft entries of what was accepted last, then propose; nothing when not speculative."""
        if not self.speculative:
            return []
        self._catch_up(sequence)
        teller = TruthTeller(sequence.twin)
        proposals: list[int] = []
        for step in range(self.draft_tokens):
            if self.paired and step:
                self._write_scratch(sequence, step, proposals[-1])
            view = DraftView(
                request_id=sequence.request_id,
                position=sequence.committed + 1 + step,
                step=step,
                truth=teller.truth(),
                state=self._draft_view(sequence, step),
            )
            proposals.append(self.drafter.propose(view, self.model.vocab_size))
            teller.proposed(proposals[-1])
        sequence.proposals.append(proposals)
        return proposals

    def _catch_up(self, sequence: ToySequence) -> None:
        """Write every draft entry whose hidden row and successor are known."""
        if not self.paired:
            return
        start, end = sequence.drafted, min(sequence.committed, self.model.num_drafts(len(sequence.tokens)))
        if end <= start:
            return
        hiddens = [sequence.hiddens.pop(position) for position in range(start, end)]
        successors = [self.model.successor(sequence.tokens, position) for position in range(start, end)]
        self.machine.write_draft(sequence.slot, start, hiddens, successors)
        sequence.drafted = end

    def _write_scratch(self, sequence: ToySequence, step: int, proposal: int) -> None:
        """The entry behind a proposal: made of the draft's own hidden row, to be written again once accepted."""
        position = sequence.committed + step - 1
        own = int(self.machine.draft_state(sequence.slot, position)[-1])
        self.machine.write_draft(sequence.slot, position, [(own, own)], [proposal])

    def _draft_view(self, sequence: ToySequence, step: int) -> Any:
        if self.paired:
            return self.machine.draft_state(sequence.slot, sequence.committed + step)
        return self.machine.base_state(sequence.slot, sequence.committed)

    def _verify(self, sequence: ToySequence, row: Row, result: RowResult) -> list[int]:
        """Keep the agreed proposals and one bonus token; roll everything else back."""
        agreed = 0
        while agreed < len(row.tokens) - 1 and row.tokens[agreed + 1] == result.next_tokens[agreed]:
            agreed += 1
        accepted = [*row.tokens[1 : agreed + 1], result.next_tokens[agreed]]
        if self.model.has_recurrent:
            self.machine.set_recurrent_state(sequence.slot, result.recurrents[agreed])
        if self.paired:
            sequence.hiddens.update(enumerate(result.hiddens[: agreed + 1], row.past))
        sequence.accept(accepted)
        sequence.committed = row.past + agreed + 1
        sequence.rounds.append(len(accepted))
        return accepted

    # --- the end of chunks -------------------------------------------------------------------------------

    def _end_chunks(self, chunks: Sequence[tuple[ToySequence, Row, RowResult]], produced: dict[int, list[int]]) -> None:
        for sequence, row, result in chunks:
            if self.paired:
                sequence.hiddens.update(enumerate(result.hiddens, row.past))
            sequence.committed = row.past + len(row.tokens)
        self._capture([sequence for sequence, _, _ in chunks])
        for sequence, _, result in chunks:
            produced[sequence.request_id] = self._end_chunk(sequence, result)

    def _capture(self, sequences: Sequence[ToySequence]) -> None:
        """Checkpoints at chunk ends, for models without MTP."""
        ends = [s for s in sequences if self._wants_checkpoint(s) and not self.mtp]
        if not ends:
            return
        slots, lengths = [self.index(sequence) for sequence in ends], [sequence.committed for sequence in ends]
        self._require_ok(self._call("enqueue_prefill_captures", self.request, slots, lengths))
        self.check_staged(ends)

    def _wants_checkpoint(self, sequence: ToySequence) -> bool:
        return self.profile.uses_checkpoint_reuse and sequence.committed in sequence.boundaries

    def check_staged(self, sequences: Iterable[ToySequence]) -> None:
        """What was captured is the state of a solo run at the same token count."""
        if self.machine.storage is None:
            return
        for sequence in sequences:
            staged = self.request.sequence(self.index(sequence)).staged_hybrid_publication
            if staged is None:
                continue
            length = staged.checkpoint.exact_length
            found = self.machine.storage.fingerprint(staged.snapshots.recurrent_snapshot_slot)
            if found != checkpoint_fingerprint(sequence.twin, length):
                raise InvariantError(f"request {sequence.request_id}: the capture at {length} is another state")

    def _end_chunk(self, sequence: ToySequence, result: RowResult) -> list[int]:
        done = sequence.committed == len(sequence.prompt)
        self._catch_up(sequence)
        index, common = self.index(sequence), {}
        if self.paired and not self.mtp:
            common["common_state_length"] = sequence.drafted
        self._require_ok(self._call("advance_prefill", self.request, index, sequence.committed, **common))
        accepted = [result.next_tokens[-1]] if done else []
        if done:
            sequence.accept(accepted)
            self._catch_up(sequence)
            advance = ContextCacheSequenceAdvance(accepted, sequence.committed)
            self._require_ok(self._call("finalize_sequence_admission", self.request, index, advance))
            sequence.finalized = True
        if self.mtp and self._wants_checkpoint(sequence):
            self._publish_boundary(sequence, result)
        return accepted

    def _publish_boundary(self, sequence: ToySequence, result: RowResult) -> None:
        rows = torch.zeros((len(self.request.impl.sequences), len(result.hiddens), HIDDEN_WIDTH), dtype=torch.int64)
        index = self.index(sequence)
        rows[index] = torch.from_numpy(np.array(result.hiddens, dtype=np.uint64).view(np.int64))
        last = len(result.hiddens) - 1
        length = sequence.committed
        self._require_ok(self._call("publish_hybrid_mtp_endpoint", self.request, index, length, rows, last))

    # --- completing a step -------------------------------------------------------------------------------

    def _complete(self, accepted: dict[int, list[int]], completed: Sequence[ToySequence]) -> None:
        self._steps += 1
        by_slot = {sequence.resident: sequence for sequence in self.live.values()}
        order = [by_slot[state.resident] for state in self.request.impl.sequences]
        commons = [sequence.drafted for sequence in order] if self.paired and not self.mtp else None
        slots = [self.index(sequence) for sequence in completed]
        advances = self._advances(order, accepted)
        self._require_ok(self._call("complete_decode_step", self.request, advances, slots, commons))

    def _advances(self, order: Sequence[ToySequence], accepted: dict[int, list[int]]) -> Any:
        """Advances in execution order, found by request id; every other vanilla step uses the compact form."""
        if not self.speculative and self._steps % 2:
            return OneTokenAdvances([accepted.get(s.request_id, [HOLD_TOKEN])[0] for s in order])
        return [
            ContextCacheSequenceAdvance(accepted[s.request_id], s.committed)
            if s.request_id in accepted
            else ContextCacheSequenceAdvance()
            for s in order
        ]

    # --- calls -------------------------------------------------------------------------------------------

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """A coordinator call; afterwards everything that nobody holds is poisoned, and all is counted again."""
        result = getattr(self.coordinator, method)(*args, **kwargs)
        self.machine.poison_unreferenced(self.coordinator.manager.pools, self._occupied)
        if self.check:
            recount(self.coordinator)
        return result

    def _require_ok(self, status: Status) -> None:
        if status is not Status.OK:
            raise SessionLostError(f"the coordinator answered {status.value}")
