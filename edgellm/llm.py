"""`LLM`: load a model once, then generate, chat and stream from any thread."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from edgellm.assembly import LoadOptions, Parts, assemble
from edgellm.cache.types import ContextCacheLookupPolicy, Retention
from edgellm.engine.engine import RequestEngine, ShutdownMode
from edgellm.errors import ContractViolation, InvalidArgumentError, SubmitError
from edgellm.fetch import DEFAULT_MODEL
from edgellm.log import get_logger
from edgellm.outputs import RequestOutput, TokenStream, output_from_response
from edgellm.prompts import (
    Conversation,
    PreparedPrompt,
    Prompt,
    PromptPreparer,
    is_conversation,
    params_per_prompt,
    request_of_prompt,
    require_one_prompt,
    split_conversations,
    split_prompts,
)
from edgellm.request import LLMGenerationRequest, Message
from edgellm.session.request_check import check_cache_salt, check_retention

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from edgellm.cache.metrics import ContextCacheMetrics
    from edgellm.engine.metrics import EngineMetrics
    from edgellm.engine.records import RequestHandle
    from edgellm.memory import MemoryBudget
    from edgellm.runtime.rank_runtime import LLMRankRuntime
    from edgellm.sampling.params import SamplingParams

logger = get_logger(__name__)

BACK_PRESSURE_POLL_SECONDS = 0.01


class LLM:
    """One model on this machine, with a paged KV cache whose content is reused across requests.

    Args:
        model: a Hugging Face folder, a `.gguf` file, or the name of a model that edgellm can fetch.
        device: "auto" or "cpu".
        dtype: "auto" (float32 on a CPU), "float32" or "bfloat16".
        kv_budget: size of the KV pool: tokens (int), bytes (text with a unit, "4GiB"), a fraction of free memory
            (float in (0, 0.95]), or None for a default that `memory_budget` shows.
        page_size: tokens a page of the KV pool.
        max_batch_size: most sequences that run at once; further requests wait.
        max_model_len: most tokens of one sequence, prompt and answer together; None is the model's context.
        tokenizer: folder or file of another tokenizer; None takes the model's own.
        seed: makes sampling reproducible for requests without a seed of their own, in order of submission.
        on_fetch: called with (bytes so far, bytes in all) while the default model is fetched.
        on_load: called with (bytes so far, bytes in all, tensor name) while weights are loaded.

    Raises:
        InvalidArgumentError: an option is out of range, or the model path does not exist.
        UnsupportedModelError, WeightFileError: the checkpoint is not supported, or damaged.
        FetchError: the default model could not be fetched.

    Threads: every method may be called from several threads at once.
    Ownership: `close()` (or the `with` block) ends running requests and frees the pool; later calls raise.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = DEFAULT_MODEL,
        *,
        device: str = "auto",
        dtype: str = "auto",
        kv_budget: int | float | str | None = None,
        page_size: int = 32,
        max_batch_size: int = 8,
        max_model_len: int | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        seed: int | None = None,
        on_fetch: Callable[[int, int], None] | None = None,
        on_load: Callable[[int, int, str], None] | None = None,
    ) -> None:
        options = LoadOptions(
            model=model,
            device=device,
            dtype=dtype,
            kv_budget=kv_budget,
            page_size=page_size,
            max_batch_size=max_batch_size,
            max_model_len=max_model_len,
            tokenizer=tokenizer,
        )
        checked_seed = _check_seed(seed)
        self._start(assemble(options, on_fetch=on_fetch, on_load=on_load), checked_seed)

    @classmethod
    def from_parts(cls, parts: Parts, *, seed: int | None = None) -> LLM:
        """An LLM over a runtime that was put together elsewhere (tests, other executors); takes the runtime over."""
        llm = cls.__new__(cls)
        llm._start(parts, _check_seed(seed))
        return llm

    def _start(self, parts: Parts, seed: int | None) -> None:
        self._seed = seed
        self._model_name = parts.model_name
        self._dtype = parts.runtime.kv_dtype
        self._request_numbers = itertools.count()
        self._close_lock = threading.Lock()
        self._runtime: LLMRankRuntime | None = parts.runtime
        self._tokenizer = parts.tokenizer
        self._memory_budget = parts.memory_budget
        self._preparer = PromptPreparer(parts.tokenizer, parts.limits)
        self._engine: RequestEngine | None = RequestEngine(parts.runtime, parts.engine_config)
        logger.info("%s: %s", parts.model_name, self._memory_budget.describe())

    # ---- generating -----------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
        use_cache: bool = True,
        retention: Retention | None = None,
    ) -> list[RequestOutput]:
        """Continue one or several prompts; waits for all of them.

        Args:
            prompts: text, token ids, `{"prompt_token_ids": [...]}` or `{"prompt": "..."}`, or a list of these.
                A flat list of integers is one prompt.
            sampling_params: one for all, or one a prompt.
            cache_salt: prompts share cached context with prompts of the same salt only; None is the common one.
            use_cache: False computes the whole prompt and keeps nothing of it for later requests.
            retention: priority and time to live of the cached context once nobody uses it; None is normal priority,
                kept by recency alone.
        Returns:
            One output a prompt, in their order; an empty list for an empty list.
        Raises:
            AdmissionError, InputTooLongError, InvalidArgumentError: a prompt or parameter is wrong.  No prompt
                of the call was started.
            RequestFailed: a request failed while running; the call's other requests were cancelled.
            ContractViolation: the LLM is closed.
        """
        self._open_engine("generate")
        options = CacheOptions.checked(cache_salt, use_cache, retention)
        requests, is_list = split_prompts(prompts)
        return self._run(requests, sampling_params, "prompts" if is_list else "", options)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
        cache_salt: str | None = None,
        use_cache: bool = True,
        retention: Retention | None = None,
    ) -> list[RequestOutput]:
        """Answer one or several conversations, written as the model's chat template says; waits for all.

        Args:
            messages: a list of `{"role": ..., "content": ...}` dicts, or a list of such lists.
            add_generation_prompt: end the prompt with the opening of the assistant's turn.
            chat_template_kwargs: further variables for the chat template (`enable_thinking`, ...).
        Returns, raises, other arguments: as `generate`.
        """
        self._open_engine("chat")
        options = CacheOptions.checked(cache_salt, use_cache, retention)
        conversations, is_list = split_conversations(messages)
        requests = [
            LLMGenerationRequest(
                messages=conversation,
                add_generation_prompt=add_generation_prompt,
                chat_template_kwargs=dict(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        return self._run(requests, sampling_params, "messages" if is_list else "", options)

    def stream(
        self,
        prompt_or_messages: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
        cache_salt: str | None = None,
        use_cache: bool = True,
        retention: Retention | None = None,
    ) -> TokenStream:
        """Start one prompt or conversation and return at once; iterate over the result for its text.

        Raises:
            AdmissionError, InputTooLongError, InvalidArgumentError: the prompt or a parameter is wrong.
            SubmitError: too many requests are pending; try again later.
            ContractViolation: the LLM is closed.
        """
        engine = self._open_engine("stream")
        options = CacheOptions.checked(cache_salt, use_cache, retention)
        require_one_prompt(prompt_or_messages)
        if is_conversation(prompt_or_messages):
            request = LLMGenerationRequest(
                messages=prompt_or_messages,  # type: ignore[arg-type]  # checked by is_conversation
                add_generation_prompt=add_generation_prompt,
                chat_template_kwargs=dict(chat_template_kwargs or {}),
            )
        else:
            request = request_of_prompt(prompt_or_messages)
        (prepared,) = self._prepare([request], sampling_params, "")
        handle = engine.submit(self._engine_request(prepared, options))
        return TokenStream(handle, prepared.token_ids.tolist())

    # ---- looking --------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer (`encode`, `decode`, `apply_chat_template`)."""
        return self._tokenizer

    @property
    def memory_budget(self) -> MemoryBudget:
        """What the KV pool costs and how much fits in it."""
        return self._memory_budget

    def engine_metrics(self) -> EngineMetrics:
        """Counters of the request engine."""
        return self._open_engine("engine_metrics").metrics()

    def cache_metrics(self) -> ContextCacheMetrics:
        """Counters of the context cache over this LLM's life: hits, reused tokens, evictions, free pages.

        May be read while the engine runs; each number is right by itself, together they are not one instant.
        """
        runtime = self._runtime
        if runtime is None:
            raise _closed_error("cache_metrics")
        return runtime.coordinator.metrics()

    # ---- ending ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel what still runs, stop the engine, and let go of weights and KV pool.  Idempotent."""
        with self._close_lock:
            engine, self._engine, self._runtime = self._engine, None, None
            if engine is not None:
                engine.shutdown(ShutdownMode.CANCEL)

    def __repr__(self) -> str:
        state = "closed" if self._engine is None else "open"
        pool = f"{self._memory_budget.tokens:,} tokens"
        return f"LLM({self._model_name!r}, dtype={self._dtype!r}, kv_pool={pool!r}, {state})"

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- inside ---------------------------------------------------------------------------------------

    def _open_engine(self, method: str) -> RequestEngine:
        engine = self._engine
        if engine is None:
            raise _closed_error(method)
        return engine

    def _prepare(self, requests: list[LLMGenerationRequest], sampling_params: Any, name: str) -> list[PreparedPrompt]:
        """Check and tokenise every request of a call, before any of them starts."""
        for request, params in zip(requests, params_per_prompt(sampling_params, len(requests)), strict=True):
            request.sampling = params
        return [
            self._preparer.prepare(request, f"{name}[{index}]" if name else "")
            for index, request in enumerate(requests)
        ]

    def _engine_request(self, prepared: PreparedPrompt, options: CacheOptions) -> LLMGenerationRequest:
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
            checkpoint_boundaries=prepared.prompt.checkpoint_boundaries,
            replay_tail_length=prepared.prompt.replay_tail_length,
        )

    def _run(
        self,
        requests: list[LLMGenerationRequest],
        sampling_params: Any,
        name: str,
        options: CacheOptions,
    ) -> list[RequestOutput]:
        prepared = self._prepare(requests, sampling_params, name)
        running: deque[tuple[PreparedPrompt, RequestHandle]] = deque()
        outputs: list[RequestOutput] = []
        try:
            for one in prepared:
                request = self._engine_request(one, options)
                running.append((one, self._submit_patiently(request, running, outputs)))
            while running:
                outputs.append(_take_oldest(running))
        finally:
            for _, handle in running:
                handle.cancel()
        return outputs

    def _submit_patiently(
        self,
        request: LLMGenerationRequest,
        running: deque[tuple[PreparedPrompt, RequestHandle]],
        outputs: list[RequestOutput],
    ) -> RequestHandle:
        """Submit; under back-pressure wait for this call's oldest request, or for other callers' to end."""
        while True:
            engine = self._open_engine("submit")
            try:
                return engine.submit(request)
            except SubmitError:
                if engine.closed_because():
                    raise
            if running:
                outputs.append(_take_oldest(running))
            else:
                time.sleep(BACK_PRESSURE_POLL_SECONDS)


def _take_oldest(running: deque[tuple[PreparedPrompt, RequestHandle]]) -> RequestOutput:
    prepared, handle = running[0]
    output = output_from_response(prepared.token_ids.tolist(), handle.get())
    running.popleft()
    return output


def _closed_error(method: str) -> ContractViolation:
    return ContractViolation(f"{method}: this LLM is closed; make a new one")


@dataclasses.dataclass(frozen=True, slots=True)
class CacheOptions:
    """How the requests of one call use the context cache."""

    salt: str | None
    lookup_policy: ContextCacheLookupPolicy
    retention: Retention

    @classmethod
    def checked(cls, cache_salt: Any, use_cache: Any, retention: Any) -> CacheOptions:
        """The options as a caller wrote them.

        Raises:
            AdmissionError, InvalidArgumentError: one of them is malformed.
        """
        check_cache_salt(cache_salt)
        if not isinstance(use_cache, bool):
            raise InvalidArgumentError(f"use_cache is {use_cache!r}; it must be True or False")
        if retention is None:
            retention = Retention()
        check_retention(retention)
        lookup = ContextCacheLookupPolicy.USE_CACHE if use_cache else ContextCacheLookupPolicy.BYPASS
        return cls(cache_salt, lookup, retention)


def _check_seed(seed: int | None) -> int | None:
    if seed is None:
        return None
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise InvalidArgumentError(f"seed is {seed!r}; it must be an integer from 0 to 2**64 - 1, or None")
    return seed
