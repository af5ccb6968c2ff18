"""`CudaExecutor`: one forward pass over a ragged batch, K and V in pages, on a GPU.

A step is one upload and a fixed list of launches on torch's current stream; nothing here waits for the device.
Small steps are padded to a bucket and replayed as CUDA graphs.  With the reference operators the same code runs on
the CPU, which is how everything above the kernels is tested.
"""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from edgellm.errors import ContractViolation, EdgeLLMError, StepDeviceError
from edgellm.models.device_attention import AttentionMode, DeviceAttention
from edgellm.models.registry import family_of
from edgellm.runtime._step_packing import count_single_tail
from edgellm.runtime.batch import StateResources, VerifyForward
from edgellm.runtime.bound_steps import BoundSteps, StepKind
from edgellm.runtime.cuda_graphs import EagerRunner, StepGraphs
from edgellm.runtime.device_cuda import device_errors
from edgellm.runtime.recurrent_state import check_recurrent
from edgellm.runtime.run_ahead import AheadStep, context_part, following_step
from edgellm.runtime.shared_prefix import MIN_SHARED_ROWS
from edgellm.runtime.sharing_counts import SharingCounts
from edgellm.runtime.step_buckets import StepBuckets
from edgellm.runtime.step_inputs import StepInputs, StepShape, StepTensors, split_rows
from edgellm.runtime.tree_commit import TreeCommit
from edgellm.runtime.tree_rows import words_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    from edgellm.models.device_ops import DeviceOps
    from edgellm.models.loader import LoadedModel
    from edgellm.models.step import HiddenRequest, KeepHidden
    from edgellm.runtime.batch import RaggedBatch
    from edgellm.runtime.cuda_graphs import StepRunner
    from edgellm.runtime.device import Device
    from edgellm.runtime.kv_cache import KVCache
    from edgellm.runtime.recurrent_state_device import DeviceRecurrentState
    from edgellm.runtime.shared_prefix import SharedPrefixes
    from edgellm.runtime.snapshot_storage import HybridSnapshotStorage


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorLimits:
    """Sizes that memory is reserved for.

    Attributes:
        num_slots, pages_per_slot: shape of the page table; at most `num_slots` sequences run in a step.
        step_tokens: tokens of an ordinary step; a larger one runs too, and takes more memory from then on.
        verify_tokens: most tokens of a row that verifies proposals; 1 where nobody proposes any.
        trees: proposals may branch.  Rows that verify any are captured with masks then.
    """

    num_slots: int
    pages_per_slot: int
    step_tokens: int
    verify_tokens: int = 1
    trees: bool = False

    def largest_step(self) -> StepShape:
        """What scratch memory is sized by: a step's tokens, and a row and its logits for every slot."""
        logits = self.num_slots * self.verify_tokens
        tokens = max(self.step_tokens, logits)
        return StepShape(tokens, self.num_slots, self.num_slots, logits, self.mask_words)

    @property
    def mask_words(self) -> int:
        """Words of a token's tree mask in steps that verify; 0 where no proposal branches."""
        return words_for(self.verify_tokens) if self.trees else 0

    @property
    def checkpoint_rows(self) -> int:
        """Checkpoints of recurrent state that the largest verification leaves."""
        return self.num_slots * self.verify_tokens if self.verify_tokens > 1 else 0


class CudaExecutor:
    """Runs the model over its pages and its recurrent state.  Not thread-safe: one session drives it.

    Args:
        model: weights on the device.
        kv_cache: pages of the model's shape; a model without attention layers takes one that stores nothing.
        device: where it computes; `CpuDevice` with reference operators.
        ops: the operators, see `edgellm.models.device_ops`.
        mode: which attention serves which rows, see `attention_mode`.
        recurrent: state of the model's recurrent layers, where it has any.
        snapshots: storage of the checkpoints of that state.
        graphs: replay small steps as CUDA graphs (on a GPU).
        pad: run small steps as the next larger bucket; without, graphs would hardly ever repeat.
        shares_prefixes: decode rows that lease the pages of a long prefix attend to it together, where that pays.
        waits: a step without logits, whose end nobody would see, ends when the device is done: for whoever measures it.
    Raises (at construction):
        InvalidArgumentError: KV cache or recurrent state are not those of the model.
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
        recurrent: DeviceRecurrentState | None = None,
        snapshots: HybridSnapshotStorage | None = None,
        graphs: bool = True,
        pad: bool = True,
        shares_prefixes: bool = True,
        waits: bool = False,
    ) -> None:
        config = model.config
        kv_cache.check_model(config)
        check_recurrent(config, recurrent)
        self._device = device
        self._kv_cache = kv_cache
        self._recurrent = recurrent
        self._snapshots = snapshots
        self._mode = mode
        self._ops = ops
        self._dtype = model.dtype
        self._waits = waits
        self._config = config
        self._mask_words = limits.mask_words
        self._inputs = StepInputs(
            device=device.torch_device,
            num_slots=limits.num_slots,
            pages_per_slot=limits.pages_per_slot,
            page_size=kv_cache.page_size,
            num_pages=kv_cache.num_pages,
            update_table=ops.update_table,
            has_pages=config.num_kv_layers > 0,
            window=min((layer.window for layer in config.kv_layers if layer.window), default=0),
        )
        attention = DeviceAttention(
            config=config,
            ops=ops,
            kv_cache=kv_cache,
            page_table=self._inputs.table,
            mode=mode,
            shares_prefixes=shares_prefixes and limits.num_slots >= MIN_SHARED_ROWS,
        )
        self._shares_prefixes = attention.shares_prefixes
        self._sharing = SharingCounts()
        attention.reserve(limits.num_slots, limits.pages_per_slot * kv_cache.page_size)
        on_gpu = device.torch_device.type == "cuda"
        self._runner: StepRunner = StepGraphs(device.torch_device) if graphs and on_gpu else EagerRunner()
        self._buckets = step_buckets(limits, mode, has_recurrent=recurrent is not None) if pad else None
        self._steps = BoundSteps(
            family_of(config.architecture).build_device_graph(model, ops),
            self._inputs,
            attention,
            recurrent,
            self._runner,
            dtype=model.dtype,
            device=device.torch_device,
        )
        self._steps.reserve(limits.largest_step())
        self._commit = TreeCommit(kv_cache, self._inputs.table, ops.commit_rows, limits.verify_tokens)
        self._has_run = False
        self._ahead: AheadStep | None = None
        # State that has moved on cannot be dropped; a step that waits has nothing to gain.
        self.runs_ahead = recurrent is None and not waits and self._buckets is not None
        self._is_warm = False

    @property
    def device(self) -> Device:
        return self._device

    @property
    def kv_cache(self) -> KVCache:
        return self._kv_cache

    @property
    def ops(self) -> DeviceOps:
        """What it computes with; a draft model beside it computes with the same."""
        return self._ops

    @property
    def table_shape(self) -> tuple[int, int]:
        """(num_slots, pages_per_slot) of its page table; a draft model's has the same."""
        return self._inputs.table_shape

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    @property
    def runner(self) -> StepRunner:
        """Where launches go: graphs, or straight to the device."""
        return self._runner

    @property
    def sharing(self) -> SharingCounts:
        """What steps saved whose decode rows share prefixes."""
        return replace(self._sharing)

    def resources(self) -> StateResources:
        """What the cache keeps in step with: see `StatefulExecutor`."""
        return StateResources(base_state_kind=self._config.base_state_kind, snapshot_storage=self._snapshots)

    def request_hidden(self, request: HiddenRequest, keep: KeepHidden | None = None) -> None:
        """From now on `forward_verify` returns these hidden rows of every token.

        Args:
            keep: the last part of every step that gives them, run ahead or not; of its graph where it has one.
        Raises:
            StepDeviceError: as `warm_up`, where that was called before.
        """
        with self._on_device(), self._step_errors(0):
            self._steps.request_hidden(request, keep)
        if self._is_warm:
            self.warm_up()

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Enqueue a pass that writes the batch's state; never waits (but see `waits`).

        Returns:
            (L, vocab_size) float32 logits on the device.  The executor's own memory: valid until the next `forward`,
            in stream order.
        Raises:
            ContractViolation: the batch contradicts itself, a token id is out of range, or a page row does not
                cover its sequence.  Nothing was enqueued.
            StepDeviceError: out of memory, a failed launch, or an error of earlier work that the device reports
                now; state of the batch's sequences is unknown.
        """
        self._check(batch)
        ahead, self._ahead = self._ahead, None
        with self._on_device(), self._step_errors(batch.num_tokens):
            taken = None if ahead is None else self._take_from(ahead, batch, hidden=False)
            return self._run(batch).logits if taken is None else taken.logits

    @torch.inference_mode()
    def forward_verify(self, batch: RaggedBatch) -> VerifyForward:
        """`forward`, with the hidden rows that were requested, and a checkpoint after each token of verified rows.

        Verified are the rows of which more than one logits row is selected.  Hidden rows are the executor's memory as
        the logits are: valid until its next launch, `run_ahead` included.

        Raises: as `forward`.
        """
        self._check(batch)
        ahead, self._ahead = self._ahead, None
        verified = _selected_often(batch.logits_to_seq.tolist())
        hidden, taken = self._steps.gives_hidden, None
        with self._on_device(), self._step_errors(batch.num_tokens):
            if ahead is not None and not verified and batch.tree_mask is None:
                taken = self._take_from(ahead, batch, hidden=hidden)
            return self._run(batch, verified, hidden=hidden) if taken is None else taken

    @torch.inference_mode()
    def rewind(self, state_index: Sequence[int], kept: Sequence[int]) -> None:
        """See `VerifyingExecutor`; in stream order, never waits.

        Raises:
            BrokenInvariantError: a slot had no verified row in the latest `forward_verify`, or fewer tokens.
            StepDeviceError: as `forward`.
        """
        recurrent = self._recurrent
        if recurrent is None or not len(state_index):
            return
        recurrent.places(state_index, kept)  # refused before anything else
        with self._on_device(), self._step_errors(0):
            recurrent.stage_rewind(state_index, kept)
            self._runner.run("rewind", recurrent.rewind_staged)

    @torch.inference_mode()
    def commit_rows(self, state_index: Sequence[int], past: Sequence[int], rows: Sequence[Sequence[int]]) -> None:
        """See `TreeExecutor`; in stream order, never waits.

        Raises:
            ContractViolation: slots, lengths and branches contradict themselves, or no forward ran before.
            StepDeviceError: as `forward`.
        """
        if not len(state_index):
            return
        if not self._has_run:
            raise ContractViolation("rows are committed and no forward ran before")
        with self._on_device(), self._step_errors(0):
            if self._commit.reserve(max(map(len, rows), default=0)):
                self._steps.forget()
            self._commit.stage(state_index, past, rows)
            self._runner.run("commit", self._commit.launch)

    @torch.inference_mode()
    def run_ahead(self, batch: RaggedBatch, token_ids: torch.Tensor, *, hidden: bool = False) -> None:
        """Enqueue what follows the latest forward if every sequence goes on; see `edgellm.runtime.run_ahead`.

        Nothing happens where not every row got a token, a sequence has no page for it yet, the batch has no graph, or
        the model keeps recurrent state.

        Args:
            batch: of the latest `forward` or `forward_verify`, and not widened by proposals.
            token_ids: (L,) int32 on the device, what was chosen from its logits.
            hidden: `forward_verify` will ask for it, with the hidden rows that were requested.  Those of the latest
                step are overwritten.
        Raises:
            StepDeviceError: as `forward`.
        """
        following = following_step(batch) if self.runs_ahead else None
        if following is None or not self._inputs.is_sound(following, self.vocab_size):
            return
        exact = self._exact_shape(following)
        shape = None if self._buckets is None else self._buckets.padded(exact)
        if shape is None:
            return
        prefixes = self._find_prefixes(following, exact)
        kind = StepKind(shape, hidden=hidden and self._steps.gives_hidden, shares_prefixes=prefixes is not None)
        with self._on_device(), self._step_errors(following.num_tokens):
            self._steps.reserve(shape)
            bound = self._steps.bind(kind, keep=True)
            if prefixes is None and self._inputs.advances_to(following, shape):
                self._advance(following, shape, bound.step, token_ids)
            else:
                self._inputs.stage(following, shape, prefixes=prefixes)
                bound.step.token_ids[: len(token_ids)].copy_(token_ids)
            self._runner.run(kind, bound.launch)
        rows = None if bound.hidden is None else _without_padding(bound.hidden, exact, shape)
        self._ahead = AheadStep(following.state_index, following.past_len, bound.buffers.logits[: exact.logits], rows)

    def _advance(self, following: RaggedBatch, shape: StepShape, step: StepTensors, token_ids: torch.Tensor) -> None:
        """The device moves the inputs of the latest step on by a token; nothing is sent."""
        rows = following.num_sequences
        self._ops.advance_rows(
            token_ids,
            step.slots[:rows],
            step.token_ids[:rows],
            step.positions[:rows],
            step.past_len[:rows],
            step.lengths[:rows],
        )
        self._inputs.advanced(following, shape)

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
        kinds = self._kinds_at_start()
        with self._on_device(), self._step_errors(0):
            self._ops.prepare(partial(self._run_padding, kinds + self._kinds_of_sharing(), captured=False))
            self._run_padding(kinds, captured=True)
            self._device.stream.synchronize()
        self._is_warm = True
        return len(kinds)

    def copy_pages(self, source_pages: npt.NDArray[np.int32], target_pages: npt.NDArray[np.int32]) -> None:
        """Copy whole pages, all layers, in stream order.

        Raises: as `KVCache.copy_pages`.
        """
        with device_errors("copying pages"), self._on_device():
            self._kv_cache.copy_pages(source_pages, target_pages)

    def _check(self, batch: RaggedBatch) -> None:
        """
        Raises:
            ContractViolation: the batch contradicts itself, or branches where recurrent state cannot.
        """
        self._inputs.check(batch, self.vocab_size)
        if batch.tree_mask is not None and self._recurrent is not None:
            raise ContractViolation("trees branch, and recurrent state does not; propose chains to this model")

    def _run(self, batch: RaggedBatch, verified: Sequence[int] = (), *, hidden: bool = False) -> VerifyForward:
        exact = self._exact_shape(batch, verified)
        padded = None if self._buckets is None else self._buckets.padded(exact)
        starts = self._lay_out(batch, verified)
        shape = self._with_masks(exact if padded is None else padded, batch, verified)
        prefixes = self._find_prefixes(batch, exact)
        kind = StepKind(
            shape, hidden=hidden, keeps_checkpoints=starts is not None, shares_prefixes=prefixes is not None
        )
        self._steps.reserve(kind.shape)
        self._inputs.stage(batch, kind.shape, starts, prefixes)
        self._has_run = True
        bound = self._steps.bind(kind, keep=padded is not None)
        if batch.late_tokens is not None:
            batch.late_tokens.place(batch, bound.step.token_ids, self._device)
        if padded is None:
            bound.launch()
        else:
            self._runner.run(kind, bound.launch)
        if self._waits and not exact.logits:
            self._device.stream.synchronize()
        logits = bound.buffers.logits[: exact.logits]
        return VerifyForward(
            logits, None if bound.hidden is None else _without_padding(bound.hidden, exact, kind.shape)
        )

    def _exact_shape(self, batch: RaggedBatch, verified: Sequence[int] = ()) -> StepShape:
        """Sizes without padding.

        Verified rows and others of one step take the same way.  So do all rows that move recurrent state on beside
        prompt chunks: padding between the two would belong to a row.
        """
        exact = split_rows(batch, decode_apart=self._mode.decode_apart and not verified and batch.tree_mask is None)
        if self._recurrent is not None and exact.context_rows:
            return split_rows(batch, decode_apart=False)
        return exact

    def _with_masks(self, shape: StepShape, batch: RaggedBatch, verified: Sequence[int]) -> StepShape:
        """The shape with room for masks, where a proposal branches or might: few kinds of steps then cover all."""
        words = self._mask_words if verified else 0
        if batch.tree_mask is not None:
            words = max(words, batch.tree_mask.shape[1])
        if not words:
            return shape
        return replace(shape, mask_words=words, has_long_rows=not self._inputs.masked_rows(batch, words).all())

    def _find_prefixes(self, batch: RaggedBatch, exact: StepShape) -> SharedPrefixes | None:
        """Which decode rows attend in groups; counts what is saved."""
        prefixes = self._inputs.shared_prefixes(batch, exact.decode_rows) if self._shares_prefixes else None
        if prefixes is not None:
            self._sharing.count(prefixes)
        return prefixes

    def _lay_out(self, batch: RaggedBatch, verified: Sequence[int]) -> npt.NDArray[np.int32] | None:
        """Where checkpoints go, in a step that leaves any; more room for them where it is needed."""
        if self._recurrent is None:
            return None
        if self._recurrent.reserve(int(batch.query_len[verified].sum()) if verified else 0):
            self._steps.forget()
        starts = self._recurrent.lay_out(batch, verified)
        return starts if verified else None

    def _take_from(self, ahead: AheadStep, batch: RaggedBatch, *, hidden: bool) -> VerifyForward | None:
        """What a batch gives whose decode rows are in `ahead`; context rows run now.  None where a row is not there."""
        if hidden and ahead.hidden is None:
            return None
        if ahead.is_all_of(batch) and self._inputs.has_rows_of(batch, 0):
            return VerifyForward(ahead.logits, ahead.hidden if hidden else None)
        first = batch.num_sequences - count_single_tail(batch.query_len)
        rows = ahead.rows_of(batch, first)
        if rows is None or not len(rows) or not self._inputs.has_rows_of(batch, first):
            return None
        behind = batch.logits_index - int(batch.query_start[first])
        if np.any(np.diff(behind) <= 0):
            return None
        wanted = behind[behind >= 0]
        whole = len(rows) == len(wanted) == len(ahead.slots) and _in_order(rows) and _in_order(wanted)
        if first == 0 and whole:
            return VerifyForward(ahead.logits, ahead.hidden if hidden else None)
        return self._beside_context(batch, first, self._chosen_of(ahead, rows, rows[wanted], hidden=hidden))

    def _chosen_of(
        self, ahead: AheadStep, rows: npt.NDArray[np.int64], selected: npt.NDArray[np.int64], *, hidden: bool
    ) -> VerifyForward:
        """A copy of some rows of `ahead`: what is computed next takes the same memory."""
        index = self._device.upload(selected)
        logits = ahead.logits[index]
        if not hidden or ahead.hidden is None:
            return VerifyForward(logits)
        return VerifyForward(
            logits, ahead.hidden[index if np.array_equal(rows, selected) else self._device.upload(rows)]
        )

    def _beside_context(self, batch: RaggedBatch, first: int, kept: VerifyForward) -> VerifyForward:
        """`kept` behind what the first `first` sequences of the batch give, which run now."""
        if first == 0:
            return kept
        ran = self._run(context_part(batch, first), hidden=kept.hidden is not None)
        logits = torch.cat((ran.logits, kept.logits))
        if ran.hidden is None or kept.hidden is None:
            return VerifyForward(logits)
        return VerifyForward(logits, torch.cat((ran.hidden, kept.hidden)))

    def _kinds_at_start(self) -> list[StepKind]:
        if self._buckets is None:
            return []
        has_state, hidden = self._recurrent is not None, self._steps.gives_hidden
        shapes = [replace(shape, mask_words=self._mask_words) for shape in self._buckets.verified_at_start()]
        verified = [StepKind(shape, hidden, has_state) for shape in shapes]
        return verified + [StepKind(shape, hidden) for shape in self._buckets.at_start()]

    def _kinds_of_sharing(self) -> list[StepKind]:
        """A step whose decode rows share prefixes, for its kernels; its graphs are captured as such steps occur."""
        if self._buckets is None or not self._shares_prefixes:
            return []
        rows = self._buckets.decode[-1]
        return [StepKind(StepShape(0, 0, rows, rows), self._steps.gives_hidden, shares_prefixes=True)]

    def _run_padding(self, kinds: list[StepKind], *, captured: bool) -> None:
        run = self._runner.run if captured else _launch
        for kind in kinds:
            self._steps.reserve(kind.shape)  # all of them first: memory that moves voids what was captured
        for kind in kinds:
            self._inputs.stage_padding(kind.shape)
            run(kind, self._steps.bind(kind, keep=True).launch)
        if self._recurrent is not None and self._recurrent.keeps_checkpoints:
            self._recurrent.stage_rewind((), ())
            run("rewind", self._recurrent.rewind_staged)
        if self._mask_words:
            self._commit.stage((), (), ())
            run("commit", self._commit.launch)

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


def _without_padding(rows: torch.Tensor, exact: StepShape, shape: StepShape) -> torch.Tensor:
    """Rows of tokens of a padded step in the batch's order."""
    context, decode = rows[: exact.context_tokens], rows[shape.context_tokens :][: exact.decode_rows]
    if not exact.decode_rows:
        return context
    return decode if not exact.context_tokens else torch.cat((context, decode))


def _selected_often(sequences: list[int]) -> list[int]:
    """Those that are named more than once."""
    if len(set(sequences)) == len(sequences):
        return []
    return [sequence for sequence, count in Counter(sequences).items() if count > 1]


def _in_order(rows: npt.NDArray[np.int64]) -> bool:
    """Whether these are 0, 1, 2 and so on."""
    return bool(rows.tolist() == list(range(len(rows))))


def _launch(kind: object, launch: Callable[[], None]) -> None:
    launch()


def step_buckets(limits: ExecutorLimits, mode: AttentionMode, *, has_recurrent: bool) -> StepBuckets:
    """The shapes that an executor pads its steps to."""
    return StepBuckets.of(
        limits.num_slots,
        decode_apart=mode.decode_apart,
        mixes_apart=mode.decode_apart and not has_recurrent,
        verify_tokens=limits.verify_tokens,
    )


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
