"""Every environment variable that edgellm reads: name, type, default, meaning.  Read at call time."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from edgellm.errors import InvalidArgumentError

DEFAULT_LOG_LEVEL = "WARNING"
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@dataclass(frozen=True, slots=True)
class EnvVar:
    """One documented variable.  `default` is what its absence means, in words."""

    name: str
    default: str
    meaning: str


VARIABLES: tuple[EnvVar, ...] = (
    EnvVar("EDGELLM_HOME", "~/.cache/edgellm", "folder for the fetched default model"),
    EnvVar("EDGELLM_LOG_LEVEL", "WARNING", "level of the `edgellm` loggers: DEBUG, INFO, WARNING, ERROR, CRITICAL"),
    EnvVar(
        "EDGELLM_PLUGINS",
        "all installed",
        "names of plugins to load beside the built-ins, comma-separated; empty: none",
    ),
    EnvVar("EDGELLM_PLUGINS_STRICT", "0", "1 raises when a plugin fails to load instead of skipping it"),
    EnvVar("EDGELLM_CPU_ISA", "the best there is", "highest CPU kernel instruction set: 0 portable, 1 AVX2, 2 AVX-512"),
    EnvVar("EDGELLM_KERNEL_CACHE", "`kernels` in `EDGELLM_HOME`", "folder of the compiled CUDA kernels"),
    EnvVar("EDGELLM_DEBUG", "0", "build time only: 1 builds the extensions with checks, line trace and assertions"),
)


def home() -> Path:
    """Folder of fetched files: `EDGELLM_HOME`, else `$XDG_CACHE_HOME/edgellm`, else `~/.cache/edgellm`.

    Raises:
        InvalidArgumentError: it starts with the home of a user who does not exist.
    """
    explicit = os.environ.get("EDGELLM_HOME")
    try:
        if explicit:
            return Path(explicit).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "edgellm"
    except RuntimeError as error:
        state = f"is {explicit!r}" if explicit else "is unset"
        raise InvalidArgumentError(f"EDGELLM_HOME {state}; use the path of a folder ({error})") from error


def kernel_cache() -> Path:
    """Folder of the compiled CUDA kernels: `EDGELLM_KERNEL_CACHE`, else `kernels` in `home()`.

    Raises:
        InvalidArgumentError: it starts with the home of a user who does not exist.
    """
    explicit = os.environ.get("EDGELLM_KERNEL_CACHE")
    if not explicit:
        return home() / "kernels"
    try:
        return Path(explicit).expanduser()
    except RuntimeError as error:
        raise InvalidArgumentError(
            f"EDGELLM_KERNEL_CACHE is {explicit!r}; use the path of a folder ({error})"
        ) from error


def cuda_toolkits() -> tuple[Path, ...]:
    """Folders of CUDA toolkits that the environment names: `CUDA_HOME`, then `CUDA_PATH`."""
    values = (os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH"))
    return tuple(Path(value) for value in values if value)


def log_level() -> str:
    """What `EDGELLM_LOG_LEVEL` says, in upper case; not necessarily one of `LOG_LEVELS`."""
    return (os.environ.get("EDGELLM_LOG_LEVEL") or DEFAULT_LOG_LEVEL).strip().upper()


def log_level_is_set() -> bool:
    return bool(os.environ.get("EDGELLM_LOG_LEVEL"))


def cpu_isa_limit() -> int | None:
    """Highest instruction set level of the CPU kernels; None for the best there is.

    Raises:
        InvalidArgumentError: `EDGELLM_CPU_ISA` is none of its values.
    """
    value = os.environ.get("EDGELLM_CPU_ISA")
    if not value:
        return None
    if value not in ("0", "1", "2"):
        raise InvalidArgumentError(
            f"EDGELLM_CPU_ISA is {value!r}; set it to 0 (portable), 1 (AVX2) or 2 (AVX-512), or unset it"
        )
    return int(value)


def plugin_selection() -> tuple[str, ...] | None:
    """Names in `EDGELLM_PLUGINS`; None when it is unset (load all), `()` when it is empty (load none)."""
    value = os.environ.get("EDGELLM_PLUGINS")
    if value is None:
        return None
    return tuple(name.strip() for name in value.split(",") if name.strip())


def plugins_strict() -> bool:
    """Whether a plugin that fails to load ends the program.

    Raises:
        InvalidArgumentError: `EDGELLM_PLUGINS_STRICT` is neither 0 nor 1.
    """
    value = os.environ.get("EDGELLM_PLUGINS_STRICT")
    if value and value not in ("0", "1"):
        raise InvalidArgumentError(
            f"EDGELLM_PLUGINS_STRICT is {value!r}; set it to 0 (skip a plugin that fails) or 1 (raise), or unset it"
        )
    return value == "1"


def check_values() -> None:
    """Refuse values that mean nothing when a program starts, not when one is needed.

    Raises:
        InvalidArgumentError: names the variable, its value and the values it may have.
    """
    plugins_strict()
    cpu_isa_limit()
