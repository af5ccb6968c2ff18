"""The way from a device source to a loaded kernel: keys, the cache on disk, NVRTC, threads, machines without a GPU."""

from __future__ import annotations

import ast
import importlib
import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from device_kernel import launch_config, scale_rows_spec
from test_core_stubs import built_names, declared_names

import edgellm.kernels
from edgellm.errors import KernelCompileError, KernelError
from edgellm.kernels import _launch
from edgellm.kernels.cu import compiler, loader
from edgellm.kernels.cu.compiler import Cubin
from edgellm.kernels.cu.cubin_cache import CubinCache, cache_key
from edgellm.kernels.cu.launch import DeviceLimits
from edgellm.kernels.cu.sources import read_source
from edgellm.kernels.cu.spec import KernelSpec

HALF = ("__half",)
FLOAT = ("float",)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache folder for this test alone."""
    folder = tmp_path / "kernels"
    monkeypatch.setenv("EDGELLM_KERNEL_CACHE", str(folder))
    return folder


@pytest.fixture
def nvrtc() -> None:
    try:
        compiler.include_folder()
    except KernelError as error:
        pytest.skip(f"needs NVRTC and the CUDA headers: {error}")


@pytest.fixture
def copied(tmp_path: Path) -> KernelSpec:
    """The test kernel with its own copy of its source and of the header it includes, free to edit."""
    spec = scale_rows_spec()
    for name, text in read_source(spec.source_path).headers:
        (tmp_path / name).write_text(text)
    source = tmp_path / "copied.cu"
    source.write_text(spec.source_path.read_text())
    return scale_rows_spec(source)


def key_of(spec: KernelSpec, **changes: Any) -> str:
    values = {"expression": spec.expression(HALF), "arch": "sm_87", "options": ("-x",), "toolkit": "13.0"} | changes
    return cache_key(read_source(spec.source_path), **values)


# ---- what identifies a compiled kernel ----


def test_key_is_stable(copied: KernelSpec) -> None:
    assert key_of(copied) == key_of(copied)
    assert len(key_of(copied)) == 64


@pytest.mark.parametrize(
    "change",
    [
        {"arch": "sm_90a"},
        {"arch": "sm_90"},
        {"options": ("-x", "-y")},
        {"options": ("-x-y",)},
        {"toolkit": "13.1"},
        {"expression": "edgellm::scale_rows<float, 128>"},
    ],
    ids=str,
)
def test_key_changes_with(copied: KernelSpec, change: dict[str, Any]) -> None:
    assert key_of(copied, **change) != key_of(copied)


@pytest.mark.parametrize("name", ["copied.cu", "types.cuh"])
def test_key_changes_with_the_text_of(copied: KernelSpec, tmp_path: Path, name: str) -> None:
    before = key_of(copied)
    path = tmp_path / name
    path.write_text(path.read_text() + "// edited\n")
    assert key_of(copied) != before


def test_key_changes_with_a_header_of_a_header(copied: KernelSpec, tmp_path: Path) -> None:
    (tmp_path / "types.cuh").write_text('#include "inner.cuh"\n')
    (tmp_path / "inner.cuh").write_text("// one\n")
    before = key_of(copied)
    (tmp_path / "inner.cuh").write_text("// two\n")
    assert key_of(copied) != before


# ---- the cache on disk ----


def test_an_entry_comes_back(tmp_path: Path) -> None:
    cache = CubinCache(tmp_path / "made" / "on" / "demand")
    assert cache.load("k") is None
    assert not cache.has("k")
    assert cache.store("k", Cubin(b"\x7fELF\n\x00code", "_Zname"))
    assert cache.has("k")
    assert cache.load("k") == Cubin(b"\x7fELF\n\x00code", "_Zname")
    assert [path.name for path in (tmp_path / "made" / "on" / "demand").iterdir()] == ["k.cubin"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: data[:20],
        lambda data: b"",
        lambda data: data.replace(b"_Zname", b"_Zother"),
        lambda data: data.replace(b"code", b"c0de"),
        lambda data: data.replace(b"edgellm-cubin-1", b"edgellm-cubin-0"),
        lambda data: data.partition(b"\n")[2],
    ],
)
def test_a_damaged_entry_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Any) -> None:
    cache = CubinCache(tmp_path)
    cache.store("k", Cubin(b"\x7fELF\n\x00code", "_Zname"))
    cache.path("k").write_bytes(damage(cache.path("k").read_bytes()))
    with caplog.at_level(logging.WARNING, logger="edgellm"):
        assert cache.load("k") is None
    assert "is damaged; it is compiled again" in caplog.text


def test_a_failed_write_leaves_the_old_entry_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CubinCache(tmp_path)
    cache.store("k", Cubin(b"old", "_Z"))

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert not cache.store("k", Cubin(b"new", "_Z"))
    monkeypatch.undo()
    assert cache.load("k") == Cubin(b"old", "_Z")
    assert [path.name for path in tmp_path.iterdir()] == ["k.cubin"]


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = CubinCache(tmp_path / "file" / "kernels")
    with caplog.at_level(logging.WARNING, logger="edgellm"):
        assert not cache.store("k", Cubin(b"code", "_Z"))
        assert not cache.store("l", Cubin(b"code", "_Z"))
    assert caplog.text.count("set EDGELLM_KERNEL_CACHE to a folder that can be written") == 1
    assert cache.load("k") is None


# ---- compiling without a GPU ----


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("arch", [87, 90])
def test_a_variant_compiles_to_a_cubin(arch: int) -> None:
    cubin = loader.variant_cubin(scale_rows_spec(), HALF, arch)
    assert cubin.code.startswith(b"\x7fELF")
    assert cubin.function.startswith("_Z")
    assert cubin.function.encode() in cubin.code
    assert loader.is_cached(scale_rows_spec(), HALF, arch)
    assert not loader.is_cached(scale_rows_spec(), FLOAT, arch)


@pytest.mark.usefixtures("nvrtc")
def test_a_registered_kernel_compiles_to_a_cubin() -> None:
    from edgellm.kernels.cu import rms_norm

    for arch in (87, 90):
        assert loader.variant_cubin(rms_norm.SPEC, rms_norm.SPEC.variants[0].key, arch).code.startswith(b"\x7fELF")


@pytest.mark.usefixtures("nvrtc")
def test_a_variant_is_compiled_once_and_again_when_its_entry_is_damaged(
    monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    compiled: list[str] = []
    compile_variant = compiler.compile_variant

    def counted(*args: Any, **options: Any) -> Cubin:
        compiled.append(args[1])
        return compile_variant(*args, **options)

    monkeypatch.setattr(compiler, "compile_variant", counted)
    first = loader.variant_cubin(scale_rows_spec(), HALF, 87)
    again = loader.variant_cubin(scale_rows_spec(), HALF, 87)
    assert (again.code, again.function) == (first.code, first.function)
    assert len(compiled) == 1
    (entry,) = own_cache.iterdir()
    entry.write_bytes(entry.read_bytes()[:-7])
    mended = loader.variant_cubin(scale_rows_spec(), HALF, 87)
    assert len(compiled) == 2
    again = loader.variant_cubin(scale_rows_spec(), HALF, 87)
    assert (again.code, again.function) == (mended.code, first.function)
    assert len(compiled) == 2


@pytest.mark.usefixtures("nvrtc")
def test_an_edited_header_is_compiled_again(copied: KernelSpec, tmp_path: Path, own_cache: Path) -> None:
    loader.variant_cubin(copied, HALF, 87)
    header = tmp_path / "types.cuh"
    header.write_text(header.read_text() + "// edited\n")
    loader.variant_cubin(copied, HALF, 87)
    assert len(list(own_cache.iterdir())) == 2


@pytest.mark.usefixtures("nvrtc")
def test_a_compile_error_names_kernel_variant_and_architecture_and_shows_the_log(copied: KernelSpec) -> None:
    path = copied.source_path
    path.write_text(path.read_text().replace("to_float(in[c])", "no_such_function(in[c])"))
    with pytest.raises(KernelCompileError) as caught:
        loader.variant_cubin(copied, HALF, 87)
    message = str(caught.value)
    assert message.startswith(
        "kernel scale_rows, variant edgellm::scale_rows<__half, 128>, does not compile for sm_87 with NVRTC "
    )
    assert "copied.cu(" in message
    assert 'identifier "no_such_function" is undefined' in message


def test_no_headers_anywhere_is_said_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiler, "_include_candidates", lambda: iter([tmp_path, tmp_path, tmp_path / "b"]))
    with pytest.raises(KernelError) as caught:
        compiler.include_folder.__wrapped__()
    message = str(caught.value)
    assert f"no CUDA headers (cuda_fp16.h, cuda_fp8.h) in any of {tmp_path}, {tmp_path / 'b'};" in message
    assert "set CUDA_HOME to a CUDA toolkit" in message


@pytest.mark.usefixtures("nvrtc")
def test_headers_of_a_toolkit_that_the_environment_names_are_a_candidate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_PATH", "")
    candidates = list(compiler._include_candidates())
    assert candidates[-2:] == [tmp_path / "include", Path("/usr/local/cuda/include")]


def test_without_cupy_the_message_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['cupy'] = None\n"
        "from edgellm.kernels.cu import compiler\n"
        "from edgellm.errors import KernelError\n"
        "try: compiler.nvrtc()\n"
        "except KernelError as error: assert 'pip install \"edgellm[cuda13]\"' in str(error), error\n"
        "else: raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- from cubin to kernel, with the driver played by a recorder ----


class RecordedFunction:
    """Stands for a loaded function: counts itself and records launches."""

    made: list[str]

    def __init__(self, code: bytes, function: bytes, ordinal: int, name: str) -> None:
        self.launches: list[tuple[object, ...]] = []
        type(self).made.append(name)

    def launch(self, *arguments: object) -> None:
        self.launches.append(arguments)


@pytest.fixture
def played_driver(monkeypatch: pytest.MonkeyPatch) -> type[RecordedFunction]:
    """Device 0 is an 8.7; compiling takes a moment and needs no NVRTC."""
    played = type("Played", (RecordedFunction,), {"made": []})
    monkeypatch.setattr(_launch, "KernelFunction", played)
    monkeypatch.setattr(loader, "device_limits", lambda device: DeviceLimits(16, 101376, 87, 4 << 20))
    monkeypatch.setattr(loader, "_kernels", {})
    return played


def slow_cubin(compiled: list[str], gate: threading.Event) -> Any:
    def variant_cubin(spec: KernelSpec, key: tuple[str, ...], arch: int) -> Cubin:
        compiled.append(spec.expression(key))
        gate.wait(0.05)
        return Cubin(b"code", "_Z")

    return variant_cubin


def test_two_threads_that_want_one_variant_compile_it_once(
    played_driver: type[RecordedFunction], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(loader, "variant_cubin", slow_cubin(compiled, threading.Event()))
    spec = scale_rows_spec()
    with ThreadPoolExecutor(6) as pool:
        kernels = list(pool.map(lambda key: loader.kernel(spec, key, 0), [HALF, FLOAT] * 12))
    assert len(compiled) == len(played_driver.made) == 2
    assert kernels[0] is kernels[2]
    assert kernels[0] is not kernels[1]


def test_warm_up_compiles_in_parallel_and_raises_what_failed(
    played_driver: type[RecordedFunction], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(loader, "variant_cubin", slow_cubin(compiled, threading.Event()))
    spec = scale_rows_spec()
    assert loader.warm_up([(spec, variant.key) for variant in spec.variants], 0) == 3
    assert len(compiled) == 3
    with pytest.raises(KernelError, match="has no variant"):
        loader.warm_up([(spec, ("none",)), (spec, HALF)], 0)
    assert loader.warm_up([], 0) == 0


def test_a_failure_is_not_remembered(played_driver: type[RecordedFunction], monkeypatch: pytest.MonkeyPatch) -> None:
    spec = scale_rows_spec()

    def refuse(*args: object) -> Cubin:
        raise KernelCompileError("first")

    monkeypatch.setattr(loader, "variant_cubin", refuse)
    with pytest.raises(KernelCompileError, match="first"):
        loader.kernel(spec, HALF, 0)
    monkeypatch.setattr(loader, "variant_cubin", slow_cubin([], threading.Event()))
    assert loader.kernel(spec, HALF, 0) is loader.kernel(spec, HALF, 0)


def test_overlap_is_asked_for_only_where_the_device_can(played_driver: type[RecordedFunction]) -> None:
    spec = scale_rows_spec()
    for overlaps in (True, False):
        function = played_driver(b"", b"", 0, "scale_rows")
        kernel = loader.Kernel(spec, function, 0, overlaps=overlaps)  # type: ignore[arg-type]
        kernel._current_stream = lambda device: 77
        kernel.launch(launch_config(5), spec.params(), pdl=True)
        kernel.launch(launch_config(5), spec.params())
        flags = [arguments[-1] for arguments in function.launches]
        assert flags == [overlaps, False]
        assert function.launches[0][:4] == ((5, 1, 1), (128, 1, 1), 512, 77)


# ---- the driver bridge ----


def test_without_a_driver_the_message_says_so() -> None:
    code = (
        "import torch\n"
        "from edgellm.errors import KernelError\n"
        "from edgellm.kernels import _launch\n"
        "try: _launch.KernelFunction(b'code', b'name', 0, 'k')\n"
        "except KernelError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    without = "no CUDA driver on this machine (libcuda.so.1 cannot be opened)"
    assert without in done.stdout or "loading kernel k: cuModuleLoadData failed with" in done.stdout


def test_stub_declares_the_public_names_of_the_bridge() -> None:
    text = (Path(edgellm.kernels.__file__).parent / "_launch.pyi").read_text(encoding="utf-8")
    declared = declared_names(ast.parse(text).body)
    assert set(declared) == built_names(importlib.import_module("edgellm.kernels._launch"))
    function = declared["KernelFunction"]
    assert isinstance(function, ast.ClassDef)
    members = {name for name in vars(_launch.KernelFunction) if not name.startswith("_")}
    assert set(declared_names(function.body)) == members
