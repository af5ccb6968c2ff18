"""The CUDA lines of `edgellm doctor`, on machines with and without a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from edgellm import doctor, doctor_cuda, envs
from edgellm.kernels.cu import spec


def lines() -> dict[str, doctor.Check]:
    return {check.name: check for check in doctor.run_checks()}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_reason_is_a_note() -> None:
    found = lines()
    assert found["cuda"].status is doctor.Status.NOTE
    assert found["cuda"].detail.startswith(f"not used: torch {torch.__version__} sees no CUDA device")
    assert found["cuda kernels"].status is doctor.Status.NOTE


def test_a_gpu_that_is_there_and_cannot_be_used_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor_cuda, "why_not_used", lambda: "it is too old")
    check = doctor._cuda()
    assert (check.status, check.detail) == (doctor.Status.FAILED, "not used: it is too old")


@pytest.mark.parametrize(
    ("error", "status"), [(1e-7, doctor.Status.OK), (1e-3, doctor.Status.FAILED), (float("nan"), doctor.Status.FAILED)]
)
def test_wrong_numbers_fail(monkeypatch: pytest.MonkeyPatch, error: float, status: doctor.Status) -> None:
    monkeypatch.setattr(doctor_cuda, "why_not_used", lambda: "")
    monkeypatch.setattr(doctor_cuda, "self_test_error", lambda: error)
    monkeypatch.setattr(doctor_cuda, "describe_kernels", lambda: "3 kernels")
    check = doctor._cuda_kernels()
    assert check.status is status
    assert check.path == (str(envs.kernel_cache()) if status is doctor.Status.OK else "")


def test_versions_are_read_from_the_drivers_number() -> None:
    assert [doctor_cuda._version(number) for number in (12080, 13000, 13010)] == ["12.8", "13.0", "13.1"]


@pytest.mark.gpu
def test_on_a_gpu_both_lines_are_good() -> None:
    found = lines()
    assert found["cuda"].status is doctor.Status.OK, found["cuda"].detail
    assert torch.cuda.get_device_name() in found["cuda"].detail
    assert found["cuda kernels"].status is doctor.Status.OK, found["cuda kernels"].detail
    variants = sum(len(one.variants) for one in spec.registry())
    assert f"{len(spec.registry())} kernels in {variants} variants" in found["cuda kernels"].detail
