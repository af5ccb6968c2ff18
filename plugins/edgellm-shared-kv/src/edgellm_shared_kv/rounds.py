"""`Rounds`: what an assistant proposes, round by round, and what it keeps between them; `HostRounds` on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from edgellm.errors import BrokenInvariantError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    import numpy.typing as npt

    from edgellm.decoding.chain import KeptRow
    from edgellm.runtime.kv_cache import KVCache
    from edgellm_shared_kv.assistant import SharedKvAssistant
    from edgellm_shared_kv.base_prefix import BasePrefix

    Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Seeds:
    """Where R rows of a round start.

    Attributes:
        slots: (R,) resident slots.
        lengths: (R,) tokens that the base has state of, at least 1.
        token_ids: (R,) int32 token behind them.
        page_rows: (num_slots, pages_per_slot) int32 page table of the base.
    """

    slots: Int32Array
    lengths: Int32Array
    token_ids: Int32Array
    page_rows: Int32Array


class Rounds(Protocol):
    """Keeps one hidden row of each resident, by slot: that of its last accepted token, after the final norm."""

    def end(self, slots: Iterable[int]) -> None:
        """What is kept of these slots is of sequences that are gone."""
        ...

    def keep(self, rows: Sequence[KeptRow]) -> None:
        """Note the hidden row of the last token of each row that ran: copied, or kept by the step itself."""
        ...

    def keep_each(self, slots: Sequence[int], hidden: torch.Tensor) -> None:
        """The same of a step of one token for each of `slots`.

        Args:
            hidden: (N, width), in the order of the slots.
        """
        ...

    def chains(self, kv_cache: KVCache, seeds: Seeds, limits: Sequence[int]) -> Sequence[Sequence[int]]:
        """A chain for each row, as long as its limit.

        Args:
            kv_cache: the base's.
            limits: at least 1, never rising.
        Raises:
            BrokenInvariantError: no hidden row of a slot is kept.
        """
        ...


class HostRounds:
    """Rounds on the CPU."""

    def __init__(self, assistant: SharedKvAssistant) -> None:
        self._assistant = assistant
        self._hidden: dict[int, torch.Tensor] = {}

    def end(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._hidden.pop(slot, None)

    def keep(self, rows: Sequence[KeptRow]) -> None:
        for row in rows:
            if row.hidden is None:
                raise no_hidden(row.slot)
            self._hidden[row.slot] = row.hidden[-1].clone()  # a view would keep the rows of the whole step

    def keep_each(self, slots: Sequence[int], hidden: torch.Tensor) -> None:
        self._hidden.update(zip(slots, hidden.clone(), strict=True))

    def chains(self, kv_cache: KVCache, seeds: Seeds, limits: Sequence[int]) -> list[list[int]]:
        chains: list[list[int]] = [[] for _ in limits]
        tokens: list[int] = seeds.token_ids.tolist()
        hidden = torch.stack([self._seed_row(slot) for slot in seeds.slots.tolist()])
        prefix, width = self._prefix(kv_cache, seeds, len(limits)), len(limits)
        for depth in range(limits[0]):
            count = sum(limit > depth for limit in limits)
            if count < width:
                tokens, hidden, prefix, width = (
                    tokens[:count],
                    hidden[:count],
                    self._prefix(kv_cache, seeds, count),
                    count,
                )
            tokens, hidden = self._assistant.forward(tokens, hidden, prefix)
            for chain, token in zip(chains, tokens, strict=False):
                chain.append(token)
        return chains

    def _prefix(self, kv_cache: KVCache, seeds: Seeds, count: int) -> BasePrefix:
        return self._assistant.prefix(
            kv_cache, slots=seeds.slots[:count], lengths=seeds.lengths[:count], page_rows=seeds.page_rows
        )

    def _seed_row(self, slot: int) -> torch.Tensor:
        try:
            return self._hidden[slot]
        except KeyError:
            raise nothing_ran(slot) from None


def no_hidden(slot: int) -> BrokenInvariantError:
    """The executor gave none of the hidden rows that were requested."""
    return BrokenInvariantError(f"slot {slot} ran without the base's hidden rows that the assistant needs")


def nothing_ran(slot: int) -> BrokenInvariantError:
    """A slot is to propose, and no hidden row of it is kept."""
    return BrokenInvariantError(f"slot {slot} is to propose, and no token of it ran here")
