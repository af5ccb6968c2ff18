"""Speculative decoders over the toy machine: real draft state, real rollback, proposals that depend on what is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from edgellm.decoding.chain import ChainDecoder
from edgellm.testing.toy_drafter import DraftView, StateDrafter, ToyDrafter, TruthTeller
from edgellm.testing.toy_model import HIDDEN_WIDTH, HiddenRow, SoloRun

if TYPE_CHECKING:
    from edgellm.cache.types import SpecReuseContract
    from edgellm.decoding.base import DecodingSeat
    from edgellm.decoding.chain import KeptRow
    from edgellm.runtime.batch import Executor, RaggedBatch, VerifyingExecutor
    from edgellm.testing.toy_executor import ToyStateExecutor
    from edgellm.testing.toy_machine import ToyMachine

_MASK = (1 << 64) - 1


@dataclass(slots=True)
class DraftSeat:
    """What the draft knows of one resident.

    Attributes:
        twin: the same tokens computed alone; tells drafters what is true.
        committed: tokens that have base state.
        drafted: leading draft entries that are right.
        hiddens: hidden rows from `drafted` on, which the draft still has to read.
        last_hidden: hidden row of the last token that ran.
    """

    request_id: int
    twin: SoloRun
    committed: int
    drafted: int
    hiddens: dict[int, HiddenRow] = field(default_factory=dict)
    last_hidden: torch.Tensor | None = None


class ToyChainDecoder(ChainDecoder):
    """Args:
    contract: what the draft needs of reused state; pages of its own are those of the machine.
    drafter: proposes single tokens; the default's are right or wrong by the draft state it reads.
    """

    def __init__(
        self, name: str, contract: SpecReuseContract, *, num_drafts: int = 3, drafter: ToyDrafter | None = None
    ) -> None:
        super().__init__(num_drafts)
        self.name = name
        self.drafter = drafter or StateDrafter()
        self._contract = contract
        self.seats: dict[int, DraftSeat] = {}
        self._machine: ToyMachine | None = None

    @property
    def paired(self) -> bool:
        return self._contract.owns_paged_spec_state

    def spec_reuse_contract(self) -> SpecReuseContract:
        return self._contract

    def seat(self, executor: Executor, seat: DecodingSeat) -> None:
        super().seat(executor, seat)
        self._machine = _machine(executor)
        twin = SoloRun(_machine(executor).model, seat.prompt.tolist())
        made = DraftSeat(seat.request_id, twin, seat.length, seat.length if self.paired else 0)
        if seat.boundary_hidden is not None:  # the entry at the boundary depends on a token that came behind it
            made.drafted = seat.length - 1
            made.hiddens[made.drafted] = _numbers(seat.boundary_hidden)
        self.seats[seat.slot] = made

    def unseat(self, slots: Sequence[int]) -> None:
        super().unseat(slots)
        for slot in slots:
            self.seats.pop(slot, None)

    def common_state_length(self, slot: int) -> int | None:
        return self.seats[slot].drafted if self.paired else None

    def boundary_hidden(self, slot: int) -> torch.Tensor | None:
        return self.seats[slot].last_hidden

    def complete_drafts(self, slots: Sequence[int], lengths: Sequence[int]) -> bool:
        if not self.paired or self._machine is None:
            return False
        for slot, length in zip(slots, lengths, strict=True):
            seat = self.seats[slot]
            seat.committed = length
            if length - 1 in seat.hiddens:  # else the answer is one token, and the prompt's last row is the last
                seat.last_hidden = _tensor(seat.hiddens[length - 1])
            self._catch_up(self._machine, slot, seat)
        return True

    def new_hidden_row(self) -> torch.Tensor:
        return torch.zeros((1, HIDDEN_WIDTH), dtype=torch.int64)

    # --- proposing ---------------------------------------------------------------------------------------

    def propose(
        self, executor: VerifyingExecutor, batch: RaggedBatch, rows: Sequence[int], limits: Sequence[int]
    ) -> list[list[int]]:
        machine = _machine(executor)
        return [
            self._chain(machine, int(batch.state_index[row]), limit) for row, limit in zip(rows, limits, strict=True)
        ]

    def _chain(self, machine: ToyMachine, slot: int, limit: int) -> list[int]:
        seat = self.seats[slot]
        self._catch_up(machine, slot, seat)
        teller = TruthTeller(seat.twin)
        chain: list[int] = []
        for step in range(limit):
            if self.paired and step:
                _write_scratch(machine, slot, seat.committed + step - 1, chain[-1])
            view = DraftView(
                request_id=seat.request_id,
                position=seat.committed + 1 + step,
                step=step,
                truth=teller.truth(),
                state=self._view(machine, slot, seat, step),
            )
            chain.append(self.drafter.propose(view, machine.model.vocab_size))
            teller.proposed(chain[-1])
        return chain

    def _view(self, machine: ToyMachine, slot: int, seat: DraftSeat, step: int) -> Any:
        if self.paired:
            return machine.draft_state(slot, seat.committed + step)
        return machine.base_state(slot, seat.committed)

    def _catch_up(self, machine: ToyMachine, slot: int, seat: DraftSeat) -> None:
        """Write every draft entry whose hidden row and successor are known."""
        start, end = seat.drafted, min(seat.committed, machine.model.num_drafts(len(seat.twin.tokens)))
        if not self.paired or end <= start:
            return
        hiddens = [seat.hiddens.pop(position) for position in range(start, end)]
        successors = [machine.model.successor(seat.twin.tokens, position) for position in range(start, end)]
        machine.write_draft(slot, start, hiddens, successors)
        seat.drafted = end

    # --- what ran ----------------------------------------------------------------------------------------

    def absorb(self, executor: VerifyingExecutor, row: KeptRow) -> None:
        seat = self.seats[row.slot]
        if row.hidden is not None:
            seat.last_hidden = row.hidden[-1]
            if self.paired:
                seat.hiddens.update(enumerate(map(_numbers, row.hidden), row.past))
        prompt = row.past < self._prompt_ends[row.slot]
        seat.committed = row.past + len(row.inputs)
        seat.twin.extend(row.token_ids)
        if prompt:  # published when the chunk is; a verified run is caught up with by the next draft pass
            self._catch_up(_machine(executor), row.slot, seat)


def _write_scratch(machine: ToyMachine, slot: int, position: int, proposal: int) -> None:
    """The entry behind a proposal: made of the draft's own hidden row, to be written again once accepted."""
    own = int(machine.draft_state(slot, position)[-1])
    machine.write_draft(slot, position, [(own, own)], [proposal])


def _numbers(hidden: torch.Tensor) -> HiddenRow:
    first, second = hidden.numpy().view(np.uint64).tolist()
    return first & _MASK, second & _MASK


def _tensor(row: HiddenRow) -> torch.Tensor:
    return torch.from_numpy(np.array(row, np.uint64).view(np.int64))


def _machine(executor: Executor) -> ToyMachine:
    return cast("ToyStateExecutor", executor).machine
