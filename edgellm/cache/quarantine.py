"""Draining streams, and holding requests whose stream could not be drained."""

from __future__ import annotations

import time
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

    Holding one poisons: nothing new is admitted until the poison is lifted.  Running requests go on.  Room for every
    active request is reserved when it begins, so that holding it cannot fail.

    Attributes:
        waited_ns: nanoseconds spent in waits so far.
    """

    def __init__(self, synchronizer: StreamSynchronizer) -> None:
        self.poisoned = False
        self.failed_waits = 0
        self.waited_ns = 0
        self._held = 0
        self._room: list[Impl | None] = []
        self._synchronizer = synchronizer

    def __len__(self) -> int:
        return self._held

    @property
    def requests(self) -> list[Impl]:
        """The held requests, first in first."""
        return [impl for impl in self._room if impl is not None]

    def reserve(self) -> None:
        """Make room for one more request."""
        self._room.append(None)

    def unreserve(self) -> None:
        """A request ended: its room goes."""
        self._room.pop()

    def wait(self, stream: Stream) -> bool:
        """Wait for a stream; False when completion is unknown.  Never raises (an interrupt passes)."""
        self.failed_waits += 1  # an interrupted wait proves nothing
        started = time.perf_counter_ns()
        try:
            drained = self._synchronizer(stream)
        except Exception:
            logger.exception("a stream could not be drained")
            return False
        finally:
            self.waited_ns += time.perf_counter_ns() - started
        if drained is not None and not drained:
            return False
        self.failed_waits -= 1
        return True

    def drain(self, impl: Impl) -> bool:
        """Wait for a request's stream; False when completion is unknown.  Never raises."""
        if not self.wait(impl.stream):
            return False
        impl.mark_device_work_synchronized()
        return True

    def hold(self, impl: Impl) -> None:
        """Take a request in, and poison.  Cannot fail."""
        impl.mark_finishing()
        self._room[self._held] = impl
        self._held += 1
        self.poison("a stream could not be drained")

    def drain_all(self, release: Callable[[Impl], None]) -> bool:
        """Release the held requests, last in first out; False when one still cannot be drained."""
        while self._held:
            impl = self._room[self._held - 1]
            if impl is None or not self.drain(impl):
                return False
            self._held -= 1
            self._room[self._held] = None
            release(impl)
        return True

    def poison(self, reason: str) -> None:
        """Admit nothing more."""
        if not self.poisoned:
            logger.error("the context cache admits nothing more: %s; recover() or shutdown() it", reason)
        self.poisoned = True

    def lift_poison(self) -> None:
        """Every stream is proven idle: admit again."""
        self.poisoned = False
