"""What the requests of `engine_traffic` are, where each is cancelled, and how its caller behaves."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from edgellm.errors import RequestTimedOut
from edgellm.request import LLMGenerationRequest
from edgellm.sampling.params import SamplingParams

if TYPE_CHECKING:
    from edgellm.engine.records import RequestHandle

STATES = ("queued", "admitted", "first chunk", "later chunk", "mixed step", "decoding", "inside a step", "last token")
CALLERS = ("stream", "stream, closed early", "get", "get, given up", "task", "task, cancelled", "nobody waits")
LEAVING = ("stream, closed early", "get, given up", "task, cancelled")
"""Callers whose going away may cancel the request."""
PATIENCE_SECONDS = 60.0
LONGEST_ANSWER = 12


@dataclass(slots=True)
class Errand:
    """One request and how its caller behaves.

    Attributes:
        number: from 1; also the request's seed, by which the session's side finds the errand again.
        cancel_at: state in which it is cancelled; None never.
        decode_rows: decode rows that it runs before a cancel "decoding".
        hit: whether the cancel came in that state.
        endings: outcomes announced.
        streamed: tokens its caller read.
        steps_after_cancel: steps that named it after its cancel; more than one would be late.
    """

    number: int
    request: LLMGenerationRequest
    cancel_at: str | None
    caller: str
    decode_rows: int
    handle: RequestHandle | None = None
    hit: bool = False
    endings: int = 0
    streamed: list[int] = field(default_factory=list)
    steps_after_cancel: int = 0

    @property
    def may_be_cancelled(self) -> bool:
        """Whether somebody cancelled it, or its caller or its deadline may have; nothing else may end it so."""
        by_somebody = self.hit or self.cancel_at == "queued" or self.caller in LEAVING
        return by_somebody or self.request.timeout_seconds is not None

    @property
    def prompt(self) -> list[int]:
        return list(cast("list[int]", self.request.prompt_token_ids))


class ErrandMaker:
    """Random errands that share the beginnings of their prompts."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._stems = [self._tokens(24) for _ in range(10)]

    def make(self, number: int) -> Errand:
        rng = self._rng
        cancel_at = rng.choice(STATES) if rng.random() < 0.5 else None
        chunked = cancel_at in ("later chunk", "mixed step")
        stem = rng.choice(self._stems)[: 24 if chunked else rng.randint(1, 24)]
        max_tokens = rng.randint(4 if cancel_at == "decoding" else 1, LONGEST_ANSWER)
        request = LLMGenerationRequest(
            prompt_token_ids=[*stem, *self._tokens(rng.randint(8, 20) if chunked else rng.randint(0, 20))],
            sampling=SamplingParams(
                temperature=0.0,
                ignore_eos=True,
                max_tokens=max_tokens,
                seed=number,
                logprobs=2 if rng.random() < 0.2 else None,
            ),
            priority=rng.choice((-1, 0, 0, 0, 1)),
            timeout_seconds=rng.uniform(0.001, 0.05) if rng.random() < 0.04 else None,
        )
        caller = rng.choices(CALLERS, weights=(5, 1, 5, 1, 3, 1, 1))[0]
        return Errand(number, request, cancel_at, caller, decode_rows=rng.randint(0, 2))

    def _tokens(self, count: int) -> list[int]:
        return self._rng.choices(range(3, 500), k=count)


# ---- callers ------------------------------------------------------------------------------------------


def _read_stream(handle: RequestHandle, errand: Errand) -> None:
    for chunk in handle.stream():
        errand.streamed += chunk.token_ids
    handle.get(PATIENCE_SECONDS)


def _close_stream(handle: RequestHandle, errand: Errand) -> None:
    for chunk in handle.stream():
        errand.streamed += chunk.token_ids
        break
    handle.cancel()


def _get(handle: RequestHandle, errand: Errand) -> None:
    handle.get(PATIENCE_SECONDS)


def _give_up(handle: RequestHandle, errand: Errand) -> None:
    try:
        handle.get(0.0005)
    except RequestTimedOut:
        raise
    except TimeoutError:
        handle.cancel()


def _await(handle: RequestHandle, errand: Errand) -> None:
    asyncio.run(asyncio.wait_for(handle.get_async(), PATIENCE_SECONDS))


def _cancel_task(handle: RequestHandle, errand: Errand) -> None:
    async def leave() -> None:
        task = asyncio.ensure_future(handle.get_async())
        await asyncio.sleep(0.0005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())


def _drop(handle: RequestHandle, errand: Errand) -> None:
    """Nobody waits; the request runs to its end."""


BEHAVIOUR = dict(zip(CALLERS, (_read_stream, _close_stream, _get, _give_up, _await, _cancel_task, _drop), strict=True))
"""How a caller takes its answer, or goes away, by the names in `CALLERS`."""
