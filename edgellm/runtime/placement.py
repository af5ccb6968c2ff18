"""`Placement`: everything about a deployment that depends on the device it runs on.

Model loading, the size of the KV pool, the executor and the default step budget; `assembly` connects the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from edgellm.errors import InvalidArgumentError
from edgellm.memory import MemoryBudget

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from edgellm.cache.types import DeploymentConfig
    from edgellm.models.device_ops import DeviceOps
    from edgellm.models.loader import LoadedModel
    from edgellm.runtime.batch import Executor
    from edgellm.runtime.executor_cuda import ExecutorLimits
    from edgellm.runtime.kv_cache import KVCache
    from edgellm.runtime.recurrent_state import RecurrentState
    from edgellm.runtime.snapshot_storage import HybridSnapshotStorage

    ProgressCallback = Callable[[int, int, str], None]

# Prompt tokens of one step: scratch memory grows with it, and arrivals and cancellations wait for a step's end.
CPU_STEP_TOKENS = 256
CUDA_STEP_TOKENS = 2048

KV_DTYPES = ("auto", "fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementOptions:
    """The options that a placement needs; see `LLM`.

    Attributes:
        step_tokens: tokens of the largest step that the scheduling options ask for; 0 is the device's default.
        step_tokens_option: which option asks for that, and for how much; "" where none does.
        measures_steps: somebody learns how long steps take (a step-time budget), so their ends must be seen.
    """

    dtype: str = "auto"
    kv_dtype: str = "auto"
    deterministic: bool = False
    kv_budget: int | float | str | None = None
    page_size: int = 32
    max_batch_size: int = 8
    step_tokens: int = 0
    step_tokens_option: str = ""
    measures_steps: bool = False


@dataclass(frozen=True, slots=True)
class DraftSizes:
    """What a decoder asks for.

    Attributes:
        bytes_per_page: of its own pages; 0 where it has none.
        hidden_width: elements of the hidden row that a checkpoint of a sequence saves; 0 saves none.
        verify_tokens: most tokens of a row that the base verifies in one step; 1 where nothing is proposed.
        trees: what it proposes may branch.
        device_bytes: `(ops, device, limits)` to the bytes that it takes of a GPU beside weights and pages; None is 0.
        write_ahead: see `DecodingKvHeadroom`.
    """

    bytes_per_page: int = 0
    hidden_width: int = 0
    verify_tokens: int = 1
    trees: bool = False
    device_bytes: Callable[[DeviceOps, torch.device, ExecutorLimits], int] | None = None
    write_ahead: int = 0


NO_DRAFT = DraftSizes()


class Placement(Protocol):
    """A device, and how a deployment is put on it."""

    @property
    def step_tokens(self) -> int:
        """Default token budget of a step."""
        ...

    def load_model(self, path: Path, on_progress: ProgressCallback | None) -> LoadedModel:
        """Weights on the device.  Raises: as `edgellm.models.loader.load_model`."""
        ...

    def size_pool(self, model: LoadedModel, max_model_len: int, draft: DraftSizes = NO_DRAFT) -> MemoryBudget:
        """Pages and checkpoints that `kv_budget` buys.

        Raises:
            InvalidArgumentError: they do not fit, or the options do not go with the model.
        """
        ...

    def build_executor(
        self,
        model: LoadedModel,
        budget: MemoryBudget,
        deployment: DeploymentConfig,
        draft: DraftSizes = NO_DRAFT,
        draft_cache: Any = None,
    ) -> Executor:
        """The executor with its KV pool and recurrent state, ready to run.

        Args:
            draft_cache: the draft model's pages, whose tails checkpoints save as well.
        Raises:
            InvalidArgumentError: memory ran out; the message says what to change.
        """
        ...

    def kv_dtype_name(self, model: LoadedModel) -> str:
        """Element type of the KV pages, part of the identity of cached state."""
        ...

    def healthy(self) -> bool:
        """Whether the device can still compute after a failure."""
        ...

    def release_memory(self) -> None:
        """Give back what a closed deployment has held; called when nothing refers to its model, pool and executor."""
        ...


def place(device: str, options: PlacementOptions) -> Placement:
    """The placement on "auto", "cpu", "cuda" or "cuda:N".

    Raises:
        InvalidArgumentError: the device cannot be used, or an option needs another one.
    """
    from edgellm.runtime.device_choice import choose_device

    choice = choose_device(device)
    if choice.device.type == "cuda":
        from edgellm.runtime.placement_cuda import CudaPlacement

        return CudaPlacement(choice.device, options)
    for name, value, default in (
        ("kv_dtype", options.kv_dtype, "auto"),
        ("deterministic", options.deterministic, False),
    ):
        if value != default:
            raise InvalidArgumentError(
                f"{name} is {value!r}, which needs a CUDA device; this deployment computes on the CPU ({choice.reason})"
            )
    return CpuPlacement(options)


class CpuPlacement:
    """The host's own cores and memory."""

    step_tokens = CPU_STEP_TOKENS

    def __init__(self, options: PlacementOptions) -> None:
        self._options = options

    def load_model(self, path: Path, on_progress: ProgressCallback | None) -> LoadedModel:
        from edgellm.models.loader import load_model

        return load_model(path, dtype=self._options.dtype, device="cpu", on_progress=on_progress)

    def size_pool(self, model: LoadedModel, max_model_len: int, draft: DraftSizes = NO_DRAFT) -> MemoryBudget:
        """Without a budget: every seat at full length, at most half of free memory."""
        from edgellm.runtime.device import CpuDevice

        options = self._options
        return divide_memory(
            model,
            options,
            draft,
            kv_dtype=model.dtype,
            budget=options.kv_budget,
            free_bytes=CpuDevice().free_memory_bytes(),
            max_model_len=max_model_len,
        )

    def build_executor(
        self,
        model: LoadedModel,
        budget: MemoryBudget,
        deployment: DeploymentConfig,
        draft: DraftSizes = NO_DRAFT,
        draft_cache: Any = None,
    ) -> Executor:
        from edgellm.runtime.executor_cpu import CpuExecutor
        from edgellm.runtime.kv_cache import KVCache
        from edgellm.runtime.recurrent_state import RecurrentState

        config = model.config
        kv_cache = KVCache.for_model(
            config, num_pages=max(1, budget.num_pages), page_size=budget.page_size, dtype=model.dtype
        )
        if not config.recurrent_pieces:
            return CpuExecutor(model, kv_cache)
        recurrent = RecurrentState(config.recurrent_pieces, deployment.max_batch_size)
        snapshots = open_snapshots(model, recurrent, kv_cache, budget, draft, draft_cache)
        return CpuExecutor(model, kv_cache, recurrent=recurrent, snapshots=snapshots)

    def kv_dtype_name(self, model: LoadedModel) -> str:
        return str(model.dtype).removeprefix("torch.")

    def healthy(self) -> bool:
        return True

    def release_memory(self) -> None:
        """Host memory went back with its tensors."""


def divide_memory(
    model: LoadedModel,
    options: PlacementOptions,
    draft: DraftSizes,
    *,
    kv_dtype: torch.dtype,
    budget: int | float | str | None,
    free_bytes: int,
    max_model_len: int,
    beside: str = "",
) -> MemoryBudget:
    """Pages and checkpoints that a budget buys.

    Args:
        free_bytes: what pages, checkpoints and live recurrent state may take together.
        beside: see `MemoryBudget`.
    Raises:
        InvalidArgumentError: they do not fit.
    """
    from edgellm.runtime.kv_cache import KVCache
    from edgellm.runtime.recurrent_state import state_bytes
    from edgellm.runtime.state_budget import StateSizes, divide

    config = model.config
    sizes = StateSizes(
        base_page=KVCache.page_bytes(config, page_size=options.page_size, dtype=kv_dtype),
        draft_page=draft.bytes_per_page,
        state=state_bytes(config.recurrent_pieces),
        hidden=draft.hidden_width * model.dtype.itemsize,
    )
    pools = divide(
        budget,
        sizes,
        page_size=options.page_size,
        free_bytes=free_bytes,
        default_tokens=options.max_batch_size * (max_model_len + draft.write_ahead),
        max_batch_size=options.max_batch_size,
    )
    return MemoryBudget(
        bytes_per_page=sizes.base_page + sizes.draft_page,
        num_pages=pools.num_pages,
        page_size=options.page_size,
        max_model_len=max_model_len,
        beside=beside,
        draft_bytes_per_page=draft.bytes_per_page,
        snapshot_slots=pools.num_snapshots,
        snapshot_bytes=pools.num_snapshots * sizes.snapshot,
        state_bytes=sizes.state * options.max_batch_size,
        write_ahead=draft.write_ahead,
    )


def open_snapshots(
    model: LoadedModel,
    recurrent: RecurrentState,
    kv_cache: KVCache,
    budget: MemoryBudget,
    draft: DraftSizes,
    draft_cache: Any,
) -> HybridSnapshotStorage:
    """Room for the checkpoints that a budget bought, beside the state that they are taken of."""
    from edgellm.runtime.recurrent_state import snapshot_storage

    return snapshot_storage(
        recurrent,
        kv_cache if model.config.num_kv_layers else None,
        draft_cache,
        num_slots=budget.snapshot_slots,
        page_size=budget.page_size,
        hidden_width=draft.hidden_width,
        hidden_dtype=model.dtype,
    )
