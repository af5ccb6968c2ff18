"""How many threads the CPU kernels use."""

from __future__ import annotations

import functools

import torch  # loads the OpenMP runtime before `_ops` asks for one

from edgellm.kernels.cpu import _ops


@functools.cache
def _runtime_is_shared() -> bool:
    return _ops.shares_threads(b"libtorch_cpu.so")


def kernel_threads() -> int:
    """For operations beside torch's own: torch's threads, or one where that would need a second OpenMP pool.

    Two OpenMP pools in one process spin against each other for the same cores.
    """
    return torch.get_num_threads() if _runtime_is_shared() else 1


def helper_threads() -> int:
    """For the many short operations of a step of few rows: the kernels' own helper threads (a negative count)."""
    return -torch.get_num_threads()
