"""Draining streams, and holding requests whose stream could not be drained."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from edgellm.log import get_logger

if TYPE_CHECKING:
    from edgellm.cache.request import Impl
    from edgellm.runtime.device import Stream

logger = get_logger(__name__)

# Waits for a stream: True when it is idle; False, or any exception, when completion is unknown.
StreamSynchronizer = Callable[["Stream"], bool]


def synchronize_stream(stream: Stream) -> bool:
    """The real wait; a device error propagates and counts as a failed drain."""
    stream.synchronize()
    return True


class Quarantine:
    """Requests that keep leases and active count because the device may still write to their pages.

    Holding one poisons: nothing new is admitted until the poison is lifted.  Running requests go on.
    """

    def __init__(self, synchronizer: StreamSynchronizer) -> None:
        self.requests: list[Impl] = []
        self.poisoned = False
        self._synchronizer = synchronizer

    def __len__(self) -> int:
        return len(self.requests)

    def drain(self, impl: Impl) -> bool:
        """Wait for a request's stream; False when completion is unknown.  Never raises."""
        try:
            drained = self._synchronizer(impl.stream)
        except Exception:
            logger.exception("the stream of a request could not be drained")
            return False
        if drained is False:
            return False
        impl.mark_device_work_synchronized()
        return True

    def hold(self, impl: Impl) -> None:
        """Take a request in, and poison."""
        impl.mark_finishing()
        self.requests.append(impl)
        self.poison("a stream could not be drained")

    def drain_all(self, release: Callable[[Impl], None]) -> bool:
        """Release the held requests, last in first out; False when one still cannot be drained."""
        while self.requests:
            if not self.drain(self.requests[-1]):
                return False
            release(self.requests.pop())
        return True

    def poison(self, reason: str) -> None:
        """Admit nothing more."""
        if not self.poisoned:
            logger.error("the context cache admits nothing more: %s; recover() or shutdown() it", reason)
        self.poisoned = True

    def lift_poison(self) -> None:
        """Every stream is proven idle: admit again."""
        self.poisoned = False
