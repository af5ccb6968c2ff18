"""`PagedDraftDecoder`: chains from a draft model that reads the target's hidden rows and keeps KV pages of its own.

Draft entry k is made of the target's hidden row of token k and of token k + 1 (Li et al., "EAGLE", 2024, and multi-
token prediction heads alike), so entries trail the text by one token.  Entries of accepted tokens are written in the
next round, all sequences in one pass; the first proposal falls out of the last of them, each further one costs a pass
over one row a sequence, whose entries are scratch: they lie behind the written ones and are written again.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from edgellm.cache.types import SpecReuseContract
from edgellm.decoding.chain import ChainDecoder, KeptRow
from edgellm.errors import BrokenInvariantError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from edgellm.decoding.adaptive import DraftLengths
    from edgellm.decoding.base import DecodingSeat, StepTokens
    from edgellm.runtime.batch import Executor, RaggedBatch, VerifyingExecutor
    from edgellm.sampling.sampler import Sampler, SamplingState

    Int32Array = npt.NDArray[np.int32]

DEFERRED_ENTRIES = 32
"""Entries of a sequence that proposes nothing are left for later, up to so many: one pass then writes all of them."""


@dataclass(slots=True)
class DraftRows:
    """N sequences of one draft pass, compact (T = sum of counts).

    Attributes:
        slots: (N,) resident slots.
        past: (N,) entries that each sequence has.
        counts: (N,) entries that each adds.
        token_ids: (T,) int32, token k + 1 of entry k.
        hidden: (T, hidden_width) the target's hidden row of token k, or the draft's own behind written entries.
        projected: whether `hidden` are rows of the draft's own.
        page_rows: (num_slots, pages_per_slot) int32 page table of the draft's pool.
    """

    slots: Int32Array
    past: Int32Array
    counts: Int32Array
    token_ids: Int32Array
    hidden: torch.Tensor
    projected: bool
    page_rows: Int32Array


class DraftModel(Protocol):
    """A draft model over pages of its own.  Owned by its decoder."""

    def forward(self, rows: DraftRows) -> tuple[list[int], torch.Tensor]:
        """Write the entries; propose what comes behind the last of each sequence.

        Returns:
            (N,) token ids of the target's vocabulary, the most likely ones; (N, draft width) the draft's hidden rows of
            the last entries.
        """
        ...


@dataclass(slots=True)
class _Seat:
    """What the draft knows of one resident.

    Attributes:
        drafted: leading entries that are written.
        hidden: (pending, width) the target's hidden rows of entries `drafted` on, in pieces.
        successors: token k + 1 of each of them, as far as it is known.
        proposal: what the draft says comes behind the last written entry, and its own hidden row there.
        last_hidden: (width,) the target's hidden row of the last token that ran.
    """

    prompt: Int32Array
    drafted: int
    hidden: list[torch.Tensor] = field(default_factory=list)
    successors: list[int] = field(default_factory=list)
    proposal: tuple[int, torch.Tensor] | None = None
    last_hidden: torch.Tensor | None = None


class PagedDraftDecoder(ChainDecoder):
    """A subclass builds the draft model, its pages and the request for hidden rows.

    Args:
        num_drafts: K, most tokens proposed in a round.
    """

    def __init__(self, num_drafts: int, lengths: DraftLengths | None) -> None:
        super().__init__(num_drafts, lengths)
        self._seats: dict[int, _Seat] = {}
        self._page_rows: Int32Array | None = None

    @property
    @abstractmethod
    def draft(self) -> DraftModel:
        """The draft model; asked for once its pages are open."""

    def spec_reuse_contract(self) -> SpecReuseContract:
        return SpecReuseContract(owns_paged_spec_state=True, future_dependency_tokens=1)

    def seat(self, executor: Executor, seat: DecodingSeat) -> None:
        super().seat(executor, seat)
        made = _Seat(seat.prompt, seat.length)
        if seat.boundary_hidden is not None:
            # The entry in front of the boundary depends on the token behind it, which differs from text to text.
            made.drafted = seat.length - 1
            made.hidden.append(seat.boundary_hidden[None].clone())
            made.successors.append(int(seat.prompt[seat.length]))
        self._seats[seat.slot] = made

    def unseat(self, slots: Sequence[int]) -> None:
        super().unseat(slots)
        for slot in slots:
            self._seats.pop(slot, None)

    def common_state_length(self, slot: int) -> int | None:
        return self._seats[slot].drafted

    def run_step(
        self, executor: Executor, batch: RaggedBatch, sampler: Sampler, rows: Sequence[SamplingState]
    ) -> StepTokens:
        if batch.draft_page_rows is None:
            raise BrokenInvariantError(f"decoder {self.name!r} has draft pages, and the batch no table of them")
        self._page_rows = batch.draft_page_rows
        return super().run_step(executor, batch, sampler, rows)

    # --- proposing ---------------------------------------------------------------------------------------

    def propose(
        self, executor: VerifyingExecutor, batch: RaggedBatch, rows: Sequence[int], limits: Sequence[int]
    ) -> list[list[int]]:
        slots: list[int] = batch.state_index[rows].tolist()
        seats = [self._seats[slot] for slot in slots]
        wanted = [slot for slot, limit in zip(slots, limits, strict=True) if limit]
        late = [
            slot
            for slot, seat in zip(slots, seats, strict=True)
            if len(seat.successors) >= DEFERRED_ENTRIES and slot not in wanted
        ]
        self._catch_up([*wanted, *late])
        chains: dict[int, list[int]] = {slot: [] for slot in slots}
        most = dict(zip(slots, limits, strict=True))
        hidden: dict[int, torch.Tensor] = {}
        for slot in wanted:
            chains[slot], hidden[slot] = self._first(slot)
        depth = 1
        while going := [slot for slot in wanted if most[slot] > depth]:
            self._deepen(going, chains, hidden, depth)
            depth += 1
        return [chains[slot] for slot in slots]

    def _first(self, slot: int) -> tuple[list[int], torch.Tensor]:
        proposal = self._seats[slot].proposal
        if proposal is None:
            raise BrokenInvariantError(f"slot {slot} is to propose and its draft has read nothing")
        return [proposal[0]], proposal[1]

    def _deepen(
        self, slots: list[int], chains: dict[int, list[int]], hidden: dict[int, torch.Tensor], depth: int
    ) -> None:
        """One more proposal for each of `slots`, from entries that are scratch."""
        past = [self._seats[slot].drafted + depth - 1 for slot in slots]
        tokens, own = self.draft.forward(
            DraftRows(
                slots=np.array(slots, np.int32),
                past=np.array(past, np.int32),
                counts=np.ones(len(slots), np.int32),
                token_ids=np.array([chains[slot][-1] for slot in slots], np.int32),
                hidden=torch.stack([hidden[slot] for slot in slots]),
                projected=True,
                page_rows=self._table(),
            )
        )
        for number, slot in enumerate(slots):
            chains[slot].append(tokens[number])
            hidden[slot] = own[number]

    def _catch_up(self, slots: Sequence[int]) -> None:
        """Write every entry of `slots` whose hidden row and successor are known."""
        slots = [slot for slot in slots if self._seats[slot].successors]
        if not slots:
            return
        seats = [self._seats[slot] for slot in slots]
        counts = [len(seat.successors) for seat in seats]
        hidden, rest = zip(*(_take(seat.hidden, count) for seat, count in zip(seats, counts, strict=True)), strict=True)
        tokens, own = self.draft.forward(
            DraftRows(
                slots=np.array(slots, np.int32),
                past=np.array([seat.drafted for seat in seats], np.int32),
                counts=np.array(counts, np.int32),
                token_ids=np.array([token for seat in seats for token in seat.successors], np.int32),
                hidden=torch.cat(hidden),
                projected=False,
                page_rows=self._table(),
            )
        )
        for number, seat in enumerate(seats):
            seat.drafted += counts[number]
            seat.hidden = rest[number]
            seat.successors = []
            seat.proposal = (tokens[number], own[number])

    def _table(self) -> Int32Array:
        if self._page_rows is None:
            raise BrokenInvariantError(f"decoder {self.name!r} is asked for entries outside a step")
        return self._page_rows

    # --- what ran ----------------------------------------------------------------------------------------

    def absorb(self, executor: VerifyingExecutor, row: KeptRow) -> None:
        seat = self._seats[row.slot]
        if row.hidden is None:
            raise BrokenInvariantError(f"decoder {self.name!r} needs the target's hidden rows, and the step gave none")
        in_prompt = row.past < len(seat.prompt)
        # What waits for a later round is copied: a slice would keep the rows of the whole step alive.
        seat.last_hidden = row.hidden[-1].clone()
        seat.hidden.append(row.hidden if in_prompt else row.hidden.clone())
        end = row.past + len(row.inputs)
        seat.successors += row.inputs[1:].tolist()
        if row.token_ids:
            seat.successors.append(row.token_ids[-1])
        elif end < len(seat.prompt):
            seat.successors.append(int(seat.prompt[end]))
        if in_prompt:  # published when the chunk is; a verified run waits for the next round
            self._catch_up([row.slot])

    def boundary_hidden(self, slot: int) -> torch.Tensor | None:
        return self._seats[slot].last_hidden


def _take(pieces: list[torch.Tensor], count: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The first `count` rows of the pieces, and the pieces that are left."""
    rows = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    return rows[:count], [rows[count:]] if len(rows) > count else []


def draft_batch(rows: DraftRows) -> Any:
    """The `RaggedBatch` of a draft pass: one logits row for the last entry of each sequence."""
    from edgellm.runtime.batch import RaggedBatch

    starts = np.zeros(len(rows.counts) + 1, np.int32)
    np.cumsum(rows.counts, out=starts[1:])
    positions = np.arange(int(starts[-1]), dtype=np.int32) + np.repeat(rows.past - starts[:-1], rows.counts)
    return RaggedBatch(
        token_ids=rows.token_ids,
        positions=positions.astype(np.int32),
        query_start=starts,
        query_len=rows.counts,
        past_len=rows.past,
        state_index=rows.slots,
        page_rows=rows.page_rows,
        logits_index=(starts[1:] - 1).astype(np.int64),
        logits_to_seq=np.arange(len(rows.counts), dtype=np.int32),
    )
