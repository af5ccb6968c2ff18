"""Batches of sequences of similar length, in an order that a seed fixes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from training.token_file import TokenFile

_POOL = 32  # batches that are sorted by length together
LEAST_TOKENS = 4


@dataclass(slots=True)
class Batch:
    """
    Attributes:
        tokens: (B, T) int64, padded behind.
        lengths, prompt_lens: (B,) int64.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    prompt_lens: torch.Tensor

    def generated(self, ahead: int) -> torch.Tensor:
        """(B, T - 1) bool: whether the token `ahead` places behind entry m is generated text."""
        places = torch.arange(self.tokens.shape[1] - 1, device=self.tokens.device) + ahead
        return (places >= self.prompt_lens[:, None]) & (places < self.lengths[:, None])


def batches(file: TokenFile, *, tokens: int, longest: int, seed: int, device: str, skip: int = 0) -> Iterator[Batch]:
    """Batches without end.

    Args:
        tokens: most of a batch, padding included.
        longest: sequences are cut there.
        skip: leading batches to leave out (what a run that goes on has seen).
    """
    generator = np.random.default_rng(seed)
    lengths = np.minimum(file.lengths, longest)
    usable = np.flatnonzero((lengths >= LEAST_TOKENS) & (file.prompt_lens < lengths - 1))
    if not len(usable):
        raise ValueError(f"no sequence with generated text in its first {longest} tokens; generate more")
    while True:
        for group in _groups(generator.permutation(usable), lengths, tokens, generator):
            if skip:
                skip -= 1
                continue
            yield collate(file, group, longest, device)


def in_order(file: TokenFile, *, tokens: int, longest: int, device: str) -> Iterator[Batch]:
    """All sequences once, shortest first."""
    lengths = np.minimum(file.lengths, longest)
    usable = np.flatnonzero((lengths >= LEAST_TOKENS) & (file.prompt_lens < lengths - 1))
    order = usable[np.argsort(lengths[usable], kind="stable")]
    for group in _cut(order, lengths, tokens):
        yield collate(file, group, longest, device)


def collate(file: TokenFile, indices: np.ndarray, longest: int, device: str) -> Batch:
    """The sequences of these indices, padded to the longest of them."""
    rows = [file[index][:longest].astype(np.int64) for index in indices]
    lengths = torch.tensor([len(row) for row in rows])
    padded = np.zeros((len(rows), int(lengths.max())), np.int64)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    prompt_lens = torch.from_numpy(file.prompt_lens[indices].astype(np.int64))
    return Batch(torch.from_numpy(padded).to(device), lengths.to(device), prompt_lens.to(device))


def _groups(
    order: np.ndarray, lengths: np.ndarray, tokens: int, generator: np.random.Generator
) -> Iterator[np.ndarray]:
    mean = max(1, int(lengths[order].mean()))
    pool = max(1, _POOL * tokens // mean)
    for start in range(0, len(order), pool):
        part = order[start : start + pool]
        groups = list(_cut(part[np.argsort(lengths[part], kind="stable")], lengths, tokens))
        for place in generator.permutation(len(groups)):
            yield groups[place]


def _cut(order: np.ndarray, lengths: np.ndarray, tokens: int) -> Iterator[np.ndarray]:
    """Ascending lengths into groups whose padded size stays within `tokens`."""
    start = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or (end + 1 - start) * lengths[order[end]] > tokens:
            yield order[start:end]
            start = end
