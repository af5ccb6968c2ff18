"""From options to a running runtime: weights, tokenizer, KV pool, executor, context cache, plugins."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgellm import envs
from edgellm.cache.types import DeploymentConfig
from edgellm.engine.config import EngineConfig, SchedulingOptions
from edgellm.errors import InvalidArgumentError
from edgellm.fetch import expand_home, resolve_model
from edgellm.memory import MemoryBudget
from edgellm.prompts import PromptLimits

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from edgellm.models.loader import LoadedModel
    from edgellm.runtime.rank_runtime import LLMRankRuntime

DEVICES = ("auto", "cpu")
PAGE_SIZES = (1, 512)
# Prompt tokens of one step: scratch memory grows with it, and arrivals and cancellations wait for a step's end.
CPU_STEP_TOKENS = 256


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The options of `ModelHost` (`LLM`, `Engine`, `AsyncEngine`), checked for range; see there."""

    model: str | os.PathLike[str]
    device: str = "auto"
    dtype: str = "auto"
    kv_budget: int | float | str | None = None
    page_size: int = 32
    max_batch_size: int = 8
    max_model_len: int | None = None
    tokenizer: str | os.PathLike[str] | None = None
    step_time_budget_ms: float | None = None
    scheduling: SchedulingOptions | None = None
    max_pending_requests: int = 256

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise InvalidArgumentError(
                f"device is {self.device!r}; this version computes on {' or '.join(map(repr, DEVICES))}"
            )
        _check_int("page_size", self.page_size, *PAGE_SIZES)
        _check_int("max_batch_size", self.max_batch_size, 1, 1024)
        if self.max_model_len is not None:
            _check_int("max_model_len", self.max_model_len, 2, 2**31 - 1)
        _check_int("max_pending_requests", self.max_pending_requests, 1, 2**20)
        if self.scheduling is not None and not isinstance(self.scheduling, SchedulingOptions):
            raise InvalidArgumentError(
                f"scheduling is a {type(self.scheduling).__name__}; pass edgellm.SchedulingOptions(...)"
            )
        self.scheduling_options()  # a bad budget is an error of the options, not of the loaded model

    def scheduling_options(self) -> SchedulingOptions:
        """`scheduling` with `step_time_budget_ms` in it.

        Raises:
            InvalidArgumentError: both name a budget and they differ, or it is out of range.
        """
        scheduling = SchedulingOptions() if self.scheduling is None else self.scheduling
        if self.step_time_budget_ms is None:
            return scheduling
        if scheduling.step_time_budget_ms not in (None, self.step_time_budget_ms):
            raise InvalidArgumentError(
                f"step_time_budget_ms is {self.step_time_budget_ms}, and {scheduling.step_time_budget_ms} in "
                "scheduling; set one of them"
            )
        return dataclasses.replace(scheduling, step_time_budget_ms=self.step_time_budget_ms)


@dataclass(frozen=True, slots=True)
class Parts:
    """What an LLM runs on.  The engine takes the runtime over and closes it."""

    model_name: str
    runtime: LLMRankRuntime
    tokenizer: Any
    engine_config: EngineConfig
    limits: PromptLimits
    memory_budget: MemoryBudget


def assemble(
    options: LoadOptions,
    *,
    on_fetch: Callable[[int, int], None] | None = None,
    on_load: Callable[[int, int, str], None] | None = None,
) -> Parts:
    """Fetch, load and connect everything.

    Raises:
        InvalidArgumentError, FetchError, UnsupportedModelError, WeightFileError: see `LLM`.
    """
    from edgellm.models.loader import load_model
    from edgellm.plugins import load_plugins
    from edgellm.runtime.executor_cpu import CpuExecutor
    from edgellm.runtime.kv_cache import KVCache
    from edgellm.runtime.rank_runtime import LLMRankRuntime
    from edgellm.tokenization.tokenizer import load_tokenizer

    envs.cpu_isa_limit()  # the kernels read the variable themselves and take nonsense for no limit
    plugins = load_plugins()
    path = resolve_model(options.model, on_progress=on_fetch)
    model = load_model(path, dtype=options.dtype, device="cpu", on_progress=on_load)
    tokenizer = load_tokenizer(path if options.tokenizer is None else expand_home("tokenizer", options.tokenizer))
    max_model_len = _choose_max_model_len(options, model)
    budget = _size_pool(options, model, max_model_len)
    kv_cache = KVCache.for_model(
        model.config, num_pages=budget.num_pages, page_size=budget.page_size, dtype=model.dtype
    )
    deployment = DeploymentConfig(
        max_batch_size=options.max_batch_size,
        max_input_length=max_model_len,
        max_kv_capacity=max_model_len,
        page_size=budget.page_size,
        num_pages=budget.num_pages,
    )
    executor = CpuExecutor(model, kv_cache)
    runtime = LLMRankRuntime(
        executor,
        tokenizer,
        deployment,
        plugins=plugins,
        model_fingerprint=model.fingerprint,
        kv_dtype=str(model.dtype).removeprefix("torch."),
    )
    return Parts(
        model_name=str(options.model),
        runtime=runtime,
        tokenizer=tokenizer,
        engine_config=_engine_config(options, max_model_len),
        limits=PromptLimits(
            vocab_size=executor.vocab_size,
            max_model_len=max_model_len,
            pool_tokens=budget.tokens,
            headroom_tokens=runtime.geometry.headroom.base_extra_tokens,
            model_context=model.config.max_positions,
        ),
        memory_budget=budget,
    )


def _choose_max_model_len(options: LoadOptions, model: LoadedModel) -> int:
    context = model.config.max_positions
    if options.max_model_len is None:
        return context
    if options.max_model_len > context:
        raise InvalidArgumentError(
            f"max_model_len is {options.max_model_len}, the model's context is {context}; pass at most that"
        )
    return options.max_model_len


def _size_pool(options: LoadOptions, model: LoadedModel, max_model_len: int) -> MemoryBudget:
    """Pages that `kv_budget` buys; without one, every seat at full length, at most half of free memory."""
    from edgellm.runtime.device import CpuDevice
    from edgellm.runtime.kv_cache import KVCache, parse_kv_budget

    one_page = KVCache.for_model(model.config, num_pages=1, page_size=options.page_size, dtype=model.dtype)
    bought = parse_kv_budget(
        options.kv_budget,
        bytes_per_page=one_page.bytes_per_page,
        page_size=options.page_size,
        free_bytes=CpuDevice().free_memory_bytes(),
        default_tokens=options.max_batch_size * max_model_len,
    )
    return MemoryBudget(
        bytes_per_page=bought.bytes_per_page,
        num_pages=bought.num_pages,
        page_size=options.page_size,
        max_model_len=max_model_len,
    )


def _engine_config(options: LoadOptions, max_model_len: int) -> EngineConfig:
    """Steps of about `CPU_STEP_TOKENS`, of at least a page, of no more than the deployment holds."""
    scheduling = options.scheduling_options()
    most = options.max_batch_size * max_model_len
    prompt_step = min(max(CPU_STEP_TOKENS, options.page_size), most)
    if not scheduling.max_prompt_step_tokens and prompt_step >= options.page_size:
        scheduling = dataclasses.replace(scheduling, max_prompt_step_tokens=prompt_step)
    return EngineConfig(
        step_token_budget=CPU_STEP_TOKENS,
        scheduling=scheduling,
        max_pending_requests=options.max_pending_requests,
        # What may be pending may also be waiting for the end of a long step.
        command_queue_capacity=options.max_pending_requests,
    )


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidArgumentError(f"{name} is {value!r}; it must be an integer from {low} to {high}")
