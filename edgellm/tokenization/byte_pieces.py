"""What bytes each token of a vocabulary stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.errors import InvalidArgumentError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_SENTENCEPIECE_SPACE = "\u2581"


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: printable bytes are themselves, the others follow from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(ord("\u00ae"), 256)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return alphabet


_ALPHABET = _byte_level_alphabet()


class BytePieces:
    """Token id to bytes, filled on first use.  Reading from several threads is safe (entries never change).

    Attributes:
        is_byte_level: the text of a sequence is exactly the UTF-8 decoding of its tokens' bytes.
        byte_fallback_ids: tokens of the form `<0xE2>` in tokenizers that spell unknown characters so.
    """

    __slots__ = ("_backend", "_cache", "byte_fallback_ids", "is_byte_level")

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._cache: dict[int, bytes] = {}
        self.is_byte_level = type(backend.decoder).__name__ == "ByteLevel"
        self.byte_fallback_ids = frozenset() if self.is_byte_level else _byte_fallback_ids(backend)

    def __getitem__(self, token_id: int) -> bytes:
        """Bytes of one token; empty for an id without a token.

        Raises:
            InvalidArgumentError: the id is negative or above 2**32 - 1.
        """
        piece = self._cache.get(token_id)
        if piece is None:
            piece = self._cache[token_id] = self._look_up(token_id)
        return piece

    def _look_up(self, token_id: int) -> bytes:
        try:
            token = self._backend.id_to_token(token_id)
        except OverflowError as error:
            raise InvalidArgumentError(f"token id {token_id} cannot be decoded; ids are 0 or larger") from error
        return b"" if token is None else self._bytes_of(token, token_id)

    def _bytes_of(self, token: str, token_id: int) -> bytes:
        if self.is_byte_level:
            # One foreign character makes the whole token literal text: the rule of the library's decoder.
            if all(character in _ALPHABET for character in token):
                return bytes([_ALPHABET[character] for character in token])
            return token.encode()
        if token_id in self.byte_fallback_ids:
            return bytes([int(token[3:5], 16)])
        return token.replace(_SENTENCEPIECE_SPACE, " ").encode()


def _byte_fallback_ids(backend: Backend) -> frozenset[int]:
    decoder = backend.decoder
    if decoder is None or b"ByteFallback" not in decoder.__getstate__():
        return frozenset()
    ids = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(token_id for token_id in ids if token_id is not None)
