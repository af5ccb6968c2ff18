"""The CPU kernels against their references: attention over pages, page writes, gathers, and row-wise operations."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cpu import _ops
from edgellm.kernels.cpu.elementwise import gelu_mul, rms_norm, rope_, silu_mul
from edgellm.kernels.cpu.linear import SKINNY_ROWS, linear
from edgellm.kernels.cpu.paged_attention import PagedAttention, gather_kv, write_kv
from edgellm.kernels.ref import elementwise as ref_rows
from edgellm.kernels.ref import paged_attention as ref

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
DTYPES = [torch.float32, torch.bfloat16]


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def random_pages(num_pages: int, kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(num_pages, 2, kv_heads, page_size, head_dim).to(dtype)


def shuffled_rows(num_slots: int, per_slot: int) -> np.ndarray:
    return np.random.default_rng(4).permutation(num_slots * per_slot).astype(np.int32).reshape(num_slots, per_slot)


def attend(
    pages: torch.Tensor,
    query: torch.Tensor,
    page_rows: np.ndarray,
    slots: np.ndarray,
    lengths: np.ndarray,
    window: int = 0,
) -> torch.Tensor:
    """Run the kernel on query (R, heads, dim) laid out as rows of a wider matrix, as in the graph."""
    num_rows, num_heads, head_dim = query.shape
    matrix = torch.full((num_rows + 1, num_heads * head_dim + 5), float("nan"), dtype=query.dtype)
    matrix[1:, : num_heads * head_dim] = query.flatten(1)
    out = torch.full((num_rows + 1, num_heads * head_dim), 7.0, dtype=query.dtype)
    plan = PagedAttention(
        pages=pages,
        num_heads=num_heads,
        query_dtype=query.dtype,
        query_rows=np.arange(1, num_rows + 1),
        page_rows=page_rows,
        slots=slots,
        lengths=lengths,
        scale=head_dim**-0.5,
        window=window,
    )
    plan.run(pages, matrix, out)
    assert bool((out[0] == 7.0).all())
    return out[1:].view(num_rows, num_heads, head_dim)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "kv_heads"), [(4, 4), (9, 3), (8, 1), (40, 2)])
@pytest.mark.parametrize("head_dim", [8, 20, 64, 80, 128])
def test_attention_equals_the_reference(num_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Lengths around page and segment borders; pages beyond a length hold NaN and must not be read."""
    lengths = np.array([1, 15, 16, 17, 255, 256, 257, 700], np.int32)
    pages = random_pages(len(lengths) * 44, kv_heads, 16, head_dim, dtype)
    page_rows = shuffled_rows(len(lengths), 44)
    for slot, length in enumerate(lengths.tolist()):
        pages[page_rows[slot, -(-length // 16) :]] = float("nan")
        pages[page_rows[slot, (length - 1) // 16], :, :, (length - 1) % 16 + 1 :] = float("nan")
    query = torch.randn(len(lengths), num_heads, head_dim).to(dtype)
    slots = np.arange(len(lengths), dtype=np.int32)
    expected = ref.paged_attention(pages, query, page_rows, slots, lengths, head_dim**-0.5)
    close(attend(pages, query, page_rows, slots, lengths), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 15, 16, 17, 255, 256, 257, 300, 699, 700, 5000])
def test_a_window_reads_and_counts_the_last_keys_alone(window: int, dtype: torch.dtype) -> None:
    """Windows that begin around page and segment borders; every key before them is NaN."""
    lengths = np.array([1, 15, 16, 17, 255, 256, 257, 512, 513, 700], np.int32)
    pages = random_pages(len(lengths) * 44, 2, 16, 24, dtype)
    page_rows = shuffled_rows(len(lengths), 44)
    query = torch.randn(len(lengths), 6, 24).to(dtype)
    slots = np.arange(len(lengths), dtype=np.int32)
    expected = ref.paged_attention(pages, query, page_rows, slots, lengths, 24**-0.5, window)
    for slot, length in enumerate(lengths.tolist()):
        start = max(length - window, 0)
        pages[page_rows[slot, : start // 16]] = float("nan")
        pages[page_rows[slot, start // 16], :, :, : start % 16] = float("nan")
    close(attend(pages, query, page_rows, slots, lengths, window), expected, dtype)


@pytest.mark.parametrize("page_size", [2, 3, 4, 32, 128])
def test_attention_for_any_page_size(page_size: int) -> None:
    lengths = np.array([page_size, page_size + 1, 300], np.int32)
    per_slot = -(-300 // page_size)
    pages = random_pages(3 * per_slot, 3, page_size, 64, torch.float32)
    page_rows = shuffled_rows(3, per_slot)
    query = torch.randn(3, 9, 64)
    slots = np.array([2, 0, 1], np.int32)
    expected = ref.paged_attention(pages, query, page_rows, slots, lengths, 0.125)
    close(attend(pages, query, page_rows, slots, lengths), expected, torch.float32)


def test_float32_rows_over_bfloat16_pages() -> None:
    pages = random_pages(8, 2, 16, 32, torch.bfloat16)
    page_rows = shuffled_rows(1, 8)
    query = torch.randn(1, 4, 32)
    slots, lengths = np.array([0], np.int32), np.array([100], np.int32)
    expected = ref.paged_attention(pages, query, page_rows, slots, lengths, 32**-0.5)
    close(attend(pages, query, page_rows, slots, lengths), expected, torch.float32)


def test_scores_far_apart_do_not_overflow() -> None:
    """One key dominates by hundreds: the weights are 1 and 0, and nothing becomes NaN or infinite."""
    pages = random_pages(40, 1, 16, 64, torch.float32)
    page_rows = np.arange(40, dtype=np.int32)[None]
    pages[20, 0, 0, 5] = 0.0
    pages[20, 0, 0, 5, 0] = 5000.0
    query = torch.zeros(1, 2, 64)
    query[0, :, 0] = torch.tensor([4.0, -4.0])
    slots, lengths = np.array([0], np.int32), np.array([640], np.int32)
    out = attend(pages, query, page_rows, slots, lengths)
    torch.testing.assert_close(out[0, 0], pages[20, 1, 0, 5], atol=1e-6, rtol=1e-6)
    close(out, ref.paged_attention(pages, query, page_rows, slots, lengths, 0.125), torch.float32)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """Bit for bit: alone, or beside others, in another order."""
    lengths = np.array([700, 3, 256, 511], np.int32)
    pages = random_pages(4 * 44, 3, 16, 64, torch.float32)
    page_rows = shuffled_rows(4, 44)
    query = torch.randn(4, 9, 64)
    slots = np.arange(4, dtype=np.int32)
    for window in (0, 300):
        together = attend(pages, query, page_rows, slots, lengths, window)
        for order in ([0], [3, 2, 1, 0], [2, 0]):
            part = attend(pages, query[order], page_rows, slots[order], lengths[order], window)
            assert torch.equal(part, together[order])


@pytest.mark.parametrize(
    ("slot_pages", "length"), [([0, 1, -1, -1], 33), ([0, 1, 2, 99], 64), ([0, 1, 2, 3], 65), ([0, 1, 2, 3], 0)]
)
def test_a_row_that_its_pages_do_not_cover_is_refused(slot_pages: list[int], length: int) -> None:
    pages = random_pages(8, 1, 16, 16, torch.float32)
    with pytest.raises(InvalidArgumentError, match=f"slot 0 has length {length}.*grow the row"):
        attend(
            pages,
            torch.randn(1, 2, 16),
            np.array([slot_pages], np.int32),
            np.array([0], np.int32),
            np.array([length], np.int32),
        )


@pytest.mark.parametrize("page_dtype", DTYPES)
@pytest.mark.parametrize("row_dtype", DTYPES)
def test_write_then_gather_equals_the_reference(page_dtype: torch.dtype, row_dtype: torch.dtype) -> None:
    """Rows are columns of a wider matrix; negative offsets are skipped; everything else stays as it was."""
    pages = random_pages(7, 2, 4, 20, page_dtype)
    expected = pages.clone()
    rows = torch.randn(9, 100).to(row_dtype)
    key, value = rows[:, 20:60].unflatten(1, (2, 20)), rows[:, 60:].unflatten(1, (2, 20))
    offsets = np.array([27, 0, -1, 5, 6, 13, 26, -1, 4], np.int64)
    write_kv(pages, key, value, offsets)
    ref.write_kv(expected, key, value, offsets)
    assert torch.equal(pages, expected)
    page_ids = np.array([6, 0, 3, 1], np.int32)
    for length in (1, 4, 15, 16):
        assert torch.equal(gather_kv(pages, page_ids, length), ref.gather_kv(pages, page_ids, length))


def test_write_beyond_the_last_page_is_refused_and_writes_nothing() -> None:
    pages = random_pages(2, 1, 4, 8, torch.float32)
    before = pages.clone()
    rows = torch.randn(2, 1, 8)
    with pytest.raises(InvalidArgumentError, match="offset 8 is beyond the last place 7"):
        write_kv(pages, rows, rows, np.array([0, 8], np.int64))
    assert torch.equal(pages, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [7, 48, 576])
def test_rms_norm_equals_the_reference(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, weight = (torch.randn(65, width) * 3).to(dtype), torch.rand(width) + 0.5
    out = torch.empty_like(x)
    rms_norm(x, weight, 1e-5, out)
    close(out, ref_rows.rms_norm(x, weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(6, 6), (20, 20), (64, 64), (20, 6), (96, 64)])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_equals_the_reference(head_dim: int, rotary_dim: int, normed: bool, dtype: torch.dtype) -> None:
    """Query and key heads are rotated, value heads stay as they are."""
    torch.manual_seed(1)
    rows = torch.randn(9, 8 * head_dim).to(dtype)
    turn = torch.rand(9, rotary_dim // 2) * 20
    angles = torch.stack((turn.cos(), turn.sin()))
    norms = [torch.rand(head_dim) + 0.5 if normed else None for _ in range(2)]
    heads = rows.view(9, 8, head_dim).float()
    expected = [heads[:, :4], heads[:, 4:6]]
    if normed:
        expected = [ref_rows.rms_norm(part, norm, 1e-5) for part, norm in zip(expected, norms, strict=True)]
    result = rows.clone()
    rope_(
        result, angles, num_heads=4, num_kv_heads=2, head_dim=head_dim, query_norm=norms[0], key_norm=norms[1], eps=1e-5
    )
    result = result.view(9, 8, head_dim)
    close(result[:, :4], ref_rows.rope(expected[0], angles), dtype)
    close(result[:, 4:6], ref_rows.rope(expected[1], angles), dtype)
    assert torch.equal(result[:, 6:], rows.view(9, 8, head_dim)[:, 6:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 80, 1536])
def test_silu_mul_equals_the_reference(width: int, dtype: torch.dtype) -> None:
    """Up to gates so large that exp overflows."""
    torch.manual_seed(1)
    gate_up = (torch.randn(17, 2 * width) * 30).to(dtype)
    gate_up[0, :4] = torch.tensor([500.0, -500.0, 88.5, -88.5])
    out = torch.empty(17, width, dtype=dtype)
    silu_mul(gate_up, out)
    close(out, ref_rows.silu_mul(gate_up), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 80, 1536])
def test_gelu_mul_equals_the_reference(width: int, dtype: torch.dtype) -> None:
    """Up to gates so large that exp overflows; gate and up are columns of wider matrices."""
    torch.manual_seed(1)
    both, other = (torch.randn(17, 2 * width) * 3).to(dtype), torch.randn(17, width + 3).to(dtype)
    both[0, :4] = torch.tensor([500.0, -500.0, 9.0, -9.0])
    out = torch.empty(17, width, dtype=dtype)
    for gate, up in ((both[:, :width], both[:, width:]), (both[:, width:], other[:, 3:])):
        gelu_mul(gate, up, out)
        close(out, ref_rows.gelu_mul(gate, up), dtype)
    expected = torch.nn.functional.gelu(both[:, :width].float(), approximate="tanh")
    close(ref_rows.gelu_mul(both[:, :width].float(), torch.ones(17, width)), expected, torch.float32)


def test_gelu_mul_refuses_rows_that_are_not_contiguous() -> None:
    rows = torch.randn(4, 12)
    with pytest.raises(InvalidArgumentError, match=r"up is \(4, 6\).*strides \(12, 2\)"):
        gelu_mul(rows[:, :6], rows[:, ::2], torch.empty(4, 6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, SKINNY_ROWS, SKINNY_ROWS + 1, 70])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_equals_torch(num_rows: int, accumulate: bool, with_bias: bool, dtype: torch.dtype) -> None:
    """Both roads, widths that fill no vector and no tile."""
    torch.manual_seed(1)
    x, weight = torch.randn(num_rows, 83).to(dtype), torch.randn(46, 83).to(dtype) / 9
    bias = torch.randn(46).to(dtype) if with_bias else None
    out = torch.randn(num_rows, 46).to(dtype)
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    expected = expected + out.double() if accumulate else expected
    result = linear(x, weight, out, bias=bias, accumulate=accumulate)
    close(result, expected, dtype)
    assert result.dtype == dtype
    assert not accumulate or result is out
    if not accumulate:
        wide = torch.empty(num_rows, 46)
        wide = linear(x, weight, wide, bias=bias)
        assert wide.dtype == torch.float32
        close(wide, expected, dtype)


def test_few_rows_do_not_depend_on_their_neighbours() -> None:
    torch.manual_seed(1)
    num_rows = SKINNY_ROWS
    x, weight = torch.randn(num_rows, 96), torch.randn(50, 96)
    together, alone = torch.empty(num_rows, 50), torch.empty(1, 50)
    linear(x, weight, together)
    for row in range(num_rows):
        linear(x[row : row + 1], weight, alone)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("level", ["0", "1"])
def test_every_instruction_set_passes(level: str) -> None:
    """The same tests with a lesser instruction set, chosen before the process starts."""
    if "EDGELLM_CPU_ISA" in os.environ:
        pytest.skip("already inside the lesser instruction set")
    if ["portable", "avx2", "avx512"].index(_ops.isa_name()) <= int(level):
        pytest.skip(f"this machine's best instruction set is {_ops.isa_name()}")
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__))]
    done = subprocess.run(tests, env=os.environ | {"EDGELLM_CPU_ISA": level}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
