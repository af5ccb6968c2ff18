"""A tiny Qwen hybrid behind `LLM`, watched: the recurrent state with which every row of every step begins."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import torch

from edgellm import LLM, SamplingParams, SpeculativeOptions
from edgellm.cache.types import ContextCacheCommitPolicy, ContextCacheLookupPolicy, ResourceType
from edgellm.request import LLMGenerationRequest
from edgellm.runtime.batch import resources_of
from edgellm.testing.recount import recount

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from edgellm.decoding.base import DecodingSeat
    from edgellm.engine.records import RequestHandle
    from edgellm.request import LLMGenerationResponse
    from edgellm.runtime.batch import RaggedBatch
    from edgellm.testing.recount import Recount

FLAVOURS = {"plain": None, "lookup": "prompt_lookup", "mtp": "mtp"}
SPECULATIVE = ["lookup", "mtp"]
WAIT_SECONDS = 60.0
NUM_DRAFTS = 3


class RealHybrid:
    """One `LLM`, driven by requests that name their checkpoint boundaries.

    Attributes:
        states: (text so far, in tokens) to the recurrent and conv state of every layer with which a step over its last
            token began: the state behind all of them.
        most_pages: most base pages that were not free when a step began.
    """

    def __init__(self, folder: Path, flavour: str, **options: Any) -> None:
        kind = FLAVOURS[flavour]
        speculative = None if kind is None else SpeculativeOptions(decoder=kind, num_drafts=NUM_DRAFTS, adaptive=False)
        options = {"kv_budget": 16384, "page_size": 8, "max_batch_size": 4, **options}
        self.llm = LLM(folder, device="cpu", speculative=speculative, **options)
        self.runtime = self.llm._frontend.open_runtime("RealHybrid")
        self.states: dict[tuple[tuple[int, ...], int], list[torch.Tensor]] = {}
        self.most_pages = 0
        self._prompts: dict[int, tuple[int, ...]] = {}
        self._live = resources_of(self.runtime.executor).snapshot_storage._live_rows
        decoder: Any = self.runtime.decoder
        self._seat, self._run_step = decoder.seat, decoder.run_step
        decoder.seat, decoder.run_step = self._note_seat, self._note_states

    def __enter__(self) -> RealHybrid:
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.close()

    def _note_seat(self, executor: Any, seat: DecodingSeat) -> None:
        self._prompts[seat.slot] = tuple(seat.prompt.tolist())
        self._seat(executor, seat)

    def _note_states(self, executor: Any, batch: RaggedBatch, *rest: Any) -> Any:
        pools, page = self.runtime.coordinator.manager.pools, ResourceType.BASE_KV_PAGE
        self.most_pages = max(self.most_pages, pools.capacity(page) - pools.free_count(page))
        for slot, past in zip(batch.state_index.tolist(), batch.past_len.tolist(), strict=True):
            self.states[self._prompts[slot], past] = [_as_floats(piece).clone() for piece in self._live[slot]]
        return self._run_step(executor, batch, *rest)

    # ---- requests -----------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int = 6,
        *,
        boundaries: Sequence[int] = (),
        salt: str | None = None,
        cold: bool = False,
        commit_policy: ContextCacheCommitPolicy = ContextCacheCommitPolicy.INCLUDING_GENERATED_TOKENS,
        timeout_seconds: float | None = None,
        **sampling: Any,
    ) -> RequestHandle:
        """Args:
        cold: neither read nor publish.
        """
        params = {"temperature": 0.0, "ignore_eos": True, **sampling}
        lookup = ContextCacheLookupPolicy.BYPASS if cold else ContextCacheLookupPolicy.USE_CACHE
        request = LLMGenerationRequest(
            prompt_token_ids=list(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, **params),
            checkpoint_boundaries=boundaries,
            cache_salt=salt,
            lookup_policy=lookup,
            commit_policy=commit_policy,
            timeout_seconds=timeout_seconds,
        )
        return self.llm._frontend.submit(request)

    def ask(self, prompt: Sequence[int], max_tokens: int = 6, **options: Any) -> LLMGenerationResponse:
        return self.submit(prompt, max_tokens, **options).get(WAIT_SECONDS)

    # ---- afterwards ---------------------------------------------------------------------------------------

    def recount_idle(self) -> Recount:
        """The pools once nobody is resident."""
        engine = self.llm._frontend.open_engine("RealHybrid")
        deadline = time.monotonic() + WAIT_SECONDS
        while engine.pending() or engine.resident():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{engine.pending()} requests have no outcome after {WAIT_SECONDS} s")
            time.sleep(0.002)
        return recount(self.runtime.coordinator)


def require_same_states(one: RealHybrid, other: RealHybrid, *, at_least: int) -> None:
    """Wherever both stood behind the same tokens of the same request, recurrent and conv state agree up to rounding."""
    shared = [place for place in one.states if place in other.states and place[1]]
    assert len(shared) >= at_least, f"only {len(shared)} states can be compared"
    for prompt, past in shared:
        pairs = zip(one.states[prompt, past], other.states[prompt, past], strict=True)
        for number, (piece, twin) in enumerate(pairs):
            error = float((piece - twin).abs().max() / twin.abs().max())
            assert error < 1e-4, f"state {number} behind token {past} of {len(prompt)}: off by {error} of its size"


def _as_floats(row: torch.Tensor) -> torch.Tensor:
    """A row of the snapshot storage, which copies in words."""
    return row if row.dtype == torch.float32 else row.view(torch.float32)


def random_tokens(seed: int, count: int, *, vocab_size: int = 257) -> list[int]:
    return random.Random(seed).choices(range(1, vocab_size), k=count)
