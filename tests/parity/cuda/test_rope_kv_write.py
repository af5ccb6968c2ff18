"""Head norms, rotation and the write into pages on CUDA, against the reference; the reference against the CPU path."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from paged_case import FP8, PagedCase, make_case
from row_ops import ROW_TYPES, assert_close, assert_same_bits, captured, record_launches

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cpu import elementwise
from edgellm.kernels.cu.rope_kv_write import launch_config, rope_kv_write
from edgellm.kernels.ref import rope_kv_write as ref
from edgellm.kernels.ref.fp8_pages import dequantise_pages, split_pages
from edgellm.runtime.kv_cache import KVCache

EPS = 1e-6
HEAD_DIMS = (64, 128, 256, 48, 80)
KV_TYPES = [(dtype, dtype) for dtype in ROW_TYPES] + [(torch.float16, FP8), (torch.bfloat16, FP8)]


def make_rows(
    case: PagedCase,
    num_heads: int,
    kv_heads: int,
    dtype: torch.dtype,
    *,
    norms: bool = True,
    padding: int = 0,
    rotary_dim: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """qkv, angles and keyword arguments.  `padding`: elements behind each row."""
    torch.manual_seed(case.head_dim + num_heads)
    num_tokens, width = len(case.token_seq), (num_heads + 2 * kv_heads) * case.head_dim
    qkv = torch.randn(num_tokens, width + padding).to(dtype)[:, :width]
    turns = torch.rand(num_tokens, (rotary_dim or case.head_dim) // 2) * 7
    options: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": kv_heads, "head_dim": case.head_dim}
    if rotary_dim is not None:
        options["rotary_dim"] = rotary_dim
    if norms:
        query_norm, key_norm = torch.rand(2, case.head_dim) + 0.5
        options |= {"query_norm": query_norm.clone(), "key_norm": key_norm.clone(), "eps": EPS}
    return qkv, torch.stack((turns.cos(), turns.sin())), options


def on_device(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in options.items()}


def like(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the device with the same row stride."""
    base = torch.empty(tensor.shape[0], tensor.stride(0), dtype=tensor.dtype, device="cuda")[:, : tensor.shape[1]]
    return base.copy_(tensor)


def run(
    function: Any, case: PagedCase, qkv: torch.Tensor, angles: torch.Tensor | None, options: dict[str, Any]
) -> None:
    pages = case.storage[0]
    function(qkv, angles, pages, case.page_table, case.slots, case.token_seq, case.positions, **options)


# ---- reference ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotary_dim", [None, 16, 50])
def test_reference_is_the_cpu_rope_and_write(dtype: torch.dtype, rotary_dim: int | None) -> None:
    case = make_case(kv_heads=2, page_size=16, head_dim=64, dtype=dtype)
    qkv, angles, options = make_rows(case, 4, 2, dtype, rotary_dim=rotary_dim)
    rotated = qkv.clone()
    elementwise.rope_(rotated, angles, **{name: value for name, value in options.items() if name != "rotary_dim"})
    real = case.slots[case.token_seq.long().clamp(min=0)].ge(0) & case.token_seq.ge(0)
    before = qkv.clone()
    run(ref.rope_kv_write, case, qkv, angles, options)
    assert_close(rotated[real, :256], qkv[real, :256])
    assert torch.equal(qkv[:, 256:], before[:, 256:])
    assert torch.equal(qkv[~real], before[~real])
    cache = KVCache(
        num_layers=1, num_pages=len(case.storage[0]), num_kv_heads=2, page_size=16, head_dim=64, dtype=dtype
    )
    cache.fill_poison()
    cache.write(0, rotated[:, 256:384].view(-1, 2, 64), rotated[:, 384:].view(-1, 2, 64), kv_offsets(case))
    assert_close(cache.pages(0), case.storage[0])


def kv_offsets(case: PagedCase) -> np.ndarray:
    offsets = []
    for sequence, position in zip(case.token_seq.tolist(), case.positions.tolist(), strict=True):
        slot = -1 if sequence < 0 else int(case.slots[sequence])
        page = -1 if slot < 0 else int(case.page_table[slot, position // case.page_size])
        offsets.append(-1 if page < 0 else page * case.page_size + position % case.page_size)
    return np.array(offsets, np.int64)


def test_reference_fp8_pages_hold_what_the_cache_would() -> None:
    """K and V rounded to the rows' type, then a scale for each token and head."""
    case = make_case(kv_heads=2, page_size=16, head_dim=64, dtype=FP8)
    plain = make_case(kv_heads=2, page_size=16, head_dim=64, dtype=torch.bfloat16)
    plain.page_table.copy_(case.page_table)
    qkv, angles, options = make_rows(case, 4, 2, torch.bfloat16)
    run(ref.rope_kv_write, plain, qkv.clone(), angles, options)
    run(ref.rope_kv_write, case, qkv, angles, options)
    stored, exact = dequantise_pages(case.storage[0], 16, 64), plain.storage[0].float()
    assert torch.equal(stored.isnan(), exact.isnan())
    amax = exact.nan_to_num(0.0).abs().amax(-1, keepdim=True)
    assert bool(((stored - exact).nan_to_num(0.0).abs() <= exact.nan_to_num(0.0).abs() / 16 + amax / 448 / 512).all())


def test_reference_norms_values() -> None:
    case = make_case(kv_heads=2, page_size=16, head_dim=64, dtype=torch.float32)
    normed = case.to("cpu")
    qkv, angles, options = make_rows(case, 4, 2, torch.float32)
    weight = torch.rand(64) + 0.5
    run(ref.rope_kv_write, case, qkv.clone(), angles, options)
    run(ref.rope_kv_write, normed, qkv, angles, options | {"value_norm": weight})
    assert_same_bits(normed.storage[0][:, 0], case.storage[0][:, 0])
    values = case.storage[0][:, 1].reshape(-1, 64)
    expected = torch.empty_like(values)
    elementwise.rms_norm(values, weight, EPS, expected)
    assert_close(normed.storage[0][:, 1].reshape(-1, 64), expected)


# ---- launches and refusals ------------------------------------------------------------------------------------------


def test_launch_config() -> None:
    assert launch_config(7, 32, 128, torch.bfloat16).grid == (7, 2, 1)  # 8 lanes a head
    assert launch_config(7, 48, 128, torch.float32).grid == (7, 6, 1)
    assert launch_config(7, 8, 64, torch.bfloat16).grid == (7, 1, 1)
    assert launch_config(7, 8, 0, torch.bfloat16).grid == (7, 2, 1)


@pytest.mark.parametrize(("dtype", "kv_dtype"), KV_TYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_variants(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int) -> None:
    launches = record_launches(monkeypatch)
    case = make_case(kv_heads=2, page_size=16, head_dim=head_dim, dtype=kv_dtype)
    qkv, angles, options = make_rows(case, 4, 2, dtype)
    run(rope_kv_write, case, qkv, angles, options)
    run(rope_kv_write, case, make_rows(case, 4, 2, dtype, padding=1)[0], None, options)
    fixed = head_dim if head_dim in (64, 128, 256) else 0
    assert [launch.key for launch in launches] == [(dtype, kv_dtype == FP8, fixed), (dtype, kv_dtype == FP8, 0)]
    assert launches[0].params["page_bytes"] == case.storage.stride(1) * case.storage.element_size()
    assert launches[0].params["head_bytes"] == case.storage.stride(3) * case.storage.element_size()
    assert launches[0].params["page_shift"] == 4
    assert launches[1].params["angles"] is None


def test_a_part_of_a_head_that_turns_takes_the_kernel_of_any_head(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    case = make_case(kv_heads=2, page_size=16, head_dim=64, dtype=torch.float32)
    for rotary_dim in (16, 64):
        qkv, angles, options = make_rows(case, 4, 2, torch.float32, rotary_dim=rotary_dim)
        run(rope_kv_write, case, qkv, angles, options | {"value_norm": torch.ones(64)})
    assert [launch.key[2] for launch in launches] == [0, 64]
    assert [launch.params["rotary_half"] for launch in launches] == [8, 32]
    assert all(launch.params["value_norm"] for launch in launches)


def test_query_only_needs_no_places(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    qkv, angles = torch.randn(3, 4 * 64), torch.randn(2, 3, 32)
    rope_kv_write(qkv, angles, None, None, None, None, None, num_heads=4, num_kv_heads=2, head_dim=64)
    assert launches[0].params["pages"] is None
    assert launches[0].config.grid == (3, 1, 1)
    rope_kv_write(qkv[:0], angles[:, :0], None, None, None, None, None, num_heads=4, num_kv_heads=2, head_dim=64)
    assert len(launches) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"angles": torch.zeros(2, 3, 32)}, "angles is"),
        ({"pages": torch.zeros(4, 2, 2, 12, 64)}, "page size"),
        ({"pages": torch.zeros(4, 2, 2, 16, 32)}, "pages is"),
        ({"pages": torch.zeros(4, 2, 3, 16, 64)}, "pages have 3 kv heads"),
        ({"pages": torch.zeros(4, 2, 2, 16, 64).half()}, "pages are torch.float16 and qkv is torch.float32"),
        ({"pages": torch.zeros(4, 2, 2, 16 * 68, dtype=torch.uint8)}, "the same type, or fp8 pages of 16-bit rows"),
        ({"page_table": None}, "page_table is None"),
        ({"slots": torch.zeros(5)}, "slots is"),
        ({"token_seq": torch.zeros(3, dtype=torch.int32)}, "token_seq is"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, "positions is"),
        ({"query_norm": torch.zeros(63)}, "query_norm is"),
        ({"value_norm": torch.zeros(63)}, "value_norm is"),
        ({"rotary_dim": 16}, "angles is"),
        ({"rotary_dim": 33}, "rotary_dim is 33; an even number up to head_dim, 64"),
        ({"rotary_dim": 66}, "rotary_dim is 66"),
        ({"rotary_dim": 0}, "rotary_dim is 0"),
        ({"num_heads": 5}, "qkv is"),
        ({"head_dim": 63}, "even size"),
    ],
)
def test_bad_arguments(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str) -> None:
    launches = record_launches(monkeypatch)
    case = make_case(kv_heads=2, page_size=16, head_dim=64, dtype=torch.float32)
    qkv, angles, options = make_rows(case, 4, 2, torch.float32)
    arguments = {
        "qkv": qkv,
        "angles": angles,
        "pages": case.storage[0],
        "page_table": case.page_table,
        "slots": case.slots,
        "token_seq": case.token_seq,
        "positions": case.positions,
        **options,
    }
    if "head_dim" in changes:
        arguments |= {"pages": None, "query_norm": None, "key_norm": None}
    with pytest.raises(InvalidArgumentError, match=message):
        rope_kv_write(**(arguments | changes))
    assert not launches


# ---- device ---------------------------------------------------------------------------------------------------------


def assert_same_pages(actual: torch.Tensor, expected: torch.Tensor, page_size: int, head_dim: int) -> None:
    """V to the bit, K to its rounding; fp8 K to a step, whose scale follows one rounding of the largest value."""
    actual, expected = actual.cpu(), expected.cpu()
    assert_same_bits(actual[:, 1], expected[:, 1])
    if actual.dtype != torch.uint8:
        assert_close(actual[:, 0], expected[:, 0])
        return
    for ours, theirs in zip(
        split_pages(actual[:, 0], page_size, head_dim), split_pages(expected[:, 0], page_size, head_dim), strict=True
    ):
        if ours.dtype == torch.float32:
            torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=0, equal_nan=True)
        else:
            assert float((ours != theirs).float().mean()) <= 0.02
    ours, theirs = dequantise_pages(actual, page_size, head_dim), dequantise_pages(expected, page_size, head_dim)
    torch.testing.assert_close(ours, theirs, rtol=0.13, atol=1e-4, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "kv_dtype"), KV_TYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("norms", [False, True])
def test_device_equals_reference(dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, norms: bool) -> None:
    for num_heads, kv_heads, page_size, padding in ((4, 2, 16, 0), (14, 2, 32, 8), (3, 3, 64, 1)):
        case = make_case(kv_heads=kv_heads, page_size=page_size, head_dim=head_dim, dtype=kv_dtype)
        qkv, angles, options = make_rows(case, num_heads, kv_heads, dtype, norms=norms, padding=padding)
        device_case, device_qkv = case.to("cuda"), like(qkv)
        run(rope_kv_write, device_case, device_qkv, angles.cuda(), on_device(options))
        run(ref.rope_kv_write, case, qkv, angles, options)
        assert_close(device_qkv, qkv)
        assert_same_pages(device_case.storage[0], case.storage[0], page_size, head_dim)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "kv_dtype"), KV_TYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 16), (256, 64), (48, 36), (512, 512), (80, 2), (128, 128)])
def test_partial_rotation_and_normed_values_equal_reference(
    dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, rotary_dim: int
) -> None:
    for num_heads, kv_heads, norms in ((4, 2, True), (3, 1, False)):
        case = make_case(kv_heads=kv_heads, page_size=16, head_dim=head_dim, dtype=kv_dtype)
        qkv, angles, options = make_rows(case, num_heads, kv_heads, dtype, norms=norms, rotary_dim=rotary_dim)
        plain = case.to("cuda"), like(qkv)
        run(rope_kv_write, *plain, angles.cuda(), on_device(options))
        expected = case.to("cpu"), qkv.clone()
        run(ref.rope_kv_write, *expected, angles, options)
        assert_close(plain[1], expected[1])
        assert_same_pages(plain[0].storage[0], expected[0].storage[0], 16, head_dim)
        options |= {"value_norm": torch.rand(head_dim) + 0.5, "eps": EPS}
        normed, device_qkv = case.to("cuda"), like(qkv)
        run(rope_kv_write, normed, device_qkv, angles.cuda(), on_device(options))
        run(ref.rope_kv_write, case, qkv, angles, options)
        assert_same_bits(device_qkv, plain[1])
        if kv_dtype != FP8:
            assert_same_bits(normed.storage[0][:, 0], plain[0].storage[0][:, 0])
            assert_close(normed.storage[0][:, 1], case.storage[0][:, 1])
            continue
        ours, theirs = (dequantise_pages(one.storage[0].cpu(), 16, head_dim) for one in (normed, case))
        torch.testing.assert_close(ours, theirs, rtol=0.13, atol=1e-4, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "kv_dtype"), KV_TYPES)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_without_rotation_pages_hold_the_rows_to_the_bit(
    dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int
) -> None:
    case = make_case(kv_heads=2, page_size=16, head_dim=head_dim, dtype=kv_dtype)
    qkv, _, options = make_rows(case, 4, 2, dtype, norms=False)
    qkv[0, :] = 0  # scale 1
    qkv[1, 4 * head_dim] = float("nan")
    qkv[2, 4 * head_dim + 1] = 1e4
    device_case, device_qkv = case.to("cuda"), like(qkv)
    run(rope_kv_write, device_case, device_qkv, None, options)
    before = qkv.clone()
    run(ref.rope_kv_write, case, qkv, None, options)
    assert_same_bits(device_qkv, before)
    if kv_dtype != FP8:
        # The payload of a NaN is free.
        assert_same_bits(device_case.storage.nan_to_num(7.0), case.storage.nan_to_num(7.0))
        return
    ours = dequantise_pages(device_case.storage[0].cpu(), 16, head_dim)
    theirs = dequantise_pages(case.storage[0], 16, head_dim)
    assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))
    # The sign of a NaN is free; everything else is the same byte.
    differs = device_case.storage.cpu() != case.storage
    assert int(differs.sum()) <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("head_dim", [128, 48])
def test_query_only_and_one_norm_only(dtype: torch.dtype, head_dim: int) -> None:
    case = make_case(kv_heads=2, page_size=16, head_dim=head_dim, dtype=dtype)
    qkv, angles, options = make_rows(case, 6, 0, dtype)
    del options["key_norm"]
    for token_seq, slots in ((None, None), (case.token_seq, None), (case.token_seq, case.slots)):
        expected, actual = qkv.clone(), qkv.cuda()
        ref.rope_kv_write(expected, angles, None, None, slots, token_seq, None, **options)
        moved = [None if tensor is None else tensor.cuda() for tensor in (slots, token_seq)]
        rope_kv_write(actual, angles.cuda(), None, None, *moved, None, **on_device(options))
        assert_close(actual, expected)
    options |= {"num_kv_heads": 2, "key_norm": torch.rand(head_dim)}
    del options["query_norm"]
    qkv = torch.randn(len(case.token_seq), 10 * head_dim).to(dtype)
    device_case, actual = case.to("cuda"), qkv.cuda()
    run(rope_kv_write, device_case, actual, angles.cuda(), on_device(options))
    run(ref.rope_kv_write, case, qkv, angles, options)
    assert_close(actual, qkv)
    assert_same_pages(device_case.storage[0], case.storage[0], 16, head_dim)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 48])
def test_places_without_a_page_are_dropped(head_dim: int) -> None:
    case = make_case(kv_heads=2, page_size=16, head_dim=head_dim, dtype=torch.float32)
    case.page_table[4, 1] = -1
    case.page_table[0, 0] = 10_000
    case.positions[3] = 16 * 4  # beyond the row
    case.positions[4] = -1
    qkv, angles, options = make_rows(case, 4, 2, torch.float32)
    device_case, actual = case.to("cuda"), qkv.cuda()
    run(rope_kv_write, device_case, actual, angles.cuda(), on_device(options))
    run(ref.rope_kv_write, case, qkv, angles, options)
    assert_close(actual, qkv)
    assert_close(device_case.storage, case.storage)


@pytest.mark.gpu
def test_bits_of_a_token_do_not_depend_on_its_batch() -> None:
    case = make_case(kv_heads=2, page_size=16, head_dim=128, dtype=torch.bfloat16)
    qkv, angles, options = make_rows(case, 5, 2, torch.bfloat16)
    whole, whole_qkv, options = case.to("cuda"), qkv.cuda(), on_device(options)
    run(rope_kv_write, whole, whole_qkv, angles.cuda(), options)
    single, single_qkv = case.to("cuda"), qkv.cuda()
    for token in range(len(qkv)):
        part = slice(token, token + 1)
        rope_kv_write(
            single_qkv[part],
            angles[:, part].contiguous().cuda(),
            single.storage[0],
            single.page_table,
            single.slots,
            single.token_seq[part].clone(),
            single.positions[part].clone(),
            **options,
        )
    assert_same_bits(single_qkv, whole_qkv)
    assert_same_bits(single.storage, whole.storage)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8])
def test_graph_equals_eager(kv_dtype: torch.dtype) -> None:
    case = make_case(kv_heads=2, page_size=16, head_dim=128, dtype=kv_dtype)
    qkv, angles, options = make_rows(case, 4, 2, torch.bfloat16)
    graph_case, graph_qkv, angles, options = case.to("cuda"), qkv.cuda(), angles.cuda(), on_device(options)
    graph = captured(lambda: run(rope_kv_write, graph_case, graph_qkv, angles, options))
    eager_case = case.to("cuda")
    for name in ("storage", "page_table", "slots", "token_seq", "positions"):
        getattr(graph_case, name).copy_(getattr(eager_case, name))
    for one in (graph_case, eager_case):
        one.slots[:2] = one.slots[:2].flip(0)
        one.token_seq[1] = -1
    graph_qkv.copy_(qkv * 2)
    graph.replay()
    eager_qkv = (qkv * 2).cuda()
    run(rope_kv_write, eager_case, eager_qkv, angles, options)
    assert_same_bits(graph_qkv, eager_qkv)
    assert_same_bits(graph_case.storage, eager_case.storage)


@pytest.mark.gpu
def test_sanitizer_rope_kv_write() -> None:
    for kv_dtype, head_dim in ((torch.bfloat16, 64), (FP8, 128), (FP8, 48)):
        case = make_case(kv_heads=2, page_size=16, head_dim=head_dim, dtype=kv_dtype).to("cuda")
        qkv, angles, options = make_rows(case, 3, 2, torch.bfloat16)
        run(rope_kv_write, case, qkv.cuda(), angles.cuda(), on_device(options))
        qkv, angles, options = make_rows(case, 3, 2, torch.bfloat16, rotary_dim=head_dim // 2)
        run(rope_kv_write, case, qkv.cuda(), angles.cuda(), on_device(options))
    torch.cuda.synchronize()
