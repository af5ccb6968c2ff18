"""`ToyStateExecutor`: the toy machine as an executor of a rank runtime, for every flavour of state.

Before each forward everything that nobody holds is poisoned: free pages and snapshot slots, recurrent rows of absent
residents, and the places behind what each row has computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from edgellm.errors import InvalidArgumentError, StepDeviceError
from edgellm.runtime.batch import StateResources, VerifyForward
from edgellm.testing.toy import LOGIT_MASS
from edgellm.testing.toy_machine import Row, RowResult, ToyMachine

if TYPE_CHECKING:
    import numpy.typing as npt

    from edgellm.cache.coordinator import ContextCacheCoordinator
    from edgellm.cache.types import ContextCacheDeploymentProfile
    from edgellm.runtime.batch import RaggedBatch
    from edgellm.runtime.device import Device


class ToyStateExecutor:
    """Attributes:
    machine: state and model.
    num_forwards, tokens_computed: what forwards ran over, verification rows included.
    """

    def __init__(self, machine: ToyMachine, profile: ContextCacheDeploymentProfile) -> None:
        self.machine = machine
        self.profile = profile
        self.num_forwards = 0
        self._coordinator: ContextCacheCoordinator | None = None
        self._failures: list[BaseException] = []
        self._latest: dict[int, RowResult] = {}

    @property
    def device(self) -> Device:
        return self.machine.device

    @property
    def kv_cache(self) -> Any:
        return self.machine.base

    @property
    def vocab_size(self) -> int:
        return self.machine.model.vocab_size

    @property
    def tokens_computed(self) -> int:
        return self.machine.tokens_computed

    def resources(self) -> StateResources:
        machine = self.machine
        return StateResources(
            base_state_kind=self.profile.base_state_kind,
            base_page_table=machine.base_table,
            draft_cache=machine.draft,
            draft_page_table=machine.draft_table,
            snapshot_storage=machine.storage,
        )

    def watch(self, coordinator: ContextCacheCoordinator) -> None:
        """Poison what nobody holds, from now on."""
        self._coordinator = coordinator

    def fail_next(self, error: BaseException | None = None) -> None:
        """Make the next forward raise (StepDeviceError by default) before it writes anything."""
        self._failures.append(error or StepDeviceError("toy executor: injected device failure"))

    def poison_unreferenced(self) -> None:
        if self._coordinator is not None:
            self.machine.poison_unreferenced(self._coordinator.manager.pools, self._coordinator._occupied)

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """(L, vocab_size) float32; see `ToyMachine.forward`."""
        return self.forward_verify(batch).logits

    def forward_verify(self, batch: RaggedBatch) -> VerifyForward:
        """Logits of the selected tokens, and (T, 2) int64 hidden rows of all."""
        if self._failures:
            raise self._failures.pop(0)
        self.poison_unreferenced()
        rows = [_row(batch, sequence) for sequence in range(batch.num_sequences)]
        _check(rows, batch, self.vocab_size)
        results = self.machine.forward(rows)
        self._latest = {row.slot: result for row, result in zip(rows, results, strict=True)}
        self.num_forwards += 1
        logits = torch.full((len(batch.logits_index), self.vocab_size), -LOGIT_MASS, dtype=torch.float32)
        for place, (token, sequence) in enumerate(zip(batch.logits_index, batch.logits_to_seq, strict=True)):
            offset = int(token) - int(batch.query_start[sequence])
            logits[place, results[int(sequence)].next_tokens[offset]] = LOGIT_MASS
        hiddens = np.array([hidden for result in results for hidden in result.hiddens], dtype=np.uint64)
        return VerifyForward(logits, torch.from_numpy(hiddens.view(np.int64)))

    def rewind(self, state_index: Sequence[int], kept: Sequence[int]) -> None:
        if not self.machine.model.has_recurrent:
            return
        for slot, count in zip(state_index, kept, strict=True):
            self.machine.set_recurrent_state(slot, self._latest[slot].recurrents[count - 1])

    def copy_pages(self, source_pages: npt.NDArray[np.int32], target_pages: npt.NDArray[np.int32]) -> None:
        self.machine.base.copy_pages(source_pages, target_pages)


def _row(batch: RaggedBatch, sequence: int) -> Row:
    start, end = int(batch.query_start[sequence]), int(batch.query_start[sequence + 1])
    tokens = tuple(batch.token_ids[start:end].tolist())
    return Row(int(batch.state_index[sequence]), int(batch.past_len[sequence]), tokens)


def _check(rows: Sequence[Row], batch: RaggedBatch, vocab_size: int) -> None:
    """What a batch says twice agrees, and every token is one."""
    positions = [position for row in rows for position in range(row.past, row.past + len(row.tokens))]
    if positions != batch.positions.tolist():
        raise InvalidArgumentError(f"positions {batch.positions.tolist()} do not continue the rows: {positions}")
    if [len(row.tokens) for row in rows] != batch.query_len.tolist():
        raise InvalidArgumentError(f"query lengths {batch.query_len.tolist()} are not those of the tokens")
    tokens = batch.token_ids
    if len(tokens) and not (tokens.min() >= 0 and tokens.max() < vocab_size):
        raise InvalidArgumentError(f"token ids reach from {tokens.min()} to {tokens.max()} of {vocab_size}")
