"""Memory between host and device that steps reuse: one upload of many small arrays, one download of many results.

On a CUDA device the host side is page-locked, so both copies are asynchronous; on the CPU the same code runs without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    Array = npt.NDArray[Any]
    Shape = tuple[str, tuple[int, ...]]  # NumPy's letter of the type, and the lengths

_ALIGNMENT = 16
_FIRST_BYTES = 4096
_MAX_LAYOUTS = 256


@dataclass(frozen=True, slots=True)
class Layout:
    """Arrays side by side in both memories, as views of both.

    Attributes:
        host, device: the views, in the order of the shapes.
        host_bytes, device_bytes: all of it.
    """

    host: list[Array]
    device: list[torch.Tensor]
    host_bytes: torch.Tensor
    device_bytes: torch.Tensor


class Staging:
    """Bytes on a device and as many on the host, grown by doubling, never shrunk.

    Layouts are kept, since steps of a session ask for the same ones again and again.  Everything handed out is
    overwritten by the next step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._copied = torch.cuda.Event() if self._is_cuda else None  # type: ignore[no-untyped-call]
        self._capacity = 0
        self._host = self._on_device = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._layouts: dict[tuple[Shape, ...], Layout] = {}

    def layout(self, shapes: tuple[Shape, ...]) -> Layout:
        """Views for arrays of these types and shapes; contents undefined."""
        found = self._layouts.get(shapes)
        if found is None:
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            found = self._layouts[shapes] = self._make(shapes)
        return found

    def upload(self, arrays: dict[str, Array]) -> dict[str, torch.Tensor]:
        """Send arrays to the device, on the current stream.

        The host bytes are read until the stream has passed this: wait before the next upload.
        """
        layout = self.layout(tuple((array.dtype.char, array.shape) for array in arrays.values()))
        for place, array in zip(layout.host, arrays.values(), strict=True):
            place[...] = array
        layout.device_bytes.copy_(layout.host_bytes, non_blocking=True)
        return dict(zip(arrays, layout.device, strict=True))

    def download(self, layout: Layout, beside: Callable[[], None] | None = None) -> list[Array]:
        """Bring everything of a layout to the host and wait for it.

        Args:
            beside: called once the copy is enqueued; what it enqueues is not waited for.
        """
        layout.host_bytes.copy_(layout.device_bytes, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))
        if beside is not None:
            beside()
        if self._copied is not None:
            self._copied.synchronize()
        return layout.host

    def _make(self, shapes: tuple[Shape, ...]) -> Layout:
        offsets, size = [], 0
        for char, shape in shapes:
            offsets.append(size)
            num_bytes = int(np.prod(shape)) * np.dtype(char).itemsize
            size += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._reserve(size)
        host = self._host.numpy()
        views = [
            host[offset : offset + int(np.prod(shape)) * np.dtype(char).itemsize].view(char).reshape(shape)
            for offset, (char, shape) in zip(offsets, shapes, strict=True)
        ]
        device = [
            self._on_device[offset : offset + view.nbytes].view(torch.from_numpy(view).dtype).view(view.shape)
            for offset, view in zip(offsets, views, strict=True)
        ]
        return Layout(views, device, self._host[:size], self._on_device[:size])

    def _reserve(self, size: int) -> None:
        if size <= self._capacity:
            return
        self._layouts.clear()
        capacity = max(_FIRST_BYTES, 1 << (size - 1).bit_length())
        on_device = torch.empty(capacity, dtype=torch.uint8, device=self._device)
        self._host = torch.empty(capacity, dtype=torch.uint8, device="cpu", pin_memory=self._is_cuda)
        # Only now: where memory runs out, the next step must find what there is.
        self._on_device, self._capacity = on_device, capacity
