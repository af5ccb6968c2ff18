"""fp8 pages: each token of a head has its own scale, which lies in the page."""

from __future__ import annotations

import pytest
import torch

from edgellm.kernels.ref.fp8_pages import (
    E4M3_MAX,
    dequantise_pages,
    dequantise_rows,
    head_block_bytes,
    quantise_pages,
    quantise_rows,
    split_pages,
)


def test_the_largest_value_of_a_row_is_exact_to_its_scale_and_the_rest_to_a_sixteenth() -> None:
    rows = torch.randn(50, 64) * torch.logspace(-20, 20, 50)[:, None]
    values, scales = quantise_rows(rows)
    amax = rows.abs().amax(-1)
    torch.testing.assert_close(scales * E4M3_MAX, amax)
    back = dequantise_rows(values, scales)
    torch.testing.assert_close(back.abs().amax(-1), amax)
    # Half a step of 3 mantissa bits; below 2^-6 (denormal) half of 2^-9.
    assert bool(((back - rows).abs() <= rows.abs() / 16 + scales[:, None] * 2**-10).all())


@pytest.mark.parametrize("value", [0.0, 1e-40, 2.0**-101])
def test_rows_without_a_scale_are_zeros_of_scale_one(value: float) -> None:
    values, scales = quantise_rows(torch.full((2, 8), value))
    assert scales.tolist() == [1.0, 1.0]
    assert not dequantise_rows(values, scales).any()


def test_nan_stays_nan_and_leaves_its_neighbours_alone() -> None:
    row = torch.tensor([[1.0, float("nan"), -2.0, 0.5]])
    back = dequantise_rows(*quantise_rows(row))
    assert back.isnan().tolist() == [[False, True, False, False]]
    torch.testing.assert_close(back[0, [0, 2, 3]], row[0, [0, 2, 3]])


def test_layout_of_a_head_is_its_values_then_its_scales() -> None:
    pages = torch.randn(3, 2, 4, 16, 8)
    stored = quantise_pages(pages)
    assert stored.shape == (3, 2, 4, 16 * 8 + 4 * 16)
    assert stored.shape[-1] == head_block_bytes(16, 8)
    values, scales = quantise_rows(pages)
    assert torch.equal(stored[..., :128], values.flatten(-2))
    assert torch.equal(stored[..., 128:].contiguous().view(torch.float32), scales)
    assert torch.equal(dequantise_pages(stored, 16, 8), dequantise_rows(values, scales))


def test_split_pages_are_views() -> None:
    stored = quantise_pages(torch.randn(2, 2, 1, 16, 4))
    values, scales = split_pages(stored, 16, 4)
    values[1, 0, 0, 3], scales[1, 0, 0, 3] = 0x38, 2.5  # 0x38 is 1.0
    assert dequantise_pages(stored, 16, 4)[1, 0, 0, 3].tolist() == [2.5] * 4


def test_a_token_is_stored_alike_whatever_stands_beside_it() -> None:
    rows = torch.randn(16, 8)
    values, scales = quantise_rows(rows)
    for token in range(16):
        alone = quantise_rows(rows[token])
        assert torch.equal(alone[0], values[token])
        assert torch.equal(alone[1], scales[token])
