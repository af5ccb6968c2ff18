"""Stop strings in streamed text: found across pieces, never shown.

The result is that of one search over the whole text, however the text was cut into pieces: the stop string
that starts earliest wins; of several that start there, the shortest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def find_first_stop(text: str, stops: Iterable[str]) -> tuple[int, str] | None:
    """`(position, stop string)` of the earliest match in a complete text, or None.  Pure."""
    found = [(position, len(stop), stop) for stop in stops if (position := text.find(stop)) >= 0]
    if not found:
        return None
    position, _, stop = min(found)
    return position, stop


def trim_at_stop(text: str, stops: Iterable[str], *, include_stop: bool = False) -> tuple[str, str | None]:
    """`(text up to the earliest stop string, that string or None)`.  Pure."""
    found = find_first_stop(text, stops)
    if found is None:
        return text, None
    position, stop = found
    return text[: position + len(stop)] if include_stop else text[:position], stop


class StopStringMatcher:
    """Passes text on, but holds back what may be the beginning of a stop string.

    Never holds back more than the longest stop string's length less one.  One matcher per sequence; not
    thread-safe.

    A match is final once no earlier one can still complete: with stops "abc" and "b", the text "ab" waits
    for the next piece (or `flush`), because "abc" would start earlier than "b".

    Attributes:
        match: the stop string that was found, or None.  Once set, nothing more is emitted.
    """

    __slots__ = ("_held", "_include_stop", "_max_held", "_prefixes", "_stops", "match")

    def __init__(self, stops: Iterable[str], *, include_stop: bool = False) -> None:
        """
        Args:
            stops: non-empty strings; none at all makes a matcher that passes everything on.
            include_stop: emit the matched string as well.
        """
        self._stops = tuple(stops)
        self._prefixes = frozenset(stop[:length] for stop in self._stops for length in range(1, len(stop)))
        self._max_held = max((len(stop) for stop in self._stops), default=1) - 1
        self._include_stop = include_stop
        self._held = ""
        self.match: str | None = None

    @property
    def held(self) -> str:
        """Text received but not yet emitted."""
        return self._held

    def push(self, text: str) -> str:
        """Take a piece; return what can be shown now."""
        if self.match is not None:
            return ""
        if not self._stops:
            return text
        buffer = self._held + text
        undecided = self._undecided_from(buffer)
        found = find_first_stop(buffer, self._stops)
        if found is not None and found[0] <= undecided:
            return self._finish(buffer, found)
        self._held = buffer[undecided:]
        return buffer[:undecided]

    def flush(self) -> str:
        """The text ends here: return what was held back, less a stop string in it.  Idempotent."""
        if self.match is not None:
            return ""
        buffer, self._held = self._held, ""
        found = find_first_stop(buffer, self._stops)
        return buffer if found is None else self._finish(buffer, found)

    def _undecided_from(self, buffer: str) -> int:
        """Where the earliest unfinished candidate starts; the buffer's length when there is none."""
        end = len(buffer)
        for start in range(max(0, end - self._max_held), end):
            if buffer[start:] in self._prefixes:
                return start
        return end

    def _finish(self, buffer: str, found: tuple[int, str]) -> str:
        position, stop = found
        self.match = stop
        self._held = ""
        return buffer[: position + len(stop)] if self._include_stop else buffer[:position]
