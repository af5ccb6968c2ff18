"""`MemoryBudget`: what the KV pool costs and how much fits in it, for people."""

from __future__ import annotations

from dataclasses import dataclass

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The KV pool of one deployment.

    Attributes:
        bytes_per_page: K and V of one page, all layers.
        page_size: tokens a page.
        max_model_len: tokens one sequence may reach.
        draft_bytes_per_page: of `bytes_per_page`, what belongs to a draft model's pool.
        snapshot_slots: checkpoints of recurrent state that may be kept.
        snapshot_bytes: memory of all of them.
        state_bytes: live recurrent state of all seats.
        write_ahead: positions behind `max_model_len` that a sequence needs room for; see `DecodingKvHeadroom`.
        beside: what else the deployment takes of the device's memory, in words; empty on the CPU.
    """

    bytes_per_page: int
    num_pages: int
    page_size: int
    max_model_len: int
    beside: str = ""
    draft_bytes_per_page: int = 0
    snapshot_slots: int = 0
    snapshot_bytes: int = 0
    state_bytes: int = 0
    write_ahead: int = 0

    @property
    def tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def total_bytes(self) -> int:
        return self.num_pages * self.bytes_per_page

    @property
    def full_length_sequences(self) -> float:
        """How many sequences of `max_model_len` tokens fit at once."""
        return self.tokens / self._sequence_tokens

    @property
    def _sequence_tokens(self) -> int:
        return self.max_model_len + self.write_ahead

    def __str__(self) -> str:
        return self.describe()

    def describe(self) -> str:
        """One line: bytes, pages, tokens, full-length sequences, and what the device holds beside the pool."""
        if not self.num_pages:
            return self._state() + (f"; {self.beside}" if self.beside else "")
        each = f"{format_bytes(self.bytes_per_page)} each" if self.num_pages > 1 else format_bytes(self.bytes_per_page)
        return (
            f"KV cache {format_bytes(self.total_bytes)}: {count(self.num_pages, 'page')} of "
            f"{count(self.page_size, 'token')} ({each}) = {count(self.tokens, 'token')}, "
            f"{self._sequences()} of full length ({count(self.max_model_len, 'token')})"
            + (f"; {self._state()}" if self.snapshot_slots else "")
            + (f"; {self.beside}" if self.beside else "")
        )

    def _state(self) -> str:
        return (
            f"recurrent state {format_bytes(self.state_bytes)}, "
            f"{count(self.snapshot_slots, 'checkpoint')} of it {format_bytes(self.snapshot_bytes)}"
        )

    def _sequences(self) -> str:
        whole = self.tokens // self._sequence_tokens
        return f"enough for {count(whole, 'sequence')}" if whole else "less than one sequence"


def count(number: int, noun: str) -> str:
    """`1 page`, `2 pages`, `1,024 pages`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def with_write_ahead(what: str, write_ahead: int) -> str:
    """`what`, and what speculation writes behind it where it does."""
    return f"{what} and the {count(write_ahead, 'token')} that speculation writes ahead" if write_ahead else what


def pool_remedy(write_ahead: int) -> str:
    """What makes room for a sequence in the pool."""
    return "raise kv_budget" + (", or propose less (num_drafts and top_k of speculative)" if write_ahead else "")


def format_bytes(num_bytes: int) -> str:
    """`num_bytes` with a binary unit and at most one decimal place."""
    value = float(num_bytes)
    for unit in _UNITS[:-1]:
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} {_UNITS[-1]}"
