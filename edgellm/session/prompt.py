"""A request's prompt as token ids: ids as given, text through the tokenizer, messages through the template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from edgellm.errors import AdmissionError
from edgellm.foreign import describe_error, describe_value
from edgellm.session._token_list import int64_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from edgellm.request import LLMGenerationRequest


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt ready for admission.

    Attributes:
        token_ids: (n,) int32, owned.
        checkpoint_boundaries: lengths in (0, n] at which a later prompt is likely to leave this one.
        replay_tail_length: tokens at the end that a next turn is not expected to repeat.
    """

    token_ids: npt.NDArray[np.int32]
    checkpoint_boundaries: tuple[int, ...] = ()
    replay_tail_length: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)


def build_prompt(request: LLMGenerationRequest, tokenizer: Any, *, vocab_size: int) -> TokenizedPrompt:
    """The prompt of a checked request: at least 1 token, every id in [0, vocab_size).

    Raises:
        AdmissionError: empty prompt, an id out of range, or the tokenizer or template failed.
    """
    boundaries: Any = request.checkpoint_boundaries
    tail: Any = request.replay_tail_length
    ids: Any = request.prompt_token_ids
    if request.messages is not None:
        chat = _guarded("chat template", lambda: _encode_chat(request, tokenizer))
        ids, boundaries, tail = chat.token_ids, chat.boundaries, chat.tail_length
    elif ids is None:
        ids = _guarded("tokenizer", lambda: tokenizer.encode(request.prompt))
    token_ids = _checked_ids(ids, vocab_size)
    inside = tuple(int(length) for length in boundaries if 0 < length <= len(token_ids))
    return TokenizedPrompt(token_ids, inside, int(tail))


def _checked_ids(ids: Any, vocab_size: int) -> npt.NDArray[np.int32]:
    prompt = _as_integers(ids)
    if not len(prompt):
        raise AdmissionError("the prompt is empty (0 tokens); it needs at least 1 token")
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        position = int(np.argmax(prompt == bad))
        raise AdmissionError(
            f"prompt token {bad} at position {position} is outside the vocabulary; "
            f"ids go from 0 to {vocab_size - 1}: tokenise with this model's tokenizer"
        )
    return prompt.astype(np.int32)


def _encode_chat(request: LLMGenerationRequest, tokenizer: Any) -> Any:
    return tokenizer.encode_chat(
        _plain_messages(request.messages),
        add_generation_prompt=request.add_generation_prompt,
        **request.chat_template_kwargs,
    )


def _guarded(what: str, tokenize: Callable[[], Any]) -> Any:
    try:
        return tokenize()
    except AdmissionError:
        raise
    except Exception as error:
        raise AdmissionError(f"the {what} failed on this prompt: {error}; correct the prompt") from error


def _plain_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages with lists of text items joined: chat templates of text models expect plain strings."""
    plain = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            message = {**message, "content": "".join(item["text"] for item in content)}
        plain.append(dict(message))
    return plain


def _as_integers(ids: Any) -> npt.NDArray[Any]:
    """(n,) array of an integer type, or of Python ints where one exceeds 64 bits."""
    if hasattr(ids, "__array__"):  # numpy's own, and tensors
        ids = _array_of(ids)
        if ids.ndim != 1:
            raise AdmissionError(f"prompt_token_ids has {ids.ndim} dimensions; pass one flat list of integers")
    elif isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence):
        raise AdmissionError(f"prompt_token_ids is a {type(ids).__name__}; pass one flat list of integers")
    if not len(ids):
        return np.zeros(0, dtype=np.int64)
    plain = int64_of(ids) if type(ids) is list else None
    if plain is not None:
        return plain
    try:
        array = np.asarray(ids)
    except Exception:
        array = np.empty(0, dtype=object)  # ragged, or of no type that numpy knows: looked at one by one
    if array.ndim != 1 or array.dtype.kind not in "iu":
        _refuse_odd_entry(ids)
        # Integers, some of them beyond 64 bits: kept as they are, for the message that refuses them.
        return np.array([int(entry) for entry in ids], dtype=object)
    return array


def _array_of(ids: Any) -> npt.NDArray[Any]:
    """The values of an array-like object of any library; not every tensor has them where numpy can read them."""
    try:
        return np.asarray(ids)
    except Exception as error:
        raise AdmissionError(
            f"prompt_token_ids is a {type(ids).__name__} whose values cannot be read ({describe_error(error)}); pass a "
            "list of integers, or a dense tensor of integers in host memory"
        ) from error


def _refuse_odd_entry(ids: Sequence[Any]) -> None:
    """Name the first entry that is no integer."""
    for position, entry in enumerate(ids):
        if isinstance(entry, (list, tuple, np.ndarray)):
            raise AdmissionError(
                f"prompt_token_ids[{position}] is itself a list; pass one flat list of integers for one prompt"
            )
        if isinstance(entry, (bool, np.bool_)) or not isinstance(entry, (int, np.integer)):
            shown = entry.item() if isinstance(entry, np.generic) else entry
            raise AdmissionError(f"prompt_token_ids[{position}] is {describe_value(shown)}; a token id is an integer")
