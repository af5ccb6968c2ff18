"""Progress on a terminal; where nobody watches (a pipe, a log), one plain line or nothing."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from edgellm.memory import format_bytes

NAME_WIDTH = 32
PIPED_WIDTH = 120  # columns of a table that goes to no terminal, where COLUMNS does not say


def piped_width() -> int | None:
    """Columns of standard output where it is no terminal; None leaves the width to the terminal."""
    if sys.stdout is None or sys.stdout.isatty():
        return None
    return shutil.get_terminal_size((PIPED_WIDTH, 0)).columns


def waiting(console: Console, text: str) -> AbstractContextManager[object]:
    """A spinner with `text`; nothing where the console is no terminal (a spinner would leave blank lines)."""
    return console.status(text) if console.is_terminal else nullcontext()


@contextmanager
def fetch_progress(console: Console, model: str) -> Iterator[Callable[[int, int], None]]:
    """A callback for `on_fetch`; the bar appears with its first call and is gone at the end."""
    if not console.is_terminal:
        yield _first_call_prints(console, lambda done, total: f"fetching {model} ({total / 1e6:.0f} MB)")
        return
    columns = (TextColumn("fetching"), BarColumn(), DownloadColumn(binary_units=True), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("fetch", visible=False)

        def on_fetch(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total or None, visible=True)

        yield on_fetch


@contextmanager
def load_progress(console: Console) -> Iterator[Callable[[int, int, str], None]]:
    """A callback for `on_load`; as `fetch_progress`."""
    if not console.is_terminal:
        yield _first_call_prints(console, lambda done, total, name: f"loading weights ({format_bytes(total)})")
        return
    columns = (TextColumn("loading"), BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", visible=False)

        def on_load(done: int, total: int, name: str) -> None:
            progress.update(task, completed=done, total=total or None, description=fixed_width(name), visible=True)

        yield on_load


def fixed_width(name: str) -> str:
    """A tensor name in `NAME_WIDTH` columns, its end kept: a bar beside it must not jump."""
    return name.ljust(NAME_WIDTH) if len(name) <= NAME_WIDTH else "…" + name[-(NAME_WIDTH - 1) :]


def _first_call_prints(console: Console, line_of: Callable[..., str]) -> Callable[..., None]:
    printed = False

    def on_progress(*arguments: Any) -> None:
        nonlocal printed
        if not printed:
            printed = True
            console.print(Text(line_of(*arguments)))

    return on_progress
