"""Attention of ragged rows over pages on CUDA: the reference against torch, launches, then the device."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from prefill_cases import (
    LENGTHS,
    TREE_LENGTHS,
    Batch,
    Case,
    assert_close,
    assert_written,
    feature_cases,
    make_batch,
    visible,
)
from row_ops import assert_same_bits, captured, record_launches

from edgellm.errors import InvalidArgumentError, KernelError
from edgellm.kernels.cu.launch import DeviceLimits
from edgellm.kernels.cu.paged_prefill import (
    HEAD_DIMS,
    MERGE,
    PREFILL,
    ROW_TYPES,
    SEGMENT_TOKENS,
    SPECS,
    WARPGROUP_MISSING,
    WARPGROUPS,
    PrefillShape,
    has_warpgroups,
    launch_config,
    paged_prefill,
    paged_prefill_workspace,
    tile_bytes,
    tile_threads_and_rows,
)
from edgellm.kernels.ref import paged_prefill as ref
from edgellm.kernels.ref.fp8_pages import dequantise_pages

H200 = DeviceLimits(sm_count=132, max_shared_bytes=232448, arch=90, l2_bytes=60 << 20)
ORIN = DeviceLimits(sm_count=16, max_shared_bytes=166912, arch=87, l2_bytes=4 << 20)
RTX = DeviceLimits(sm_count=84, max_shared_bytes=101376, arch=120, l2_bytes=64 << 20)
CHUNK = PrefillShape(
    num_rows=512,
    num_sequences=1,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_keys=16384,
    is_fp8=False,
    deterministic=False,
)
WORKSPACE_BYTES = 64 << 20


def reference(batch: Batch) -> torch.Tensor:
    return batch.run(ref.paged_prefill)


def by_torch(batch: Batch) -> torch.Tensor:
    """Each sequence through torch's attention in float64, with its rule as a mask."""
    case, operands = batch.case, batch.operands
    pages = operands["pages"]
    if case.is_fp8:
        pages = dequantise_pages(pages, case.page_size, case.head_dim)
    rows = []
    for n, (past, new) in enumerate(case.sequences):
        first = int(operands["query_start"][n])
        query = operands["query"][first : first + new].double().view(new, case.num_heads, case.head_dim).transpose(0, 1)
        ids = operands["page_table"][operands["slots"][n]].clamp(min=0).long()
        places = pages[ids].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : past + new]
        key, value = places.nan_to_num().double().repeat_interleave(case.group, dim=1)
        mask = torch.zeros(new, past + new, dtype=torch.bool)
        for row in range(new):
            mask[row, visible(batch, n, row)] = True
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=operands["scale"])
        rows.append(out.transpose(0, 1).flatten(1))
    return torch.cat(rows).to(operands["query"].dtype)


@pytest.mark.parametrize(
    "case",
    [
        Case(((0, 5), (33, 7)), dtype=torch.float32),
        Case(((0, 5), (33, 7)), dtype=torch.float32, window=6, group=3, head_dim=40),
        Case(((20, 9), (3, 4)), dtype=torch.float32, is_tree=True),
        Case(((20, 9), (3, 4)), dtype=torch.float32, is_tree=True, window=12),
        Case(((0, 5), (33, 7)), is_fp8=True, page_size=32),
    ],
)
def test_reference_is_torch(case: Case) -> None:
    batch = make_batch(case)
    assert_close(reference(batch), by_torch(batch))


def test_causal_reference_is_torch_without_a_mask() -> None:
    batch = make_batch(Case(((0, 37),), dtype=torch.float32, kv_heads=1, group=2))
    query = batch.operands["query"].view(37, 2, 64).transpose(0, 1)
    ids = batch.operands["page_table"][batch.operands["slots"][0], :3].long()
    key, value = batch.operands["pages"][ids].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :37]
    out = functional.scaled_dot_product_attention(query, key.expand(2, -1, -1), value.expand(2, -1, -1), is_causal=True)
    assert_close(reference(batch), out.transpose(0, 1).flatten(1))


def test_reference_of_sinks_and_cap() -> None:
    """One head, two keys: by hand."""
    batch = make_batch(Case(((1, 1),), dtype=torch.float32, kv_heads=1, group=1, soft_cap=2.0, has_sinks=True))
    operands = batch.operands
    page = operands["pages"][int(operands["page_table"][operands["slots"][0], 0]), :, 0, :2].double()
    scores = [float(page[0, k] @ operands["query"][0].double()) * operands["scale"] for k in range(2)]
    scores = [2.0 * float(torch.tanh(torch.tensor(score / 2.0, dtype=torch.float64))) for score in scores]
    weights = torch.tensor([*scores, float(operands["sinks"][0])], dtype=torch.float64).exp()
    expected = (weights[0] * page[1, 0] + weights[1] * page[1, 1]) / weights.sum()
    assert_close(reference(batch), expected[None].float())


def test_reference_writes_nothing_for_padding() -> None:
    batch = make_batch(Case(((-1, 3), (0, 2), (-1, 1)), dtype=torch.float32))
    out = reference(batch)
    assert_written(batch, out)
    assert bool(out[3:5].isfinite().all())


@pytest.mark.parametrize("limits", [H200, ORIN, RTX])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_launch_fits_the_device(limits: DeviceLimits, head_dim: int, deterministic: bool, is_fp8: bool) -> None:
    shape = dataclasses.replace(CHUNK, head_dim=head_dim, deterministic=deterministic, is_fp8=is_fp8)
    threads, tile_rows = tile_threads_and_rows(head_dim, deterministic=deterministic, limits=limits)
    query_bytes, stage_bytes = tile_bytes(shape, tile_rows)
    launch = launch_config(shape, limits, 0, by_warpgroups=False)
    assert launch.attention.block == (threads, 1, 1)
    assert launch.attention.shared_bytes == 1024 + query_bytes + launch.ring * stage_bytes
    assert launch.attention.shared_bytes <= limits.max_shared_bytes
    assert 2 <= launch.ring <= 4


def test_two_blocks_share_an_sm() -> None:
    launch = launch_config(CHUNK, H200, 0, by_warpgroups=False)
    assert launch.ring == 4
    assert 2 * (launch.attention.shared_bytes + 1024) <= H200.max_shared_bytes + 1024
    assert launch_config(CHUNK, ORIN, 0).ring == 3


def test_warpgroups_serve_what_they_can() -> None:
    missing = dataclasses.replace(CHUNK, head_dim=256, deterministic=True)
    assert has_warpgroups(CHUNK, H200)
    assert not has_warpgroups(CHUNK, RTX)
    assert not has_warpgroups(dataclasses.replace(CHUNK, is_fp8=True), H200)
    assert not has_warpgroups(missing, H200)
    with pytest.raises(InvalidArgumentError, match="by_warpgroups: there is no such kernel"):
        launch_config(missing, H200, 0, by_warpgroups=True)
    launch = launch_config(dataclasses.replace(CHUNK, max_keys=8192), H200, 0)
    assert launch.by_warpgroups
    assert (launch.attention.block, launch.tile_rows) == ((384, 1, 1), 128)
    assert launch.attention.grid == (128, 1, 1)


@pytest.mark.parametrize(
    ("head_dim", "deterministic", "rows_and_keys", "totals"),
    [(64, False, 768, 0), (128, False, 768, 0), (256, False, 384, 0), (64, True, 640, 256), (128, True, 640, 512)],
)
def test_warpgroups_fit_the_device(head_dim: int, deterministic: bool, rows_and_keys: int, totals: int) -> None:
    shape = dataclasses.replace(CHUNK, head_dim=head_dim, deterministic=deterministic)
    shared_bytes = launch_config(shape, H200, 0, by_warpgroups=True).attention.shared_bytes
    assert shared_bytes == rows_and_keys * head_dim * 2 + 128 * totals + 256
    assert shared_bytes <= H200.max_shared_bytes


def test_grid_holds_every_tile() -> None:
    """Any split of the rows over sequences makes no more tiles than the grid has."""
    for rows, sequences in ((1, 1), (7, 7), (300, 4), (513, 9)):
        shape = dataclasses.replace(CHUNK, num_rows=rows, num_sequences=sequences)
        launch = launch_config(shape, H200, 0, by_warpgroups=False)
        lengths = [rows - sequences + 1, *[1] * (sequences - 1)]
        even = [rows // sequences + (n < rows % sequences) for n in range(sequences)]
        for split in (lengths, even):
            assert sum(-(-length * 4 // launch.tile_rows) for length in split) <= launch.attention.grid[1]


def test_few_rows_are_spread() -> None:
    tree = dataclasses.replace(CHUNK, num_rows=8)
    assert launch_config(tree, H200, 0).merge is None
    long = dataclasses.replace(CHUNK, num_rows=8192)
    assert launch_config(long, H200, 0, by_warpgroups=True).attention.grid == (132, 1, 1)
    spread = launch_config(tree, H200, WORKSPACE_BYTES, by_warpgroups=True)
    assert spread.attention.grid == (128, 1, 1)
    assert (spread.splits, spread.parts) == (16, 16)
    assert launch_config(tree, H200, WORKSPACE_BYTES, by_warpgroups=False).splits == 32
    assert spread.merge is not None
    assert spread.merge.grid == (8 * 32 // 4, 1, 1)
    assert launch_config(CHUNK, H200, WORKSPACE_BYTES, by_warpgroups=True).splits == 1
    assert launch_config(CHUNK, H200, WORKSPACE_BYTES, by_warpgroups=False).splits == 2
    assert launch_config(dataclasses.replace(CHUNK, num_rows=8192), H200, WORKSPACE_BYTES).splits == 1
    assert launch_config(dataclasses.replace(tree, max_keys=1023), H200, WORKSPACE_BYTES).splits == 1


def test_padded_steps_have_room_to_spread_what_is_real() -> None:
    """The device divides by the tiles that there are: 93 rows of 128 make 3 of 4, and 5 blocks can share each."""
    padded = dataclasses.replace(CHUNK, num_rows=128)
    launch = launch_config(padded, H200, paged_prefill_workspace(32, 128, H200))
    assert launch.blocks // (8 * 3) == 5 <= launch.splits
    full = dataclasses.replace(CHUNK, num_rows=2048)
    assert launch_config(full, H200, WORKSPACE_BYTES).merge is None


def test_deterministic_rows_are_spread_by_segment() -> None:
    row = dataclasses.replace(CHUNK, num_rows=1, deterministic=True, max_keys=16 * SEGMENT_TOKENS)
    assert launch_config(row, H200, WORKSPACE_BYTES).parts == 16
    assert launch_config(row, H200, 100).splits == 1
    long = launch_config(dataclasses.replace(row, max_keys=1000 * SEGMENT_TOKENS), H200, WORKSPACE_BYTES)
    assert (long.splits, long.parts) == (64, 1000)


def test_workspace_suffices() -> None:
    size = paged_prefill_workspace(32, 128, H200)
    for rows, sequences in ((1, 1), (8, 1), (33, 2), (512, 1), (64, 64)):
        shape = dataclasses.replace(CHUNK, num_rows=rows, num_sequences=sequences)
        assert launch_config(shape, H200, size).splits == launch_config(shape, H200, 1 << 40).splits
    size = paged_prefill_workspace(32, 128, H200, max_rows=16, max_keys=16384)
    shape = dataclasses.replace(CHUNK, num_rows=8, num_sequences=8, deterministic=True)
    assert launch_config(shape, H200, size).parts == 16


def test_launches_and_struct(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    monkeypatch.setattr("edgellm.kernels.cu.paged_prefill.device_limits", lambda _device: H200)
    workspace = torch.zeros(paged_prefill_workspace(8, 128, H200), dtype=torch.uint8)
    batch = make_batch(Case(((700, 4), (2000, 4)), head_dim=128, page_size=32, window=9, soft_cap=3.0, has_sinks=True))
    batch.run(paged_prefill, workspace=workspace, by_warpgroups=True)
    assert [launch.spec for launch in launches] == [WARPGROUPS, MERGE]
    assert launches[0].key == (torch.bfloat16, 128, False)
    params = launches[0].params
    assert params == launches[1].params
    assert (params["num_rows"], params["num_sequences"], params["num_heads"], params["num_kv_heads"]) == (8, 2, 8, 2)
    assert (params["group"], params["page_shift"], params["pages_per_slot"], params["window"]) == (4, 5, 64, 9)
    assert (params["query_stride"], params["mask_words"], params["deterministic"]) == (1024, 0, 0)
    assert (params["scale"], params["soft_cap"]) == (pytest.approx(128**-0.5), 3.0)
    assert params["partial_stats"] - params["partial_out"] == params["splits"] * 8 * 8 * 128 * 4
    batch.run(paged_prefill, deterministic=True, by_warpgroups=False)
    batch.run(paged_prefill, by_warpgroups=False)
    assert [launch.spec for launch in launches[2:]] == [PREFILL, PREFILL]
    assert [launch.key for launch in launches[2:]] == [(torch.bfloat16, False, 128, way) for way in (True, False)]
    assert (launches[2].params["splits"], launches[2].params["partial_out"]) == (1, None)


def test_variant_count() -> None:
    assert sum(len(spec.variants) for spec in SPECS) == 40
    with pytest.raises(KernelError, match="has no variant"):
        PREFILL.expression((torch.float32, False, 128, False))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(8, 512)}, "query is .*float16 or torch.bfloat16"),
        ({"query": torch.zeros(7, 512, dtype=torch.bfloat16)}, r"query is .*\(8, >= 512\)"),
        ({"query": torch.zeros(8, 516, dtype=torch.bfloat16)[:, 4:]}, "query starts at an address"),
        ({"out": torch.zeros(8, 500, dtype=torch.bfloat16)}, "out is .* for 8 heads"),
        ({"out": torch.zeros(8, 512, dtype=torch.float16)}, "out is"),
        ({"out": torch.zeros(8, 256, dtype=torch.bfloat16)}, "pages is"),
        ({"num_heads": 3}, "out is"),
        ({"pages": torch.zeros(5, 2, 3, 16, 64, dtype=torch.bfloat16)}, "8 query heads over 3 kv heads"),
        ({"pages": torch.zeros(5, 2, 2, 16, 64, dtype=torch.float16)}, "pages are torch.float16"),
        ({"page_table": torch.zeros(3, 5)}, "page_table is"),
        ({"slots": torch.zeros(2, dtype=torch.int64)}, "slots is"),
        ({"query_start": torch.zeros(2, dtype=torch.int32)}, "query_start is"),
        ({"past_len": torch.zeros(3, dtype=torch.int32)}, "past_len is"),
        ({"sinks": torch.zeros(7)}, "sinks is"),
        ({"tree_mask": torch.zeros(7, 1, dtype=torch.int32)}, "tree_mask is"),
        ({"scale": 0.0}, "scale is 0.0"),
        ({"window": -1}, "window is -1"),
        ({"soft_cap": float("nan")}, "soft_cap is nan"),
        ({"workspace": torch.zeros(16)}, "workspace is"),
    ],
)
def test_bad_arguments(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str) -> None:
    launches = record_launches(monkeypatch)
    batch = make_batch(Case(((3, 4), (20, 4))))
    out = torch.zeros(8, 512, dtype=torch.bfloat16)
    with pytest.raises(InvalidArgumentError, match=message):
        paged_prefill(**(batch.operands | {"out": out} | changes))
    assert not launches


def test_head_dim_without_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    record_launches(monkeypatch)
    with pytest.raises(InvalidArgumentError, match="head_dim is 96; this kernel has 64, 128, 256"):
        make_batch(Case(((3, 4),), head_dim=96)).run(paged_prefill)


def test_cpu_tensors_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="query is on cpu; a CUDA tensor is needed"):
        make_batch(Case(((3, 4),))).run(paged_prefill)


# ---- the device ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workspace() -> torch.Tensor:
    return torch.full((WORKSPACE_BYTES,), 0xFF, dtype=torch.uint8, device="cuda")


def check(case: Case, *choices: dict[str, Any]) -> None:
    """One batch, by each choice of options."""
    batch = make_batch(case).to("cuda")
    expected = reference(batch)
    for options in choices or ({},):
        out = batch.run(paged_prefill, **options)
        assert_close(out, expected)
        assert_written(batch, out)


def all_ways(workspace: torch.Tensor, by_warpgroups: bool) -> list[dict[str, Any]]:
    """Deterministic or not, keys spread over blocks or not."""
    ways = [{"by_warpgroups": by_warpgroups, "deterministic": deterministic} for deterministic in (False, True)]
    return ways + [way | {"workspace": workspace} for way in ways]


def skip_without_warpgroups(head_dim: int, *, deterministic: bool) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    if (head_dim, deterministic) in WARPGROUP_MISSING:
        pytest.skip("no such variant")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("is_fp8", [False, True])
def test_device_equals_reference(dtype: torch.dtype, head_dim: int, is_fp8: bool, workspace: torch.Tensor) -> None:
    for case in feature_cases(dtype=dtype, head_dim=head_dim, is_fp8=is_fp8):
        check(case, *all_ways(workspace, False))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_warpgroups_equal_reference(dtype: torch.dtype, head_dim: int, workspace: torch.Tensor) -> None:
    skip_without_warpgroups(head_dim, deterministic=False)
    ways = [way for way in all_ways(workspace, True) if (head_dim, way["deterministic"]) not in WARPGROUP_MISSING]
    for case in feature_cases(dtype=dtype, head_dim=head_dim):
        check(case, *ways)
    check(Case(((5000, 1),), head_dim=head_dim, kv_heads=1, window=1500), *ways)
    check(Case(((4000, 40), (100, 2), (3333, 1)), head_dim=head_dim, kv_heads=1, group=8), *ways)
    lengths = tuple((n * 7 % 50, n % 3) if n % 5 else (-1, 2) for n in range(100))
    check(Case(lengths, head_dim=head_dim, kv_heads=8), *ways)  # more items than blocks


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_long_past_is_spread(head_dim: int, workspace: torch.Tensor) -> None:
    for sequences, group in (((5000, 1),), 4), (((4000, 9), (100, 2), (3333, 1)), 8):
        case = Case(sequences, head_dim=head_dim, group=group, kv_heads=1)
        check(case, *all_ways(workspace, False))
        check(dataclasses.replace(case, window=1500, has_sinks=True), *all_ways(workspace, False))


@pytest.mark.gpu
def test_many_sequences() -> None:
    """More sequences than a warp has lanes, and more than one a lane."""
    lengths = tuple((n * 7 % 50, n % 3) if n % 5 else (-1, 2) for n in range(100))
    check(Case(lengths, group=3))
    check(Case(lengths[:33], group=16, kv_heads=1), {"deterministic": True})


@pytest.mark.gpu
def test_rows_that_see_nothing() -> None:
    batch = make_batch(Case(((0, 4), (70, 4)), is_tree=True)).to("cuda")
    batch.operands["tree_mask"][:] = 0
    out = batch.run(paged_prefill)
    assert bool((out[:4] == 0).all())
    assert_close(out[4:], reference(batch)[4:])


def rows_of(batch: Batch, past: int, first: int, end: int) -> Batch:
    """Rows [first, end) of the batch's one sequence as a chunk of their own."""
    changed = {
        "query": batch.operands["query"][first:end],
        "query_start": torch.tensor([0, end - first], dtype=torch.int32, device="cuda"),
        "past_len": torch.tensor([past + first], dtype=torch.int32, device="cuda"),
    }
    return Batch(batch.case, batch.operands | changed)


# (head_dim, is_fp8, by_warpgroups) of all deterministic kernels.
DETERMINISTIC = [
    (head_dim, is_fp8, by_warpgroups)
    for head_dim in HEAD_DIMS
    for is_fp8, by_warpgroups in ((False, False), (True, False), (False, True))
    if not (by_warpgroups and (head_dim, True) in WARPGROUP_MISSING)
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize(("head_dim", "is_fp8", "by_warpgroups"), DETERMINISTIC)
@pytest.mark.parametrize("window", [0, 700])
def test_bits_do_not_depend_on_chunks(
    dtype: torch.dtype, head_dim: int, is_fp8: bool, by_warpgroups: bool, window: int, workspace: torch.Tensor
) -> None:
    """One chunk, chunks of many sizes, single rows, spread or not: the same bits."""
    if by_warpgroups:
        skip_without_warpgroups(head_dim, deterministic=True)
    case = Case(((0, 2500),), head_dim=head_dim, dtype=dtype, is_fp8=is_fp8, window=window, group=3, soft_cap=9.0)
    batch = make_batch(case).to("cuda")
    way: dict[str, Any] = {"deterministic": True, "by_warpgroups": by_warpgroups}
    whole = batch.run(paged_prefill, **way)
    borders = [0, 1, 2, 17, 64, 100, 1000, 1023, 1024, 1025, 2047, 2100, 2499, 2500]
    for first, end in itertools.pairwise(borders):
        for options in (way, way | {"workspace": workspace}):
            part = rows_of(batch, 0, first, end).run(paged_prefill, **options)
            assert_same_bits(part, whole[first:end])


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "is_fp8", "by_warpgroups"), DETERMINISTIC)
def test_bits_do_not_depend_on_the_batch_or_the_page_size(
    head_dim: int, is_fp8: bool, by_warpgroups: bool, workspace: torch.Tensor
) -> None:
    if by_warpgroups:
        skip_without_warpgroups(head_dim, deterministic=True)
    sequences = ((1500, 40), (-1, 2), (30, 5), (3000, 1))
    case = Case(sequences, head_dim=head_dim, is_fp8=is_fp8, has_sinks=True)
    way: dict[str, Any] = {"deterministic": True, "by_warpgroups": by_warpgroups}
    results = []
    for page_size in (16, 32, 64, 128):
        batch = make_batch(dataclasses.replace(case, page_size=page_size)).to("cuda")
        batch.operands["sinks"] = torch.linspace(-1, 1, case.num_heads, device="cuda")
        results.append(batch.run(paged_prefill, workspace=workspace, **way))
        assert_same_bits(results[-1], results[0])
        for n, (past, new) in enumerate(sequences):
            if past < 0:
                continue
            first = int(batch.operands["query_start"][n])
            alone = rows_of(batch, past - first, first, first + new)
            alone.operands["slots"] = batch.operands["slots"][n : n + 1].clone()
            assert_same_bits(alone.run(paged_prefill, **way), results[0][first : first + new])


@pytest.mark.gpu
@pytest.mark.parametrize("way", [{}, {"deterministic": True}, {"by_warpgroups": False}])
def test_graph_equals_eager_with_other_lengths(way: dict[str, Any], workspace: torch.Tensor) -> None:
    batch = make_batch(Case(((100, 30), (2000, 2), (7, 16)), head_dim=128), pages_per_slot=200).to("cuda")
    other = make_batch(Case(((900, 2), (1, 31), (-1, 15)), head_dim=128, seed=3), pages_per_slot=200).to("cuda")
    out = torch.full_like(batch.run(paged_prefill), 7.0)
    options = way | {"workspace": workspace}
    graph = captured(lambda: paged_prefill(**batch.operands, out=out, **options))
    for name, value in other.operands.items():
        if isinstance(value, torch.Tensor):
            batch.operands[name].copy_(value)
    out.fill_(7.0)
    graph.replay()
    assert_same_bits(out[:33], other.run(paged_prefill, **options)[:33])
    assert_written(other, out)
    assert_close(out[:33], reference(other)[:33])


@pytest.mark.gpu
def test_sanitizer_paged_prefill() -> None:
    """Small, for compute-sanitizer: plain, tree and fp8 rows, spread and merged."""
    space = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    for is_fp8 in (False, True):
        for sequences, is_tree in ((LENGTHS[:4], False), (TREE_LENGTHS[:3], True), (((1100, 2),), False)):
            case = Case(sequences, is_fp8=is_fp8, is_tree=is_tree, kv_heads=1)
            check(case, {"workspace": space}, {"deterministic": True, "workspace": space})
