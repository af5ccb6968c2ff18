"""Tokens per second with prompt lookup against plain decoding, on the default model, in one process and one run.

    pytest bench/bench_prompt_lookup.py                        # times; ratios and acceptance in extra_info
    pytest bench/bench_prompt_lookup.py --benchmark-disable    # smoke test: equal texts

`summarise`: parts of a manual with a task that makes the answer quote it.  `unrelated`: prompts of random words, whose
answers repeat nothing much: what speculation costs where it does not pay.  Both engines hold the prompts in their
caches before anything is timed, so rounds decode and nothing else; they alternate, the plain round is the `setup` of
ours.  The texts must be equal (near ties apart) before anything is timed.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

from edgellm import LLM, SamplingParams, SpeculativeOptions
from edgellm.demo import load_document
from edgellm.fetch import DEFAULT_MODEL, PACKAGED_MODELS, ensure_model
from edgellm.outputs import RequestOutput

pytestmark = pytest.mark.model

ROUNDS = 3
NEW_TOKENS = {True: 64, False: 8}
PART_WORDS = 260
TASKS = (
    "Summarise the text above. Quote its sentences.",
    "Repeat the text above word for word.",
    "List the rules in the text above as they stand.",
    "Which numbers does the text above name? Copy the sentences.",
)


def summarise() -> list[str]:
    words = load_document().split()
    parts = [" ".join(words[start : start + PART_WORDS]) for start in range(0, len(TASKS) * PART_WORDS, PART_WORDS)]
    return [f"{part}\n\n{task}" for part, task in zip(parts, TASKS, strict=True)]


def unrelated() -> list[str]:
    words = sorted(set(load_document().split()))
    chosen = random.Random(3)
    return [" ".join(chosen.sample(words, 40)) + " Tell a story with these words." for _ in TASKS]


PROMPTS = {"summarise": summarise, "unrelated": unrelated}


def load(path: Path, speculative: SpeculativeOptions | None) -> LLM:
    return LLM(path, device="cpu", dtype="float32", kv_budget=8192, speculative=speculative)


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[LLM, LLM]]:
    """Plain decoding and prompt lookup."""
    path = ensure_model(PACKAGED_MODELS[DEFAULT_MODEL])
    with load(path, None) as plain, load(path, SpeculativeOptions(decoder="prompt_lookup")) as lookup:
        yield plain, lookup


def answers(llm: LLM, prompts: list[str], batch: int, num_new: int) -> list[RequestOutput]:
    """Answers to all prompts, so many at once."""
    params = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True)
    talks = [[{"role": "user", "content": prompt}] for prompt in prompts]
    groups = [talks[start : start + batch] for start in range(0, len(talks), batch)]
    return [output for group in groups for output in llm.chat(group, params)]


def decode_seconds(outputs: list[RequestOutput], batch: int) -> float:
    """Time behind the first tokens: of each answer alone, or of the longest of a group."""
    seconds = [(output.timings.total_ms - output.timings.time_to_first_token_ms) / 1e3 for output in outputs]
    return sum(max(seconds[start : start + batch]) for start in range(0, len(seconds), batch))


def share_of_equal_tokens(ours: list[RequestOutput], theirs: list[RequestOutput]) -> float:
    same = 0
    for one, two in zip(ours, theirs, strict=True):
        pairs = zip(one.token_ids, two.token_ids, strict=True)
        same += next((place for place, (left, right) in enumerate(pairs) if left != right), len(one.token_ids))
    return same / sum(len(output.token_ids) for output in theirs)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("kind", PROMPTS)
def test_prompt_lookup(benchmark: Any, both: tuple[LLM, LLM], kind: str, batch: int) -> None:
    plain, lookup = both
    timed = not benchmark.disabled
    prompts, num_new = PROMPTS[kind]()[: None if timed else 1], NEW_TOKENS[timed]
    expected = answers(plain, prompts, batch, num_new)
    assert share_of_equal_tokens(answers(lookup, prompts, batch, num_new), expected) > 0.9
    times: dict[str, list[float]] = {"plain": [], "lookup": []}
    latest: list[RequestOutput] = []

    def plain_round() -> None:
        times["plain"].append(decode_seconds(answers(plain, prompts, batch, num_new), batch))

    def lookup_round() -> None:
        latest[:] = answers(lookup, prompts, batch, num_new)
        times["lookup"].append(decode_seconds(latest, batch))

    if not timed:
        benchmark(lookup_round)
        return
    started = perf_counter()
    benchmark.pedantic(lookup_round, setup=plain_round, rounds=ROUNDS, warmup_rounds=1)
    median = {name: statistics.median(values[1:]) for name, values in times.items()}
    tokens = sum(len(output.token_ids) - 1 for output in latest)
    benchmark.extra_info.update(
        faster=round(median["plain"] / median["lookup"], 3),
        plain_tokens_per_second=round(tokens / median["plain"], 1),
        lookup_tokens_per_second=round(tokens / median["lookup"], 1),
        proposed=sum(output.proposed_draft_tokens for output in latest),
        kept=sum(output.accepted_draft_tokens for output in latest),
        tokens=tokens,
        seconds=round(perf_counter() - started, 1),
    )
