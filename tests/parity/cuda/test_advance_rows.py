"""Inputs of a decode step that move on to the next one on CUDA, against the reference; the reference by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from row_ops import record_launches

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu.advance_rows import advance_rows, launch_config
from edgellm.kernels.ref import advance_rows as ref

NAMES = ("tokens", "slots", "token_ids", "positions", "past_len", "lengths")


def make_case(rows: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    case = {name: torch.randint(0, 1000, (rows,), dtype=torch.int32, generator=generator) for name in NAMES}
    case["slots"] = torch.where(torch.rand(rows, generator=generator) < 0.3, -1, case["slots"]).int()
    return {name: vector.to(device) for name, vector in case.items()}


def test_reference() -> None:
    columns = ([5, 6, 7], [2, -1, 0], [1, 0, 3], [10, 0, 30], [10, 0, 29], [11, 0, 30])
    case = {name: torch.tensor(values, dtype=torch.int32) for name, values in zip(NAMES, columns, strict=True)}
    ref.advance_rows(**case)
    assert case["token_ids"].tolist() == [5, 0, 7]
    assert case["positions"].tolist() == [11, 0, 31]
    assert case["past_len"].tolist() == [11, 0, 30]
    assert case["lengths"].tolist() == [12, 0, 31]


def test_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    case = make_case(129)
    advance_rows(**case)
    advance_rows(**make_case(0))
    assert [launch.config for launch in launches] == [launch_config(129)]
    assert launches[0].config.grid == (2, 1, 1)
    assert launches[0].params["num_rows"] == 129
    assert launches[0].params["lengths"] == case["lengths"].data_ptr()


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize("bad", [torch.zeros(3, dtype=torch.int32), torch.zeros(4), torch.zeros(2, 2).int()])
def test_bad_arguments(monkeypatch: pytest.MonkeyPatch, name: str, bad: torch.Tensor) -> None:
    launches = record_launches(monkeypatch)
    arguments: dict[str, Any] = make_case(4) | {name: bad}
    with pytest.raises(InvalidArgumentError, match=f"{name} is"):
        advance_rows(**arguments)
    assert not launches


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 128, 300])
def test_device(rows: int) -> None:
    expected, case = make_case(rows), make_case(rows, "cuda")
    for _ in range(3):
        ref.advance_rows(**expected)
        advance_rows(**case)
    for name in NAMES:
        assert torch.equal(case[name].cpu(), expected[name]), name


@pytest.mark.gpu
def test_sanitizer_advance_rows() -> None:
    advance_rows(**make_case(5, "cuda"))
    torch.cuda.synchronize()
