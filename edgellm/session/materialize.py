"""Finished snapshot to response: one-shot decode, then the final stop-string trim.  Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgellm.errors import InvalidArgumentError
from edgellm.foreign import describe_value
from edgellm.request import LLMGenerationResponse
from edgellm.session.finish import OVERRIDDEN_BY_STOP_STRING
from edgellm.session.types import BatchResult, FinishReason
from edgellm.tokenization.stop_strings import trim_at_stop

if TYPE_CHECKING:
    from collections.abc import Sequence


def materialize_result(result: BatchResult, stop_strings: Sequence[str], tokenizer: Any) -> LLMGenerationResponse:
    """The response of a finished sequence, as the blocking path assembles its own.

    The text is decoded once from all generated ids and cut at the earliest stop string, also where the
    incremental decode of streaming missed it; the ids stay complete.

    Raises:
        InvalidArgumentError: see `RuntimeSession.materialize`.
    """
    _check(result, stop_strings)
    token_ids = result.generated_ids
    text = tokenizer.decode(token_ids, skip_special_tokens=result.skip_special_tokens)
    text, match = trim_at_stop(text, stop_strings, include_stop=result.include_stop_str_in_output)
    reason = result.terminal_reason
    if match is not None and reason in OVERRIDDEN_BY_STOP_STRING:
        reason = FinishReason.STOP_WORDS
    return LLMGenerationResponse(
        text=text,
        token_ids=token_ids,
        finish_reason=reason,
        prompt_tokens=len(result.raw_input_ids),
        logprobs=None if result.logprobs is None else list(result.logprobs),
        reuse=result.reuse,
        stop_match=match if match is not None else result.stop_match,
        iterations=result.iterations,
        error_message=result.error_message,
        proposed_draft_tokens=result.proposed_draft_tokens,
        accepted_draft_tokens=result.accepted_draft_tokens,
    )


def _check(result: object, stop_strings: object) -> None:
    if not isinstance(result, BatchResult):
        raise InvalidArgumentError(
            f"result is {describe_value(result)}; pass the BatchResult of a sequence that a step finished"
        )
    texts = isinstance(stop_strings, (list, tuple)) and all(isinstance(text, str) and text for text in stop_strings)
    if not texts:
        raise InvalidArgumentError(
            f"stop_strings is {describe_value(stop_strings)}; pass a list or tuple of non-empty texts, () for none"
        )
