"""The second demonstration: the same text from fewer steps, by prompt lookup and by the drafts that plugins bring."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from edgellm.demo import load_document
from edgellm.demo_pairs import HEADINGS, LEGEND, Pair, ask_in_turns
from edgellm.sampling.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from rich.console import Console

    from edgellm.llm import LLM
    from edgellm.shipped import ShippedCheckpoint

    OpenLLM = Callable[[str | None], AbstractContextManager[LLM]]

LOOKUP = "prompt_lookup"
TASKS = (
    "Repeat the manual's first section word for word.",
    "Summarise the manual in its own words.",
    "Copy every sentence of the manual that names a number.",
)
# What drafts are trained on: answers of the model's own, to short prompts.
QUESTIONS = (
    "What does the word 'lighthouse' mean?",
    "Explain to a child why ships need a compass.",
    "List five facts about the sea.",
)


def shipped_drafts(model: str) -> list[ShippedCheckpoint]:
    """The drafts that plugins bring for a model, present or not; reads the headers of its files."""
    from pathlib import Path

    from edgellm.fetch import resolve_model
    from edgellm.models.loader import open_checkpoint
    from edgellm.plugins import load_plugins
    from edgellm.shipped import drafts_for, models_of

    shipped = load_plugins().shipped
    config, _ = open_checkpoint(Path(resolve_model(model, shipped=models_of(shipped))))
    return drafts_for(shipped, config)


def run_speculative_demo(
    open_llm: OpenLLM, console: Console, *, max_tokens: int, find_drafts: Callable[[], list[ShippedCheckpoint]]
) -> bool:
    """Answer tasks plainly and with prompt lookup, and questions with each draft there is, and show the numbers.

    Both ways are open at a time: the model is in memory twice.

    Args:
        open_llm: called with the kind of a decoder, or None for plain decoding.
        find_drafts: called once the model is there; see `shipped_drafts`.
    Returns:
        Whether every text is the same, token for token.
    """
    console.print("Three tasks about a lighthouse manual whose answers quote it.  Prompt lookup proposes what followed")
    console.print("the same words before, and the model checks several tokens in one step.\n")
    demo = _Demo(console, SamplingParams(max_tokens=max_tokens, temperature=0.0))
    with ExitStack() as held:
        with open_llm(LOOKUP) as fast:  # first: a model that it does not go with is refused before weights are read
            plain = held.enter_context(open_llm(None))
            drafts = find_drafts()
            same = demo.show(plain, fast, LOOKUP, {task: f"{load_document()}\n\n{task}" for task in TASKS})
        present = [draft for draft in drafts if draft.is_present]
        if present:
            console.print("\nThree questions, answered from what the model knows: a draft trained for it proposes.\n")
        for draft in present:
            with open_llm(draft.decoder) as fast:
                same &= demo.show(plain, fast, str(draft.decoder), {each: each for each in QUESTIONS})
    for draft in drafts:
        if not draft.is_present:
            console.print(Text(f"not shown: {draft.missing()}; {draft.remedy}", style="yellow"))
    verdict = "the texts are identical, token for token" if same else "the texts DIFFER"
    console.print(Text(verdict, style="bold green" if same else "bold red"))
    return same


@dataclass(frozen=True, slots=True)
class _Demo:
    """How prompts are asked and shown.  Prompts are named by their tasks."""

    console: Console
    params: SamplingParams

    def show(self, plain: LLM, fast: LLM, decoder: str, prompts: dict[str, str]) -> bool:
        """Answer both ways and print texts and numbers; whether the texts are the same."""
        pairs = []
        for task, prompt in prompts.items():
            messages = [{"role": "user", "content": prompt}]
            pair = ask_in_turns(plain, fast, messages, self.params, self.console, task=f"{decoder}, {task}")
            pairs.append(pair)
            self.console.print(Text(task, style="bold cyan"))
            self.console.print(Text(f"   {pair.fast.text.strip()}\n"))
        self.console.print(answer_table(pairs, decoder))
        self.console.print(Text(LEGEND, style="dim"))
        return all(pair.same for pair in pairs)


def answer_table(pairs: list[Pair], decoder: str) -> Table:
    """Steps and rate of either way, and what became of the proposals."""
    table = Table(title=f"plain and {decoder}", title_justify="left", box=box.SIMPLE_HEAVY, padding=(0, 1, 0, 0))
    for heading in ("task", *HEADINGS):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, pair in enumerate(pairs, start=1):
        table.add_row(str(number), *pair.cells())
    return table
