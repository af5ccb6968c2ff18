"""What the wrappers of row-wise kernels share: their element types, and when rows allow 16-byte accesses."""

from __future__ import annotations

import torch

ROW_TYPES = (torch.float32, torch.float16, torch.bfloat16)
ACCESS_BYTES = 16
MAX_GRID_YZ = 65535  # blocks along y or z


def access_elements(dtype: torch.dtype) -> int:
    """Elements of one 16-byte access."""
    return ACCESS_BYTES // dtype.itemsize


def allows_vectors(*tensors: torch.Tensor | None) -> bool:
    """Whether every row of every tensor starts at a multiple of 16 bytes and is a multiple of 16 bytes long."""
    return all(tensor is None or _is_aligned(tensor) for tensor in tensors)


def _is_aligned(tensor: torch.Tensor) -> bool:
    size = tensor.element_size()
    row_stride = tensor.stride(0) if tensor.dim() > 1 and tensor.shape[0] > 1 else 0
    width = tensor.shape[-1]
    return not (tensor.data_ptr() % ACCESS_BYTES or row_stride * size % ACCESS_BYTES or width * size % ACCESS_BYTES)
