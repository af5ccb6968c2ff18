"""Compile check of every kernel source: warnings are errors, nothing is linked or run.

C and C++ sources below edgellm/kernels/cpu are compiled with the host compiler.  CUDA sources below
edgellm/kernels/cu are compiled with nvcc for each target architecture, when nvcc is present.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "edgellm" / "kernels"
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"]
CUDA_ARCHITECTURES = ("80", "87", "89", "90a", "120a")


def include_flags() -> list[str]:
    import numpy

    return [f"-I{numpy.get_include()}", f"-I{sysconfig.get_paths()['include']}"]


def host_command(source: Path) -> list[str]:
    is_c = source.suffix == ".c"
    compiler = os.environ.get("CC", "cc") if is_c else os.environ.get("CXX", "c++")
    standard = "-std=gnu11" if is_c else "-std=c++17"
    return [compiler, standard, "-O2", "-fsyntax-only", *WARNINGS, *include_flags(), str(source)]


def cuda_commands(source: Path) -> list[list[str]]:
    common = ["nvcc", "-std=c++17", f"-I{KERNELS / 'cu' / 'include'}", "-cubin", "-o", os.devnull]
    return [[*common, f"-arch=sm_{arch}", str(source)] for arch in CUDA_ARCHITECTURES]


def main() -> int:
    host = [path for suffix in ("c", "cpp", "cc") for path in sorted((KERNELS / "cpu").rglob(f"*.{suffix}"))]
    # Cython writes its output beside its source; that is the Cython build's to check.
    host = [path for path in host if not path.with_suffix(".pyx").exists()]
    cuda = sorted((KERNELS / "cu").rglob("*.cu"))
    commands = [host_command(path) for path in host]
    if cuda and shutil.which("nvcc") is None:
        print(f"kernel_check: nvcc is not installed here, {len(cuda)} CUDA sources skipped")
    elif cuda:
        commands += [command for path in cuda for command in cuda_commands(path)]
    failed = [command[-1] for command in commands if subprocess.run(command, check=False).returncode != 0]
    print(f"kernel_check: {len(host)} host and {len(cuda)} CUDA sources, {len(commands)} compiled, {len(failed)} bad")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
