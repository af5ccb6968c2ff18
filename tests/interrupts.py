"""Ctrl-C at every place where the interpreter takes one, one place a run."""

from __future__ import annotations

import dis
import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import edgellm

PACKAGE = str(Path(edgellm.__file__).parent)
STANDARD = (threading.__file__,)  # its locks are written in Python in part


class Interrupt:
    """Raises KeyboardInterrupt at place number `place` of what runs under it on this thread.

    The interpreter looks for signals when a function begins, when a call in it has returned, and when a loop turns; a
    lock entered by `with` is not such a place, which is what the code relies on.
    """

    def __init__(self, place: int) -> None:
        self._left = place
        self._last: dict[FrameType, int] = {}  # offset of the instruction before

    def run(self, action: Callable[[], object]) -> bool:
        """Whether the interrupt came before the end of `action`."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            action()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        if event == "call":
            if not (name.startswith(PACKAGE) or name in STANDARD):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            self._pass()
        elif event == "opcode":
            before = self._last.get(frame, -1)
            self._last[frame] = frame.f_lasti
            # The interpreter's own interrupt belongs to the call; what is raised here, to what follows it.
            if before in places(frame.f_code) and (
                handler(frame.f_code, before) == handler(frame.f_code, frame.f_lasti)
            ):
                self._pass()
        elif event == "return":
            self._last.pop(frame, None)
        return self._trace

    def _pass(self) -> None:
        if self._left == 0:
            self._left = -1
            raise KeyboardInterrupt
        self._left -= 1


@functools.cache
def places(code: CodeType) -> set[int]:
    """Offsets of the instructions after which the interpreter looks for signals."""
    names = ("CALL", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
    return {one.offset for one in dis.get_instructions(code) if one.opname.startswith(names)}


@functools.cache
def handler(code: CodeType, offset: int) -> int | None:
    """Where an exception at that offset is handled in the function; always None before 3.11, which has no table."""
    entries = getattr(dis.Bytecode(code), "exception_entries", ())
    return next((entry.target for entry in entries if entry.start <= offset < entry.end), None)


def interrupts() -> Iterator[Interrupt]:
    """One for each place, without end; stop when `run` says that none came."""
    return (Interrupt(place) for place in itertools.count())
