"""Linear in deterministic mode: reference, plans, arguments; then the bits of a row on the device at any row count."""

from __future__ import annotations

import pytest
import torch
from linear_case import SHAPES, check_against_reference, make_case, norm_error, rows_at_once
from row_ops import assert_same_bits, captured, record_launches

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu import deterministic_linear as module
from edgellm.kernels.cu import loader
from edgellm.kernels.cu import skinny_linear as skinny_module
from edgellm.kernels.cu.deterministic_linear import (
    FLOAT_VARIANTS,
    HALF_TYPES,
    SPECS,
    VARIANTS,
    WARPGROUP_VARIANTS,
    WarpgroupVariant,
    deterministic_linear,
    half_variant,
    launch_config,
)
from edgellm.kernels.cu.launch import DeviceLimits, device_limits
from edgellm.kernels.cu.skinny_linear import skinny_linear
from edgellm.kernels.ref import deterministic_linear as ref
from edgellm.kernels.ref import skinny_linear as plain_ref

H200 = DeviceLimits(132, 227 * 1024, 90, 60 << 20)
ORIN = DeviceLimits(16, 163 * 1024, 87, 4 << 20)
RTX = DeviceLimits(128, 99 * 1024, 89, 72 << 20)
TYPES = (*HALF_TYPES, torch.float32)
# Linears of three models, then odd widths.
MODEL_SHAPES = (
    *((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)),
    *((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)),
    *((960, 576), (576, 576), (3072, 576), (576, 1536)),
    *((1061, 1048), (131, 520), (7, 8)),
)
ROW_COUNTS = (1, 7, 16, 17, 64, 300, 2048)


@pytest.mark.parametrize("in_width", [1, 8, 512, 520, 576, 1024, 1536, 12288])
def test_slices_cover_k_in_order(in_width: int) -> None:
    bounds = ref.slice_bounds(in_width)
    assert len(bounds) <= 16
    assert [start for start, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
    assert bounds[-1][1] == in_width
    assert all(start % 32 == 0 and end > start for start, end in bounds)


@pytest.mark.parametrize("dtype", TYPES)
def test_reference_is_the_plain_one_and_rows_are_alone(dtype: torch.dtype) -> None:
    case = make_case(6, 40, 1088, dtype, device="cpu")
    together = rows_at_once(ref.deterministic_linear, case, 6)
    plain = rows_at_once(plain_ref.skinny_linear, case, 6)
    assert norm_error(together, plain) < 4e-3
    assert_same_bits(rows_at_once(ref.deterministic_linear, case, 2), together[:2])


def test_variants_by_size_and_device() -> None:
    assert half_variant(16, 4096, 4096, H200) is None
    assert half_variant(20, 2048, 1024, H200) is None
    big = half_variant(4096, 4096, 4096, H200)
    assert isinstance(big, WarpgroupVariant)
    assert big.groups > 1
    # Runs of K that are no whole stages, and other devices, take mma tiles.
    assert half_variant(4096, 1536, 4096, H200) is VARIANTS[0]
    assert half_variant(4096, 4096, 4096, ORIN) is VARIANTS[0]
    assert half_variant(4096, 4096, 4096, RTX) is VARIANTS[1]
    for limits in (H200, ORIN, RTX):
        for rows in (17, 100, 3000):
            variant = half_variant(rows, 12288, 4096, limits)
            assert variant is None or variant.shared_bytes <= limits.max_shared_bytes
    assert launch_config(300, 1061, VARIANTS[0]).grid == (3 * 9, 1, 1)
    assert launch_config(300, 1061, FLOAT_VARIANTS[1]).grid == (38 * 34, 1, 1)


def test_launches_and_struct(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    for each in (module, skinny_module):
        monkeypatch.setattr(each, "device_limits", lambda _device: H200)
    for dtype, rows in ((torch.float16, 3), (torch.float16, 3000), (torch.float32, 3), (torch.float32, 300)):
        case = make_case(rows, 512, 2048, dtype, device="cpu")
        deterministic_linear(case.x, case.weight, torch.empty(rows, 512, dtype=dtype), case.bias)
    deterministic_linear(torch.zeros(0, 8), torch.zeros(4, 8), torch.zeros(0, 4))
    names = [launch.spec.name for launch in launches]
    assert names == ["skinny_linear", "deterministic_linear_sm90", *["deterministic_linear_float"] * 2]
    assert launches[1].params["x_stride"] == 2072
    assert launches[1].params["residual"] is None
    assert launches[3].params["num_rows"] == 300


@pytest.mark.parametrize(
    ("x", "weight", "out", "message"),
    [
        (torch.zeros(2, 8, dtype=torch.float64), torch.zeros(4, 8), torch.zeros(2, 4), "x is"),
        (torch.zeros(2, 8), torch.zeros(4, 9), torch.zeros(2, 4), "weight is"),
        (torch.zeros(2, 8), torch.zeros(4, 8), torch.zeros(2, 5), "out is"),
        (torch.zeros(2, 9).half(), torch.zeros(4, 9).half(), torch.zeros(2, 4).half(), "multiple of 8"),
    ],
)
def test_bad_arguments(
    monkeypatch: pytest.MonkeyPatch, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, message: str
) -> None:
    launches = record_launches(monkeypatch)
    with pytest.raises(InvalidArgumentError, match=message):
        deterministic_linear(x, weight, out)
    assert not launches


@pytest.fixture(scope="module")
def compiled() -> None:
    """Every variant that runs here, compiled in threads."""
    arch = device_limits(torch.device("cuda")).arch
    loader.warm_up(
        (spec, variant.key) for spec in (*SPECS, skinny_module.SPEC) if spec.supports(arch) for variant in spec.variants
    )


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("out_width", "in_width"), SHAPES)
def test_device_equals_reference(dtype: torch.dtype, out_width: int, in_width: int) -> None:
    for rows in (1, 17, 65, 129, 700):
        for out_dtype, extra in ((dtype, False), (torch.float32, True)):
            case = make_case(rows, out_width, in_width, dtype, out_dtype)
            check_against_reference(deterministic_linear, case, bias=extra, residual=extra, out_dtype=out_dtype)


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("out_width", "in_width"), MODEL_SHAPES)
def test_a_row_has_the_same_bits_at_any_row_count(dtype: torch.dtype, out_width: int, in_width: int) -> None:
    case = make_case(ROW_COUNTS[-1], out_width, in_width, dtype)
    together = rows_at_once(deterministic_linear, case, ROW_COUNTS[-1])
    for rows in ROW_COUNTS[:-1]:
        assert_same_bits(rows_at_once(deterministic_linear, case, rows), together[:rows])
    if dtype != torch.float32:
        assert_same_bits(rows_at_once(skinny_linear, case, 16), together[:16])


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize(("out_width", "in_width"), [(1061, 1048), (576, 1536), (1024, 3072), (200, 4096), (90, 16)])
def test_bits_do_not_depend_on_the_variant(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, out_width: int, in_width: int
) -> None:
    """Warp products, warpgroup products and the skinny kernel; also where x and weight are of very different sizes."""
    case = make_case(260, out_width, in_width, dtype)
    case.x.mul_(torch.exp(3 * torch.randn_like(case.x)))
    limits = device_limits(case.x.device)
    monkeypatch.setattr(module, "half_variant", lambda *_args: None)
    expected = rows_at_once(deterministic_linear, case, 260)
    for variant in (*VARIANTS, *WARPGROUP_VARIANTS):
        if variant.takes(in_width, limits):
            monkeypatch.setattr(module, "half_variant", lambda *_args, variant=variant: variant)
            assert_same_bits(rows_at_once(deterministic_linear, case, 260), expected)


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [3, 130])
def test_graph_equals_eager_and_repeats(dtype: torch.dtype, rows: int) -> None:
    case = make_case(rows, 1061, 1048, dtype)
    out, expected = torch.empty_like(case.residual), torch.empty_like(case.residual)
    graph = captured(lambda: deterministic_linear(case.x, case.weight, out, case.bias, residual=case.residual))
    case.x.neg_()
    deterministic_linear(case.x, case.weight, expected, case.bias, residual=case.residual)
    for _ in range(20):
        out.fill_(float("nan"))
        graph.replay()
        assert_same_bits(out, expected)


@pytest.mark.gpu
def test_float32_takes_any_width() -> None:
    for rows, out_width, in_width in ((1, 5, 1), (16, 33, 77), (17, 65, 101), (100, 70, 3)):
        case = make_case(rows, out_width, in_width, torch.float32)
        check_against_reference(deterministic_linear, case, bias=True, residual=True, out_dtype=torch.float32)


@pytest.mark.gpu
def test_sanitizer_deterministic_linear() -> None:
    for dtype, rows in ((torch.bfloat16, 20), (torch.bfloat16, 150), (torch.float32, 3), (torch.float32, 70)):
        for in_width in (104, 520):
            rows_at_once(deterministic_linear, make_case(rows, 131, in_width, dtype), rows)
    torch.cuda.synchronize()
