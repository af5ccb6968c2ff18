"""Build ragged batches by hand: what the session's lowering does, in test form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from edgellm.runtime.batch import RaggedBatch
from edgellm.runtime.executor_cpu import CpuExecutor


def ragged_batch(rows: Sequence[tuple[int, int, Sequence[int]]], page_rows: np.ndarray) -> RaggedBatch:
    """Rows of (slot, tokens that have state, tokens to add); logits of each row's last token."""
    query_len = np.array([len(tokens) for _, _, tokens in rows], np.int32)
    query_start = np.concatenate([[0], np.cumsum(query_len)]).astype(np.int32)
    return RaggedBatch(
        token_ids=np.concatenate([np.asarray(tokens, np.int32) for _, _, tokens in rows]),
        positions=np.concatenate([np.arange(past, past + len(t)) for _, past, t in rows]).astype(np.int32),
        query_start=query_start,
        query_len=query_len,
        past_len=np.array([past for _, past, _ in rows], np.int32),
        state_index=np.array([slot for slot, _, _ in rows], np.int32),
        page_rows=page_rows,
        logits_index=(query_start[1:] - 1).astype(np.int64),
        logits_to_seq=np.arange(len(rows), dtype=np.int32),
    )


@dataclass
class GreedySequence:
    """One sequence that is prefilled in chunks and then decoded greedily."""

    slot: int
    prompt: list[int]
    chunk: int
    num_new: int
    done: int = 0
    tokens: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return len(self.tokens) >= self.num_new

    def next_row(self) -> tuple[int, int, list[int]]:
        known = self.prompt + self.tokens
        stop = min(self.done + self.chunk, len(self.prompt)) if self.done < len(self.prompt) else self.done + 1
        return self.slot, self.done, known[self.done : stop]

    def take(self, row: tuple[int, int, list[int]], logits: torch.Tensor) -> None:
        self.done += len(row[2])
        if self.done >= len(self.prompt):
            self.logits.append(logits)
            self.tokens.append(int(logits.argmax()))


def run_greedy(executor: CpuExecutor, sequences: Sequence[GreedySequence], page_rows: np.ndarray) -> None:
    """Drive all sequences to their end, prompt chunks and decode rows in the same steps."""
    while running := [sequence for sequence in sequences if not sequence.finished]:
        rows = [sequence.next_row() for sequence in running]
        logits = executor.forward(ragged_batch(rows, page_rows))
        for sequence, row, row_logits in zip(running, rows, logits, strict=True):
            sequence.take(row, row_logits)


def permuted_page_rows(num_slots: int, pages_per_slot: int, *, seed: int) -> np.ndarray:
    """Every page once, in an order that has nothing to do with its owner."""
    pages = np.random.default_rng(seed).permutation(num_slots * pages_per_slot)
    return pages.astype(np.int32).reshape(num_slots, pages_per_slot)
