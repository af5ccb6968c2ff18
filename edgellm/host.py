"""`ModelHost`: a loaded model with its engine, and the blocking calls that `LLM` and `Engine` share."""

from __future__ import annotations

import functools
from types import FunctionType
from typing import TYPE_CHECKING, Any

from edgellm.assembly import LoadOptions, Parts, assemble
from edgellm.fetch import DEFAULT_MODEL
from edgellm.frontend import RequestFrontend, RequestOptions, check_seed, prompt_of
from edgellm.outputs import RequestOutput, TokenStream, output_from_response
from edgellm.ownership import Uncopyable

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from typing_extensions import Self

    from edgellm.cache.types import Retention
    from edgellm.decoding.options import SpeculativeOptions
    from edgellm.engine.config import SchedulingOptions
    from edgellm.engine.engine import RequestEngine
    from edgellm.engine.records import RequestHandle
    from edgellm.memory import MemoryBudget
    from edgellm.prompts import Conversation, Prompt
    from edgellm.request import LLMGenerationRequest, Message
    from edgellm.runtime.rank_runtime import LLMRankRuntime
    from edgellm.sampling.params import SamplingParams


class ModelHost(Uncopyable):
    """One model on this machine, with a paged KV cache whose content is reused across requests.

    Threads: every method may be called from several threads at once.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Name the shared methods after the public class: what Python says of a wrong argument then names that."""
        super().__init_subclass__(**kwargs)
        for name in ("__init__", "generate", "chat", "stream"):
            if getattr(cls, name) is vars(ModelHost)[name]:
                setattr(cls, name, _named_after(cls, vars(ModelHost)[name]))

    def __init__(
        self,
        model: str | os.PathLike[str] = DEFAULT_MODEL,
        *,
        device: str = "auto",
        dtype: str = "auto",
        kv_dtype: str = "auto",
        deterministic: bool = False,
        kv_budget: int | float | str | None = None,
        page_size: int = 32,
        max_batch_size: int = 8,
        max_model_len: int | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        step_time_budget_ms: float | None = None,
        scheduling: SchedulingOptions | None = None,
        max_pending_requests: int = 256,
        speculative: SpeculativeOptions | str | None = None,
        seed: int | None = None,
        on_fetch: Callable[[int, int], None] | None = None,
        on_load: Callable[[int, int, str], None] | None = None,
    ) -> None:
        """Fetch the model where need be, load it, and start its engine.

        Args:
            model: a Hugging Face folder, a `.gguf` file, or the name of a model that edgellm can fetch.
            device: "cpu", "cuda", "cuda:N", or "auto": a CUDA device where there is one that the kernels serve.
            dtype: "auto" (float32 on a CPU, the checkpoint's own on CUDA), "float32", "bfloat16", or "float16" on CUDA.
            kv_dtype: "auto" (the same as `dtype`) or, on CUDA, "fp8": half the memory a token, a little less exact.
            deterministic: on CUDA, logits that do not depend on who else is in the batch, on chunks or on reuse, to the
                bit; slower.
            kv_budget: size of the KV pool: tokens (int), bytes (text with a unit, "4GiB"), a fraction of free memory
                (float in (0, 0.95]), or None for a default that `memory_budget` shows (on CUDA most of what the
                weights leave).
            page_size: tokens a page of the KV pool.
            max_batch_size: most sequences that run at once; further requests wait.
            max_model_len: most tokens of one sequence, prompt and answer together; None is the model's context.
            tokenizer: folder or file of another tokenizer; None takes the model's own.
            step_time_budget_ms: aim for the longest step beside running streams: a long prompt is then computed in
                pieces that fit, so that the gap between two tokens of others stays near it.  None does not limit time.
            scheduling: how steps are filled (`edgellm.SchedulingOptions`); None takes the defaults.
            max_pending_requests: requests that may wait or run at once; one more is refused (`SubmitError`).
            speculative: decode speculatively: the kind of a decoder ("prompt_lookup", "eagle", ...) or
                `edgellm.SpeculativeOptions(...)`; None decodes token by token.
            seed: makes sampling reproducible for requests without a seed of their own, in order of submission.
            on_fetch: called with (bytes so far, bytes in all) while the default model is fetched.
            on_load: called with (bytes so far, bytes in all, tensor name) while weights are loaded.

        Raises:
            InvalidArgumentError: an option is out of range, or the model path does not exist.
            UnsupportedModelError, WeightFileError: the checkpoint or its draft is not supported, or damaged.
            PluginError: a decoder or policy that the model needs is not installed, or at fault.
            FetchError: the default model could not be fetched.
        """
        options = LoadOptions(
            model=model,
            device=device,
            dtype=dtype,
            kv_dtype=kv_dtype,
            deterministic=deterministic,
            kv_budget=kv_budget,
            page_size=page_size,
            max_batch_size=max_batch_size,
            max_model_len=max_model_len,
            tokenizer=tokenizer,
            step_time_budget_ms=step_time_budget_ms,
            scheduling=scheduling,
            max_pending_requests=max_pending_requests,
            speculative=speculative,
        )
        check_seed(seed)
        self._start(assemble(options, on_fetch=on_fetch, on_load=on_load), seed)

    @classmethod
    def from_parts(cls, parts: Parts, *, seed: int | None = None) -> Self:
        """The same over a runtime that was put together elsewhere (tests, other executors); takes the runtime over."""
        check_seed(seed)
        host = cls.__new__(cls)
        host._start(parts, seed)
        return host

    def _start(self, parts: Parts, seed: int | None) -> None:
        self._frontend = RequestFrontend(parts, seed=seed, owner=type(self).__name__)

    # ---- generating -----------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
        use_cache: bool = True,
        retention: Retention | None = None,
        priority: int = 0,
        timeout_seconds: float | None = None,
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
            priority: smaller is more urgent; needs `scheduling_policy` priority (or `priority_reserved_slots`), other
                than 0 is refused without.
            timeout_seconds: most time for each prompt, waiting included; then it ends with `RequestTimedOut`.
        Returns:
            One output a prompt, in their order; an empty list for an empty list.
        Raises:
            AdmissionError, InputTooLongError, InvalidArgumentError: a prompt or parameter is wrong.  No prompt
                of the call was started.
            RequestFailed, RequestTimedOut: a request ended so; the call's other requests were cancelled.
            ContractViolation: closed.
        """
        self._frontend.open_engine("generate")
        options = RequestOptions.checked(
            cache_salt=cache_salt,
            use_cache=use_cache,
            retention=retention,
            priority=priority,
            timeout_seconds=timeout_seconds,
        )
        return self._run(self._frontend.prepare_prompts(prompts, sampling_params, options))

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
        priority: int = 0,
        timeout_seconds: float | None = None,
    ) -> list[RequestOutput]:
        """Answer one or several conversations, written as the model's chat template says; waits for all.

        Args:
            messages: a list of `{"role": ..., "content": ...}` dicts, or a list of such lists.
            add_generation_prompt: end the prompt with the opening of the assistant's turn.
            chat_template_kwargs: further variables for the chat template (`enable_thinking`, ...).
        Returns, raises, other arguments: as `generate`.
        """
        self._frontend.open_engine("chat")
        options = RequestOptions.checked(
            cache_salt=cache_salt,
            use_cache=use_cache,
            retention=retention,
            priority=priority,
            timeout_seconds=timeout_seconds,
        )
        requests = self._frontend.prepare_conversations(
            messages,
            sampling_params,
            options,
            add_generation_prompt=add_generation_prompt,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._run(requests)

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
        priority: int = 0,
        timeout_seconds: float | None = None,
    ) -> TokenStream:
        """Start one prompt or conversation and return at once; iterate over the result for its text.

        Raises:
            AdmissionError, InputTooLongError, InvalidArgumentError: the prompt or a parameter is wrong.
            SubmitError: too many requests are pending; try again later.
            ContractViolation: closed.
        """
        self._frontend.open_engine("stream")
        options = RequestOptions.checked(
            cache_salt=cache_salt,
            use_cache=use_cache,
            retention=retention,
            priority=priority,
            timeout_seconds=timeout_seconds,
        )
        request = self._frontend.prepare_one(
            prompt_or_messages,
            sampling_params,
            options,
            add_generation_prompt=add_generation_prompt,
            chat_template_kwargs=chat_template_kwargs,
            method="stream",
        )
        return TokenStream(self._frontend.submit(request, stream=True), prompt_of(request))

    # ---- looking --------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer (`encode`, `decode`, `apply_chat_template`)."""
        return self._frontend.tokenizer

    @property
    def memory_budget(self) -> MemoryBudget:
        """What the KV pool costs and how much fits in it."""
        return self._frontend.memory_budget

    def __repr__(self) -> str:
        front = self._frontend
        state = "closed" if front.engine is None else "open"
        budget = front.memory_budget
        pool = f"{budget.tokens:,} tokens" if budget.num_pages else f"{budget.snapshot_slots:,} checkpoints"
        return f"{type(self).__name__}({front.model_name!r}, dtype={front.dtype!r}, kv_pool={pool!r}, {state})"

    # ---- inside ---------------------------------------------------------------------------------------

    @property
    def _engine(self) -> RequestEngine | None:
        return self._frontend.engine

    @property
    def _runtime(self) -> LLMRankRuntime | None:
        return self._frontend.runtime

    def _run(self, requests: list[LLMGenerationRequest]) -> list[RequestOutput]:
        handles: list[RequestHandle] = []
        try:
            for request in requests:
                handles.append(self._frontend.submit(request, wait=True))
            return [
                output_from_response(prompt_of(request), handle.get())
                for request, handle in zip(requests, handles, strict=True)
            ]
        finally:
            for handle in handles:
                handle.cancel()  # no effect on one that has ended


def _named_after(owner: type, method: FunctionType) -> FunctionType:
    """A copy of `method` whose qualified name, which a TypeError shows, begins with `owner`."""
    copy = FunctionType(method.__code__, method.__globals__, method.__name__, method.__defaults__, method.__closure__)
    copy.__kwdefaults__ = method.__kwdefaults__
    functools.update_wrapper(copy, method)
    del copy.__wrapped__  # type: ignore[attr-defined]  # it is the function itself under another name
    copy.__qualname__ = f"{owner.__qualname__}.{method.__name__}"
    return copy
