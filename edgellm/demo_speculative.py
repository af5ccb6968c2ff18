"""The second demonstration: answers that quote a document, decoded plainly and with prompt lookup."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from edgellm.demo import load_document
from edgellm.sampling.params import SamplingParams
from edgellm.terminal import waiting

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from rich.console import Console

    from edgellm.llm import LLM
    from edgellm.outputs import RequestOutput

    OpenLLM = Callable[[str | None], AbstractContextManager[LLM]]

DECODER = "prompt_lookup"
TASKS = (
    "Repeat the manual's first section word for word.",
    "Summarise the manual in its own words.",
    "Copy every sentence of the manual that names a number.",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """One task, without and with speculation."""

    task: str
    plain: RequestOutput
    speculative: RequestOutput


def run_speculative_demo(open_llm: OpenLLM, console: Console, *, max_tokens: int) -> bool:
    """Answer the tasks with either way of decoding and show the numbers.

    Args:
        open_llm: called with the kind of a decoder, or None for plain decoding.
    Returns:
        Whether every text is the same, token for token.
    """
    console.print("Three tasks about a lighthouse manual whose answers quote it.  Prompt lookup proposes what followed")
    console.print("the same words before, and the model checks several tokens in one step.\n")
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    plain = _answers(open_llm, None, params, console)
    speculative = _answers(open_llm, DECODER, params, console)
    answers = [Answer(*each) for each in zip(TASKS, plain, speculative, strict=True)]
    for answer in answers:
        console.print(Text(answer.task, style="bold cyan"))
        console.print(Text(f"   {answer.speculative.text.strip()}\n"))
    console.print(answer_table(answers))
    same = all(answer.plain.token_ids == answer.speculative.token_ids for answer in answers)
    verdict = "the texts are identical, token for token" if same else "the texts DIFFER"
    console.print(Text(verdict, style="bold green" if same else "bold red"))
    return same


def _answers(open_llm: OpenLLM, decoder: str | None, params: SamplingParams, console: Console) -> list[RequestOutput]:
    with open_llm(decoder) as llm:
        outputs = []
        for number, task in enumerate(TASKS, start=1):
            messages = [{"role": "user", "content": f"{load_document()}\n\n{task}"}]
            with waiting(console, f"task {number}: {decoder or 'plain decoding'}"):
                outputs += llm.chat(messages, params)
        return outputs


def answer_table(answers: list[Answer]) -> Table:
    """Rate of either way, and what became of the proposals."""
    table = Table(title="plain and speculative", title_justify="left", box=box.SIMPLE_HEAVY, padding=(0, 1, 0, 0))
    for heading in ("task", "tokens", "proposed", "kept", "tok/s\nplain", "tok/s\nlookup", "faster"):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, answer in enumerate(answers, start=1):
        plain, fast = answer.plain.timings.tokens_per_second, answer.speculative.timings.tokens_per_second
        table.add_row(
            str(number),
            str(len(answer.speculative.token_ids)),
            str(answer.speculative.proposed_draft_tokens),
            str(answer.speculative.accepted_draft_tokens),
            f"{plain:.1f}",
            f"{fast:.1f}",
            f"{fast / max(plain, 0.001):.2f}x",
        )
    return table
