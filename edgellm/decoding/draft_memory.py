"""What drafts take of a GPU beside weights and pages, counted from sizes before any of it is there.

Results of passes are counted by a run over tensors that have sizes and no memory, with operators that launch nothing.
"""

from __future__ import annotations

import weakref
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from edgellm.decoding.draft_model import DraftStep
from edgellm.runtime.cuda_graphs import MAX_GRAPHS
from edgellm.runtime.cuda_memory import GRAPH_BYTES
from edgellm.runtime.step_buckets import TOKEN_BUCKETS, bucket_of, decode_buckets

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from edgellm.decoding.draft_model import DraftHead
    from edgellm.decoding.tree_passes import RankingHead
    from edgellm.models.device_ops import DeviceOps
    from edgellm.runtime.executor_cuda import ExecutorLimits

_ALIGNMENT = 512  # torch's allocator gives whole pieces of so many bytes


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the memory of tensors that operations make, as long as anything holds them.

    Attributes:
        now, peak: bytes at this moment, and at most so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor)
        return made

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def launching_nothing(ops: DeviceOps) -> DeviceOps:
    """The same table with operators that do nothing; how much workspace they want is still said."""
    silent: dict[str, Any] = {field.name: _nothing for field in fields(ops) if "workspace" not in field.name}
    return replace(ops, **silent)


def result_bytes(run: Callable[[], object]) -> int:
    """Most bytes that results of `run` take at the same time; nothing is allocated.

    Args:
        run: makes its tensors itself, borrows weights, and reads nothing back.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    live = LiveBytes()
    with torch.inference_mode(), FakeTensorMode(allow_non_fake_inputs=True), live:
        run()
    return live.peak


def pass_bytes(head: DraftHead, device: torch.device, *, tokens: int, rows: int, projected: bool = False) -> int:
    """Most bytes of results in a pass of `tokens` entries, `rows` proposals of which are wanted.

    Args:
        head: over operators that launch nothing.
    """

    def run() -> object:
        numbers = torch.zeros(tokens, dtype=torch.int32, device=device)
        width = head.width if projected else head.hidden_width
        hidden = torch.zeros((tokens, width), dtype=head.dtype, device=device)
        ends = None if projected else torch.zeros(rows, dtype=torch.int64, device=device)
        return head.forward(numbers, hidden, DraftStep(numbers, attend_to_nothing), ends, projected=projected)

    return result_bytes(run)


def paged_draft_bytes(
    head: DraftHead, ops: DeviceOps, device: torch.device, limits: ExecutorLimits, num_drafts: int
) -> int:
    """What `DevicePasses` take: rows that wait, inputs of passes, graphs, and the largest passes' results.

    Args:
        head: over operators that launch nothing.
        num_drafts: K, most tokens proposed in a round.
    """
    from edgellm.decoding.device_drafts import DevicePasses, new_slot_rows
    from edgellm.decoding.draft_staging import DraftStaging

    slots = limits.num_slots
    kept = result_bytes(lambda: new_slot_rows(head, device, slots, num_drafts))
    staging = DraftStaging.device_bytes(head.config, ops, head.dtype, slots, limits.pages_per_slot)
    # Entries of answers run from a graph, whose memory stays; those of prompt chunks come and go.
    round_tokens = padded_tokens(slots * max(num_drafts + 1, DevicePasses.deferred))
    captured = pass_bytes(head, device, tokens=round_tokens, rows=slots)
    chunks = pass_bytes(head, device, tokens=limits.step_tokens, rows=slots)
    # For every number of rows a chain, and entries of 1 to K + 1 accepted tokens a row.
    return kept + staging + captured + chunks + graph_bytes(slots, num_drafts + 2)


def tree_bytes(head: RankingHead, device: torch.device, num_slots: int, top_k: int, depth: int) -> int:
    """What trees take beside that: tables by slot, and the results of a captured level.

    Args:
        head: over operators that launch nothing.
    """
    from edgellm.decoding.device_trees import LevelSizes

    sizes = LevelSizes.of(top_k, head.num_tokens, depth)
    tables = 4 * (2 * (num_slots + 1) * sizes.each + num_slots * sizes.words(depth))
    rows = num_slots * max(1, sizes.places(depth))  # those of a level, behind those of the levels before

    def run() -> object:
        numbers = torch.zeros(rows, dtype=torch.int32, device=device)
        hidden = torch.zeros((rows, head.width), dtype=head.dtype, device=device)
        step = DraftStep(numbers, attend_to_nothing)
        return head.rank(numbers, hidden, step, None, projected=True, top_k=sizes.each)

    return tables + result_bytes(run)


def graph_bytes(num_slots: int, kinds: int) -> int:
    """Captured passes: of each kind one for every number of rows at start, and twice as many that come up later."""
    return min(MAX_GRAPHS, 3 * kinds * len(decode_buckets(num_slots))) * GRAPH_BYTES


def padded_tokens(tokens: int) -> int:
    """What a captured pass over so many tokens is padded to."""
    return bucket_of(tokens, TOKEN_BUCKETS) or tokens


def attend_to_nothing(*_: object, **__: object) -> None:
    """Attention of a pass whose results are only counted."""


def _nothing(*_: object, **__: object) -> None:
    return None
