"""What a start compiles beside the kernels of the model's steps: all that a request can ask for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from edgellm.kernels.cu import kv_storage, loader, tensors
from edgellm.kernels.cu import sample as sampling
from edgellm.kernels.cu.copy_pages import copy_pages
from edgellm.kernels.cu.rms_norm import rms_norm
from edgellm.kernels.cu.serving import serving_kernels
from edgellm.kernels.cu.table_update import table_update
from edgellm.models.device_ops import cuda_ops
from edgellm.sampling.device_sampler import DeviceSampler, kernel_ops
from edgellm.sampling.guidance import Guidance
from edgellm.sampling.params import SamplingParams
from edgellm.sampling.state import SamplingState
from edgellm.sampling.structured import StructuredOutput
from edgellm.testing.toy_tokenizer import ToyTokenizer

VOCAB = 300
GUIDANCE = Guidance(ToyTokenizer(VOCAB), VOCAB)
PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.0},
    "filtered": {"temperature": 1.0, "top_k": 5, "top_p": 0.5, "min_p": 0.1},
    "logprobs": {"temperature": 1.0, "logprobs": 3},
    "bias": {"temperature": 1.0, "top_p": 0.5, "logit_bias": {3: 1.0}, "logprobs": 2},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.5, "logprobs": 0},
    "grammar": {"temperature": 0.0, "structured": StructuredOutput(regex="[0-9]+")},
    "min_tokens": {"temperature": 1.0, "top_k": 3, "min_tokens": 2},
}

Noted = list[tuple[Any, Any]]


@pytest.fixture
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors may be launched on, as long as launches are only noted."""
    for module in (tensors, kv_storage, sampling):
        monkeypatch.setattr(module, "check_device", lambda name, tensor: None)
    monkeypatch.setattr(loader, "current_device", lambda: 0)
    monkeypatch.setattr(loader, "_kernels", {})


@pytest.fixture
def noted(nothing_loaded: None) -> Iterator[Noted]:
    """The kernels that the test launches."""
    with loader.collecting() as kernels:
        yield kernels


def places(kernels: Any) -> set[tuple[str, Any]]:
    return {(spec.name, key) for spec, key in kernels}


def sample(names: list[str]) -> None:
    states = []
    for name in names:
        params = SamplingParams(max_tokens=9, seed=1, **PARAMETERS[name])
        guide = None if params.structured is None else GUIDANCE.start(params.structured)
        states.append(SamplingState(params, [1, 2], VOCAB, {0}, guide=guide))
    sampler = DeviceSampler(torch.device("cpu"), kernel_ops())
    sampler.coming_back.layout((("d", (1024,)),)).device_bytes.zero_()  # what launches that do nothing leave
    sampler.sample(torch.randn(len(states), VOCAB), states)


@pytest.mark.parametrize("names", [*([name] for name in PARAMETERS), list(PARAMETERS)], ids="+".join)
def test_whatever_a_request_samples_by_is_compiled_at_start(names: list[str], noted: Noted) -> None:
    sample(names)
    assert noted
    assert places(noted) <= places(serving_kernels())


@pytest.mark.parametrize("columns", [1, 3, 4, 64])
def test_copies_of_pages_and_of_page_rows_are_compiled_at_start(columns: int, noted: Noted) -> None:
    ids = torch.zeros(1, dtype=torch.int32)
    copy_pages(torch.zeros(1, 2, 2, 1, 16, 8), ids, ids)
    table = torch.zeros(3, 64, dtype=torch.int32)
    table_update(table[:, :columns], ids, torch.zeros(1, columns, dtype=torch.int32))
    assert len(noted) == 2
    assert places(noted) <= places(serving_kernels())


def test_every_one_of_them_is_a_variant_of_its_kernel() -> None:
    kernels = serving_kernels()
    assert len(places(kernels)) == len(kernels)
    for spec, key in kernels:
        assert spec.expression(key)


@pytest.mark.usefixtures("nothing_loaded")
def test_a_start_compiles_what_it_launches_and_what_requests_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: Noted = []
    monkeypatch.setattr(loader, "warm_up", lambda wanted: compiled.extend(wanted))
    cuda_ops().prepare(partial(rms_norm, torch.ones(1, 64), torch.ones(64), 1e-6, torch.ones(1, 64)))
    names = [spec.name for spec, _ in compiled]
    assert names[0] == "rms_norm"
    assert places(compiled[1:]) == places(serving_kernels())
    assert len(compiled) == len(set(places(compiled)))
