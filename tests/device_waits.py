"""Waits of the host for a CUDA device: refused where nothing may wait, counted where one download may."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the device is an error, as far as torch knows."""
    torch.cuda.synchronize()
    try:
        refuse_waits(True)
        yield
    finally:
        refuse_waits(False)


def count_downloads(decoder: Any) -> list[int]:
    """Refuse every wait of the decoder's `propose` before its download; afterwards it may wait.

    Returns:
        Lengths of what was downloaded, which grows with every round.
    """
    downloads: list[int] = []
    propose = decoder.propose

    def checked(executor: Any, batch: Any, rows: Any, limits: Any) -> Any:
        download = executor.device.download

        def counted(tensor: torch.Tensor) -> Any:
            refuse_waits(False)
            downloads.append(len(tensor))
            return download(tensor)

        executor.device.download = counted
        try:
            refuse_waits(True)
            return propose(executor, batch, rows, limits)
        finally:
            refuse_waits(False)
            del executor.device.download

    decoder.propose = checked
    return downloads


def refuse_waits(refused: bool) -> None:
    """Whether anything that makes the host wait for the device is an error, as far as torch knows."""
    with warnings.catch_warnings():  # torch calls the mode a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error" if refused else "default")
