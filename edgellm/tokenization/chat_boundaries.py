"""Where the next turn of a conversation will still match this one's prompt.

A chat template writes more than the messages: openings of turns, thinking markers, a generation prompt.  Some of
it is written differently once the turn is history.  So the places where a later prompt leaves this one are found
by asking the template itself: render the conversation as a later request would, and see how far the texts agree.
They say where recurrent state is worth keeping, and which part of a prompt is volatile; nothing depends on them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgellm.errors import AdmissionError

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], bool], str]
EncodeWithEnds = Callable[[str], tuple[list[int], Sequence[int]]]

_SYSTEM_ROLES = ("system", "developer")
# Not empty: what a template writes behind an empty text may begin like the text that is compared with it ("<|end|>" and
# "<think>"), and a boundary one character too far is one that nobody repeats.
_PROBE_TEXT = "\u25a0"
_SOME_USER = {"role": "user", "content": _PROBE_TEXT}
_SOME_REPLY = {"role": "assistant", "content": _PROBE_TEXT}


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as token ids.

    Attributes:
        token_ids: the whole prompt.
        boundaries: ascending prompt lengths at which a later request is likely to leave this one: after the system
            prompt, and at the end of what a next turn repeats.
        tail_length: tokens at the end that a next turn is not expected to repeat.
    """

    token_ids: list[int]
    boundaries: tuple[int, ...] = ()
    tail_length: int = 0


def build_chat_prompt(
    messages: Sequence[Message], add_generation_prompt: bool, render: Render, encode: EncodeWithEnds
) -> ChatPrompt:
    """Render and tokenise a conversation, with its boundaries.

    Args:
        render: the template: messages and whether to open the assistant's turn, to text.  May raise AdmissionError.
        encode: text to token ids and the end of each token in the text (characters).
    Raises:
        AdmissionError: whatever `render` raises for the conversation itself.  A probe that the template refuses
            only means one boundary less.
    """
    text = render(messages, add_generation_prompt)
    token_ids, ends = encode(text)
    repeated = _agreement(text, render, [*messages, _SOME_REPLY, _SOME_USER])
    shared = _agreement(text, render, [*_instructions(messages), _SOME_USER])
    lengths = {bisect_right(ends, place) for place in (shared, repeated) if place is not None}
    stable = len(token_ids) if repeated is None else bisect_right(ends, repeated)
    return ChatPrompt(token_ids, tuple(sorted(lengths - {0})), len(token_ids) - stable)


def _instructions(messages: Sequence[Message]) -> list[Message]:
    """The leading messages that other conversations are likely to begin with as well."""
    system: list[Message] = []
    for message in messages:
        if message.get("role") not in _SYSTEM_ROLES:
            break
        system.append(message)
    return system


def _agreement(text: str, render: Render, probe: Sequence[Message]) -> int | None:
    """Characters that `text` and the rendered probe have in common at their beginning; None when it is refused."""
    try:
        other = render(probe, False)
    except AdmissionError:
        return None
    return _common_length(text, other)


def _common_length(left: str, right: str) -> int:
    """Characters that two texts share at their beginning.  By bisection: comparing slices runs at memory speed."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
