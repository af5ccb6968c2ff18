"""Workloads for the cache benchmarks: what is asked, token by token; no engine in sight.

Each is a list of turns, a turn being a prompt and the reply that will be generated, both contiguous int32.  The
workloads are drawn in a fixed order from a seeded generator, so they are the same on every machine and in every run.
"""

from __future__ import annotations

import gzip
import json
from array import array
from dataclasses import dataclass
from pathlib import Path
from random import Random

VOCAB_SIZE = 150_000
FIRST_TOKEN = 3  # ids below are special in most vocabularies
TRACE = Path(__file__).with_name("data") / "conversation_first2000.jsonl.gz"
TRACE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Turn:
    """prompt, reply: int32 token ids.  boundaries: ends of instructions and history, where the caller names them."""

    prompt: array[int]
    reply: array[int]
    boundaries: tuple[int, ...] = ()


def random_tokens(rng: Random, count: int) -> array[int]:
    return array("i", rng.choices(range(FIRST_TOKEN, VOCAB_SIZE), k=count))


def chat_turns(
    *,
    sessions: int = 2000,
    turns: int = 8,
    system_prompts: int = 4,
    system_tokens: int = 2048,
    user_tokens: tuple[int, int] = (32, 160),
    reply_tokens: tuple[int, int] = (16, 96),
    seed: int = 7,
) -> list[Turn]:
    """Multi-turn chat: many sessions that start over one window of time and think between their turns.

    A session opens with one of a few system prompts (the i-th is chosen with weight 1/i).  Each turn's prompt is the
    whole history plus a user message; the reply then joins the history.  Think times are exponential with a mean of
    1/16 of the window, so turns of different sessions interleave as in service.

    Returns:
        All turns in order of their time.
    """
    rng = Random(seed)
    systems = [random_tokens(rng, system_tokens) for _ in range(system_prompts)]
    order: list[tuple[float, int, int]] = []
    for session in range(sessions):
        time = rng.random()
        for turn in range(turns):
            order.append((time, session, turn))
            time += rng.expovariate(1.0) / 16
    order.sort()
    weights = [1 / rank for rank in range(1, system_prompts + 1)]
    history: list[array[int] | None] = [None] * sessions
    workload = []
    for _, session, _ in order:
        past = history[session]
        if past is None:
            past = history[session] = array("i", rng.choices(systems, weights)[0])
        past.extend(random_tokens(rng, rng.randint(*user_tokens)))
        prompt = array("i", past)
        reply = random_tokens(rng, rng.randint(*reply_tokens))
        past.extend(reply)
        workload.append(Turn(prompt, reply, (system_tokens, len(prompt))))
    return workload


def trace_turns(path: Path = TRACE, *, limit: int = 1500, max_reply: int = 32, seed: int = 11) -> list[Turn]:
    """The first `limit` requests of the recorded conversation trace (see data/README.md), replies cut short."""
    rng = Random(seed)
    blocks: dict[int, array[int]] = {}
    workload = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for _, line in zip(range(limit), lines, strict=False):
            request = json.loads(line)
            prompt = array("i")
            for name in request["hash_ids"]:
                if name not in blocks:
                    blocks[name] = random_tokens(Random(name * 2654435761 + seed), TRACE_BLOCK_TOKENS)
                prompt.extend(blocks[name])
            prompt = prompt[: max(2, request["input_length"])]
            reply = random_tokens(rng, max(1, min(max_reply, request["output_length"])))
            workload.append(Turn(prompt, reply))
    return workload


def distinct_pages(turns: list[Turn], page_size: int) -> tuple[int, float]:
    """How many different full pages (prompt and reply) a workload touches, and the hit rate of an endless pool."""
    seen: set[int] = set()
    hit = total = 0
    for turn in turns:
        tokens = turn.prompt + turn.reply
        name, leading = 0, True
        for end in range(page_size, len(tokens) + 1, page_size):
            name = hash((name, tokens[end - page_size : end].tobytes()))
            leading = leading and name in seen
            hit += page_size if leading and end < len(turn.prompt) else 0
            seen.add(name)
        total += len(turn.prompt)
    return len(seen), hit / total
