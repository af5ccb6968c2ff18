"""What a reader has of a stream: everything unread, and chunks put together again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgellm.session.types import FinishReason
    from edgellm.streaming import StreamChannel, StreamChunk


def drained(channel: StreamChannel) -> list[StreamChunk]:
    """All chunks that can be read now."""
    chunks = []
    while (chunk := channel.try_pop()) is not None:
        chunks.append(chunk)
    return chunks


def joined(chunks: list[StreamChunk]) -> tuple[list[int], str, FinishReason]:
    """Ids, text, and the reason of the last chunk."""
    ids = [token for chunk in chunks for token in chunk.token_ids]
    return ids, "".join(chunk.text for chunk in chunks), chunks[-1].reason
