"""The one way to a logger: `logger = get_logger(__name__)`.  The level comes from `EDGELLM_LOG_LEVEL`."""

from __future__ import annotations

import logging

from edgellm import envs

_ROOT = "edgellm"


def get_logger(name: str) -> logging.Logger:
    """A logger below `edgellm`, whose level follows `EDGELLM_LOG_LEVEL` unless the application set one."""
    root = logging.getLogger(_ROOT)
    if root.level == logging.NOTSET:
        level = logging.getLevelName(envs.log_level())
        root.setLevel(level if isinstance(level, int) else logging.WARNING)
    return logging.getLogger(name if name == _ROOT or name.startswith(_ROOT + ".") else f"{_ROOT}.{name}")
