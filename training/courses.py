"""The three students: what each is made of, learns from, is measured on and is saved as."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from training import draft_vocabulary
from training.acceptance import Acceptance, add, count_rounds
from training.assistant import Assistant
from training.batches import Batch, batches, in_order
from training.eagle import DRAFT_VOCAB, EagleHead, tapped_layers
from training.hybrid import Hybrid
from training.lessons import assistant_lesson, eagle_lesson, hybrid_lesson
from training.unrolled import correct_drafts, unrolled_loss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from training.llama import Llama
    from training.token_file import TokenFile
    from training.unrolled import Lesson

    Student = EagleHead | Assistant | Hybrid

NAMES = ("eagle", "assistant", "hybrid")
TRAINED_DEPTH = {"eagle": 6, "assistant": 5, "hybrid": 3}
HEAD_SHARE = 0.5  # of the hybrid's loss, beside 1 for its text


@dataclass(slots=True)
class Course:
    """A student and its lessons.

    Attributes:
        lesson: of a batch, for a drafter.
        loss: of a batch, and a line about it.
    """

    name: str
    student: Student
    device: str
    lesson: Callable[[Batch], Lesson]
    loss: Callable[[Batch], tuple[torch.Tensor, str]]

    def precision(self) -> AbstractContextManager[Any]:
        """bfloat16 products on a GPU, float32 on a CPU."""
        return torch.autocast("cuda", torch.bfloat16) if self.device.startswith("cuda") else nullcontext()


def draft_course(student: EagleHead | Assistant, target: Llama, depth: int | None = None) -> Course:
    """The course of an EAGLE-3 head or an assistant, on the target's device.

    Args:
        depth: steps of a chain that it learns; None is what `TRAINED_DEPTH` says.
    """
    device = str(target.device)
    name = "eagle" if isinstance(student, EagleHead) else "assistant"
    student, steps = student.to(device), depth or TRAINED_DEPTH[name]

    def lesson(batch: Batch) -> Lesson:
        if isinstance(student, EagleHead):
            return eagle_lesson(target, tapped_layers(target.shape.num_layers), batch)
        return assistant_lesson(target, student.donors, batch)

    def loss(batch: Batch) -> tuple[torch.Tensor, str]:
        value, right = unrolled_loss(student, lesson(batch), steps)
        return value, f"loss {value.item():.3f}  right {_shares(right)}"

    return Course(name, student, device, lesson, loss)


def hybrid_course(model: Hybrid, device: str) -> Course:
    """The course of the hybrid model: text, and its head on the side."""
    depth = TRAINED_DEPTH["hybrid"]

    def loss(batch: Batch) -> tuple[torch.Tensor, str]:
        lesson, logits = hybrid_lesson(model, batch)
        inside = batch.generated(1) | (batch.prompt_lens[:, None] > _places(batch))
        wanted = batch.tokens[:, 1:].masked_fill(~inside, -100)
        text = functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), wanted.flatten())
        head, right = unrolled_loss(model, lesson, depth)
        return text + HEAD_SHARE * head, f"text {text.item():.3f}  head {head.item():.3f}  right {_shares(right)}"

    return Course("hybrid", model, device, lambda batch: hybrid_lesson(model, batch)[0], loss)


def _places(batch: Batch) -> torch.Tensor:
    """Place of the token that each entry predicts."""
    return torch.arange(1, batch.tokens.shape[1], device=batch.tokens.device)


def _shares(right: list[float]) -> str:
    return " ".join(f"{share:.3f}" for share in right)


def losses(
    course: Course, file: TokenFile, *, tokens: int, longest: int, seed: int
) -> Callable[[int], Iterator[tuple[torch.Tensor, str]]]:
    """For `training.loop.fit`: the loss of one batch after the other, from a step on."""

    def from_step(step: int) -> Iterator[tuple[torch.Tensor, str]]:
        order = batches(file, tokens=tokens, longest=longest, seed=seed, device=course.device, skip=step)
        for batch in order:
            with course.precision():
                made = course.loss(batch)
            yield made

    return from_step


def choose_vocabulary(file: TokenFile, vocab_size: int, say: Callable[[str], None]) -> torch.Tensor:
    """The draft vocabulary of generated text, and a line on what other sizes would cover."""
    counts = draft_vocabulary.generated_counts(file, vocab_size)
    for size in (DRAFT_VOCAB // 2, DRAFT_VOCAB, 3 * DRAFT_VOCAB // 2):
        share = draft_vocabulary.coverage(counts, draft_vocabulary.choose(counts, size))
        say(f"the {size} most frequent tokens are {share:.2%} of the generated text")
    return draft_vocabulary.choose(counts, DRAFT_VOCAB)


def measure(course: Course, file: TokenFile, chain: int, *, tokens: int, longest: int) -> Acceptance:
    """Acceptance of chains of one length on greedy continuations."""
    return add(_measure(course, file, chain, tokens, longest))


@torch.no_grad()
def _measure(course: Course, file: TokenFile, chain: int, tokens: int, longest: int) -> Iterable[Acceptance]:
    course.student.eval()
    for batch in in_order(file, tokens=tokens, longest=longest, device=course.device):
        with course.precision():
            hits = correct_drafts(course.student, course.lesson(batch), chain)
        pairs = zip(batch.prompt_lens.tolist(), batch.lengths.tolist(), strict=True)
        yield count_rounds(hits, [(max(prompt - 1, 0), length - 2) for prompt, length in pairs])
    course.student.train()


@torch.no_grad()
def continue_greedily(model: Hybrid, prompts: list[list[int]], most_new: int, device: str) -> list[list[int]]:
    """What the hybrid says behind each prompt; the whole sequence anew for each token (it is small)."""
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    longest = int(lengths.max()) + most_new
    tokens = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts], device=device)
    rows, ended = torch.arange(len(prompts), device=device), torch.zeros(len(prompts), dtype=torch.bool, device=device)
    ends = torch.full_like(lengths, longest)
    for _ in range(most_new):
        used = int(lengths.max())
        chosen = model.logits(model.hidden(tokens[:, :used])[rows, lengths - 1]).argmax(-1)
        tokens[rows, lengths] = torch.where(ended, tokens[rows, lengths], chosen)
        lengths = lengths + 1
        stops = ~ended & (chosen == model.shape.eos_token_id)
        ends[stops] = lengths[stops]
        ended |= stops
        if bool(ended.all()):
            break
    ends = torch.minimum(ends, lengths)
    return [tokens[row, len(prompts[row]) : int(ends[row])].tolist() for row in range(len(prompts))]


def save(student: Student, folder: Path) -> Path:
    """Write config.json and model.safetensors as edgellm reads them; the path of the latter."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(student.config(), indent=2) + "\n", encoding="utf-8")
    path = folder / "model.safetensors"
    tensors = {name: tensor.contiguous() for name, tensor in student.public_tensors().items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def read_exported(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of an exported student.

    Raises:
        FileNotFoundError: there is none.
    """
    from safetensors.torch import load_file

    path = folder / "model.safetensors"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; train first, or join the parts that came back")
    return load_file(path)
