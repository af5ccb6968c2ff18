"""Operands of the gated delta rule on CUDA: their checks, and the parameter struct that its kernels share."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu.rows import ROW_TYPES
from edgellm.kernels.cu.tensors import address, check_device, check_vector, describe

if TYPE_CHECKING:
    from edgellm.kernels.cu.state_rows import StateRows

MAX_KEY_DIM = 256


class GatedDeltaParams(ctypes.Structure):
    _fields_ = (
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("decay", ctypes.c_void_p),
        ("beta", ctypes.c_void_p),
        ("state", ctypes.c_void_p),
        ("checkpoint", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("query_start", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("checkpoint_start", ctypes.c_void_p),
        ("queries", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("reads", ctypes.c_void_p),
        ("scores", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("states", ctypes.c_void_p),
        ("totals", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("q_stride", ctypes.c_int64),
        ("k_stride", ctypes.c_int64),
        ("v_stride", ctypes.c_int64),
        ("decay_stride", ctypes.c_int64),
        ("beta_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("state_stride", ctypes.c_int64),
        ("checkpoint_stride", ctypes.c_int64),
        ("num_rows", ctypes.c_int32),
        ("num_slots", ctypes.c_int32),
        ("num_checkpoints", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("key_dim", ctypes.c_int32),
        ("value_dim", ctypes.c_int32),
        ("longest", ctypes.c_int32),
        ("is_wide", ctypes.c_int32),
        ("is_unit", ctypes.c_int32),
        ("first_place", ctypes.c_int32),
        ("num_places", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Sizes of one call: tokens T, rows N, heads of k and of v, and the two sizes of a head's state."""

    tokens: int
    rows: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class DeltaOperands:
    """The tensors of one call; see `gated_delta.gated_delta`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor
    state: torch.Tensor
    rows: StateRows
    out: torch.Tensor
    checkpoint: torch.Tensor | None

    def check(self) -> DeltaShape:
        """Refuse what does not fit together.

        Raises:
            InvalidArgumentError: names the tensor, what it is and what is needed.
        """
        shape = self._shape()
        tokens, keys = shape.tokens, (shape.key_heads, shape.key_dim)
        dtype = self.k.dtype
        check_heads("q", self.q, (tokens, *keys), dtype)
        check_heads("k", self.k, (tokens, *keys), dtype)
        check_heads("v", self.v, (tokens, shape.heads, shape.value_dim), dtype)
        check_heads("out", self.out, (tokens, shape.heads, shape.value_dim), dtype)
        for name, gate in (("decay", self.decay), ("beta", self.beta)):
            check_heads(name, gate, (tokens, shape.heads), torch.float32)
        state_shape = (-1, shape.heads, shape.key_dim, shape.value_dim)
        check_heads("state", self.state, state_shape, torch.float32)
        if self.checkpoint is not None:
            check_heads("checkpoint", self.checkpoint, state_shape, torch.float32)
        check_state_rows(self.rows)
        return shape

    def _shape(self) -> DeltaShape:
        k, v = self.k, self.v
        if k.dim() != 3 or v.dim() != 3 or 0 in k.shape[1:] or 0 in v.shape[1:] or v.shape[1] % k.shape[1]:
            raise InvalidArgumentError(
                f"k is {tuple(k.shape)} and v {tuple(v.shape)}; (T, Hk, dk) and (T, Hv, dv) with Hv a multiple of Hk "
                "are needed"
            )
        if k.shape[2] > MAX_KEY_DIM:
            raise InvalidArgumentError(f"k has head size {k.shape[2]}; at most {MAX_KEY_DIM} is supported on CUDA")
        if k.dtype not in ROW_TYPES:
            raise InvalidArgumentError(f"k is {k.dtype}; one of {', '.join(map(str, ROW_TYPES))} is needed")
        return DeltaShape(k.shape[0], self.rows.num_rows, k.shape[1], v.shape[1], k.shape[2], v.shape[2])

    def params(self, shape: DeltaShape, *, scale: float, l2norm: bool) -> GatedDeltaParams:
        """Everything but what chunks need; `longest` lets every row go token by token."""
        rows, checkpoint = self.rows, self.checkpoint
        return GatedDeltaParams(
            q=address(self.q),
            k=address(self.k),
            v=address(self.v),
            decay=address(self.decay),
            beta=address(self.beta),
            state=address(self.state),
            checkpoint=address(checkpoint),
            out=address(self.out),
            query_start=address(rows.query_start),
            slots=address(rows.slots),
            checkpoint_start=None if checkpoint is None else address(rows.checkpoint_start),
            q_stride=self.q.stride(0),
            k_stride=self.k.stride(0),
            v_stride=self.v.stride(0),
            decay_stride=self.decay.stride(0),
            beta_stride=self.beta.stride(0),
            out_stride=self.out.stride(0),
            state_stride=self.state.stride(0),
            checkpoint_stride=0 if checkpoint is None else checkpoint.stride(0),
            num_rows=shape.rows,
            num_slots=self.state.shape[0],
            num_checkpoints=0 if checkpoint is None else checkpoint.shape[0],
            heads=shape.heads,
            group=shape.heads // shape.key_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            longest=2**31 - 1,
            is_wide=int(all(part is None or is_wide(part) for part in (self.state, checkpoint))),
            is_unit=int(l2norm),
            scale=scale,
        )


def is_wide(state: torch.Tensor) -> bool:
    """Whether four columns of a state make one aligned access."""
    return state.shape[-1] % 4 == 0 and state.stride(0) % 4 == 0 and state.data_ptr() % 16 == 0


def check_heads(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuse anything but this shape (-1: any) and type with C-ordered rows, which may lie apart.

    Raises:
        InvalidArgumentError: names the tensor, what it is and what is needed.
    """
    have = tensor.shape
    fits = len(have) == len(shape) and all(want in (-1, size) for want, size in zip(shape, have, strict=True))
    if not fits or tensor.dtype != dtype or not _has_whole_rows(tensor):
        raise InvalidArgumentError(
            f"{name} is {describe(tensor)}; {shape} {dtype} is needed, rows apart but without gaps inside"
        )
    check_device(name, tensor)


def _has_whole_rows(tensor: torch.Tensor) -> bool:
    """Whether each tensor[i] is contiguous."""
    step = 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def check_state_rows(rows: StateRows) -> None:
    """Refuse rows whose arrays do not fit together.

    Raises:
        InvalidArgumentError: names the array, what it is and what is needed.
    """
    check_vector("slots", rows.slots, rows.num_rows, torch.int32)
    check_vector("query_start", rows.query_start, rows.num_rows + 1, torch.int32)
    if rows.checkpoint_start is not None:
        check_vector("checkpoint_start", rows.checkpoint_start, rows.num_rows, torch.int32)
