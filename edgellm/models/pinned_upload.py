"""`PinnedUpload`: stored tensors to a GPU through two pinned buffers, so that no tensor is whole in host memory.

While one buffer is copied to the device the next is read from the file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

PIECE_BYTES = 32 << 20
_NUM_BUFFERS = 2


@runtime_checkable
class PieceReader(Protocol):
    """A weight source whose tensors lie in a file as they are."""

    def read_pieces(self, name: str, buffers: Iterator[memoryview]) -> Iterator[int]:
        """Fill buffers with the stored bytes, in order; yields how many each got: all it holds, or the rest."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """The stored element type."""
        ...


class PinnedUpload:
    """Copies on torch's current stream of `device`.

    Args:
        piece_bytes: size of a buffer, a multiple of 4.
    """

    def __init__(self, source: PieceReader, device: torch.device, *, piece_bytes: int = PIECE_BYTES) -> None:
        self._source = source
        gpu = device.type == "cuda"
        # The device is named, because torch pins nothing that its default device would take elsewhere.
        self._buffers = [
            torch.empty(piece_bytes, dtype=torch.uint8, device="cpu", pin_memory=gpu) for _ in range(_NUM_BUFFERS)
        ]
        self._copied = [torch.cuda.Event() if gpu else None for _ in self._buffers]  # type: ignore[no-untyped-call]
        self._turn = 0

    def fill(self, name: str, target: torch.Tensor) -> None:
        """Read a tensor into `target`, converted to its dtype on the device.

        Args:
            target: contiguous, on the device, as many elements as the stored tensor.
        Raises:
            WeightFileError: see the source.
        """
        dtype, flat, start = self._source.dtype(name), target.view(-1), 0
        for count in self._source.read_pieces(name, self._free_buffers()):
            # To the device as it is stored: torch would convert on the host, into memory of its own.
            piece = self._buffers[self._turn][:count].view(dtype).to(target.device, non_blocking=True)
            flat[start : start + len(piece)].copy_(piece)
            event = self._copied[self._turn]
            if event is not None:
                event.record()
            start += len(piece)

    def _free_buffers(self) -> Iterator[memoryview]:
        """The buffers in turn, each once its last copy is done."""
        while True:
            self._turn = (self._turn + 1) % len(self._buffers)
            event = self._copied[self._turn]
            if event is not None:
                event.synchronize()
            yield self._buffers[self._turn].numpy().data
