"""Which of the target's tokens a draft can say: those it generates most often."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from training.token_file import TokenFile


def generated_counts(file: TokenFile, vocab_size: int) -> torch.Tensor:
    """(vocab_size,) int64: how often each token was generated; prompts do not count."""
    within = np.arange(len(file.tokens)) - np.repeat(file.starts[:-1], file.lengths)
    generated = file.tokens[within >= np.repeat(file.prompt_lens, file.lengths)]
    return torch.from_numpy(np.bincount(generated, minlength=vocab_size)[:vocab_size].astype(np.int64))


def choose(counts: torch.Tensor, size: int) -> torch.Tensor:
    """(size,) int64 ascending: the most frequent tokens; of equally frequent ones those of smaller id."""
    order = torch.sort(counts, descending=True, stable=True).indices
    return order[: min(size, len(counts))].sort().values


def coverage(counts: torch.Tensor, chosen: torch.Tensor) -> float:
    """Share of the generated tokens that the chosen ones are."""
    return float(counts[chosen].sum() / counts.sum().clamp(min=1))
