"""What a thread has told torch, put aside while a deployment is built: its tensors outlive the caller's blocks."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def plain_torch() -> Iterator[None]:
    """Tensors without a named device on the CPU, and none of them an inference tensor, whatever the caller chose.

    `torch.set_default_device` and `torch.inference_mode` hold for one thread; the engine's own starts without them.
    """
    with torch.device("cpu"), torch.inference_mode(False):
        yield
