"""One variant to one cubin by NVRTC, through CuPy's low-level bindings.  Needs no GPU."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from edgellm import envs
from edgellm.errors import KernelCompileError, KernelError
from edgellm.kernels.cu.sources import Source

USUAL_TOOLKIT = Path("/usr/local/cuda")
OPTIONS = ("--std=c++17", "-default-device")
# What device sources include in angle brackets; their text is part of a kernel's identity.
TOOLKIT_HEADERS = ("cuda_fp16.h", "cuda_fp16.hpp", "cuda_bf16.h", "cuda_bf16.hpp", "cuda_fp8.h", "cuda_fp8.hpp")


@dataclass(frozen=True, slots=True)
class Cubin:
    """Machine code of one variant, the name of its function in it, and what the compiler said."""

    code: bytes
    function: str
    log: str = ""


def nvrtc() -> ModuleType:
    """CuPy's bindings of NVRTC.

    Raises:
        KernelError: CuPy or NVRTC is not installed; says what to install.
    """
    try:
        from cupy.cuda import nvrtc as module

        module.getVersion()
    except Exception as error:  # CuPy raises its own kinds when a library is missing
        raise KernelError(
            f"CUDA kernels are compiled by NVRTC through CuPy, which does not load ({type(error).__name__}: {error}); "
            'install it with: pip install "edgellm[cuda13]" nvidia-cuda-nvrtc (or [cuda12] with nvidia-cuda-nvrtc-cu12)'
        ) from error
    return module  # type: ignore[no-any-return]


@cache
def version() -> tuple[int, int]:
    """(major, minor) of NVRTC."""
    major, minor = nvrtc().getVersion()
    return int(major), int(minor)


@cache
def include_folder() -> Path:
    """The folder of CUDA's own headers.

    Raises:
        KernelError: none was found; says where it was looked for and what to install.
    """
    tried = list(dict.fromkeys(_include_candidates()))
    for folder in tried:
        if (folder / "cuda_fp16.h").is_file() and (folder / "cuda_fp8.h").is_file():
            return folder
    places = ", ".join(map(str, tried))
    raise KernelError(
        f"no CUDA headers (cuda_fp16.h, cuda_fp8.h) in any of {places}; "
        "install nvidia-cuda-runtime and nvidia-cuda-crt (nvidia-cuda-runtime-cu12 for CUDA 12), "
        "or set CUDA_HOME to a CUDA toolkit"
    )


def _include_candidates() -> Iterator[Path]:
    """Wheels of NVRTC's own version first, then the toolkits that the environment names, then the usual place."""
    spec = importlib.util.find_spec("nvidia")
    parts = (f"cu{version()[0]}", "cuda_runtime")
    for base in spec.submodule_search_locations or () if spec is not None else ():
        yield from (Path(base) / part / "include" for part in parts)
    yield from (toolkit / "include" for toolkit in (*envs.cuda_toolkits(), USUAL_TOOLKIT))


@cache
def toolkit_digest() -> str:
    """Identifies NVRTC and the toolkit's headers together."""
    digest = hashlib.sha256(repr(version()).encode())
    for name in TOOLKIT_HEADERS:
        path = include_folder() / name
        digest.update(path.read_bytes() if path.is_file() else b"absent")
    return digest.hexdigest()


def compile_variant(
    source: Source, expression: str, arch: str, *, kernel: str = "", options: tuple[str, ...] = ()
) -> Cubin:
    """Compile one instantiation.

    Args:
        expression: its C++ name, "edgellm::paged_decode<__nv_bfloat16, 128>".
        arch: "sm_87", "sm_90a".
        kernel: the kernel's name, for the message of an error.
        options: more of NVRTC's, behind the usual ones.
    Raises:
        KernelCompileError: with the kernel, the expression, the architecture and NVRTC's log.
        KernelError: there is no NVRTC, or no CUDA headers.
    Cost: 0.1 s to seconds, without the GIL; needs no GPU.
    """
    library = nvrtc()
    command = [f"-arch={arch}", *OPTIONS, f"-I{include_folder()}", *options]
    names = [name.encode() for name, _ in source.headers]
    texts = [text.encode() for _, text in source.headers]
    program = library.createProgram(source.text, source.name, texts, names)
    try:
        library.addNameExpression(program, expression)
        library.compileProgram(program, command)
        function = str(library.getLoweredName(program, expression))
        return Cubin(bytes(library.getCUBIN(program)), function, str(library.getProgramLog(program)))
    except library.NVRTCError as error:
        log = _log(library, program)
        raise KernelCompileError(
            f"kernel {kernel or source.name}, variant {expression}, does not compile for {arch} "
            f"with NVRTC {'.'.join(map(str, version()))} ({error})\n{log}"
        ) from error
    finally:
        library.destroyProgram(program)


def _log(library: Any, program: int) -> str:
    return str(library.getProgramLog(program)).strip() or "NVRTC wrote no log"
