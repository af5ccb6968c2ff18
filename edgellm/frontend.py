"""`RequestFrontend`: from what a caller wrote to a submitted request; the one rule behind `LLM` and both engines."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from edgellm.argument_check import check_flag
from edgellm.cache.types import ContextCacheLookupPolicy, Retention
from edgellm.engine.engine import RequestEngine, ShutdownMode
from edgellm.errors import ContractViolation, InvalidArgumentError
from edgellm.log import get_logger
from edgellm.prompts import (
    PreparedPrompt,
    PromptPreparer,
    is_conversation,
    params_per_prompt,
    request_of_prompt,
    require_one_prompt,
    split_conversations,
    split_prompts,
)
from edgellm.request import LLMGenerationRequest
from edgellm.session.request_check import (
    check_cache_salt,
    check_priority,
    check_retention,
    check_template_arguments,
    check_timeout_seconds,
)
from edgellm.streaming import StreamChannel

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from edgellm.assembly import Parts
    from edgellm.engine.records import RequestHandle
    from edgellm.runtime.rank_runtime import LLMRankRuntime
    from edgellm.sampling.params import SamplingParams

logger = get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class RequestOptions:
    """How the requests of one call use the context cache, and how urgent they are."""

    salt: str | None
    lookup_policy: ContextCacheLookupPolicy
    retention: Retention
    priority: int
    timeout_seconds: float | None

    @classmethod
    def checked(
        cls,
        *,
        cache_salt: Any = None,
        use_cache: Any = True,
        retention: Any = None,
        priority: Any = 0,
        timeout_seconds: Any = None,
    ) -> RequestOptions:
        """The options as a caller wrote them.

        Raises:
            AdmissionError, InvalidArgumentError: one of them is malformed.
        """
        check_cache_salt(cache_salt)
        check_flag("use_cache", use_cache)
        if retention is None:
            retention = Retention()
        check_retention(retention)
        check_priority(priority)
        check_timeout_seconds(timeout_seconds)
        lookup = ContextCacheLookupPolicy.USE_CACHE if use_cache else ContextCacheLookupPolicy.BYPASS
        return cls(cache_salt, lookup, retention, priority, timeout_seconds)


class RequestFrontend:
    """Prompts in, requests out: checks, tokenises, gives seeds, and submits to the one engine it owns.

    Threads: every method may be called from several threads.
    Ownership: takes the parts' runtime over; `close` ends the engine, which closes the runtime.
    """

    def __init__(self, parts: Parts, *, seed: int | None, owner: str) -> None:
        """Start the engine.

        Args:
            seed: makes sampling reproducible for requests without a seed of their own, in order of preparation.
            owner: name of the public class in front, for messages.
        """
        self._seed = check_seed(seed)
        self._owner = owner
        self._request_numbers = itertools.count()
        self.model_name = parts.model_name
        self.dtype = parts.runtime.kv_dtype
        self.tokenizer: Any = parts.tokenizer
        self.memory_budget = parts.memory_budget
        self._preparer = PromptPreparer(parts.tokenizer, parts.limits)
        self.runtime: LLMRankRuntime | None = parts.runtime
        self.engine: RequestEngine | None = RequestEngine(
            parts.runtime, parts.engine_config, device_healthy=parts.device_healthy
        )
        self._ending: RequestEngine | None = self.engine  # until it has ended
        self._release_memory = parts.release_memory
        logger.info("%s: %s", parts.model_name, self.memory_budget.describe())

    # ---- requests -------------------------------------------------------------------------------------

    def prepare_prompts(
        self, prompts: Any, sampling_params: Any, options: RequestOptions
    ) -> list[LLMGenerationRequest]:
        """One request a prompt, checked and tokenised; either all of them or none.

        Raises:
            AdmissionError, InputTooLongError, InvalidArgumentError: a prompt or parameter is wrong.
        """
        requests, is_list = split_prompts(prompts)
        return self._prepare(requests, sampling_params, "prompts" if is_list else "", options)

    def prepare_conversations(
        self,
        messages: Any,
        sampling_params: Any,
        options: RequestOptions,
        *,
        add_generation_prompt: bool,
        chat_template_kwargs: dict[str, Any] | None,
    ) -> list[LLMGenerationRequest]:
        """One request a conversation, written as the chat template says; either all of them or none.

        Raises: as `prepare_prompts`.
        """
        chat_template_kwargs = _template_variables(add_generation_prompt, chat_template_kwargs)
        conversations, is_list = split_conversations(messages)
        requests = [_chat_request(one, add_generation_prompt, chat_template_kwargs) for one in conversations]
        return self._prepare(requests, sampling_params, "messages" if is_list else "", options)

    def prepare_one(
        self,
        prompt_or_messages: Any,
        sampling_params: Any,
        options: RequestOptions,
        *,
        add_generation_prompt: bool,
        chat_template_kwargs: dict[str, Any] | None,
        method: str,
    ) -> LLMGenerationRequest:
        """The request of one prompt or one conversation.

        Args:
            method: the public method that was called, for messages.
        Raises: as `prepare_prompts`; InvalidArgumentError also for a list of several.
        """
        chat_template_kwargs = _template_variables(add_generation_prompt, chat_template_kwargs)
        require_one_prompt(prompt_or_messages, method)
        if is_conversation(prompt_or_messages):
            request = _chat_request(prompt_or_messages, add_generation_prompt, chat_template_kwargs)
        else:
            request = request_of_prompt(prompt_or_messages)
        return self._prepare([request], sampling_params, "", options)[0]

    def submit(self, request: LLMGenerationRequest, *, stream: bool = False, wait: bool = False) -> RequestHandle:
        """Hand a prepared request to the engine.

        Args:
            stream: its text is read as it comes, so give it a channel from the first token on.
            wait: let it stand in line while too many are pending, see `RequestEngine.submit`.
        Raises:
            InvalidArgumentError: `stream` is neither True nor False.
            SubmitError: too many requests are pending, try again later; or the engine takes none any more.
            ContractViolation: closed.
        """
        check_flag("stream", stream)
        engine = self.open_engine("submit")
        if stream:
            request = dataclasses.replace(request, stream_channel=StreamChannel.create())
        return engine.submit(request, wait=wait)

    def open_engine(self, method: str) -> RequestEngine:
        """The engine.

        Raises:
            ContractViolation: closed.
        """
        engine = self.engine
        if engine is None:
            raise self.closed_error(method)
        return engine

    def open_runtime(self, method: str) -> LLMRankRuntime:
        """The runtime; only for what may be read while the engine runs.

        Raises:
            ContractViolation: closed.
        """
        runtime = self.runtime
        if runtime is None:
            raise self.closed_error(method)
        return runtime

    def closed_error(self, method: str) -> ContractViolation:
        return ContractViolation(f"{method}: this {self._owner} is closed; make a new one")

    def close(self, mode: ShutdownMode) -> None:
        """End the engine as `mode` says, and let go of weights and KV pool.  Idempotent; the first mode stays.

        Returns once everything has ended, whoever asked for it first, and also after a call that was interrupted.

        Raises:
            ContractViolation: called on the engine's own thread; nothing was changed.
        """
        engine = self._ending
        if engine is None:
            return
        engine.require_other_thread()
        self.engine = self.runtime = None
        engine.shutdown(mode)
        self._ending = None
        del engine  # the last that refers to weights and pool
        if self._release_memory is not None:
            self._release_memory()

    # ---- inside ---------------------------------------------------------------------------------------

    def _prepare(
        self, requests: Sequence[LLMGenerationRequest], sampling_params: Any, name: str, options: RequestOptions
    ) -> list[LLMGenerationRequest]:
        """Check and tokenise every request of a call before any of them gets a seed or starts."""
        for request, params in zip(requests, params_per_prompt(sampling_params, len(requests)), strict=True):
            request.sampling = params
        prepared = [
            self._preparer.prepare(request, f"{name}[{index}]" if name else "")
            for index, request in enumerate(requests)
        ]
        self._compile_forms(one.params for one in prepared)
        return [self._engine_request(one, options) for one in prepared]

    def _compile_forms(self, params: Iterable[SamplingParams]) -> None:
        """Compile what structured output asks for here, so that the engine's thread finds it done."""
        runtime = self.runtime
        for one in params:
            if one.structured is not None and runtime is not None:
                runtime.guidance.prepare(one.structured)

    def _engine_request(self, prepared: PreparedPrompt, options: RequestOptions) -> LLMGenerationRequest:
        params = prepared.params
        if params.seed is None and self._seed is not None:
            # A seed of its own for each request: equal prompts should not all get the same sample.
            sequence = np.random.SeedSequence([self._seed, next(self._request_numbers)])
            params = dataclasses.replace(params, seed=int(sequence.generate_state(1, np.uint64)[0]))
        return LLMGenerationRequest(
            prompt_token_ids=prepared.token_ids,
            sampling=params,
            cache_salt=options.salt,
            lookup_policy=options.lookup_policy,
            retention=options.retention,
            priority=options.priority,
            timeout_seconds=options.timeout_seconds,
            checkpoint_boundaries=prepared.prompt.checkpoint_boundaries,
            replay_tail_length=prepared.prompt.replay_tail_length,
        )


def prompt_of(request: LLMGenerationRequest) -> list[int]:
    """The token ids of a prepared request."""
    ids: list[int] = np.asarray(request.prompt_token_ids).tolist()
    return ids


def check_seed(seed: Any) -> int | None:
    """`seed` as it is.

    Raises:
        InvalidArgumentError: neither None nor an integer of 64 bits.
    """
    if seed is None:
        return None
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise InvalidArgumentError(f"seed is {seed!r}; it must be an integer from 0 to 2**64 - 1, or None")
    return seed


def _template_variables(add_generation_prompt: Any, chat_template_kwargs: Any) -> dict[str, Any]:
    """The variables as a dict of our own.

    Raises:
        InvalidArgumentError: one of the two arguments is malformed.
    """
    variables = {} if chat_template_kwargs is None else chat_template_kwargs
    check_template_arguments(add_generation_prompt, variables)
    return dict(variables)


def _chat_request(
    conversation: Any, add_generation_prompt: bool, chat_template_kwargs: dict[str, Any]
) -> LLMGenerationRequest:
    return LLMGenerationRequest(
        messages=conversation,
        add_generation_prompt=add_generation_prompt,
        chat_template_kwargs=dict(chat_template_kwargs),
    )
