"""Changes of logits before a token is chosen (bias, grammar, penalties, excluded tokens), and renaming of ids."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntFlag

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu import loader
from edgellm.kernels.cu.launch import LaunchConfig
from edgellm.kernels.cu.rows import MAX_GRID_YZ
from edgellm.kernels.cu.sample import LOGIT_TYPES, check_logits, logit_type_name
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import address, check_rows, check_shape, check_vector

EDIT_CHUNK = 4096  # kEditChunk
EDIT_THREADS = 512  # kEditThreads
REMAP_THREADS = 128


class EditFlag(IntFlag):
    """What the raw logits of a row contain, and whether a finite one is left, after the grammar and at last."""

    RAW_NAN = 1
    RAW_INFINITY = 2
    RAW_FINITE = 4
    LEFT_BY_GRAMMAR = 8
    LEFT_AT_LAST = 16


@dataclass(frozen=True, slots=True)
class IdLists:
    """A list of distinct token ids for each of E rows: those of row e are ids[start[e] : start[e + 1]].

    Attributes:
        start: (E + 1,) int32.  ids: (n,) int32, n at least start[E].
        values: (n,), what belongs to each id, where the list says more than ids.
    """

    start: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """What is changed in E rows, in this order; None: in no row.  Everything contiguous, on the device of the logits.

    Attributes:
        bias: values float64, added.
        mask: (M, ceil(vocab_size / 32)) int32; bit (id % 32) of word (id / 32) set: allowed.  Others become -inf.
        mask_index: (E,) int32, the mask of each row, -1: none.  Given with `mask`.
        seen, repetition: tokens whose positive logits are divided, others multiplied, by repetition[e]; (E,) float64.
        output, presence, frequency: frequency[e] * count + presence[e] is subtracted; values int32 counts.
        excluded: become -inf.
    """

    bias: IdLists | None = None
    mask: torch.Tensor | None = None
    mask_index: torch.Tensor | None = None
    seen: IdLists | None = None
    repetition: torch.Tensor | None = None
    output: IdLists | None = None
    presence: torch.Tensor | None = None
    frequency: torch.Tensor | None = None
    excluded: IdLists | None = None


class LogitEditParams(ctypes.Structure):
    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("row_index", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("flags", ctypes.c_void_p),
        ("bias_start", ctypes.c_void_p),
        ("bias_ids", ctypes.c_void_p),
        ("bias_values", ctypes.c_void_p),
        ("mask", ctypes.c_void_p),
        ("mask_index", ctypes.c_void_p),
        ("seen_start", ctypes.c_void_p),
        ("seen_ids", ctypes.c_void_p),
        ("repetition", ctypes.c_void_p),
        ("output_start", ctypes.c_void_p),
        ("output_ids", ctypes.c_void_p),
        ("output_counts", ctypes.c_void_p),
        ("presence", ctypes.c_void_p),
        ("frequency", ctypes.c_void_p),
        ("excluded_start", ctypes.c_void_p),
        ("excluded_ids", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("mask_stride", ctypes.c_int64),
        ("vocab", ctypes.c_int32),
    )


class RemapIdsParams(ctypes.Structure):
    _fields_ = (
        ("ids", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("num_ids", ctypes.c_int32),
        ("table_size", ctypes.c_int32),
    )


EDIT = KernelSpec(
    name="logit_edit",
    entry="logit_edit",
    params=LogitEditParams,
    params_name="LogitEditParams",
    variants=tuple(Variant((dtype,), logit_type_name(dtype)) for dtype in LOGIT_TYPES),
)
REMAP = KernelSpec(
    name="remap_ids",
    entry="remap_ids",
    source="logit_edit.cu",
    params=RemapIdsParams,
    params_name="RemapIdsParams",
    variants=(Variant((), ""),),
)
SPECS = (EDIT, REMAP)


def launch_config(num_rows: int, vocab_size: int) -> LaunchConfig:
    """Chunks of a row along x, rows along y."""
    return LaunchConfig((-(-vocab_size // EDIT_CHUNK), num_rows, 1), (EDIT_THREADS, 1, 1))


def remap_config(num_ids: int) -> LaunchConfig:
    return LaunchConfig((-(-num_ids // REMAP_THREADS), 1, 1), (REMAP_THREADS, 1, 1))


def logit_edit(
    logits: torch.Tensor,
    edits: LogitEdits,
    out: torch.Tensor,
    flags: torch.Tensor,
    *,
    row_index: torch.Tensor | None = None,
) -> None:
    """Write edited copies of rows, in float64 as the host computes them.

    Args:
        logits: (R, vocab_size) float32, float16, bfloat16 or float64, CUDA; rows may be apart; not modified.
        out: (E, vocab_size) float64; rows may be apart.
        flags: (E,) int32, zero before; the bits of `EditFlag` are set.
        row_index: (E,) int32, the logits row of each edited row; None: row e is logits row e.  Neither it nor ids in
            lists are checked on the device: ids outside the vocabulary are left out.
    Raises:
        InvalidArgumentError: shapes, types or devices do not fit.  Nothing was launched.
    Ordering: torch's current stream; never waits.
    """
    num_rows, vocab_size = _check_operands(logits, edits, out, flags, row_index)
    if num_rows == 0:
        return
    bias, seen, output, excluded = edits.bias, edits.seen, edits.output, edits.excluded
    params = LogitEditParams(
        logits.data_ptr(),
        address(row_index),
        out.data_ptr(),
        flags.data_ptr(),
        None if bias is None else bias.start.data_ptr(),
        None if bias is None else bias.ids.data_ptr(),
        None if bias is None else address(bias.values),
        address(edits.mask),
        address(edits.mask_index),
        None if seen is None else seen.start.data_ptr(),
        None if seen is None else seen.ids.data_ptr(),
        address(edits.repetition),
        None if output is None else output.start.data_ptr(),
        None if output is None else output.ids.data_ptr(),
        None if output is None else address(output.values),
        address(edits.presence),
        address(edits.frequency),
        None if excluded is None else excluded.start.data_ptr(),
        None if excluded is None else excluded.ids.data_ptr(),
        logits.stride(0),
        out.stride(0),
        0 if edits.mask is None else edits.mask.stride(0),
        vocab_size,
    )
    loader.kernel(EDIT, (logits.dtype,)).launch(launch_config(num_rows, vocab_size), params, pdl=True)


def remap_ids(ids: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    """out[i] = table[ids[i]]: ids of a reduced vocabulary to those of the whole one.

    Negative ids stay as they are; ids beyond the table become -1.

    Args:
        ids, out: (n,) int32, CUDA; may be the same.  table: (m,) int32.
    Raises:
        InvalidArgumentError: shapes, types or devices do not fit.  Nothing was launched.
    Ordering: torch's current stream; never waits.
    """
    check_shape("ids", ids, (-1,), torch.int32)
    check_shape("table", table, (-1,), torch.int32)
    check_vector("out", out, ids.shape[0], torch.int32)
    if ids.shape[0] == 0:
        return
    params = RemapIdsParams(ids.data_ptr(), table.data_ptr(), out.data_ptr(), ids.shape[0], table.shape[0])
    loader.kernel(REMAP, ()).launch(remap_config(ids.shape[0]), params, pdl=True)


def _check_operands(
    logits: torch.Tensor,
    edits: LogitEdits,
    out: torch.Tensor,
    flags: torch.Tensor,
    row_index: torch.Tensor | None,
) -> tuple[int, int]:
    check_logits(logits)
    num_rows, vocab_size = (logits if row_index is None else row_index).shape[0], logits.shape[1]
    if num_rows > MAX_GRID_YZ:
        raise InvalidArgumentError(f"{num_rows} rows are edited at once, the limit is {MAX_GRID_YZ}; split them")
    check_rows("out", out, dtype=torch.float64, rows=num_rows, width=vocab_size)
    check_vector("flags", flags, num_rows, torch.int32)
    if row_index is not None:
        check_vector("row_index", row_index, num_rows, torch.int32)
    _check_lists("bias", edits.bias, num_rows, torch.float64)
    _check_lists("seen", edits.seen, num_rows, None)
    _check_lists("output", edits.output, num_rows, torch.int32)
    _check_lists("excluded", edits.excluded, num_rows, None)
    _check_numbers(edits.seen, num_rows, repetition=edits.repetition)
    _check_numbers(edits.output, num_rows, presence=edits.presence, frequency=edits.frequency)
    if (edits.mask is None) != (edits.mask_index is None):
        raise InvalidArgumentError("mask and mask_index belong together; pass both or neither")
    if edits.mask is not None and edits.mask_index is not None:
        check_rows("mask", edits.mask, dtype=torch.int32, width=-(-vocab_size // 32))
        check_vector("mask_index", edits.mask_index, num_rows, torch.int32)
    return num_rows, vocab_size


def _check_lists(name: str, lists: IdLists | None, num_rows: int, values: torch.dtype | None) -> None:
    if lists is None:
        return
    check_vector(f"{name}.start", lists.start, num_rows + 1, torch.int32)
    check_shape(f"{name}.ids", lists.ids, (-1,), torch.int32)
    if (values is None) != (lists.values is None):
        raise InvalidArgumentError(f"{name} has values={lists.values is not None}; {values is not None} is needed")
    if values is not None and lists.values is not None:
        check_vector(f"{name}.values", lists.values, lists.ids.shape[0], values)


def _check_numbers(lists: IdLists | None, num_rows: int, **numbers: torch.Tensor | None) -> None:
    for name, tensor in numbers.items():
        if (tensor is None) != (lists is None):
            raise InvalidArgumentError(f"{name} and the list of its tokens belong together; pass both or neither")
        if tensor is not None:
            check_vector(name, tensor, num_rows, torch.float64)
