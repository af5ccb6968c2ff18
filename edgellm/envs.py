"""Every environment variable that edgellm reads: name, type, default, meaning.  Read at call time."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class EnvVar:
    """One documented variable.  `default` is what its absence means, in words."""

    name: str
    default: str
    meaning: str


VARIABLES: tuple[EnvVar, ...] = (
    EnvVar("EDGELLM_HOME", "~/.cache/edgellm", "folder for the fetched default model"),
    EnvVar("EDGELLM_LOG_LEVEL", "WARNING", "level of the `edgellm` loggers: DEBUG, INFO, WARNING, ERROR"),
    EnvVar("EDGELLM_PLUGINS", "all installed", "comma-separated entry point names to load; empty loads none"),
    EnvVar("EDGELLM_PLUGINS_STRICT", "0", "1 raises when a plugin fails to load instead of skipping it"),
    EnvVar("EDGELLM_CPU_ISA", "the best there is", "highest CPU kernel instruction set: 0 portable, 1 AVX2, 2 AVX-512"),
    EnvVar("EDGELLM_DEBUG", "0", "build time only: 1 builds the extensions with checks, line trace and assertions"),
)


def home() -> Path:
    """Folder of fetched files: `EDGELLM_HOME`, else `$XDG_CACHE_HOME/edgellm`, else `~/.cache/edgellm`."""
    explicit = os.environ.get("EDGELLM_HOME")
    if explicit:
        return Path(explicit).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "edgellm"


def log_level() -> str:
    return (os.environ.get("EDGELLM_LOG_LEVEL") or "WARNING").upper()


def plugin_selection() -> tuple[str, ...] | None:
    """Names in `EDGELLM_PLUGINS`; None when it is unset (load all), `()` when it is empty (load none)."""
    value = os.environ.get("EDGELLM_PLUGINS")
    if value is None:
        return None
    return tuple(name.strip() for name in value.split(",") if name.strip())


def plugins_strict() -> bool:
    return os.environ.get("EDGELLM_PLUGINS_STRICT") == "1"
