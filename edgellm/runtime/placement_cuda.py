"""`CudaPlacement`: a deployment on one GPU, from free memory to captured graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from edgellm.errors import InvalidArgumentError, UnsupportedModelError
from edgellm.memory import MemoryBudget
from edgellm.models.registry import FAMILIES
from edgellm.runtime.cuda_memory import measure
from edgellm.runtime.device_cuda import CudaDevice, memory_errors
from edgellm.runtime.executor_cuda import CudaExecutor, ExecutorLimits, attention_mode
from edgellm.runtime.kv_cache import KVCache, parse_kv_budget
from edgellm.runtime.placement import CUDA_STEP_TOKENS, NO_DRAFT

if TYPE_CHECKING:
    from pathlib import Path

    from edgellm.cache.types import DeploymentConfig
    from edgellm.models.config import ModelConfig
    from edgellm.models.loader import LoadedModel
    from edgellm.runtime.placement import DraftSizes, PlacementOptions, ProgressCallback

PAGE_SIZES = (16, 32, 64, 128)
TENSOR_CORE_HEADS = (64, 128, 256)
_EXACT_HEAD_MULTIPLE = 8
_EXACT_HEAD_MOST = 256
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

    @property
    def step_tokens(self) -> int:
        return CUDA_STEP_TOKENS

    def load_model(self, path: Path, on_progress: ProgressCallback | None) -> LoadedModel:
        from edgellm.models.loader import load_model

        device = self._device.torch_device
        return load_model(path, dtype=self._options.dtype, device=device, on_progress=on_progress)

    def size_pool(self, model: LoadedModel, max_model_len: int, draft: DraftSizes = NO_DRAFT) -> MemoryBudget:
        """Without a budget: most of what weights and scratch leave, see `DeviceMemory.default_fraction`."""
        _check_attention_only(model.config, draft)
        options = self._options
        kv_dtype = self._kv_dtype(model)
        check_model(model.config, model.dtype)
        limits = self._limits(-(-max_model_len // options.page_size))
        memory = measure(self._device, model.config, model.dtype, model.weights.num_bytes(), limits)
        one_page = KVCache.for_model(
            model.config,
            num_pages=1,
            page_size=options.page_size,
            dtype=kv_dtype,
            device=self._device.torch_device,
        )
        bought = parse_kv_budget(
            memory.default_fraction if options.kv_budget is None else options.kv_budget,
            bytes_per_page=one_page.bytes_per_page,
            page_size=options.page_size,
            free_bytes=memory.pool_bytes,
            default_tokens=options.max_batch_size * max_model_len,
        )
        return MemoryBudget(
            bytes_per_page=bought.bytes_per_page,
            num_pages=bought.num_pages,
            page_size=options.page_size,
            max_model_len=max_model_len,
            beside=memory.describe(),
        )

    def build_executor(
        self,
        model: LoadedModel,
        budget: MemoryBudget,
        deployment: DeploymentConfig,
        draft: DraftSizes = NO_DRAFT,
        draft_cache: Any = None,
    ) -> CudaExecutor:
        from edgellm.models.device_ops import cuda_ops

        mode = attention_mode(model.dtype, deterministic=self._options.deterministic)
        with memory_errors("the KV pool and the steps' memory", budget.total_bytes, self._device, _POOL_REMEDY):
            kv_cache = KVCache.for_model(
                model.config,
                num_pages=budget.num_pages,
                page_size=budget.page_size,
                dtype=self._kv_dtype(model),
                device=self._device.torch_device,
            )
            executor = CudaExecutor(
                model,
                kv_cache,
                device=self._device,
                ops=cuda_ops(deterministic=self._options.deterministic),
                limits=self._limits(deployment.pages_per_slot),
                mode=mode,
                waits=self._options.measures_steps,
            )
            executor.warm_up()
        return executor

    def kv_dtype_name(self, model: LoadedModel) -> str:
        return str(self._kv_dtype(model)).removeprefix("torch.")

    def healthy(self) -> bool:
        return self._device.healthy()

    def _limits(self, pages_per_slot: int) -> ExecutorLimits:
        options = self._options
        step_tokens = max(options.step_tokens, self.step_tokens, options.page_size)
        return ExecutorLimits(
            num_slots=options.max_batch_size, pages_per_slot=pages_per_slot, step_tokens=step_tokens + options.page_size
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


def _check_attention_only(config: ModelConfig, draft: DraftSizes) -> None:
    """
    Raises:
        UnsupportedModelError: the model keeps recurrent state, or a draft of its own is asked for.
    """
    if FAMILIES[config.architecture] != "dense":
        raise UnsupportedModelError(
            f"{config.architecture.value} models run on the CPU only for now; pass device='cpu'"
        )
    if draft.bytes_per_page:
        raise UnsupportedModelError(
            "draft models with pages of their own run on the CPU only for now; pass device='cpu'"
        )


def check_model(config: ModelConfig, dtype: torch.dtype) -> None:
    """Refuse what no attention kernel serves.

    Raises:
        InvalidArgumentError: names the head size and what works.
    """
    head_dim, group = config.head_dim, config.group_size
    if dtype == torch.float32:
        good = head_dim % _EXACT_HEAD_MULTIPLE == 0 and head_dim <= _EXACT_HEAD_MOST
        served = f"multiples of {_EXACT_HEAD_MULTIPLE} up to {_EXACT_HEAD_MOST} in float32"
    else:
        good = head_dim in TENSOR_CORE_HEADS
        served = f"{', '.join(map(str, TENSOR_CORE_HEADS))} in 16-bit types (more with dtype='float32')"
    if not good:
        raise InvalidArgumentError(
            f"the model's heads have {head_dim} dimensions; the CUDA kernels serve {served}; use device='cpu'"
        )
    if group > 16:
        raise InvalidArgumentError(
            f"{group} query heads share a KV head; the CUDA kernels serve up to 16: use device='cpu'"
        )
