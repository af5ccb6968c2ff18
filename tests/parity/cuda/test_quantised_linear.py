"""Linear on packed weights: layout, plans, arguments; then the device against the reference and dense weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from linear_case import NORM_TOLERANCE, LinearCase, norm_error
from packed_case import FP8, INT4, SHAPES, PackedShape, operands, random_weight
from row_ops import assert_close, assert_same_bits, captured, record_launches

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu import loader
from edgellm.kernels.cu import quantised_linear as module
from edgellm.kernels.cu.launch import DeviceLimits
from edgellm.kernels.cu.quantised_linear import (
    GATED_VARIANTS,
    LINEAR,
    MAX_GRID,
    SPECS,
    VARIANTS,
    expand_config,
    expand_weight,
    launch_config,
    launch_plan,
    plan_of,
    quantised_gated_linear,
    quantised_linear,
    span_units,
    sums_as_dense,
)
from edgellm.kernels.cu.silu_mul import silu_mul
from edgellm.kernels.cu.skinny_linear import HALF_TYPES, skinny_linear
from edgellm.kernels.packed_weight import PackedWeight, pack_nibbles, pack_zeros
from edgellm.kernels.ref import quantised_linear as ref

H200 = DeviceLimits(132, 227 * 1024, 90, 60 << 20)
ORIN = DeviceLimits(16, 163 * 1024, 87, 4 << 20)
RTX = DeviceLimits(128, 99 * 1024, 89, 72 << 20)
ROWS = (1, 2, 7, 8, 9, 15, 16)
GATED_SHAPES = (
    PackedShape(INT4, 6144, 1024),
    PackedShape(INT4, 24576, 4096),
    PackedShape(INT4, 96, 192, 64),
    PackedShape(FP8, 6144, 1024, shares_scales=True),
    PackedShape(FP8, 32, 96, 0),
)


def test_a_lane_holds_what_it_multiplies() -> None:
    """A word's pair j is bits 4 j and 16 + 4 j; lane 4 r + i has columns 8 i.. of each block, of rows r and 8 + r."""
    values = torch.randint(0, 16, (32, 192), dtype=torch.uint8)
    words = pack_nibbles(values).view(torch.int32).long() & 0xFFFFFFFF
    assert words.shape == (2, 3, 128)
    for panel, unit, lane, half, tile in torch.cartesian_prod(*map(torch.arange, (2, 3, 32, 2, 2))).tolist():
        word = int(words[panel, unit, 4 * lane + 2 * half + tile])
        first = unit * 64 + half * 32 + lane % 4 * 8
        pairs = [(word >> 4 * j & 15, word >> 16 + 4 * j & 15) for j in range(4)]
        row = panel * 16 + tile * 8 + lane // 4
        assert [value for pair in pairs for value in pair] == values[row, first : first + 8].tolist()


def test_zeros_of_a_lane() -> None:
    zeros = torch.randint(0, 16, (16, 3), dtype=torch.uint8)
    packed = pack_zeros(zeros).contiguous()
    for group, row in torch.cartesian_prod(torch.arange(3), torch.arange(8)).tolist():
        word = int(packed[0, group].view(torch.int32)[row // 4])
        assert [word >> row % 4 * 8 & 15, word >> row % 4 * 8 + 4 & 15] == [zeros[row, group], zeros[8 + row, group]]


@pytest.mark.parametrize(("dtype", "offset", "integer"), [(torch.bfloat16, 0x4300, 128), (torch.float16, 0x6400, 1024)])
def test_offsets_make_exact_differences(dtype: torch.dtype, offset: int, integer: int) -> None:
    """What the device does to a nibble: an integer below an exponent, less the zero below the same."""
    values = torch.arange(16, dtype=torch.int16)
    numbers = (values | offset).view(dtype)
    assert torch.equal(numbers.float(), integer + values.float())
    for zero in range(16):
        assert torch.equal((numbers - numbers[zero]).float(), values.float() - zero)
    if dtype == torch.float16:
        high = (values << 4 | offset).view(dtype)
        for zero in range(16):
            addend = torch.tensor(0x6380, dtype=torch.int16).view(dtype) - numbers[zero]
            assert torch.equal(torch.addcmul(addend, high, torch.tensor(0.0625, dtype=dtype)).float(), values - zero)


@pytest.mark.parametrize("shape", SHAPES)
def test_reference_is_the_product_of_the_expanded_weight(shape: PackedShape) -> None:
    if shape.rows * shape.columns > 1 << 22:
        pytest.skip("large; the device tests run it")
    weight, case = random_weight(shape, torch.bfloat16, "cpu"), operands(3, shape, torch.bfloat16, "cpu")
    matrix, out = torch.empty(weight.shape, dtype=torch.bfloat16), torch.empty_like(case.residual)
    ref.expand_weight(weight, matrix)
    assert 0.2 < float(matrix.float().std()) * shape.columns**0.5 < 5
    ref.quantised_linear(case.x, weight, out, case.bias, residual=case.residual)
    expected = case.x.double() @ matrix.double().T + case.bias.double() + case.residual.double()
    assert_same_bits(out, expected.bfloat16())


@pytest.mark.parametrize("limits", [H200, ORIN, RTX])
@pytest.mark.parametrize("rows", [1, 8, 9, 16, 40])
@pytest.mark.parametrize("gated", [False, True])
def test_plans_cover_the_operands_and_fit(limits: DeviceLimits, rows: int, gated: bool) -> None:
    for shape in SHAPES:
        plan = launch_plan(shape.kind, rows, shape.columns, shape.rows, limits, gated=gated)
        row_blocks, groups, _ = plan.config.grid
        columns = plan.variant.panels * 16 // (2 if gated else 1)
        all_groups = -(-shape.rows // columns)
        assert groups == all_groups or (groups == plan.variant.blocks_per_sm * limits.sm_count < all_groups)
        assert row_blocks * 8 * plan.variant.row_tiles >= rows
        assert plan.config.shared_bytes <= limits.max_shared_bytes
        if not gated:
            assert launch_config(shape.kind, rows, shape.columns, shape.rows, limits) == plan.config


def test_blocks_may_walk() -> None:
    plan = plan_of(VARIANTS[0], 1, 4096, max_groups=100)
    assert plan.config.grid == (1, 100, 1)
    assert plan_of(VARIANTS[0], 17, 64, max_groups=100).config.grid == (3, 2, 1)


def test_plans_by_shape() -> None:
    for rows, out_width, in_width, panels, places, groups in (
        (1, 6144, 4096, 2, 4, 192),
        (1, 4096, 4096, 1, 4, 256),
        (1, 24576, 4096, 2, 4, 264),
        (8, 24576, 4096, 2, 2, 264),
        (1, 4096, 12288, 1, 4, 256),
        (1, 1024, 3072, 1, 4, 64),
        (1, 1024, 12288, 1, 4, 64),
        (8, 4096, 12288, 1, 4, 256),
        (16, 6144, 4096, 2, 2, 192),
        (16, 24576, 4096, 2, 2, 132),
        (17, 24576, 2048, 2, 2, 768),
    ):
        plan = launch_plan(INT4, rows, in_width, out_width, H200)
        assert (plan.variant.panels, plan.variant.places, plan.config.grid[1]) == (panels, places, groups)


def test_units_of_a_span_share_their_scales() -> None:
    for kind, in_width, shift, span in (
        (INT4, 4096, 2, 2),
        (INT4, 4096, 30, 4),
        (INT4, 3072, 2, 1),
        (INT4, 4096, 1, 1),
        (FP8, 4096, 2, 4),
        (FP8, 3072, 2, 2),
        (FP8, 1568, 30, 4),
    ):
        assert span_units(kind, in_width, shift) == span


def test_expansion_fills_the_device() -> None:
    assert expand_config(9, H200).grid == (2, 1, 1)
    assert expand_config(1 << 20, H200).grid == (8 * 132, 1, 1)


def test_which_sums_are_those_of_dense_weights() -> None:
    assert sums_as_dense(INT4, 4096)
    assert not sums_as_dense(INT4, 3584)
    assert sums_as_dense(FP8, 3584)


def test_a_device_with_too_little_shared_memory_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="99 KiB"):
        launch_plan(INT4, 16, 4096, 4096, DeviceLimits(8, 32 * 1024, 80, 1 << 20))


def test_launches_and_struct(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    monkeypatch.setattr(module, "device_limits", lambda _device: H200)
    shape = PackedShape(INT4, 96, 256)
    weight, case = random_weight(shape, torch.bfloat16, "cpu"), operands(9, shape, torch.bfloat16, "cpu")
    quantised_linear(case.x, weight, case.residual, case.bias, residual=case.residual)
    quantised_linear(case.x[:0], weight, case.residual[:0])
    quantised_gated_linear(case.x, weight, torch.empty(9, 48).bfloat16(), case.bias)
    expand_weight(weight.rows(32, 64), torch.empty(32, 256).bfloat16())
    assert [launch.spec.name for launch in launches] == [
        "quantised_linear_int4",
        "quantised_linear_int4_gated",
        "expand_int4",
    ]
    params = launches[0].params
    assert (params["num_rows"], params["in_width"], params["out_width"]) == (9, 256, 96)
    assert (params["x_stride"], params["residual_stride"], params["out_stride"]) == (280, 99, 99)
    assert (params["num_units"], params["num_groups"], params["group_shift"], params["scale_step"]) == (4, 2, 2, 1)
    assert launches[1].params["out_width"] == 48
    piece = launches[2].params
    assert (piece["out_width"], piece["out_stride"]) == (32, 256)
    assert piece["packed"] == weight.packed.data_ptr() + 2 * 4 * 512
    assert piece["scales"] == weight.scales.data_ptr() + 2 * 2 * 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(2, 64)}, "x is"),
        ({"x": torch.zeros(2, 128).bfloat16()}, "x is"),
        ({"x": torch.zeros(2, 68).bfloat16()[:, :64]}, "rows of x are 136 bytes apart"),
        ({"out": torch.zeros(2, 32).half()}, "out is"),
        ({"out": torch.zeros(3, 32).bfloat16()}, "out is"),
        ({"bias": torch.zeros(32)}, "bias is"),
        ({"residual": torch.zeros(2, 32)}, "residual is"),
        ({"x": torch.zeros(2, 64).half(), "out": torch.zeros(2, 32).half()}, "expands to torch.bfloat16"),
    ],
)
def test_bad_arguments(monkeypatch: pytest.MonkeyPatch, changes: dict[str, torch.Tensor], message: str) -> None:
    launches = record_launches(monkeypatch)
    weight = random_weight(PackedShape(INT4, 32, 64, 64), torch.bfloat16, "cpu")
    arguments = {"x": torch.zeros(2, 64).bfloat16(), "weight": weight, "out": torch.zeros(2, 32).bfloat16()}
    with pytest.raises(InvalidArgumentError, match=message):
        quantised_linear(**(arguments | changes))
    with pytest.raises(InvalidArgumentError, match="16 each"):
        quantised_gated_linear(arguments["x"], weight.rows(0, 16), arguments["out"])
    assert not launches


def test_a_cpu_tensor_is_refused() -> None:
    weight = random_weight(PackedShape(FP8, 32, 64, 0), torch.bfloat16, "cpu")
    with pytest.raises(InvalidArgumentError, match="CUDA"):
        quantised_linear(torch.zeros(2, 64).bfloat16(), weight, torch.zeros(2, 32).bfloat16())


@pytest.fixture(scope="module")
def compiled() -> None:
    """Every variant, compiled in threads."""
    loader.warm_up((spec, variant.key) for spec in SPECS for variant in spec.variants)


def at_once(weight: PackedWeight, case: LinearCase, rows: int) -> torch.Tensor:
    """The first `rows` rows of a case, bias and residual included, by one call."""
    out = torch.empty_like(case.residual[:rows])
    quantised_linear(case.x[:rows], weight, out, case.bias, residual=case.residual[:rows])
    return out


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_device_expands_as_the_reference(dtype: torch.dtype, shape: PackedShape) -> None:
    weight = random_weight(shape, dtype, "cuda")
    ours = torch.full((shape.rows + 1, shape.columns + 8), 7.0, dtype=dtype, device="cuda")
    theirs = torch.empty(weight.shape, dtype=dtype, device="cuda")
    expand_weight(weight, ours[:-1, : shape.columns])
    ref.expand_weight(weight, theirs)
    assert_same_bits(ours[:-1, : shape.columns], theirs)
    assert bool((ours[-1] == 7.0).all())
    assert bool((ours[:, shape.columns :] == 7.0).all())


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_device_equals_reference(dtype: torch.dtype, shape: PackedShape) -> None:
    weight = random_weight(shape, dtype, "cuda")
    for rows in (*ROWS, 17, 40):
        case = operands(rows, shape, dtype, "cuda")
        for out_dtype, extra in ((dtype, False), (dtype, True), (torch.float32, True)):
            whole = torch.full((rows + 1, shape.rows + 5), 7.0, dtype=out_dtype, device="cuda")
            out = whole[:rows, : shape.rows]
            residual = case.residual.to(out_dtype) if extra else None
            options = {"bias": case.bias if extra else None, "residual": residual}
            quantised_linear(case.x, weight, out, **options)
            expected = torch.empty(rows, shape.rows, dtype=torch.float64, device="cuda")
            ref.quantised_linear(case.x, weight, expected, **options)
            assert norm_error(out, expected) < NORM_TOLERANCE[out_dtype]
            assert float((out - expected).abs().max()) < 4 * NORM_TOLERANCE[out_dtype] * float(expected.abs().max())
            assert bool((whole[rows:] == 7.0).all())
            assert bool((whole[:, shape.rows :] == 7.0).all())


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if sums_as_dense(shape.kind, shape.columns)])
def test_bits_are_those_of_the_dense_kernel(dtype: torch.dtype, shape: PackedShape) -> None:
    weight = random_weight(shape, dtype, "cuda")
    matrix = torch.empty(weight.shape, dtype=dtype, device="cuda")
    ref.expand_weight(weight, matrix)
    for rows in ROWS:
        case = operands(rows, shape, dtype, "cuda")
        expected = torch.empty_like(case.residual)
        skinny_linear(case.x, matrix, expected, case.bias, residual=case.residual)
        assert_same_bits(at_once(weight, case, rows), expected)


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("rows", [8, 13])
@pytest.mark.parametrize("shape", [SHAPES[3], SHAPES[5], SHAPES[13]])
def test_bits_do_not_depend_on_the_plan(monkeypatch: pytest.MonkeyPatch, rows: int, shape: PackedShape) -> None:
    weight, case = random_weight(shape, torch.bfloat16, "cuda"), operands(rows, shape, torch.bfloat16, "cuda")
    expected = at_once(weight, case, rows)
    for variant in VARIANTS:
        if variant.row_tiles == (1 if rows <= 8 else 2):
            for max_groups in (1, 7, MAX_GRID):
                plan = plan_of(variant, rows, shape.rows, max_groups=max_groups)
                monkeypatch.setattr(module, "launch_plan", lambda *_args, plan=plan, **_options: plan)
                assert_same_bits(at_once(weight, case, rows), expected)


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[6], SHAPES[12]])
def test_a_row_has_the_same_bits_in_any_company(shape: PackedShape) -> None:
    weight, case = random_weight(shape, torch.bfloat16, "cuda"), operands(40, shape, torch.bfloat16, "cuda")
    together = at_once(weight, case, 40)
    for rows in range(1, 40):
        assert_same_bits(at_once(weight, case, rows), together[:rows])


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
def test_residual_in_place() -> None:
    weight, case = random_weight(SHAPES[1], torch.float16, "cuda"), operands(4, SHAPES[1], torch.float16, "cuda")
    apart = at_once(weight, case, 4)
    quantised_linear(case.x, weight, case.residual, case.bias, residual=case.residual)
    assert_same_bits(case.residual, apart)


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("shape", GATED_SHAPES)
def test_gated_equals_linear_and_silu_mul(dtype: torch.dtype, shape: PackedShape) -> None:
    weight, width = random_weight(shape, dtype, "cuda"), shape.rows // 2
    for rows in (1, 8, 13):
        case = operands(rows, shape, dtype, "cuda", gated=True)
        for bias in (None, case.bias):
            out, expected = (torch.full((rows, width), float("nan"), dtype=dtype, device="cuda") for _ in range(2))
            both = torch.empty(rows, 2 * width, dtype=dtype, device="cuda")
            quantised_gated_linear(case.x, weight, out, bias)
            quantised_linear(case.x, weight, both, bias)
            silu_mul(both, expected)
            assert_close(out, expected)
            ref.quantised_gated_linear(case.x, weight, expected, bias)
            assert norm_error(out, expected) < 2 * NORM_TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("variant", GATED_VARIANTS)
def test_gated_variants(monkeypatch: pytest.MonkeyPatch, variant: module.QuantisedVariant) -> None:
    rows, shape = variant.row_tiles * 8, GATED_SHAPES[0]
    weight, case = (
        random_weight(shape, torch.bfloat16, "cuda"),
        operands(rows, shape, torch.bfloat16, "cuda", gated=True),
    )
    expected, out = (torch.empty(rows, shape.rows // 2, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    quantised_gated_linear(case.x, weight, expected)
    for max_groups in (5, MAX_GRID):
        plan = plan_of(variant, rows, shape.rows // 2, gated=True, max_groups=max_groups)
        monkeypatch.setattr(module, "launch_plan", lambda *_args, plan=plan, **_options: plan)
        quantised_gated_linear(case.x, weight, out)
        assert_same_bits(out, expected)


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("rows", [1, 12])
def test_a_chain_of_overlapping_launches(rows: int) -> None:
    """Each kernel starts while the one in front ends; waiting in between, and a graph, must change nothing."""
    half = torch.bfloat16
    shapes = (PackedShape(INT4, 4096, 1024), PackedShape(INT4, 1024, 4096))
    weights = [random_weight(shape, half, "cuda") for shape in shapes] * 20
    torch.manual_seed(3)
    first = torch.randn(rows, 1024, device="cuda").to(half)
    narrow, wide = torch.empty_like(first), torch.empty(rows, 4096, device="cuda", dtype=half)

    def chain(after: Callable[[], None]) -> None:
        narrow.copy_(first)
        for idx, weight in enumerate(weights):
            if idx % 2 == 0:
                quantised_linear(narrow, weight, wide)
                wide.div_(8)
            else:
                quantised_linear(wide, weight, narrow)
            after()

    chain(torch.cuda.synchronize)
    expected = narrow.clone()
    assert bool(expected.isfinite().all())
    graph = captured(lambda: chain(lambda: None))
    for run in [lambda: chain(lambda: None)] * 5 + [graph.replay] * 20:
        narrow.fill_(float("nan"))
        run()
        assert_same_bits(narrow, expected)


@pytest.mark.gpu
def test_sanitizer_quantised_linear() -> None:
    for shape in (PackedShape(INT4, 48, 192, 64), PackedShape(INT4, 16, 2048), PackedShape(FP8, 48, 96, 0)):
        weight = random_weight(shape, torch.bfloat16, "cuda")
        for rows in (1, 9, 20):
            at_once(weight, operands(rows, shape, torch.bfloat16, "cuda"), rows)
        expand_weight(weight, torch.empty(weight.shape, dtype=torch.bfloat16, device="cuda"))
    shape = PackedShape(INT4, 96, 192, 64)
    weight = random_weight(shape, torch.bfloat16, "cuda")
    x = operands(3, shape, torch.bfloat16, "cuda").x
    quantised_gated_linear(x, weight, torch.empty(3, 48, dtype=torch.bfloat16, device="cuda"))
    assert {kind for kind, _ in LINEAR} == {INT4, FP8}
    torch.cuda.synchronize()
