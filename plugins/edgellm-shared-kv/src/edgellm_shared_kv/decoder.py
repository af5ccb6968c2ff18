"""`SharedKvMtpDecoder`: chains from an assistant that has no state of its own and reads the base model's.

A round starts from the last token, whose state the base has not written yet, and from the base's hidden row in front of
it.  Each step proposes the likeliest token and feeds its output row to the next; all of them see the committed prefix.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from edgellm.cache.types import SpecReuseContract
from edgellm.decoding.adaptive import DraftLengths
from edgellm.decoding.chain import ChainDecoder, KeptRow
from edgellm.errors import BrokenInvariantError, InvalidArgumentError
from edgellm.models.step import HiddenRequest
from edgellm_shared_kv.assistant import SharedKvAssistant
from edgellm_shared_kv.checkpoint import read_assistant

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from edgellm.decoding.base import DecodingSeat
    from edgellm.decoding.options import DecoderContext
    from edgellm.runtime.batch import Executor, RaggedBatch, VerifyingExecutor
    from edgellm_shared_kv.base_prefix import BasePrefix

NUM_DRAFTS = 4


class SharedKvMtpDecoder(ChainDecoder):
    """Keeps one hidden row of each resident, by slot: that of its last accepted token, after the final norm.

    Args:
        num_drafts: most tokens proposed in a round.
        adaptive: propose less where it does not pay.
    """

    name = "shared-kv-mtp"

    def __init__(self, assistant: SharedKvAssistant, num_drafts: int = NUM_DRAFTS, *, adaptive: bool = True) -> None:
        super().__init__(num_drafts, DraftLengths() if adaptive else None)
        self._assistant = assistant
        self._hidden: dict[int, torch.Tensor] = {}

    def spec_reuse_contract(self) -> SpecReuseContract:
        return SpecReuseContract(owns_paged_spec_state=False, future_dependency_tokens=0)

    def attach(self, executor: Executor) -> None:
        executor.request_hidden(HiddenRequest(normed=True))  # type: ignore[attr-defined]

    def seat(self, executor: Executor, seat: DecodingSeat) -> None:
        super().seat(executor, seat)
        self._hidden.pop(seat.slot, None)

    def unseat(self, slots: Sequence[int]) -> None:
        super().unseat(slots)
        for slot in slots:
            self._hidden.pop(slot, None)

    def absorb(self, executor: VerifyingExecutor, row: KeptRow) -> None:
        if row.hidden is None:
            raise BrokenInvariantError(f"decoder {self.name!r} needs the base's hidden rows, and the step gave none")
        self._hidden[row.slot] = row.hidden[-1].clone()  # a view would keep the rows of the whole step

    def propose(
        self, executor: VerifyingExecutor, batch: RaggedBatch, rows: Sequence[int], limits: Sequence[int]
    ) -> list[list[int]]:
        chains: list[list[int]] = [[] for _ in rows]
        # The longest first: who goes on is then always at the front.
        wanted = sorted((number for number, limit in enumerate(limits) if limit), key=lambda number: -limits[number])
        if not wanted:
            return chains
        chosen = np.asarray(rows)[wanted]
        tokens: list[int] = batch.token_ids[batch.query_start[chosen]].tolist()
        hidden = torch.stack([self._seed_row(slot) for slot in batch.state_index[chosen].tolist()])
        prefix = self._prefix(executor, batch, chosen)
        for depth in range(max(limits)):
            count = sum(limits[number] > depth for number in wanted)
            if count < len(tokens):
                tokens, hidden, prefix = tokens[:count], hidden[:count], self._prefix(executor, batch, chosen[:count])
            tokens, hidden = self._assistant.forward(tokens, hidden, prefix)
            for number, token in zip(wanted[:count], tokens, strict=True):
                chains[number].append(token)
        return chains

    def _prefix(self, executor: VerifyingExecutor, batch: RaggedBatch, rows: npt.NDArray[np.int64]) -> BasePrefix:
        return self._assistant.prefix(
            executor.kv_cache,
            slots=batch.state_index[rows],
            lengths=batch.past_len[rows],
            page_rows=batch.page_rows,
        )

    def _seed_row(self, slot: int) -> torch.Tensor:
        try:
            return self._hidden[slot]
        except KeyError:
            raise BrokenInvariantError(f"slot {slot} is to propose, and no token of it ran here") from None


def build(context: DecoderContext) -> SharedKvMtpDecoder:
    """
    Raises:
        InvalidArgumentError: no assistant was given, or the base is not on a CPU.
        UnsupportedModelError, WeightFileError: it is no assistant of this base, or damaged.
    """
    options = context.options
    if options is None or options.draft is None:
        raise InvalidArgumentError(
            "decoder 'shared_kv_mtp' needs an assistant: pass "
            "speculative=SpeculativeOptions(decoder='shared_kv_mtp', draft=<its folder>)"
        )
    if context.device.type != "cpu":
        raise InvalidArgumentError(
            f"decoder 'shared_kv_mtp' runs on the CPU, the model is on {context.device}; pass device='cpu'"
        )
    folder = Path(options.draft).expanduser()
    if not folder.is_dir():
        raise InvalidArgumentError(f"draft is {str(options.draft)!r}, which is no folder; pass that of an assistant")
    assistant = SharedKvAssistant(*read_assistant(folder, context.model))
    return SharedKvMtpDecoder(assistant, options.num_drafts or NUM_DRAFTS, adaptive=options.adaptive)
