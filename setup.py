"""The list of Cython extensions and the debug switch; everything else is in pyproject.toml.

EDGELLM_DEBUG=1 builds with bounds checks, line trace, `-O0 -g` and library assertions.
"""

import glob
import os
import sys

from Cython.Build import cythonize
from Cython.Compiler import Errors, PyrexTypes
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

DEBUG_VALUE = os.environ.get("EDGELLM_DEBUG", "")
if DEBUG_VALUE not in ("", "0", "1"):
    sys.exit(f"EDGELLM_DEBUG is {DEBUG_VALUE!r}; set it to 0 (release) or 1 (checks and line trace), or unset it")
DEBUG = DEBUG_VALUE == "1"

MODULES = [
    "edgellm._core.block_hash",
    "edgellm._core.page_table",
    "edgellm._core.page_ledger",
    "edgellm._core.block_index",
    "edgellm._core.draft_index",
    "edgellm._core.records",
    "edgellm._core.planners",
    "edgellm._core.cache_state",
    "edgellm._core.leasing",
    "edgellm._core.publication",
    "edgellm._core.checkpoints",
    "edgellm._core.recount",
    "edgellm._core.cache_manager",
    # Host code that knows requests lies beside the session.
    "edgellm.session._token_list",
    "edgellm.session._slots",
    "edgellm.session._finish",
    "edgellm.session._ledger",
    "edgellm.session._step_plan",
    "edgellm.session._plan_check",
    "edgellm.session._decode_lane",
    "edgellm.session._lowering",
    "edgellm.decoding._throughput_guard",
    "edgellm.decoding._length_records",
    "edgellm.runtime._shared_prefix",
    "edgellm.runtime._step_packing",
    # The CUDA driver by address; builds and imports on any machine.
    "edgellm.kernels._launch",
]

# C kernels: the module and the C files it is linked with.
KERNEL_DIR = "edgellm/kernels/cpu/"
KERNELS = {
    "edgellm.kernels.cpu._ops": [
        "paged_attention.c",
        "elementwise.c",
        "skinny_linear.c",
        "causal_conv.c",
        "gated_delta.c",
        "gates.c",
        "experts.c",
        "mamba2.c",
        "parallel.c",
        "thread_pool.c",
    ]
}

FLAGS = ["-O0", "-g", "-D_GLIBCXX_ASSERTIONS"] if DEBUG else ["-O2", "-g0"]

DIRECTIVES = {
    "language_level": 3,
    "boundscheck": DEBUG,
    "wraparound": False,
    "initializedcheck": DEBUG,
    "cdivision": True,
    "linetrace": DEBUG,
    "embedsignature": True,
}


def extension(module: str) -> Extension:
    source = module.replace(".", "/") + ".pyx"
    macros = [("CYTHON_TRACE_NOGIL", "1")] if DEBUG else []
    return Extension(module, [source], language="c++", extra_compile_args=["-std=c++17", *FLAGS], define_macros=macros)


def kernel_extension(module: str, sources: list[str]) -> Extension:
    """Plain C at -O3; OpenMP on Linux, where it is the runtime that torch has already loaded."""
    threads = ["-fopenmp"] if sys.platform == "linux" else []
    return Extension(
        module,
        [module.replace(".", "/") + ".pyx", *(KERNEL_DIR + source for source in sources)],
        include_dirs=[KERNEL_DIR],
        depends=sorted(glob.glob(KERNEL_DIR + "*.h")),
        extra_compile_args=[*(FLAGS if DEBUG else ["-O3", "-g0"]), *threads],
        extra_link_args=threads,
        define_macros=[("CYTHON_TRACE_NOGIL", "1")] if DEBUG else [],
    )


class ParallelBuild(build_ext):
    """One compiler a core, where nobody asks for another number (`-j`)."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if self.parallel is None:
            self.parallel = os.cpu_count()


def refuse_implicit_exception_checks() -> None:
    """Fail on a C function without `noexcept` or `except <value>`: every call of it would take the GIL again.

    Cython only prints a performance hint.  The hook is private to Cython, so a version without it builds as usual.
    """

    def refuse(pos, env, *args, **kwargs) -> None:
        Errors.error(pos, "C function without `noexcept` or an exception value; state one of them")

    if hasattr(PyrexTypes, "write_noexcept_performance_hint"):
        PyrexTypes.write_noexcept_performance_hint = refuse


refuse_implicit_exception_checks()
setup(
    ext_modules=cythonize(
        [
            *(extension(m) for m in MODULES if os.path.exists(m.replace(".", "/") + ".pyx")),
            *(kernel_extension(m, sources) for m, sources in KERNELS.items()),
        ],
        compiler_directives=DIRECTIVES,
        nthreads=2 if not DEBUG else 0,
    ),
    cmdclass={"build_ext": ParallelBuild},
)
