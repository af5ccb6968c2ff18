"""`PagedDraftDecoder`: chains from a draft model that reads the target's hidden rows and keeps KV pages of its own.

Draft entry k is made of the target's hidden row of token k and of token k + 1 (Li et al., "EAGLE", 2024, and multi-
token prediction heads alike), so entries trail the text by one token.  Entries of accepted tokens are written in the
next round, all sequences in one pass; the first proposal falls out of the last of them, each further one costs a pass
over one row a sequence, whose entries are scratch: they lie behind the written ones and are written again.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from edgellm.cache.types import SpecReuseContract
from edgellm.decoding.chain import ChainDecoder, KeptRow
from edgellm.decoding.draft_model import DraftModel, DraftRows, draft_batch
from edgellm.decoding.draft_ops import device_executor
from edgellm.decoding.draft_passes import DraftEntries, HostPasses
from edgellm.errors import BrokenInvariantError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    import numpy.typing as npt
    import torch

    from edgellm.decoding.adaptive import DraftLengths
    from edgellm.decoding.base import DecodingSeat, StepTokens
    from edgellm.decoding.draft_model import DraftHead
    from edgellm.decoding.draft_ops import DraftExecutor
    from edgellm.decoding.draft_passes import DraftPasses
    from edgellm.decoding.verify import Proposal
    from edgellm.models.device_ops import DeviceOps
    from edgellm.models.step import HiddenRequest
    from edgellm.runtime.batch import Executor, RaggedBatch, VerifyingExecutor
    from edgellm.runtime.executor_cuda import ExecutorLimits
    from edgellm.runtime.kv_cache import KVCache
    from edgellm.sampling.sampler import Sampler, SamplingState

    Int32Array = npt.NDArray[np.int32]

__all__ = ["DraftModel", "DraftRows", "PagedDraftDecoder", "draft_batch"]


@dataclass(slots=True)
class _Seat:
    """What the draft knows of one resident.

    Attributes:
        drafted: leading entries that are written.
        successors: token k + 1 of each entry from `drafted` on, as far as it is known.
        last_hidden: (width,) the target's hidden row of the last prompt token that ran, where checkpoints save it.
        decodes: a step kept something of the answer.
    """

    prompt: Int32Array
    drafted: int
    successors: list[int] = field(default_factory=list)
    last_hidden: torch.Tensor | None = None
    decodes: bool = False


class PagedDraftDecoder(ChainDecoder):
    """A subclass builds the head and its pages, and asks for hidden rows.

    Args:
        num_drafts: K, most tokens proposed in a round.
    """

    absorbs_plain_steps = True

    def __init__(self, num_drafts: int, lengths: DraftLengths | None) -> None:
        super().__init__(num_drafts, lengths)
        self._seats: dict[int, _Seat] = {}
        self._page_rows: Int32Array | None = None
        self._passes: DraftPasses = HostPasses(lambda: self.draft)

    @property
    @abstractmethod
    def draft(self) -> DraftModel:
        """The draft model on the CPU; asked for once its pages are open."""

    @abstractmethod
    def _head(self, ops: DeviceOps | None) -> DraftHead:
        """The draft model over these operators; None are the CPU's."""

    @abstractmethod
    def device_parts(self, ops: DeviceOps) -> tuple[DraftHead, KVCache]:
        """The head over the operators of the executor's device, and its pages."""

    def spec_reuse_contract(self) -> SpecReuseContract:
        return SpecReuseContract(owns_paged_spec_state=True, future_dependency_tokens=1)

    def attach(self, executor: Executor) -> None:
        on_device = device_executor(executor)
        if on_device is not None:
            self._passes = self._device_passes(on_device)

    def _request_hidden(self, executor: Executor, request: HiddenRequest) -> None:
        """Ask for the target's hidden rows, and on a device for their being kept there."""
        keep: dict[str, Any] = {} if self._passes.keep is None else {"keep": self._passes.keep}
        executor.request_hidden(request, **keep)  # type: ignore[attr-defined]

    def _device_passes(self, executor: DraftExecutor) -> DraftPasses:
        from edgellm.decoding.device_drafts import DevicePasses

        return DevicePasses(*self.device_parts(executor.ops), executor, self.num_drafts)

    def device_bytes(self, ops: DeviceOps, device: torch.device, limits: ExecutorLimits) -> int:
        from edgellm.decoding.draft_memory import launching_nothing, paged_draft_bytes

        return paged_draft_bytes(self._head(launching_nothing(ops)), ops, device, limits, self.num_drafts)

    def seat(self, executor: Executor, seat: DecodingSeat) -> None:
        super().seat(executor, seat)
        made = _Seat(seat.prompt, seat.length)
        if seat.boundary_hidden is not None:
            # The entry in front of the boundary depends on the token behind it, which differs from text to text.
            made.drafted = seat.length - 1
            made.successors.append(int(seat.prompt[seat.length]))
        self._passes.begin(seat.slot, seat.boundary_hidden)
        self._seats[seat.slot] = made

    def unseat(self, slots: Sequence[int]) -> None:
        super().unseat(slots)
        self._passes.end(slots)
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
    ) -> Sequence[Proposal]:
        wanted = self._ready(batch, rows, limits)
        chains: dict[int, Sequence[int]] = {}
        if wanted:
            made = self._passes.chains(list(wanted), self._drafted(wanted), list(wanted.values()), self._table())
            chains = dict(zip(wanted, made, strict=True))
        return [chains.get(slot, []) for slot in batch.state_index[rows].tolist()]

    def _ready(self, batch: RaggedBatch, rows: Sequence[int], limits: Sequence[int]) -> dict[int, int]:
        """Slots that are to propose, with their limits, once their entries are written.

        Those of the highest limit come first: who goes on is then always at the front.
        """
        most = dict(zip(batch.state_index[rows].tolist(), limits, strict=True))
        wanted = sorted((slot for slot in most if most[slot]), key=lambda slot: -most[slot])
        self._catch_up([*wanted, *self._late(slot for slot in most if not most[slot])])
        return {slot: most[slot] for slot in wanted}

    def _late(self, slots: Iterable[int]) -> list[int]:
        """Slots whose entries have waited long enough."""
        seats, deferred = self._seats, self._passes.deferred
        return [slot for slot in slots if len(seats[slot].successors) >= deferred]

    def pass_round(self, batch: RaggedBatch, slots: Sequence[int]) -> None:
        late = self._late(slots)
        if late:
            self._catch_up(late)

    def _drafted(self, slots: Iterable[int]) -> list[int]:
        """Written entries of each slot."""
        return [self._seats[slot].drafted for slot in slots]

    def _catch_up(self, slots: Sequence[int], fresh: Sequence[KeptRow] = ()) -> None:
        """Write every entry of `slots` whose hidden row and successor are known.

        Args:
            fresh: rows of the latest step that are not held yet.
        """
        slots = [slot for slot in slots if self._seats[slot].successors]
        if not slots:
            return
        seats = [self._seats[slot] for slot in slots]
        counts = [len(seat.successors) for seat in seats]
        entries = DraftEntries(
            slots=slots,
            past=[seat.drafted for seat in seats],
            counts=counts,
            token_ids=[token for seat in seats for token in seat.successors],
            page_rows=self._table(),
        )
        self._passes.write(entries, fresh)
        for seat, count in zip(seats, counts, strict=True):
            seat.drafted += count
            seat.successors = []

    def _table(self) -> Int32Array:
        if self._page_rows is None:
            raise BrokenInvariantError(f"decoder {self.name!r} is asked for entries outside a step")
        return self._page_rows

    # --- what ran ----------------------------------------------------------------------------------------

    def absorb_step(self, executor: VerifyingExecutor, rows: Sequence[KeptRow]) -> None:
        chunks = [row for row in rows if row.past < len(self._seats[row.slot].prompt)]
        runs = [row for row in rows if row.past >= len(self._seats[row.slot].prompt)]
        for row in rows:
            self._note(row)
        if runs:  # a verified run waits for the next round
            self._passes.hold(runs)
        if chunks:  # published when the step is
            self._catch_up([row.slot for row in chunks], chunks)

    def hold_plain(self, slots: Sequence[int], hidden: torch.Tensor | None) -> None:
        if hidden is None:
            raise BrokenInvariantError(f"decoder {self.name!r} needs the target's hidden rows, and the step gave none")
        self._passes.hold_each(slots, hidden)

    def note_plain(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        for slot, token_id in zip(slots, token_ids, strict=True):
            seat = self._seats[slot]
            seat.decodes = True
            if token_id >= 0:
                seat.successors.append(token_id)

    def absorb(self, executor: VerifyingExecutor, row: KeptRow) -> None:
        self.absorb_step(executor, [row])

    def _note(self, row: KeptRow) -> None:
        """Successors of a row that ran, and the hidden row that a checkpoint behind it would save."""
        seat, end = self._seats[row.slot], row.past + len(row.inputs)
        if row.step_hidden is None:
            raise BrokenInvariantError(f"decoder {self.name!r} needs the target's hidden rows, and the step gave none")
        if row.past >= len(seat.prompt):
            seat.decodes = True
        elif self.boundary_hidden_width():
            seat.last_hidden = row.step_hidden[row.rows[-1]].clone()
        seat.successors += row.inputs[1:].tolist()
        if row.token_ids:
            seat.successors.append(row.token_ids[-1])
        elif end < len(seat.prompt):
            seat.successors.append(int(seat.prompt[end]))

    def boundary_hidden(self, slot: int) -> torch.Tensor | None:
        return self._seats[slot].last_hidden

    def complete_drafts(self, slots: Sequence[int], lengths: Sequence[int]) -> bool:
        saves_hidden = self.boundary_hidden_width() > 0
        for slot, length in zip(slots, lengths, strict=True):
            seat = self._seats[slot]
            del seat.successors[length - seat.drafted :]  # of tokens that the session did not keep
            if saves_hidden and seat.decodes:  # the entry of that token waits, for one that comes behind it
                seat.last_hidden = self._passes.held_row(slot, seat.drafted, length - 1 - seat.drafted)
        self._catch_up(slots)
        return True
