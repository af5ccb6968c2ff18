"""Waits that an interrupt (Ctrl-C) may leave at any point: `WaitList` and `Latch`.

`threading.Condition` and `threading.Event` take and give back their lock in Python code; an interrupt that lands
between the two steps of it leaves the lock taken, and everybody waits for ever.  Here locks are entered as they are
(`with lock:`), which no interrupt splits, and nobody holds one while asleep.

The system may hand an interrupt to any thread.  Python runs its handler on the main one, which a signal that went
elsewhere does not wake from a lock; so the main thread sleeps in slices.
"""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MAIN_THREAD_SLICE = 0.5  # seconds that an interrupt may go unheard


class WaitList:
    """Threads that sleep until another one changes what `lock` guards.

    Threads: `join` and `wake_all` under the lock, `wait` and `wait_for` without.
    """

    __slots__ = ("_bells", "_lock")

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._bells: list[threading.Lock] = []  # one for each sleeper; taken until it rings

    def join(self) -> threading.Lock:
        """Enter the list; what is woken from now on is heard by `wait` with the result."""
        bell = threading.Lock()
        bell.acquire()
        self._bells.append(bell)
        return bell

    def wait(self, bell: threading.Lock, timeout: float | None) -> None:
        """Sleep until `wake_all`, at most `timeout` seconds (None: no limit), and leave the list."""
        try:
            if threading.current_thread() is threading.main_thread():
                _acquire_in_slices(bell, timeout)
            else:
                bell.acquire(True, -1 if timeout is None else timeout)
        finally:
            self._bells.remove(bell)

    def wake_all(self) -> None:
        """Wake everybody; they leave the list by themselves, so a wake that was interrupted may be repeated."""
        for bell in tuple(self._bells):
            try:
                bell.release()
            except RuntimeError:  # it rang before
                continue

    def wait_for(self, happened: Callable[[], bool], timeout: float | None) -> bool:
        """Sleep until `happened()`, which is asked under the lock.

        Args:
            timeout: seconds; None waits without limit.
        Returns:
            False when the time is up.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                if happened():
                    return True
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    return False
                bell = self.join()
            self.wait(bell, remaining)


def _acquire_in_slices(bell: threading.Lock, timeout: float | None) -> None:
    """Wait for the bell, awake for a moment now and then, in which the interpreter runs what signals left to do."""
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while True:
        remaining = deadline - time.monotonic()
        if bell.acquire(True, max(0.0, min(MAIN_THREAD_SLICE, remaining))) or remaining <= MAIN_THREAD_SLICE:
            return


class Latch:
    """A fact that becomes true once; any thread sets it and waits for it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiters = WaitList(self._lock)
        self._is_set = False

    def set(self) -> None:
        with self._lock:
            self._is_set = True
            self._waiters.wake_all()

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, at most `timeout` seconds; whether it is."""
        return self._waiters.wait_for(self.is_set, timeout)
