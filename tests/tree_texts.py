"""Prompts and settings of the tests that compare the text of trees with that of plain decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgellm import SamplingParams, StructuredOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

PROMPTS = ["the quick brown fox " * 3, "a", "0123456789" * 7, "in or out, that is: in or out", "zz top zz top zz"]


def settings_of(max_tokens: int) -> dict[str, SamplingParams]:
    """One of each kind that treats a verified token in a way of its own."""
    regex = StructuredOutput(regex="([a-f]{2,5} [0-9]+,){1,9}")
    return {
        "greedy": SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        "sampled": SamplingParams(max_tokens=max_tokens, temperature=0.9, top_k=20, seed=5, ignore_eos=True),
        "penalised": SamplingParams(max_tokens=max_tokens, temperature=0.7, frequency_penalty=0.3, seed=1, logprobs=2),
        "guided": SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=2, structured=regex),
    }


def ids(outputs: Sequence[Any]) -> list[list[int]]:
    """The answers."""
    return [output.token_ids for output in outputs]


def texts(*outputs: Sequence[Any]) -> list[tuple[list[int], list[int]]]:
    """Prompts and answers, as `HelpedTrees` takes them."""
    return [(output.prompt_token_ids, output.token_ids) for some in outputs for output in some]


def second_prompts(first: Sequence[Any]) -> list[list[int]]:
    """The turn behind each answer."""
    return [[*output.prompt_token_ids, *output.token_ids, 7, 8, 9] for output in first]
