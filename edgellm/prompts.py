"""Prompts as callers write them, turned into checked token ids on the caller's thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from edgellm.errors import INPUT_TOO_LONG_MARKER, CallerError, InputTooLongError, InvalidArgumentError
from edgellm.memory import pool_remedy, with_write_ahead
from edgellm.request import LLMGenerationRequest, Message
from edgellm.sampling.params import SamplingParams
from edgellm.session.prompt import TokenizedPrompt, build_prompt
from edgellm.session.request_check import check_request, read_foreign

if TYPE_CHECKING:
    import numpy.typing as npt

Prompt: TypeAlias = "str | Sequence[int] | npt.NDArray[np.integer[Any]] | Mapping[str, Any]"
Conversation: TypeAlias = "Sequence[Message]"


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """What a prompt must respect.

    Attributes:
        max_model_len: tokens one sequence may reach, prompt and answer together.
        pool_tokens: tokens the whole KV pool holds.
        headroom_tokens: positions beyond its committed ones that a step may write; the pool has to hold them.
        model_context: what `max_model_len` may be raised to; None when that is not known.
    """

    vocab_size: int
    max_model_len: int
    pool_tokens: int
    headroom_tokens: int
    model_context: int | None = None

    def check_length(self, length: int) -> None:
        """Refuse a prompt that never fits with one generated token, and in the pool with what is written ahead of it.

        Raises:
            InputTooLongError: names the length, the limit and which setting raises it, if one does.
        """
        ahead = self.headroom_tokens - 1
        for limit, behind, what, remedy in (
            (self.max_model_len, 0, "a sequence may reach", self._longer_sequences()),
            (self.pool_tokens, ahead, "the KV pool holds", f" or {pool_remedy(ahead)}"),
        ):
            if length + 1 + behind > limit:
                answer = with_write_ahead("an answer of at least 1 token", behind)
                raise InputTooLongError(
                    f"the prompt has {length} tokens and never fits: together with {answer} it exceeds the {limit} "
                    f"tokens that {what}; shorten the prompt{remedy}"
                )

    def _longer_sequences(self) -> str:
        """How to get longer sequences; empty when the model has no longer ones."""
        if self.model_context is None:
            return " or raise max_model_len"
        if self.max_model_len >= self.model_context:
            return ""
        return f" or raise max_model_len (the model's context is {self.model_context})"


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """One checked prompt."""

    prompt: TokenizedPrompt
    params: SamplingParams

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """(n,) int32."""
        return self.prompt.token_ids


class PromptPreparer:
    """Checks and tokenises prompts; safe to call from several threads when the tokenizer is."""

    def __init__(self, tokenizer: Any, limits: PromptLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits

    def prepare(self, request: LLMGenerationRequest, where: str) -> PreparedPrompt:
        """Validate one request and turn its prompt into token ids.

        Args:
            where: what the request is in the caller's words ("prompts[3]"), to begin the message with.
        Raises:
            AdmissionError, InputTooLongError, InvalidArgumentError: of the kind the check raises.
        """
        try:
            prompt = read_foreign(lambda: self._read(request))
            self._limits.check_length(len(prompt))
        except CallerError as error:
            if not where:
                raise
            # The marker of a prompt that is too long stays in front; the constructor puts it there.
            text = str(error).removeprefix(f"{INPUT_TOO_LONG_MARKER}: ")
            raise type(error)(f"{where}: {text}") from error
        return PreparedPrompt(prompt, request.sampling)

    def _read(self, request: LLMGenerationRequest) -> TokenizedPrompt:
        check_request(request, vocab_size=self._limits.vocab_size)
        return build_prompt(request, self._tokenizer, vocab_size=self._limits.vocab_size)


def request_of_prompt(prompt: Any) -> LLMGenerationRequest:
    """A request that holds `prompt` in whichever form the caller wrote it.

    Raises:
        InvalidArgumentError: none of the accepted forms.
    """
    if isinstance(prompt, str):
        return LLMGenerationRequest(prompt=prompt)
    if isinstance(prompt, Mapping):
        if set(prompt) == {"prompt_token_ids"}:
            return LLMGenerationRequest(prompt_token_ids=prompt["prompt_token_ids"])
        if set(prompt) == {"prompt"}:
            return LLMGenerationRequest(prompt=prompt["prompt"])
        raise InvalidArgumentError(
            f"a prompt dict has the keys {sorted(map(str, prompt))}; it must have exactly one of "
            "'prompt_token_ids' and 'prompt'"
        )
    if isinstance(prompt, (Sequence, np.ndarray)) and not isinstance(prompt, bytes):
        return LLMGenerationRequest(prompt_token_ids=prompt)
    raise InvalidArgumentError(
        f"a prompt is a {type(prompt).__name__}; pass text, a list of token ids or {{'prompt_token_ids': [...]}}"
    )


def split_prompts(prompts: Any) -> tuple[list[LLMGenerationRequest], bool]:
    """One prompt or a list of them, as requests, and whether it was a list (an empty list is no prompt)."""
    if _is_single_prompt(prompts):
        return [request_of_prompt(prompts)], False
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        return [request_of_prompt(prompts)], False
    requests = []
    for index, prompt in enumerate(prompts):
        try:
            requests.append(request_of_prompt(prompt))
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"prompts[{index}]: {error}") from error
    return requests, True


def require_one_prompt(value: Any, method: str) -> None:
    """Refuse a list of prompts or conversations where `method` takes one of them.

    Raises:
        InvalidArgumentError: a list whose entries are themselves prompts or conversations.
    """
    if isinstance(value, np.ndarray):
        several = value.ndim > 1
    elif isinstance(value, (str, bytes)) or not isinstance(value, Sequence) or not len(value):
        several = False
    else:
        first = value[0]
        several = isinstance(first, (str, Sequence, np.ndarray)) or (
            isinstance(first, Mapping) and _is_prompt_dict(first)
        )
    if several:
        raise InvalidArgumentError(
            f"{method} takes one prompt or conversation, this is a list of {len(value)}; call {method} once for each"
            + (", or pass the list to generate or chat" if method in ("stream", "submit") else "")
        )


def _is_single_prompt(prompts: Any) -> bool:
    if isinstance(prompts, (str, Mapping)):
        return True
    if isinstance(prompts, np.ndarray):
        return prompts.ndim == 1
    is_list = isinstance(prompts, Sequence) and not isinstance(prompts, bytes)
    return is_list and len(prompts) > 0 and isinstance(prompts[0], (int, np.integer))


def split_conversations(messages: Any) -> tuple[list[Conversation], bool]:
    """One conversation or a list of them, and whether it was a list.

    Raises:
        InvalidArgumentError: neither.
    """
    if isinstance(messages, Sequence) and not isinstance(messages, (str, bytes)):
        if not len(messages) or is_conversation(messages):
            return [messages], False
        if all(isinstance(item, Sequence) and not isinstance(item, (str, bytes)) for item in messages):
            return list(messages), True
    raise InvalidArgumentError(
        f"messages is a {type(messages).__name__}; pass a list of {{'role': ..., 'content': ...}} dicts, or a list "
        "of such lists"
    )


def is_conversation(value: Any) -> bool:
    """Whether `value` is one list of messages rather than a prompt or a list of prompts."""
    is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    return is_list and len(value) > 0 and isinstance(value[0], Mapping) and not _is_prompt_dict(value[0])


def _is_prompt_dict(value: Mapping[str, Any]) -> bool:
    return "prompt_token_ids" in value or "prompt" in value


def params_per_prompt(sampling_params: Any, count: int) -> list[SamplingParams]:
    """One `SamplingParams` a prompt: the default, one for all, or a list of equal length.

    Raises:
        InvalidArgumentError: another type, or a list of another length.
    """
    if sampling_params is None:
        return [SamplingParams()] * count
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * count
    if not isinstance(sampling_params, Sequence) or isinstance(sampling_params, (str, bytes)):
        raise InvalidArgumentError(
            f"sampling_params is a {type(sampling_params).__name__}; pass a SamplingParams, or a list with one a prompt"
        )
    if len(sampling_params) != count:
        raise InvalidArgumentError(
            f"sampling_params has {len(sampling_params)} entries for {count} prompts; pass one for all or one a prompt"
        )
    return list(sampling_params)
