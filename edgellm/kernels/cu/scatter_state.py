"""State of resident slots put back to what a checkpoint holds, after verification, all layers in a few launches."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu import loader
from edgellm.kernels.cu.launch import LaunchConfig
from edgellm.kernels.cu.rows import ACCESS_BYTES, MAX_GRID_YZ
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import address, check_device, check_shape, check_vector, describe

MAX_PIECES = 64  # of one launch, kScatterPieces
THREADS = 128  # kScatterThreads
WORDS_A_THREAD = 8
WORD_TYPES = {16: "uint4", 4: "edgellm::u32", 2: "edgellm::u16"}


class ScatterStateParams(ctypes.Structure):
    _fields_ = (
        ("live", ctypes.c_void_p * MAX_PIECES),
        ("checkpoint", ctypes.c_void_p * MAX_PIECES),
        ("slots", ctypes.c_void_p),
        ("sources", ctypes.c_void_p),
        ("words", ctypes.c_int64 * MAX_PIECES),
        ("num_slots", ctypes.c_int32),
        ("num_checkpoints", ctypes.c_int32),
    )


SPEC = KernelSpec(
    name="scatter_state",
    entry="scatter_state",
    params=ScatterStateParams,
    params_name="ScatterStateParams",
    variants=tuple(Variant((size,), name) for size, name in WORD_TYPES.items()),
)


def launch_config(num_entries: int, num_pieces: int, words: int) -> LaunchConfig:
    """WORDS_A_THREAD words a thread of the widest piece along x, an entry along y, a piece along z."""
    return LaunchConfig((-(-words // (THREADS * WORDS_A_THREAD)), num_entries, num_pieces), (THREADS, 1, 1))


def scatter_state(
    live: torch.Tensor | Sequence[torch.Tensor],
    checkpoint: torch.Tensor | Sequence[torch.Tensor],
    slots: torch.Tensor,
    sources: torch.Tensor,
) -> None:
    """live[slots[i]] = checkpoint[sources[i]] wherever slots[i] >= 0, for one piece of state or for many.

    Args:
        live: (S, *shape) state of every resident slot, contiguous, CUDA; or one tensor a piece, S the same.
        checkpoint: (CK, *shape), dtype of live, contiguous; or as many tensors, CK the same.
        slots: (N,) int32, no two equal but -1.
        sources: (N,) int32; anything where the slot is -1.
    Raises:
        InvalidArgumentError: shapes, types or devices do not fit.  Nothing was launched.
    Effects: writes live.  Ordering: torch's current stream; never waits.  A launch for each MAX_PIECES pieces.
    """
    targets = [live] if isinstance(live, torch.Tensor) else list(live)
    kept = [checkpoint] if isinstance(checkpoint, torch.Tensor) else list(checkpoint)
    _check(targets, kept, slots, sources)
    pieces = [pair for pair in zip(targets, kept, strict=True) if pair[0].numel() and pair[1].numel()]
    if slots.numel() == 0 or not pieces:
        return
    size = _word_bytes(pieces)
    for start in range(0, len(pieces), MAX_PIECES):
        part = pieces[start : start + MAX_PIECES]
        params = ScatterStateParams(
            slots=address(slots),
            sources=address(sources),
            num_slots=part[0][0].shape[0],
            num_checkpoints=part[0][1].shape[0],
        )
        for place, (target, source) in enumerate(part):
            params.live[place], params.checkpoint[place] = address(target), address(source)
            params.words[place] = _row_bytes(target) // size
        config = launch_config(slots.numel(), len(part), max(params.words[: len(part)]))
        loader.kernel(SPEC, (size,)).launch(config, params, pdl=True)


def _row_bytes(tensor: torch.Tensor) -> int:
    return tensor.stride(0) * tensor.element_size()


def _word_bytes(pieces: list[tuple[torch.Tensor, torch.Tensor]]) -> int:
    """Bytes that a thread moves at once: as many as every row of every piece is aligned to."""
    places = [value for pair in pieces for part in pair for value in (part.data_ptr(), _row_bytes(part))]
    sizes = (size for size in WORD_TYPES if size <= ACCESS_BYTES and not any(place % size for place in places))
    found = next(sizes, None)
    if found is None:
        raise InvalidArgumentError("rows of the state are of odd bytes; elements of 2 bytes or more are needed")
    return found


def _check(
    live: list[torch.Tensor], checkpoint: list[torch.Tensor], slots: torch.Tensor, sources: torch.Tensor
) -> None:
    check_shape("slots", slots, (-1,), torch.int32)
    check_vector("sources", sources, slots.numel(), torch.int32)
    if len(live) != len(checkpoint) or slots.numel() > MAX_GRID_YZ:
        raise InvalidArgumentError(
            f"{len(live)} pieces, {len(checkpoint)} checkpoints, {slots.numel()} slots; as many checkpoints as pieces "
            f"and at most {MAX_GRID_YZ} slots are needed"
        )
    for target, source in zip(live, checkpoint, strict=True):
        if target.dim() < 1 or target.shape[0] != live[0].shape[0] or not target.is_contiguous():
            raise InvalidArgumentError(f"live is {describe(target)}; contiguous ({live[0].shape[0]}, ...) is needed")
        check_device("live", target)
        check_shape("checkpoint", source, (checkpoint[0].shape[0], *target.shape[1:]), target.dtype)
