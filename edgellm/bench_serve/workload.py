"""What is asked: requests with arrival times, prompts and answer lengths, synthetic or recorded."""

from __future__ import annotations

import gzip
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from edgellm.errors import InvalidArgumentError

FIRST_TOKEN = 3  # ids below are special in most vocabularies
TRACE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a workload.

    Attributes:
        arrival: seconds from the start; ignored where a fixed number of clients asks one after the other.
        prompt: text or token ids.
        output_tokens: tokens to generate; the model's end token is ignored.
    """

    arrival: float
    prompt: str | list[int]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens: `128` (always), `64-256` (uniform), `lognormal:200:0.5` (median, sigma)."""

    low: int
    high: int
    sigma: float = 0.0

    @classmethod
    def parse(cls, option: str, text: str) -> Lengths:
        """Raises: InvalidArgumentError, naming the option."""
        for pattern in (r"(?P<low>\d+)", r"(?P<low>\d+)-(?P<high>\d+)", r"lognormal:(?P<low>\d+):(?P<sigma>\d*\.?\d+)"):
            match = re.fullmatch(pattern, text.strip())
            if match:
                found = match.groupdict()
                low = int(found["low"])
                lengths = cls(low, int(found.get("high") or low), float(found.get("sigma") or 0.0))
                if 1 <= lengths.low <= lengths.high:
                    return lengths
        raise InvalidArgumentError(
            f"{option} is {text!r}; write 128 (always), 64-256 (uniform) or lognormal:200:0.5 (median and sigma), at "
            "least 1"
        )

    def draw(self, rng: Random) -> int:
        """One length, at least 1."""
        if self.sigma:
            return max(1, round(self.low * math.exp(rng.gauss(0.0, self.sigma))))
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticOptions:
    """Random prompts, some of which begin with a common text.

    Attributes:
        rate: arrivals a second, exponential gaps; None: all arrive at once (for a fixed number of clients).
        prompt_tokens, output_tokens: lengths; the prompt's includes a shared prefix.
        shared_prefix_share: part of the requests that begin with one of the shared prefixes, 0 to 1.
        shared_prefix_tokens: length of a shared prefix; at least one token of a prompt is its own.
        shared_prefixes: how many different ones there are.
    """

    requests: int
    rate: float | None
    prompt_tokens: Lengths
    output_tokens: Lengths
    shared_prefix_share: float = 0.0
    shared_prefix_tokens: int = 0
    shared_prefixes: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise InvalidArgumentError(f"--requests is {self.requests}; it must be at least 1")
        if self.rate is not None and not (math.isfinite(self.rate) and self.rate > 0):
            raise InvalidArgumentError(f"--rate is {self.rate}; it must be above 0 requests a second")
        if not 0 <= self.shared_prefix_share <= 1:
            raise InvalidArgumentError(f"--shared-prefix is {self.shared_prefix_share}; it must be from 0 to 1")
        if self.shared_prefix_tokens < 0 or self.shared_prefixes < 1:
            raise InvalidArgumentError(
                f"--shared-prefix-tokens is {self.shared_prefix_tokens} and --shared-prefixes {self.shared_prefixes}; "
                "they must be at least 0 and 1"
            )


def synthetic(options: SyntheticOptions, vocab_size: int) -> list[PlannedRequest]:
    """The same requests for the same options and vocabulary, on every machine."""
    rng = Random(options.seed)
    prefixes = [_tokens(rng, options.shared_prefix_tokens, vocab_size) for _ in range(options.shared_prefixes)]
    planned, clock = [], 0.0
    for _ in range(options.requests):
        length = options.prompt_tokens.draw(rng)
        shares, prefix = rng.random() < options.shared_prefix_share, rng.choice(prefixes)
        head = prefix[: length - 1] if shares else []
        prompt = head + _tokens(rng, length - len(head), vocab_size)
        planned.append(PlannedRequest(clock, prompt, options.output_tokens.draw(rng)))
        clock += rng.expovariate(options.rate) if options.rate else 0.0
    return planned


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedOptions:
    """A file with one JSON object a line (`.gz` may be compressed).

    Fields of a line: `timestamp` (milliseconds from the start; 0 when absent); `prompt` (text), or `input_length` in
    tokens with `hash_ids` (equal ids stand for the same block of `TRACE_BLOCK_TOKENS` tokens after the same prefix) -
    without `hash_ids` the prompt is all its own; `output_length`.

    Attributes:
        limit: so many lines at most.
        block_tokens: tokens that a block of a recorded prompt becomes here; prompts shrink in proportion, so that a
            small model can play a trace of long ones and share the same parts.
        max_output_tokens: answers are cut to it; None keeps them.
        speed: 2.0 plays twice as fast.
    """

    path: Path
    limit: int
    block_tokens: int = TRACE_BLOCK_TOKENS
    max_output_tokens: int | None = None
    speed: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise InvalidArgumentError(f"--requests is {self.limit}; it must be at least 1")
        if not 1 <= self.block_tokens <= TRACE_BLOCK_TOKENS:
            raise InvalidArgumentError(
                f"--block-tokens is {self.block_tokens}; it must be from 1 to {TRACE_BLOCK_TOKENS}"
            )
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise InvalidArgumentError(f"--max-output-tokens is {self.max_output_tokens}; it must be at least 1")
        if not (math.isfinite(self.speed) and self.speed > 0):
            raise InvalidArgumentError(f"--speed is {self.speed}; it must be above 0")


def recorded(options: RecordedOptions, vocab_size: int) -> list[PlannedRequest]:
    """The first requests of a recording, with pseudo-random tokens for each block.

    Raises:
        InvalidArgumentError: the file cannot be read, or a line is malformed; names the line.
    """
    opener = gzip.open if options.path.suffix == ".gz" else open
    planned: list[PlannedRequest] = []
    try:
        with opener(options.path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    planned.append(_recorded_request(line, number, options, vocab_size))
                if len(planned) == options.limit:
                    break
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"cannot read the recording {options.path}: {error}") from error
    if not planned:
        raise InvalidArgumentError(f"the recording {options.path} has no requests; it needs one JSON object a line")
    return planned


def _recorded_request(line: str, number: int, options: RecordedOptions, vocab_size: int) -> PlannedRequest:
    where = f"{options.path}, line {number}"
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise InvalidArgumentError(f"{where}: no JSON ({error})") from error
    if not isinstance(entry, dict):
        raise InvalidArgumentError(f"{where}: a {type(entry).__name__}; each line is one JSON object")
    output = _number(entry, "output_length", where, least=1, kind=int)
    if options.max_output_tokens is not None:
        output = min(output, options.max_output_tokens)
    arrival = _number(entry, "timestamp", where, least=0, default=0) / 1000.0 / options.speed
    return PlannedRequest(arrival, _recorded_prompt(entry, number, where, options, vocab_size), int(output))


def _recorded_prompt(
    entry: dict[str, Any], number: int, where: str, options: RecordedOptions, vocab_size: int
) -> str | list[int]:
    if "prompt" in entry:
        if not isinstance(entry["prompt"], str) or not entry["prompt"]:
            raise InvalidArgumentError(f"{where}: prompt is {entry['prompt']!r}; it must be text")
        return str(entry["prompt"])
    recorded_length = _number(entry, "input_length", where, least=1, kind=int)
    length = max(1, math.ceil(recorded_length * options.block_tokens / TRACE_BLOCK_TOKENS))
    blocks = entry.get("hash_ids", [])
    if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
        raise InvalidArgumentError(f"{where}: hash_ids is {blocks!r}; it must be a list of integers")
    prompt: list[int] = []
    for block in blocks:
        prompt += _tokens(Random(f"{options.seed}:{block}"), options.block_tokens, vocab_size)
    rest = _tokens(Random(f"{options.seed}:line:{number}"), max(0, length - len(prompt)), vocab_size)
    return prompt[:length] + rest


def _number(
    entry: dict[str, Any], name: str, where: str, *, least: int, default: int | None = None, kind: Any = (int, float)
) -> Any:
    value = entry.get(name, default)
    if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(value) or value < least:
        raise InvalidArgumentError(f"{where}: {name} is {value!r}; it must be a number of at least {least}")
    return value


def _tokens(rng: Random, count: int, vocab_size: int) -> list[int]:
    return rng.choices(range(min(FIRST_TOKEN, vocab_size - 1), vocab_size), k=count)
