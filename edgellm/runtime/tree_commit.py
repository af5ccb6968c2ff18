"""`TreeCommit`: K and V of accepted branches moved to where those of a chain would be, without a wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from edgellm.errors import ContractViolation
from edgellm.runtime.step_inputs import HostStaging

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edgellm.runtime.kv_cache import KVCache

_HEAD = 3  # words in front of a slot's rows: slot, tokens before its tree, rows
_NOBODY = -1


class TreeCommit:
    """Inputs of the launches that move, at addresses that stay, so that these can be captured.

    Args:
        kv_cache: whose tokens move; borrowed.
        page_table: (num_slots, pages_per_slot) int32, the device's copy; borrowed.
        commit: `commit_rows` of the operators.
        most: rows of one branch that there is room for.
    """

    def __init__(self, kv_cache: KVCache, page_table: torch.Tensor, commit: Callable[..., object], most: int) -> None:
        self._kv_cache = kv_cache
        self._page_table = page_table
        self._commit = commit
        self._num_slots = len(page_table)
        self._turn = 0
        self._make_room(most)

    def reserve(self, most: int) -> bool:
        """Make room for branches of so many rows; True where memory moved, so that captured launches are void."""
        if most <= self._most:
            return False
        self._make_room(most)
        return True

    def stage(self, state_index: Sequence[int], past: Sequence[int], rows: Sequence[Sequence[int]]) -> None:
        """Send what `launch` moves, in stream order; nothing is nobody.

        Args: see `TreeExecutor.commit_rows`; no more rows of a branch than there is room for.
        Raises:
            ContractViolation: a slot that is not there or there twice, or rows that do not rise from 0 or more.
        """
        check_branches(self._num_slots, state_index, past, rows)
        self._turn ^= 1
        staging = self._staging[self._turn]
        staging.wait()
        count = self._num_slots
        head, index = staging.words[: _HEAD * count].reshape(_HEAD, count), staging.words[_HEAD * count :]
        head[0], head[1:] = _NOBODY, 0
        index = index.reshape(count, self._most)
        for number, (slot, length, branch) in enumerate(zip(state_index, past, rows, strict=True)):
            head[:, number] = slot, length, len(branch)
            index[number, : len(branch)] = branch
        staging.send(self._words, 0, len(staging.words))

    def launch(self) -> None:
        """Move what was sent."""
        count = self._num_slots
        slots, past, lengths = self._words[: _HEAD * count].view(_HEAD, count).unbind(0)
        index = self._words[_HEAD * count :].view(count, self._most)
        for head_dim, storage in self._kv_cache.storages:
            self._commit(storage, self._page_table, slots, past, index, lengths, head_dim=head_dim)

    def _make_room(self, most: int) -> None:
        words, device = self._num_slots * (_HEAD + most), self._page_table.device
        staging = [HostStaging(words, device) for _ in range(2)]
        self._words = torch.zeros(words, dtype=torch.int32, device=device)
        self._staging, self._most = staging, most


def check_branches(
    num_slots: int, state_index: Sequence[int], past: Sequence[int], rows: Sequence[Sequence[int]]
) -> None:
    """
    Raises:
        ContractViolation: as `TreeCommit.stage`.
    """
    if len({*state_index}) != len(state_index) or not all(0 <= slot < num_slots for slot in state_index):
        raise ContractViolation(f"slots {[*state_index]} of branches are not different ones of [0, {num_slots})")
    if not len(state_index) == len(past) == len(rows):
        raise ContractViolation(
            f"{len(rows)} branches behind {len(past)} lengths in {len(state_index)} slots; one of each is needed"
        )
    for slot, branch in zip(state_index, rows, strict=True):
        if any(row <= before for before, row in zip([-1, *branch], branch, strict=False)):
            raise ContractViolation(f"rows {[*branch]} of slot {slot} do not rise; commit a tree's nodes in order")
