"""`CudaPlacement`: a deployment on one GPU, from free memory to captured graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from edgellm.cache.types import row_width
from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu.paged_attention_exact import HEAD_DIM_STEP, MAX_HEAD_DIM
from edgellm.kernels.cu.prefill_operands import MAX_GROUP
from edgellm.log import get_logger
from edgellm.models.device_ops import cuda_ops
from edgellm.models.packed_layers import describe_packed
from edgellm.models.registry import family_of
from edgellm.runtime.cuda_memory import measure
from edgellm.runtime.device_cuda import CudaDevice, memory_errors
from edgellm.runtime.executor_cuda import CudaExecutor, ExecutorLimits, attention_mode
from edgellm.runtime.kv_cache import KVCache
from edgellm.runtime.placement import CUDA_STEP_TOKENS, NO_DRAFT, divide_memory, open_snapshots
from edgellm.runtime.recurrent_state_device import DeviceRecurrentState

if TYPE_CHECKING:
    from pathlib import Path

    from edgellm.cache.types import DeploymentConfig
    from edgellm.memory import MemoryBudget
    from edgellm.models.config import ModelConfig
    from edgellm.models.device_step import DeviceFamilyGraph
    from edgellm.models.loader import LoadedModel
    from edgellm.runtime.placement import DraftSizes, PlacementOptions, ProgressCallback

logger = get_logger(__name__)

PAGE_SIZES = (16, 32, 64, 128)
WIDTH_STEP = 8  # elements of 16 bits that kernels read at once
_FP8 = torch.float8_e4m3fn
_POOL_REMEDY = "lower kv_budget, max_batch_size or max_model_len, or end other programs on the GPU"


class CudaPlacement:
    """One GPU."""

    def __init__(self, device: torch.device, options: PlacementOptions) -> None:
        if options.page_size not in PAGE_SIZES:
            raise InvalidArgumentError(
                f"page_size is {options.page_size}; on a CUDA device it is one of {', '.join(map(str, PAGE_SIZES))}"
            )
        self._device = CudaDevice(device)
        self._options = options
        self._ops = cuda_ops(deterministic=options.deterministic)

    @property
    def step_tokens(self) -> int:
        return CUDA_STEP_TOKENS

    def load_model(self, path: Path, on_progress: ProgressCallback | None) -> LoadedModel:
        from edgellm.models.loader import load_model

        device = self._device.torch_device
        return load_model(path, dtype=self._options.dtype, device=device, on_progress=on_progress)

    def size_pool(self, model: LoadedModel, max_model_len: int, draft: DraftSizes = NO_DRAFT) -> MemoryBudget:
        """Without a budget: most of what weights and scratch leave, see `DeviceMemory.default_fraction`."""
        options = self._options
        check_model(model.config, model.dtype, deterministic=options.deterministic)
        limits = self._limits(row_width(max_model_len + draft.write_ahead, options.page_size), draft)
        graph = self._device_graph(model)
        drafts = 0
        if draft.device_bytes is not None:
            drafts = draft.device_bytes(self._ops, self._device.torch_device, limits)
        weights, large = model.weights.num_bytes(), self._large_step_option()
        memory = measure(self._device, graph, model.dtype, weights, limits, large, drafts)
        return divide_memory(
            model,
            options,
            draft,
            kv_dtype=self._kv_dtype(model),
            budget=memory.default_fraction if options.kv_budget is None else options.kv_budget,
            free_bytes=memory.pool_bytes,
            max_model_len=max_model_len,
            beside=memory.describe(describe_packed(model)),
        )

    def build_executor(
        self,
        model: LoadedModel,
        budget: MemoryBudget,
        deployment: DeploymentConfig,
        draft: DraftSizes = NO_DRAFT,
        draft_cache: Any = None,
    ) -> CudaExecutor:
        config, limits = model.config, self._limits(deployment.pages_per_slot, draft)
        needed = budget.total_bytes + budget.state_bytes + budget.snapshot_bytes
        with memory_errors("the KV pool and the steps' memory", needed, self._device, _POOL_REMEDY):
            kv_cache = KVCache.for_model(
                config,
                num_pages=max(1, budget.num_pages),
                page_size=budget.page_size,
                dtype=self._kv_dtype(model),
                device=self._device.torch_device,
            )
            recurrent = snapshots = None
            if config.recurrent_pieces:
                recurrent = self._recurrent_state(config, limits)
                snapshots = open_snapshots(model, recurrent, kv_cache, budget, draft, draft_cache)
            executor = CudaExecutor(
                model,
                kv_cache,
                device=self._device,
                ops=self._ops,
                limits=limits,
                mode=attention_mode(model.dtype, deterministic=self._options.deterministic),
                recurrent=recurrent,
                snapshots=snapshots,
                waits=self._options.measures_steps,
            )
            executor.warm_up()
        return executor

    def kv_dtype_name(self, model: LoadedModel) -> str:
        return str(self._kv_dtype(model)).removeprefix("torch.")

    def healthy(self) -> bool:
        return self._device.healthy()

    def release_memory(self) -> None:
        """Torch keeps what tensors leave for tensors to come; other programs cannot use that."""
        try:
            torch.cuda.empty_cache()
        except RuntimeError as error:  # a device that failed for good: the process has to end anyway
            logger.warning("the GPU's memory was not given back: %s", error)

    def _limits(self, pages_per_slot: int, draft: DraftSizes) -> ExecutorLimits:
        options = self._options
        step_tokens = max(options.step_tokens, self.step_tokens, options.page_size)
        return ExecutorLimits(
            num_slots=options.max_batch_size,
            pages_per_slot=pages_per_slot,
            step_tokens=step_tokens + options.page_size,
            verify_tokens=draft.verify_tokens,
            trees=draft.trees,
        )

    def _large_step_option(self) -> str:
        """The option that asks for steps above the default, "" where none does."""
        options = self._options
        return options.step_tokens_option if options.step_tokens > self.step_tokens else ""

    def _device_graph(self, model: LoadedModel) -> DeviceFamilyGraph:
        return family_of(model.config.architecture).build_device_graph(model, self._ops)

    def _recurrent_state(self, config: ModelConfig, limits: ExecutorLimits) -> DeviceRecurrentState:
        return DeviceRecurrentState(
            config.recurrent_pieces,
            limits.num_slots,
            device=self._device.torch_device,
            checkpoint_rows=limits.checkpoint_rows,
            scatter=self._ops.scatter_state,
        )

    def _kv_dtype(self, model: LoadedModel) -> torch.dtype:
        """
        Raises:
            InvalidArgumentError: fp8 pages beside float32 activations.
        """
        if self._options.kv_dtype == "auto":
            return model.dtype
        if model.dtype == torch.float32:
            raise InvalidArgumentError(
                "kv_dtype is 'fp8' and the model computes in float32; choose dtype='bfloat16' or 'float16', or "
                "kv_dtype='auto'"
            )
        return _FP8


def check_model(config: ModelConfig, dtype: torch.dtype, *, deterministic: bool = False) -> None:
    """Refuse what no kernel serves.

    Raises:
        InvalidArgumentError: names the heads or the width, and what works.
    """
    for layer in dict.fromkeys(config.kv_layers):
        if layer.head_dim % HEAD_DIM_STEP or layer.head_dim > MAX_HEAD_DIM:
            raise InvalidArgumentError(
                f"heads of the model have {layer.head_dim} dimensions; the CUDA kernels serve multiples of "
                f"{HEAD_DIM_STEP} up to {MAX_HEAD_DIM}; use device='cpu'"
            )
        group = config.num_heads // layer.num_kv_heads
        if group > MAX_GROUP:
            raise InvalidArgumentError(
                f"{group} query heads share a KV head; the CUDA kernels serve up to {MAX_GROUP}: use device='cpu'"
            )
    if dtype == torch.float32:
        return
    _check_widths("16-bit experts", config.expert_widths, "dtype='float32' or device='cpu'")
    if deterministic:
        _check_widths("16-bit linear layers of deterministic=True", config.linear_widths, "deterministic=False")


def _check_widths(what: str, widths: tuple[tuple[str, int], ...], remedy: str) -> None:
    """
    Raises:
        InvalidArgumentError: rows that these kernels read are not whole pieces of 16 bytes.
    """
    for name, width in widths:
        if width % WIDTH_STEP:
            raise InvalidArgumentError(
                f"{name} of the model is {width}; on a CUDA device {what} take multiples of {WIDTH_STEP}: use {remedy}"
            )
