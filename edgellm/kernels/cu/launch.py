"""How a kernel is launched: grid, block and shared memory, computed by pure functions of shapes and device limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from edgellm.errors import InvalidArgumentError

# Values of CUdevice_attribute.
_SM_COUNT = 16
_L2_BYTES = 38
_ARCH_MAJOR = 75
_ARCH_MINOR = 76
_MAX_SHARED_BYTES = 97


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Blocks a grid, threads a block (x, y, z) and bytes of dynamic shared memory a block."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What launch configurations depend on.  `arch` is 10 * major + minor of the compute capability."""

    sm_count: int
    max_shared_bytes: int  # a block may have after opting in
    arch: int
    l2_bytes: int


def device_limits(device: torch.device) -> DeviceLimits:
    """The limits of a CUDA device; asked once, then cached.

    Raises:
        InvalidArgumentError: it is no CUDA device.
        KernelError: there is no driver or no such device.
    """
    if device.type != "cuda":
        raise InvalidArgumentError(f"device is {device}; kernels run on a CUDA device")
    return _limits(current_device() if device.index is None else device.index)


def current_device() -> int:
    """Ordinal of torch's current CUDA device on this thread."""
    return torch.cuda.current_device()


def current_stream_lookup() -> Callable[[int], int]:
    """A function from a device ordinal to the address of torch's current stream there, on the calling thread.

    The cheap one (0.1 us) is private to torch; where a version lacks it, the public one is used.
    """
    private: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return private or _current_stream


def _current_stream(ordinal: int) -> int:
    return torch.cuda.current_stream(ordinal).cuda_stream


@cache
def _limits(ordinal: int) -> DeviceLimits:
    from edgellm.kernels import _launch

    return DeviceLimits(
        sm_count=_launch.device_attribute(ordinal, _SM_COUNT),
        max_shared_bytes=_launch.device_attribute(ordinal, _MAX_SHARED_BYTES),
        arch=10 * _launch.device_attribute(ordinal, _ARCH_MAJOR) + _launch.device_attribute(ordinal, _ARCH_MINOR),
        l2_bytes=_launch.device_attribute(ordinal, _L2_BYTES),
    )
