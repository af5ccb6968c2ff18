"""The integer toy model: an executor whose text depends on every byte of its paged state.

The "KV" of a token is a 64-bit mix of (token, position, value of the token before), kept in real pages
of a paged array.  The next token is a function of the *whole* state read back through the page table.
A stale page, a wrong row or an off-by-one therefore changes the text exactly, without any tolerance.

Poison: places that hold no valid state hold `CANARY`; reading one raises `PoisonReadError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from edgellm.errors import BrokenInvariantError, InvalidArgumentError, StepDeviceError
from edgellm.runtime.device import CpuDevice

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from edgellm.runtime.batch import RaggedBatch
    from edgellm.runtime.device import Device

    UInt64Array = npt.NDArray[np.uint64]

CANARY = -0x0BADC0DE0BADC0DE
LOGIT_MASS = 100.0

MASK64 = (1 << 64) - 1
MIX_A = 0x9E3779B97F4A7C15
ROOT_STATE = 0x243F6A8885A308D3  # what the first token is mixed with
_MIX_B = 0xBF58476D1CE4E5B9
_MIX_C = 0x94D049BB133111EB


class PoisonReadError(BrokenInvariantError):
    """State was read from a place that nobody wrote: a stale, free or foreign page."""


def mix_token(token_id: int, position: int, parent: int) -> int:
    """State value of one token: 64 bits, never the canary."""
    value = (parent ^ (token_id * MIX_A) ^ ((position + 1) * _MIX_B)) & MASK64
    value = ((value ^ (value >> 30)) * _MIX_B) & MASK64
    value = ((value ^ (value >> 27)) * _MIX_C) & MASK64
    value ^= value >> 31
    return value if to_signed(value) != CANARY else value ^ 1


def next_token(state: UInt64Array, vocab_size: int) -> int:
    """The token after `state`, (n,) uint64 in position order: depends on every value and its place."""
    return next_token_of_fold(fold_state(state), vocab_size)


def fold_state(state: UInt64Array) -> int:
    """One 64-bit value that depends on every value of `state` and its place."""
    with np.errstate(over="ignore"):
        places = (np.arange(len(state), dtype=np.uint64) * np.uint64(2) + np.uint64(1)) * np.uint64(MIX_A)
        return int(np.bitwise_xor.reduce((state ^ (state >> np.uint64(29))) * places))


def next_token_of_fold(folded: int, vocab_size: int) -> int:
    return ((folded * _MIX_C & MASK64) >> 33) % vocab_size


def toy_states(token_ids: Iterable[int]) -> UInt64Array:
    """(n,) uint64, the state of a sequence computed without pages."""
    values, parent = [], ROOT_STATE
    for position, token_id in enumerate(token_ids):
        parent = mix_token(int(token_id), position, parent)
        values.append(parent)
    return np.array(values, dtype=np.uint64)


def toy_generate(prompt: Sequence[int], num_tokens: int, vocab_size: int) -> list[int]:
    """The cold twin in plain Python: the `num_tokens` tokens that must follow `prompt`."""
    tokens = [int(token_id) for token_id in prompt]
    for _ in range(num_tokens):
        tokens.append(next_token(toy_states(tokens), vocab_size))
    return tokens[len(prompt) :]


def to_signed(value: int) -> int:
    """The int64 with the same bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


class ToyKVCache:
    """The paged store: one int64 per token place.

    Attributes:
        pages: (num_pages, page_size) int64; `CANARY` where nothing valid lies.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.pages: npt.NDArray[np.int64] = np.full((num_pages, page_size), CANARY, dtype=np.int64)

    def poison(self, page_ids: Iterable[int]) -> None:
        """Fill whole pages with the canary."""
        self.pages[list(page_ids)] = CANARY

    def copy_pages(self, source_pages: npt.NDArray[np.int32], target_pages: npt.NDArray[np.int32]) -> None:
        """Copy whole pages, canaries included; all sources are read before any target is written.

        Raises:
            InvalidArgumentError: an id is out of range, or the lengths differ.
        """
        sources, targets = np.asarray(source_pages, np.int64), np.asarray(target_pages, np.int64)
        for ids in (sources, targets):
            if len(ids) and not (ids.min() >= 0 and ids.max() < self.num_pages):
                raise InvalidArgumentError(f"pages {ids.tolist()} are not all in [0, {self.num_pages})")
        if len(sources) != len(targets):
            raise InvalidArgumentError(f"{len(sources)} source pages for {len(targets)} target pages; pass as many")
        self.pages[targets] = self.pages[sources]

    def read(self, page_row: Sequence[int], length: int) -> UInt64Array:
        """(length,) uint64, a sequence's state read through its pages.

        Raises:
            PoisonReadError: a place holds the canary, or has no page.
        """
        num_pages = -(-length // self.page_size)
        pages = np.asarray(page_row[:num_pages], dtype=np.int64)
        if len(pages) < num_pages or (pages < 0).any():
            raise PoisonReadError(f"{length} tokens need {num_pages} pages, the row has {pages.tolist()}")
        values = self.pages[pages].reshape(-1)[:length]
        poisoned = np.flatnonzero(values == CANARY)
        if len(poisoned):
            position = int(poisoned[0])
            raise PoisonReadError(
                f"position {position} of {length} lies in page {int(pages[position // self.page_size])}, "
                f"place {position % self.page_size}, which holds no valid state"
            )
        return values.view(np.uint64)

    def write(self, page_row: Sequence[int], position: int, value: int) -> None:
        """Store one value.

        Raises:
            InvalidArgumentError: the row has no page for the position.
        """
        block = position // self.page_size
        if block >= len(page_row) or page_row[block] < 0:
            raise InvalidArgumentError(f"position {position} has no page; grow it first")
        self.pages[page_row[block], position % self.page_size] = to_signed(value)

    def poison_from(self, page_row: Sequence[int], length: int) -> None:
        """Poison every place of a row at or behind `length`: they must be the sequence's own."""
        block, place = divmod(length, self.page_size)
        for page in page_row[block:]:
            if page >= 0:
                self.pages[page, place:] = CANARY
            place = 0


class ToyExecutor:
    """An `Executor` over the toy model.

    Args:
        vocab_size: V, number of token ids.
        num_pages, page_size: the pool; sizes like 12 pages of 2 or 4 tokens make trouble likely.
        pools: resource pools of the cache manager; when given (or by `watch`), every page without
            references is poisoned before each step.

    In every step, all places of a row at or behind a sequence's past are poisoned before it writes: they
    must be its own.  A shared page there makes another sequence raise at once.
    """

    def __init__(self, *, vocab_size: int = 97, num_pages: int, page_size: int, pools: Any = None) -> None:
        self._device = CpuDevice()
        self.cache = ToyKVCache(num_pages, page_size)
        self._vocab_size = vocab_size
        self._pools = pools
        self._failures: list[BaseException] = []
        self.num_forwards = 0
        self.tokens_computed = 0

    @property
    def device(self) -> Device:
        return self._device

    @property
    def kv_cache(self) -> Any:
        return self.cache

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def watch(self, pools: Any) -> None:
        """Poison pages that have no references in `pools`, from now on."""
        self._pools = pools

    def fail_next(self, error: BaseException | None = None) -> None:
        """Make the next `forward` raise (StepDeviceError by default) before it writes anything."""
        self._failures.append(error or StepDeviceError("toy executor: injected device failure"))

    def poison_unreferenced(self) -> list[int]:
        """Poison every page that nobody leases or retains; returns their ids."""
        if self._pools is None:
            return []
        from edgellm.cache.types import ResourceType

        pool = self._pools.pool(ResourceType.BASE_KV_PAGE)
        free = [page for page in range(self.cache.num_pages) if pool.is_free(page)]
        self.cache.poison(free)
        return free

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Write the batch's state into its pages; return (L, vocab_size) float32 logits.

        Raises:
            PoisonReadError: a sequence's past, or what it just wrote, is not there any more.
            InvalidArgumentError: a token id outside the vocabulary, or a position without a page.
        """
        import torch

        if self._failures:
            raise self._failures.pop(0)
        self._check_tokens(batch)
        self.poison_unreferenced()
        for sequence in range(batch.num_sequences):
            self._poison_tail(batch, sequence)
        for sequence in range(batch.num_sequences):
            self._write(batch, sequence)
        logits = torch.full((len(batch.logits_index), self._vocab_size), -LOGIT_MASS, dtype=torch.float32)
        for row, sequence in enumerate(batch.logits_to_seq.tolist()):
            length = self._length_at_row(batch, sequence, int(batch.logits_index[row]))
            logits[row, next_token(self._read(batch, sequence, length), self._vocab_size)] = LOGIT_MASS
        for sequence in range(batch.num_sequences):
            self._read(batch, sequence, int(batch.past_len[sequence]) + int(batch.query_len[sequence]))
        self.num_forwards += 1
        self.tokens_computed += batch.num_tokens
        return logits

    def copy_pages(self, source_pages: npt.NDArray[np.int32], target_pages: npt.NDArray[np.int32]) -> None:
        """Copy whole pages."""
        self.cache.copy_pages(source_pages, target_pages)

    def state_of(self, page_row: Sequence[int], length: int) -> UInt64Array:
        """(length,) uint64, a sequence's state read through its pages.

        Raises:
            PoisonReadError: a place holds the canary, or has no page.
        """
        return self.cache.read(page_row, length)

    def _check_tokens(self, batch: RaggedBatch) -> None:
        tokens = batch.token_ids
        if not len(tokens):
            return
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self._vocab_size:
            raise InvalidArgumentError(f"token ids reach from {low} to {high}; the vocabulary has {self._vocab_size}")

    def _row(self, batch: RaggedBatch, sequence: int) -> npt.NDArray[np.int32]:
        row: npt.NDArray[np.int32] = batch.page_rows[int(batch.state_index[sequence])]
        return row

    def _poison_tail(self, batch: RaggedBatch, sequence: int) -> None:
        """Places at or behind the past are unwritten; whatever lies there is stale."""
        self.cache.poison_from(self._row(batch, sequence).tolist(), int(batch.past_len[sequence]))

    def _write(self, batch: RaggedBatch, sequence: int) -> None:
        past, row = int(batch.past_len[sequence]), self._row(batch, sequence).tolist()
        start, count = int(batch.query_start[sequence]), int(batch.query_len[sequence])
        parent = int(self._read(batch, sequence, past)[-1]) if past else ROOT_STATE
        for offset in range(count):
            position = int(batch.positions[start + offset])
            if position != past + offset:
                raise InvalidArgumentError(f"sequence {sequence}: position {position} at place {past + offset}")
            parent = mix_token(int(batch.token_ids[start + offset]), position, parent)
            self.cache.write(row, position, parent)

    def _read(self, batch: RaggedBatch, sequence: int, length: int) -> UInt64Array:
        return self.state_of(self._row(batch, sequence).tolist(), length)

    def _length_at_row(self, batch: RaggedBatch, sequence: int, token_row: int) -> int:
        offset = token_row - int(batch.query_start[sequence])
        if not 0 <= offset < int(batch.query_len[sequence]):
            raise InvalidArgumentError(f"logits row {token_row} is not a token of sequence {sequence}")
        return int(batch.past_len[sequence]) + offset + 1
