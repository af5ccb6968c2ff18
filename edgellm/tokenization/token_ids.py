"""Range checks for token ids that come from outside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable


def check_token_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Refuse ids outside `[0, vocab_size)`.

    Args:
        name: what the ids are, as the user wrote it ("stop_token_ids").
    Raises:
        InvalidArgumentError: names the first bad id and the vocabulary size.
    """
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidArgumentError(
                f"{name} contains token id {token_id}, which is outside the vocabulary of {vocab_size} tokens; "
                f"use ids from 0 to {vocab_size - 1}"
            )
