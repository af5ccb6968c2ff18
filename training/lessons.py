"""Lessons of each drafter: what its target makes of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from training.unrolled import Lesson

if TYPE_CHECKING:
    from training.batches import Batch
    from training.hybrid import Hybrid
    from training.llama import Llama


def eagle_lesson(target: Llama, layers: tuple[int, ...], batch: Batch) -> Lesson:
    """Hidden rows are those in front of three layers, side by side."""
    taps = target.run(batch.tokens, taps=layers)
    return _lesson(target, batch, taps.normed, torch.cat(taps.layers, dim=-1))


def assistant_lesson(target: Llama, donors: tuple[int, ...], batch: Batch) -> Lesson:
    """Hidden rows are those after the final norm; keys and values come from the donors."""
    taps = target.run(batch.tokens, donors=donors)
    lesson = _lesson(target, batch, taps.normed, taps.normed)
    lesson.keys = [keys[:, :, :-1] for keys in taps.keys]
    lesson.values = [values[:, :, :-1] for values in taps.values]
    return lesson


def hybrid_lesson(model: Hybrid, batch: Batch) -> tuple[Lesson, torch.Tensor]:
    """Of its own head, which teaches the model nothing; and the model's logits of all tokens."""
    normed = model.hidden(batch.tokens)
    logits = model.logits(normed)
    lesson = Lesson(
        batch.tokens[:, 1:], logits.detach()[:, 1:], batch.generated(2), normed.detach()[:, :-1], keys=[], values=[]
    )
    return lesson, logits


def _lesson(target: Llama, batch: Batch, normed: torch.Tensor | None, hidden: torch.Tensor | None) -> Lesson:
    if normed is None or hidden is None:
        raise ValueError("the target gave no hidden rows")
    teacher = target.logits(normed[:, 1:])
    return Lesson(batch.tokens[:, 1:], teacher, batch.generated(2), hidden[:, :-1], keys=[], values=[])
