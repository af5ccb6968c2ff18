"""The CUDA lines of `edgellm doctor`: the device and its versions, the compiled kernels, and one kernel's numbers."""

from __future__ import annotations

import torch

from edgellm.memory import count, format_bytes
from edgellm.runtime.device_choice import why_unusable

# Rows and width of the self-test, and how far float32 sums in another order may be apart.
SELF_TEST_SHAPE = (5, 768)
SELF_TEST_TOLERANCE = 1e-5


def first_device() -> torch.device:
    """torch's current CUDA device; number 0 where there is none."""
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)


def why_not_used() -> str:
    """Why this machine computes on the CPU; empty where it computes on a GPU."""
    return why_unusable(first_device())


def describe_device() -> str:
    """Name, architecture and memory of the device, then the versions that kernels depend on."""
    from edgellm.kernels import _launch
    from edgellm.kernels.cu import compiler
    from edgellm.kernels.cu.launch import device_limits

    device = first_device()
    limits = device_limits(device)
    free, total = torch.cuda.mem_get_info(device)
    return (
        f"{torch.cuda.get_device_name(device)} (sm_{limits.arch}, {count(limits.sm_count, 'multiprocessor')}, "
        f"{format_bytes(free)} of {format_bytes(total)} free); driver for CUDA {_version(_launch.driver_version())}, "
        f"torch's runtime {torch.version.cuda}, NVRTC {'.'.join(map(str, compiler.version()))}"
    )


def _version(number: int) -> str:
    """ "13.0" of 13000."""
    return f"{number // 1000}.{number % 1000 // 10}"


def count_kernels(arch: int) -> tuple[int, int, int]:
    """(kernels, variants that this architecture can run, how many of those are compiled and kept on disk)."""
    from edgellm.kernels.cu import loader, spec

    usable = [one for one in spec.registry() if one.supports(arch)]
    cached = sum(loader.is_cached(one, variant.key, arch) for one in usable for variant in one.variants)
    return len(usable), sum(len(one.variants) for one in usable), cached


def describe_kernels() -> str:
    from edgellm.kernels.cu.launch import device_limits

    kernels, variants, cached = count_kernels(device_limits(first_device()).arch)
    return f"{count(kernels, 'kernel')} in {count(variants, 'variant')}, {cached} of them compiled"


def self_test_error() -> float:
    """Largest relative difference between one of our kernels and torch's float64, on fixed rows.

    Raises:
        KernelError, StepDeviceError: it does not compile, or does not run.
    """
    from edgellm.kernels.cu.rms_norm import rms_norm

    device = first_device()
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(SELF_TEST_SHAPE, generator=generator)
    weight = torch.rand(SELF_TEST_SHAPE[1], generator=generator) + 0.5
    out = torch.empty_like(rows, device=device)
    rms_norm(rows.to(device), weight.to(device), 1e-6, out)
    wide = rows.double()
    expected = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
    return float(((out.cpu().double() - expected).abs() / expected.abs().clamp_min(1e-3)).max())
