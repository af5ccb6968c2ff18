"""The CUDA executor on the CPU, its kernels replaced by their references."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgellm import Engine
from edgellm.assembly import LoadOptions, connect
from edgellm.models.device_attention import AttentionMode
from edgellm.models.device_ops import reference_ops
from edgellm.runtime.device import CpuDevice
from edgellm.runtime.executor_cuda import CudaExecutor, ExecutorLimits
from edgellm.runtime.kv_cache import KVCache
from edgellm.runtime.placement import NO_DRAFT, CpuPlacement, DraftSizes, open_snapshots
from edgellm.runtime.recurrent_state_device import DeviceRecurrentState
from edgellm.tokenization.tokenizer import load_tokenizer


class ReferencePlacement(CpuPlacement):
    """The CPU with the CUDA executor on it; steps of at most 32 prompt tokens, so that prompts run in chunks.

    Attributes:
        mode: which attention serves which rows; float32 models take EXACT on a GPU.
    """

    step_tokens = 32
    mode = AttentionMode.EXACT

    def build_executor(
        self, model: Any, budget: Any, deployment: Any, draft: DraftSizes = NO_DRAFT, draft_cache: Any = None
    ) -> Any:
        config, ops, device = model.config, reference_ops(), CpuDevice()
        kv_cache = KVCache.for_model(config, num_pages=max(1, budget.num_pages), page_size=budget.page_size)
        kv_cache.fill_poison()
        limits = ExecutorLimits(
            num_slots=deployment.max_batch_size,
            pages_per_slot=deployment.pages_per_slot,
            step_tokens=40,
            verify_tokens=draft.verify_tokens,
            trees=draft.trees,
        )
        recurrent = snapshots = None
        if config.recurrent_pieces:
            recurrent = DeviceRecurrentState(
                config.recurrent_pieces,
                limits.num_slots,
                device=device.torch_device,
                checkpoint_rows=limits.checkpoint_rows,
                scatter=ops.scatter_state,
            )
            snapshots = open_snapshots(model, recurrent, kv_cache, budget, draft, draft_cache)
        return CudaExecutor(
            model,
            kv_cache,
            device=device,
            ops=ops,
            limits=limits,
            mode=self.mode,
            recurrent=recurrent,
            snapshots=snapshots,
        )


def make_engine(folder: Path, placement_class: type[CpuPlacement] = ReferencePlacement, **options: Any) -> Engine:
    """An engine over a placement of that class, float32; the caller shuts it down."""
    chosen = LoadOptions(folder, **({"device": "cpu", "dtype": "float32", "page_size": 8} | options))
    placement = placement_class(chosen.placement_options())
    model = placement.load_model(folder, None)
    return Engine.from_parts(connect(chosen, placement, model, load_tokenizer(folder)))
