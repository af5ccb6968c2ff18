"""Trees that hold the right tokens at most places: random drafts nearly never do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgellm.decoding.draft_tree import DraftTable

    Texts = Sequence[tuple[Sequence[int], Sequence[int]]]


class HelpedTrees:
    """Stands between a tree decoder's passes and the decoder, and writes the right token into their tables.

    At four of five places one candidate becomes the token that plain decoding gives, now the likeliest, now a sibling.
    The draft runs as it is: its own state, its own tables.

    Args:
        texts: prompts, and the tokens that plain decoding gives behind them.
    Attributes:
        branches: accepted nodes that were no chain, of every sequence and round.
        tables: how many were made.
    """

    def __init__(self, llm: Any, texts: Texts) -> None:
        self.runtime: Any = llm._frontend.open_runtime("HelpedTrees")
        self._decoder: Any = self.runtime.decoder
        self._texts = {tuple(prompt): [*prompt, *answer] for prompt, answer in texts}
        self._by_slot: dict[int, list[int]] = {}
        self.branches: list[list[int]] = []
        self.tables = 0
        self._seat, self._tables = self._decoder.seat, self._decoder._trees.tables
        self._commit = self.runtime.executor.commit_rows
        self._decoder.seat, self._decoder._trees.tables = self._noting, self._helped
        self.runtime.executor.commit_rows = self._listening

    def _noting(self, executor: Any, seat: Any) -> None:
        self._by_slot[seat.slot] = self._texts[tuple(seat.prompt.tolist())]
        self._seat(executor, seat)

    def _listening(self, slots: Sequence[int], past: Sequence[int], rows: Sequence[list[int]]) -> None:
        self.branches += rows
        self._commit(slots, past, rows)

    def _helped(self, slots: Sequence[int], past: Sequence[int], limits: Sequence[int], pages: Any) -> Any:
        tables = self._tables(slots, past, limits, pages)
        for slot, length, table in zip(slots, past, tables, strict=True):
            help_table(table, self._by_slot[slot], length + 1)
        self.tables += len(tables)
        return tables


def note_tables(decoder: Any) -> dict[tuple[int, int], DraftTable]:
    """Every table that a tree decoder's passes make from now on, by its slot and how many tokens stand in front."""
    found: dict[tuple[int, int], DraftTable] = {}
    make = decoder._trees.tables

    def noting(slots: Sequence[int], past: Sequence[int], limits: Sequence[int], pages: Any) -> Any:
        tables = make(slots, past, limits, pages)
        found.update({(slot, length): table for slot, length, table in zip(slots, past, tables, strict=True)})
        return tables

    decoder._trees.tables = noting
    return found


def help_table(table: DraftTable, text: list[int], place: int) -> None:
    """Make one way through the table that of the text, as far as it goes and the table has nodes.

    Args:
        place: of the first level in the text.
    """
    entry = 0
    while place < len(text) and place % 5:
        children = [child for child, parent in enumerate(table.parents) if parent == entry]
        grown = [child for child in children if child in table.parents] or children
        if not grown:
            return
        entry = grown[place % 3 % len(grown)]
        wrong = table.token_ids[entry]
        for child in children:
            if table.token_ids[child] == text[place]:
                table.token_ids[child] = wrong
        table.token_ids[entry] = text[place]
        place += 1
