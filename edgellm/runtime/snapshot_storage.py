"""`HybridSnapshotStorage`: the bytes of recurrent checkpoints, and nothing about when or why they are taken.

Two families of slots, both sized by a byte budget:

* recurrent: recurrent and conv state of every recurrent layer at one token boundary, and with MTP one hidden row;
* partial: the page that straddles the boundary, of every layer that owns KV (and the draft model's page with MTP).

Copies go between these slots and the live state on torch's current stream; nothing here waits, except where a
docstring says so.  Which slot is free, and when a copy is complete, the cache manager and the coordinator know.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.memory import format_bytes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Int32Array = npt.NDArray[np.int32]


class HybridSnapshotStorage:
    """Snapshot slots of both families, beside the live state that they are captured from and restored to.

    Args:
        recurrent_slabs: one (max_batch, ...) tensor per piece of state that a resident has (recurrent and conv
            state of each recurrent layer); borrowed.
        page_slabs: one (num_pages, ...) tensor per layer that owns base KV; borrowed.  A layer that reads another
            layer's KV has no slab of its own; a tensor that is named twice counts once.
        draft_page_slabs: the same of the draft model, for MTP.
        hidden_width, hidden_dtype: shape of the boundary hidden row that MTP saves; width 0 saves none.
        recurrent_budget_bytes, partial_budget_bytes: memory each family may take; slots = budget // bytes per slot.
        page_size: tokens a page holds.
        token_dim: dimension of a page slab that counts tokens, for fingerprints of partly filled pages.  None
            fingerprints whole pages.
    Raises:
        InvalidArgumentError: a budget is negative, holds no slot of a family that is needed, or slabs disagree.
    """

    def __init__(
        self,
        recurrent_slabs: Sequence[torch.Tensor],
        page_slabs: Sequence[torch.Tensor] = (),
        draft_page_slabs: Sequence[torch.Tensor] = (),
        *,
        hidden_width: int = 0,
        hidden_dtype: torch.dtype | None = None,
        recurrent_budget_bytes: int,
        partial_budget_bytes: int,
        page_size: int,
        token_dim: int | None = None,
    ) -> None:
        if page_size < 1:
            raise InvalidArgumentError(f"page_size is {page_size}; it must be at least 1")
        if hidden_width < 0 or (hidden_width > 0) != (hidden_dtype is not None):
            raise InvalidArgumentError(
                f"hidden_width is {hidden_width} and hidden_dtype {hidden_dtype}; give both or neither"
            )
        self.page_size = page_size
        self._token_dim = token_dim
        self._live = _owned(recurrent_slabs)
        self._base_pages = _owned(page_slabs)
        self._draft_pages = _owned(draft_page_slabs)
        self.max_batch = _common_rows("recurrent_slabs", self._live, required=True)
        self.num_pages = _common_rows("page_slabs", self._base_pages)
        self.num_draft_pages = _common_rows("draft_page_slabs", self._draft_pages)
        if self._draft_pages and not self._base_pages:
            raise InvalidArgumentError(
                "draft_page_slabs without page_slabs; a draft page is saved beside its base page"
            )
        hidden_bytes = hidden_width * hidden_dtype.itemsize if hidden_dtype is not None else 0
        self.bytes_per_recurrent_slot = _row_bytes(self._live) + hidden_bytes
        self.bytes_per_partial_slot = _row_bytes(self._base_pages) + _row_bytes(self._draft_pages)
        self.num_recurrent_slots = _slots("recurrent", recurrent_budget_bytes, self.bytes_per_recurrent_slot)
        self.num_partial_slots = _slots("partial", partial_budget_bytes, self.bytes_per_partial_slot)
        self._recurrent = [_like(slab, self.num_recurrent_slots) for slab in self._live]
        self._base_partial = [_like(slab, self.num_partial_slots) for slab in self._base_pages]
        self._draft_partial = [_like(slab, self.num_partial_slots) for slab in self._draft_pages]
        self._live_rows, self._recurrent_rows = _row_pair(self._live, self._recurrent)
        # live pages are too many to keep views of each
        self._base_rows, self._base_partial_rows = _row_pair(self._base_pages, self._base_partial, remember_live=False)
        self._draft_rows, self._draft_partial_rows = _row_pair(
            self._draft_pages, self._draft_partial, remember_live=False
        )
        self._hidden = (
            torch.zeros((self.num_recurrent_slots, hidden_width), dtype=hidden_dtype, device=self._live[0].device)
            if hidden_width
            else None
        )
        self._valid_tokens = [0] * self.num_partial_slots

    # --- recurrent state ---------------------------------------------------------------------------------

    def zero_recurrent(self, resident_slot: int) -> None:
        """The state before any token: zeros in every slab of one resident."""
        _require("resident slot", resident_slot, self.max_batch)
        torch._foreach_zero_(self._live_rows[resident_slot])

    def capture_recurrent(self, snapshot_slot: int, resident_slot: int) -> None:
        """Copy a resident's state into a snapshot slot."""
        self._check_recurrent(snapshot_slot, resident_slot)
        torch._foreach_copy_(self._recurrent_rows[snapshot_slot], self._live_rows[resident_slot])

    def restore_recurrent(self, snapshot_slot: int, resident_slot: int) -> None:
        """Copy a snapshot slot into a resident's state; the slot keeps its bytes."""
        self._check_recurrent(snapshot_slot, resident_slot)
        torch._foreach_copy_(self._live_rows[resident_slot], self._recurrent_rows[snapshot_slot])

    # --- partial pages -----------------------------------------------------------------------------------

    def capture_partial_kv(
        self, snapshot_slot: int, base_page: int, draft_page: int | None = None, *, valid_token_count: int
    ) -> None:
        """Copy the page that straddles a boundary (and its draft page) into a snapshot slot.

        Args:
            draft_page: the paired page of an MTP request; a plain request saves the base page alone.
            valid_token_count: tokens of the page that belong to the checkpoint, 1 to page_size.
        """
        self._check_partial(snapshot_slot, base_page, draft_page, valid_token_count)
        torch._foreach_copy_(self._base_partial_rows[snapshot_slot], self._base_rows[base_page])
        if draft_page is not None:
            torch._foreach_copy_(self._draft_partial_rows[snapshot_slot], self._draft_rows[draft_page])
        self._valid_tokens[snapshot_slot] = valid_token_count

    def restore_partial_kv(
        self, snapshot_slot: int, base_page: int, draft_page: int | None = None, *, valid_token_count: int
    ) -> None:
        """Copy a snapshot slot into a private page (and draft page).

        Places at and behind `valid_token_count` are meaningless afterwards.
        """
        self._check_partial(snapshot_slot, base_page, draft_page, valid_token_count)
        torch._foreach_copy_(self._base_rows[base_page], self._base_partial_rows[snapshot_slot])
        if draft_page is not None:
            torch._foreach_copy_(self._draft_rows[draft_page], self._draft_partial_rows[snapshot_slot])

    # --- the boundary hidden row -------------------------------------------------------------------------

    def capture_boundary_hidden(self, snapshot_slot: int, hidden: torch.Tensor, row: int) -> None:
        """Copy one row of `hidden`, (rows, hidden_width), into the recurrent slot."""
        stored = self._check_hidden(snapshot_slot, hidden, row)
        stored[snapshot_slot].copy_(hidden[row], non_blocking=True)

    def restore_boundary_hidden(self, snapshot_slot: int, hidden: torch.Tensor, row: int) -> None:
        """Copy the saved row into `hidden[row]`."""
        stored = self._check_hidden(snapshot_slot, hidden, row)
        hidden[row].copy_(stored[snapshot_slot], non_blocking=True)

    # --- for tests ---------------------------------------------------------------------------------------

    def poison(
        self, recurrent_slots: Iterable[int] = (), partial_slots: Iterable[int] = (), *, value: int | None = None
    ) -> None:
        """Fill slots with NaN (`value`, by default the smallest number, where the dtype has no NaN)."""
        rows, pages = list(recurrent_slots), list(partial_slots)
        for slot in rows:
            _require("recurrent slot", slot, self.num_recurrent_slots)
        for slot in pages:
            _require("partial slot", slot, self.num_partial_slots)
        hidden = [] if self._hidden is None else [self._hidden]
        for slots, family in (
            (rows, [*self._recurrent, *hidden]),
            (pages, [*self._base_partial, *self._draft_partial]),
        ):
            for stored in family:
                if slots:
                    stored[slots] = _canary(stored.dtype, value)

    def fingerprint(self, recurrent_slot: int) -> str:
        """Digest of a recurrent slot's state, without the hidden row.  Waits for the device."""
        _require("recurrent slot", recurrent_slot, self.num_recurrent_slots)
        return tensor_fingerprint([stored[recurrent_slot] for stored in self._recurrent])

    def live_fingerprint(self, resident_slot: int) -> str:
        """`fingerprint` of a resident's state as it is now.  Waits for the device."""
        _require("resident slot", resident_slot, self.max_batch)
        return tensor_fingerprint([slab[resident_slot] for slab in self._live])

    def partial_fingerprint(self, partial_slot: int) -> str:
        """Digest of the valid tokens of a partial slot, base before draft.  Waits for the device."""
        _require("partial slot", partial_slot, self.num_partial_slots)
        valid = self._valid_tokens[partial_slot]
        pages = [stored[partial_slot : partial_slot + 1] for stored in (*self._base_partial, *self._draft_partial)]
        if self._token_dim is not None:
            pages = [page.narrow(self._token_dim, 0, valid) for page in pages]
        return tensor_fingerprint(pages)

    # --- checks ------------------------------------------------------------------------------------------

    def _check_recurrent(self, snapshot_slot: int, resident_slot: int) -> None:
        _require("recurrent snapshot slot", snapshot_slot, self.num_recurrent_slots)
        _require("resident slot", resident_slot, self.max_batch)

    def _check_partial(self, snapshot_slot: int, base_page: int, draft_page: int | None, valid: int) -> None:
        _require("partial snapshot slot", snapshot_slot, self.num_partial_slots)
        _require("base page", base_page, self.num_pages)
        if not 1 <= valid <= self.page_size:
            raise InvalidArgumentError(
                f"valid_token_count is {valid}; a page of {self.page_size} holds 1 to {self.page_size}"
            )
        if draft_page is not None:
            _require("draft page", draft_page, self.num_draft_pages)

    def _check_hidden(self, snapshot_slot: int, hidden: torch.Tensor, row: int) -> torch.Tensor:
        if self._hidden is None:
            raise InvalidArgumentError("this storage saves no hidden row; build it with hidden_width and hidden_dtype")
        _require("recurrent snapshot slot", snapshot_slot, self.num_recurrent_slots)
        width = self._hidden.shape[1]
        if hidden.ndim != 2 or hidden.shape[1] != width or hidden.dtype != self._hidden.dtype:
            raise InvalidArgumentError(
                f"hidden is {tuple(hidden.shape)} {hidden.dtype}; this storage saves rows of (rows, {width}) "
                f"{self._hidden.dtype}"
            )
        _require("hidden row", row, hidden.shape[0])
        return self._hidden


def tensor_fingerprint(tensors: Iterable[torch.Tensor]) -> str:
    """Digest of the bytes of tensors in order; their shapes are not part of it.  Waits for the device."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class _Rows:
    """`rows[i]` is row i of every slab.

    Where rows are few their views are remembered, because making them costs more than the copy.
    """

    def __init__(self, slabs: Sequence[torch.Tensor], *, remember: bool = True) -> None:
        self._slabs = slabs
        self._remember = remember
        self._known: dict[int, list[torch.Tensor]] = {}

    def __getitem__(self, row: int) -> list[torch.Tensor]:
        views = self._known.get(row)
        if views is None:
            views = [slab[row] for slab in self._slabs]
            if self._remember:
                self._known[row] = views
        return views


def _row_pair(
    live: Sequence[torch.Tensor], stored: Sequence[torch.Tensor], *, remember_live: bool = True
) -> tuple[_Rows, _Rows]:
    """Rows of live slabs and of those that hold their copies, as views of one integer dtype where both sides allow it.

    One dtype lets torch copy all slabs in one launch.  A slab and its copy are always of one dtype and shape: of two
    that differ, torch would convert the values.
    """
    pairs = [
        (_as_words(slab), _as_words(copy)) if _in_words(slab) and _in_words(copy) else (slab, copy)
        for slab, copy in zip(live, stored, strict=True)
    ]
    return _Rows([slab for slab, _ in pairs], remember=remember_live), _Rows([copy for _, copy in pairs])


def _in_words(slab: torch.Tensor) -> bool:
    """Whether the rows of a slab are whole 8-byte words, one behind the other."""
    return slab.is_contiguous() and _row_bytes([slab]) % 8 == 0 and slab.data_ptr() % 8 == 0


def _as_words(slab: torch.Tensor) -> torch.Tensor:
    """(rows, words) int64 view of a slab."""
    return slab.view(slab.shape[0], -1).view(torch.int64)


def _owned(slabs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The slabs without those that are views of the same memory as an earlier one (layers that borrow KV)."""
    seen: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}
    for slab in slabs:
        seen.setdefault((slab.data_ptr(), tuple(slab.shape)), slab)
    return list(seen.values())


def _common_rows(name: str, slabs: Sequence[torch.Tensor], *, required: bool = False) -> int:
    if not slabs:
        if required:
            raise InvalidArgumentError(f"{name} is empty; a storage of checkpoints needs the state they are taken of")
        return 0
    rows = {slab.shape[0] if slab.ndim else 0 for slab in slabs}
    if len(rows) > 1 or 0 in rows:
        raise InvalidArgumentError(f"{name} have {sorted(rows)} rows; all must have the same number, at least 1")
    return rows.pop()


def _row_bytes(slabs: Sequence[torch.Tensor]) -> int:
    return sum(slab[0].numel() * slab.element_size() for slab in slabs)


def _slots(family: str, budget_bytes: int, bytes_per_slot: int) -> int:
    if budget_bytes < 0:
        raise InvalidArgumentError(f"the {family} snapshot budget is {budget_bytes} bytes; it must not be negative")
    if bytes_per_slot == 0:
        return 0
    slots = budget_bytes // bytes_per_slot
    if slots < 1:
        raise InvalidArgumentError(
            f"the {family} snapshot budget of {budget_bytes} bytes holds no slot; this model needs "
            f"{bytes_per_slot} bytes ({format_bytes(bytes_per_slot)}) for one: raise {family}_snapshot_pool_bytes"
        )
    return slots


def _like(slab: torch.Tensor, slots: int) -> torch.Tensor:
    return torch.zeros((slots, *slab.shape[1:]), dtype=slab.dtype, device=slab.device)


def _require(what: str, index: int, count: int) -> None:
    if not 0 <= index < count:
        raise InvalidArgumentError(f"{what} {index} is not in [0, {count})")


def _canary(dtype: torch.dtype, value: int | None) -> float | int:
    if dtype.is_floating_point:
        return float("nan")
    return torch.iinfo(dtype).min if value is None else value
