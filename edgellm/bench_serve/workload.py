"""What is asked: requests with arrival times, prompts and answer lengths, synthetic or recorded."""

from __future__ import annotations

import gzip
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from edgellm.errors import InvalidArgumentError
from edgellm.foreign import describe_value

if TYPE_CHECKING:
    from collections.abc import Sequence

FIRST_TOKEN = 3  # ids below are special in most vocabularies
TRACE_BLOCK_TOKENS = 512
MAX_LENGTH_TOKENS = 1 << 20
MAX_ARRIVAL_SECONDS = 30 * 86400.0


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
        low, high, sigma = r"(?P<low>\d{1,9})", r"(?P<high>\d{1,9})", r"(?P<sigma>\d*\.?\d+)"
        for pattern in (low, f"{low}-{high}", f"lognormal:{low}:{sigma}"):
            match = re.fullmatch(pattern, text.strip())
            if match:
                found = match.groupdict()
                least = int(found["low"])
                lengths = cls(least, int(found.get("high") or least), float(found.get("sigma") or 0.0))
                if 1 <= lengths.low <= lengths.high <= MAX_LENGTH_TOKENS:
                    return lengths
        raise InvalidArgumentError(
            f"{option} is {text!r}; write 128 (always), 64-256 (uniform) or lognormal:200:0.5 (median and sigma), at "
            f"least 1 and at most {MAX_LENGTH_TOKENS} tokens"
        )

    def draw(self, rng: Random) -> int:
        """One length, at least 1.

        Raises:
            InvalidArgumentError: it is beyond `MAX_LENGTH_TOKENS`.
        """
        if not self.sigma:
            return rng.randint(self.low, self.high)
        exponent = rng.gauss(0.0, self.sigma)
        if math.log(self.low) + exponent > math.log(MAX_LENGTH_TOKENS):
            raise InvalidArgumentError(
                f"lognormal:{self.low}:{self.sigma} draws lengths above {MAX_LENGTH_TOKENS} tokens; lower the median "
                "or sigma"
            )
        return max(1, round(self.low * math.exp(exponent)))


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
        if self.rate is not None and (self.requests - 1) / MAX_ARRIVAL_SECONDS > self.rate:
            raise InvalidArgumentError(
                f"--rate is {self.rate}: {self.requests} requests would arrive over more than "
                f"{MAX_ARRIVAL_SECONDS / 86400:.0f} days; raise it or lower --requests"
            )
        if not 0 <= self.shared_prefix_share <= 1:
            raise InvalidArgumentError(f"--shared-prefix is {self.shared_prefix_share}; it must be from 0 to 1")
        if not 0 <= self.shared_prefix_tokens <= MAX_LENGTH_TOKENS or self.shared_prefixes < 1:
            raise InvalidArgumentError(
                f"--shared-prefix-tokens is {self.shared_prefix_tokens} and --shared-prefixes {self.shared_prefixes}; "
                f"they must be from 0 to {MAX_LENGTH_TOKENS}, and at least 1"
            )


def synthetic(options: SyntheticOptions, vocab_size: int) -> list[PlannedRequest]:
    """The same requests for the same options and vocabulary, on every machine; arrivals and lengths for any vocabulary.

    Raises:
        InvalidArgumentError: a distribution draws a length that is too long.
    """
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


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One line of a recording, checked; its tokens are made once the vocabulary is known.

    Attributes:
        number: of the line, from 1.
        arrival: seconds from the start, at the speed that was asked for.
        prompt: its text, or None where the line says lengths only.
        length: tokens of the prompt, shrunk; 0 where there is text.
        blocks: ids of the shared blocks that it begins with.
    """

    number: int
    arrival: float
    output_tokens: int
    prompt: str | None
    length: int
    blocks: list[int]


def read_recording(options: RecordedOptions) -> list[RecordedRequest]:
    """The first lines of a recording, each of them checked.

    Raises:
        InvalidArgumentError: the file cannot be read, or a line is malformed; names the line.
    """
    opener = gzip.open if options.path.suffix == ".gz" else open
    found: list[RecordedRequest] = []
    try:
        with opener(options.path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    found.append(_recorded_request(line, number, options))
                if len(found) == options.limit:
                    break
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"cannot read the recording {options.path}: {error}") from error
    if not found:
        raise InvalidArgumentError(f"the recording {options.path} has no requests; it needs one JSON object a line")
    return found


def recorded(options: RecordedOptions, vocab_size: int) -> list[PlannedRequest]:
    """The first requests of a recording, with pseudo-random tokens for each block.

    Raises: as `read_recording`.
    """
    return replay(read_recording(options), options, vocab_size)


def replay(lines: Sequence[RecordedRequest], options: RecordedOptions, vocab_size: int) -> list[PlannedRequest]:
    """`recorded` for lines that were read before."""
    return [
        PlannedRequest(line.arrival, _recorded_prompt(line, options, vocab_size), line.output_tokens) for line in lines
    ]


def _recorded_request(line: str, number: int, options: RecordedOptions) -> RecordedRequest:
    where = f"{options.path}, line {number}"
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise InvalidArgumentError(f"{where}: no JSON ({error})") from error
    if not isinstance(entry, dict):
        raise InvalidArgumentError(f"{where}: a {type(entry).__name__}; each line is one JSON object")
    output = _number(entry, "output_length", where, least=1, most=MAX_LENGTH_TOKENS, kind=int)
    if options.max_output_tokens is not None:
        output = min(output, options.max_output_tokens)
    timestamp = _number(entry, "timestamp", where, least=0, most=1e300, default=0)
    arrival = timestamp / 1000.0 / options.speed
    if arrival > MAX_ARRIVAL_SECONDS:
        raise InvalidArgumentError(
            f"{where}: timestamp is {describe_value(timestamp)}, which --speed {options.speed} plays after more than "
            f"{MAX_ARRIVAL_SECONDS / 86400:.0f} days; raise --speed or shorten the recording"
        )
    if "prompt" in entry:
        if not isinstance(entry["prompt"], str) or not entry["prompt"]:
            raise InvalidArgumentError(f"{where}: prompt is {entry['prompt']!r}; it must be text")
        return RecordedRequest(number, arrival, output, entry["prompt"], 0, [])
    longest = MAX_LENGTH_TOKENS * TRACE_BLOCK_TOKENS // options.block_tokens
    recorded_length = _number(entry, "input_length", where, least=1, most=longest, kind=int)
    length = max(1, math.ceil(recorded_length * options.block_tokens / TRACE_BLOCK_TOKENS))
    blocks = entry.get("hash_ids", [])
    if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
        raise InvalidArgumentError(f"{where}: hash_ids is {blocks!r}; it must be a list of integers")
    return RecordedRequest(number, arrival, output, None, length, blocks)


def _recorded_prompt(line: RecordedRequest, options: RecordedOptions, vocab_size: int) -> str | list[int]:
    if line.prompt is not None:
        return line.prompt
    prompt: list[int] = []
    for block in line.blocks[: -(-line.length // options.block_tokens)]:
        prompt += _tokens(Random(f"{options.seed}:{block}"), options.block_tokens, vocab_size)
    rest = _tokens(Random(f"{options.seed}:line:{line.number}"), max(0, line.length - len(prompt)), vocab_size)
    return prompt[: line.length] + rest


def _number(
    entry: dict[str, Any],
    name: str,
    where: str,
    *,
    least: int,
    most: float,
    default: int | None = None,
    kind: Any = (int, float),
) -> Any:
    value = entry.get(name, default)
    if isinstance(value, bool) or not isinstance(value, kind) or not value >= least:
        raise InvalidArgumentError(f"{where}: {name} is {value!r}; it must be a number of at least {least}")
    if value > most:
        raise InvalidArgumentError(f"{where}: {name} is {describe_value(value)}; it must be at most {most:.6g}")
    return value


def _tokens(rng: Random, count: int, vocab_size: int) -> list[int]:
    return rng.choices(range(min(FIRST_TOKEN, vocab_size - 1), vocab_size), k=count)
