"""The tensors of quantised checkpoints as numbers: nibbles of AWQ and GPTQ words, scales of e4m3 blocks.

Words are int32, eight numbers of 4 bits from the lowest bits up.
"""

from __future__ import annotations

import torch

# AWQ: bits 4 * i of a word are column _AWQ_ORDER[i] of eight; here the inverse.
_AWQ_PLACE = [0, 4, 1, 5, 2, 6, 3, 7]


def nibbles(words: torch.Tensor) -> torch.Tensor:
    """(..., N) int32 to (..., N, 8) uint8 of 0 to 15, lowest bits first."""
    pairs = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).view(*words.shape, 8)


def awq_columns(words: torch.Tensor) -> torch.Tensor:
    """(R, N / 8) int32 of an AWQ file to (N, R) uint8: weights (R columns of the matrix) or zeros (R groups)."""
    return nibbles(words)[..., _AWQ_PLACE].view(words.shape[0], -1).T.contiguous()


def gptq_weights(words: torch.Tensor) -> torch.Tensor:
    """(K / 8, N) int32 to (N, K) uint8."""
    return nibbles(words).permute(1, 0, 2).reshape(words.shape[1], -1)


def gptq_zeros(words: torch.Tensor, offset: int) -> torch.Tensor:
    """(groups, N / 8) int32 to (N, groups) uint8; `offset` is added modulo 16."""
    return (nibbles(words).view(words.shape[0], -1).T.contiguous() + offset) & 15


def block_scales(scales: torch.Tensor, rows: int, block_rows: int) -> torch.Tensor:
    """Scales of blocks (N / block_rows, groups), rows (N, groups) or (N,), or the matrix, to (N, groups) float32."""
    scales = scales.float()
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(rows, 1)
    if block_rows > 1:
        return scales.repeat_interleave(block_rows, 0)[:rows]
    return scales.reshape(rows, -1)


def by_columns(groups: torch.Tensor, group_columns: int, columns: int) -> torch.Tensor:
    """(N, groups) to (N, K): what each column has."""
    if groups.shape[1] == 1:
        return groups.expand(-1, columns)
    return groups.repeat_interleave(group_columns, 1)[:, :columns]
