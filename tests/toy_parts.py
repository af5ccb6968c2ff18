"""An `LLM`'s or engine's parts over the integer toy model: exact text, real cache, and steps that can be held."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from edgellm.assembly import Parts
from edgellm.cache.types import DeploymentConfig
from edgellm.engine.config import EngineConfig
from edgellm.memory import MemoryBudget
from edgellm.plugins import load_plugins
from edgellm.prompts import PromptLimits
from edgellm.runtime.rank_runtime import LLMRankRuntime
from edgellm.testing.toy import ToyExecutor
from edgellm.testing.toy_tokenizer import ToyTokenizer

VOCAB = 300
PAGE = 4
NUM_PAGES = 128
MAX_LEN = 256


class HeldExecutor(ToyExecutor):
    """A toy executor whose forward waits while `gate` is cleared, and takes `seconds` more."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.gate = threading.Event()
        self.gate.set()
        self.seconds = 0.0
        self.forwards = 0

    def forward(self, batch: Any) -> torch.Tensor:
        assert self.gate.wait(60), "nobody opened the gate"
        if self.seconds:
            time.sleep(self.seconds)
        self.forwards += 1
        return super().forward(batch)


def toy_parts(*, num_pages: int = NUM_PAGES, max_batch_size: int = 4, config: EngineConfig | None = None) -> Parts:
    executor = HeldExecutor(vocab_size=VOCAB, num_pages=num_pages, page_size=PAGE)
    deployment = DeploymentConfig(
        max_batch_size=max_batch_size, max_input_length=32, max_kv_capacity=MAX_LEN, page_size=PAGE, num_pages=num_pages
    )
    tokenizer = ToyTokenizer(VOCAB)
    runtime = LLMRankRuntime(
        executor, tokenizer, deployment, plugins=load_plugins(autoload=False), model_fingerprint="toy", kv_dtype="int64"
    )
    executor.watch(runtime.coordinator.manager.pools)
    limits = PromptLimits(vocab_size=VOCAB, max_model_len=MAX_LEN, pool_tokens=num_pages * PAGE, headroom_tokens=1)
    budget = MemoryBudget(bytes_per_page=8 * PAGE, num_pages=num_pages, page_size=PAGE, max_model_len=MAX_LEN)
    return Parts("toy", runtime, tokenizer, config or EngineConfig(step_token_budget=32), limits, budget)


def executor_of(parts: Parts) -> HeldExecutor:
    executor = parts.runtime.executor
    assert isinstance(executor, HeldExecutor)
    return executor


def hold_after(parts: Parts, steps: int) -> Callable[[], bool]:
    """Close the executor's gate after so many steps; whether the actor stands there."""
    executor = executor_of(parts)
    run = executor.forward
    standing = threading.Event()

    def forward(batch: Any) -> torch.Tensor:
        if executor.forwards == steps:
            executor.gate.clear()
            standing.set()
        return run(batch)

    executor.forward = forward  # type: ignore[method-assign]
    return standing.is_set


def wait_until_idle(host: Any) -> None:
    """Nothing pending and nobody resident in an `LLM`, `Engine` or `AsyncEngine`; without further traffic."""
    engine = host._frontend.engine
    deadline = time.monotonic() + 60
    while (engine.pending() or engine.resident()) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert (engine.pending(), engine.resident()) == (0, 0)
