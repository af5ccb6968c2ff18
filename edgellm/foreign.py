"""Calls of code that is not ours (callbacks, listeners), whose errors must not reach the thread that makes them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def call_foreign(function: Callable[..., object], *arguments: Any) -> BaseException | None:
    """Call `function`, and hand back what it raised, whatever it was; None when it returned.

    Raises:
        KeyboardInterrupt: on the main thread only, the one that the interpreter interrupts; it is nobody's failure.
    """
    try:
        function(*arguments)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        return error
    return None


def describe_error(error: BaseException) -> str:
    """Class and message of an error; a foreign one's text may fail too."""
    texts: list[str] = []
    failed = call_foreign(lambda: texts.append(f"{type(error).__name__}: {error}"))
    return type(error).__name__ if failed is not None else texts[0]


def describe_value(value: object, limit: int = 80) -> str:
    """`repr(value)` for a message: cut, and never an error (a huge integer has none, a foreign object may fail)."""
    texts: list[str] = []
    # Joined, because a `repr` may be of a subclass of `str` that fails later.
    if call_foreign(lambda: texts.append("".join((repr(value),)))) is not None:
        return f"a {type(value).__name__}"
    return texts[0] if len(texts[0]) <= limit else f"{texts[0][:limit]}..."
