"""Every CUDA kernel's declaration against its source, its wrapper and its reference; no GPU needed."""

from __future__ import annotations

import ctypes
import importlib
import inspect
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from device_kernel import ScaleRowsParams, scale_rows_spec

from edgellm.errors import InvalidArgumentError, KernelError
from edgellm.kernels.cu import spec as specs
from edgellm.kernels.cu.launch import device_limits
from edgellm.kernels.cu.loader import architecture
from edgellm.kernels.cu.sources import read_source
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import check_rows, check_shape, kv_layout, type_name

REGISTRY = specs.registry()
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def struct_fields(text: str, name: str) -> list[str]:
    """Names of a plain struct's fields in a device source, in order."""
    found = re.search(rf"struct\s+{name}\s*\{{(.*?)\n\}};", COMMENT.sub("", text), re.DOTALL)
    assert found is not None, f"no struct {name}"
    declarators = [part for line in found[1].split(";") for part in line.split(",") if part.strip()]
    return [re.sub(r"\[.*\]", "", part).replace("*", " ").split()[-1] for part in declarators]


def whole_text(spec: KernelSpec) -> str:
    source = read_source(spec.source_path)
    return "\n".join((source.text, *(text for _, text in source.headers)))


def public_functions(module_name: str) -> dict[str, list[str]]:
    """Parameter names of the functions that a module defines."""
    module = importlib.import_module(module_name)
    return {
        name: list(inspect.signature(value).parameters)
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module_name and not name.startswith("_")
    }


def test_the_registry_finds_the_ops() -> None:
    assert {"rms_norm", "rope_kv_write"} <= {spec.name for spec in REGISTRY}


def test_every_device_source_belongs_to_a_kernel() -> None:
    used = {spec.source_path for spec in REGISTRY}
    assert sorted(path.name for path in specs.FOLDER.glob("*.cu") if path not in used) == []


@pytest.mark.parametrize("spec", REGISTRY, ids=lambda spec: spec.name)
def test_struct_fields_are_those_of_the_source_without_padding(spec: KernelSpec) -> None:
    text = whole_text(spec)
    assert struct_fields(text, spec.params_name) == [field[0] for field in spec.params._fields_]
    sizes = sum(getattr(spec.params, field[0]).size for field in spec.params._fields_)
    assert ctypes.sizeof(spec.params) - sizes in (0, 4), "hidden padding: order pointers, int64, then 4-byte fields"
    assert re.search(rf"\b{spec.entry}\s*\(\s*const\s+__grid_constant__\s+{spec.params_name}\b", text)


@pytest.mark.parametrize("spec", REGISTRY, ids=lambda spec: spec.name)
def test_variants_are_distinct(spec: KernelSpec) -> None:
    keys = [variant.key for variant in spec.variants]
    arguments = [variant.arguments for variant in spec.variants]
    assert spec.variants
    assert len(set(keys)) == len(keys)
    assert len(set(arguments)) == len(arguments)


@pytest.mark.parametrize("spec", REGISTRY, ids=lambda spec: spec.name)
def test_sources_use_device_headers_only_and_no_fast_math(spec: KernelSpec) -> None:
    text = whole_text(spec)
    foreign = set(re.findall(r"#\s*include\s*<([^>]+)>", text)) - {"cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h"}
    assert not foreign, "NVRTC has no host headers"
    assert "use_fast_math" not in text


@pytest.mark.parametrize("op", specs.ops())
def test_wrapper_and_reference_have_one_signature(op: str) -> None:
    wrappers = public_functions(f"edgellm.kernels.cu.{op}")
    references = public_functions(f"edgellm.kernels.ref.{op}")
    shared = wrappers.keys() & references.keys()
    assert shared, f"no function of cu/{op}.py has its reference in ref/{op}.py"
    for name in shared:
        assert wrappers[name] == references[name], name


def test_an_unknown_variant_is_refused_with_the_list() -> None:
    with pytest.raises(KernelError) as caught:
        scale_rows_spec().expression(("int8",))
    message = str(caught.value)
    assert message.startswith("kernel scale_rows has no variant ('int8',)")
    assert "('float',), ('__half',), ('__nv_bfloat16',)" in message


def test_expressions_are_qualified_names() -> None:
    assert scale_rows_spec().expression(("__half",)) == "edgellm::scale_rows<__half, 128>"
    plain = KernelSpec("plain", "plain", ScaleRowsParams, "ScaleRowsParams", (Variant((), ""),))
    assert plain.expression(()) == "edgellm::plain"
    assert plain.source_path == specs.FOLDER / "plain.cu"


def test_architectures_outside_the_bounds_are_refused() -> None:
    hopper = KernelSpec("h", "h", ScaleRowsParams, "P", (Variant((), ""),), min_arch=90, max_arch=99, arch_suffix="a")
    assert architecture(hopper, 90) == "sm_90a"
    with pytest.raises(KernelError, match="kernel h runs on compute capability 90 to 99; this device has 87"):
        architecture(hopper, 87)
    with pytest.raises(KernelError, match="this device has 120"):
        architecture(hopper, 120)
    with pytest.raises(KernelError, match="80 and newer; this device has 75"):
        architecture(scale_rows_spec(), 75)


def test_a_header_that_is_missing_is_named(tmp_path: Path) -> None:
    source = tmp_path / "broken.cu"
    source.write_text('#include "nowhere.cuh"\n')
    with pytest.raises(KernelError, match=r"nowhere\.cuh, included by broken\.cu, cannot be read"):
        read_source(source)


def test_headers_are_found_through_headers(tmp_path: Path) -> None:
    (tmp_path / "a.cuh").write_text('#include "b.cuh"\n#include "types.cuh"\n')
    (tmp_path / "b.cuh").write_text('// leaf, and a loop\n#include "a.cuh"\n')
    source = tmp_path / "x.cu"
    source.write_text('#include "a.cuh"\n')
    assert [name for name, _ in read_source(source).headers] == ["a.cuh", "b.cuh", "types.cuh"]


def test_two_specs_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs, "specs_of", lambda op: (scale_rows_spec(),))
    monkeypatch.setattr(specs, "ops", lambda: ("one", "two"))
    with pytest.raises(KernelError, match=r"two kernels are named scale_rows \(two exports the second\)"):
        specs.registry()


def test_element_types() -> None:
    assert type_name(torch.bfloat16) == "__nv_bfloat16"
    with pytest.raises(InvalidArgumentError, match=r"torch\.int64 is no element type"):
        type_name(torch.int64)


def test_rows_are_checked_before_their_device() -> None:
    good = torch.zeros(3, 8)
    with pytest.raises(InvalidArgumentError, match="x is on cpu; a CUDA tensor is needed"):
        check_rows("x", good, dtype=torch.float32, rows=3, width=8, contiguous=True)
    for bad in (good.T, good[:, ::2], good[0], good.half(), good[:2]):
        with pytest.raises(InvalidArgumentError, match=r"x is .*; \(3, 8\) torch\.float32, rows that do not overlap"):
            check_rows("x", bad, dtype=torch.float32, rows=3, width=8)
    with pytest.raises(InvalidArgumentError, match=r"\(3, >= 9\)"):
        check_rows("x", good, rows=3, min_width=9)
    with pytest.raises(InvalidArgumentError, match="x is on cpu"):
        check_rows("x", torch.zeros(3, 16)[:, :8], dtype=(torch.float16, torch.float32), rows=3, width=8)


def test_shapes_may_leave_a_length_open() -> None:
    table = torch.zeros(4, 7, dtype=torch.int32)
    with pytest.raises(InvalidArgumentError, match="table is on cpu"):
        check_shape("table", table, (4, -1), torch.int32)
    for bad in (table[0], table.long(), table.T, table[:3]):
        with pytest.raises(InvalidArgumentError, match=r"\(4, -1\) torch\.int32, contiguous, is needed"):
            check_shape("table", bad, (4, -1), torch.int32)


def test_layout_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgellm.kernels.cu.tensors.check_device", lambda name, tensor: None)
    plain = kv_layout(torch.zeros(5, 2, 3, 16, 64, dtype=torch.bfloat16))
    assert (plain.kv_heads, plain.page_size, plain.head_dim, plain.dtype) == (3, 16, 64, torch.bfloat16)
    assert (plain.head_bytes, plain.page_bytes, plain.is_fp8) == (16 * 64 * 2, 2 * 3 * 16 * 64 * 2, False)
    packed = kv_layout(torch.zeros(5, 2, 3, 32 * 68, dtype=torch.uint8), 64)
    assert (packed.kv_heads, packed.page_size, packed.head_dim, packed.is_fp8) == (3, 32, 64, True)
    assert packed.head_bytes == 32 * 64 + 4 * 32


@pytest.mark.parametrize(
    ("pages", "head_dim"),
    [
        (torch.zeros(5, 2, 3, 24, 64), None),
        (torch.zeros(5, 1, 3, 16, 64), None),
        (torch.zeros(5, 2, 3, 16, 64), 128),
        (torch.zeros(5, 2, 3, 16, 64, dtype=torch.int32), None),
        (torch.zeros(5, 2, 3, 64, 16).transpose(3, 4), None),
        (torch.zeros(5, 2, 3, 16 * 64, dtype=torch.uint8), 64),
        (torch.zeros(5, 2, 3, 24 * 68, dtype=torch.uint8), 64),
    ],
)
def test_other_pages_are_refused(pages: torch.Tensor, head_dim: int | None) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^pages is .* is needed$"):
        kv_layout(pages, head_dim)


def test_packed_pages_do_not_show_their_head_size() -> None:
    with pytest.raises(InvalidArgumentError, match="pass head_dim"):
        kv_layout(torch.zeros(5, 2, 3, 32 * 68, dtype=torch.uint8))


def test_limits_are_those_of_a_cuda_device() -> None:
    with pytest.raises(InvalidArgumentError, match="device is cpu; kernels run on a CUDA device"):
        device_limits(torch.device("cpu"))
