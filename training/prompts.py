"""Prompts made of documents: questions about words, passages to explain or to sum up, passages to go on with."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from training.documents import digest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from training.documents import Document

T = TypeVar("T")

LEAST_PASSAGE, MOST_PASSAGE = 200, 600
PROMPTS_PER_DOCUMENT = {"docs": 30, "library": 16, "wordnet": 5}
_WORD_TASKS = (
    "What does the word '{0}' mean?",
    "Use the word '{0}' in a short paragraph.",
    "Explain '{0}' to a child.",
    "What is the difference between '{0}' and '{1}'?",
    "Write a short story about '{0}' and '{1}'.",
    "List five facts about '{0}'.",
)
_TEXT_TASKS = (
    "Summarise the following text in a few sentences.\n\n{0}",
    "Explain the following text in simple words.\n\n{0}",
    "Rewrite this text so that it is easier to read:\n\n{0}",
    "Write three questions about this text and answer them:\n\n{0}",
    None,
)
_CODE_TASKS = (
    "Explain what this Python code does.\n\n```python\n{0}\n```",
    "Write a docstring for this Python code.\n\n```python\n{0}\n```",
    "Write a short example that uses this Python code.\n\n```python\n{0}\n```",
    None,
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """
    Attributes:
        chat: a user's message, else plain text to go on with.
    """

    text: str
    chat: bool


def prompts_of(document: Document) -> Iterator[Prompt]:
    """The prompts of a document: the same ones every time."""
    if document.source == "wordnet":
        yield from _about_words(document)
        return
    tasks = _CODE_TASKS if document.source == "library" else _TEXT_TASKS
    for passage in _spread(list(passages(document.text)), PROMPTS_PER_DOCUMENT[document.source]):
        task = tasks[_draw(passage, len(tasks))]
        yield Prompt(passage if task is None else task.format(passage), task is not None)


def passages(text: str) -> Iterator[str]:
    """Runs of whole paragraphs of `LEAST_PASSAGE` characters and more, cut at a line near `MOST_PASSAGE`."""
    held = ""
    for paragraph in re.split(r"\n\n+", text):
        held = f"{held}\n\n{paragraph}" if held else paragraph
        if len(held) >= LEAST_PASSAGE:
            yield held if len(held) <= MOST_PASSAGE else _cut(held)
            held = ""


def _cut(text: str) -> str:
    end = text.rfind("\n", LEAST_PASSAGE, MOST_PASSAGE)
    return text[: end if end > 0 else MOST_PASSAGE].rstrip()


def _about_words(document: Document) -> Iterator[Prompt]:
    words = [line.partition(":")[0].split(", ")[0] for line in document.text.splitlines()]
    for number in _spread(list(range(len(words))), PROMPTS_PER_DOCUMENT["wordnet"]):
        task = _WORD_TASKS[_draw(f"{document.name}/{number}", len(_WORD_TASKS))]
        yield Prompt(task.format(words[number], words[(number + 7) % len(words)]), True)


def _spread(items: list[T], count: int) -> list[T]:
    """At most `count` of them, evenly spaced."""
    if len(items) <= count:
        return items
    return [items[index * len(items) // count] for index in range(count)]


def _draw(key: str, count: int) -> int:
    return int(digest(key)[:8], 16) % count
