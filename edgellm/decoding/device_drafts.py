"""`DevicePasses`: the passes of a paged draft model where the target computes on a device.

Hidden rows that wait (the target's steps keep them, see `HiddenRing`), the proposals that chains begin with, and all
between them stay on the device.  A round is one pass over what waits and one chain of passes over a row a sequence,
each a replayed graph where its shape has been seen; the host reads the chains when the target has checked them
(`unread_chains`).
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
from edgellm.decoding.hidden_ring import HiddenRing
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
    from edgellm.models.step import KeepHidden
    from edgellm.runtime.batch import RaggedBatch
    from edgellm.runtime.kv_cache import KVCache
    from edgellm.runtime.step_inputs import StepShape, StepTensors

    Int32Array = npt.NDArray[np.int32]


_DEFERRED = 32  # entries of a sequence that wait at most while it proposes nothing


@dataclass(slots=True)
class SlotRows:
    """State by resident slot; a row behind the last slot takes what padding writes.

    Attributes:
        waiting: (slots, room, hidden_width) hidden rows of the target's latest tokens, see `HiddenRing`; entries of
            some are not written yet.
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
    """Rows of a sequence that wait at most: those of the latest run behind as many as are put off; one is run ahead."""
    return _DEFERRED + num_drafts + 2


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
        self._boundaries: dict[int, torch.Tensor] = {}
        self._read: set[int] = set()
        self._staging = DraftStaging(executor, head.config, kv_cache, dtype=head.dtype)
        self._rows = new_slot_rows(head, self._device.torch_device, executor.table_shape[0], num_drafts)
        self._ring = HiddenRing(self._rows.waiting, executor)
        self._staging.warm_up(self._expected())

    @property
    def keep(self) -> KeepHidden:
        return self._ring.keep

    def begin(self, slot: int, boundary: torch.Tensor | None) -> None:
        self.end([slot])
        if boundary is not None:
            self._boundaries[slot] = boundary[None].clone()

    def end(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._boundaries.pop(slot, None)
            self._read.discard(slot)

    @torch.inference_mode()
    def hold(self, rows: Sequence[KeptRow]) -> None:
        """What follows each other in its step was kept by it."""
        apart = [row for row in rows if row.branch is not None]
        if apart:
            self._ring.put(apart)

    def hold_each(self, slots: Sequence[int], hidden: torch.Tensor) -> None:
        """The step kept them itself."""

    @torch.inference_mode()
    def held_row(self, slot: int, written: int, number: int) -> torch.Tensor:
        if not 0 <= number < self._ring.room:
            raise BrokenInvariantError(f"hidden row {number} of slot {slot} is wanted, of {self._ring.room} that wait")
        return self._ring.copy_of(slot, written + number)

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
            self._check_room(entries)
            self._staging.run("write", batch, self._write_waiting)
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
        """(T, hidden_width): the target's row at the place of each entry; any row for padding."""
        sequence = step.token_seq.clamp(min=0)
        return self._ring.gathered(step.slots.index_select(0, sequence), step.positions)

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

    def _check_room(self, entries: DraftEntries) -> None:
        for slot, count in zip(entries.slots, entries.counts, strict=True):
            if count > self._ring.room:
                raise BrokenInvariantError(
                    f"slot {slot} adds {count} draft entries, and {self._ring.room} hidden rows wait at most"
                )
