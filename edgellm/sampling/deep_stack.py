"""Work on a stack that is deep enough for the grammar engine, which recurses as deep as a form nests."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")

STACK_BYTES = 256 << 20
"""More than the deepest form of `MAX_GUIDE_BYTES` takes; address space, of which only what is used becomes memory."""

_start_lock = threading.Lock()  # the size of new stacks is a setting of the whole process


def on_deep_stack(work: Callable[[], Result]) -> Result:
    """Run `work` on a thread with a stack of `STACK_BYTES`, and wait for it.

    Where no such stack can be had, it runs on the caller's.
    Raises: what `work` raises.
    Cost: tenths of a millisecond for the thread.
    """
    result: Future[Result] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    if not start_with_deep_stack(threading.Thread(target=run, name="edgellm-grammar", daemon=True)):
        return work()
    return result.result()


def start_with_deep_stack(thread: threading.Thread) -> bool:
    """Start a thread with a stack of `STACK_BYTES`; False where no such stack can be had, and it is not started."""
    with _start_lock:
        try:
            usual = threading.stack_size(STACK_BYTES)
        except ValueError:  # more than this platform has
            return False
        try:
            thread.start()
        except (RuntimeError, MemoryError):  # no address space left for it
            return False
        finally:
            threading.stack_size(usual)
    return True
