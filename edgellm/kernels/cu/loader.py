"""Kernels on first use: compiled or taken from the cache, loaded once a device, launched on torch's current stream."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from edgellm import envs
from edgellm.errors import KernelError
from edgellm.kernels.cu import compiler
from edgellm.kernels.cu.cubin_cache import CubinCache, cache_key
from edgellm.kernels.cu.launch import LaunchConfig, current_device, current_stream_lookup, device_limits
from edgellm.kernels.cu.sources import read_source
from edgellm.log import get_logger

if TYPE_CHECKING:
    from edgellm.kernels._launch import KernelFunction
    from edgellm.kernels.cu.compiler import Cubin
    from edgellm.kernels.cu.spec import KernelSpec

logger = get_logger(__name__)

OVERLAP_ARCH = 90  # the oldest architecture that can start a kernel before the one in front has ended
MAX_COMPILE_THREADS = 16

Key = tuple[Hashable, ...]


class Kernel:
    """One variant, loaded on one device.  Any thread may launch it."""

    __slots__ = ("_current_stream", "_device", "_function", "_overlaps", "spec")

    def __init__(self, spec: KernelSpec, function: KernelFunction, device: int, *, overlaps: bool) -> None:
        self.spec = spec
        self._function = function
        self._device = device
        self._overlaps = overlaps
        self._current_stream = current_stream_lookup()

    def launch(self, config: LaunchConfig, params: ctypes.Structure, *, pdl: bool = False) -> None:
        """Put the kernel on torch's current stream; an empty grid launches nothing.

        Args:
            params: an instance of the spec's struct; copied before this returns.
            pdl: the kernel waits for the one in front itself (`wait_for_previous_kernel`) and may start while that
                one ends.  Ignored before 9.0.
        Raises:
            StepDeviceError: the driver refuses, or reports the failure of earlier work.
        Ordering: after everything on that stream; the host never waits.  Cost: a few microseconds, no allocation.
        """
        self._function.launch(
            config.grid,
            config.block,
            config.shared_bytes,
            self._current_stream(self._device),
            ctypes.addressof(params),
            pdl and self._overlaps,
        )

    def resources(self) -> dict[str, int]:
        """Registers a thread, spilled bytes a thread, static shared bytes and the most threads a block may have."""
        return self._function.resources()


_kernels: dict[tuple[str, Key, int], Kernel] = {}
_locks: dict[tuple[str, Key, int], threading.Lock] = {}
_locks_guard = threading.Lock()
_caches: dict[str, CubinCache] = {}
_collector = threading.local()


class _NotedKernel(Kernel):
    """Stands for a kernel that is not loaded yet; see `collecting`."""

    __slots__ = ()

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec

    def launch(self, config: LaunchConfig, params: ctypes.Structure, *, pdl: bool = False) -> None:
        return


@contextmanager
def collecting() -> Iterator[list[tuple[KernelSpec, Key]]]:
    """On this thread, note kernels that are not loaded instead of loading them; to launch such a one does nothing.

    A start makes its launches once like this, then compiles all that was noted at the same time by `warm_up`.
    """
    noted: list[tuple[KernelSpec, Key]] = []
    _collector.noted = noted
    try:
        yield noted
    finally:
        _collector.noted = None


def kernel(spec: KernelSpec, key: Key, device: int | None = None) -> Kernel:
    """The kernel of a variant on a device, compiled on first use.

    Args:
        device: ordinal; None for torch's current device.
    Raises:
        KernelError: no such variant, no driver, no compiler, or the device is too old (or too new) for the kernel.
        KernelCompileError: it does not compile.
    Cost: a dictionary look-up, after the first call.  Two threads that ask for one variant compile it once.
    """
    ordinal = current_device() if device is None else device
    place = (spec.name, key, ordinal)
    found = _kernels.get(place)
    if found is not None and found.spec is spec:
        return found
    noted: list[tuple[KernelSpec, Key]] | None = getattr(_collector, "noted", None)
    if noted is not None:
        noted.append((spec, key))
        return _NotedKernel(spec)
    with _locks_guard:
        lock = _locks.setdefault(place, threading.Lock())
    with lock:
        found = _kernels.get(place)
        if found is None or found.spec is not spec:
            found = _kernels[place] = _load(spec, key, ordinal)
    return found


def _load(spec: KernelSpec, key: Key, ordinal: int) -> Kernel:
    from edgellm.kernels._launch import KernelFunction

    arch = device_limits(torch.device("cuda", ordinal)).arch
    cubin = variant_cubin(spec, key, arch)
    name = f"{spec.name} {spec.expression(key)}"
    function = KernelFunction(cubin.code, cubin.function.encode(), ordinal, name)
    return Kernel(spec, function, ordinal, overlaps=arch >= OVERLAP_ARCH)


def architecture(spec: KernelSpec, arch: int) -> str:
    """The compiler's name of an architecture for a spec: "sm_87", or "sm_90a" where the spec asks for it.

    Raises:
        KernelError: the kernel does not run there.
    """
    if not spec.supports(arch):
        bounds = f"{spec.min_arch} and newer" if spec.max_arch is None else f"{spec.min_arch} to {spec.max_arch}"
        raise KernelError(f"kernel {spec.name} runs on compute capability {bounds}; this device has {arch}")
    return f"sm_{arch}{spec.arch_suffix}"


def variant_cubin(spec: KernelSpec, key: Key, arch: int) -> Cubin:
    """Machine code of one variant for a compute capability, from the cache or compiled now.  Needs no GPU.

    Raises:
        KernelError, KernelCompileError: as `kernel`.
    """
    name = architecture(spec, arch)
    expression = spec.expression(key)
    cache = kernel_cache()
    source = read_source(spec.source_path)
    identity = cache_key(source, expression, name, compiler.OPTIONS, compiler.toolkit_digest())
    cubin = cache.load(identity)
    if cubin is None:
        logger.info("compiling kernel %s for %s", expression, name)
        cubin = compiler.compile_variant(source, expression, name, kernel=spec.name)
        cache.store(identity, cubin)
    return cubin


def is_cached(spec: KernelSpec, key: Key, arch: int) -> bool:
    """Whether the folder of compiled kernels has this variant for this compute capability."""
    source = read_source(spec.source_path)
    name = architecture(spec, arch)
    identity = cache_key(source, spec.expression(key), name, compiler.OPTIONS, compiler.toolkit_digest())
    return kernel_cache().has(identity)


def kernel_cache() -> CubinCache:
    """The cache in the folder that the environment names now."""
    folder = envs.kernel_cache()
    return _caches.setdefault(str(folder), CubinCache(folder))


def warm_up(wanted: Iterable[tuple[KernelSpec, Key]], device: int | None = None) -> int:
    """Compile and load many variants, in threads; a deployment calls it before its first request.

    Returns:
        How many there are.
    Raises:
        KernelError, KernelCompileError: as `kernel`, for the first that fails; the others are finished first.
    """
    ordinal = current_device() if device is None else device
    variants = list(wanted)
    workers = max(1, min(len(variants), MAX_COMPILE_THREADS, os.cpu_count() or 1))
    with ThreadPoolExecutor(workers, thread_name_prefix="kernel-compile") as pool:
        jobs = [pool.submit(kernel, spec, key, ordinal) for spec, key in variants]
    for job in jobs:
        job.result()
    return len(variants)
