"""The inputs of a decode step become those of the step behind it, without a copy from the host."""

from __future__ import annotations

import ctypes

import torch

from edgellm.kernels.cu import loader
from edgellm.kernels.cu.launch import LaunchConfig
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import address, check_vector

THREADS = 128  # kAdvanceThreads


class AdvanceRowsParams(ctypes.Structure):
    _fields_ = (
        ("tokens", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("token_ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("past_len", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("num_rows", ctypes.c_int32),
    )


SPEC = KernelSpec(
    name="advance_rows",
    entry="advance_rows",
    params=AdvanceRowsParams,
    params_name="AdvanceRowsParams",
    variants=(Variant((), ""),),
)


def launch_config(num_rows: int) -> LaunchConfig:
    """A thread a row."""
    return LaunchConfig((-(-num_rows // THREADS), 1, 1), (THREADS, 1, 1))


def advance_rows(
    tokens: torch.Tensor,
    slots: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    past_len: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    """token_ids[i] = tokens[i], and positions, past_len and lengths grow by 1, for each row that has a slot.

    Args:
        tokens: (N,) int32, what was chosen behind the rows, CUDA.
        slots: (N,) int32; rows of -1 (padding) stay as they are.
        token_ids, positions, past_len, lengths: (N,) int32, a step of one token a row.
    Raises:
        InvalidArgumentError: shapes, types or devices do not fit.  Nothing was launched.
    Effects: writes the last four.  Ordering: torch's current stream; never waits.
    """
    num_rows = tokens.numel()
    names = ("tokens", "slots", "token_ids", "positions", "past_len", "lengths")
    vectors = (tokens, slots, token_ids, positions, past_len, lengths)
    for name, vector in zip(names, vectors, strict=True):
        check_vector(name, vector, num_rows, torch.int32)
    if num_rows == 0:
        return
    params = AdvanceRowsParams(*map(address, vectors), num_rows)
    loader.kernel(SPEC, ()).launch(launch_config(num_rows), params, pdl=True)
