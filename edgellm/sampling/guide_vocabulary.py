"""A tokenizer's vocabulary as the grammar engine needs it: the bytes of every token, and how a text ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from edgellm.errors import InvalidArgumentError

if TYPE_CHECKING:
    import numpy.typing as npt

# Written before a text so that a tokenizer takes it for the middle of one; merges with no other character.
_ANCHOR = "\n"
# Of a long text without choices only the beginning is tokenised, so that a step costs the same however long it is: the
# grammar engine writes the first token and asks again.  It may take up to four tokens back at the end of what it gets.
_AHEAD_CHARACTERS = 256
_AHEAD_TOKENS = 16
# Tokens of a vocabulary whose bytes are compared with what the tokenizer decodes.
_NUM_PROBES = 256


class VocabularyWrapper:
    """What `llguidance.LLTokenizer` reads; the attribute names are its own."""

    is_tokenizer_wrapper = True
    bos_token_id: int | None = None

    def __init__(self, tokenizer: Any, tokens: list[bytes], special_token_ids: list[int], eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = eos_token_id
        self._special = frozenset(special_token_ids)
        self._ids = {
            piece: token_id for token_id, piece in enumerate(tokens) if piece and token_id not in self._special
        }
        self._longest = max(map(len, self._ids), default=0)
        self._missing_bytes = frozenset(range(256)).difference(*(piece for piece in self._ids if len(piece) == 1))

    def __call__(self, text: str) -> list[int]:
        """Tokens of a text that the grammar leaves no choice about: of its beginning, at least `_AHEAD_TOKENS`, or of
        all of it where it is shorter.

        Returns:
            ids as the tokenizer itself writes the text inside a longer one, except that the name of a special token
            is spelt with ordinary ones.  Where it changes such a text, the longest tokens that fit, as far as there
            are any.
        """
        size = _AHEAD_CHARACTERS
        while size < len(text):
            ids = self._spell(text[:size])
            if len(ids) >= _AHEAD_TOKENS:
                return ids
            size *= 2
        return self._spell(text)

    def _spell(self, text: str) -> list[int]:
        wanted = text.encode()
        for anchor in ("", _ANCHOR):
            ids = self._without_special(self._tokenizer.encode(anchor + text, add_special_tokens=False))
            ids = self._last_bytes(ids, len(wanted))
            if self._bytes_of(ids) == wanted:
                return ids
        return self._longest_tokens(wanted)

    def unspelled(self, text: bytes) -> bytes:
        """What is left of a text behind the longest ordinary tokens, where none fits any more; empty as a rule."""
        if self._missing_bytes.isdisjoint(text):
            return b""
        return text[len(self._bytes_of(self._longest_tokens(text))) :]

    def can_go_on(self, rest: bytes) -> bool:
        """Whether an ordinary token begins with these bytes.  O(vocab_size)."""
        return any(piece.startswith(rest) for piece in self._ids)

    def _without_special(self, token_ids: list[int]) -> list[int]:
        """The same text in ordinary tokens: a special one would end the text, or vanish from it."""
        if max(token_ids, default=0) >= len(self.tokens):
            return []
        ordinary: list[int] = []
        for token_id in token_ids:
            special = token_id in self._special
            ordinary += self._longest_tokens(self.tokens[token_id]) if special else [token_id]
        return ordinary

    def _last_bytes(self, token_ids: list[int], size: int) -> list[int]:
        """The last tokens, as many as have `size` bytes or just fewer."""
        excess = sum(len(self.tokens[token_id]) for token_id in token_ids) - size
        first = 0
        while excess > 0:
            excess -= len(self.tokens[token_ids[first]])
            first += 1
        return token_ids[first:]

    def _longest_tokens(self, wanted: bytes) -> list[int]:
        ids: list[int] = []
        place = 0
        while place < len(wanted):
            ends = range(min(len(wanted), place + self._longest), place, -1)
            end = next((end for end in ends if wanted[place:end] in self._ids), None)
            if end is None:
                break
            ids.append(self._ids[wanted[place:end]])
            place = end
        return ids

    def _bytes_of(self, token_ids: list[int]) -> bytes:
        return b"".join(self.tokens[token_id] for token_id in token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class GuideVocabulary:
    """Attributes:
    size: width of the logits.
    end_ids: end tokens of the model, at least one.
    stripped: (size,) bool, tokens that may not begin a text, since decoding takes their leading spaces off; None
        where it takes none.
    wrapper: for `llguidance.LLTokenizer`.
    """

    size: int
    end_ids: frozenset[int]
    stripped: npt.NDArray[np.bool_] | None
    wrapper: VocabularyWrapper


def read_vocabulary(tokenizer: Any, vocab_size: int) -> GuideVocabulary:
    """Bytes of every token the model can produce.

    Args:
        vocab_size: width of the logits; ids that the tokenizer does not know get no bytes, and so are never allowed.
    Raises:
        InvalidArgumentError: no end token is among the ids, or the text of a sequence is not the sum of its tokens'
            bytes.
    Cost: O(vocab_size), tenths of a second.
    """
    end_ids = frozenset(token_id for token_id in tokenizer.eos_token_ids if 0 <= token_id < vocab_size)
    if not end_ids:
        raise InvalidArgumentError(
            "structured output needs an end token, and this model's tokenizer has none; use another checkpoint"
        )
    known = min(vocab_size, tokenizer.vocab_size)
    special = sorted({token_id for token_id in tokenizer.special_token_ids if token_id < known}.union(end_ids))
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(known)]
    stripped = None
    if not tokenizer.is_byte_level:
        _check_decoding(tokenizer, tokens, frozenset(special))
        stripped = _stripped_tokens(tokenizer, tokens, vocab_size)
    tokens += [b""] * (vocab_size - known)
    wrapper = VocabularyWrapper(tokenizer, tokens, special, min(end_ids))
    return GuideVocabulary(vocab_size, end_ids, stripped, wrapper)


def _check_decoding(tokenizer: Any, tokens: list[bytes], special: frozenset[int]) -> None:
    """Refuse a decoder whose text is not its tokens' bytes in a row, behind a letter that nothing is stripped from."""
    letter = next((token_id for token_id, piece in enumerate(tokens) if piece.isalpha() and piece.isascii()), None)
    if letter is None:
        return
    step = max(1, len(tokens) // _NUM_PROBES)
    for token_id in range(0, len(tokens), step):
        piece = tokens[token_id]
        if token_id in special or not piece or token_id in tokenizer.byte_fallback_ids:
            continue
        text = tokenizer.decode([letter, token_id], skip_special_tokens=True)
        if text.encode() != tokens[letter] + piece:
            raise InvalidArgumentError(
                f"structured output is not available with this tokenizer: token {token_id} decodes to {text!r}, not to "
                f"its bytes {piece!r}; use a checkpoint with a byte-level or byte-fallback tokenizer"
            )


def _stripped_tokens(tokenizer: Any, tokens: list[bytes], vocab_size: int) -> npt.NDArray[np.bool_] | None:
    """Tokens with leading spaces, where decoding a text takes such spaces off."""
    spaced = [token_id for token_id, piece in enumerate(tokens) if piece.startswith(b" ")]
    if not any(tokenizer.decode([token_id]).encode() != tokens[token_id] for token_id in spaced[:_NUM_PROBES]):
        return None
    stripped = np.zeros(vocab_size, np.bool_)
    stripped[spaced] = True
    return stripped
