"""Which device a deployment computes on, and why."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from edgellm.errors import InvalidArgumentError, KernelError
from edgellm.log import get_logger
from edgellm.memory import count

if TYPE_CHECKING:
    from edgellm.kernels.cu.spec import KernelSpec

logger = get_logger(__name__)

MIN_CAPABILITY = (8, 0)
MAX_INDEX = 127  # torch keeps a device's number in 8 bits
_NUMBERED = re.compile(r"cuda:(0|[1-9][0-9]*)")


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """Attributes:
    device: "cpu" or "cuda:N".
    reason: why this one, in words.
    """

    device: torch.device
    reason: str


def choose_device(wanted: str) -> DeviceChoice:
    """The device that "auto", "cpu", "cuda" or "cuda:N" stands for; the log says which and why.

    Raises:
        InvalidArgumentError: no such name, or a CUDA device was asked for by name and cannot be used; the message says
            why.
    """
    if wanted == "cpu":
        return DeviceChoice(torch.device("cpu"), "it was asked for")
    if wanted == "auto":
        choice = _automatic()
        level = logger.info if choice.device.type == "cuda" or not torch.cuda.is_available() else logger.warning
        level("computing on %s: %s", choice.device, choice.reason)
        return choice
    device = _named(wanted)
    refusal = why_unusable(device)
    if refusal:
        raise InvalidArgumentError(
            f"device is {wanted!r}, which cannot be used: {refusal}; mend that ('edgellm doctor' says what is there) "
            "or pass device='cpu'"
        )
    return DeviceChoice(device, "it was asked for")


def _named(wanted: str) -> torch.device:
    if wanted == "cuda":
        return _current()
    match = _NUMBERED.fullmatch(wanted)
    if match is None or len(match[1]) > 3 or int(match[1]) > MAX_INDEX:
        raise InvalidArgumentError(
            f"device is {wanted!r}; 'auto', 'cpu', 'cuda' or 'cuda:N' with N from 0 to {MAX_INDEX} is needed"
        )
    return torch.device("cuda", int(match[1]))


def _automatic() -> DeviceChoice:
    device = _current()
    refusal = why_unusable(device)
    if refusal:
        return DeviceChoice(torch.device("cpu"), refusal)
    return DeviceChoice(device, f"{torch.cuda.get_device_name(device)} is there and its kernels compile")


def why_unusable(device: torch.device) -> str:
    """Why our kernels cannot run on a CUDA device; empty when they can."""
    if not torch.cuda.is_available():
        build = "no driver or no device" if torch.version.cuda else "a build without CUDA; one with it is needed"
        return f"torch {torch.__version__} sees no CUDA device ({build})"
    if device.index >= torch.cuda.device_count():
        return f"torch sees {count(torch.cuda.device_count(), 'CUDA device')}, numbered from 0"
    try:
        capability = torch.cuda.get_device_capability(device)
    except RuntimeError as error:  # in a forked child of a process that used CUDA, say
        return f"CUDA cannot be used in this process: {error}"
    if capability < MIN_CAPABILITY:
        return (
            f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}, "
            f"{MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or newer is needed"
        )
    return _why_no_kernels(device)


def _why_no_kernels(device: torch.device) -> str:
    """Compile (or find) and load one small kernel: compiler, headers and driver are all needed for it."""
    from edgellm.kernels.cu import loader

    try:
        loader.kernel(*_probe(), device=device.index)
    except (KernelError, ImportError) as error:
        return f"CUDA kernels cannot be built: {error}"
    return ""


def _probe() -> tuple[KernelSpec, tuple[object, ...]]:
    from edgellm.kernels.cu import table_update

    return table_update.SPEC, table_update.SPEC.variants[0].key


def _current() -> torch.device:
    """torch's current CUDA device; number 0 where there is none, or where CUDA cannot be used."""
    try:
        return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    except RuntimeError:  # `why_unusable` says why
        return torch.device("cuda", 0)
