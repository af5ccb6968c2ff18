"""Decode attention on CUDA: reference against torch, schedule, launch; then the device against the reference."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paged_case import FP8, poisoned_storage, random_storage
from row_ops import assert_same_bits, captured, record_launches

from edgellm.errors import InvalidArgumentError, KernelError
from edgellm.kernels.cu import loader
from edgellm.kernels.cu import paged_decode as op
from edgellm.kernels.cu.launch import DeviceLimits, device_limits
from edgellm.kernels.ref import paged_decode as ref
from edgellm.kernels.ref.fp8_pages import dequantise_pages

H200 = DeviceLimits(sm_count=132, max_shared_bytes=232448, arch=90, l2_bytes=60 << 20)
ORIN = DeviceLimits(sm_count=16, max_shared_bytes=166912, arch=87, l2_bytes=4 << 20)
ADA = DeviceLimits(sm_count=128, max_shared_bytes=101376, arch=89, l2_bytes=72 << 20)
DEVICES = (H200, ORIN, ADA)
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
NORM_ERROR = 5e-3
HEADS = {1: (2, 2), 2: (4, 2), 3: (6, 2), 4: (8, 2), 7: (14, 2), 8: (16, 2), 16: (16, 1)}  # group: query, kv heads


@dataclass(slots=True)
class Case:
    """Inputs of one call; pages that no row needs, and places past a row's length, are NaN."""

    query: torch.Tensor
    pages: torch.Tensor
    page_table: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
    out: torch.Tensor
    num_heads: int
    head_dim: int

    def to(self, device: str) -> Case:
        names = ("pages", "page_table", "slots", "lengths", "out")
        others = (getattr(self, name).clone().to(device) for name in names)
        return Case(rows_apart(self.query.to(device)), *others, self.num_heads, self.head_dim)

    def arguments(self, workspace: torch.Tensor | None) -> tuple[Any, ...]:
        return (self.query, self.pages, self.page_table, self.slots, self.lengths, self.out, workspace)


def make_case(
    lengths: list[int],
    *,
    page_size: int = 16,
    head_dim: int = 128,
    group: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    kv: torch.dtype | None = None,
    padding: tuple[int, ...] = (),
    room: int = 0,
) -> Case:
    """Rows of these lengths in slots in reverse; rows named in `padding` have slot -1; pages for `room` more keys."""
    num_heads, kv_heads = HEADS[group]
    rows, needed = len(lengths), [-(-(length + room) // page_size) for length in lengths]
    num_pages, per_slot = sum(needed) + 3, max(1, *needed) + 1
    ids = torch.randperm(num_pages).int()
    table = torch.full((rows + 1, per_slot), -1, dtype=torch.int32)
    pages = poisoned_storage(1, num_pages, kv_heads, page_size, head_dim, kv or dtype)[0]
    good = random_storage(1, num_pages, kv_heads, page_size, head_dim, kv or dtype)[0]
    for row, length in enumerate(lengths):
        first = sum(needed[:row])
        table[rows - row, : needed[row]] = ids[first : first + needed[row]]
        full = (length + room) // page_size
        whole = ids[first : first + full].long()
        pages[whole] = good[whole]
        if full < needed[row]:
            page = int(ids[first + full])
            fill_places(pages[page], good[page], length + room - full * page_size, page_size, head_dim)
    slots = torch.tensor([-1 if row in padding else rows - row for row in range(rows)], dtype=torch.int32)
    width = num_heads * head_dim
    query = rows_apart(torch.randn(rows, width).to(dtype) * 2)
    out = torch.full((rows, width), float("nan"), dtype=dtype)
    return Case(query, pages, table, slots, torch.tensor(lengths, dtype=torch.int32), out, num_heads, head_dim)


def rows_apart(query: torch.Tensor) -> torch.Tensor:
    """The same rows 32 elements further apart than they are wide, NaN between them."""
    rows, width = query.shape
    apart = torch.full((rows, width + 32), float("nan"), dtype=query.dtype, device=query.device)[:, :width]
    return apart.copy_(query)


def fill_places(page: torch.Tensor, good: torch.Tensor, places: int, page_size: int, head_dim: int) -> None:
    """Copy the first `places` keys and values of one page."""
    if page.dtype != torch.uint8:
        page[:, :, :places] = good[:, :, :places]
        return
    page[..., : places * head_dim] = good[..., : places * head_dim]
    scales = page_size * head_dim
    page[..., scales : scales + 4 * places] = good[..., scales : scales + 4 * places]


# ---- reference ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", [None, FP8])
@pytest.mark.parametrize("group", [1, 4, 7])
def test_reference_is_scaled_dot_product_attention(kv: torch.dtype | None, group: int) -> None:
    case = make_case([1, 15, 16, 17, 40], group=group, dtype=torch.float16, kv=kv, head_dim=64)
    ref.paged_decode(*case.arguments(None), num_heads=case.num_heads, scale=0.2)
    pages = case.pages if kv is None else dequantise_pages(case.pages, 16, 64)
    for row, length in enumerate(case.lengths.tolist()):
        ids = case.page_table[case.slots[row]][: -(-length // 16)].long()
        key, value = pages[ids].double().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
        heads = case.query[row].double().view(case.num_heads, 1, 64)
        expected = torch.nn.functional.scaled_dot_product_attention(heads, key, value, scale=0.2, enable_gqa=True)
        torch.testing.assert_close(case.out[row], expected.flatten().half(), rtol=1e-3, atol=1e-3)


def test_reference_window_is_attention_over_the_newest_keys() -> None:
    case = make_case([40], dtype=torch.float16)
    ref.paged_decode(*case.arguments(None), num_heads=8, scale=0.1, window=16)
    shifted = Case(
        case.query, case.pages, case.page_table[:, 1:], case.slots, torch.tensor([24]), case.out.clone(), 8, 128
    )
    # the newest 16 of 40 keys are keys 8 .. 23 of the last 24: the same keys seen through a table that is one page off
    ref.paged_decode(*shifted.arguments(None), num_heads=8, scale=0.1, window=16)
    assert torch.equal(case.out, shifted.out)


def test_reference_options() -> None:
    case = make_case([20], dtype=torch.float16)
    plain = case.out.clone()
    ref.paged_decode(*case.arguments(None), num_heads=8, scale=0.1)
    plain.copy_(case.out)
    ref.paged_decode(*case.arguments(None), num_heads=8, scale=0.1, soft_cap=1e6)
    torch.testing.assert_close(case.out, plain, rtol=2e-3, atol=1e-4)  # a cap far away changes nothing
    ref.paged_decode(*case.arguments(None), num_heads=8, scale=0.1, soft_cap=1e-9)
    key_mean = ref.gather_kv(case.pages, case.page_table[1], 20, 128)[1].mean(1)  # equal scores: the mean of the values
    torch.testing.assert_close(case.out.view(2, 4, 128)[:, 1], key_mean.half(), rtol=2e-3, atol=1e-3)
    ref.paged_decode(*case.arguments(None), num_heads=8, scale=0.1, sinks=torch.full((8,), 40.0))
    assert float(case.out.abs().max()) < 1e-3  # the sinks take all
    ref.paged_decode(*case.arguments(None), num_heads=8, scale=0.1, sinks=torch.full((8,), -1e30))
    assert torch.equal(case.out, plain)


def test_reference_leaves_padding_rows_alone() -> None:
    case = make_case([5, 0, 7], padding=(2,))
    ref.paged_decode(*case.arguments(None), num_heads=8, scale=0.1)
    assert case.out[0].isfinite().all()
    assert case.out[1:].isnan().all()


# ---- schedule -------------------------------------------------------------------------------------------------------

rows_strategy = st.one_of(
    st.lists(st.tuples(st.sampled_from([-1, 3, 3, 3]), st.integers(0, 400)), min_size=1, max_size=12),
    st.builds(lambda rows, length: [(0, length)] * rows, st.integers(1, 30), st.integers(1, 900)),  # equal lengths
)


def cut(rows: list[tuple[int, int]], kv_heads: int, blocks: int, *, window: int = 0, warps: int = 8) -> list[ref.Span]:
    slots, lengths = zip(*rows, strict=True)
    return ref.cut_line(
        slots, lengths, kv_heads=kv_heads, window=window, blocks=blocks, warps=warps, align_tiles=op.ALIGN_TILES
    )


@given(rows_strategy, st.integers(1, 8), st.sampled_from([0, 0, 1, 16, 100]), st.integers(1, 140), st.integers(1, 8))
def test_every_tile_is_in_exactly_one_span(
    rows: list[tuple[int, int]], kv_heads: int, window: int, blocks: int, warps: int
) -> None:
    spans = cut(rows, kv_heads, blocks, window=window, warps=warps)
    found = [(s.row, s.head, tile) for s in spans for tile in range(s.begin, s.end)]
    wanted = [
        (row, head, key // 16)
        for row, (slot, length) in enumerate(rows)
        for head in range(kv_heads)
        for key in range(max(0, length - window) if window else 0, length)
        if slot >= 0
    ]
    assert found == [tile for tile, _ in itertools.groupby(wanted)]  # each once, and in order
    assert [(s.block, s.warp) for s in spans] == sorted((s.block, s.warp) for s in spans)
    assert all(s.block < blocks for s in spans)


@given(rows_strategy, st.integers(1, 4), st.integers(1, 140))
def test_pieces_are_nearly_equal(rows: list[tuple[int, int]], kv_heads: int, blocks: int) -> None:
    tiles: dict[int, int] = {}
    for span in cut(rows, kv_heads, blocks):
        tiles[span.block] = tiles.get(span.block, 0) + span.end - span.begin
    if tiles:
        total = sum(tiles.values())
        parts = max(1, min(blocks, total // ref.MIN_TILES))
        assert max(tiles.values()) <= total // parts + max(1, op.ALIGN_TILES)


def test_equal_rows_are_cut_between_pairs() -> None:
    def parts_of_pairs(rows: int, length: int) -> set[int]:
        blocks: dict[tuple[int, int], set[int]] = {}
        for span in cut([(0, length)] * rows, 8, 132):
            blocks.setdefault((span.row, span.head), set()).add(span.block)
        return {len(found) for found in blocks.values()}

    assert parts_of_pairs(1, 8192) == {16}  # 128 of 132 blocks work
    assert parts_of_pairs(32, 1024) == {1}  # two pairs a block
    assert parts_of_pairs(1, 1024) == {8}
    assert parts_of_pairs(3, 32768) != {5}  # 120 blocks would cost more than merging


@given(rows_strategy, st.integers(1, 4), st.integers(1, 140))
def test_block_of_is_the_inverse_of_begin(rows: list[tuple[int, int]], kv_heads: int, blocks: int) -> None:
    tiles = [len(ref.row_tiles(slot, length, 0)) for slot, length in rows for _ in range(kv_heads)]
    line = ref.make_cut([count for count in tiles if count], blocks, op.ALIGN_TILES)
    for block in range(line.blocks):
        begin, end = line.begin(block), line.begin(block + 1)
        assert begin == end or line.block_of(begin) == line.block_of(end - 1) == block
    assert line.begin(line.blocks) == line.total
    assert line.begin(line.blocks + 1) == line.total


@given(rows_strategy, st.integers(1, 4), st.integers(1, 140))
def test_a_block_opens_at_most_one_pair(rows: list[tuple[int, int]], kv_heads: int, blocks: int) -> None:
    """What the arrival counters rely on: the first block of a pair that others continue is first of that pair only."""
    of_pair: dict[tuple[int, int], list[int]] = {}
    for span in cut(rows, kv_heads, blocks):
        of_pair.setdefault((span.row, span.head), []).append(span.block)
    firsts = [min(blocks_) for blocks_ in of_pair.values() if len(set(blocks_)) > 1]
    assert len(firsts) == len(set(firsts))


# ---- launch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", DEVICES)
@pytest.mark.parametrize("head_dim", op.HEAD_DIMS)
@pytest.mark.parametrize("is_fp8", [False, True])
def test_launch_config_fits_and_has_room_for_partials(limits: DeviceLimits, head_dim: int, is_fp8: bool) -> None:
    for group in range(1, 17):
        launch = op.launch_config(head_dim, group, is_fp8, limits)
        assert launch.config.grid == (limits.sm_count, 1, 1)
        assert launch.stages in op.STAGES
        assert launch.config.shared_bytes <= limits.max_shared_bytes
        warps = launch.config.block[0] // 32
        ring = launch.stages * 32 * (head_dim * (1 if is_fp8 else 2) + (4 if is_fp8 else 0))
        assert ring >= group * (head_dim + 4) * 4  # the last partial of a warp lies in its ring
        assert launch.config.shared_bytes >= warps * (ring + group * (head_dim + 4) * 4) + op.STATE_BYTES


def test_launch_config_on_an_h200() -> None:
    assert op.launch_config(128, 4, False, H200).config.block == (256, 1, 1)
    assert op.launch_config(128, 8, False, H200).stages == 3
    assert op.launch_config(256, 16, False, H200).config.block == (128, 1, 1)
    with pytest.raises(InvalidArgumentError, match="bytes of shared memory; the device has 46000"):
        op.launch_config(256, 16, False, DeviceLimits(4, 46000 + op.STATE_BYTES, 80, 1))


def test_workspace_covers_every_group() -> None:
    size = op.paged_decode_workspace(64, 32, 128, H200)
    assert size == 4 * (192 + 2 * 132 * 16 * 132)
    assert op.paged_decode_workspace(1, 32, 128, H200) == size
    with pytest.raises(InvalidArgumentError, match="32 heads of 80"):
        op.paged_decode_workspace(64, 32, 80, H200)


def test_a_variant_for_every_type_and_size() -> None:
    assert len(op.SPEC.variants) == 24
    assert op.SPEC.expression((torch.bfloat16, True, 64, 2)) == (
        "edgellm::paged_decode<__nv_bfloat16, __nv_fp8_e4m3, 64, 2>"
    )
    with pytest.raises(KernelError, match="no variant"):
        op.SPEC.expression((torch.float32, False, 64, 1))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    recorded = record_launches(monkeypatch)
    monkeypatch.setattr(op, "device_limits", lambda _device: H200)
    return recorded


def workspace_for(case: Case, limits: DeviceLimits, device: str = "cpu") -> torch.Tensor:
    size = op.paged_decode_workspace(case.query.shape[0], case.num_heads, case.head_dim, limits)
    return torch.zeros(size, dtype=torch.uint8, device=device)


def test_struct(launches: list[Any]) -> None:
    case = make_case([5, 40], page_size=32, group=7, kv=FP8, head_dim=64)
    workspace = workspace_for(case, H200)
    op.paged_decode(*case.arguments(workspace), num_heads=14, scale=0.5, window=9, soft_cap=2.0, early_reads=True)
    op.paged_decode(*make_case([1], group=16).arguments(torch.zeros(1 << 22)), num_heads=16, scale=0.5)
    first, second = launches
    assert first.key == (torch.bfloat16, True, 64, 1)
    assert second.key == (torch.bfloat16, False, 128, 2)
    assert first.params["head_bytes"] == 32 * 68
    assert first.params["query_stride"] == 14 * 64 + 32
    assert (first.params["group"], first.params["kv_heads"], first.params["page_shift"]) == (7, 2, 5)
    assert (first.params["score_scale"], first.params["window"], first.params["early_reads"]) == (0.25, 9, 1)
    assert first.params["cap"] == pytest.approx(2.0 * 1.4426950408889634)
    assert (second.params["cap"], second.params["sinks"], second.params["early_reads"]) == (0.0, None, 0)


def test_no_rows_launch_nothing(launches: list[Any]) -> None:
    case = make_case([5])
    op.paged_decode(
        case.query[:0], case.pages, case.page_table, case.slots[:0], case.lengths[:0], case.out[:0], torch.zeros(0),
        num_heads=8, scale=1.0,
    )  # fmt: skip
    assert not launches


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"query": torch.zeros(2, 1024)}, {}, "query is"),
        ({"query": torch.zeros(2, 1023, dtype=torch.bfloat16)}, {}, "query is"),
        ({"query": torch.zeros(2, 1028, dtype=torch.bfloat16)}, {}, "multiple of 16"),
        ({"out": torch.zeros(2, 1000, dtype=torch.bfloat16)}, {}, "head size of 64, 128, 256"),
        ({"out": torch.zeros(3, 1024, dtype=torch.bfloat16)}, {}, "out is"),
        ({"pages": torch.zeros(4, 2, 2, 16, 128)}, {}, "the same type"),
        ({"pages": torch.zeros(4, 2, 2, 8, 128, dtype=torch.bfloat16)}, {}, "page size of 16"),
        ({"pages": torch.zeros(4, 2, 3, 16, 128, dtype=torch.bfloat16)}, {}, "a whole group"),
        ({"slots": torch.zeros(2, dtype=torch.int64)}, {}, "slots is"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, {}, "lengths is"),
        ({"page_table": torch.zeros(3, dtype=torch.int32)}, {}, "page_table is"),
        ({"workspace": torch.zeros(16)}, {}, "see paged_decode_workspace"),
        ({}, {"window": -1}, "window -1"),
        ({}, {"soft_cap": float("nan")}, "soft_cap nan"),
        ({}, {"scale": float("inf")}, "scale inf"),
        ({}, {"sinks": torch.zeros(7)}, "sinks is"),
        ({}, {"num_heads": 0}, "for 0 heads"),
    ],
)
def test_bad_arguments(launches: list[Any], change: dict[str, Any], options: dict[str, Any], message: str) -> None:
    case = make_case([5, 17])
    names = ("query", "pages", "page_table", "slots", "lengths", "out", "workspace")
    arguments = dict(zip(names, case.arguments(workspace_for(case, H200)), strict=True)) | change
    with pytest.raises(InvalidArgumentError, match=message):
        op.paged_decode(**arguments, **({"num_heads": 8, "scale": 1.0} | options))
    assert not launches


# ---- device ---------------------------------------------------------------------------------------------------------


def check_on_device(case: Case, workspace: torch.Tensor | None = None, **options: Any) -> Case:
    """Run the kernel, compare with the reference on the same inputs, and check that the counters are zero again."""
    there = case.to("cuda")
    limits = device_limits(there.query.device)
    if workspace is None:
        workspace = workspace_for(case, limits, "cuda")
    sinks = options.pop("sinks", None)
    options = {"scale": case.head_dim**-0.5, "sinks": None if sinks is None else sinks.cuda()} | options
    op.paged_decode(*there.arguments(workspace), num_heads=case.num_heads, **options)
    compare(there, num_heads=case.num_heads, **options)
    group = case.num_heads // case.pages.shape[2]
    blocks = op.launch_config(case.head_dim, group, case.pages.dtype == torch.uint8, limits).config.grid[0]
    assert not workspace[: 4 * blocks].any(), "arrival counters are not back at zero"
    return there


def compare(case: Case, **options: Any) -> None:
    """Written rows within tolerance of the reference, in total within NORM_ERROR; the others untouched (NaN)."""
    expected = torch.full(case.out.shape, float("nan"), dtype=torch.float64, device=case.out.device)
    arguments = (case.query, case.pages, case.page_table, case.slots, case.lengths, expected, None)
    ref.paged_decode(*arguments, **options)
    written = (case.slots >= 0) & (case.lengths > 0)
    assert case.out[~written].isnan().all()
    ours, wanted = case.out[written].double(), expected[written]
    assert ours.isfinite().all()
    step = TOLERANCE[case.out.dtype]
    torch.testing.assert_close(ours, wanted, rtol=step, atol=step)
    if len(ours):
        assert float((ours - wanted).norm()) <= NORM_ERROR * float(wanted.norm())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", op.QUERY_TYPES)
@pytest.mark.parametrize("kv", [None, FP8])
@pytest.mark.parametrize("head_dim", op.HEAD_DIMS)
@pytest.mark.parametrize("group", [4, 16])
def test_every_variant(dtype: torch.dtype, kv: torch.dtype | None, head_dim: int, group: int) -> None:
    for page_size in (16, 64):
        lengths = [1, page_size - 1, page_size, page_size + 1, 0, 700, 33]
        check_on_device(
            make_case(lengths, page_size=page_size, head_dim=head_dim, group=group, dtype=dtype, kv=kv, padding=(6,))
        )


@pytest.mark.gpu
@pytest.mark.parametrize("group", sorted(HEADS))
@pytest.mark.parametrize("kv", [None, FP8])
def test_every_group_and_option(group: int, kv: torch.dtype | None) -> None:
    lengths = [1, 130, 1500, 31, 64]
    sinks = torch.randn(HEADS[group][0])
    for options in ({"window": 1}, {"window": 100}, {"soft_cap": 3.0}, {"sinks": sinks}, {"scale": 0.3, "window": 40}):
        check_on_device(make_case(lengths, group=group, kv=kv), **options)
    check_on_device(make_case(lengths, group=group, kv=kv), window=333, soft_cap=20.0, sinks=sinks)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_ragged_batches(page_size: int) -> None:
    generator = torch.Generator().manual_seed(page_size)
    for rows, longest in ((1, 9000), (3, 5000), (33, 600), (70, 40), (130, 300)):
        lengths = torch.randint(0, longest, (rows,), generator=generator).tolist()
        padding = tuple(torch.randint(0, rows, (rows // 4,), generator=generator).tolist())
        check_on_device(make_case(lengths, page_size=page_size, padding=padding))


@pytest.mark.gpu
def test_only_padding_writes_nothing() -> None:
    check_on_device(make_case([9, 40, 0], padding=(0, 1)))


@pytest.mark.gpu
def test_one_workspace_for_many_calls_and_equal_bits() -> None:
    workspace: torch.Tensor | None = None
    for lengths in ([4000], [17] * 40, [3000, 1, 2000, 64, 900], [1]):
        case = make_case(lengths)
        if workspace is None:
            workspace = workspace_for(case, device_limits(torch.device("cuda")), "cuda")
        first = check_on_device(case, workspace).out.clone()
        for _ in range(20):
            again = case.to("cuda")
            again.out.fill_(float("nan"))
            op.paged_decode(*again.arguments(workspace), num_heads=8, scale=128**-0.5)
            assert_same_bits(again.out, first)


@pytest.mark.gpu
@pytest.mark.parametrize("early_reads", [False, True])
def test_graph_equals_eager_with_new_lengths_and_pages(early_reads: bool) -> None:
    """One captured launch, replayed with other lengths, slots, tables and queries, adapts on the device."""
    case = make_case([900, 64, 3000, 17], room=40)
    there = case.to("cuda")
    workspace = workspace_for(case, device_limits(there.query.device), "cuda")
    arguments = there.arguments(workspace)
    graph = captured(lambda: op.paged_decode(*arguments, num_heads=8, scale=128**-0.5, early_reads=early_reads))
    for lengths, padding in (
        ([900, 64, 3000, 17], []),
        ([1, 70, 16, 20], []),
        ([0, 100, 2048, 40], [3]),
        ([5] * 4, [0, 1]),
    ):
        there.lengths.copy_(torch.tensor(lengths))
        there.slots.copy_(torch.tensor([-1 if row in padding else 4 - row for row in range(4)]))
        there.query.copy_((torch.randn(*case.query.shape) * 2).to(case.query.dtype))
        there.out.fill_(float("nan"))
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        compare(there, num_heads=8, scale=128**-0.5)
        replayed = there.out.clone()
        there.out.fill_(float("nan"))
        op.paged_decode(*arguments, num_heads=8, scale=128**-0.5)
        assert_same_bits(there.out, replayed)


@pytest.mark.gpu
def test_launches_in_a_row_overlap_without_harm() -> None:
    """Launches that may start early, back to back, each reading what the one before wrote as its query."""
    case = make_case([300, 2000, 40], group=4)
    there = case.to("cuda")
    workspace = workspace_for(case, device_limits(there.query.device), "cuda")
    buffers = [torch.empty_like(there.out) for _ in range(6)]

    def chain(early: bool) -> torch.Tensor:
        query = there.query
        for out in buffers:
            arguments = (query, there.pages, there.page_table, there.slots, there.lengths, out, workspace)
            op.paged_decode(*arguments, num_heads=8, scale=1.0, early_reads=early)
            query = out
        torch.cuda.synchronize()
        return buffers[-1].clone()

    expected = chain(False)
    for _ in range(10):
        assert_same_bits(chain(True), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [1, 3, 1000])
@pytest.mark.parametrize("warps", [1, 3, 8])
def test_any_grid_gives_the_same_result(monkeypatch: pytest.MonkeyPatch, blocks: int, warps: int) -> None:
    actual = device_limits(torch.device("cuda"))
    limits = DeviceLimits(blocks, actual.max_shared_bytes, actual.arch, actual.l2_bytes)
    launch = op.launch_config(128, 4, False, limits)
    warp_bytes = (launch.config.shared_bytes - op.STATE_BYTES) // (launch.config.block[0] // 32)
    config = op.LaunchConfig((blocks, 1, 1), (32 * warps, 1, 1), warps * warp_bytes + op.STATE_BYTES)
    monkeypatch.setattr(op, "launch_config", lambda *_: op.DecodeLaunch(config, launch.stages))
    case = make_case([700, 1, 90, 2500])
    check_on_device(case, workspace_for(case, limits, "cuda"))


@pytest.mark.gpu
def test_no_variant_spills() -> None:
    for key in ((torch.bfloat16, False, 128, 1), (torch.float16, True, 256, 2), (torch.bfloat16, True, 64, 1)):
        assert loader.kernel(op.SPEC, key).resources()["local_bytes"] == 0


@pytest.mark.gpu
def test_sanitizer_paged_decode() -> None:
    check_on_device(make_case([1, 17, 300], padding=(1,)))
    check_on_device(make_case([33, 0], head_dim=64, group=7, kv=FP8, dtype=torch.float16), window=20, soft_cap=5.0)
