"""Per-slot state by a list of slots: clear rows, set them, or add to them."""

from __future__ import annotations

import ctypes

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu import loader
from edgellm.kernels.cu.launch import LaunchConfig
from edgellm.kernels.cu.rows import MAX_GRID_YZ, access_elements, allows_vectors
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import address, check_device, check_shape, describe

THREADS = 128  # kSlotThreads
STATE_TYPES = {
    torch.int32: "int",
    torch.int64: "long long",
    torch.float32: "float",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
}


class SlotUpdateParams(ctypes.Structure):
    _fields_ = (
        ("state", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("state_stride", ctypes.c_int64),
        ("values_stride", ctypes.c_int64),
        ("width", ctypes.c_int32),
        ("num_slots", ctypes.c_int32),
        ("is_add", ctypes.c_int32),
    )


SPEC = KernelSpec(
    name="slot_update",
    entry="slot_update",
    params=SlotUpdateParams,
    params_name="SlotUpdateParams",
    variants=tuple(
        Variant((dtype, step), f"{name}, {step}")
        for dtype, name in STATE_TYPES.items()
        for step in (access_elements(dtype), 1)
    ),
)


def launch_config(num_entries: int, width: int, step: int) -> LaunchConfig:
    """An entry of the list along x, columns along y, `step` a thread."""
    return LaunchConfig((num_entries, -(-width // (step * THREADS)), 1), (THREADS, 1, 1))


def slot_update(
    state: torch.Tensor, slots: torch.Tensor, values: torch.Tensor | None = None, *, add: bool = False
) -> None:
    """state[slots[i]] = values[i], or += values[i] with `add`, or 0 without values.

    Args:
        state: (num_slots, ...) int32, int64, float32, float16 or bfloat16, contiguous, CUDA.
        slots: (n,) int32, each slot at most once; out of range (-1: padding) is skipped.
        values: (n, ...) like state's rows, dtype of state, contiguous; None clears.
    Raises:
        InvalidArgumentError: shapes, types or devices do not fit.  Nothing was launched.
    Effects: writes state.  Ordering: torch's current stream; never waits.
    """
    check_shape("slots", slots, (-1,), torch.int32)
    _check_state(state, add=add, has_values=values is not None)
    if values is not None:
        check_shape("values", values, (slots.shape[0], *state.shape[1:]), state.dtype)
    if slots.shape[0] == 0 or state.numel() == 0:
        return
    width = state.stride(0)
    rows = state.view(-1, width), None if values is None else values.view(-1, width)
    step = access_elements(state.dtype) if allows_vectors(*rows) else 1
    config = launch_config(slots.shape[0], width, step)
    if config.grid[1] > MAX_GRID_YZ:
        raise InvalidArgumentError(f"a row of state has {width} elements; at most {MAX_GRID_YZ * THREADS * step} fit")
    params = SlotUpdateParams(
        address(state), address(slots), address(values), width, width, width, state.shape[0], int(add)
    )
    loader.kernel(SPEC, (state.dtype, step)).launch(config, params, pdl=True)


def _check_state(state: torch.Tensor, *, add: bool, has_values: bool) -> None:
    if state.dim() < 1 or state.dtype not in STATE_TYPES or not state.is_contiguous():
        known = ", ".join(map(str, STATE_TYPES))
        raise InvalidArgumentError(f"state is {describe(state)}; a contiguous (num_slots, ...) of {known} is needed")
    if add and not has_values:
        raise InvalidArgumentError("add is True but there are no values to add; pass values")
    check_device("state", state)
