"""`ToyTokenizer`: ids and text of a small invented vocabulary, for tests without a model.

Ids 0 and 1 are the special tokens `<pad>` and `<eos>`; 2 to 257 are the 256 byte values; every id above is
a word of the form `w258 ` (with a trailing space).  Encoding is bytes only, so any text round-trips.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgellm.tokenization.chat_boundaries import ChatPrompt, build_chat_prompt

PAD_ID = 0
EOS_ID = 1
_FIRST_BYTE_ID = 2
_FIRST_WORD_ID = _FIRST_BYTE_ID + 256


class ToyTokenizer:
    """A byte tokenizer with the same methods as `edgellm.tokenization.tokenizer.Tokenizer`."""

    is_byte_level = True

    def __init__(self, vocab_size: int = 512, eos_token_ids: Sequence[int] = (EOS_ID,)) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids: tuple[int, ...] = tuple(eos_token_ids)
        self.bos_token_id: int | None = None
        self.pad_token_id: int | None = PAD_ID
        self.special_token_ids: frozenset[int] = frozenset({PAD_ID, EOS_ID, *self.eos_token_ids})
        self.is_byte_level = True
        self.byte_fallback_ids: frozenset[int] = frozenset()
        self.all_special_ids: tuple[int, ...] = tuple(sorted(self.special_token_ids))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [byte + _FIRST_BYTE_ID for byte in text.encode("utf-8")]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that `token_id` adds to the text; special tokens have a name in angle brackets."""
        if token_id in self.special_token_ids:
            return b"<eos>" if token_id in self.eos_token_ids else b"<pad>"
        if token_id < _FIRST_WORD_ID:
            return bytes([token_id - _FIRST_BYTE_ID])
        return f"w{token_id} ".encode()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        pieces = (
            self.token_bytes(int(token_id))
            for token_id in token_ids
            if not (skip_special_tokens and int(token_id) in self.special_token_ids)
        )
        return b"".join(pieces).decode("utf-8", errors="replace")

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        """`[role]content\\n` per message, then `[assistant]` when an answer is wanted."""
        return self.encode(self.render_chat(messages, add_generation_prompt))

    def encode_chat(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> ChatPrompt:
        """`apply_chat_template`, with the lengths at which a later prompt is likely to leave this one."""
        return build_chat_prompt(messages, add_generation_prompt, self.render_chat, self._encode_with_ends)

    def render_chat(self, messages: Sequence[Any], add_generation_prompt: bool = True) -> str:
        """The text that `apply_chat_template` tokenises."""
        text = "".join(f"[{message['role']}]{message.get('content') or ''}\n" for message in messages)
        return text + ("[assistant]" if add_generation_prompt else "")

    def _encode_with_ends(self, text: str) -> tuple[list[int], list[int]]:
        ends = [place + 1 for place, character in enumerate(text) for _ in character.encode("utf-8")]
        return self.encode(text), ends
