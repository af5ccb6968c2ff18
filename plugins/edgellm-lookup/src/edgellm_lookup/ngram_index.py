"""`NgramIndex`: where the last few tokens of a text stood before, and what came after them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

LONGEST = 4
SHORTEST = 2


class NgramIndex:
    """The tokens of one sequence, with the latest place behind every n-gram of theirs.

    Args:
        longest, shortest: lengths of the n-grams that are looked for, the longest first.
    Cost: a token is `longest - shortest + 1` entries.
    """

    def __init__(self, longest: int = LONGEST, shortest: int = SHORTEST) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._tokens: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens.

        An n-gram is entered when the token behind it is known, so that the text's own end is never found.
        """
        tokens, behind = self._tokens, self._behind
        for token in token_ids:
            end = len(tokens)
            for length in self._lengths:
                if length <= end:
                    behind[tuple(tokens[end - length :])] = end
            tokens.append(token)

    def propose(self, most: int) -> list[int]:
        """Up to `most` tokens that followed the longest known n-gram which the text ends with; empty where none is.

        A continuation that runs into the text's end goes on with itself: the text repeats there.
        """
        tokens = self._tokens
        for length in self._lengths:
            place = self._behind.get(tuple(tokens[-length:])) if length <= len(tokens) else None
            if place is not None:
                return _cycle(tokens[place : place + most], most)
        return []


def _cycle(tokens: Sequence[int], most: int) -> list[int]:
    repeated = list(tokens)
    while len(repeated) < most:
        repeated += tokens[: most - len(repeated)]
    return repeated
