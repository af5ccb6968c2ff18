"""Rings of the latest rows on CUDA, against the reference; the reference against a loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from row_ops import ROW_TYPES, assert_same_bits, captured, record_launches

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu.keep_rows import keep_rows, launch_config
from edgellm.kernels.ref import keep_rows as ref

NUM_SLOTS, ROOM = 4, 5
# Sequence 0 is longer than the ring, 1 a row, 2 of no slot, 3 of a slot that is not there; the rest is padding.
COUNTS, SLOTS, LENGTHS = [13, 1, 2, 2], [2, 0, -1, NUM_SLOTS], [20, 8, 6, 6]


def step(device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """Places, sequences, slots and lengths."""
    places, owners = [], []
    for sequence, (count, length) in enumerate(zip(COUNTS, LENGTHS, strict=True)):
        places += range(length - count, length)
        owners += [sequence] * count
    vectors = ([*places, 0, 0, 0], [*owners, -1, -1, -1], [*SLOTS, -1], [*LENGTHS, 0])
    return tuple(torch.tensor(vector, dtype=torch.int32, device=device) for vector in vectors)


def new_rows(width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(len(step()[0]), width, generator=torch.Generator().manual_seed(1)).to(dtype)


def test_reference() -> None:
    ring, rows = torch.zeros(NUM_SLOTS, ROOM, 2), new_rows(2)
    ref.keep_rows(rows, *step(), ring)
    wanted = torch.zeros_like(ring)
    for place in range(15, 20):
        wanted[2, place % ROOM] = rows[place - 7]
    wanted[0, 7 % ROOM] = rows[13]
    assert_same_bits(ring, wanted)


def test_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    keep_rows(new_rows(16), *step(), torch.zeros(NUM_SLOTS, ROOM, 16))
    keep_rows(new_rows(18)[:, :3], *step(), torch.zeros(NUM_SLOTS, ROOM, 3))
    keep_rows(new_rows(16), *step(), torch.zeros(0, ROOM, 16))
    assert [launch.key for launch in launches] == [(torch.float32, 4), (torch.float32, 1)]
    assert [launch.params["row_stride"] for launch in launches] == [16, 18]
    sizes = {name: launches[1].params[name] for name in ("width", "room", "num_sequences", "num_slots")}
    assert sizes == {"width": 3, "room": ROOM, "num_sequences": 5, "num_slots": NUM_SLOTS}
    assert launches[0].config == launch_config(21, 16, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": torch.zeros(21, 8, dtype=torch.int32)}, "rows is"),
        ({"places": torch.zeros(20, dtype=torch.int32)}, "places is"),
        ({"token_seq": torch.zeros(21, dtype=torch.int64)}, "token_seq is"),
        ({"slots": torch.zeros(5)}, "slots is"),
        ({"lengths": torch.zeros(4, dtype=torch.int32)}, "lengths is"),
        ({"ring": torch.zeros(NUM_SLOTS, ROOM, 4)}, "ring is"),
        ({"ring": torch.zeros(NUM_SLOTS, ROOM, 8, dtype=torch.float16)}, "ring is"),
        ({"ring": torch.zeros(NUM_SLOTS * ROOM, 8)}, "ring is"),
    ],
)
def test_bad_arguments(monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], message: str) -> None:
    launches = record_launches(monkeypatch)
    names = ("places", "token_seq", "slots", "lengths")
    good = {"rows": new_rows(8), "ring": torch.zeros(NUM_SLOTS, ROOM, 8)} | dict(zip(names, step(), strict=True))
    with pytest.raises(InvalidArgumentError, match=message):
        keep_rows(**(good | arguments))
    assert not launches


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("width", [1, 3, 8, 576, 4096 + 8])
def test_device_equals_reference(dtype: torch.dtype, width: int) -> None:
    rows, ring = new_rows(width, dtype), torch.full((NUM_SLOTS, ROOM, width), -7.0, dtype=dtype)
    actual = ring.cuda()
    ref.keep_rows(rows, *step(), ring)
    keep_rows(rows.cuda(), *step("cuda"), actual)
    assert_same_bits(actual, ring)


@pytest.mark.gpu
def test_graph_equals_eager() -> None:
    rows, (places, owners, slots, lengths) = new_rows(8), step("cuda")
    ring, given = torch.zeros(NUM_SLOTS, ROOM, 8, device="cuda"), rows.cuda()
    graph = captured(lambda: keep_rows(given, places, owners, slots, lengths, ring))
    ring.zero_()
    given.copy_(2 * rows)
    for moved in (places, lengths):
        moved.add_(1)
    graph.replay()
    wanted = torch.zeros(NUM_SLOTS, ROOM, 8)
    ref.keep_rows(2 * rows, *(vector.cpu() for vector in (places, owners, slots, lengths)), wanted)
    assert_same_bits(ring, wanted)


@pytest.mark.gpu
def test_sanitizer_keep_rows() -> None:
    for width in (3, 8):
        keep_rows(new_rows(width).cuda(), *step("cuda"), torch.zeros(NUM_SLOTS, ROOM, width, device="cuda"))
    torch.cuda.synchronize()
