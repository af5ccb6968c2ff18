"""`DecodingStrategy`: how one step turns a ragged batch into accepted tokens.

A strategy never decides termination, streaming or publication; it returns tokens and lengths.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edgellm.cache.types import DecodingKvHeadroom, DecodingTokenStateContract, SpecReuseContract

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgellm.runtime.batch import Executor, RaggedBatch
    from edgellm.sampling.logprobs import TokenLogprobs
    from edgellm.sampling.sampler import Sampler, SamplingState


@dataclass(frozen=True, slots=True)
class DecoderCapabilities:
    """What a decoder can do beyond greedy, single-setting decoding.

    Attributes:
        per_row_sampling: rows of one step may have different sampling parameters.
        ragged_steps: prompt chunks and decode rows may share one step.
        max_sampling_support: largest top_k it verifies exactly; 0 is unbounded.
    """

    per_row_sampling: bool = True
    ragged_steps: bool = True
    supports_lossless_sampling: bool = True
    max_sampling_support: int = 0


@dataclass(slots=True)
class StepTokens:
    """What a step produced.

    Attributes:
        token_ids: one list per selected logits row, in the batch's `logits_to_seq` order.
        committed: positions gained per sequence of the batch, (N,).
        logprobs: one list per selected logits row, or None where nobody asked.
        errors: selected logits row to reason, for rows in which no token can be chosen; they end, others go on.
    """

    token_ids: list[list[int]]
    committed: list[int]
    logprobs: list[list[TokenLogprobs] | None]
    errors: dict[int, str] = field(default_factory=dict)


class DecodingStrategy(ABC):
    """One way of decoding, chosen at start-up and called directly in the loop."""

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

    @abstractmethod
    def run_step(
        self, executor: Executor, batch: RaggedBatch, sampler: Sampler, rows: Sequence[SamplingState]
    ) -> StepTokens:
        """Forward the batch and choose tokens.

        Args:
            rows: sampling state of each selected logits row, in `logits_to_seq` order.
        """
