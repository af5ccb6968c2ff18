"""What the draft of an only resident has when it proposes: to compare one that reused state with one that did not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


class DraftState:
    """Listens to a decoder whose draft has pages of its own, before what it proposes is changed.

    Attributes:
        proposals: tokens by how many stood in front.
        entries: (2, kv_heads, tokens, head_dim) of the draft's one layer, by the same.
    """

    def __init__(self, engine: Any) -> None:
        self.runtime: Any = engine._frontend.open_runtime("DraftState")
        self.proposals: dict[int, tuple[int, ...]] = {}
        self.entries: dict[int, torch.Tensor] = {}
        self._decoder: Any = self.runtime.decoder
        self._propose, self._decoder.propose = self._decoder.propose, self.propose

    def propose(self, executor: Any, batch: Any, rows: Sequence[int], limits: Sequence[int]) -> Any:
        proposals = self._propose(executor, batch, rows, limits)
        if limits[0]:
            slot, past = int(batch.state_index[rows[0]]), int(batch.past_len[rows[0]])
            self.proposals[past] = tuple(proposals[0])
            self.entries[past] = self._decoder._pages.gather(0, batch.draft_page_rows[slot], past)
        return proposals

    def require_same(self, cold: DraftState, *, behind: int = 0, at_least: int = 1) -> None:
        """The same entries and proposals wherever the other proposed.

        Args:
            behind: only places with as many tokens in front.
            at_least: places that are compared.
        """
        places = [place for place in cold.proposals if place >= behind]
        assert len(places) >= at_least
        for place in places:
            torch.testing.assert_close(self.entries[place], cold.entries[place], atol=1e-4, rtol=1e-4)
            assert self.proposals[place] == cold.proposals[place]

    def forget(self) -> None:
        """Listen as from the start."""
        self.proposals.clear()
        self.entries.clear()
