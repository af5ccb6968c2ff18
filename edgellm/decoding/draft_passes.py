"""`DraftPasses`: the passes of a draft model with pages of its own, and the rows that wait for them.

`HostPasses` runs them on the CPU, `device_drafts.DevicePasses` where the target computes on a device.  The decoder
knows lengths and tokens; hidden rows, proposals that chains begin with and passes are here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from edgellm.decoding.draft_model import DraftRows
from edgellm.errors import BrokenInvariantError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy.typing as npt

    from edgellm.decoding.chain import KeptRow
    from edgellm.decoding.draft_model import DraftModel
    from edgellm.models.step import KeepHidden

    Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DraftEntries:
    """Entries that N sequences add to the draft's pages; T in all.

    Attributes:
        slots: (N,) resident slots.
        past: (N,) entries that each has.
        counts: (N,) entries that each adds, at least 1.
        token_ids: (T,) token k + 1 of entry k.
        page_rows: (num_slots, pages_per_slot) int32 page table of the draft's pool.
    """

    slots: Sequence[int]
    past: Sequence[int]
    counts: Sequence[int]
    token_ids: Sequence[int]
    page_rows: Int32Array


class DraftPasses(Protocol):
    """State of residents is kept by slot.

    Attributes:
        deferred: entries of a sequence that proposes nothing may wait, up to so many: one pass then writes all of them.
        keep: what the target's steps are to do with their hidden rows, where they run on a device.
    """

    deferred: int

    @property
    def keep(self) -> KeepHidden | None: ...

    def begin(self, slot: int, boundary: torch.Tensor | None) -> None:
        """A sequence takes the slot.

        Args:
            boundary: (hidden_width,) the target's hidden row that waits for its entry already; None where none does.
        """
        ...

    def end(self, slots: Iterable[int]) -> None:
        """The sequences of these slots are gone."""
        ...

    def hold(self, rows: Sequence[KeptRow]) -> None:
        """Keep copies of the hidden rows of rows that ran, behind those that wait already, unless `keep` has."""
        ...

    def hold_each(self, slots: Sequence[int], hidden: torch.Tensor) -> None:
        """The same of a step of one token for each of `slots`.

        Args:
            hidden: (N, hidden_width), in the order of the slots.
        """
        ...

    def held_row(self, slot: int, written: int, number: int) -> torch.Tensor:
        """(hidden_width,) a copy of the row of a slot that waits behind `number` others.

        Args:
            written: entries that the slot has.
        """
        ...

    def write(self, entries: DraftEntries, fresh: Sequence[KeptRow] = ()) -> None:
        """Write entries, and remember the proposal that comes behind the last of each sequence.

        Args:
            fresh: rows of the latest step whose hidden rows come behind those that wait, where they still lie.
        """
        ...

    def chains(
        self, slots: Sequence[int], past: Sequence[int], limits: Sequence[int], page_rows: Int32Array
    ) -> Sequence[Sequence[int]]:
        """Chains behind the entries of each slot, as long as its limit; further entries are scratch.

        Args:
            past: entries of each that are written.
            limits: at least 1, never rising.
        Raises:
            BrokenInvariantError: a slot has no entries.
        """
        ...


@dataclass(slots=True)
class _Waiting:
    """What a resident left behind.

    Attributes:
        hidden: (pending, width) the target's hidden rows of entries to come, in pieces.
        proposal: what the draft says comes behind the last written entry, and its own hidden row there.
    """

    hidden: list[torch.Tensor] = field(default_factory=list)
    proposal: tuple[Any, torch.Tensor] | None = None


class HostPasses:
    """Passes of a draft model on the CPU, one after the other.

    Args:
        draft: the model; asked for at each pass.
    """

    deferred = 32
    keep = None

    def __init__(self, draft: Callable[[], DraftModel]) -> None:
        self._draft = draft
        self._slots: dict[int, _Waiting] = {}

    def begin(self, slot: int, boundary: torch.Tensor | None) -> None:
        self._slots[slot] = _Waiting([] if boundary is None else [boundary[None].clone()])

    def end(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._slots.pop(slot, None)

    def hold(self, rows: Sequence[KeptRow]) -> None:
        for row in rows:
            # A slice would keep the rows of the whole step alive.
            self._slots[row.slot].hidden.append(_rows_of(row).clone())

    def hold_each(self, slots: Sequence[int], hidden: torch.Tensor) -> None:
        for slot, row in zip(slots, hidden.clone()[:, None], strict=True):
            self._slots[slot].hidden.append(row)

    def held_row(self, slot: int, written: int, number: int) -> torch.Tensor:
        return torch.cat(self._slots[slot].hidden)[number]

    def write(self, entries: DraftEntries, fresh: Sequence[KeptRow] = ()) -> None:
        for row in fresh:
            self._slots[row.slot].hidden.append(_rows_of(row))
        waiting = [self._slots[slot] for slot in entries.slots]
        taken = [_take(one.hidden, count) for one, count in zip(waiting, entries.counts, strict=True)]
        tokens, own = self._proposals(
            DraftRows(
                slots=np.array(entries.slots, np.int32),
                past=np.array(entries.past, np.int32),
                counts=np.array(entries.counts, np.int32),
                token_ids=np.array(entries.token_ids, np.int32),
                hidden=torch.cat([rows for rows, _ in taken]),
                projected=False,
                page_rows=entries.page_rows,
            )
        )
        for number, one in enumerate(waiting):
            one.hidden = taken[number][1]
            one.proposal = (tokens[number], own[number])

    def chains(
        self, slots: Sequence[int], past: Sequence[int], limits: Sequence[int], page_rows: Int32Array
    ) -> list[list[int]]:
        firsts = [self._first(slot) for slot in slots]
        chains = [[token] for token, _ in firsts]
        own = torch.stack([hidden for _, hidden in firsts])
        depth = 1
        while count := sum(limit > depth for limit in limits):
            tokens, own = self._draft().forward(
                DraftRows(
                    slots=np.array(slots[:count], np.int32),
                    past=np.array(past[:count], np.int32) + np.int32(depth - 1),
                    counts=np.ones(count, np.int32),
                    token_ids=np.array([chain[-1] for chain in chains[:count]], np.int32),
                    hidden=own[:count],
                    projected=True,
                    page_rows=page_rows,
                )
            )
            for chain, token in zip(chains, tokens, strict=False):
                chain.append(token)
            depth += 1
        return chains

    def _proposals(self, rows: DraftRows) -> tuple[Sequence[Any], torch.Tensor]:
        """(N,) what comes behind the last entry of each sequence, and its own hidden rows."""
        return self._draft().forward(rows)

    def _first(self, slot: int) -> tuple[Any, torch.Tensor]:
        proposal = self._slots[slot].proposal
        if proposal is None:
            raise nothing_read(slot)
        return proposal


def nothing_read(slot: int) -> BrokenInvariantError:
    """A slot is to propose, and the draft has no entries of it."""
    return BrokenInvariantError(f"slot {slot} is to propose and its draft has read nothing")


def _rows_of(row: KeptRow) -> torch.Tensor:
    if row.hidden is None:
        raise BrokenInvariantError(f"slot {row.slot} ran without the hidden rows that its draft needs")
    return row.hidden


def _take(pieces: list[torch.Tensor], count: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The first `count` rows of the pieces, and the pieces that are left."""
    rows = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    return rows[:count], [rows[count:]] if len(rows) > count else []
