"""`DeviceRounds`: rounds of an assistant where the base computes on a device.

Hidden rows and tokens stay there; a round is a replayed graph where its shape has been seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from edgellm.decoding.draft_memory import attend_to_nothing, graph_bytes, result_bytes
from edgellm.decoding.draft_model import DraftStep, entries_batch
from edgellm.decoding.draft_staging import DraftStaging, ExpectedPass
from edgellm.decoding.hidden_ring import HiddenRing
from edgellm.decoding.unread_chains import UnreadChains
from edgellm.models.config import KVLayer
from edgellm_shared_kv.rounds import no_hidden, nothing_ran

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from edgellm.decoding.chain import KeptRow
    from edgellm.decoding.draft_ops import DraftExecutor
    from edgellm.decoding.unread_chains import UnreadChain
    from edgellm.models.device_ops import DeviceOps
    from edgellm.models.step import KeepHidden
    from edgellm.runtime.executor_cuda import ExecutorLimits
    from edgellm.runtime.kv_cache import KVCache
    from edgellm.runtime.step_inputs import StepShape, StepTensors
    from edgellm_shared_kv.assistant_head import AssistantHead
    from edgellm_shared_kv.assistant_model import AssistantConfig
    from edgellm_shared_kv.rounds import Seeds

    Int32Array = npt.NDArray[np.int32]


class DeviceRounds:
    """See `Rounds`.  The host reads the chains of a round when they were checked.

    Args:
        head: over the executor's operators.
        num_drafts: K, most tokens proposed in a round.
    """

    @torch.inference_mode()
    def __init__(self, head: AssistantHead, executor: DraftExecutor, num_drafts: int) -> None:
        kv_cache, num_slots = executor.kv_cache, executor.table_shape[0]
        self._head = head
        self._device = executor.device
        self._kept: set[int] = set()
        self._staging = DraftStaging(executor, donor_layers(head.config, kv_cache), kv_cache, dtype=head.dtype)
        device = self._device.torch_device
        self._hidden, self._chains = _slot_rows(head, device, num_slots, num_drafts)
        self._ring = HiddenRing(self._hidden, executor)
        longest = partial(self._propose, num_drafts)
        self._staging.warm_up(
            [ExpectedPass(("round", num_drafts), rows, rows, longest) for rows in self._staging.row_buckets]
        )

    def end(self, slots: Iterable[int]) -> None:
        self._kept.difference_update(slots)

    @property
    def keep_hidden(self) -> KeepHidden:
        return self._ring.keep

    def keep(self, rows: Sequence[KeptRow]) -> None:
        """The step kept the hidden rows itself; who has any is noted."""
        if rows[0].step_hidden is None:
            raise no_hidden(rows[0].slot)
        self._kept.update(row.slot for row in rows)

    def keep_each(self, slots: Sequence[int], hidden: torch.Tensor) -> None:
        """The step kept them, and a prompt came before."""

    @torch.inference_mode()
    def chains(self, kv_cache: KVCache, seeds: Seeds, limits: Sequence[int]) -> list[UnreadChain]:
        for slot in seeds.slots.tolist():
            if slot not in self._kept:
                raise nothing_ran(slot)
        # Queries stand behind the keys that they see: as if each were the last of these.
        one = np.ones(len(limits), np.int32)
        batch = entries_batch(seeds.slots, seeds.lengths - one, one, seeds.token_ids, seeds.page_rows)
        batch.positions = seeds.lengths
        shape = self._staging.run(("round", limits[0]), batch, partial(self._propose, limits[0]))
        return UnreadChains(self._device, self._chains_of(limits[0], shape.rows), limits).chains()

    def _propose(self, depth: int, step: StepTensors, shape: StepShape) -> None:
        """May be captured: reads nothing back."""
        prefix = _DevicePrefix(self._head, self._staging.step(step, shape))
        # Keys end with the token in front of the seed, whose hidden row it is.
        tokens, hidden = step.token_ids, self._ring.gathered(step.slots, step.past_len)
        chains = self._chains_of(depth, shape.rows)
        for number in range(depth):
            found, hidden = self._head.forward(tokens, hidden, prefix)
            tokens = found.int()
            chains[number] = tokens

    def _chains_of(self, depth: int, rows: int) -> torch.Tensor:
        return self._chains[: depth * rows].view(depth, rows)


def _slot_rows(
    head: AssistantHead, device: torch.device, num_slots: int, num_drafts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(slots, room, width) hidden rows, see `HiddenRing`; (K * slots,) int32 proposals of a round.

    There is room for the rows of a verified run behind the one in front of it.
    """
    hidden = torch.zeros((num_slots, num_drafts + 2, head.width), dtype=head.dtype, device=device)
    return hidden, torch.zeros(num_drafts * num_slots, dtype=torch.int32, device=device)


def device_bytes(
    head: AssistantHead, ops: DeviceOps, device: torch.device, limits: ExecutorLimits, num_drafts: int
) -> int:
    """What `DeviceRounds` takes of a GPU: state by slot, inputs and graphs of rounds, the results of a step of one.

    Args:
        head: over operators that launch nothing, see `edgellm.decoding.draft_memory`.
    """
    slots, config = limits.num_slots, head.config
    kept = result_bytes(lambda: _slot_rows(head, device, slots, num_drafts))
    kinds = tuple(KVLayer(layer.num_kv_heads, layer.head_dim, layer.window) for layer in config.layers)
    layers = DonorLayers(config.num_heads, config.attention_scale, config.rms_norm_eps, kinds)
    staging = DraftStaging.device_bytes(layers, ops, head.dtype, slots, limits.pages_per_slot)

    def run() -> object:
        numbers = torch.zeros(slots, dtype=torch.int32, device=device)
        hidden = torch.zeros((slots, head.width), dtype=head.dtype, device=device)
        return head.forward(numbers, hidden, _DevicePrefix(head, DraftStep(numbers, attend_to_nothing)))

    return kept + staging + result_bytes(run) + graph_bytes(slots, 1)


class _DevicePrefix:
    """See `Prefix`."""

    def __init__(self, head: AssistantHead, step: DraftStep) -> None:
        self._layers = head.config.layers
        self._angles = head.angles(step.positions)
        self._attend = step.attend

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, query_norm: torch.Tensor | None) -> None:
        self._attend(self._layers[layer].donor, query, self._angles[layer], out, query_norm=query_norm)


@dataclass(frozen=True, slots=True)
class DonorLayers:
    """The base's layers as the assistant attends to them; see `DraftStaging`."""

    num_heads: int
    attention_scale: float
    rms_norm_eps: float
    kv_layers: tuple[KVLayer, ...]


def donor_layers(config: AssistantConfig, kv_cache: KVCache) -> DonorLayers:
    """All layers of the base by number; those that are nobody's donor stand in as the first donor."""
    donors = {layer.donor: KVLayer(layer.num_kv_heads, layer.head_dim, layer.window) for layer in config.layers}
    first = donors[config.layers[0].donor]
    layers = tuple(donors.get(idx, first) for idx in range(kv_cache.num_layers))
    return DonorLayers(config.num_heads, config.attention_scale, config.rms_norm_eps, layers)
