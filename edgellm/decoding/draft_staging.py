"""`DraftStaging`: inputs of draft passes on a device, padded to buckets, and the graphs of what runs over them."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

import torch

from edgellm.decoding.draft_model import DraftStep
from edgellm.errors import (
    BrokenInvariantError,
    ContractViolation,
    EdgeLLMError,
    InvalidArgumentError,
    StepDeviceError,
)
from edgellm.kernels.cu.paged_attention_exact import HEAD_DIM_STEP, MAX_HEAD_DIM
from edgellm.kernels.cu.prefill_operands import MAX_GROUP
from edgellm.models.device_attention import AttentionMode, DeviceAttention
from edgellm.runtime.cuda_graphs import EagerRunner, StepGraphs
from edgellm.runtime.executor_cuda import attention_mode, full_precision
from edgellm.runtime.step_buckets import StepBuckets
from edgellm.runtime.step_inputs import StepInputs, StepShape

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from edgellm.decoding.draft_ops import DraftExecutor
    from edgellm.models.config import KVLayer, ModelConfig
    from edgellm.models.device_ops import DeviceOps
    from edgellm.runtime.batch import RaggedBatch
    from edgellm.runtime.cuda_graphs import StepRunner
    from edgellm.runtime.kv_cache import KVCache
    from edgellm.runtime.step_inputs import StepTensors

    Launch = Callable[[StepTensors, StepShape], None]

_STEP_TOKENS = 1 << 14  # inputs of larger passes move, and graphs with them


@dataclass(frozen=True, slots=True)
class ExpectedPass:
    """A pass worth capturing before the first request: `tokens` of `rows` sequences; see `DraftStaging.run`."""

    name: Hashable
    tokens: int
    rows: int
    launch: Launch


class AttendingLayers(Protocol):
    """What attention needs to know of the layers of a pass; a `ModelConfig` says it of a model's."""

    @property
    def num_heads(self) -> int: ...

    @property
    def attention_scale(self) -> float: ...

    @property
    def rms_norm_eps(self) -> float: ...

    @property
    def kv_layers(self) -> tuple[KVLayer, ...]: ...


def _largest(num_slots: int) -> StepShape:
    """The pass that there is room for from the start."""
    return StepShape(_STEP_TOKENS, num_slots, num_slots, _STEP_TOKENS)


def slot_rows(slots: torch.Tensor, padding: int) -> torch.Tensor:
    """(N,) int64 rows of memory by slot, `padding` for rows without one."""
    return torch.where(slots < 0, padding, slots).long()


def check_layers(layers: AttendingLayers) -> None:
    """Refuse heads that no attention kernel of a GPU serves.

    Raises:
        InvalidArgumentError: names the heads and what works.
    """
    for layer in dict.fromkeys(layers.kv_layers):
        if layer.head_dim % HEAD_DIM_STEP or layer.head_dim > MAX_HEAD_DIM:
            raise InvalidArgumentError(
                f"heads of the draft model have {layer.head_dim} dimensions; the CUDA kernels serve multiples of "
                f"{HEAD_DIM_STEP} up to {MAX_HEAD_DIM}; use device='cpu'"
            )
        group = layers.num_heads // layer.num_kv_heads
        if group > MAX_GROUP:
            raise InvalidArgumentError(
                f"{group} query heads of the draft model share a KV head; the CUDA kernels serve up to {MAX_GROUP}: "
                "use device='cpu'"
            )


class DraftStaging:
    """Holds the device's copy of a page table, and what attention over its pages needs.

    Args:
        layers: of the passes.
        kv_cache: their pages.
        dtype: of rows.
    Raises (at construction):
        InvalidArgumentError: see `check_layers`.
    """

    def __init__(
        self,
        executor: DraftExecutor,
        layers: AttendingLayers,
        kv_cache: KVCache,
        *,
        dtype: torch.dtype,
    ) -> None:
        check_layers(layers)
        device, (num_slots, pages_per_slot) = executor.device.torch_device, executor.table_shape
        self._executor = executor
        mode = attention_mode(dtype, deterministic=False)
        self._dtype = dtype
        self._decode_apart = mode is AttentionMode.SPLIT
        self._inputs = StepInputs(
            device=device,
            num_slots=num_slots,
            pages_per_slot=pages_per_slot,
            page_size=kv_cache.page_size,
            num_pages=kv_cache.num_pages,
            update_table=executor.ops.update_table,
        )
        self._attention = DeviceAttention(
            config=cast("ModelConfig", layers),
            ops=executor.ops,
            kv_cache=kv_cache,
            page_table=self._inputs.table,
            mode=mode,
        )
        self._attention.reserve(num_slots, pages_per_slot * kv_cache.page_size)
        self._inputs.reserve(_largest(num_slots))
        self._buckets = StepBuckets.of(num_slots, decode_apart=self._decode_apart)
        self._runner: StepRunner = StepGraphs(device) if device.type == "cuda" else EagerRunner()

    @staticmethod
    def device_bytes(
        layers: AttendingLayers, ops: DeviceOps, dtype: torch.dtype, num_slots: int, pages_per_slot: int
    ) -> int:
        """Device memory that one takes: page table, inputs, and what attention needs."""
        mode, shape = attention_mode(dtype, deterministic=False), _largest(num_slots)
        attention = DeviceAttention.bytes_for(cast("ModelConfig", layers), ops, mode, num_slots, 0)
        return StepInputs.device_bytes(shape, num_slots, pages_per_slot) + attention

    def run(self, name: Hashable, batch: RaggedBatch, launch: Launch, *, captured: bool = True) -> StepShape:
        """Send the inputs of a pass and launch it, padded and as a graph where there is a bucket for it.

        Args:
            name: with the shape of the step it decides which launches these are.
            captured: False launches the step as it is.
        Returns:
            The shape that it ran as.
        Raises:
            StepDeviceError: out of memory or a failed launch.
        """
        exact = self._exact(batch.num_tokens, batch.num_sequences)
        padded = self._buckets.padded(exact) if captured else None
        shape = exact if padded is None else padded
        with self._guarded():
            if self._inputs.reserve(shape):
                self._runner.clear()
            self._inputs.stage(batch, shape)
            if padded is None:
                self._launch(launch, shape)
            else:
                self._runner.run((name, shape), partial(self._launch, launch, shape))
        return shape

    def _launch(self, launch: Launch, shape: StepShape) -> None:
        """Not called where a captured pass is replayed."""
        launch(self._inputs.views(shape), shape)

    def warm_up(self, passes: Sequence[ExpectedPass]) -> None:
        """Compile the kernels of passes and capture their graphs; what they write is that of padding.

        Raises: as `run`.
        """
        with self._guarded():
            self._executor.ops.prepare(partial(self._run_padding, passes, captured=False))
            self._run_padding(passes, captured=True)
            self._executor.device.stream.synchronize()

    def _run_padding(self, passes: Sequence[ExpectedPass], *, captured: bool) -> None:
        done: set[tuple[Hashable, StepShape]] = set()
        for one in passes:
            shape = self._buckets.padded(self._exact(one.tokens, one.rows))
            if shape is None or (one.name, shape) in done:
                continue
            done.add((one.name, shape))
            self._inputs.stage_padding(shape)
            bound = partial(one.launch, self._inputs.views(shape), shape)
            if captured:
                self._runner.run((one.name, shape), bound)
            else:
                bound()

    @property
    def row_buckets(self) -> tuple[int, ...]:
        """Numbers of sequences that passes of a row each are padded to."""
        return self._buckets.decode

    def step(self, inputs: StepTensors, shape: StepShape) -> DraftStep:
        """What rows of a pass remember."""
        return DraftStep(inputs.positions, self._attention.bind(inputs, shape))

    def _exact(self, tokens: int, rows: int) -> StepShape:
        if self._decode_apart and tokens == rows:
            return StepShape(0, 0, rows, rows)
        return StepShape(tokens, rows, 0, rows)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        exact = self._dtype == torch.float32 and isinstance(self._runner, StepGraphs)
        try:
            with full_precision() if exact else nullcontext():
                yield
        except (ContractViolation, BrokenInvariantError, StepDeviceError):
            self._inputs.forget()
            raise
        except (RuntimeError, MemoryError, EdgeLLMError) as error:
            self._inputs.forget()
            raise StepDeviceError(
                f"a pass of the draft model failed: {error}; close the session, and lower kv_budget or max_batch_size "
                "if memory ran out"
            ) from error
