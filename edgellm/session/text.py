"""`TextPipeline`: one resident's tokens to streamable text, held back where a stop string may begin."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgellm.tokenization.detokenizer import IncrementalDetokenizer
    from edgellm.tokenization.stop_strings import StopStringMatcher


class TextPipeline:
    """Incremental detokeniser followed by the stop-string matcher.

    After a match nothing more is emitted.
    """

    __slots__ = ("_detokenizer", "_ended", "_matcher")

    def __init__(self, detokenizer: IncrementalDetokenizer, matcher: StopStringMatcher | None) -> None:
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._ended = False

    @property
    def match(self) -> str | None:
        """The stop string that was found, or None."""
        return None if self._matcher is None else self._matcher.match

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that `token_ids` make safe to show: whole characters, no part of a stop string."""
        return self._filter(self._detokenizer.push(token_ids))

    def finish(self) -> str:
        """The rest of the text; incomplete characters become U+FFFD.  Call once, at the end."""
        if self._ended:
            return ""
        text = self._filter(self._detokenizer.flush())
        if self._matcher is not None and not self._ended:
            text += self._matcher.flush()
        self._ended = True
        return text

    def _filter(self, text: str) -> str:
        if self._ended:
            return ""
        if self._matcher is None:
            return text
        emitted = self._matcher.push(text)
        self._ended = self._matcher.match is not None
        return emitted
