"""The training loop: AdamW, cosine over the time that is granted, state and export every minute."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

WARMUP_SHARE = 0.02
FLOOR_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Settings:
    """
    Attributes:
        seconds: of training in all, over every command that takes part.
        steps: end after so many, whatever the time; None is no limit.
        stop_after: seconds after which this command ends; the next one goes on.
        save_every: seconds between two saves.
    """

    seconds: float
    steps: int | None = None
    stop_after: float = math.inf
    save_every: float = 60.0
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    clip: float = 1.0


@dataclass(slots=True)
class Progress:
    step: int = 0
    elapsed: float = 0.0

    def share(self, settings: Settings) -> float:
        """What is done of the whole, 0 to 1."""
        by_steps = self.step / settings.steps if settings.steps else 0.0
        return min(1.0, max(by_steps, self.elapsed / settings.seconds))


def learning_rate(share: float, settings: Settings) -> float:
    """Linear warm-up, then a cosine down to `FLOOR_SHARE`."""
    if share < WARMUP_SHARE:
        return settings.learning_rate * (0.05 + 0.95 * share / WARMUP_SHARE)
    bend = 0.5 * (1 + math.cos(math.pi * (share - WARMUP_SHARE) / (1 - WARMUP_SHARE)))
    return settings.learning_rate * (FLOOR_SHARE + (1 - FLOOR_SHARE) * bend)


def fit(
    student: torch.nn.Module,
    losses: Callable[[int], Iterable[tuple[torch.Tensor, str]]],
    settings: Settings,
    state: Path,
    export: Callable[[], None],
    say: Callable[[str], None],
) -> Progress:
    """Train until time or steps are used up; goes on from `state` if that is there.

    Args:
        losses: given the step to go on from, yields the loss of each further step and a line about it.
        export: writes the student as it stands.
    """
    optimiser = torch.optim.AdamW(_groups(student, settings), lr=settings.learning_rate, betas=(0.9, 0.95))
    progress = _resume(student, optimiser, state)
    started = saved = last = time.monotonic()
    for loss, line in losses(progress.step):
        rate = learning_rate(progress.share(settings), settings)
        for group in optimiser.param_groups:
            group["lr"] = rate
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(student.parameters(), settings.clip)
        optimiser.step()
        now = time.monotonic()
        progress.step, progress.elapsed, last = progress.step + 1, progress.elapsed + now - last, now
        if progress.step % 50 == 0:
            say(f"step {progress.step}  {progress.elapsed:.0f} s  rate {rate:.2e}  {line}")
        if now - saved >= settings.save_every:
            _save(student, optimiser, progress, state)
            export()
            saved = now
        if progress.share(settings) >= 1 or now - started >= settings.stop_after:
            break
    _save(student, optimiser, progress, state)
    export()
    return progress


def _groups(student: torch.nn.Module, settings: Settings) -> list[dict[str, object]]:
    """Norms, biases and other vectors do not decay."""
    matrices = [weight for weight in student.parameters() if weight.ndim > 1]
    vectors = [weight for weight in student.parameters() if weight.ndim <= 1]
    return [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def _save(student: torch.nn.Module, optimiser: torch.optim.Optimizer, progress: Progress, state: Path) -> None:
    state.parent.mkdir(parents=True, exist_ok=True)
    partial = state.with_suffix(".partial")
    torch.save(
        {
            "student": student.state_dict(),
            "optimiser": optimiser.state_dict(),
            "step": progress.step,
            "elapsed": progress.elapsed,
        },
        partial,
    )
    partial.rename(state)


def _resume(student: torch.nn.Module, optimiser: torch.optim.Optimizer, state: Path) -> Progress:
    if not state.is_file():
        return Progress()
    held = torch.load(state, map_location=next(student.parameters()).device, weights_only=True)
    student.load_state_dict(held["student"])
    optimiser.load_state_dict(held["optimiser"])
    return Progress(held["step"], held["elapsed"])
