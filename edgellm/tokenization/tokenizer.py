"""`Tokenizer`: text to ids and back, chat templates, end tokens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm.errors import InvalidArgumentError
from edgellm.tokenization.byte_pieces import BytePieces
from edgellm.tokenization.chat_boundaries import ChatPrompt, build_chat_prompt
from edgellm.tokenization.chat_template import render_messages
from edgellm.tokenization.load import read_tokenizer
from edgellm.tokenization.token_ids import check_token_ids

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from transformers import PreTrainedTokenizerBase

__all__ = ["Tokenizer", "check_token_ids", "load_tokenizer"]

# Tokens that close a turn.  One that the chat template writes ends generation, also where the checkpoint's
# own list of end tokens leaves it out (base models with a chat template, some conversions).
_CHAT_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end_of_turn|>")


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a Hugging Face directory or of a `.gguf` file.  Quiet; never touches the network.

    Raises:
        WeightFileError: the path, or the tokenizer in it, is missing or damaged.
    Cost: about a second for importing transformers once, then tenths of a second.
    """
    tokenizer, end_ids = read_tokenizer(Path(path))
    return Tokenizer(tokenizer, end_ids)


class Tokenizer:
    """A checkpoint's tokenizer.  Read only after construction, safe to share between threads.

    Text never loses anything on the way out: decoding does not "clean up" spaces.

    Attributes:
        vocab_size: number of ids the tokenizer knows; the model's own vocabulary may be padded beyond it.
        eos_token_ids: ids that end generation, ascending: those of the tokenizer, of generation_config.json
            (or the GGUF file), and the chat template's end of turn.
        bos_token_id, pad_token_id: None where the tokenizer has none.
        special_token_ids: ids that `skip_special_tokens` leaves out.
        is_byte_level, byte_fallback_ids: see `BytePieces`.
    """

    __slots__ = (
        "_backend",
        "_hf_tokenizer",
        "_pieces",
        "bos_token_id",
        "byte_fallback_ids",
        "eos_token_ids",
        "is_byte_level",
        "pad_token_id",
        "special_token_ids",
        "token_bytes",
        "vocab_size",
    )

    def __init__(self, hf_tokenizer: PreTrainedTokenizerBase, extra_eos_token_ids: Iterable[int] = ()) -> None:
        """
        Args:
            hf_tokenizer: a fast tokenizer; owned from here on (truncation and padding are switched off).
            extra_eos_token_ids: end tokens beside the tokenizer's own.
        """
        self._hf_tokenizer = hf_tokenizer
        self._backend: Any = hf_tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.vocab_size = int(self._backend.get_vocab_size(with_added_tokens=True))
        added = self._backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.bos_token_id: int | None = hf_tokenizer.bos_token_id
        self.pad_token_id: int | None = hf_tokenizer.pad_token_id
        self._pieces = BytePieces(self._backend)
        self.is_byte_level = self._pieces.is_byte_level
        self.byte_fallback_ids = self._pieces.byte_fallback_ids
        self.eos_token_ids = self._find_eos(extra_eos_token_ids)
        # The detokeniser calls this once a token: bound directly, without a method in between.
        self.token_bytes = self._pieces.__getitem__

    @property
    def has_chat_template(self) -> bool:
        return self._hf_tokenizer.chat_template is not None

    @property
    def all_special_ids(self) -> tuple[int, ...]:
        """`special_token_ids`, ascending."""
        return tuple(sorted(self.special_token_ids))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; special tokens written out in it become their ids.

        Args:
            add_special_tokens: let the tokenizer add what it adds to a text (such as a begin token).
        Raises:
            InvalidArgumentError: not text, or text with lone surrogates.
        """
        if not isinstance(text, str):
            raise InvalidArgumentError(f"the prompt is a {type(text).__name__}; pass text, or ids as prompt_token_ids")
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeError, TypeError) as error:
            raise InvalidArgumentError(
                f"the prompt is not valid Unicode text ({error}); remove lone surrogates"
            ) from error
        return ids

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence.  Invalid UTF-8 becomes U+FFFD; ids beyond the vocabulary have no text.

        Raises:
            InvalidArgumentError: an id is negative or above 2**32 - 1.
        """
        ids = [int(token_id) for token_id in token_ids]
        try:
            text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except OverflowError as error:
            bad = next(token_id for token_id in ids if not 0 <= token_id < 2**32)
            raise InvalidArgumentError(
                f"token id {bad} cannot be decoded; ids go from 0 to {self.vocab_size - 1}"
            ) from error
        return text

    def token_id(self, token: str) -> int | None:
        """Id of one token as the vocabulary spells it, or None."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def check_ids(self, name: str, token_ids: Iterable[int]) -> None:
        """Refuse ids outside `[0, vocab_size)`; see `check_token_ids`."""
        check_token_ids(name, token_ids, self.vocab_size)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        """Ids of a conversation as the model's template writes it.

        Args:
            add_generation_prompt: end with the opening of the assistant's turn.
            kwargs: passed to the template (`tools`, `enable_thinking`, ...).
        Raises:
            AdmissionError: bad messages, no template, or the template refused them.
            InvalidArgumentError: a reserved template argument.
        """
        return self.encode(self.render_chat(messages, add_generation_prompt, **kwargs), add_special_tokens=False)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> ChatPrompt:
        """`apply_chat_template`, with the lengths at which a later prompt is likely to leave this one."""

        def encode(text: str) -> tuple[list[int], list[int]]:
            encoding = self._backend.encode(text, add_special_tokens=False)
            return encoding.ids, [end for _, end in encoding.offsets]

        def render(conversation: Sequence[Mapping[str, Any]], open_turn: bool) -> str:
            return self.render_chat(conversation, open_turn, **kwargs)

        return build_chat_prompt(messages, add_generation_prompt, render, encode)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The text that `apply_chat_template` tokenises; raises as it does."""
        return render_messages(
            self._hf_tokenizer, messages, add_generation_prompt=add_generation_prompt, template_arguments=kwargs
        )

    def _find_eos(self, extra: Iterable[int]) -> tuple[int, ...]:
        found = set(extra)
        own = self._hf_tokenizer.eos_token_id
        if own is not None:
            found.add(int(own))
        template = str(self._hf_tokenizer.chat_template or "")
        for token in _CHAT_END_TOKENS:
            token_id = self.token_id(token)
            if token in template and token_id is not None:
                found.add(token_id)
        return tuple(sorted(found))
