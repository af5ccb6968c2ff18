"""The compile check of CUDA kernels: the unit it generates, and how it reads ptxas' report.  No compiler needed."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

pytest.importorskip("torch")
cuda_check = pytest.importorskip("cuda_check", reason="the tools are not beside an installed package")

from device_kernel import scale_rows_spec  # noqa: E402 - needs torch

from edgellm.kernels.cu.spec import KernelSpec, Variant  # noqa: E402

REPORT = """
ptxas info    : 16 bytes gmem, 32 bytes cmem[4]
ptxas info    : Compiling entry function '_Zsecond' for 'sm_87'
ptxas info    : Function properties for _Zsecond
    40 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Function properties for _Zhelper
    8 bytes stack frame, 1 bytes spill stores, 2 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 400 bytes smem, 384 bytes cmem[0]
ptxas info    : Compile time = 41.974 ms
ptxas info    : Compiling entry function '_Zfirst' for 'sm_87'
ptxas info    : Function properties for _Zfirst
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 20 registers, used 0 barriers, 384 bytes cmem[0]
"""
PTX = """
.global .align 8 .u64 edgellm_variant_0 = _Zfirst;
.global .align 8 .u64 edgellm_variant_1 = _Zsecond;
"""


def job(variants: int = 2) -> cuda_check.Job:
    spec = scale_rows_spec()
    return cuda_check.Job(spec, spec.variants[:variants], 87)


def test_each_variant_gets_its_own_numbers() -> None:
    assert cuda_check.usages_of(job(), REPORT, cuda_check.parse_names(PTX)) == (
        cuda_check.Usage("scale_rows", "float, 128", "sm_87", 20, 0, 0, 0),
        cuda_check.Usage("scale_rows", "__half, 128", "sm_87", 128, 35, 40, 400),
    )


def test_a_variant_without_a_report_is_an_error() -> None:
    with pytest.raises(KeyError):
        cuda_check.usages_of(job(), REPORT.replace("_Zfirst", "_Zother"), cuda_check.parse_names(PTX))


def test_spills_are_bad_unless_they_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    usages = cuda_check.usages_of(job(), REPORT, cuda_check.parse_names(PTX))
    assert [use.arguments for use in cuda_check.spilled(usages)] == ["__half, 128"]
    monkeypatch.setitem(cuda_check.SPILLS_ALLOWED, ("scale_rows", "__half, 128"), "measured: faster")
    assert cuda_check.spilled(usages) == []


def test_the_unit_compares_every_field_and_instantiates_every_variant() -> None:
    text = cuda_check.unit_text(job(), offsets=True)
    assert "static_assert(offsetof(edgellm::ScaleRowsParams, factor) == 24, " in text
    assert "static_assert(sizeof(edgellm::ScaleRowsParams::columns) == 8, " in text
    assert "static_assert(sizeof(edgellm::ScaleRowsParams) == 32, " in text
    assert "Kind<decltype(edgellm::ScaleRowsParams::in)>::value == 'p'" in text
    assert "Kind<decltype(edgellm::ScaleRowsParams::factor)>::value == 'f'" in text
    assert "Kind<decltype(edgellm::ScaleRowsParams::waits)>::value == 'i'" in text
    assert "(*edgellm_variant_1)(edgellm::ScaleRowsParams) = &edgellm::scale_rows<__half, 128>;" in text
    assert "offsetof" not in cuda_check.unit_text(job(), offsets=False)


def test_kernels_are_compiled_only_where_they_run() -> None:
    variants = tuple(Variant((number,), str(number)) for number in range(11))
    hopper = KernelSpec("h", "h", ctypes.Structure, "P", variants, min_arch=90, max_arch=99, arch_suffix="a")
    jobs = cuda_check.jobs_of([scale_rows_spec(), hopper], (80, 87, 90, 120))
    assert [one.target for one in jobs if one.spec.name == "scale_rows"] == ["sm_80", "sm_87", "sm_90", "sm_120"]
    of_hopper = [one for one in jobs if one.spec is hopper]
    assert [one.target for one in of_hopper] == ["sm_90a", "sm_90a"]
    assert [variant for one in of_hopper for variant in one.variants] == list(variants)


def test_a_partial_run_keeps_the_other_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda_check, "TABLE", tmp_path / "build" / "kernels.txt")
    rows = (("a", "x", "sm_87", 9), ("b", "x", "sm_87", 8), ("b", "y", "sm_87", 7))
    other, old, new = (cuda_check.Usage(*row, 0, 0, 0) for row in rows)
    cuda_check.write_table([other, old], partial=False)
    cuda_check.write_table([new], partial=True)
    lines = cuda_check.TABLE.read_text().splitlines()[1:]
    assert [line.split()[:3] for line in lines] == [["a", "sm_87", "9"], ["b", "sm_87", "7"]]
    cuda_check.write_table([new], partial=False)
    assert len(cuda_check.TABLE.read_text().splitlines()) == 2


def test_a_wrong_struct_does_not_compile(tmp_path: Path) -> None:
    if cuda_check.choose_compiler()[0] != "nvcc":
        pytest.skip("needs nvcc")

    class Swapped(ctypes.Structure):
        _fields_ = (*scale_rows_spec().params._fields_[:3], ("waits", ctypes.c_int32), ("factor", ctypes.c_float))

    good = scale_rows_spec()
    bad = KernelSpec(good.name, good.entry, Swapped, good.params_name, good.variants[:1], good.source)
    error = cuda_check.nvcc_answer(cuda_check.Job(bad, bad.variants, 87)).error
    assert "ScaleRowsParams::factor is at byte 28 in ctypes" in error
    assert not cuda_check.nvcc_answer(cuda_check.Job(good, good.variants[:1], 87)).error
