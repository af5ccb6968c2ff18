"""`CudaExecutor`: one forward pass over a ragged batch, K and V in pages, on a GPU.

A step is one upload and a fixed list of launches on torch's current stream; nothing here waits for the device.
Small steps are padded to a bucket and replayed as CUDA graphs.  With the reference operators the same code runs on
the CPU, which is how everything above the kernels is tested.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from edgellm.errors import ContractViolation, EdgeLLMError, InvalidArgumentError, StepDeviceError
from edgellm.models.device_attention import AttentionMode, DeviceAttention
from edgellm.models.device_graph import DeviceGraph, GraphScratch
from edgellm.runtime._step_packing import count_single_tail
from edgellm.runtime.cuda_graphs import EagerRunner, StepGraphs
from edgellm.runtime.run_ahead import AheadStep, context_part, following_step
from edgellm.runtime.step_buckets import StepBuckets
from edgellm.runtime.step_inputs import StepInputs, StepShape, split_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    from edgellm.models.device_graph import StepBuffers
    from edgellm.models.device_ops import DeviceOps
    from edgellm.models.loader import LoadedModel
    from edgellm.runtime.batch import RaggedBatch
    from edgellm.runtime.cuda_graphs import StepRunner
    from edgellm.runtime.device import Device
    from edgellm.runtime.kv_cache import KVCache


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorLimits:
    """Sizes that memory is reserved for.

    Attributes:
        num_slots, pages_per_slot: shape of the page table; at most `num_slots` sequences run in a step.
        step_tokens: tokens of an ordinary step; a larger one runs too, and takes more memory from then on.
    """

    num_slots: int
    pages_per_slot: int
    step_tokens: int

    def largest_step(self) -> StepShape:
        """What scratch memory is sized by: a step's tokens, and a row and its logits for every slot."""
        return StepShape(self.step_tokens, self.num_slots, self.num_slots, self.num_slots)


class CudaExecutor:
    """Runs the model over its pages.  Not thread-safe: one session drives it.

    Args:
        model: weights on the device.
        device: where it computes; `CpuDevice` with reference operators.
        ops: the operators, see `edgellm.models.device_ops`.
        mode: which attention serves which rows, see `attention_mode`.
        graphs: replay small steps as CUDA graphs (on a GPU).
        pad: run small steps as the next larger bucket; without, graphs would hardly ever repeat.
        waits: a step without logits, whose end nobody would see, ends when the device is done: for whoever measures it.
    Raises (at construction):
        InvalidArgumentError: the KV cache has another shape than the model.
    """

    def __init__(
        self,
        model: LoadedModel,
        kv_cache: KVCache,
        *,
        device: Device,
        ops: DeviceOps,
        limits: ExecutorLimits,
        mode: AttentionMode,
        graphs: bool = True,
        pad: bool = True,
        waits: bool = False,
    ) -> None:
        config = model.config
        shape = (kv_cache.num_layers, kv_cache.num_kv_heads, kv_cache.head_dim)
        if shape != (config.num_layers, config.num_kv_heads, config.head_dim):
            raise InvalidArgumentError(
                f"the KV cache has {shape} (layers, kv heads, head_dim), the model "
                f"{(config.num_layers, config.num_kv_heads, config.head_dim)}; build it with KVCache.for_model"
            )
        self._device = device
        self._kv_cache = kv_cache
        self._mode = mode
        self._ops = ops
        self._dtype = model.dtype
        self._waits = waits
        self._graph = DeviceGraph(model, ops)
        self._scratch = GraphScratch(config, model.dtype, device.torch_device)
        self._inputs = StepInputs(
            device=device.torch_device,
            num_slots=limits.num_slots,
            pages_per_slot=limits.pages_per_slot,
            page_size=kv_cache.page_size,
            num_pages=kv_cache.num_pages,
            update_table=ops.update_table,
        )
        self._attention = DeviceAttention(
            config=config,
            ops=ops,
            kv_cache=kv_cache,
            page_table=self._inputs.table,
            head_norms=self._graph.head_norms,
            mode=mode,
        )
        on_gpu = device.torch_device.type == "cuda"
        self._runner: StepRunner = StepGraphs(device.torch_device) if graphs and on_gpu else EagerRunner()
        self._buckets = StepBuckets.of(limits.num_slots, decode_apart=mode.decode_apart) if pad else None
        self._bound: dict[StepShape, _BoundStep] = {}
        self._ahead: AheadStep | None = None
        self._attention.reserve(limits.num_slots, limits.pages_per_slot * kv_cache.page_size)
        self._reserve(limits.largest_step())

    @property
    def device(self) -> Device:
        return self._device

    @property
    def kv_cache(self) -> KVCache:
        return self._kv_cache

    @property
    def vocab_size(self) -> int:
        return self._graph.config.vocab_size

    @property
    def runner(self) -> StepRunner:
        """Where launches go: graphs, or straight to the device."""
        return self._runner

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Enqueue a pass that writes the batch's K and V into their pages; never waits (but see `waits`).

        Returns:
            (L, vocab_size) float32 logits on the device.  The executor's own memory: valid until the next `forward`,
            in stream order.
        Raises:
            ContractViolation: the batch contradicts itself, a token id is out of range, or a page row does not
                cover its sequence.  Nothing was enqueued.
            StepDeviceError: out of memory, a failed launch, or an error of earlier work that the device reports
                now; state of the batch's sequences is unknown.
        """
        self._inputs.check(batch, self.vocab_size)
        ahead, self._ahead = self._ahead, None
        with self._on_device(), self._step_errors(batch.num_tokens):
            logits = None if ahead is None else self._take_from(ahead, batch)
            return self._run(batch) if logits is None else logits

    @torch.inference_mode()
    def run_ahead(self, batch: RaggedBatch, token_ids: torch.Tensor) -> None:
        """Enqueue what follows the latest `forward` if every sequence goes on; see `edgellm.runtime.run_ahead`.

        Nothing happens where not every row got a token, a sequence has no page for it yet, or the batch has no graph.

        Args:
            batch: of the latest `forward`.
            token_ids: (L,) int32 on the device, what was chosen from its logits.
        Raises:
            StepDeviceError: as `forward`.
        """
        following = None if self._waits else following_step(batch)
        if following is None or not self._inputs.is_sound(following, self.vocab_size):
            return
        exact = split_rows(following, decode_apart=self._mode.decode_apart)
        shape = None if self._buckets is None else self._buckets.padded(exact)
        if shape is None:
            return
        with self._on_device(), self._step_errors(following.num_tokens):
            self._reserve(shape)
            self._inputs.stage(following, shape)
            bound = self._bind(shape, keep=True)
            bound.token_ids[: len(token_ids)].copy_(token_ids)
            self._runner.run(shape, bound.launch)
        self._ahead = AheadStep(following.state_index, following.past_len, bound.buffers.logits[: exact.logits])

    def ran_ahead_with(self, token_ids: Sequence[int]) -> None:
        """What the host read of the tokens that the latest `run_ahead` was given; without it nothing is used."""
        if self._ahead is not None:
            self._ahead.token_ids = np.array(token_ids, np.int32)

    @torch.inference_mode()
    def warm_up(self) -> int:
        """Compile the kernels and capture the graphs of the steps that are to be expected, see `StepBuckets.at_start`.

        Returns:
            Steps that were run; none of them writes state.
        """
        shapes = [] if self._buckets is None else self._buckets.at_start()
        with self._on_device(), self._step_errors(0):
            self._ops.prepare(partial(self._run_padding, shapes, captured=False))
            self._run_padding(shapes, captured=True)
            self._device.stream.synchronize()
        return len(shapes)

    def copy_pages(self, source_pages: npt.NDArray[np.int32], target_pages: npt.NDArray[np.int32]) -> None:
        """Copy whole pages, all layers, in stream order."""
        with self._on_device():
            self._kv_cache.copy_pages(source_pages, target_pages)

    def _run(self, batch: RaggedBatch) -> torch.Tensor:
        exact = split_rows(batch, decode_apart=self._mode.decode_apart)
        padded = None if self._buckets is None else self._buckets.padded(exact)
        shape = exact if padded is None else padded
        self._reserve(shape)
        self._inputs.stage(batch, shape)
        bound = self._bind(shape, keep=padded is not None)
        if padded is None:
            bound.launch()
        else:
            self._runner.run(shape, bound.launch)
        if self._waits and not exact.logits:
            self._device.stream.synchronize()
        return bound.buffers.logits[: exact.logits]

    def _take_from(self, ahead: AheadStep, batch: RaggedBatch) -> torch.Tensor | None:
        """Logits of a batch whose decode rows are in `ahead`; context rows run now.  None where a row is not there."""
        first = batch.num_sequences - count_single_tail(batch.query_len)
        rows = ahead.rows_of(batch, first)
        if rows is None or not len(rows) or not self._inputs.has_rows_of(batch, first):
            return None
        behind = batch.logits_index - int(batch.query_start[first])
        if np.any(np.diff(behind) <= 0):
            return None
        wanted = rows[behind[behind >= 0]]
        whole = len(wanted) == len(ahead.slots) and np.array_equal(wanted, np.arange(len(wanted)))
        if first == 0 and whole:
            return ahead.logits
        # A copy: the context rows are computed into the same memory.
        kept = ahead.logits.clone() if whole else ahead.logits[self._device.upload(wanted)]
        return kept if first == 0 else torch.cat((self._run(context_part(batch, first)), kept))

    def _run_padding(self, shapes: list[StepShape], *, captured: bool) -> None:
        for shape in shapes:
            self._reserve(shape)
            self._inputs.stage_padding(shape)
            bound = self._bind(shape, keep=True)
            if captured:
                self._runner.run(shape, bound.launch)
            else:
                bound.launch()

    def _bind(self, shape: StepShape, *, keep: bool) -> _BoundStep:
        """A shape with its memory; `keep` it for the next step of that shape."""
        bound = self._bound.get(shape)
        if bound is None:
            step = self._inputs.views(shape)
            buffers = self._scratch.buffers(tokens=shape.tokens, logits=shape.logits)
            launch = partial(self._graph.forward, step, buffers, self._attention.bind(step, shape))
            bound = _BoundStep(step.token_ids, buffers, launch)
            if keep:
                self._bound[shape] = bound
        return bound

    def _reserve(self, shape: StepShape) -> None:
        """Make room; where memory moved, everything that holds addresses is forgotten."""
        moved = self._inputs.reserve(shape)
        moved |= self._scratch.reserve(tokens=shape.tokens, logits=shape.logits)
        if moved:
            self._bound.clear()
            self._runner.clear()

    def _on_device(self) -> AbstractContextManager[None]:
        """Make our device the calling thread's current one, and float32 products float32's.

        The device stays current: what comes after a step (sampling, page copies) belongs on it too.
        """
        device = self._device.torch_device
        if device.type != "cuda":
            return nullcontext()
        if torch.cuda.current_device() != device.index:
            torch.cuda.set_device(device)
        return full_precision() if self._dtype == torch.float32 else nullcontext()

    @contextmanager
    def _step_errors(self, num_tokens: int) -> Iterator[None]:
        try:
            yield
        except ContractViolation:
            raise
        except (RuntimeError, MemoryError, EdgeLLMError) as error:
            self._inputs.forget()
            if isinstance(error, StepDeviceError):
                raise
            raise StepDeviceError(
                f"the forward pass of {num_tokens} tokens failed: {error}; close the session, and lower the step "
                "token budget or kv_budget if memory ran out"
            ) from error


@dataclass(slots=True)
class _BoundStep:
    """A shape with the memory it runs in."""

    token_ids: torch.Tensor
    buffers: StepBuffers
    launch: Callable[[], None]


def attention_mode(dtype: torch.dtype, *, deterministic: bool) -> AttentionMode:
    """float32 always takes the exact kernels, whose sums do not depend on other rows either."""
    if dtype == torch.float32:
        return AttentionMode.EXACT
    return AttentionMode.DETERMINISTIC if deterministic else AttentionMode.SPLIT


@contextmanager
def full_precision() -> Iterator[None]:
    """float32 products with float32's precision, whatever the process allows elsewhere (TF32 keeps 10 bits).

    The switch is torch's and global: another thread that multiplies meanwhile gets full precision too.
    """
    matmul = torch.backends.cuda.matmul
    name, exact = ("fp32_precision", "ieee") if hasattr(matmul, "fp32_precision") else ("allow_tf32", False)
    before = getattr(matmul, name)
    if before == exact:
        yield
        return
    setattr(matmul, name, exact)
    try:
        yield
    finally:
        setattr(matmul, name, before)
