"""Rounds that propose where a test wants them, and counts of the steps that executors run ahead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from edgellm.decoding.adaptive import DraftLengths
from edgellm.runtime.executor_cuda import CudaExecutor

if TYPE_CHECKING:
    import pytest


class ScriptedLengths(DraftLengths):
    """Every `every`-th round of a slot proposes; 0 is none.  Of `lies`, every so many guesses is the wrong one."""

    def __init__(self, every: int, lies: int = 0) -> None:
        super().__init__()
        self._every, self._lies = every, lies
        self._rounds: dict[int, int] = {}
        self._guesses = 0

    def seat(self, slot: int) -> None:
        self._rounds[slot] = 0

    def limits(self, slots: Sequence[int], most: Sequence[int], other_rows: int = 0) -> list[int]:
        found = []
        for slot, limit in zip(slots, most, strict=True):
            self._rounds[slot] += 1
            found.append(limit if self._proposes(self._rounds[slot]) else 0)
        return found

    def rest(self, slots: Sequence[int], most: Sequence[int]) -> bool:
        """Every other round that proposes nothing anyway."""
        rests = self._rounds[slots[0]] % 2 == 0 and not any(self._proposes(self._rounds[slot] + 1) for slot in slots)
        for slot in slots if rests else ():
            self._rounds[slot] += 1
        return rests

    def stay_idle(self, slots: Sequence[int], most: Sequence[int]) -> bool:
        self._guesses += 1
        idle = not any(self._proposes(self._rounds[slot] + 1) for slot in slots)
        return idle is not (self._lies > 0 and self._guesses % self._lies == 0)

    def _proposes(self, number: int) -> bool:
        return self._every > 0 and number % self._every == 0


class AheadCounts:
    """Counts the steps that executors ran ahead, and those of them that were used."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ahead = self.taken = self.verified = 0
        run_ahead, take, verify = CudaExecutor.run_ahead, CudaExecutor._take_from, CudaExecutor.forward_verify

        def counted_run(executor: CudaExecutor, *given: Any, **named: Any) -> None:
            run_ahead(executor, *given, **named)
            self.ahead += executor._ahead is not None

        def counted_take(executor: CudaExecutor, *given: Any, **named: Any) -> Any:
            found = take(executor, *given, **named)
            self.taken += found is not None
            return found

        def counted_verify(executor: CudaExecutor, batch: Any) -> Any:
            self.verified += len(batch.logits_index) > batch.num_sequences
            return verify(executor, batch)

        patch.setattr(CudaExecutor, "run_ahead", counted_run)
        patch.setattr(CudaExecutor, "_take_from", counted_take)
        patch.setattr(CudaExecutor, "forward_verify", counted_verify)
