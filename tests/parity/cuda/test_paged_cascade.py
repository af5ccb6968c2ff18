"""Decode attention over shared prefixes: reference against plain decode, launch; then the device against both."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from paged_case import FP8, poisoned_storage, random_storage
from row_ops import assert_same_bits, captured, record_launches
from test_paged_decode import DEVICES, H200, HEADS, NORM_ERROR, TOLERANCE, fill_places, rows_apart

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu import loader
from edgellm.kernels.cu import paged_cascade as op
from edgellm.kernels.cu import paged_decode as decode
from edgellm.kernels.cu.launch import DeviceLimits, device_limits
from edgellm.kernels.ref import paged_cascade as ref
from edgellm.kernels.ref import paged_decode as decode_ref

Groups = list[tuple[int, list[int]]]  # keys of a prefix, own keys of each row; 0: rows in no group


@dataclass(slots=True)
class Case:
    """Inputs of one call; pages that no row needs, and places past a row's length, are NaN."""

    query: torch.Tensor
    pages: torch.Tensor
    page_table: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
    shared: torch.Tensor
    members: torch.Tensor
    group_start: torch.Tensor
    out: torch.Tensor
    num_heads: int

    @property
    def kv_heads(self) -> int:
        return self.pages.shape[2]

    @property
    def head_dim(self) -> int:
        return self.out.shape[1] // self.num_heads

    def to(self, device: str) -> Case:
        moved = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value.clone().to(device) for name, value in moved.items() if isinstance(value, torch.Tensor)}
        return Case(**moved | tensors | {"query": rows_apart(self.query.to(device))})

    def arguments(self, workspace: torch.Tensor | None) -> tuple[Any, ...]:
        return (*self.plain(), self.shared, self.members, self.group_start, self.out, workspace)

    def plain(self) -> tuple[torch.Tensor, ...]:
        return self.query, self.pages, self.page_table, self.slots, self.lengths

    def set_groups(self, groups: Groups) -> None:
        """Other groups of other lengths over the same pages, which have to hold them; on the case's device."""
        order = torch.arange(len(self.slots)).tolist()
        shared, members, starts = group_tables(groups, order)
        for name, value in (("shared", shared), ("members", members), ("group_start", starts)):
            getattr(self, name).copy_(value)
        self.lengths.copy_(torch.tensor([prefix + own for prefix, rows in groups for own in rows]))


def group_tables(groups: Groups, order: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """shared, members and group_start where the rows of the groups, one after the other, are rows `order`."""
    shared, members = torch.zeros(len(order), dtype=torch.int32), torch.full((len(order),), -7, dtype=torch.int32)
    starts, row, count = torch.zeros(op.MAX_GROUPS + 1, dtype=torch.int32), 0, 0
    for index, (prefix, own) in enumerate(groups):
        rows = order[row : row + len(own)]
        row += len(own)
        shared[rows] = prefix
        if prefix:
            members[count : count + len(rows)] = torch.tensor(rows, dtype=torch.int32)
            count += len(rows)
        starts[index + 1 :] = count
    return shared, members, starts


def make_case(
    groups: Groups,
    *,
    page_size: int = 16,
    head_dim: int = 128,
    group: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    kv: torch.dtype | None = None,
    padding: int = 0,
    shuffled: bool = True,
) -> Case:
    """Rows of all groups in random order, slots in reverse; `padding` rows behind them have slot -1."""
    num_heads, kv_heads = HEADS[group]
    lengths = [prefix + own for prefix, rows in groups for own in rows]
    rows = len(lengths)
    order = torch.randperm(rows).tolist() if shuffled else list(range(rows))
    num_pages = sum(-(-length // page_size) for length in lengths) + 5
    ids = torch.randperm(num_pages).tolist()
    table = torch.full((rows + 1, -(-max(lengths) // page_size) + 1), -1, dtype=torch.int32)
    storage = (num_pages, kv_heads, page_size, head_dim, kv or dtype)
    pages, good = poisoned_storage(1, *storage)[0], random_storage(1, *storage)[0]
    row = 0
    for prefix, own_lengths in groups:
        common = [ids.pop() for _ in range(prefix // page_size)]
        pages[common] = good[common]
        for own in own_lengths:
            private = [ids.pop() for _ in range(-(-own // page_size))]
            table[rows - order[row], : len(common) + len(private)] = torch.tensor([*common, *private])
            whole, rest = divmod(own, page_size)
            pages[private[:whole]] = good[private[:whole]]
            if rest:
                fill_places(pages[private[-1]], good[private[-1]], rest, page_size, head_dim)
            row += 1
    shared, members, starts = group_tables(groups, [*order, *range(rows, rows + padding)])
    by_row = torch.zeros(rows + padding, dtype=torch.int32)
    by_row[order] = torch.tensor(lengths, dtype=torch.int32)
    slots = torch.tensor([rows - row for row in range(rows)] + [-1] * padding, dtype=torch.int32)
    width = num_heads * head_dim
    query = rows_apart(torch.randn(rows + padding, width).to(dtype) * 2)
    out = torch.full((rows + padding, width), float("nan"), dtype=dtype)
    return Case(query, pages, table, slots, by_row, shared, members, starts, out, num_heads)


# ---- reference ------------------------------------------------------------------------------------------------------


def test_the_reference_has_the_wrappers_signature() -> None:
    for ours, theirs in ((op.paged_cascade, ref.paged_cascade), (decode.paged_decode, decode_ref.paged_decode)):
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)


@pytest.mark.parametrize("kv", [None, FP8])
@pytest.mark.parametrize(
    "groups",
    [
        [(32, [1, 5, 17])],
        [(48, [16])],
        [(0, [3, 40])],
        [(16, [1, 2]), (0, [9]), (80, [33, 1, 1, 20])],
    ],
)
def test_reference_is_plain_decode_attention(groups: Groups, kv: torch.dtype | None) -> None:
    case = make_case(groups, dtype=torch.float16, kv=kv, head_dim=64, padding=1)
    options: dict[str, Any] = {"num_heads": case.num_heads, "scale": 0.2, "soft_cap": 9.0, "sinks": torch.randn(8)}
    ref.paged_cascade(*case.arguments(None), **options)
    plain = torch.full_like(case.out, float("nan"))
    decode_ref.paged_decode(*case.plain(), plain, None, **options)
    assert_same_bits(case.out, plain)


def test_reference_reads_the_shared_keys_where_the_first_member_has_them() -> None:
    case = make_case([(32, [1, 5])], shuffled=False)
    expected = case.out.clone()
    ref.paged_cascade(*case.arguments(None), num_heads=8, scale=0.1)
    expected.copy_(case.out)
    case.page_table[int(case.slots[1]), :2] = -1
    ref.paged_cascade(*case.arguments(None), num_heads=8, scale=0.1)
    assert_same_bits(case.out, expected)
    case.shared[1] = 16
    with pytest.raises(ValueError, match="several lengths"):
        ref.paged_cascade(*case.arguments(None), num_heads=8, scale=0.1)
    case.shared.fill_(32)
    case.group_start.fill_(0)
    with pytest.raises(ValueError, match="in no group"):
        ref.paged_cascade(*case.arguments(None), num_heads=8, scale=0.1)


def test_states_of_own_keys_join_to_plain_attention() -> None:
    """What decode attention leaves with `starts`, joined with the same of the keys before, is attention to all keys."""
    case = make_case([(32, [7, 1])], dtype=torch.float32, kv=torch.float32, shuffled=False)
    plain, out = torch.empty_like(case.out), case.out.clone()
    own, before = torch.zeros(2, 2, 8, 132, dtype=torch.float64)
    options: dict[str, Any] = {"num_heads": 8, "scale": 0.1}
    decode_ref.paged_decode(*case.plain(), plain, None, **options)
    decode_ref.paged_decode(*case.plain(), out, None, starts=case.shared, states=own, **options)
    assert out.isnan().all()
    head = case.page_table.clone()
    shifted = (case.query, case.pages, torch.cat((head[:, :1], head), 1), case.slots, case.shared + 16)
    decode_ref.paged_decode(*shifted, out, None, starts=torch.full_like(case.shared, 16), states=before, **options)
    top = torch.maximum(own[..., 128], before[..., 128])
    weights = [torch.exp2(state[..., 128] - top)[..., None] for state in (own, before)]
    total = own * weights[0] + before * weights[1]
    torch.testing.assert_close((total[..., :128] / total[..., 129:130]).flatten(1).float(), plain)


# ---- launch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", DEVICES)
@pytest.mark.parametrize("head_dim", decode.HEAD_DIMS)
@pytest.mark.parametrize("is_fp8", [False, True])
def test_launch_config_fits(limits: DeviceLimits, head_dim: int, is_fp8: bool) -> None:
    for rows, heads, kv_heads in ((1, 1, 1), (8, 32, 8), (64, 32, 8), (256, 128, 8), (64, 14, 2)):
        launch = op.launch_config(rows, heads, kv_heads, head_dim, is_fp8, limits)
        assert launch.attention.shared_bytes <= limits.max_shared_bytes
        by_warpgroups = limits.arch == 90 and not is_fp8
        assert launch.by_warpgroups == by_warpgroups
        grid = (limits.sm_count, 1, 1) if by_warpgroups else (kv_heads, launch.blocks, 1)
        assert launch.attention.grid == grid
        assert 2 <= launch.ring <= 4
        assert launch.merge.grid[0] * 4 >= rows * heads > launch.merge.grid[0] * 4 - 4


def test_launch_config_on_an_h200() -> None:
    launch = op.launch_config(64, 32, 8, 128, False, H200)
    assert (launch.attention.grid, launch.attention.block, launch.tile_rows) == ((132, 1, 1), (384, 1, 1), 128)
    assert (launch.by_warpgroups, launch.blocks) == (True, 16)
    launch = op.launch_config(64, 32, 8, 128, True, H200)
    assert (launch.attention.grid, launch.attention.block, launch.by_warpgroups) == ((8, 33, 1), (128, 1, 1), False)
    launch = op.launch_config(64, 32, 8, 256, False, H200, by_warpgroups=False)
    assert (launch.attention.grid, launch.attention.block) == ((8, 16, 1), (256, 1, 1))


def test_the_workspace_begins_with_decodes_and_holds_every_part() -> None:
    size = op.paged_cascade_workspace(64, 32, 8, 128, H200)
    assert size == decode.paged_decode_workspace(64, 32, 128, H200) + 4 * 132 * (64 * 32 + 8 * 33 * 128)
    # 256 rows of 16 heads a kv head: 32 tiles, and one more for each group but the first
    many = op.paged_cascade_workspace(256, 128, 8, 128, H200)
    assert many >= 4 * 132 * (256 * 128 + 8 * 63 * 128)
    with pytest.raises(InvalidArgumentError, match="32 heads over 5 kv heads"):
        op.paged_cascade_workspace(64, 32, 5, 128, H200)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    recorded = record_launches(monkeypatch)
    for module in (op, decode):
        monkeypatch.setattr(module, "device_limits", lambda _device: H200)
    return recorded


def workspace_for(case: Case, limits: DeviceLimits, device: str = "cpu") -> torch.Tensor:
    size = op.paged_cascade_workspace(len(case.slots), case.num_heads, case.kv_heads, case.head_dim, limits)
    return torch.zeros(size, dtype=torch.uint8, device=device)


def test_three_launches_over_one_workspace(launches: list[Any]) -> None:
    case = make_case([(64, [5, 40, 1])], page_size=32, group=7, kv=FP8, head_dim=64)
    workspace = workspace_for(case, H200)
    op.paged_cascade(*case.arguments(workspace), num_heads=14, scale=0.5, soft_cap=2.0, early_reads=True)
    own, shared, merge = launches
    assert [launch.spec.name for launch in launches] == ["paged_decode", "paged_cascade", "paged_cascade_merge"]
    assert [launch.key for launch in launches[1:]] == [(torch.bfloat16, True, 64), (torch.bfloat16, 64)]
    assert own.params["starts"] == shared.params["shared"] == case.shared.data_ptr()
    assert own.params["states"] == merge.params["own"]
    assert workspace.data_ptr() < merge.params["own"] < merge.params["parts"] < workspace.data_ptr() + len(workspace)
    assert (own.params["early_reads"], own.params["window"]) == (1, 0)
    assert (shared.params["scale"], shared.params["soft_cap"], shared.params["blocks"]) == (0.5, 2.0, 132)
    assert (shared.params["group"], shared.params["page_shift"], shared.params["num_rows"]) == (7, 5, 3)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"shared": torch.zeros(2, dtype=torch.int32)}, {}, "shared is"),
        ({"members": torch.zeros(3, dtype=torch.int64)}, {}, "members is"),
        ({"group_start": torch.zeros(4, dtype=torch.int32)}, {}, "group_start is"),
        ({"workspace": torch.zeros(64, dtype=torch.uint8)}, {}, "see paged_cascade_workspace"),
        ({"workspace": torch.zeros(1 << 22)}, {}, "bytes of uint8"),
        ({"lengths": torch.zeros(2, dtype=torch.int32)}, {}, "lengths is"),
        ({"out": torch.zeros(3, 1000, dtype=torch.bfloat16)}, {}, "head size of 64, 128, 256"),
        ({"pages": torch.zeros(4, 2, 3, 16, 128, dtype=torch.bfloat16)}, {}, "a whole group"),
        ({}, {"scale": float("nan")}, "scale nan"),
        ({}, {"sinks": torch.zeros(7)}, "sinks is"),
    ],
)
def test_bad_arguments(launches: list[Any], change: dict[str, Any], options: dict[str, Any], message: str) -> None:
    case = make_case([(16, [5, 17, 3])])
    names = [*[field.name for field in fields(case)][:9], "workspace"]
    arguments = dict(zip(names, case.arguments(workspace_for(case, H200)), strict=True)) | change
    with pytest.raises(InvalidArgumentError, match=message):
        op.paged_cascade(**arguments, **({"num_heads": 8, "scale": 1.0} | options))
    assert not launches


def test_decode_takes_starts_only_with_states_and_without_a_window(launches: list[Any]) -> None:
    case = make_case([(16, [5, 17, 3])])
    states = torch.zeros(3, 8, 132)
    run = (*case.plain(), case.out, workspace_for(case, H200))
    for wrong in ({}, {"states": states, "window": 4}, {"states": states[:2]}, {"states": states.double()}):
        with pytest.raises(InvalidArgumentError, match="states"):
            decode.paged_decode(*run, num_heads=8, scale=1.0, starts=case.shared, **wrong)
    assert not launches


# ---- device ---------------------------------------------------------------------------------------------------------


def check_on_device(case: Case, workspace: torch.Tensor | None = None, **options: Any) -> Case:
    """Run the kernels, and compare with the reference on the same inputs."""
    there = case.to("cuda")
    if workspace is None:
        workspace = workspace_for(case, device_limits(there.query.device), "cuda")
    sinks = options.pop("sinks", None)
    options = {"scale": case.head_dim**-0.5, "sinks": None if sinks is None else sinks.to("cuda")} | options
    op.paged_cascade(*there.arguments(workspace), num_heads=case.num_heads, **options)
    options.pop("by_warpgroups", None)
    compare(there, **options)
    return there


def compare(case: Case, **options: Any) -> None:
    """Written rows within tolerance of the reference, in total within NORM_ERROR; the others untouched (NaN)."""
    expected = torch.full(case.out.shape, float("nan"), dtype=torch.float64, device=case.out.device)
    arguments = (*case.plain(), case.shared, case.members, case.group_start, expected, None)
    ref.paged_cascade(*arguments, num_heads=case.num_heads, **options)
    written = case.slots >= 0
    assert case.out[~written].isnan().all()
    ours, wanted = case.out[written].double(), expected[written]
    assert ours.isfinite().all()
    step = TOLERANCE[case.out.dtype]
    torch.testing.assert_close(ours, wanted, rtol=step, atol=step)
    assert float((ours - wanted).norm()) <= NORM_ERROR * float(wanted.norm())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", decode.QUERY_TYPES)
@pytest.mark.parametrize("kv", [None, FP8])
@pytest.mark.parametrize("head_dim", decode.HEAD_DIMS)
@pytest.mark.parametrize("group", [4, 16])
def test_every_variant(dtype: torch.dtype, kv: torch.dtype | None, head_dim: int, group: int) -> None:
    groups: Groups = [(192, [1, 15, 16, 17, 200]), (0, [64, 1]), (64, [3] * 11)]
    for page_size in (16, 64):
        check_on_device(
            make_case(groups, page_size=page_size, head_dim=head_dim, group=group, dtype=dtype, kv=kv, padding=1)
        )


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", decode.HEAD_DIMS)
def test_both_kernels(head_dim: int) -> None:
    """By warpgroup products, where the device has them, and by those of warps."""
    if device_limits(torch.device("cuda")).arch != 90:
        pytest.skip("paged_cascade_sm90 needs compute capability 9.0; elsewhere there is one kernel")
    groups: Groups = [(4096, [17] * 40), (1168, [300] * 9), (0, [900] * 3), (16, [5, 6])]
    case = make_case(groups, head_dim=head_dim, padding=1)
    for by_warpgroups in (False, True):
        check_on_device(case, by_warpgroups=by_warpgroups)


@pytest.mark.gpu
@pytest.mark.parametrize("group", sorted(HEADS))
@pytest.mark.parametrize("kv", [None, FP8])
def test_every_group_and_option(group: int, kv: torch.dtype | None) -> None:
    groups: Groups = [(1504, [1, 130, 30]), (0, [31, 700]), (16, [1, 64])]
    sinks = torch.randn(HEADS[group][0])
    for options in ({"soft_cap": 3.0}, {"sinks": sinks}, {"sinks": sinks, "soft_cap": 20.0, "scale": 0.3}):
        check_on_device(make_case(groups, group=group, kv=kv), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_groups_of_any_kind(page_size: int) -> None:
    """One row, all rows, as many groups as there can be, prefixes that end anywhere, and more tiles than blocks."""
    generator = torch.Generator().manual_seed(page_size)

    def numbers(count: int, most: int) -> list[int]:
        return torch.randint(1, most, (count,), generator=generator).tolist()

    cases: list[Groups] = [
        [(4096 + page_size, [1])],
        [(2048, numbers(64, 300))],
        [(0, numbers(5, 300))],
        [(page_size * pages, numbers(2, 40)) for pages in numbers(op.MAX_GROUPS, 12)],
        [(page_size * pages, numbers(rows, 90)) for pages, rows in zip(numbers(6, 70), numbers(6, 40), strict=True)],
    ]
    for groups in cases:
        check_on_device(make_case(groups, page_size=page_size, padding=2))
    check_on_device(make_case([(256, numbers(150, 40))], group=16, page_size=page_size))


@pytest.mark.gpu
def test_rows_in_no_group_get_plain_decodes_bits_and_counters_return_to_zero() -> None:
    case = make_case([(0, [300, 41, 7, 1000])])
    there = check_on_device(case)
    limits = device_limits(there.query.device)
    workspace, plain = workspace_for(case, limits, "cuda"), torch.full_like(there.out, float("nan"))
    decode.paged_decode(*there.plain(), plain, workspace, num_heads=8, scale=128**-0.5)
    assert_same_bits(there.out, plain)
    grouped = check_on_device(make_case([(640, [300, 41, 7, 1000])]), workspace)
    assert grouped.out.isfinite().all()
    blocks = decode.launch_config(128, 4, False, limits).config.grid[0]
    assert not workspace[: 4 * blocks].any(), "arrival counters are not back at zero"


@pytest.mark.gpu
def test_equal_bits_every_time() -> None:
    case = make_case([(2048, [17] * 20), (1024, [300] * 9), (0, [900] * 3)])
    workspace = workspace_for(case, device_limits(torch.device("cuda")), "cuda")
    first = check_on_device(case, workspace).out.clone()
    for _ in range(20):
        again = case.to("cuda")
        op.paged_cascade(*again.arguments(workspace), num_heads=8, scale=128**-0.5)
        assert_same_bits(again.out, first)


@pytest.mark.gpu
@pytest.mark.parametrize("early_reads", [False, True])
def test_graph_equals_eager_with_other_groups(early_reads: bool) -> None:
    """One captured call serves rows that leave, other prefixes, and no group at all."""
    case = make_case([(960, [40, 64, 300, 17, 8, 200])], shuffled=False)
    there = case.to("cuda")
    workspace = workspace_for(case, device_limits(there.query.device), "cuda")
    arguments, options = there.arguments(workspace), {"num_heads": 8, "scale": 128**-0.5}
    graph = captured(lambda: op.paged_cascade(*arguments, early_reads=early_reads, **options))
    changes: list[tuple[Groups, list[int]]] = [
        ([(960, [40, 64, 300, 17, 8, 200])], []),
        ([(960, [40, 64, 300, 17, 8]), (0, [1000])], [5]),
        ([(512, [40, 64, 300]), (16, [17, 8, 500])], []),
        ([(0, [40, 64, 1000, 900, 8, 200])], []),
        ([(0, [40]), (320, [1, 1, 1]), (0, [77, 5])], [0, 4, 5]),
    ]
    for groups, gone in changes:
        there.set_groups(groups)
        there.slots.copy_(torch.tensor([-1 if row in gone else 6 - row for row in range(6)]))
        there.query.copy_((torch.randn(*case.query.shape) * 2).to(case.query.dtype))
        there.out.fill_(float("nan"))
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        compare(there, scale=128**-0.5)
        replayed = there.out.clone()
        there.out.fill_(float("nan"))
        op.paged_cascade(*arguments, **options)
        assert_same_bits(there.out, replayed)


@pytest.mark.gpu
def test_calls_in_a_row_overlap_without_harm() -> None:
    """Launches that may start early, back to back, each reading what the one before wrote as its query."""
    case = make_case([(1024, [300, 20, 40, 1])])
    there = case.to("cuda")
    workspace = workspace_for(case, device_limits(there.query.device), "cuda")
    buffers = [torch.empty_like(there.out) for _ in range(6)]

    def chain(*, waits: bool) -> torch.Tensor:
        query = there.query
        for out in buffers:
            out.zero_()
            op.paged_cascade(
                query, *there.arguments(workspace)[1:8], out, workspace, num_heads=8, scale=0.5, early_reads=True
            )
            query = out
            if waits:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        return buffers[-1].clone()

    expected = chain(waits=True)
    for _ in range(10):
        assert_same_bits(chain(waits=False), expected)


@pytest.mark.gpu
def test_no_variant_spills() -> None:
    for spec in op.SPECS:
        for variant in spec.variants:
            resources = loader.kernel(spec, variant.key).resources()
            assert resources["local_bytes"] == 0, (variant, resources)


@pytest.mark.gpu
def test_sanitizer_paged_cascade() -> None:
    check_on_device(make_case([(528, [1, 17, 30]), (0, [9]), (32, [1, 1])], padding=1))
    check_on_device(make_case([(64, [33, 5])], head_dim=64, group=7, kv=FP8, dtype=torch.float16), soft_cap=5.0)
