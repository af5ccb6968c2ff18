"""The Mamba-2 scan on CUDA: references, plans and arguments on the CPU; then the device against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from row_ops import ROW_TYPES, assert_same_bits, captured, record_launches
from scan_case import CHUNK_TOLERANCE, NAN, SCAN_TOLERANCE, ScanCase, ScanShape, norm_error

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cpu.mamba2 import mamba2 as cpu_mamba2
from edgellm.kernels.cpu.recurrent_rows import RecurrentRows
from edgellm.kernels.cu import mamba2 as module
from edgellm.kernels.cu.launch import DeviceLimits
from edgellm.kernels.cu.mamba2 import (
    CHUNK,
    NO_LIMIT,
    chunk_config,
    chunk_rows,
    chunk_shared_bytes,
    launch_config,
    mamba2,
    scan_columns,
)
from edgellm.kernels.cu.state_rows import StateRows
from edgellm.kernels.ref.mamba2 import mamba2 as reference

H200 = DeviceLimits(132, 227 * 1024, 90, 60 << 20)
RTX = DeviceLimits(170, 99 * 1024, 120, 96 << 20)
SMALL = ScanShape(2, 4, 8, 16)
SHAPES = (
    ScanShape(1, 4, 64, 128),
    ScanShape(2, 4, 32, 64),
    ScanShape(1, 2, 128, 16),
    ScanShape(4, 8, 64, 64),
    ScanShape(1, 3, 32, 128),
    ScanShape(2, 2, 128, 128),
    ScanShape(1, 2, 64, 256),
    ScanShape(3, 6, 40, 32),
    ScanShape(2, 6, 7, 16),
    ScanShape(3, 3, 5, 37),
    ScanShape(1, 2, 33, 130),
    ScanShape(1, 1, 1, 1),
)
CHUNK_SHAPES = tuple(shape for shape in SHAPES if shape.state_dim in (64, 128))


def label(shape: ScanShape) -> str:
    return f"G{shape.groups}H{shape.heads}P{shape.head_dim}N{shape.state_dim}"


# ---- references -----------------------------------------------------------------------------------------------------


def test_reference_is_the_cpu_kernel_and_skips_padding() -> None:
    case = ScanCase(SMALL, torch.float32, [3, 2, 1, 5], [2, -1, 0, 4], [0, -1, -1, 3])
    expected = case.expected()
    real = case.real_tokens()
    x, dt, b, c = (getattr(case, name)[real].contiguous() for name in ("x", "dt", "b", "c"))
    out, checkpoint = torch.empty_like(x), torch.full_like(case.checkpoint, NAN)
    rows = RecurrentRows([0, 3, 4, 9], [2, 0, 4], [0, -1, 3])
    cpu_mamba2(x, dt, case.a, b, c, case.d, case.state, rows, out, checkpoint)
    assert norm_error(out, expected["out"][real]) < 1e-6
    assert norm_error(case.state, expected["state"]) < 1e-6
    assert norm_error(checkpoint, expected["checkpoint"]) < 1e-6
    assert bool(expected["out"][3:5].isnan().all())
    assert bool(expected["out"][11:].isnan().all())


def chunk_by_chunk(x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any, state: Any, out: Any) -> None:
    """The equations at the head of mamba2_chunks.cu, one head and sequence, in float64."""
    for begin in range(0, len(x), CHUNK):
        part = slice(begin, begin + CHUNK)
        sums = (dt[part] * a).cumsum(0)
        decays = torch.exp(sums[:, None] - sums[None, :]).tril()
        weights = (c[part] @ b[part].T) * decays * dt[part]
        out[part] = torch.exp(sums)[:, None] * (c[part] @ state.T) + weights @ x[part] + d * x[part]
        kept = (torch.exp(sums[-1] - sums) * dt[part])[:, None] * x[part]
        state.copy_(torch.exp(sums[-1]) * state + kept.T @ b[part])


@pytest.mark.parametrize("length", [1, CHUNK, CHUNK + 1, 3 * CHUNK - 5])
def test_the_chunked_form_is_the_recurrence(length: int) -> None:
    case = ScanCase(ScanShape(1, 1, 16, 32), torch.float32, [length], [0], padding=0)
    expected = case.expected()
    x, dt, b, c, state = (value.double() for value in (case.x, case.dt, case.b, case.c, case.state))
    out = torch.empty_like(x[:, 0])
    chunk_by_chunk(x[:, 0], dt[:, 0], case.a[0], b[:, 0], c[:, 0], case.d[0], state[0, 0], out)
    assert norm_error(out[:, None], expected["out"]) < 1e-12
    assert norm_error(state, expected["state"]) < 1e-12


# ---- plans ----------------------------------------------------------------------------------------------------------


def test_launch_configs() -> None:
    assert launch_config(3, 80, 64).grid == (160, 3, 1)
    assert launch_config(1, 2, 33).grid == (4, 1, 1)
    assert launch_config(1, 2, 33).block == (128, 1, 1)
    assert [scan_columns(columns) for columns in (1, 16, 17, 64, 100, 256)] == [16, 16, 32, 64, 128, 256]
    config = chunk_config(2, 80, 64, 128, 64)
    assert (config.grid, config.block, config.shared_bytes) == ((80, 2, 1), (128, 1, 1), 107008)


def test_rows_of_a_chunked_block() -> None:
    assert chunk_rows(80, 64, 128, H200) == 64
    assert chunk_rows(24, 64, 128, H200) == 32
    assert chunk_rows(80, 32, 64, H200) == 32
    assert chunk_rows(80, 64, 128, RTX) == 32
    assert chunk_rows(80, 64, 64, RTX) == 32
    assert chunk_rows(128, 64, 64, RTX) == 64
    assert chunk_rows(80, 48, 128, H200) is None
    assert chunk_rows(80, 64, 256, H200) is None
    assert chunk_shared_bytes(128, 32) <= RTX.max_shared_bytes


def launches_of(monkeypatch: pytest.MonkeyPatch, case: ScanCase, **options: Any) -> list[Any]:
    launches = record_launches(monkeypatch)
    monkeypatch.setattr(module, "device_limits", lambda _device: H200)
    mamba2(**case.arguments() | options)
    return launches


def test_launches_and_struct(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ScanShape(1, 4, 64, 128)
    case = ScanCase(shape, torch.bfloat16, [100, 1], [1, 0], [-1, 0])
    launches = launches_of(monkeypatch, case)
    assert [(launch.spec.name, launch.key) for launch in launches] == [
        ("mamba2", (torch.bfloat16, 128, True)),
        ("mamba2_chunks", (torch.bfloat16, 128, 32)),
    ]
    params = launches[0].params
    assert params == launches[1].params
    assert (params["x"], params["b"], params["out"]) == (case.x.data_ptr(), case.b.data_ptr(), case.out.data_ptr())
    assert (params["x_stride"], params["b_stride"], params["out_stride"]) == (520, 520, 256)
    assert (params["dt_stride"], params["state_stride"], params["checkpoint_stride"]) == (4, 32768, 32768)
    assert (params["num_heads"], params["head_dim"], params["state_dim"], params["num_groups"]) == (4, 64, 128, 1)
    assert (params["num_slots"], params["num_checkpoints"], params["longest_scan"]) == (4, 103, CHUNK)
    assert case.checkpoint is not None
    assert params["checkpoint"] == case.checkpoint.data_ptr()


@pytest.mark.parametrize(
    ("dtype", "shape", "lengths", "options"),
    [
        (torch.float32, SHAPES[0], [100], {}),
        (torch.bfloat16, SHAPES[0], [100], {"deterministic": True}),
        (torch.bfloat16, SHAPES[0], [CHUNK - 3], {}),
        (torch.bfloat16, ScanShape(1, 4, 48, 128), [100], {}),
        (torch.bfloat16, ScanShape(3, 3, 5, 37), [100], {}),
    ],
)
def test_what_is_always_taken_token_after_token(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shape: ScanShape, lengths: list[int], options: dict[str, Any]
) -> None:
    launches = launches_of(monkeypatch, ScanCase(shape, dtype, lengths, [0]), **options)
    assert [launch.spec.name for launch in launches] == ["mamba2"]
    assert launches[0].params["longest_scan"] == NO_LIMIT
    assert launches[0].params["checkpoint"] is None


def test_nothing_to_do_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = ScanCase(SMALL, torch.float32, [1], [0])
    launches = record_launches(monkeypatch)
    empty = torch.zeros(0, dtype=torch.int32)
    mamba2(**case.arguments() | {"rows": StateRows(torch.zeros(1, dtype=torch.int32), empty)})
    none = {name: getattr(case, name)[:0] for name in ("x", "dt", "b", "c", "out")}
    mamba2(**case.arguments() | none)
    assert not launches


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(4, 4, 8, dtype=torch.float64)}, "x is torch.float64"),
        ({"x": torch.zeros(4, 3, 8)}, "H a multiple of G"),
        ({"x": torch.zeros(4, 32)}, "H a multiple of G"),
        ({"b": torch.zeros(5, 2, 16)}, "b is"),
        ({"c": torch.zeros(4, 2, 8)}, "c is"),
        ({"b": torch.zeros(4, 2, 300), "c": torch.zeros(4, 2, 300)}, "at most 256"),
        ({"dt": torch.zeros(4, 4, dtype=torch.bfloat16)}, "dt is"),
        ({"a": torch.zeros(3)}, "a is"),
        ({"d": torch.zeros(4, dtype=torch.float64)}, "d is"),
        ({"state": torch.zeros(3, 4, 16, 8)}, "state is"),
        ({"state": torch.zeros(3, 4, 8, 16, dtype=torch.bfloat16)}, "state is"),
        ({"state": torch.zeros(3, 4, 8, 32)[..., ::2]}, "state is .*each row contiguous"),
        ({"checkpoint": torch.zeros(3, 4, 8, 15)}, "checkpoint is"),
        ({"out": torch.zeros(4, 4, 8, dtype=torch.bfloat16)}, "out is"),
        ({"rows": StateRows(torch.zeros(2, dtype=torch.int32), torch.zeros(1))}, "slots is"),
        ({"rows": StateRows(torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))}, "query_start is"),
    ],
)
def test_bad_arguments(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str) -> None:
    launches = record_launches(monkeypatch)
    case = ScanCase(SMALL, torch.float32, [1], [0])
    with pytest.raises(InvalidArgumentError, match=message):
        mamba2(**case.arguments() | changes)
    assert not launches


def test_cpu_tensors_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="x is on cpu; a CUDA tensor is needed"):
        mamba2(**ScanCase(SMALL, torch.float32, [1], [0]).arguments())


# ---- device ---------------------------------------------------------------------------------------------------------


def check(case: ScanCase, tolerance: float, state_tolerance: float, **options: Any) -> None:
    """One call against float64."""
    expected = case.expected()
    mamba2(**case.arguments(), **options)
    errors = {name: norm_error(getattr(case, name), value) for name, value in expected.items()}
    assert errors["out"] < tolerance, errors
    assert max(error for name, error in errors.items() if name != "out") < state_tolerance, errors


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=label)
def test_token_after_token_equals_reference(dtype: torch.dtype, shape: ScanShape) -> None:
    for seed, (lengths, slots, kept) in enumerate(
        (
            ([1], [0], None),
            ([1, 1, 1, 1], [3, -1, 0, 5], None),
            ([4, 0, 9, 2, 1], [1, 4, 0, -1, 2], [3, -1, 8, -1, -1]),
            ([130, 1, 7, 8, 17], [2, 0, 1, 6, -1], [-1, 0, 1, -1, -1]),
        )
    ):
        case = ScanCase(shape, dtype, lengths, slots, kept, "cuda", seed)
        check(case, SCAN_TOLERANCE[dtype], 3e-6, deterministic=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(CHUNK_TOLERANCE))
@pytest.mark.parametrize("shape", CHUNK_SHAPES, ids=label)
def test_chunk_by_chunk_equals_reference(dtype: torch.dtype, shape: ScanShape) -> None:
    for seed, (lengths, slots, kept) in enumerate(
        (
            ([CHUNK + 1], [0], None),
            ([2 * CHUNK, 1, 3, 5 * CHUNK - 1], [3, -1, 1, 0], [-1, -1, 4, -1]),
            ([700, 129, 64, 90], [2, 0, 1, -1], [-1, -1, 0, -1]),
        )
    ):
        case = ScanCase(shape, dtype, lengths, slots, kept, "cuda", seed)
        check(case, CHUNK_TOLERANCE[dtype], CHUNK_TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3], SHAPES[5]], ids=label)
def test_bits_of_the_chunked_form_do_not_depend_on_the_rows_of_a_block(
    monkeypatch: pytest.MonkeyPatch, shape: ScanShape
) -> None:
    results = []
    for rows in (64, 32):
        monkeypatch.setattr(module, "chunk_rows", lambda *_shape, rows=rows: rows)
        case = ScanCase(shape, torch.bfloat16, [200, 77], [0, 1], device="cuda")
        mamba2(**case.arguments())
        results.append(case)
    assert_same_bits(results[0].out, results[1].out)
    assert_same_bits(results[0].state, results[1].state)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1], SHAPES[2], SHAPES[9]], ids=label)
def test_a_prompt_in_pieces_has_the_bits_of_one_call(dtype: torch.dtype, shape: ScanShape) -> None:
    whole = ScanCase(shape, dtype, [150], [1], device="cuda", padding=0)
    parts = ScanCase(shape, dtype, [150], [1], device="cuda", padding=0)
    mamba2(**whole.arguments(), deterministic=True)
    begin = 0
    for length in (1, 8, 3, 64, 70, 4):
        part = slice(begin, begin + length)
        sliced = {name: getattr(parts, name)[part] for name in ("x", "dt", "b", "c", "out")}
        starts = torch.tensor([0, length], dtype=torch.int32, device="cuda")
        rows = StateRows(starts, torch.tensor([1], dtype=torch.int32, device="cuda"))
        mamba2(**parts.arguments() | sliced | {"rows": rows}, deterministic=True)
        begin += length
    assert_same_bits(whole.out, parts.out)
    assert_same_bits(whole.state, parts.state)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3], SHAPES[7]], ids=label)
def test_verified_rows_have_the_bits_of_decode_rows(dtype: torch.dtype, shape: ScanShape) -> None:
    """Beside a long prompt and without; checkpoints are the states that decoding went through."""
    verified = ScanCase(shape, dtype, [5, 100, 3], [1, 0, 4], [7, -1, 0], "cuda")
    decoded = ScanCase(shape, dtype, [5, 100, 3], [1, 0, 4], [7, -1, 0], "cuda")
    mamba2(**verified.arguments())
    slots = torch.tensor([4, 1, -1], dtype=torch.int32, device="cuda")
    assert verified.checkpoint is not None
    for step in range(5):
        tokens = [105 + step if step < 3 else 105, step, 0]
        taken = {name: getattr(decoded, name)[tokens].contiguous() for name in ("x", "dt", "b", "c", "out")}
        if step == 3:
            slots[0] = -1
        starts = torch.tensor([0, 1, 2, 3], dtype=torch.int32, device="cuda")
        rows = StateRows(starts, slots)
        mamba2(**decoded.arguments() | taken | {"rows": rows, "checkpoint": None})
        assert_same_bits(taken["out"][1], verified.out[step])
        assert_same_bits(decoded.state[1], verified.checkpoint[7 + step])
        if step < 3:
            assert_same_bits(taken["out"][0], verified.out[105 + step])
            assert_same_bits(decoded.state[4], verified.checkpoint[step])
    assert_same_bits(decoded.state[1], verified.state[1])
    assert_same_bits(decoded.state[4], verified.state[4])


@pytest.mark.gpu
def test_checkpoints_without_a_tensor_and_beyond_its_end_are_not_kept() -> None:
    case = ScanCase(SMALL, torch.float32, [2, 4], [0, 1], [0, 2], "cuda")
    plain = ScanCase(SMALL, torch.float32, [2, 4], [0, 1], None, "cuda")
    mamba2(**plain.arguments())
    mamba2(**case.arguments() | {"checkpoint": None})
    assert_same_bits(case.out, plain.out)
    assert_same_bits(case.state, plain.state)
    again = ScanCase(SMALL, torch.float32, [2, 4], [0, 1], [0, 2], "cuda")
    assert again.checkpoint is not None
    mamba2(**again.arguments() | {"checkpoint": again.checkpoint[:4]})
    assert not bool(again.checkpoint[:4].isnan().any())
    assert bool(again.checkpoint[4:].isnan().all())
    assert_same_bits(again.state, plain.state)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROW_TYPES)
def test_a_graph_serves_other_lengths_and_slots(dtype: torch.dtype) -> None:
    shape = SHAPES[0]
    case = ScanCase(shape, dtype, [1, 120, 30], [0, 1, 2], [0, -1, -1], "cuda", padding=0)
    arguments = case.arguments()
    rows: StateRows = arguments["rows"]
    graph = captured(lambda: mamba2(**arguments))
    other = ScanCase(shape, dtype, [80, 5, 66], [2, -1, 0], [-1, -1, -1], "cuda", seed=9, padding=0)
    assert case.checkpoint is not None
    for name in ("x", "dt", "b", "c"):
        getattr(case, name).copy_(getattr(other, name))
    for name in ("a", "d"):
        getattr(case, name).copy_(getattr(other, name))
    case.state[: len(other.state)].copy_(other.state[: len(case.state)])
    case.out.fill_(NAN)
    case.checkpoint.fill_(NAN)
    fresh = other.rows()
    rows.query_start.copy_(fresh.query_start)
    rows.slots.copy_(fresh.slots)
    assert rows.checkpoint_start is not None
    assert fresh.checkpoint_start is not None
    rows.checkpoint_start.copy_(fresh.checkpoint_start)
    graph.replay()
    mamba2(**other.arguments())
    assert_same_bits(case.out, other.out)
    assert_same_bits(case.state[[0, 2]], other.state[[0, 2]])
    assert bool(case.checkpoint.isnan().all())


@pytest.mark.gpu
def test_sanitizer_mamba2() -> None:
    for shape, dtype in ((SHAPES[0], torch.bfloat16), (SHAPES[9], torch.float32), (SHAPES[4], torch.float16)):
        case = ScanCase(shape, dtype, [70, 1, 3], [0, -1, 2], [-1, -1, 0], "cuda")
        mamba2(**case.arguments())
    torch.cuda.synchronize()


def test_the_reference_takes_the_kernels_options() -> None:
    case = ScanCase(SMALL, torch.float32, [2], [0])
    other = ScanCase(SMALL, torch.float32, [2], [0])
    reference(**case.arguments())
    reference(**other.arguments(), deterministic=True)
    assert_same_bits(case.out, other.out)
