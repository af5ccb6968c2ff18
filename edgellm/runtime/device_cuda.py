"""The CUDA form of the device seam: torch's current stream, pinned uploads, and how much memory is really free."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from edgellm.errors import InvalidArgumentError, StepDeviceError
from edgellm.log import get_logger
from edgellm.memory import format_bytes
from edgellm.runtime.device import Device, Event, Stream, available_host_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    import numpy.typing as npt

logger = get_logger(__name__)

# Boards whose GPU has no memory of its own, by words of their device name; for versions of torch that do not say.
_INTEGRATED_NAMES = ("orin", "thor", "xavier", "tegra", "gb10", "spark")
_HOST_RESERVE_FRACTION = 0.1
_MOST_HOST_RESERVE_BYTES = 2 << 30


class CudaEvent(Event):
    """A recorded event of one stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def synchronize(self) -> None:
        """Wait for the event.

        Raises:
            StepDeviceError: the device reports an error.
        """
        with device_errors("waiting for an event"):
            self._event.synchronize()


class CudaStream(Stream):
    """torch's current stream of a device, looked up at each call: kernels, GEMMs and copies all go there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def synchronize(self) -> None:
        """Wait until everything enqueued so far is complete.

        Raises:
            StepDeviceError: the device reports an error; completion is unknown.  After most of them (an illegal
                address, say) every later call fails too, and only a new process helps.
        """
        with device_errors("waiting for the stream"):
            torch.cuda.current_stream(self._device).synchronize()

    def record_event(self) -> Event:
        with device_errors("recording an event"):
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            return CudaEvent(event)


class CudaDevice(Device):
    """One GPU.

    Raises (at construction):
        InvalidArgumentError: torch sees no such device.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        wanted = torch.device(device)
        if wanted.type != "cuda" or not torch.cuda.is_available():
            raise InvalidArgumentError(f"device is {str(wanted)!r}, and torch sees no CUDA device; use device='cpu'")
        index = torch.cuda.current_device() if wanted.index is None else wanted.index
        if index >= torch.cuda.device_count():
            raise InvalidArgumentError(
                f"device is 'cuda:{index}'; torch sees {torch.cuda.device_count()} CUDA devices, numbered from 0"
            )
        self._device = torch.device("cuda", index)
        self._stream = CudaStream(self._device)

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self._device)

    @property
    def torch_device(self) -> torch.device:
        return self._device

    @property
    def stream(self) -> Stream:
        return self._stream

    @property
    def is_integrated(self) -> bool:
        """Whether the GPU shares the host's memory (Jetson, Thor, Spark)."""
        return is_integrated(torch.cuda.get_device_properties(self._device))

    def upload(self, host: npt.NDArray[np.generic]) -> torch.Tensor:
        """Copy a host array to the device in stream order; the host array may be reused at once."""
        with device_errors("uploading"):
            # torch keeps pinned memory until the copies that were made from it are complete.
            return torch.from_numpy(host.copy()).pin_memory().to(self._device, non_blocking=True)

    def download(self, tensor: torch.Tensor) -> npt.NDArray[np.generic]:
        """Copy to the host and wait for it.

        Raises:
            StepDeviceError: the device reports an error.
        """
        with device_errors("downloading"):
            return tensor.detach().cpu().numpy()

    def fetch(self, tensor: torch.Tensor) -> Callable[[], npt.NDArray[np.generic]]:
        """See `Device.fetch`.

        Raises:
            StepDeviceError: the device reports an error, now or when the copy is waited for.
        """
        with device_errors("downloading"):
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor.detach(), non_blocking=True)
        copied = self._stream.record_event()

        def wait() -> npt.NDArray[np.generic]:
            copied.synchronize()
            return host.numpy()

        return wait

    def free_memory_bytes(self) -> int:
        """Bytes that a new allocation could use, memory that torch holds unused included."""
        with device_errors("asking for free memory"):
            free, total = torch.cuda.mem_get_info(self._device)
            unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        if self.is_integrated:
            return unified_free_bytes(available_host_bytes(), total) + unused
        return free + unused

    def healthy(self) -> bool:
        """Whether the device still answers; False after an error that stays for the life of the process."""
        try:
            torch.cuda.synchronize(self._device)
            torch.zeros(1, device=self._device).cpu()
        except torch.cuda.OutOfMemoryError:  # that is an answer: memory is full, nothing is broken
            return True
        except RuntimeError as error:
            logger.error("%s does not answer: %s", self._device, error)
            return False
        return True


def is_integrated(properties: object) -> bool:
    """Whether device properties describe a GPU that shares the host's memory."""
    flag = getattr(properties, "is_integrated", None)
    if flag is not None:
        return bool(flag)
    name = str(getattr(properties, "name", "")).lower()
    return any(word in name for word in _INTEGRATED_NAMES)


def unified_free_bytes(host_available: int, total: int) -> int:
    """What an allocation may take where GPU and host share memory.

    The driver's own number is no guide there: it counts the page cache, which holds the weight files that were just
    read, as used.  MemAvailable counts it as reclaimable.  A part stays for the system, because what follows from
    taking all of it is not an error but a killed process.
    """
    reserve = min(int(total * _HOST_RESERVE_FRACTION), _MOST_HOST_RESERVE_BYTES)
    return max(0, min(host_available, total) - reserve)


@contextmanager
def device_errors(doing: str) -> Iterator[None]:
    """Turn what torch raises about a device into `StepDeviceError`."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, StepDeviceError):
            raise
        raise StepDeviceError(f"{doing} failed: {error}") from error


@contextmanager
def memory_errors(what: str, needed_bytes: int, device: CudaDevice, remedy: str) -> Iterator[None]:
    """Turn an out-of-memory error while starting into one that names what to change.

    Args:
        what: what was being allocated ("the weights").
        needed_bytes: how much that is.
        remedy: which options to change, and in which direction.
    Raises:
        InvalidArgumentError: memory ran out.
    """
    try:
        yield
    except (torch.cuda.OutOfMemoryError, StepDeviceError) as error:
        if not isinstance(error.__cause__ or error, torch.cuda.OutOfMemoryError):
            raise
        free = device.free_memory_bytes()
        raise InvalidArgumentError(
            f"{what} need {format_bytes(needed_bytes)}, {format_bytes(free)} are free on {device.name}; {remedy}"
        ) from error
