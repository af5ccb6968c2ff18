"""Many clients on one real (tiny, random) checkpoint: arrivals, cancellations and bad input disturb nobody."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgellm import LLM, SamplingParams
from edgellm.errors import AdmissionError, CallerError, InputTooLongError, InvalidArgumentError, RequestCancelled

KV_TOKENS = 1024
VOCAB = 257


@pytest.fixture(scope="module")
def llm(tiny_model_dir: Path) -> Iterator[LLM]:
    with LLM(tiny_model_dir, dtype="float32", kv_budget=KV_TOKENS, page_size=8, max_batch_size=6) as model:
        yield model


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def wait_until_idle(model: LLM) -> None:
    deadline = time.monotonic() + 10
    while (model._engine.pending() or model._engine.resident()) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert (model._engine.pending(), model._engine.resident()) == (0, 0)


def leased_pages(model: LLM) -> int:
    from edgellm.testing.recount import recount

    return recount(model._runtime.coordinator).leased


@pytest.mark.parametrize("seed", range(3))
def test_sixteen_arrivals_equal_their_solo_runs_while_eight_are_cancelled(llm: LLM, seed: int) -> None:
    dice = random.Random(seed)
    prompts = [[dice.randrange(1, VOCAB) for _ in range(dice.randrange(1, 90))] for _ in range(16)]
    for index in range(4, 16, 4):
        prompts[index] = prompts[index - 1][:40] + prompts[index]  # some share a prefix
    lengths = [dice.randrange(4, 40) for _ in range(16)]
    alone = [llm.generate(p, greedy(n), use_cache=False)[0].token_ids for p, n in zip(prompts, lengths, strict=True)]
    cancelled = set(dice.sample(range(16), 8))

    streams = []
    for index in range(16):
        streams.append(llm.stream(prompts[index], greedy(lengths[index])))
        time.sleep(dice.random() * 0.01)
    for index in sorted(cancelled, key=lambda _: dice.random()):
        time.sleep(dice.random() * 0.005)
        streams[index].cancel()
    for index, stream in enumerate(streams):
        tokens = [token for chunk in stream.chunks() for token in chunk.token_ids]
        if index not in cancelled:
            assert tokens == alone[index]
        else:
            assert tokens == alone[index][: len(tokens)]
    wait_until_idle(llm)
    gauge = llm.cache_metrics().base_kv_pages
    assert gauge.capacity == KV_TOKENS // 8
    assert leased_pages(llm) == 0


BAD_CALLS = {
    "empty prompt": (lambda llm: llm.generate("", greedy(4)), AdmissionError, "empty"),
    "empty ids": (lambda llm: llm.generate([[]], greedy(4)), AdmissionError, "empty"),
    "id out of range": (lambda llm: llm.generate([1, VOCAB], greedy(4)), CallerError, str(VOCAB)),
    "negative id": (lambda llm: llm.generate([1, -1], greedy(4)), CallerError, "-1"),
    "never fits": (lambda llm: llm.generate([1] * 600, greedy(4)), InputTooLongError, "600"),
    "max_tokens 0": (lambda llm: llm.generate("x", SamplingParams(max_tokens=0)), InvalidArgumentError, "max_tokens"),
    "max_tokens -3": (lambda llm: llm.generate("x", SamplingParams(max_tokens=-3)), InvalidArgumentError, "-3"),
    "NaN": (lambda llm: llm.generate("x", SamplingParams(temperature=float("nan"))), InvalidArgumentError, "nan"),
    "infinite": (lambda llm: llm.generate("x", SamplingParams(top_p=float("inf"))), InvalidArgumentError, "inf"),
    "unknown role": (lambda llm: llm.chat([{"role": "wizard", "content": "x"}]), AdmissionError, "wizard"),
}


@pytest.mark.parametrize(("call", "error", "named"), BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_bad_input_is_named_and_a_stream_beside_it_runs_on(llm: LLM, call, error, named) -> None:
    expected = llm.generate("beside", greedy(60), use_cache=False)[0].token_ids
    stream = llm.stream("beside", greedy(60), use_cache=False)
    chunks = stream.chunks()
    seen = list(next(chunks).token_ids)
    with pytest.raises(error, match=named):
        call(llm)
    for chunk in chunks:
        seen += chunk.token_ids
    assert seen == expected


def test_a_caller_that_goes_away_leaves_nothing_behind(llm: LLM) -> None:
    stopped = threading.Event()

    def read_a_little() -> None:
        stream = llm.stream("going away", greedy(400))
        next(iter(stream))
        stream.cancel()
        with pytest.raises(RequestCancelled):
            _ = stream.output
        stopped.set()

    readers = [threading.Thread(target=read_a_little) for _ in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(30)
    assert stopped.is_set()
    wait_until_idle(llm)
    assert leased_pages(llm) == 0
