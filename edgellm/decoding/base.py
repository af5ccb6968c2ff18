"""`DecodingStrategy`: how one step turns a ragged batch into accepted tokens.

A strategy never decides termination, streaming or publication; it returns tokens and lengths.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from edgellm.cache.types import DecodingKvHeadroom, DecodingTokenStateContract, SpecReuseContract
from edgellm.errors import BrokenInvariantError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt
    import torch

    from edgellm.models.device_ops import DeviceOps
    from edgellm.runtime.batch import Executor, RaggedBatch
    from edgellm.runtime.executor_cuda import ExecutorLimits
    from edgellm.sampling.logprobs import TokenLogprobs
    from edgellm.sampling.sampler import Sampler, SamplingState

    Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DecoderCapabilities:
    """What a decoder can do beyond greedy, single-setting decoding.

    Attributes:
        per_row_sampling: rows of one step may have different sampling parameters.
        ragged_steps: prompt chunks and decode rows may share one step.
        max_sampling_support: largest top_k it verifies exactly; 0 is unbounded.
        trees: it proposes trees where `SpeculativeOptions.top_k` asks for them.
    """

    per_row_sampling: bool = True
    ragged_steps: bool = True
    supports_lossless_sampling: bool = True
    max_sampling_support: int = 0
    trees: bool = False


@dataclass(slots=True)
class StepTokens:
    """What a step produced.

    Attributes:
        token_ids: one list per selected logits row, in the batch's `logits_to_seq` order.
        committed: positions gained per sequence of the batch, (N,).
        logprobs: one list per selected logits row, or None where nobody asked.
        errors: selected logits row to reason, for rows in which no token can be chosen; they end, others go on.
        proposed: draft tokens that were verified, per sequence of the batch, (N,); empty is none.
    """

    token_ids: list[list[int]]
    committed: list[int]
    logprobs: list[list[TokenLogprobs] | None]
    errors: dict[int, str] = field(default_factory=dict)
    proposed: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DecodingSeat:
    """A sequence whose state a decoder may keep something beside.

    Attributes:
        slot: resident slot; `RaggedBatch.state_index` names it in every step.
        request_id: of its request, for logs and scripts.
        prompt: (prompt_length,) int32, the whole prompt; not to be modified.
        length: leading tokens whose state was taken over from the cache, draft state included.
        boundary_hidden: (hidden_width,) the base model's hidden row of token `length - 1`, where checkpoints save it.
    """

    slot: int
    request_id: int
    prompt: Int32Array
    length: int
    boundary_hidden: torch.Tensor | None = None


class DecodingStrategy(ABC):
    """One way of decoding, chosen at start-up and called directly in the loop.

    State of its own is kept by resident slot, never by batch row: rows move, slots do not.
    """

    name: str
    is_speculative: bool = False

    def capabilities(self) -> DecoderCapabilities:
        return DecoderCapabilities()

    def required_kv_headroom(self) -> DecodingKvHeadroom:
        """Most positions one execution may address beyond its materialised endpoint."""
        return DecodingKvHeadroom(base_extra_tokens=1, draft_extra_tokens=0)

    def token_state_contract(self) -> DecodingTokenStateContract:
        return DecodingTokenStateContract.COMMITTED_PLUS_LOOKAHEAD

    def spec_reuse_contract(self) -> SpecReuseContract | None:
        """None for decoders that are not speculative."""
        return None

    def draft_bytes_per_page(self) -> int:
        """Bytes that a page of the draft model's own KV pool takes, all its layers; 0 where it has none."""
        return 0

    def open_draft(self, num_pages: int) -> Any:
        """Allocate the draft model's KV pool; called once, where `draft_bytes_per_page` is not 0.

        Returns:
            The paged store, a `KVCache` or anything with its `copy_pages`; the decoder keeps it too.
        Raises:
            InvalidArgumentError: memory ran out.
        """
        raise BrokenInvariantError(f"decoder {self.name!r} says it has draft pages, and allocates none")

    def device_bytes(self, ops: DeviceOps, device: torch.device, limits: ExecutorLimits) -> int:
        """Bytes that drafts take of a GPU beside weights and pages: state by slot, inputs, graphs, results of passes.

        Asked before anything of it is allocated.

        Args:
            ops: the operators that the deployment will compute with.
        """
        return 0

    def boundary_hidden_width(self) -> int:
        """Elements of the hidden row that a checkpoint of recurrent state saves for the draft; 0 where none is."""
        return 0

    def attach(self, executor: Executor) -> None:  # noqa: B027 - most need nothing
        """The executor is built; ask it here for hidden rows (`request_hidden`).  Called once, before any step."""

    def seat(self, executor: Executor, seat: DecodingSeat) -> None:  # noqa: B027 - most keep nothing
        """A sequence takes a slot; again when it took over more state while its prompt was incomplete."""

    def unseat(self, slots: Sequence[int]) -> None:  # noqa: B027
        """The sequences of these slots are gone."""

    def settle(self, executor: Executor, slots: Sequence[int], kept: Sequence[int]) -> None:  # noqa: B027
        """The session kept fewer tokens of the latest step's run than were accepted: take the state back as well.

        Their sequences end with this step.

        Args:
            kept: tokens kept of each, at least 1.
        """

    def common_state_length(self, slot: int) -> int | None:
        """Leading tokens of a slot whose state exists in every model of the strategy; None where there is one model.

        A draft with pages of its own trails the base by the last accepted span.
        """
        return None

    def boundary_hidden(self, slot: int) -> torch.Tensor | None:
        """(hidden_width,) the base model's hidden row of the last prompt token that ran, where checkpoints save it.

        Behind `complete_drafts`: that of the last token that was kept.
        """
        return None

    def complete_drafts(self, slots: Sequence[int], lengths: Sequence[int]) -> bool:
        """Sequences ended in the latest step: write the draft state that trails their base state, for later prompts.

        Args:
            lengths: leading tokens of each whose base state is kept.
        Returns:
            Whether all of it is written (enqueued), and where checkpoints save it `boundary_hidden` gives the row of
            token `length - 1`.  False: the strategy does not do this; pages are kept as far as `common_state_length`
            says, and no checkpoint is taken where answers end.
        """
        return False

    def new_hidden_row(self) -> torch.Tensor:
        """(1, hidden_width) room for a saved hidden row, on the executor's device.

        Raises:
            BrokenInvariantError: the strategy saves none.
        """
        raise BrokenInvariantError(f"decoder {self.name!r} runs on checkpoints with hidden rows, and saves none")

    @abstractmethod
    def run_step(
        self, executor: Executor, batch: RaggedBatch, sampler: Sampler, rows: Sequence[SamplingState]
    ) -> StepTokens:
        """Forward the batch and choose tokens.

        Args:
            rows: sampling state of each selected logits row, in `logits_to_seq` order; read, never recorded into.
        """
