"""Compile check of every kernel source: warnings are errors, nothing is linked or run.

C and C++ sources below edgellm/kernels/cpu are compiled with the host compiler; the CUDA kernels by `cuda_check`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import cuda_check

ROOT = Path(__file__).resolve().parent.parent
CPU_KERNELS = ROOT / "edgellm" / "kernels" / "cpu"
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"]


def include_flags() -> list[str]:
    import numpy

    return [f"-I{numpy.get_include()}", f"-I{sysconfig.get_paths()['include']}"]


def host_command(source: Path) -> list[str]:
    is_c = source.suffix == ".c"
    compiler = os.environ.get("CC", "cc") if is_c else os.environ.get("CXX", "c++")
    standard = "-std=gnu11" if is_c else "-std=c++17"
    return [compiler, standard, "-O2", "-fsyntax-only", *WARNINGS, *include_flags(), str(source)]


def check_host() -> int:
    """Compile the CPU kernels; returns how many sources are bad."""
    sources = [path for suffix in ("c", "cpp", "cc") for path in sorted(CPU_KERNELS.rglob(f"*.{suffix}"))]
    # Cython writes its output beside its source; that is the Cython build's to check.
    sources = [path for path in sources if not path.with_suffix(".pyx").exists()]
    failed = [path for path in sources if subprocess.run(host_command(path), check=False).returncode != 0]
    print(f"kernel_check: {len(sources)} host sources compiled, {len(failed)} bad")
    return len(failed)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="OP", help="this op or kernel; may be repeated")
    parser.add_argument("--all", action="store_true", help="every architecture that is supported")
    parser.add_argument("--arch", action="append", type=int, default=[], metavar="NN", help="this one, such as 87")
    return parser.parse_args()


def main() -> int:
    started = time.monotonic()
    options = arguments()
    everywhere = cuda_check.ALL_ARCHITECTURES if options.all else cuda_check.DEFAULT_ARCHITECTURES
    bad = 0 if options.only else check_host()
    bad += cuda_check.check(options.only, options.arch or everywhere)
    print(f"kernel_check: {bad} bad, {time.monotonic() - started:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
