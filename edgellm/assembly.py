"""From options to a running runtime: weights, tokenizer, KV pool, executor, context cache, plugins."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgellm import envs
from edgellm.argument_check import check_flag
from edgellm.cache.deployment import SPEC_REUSE_CONTRACTS, check_support
from edgellm.cache.types import DeploymentConfig
from edgellm.decoder_choice import check_decoder, decoder_kind
from edgellm.decoding.options import DecoderContext, SpeculativeOptions, speculative_options
from edgellm.engine.config import EngineConfig, SchedulingOptions
from edgellm.errors import InvalidArgumentError, UnsupportedModelError
from edgellm.fetch import expand_home, resolve_model
from edgellm.memory import MemoryBudget, count, pool_remedy, with_write_ahead
from edgellm.prompts import PromptLimits
from edgellm.runtime.placement import KV_DTYPES, DraftSizes, PlacementOptions
from edgellm.shipped import models_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from edgellm.decoding.base import DecodingStrategy
    from edgellm.models.loader import LoadedModel
    from edgellm.plugins import Plugins
    from edgellm.runtime.batch import Executor
    from edgellm.runtime.placement import Placement
    from edgellm.runtime.rank_runtime import LLMRankRuntime

DEVICE_PATTERN = re.compile(r"auto|cpu|cuda(:(0|[1-9][0-9]*))?")
PAGE_SIZES = (1, 512)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The options of `ModelHost` (`LLM`, `Engine`, `AsyncEngine`), checked for range; see there."""

    model: str | os.PathLike[str]
    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    deterministic: bool = False
    kv_budget: int | float | str | None = None
    page_size: int = 32
    max_batch_size: int = 8
    max_model_len: int | None = None
    tokenizer: str | os.PathLike[str] | None = None
    step_time_budget_ms: float | None = None
    scheduling: SchedulingOptions | None = None
    max_pending_requests: int = 256
    speculative: SpeculativeOptions | str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.device, str) or not DEVICE_PATTERN.fullmatch(self.device):
            raise InvalidArgumentError(
                f"device is {self.device!r}; it must be 'auto', 'cpu', 'cuda' or 'cuda:N' with a device's number"
            )
        if self.kv_dtype not in KV_DTYPES:
            raise InvalidArgumentError(f"kv_dtype is {self.kv_dtype!r}; supported: {', '.join(map(repr, KV_DTYPES))}")
        check_flag("deterministic", self.deterministic)
        _check_int("page_size", self.page_size, *PAGE_SIZES)
        _check_int("max_batch_size", self.max_batch_size, 1, 1024)
        if self.max_model_len is not None:
            _check_int("max_model_len", self.max_model_len, 2, 2**31 - 1)
        _check_int("max_pending_requests", self.max_pending_requests, 1, 2**20)
        if self.scheduling is not None and not isinstance(self.scheduling, SchedulingOptions):
            raise InvalidArgumentError(
                f"scheduling is a {type(self.scheduling).__name__}; pass edgellm.SchedulingOptions(...)"
            )
        speculative_options(self.speculative)
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

    def placement_options(self) -> PlacementOptions:
        """What the device's part of the deployment needs to know."""
        scheduling = self.scheduling_options()
        step_tokens, option = max(
            (scheduling.max_num_tokens, "scheduling.max_num_tokens"),
            (scheduling.max_prompt_step_tokens, "scheduling.max_prompt_step_tokens"),
        )
        return PlacementOptions(
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            deterministic=self.deterministic,
            kv_budget=self.kv_budget,
            page_size=self.page_size,
            max_batch_size=self.max_batch_size,
            step_tokens=step_tokens,
            step_tokens_option=f"{option} (now {step_tokens})" if step_tokens else "",
            measures_steps=scheduling.step_time_budget_ms is not None,
        )


@dataclass(frozen=True, slots=True)
class Parts:
    """What an LLM runs on.  The engine takes the runtime over and closes it.

    Attributes:
        device_healthy: asked before a lost session is replaced; None takes the device for healthy.
        release_memory: called once all of this was closed and let go; None where nobody keeps memory beyond that.
    """

    model_name: str
    runtime: LLMRankRuntime
    tokenizer: Any
    engine_config: EngineConfig
    limits: PromptLimits
    memory_budget: MemoryBudget
    device_healthy: Callable[[], bool] | None = None
    release_memory: Callable[[], None] | None = None


def assemble(
    options: LoadOptions,
    *,
    on_fetch: Callable[[int, int], None] | None = None,
    on_load: Callable[[int, int, str], None] | None = None,
) -> Parts:
    """Fetch, load and connect everything.

    Raises:
        InvalidArgumentError, FetchError, UnsupportedModelError, WeightFileError, PluginError: see `LLM`.
    """
    from edgellm.plugins import load_plugins
    from edgellm.runtime.placement import place
    from edgellm.runtime.torch_state import plain_torch
    from edgellm.tokenization.tokenizer import load_tokenizer

    envs.cpu_isa_limit()  # the kernels read the variable themselves and take nonsense for no limit
    with plain_torch():
        placement = place(options.device, options.placement_options())
        plugins = load_plugins()
        path = resolve_model(options.model, on_progress=on_fetch, shipped=models_of(plugins.shipped))
        check_decoder(path, speculative_options(options.speculative), plugins)
        model = placement.load_model(path, on_load)
        tokenizer = load_tokenizer(path if options.tokenizer is None else expand_home("tokenizer", options.tokenizer))
        return connect(options, placement, model, tokenizer, plugins)


def connect(
    options: LoadOptions, placement: Placement, model: LoadedModel, tokenizer: Any, plugins: Plugins | None = None
) -> Parts:
    """A running runtime from a loaded model.

    Args:
        placement: where `model` is.
        tokenizer: `edgellm.tokenization.tokenizer.Tokenizer` or anything with its methods.
        plugins: what was loaded; None loads it.
    Raises:
        InvalidArgumentError: the pool does not fit, or the options do not go with the model.
    """
    from edgellm.plugins import load_plugins
    from edgellm.runtime.rank_runtime import LLMRankRuntime

    plugins = load_plugins() if plugins is None else plugins
    max_model_len = _choose_max_model_len(options, model)
    kind, decoder = _build_decoder(options, model, plugins, max_model_len)
    draft = _draft_sizes(options, decoder)
    budget = placement.size_pool(model, max_model_len, draft)
    _check_pool(budget)
    deployment = DeploymentConfig(
        max_batch_size=options.max_batch_size,
        max_input_length=max_model_len,
        max_kv_capacity=max_model_len + draft.write_ahead,
        page_size=budget.page_size,
        num_pages=budget.num_pages,
        num_draft_pages=budget.num_pages if draft.bytes_per_page else 0,
    )
    draft_cache = decoder.open_draft(budget.num_pages) if draft.bytes_per_page else None
    executor = placement.build_executor(model, budget, deployment, draft, draft_cache)
    _check_takes_trees(options, executor)
    runtime = LLMRankRuntime(
        executor,
        tokenizer,
        deployment,
        plugins=plugins,
        model_fingerprint=model.fingerprint,
        kv_dtype=placement.kv_dtype_name(model),
        decoder_kind=kind,
        decoder=decoder,
        draft_cache=draft_cache,
    )
    return Parts(
        model_name=str(options.model),
        runtime=runtime,
        tokenizer=tokenizer,
        engine_config=_engine_config(options, max_model_len, placement.step_tokens),
        limits=PromptLimits(
            vocab_size=executor.vocab_size,
            max_model_len=max_model_len,
            pool_tokens=budget.tokens or options.max_batch_size * deployment.max_kv_capacity,
            headroom_tokens=draft.write_ahead + 1,
            model_context=model.config.max_positions,
        ),
        memory_budget=budget,
        device_healthy=placement.healthy,
        release_memory=placement.release_memory,
    )


def _build_decoder(
    options: LoadOptions, model: LoadedModel, plugins: Plugins, max_model_len: int
) -> tuple[str, DecodingStrategy]:
    """The decoder's kind, and the decoder with its draft's weights; memory for its pages comes later.

    Raises:
        UnsupportedModelError: the decoder does not go with the model's kind of state.
        PluginError: no installed decoder is of that kind, or its plugin is broken.
    """
    from edgellm.plugin_guard import build_decoder

    speculative = speculative_options(options.speculative)
    kind = decoder_kind(speculative)
    if kind in SPEC_REUSE_CONTRACTS:
        check_support(model.config.base_state_kind, kind)
    context = DecoderContext(
        options=speculative,
        model=model,
        device=model.weights.embedding.device,
        page_size=options.page_size,
        max_batch_size=options.max_batch_size,
        max_model_len=max_model_len,
        shipped=tuple(plugins.shipped),
    )
    decoder = build_decoder(plugins.choose_decoder(kind), context)
    if speculative is not None and speculative.top_k > 1 and not decoder.capabilities().trees:
        raise InvalidArgumentError(f"top_k is {speculative.top_k}, and decoder {kind!r} proposes chains; pass top_k=1")
    return kind, decoder


def _draft_sizes(options: LoadOptions, decoder: DecodingStrategy) -> DraftSizes:
    headroom = decoder.required_kv_headroom()
    return DraftSizes(
        bytes_per_page=decoder.draft_bytes_per_page(),
        hidden_width=decoder.boundary_hidden_width(),
        verify_tokens=headroom.base_extra_tokens if decoder.is_speculative else 1,
        trees=_wants_trees(options),
        device_bytes=decoder.device_bytes,
        write_ahead=headroom.write_ahead,
    )


def _check_pool(budget: MemoryBudget) -> None:
    """
    Raises:
        InvalidArgumentError: no prompt would ever be taken.
    """
    ahead = budget.write_ahead
    if 0 < budget.tokens < 2 + ahead:
        raise InvalidArgumentError(
            f"the KV pool holds {count(budget.tokens, 'token')}, and "
            f"{with_write_ahead('a prompt and an answer of 1 token each', ahead)} need {2 + ahead}; "
            f"{pool_remedy(ahead)}"
        )


def _check_takes_trees(options: LoadOptions, executor: Executor) -> None:
    """
    Raises:
        UnsupportedModelError: the decoder is to propose trees, and the executor verifies chains alone.
    """
    speculative = speculative_options(options.speculative)
    if speculative is not None and speculative.top_k > 1 and not hasattr(executor, "commit_rows"):
        raise UnsupportedModelError(
            f"top_k is {speculative.top_k}, and {type(executor).__name__} verifies chains only; pass top_k=1"
        )


def _wants_trees(options: LoadOptions) -> bool:
    speculative = speculative_options(options.speculative)
    return speculative is not None and speculative.top_k > 1


def _choose_max_model_len(options: LoadOptions, model: LoadedModel) -> int:
    context = model.config.max_positions
    if options.max_model_len is None:
        return context
    if options.max_model_len > context:
        raise InvalidArgumentError(
            f"max_model_len is {options.max_model_len}, the model's context is {context}; pass at most that"
        )
    return options.max_model_len


def _engine_config(options: LoadOptions, max_model_len: int, step_tokens: int) -> EngineConfig:
    """Steps of about `step_tokens`, of at least a page, of no more than the deployment holds."""
    scheduling = options.scheduling_options()
    most = options.max_batch_size * max_model_len
    prompt_step = min(max(step_tokens, options.page_size), most)
    if not scheduling.max_prompt_step_tokens and prompt_step >= options.page_size:
        scheduling = dataclasses.replace(scheduling, max_prompt_step_tokens=prompt_step)
    return EngineConfig(
        step_token_budget=step_tokens,
        scheduling=scheduling,
        max_pending_requests=options.max_pending_requests,
        # What may be pending may also be waiting for the end of a long step.
        command_queue_capacity=options.max_pending_requests,
    )


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidArgumentError(f"{name} is {value!r}; it must be an integer from {low} to {high}")
