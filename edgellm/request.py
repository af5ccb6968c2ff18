"""One generation request as the engine and the session see it, and the response that comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from edgellm.cache.types import ContextCacheCommitPolicy, ContextCacheLookupPolicy, Retention, ReuseReport
from edgellm.sampling.params import SamplingParams
from edgellm.session._ledger import CancelToken
from edgellm.session.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from edgellm.sampling.logprobs import TokenLogprobs
    from edgellm.streaming import StreamChannel

__all__ = ["CancelToken", "LLMGenerationRequest", "LLMGenerationResponse", "Message"]

Message = dict[str, Any]


@dataclass(slots=True, eq=False)
class LLMGenerationRequest:
    """One prompt and how to continue it.  Exactly one of `prompt_token_ids`, `prompt`, `messages` is set.

    Compared by identity: prompts may be arrays.

    The last block holds kinds of request that the seeds name and this runtime refuses
    (`UnsupportedRequestError`).

    Attributes:
        prompt_token_ids: (n,) int32, already tokenised; never templated again.
        cache_salt: separates what this request may share from everybody else's; None shares.
        retention: how long its context is worth keeping once nobody uses it.
        checkpoint_boundaries: prompt lengths, 0 or more, at which a later prompt is likely to leave this one; found
            from the template where `messages` are given.
        replay_tail_length: tokens at the end of the prompt that a next turn is not expected to repeat; likewise.
        priority: of 32 bits, smaller is more urgent; other than 0 needs the priority policy, or reserved seats.
        timeout_seconds: seconds from submit after which the engine ends the request, wherever it is, like a cancel;
            `get` then raises `RequestTimedOut`.  None waits without limit.
        disable_spec_decode: decode one token a step; refused where the decoder only verifies (shared-KV MTP).
    """

    prompt_token_ids: npt.NDArray[np.int32] | Sequence[int] | None = None
    prompt: str | None = None
    messages: Sequence[Message] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    lookup_policy: ContextCacheLookupPolicy = ContextCacheLookupPolicy.USE_CACHE
    commit_policy: ContextCacheCommitPolicy = ContextCacheCommitPolicy.INCLUDING_GENERATED_TOKENS
    cache_salt: str | None = None
    retention: Retention = field(default_factory=Retention)
    checkpoint_boundaries: Sequence[int] = ()
    replay_tail_length: int = 0
    stream_channel: StreamChannel | None = None
    priority: int = 0
    timeout_seconds: float | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    disable_spec_decode: bool = False

    token_callback: Callable[[list[int]], None] | None = None
    adapter_name: str | None = None
    speech_output: bool = False
    save_system_prompt_kv_cache: bool = False
    trajectory: bool = False
    num_sequences: int = 1


@dataclass(slots=True)
class LLMGenerationResponse:
    """The finished answer of one request.

    Attributes:
        token_ids: every generated id, also those whose text a stop string cut away.
        text: decoded and trimmed text.
        iterations: steps that the request took part in.
        proposed_draft_tokens, accepted_draft_tokens: under speculative decoding, what was verified, and what of it is
            in the answer.
        queue_ms, time_to_first_token_ms, total_ms: filled by the engine; 0.0 where unknown.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    logprobs: list[TokenLogprobs] | None = None
    reuse: ReuseReport | None = None
    stop_match: str | None = None
    iterations: int = 0
    error_message: str = ""
    proposed_draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    queue_ms: float = 0.0
    time_to_first_token_ms: float = 0.0
    total_ms: float = 0.0
