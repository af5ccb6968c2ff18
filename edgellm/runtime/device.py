"""The device seam: stream, event, upload, synchronise.

Everything above this file is written against `Device`; the CPU form below completes work immediately,
the CUDA form (`runtime/device_cuda.py`) orders it on one stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt
    import torch


class Stream(ABC):
    """An ordered queue of device work."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything enqueued so far is complete.

        Raises:
            StepDeviceError: the device reports an error; completion is unknown.
        """

    @abstractmethod
    def record_event(self) -> Event:
        """An event that completes when everything enqueued so far has completed."""


class Event(ABC):
    @abstractmethod
    def synchronize(self) -> None:
        """Wait for the event."""


class Device(ABC):
    """Where tensors live and work runs."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Human-readable device name."""

    @property
    @abstractmethod
    def torch_device(self) -> torch.device: ...

    @property
    @abstractmethod
    def stream(self) -> Stream: ...

    @abstractmethod
    def upload(self, host: npt.NDArray[np.generic]) -> torch.Tensor:
        """Copy a host array to the device in stream order; the host array may be reused at once."""

    @abstractmethod
    def download(self, tensor: torch.Tensor) -> npt.NDArray[np.generic]:
        """Copy to the host and wait for it."""

    def fetch(self, tensor: torch.Tensor) -> Callable[[], npt.NDArray[np.generic]]:
        """Begin to copy to the host, in stream order.

        Returns:
            What waits for the copy, and only for what was enqueued in front of it, and returns it.
        """
        copied = self.download(tensor).copy()
        return lambda: copied

    @abstractmethod
    def free_memory_bytes(self) -> int:
        """Bytes that a new allocation could use."""


class _CompletedEvent(Event):
    def synchronize(self) -> None:
        return


class _ImmediateStream(Stream):
    def synchronize(self) -> None:
        return

    def record_event(self) -> Event:
        return _CompletedEvent()


class CpuDevice(Device):
    """Host execution: every call completes before it returns."""

    def __init__(self) -> None:
        self._stream = _ImmediateStream()

    @property
    def name(self) -> str:
        return "cpu"

    @property
    def torch_device(self) -> torch.device:
        import torch

        return torch.device("cpu")

    @property
    def stream(self) -> Stream:
        return self._stream

    def upload(self, host: npt.NDArray[np.generic]) -> torch.Tensor:
        import torch

        return torch.from_numpy(host.copy())

    def download(self, tensor: torch.Tensor) -> npt.NDArray[np.generic]:
        return tensor.detach().cpu().numpy()

    def free_memory_bytes(self) -> int:
        return available_host_bytes()


def available_host_bytes() -> int:
    """MemAvailable of the host, capped by the cgroup's limit where one is set."""
    import os

    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    try:
        with open("/proc/meminfo", encoding="ascii") as meminfo:
            for line in meminfo:
                if line.startswith("MemAvailable:"):
                    available = int(line.split()[1]) * 1024
    except OSError:
        return available
    return min(available, _cgroup_headroom_bytes(available))


def _cgroup_headroom_bytes(default: int) -> int:
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as limit_file:
            limit = limit_file.read().strip()
        with open("/sys/fs/cgroup/memory.current", encoding="ascii") as current_file:
            current = int(current_file.read())
    except (OSError, ValueError):
        return default
    return default if limit == "max" else max(0, int(limit) - current)
