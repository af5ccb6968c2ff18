"""One prompt answered by two models in turns, so that what else the machine does meets both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgellm.terminal import waiting

if TYPE_CHECKING:
    from rich.console import Console

    from edgellm.llm import LLM
    from edgellm.outputs import RequestOutput
    from edgellm.sampling.params import SamplingParams

REPEATS = 3
LEGEND = (
    f"tok/s: the best of {REPEATS} runs each way, taken in turns; it depends on the machine and on what else it does.  "
    "steps: how often the model ran for the answer; that does not."
)


@dataclass(frozen=True, slots=True)
class Pair:
    """The answers to one prompt, plain and with a decoder.

    Attributes:
        plain_runs, fast_runs: in the order in which they were taken; only the first finds the cache as it was.
    """

    task: str
    plain_runs: tuple[RequestOutput, ...]
    fast_runs: tuple[RequestOutput, ...]

    @property
    def plain(self) -> RequestOutput:
        """The fastest plain run."""
        return max(self.plain_runs, key=_rate)

    @property
    def fast(self) -> RequestOutput:
        """The fastest run with the decoder."""
        return max(self.fast_runs, key=_rate)

    @property
    def same(self) -> bool:
        """Whether all runs gave the same tokens."""
        return len({tuple(run.token_ids) for run in (*self.plain_runs, *self.fast_runs)}) == 1

    @property
    def steps(self) -> int:
        """How often the model ran for the fast answer: a kept proposal saves one."""
        return len(self.fast.token_ids) - self.fast.accepted_draft_tokens

    def cells(self) -> list[str]:
        """The columns of `HEADINGS`."""
        plain, fast = _rate(self.plain), _rate(self.fast)
        return [
            str(len(self.fast.token_ids)),
            str(self.fast.proposed_draft_tokens),
            str(self.fast.accepted_draft_tokens),
            str(self.steps),
            f"{plain:.1f}",
            f"{fast:.1f}",
            f"{fast / max(plain, 0.001):.2f}x",
        ]


HEADINGS = ("tokens", "proposed", "kept", "steps", "tok/s\nplain", "tok/s\nspec.", "faster")


def ask_in_turns(
    plain: LLM, fast: LLM, messages: list[dict[str, Any]], params: SamplingParams, console: Console, *, task: str
) -> Pair:
    """Chat with both, `REPEATS` times.

    Args:
        task: shown while it runs.
    """
    runs: dict[str, list[RequestOutput]] = {"plain decoding": [], "with proposals": []}
    for _ in range(REPEATS):
        for (way, outputs), llm in zip(runs.items(), (plain, fast), strict=True):
            with waiting(console, f"{task}: {way}"):
                outputs += llm.chat(messages, params)
    plain_runs, fast_runs = (tuple(outputs) for outputs in runs.values())
    return Pair(task, plain_runs, fast_runs)


def _rate(output: RequestOutput) -> float:
    return output.timings.tokens_per_second
