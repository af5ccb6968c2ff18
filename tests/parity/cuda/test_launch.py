"""Loader and launch on a GPU: compile, load, launch on torch's streams, in graphs, overlapped, from any thread."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from device_kernel import THREADS, ScaleRowsParams, launch_config, scale_rows_spec

from edgellm.errors import StepDeviceError
from edgellm.kernels import _launch
from edgellm.kernels.cu import loader
from edgellm.kernels.cu.launch import LaunchConfig, device_limits

pytestmark = pytest.mark.gpu

TYPES = {"float": torch.float32, "__half": torch.float16, "__nv_bfloat16": torch.bfloat16}
ROWS, COLUMNS = 7, 300


def params(source: torch.Tensor, out: torch.Tensor, factor: float, *, waits: bool = False) -> ScaleRowsParams:
    return ScaleRowsParams(source.data_ptr(), out.data_ptr(), source.shape[1], factor, int(waits))


def rows(name: str = "float", count: int = ROWS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(count, COLUMNS, generator=generator).to("cuda", TYPES[name])


@pytest.mark.parametrize("name", TYPES)
def test_every_variant_computes_what_torch_does(name: str) -> None:
    source = rows(name)
    out = torch.full_like(source, 9.0)
    loader.kernel(scale_rows_spec(), (name,)).launch(launch_config(ROWS), params(source, out, 0.5))
    assert torch.equal(out, source * 0.5)


def test_limits_are_those_that_torch_reports() -> None:
    limits = device_limits(torch.device("cuda"))
    properties = torch.cuda.get_device_properties(0)
    assert limits.sm_count == properties.multi_processor_count
    assert limits.arch == properties.major * 10 + properties.minor
    assert limits.l2_bytes == properties.L2_cache_size
    assert limits.max_shared_bytes > 48 * 1024
    assert limits is device_limits(torch.device("cuda", 0))


def test_resources_are_reported() -> None:
    resources = loader.kernel(scale_rows_spec(), ("float",)).resources()
    assert 0 < resources["registers"] <= 255
    assert resources["local_bytes"] == 0
    assert resources["static_shared_bytes"] >= 4
    assert resources["max_threads"] >= THREADS


def test_parameters_are_copied_at_the_launch() -> None:
    source, out = rows(), torch.empty(ROWS, COLUMNS, device="cuda")
    struct = params(source, out, 2.0)
    torch.cuda._sleep(20_000_000)  # the stream is busy while the struct changes
    loader.kernel(scale_rows_spec(), ("float",)).launch(launch_config(ROWS), struct)
    ctypes.memset(ctypes.addressof(struct), 0, ctypes.sizeof(struct))
    assert torch.equal(out, source * 2.0)


def test_it_runs_on_the_current_stream_in_order() -> None:
    kernel = loader.kernel(scale_rows_spec(), ("float",))
    source, out = rows(), torch.zeros(ROWS, COLUMNS, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        source.mul_(3.0)
        kernel.launch(launch_config(ROWS), params(source, out, 2.0))
        assert not side.query(), "the launch waited for the device"
    side.synchronize()
    assert torch.equal(out, source * 2.0)


def test_it_is_recorded_in_a_graph_and_replays() -> None:
    kernel = loader.kernel(scale_rows_spec(), ("float",))
    source, middle, out = rows(), torch.zeros(ROWS, COLUMNS, device="cuda"), torch.zeros(ROWS, COLUMNS, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        kernel.launch(launch_config(ROWS), params(source, middle, 2.0), pdl=True)
        kernel.launch(launch_config(ROWS), params(middle, out, 4.0, waits=True), pdl=True)
    assert out.abs().max() == 0
    for _ in range(3):
        source.add_(1.0)
        graph.replay()
        assert torch.equal(out, source * 8.0)


def test_overlapped_launches_that_wait_see_what_came_before() -> None:
    kernel = loader.kernel(scale_rows_spec(), ("float",))
    count = 4096
    buffers = [rows(count=count), *(torch.zeros(count, COLUMNS, device="cuda") for _ in range(8))]
    for _ in range(10):
        for source, out in itertools.pairwise(buffers):
            kernel.launch(launch_config(count), params(source, out, 0.5, waits=True), pdl=True)
    assert torch.equal(buffers[-1], buffers[0] * 0.5**8)


def test_static_shared_memory_counts_before_opting_in() -> None:
    spec, key = scale_rows_spec(), ("float",)
    cubin = loader.variant_cubin(spec, key, device_limits(torch.device("cuda")).arch)
    function = _launch.KernelFunction(cubin.code, cubin.function.encode(), 0, "scale_rows")
    kernel = loader.Kernel(spec, function, 0, overlaps=False)
    source, out = rows(), torch.empty(ROWS, COLUMNS, device="cuda")
    kernel.launch(launch_config(ROWS, 48 * 1024), params(source, out, 3.0))
    assert torch.equal(out, source * 3.0)


def test_more_shared_memory_than_the_default_is_opted_in_once() -> None:
    kernel = loader.kernel(scale_rows_spec(), ("float",))
    limit = device_limits(torch.device("cuda")).max_shared_bytes - kernel.resources()["static_shared_bytes"]
    source, out = rows(), torch.empty(ROWS, COLUMNS, device="cuda")
    for shared_bytes in (limit, 4 * THREADS, 64 * 1024):
        out.zero_()
        kernel.launch(launch_config(ROWS, shared_bytes), params(source, out, 3.0))
        assert torch.equal(out, source * 3.0)
    with pytest.raises(StepDeviceError, match=f"kernel scale_rows .* needs {limit + 1} bytes of shared memory a block"):
        kernel.launch(launch_config(ROWS, limit + 1), params(source, out, 3.0))


def test_a_refused_launch_names_kernel_and_shape() -> None:
    kernel = loader.kernel(scale_rows_spec(), ("float",))
    source = rows()
    config = LaunchConfig((ROWS, 1, 1), (2048, 1, 1))
    with pytest.raises(StepDeviceError, match=r"kernel scale_rows .* CUDA_ERROR_INVALID_VALUE.*block \(2048, 1, 1\)"):
        kernel.launch(config, params(source, source, 1.0))
    out = torch.empty_like(source)
    kernel.launch(launch_config(ROWS), params(source, out, 1.0))  # the device is as good as before
    assert torch.equal(out, source)


def test_an_empty_grid_launches_nothing() -> None:
    source = rows()
    before = source.clone()
    kernel = loader.kernel(scale_rows_spec(), ("float",))
    kernel.launch(LaunchConfig((0, 1, 1), (THREADS, 1, 1)), params(source, source, 5.0))
    assert torch.equal(source, before)


def test_a_thread_that_never_touched_the_device_may_launch() -> None:
    kernel = loader.kernel(scale_rows_spec(), ("float",))
    source, out = rows(), torch.zeros(ROWS, COLUMNS, device="cuda")
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def launch() -> None:
        try:
            kernel.launch(launch_config(ROWS), params(source, out, 2.0))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert not failures
    assert torch.equal(out, source * 2.0)


def test_a_kernel_is_loaded_and_launched_on_the_device_it_was_asked_for() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    kernel = loader.kernel(scale_rows_spec(), ("float",), device=1)
    source = rows().to("cuda:1")
    out = torch.zeros_like(source)
    torch.cuda.synchronize(1)
    assert torch.cuda.current_device() == 0
    kernel.launch(launch_config(ROWS), params(source, out, 2.0))
    assert torch.equal(out, source * 2.0)
    assert torch.cuda.current_device() == 0


def test_a_second_process_finds_the_compiled_kernel(tmp_path: Path) -> None:
    code = (
        "import torch\n"
        "from device_kernel import scale_rows_spec\n"
        "from edgellm.kernels.cu import compiler, loader\n"
        "compile_variant, count = compiler.compile_variant, []\n"
        "compiler.compile_variant = lambda *a, **k: (count.append(1), compile_variant(*a, **k))[1]\n"
        "loader.warm_up([(scale_rows_spec(), v.key) for v in scale_rows_spec().variants])\n"
        "print(len(count))\n"
    )
    tests = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join((tests, os.getcwd(), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "EDGELLM_KERNEL_CACHE": str(tmp_path), "PYTHONPATH": path}
    command = [sys.executable, "-c", code]
    counts = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()
        for _ in range(2)
    ]
    assert counts == ["3", "0"]


def test_a_launch_costs_microseconds() -> None:
    """A generous bound against a mistake (a compile, a wait, an allocation a launch); the bench has the numbers."""
    kernel = loader.kernel(scale_rows_spec(), ("float",))
    source, out = rows(), torch.empty(ROWS, COLUMNS, device="cuda")
    config, struct = launch_config(ROWS), params(source, out, 2.0)
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(200):
            kernel.launch(config, struct)
        best = min(best, (time.perf_counter() - started) / 200)
    torch.cuda.synchronize()
    assert best < 50e-6
