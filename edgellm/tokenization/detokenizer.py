"""`IncrementalDetokenizer`: token ids to text, piece by piece, exactly.

The pieces and the flush joined equal the one-shot decode of all ids, and every piece is valid UTF-8.  Two ways:

- byte-level tokenizers (GPT-2 style: SmolLM2, Llama 3, Qwen): a token is a string of bytes, and the text is
  their UTF-8 decoding; one table look-up a token.
- any other: a short window of recent tokens is decoded with and without the new ones.  A run of byte-fallback
  tokens (`<0xE2>`) is held until it ends, because one invalid byte turns the *whole* run into U+FFFD; the
  `tokenizers` library's own `DecodeStream` shows the beginning of such a run too early.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    class DetokenizerSource(Protocol):
        """What a tokenizer must offer here; `Tokenizer` and the toy tokenizer do."""

        @property
        def is_byte_level(self) -> bool: ...

        @property
        def special_token_ids(self) -> frozenset[int]: ...

        @property
        def byte_fallback_ids(self) -> frozenset[int]: ...

        def token_bytes(self, token_id: int) -> bytes: ...

        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


_REPLACEMENT = "\ufffd"
_EMPTY: frozenset[int] = frozenset()


class IncrementalDetokenizer:
    """Text of one growing token sequence.  One per sequence; not thread-safe.

    Characters whose bytes have not all arrived are held back; `flush` turns an unfinished one into U+FFFD,
    as the one-shot decode does.
    """

    __slots__ = ("_impl",)

    def __init__(self, tokenizer: DetokenizerSource, skip_special_tokens: bool = True) -> None:
        """
        Args:
            tokenizer: shared, only read.
            skip_special_tokens: leave special tokens out of the text.
        """
        self._impl: _ByteDecoder | _WindowDecoder
        if tokenizer.is_byte_level:
            self._impl = _ByteDecoder(tokenizer, skip_special_tokens)
        else:
            self._impl = _WindowDecoder(tokenizer, skip_special_tokens)

    def push(self, token_ids: Iterable[int]) -> str:
        """Append ids; return the characters that became complete (often none or several).

        Raises:
            InvalidArgumentError: a negative id.  Ids beyond the vocabulary have no text, as in `decode`.
        """
        return self._impl.push(token_ids)

    def flush(self) -> str:
        """The sequence ends: return what was held back.  A second call returns ""."""
        return self._impl.flush()


class _ByteDecoder:
    __slots__ = ("_decoder", "_skipped", "_token_bytes")

    def __init__(self, tokenizer: DetokenizerSource, skip_special_tokens: bool) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else _EMPTY
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        skipped, token_bytes = self._skipped, self._token_bytes
        return self._decoder.decode(b"".join([token_bytes(t) for t in token_ids if t not in skipped]))

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class _WindowDecoder:
    """Decodes recent tokens together.

    The window starts with a token whose text is out already and not empty, so that a decoder's rule for the
    first token (drop one leading space) never touches new text.

    Attributes:
        _window: ids; decoded together.
        _shown: the text of the window that is out already.
    """

    __slots__ = ("_byte_fallback_ids", "_shown", "_skipped", "_tokenizer", "_window")

    def __init__(self, tokenizer: DetokenizerSource, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._byte_fallback_ids = tokenizer.byte_fallback_ids
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else _EMPTY
        self._window: list[int] = []
        self._shown = ""

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join([self._push_one(token_id) for token_id in token_ids if token_id not in self._skipped])

    def _push_one(self, token_id: int) -> str:
        # An id without a token does not even end a run of bytes.
        if not self._tokenizer.token_bytes(token_id):
            return ""
        self._window.append(token_id)
        if token_id in self._byte_fallback_ids:
            return ""
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT):
            return ""
        new_text = text[len(self._shown) :]
        alone = self._decode([token_id])
        if alone:
            self._window, self._shown = [token_id], alone
        else:
            self._shown = text
        return new_text

    def flush(self) -> str:
        text = self._decode(self._window)[len(self._shown) :]
        self._window, self._shown = [], ""
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
