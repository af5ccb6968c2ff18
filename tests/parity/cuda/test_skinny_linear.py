"""Linear on few rows: the reference against the CPU kernel, plans, arguments; then the device against the reference."""

from __future__ import annotations

import pytest
import torch
from linear_case import NORM_TOLERANCE, SHAPES, check_against_reference, make_case, norm_error, rows_at_once
from row_ops import assert_close, assert_same_bits, captured, record_launches

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cpu.linear import linear as cpu_linear
from edgellm.kernels.cu import loader
from edgellm.kernels.cu import skinny_linear as module
from edgellm.kernels.cu.launch import DeviceLimits
from edgellm.kernels.cu.silu_mul import silu_mul
from edgellm.kernels.cu.skinny_linear import (
    HALF_TYPES,
    SPECS,
    VARIANTS,
    gated_linear,
    launch_config,
    launch_plan,
    plan_of,
    skinny_linear,
)
from edgellm.kernels.ref import gated_linear as gated_ref
from edgellm.kernels.ref import skinny_linear as ref

H200 = DeviceLimits(132, 227 * 1024, 90, 60 << 20)
ORIN = DeviceLimits(16, 163 * 1024, 87, 4 << 20)
RTX = DeviceLimits(128, 99 * 1024, 89, 72 << 20)
ROWS = (1, 2, 7, 8, 9, 15, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("accumulate", [False, True])
def test_reference_is_the_cpu_kernel(dtype: torch.dtype, accumulate: bool) -> None:
    case = make_case(5, 24, 48, dtype, device="cpu")
    ours, theirs = case.residual.clone(), case.residual.clone()
    ref.skinny_linear(case.x, case.weight, ours, case.bias, residual=ours if accumulate else None)
    cpu_linear(case.x.contiguous(), case.weight, theirs, bias=case.bias, accumulate=accumulate)
    torch.testing.assert_close(theirs, ours, rtol=1e-5 if dtype == torch.float32 else 0.008, atol=1e-5)


def test_plans_by_shape() -> None:
    for rows, out_width, in_width, tiles, blocks, grid in (
        (1, 4096, 1024, 3, 2, 171),
        (8, 1024, 2048, 2, 4, 64),
        (16, 1024, 3072, 2, 6, 64),
        (1, 24576, 4096, 2, 8, 1536),
        (1, 4096, 12288, 1, 4, 512),
        (16, 24576, 4096, 2, 4, 128),
    ):
        plan = launch_plan(rows, in_width, out_width, H200)
        assert (plan.variant.tiles, plan.variant.blocks, plan.config.grid) == (tiles, blocks, (grid, 1, 1))


@pytest.mark.parametrize("limits", [H200, ORIN, RTX])
@pytest.mark.parametrize("rows", [1, 8, 9, 16, 40])
@pytest.mark.parametrize("gated", [False, True])
def test_plans_cover_the_operands_and_fit(limits: DeviceLimits, rows: int, gated: bool) -> None:
    for out_width, in_width in (*SHAPES, (151936, 1024), (24576, 4096)):
        plan = launch_plan(rows, in_width, out_width, limits, gated=gated)
        groups, row_blocks, _ = plan.config.grid
        all_groups = -(-out_width // (plan.variant.tiles * 8 // (2 if gated else 1)))
        assert groups == all_groups or (plan.variant.walks and groups < all_groups)
        assert row_blocks * 8 * plan.variant.row_tiles >= rows
        assert plan.config.shared_bytes <= limits.max_shared_bytes
        assert plan.variant.long or plan.variant.blocks * 512 >= in_width
        if not gated:
            assert launch_config(rows, in_width, out_width, limits) == plan.config


def test_a_device_with_too_little_shared_memory_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="99 KiB"):
        launch_plan(16, 4096, 4096, DeviceLimits(8, 64 * 1024, 80, 1 << 20))


def test_launches_and_struct(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    monkeypatch.setattr(module, "device_limits", lambda _device: H200)
    case = make_case(9, 1024, 2048, torch.bfloat16, torch.float32, device="cpu")
    out = torch.empty(9, 1024)
    skinny_linear(case.x, case.weight, out, case.bias, residual=case.residual)
    skinny_linear(case.x[:0], case.weight, out[:0])
    assert len(launches) == 1
    params = launches[0].params
    assert (params["num_rows"], params["in_width"], params["out_width"]) == (9, 2048, 1024)
    assert (params["x_stride"], params["residual_stride"], params["out_stride"]) == (2072, 1027, 1024)
    assert params["out_is_float"] == 1
    assert params["bias"] == case.bias.data_ptr()
    assert launches[0].key == (torch.bfloat16, launch_plan(9, 2048, 1024, H200).variant)


def test_gated_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    monkeypatch.setattr(module, "device_limits", lambda _device: H200)
    case = make_case(2, 6144, 1024, torch.bfloat16, device="cpu")
    gated_linear(case.x, case.weight, torch.empty(2, 3072).bfloat16(), case.bias)
    assert [launch.spec.name for launch in launches] == ["skinny_linear_gated"]
    assert launches[0].params["out_width"] == 3072
    assert launches[0].config.grid == (128, 1, 1)
    for weight, out, message in (
        (case.weight, torch.empty(2, 3072), "out is"),
        (case.weight, torch.empty(2, 6144).bfloat16(), "out is"),
        (case.weight[:5], torch.empty(2, 2).bfloat16(), "an even number of rows"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            gated_linear(case.x, weight, out)
    assert len(launches) == 1


def _arguments() -> dict[str, torch.Tensor]:
    half = torch.bfloat16
    return {
        "x": torch.zeros(2, 16, dtype=half),
        "weight": torch.zeros(4, 16, dtype=half),
        "out": torch.zeros(2, 4, dtype=half),
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(17, 16, dtype=torch.bfloat16)}, "at most 16"),
        ({"x": torch.zeros(2, 16)}, "x is"),
        ({"x": torch.zeros(2, 24, dtype=torch.bfloat16)}, "weight is"),
        ({"x": torch.zeros(2, 32, dtype=torch.bfloat16)[:, ::2]}, "x is"),
        ({"x": torch.zeros(2, 20, dtype=torch.bfloat16)[:, :16]}, "rows of x are 40 bytes apart"),
        ({"x": torch.zeros(40, dtype=torch.bfloat16)[1:33].view(2, 16)}, "x starts at"),
        ({"weight": torch.zeros(4, 16, dtype=torch.float16)}, "weight is"),
        ({"weight": torch.zeros(4, 32, dtype=torch.bfloat16)[:, :16]}, "weight is"),
        ({"out": torch.zeros(2, 4, dtype=torch.float16)}, "out is"),
        ({"out": torch.zeros(3, 4, dtype=torch.bfloat16)}, "out is"),
        ({"bias": torch.zeros(5, dtype=torch.bfloat16)}, "bias is"),
        ({"bias": torch.zeros(4)}, "bias is"),
        ({"residual": torch.zeros(2, 4)}, "residual is"),
        ({"residual": torch.zeros(1, 4, dtype=torch.bfloat16)}, "residual is"),
        (
            {"x": torch.zeros(2, 12, dtype=torch.bfloat16), "weight": torch.zeros(4, 12, dtype=torch.bfloat16)},
            "a multiple of 8",
        ),
    ],
)
def test_bad_arguments(monkeypatch: pytest.MonkeyPatch, changes: dict[str, torch.Tensor], message: str) -> None:
    launches = record_launches(monkeypatch)
    with pytest.raises(InvalidArgumentError, match=message):
        skinny_linear(**(_arguments() | changes))
    assert not launches


def test_a_cpu_tensor_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="CUDA"):
        skinny_linear(**_arguments())


@pytest.fixture(scope="module")
def compiled() -> None:
    """Every variant, compiled in threads."""
    loader.warm_up((spec, variant.key) for spec in SPECS for variant in spec.variants)


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize(("out_width", "in_width"), SHAPES)
def test_device_equals_reference(dtype: torch.dtype, out_width: int, in_width: int) -> None:
    for rows in ROWS:
        for out_dtype, extra in ((dtype, False), (dtype, True), (torch.float32, True)):
            case = make_case(rows, out_width, in_width, dtype, out_dtype)
            check_against_reference(skinny_linear, case, bias=extra, residual=extra, out_dtype=out_dtype)


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
def test_a_vocabulary() -> None:
    case = make_case(3, 151936, 1024, torch.bfloat16, torch.float32)
    check_against_reference(skinny_linear, case, bias=False, residual=False, out_dtype=torch.float32)


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("rows", [8, 13])
@pytest.mark.parametrize(("out_width", "in_width"), [(4099, 1000), (520, 2568)])
def test_bits_do_not_depend_on_the_plan(
    monkeypatch: pytest.MonkeyPatch, rows: int, out_width: int, in_width: int
) -> None:
    case = make_case(rows, out_width, in_width, torch.bfloat16)
    expected = rows_at_once(skinny_linear, case, rows)
    row_tiles = 1 if rows <= 8 else 2
    for variant in VARIANTS:
        if variant.row_tiles == row_tiles and variant.takes(in_width):
            for sm_count in (3, 132, 4096):
                plan = plan_of(variant, rows, out_width, DeviceLimits(sm_count, 1 << 20, 90, 0))
                monkeypatch.setattr(module, "launch_plan", lambda *_args, plan=plan, **_options: plan)
                assert_same_bits(rows_at_once(skinny_linear, case, rows), expected)


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("out_width", "in_width"), [(4096, 1024), (1024, 3072), (1061, 1048), (576, 1536)])
def test_a_row_has_the_same_bits_in_any_company(out_width: int, in_width: int) -> None:
    case = make_case(16, out_width, in_width, torch.bfloat16)
    together = rows_at_once(skinny_linear, case, 16)
    for rows in range(1, 16):
        assert_same_bits(rows_at_once(skinny_linear, case, rows), together[:rows])


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
def test_residual_in_place() -> None:
    case = make_case(4, 1024, 2048, torch.bfloat16)
    apart = rows_at_once(skinny_linear, case, 4)
    skinny_linear(case.x, case.weight, case.residual, case.bias, residual=case.residual)
    assert_same_bits(case.residual, apart)


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("rows", [1, 12])
def test_a_chain_of_overlapping_launches(rows: int) -> None:
    """Each kernel starts while the one in front ends; waiting in between, and a graph, must change nothing."""
    torch.manual_seed(3)
    half = torch.bfloat16
    weights = [torch.randn(n, k, device="cuda").div(k**0.5).to(half) for n, k in ((4096, 1024), (1024, 4096))] * 20
    first = torch.randn(rows, 1024, device="cuda").to(half)
    narrow, wide = (
        torch.empty(rows, 1024, device="cuda", dtype=half),
        torch.empty(rows, 4096, device="cuda", dtype=half),
    )

    def chain(wait: bool) -> None:
        narrow.copy_(first)
        for idx, weight in enumerate(weights):
            if idx % 2 == 0:
                skinny_linear(narrow, weight, wide)
            else:
                skinny_linear(wide, weight, narrow, residual=narrow)
            if wait:
                torch.cuda.synchronize()

    chain(True)
    expected = narrow.clone()
    graph = captured(lambda: chain(False))
    for run in [lambda: chain(False)] * 5 + [graph.replay] * 20:
        narrow.fill_(float("nan"))
        run()
        assert_same_bits(narrow, expected)
    assert norm_error(narrow, first) > 0.1


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize(("out_width", "in_width"), [(3072, 1024), (12288, 4096), (768, 576), (65, 1048), (1, 8)])
def test_gated_equals_linear_and_silu_mul(dtype: torch.dtype, out_width: int, in_width: int) -> None:
    for rows in (1, 8, 13):
        case = make_case(rows, 2 * out_width, in_width, dtype)
        for bias in (None, case.bias):
            out, expected = (torch.full((rows, out_width), float("nan"), dtype=dtype, device="cuda") for _ in range(2))
            both = torch.empty(rows, 2 * out_width, dtype=dtype, device="cuda")
            gated_linear(case.x, case.weight, out, bias)
            skinny_linear(case.x, case.weight, both, bias)
            silu_mul(both, expected)
            assert_close(out, expected)
            gated_ref.gated_linear(case.x, case.weight, expected, bias)
            assert norm_error(out, expected) < 2 * NORM_TOLERANCE[dtype]


@pytest.mark.gpu
def test_sanitizer_skinny_linear() -> None:
    case = make_case(9, 34, 104, torch.bfloat16)
    gated_linear(case.x, case.weight, torch.empty(9, 17, device="cuda", dtype=torch.bfloat16))
    for rows, out_width, in_width in ((1, 17, 40), (9, 33, 520), (16, 100, 1032), (3, 40, 2600)):
        rows_at_once(skinny_linear, make_case(rows, out_width, in_width, torch.bfloat16), rows)
    torch.cuda.synchronize()
