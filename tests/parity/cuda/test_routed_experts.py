"""Routed experts on CUDA: references, plans and arguments on the CPU; then the device against the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from row_ops import ROW_TYPES, assert_same_bits, captured, record_launches
from torch.nn import functional

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cpu.experts import few_experts as cpu_few_experts
from edgellm.kernels.cu import experts as module
from edgellm.kernels.cu.deterministic_linear import VARIANTS as LINEAR_TILES
from edgellm.kernels.cu.experts import (
    STREAM_ROWS,
    ExpertsPlan,
    ExpertsShape,
    combine_config,
    experts,
    experts_workspace,
    float_config,
    launch_config,
    launch_plan,
    stream_config,
    stream_shared_bytes,
    tiles_config,
    workspace_layout,
)
from edgellm.kernels.cu.launch import DeviceLimits
from edgellm.kernels.cu.skinny_linear import gated_linear, skinny_linear
from edgellm.kernels.ref import experts as ref

H200 = DeviceLimits(132, 227 * 1024, 90, 60 << 20)
ORIN = DeviceLimits(16, 163 * 1024, 87, 4 << 20)
RTX = DeviceLimits(170, 99 * 1024, 120, 96 << 20)
NAN = float("nan")
# Norm of the error over norm of the result: gate, up and their product are rounded to the type.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# T, k, E, D, F
SHAPES = (
    ExpertsShape(1, 8, 128, 256, 96),
    ExpertsShape(2, 1, 4, 64, 32),
    ExpertsShape(5, 10, 512, 128, 64),
    ExpertsShape(16, 4, 16, 512, 136),
    ExpertsShape(9, 3, 8, 72, 40),
    ExpertsShape(3, 2, 5, 1048, 8),
    ExpertsShape(17, 2, 8, 64, 64),
    ExpertsShape(70, 6, 64, 200, 88),
    ExpertsShape(300, 4, 4, 128, 72),
    ExpertsShape(260, 5, 16, 136, 128),
    ExpertsShape(130, 10, 512, 64, 32),
    ExpertsShape(900, 2, 6, 264, 192),
)


def label(shape: ExpertsShape) -> str:
    return f"T{shape.num_rows}k{shape.count}E{shape.num_experts}D{shape.hidden}F{shape.inner_size}"


@dataclass
class Case:
    """Rows and total with NaN between their rows; NaN weights where an expert was not chosen."""

    shape: ExpertsShape
    dtype: torch.dtype
    device: str = "cpu"
    seed: int = 0
    wide_numbers: bool = False
    skipped: int = 0  # of the choices, about every so manieth one is -1 or beyond the last expert

    def __post_init__(self) -> None:
        shape = self.shape
        generator = torch.Generator().manual_seed(self.seed + shape.pairs)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator)

        def with_gaps(gap: int) -> torch.Tensor:
            whole = torch.full((shape.num_rows, shape.hidden + gap), NAN)
            whole[:, : shape.hidden] = normal(shape.num_rows, shape.hidden)
            return whole

        rows, total = with_gaps(24), with_gaps(5)
        # Experts are not equally popular.
        popularity = normal(shape.num_experts) + torch.linspace(1, 0, shape.num_experts)
        scores = normal(shape.num_rows, shape.num_experts) + popularity
        shares, chosen = scores.softmax(-1).topk(shape.count, dim=-1)
        if self.skipped:
            flat = chosen.flatten()
            flat[:: self.skipped] = -1
            flat[2 :: 2 * self.skipped] = shape.num_experts
        gate_up = normal(shape.num_experts, 2 * shape.inner_size, shape.hidden) / shape.hidden**0.5
        down = normal(shape.num_experts, shape.hidden, shape.inner_size) / shape.inner_size**0.5
        used = torch.zeros(shape.num_experts + 1, dtype=torch.bool)
        used[chosen.flatten().clamp(-1)] = True
        gate_up[~used[:-1]] = NAN
        down[~used[:-1]] = NAN
        self.rows = rows.to(self.dtype).to(self.device)[:, : shape.hidden]
        self.total = total.to(self.device)[:, : shape.hidden]
        self.shares = shares.contiguous().to(self.device)
        self.chosen = chosen.contiguous().to(self.device).to(torch.int64 if self.wide_numbers else torch.int32)
        self.gate_up, self.down = gate_up.to(self.dtype).to(self.device), down.to(self.dtype).to(self.device)
        size = experts_workspace(
            shape.num_rows, shape.count, shape.num_experts, shape.hidden, shape.inner_size, self.dtype
        )
        self.workspace = torch.full((size,), 255, dtype=torch.uint8, device=self.device)

    def operands(self) -> dict[str, torch.Tensor]:
        names = ("rows", "shares", "chosen", "gate_up", "down", "total")
        return {name: getattr(self, name) for name in names}

    def run(self, **options: Any) -> torch.Tensor:
        experts(**self.operands(), workspace=self.workspace, **options)
        return self.total

    def expected(self, *, gelu: bool = False, accumulate: bool = True) -> torch.Tensor:
        """In float64, expert by expert."""
        total = self.total.double() if accumulate else torch.zeros_like(self.total, dtype=torch.float64)
        for expert in range(self.shape.num_experts):
            tokens, choices = (self.chosen == expert).nonzero(as_tuple=True)
            if not len(tokens):
                continue
            gate, up = (self.rows[tokens].double() @ self.gate_up[expert].double().T).chunk(2, dim=-1)
            gate = functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)
            product = (gate * up) @ self.down[expert].double().T
            total.index_add_(0, tokens, product * self.shares[tokens, choices].double()[:, None])
        return total


def norm_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def check(case: Case, **options: Any) -> None:
    """One call against float64; what lies between the rows of total stays."""
    expected = case.expected(**options)
    total = case.run(**options)
    assert norm_error(total, expected) < TOLERANCE[case.dtype]
    assert float((total - expected).abs().max()) < 6 * TOLERANCE[case.dtype] * float(expected.abs().max())
    whole = total.as_strided((total.shape[0], total.stride(0)), (total.stride(0), 1))
    assert bool(whole[:, case.shape.hidden :].isnan().all())


# ---- references -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_reference_is_the_sum_over_experts_and_skips_what_is_none(gelu: bool, accumulate: bool) -> None:
    case = Case(ExpertsShape(5, 3, 8, 24, 16), torch.float32, skipped=4)
    expected = case.expected(gelu=gelu, accumulate=accumulate)
    total = case.total.double()
    ref.experts(**case.operands() | {"total": total}, gelu=gelu, accumulate=accumulate)
    assert bool((case.chosen == -1).any())
    assert bool((case.chosen == 8).any())
    assert norm_error(total, expected) < 1e-12


def test_reference_is_the_cpu_kernel() -> None:
    case = Case(ExpertsShape(4, 3, 8, 24, 16), torch.float32, wide_numbers=True)
    expected = case.total.double()
    ref.experts(**case.operands() | {"total": expected})
    given = {name: value.contiguous() for name, value in case.operands().items()}
    cpu_few_experts(**given)
    assert norm_error(given["total"], expected) < 1e-6


# ---- plans ----------------------------------------------------------------------------------------------------------


def test_plans_by_rows() -> None:
    large, small = LINEAR_TILES
    for rows, dtype, expected in (
        (1, torch.bfloat16, ExpertsPlan(16, None, False, False)),
        (16, torch.bfloat16, ExpertsPlan(16, None, False, False)),
        (17, torch.bfloat16, ExpertsPlan(64, small, False, True)),
        (384, torch.bfloat16, ExpertsPlan(64, small, False, True)),
        (512, torch.bfloat16, ExpertsPlan(64, small, False, True)),
        (2048, torch.bfloat16, ExpertsPlan(128, large, False, True)),
        (2048, torch.float32, ExpertsPlan(16, None, True, True)),
    ):
        assert launch_plan(ExpertsShape(rows, 8, 128, 2048, 768), dtype, H200) == expected
    assert launch_plan(ExpertsShape(2048, 8, 128, 2048, 768), torch.bfloat16, RTX).tile == small


@pytest.mark.parametrize("limits", [H200, ORIN, RTX])
@pytest.mark.parametrize("shape", SHAPES, ids=label)
def test_launches_cover_the_work_and_fit(limits: DeviceLimits, shape: ExpertsShape) -> None:
    items = shape.max_items(STREAM_ROWS)
    assert items >= min(shape.num_experts, shape.pairs)
    assert items * STREAM_ROWS >= shape.pairs
    for part, width in (("kGateUp", shape.inner_size), ("kDown", shape.hidden), ("kDownTotal", shape.hidden)):
        config = stream_config(shape, part, limits)
        assert 1 <= config.grid[0] <= max(2 * limits.sm_count, width // 8)
        assert config.shared_bytes == stream_shared_bytes(part) <= limits.max_shared_bytes
    for tile in LINEAR_TILES:
        config = tiles_config(shape, tile, gate_up=True)
        assert config.grid[0] * tile.tile[1] // 2 >= shape.max_items(tile.tile[0]) * shape.inner_size
        assert shape.max_items(tile.tile[0]) <= items
    assert float_config(shape, gate_up=False).grid[0] * 32 >= items * shape.hidden
    assert combine_config(shape).grid[:2] == (shape.num_rows, -(-shape.hidden // 256))
    assert launch_config(shape).grid == (1, 1, 1)


def test_workspace() -> None:
    shape = ExpertsShape(20, 3, 8, 64, 40)
    layout = workspace_layout(shape, torch.bfloat16)
    items = 16 * (1 + 3 + 8)
    assert (layout.order, layout.places, layout.inner) == (items, items + 240, items + 480)
    assert layout.product == layout.inner + 60 * 40 * 2
    assert layout.size == layout.product + 60 * 64 * 4
    assert experts_workspace(20, 3, 8, 64, 40, torch.bfloat16) == layout.size
    few = workspace_layout(ExpertsShape(16, 3, 8, 64, 40), torch.bfloat16)
    assert few.size == few.product
    sizes = [experts_workspace(rows, 8, 128, 2048, 768, torch.bfloat16) for rows in range(1, 70)]
    assert sizes == sorted(sizes)


def test_launches_and_struct(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    monkeypatch.setattr(module, "device_limits", lambda _device: H200)
    case = Case(ExpertsShape(9, 3, 8, 72, 40), torch.bfloat16, wide_numbers=True)
    case.run(gelu=True, accumulate=False)
    assert [(launch.spec.name, launch.key) for launch in launches] == [
        ("experts_route", ()),
        ("experts_stream", (torch.bfloat16, "kGateUp")),
        ("experts_stream", (torch.bfloat16, "kDownTotal")),
    ]
    params = launches[0].params
    assert all(launch.params == params for launch in launches)
    names = ("rows", "shares", "chosen", "gate_up", "down", "total")
    assert [params[name] for name in names] == [getattr(case, name).data_ptr() for name in names]
    layout = workspace_layout(case.shape, torch.bfloat16)
    assert (params["items"], params["order"]) == (case.workspace.data_ptr(), case.workspace.data_ptr() + layout.order)
    assert (params["rows_stride"], params["total_stride"]) == (96, 77)
    numbers = ("num_rows", "count", "num_experts", "hidden", "inner_size", "item_rows")
    assert [params[name] for name in numbers] == [9, 3, 8, 72, 40, 16]
    assert (params["chosen_is_wide"], params["is_gelu"], params["accumulate"]) == (1, 1, 0)


@pytest.mark.parametrize(
    ("shape", "dtype", "names"),
    [
        (SHAPES[3], torch.bfloat16, ["experts_route", "experts_stream", "experts_stream"]),
        (SHAPES[9], torch.float16, ["experts_route", "experts_tiles", "experts_tiles", "experts_combine"]),
        (SHAPES[0], torch.float32, ["experts_route", "experts_float", "experts_float", "experts_combine"]),
    ],
)
def test_kernels_by_shape(
    monkeypatch: pytest.MonkeyPatch, shape: ExpertsShape, dtype: torch.dtype, names: list[str]
) -> None:
    launches = record_launches(monkeypatch)
    monkeypatch.setattr(module, "device_limits", lambda _device: H200)
    Case(shape, dtype).run()
    assert [launch.spec.name for launch in launches] == names


def test_no_rows_or_no_choices_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    case = Case(SHAPES[1], torch.bfloat16)
    before = case.total.clone()
    none = {"shares": case.shares[:, :0], "chosen": case.chosen[:, :0]}
    experts(**case.operands() | none)
    assert torch.equal(case.total, before)
    experts(**case.operands() | none, accumulate=False)
    assert not bool(case.total.any())
    experts(**case.operands() | {name: getattr(case, name)[:0] for name in ("rows", "shares", "chosen", "total")})
    assert not launches


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": torch.zeros(2, 64, dtype=torch.float64)}, "rows is"),
        ({"rows": torch.zeros(2, 64)}, "down is .*torch.float32, contiguous"),
        ({"down": torch.zeros(4, 64, 33, dtype=torch.bfloat16)}, "gate_up is"),
        ({"down": torch.zeros(64, 32, dtype=torch.bfloat16)}, r"\(E, D, F\), \(T, k\) needed"),
        ({"gate_up": torch.zeros(3, 64, 64, dtype=torch.bfloat16)}, "gate_up is"),
        ({"chosen": torch.zeros(2, 1)}, "int32 or int64 is needed"),
        ({"chosen": torch.zeros(3, 1, dtype=torch.int32)}, "chosen is"),
        ({"shares": torch.zeros(2, 2)}, "shares is"),
        ({"shares": torch.zeros(2, 1, dtype=torch.bfloat16)}, "shares is"),
        ({"total": torch.zeros(2, 64, dtype=torch.bfloat16)}, "total is"),
        ({"total": torch.zeros(1, 64)}, "total is"),
        ({"workspace": None}, "workspace is missing"),
        ({"workspace": torch.zeros(100, dtype=torch.uint8)}, r"workspace is \(100,\).*uint8 of at least"),
        ({"workspace": torch.zeros(10000, dtype=torch.uint8)[1:]}, "workspace starts at"),
        ({"rows": torch.zeros(2, 68, dtype=torch.bfloat16)[:, 2:66]}, "rows starts at"),
        (
            {"chosen": torch.zeros(2, 33, dtype=torch.int32), "shares": torch.zeros(2, 33)},
            "up to 32 of 1024 are supported",
        ),
    ],
)
def test_bad_arguments(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str) -> None:
    launches = record_launches(monkeypatch)
    monkeypatch.setattr(module, "device_limits", lambda _device: H200)
    case = Case(ExpertsShape(2, 1, 4, 64, 32), torch.bfloat16)
    with pytest.raises(InvalidArgumentError, match=message):
        experts(**case.operands() | {"workspace": case.workspace} | changes)
    assert not launches


def test_odd_sizes_and_cpu_tensors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgumentError, match="rows is on cpu; a CUDA tensor is needed"):
        Case(SHAPES[1], torch.bfloat16).run()
    record_launches(monkeypatch)
    for hidden, inner in ((60, 32), (64, 36)):
        with pytest.raises(InvalidArgumentError, match="multiples of 8 are needed"):
            Case(ExpertsShape(2, 1, 4, hidden, inner), torch.float16).run()


# ---- device ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=label)
def test_device_equals_reference(dtype: torch.dtype, shape: ExpertsShape) -> None:
    check(Case(shape, dtype, "cuda"))
    check(Case(shape, dtype, "cuda", seed=1, wide_numbers=True, skipped=3), gelu=True, accumulate=False)


@pytest.mark.gpu
def test_float32_takes_any_sizes() -> None:
    check(Case(ExpertsShape(21, 3, 7, 37, 23), torch.float32, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("count", range(1, 11))
@pytest.mark.parametrize("num_experts", [10, 64, 512])
def test_counts_and_numbers_of_experts(count: int, num_experts: int) -> None:
    for rows in (1, 8, 33):
        check(Case(ExpertsShape(rows, count, num_experts, 64, 32), torch.bfloat16, "cuda"), accumulate=False)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3, 16, 40])
@pytest.mark.parametrize("dtype", ROW_TYPES)
def test_choices_that_are_all_skipped(rows: int, dtype: torch.dtype) -> None:
    case = Case(ExpertsShape(rows, 2, 4, 64, 32), dtype, "cuda")
    case.chosen.fill_(-1)
    before = case.total.clone()
    assert_same_bits(case.run(), before)
    assert not bool(case.run(accumulate=False).any())


def plans(dtype: torch.dtype) -> list[ExpertsPlan]:
    stream = ExpertsPlan(16, None, is_float=False, combines=True)
    tiles = [ExpertsPlan(tile.tile[0], tile, is_float=False, combines=True) for tile in LINEAR_TILES]
    return [stream, *tiles]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [SHAPES[7], SHAPES[8], SHAPES[9], SHAPES[11]], ids=label)
def test_bits_do_not_depend_on_the_plan(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shape: ExpertsShape
) -> None:
    results = []
    for plan in plans(dtype):
        monkeypatch.setattr(module, "launch_plan", lambda *_shape, plan=plan: plan)
        case = Case(shape, dtype, "cuda")
        check(case)
        results.append(case.total)
    for other in results[1:]:
        assert_same_bits(other, results[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("shape", [SHAPES[7], SHAPES[9]], ids=label)
def test_bits_of_a_row_do_not_depend_on_its_company(dtype: torch.dtype, shape: ExpertsShape) -> None:
    case = Case(shape, dtype, "cuda")
    before = case.total.clone()
    whole = case.run()
    for first, rows in ((0, 1), (5, 1), (3, 4), (16, 16), (20, 17), (1, 50)):
        part = slice(first, first + rows)
        few = {name: getattr(case, name)[part] for name in ("rows", "shares", "chosen")}
        total = before[part].clone()
        experts(**case.operands() | few | {"total": total}, workspace=case.workspace)
        assert_same_bits(total, whole[part])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_expert_has_the_bits_of_its_linears(dtype: torch.dtype) -> None:
    for shape in (ExpertsShape(12, 1, 4, 2048, 768), ExpertsShape(7, 1, 8, 1048, 520)):
        case = Case(shape, dtype, "cuda")
        total = case.run(accumulate=False)
        for token in range(shape.num_rows):
            expert, row = int(case.chosen[token, 0]), slice(token, token + 1)
            inner = torch.empty(1, shape.inner_size, dtype=dtype, device="cuda")
            product = torch.empty(1, shape.hidden, device="cuda")
            gated_linear(case.rows[row], case.gate_up[expert], inner)
            skinny_linear(inner, case.down[expert], product)
            assert torch.equal(total[row], product * case.shares[row])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[6], SHAPES[9]], ids=label)
def test_a_graph_serves_other_routings(shape: ExpertsShape) -> None:
    case = Case(shape, torch.bfloat16, "cuda")
    graph = captured(case.run)
    other = Case(shape, torch.bfloat16, "cuda", seed=5, skipped=5)
    for name, value in other.operands().items():
        getattr(case, name).copy_(value)
    graph.replay()
    assert_same_bits(case.total, other.run())


@pytest.mark.gpu
def test_sanitizer_experts() -> None:
    for shape, dtype in ((SHAPES[4], torch.bfloat16), (SHAPES[9], torch.float16), (SHAPES[1], torch.float32)):
        Case(shape, dtype, "cuda").run()
    torch.cuda.synchronize()
