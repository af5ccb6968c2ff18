"""A small kernel for the tests of the loader: scales rows.  Its source stands beside this file."""

from __future__ import annotations

import ctypes
from pathlib import Path

from edgellm.kernels.cu.launch import LaunchConfig
from edgellm.kernels.cu.spec import KernelSpec, Variant

THREADS = 128


class ScaleRowsParams(ctypes.Structure):
    _fields_ = (
        ("in", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("columns", ctypes.c_int64),
        ("factor", ctypes.c_float),
        ("waits", ctypes.c_int32),
    )


def scale_rows_spec(source: Path | None = None) -> KernelSpec:
    """The spec; `source` replaces the file beside this one."""
    return KernelSpec(
        name="scale_rows",
        entry="scale_rows",
        params=ScaleRowsParams,
        params_name="ScaleRowsParams",
        variants=tuple(Variant((name,), f"{name}, {THREADS}") for name in ("float", "__half", "__nv_bfloat16")),
        source=str(source or Path(__file__).with_suffix(".cu")),
    )


def launch_config(rows: int, shared_bytes: int = 4 * THREADS) -> LaunchConfig:
    return LaunchConfig(grid=(rows, 1, 1), block=(THREADS, 1, 1), shared_bytes=shared_bytes)
