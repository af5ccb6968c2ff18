"""Proposals that are right where a test wants them: random drafts nearly always are wrong."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from edgellm import LLM
    from edgellm.decoding.base import DecodingSeat
    from edgellm.runtime.batch import RaggedBatch

    Texts = Sequence[tuple[Sequence[int], Sequence[int]]]

WRONG = 1


class TruthfulDraft(ABC):
    """Stands in front of a decoder's `propose` and changes its chains by what plain decoding says.

    The draft runs as it is: its own state, its own proposals.  Chains that it leaves short (prompt lookup found
    nothing) are filled.

    Args:
        texts: prompts, and the tokens that plain decoding gives behind them.
    """

    def __init__(self, llm: LLM, texts: Texts) -> None:
        self._decoder: Any = llm._frontend.open_runtime("TruthfulDraft").decoder
        self._seat, self._propose = self._decoder.seat, self._decoder.propose
        self._texts = {tuple(prompt): [*prompt, *answer] for prompt, answer in texts}
        self._prompts: dict[int, tuple[int, ...]] = {}  # by slot
        self._decoder.seat, self._decoder.propose = self.seat, self.propose

    def seat(self, executor: Any, seat: DecodingSeat) -> None:
        self._prompts[seat.slot] = tuple(seat.prompt.tolist())
        self._seat(executor, seat)

    def propose(self, executor: Any, batch: RaggedBatch, rows: Sequence[int], limits: Sequence[int]) -> list[list[int]]:
        chains = self._propose(executor, batch, rows, limits)
        changed = []
        for row, chain, limit in zip(rows, chains, limits, strict=True):
            slot, place = int(batch.state_index[row]), int(batch.past_len[row]) + 1
            filled = [*chain, *[WRONG] * (limit - len(chain))]
            truth = self._texts[self._prompts[slot]][place:]
            changed.append(self.change(slot, filled, place, truth) if filled else [])
        return changed

    @abstractmethod
    def change(self, slot: int, chain: list[int], place: int, truth: list[int]) -> list[int]:
        """The chain that is proposed instead.

        Args:
            slot: of the resident.
            place: of its first token in the text.
            truth: what plain decoding says from there on, as far as it is known.
        """


class HelpedDraft(TruthfulDraft):
    """Corrects two of three places, by position, so that rounds end everywhere, from the first place to the last."""

    def change(self, slot: int, chain: list[int], place: int, truth: list[int]) -> list[int]:
        return [
            truth[offset] if (place + offset) % 3 and offset < len(truth) else token
            for offset, token in enumerate(chain)
        ]


class ScriptedDraft(TruthfulDraft):
    """Each round of a request is right in exactly as many places as its script says, if it has so many.

    Args:
        scripts: prompts to the numbers of their rounds, of which the last one goes on.
    """

    def __init__(self, llm: LLM, texts: Texts, scripts: Mapping[tuple[int, ...], Sequence[int]]) -> None:
        super().__init__(llm, texts)
        self._scripts = scripts
        self._rounds: dict[int, int] = {}  # by slot

    def seat(self, executor: Any, seat: DecodingSeat) -> None:
        super().seat(executor, seat)
        self._rounds[seat.slot] = 0

    def change(self, slot: int, chain: list[int], place: int, truth: list[int]) -> list[int]:
        script = self._scripts[self._prompts[slot]]
        right = script[min(self._rounds[slot], len(script) - 1)]
        self._rounds[slot] += 1
        return [*truth[:right], *(token % 250 + 1 for token in truth[right : len(chain)])][: len(chain)]
