"""Prompt-lookup decoding: no draft model, proposals are what followed the same words earlier in the text.

It pays where answers quote: summaries, extraction, code edits, retrieval.  A sequence whose proposals are not kept is
left alone by `DraftLengths`.  (Saxena, "Prompt Lookup Decoding", 2023; Yang et al., "Inference with Reference", 2023.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.cache.types import SpecReuseContract
from edgellm.decoding.adaptive import DraftLengths
from edgellm.decoding.chain import ChainDecoder, KeptRow
from edgellm.hookspecs import hookimpl
from edgellm_lookup.ngram_index import NgramIndex

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgellm.decoding.base import DecodingSeat
    from edgellm.decoding.options import DecoderChoice, DecoderContext
    from edgellm.plugins import DecoderRegistrar
    from edgellm.runtime.batch import Executor, RaggedBatch, VerifyingExecutor

EDGELLM_API = ((1, 3), (1, 3))

NUM_DRAFTS = 7  # with the token before them 8 rows, which linear layers on a CPU still run as one pass over the weights


class PromptLookupDecoder(ChainDecoder):
    """Keeps an index of every resident's own tokens, by slot; nothing is shared between requests.

    Args:
        num_drafts: most tokens proposed in a round.
        adaptive: propose less where it does not pay.
    """

    name = "prompt-lookup"
    absorbs_plain_steps = True

    def __init__(self, num_drafts: int = NUM_DRAFTS, *, adaptive: bool = True) -> None:
        super().__init__(num_drafts, DraftLengths() if adaptive else None)
        self._texts: dict[int, NgramIndex] = {}
        self._requests: dict[int, int] = {}

    def spec_reuse_contract(self) -> SpecReuseContract:
        return SpecReuseContract(owns_paged_spec_state=False, future_dependency_tokens=0)

    def seat(self, executor: Executor, seat: DecodingSeat) -> None:
        super().seat(executor, seat)
        if self._requests.get(seat.slot) == seat.request_id:
            return  # the same prompt, of which more was found in the cache
        self._requests[seat.slot] = seat.request_id
        text = self._texts[seat.slot] = NgramIndex()
        text.extend(seat.prompt.tolist())

    def unseat(self, slots: Sequence[int]) -> None:
        super().unseat(slots)
        for slot in slots:
            self._texts.pop(slot, None)
            self._requests.pop(slot, None)

    def propose(
        self, executor: VerifyingExecutor, batch: RaggedBatch, rows: Sequence[int], limits: Sequence[int]
    ) -> list[list[int]]:
        slots = batch.state_index[rows].tolist()
        return [self._texts[slot].propose(limit) if limit else [] for slot, limit in zip(slots, limits, strict=True)]

    def note_plain(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        for slot, token_id in zip(slots, token_ids, strict=True):
            if token_id >= 0:
                self._texts[slot].extend([token_id])

    def absorb(self, executor: VerifyingExecutor, row: KeptRow) -> None:
        self._texts[row.slot].extend(row.token_ids)


def check_fits(choice: DecoderChoice) -> None:
    """
    Raises:
        InvalidArgumentError: a draft was given, or trees are asked for.
    """
    choice.require_no_draft("prompt lookup needs none")
    choice.require_chains()


def build(context: DecoderContext) -> PromptLookupDecoder:
    """
    Raises:
        InvalidArgumentError: a draft was given.
    """
    options = context.options
    if options is None:
        return PromptLookupDecoder()
    check_fits(context.choice)
    return PromptLookupDecoder(options.num_drafts or NUM_DRAFTS, adaptive=options.adaptive)


@hookimpl
def edgellm_register_decoders(register: DecoderRegistrar) -> None:
    register("prompt-lookup", build, "prompt_lookup", fits=check_fits)
