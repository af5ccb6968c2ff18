"""A request's prompt as token ids: ids as given, text through the tokenizer, messages through the template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from edgellm.errors import AdmissionError

if TYPE_CHECKING:
    import numpy.typing as npt

    from edgellm.request import LLMGenerationRequest


def build_prompt(request: LLMGenerationRequest, tokenizer: Any, *, vocab_size: int) -> npt.NDArray[np.int32]:
    """The prompt of a checked request.

    Returns:
        (prompt_length,) int32, at least 1, every id in [0, vocab_size); a fresh array.
    Raises:
        AdmissionError: empty prompt, an id out of range, or the tokenizer or template failed.
    """
    ids = request.prompt_token_ids if request.prompt_token_ids is not None else _tokenize(request, tokenizer)
    prompt = _as_int64(ids)
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


def _tokenize(request: LLMGenerationRequest, tokenizer: Any) -> Any:
    try:
        if request.messages is not None:
            return tokenizer.apply_chat_template(
                _plain_messages(request.messages),
                add_generation_prompt=request.add_generation_prompt,
                **request.chat_template_kwargs,
            )
        return tokenizer.encode(request.prompt)
    except AdmissionError:
        raise
    except Exception as error:
        what = "chat template" if request.messages is not None else "tokenizer"
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


def _as_int64(ids: Any) -> npt.NDArray[np.int64]:
    try:
        array = np.asarray(ids)
    except (TypeError, ValueError, OverflowError) as error:
        raise AdmissionError(f"prompt_token_ids cannot be read as token ids: {error}; pass a list of ints") from error
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise AdmissionError(
            f"prompt_token_ids has shape {array.shape} and type {array.dtype}; pass a flat list of integers"
        )
    if array.dtype == np.uint64:
        array = np.minimum(array, np.uint64(2**62))
    return array.astype(np.int64)
