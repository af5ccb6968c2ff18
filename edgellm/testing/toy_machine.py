"""The toy's device: paged base and draft state, recurrent rows, snapshot slots, and forwards over them.

Everything that holds no valid state holds `CANARY`: pages and snapshot slots without references, rows of residents
that do not exist, and the places behind what a sequence has computed.  Reading one raises `PoisonReadError`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from edgellm._core.page_table import KVPageTable
from edgellm.cache.types import ContextCacheDeploymentProfile, DeploymentConfig, ResourceType
from edgellm.runtime.device import CpuDevice
from edgellm.runtime.snapshot_storage import HybridSnapshotStorage
from edgellm.testing.toy import CANARY, MASK64, PoisonReadError, ToyKVCache, fold_state, to_signed
from edgellm.testing.toy_model import CONV_WINDOW, HIDDEN_WIDTH, HiddenRow, RecurrentState, ToyModel, draft_entry

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    UInt64Array = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a forward: `tokens` at positions `past`, `past + 1` ..."""

    slot: int
    past: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowResult:
    """Per token of a row, what the forward gave; the resident's state is that after the last token.

    Attributes:
        next_tokens: the token that follows each.
        hiddens: hidden row of each.
        recurrents: recurrent state after each (all zeros without recurrent layers), for rollback.
    """

    next_tokens: tuple[int, ...]
    hiddens: tuple[HiddenRow, ...]
    recurrents: tuple[RecurrentState, ...]


class ToyMachine:
    """Attributes:
    base, draft: paged stores; the draft's is None without a paired draft model.
    base_table, draft_table: host rows.
    recurrent: (max_batch, 1) int64; conv: (max_batch, 4) int64, the conv window.
    storage: snapshot slots, for checkpoint deployments.
    tokens_computed: base tokens that forwards ran over, verification included.
    """

    def __init__(
        self,
        profile: ContextCacheDeploymentProfile,
        deployment: DeploymentConfig,
        model: ToyModel,
        *,
        recurrent_slots: int,
        partial_slots: int,
    ) -> None:
        self.model = model
        self.deployment = deployment
        self.device = CpuDevice()
        batch, width = deployment.max_batch_size, deployment.pages_per_slot
        self.base = ToyKVCache(deployment.num_pages, deployment.page_size)
        self.base_table = KVPageTable(batch, width, deployment.num_pages)
        paired = profile.owns_paged_spec_state
        self.draft = ToyKVCache(deployment.num_draft_pages, deployment.page_size) if paired else None
        self.draft_table = KVPageTable(batch, width, deployment.num_draft_pages) if paired else None
        self.recurrent = torch.full((batch, 1), CANARY, dtype=torch.int64)
        self.conv = torch.full((batch, CONV_WINDOW), CANARY, dtype=torch.int64)
        self.storage = self._build_storage(profile, recurrent_slots, partial_slots)
        self.tokens_computed = 0

    def _build_storage(
        self, profile: ContextCacheDeploymentProfile, recurrent_slots: int, partial_slots: int
    ) -> HybridSnapshotStorage | None:
        if not profile.uses_checkpoint_reuse:
            return None
        mtp = self.draft is not None
        pages = [torch.from_numpy(self.base.pages)] if profile.has_attention else []
        draft_pages = [torch.from_numpy(self.draft.pages)] if self.draft is not None else []
        page_bytes = 8 * self.deployment.page_size
        return HybridSnapshotStorage(
            [self.recurrent, self.conv],
            pages,
            draft_pages,
            hidden_width=HIDDEN_WIDTH if mtp else 0,
            hidden_dtype=torch.int64 if mtp else None,
            recurrent_budget_bytes=recurrent_slots * 8 * (1 + CONV_WINDOW + (HIDDEN_WIDTH if mtp else 0)),
            partial_budget_bytes=partial_slots * page_bytes * (len(pages) + len(draft_pages)) if pages else 0,
            page_size=self.deployment.page_size,
            token_dim=-1,
        )

    # --- forward -----------------------------------------------------------------------------------------

    def forward(self, rows: Sequence[Row]) -> list[RowResult]:
        """Write the state of every row's tokens; all rows are written before any next token is read.

        Raises:
            PoisonReadError: a row's past, or what was just written, is not there.
        """
        self._poison_unwritten(rows)
        written = [self._write_row(row) for row in rows]
        results = []
        for row, (hiddens, recurrents) in zip(rows, written, strict=True):
            lengths = range(row.past + 1, row.past + len(row.tokens) + 1)
            chosen = tuple(
                self.model.next_token(self._fold(row.slot, length), state if self.model.has_recurrent else None)
                for length, state in zip(lengths, recurrents, strict=True)
            )
            results.append(RowResult(chosen, hiddens, recurrents))
        self.tokens_computed += sum(len(row.tokens) for row in rows)
        return results

    def _poison_unwritten(self, rows: Sequence[Row]) -> None:
        if self.model.has_attention:
            for row in rows:
                self.base.poison_from(self.base_row(row.slot), row.past)

    def _write_row(self, row: Row) -> tuple[tuple[HiddenRow, ...], tuple[RecurrentState, ...]]:
        model, page_row = self.model, self.base_row(row.slot)
        state = self.recurrent_state(row.slot) if model.has_recurrent else RecurrentState()
        value = int(self.base.read(page_row, row.past)[-1]) if row.past and model.has_attention else None
        hiddens, recurrents = [], []
        for position, token_id in enumerate(row.tokens, row.past):
            if model.has_recurrent:
                state = state.after(token_id, position)
            recurrent = state if model.has_recurrent else None
            if model.has_attention:
                value = model.token_value(token_id, position, value, recurrent)
                self.base.write(page_row, position, value)
            hiddens.append(model.hidden(value, recurrent))
            recurrents.append(state)
        if model.has_recurrent:
            self.set_recurrent_state(row.slot, state)
        return tuple(hiddens), tuple(recurrents)

    def _fold(self, slot: int, length: int) -> int:
        return fold_state(self.base.read(self.base_row(slot), length)) if self.model.has_attention else 0

    # --- state of one resident ---------------------------------------------------------------------------

    def base_row(self, slot: int) -> list[int]:
        row: list[int] = self.base_table.row(slot).tolist()
        return row

    def draft_row(self, slot: int) -> list[int]:
        if self.draft_table is None:
            return []
        row: list[int] = self.draft_table.row(slot).tolist()
        return row

    def base_state(self, slot: int, length: int) -> UInt64Array:
        """(length,) uint64, read through the page table."""
        return self.base.read(self.base_row(slot), length)

    def draft_state(self, slot: int, length: int) -> UInt64Array:
        """(length,) uint64, the draft entries, read through the draft page table."""
        if self.draft is None:
            raise PoisonReadError("this machine has no draft pages")
        return self.draft.read(self.draft_row(slot), length)

    def recurrent_state(self, slot: int) -> RecurrentState:
        values = [int(self.recurrent[slot, 0]), *self.conv[slot].tolist()]
        if CANARY in values:
            raise PoisonReadError(f"slot {slot} has no valid recurrent state: {values}")
        value, *window = [number & MASK64 for number in values]
        return RecurrentState(value, (window[0], window[1], window[2], window[3]))

    def set_recurrent_state(self, slot: int, state: RecurrentState) -> None:
        """Write a resident's recurrent value and conv window: both, as a rollback must."""
        self.recurrent[slot, 0] = to_signed(state.value)
        self.conv[slot] = torch.tensor([to_signed(value) for value in state.window], dtype=torch.int64)

    # --- draft -------------------------------------------------------------------------------------------

    def write_draft(self, slot: int, start: int, hiddens: Sequence[HiddenRow], successors: Sequence[int]) -> None:
        """Write draft entries from `start`, one per hidden row and successor; what lies behind them is invalid."""
        if self.draft is None:
            raise PoisonReadError("this machine has no draft pages")
        row = self.draft_row(slot)
        self.draft.poison_from(row, start)
        parent = int(self.draft.read(row, start)[-1]) if start else None
        for position, (hidden, successor) in enumerate(zip(hiddens, successors, strict=True), start):
            parent = draft_entry(hidden, successor, position, parent)
            self.draft.write(row, position, parent)

    # --- poison ------------------------------------------------------------------------------------------

    def poison_unreferenced(self, pools: Any, resident_slots: Collection[int]) -> None:
        """Fill everything that nobody holds: pages and snapshot slots of `pools`, rows of absent residents."""
        if self.model.has_attention:
            self.base.poison(_free(pools, ResourceType.BASE_KV_PAGE))
        if self.draft is not None:
            self.draft.poison(_free(pools, ResourceType.DRAFT_KV_PAGE))
        for slot in range(self.deployment.max_batch_size):
            if slot not in resident_slots:
                self.recurrent[slot] = CANARY
                self.conv[slot] = CANARY
        if self.storage is not None:
            recurrent = _free(pools, ResourceType.RECURRENT_SNAPSHOT)
            partial = _free(pools, ResourceType.PARTIAL_KV_SNAPSHOT)
            self.storage.poison(recurrent, partial, value=CANARY)


def _free(pools: Any, kind: ResourceType) -> Iterable[int]:
    free: list[int] = pools.pool(kind).free_list()
    return free
