"""`StepInputs`: what a step needs on the device, packed into one staging buffer and sent by one copy.

The device holds a copy of the page table.  It follows the host's by differences: of the rows that a step reads, only
those that changed since they were last sent travel, in the same copy as the step's tokens.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from edgellm.errors import ContractViolation
from edgellm.runtime._step_packing import (
    count_single_tail,
    is_sound,
    pack_changed_rows,
    pack_step,
    rows_are_current,
)
from edgellm.runtime.attention_cpu import kv_offsets
from edgellm.runtime.executor_cpu import check_batch
from edgellm.runtime.run_ahead import equal
from edgellm.runtime.shared_prefix import MAX_GROUPS, SharedPrefixes
from edgellm.runtime.tree_rows import check_trees, masked_rows, pack_trees

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from edgellm.runtime.batch import RaggedBatch

    Int32Array = npt.NDArray[np.int32]
    TableUpdate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]

_Words = TypeVar("_Words", torch.Tensor, "npt.NDArray[np.int32]")

_ALIGNMENT = 4  # 16 bytes: kernels may read a section by wide loads
_ENDLESS_PAGE = 1 << 30  # tokens; no sequence is as long
_NOTHING = -2  # no page and not "unused": an entry of which the device's copy is not known
_UPDATE_WORDS = 16_384  # room for changed page-table rows in one copy; a step with more of them makes several


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes of a step as it is launched, padding included.

    Context rows and their tokens come first, then decode rows of one token each.

    Attributes:
        context_tokens: tokens of all context rows.
        context_rows: sequences that go through ragged attention.
        decode_rows: sequences that go through decode attention.
        logits: rows whose logits are computed.
        mask_words: words of a token's row of tree mask; 0 where no token has one.  With masks there are context rows
            alone, see `edgellm.runtime.tree_rows`.
        has_long_rows: some of them attend without masks.
    """

    context_tokens: int
    context_rows: int
    decode_rows: int
    logits: int
    mask_words: int = 0
    has_long_rows: bool = False

    @property
    def tokens(self) -> int:
        return self.context_tokens + self.decode_rows

    @property
    def rows(self) -> int:
        return self.context_rows + self.decode_rows


@dataclass(slots=True)
class TreeTensors:
    """What steps with tree masks have beside.

    Attributes:
        places: (T,) int32, where in its sequence each token's K and V go; 0 in padding.
        slots: (N,) int32, `StepTensors.slots` of rows that attend by their masks; -1 for all others.
        long_slots: (N,) int32, the same of rows that are too long for a mask.
        mask: (T, mask_words) int32; bit j of a token: it sees token j of its row.
    """

    places: torch.Tensor
    slots: torch.Tensor
    long_slots: torch.Tensor
    mask: torch.Tensor


@dataclass(slots=True)
class StepTensors:
    """Views of one step's inputs; T tokens, N rows, L logits rows of a `StepShape`.

    Attributes:
        token_ids, positions: (T,) int32; 0 in padding.
        token_seq: (T,) int32, row of each token; -1 in padding.
        slots: (N,) int32, page-table row of each sequence; -1 in padding.
        query_start: (N + 1,) int32, first token of each row.
        past_len: (N,) int32, tokens that had state before the step.
        lengths: (N,) int32, tokens that have state after it; 0 in padding.
        logits_index: (L,) int32, token of each logits row; 0 in padding.
        checkpoint_start: (N,) int32, row of the checkpoint of each sequence's first token; -1 where none is kept.
        shared, members: (decode rows,) int32, and group_start: (MAX_GROUPS + 1,) int32, decode rows in groups that
            share a prefix, see `SharedPrefixes`; set in steps that were staged with such groups.
        tree: masks, in a step that has any.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    token_seq: torch.Tensor
    slots: torch.Tensor
    query_start: torch.Tensor
    past_len: torch.Tensor
    lengths: torch.Tensor
    logits_index: torch.Tensor
    checkpoint_start: torch.Tensor
    shared: torch.Tensor
    members: torch.Tensor
    group_start: torch.Tensor
    tree: TreeTensors | None = None


_ROW_SECTIONS = tuple(field.name for field in fields(StepTensors) if field.name != "tree")
_CHECKPOINTS, _SHARED = _ROW_SECTIONS.index("checkpoint_start"), _ROW_SECTIONS.index("shared")
_TREE_SECTIONS = tuple(f"tree {field.name}" for field in fields(TreeTensors))
_OF_NOBODY = ("token_seq", "slots", "checkpoint_start", "tree slots", "tree long_slots")  # -1 in padding


def section_sizes(shape: StepShape) -> tuple[int, ...]:
    """int32 words of each section of `StepTensors` and then of `TreeTensors`, in order, alignment not included."""
    of_rows = (
        *(shape.tokens, shape.tokens, shape.tokens),
        *(shape.rows, shape.rows + 1, shape.rows, shape.rows),
        *(shape.logits, shape.rows),
        *(shape.decode_rows, shape.decode_rows, MAX_GROUPS + 1 if shape.decode_rows else 0),
    )
    if not shape.mask_words:
        return of_rows
    return (*of_rows, shape.tokens, shape.rows, shape.rows, shape.tokens * shape.mask_words)


@lru_cache(maxsize=1024)
def section_starts(shape: StepShape) -> tuple[int, ...]:
    """First word of each section, and at the end the words of all of them."""
    starts = [0]
    for size in section_sizes(shape):
        starts.append(starts[-1] + _aligned(size))
    return tuple(starts)


@dataclass(frozen=True, slots=True)
class _SentRows:
    """A step of decode rows as the device has it: (N,) int32 slots, and the tokens that have state behind it."""

    shape: StepShape
    slots: Int32Array
    lengths: Int32Array

    @classmethod
    def of(cls, batch: RaggedBatch, shape: StepShape) -> _SentRows:
        return cls(shape, batch.state_index.copy(), batch.past_len + 1)


class StepInputs:
    """Host staging, device copy and page-table mirror of one executor.  Not thread-safe.

    Args:
        num_slots, pages_per_slot: shape of the page table.
        page_size, num_pages: of the KV pool; a step whose pages are not in it is refused.
        has_pages: False for a model without attention, whose batches name no pages: every sequence lies in page 0 then.
        update_table: `(table, slots, rows)`, all int32 on the device: `table[slots] = rows`.
        window: smallest of the model's attention layers; 0 where none has any.
    Ownership: the device copy of a step is valid until the next `stage`, in stream order.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        num_slots: int,
        pages_per_slot: int,
        page_size: int,
        num_pages: int,
        update_table: TableUpdate,
        has_pages: bool = True,
        window: int = 0,
    ) -> None:
        # Rows of the copy start at multiples of 16 bytes; columns behind the host's are never read.
        shape = (num_slots, _aligned(pages_per_slot))
        self.table = torch.full(shape, -1, dtype=torch.int32, device=device)
        self._shadow = np.full(shape, -1, dtype=np.int32)
        self._pages_per_slot = pages_per_slot
        self._page_size = page_size if has_pages else _ENDLESS_PAGE
        self._num_pages = num_pages if has_pages else 1
        self._own_rows = None if has_pages else np.zeros((num_slots, pages_per_slot), np.int32)
        self._update_table = update_table
        self._update_words = max(_UPDATE_WORDS, shape[1] + 2 * _ALIGNMENT)
        self._device = device
        self._window = window
        self._capacity = 0
        self._staging: list[HostStaging] = []
        self._turn = 0
        self._words = torch.empty(0, dtype=torch.int32, device=device)
        self._sent: _SentRows | None = None

    @staticmethod
    def device_bytes(shape: StepShape, num_slots: int, pages_per_slot: int) -> int:
        """Device memory of inputs that have room for a step of `shape`."""
        width = _aligned(pages_per_slot)
        return 4 * (num_slots * width + section_starts(shape)[-1] + max(_UPDATE_WORDS, width + 2 * _ALIGNMENT))

    @property
    def table_shape(self) -> tuple[int, int]:
        """(num_slots, pages_per_slot) of the host's page table."""
        return len(self._shadow), self._pages_per_slot

    def reserve(self, shape: StepShape) -> bool:
        """Make room for a step of `shape`; True when device buffers moved, so that captured graphs are void."""
        needed = section_starts(shape)[-1] + self._update_words
        if needed <= self._capacity:
            return False
        staging = [HostStaging(needed, self._device) for _ in range(2)]
        self._words = torch.empty(needed, dtype=torch.int32, device=self._device)
        self._staging, self._capacity = staging, needed  # once all is there: memory may run out
        self._sent = None
        return True

    def views(self, shape: StepShape) -> StepTensors:
        """The device tensors of a step of `shape`; the same memory for every step of that shape."""
        found = self._sections(self._words, shape)
        step = StepTensors(**{name: found[name] for name in _ROW_SECTIONS})  # type: ignore[arg-type]
        if shape.mask_words:
            places, slots, long_slots, mask = (found[name] for name in _TREE_SECTIONS)
            step.tree = TreeTensors(places, slots, long_slots, mask.view(shape.tokens, shape.mask_words))
        return step

    def check(self, batch: RaggedBatch, vocab_size: int) -> None:
        """Refuse a batch that contradicts itself or reads pages that it does not have.

        Raises:
            ContractViolation: names what is wrong.
        """
        table = (len(self._shadow), self._pages_per_slot)
        if batch.page_rows.shape != table:
            raise ContractViolation(
                f"the page table is {batch.page_rows.shape} (slots, pages a slot), the executor was built for {table}"
            )
        if batch.tree_mask is not None or not self.is_sound(batch, vocab_size):
            with suppress(ValueError):  # lengths of arrays that cannot even be compared
                check_batch(batch, vocab_size)
                if self._own_rows is None:
                    kv_offsets(batch, self._page_size, self._num_pages)
                if batch.tree_mask is not None:
                    check_trees(batch, batch.tree_mask, self._window)
                    return
            raise ContractViolation("the arrays of the batch do not have the lengths that belong together; rebuild it")

    def is_sound(self, batch: RaggedBatch, vocab_size: int) -> bool:
        """Whether `check` would pass a batch without trees over a page table of the right shape."""
        return is_sound(
            batch.token_ids,
            batch.positions,
            batch.query_start,
            batch.query_len,
            batch.past_len,
            batch.state_index,
            self._page_rows(batch),
            batch.logits_index,
            vocab_size,
            self._page_size,
            self._num_pages,
        )

    def masked_rows(self, batch: RaggedBatch, words: int) -> npt.NDArray[np.bool_]:
        """(N,) which rows of a checked batch attend by masks of so many words."""
        return masked_rows(batch, words, self._window)

    def has_rows_of(self, batch: RaggedBatch, first: int) -> bool:
        """Whether the device's table is the host's as far as sequences from `first` on of a checked batch read it."""
        return rows_are_current(
            batch.query_len[first:],
            batch.past_len[first:],
            batch.state_index[first:],
            self._page_rows(batch),
            self._shadow,
            self._page_size,
        )

    def shared_prefixes(self, batch: RaggedBatch, decode_rows: int) -> SharedPrefixes | None:
        """Which of the last `decode_rows` sequences of a checked batch share a prefix; None where none pay."""
        return SharedPrefixes.of(batch, decode_rows, self._page_rows(batch), self._page_size)

    def stage(
        self,
        batch: RaggedBatch,
        shape: StepShape,
        checkpoint_start: Int32Array | None = None,
        prefixes: SharedPrefixes | None = None,
    ) -> None:
        """Send a step that was checked: pack it, copy it, and bring the page table up to date, all in stream order.

        Args:
            shape: at least the batch's sizes, see `split_rows`; what is beyond them is padding.
            checkpoint_start: (N,) int32 of the batch's sequences, in a step whose rows are all context rows.
            prefixes: of the step's decode rows.
        """
        self._sent = None
        staging = self._next_staging()
        pack_step(
            batch.token_ids,
            batch.positions,
            batch.query_len,
            batch.past_len,
            batch.state_index,
            batch.logits_index,
            staging.words,
            count_single_tail(batch.query_len) if shape.decode_rows else 0,
            shape.context_tokens,
            shape.context_rows,
            shape.decode_rows,
            shape.logits,
        )
        starts = section_starts(shape)
        updates = starts[-1]
        _fill(staging.words, starts[_CHECKPOINTS], shape.rows, checkpoint_start, padding=-1)
        if prefixes is not None:
            _fill(staging.words, starts[_SHARED], shape.decode_rows, prefixes.shared, padding=0)
            _fill(staging.words, starts[_SHARED + 1], shape.decode_rows, prefixes.members, padding=0)
            _fill(staging.words, starts[_SHARED + 2], MAX_GROUPS + 1, prefixes.group_start, padding=0)
        if shape.mask_words:
            masked, sections = self.masked_rows(batch, shape.mask_words), self._sections(staging.words, shape)
            pack_trees(batch, masked, *(sections[name] for name in _TREE_SECTIONS))
        sequence = self._send_rows(staging, batch, 0, updates, 0)
        while sequence < batch.num_sequences:
            sequence = self._send_rows(self._next_staging(), batch, updates, updates, sequence)
        if prefixes is None and not shape.context_rows and not shape.mask_words:
            self._sent = _SentRows.of(batch, shape)

    def advances_to(self, batch: RaggedBatch, shape: StepShape) -> bool:
        """Whether a checked step of decode rows is what the device has, one token on, tokens apart.

        If so, and once the device moved it on, call `advanced`; otherwise `stage` it.
        """
        sent = self._sent
        return (
            sent is not None
            and sent.shape == shape
            and equal(sent.slots, batch.state_index)
            and equal(sent.lengths, batch.past_len)
            and self.has_rows_of(batch, 0)
        )

    def advanced(self, batch: RaggedBatch, shape: StepShape) -> None:
        """The device's inputs are those of this step now."""
        self._sent = _SentRows.of(batch, shape)

    def stage_padding(self, shape: StepShape) -> None:
        """Send a step in which every row is padding: it can be launched, and writes no state."""
        self._sent = None
        staging, end = self._next_staging(), section_starts(shape)[-1]
        staging.words[:end] = 0
        sections = self._sections(staging.words, shape)
        for name in sections.keys() & _OF_NOBODY:
            sections[name].fill(-1)
        staging.send(self._words, 0, end)

    def forget(self) -> None:
        """The device's copy of the table is in doubt (a step failed): send every row again before it is read."""
        self._shadow.fill(_NOTHING)
        self._sent = None

    @staticmethod
    def _sections(words: _Words, shape: StepShape) -> dict[str, _Words]:
        """The sections that a step of `shape` has in `words`, by name."""
        names, sizes = (*_ROW_SECTIONS, *_TREE_SECTIONS), section_sizes(shape)
        starts = section_starts(shape)
        return {name: words[start : start + size] for name, start, size in zip(names, starts, sizes, strict=False)}

    def _page_rows(self, batch: RaggedBatch) -> Int32Array:
        return batch.page_rows if self._own_rows is None else self._own_rows

    def _next_staging(self) -> HostStaging:
        self._turn ^= 1
        staging = self._staging[self._turn]
        staging.wait()
        return staging

    def _send_rows(self, staging: HostStaging, batch: RaggedBatch, start: int, updates: int, sequence: int) -> int:
        """Copy words from `start` on, with changed page rows at `updates`; returns the next sequence to look at."""
        count, width, following = pack_changed_rows(
            batch.query_len,
            batch.past_len,
            batch.state_index,
            self._page_rows(batch),
            self._shadow,
            self._page_size,
            staging.words[: updates + self._update_words],
            updates,
            sequence,
        )
        rows = updates + _aligned(count)
        end = rows + count * width
        staging.send(self._words, start, end)
        if count:
            new_rows = self._words[rows:end].view(count, width)
            self._update_table(self.table[:, :width], self._words[updates : updates + count], new_rows)
        return following


class HostStaging:
    """One host buffer of int32 words; pinned where the device is a GPU, and free again once its copy was made."""

    def __init__(self, words: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._tensor = torch.empty(words, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self.words: Int32Array = self._tensor.numpy()
        self._copied = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Until the device has read what was sent from here before: two steps back, so practically at once."""
        if self._copied is not None:
            self._copied.synchronize()

    def send(self, target: torch.Tensor, start: int, end: int) -> None:
        """Copy words [start, end) to the same place of `target`, in stream order."""
        target[start:end].copy_(self._tensor[start:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


def split_rows(batch: RaggedBatch, *, decode_apart: bool) -> StepShape:
    """The sizes of a batch without padding.

    Args:
        decode_apart: the rows of one token at its tail go through decode attention; False makes all context rows.
    """
    decode = count_single_tail(batch.query_len) if decode_apart else 0
    return StepShape(batch.num_tokens - decode, batch.num_sequences - decode, decode, len(batch.logits_index))


def _fill(words: Int32Array, start: int, size: int, values: Int32Array | None, *, padding: int) -> None:
    """A section: the values that there are, then padding."""
    words[start : start + size] = padding
    if values is not None:
        words[start : start + len(values)] = values


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT
