"""`DevicePasses`: the passes of a paged draft model where the target computes on a device.

Hidden rows that wait, the proposals that chains begin with, and everything between them stay on the device.  A round is
one pass over what waits and one chain of passes over a row a sequence, each a replayed graph where its shape has been
seen; the host reads the chains when the target has checked them (`unread_chains`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from edgellm.decoding.draft_model import entries_batch
from edgellm.decoding.draft_passes import nothing_read
from edgellm.decoding.draft_staging import DraftStaging, ExpectedPass, slot_rows
from edgellm.decoding.unread_chains import UnreadChains
from edgellm.errors import BrokenInvariantError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from edgellm.decoding.chain import KeptRow
    from edgellm.decoding.draft_model import DraftHead, DraftStep
    from edgellm.decoding.draft_ops import DraftExecutor
    from edgellm.decoding.draft_passes import DraftEntries
    from edgellm.decoding.unread_chains import UnreadChain
    from edgellm.runtime.batch import RaggedBatch
    from edgellm.runtime.kv_cache import KVCache
    from edgellm.runtime.step_inputs import StepShape, StepTensors

    Int32Array = npt.NDArray[np.int32]


_DEFERRED = 16  # entries of a sequence that wait at most while it proposes nothing
_COPIED_ONE_BY_ONE = 2  # rows: more of them pay for sending their places


@dataclass(slots=True)
class SlotRows:
    """State by resident slot; a row behind the last slot takes what padding writes.

    Attributes:
        waiting: (slots, room, hidden_width) hidden rows of the target whose entries are not written yet.
        tokens: (slots + 1,) int32, the proposal behind the entries.
        own: (slots + 1, width) the head's hidden row there.
        chains: (K * slots,) int32, memory of a round's proposals.
    """

    waiting: torch.Tensor
    tokens: torch.Tensor
    own: torch.Tensor
    chains: torch.Tensor


def new_slot_rows(head: DraftHead, device: torch.device, num_slots: int, num_drafts: int) -> SlotRows:
    """Zeroed; `num_drafts` is K."""
    return SlotRows(
        waiting=torch.zeros((num_slots, _room(num_drafts), head.hidden_width), dtype=head.dtype, device=device),
        tokens=torch.zeros(num_slots + 1, dtype=torch.int32, device=device),
        own=torch.zeros((num_slots + 1, head.width), dtype=head.dtype, device=device),
        chains=torch.zeros(num_drafts * num_slots, dtype=torch.int32, device=device),
    )


def _room(num_drafts: int) -> int:
    """Rows of a sequence that wait at most: those of the latest run behind as many as are put off."""
    return _DEFERRED + num_drafts + 1


class DevicePasses:
    """See `DraftPasses`.

    Args:
        head: over the executor's operators.
        kv_cache: the head's pages.
        num_drafts: K, most tokens proposed in a round.
    """

    deferred = _DEFERRED

    @torch.inference_mode()
    def __init__(self, head: DraftHead, kv_cache: KVCache, executor: DraftExecutor, num_drafts: int) -> None:
        self._head = head
        self._device = executor.device
        self._num_drafts = num_drafts
        self._room = _room(num_drafts)
        self._boundaries: dict[int, torch.Tensor] = {}
        self._held: dict[int, int] = {}
        self._read: set[int] = set()
        self._staging = DraftStaging(executor, head.config, kv_cache, dtype=head.dtype)
        self._rows = new_slot_rows(head, self._device.torch_device, executor.table_shape[0], num_drafts)
        self._waiting = self._rows.waiting.flatten(0, 1)
        self._row_views: dict[int, torch.Tensor] = {}
        self._staging.warm_up(self._expected())

    def begin(self, slot: int, boundary: torch.Tensor | None) -> None:
        self.end([slot])
        if boundary is not None:
            self._boundaries[slot] = boundary[None].clone()

    def end(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._boundaries.pop(slot, None)
            self._held.pop(slot, None)
            self._read.discard(slot)

    @torch.inference_mode()
    def hold(self, rows: Sequence[KeptRow]) -> None:
        slots, lengths = [row.slot for row in rows], [len(row.inputs) for row in rows]
        held = [self._held.get(slot, 0) for slot in slots]
        ends = [before + count for before, count in zip(held, lengths, strict=True)]
        if max(ends) > self._room:
            raise BrokenInvariantError(f"{max(ends)} hidden rows wait in a slot of {self._room}")
        places = [slot * self._room + before for slot, before in zip(slots, held, strict=True)]
        if len(rows) <= _COPIED_ONE_BY_ONE:
            for row, place, count in zip(rows, places, lengths, strict=True):
                self._waiting[place : place + count].copy_(_hidden_of(row))
        else:
            self._hold_many(rows, np.array(places), np.array(lengths))
        self._held.update(zip(slots, ends, strict=True))

    def _hold_many(self, rows: Sequence[KeptRow], places: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> None:
        """One copy for all of them.

        Args:
            places: (N,) where each begins among the rows that wait; (N,) counts.
        """
        within = _places_within(counts)
        lie = np.repeat(np.array([row.first for row in rows]), counts) + within
        start = 0
        for row, count in zip(rows, counts.tolist(), strict=True):
            if row.branch is not None:
                lie[start : start + count] = row.rows
            start += count
        go = np.repeat(places, counts) + within
        sources, targets = self._device.upload(np.stack((lie, go))).unbind(0)
        self._waiting.index_copy_(0, targets, _gathered(rows, sources))

    @torch.inference_mode()
    def hold_each(self, slots: Sequence[int], hidden: torch.Tensor) -> None:
        places = []
        for slot in slots:
            held = self._held.get(slot, 0)
            if held >= self._room:
                raise BrokenInvariantError(f"{held + 1} hidden rows wait in a slot of {self._room}")
            places.append(slot * self._room + held)
            self._held[slot] = held + 1
        if len(places) > _COPIED_ONE_BY_ONE:
            self._waiting.index_copy_(0, self._device.upload(np.array(places)), hidden)
            return
        for place, row in zip(places, (hidden,) if len(places) == 1 else hidden[:, None], strict=True):
            self._waiting_row(place).copy_(row)

    def _waiting_row(self, place: int) -> torch.Tensor:
        """(1, hidden_width): one row of those that wait."""
        found = self._row_views.get(place)
        if found is None:
            found = self._row_views[place] = self._waiting[place : place + 1]
        return found

    @torch.inference_mode()
    def held_row(self, slot: int, number: int) -> torch.Tensor:
        if not 0 <= number < self._held.get(slot, 0):
            raise BrokenInvariantError(f"hidden row {number} of slot {slot} is wanted, {self._held.get(slot, 0)} wait")
        return self._rows.waiting[slot, number].clone()

    @torch.inference_mode()
    def write(self, entries: DraftEntries, fresh: Sequence[KeptRow] = ()) -> None:
        batch = entries_batch(
            np.array(entries.slots, np.int32),
            np.array(entries.past, np.int32),
            np.array(entries.counts, np.int32),
            np.array(entries.token_ids, np.int32),
            entries.page_rows,
        )
        if fresh:
            launch = partial(self._write_rows, self._joined(entries, fresh))
            self._staging.run("fresh", batch, launch, captured=False)
        else:
            self._check_held(entries)
            self._staging.run("write", batch, self._write_waiting)
        self._held.update(dict.fromkeys(entries.slots, 0))
        self._read.update(entries.slots)

    @torch.inference_mode()
    def chains(
        self, slots: Sequence[int], past: Sequence[int], limits: Sequence[int], page_rows: Int32Array
    ) -> list[UnreadChain]:
        depth = limits[0]
        # A row that has its chain goes on at its last place; what it proposes there is not looked at.
        batch = self._proposal_batch(slots, past, np.maximum(np.array(limits, np.int32) - 2, 0), page_rows)
        shape = self._staging.run(("chain", depth), batch, partial(self._propose, depth))
        return UnreadChains(self._device, self._chains_of(depth, shape.rows), limits).chains()

    def _proposal_batch(
        self, slots: Sequence[int], past: Sequence[int], scratch: Int32Array, page_rows: Int32Array
    ) -> RaggedBatch:
        """A row for each sequence; positions say where its scratch entries begin, `past_len` where the last one is.

        Args:
            scratch: (N,) int32 entries behind the first one.
        Raises:
            BrokenInvariantError: a slot has no entries.
        """
        if not self._read.issuperset(slots):
            raise nothing_read(next(slot for slot in slots if slot not in self._read))
        first, nothing = np.array(past, np.int32), np.zeros(len(slots), np.int32)
        batch = entries_batch(np.array(slots, np.int32), first + scratch, nothing + np.int32(1), nothing, page_rows)
        batch.positions = first
        return batch

    # ---- launches: what follows may be captured, and reads nothing back ------------------------------------------

    def _write_waiting(self, step: StepTensors, shape: StepShape) -> None:
        self._write_rows(self._waiting_rows(step), step, shape)

    def _write_rows(self, hidden: torch.Tensor, step: StepTensors, shape: StepShape) -> None:
        ends = (step.query_start[1 : shape.rows + 1] - 1).clamp_(min=0).long()
        slots = slot_rows(step.slots, len(self._rows.tokens) - 1)
        self._run_entries(step.token_ids, hidden, self._staging.step(step, shape), ends, slots)

    def _run_entries(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, step: DraftStep, ends: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Write entries, and remember what comes behind rows `ends` in memory rows `slots`."""
        tokens, own = self._head.forward(token_ids, hidden, step, ends, projected=False)
        self._rows.tokens.index_copy_(0, slots, tokens.int())
        self._rows.own.index_copy_(0, slots, own)

    def _waiting_rows(self, step: StepTensors) -> torch.Tensor:
        """(T, hidden_width): row j of a slot's memory for the j-th entry that it adds; any row for padding."""
        sequence = step.token_seq.clamp(min=0)
        within = step.positions - step.past_len.index_select(0, sequence)
        places = (step.slots.index_select(0, sequence) * self._room + within).clamp_(min=0)
        return self._waiting.index_select(0, places)

    def _propose(self, depth: int, step: StepTensors, shape: StepShape) -> None:
        """A chain of `depth` tokens for each row, the first of them known already."""
        memory, staging = self._rows, self._staging
        slots, chains = slot_rows(step.slots, len(memory.tokens) - 1), self._chains_of(depth, shape.rows)
        tokens, own = memory.tokens.index_select(0, slots), memory.own.index_select(0, slots)
        chains[0] = tokens
        positions = step.positions
        for number in range(1, depth):
            here = replace(step, positions=positions, past_len=positions, lengths=positions + 1)
            found, own = self._head.forward(tokens, own, staging.step(here, shape), None, projected=True)
            tokens = found.int()
            chains[number] = tokens
            positions = torch.minimum(positions + 1, step.past_len)

    # ---- memory -------------------------------------------------------------------------------------------------

    def _expected(self) -> list[ExpectedPass]:
        """Proposals, and passes in front of them over as many entries as a round accepts at most."""
        passes = []
        for rows in self._staging.row_buckets:
            passes.append(self._expected_proposal(rows))
            for accepted in range(1, self._num_drafts + 2):
                passes.append(ExpectedPass("write", accepted * rows, rows, self._write_waiting))
        return passes

    def _expected_proposal(self, rows: int) -> ExpectedPass:
        """Chains of K tokens."""
        return ExpectedPass(("chain", self._num_drafts), rows, rows, partial(self._propose, self._num_drafts))

    def _chains_of(self, depth: int, rows: int) -> torch.Tensor:
        return self._rows.chains[: depth * rows].view(depth, rows)

    def _joined(self, entries: DraftEntries, fresh: Sequence[KeptRow]) -> torch.Tensor:
        """(T, hidden_width) rows of a step's prompt chunks, behind those at the boundary of a checkpoint."""
        rows = {row.slot: row.hidden for row in fresh}
        pieces: list[torch.Tensor] = []
        for slot, count in zip(entries.slots, entries.counts, strict=True):
            hidden, boundary = rows[slot], self._boundaries.pop(slot, None)
            if hidden is None:
                raise BrokenInvariantError(f"slot {slot} ran without the hidden rows that its draft needs")
            if boundary is not None:
                pieces.append(boundary)
                count -= 1
            pieces.append(hidden[:count])
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def _check_held(self, entries: DraftEntries) -> None:
        for slot, count in zip(entries.slots, entries.counts, strict=True):
            if self._held.get(slot, 0) < count:
                raise BrokenInvariantError(
                    f"slot {slot} adds {count} draft entries, and {self._held.get(slot, 0)} hidden rows wait"
                )


def _hidden_of(row: KeptRow) -> torch.Tensor:
    if row.hidden is None:
        raise BrokenInvariantError(f"slot {row.slot} ran without the hidden rows that its draft needs")
    return row.hidden


def _gathered(rows: Sequence[KeptRow], sources: torch.Tensor) -> torch.Tensor:
    """The hidden rows of rows of one step, one behind the other.

    Args:
        sources: where they lie in the step's.
    """
    step_hidden = rows[0].step_hidden
    if step_hidden is not None and all(row.step_hidden is step_hidden for row in rows):
        return step_hidden.index_select(0, sources)
    return torch.cat([row.hidden for row in rows if row.hidden is not None])


def _places_within(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """0, 1, ... within each of the groups of these sizes, one behind the other."""
    places: npt.NDArray[np.int64] = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return places
