"""`SharedKvMtpDecoder`: chains from an assistant that has no state of its own and reads the base model's.

A round starts from the last token, whose state the base has not written yet, and from the base's hidden row in front of
it.  Each step proposes the likeliest token and feeds its output row to the next; all of them see the committed prefix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edgellm.cache.types import SpecReuseContract
from edgellm.decoding.adaptive import DraftLengths
from edgellm.decoding.chain import ChainDecoder, KeptRow
from edgellm.decoding.draft_ops import device_executor
from edgellm.decoding.options import SpeculativeOptions
from edgellm.models.step import HiddenRequest
from edgellm.shipped import draft_folder
from edgellm_shared_kv.assistant import SharedKvAssistant
from edgellm_shared_kv.checkpoint import read_assistant
from edgellm_shared_kv.rounds import HostRounds, Rounds, Seeds, no_hidden

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from edgellm.decoding.base import DecodingSeat
    from edgellm.decoding.options import DecoderContext
    from edgellm.models.device_ops import DeviceOps
    from edgellm.runtime.batch import Executor, RaggedBatch, VerifyingExecutor
    from edgellm.runtime.executor_cuda import ExecutorLimits

NUM_DRAFTS = 4


class SharedKvMtpDecoder(ChainDecoder):
    """
    Args:
        num_drafts: most tokens proposed in a round.
        adaptive: propose less where it does not pay.
    """

    name = "shared-kv-mtp"
    absorbs_plain_steps = True

    def __init__(self, assistant: SharedKvAssistant, num_drafts: int = NUM_DRAFTS, *, adaptive: bool = True) -> None:
        super().__init__(num_drafts, DraftLengths() if adaptive else None)
        self._assistant = assistant
        self._rounds: Rounds = HostRounds(assistant)

    def spec_reuse_contract(self) -> SpecReuseContract:
        return SpecReuseContract(owns_paged_spec_state=False, future_dependency_tokens=0)

    def device_bytes(self, ops: DeviceOps, device: torch.device, limits: ExecutorLimits) -> int:
        from edgellm.decoding.draft_memory import launching_nothing
        from edgellm_shared_kv.device_rounds import device_bytes

        head = self._assistant.on_device(launching_nothing(ops))
        return device_bytes(head, ops, device, limits, self.num_drafts)

    def attach(self, executor: Executor) -> None:
        request, on_device = HiddenRequest(normed=True), device_executor(executor)
        if on_device is None:
            executor.request_hidden(request)  # type: ignore[attr-defined]
            return
        from edgellm_shared_kv.device_rounds import DeviceRounds

        rounds = DeviceRounds(self._assistant.on_device(on_device.ops), on_device, self.num_drafts)
        executor.request_hidden(request, rounds.keep_hidden)  # type: ignore[attr-defined]
        self._rounds = rounds

    def seat(self, executor: Executor, seat: DecodingSeat) -> None:
        super().seat(executor, seat)
        self._rounds.end([seat.slot])

    def unseat(self, slots: Sequence[int]) -> None:
        super().unseat(slots)
        self._rounds.end(slots)

    def absorb_step(self, executor: VerifyingExecutor, rows: Sequence[KeptRow]) -> None:
        self._rounds.keep(rows)

    def hold_plain(self, slots: Sequence[int], hidden: torch.Tensor | None) -> None:
        if hidden is None:
            raise no_hidden(slots[0])
        self._rounds.keep_each(slots, hidden)

    def absorb(self, executor: VerifyingExecutor, row: KeptRow) -> None:
        self._rounds.keep([row])

    def propose(
        self, executor: VerifyingExecutor, batch: RaggedBatch, rows: Sequence[int], limits: Sequence[int]
    ) -> Sequence[Sequence[int]]:
        chains: list[Sequence[int]] = [[] for _ in rows]
        # The longest first: who goes on is then always at the front.
        wanted = sorted((number for number, limit in enumerate(limits) if limit), key=lambda number: -limits[number])
        if not wanted:
            return chains
        chosen = np.asarray(rows)[wanted]
        seeds = Seeds(
            slots=batch.state_index[chosen],
            lengths=batch.past_len[chosen],
            token_ids=batch.token_ids[batch.query_start[chosen]],
            page_rows=batch.page_rows,
        )
        found = self._rounds.chains(executor.kv_cache, seeds, [limits[number] for number in wanted])
        for number, chain in zip(wanted, found, strict=True):
            chains[number] = chain
        return chains


def build(context: DecoderContext) -> SharedKvMtpDecoder:
    """
    Raises:
        InvalidArgumentError: no assistant was given, and none is brought for this base.
        UnsupportedModelError, WeightFileError: it is no assistant of this base, or damaged.
    """
    options = context.options or SpeculativeOptions(decoder="shared_kv_mtp")
    assistant = SharedKvAssistant(
        *read_assistant(draft_folder(context.choice, "shared_kv_mtp", "an assistant"), context.model)
    )
    return SharedKvMtpDecoder(assistant, options.num_drafts or NUM_DRAFTS, adaptive=options.adaptive)
