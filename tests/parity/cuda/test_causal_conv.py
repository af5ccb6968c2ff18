"""The causal convolution on CUDA: against the reference in float64, and bit for bit the same however rows are cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from recurrent_cases import ConvCase, ragged_rows
from row_ops import ROW_TYPES, assert_same_bits, captured, record_launches
from state_case import apart, poisoned_state, real_tokens, state_rows

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu import causal_conv as module
from edgellm.kernels.cu.causal_conv import causal_conv, launch_config, tile_config
from edgellm.kernels.cu.state_rows import StateRows
from edgellm.kernels.ref import causal_conv as ref

CASES = [
    ConvCase(channels=512, width=4),
    ConvCase(channels=260, width=4, with_bias=True),
    ConvCase(channels=33, width=4, silu=False),
    ConvCase(channels=70, width=2, with_bias=True),
    ConvCase(channels=5, width=3, silu=False),
    ConvCase(channels=33, width=8),
]
CASE_NAMES = [case.label for case in CASES]
LENGTHS, SLOTS = (1, 9, 0, 300, 3, 2, 129), (5, 0, 3, 7, -1, 2, 8)  # the row of 3 tokens is padding
NUM_SLOTS = 9
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def make(
    case: ConvCase,
    dtype: torch.dtype,
    lengths: Sequence[int] = LENGTHS,
    slots: Sequence[int] = SLOTS,
    *,
    verified: Sequence[int] = (),
) -> dict[str, Any]:
    """Arguments on the CPU; tokens of padding rows are NaN, and so are checkpoints."""
    rows = state_rows(lengths, slots, verified=verified)
    inputs = case.inputs(sum(lengths) + 2, dtype, seed=3)
    inputs["x"][~real_tokens(rows, len(inputs["x"]))] = float("nan")
    kept = sum(lengths[row] for row in verified)
    return {
        **inputs,
        **case.options(),
        "state": poisoned_state(NUM_SLOTS, case.state_shape, slots, seed=4),
        "rows": rows,
        "out": torch.full_like(inputs["x"], 9.0),
        "checkpoint": torch.full((kept, *case.state_shape), float("nan")) if verified else None,
    }


def on_device(arguments: dict[str, Any], *, gap: int = 0) -> dict[str, Any]:
    moved = {name: value.to("cuda") if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    rows = arguments["rows"]
    moved["rows"] = StateRows(*(array.to("cuda") for array in (rows.query_start, rows.slots, rows.checkpoint_start)))
    return moved | {name: apart(moved[name], gap) for name in ("x", "out")}


def expected_of(arguments: dict[str, Any]) -> dict[str, Any]:
    wide = {
        name: value.double() if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
        if name in ("state", "out", "checkpoint")
    }
    ref.causal_conv(**(arguments | wide))
    return wide


def near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual.double().cpu(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


# ---- reference, launches and refusals -------------------------------------------------------------------------------


def test_reference_takes_rows_of_the_device_as_those_of_the_cpu() -> None:
    case = CASES[4]
    one, other = (make(case, torch.float32, (4, 2), (3, 1), verified=(0,)) for _ in range(2))
    ref.causal_conv(**one)
    ref.causal_conv(**(other | {"rows": ragged_rows((4, 2), seed=0, slots=(3, 1), verified=(0,))}))
    for name in ("state", "out", "checkpoint"):
        assert_same_bits(one[name], other[name])


def test_launch_config() -> None:
    assert launch_config(64, 64, 8192, 2).grid == (128, 64, 1)
    assert launch_config(64, 64, 8192, 2).block == (32, 1, 1)
    assert launch_config(100, 2, 100, 1).block == (32, 8, 1)
    assert launch_config(5000, 2, 100, 1).grid == (4, 2, 1)
    assert launch_config(5000, 2, 100, 1).block == (32, 16, 1)


def test_tile_config() -> None:
    config, tile = tile_config(64, 64, 8192)  # a place a row and one that may stay empty
    assert (config.grid, config.block, tile) == ((16, 64, 1), (128, 1, 1), 64)
    assert tile_config(2048, 1, 8192)[0].grid == (16, 64, 1)  # tiles of 32
    assert tile_config(1, 1, 8192)[0].grid == (16, 1, 1)
    assert tile_config(300, 1, 1000)[0].grid == (2, 19, 1)


@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)
def test_variants(monkeypatch: pytest.MonkeyPatch, case: ConvCase, dtype: torch.dtype) -> None:
    launches = record_launches(monkeypatch)
    arguments = make(case, dtype)
    causal_conv(**arguments)
    causal_conv(**(arguments | {"out": arguments["x"]}))
    causal_conv(**(arguments | {"x": apart(arguments["x"], 7 if case.channels % 2 == 0 else 8)}))
    causal_conv(**(arguments | {"x": arguments["x"][:0], "out": arguments["out"][:0]}))
    paired = case.width == 4 and case.channels % 2 == 0
    by_tiles = case.width == 4 and case.channels % 4 == 0
    in_place, unaligned = (dtype, case.width, 2 if paired else 1), (dtype, case.width, 1)
    assert [launch.key for launch in launches] == [(dtype, 4) if by_tiles else in_place, in_place, unaligned]
    assert launches[0].spec.name == ("causal_conv_tiles" if by_tiles else "causal_conv")
    assert launches[0].params["has_silu"] == int(case.silu)
    assert launches[0].params["checkpoint_start"] is None
    assert launches[0].params["tile"] == (16 if by_tiles else 0)


def test_rows_that_meet_the_output_are_not_cut_into_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    arguments = make(CASES[0], torch.bfloat16, (30,), (1,))
    rows = torch.zeros(64, 512, dtype=torch.bfloat16)
    for start, name in ((0, "causal_conv"), (20, "causal_conv"), (32, "causal_conv_tiles")):
        causal_conv(**(arguments | {"x": rows[:32], "out": rows[start : start + 32]}))
        assert launches[-1].spec.name == name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": torch.zeros(5, 9)}, "W from 2 to 8"),
        ({"weight": torch.zeros(5, 1)}, "W from 2 to 8"),
        ({"weight": torch.zeros(5, 3).half()}, "weight is"),
        ({"x": torch.zeros(11, 4)}, "x is"),
        ({"x": torch.zeros(11, 5, dtype=torch.float64)}, "x is"),
        ({"out": torch.zeros(11, 5).half()}, "out is"),
        ({"bias": torch.zeros(4)}, "bias is"),
        ({"state": torch.zeros(9, 5, 3)}, "state is"),
        ({"checkpoint": torch.zeros(9, 4, 2)}, "checkpoint is"),
        ({"rows": StateRows(torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32))}, "query_start is"),
    ],
)
def test_bad_arguments(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str) -> None:
    launches = record_launches(monkeypatch)
    with pytest.raises(InvalidArgumentError, match=message):
        causal_conv(**(make(CASES[4], torch.float32, (9,), (1,)) | changes))
    assert not launches


# ---- device ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)
@pytest.mark.parametrize("in_place", [False, True])
def test_device_equals_reference(case: ConvCase, dtype: torch.dtype, in_place: bool) -> None:
    for gap, verified in ((0, ()), (7, (1, 5))):
        arguments = make(case, dtype, verified=verified)
        if in_place:
            arguments["out"] = arguments["x"].clone()
        expected, actual = expected_of(arguments), on_device(arguments, gap=gap)
        if in_place:
            actual["out"] = actual["x"]
        causal_conv(**actual)
        near(actual["out"], expected["out"], TOLERANCE[dtype])
        near(actual["state"], expected["state"], 0)
        if verified:
            near(actual["checkpoint"], expected["checkpoint"], 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)
def test_cutting_rows_and_company_change_no_bit(case: ConvCase, dtype: torch.dtype) -> None:
    whole, parts = (on_device(make(case, dtype, (300, 13), (4, 1))) for _ in range(2))
    causal_conv(**whole)
    for slot, cuts in ((4, (0, 1, 2, 7, 150, 300)), (1, (300, 313))):
        for start, end in pairwise(cuts):
            some = {name: parts[name][start:end] for name in ("x", "out")}
            causal_conv(**(parts | some | {"rows": state_rows((end - start,), (slot,), device="cuda")}))
    assert_same_bits(parts["out"], whole["out"])
    assert_same_bits(parts["state"], whole["state"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROW_TYPES)
def test_verified_rows_are_decode_rows(dtype: torch.dtype) -> None:
    case, lengths, slots = CASES[0], (5, 5), (6, 2)
    verified = on_device(make(case, dtype, lengths, slots, verified=(0, 1)))
    decoded = on_device(make(case, dtype, lengths, slots))
    causal_conv(**verified)
    for token in range(5):
        places = [token, 5 + token]
        out = torch.empty_like(decoded["out"][places])
        rows = state_rows((1, 1), slots, device="cuda")
        causal_conv(**(decoded | {"x": decoded["x"][places], "out": out, "rows": rows}))
        assert_same_bits(out, verified["out"][places])
        assert_same_bits(verified["checkpoint"][[5 + token, token]], decoded["state"][list(slots)])
    assert_same_bits(decoded["state"], verified["state"])


@pytest.mark.gpu
def test_a_graph_serves_other_rows() -> None:
    case, dtype = CASES[0], torch.bfloat16
    step = on_device(make(case, dtype, (3, 0, 150, 2), (1, -1, 0, 4), verified=(0, 3)))
    step["x"].nan_to_num_(0.5)
    graph = captured(lambda: causal_conv(**step))
    other = on_device(make(case, dtype, (80, 30, 1, 44), (3, 2, -1, 5), verified=(1,)))
    eager = step | {"rows": other["rows"], "state": other["state"], "out": torch.full_like(step["out"], 9.0)}
    eager["checkpoint"] = torch.full((30, *case.state_shape), float("nan"), device="cuda")
    step["state"].copy_(other["state"])
    step["out"].fill_(9.0)
    causal_conv(**eager)
    for name in ("query_start", "slots", "checkpoint_start"):
        getattr(step["rows"], name).copy_(getattr(other["rows"], name))
    graph.replay()
    assert_same_bits(step["out"], eager["out"])
    assert_same_bits(step["state"], eager["state"])
    assert_same_bits(step["checkpoint"], eager["checkpoint"][:5])  # rows beyond the last are not written


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("case", CASES[:2], ids=CASE_NAMES[:2])
@pytest.mark.parametrize("tile", [16, 32, 64])
def test_tiles_have_the_bits_of_rows_in_place(
    monkeypatch: pytest.MonkeyPatch, case: ConvCase, dtype: torch.dtype, tile: int
) -> None:
    monkeypatch.setattr(module, "TILES", (tile,))
    for verified in ((), (1, 5)):
        arguments = make(case, dtype, verified=verified)
        tiled, in_place = on_device(arguments), on_device(arguments)
        in_place["out"] = in_place["x"]
        causal_conv(**tiled)
        causal_conv(**in_place)
        real = real_tokens(arguments["rows"], len(arguments["x"])).to("cuda")
        assert_same_bits(tiled["out"][real], in_place["out"][real])
        for name in ("state", "checkpoint")[: 1 + bool(verified)]:
            assert_same_bits(tiled[name], in_place[name])


@pytest.mark.gpu
def test_sanitizer_causal_conv() -> None:
    """Small enough for compute-sanitizer: rows of several tiles, decode rows and checkpoints."""
    arguments = make(CASES[1], torch.bfloat16, (70, 1, 5), (3, 0, 1), verified=(2,))
    expected, actual = expected_of(arguments), on_device(arguments)
    causal_conv(**actual)
    near(actual["out"], expected["out"], TOLERANCE[torch.bfloat16])
    near(actual["state"], expected["state"], 0)
    near(actual["checkpoint"], expected["checkpoint"], 0)
