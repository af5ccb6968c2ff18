"""The one way to a logger: `logger = get_logger(__name__)`.  The level comes from `EDGELLM_LOG_LEVEL`."""

from __future__ import annotations

import logging
import sys

from edgellm import envs

_ROOT = "edgellm"


def get_logger(name: str) -> logging.Logger:
    """A logger below `edgellm`, whose level follows `EDGELLM_LOG_LEVEL` unless the application set one."""
    root = logging.getLogger(_ROOT)
    if root.level == logging.NOTSET:
        wanted = envs.log_level()
        root.setLevel(wanted if wanted in envs.LOG_LEVELS else envs.DEFAULT_LOG_LEVEL)
        if wanted not in envs.LOG_LEVELS:
            root.warning(
                "EDGELLM_LOG_LEVEL is %r; it must be one of %s; %s is used",
                wanted,
                ", ".join(envs.LOG_LEVELS),
                envs.DEFAULT_LOG_LEVEL,
            )
    return logging.getLogger(name if name == _ROOT or name.startswith(_ROOT + ".") else f"{_ROOT}.{name}")


def show_on_stderr() -> None:
    """Write the `edgellm` loggers to stderr, one line a record; for programs, the library itself never does."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    root = get_logger(_ROOT)
    root.addHandler(handler)
    root.propagate = False
