"""What the tests of the row-wise kernels share: launches recorded without a GPU, tolerances, captured graphs."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from edgellm.kernels.cu import loader
from edgellm.kernels.cu.launch import LaunchConfig
from edgellm.kernels.cu.spec import KernelSpec

ROW_TYPES = (torch.float32, torch.float16, torch.bfloat16)
# Share of 16-bit results that may differ by one rounding: sums in another order, other roundings inside exp and sin.
ROUNDED_OTHERWISE = 0.02


@dataclass(slots=True)
class Launch:
    """One launch that a wrapper asked for; `params` is a copy by field name."""

    spec: KernelSpec
    key: tuple[Hashable, ...]
    config: LaunchConfig
    params: dict[str, Any]


@dataclass(slots=True)
class RecordedKernel:
    spec: KernelSpec
    key: tuple[Hashable, ...]
    launches: list[Launch] = field(default_factory=list)

    def launch(self, config: LaunchConfig, params: ctypes.Structure, *, pdl: bool = False) -> None:
        assert isinstance(params, self.spec.params)
        self.spec.expression(self.key)  # raises for a variant that does not exist
        fields = {name: getattr(params, name) for name, *_ in self.spec.params._fields_}
        self.launches.append(Launch(self.spec, self.key, config, fields))


def record_launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Let wrappers take CPU tensors, and record what they would launch."""
    launches: list[Launch] = []
    monkeypatch.setattr(loader, "kernel", lambda spec, key: RecordedKernel(spec, key, launches))
    for name, module in list(sys.modules.items()):
        if name.startswith("edgellm.kernels.cu.") and hasattr(module, "check_device"):
            monkeypatch.setattr(module, "check_device", lambda _name, _tensor: None)
    return launches


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Float32 to 1e-6; 16-bit types to one rounding, and most results to the last bit."""
    actual, expected = actual.cpu(), expected.cpu()
    if actual.dtype == torch.float32:
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
        return
    step = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=step, atol=1e-6, equal_nan=True)
    both_nan = actual.isnan() & expected.isnan()
    share = float(((actual != expected) & ~both_nan).float().mean()) if actual.numel() else 0.0
    assert share <= ROUNDED_OTHERWISE, f"{share:.1%} of the results are rounded otherwise"


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal, NaN included."""
    actual, expected = actual.cpu(), expected.cpu()
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """`run` as a CUDA graph, after one run that compiles what it needs."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def strided_rows(rows: int, width: int, stride: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """(rows, width) of normal numbers whose rows are `stride` elements apart."""
    return torch.randn(rows, stride, device=device).to(dtype)[:, :width]
