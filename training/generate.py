"""Text that the target itself makes of prompts, in large batches over a key-value cache.  Goes on where it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from training.token_file import TokenFile, read_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from training.llama import Llama


@dataclass(frozen=True, slots=True)
class Settings:
    """
    Attributes:
        rows: sequences of a batch.
        most_new: tokens generated for each at most.
        temperatures: row i of a batch takes the i-th, round robin; 0 is greedy.
        tokens_per_file: a file is written when so many are there.
        seconds: no batch is started after so many.
        most_tokens: end when so many are there, in all files.
    """

    rows: int = 2048
    most_new: int = 320
    temperatures: tuple[float, ...] = (0.0, 0.7, 0.0, 1.0)
    tokens_per_file: int = 4_000_000
    seconds: float = 480.0
    most_tokens: int = 28_000_000
    seed: int = 0


def generate_files(
    target: Llama,
    prompts: TokenFile,
    folder: Path,
    name: str,
    settings: Settings,
    say: Callable[[str], None],
    written: Callable[[Path], None] = lambda path: None,
) -> list[Path]:
    """Write `<name>-00.tok` and on into a folder, each with the number of the batch that comes behind it.

    Files that are there are kept, and generation goes on behind the last.  Batches pass over the prompts as often as
    tokens are wanted, with other random numbers each time; greedy rows take part in the first pass only.

    Args:
        written: told of each new file at once.
    Returns:
        all files, also those that were there.
    """
    import time

    started = time.monotonic()
    paths = sorted(folder.glob(f"{name}-*.tok"))
    files = [read_tokens(path) for path in paths]
    made = sum(len(file.tokens) for file in files)
    number = first = int(files[-1].notes["next_batch"]) if files else 0
    rows: list[list[int]] = []
    lens: list[int] = []

    def flush(next_batch: int) -> None:
        if rows:
            paths.append(folder / f"{name}-{len(paths):02d}.tok")
            TokenFile.of(rows, lens, next_batch=next_batch).write(paths[-1])
            written(paths[-1])
            rows.clear()
            lens.clear()

    for number, chosen, temperatures in _batches(prompts, first, settings):
        done, late = made >= settings.most_tokens, time.monotonic() - started > settings.seconds
        if done or late or sum(map(len, rows)) >= settings.tokens_per_file:
            flush(number)
            if done or late:
                break
        generator = torch.Generator(target.device).manual_seed(settings.seed + number)
        batch = [prompts[index].tolist() for index in chosen]
        new = continue_batch(target, batch, settings.most_new, temperatures, generator)
        rows += [prompt + tail for prompt, tail in zip(batch, new, strict=True)]
        lens += [len(prompt) for prompt in batch]
        made += sum(len(prompt) + len(tail) for prompt, tail in zip(batch, new, strict=True))
        say(f"batch {number}: {made} tokens, {time.monotonic() - started:.0f} s")
    else:
        flush(number + 1)
    return paths


def _batches(prompts: TokenFile, first: int, settings: Settings) -> Iterator[tuple[int, list[int], list[float]]]:
    """Number, prompts and temperatures of each batch from `first` on."""
    order = np.argsort(prompts.lengths, kind="stable").tolist()
    groups = [order[start : start + settings.rows] for start in range(0, len(order), settings.rows)]
    shuffled = np.random.default_rng(settings.seed).permutation(len(groups)).tolist()
    warm = [temperature for temperature in settings.temperatures if temperature] or None
    number = first
    while warm is not None or number < len(groups):
        group = groups[shuffled[number % len(groups)]]
        kinds = settings.temperatures if number < len(groups) or warm is None else warm
        yield number, group, [kinds[(index + number) % len(kinds)] for index in group]
        number += 1


@torch.no_grad()
def continue_batch(
    target: Llama, prompts: list[list[int]], most_new: int, temperatures: list[float], generator: torch.Generator
) -> list[list[int]]:
    """What the target says behind each prompt, its end token included.

    Args:
        temperatures: of each row; 0 takes the likeliest token.
    """
    device, longest = target.device, max(map(len, prompts))
    capacity = -(-(longest + most_new) // 8) * 8
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    cache = target.new_cache(len(prompts), capacity, padding)
    places = torch.arange(capacity, device=device)
    behind_padding = places >= padding[:, None]
    # A padded row sees itself, since a row that sees nothing has no softmax.
    causal = (places <= places[:longest, None]) & behind_padding[:, None] | (places == places[:longest, None])
    heat = torch.tensor(temperatures, device=device)
    logits = target.extend(tokens, cache, causal[:, None])
    new, ended = [], torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for count in range(most_new):
        chosen = _choose(logits, heat, generator)
        new.append(torch.where(ended, -1, chosen))
        ended |= chosen == target.shape.eos_token_id
        if count + 1 == most_new or (count % 16 == 0 and bool(ended.all())):
            break
        visible = behind_padding & (places <= cache.length)
        logits = target.extend(chosen[:, None], cache, visible[:, None, None])
    return [[token for token in row if token >= 0] for row in torch.stack(new, dim=1).tolist()]


def _choose(logits: torch.Tensor, heat: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Gumbel's trick: the largest of logits / temperature + noise is a sample of the softmax."""
    noise = torch.empty_like(logits).exponential_(generator=generator).clamp(min=1e-20).log_()
    return (logits - heat[:, None] * noise).argmax(-1)
