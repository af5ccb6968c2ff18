"""What a launch costs on the host, in microseconds a call, against torch and CuPy; and what compiling costs.

Run by hand: `python bench/gpu/bench_launch.py [--compile]`.  Kernels are tiny, so the host is what is measured; every
round starts with an empty queue and stays far below its depth.  Sides alternate; the least of many rounds counts.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from device_kernel import ScaleRowsParams, launch_config, scale_rows_spec

from edgellm.kernels.cu import loader, spec
from edgellm.kernels.cu.launch import current_stream_lookup
from edgellm.kernels.cu.rms_norm import rms_norm

ROUNDS = 30
CALLS = 200
ROWS, COLUMNS = 4, 128


def best_us(call: Callable[[], object]) -> float:
    """Microseconds of one call: the least of a few rounds."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - started) / CALLS * 1e6


def launches() -> dict[str, Callable[[], object]]:
    """Ways to launch one tiny kernel, by name."""
    source = torch.ones(ROWS, COLUMNS, device="cuda")
    out, weight = torch.empty_like(source), torch.ones(COLUMNS, device="cuda")
    kernel = loader.kernel(scale_rows_spec(), ("float",))
    params = ScaleRowsParams(source.data_ptr(), out.data_ptr(), COLUMNS, 2.0, 0)
    config, lookup = launch_config(ROWS), current_stream_lookup()
    address, function = ctypes.addressof(params), kernel._function
    return {
        "driver call alone": lambda: function.launch(config.grid, config.block, 512, 0, address, False),
        "Kernel.launch": lambda: kernel.launch(config, params),
        "Kernel.launch, pdl": lambda: kernel.launch(config, params, pdl=True),
        "look-up of the kernel": lambda: loader.kernel(kernel.spec, ("float",)),
        "look-up of the stream": lambda: lookup(0),
        "wrapper rms_norm": lambda: rms_norm(source, weight, 1e-6, out),
        "torch.mul": lambda: torch.mul(source, 2.0, out=out),
        "torch rms_norm": lambda: torch.nn.functional.rms_norm(source, (COLUMNS,), weight, 1e-6),
        "cupy.RawKernel": cupy_launch(source, out),
    }


def cupy_launch(source: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
    """CuPy's own launch of a kernel with the same work, on the stream that is current."""
    import cupy

    text = (
        'extern "C" __global__ void scale(const float* x, float* y, long long n, float f)'
        "{ for (long long c = threadIdx.x; c < n; c += 128) y[blockIdx.x * n + c] = x[blockIdx.x * n + c] * f; }"
    )
    raw = cupy.RawKernel(text, "scale")
    arguments = (cupy.asarray(source), cupy.asarray(out), cupy.int64(COLUMNS), cupy.float32(2.0))
    return lambda: raw((ROWS,), (128,), arguments)


def compile_seconds() -> str:
    """Seconds to compile all variants into an empty folder, then to load them from it, in fresh kernels."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EDGELLM_KERNEL_CACHE"] = folder
        wanted = [(one, variant.key) for one in spec.registry() for variant in one.variants]
        seconds = []
        for _ in range(2):
            loader._kernels.clear()
            started = time.perf_counter()
            loader.warm_up(wanted)
            seconds.append(time.perf_counter() - started)
    return f"{len(wanted)} variants: compiled and loaded in {seconds[0]:.1f} s, from the cache in {seconds[1]:.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", action="store_true", help="also time compiling every variant")
    options = parser.parse_args()
    calls = launches()
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for name, call in calls.items():
            best[name] = min(best[name], best_us(call))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    for name, value in best.items():
        print(f"{name:<24} {value:6.2f} us a call")
    if options.compile:
        print(compile_seconds())


if __name__ == "__main__":
    main()
