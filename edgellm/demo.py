"""The demonstration: four questions about a 2,000-token document, asked cold and warm."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from edgellm.sampling.params import SamplingParams
from edgellm.terminal import waiting

if TYPE_CHECKING:
    from rich.console import Console

    from edgellm.llm import LLM
    from edgellm.outputs import RequestOutput

QUESTIONS = (
    "How tall is the tower, and how many steps lead to the lantern room?",
    "What is done first if the main lamp and its spare both fail?",
    "How often does the fog horn sound, and for how long?",
    "Which channel is used to report a vessel in distress?",
)
BAR_WIDTH = 40
# Two computations of one token may round differently; below this margin the two best tokens are a tie.
NEAR_TIE_NATS = 0.05


@dataclass(frozen=True, slots=True)
class Turn:
    """One question, answered without and with reuse."""

    question: str
    cold: RequestOutput
    warm: RequestOutput


def load_document() -> str:
    """The manual that the questions are about."""
    return resources.files("edgellm").joinpath("data/lighthouse_manual.txt").read_text(encoding="utf-8")


def run_demo(llm: LLM, console: Console, *, max_tokens: int = 40) -> bool:
    """Run the chat twice a turn and show the numbers.

    Returns:
        Whether every warm answer equals the cold one, token for token or up to a tie in rounding.
    """
    console.print("A keeper asks four questions about a lighthouse manual.  Each turn carries the whole manual and the")
    console.print("conversation so far, and is run twice: cold (nothing reused) and warm (context reused).")
    console.print("The default model is tiny: look at the times, not at the wisdom of the answers.\n")
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=2)
    messages = [{"role": "system", "content": "Answer briefly from this manual.\n\n" + load_document()}]
    turns: list[Turn] = []
    for number, question in enumerate(QUESTIONS, start=1):
        messages.append({"role": "user", "content": question})
        with waiting(console, f"turn {number}: cold"):
            (cold,) = llm.chat(messages, params, use_cache=False)
        with waiting(console, f"turn {number}: warm"):
            (warm,) = llm.chat(messages, params)
        turns.append(Turn(question, cold, warm))
        messages.append({"role": "assistant", "content": warm.text})
        console.print(Text(f"{number}. {question}", style="bold cyan"))
        console.print(Text(f"   {warm.text.strip()}\n"))
    console.print(turn_table(turns))
    console.print(first_token_bars(turns))
    verdict, same = compare_answers(turns)
    console.print(Text(verdict, style="bold green" if same else "bold red"))
    return same


def turn_table(turns: list[Turn]) -> Table:
    """Prompt, reuse, time to first token and rate of every turn."""
    table = Table(title="four turns, cold and warm", title_justify="left", box=box.SIMPLE_HEAVY, padding=(0, 1, 0, 0))
    for heading in ("turn", "prompt\ntokens", "reused\ncold", "reused\nwarm", "1st token\ncold", "1st token\nwarm",
                    "faster", "tok/s\ncold", "tok/s\nwarm"):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    for number, turn in enumerate(turns, start=1):
        cold, warm = turn.cold.timings, turn.warm.timings
        table.add_row(
            str(number),
            str(turn.warm.reuse.prompt_tokens),
            str(turn.cold.reuse.reused_tokens),
            str(turn.warm.reuse.reused_tokens),
            f"{cold.time_to_first_token_ms / 1000:.2f} s",
            f"{warm.time_to_first_token_ms / 1000:.2f} s",
            _faster(turn),
            f"{cold.tokens_per_second:.1f}",
            f"{warm.tokens_per_second:.1f}",
        )
    return table


def _faster(turn: Turn) -> str:
    """Cold over warm time to the first token; nothing where nothing was reused: both then did the same."""
    if not turn.warm.reuse.reused_tokens:
        return "-"
    ratio = turn.cold.timings.time_to_first_token_ms / max(turn.warm.timings.time_to_first_token_ms, 0.001)
    return f"{ratio:.1f}x"


def first_token_bars(turns: list[Turn]) -> Text:
    """A bar chart of the time to the first token."""
    longest = max(output.timings.time_to_first_token_ms for turn in turns for output in (turn.cold, turn.warm))
    chart = Text("\ntime to first token\n", style="bold")
    for number, turn in enumerate(turns, start=1):
        for name, output, style in (("cold", turn.cold, "blue"), ("warm", turn.warm, "green")):
            milliseconds = output.timings.time_to_first_token_ms
            filled = max(1, round(BAR_WIDTH * milliseconds / max(longest, 0.001)))
            chart.append(f"  turn {number} {name} ", style="default not bold")
            chart.append("█" * filled, style=style)
            chart.append(f" {milliseconds / 1000:.2f} s\n", style="default not bold")
    return chart


def compare_answers(turns: list[Turn]) -> tuple[str, bool]:
    """A sentence on whether warm equals cold, and the answer as a bool."""
    ties = []
    for number, turn in enumerate(turns, start=1):
        margin = divergence_margin(turn.cold, turn.warm)
        if margin is None:
            continue
        if margin >= NEAR_TIE_NATS:
            return f"turn {number}: the warm answer DIFFERS from the cold one (margin {margin:.3f} nat)", False
        ties.append(f"turn {number} ({margin:.3f} nat)")
    if ties:
        return (
            f"warm and cold answers are identical up to a tie of the two best tokens in {', '.join(ties)}: rounding, "
            "not reuse",
            True,
        )
    return f"warm and cold answers are identical, token for token, in all {len(turns)} turns", True


def divergence_margin(cold: RequestOutput, warm: RequestOutput) -> float | None:
    """None for equal answers; else the cold run's margin between its two best tokens where they part."""
    if cold.token_ids == warm.token_ids:
        return None
    pairs = zip(cold.token_ids, warm.token_ids, strict=False)
    where = next((index for index, (left, right) in enumerate(pairs) if left != right), None)
    if where is None or cold.logprobs is None or len(cold.logprobs[where].top) < 2:
        return float("inf")
    best, second = cold.logprobs[where].top[:2]
    return best[1] - second[1] if warm.token_ids[where] == second[0] else float("inf")
