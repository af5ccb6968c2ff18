"""What a session does with stream channels: one chunk a step, one terminal chunk whatever happens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.log import get_logger
from edgellm.session.types import FinishReason
from edgellm.streaming import StreamChunk

if TYPE_CHECKING:
    from edgellm.session.resident import Resident
    from edgellm.session.text import TextPipeline
    from edgellm.streaming import StreamChannel

_logger = get_logger(__name__)


def emit_chunk(resident: Resident) -> None:
    """Push what the resident gained since its last chunk; the terminal chunk when it ended."""
    channel = resident.channel
    if channel is None or resident.released:
        return
    start = resident.streamed
    token_ids = resident.generated[start:]
    if not token_ids and not resident.terminal:
        return
    resident.streamed = len(resident.generated)
    channel.push(
        StreamChunk(
            token_ids=token_ids,
            text=resident.take_text(),
            finished=resident.terminal,
            reason=resident.reason,
            logprobs=None if resident.logprobs is None else resident.logprobs[start:],
        )
    )


def attach_late(resident: Resident, channel: StreamChannel, fresh: TextPipeline | None) -> None:
    """Give a resident without a stream one, and push what it generated so far as one chunk.

    Args:
        fresh: a text pipeline for the resident as streamed, that has seen no token yet.
    Raises:
        ContractViolation: the channel was used before.  Nothing was changed.
    """
    text, pending = resident.text, resident.pending_text
    if text is None and fresh is not None:
        text, pending = fresh, fresh.push(resident.generated)
        if resident.terminal:
            pending += fresh.finish()
    channel.attach()
    resident.channel, resident.text, resident.pending_text = channel, text, pending
    emit_chunk(resident)


def finish_unfinished(resident: Resident) -> None:
    """End an attached channel with ERROR (CANCELLED if somebody cancelled), with all text that is left; never raises.

    For sessions that close with residents.
    """
    channel = resident.channel
    if channel is None or resident.released or channel.is_finished():
        return
    reason = FinishReason.CANCELLED if resident.cancel_requested else FinishReason.ERROR
    resident.end(reason, "the session closed before the sequence ended")
    try:
        resident.flush_text()
        emit_chunk(resident)
    except Exception:
        _logger.exception("request %d: its last chunk could not be pushed", resident.request_id)
    try:
        channel.finish(resident.reason)
    except Exception:
        _logger.exception("request %d: its stream channel could not be finished", resident.request_id)
