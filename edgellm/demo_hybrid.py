"""The third demonstration: a chat with a hybrid model, decoded plainly and with its multi-token prediction head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from edgellm.demo import QUESTIONS, load_document
from edgellm.demo_pairs import HEADINGS, LEGEND, Pair, ask_in_turns
from edgellm.errors import InvalidArgumentError
from edgellm.sampling.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from rich.console import Console

    from edgellm.llm import LLM

    OpenLLM = Callable[[str | None], AbstractContextManager[LLM]]

DECODER = "mtp"
SHIPPED_MODEL = "edgellm-hybrid-7m"
DOCUMENT_SHARE = 3  # the document takes at most this part of the context


def hybrid_model(given: str | None) -> str:
    """The checkpoint to show.

    Args:
        given: what the caller named; None takes the one that edgellm-hybrid brings.
    Raises:
        InvalidArgumentError: none was named and none is there.
    """
    from edgellm.plugins import how_to_get, load_plugins
    from edgellm.shipped import models_of

    if given is not None:
        return given
    plugins = load_plugins()
    shipped = models_of(plugins.shipped).get(SHIPPED_MODEL)
    if shipped is not None and shipped.is_present:
        return shipped.name
    if shipped is None:
        why = f"no plugin brings one; {how_to_get('edgellm-hybrid', plugins.reports)}"
    else:
        why = f"{shipped.missing()}; {shipped.remedy}"
    raise InvalidArgumentError(
        f"demo --hybrid shows a hybrid model, and {why}, or pass --model with the folder of a Qwen3-Next or Qwen3.5 "
        "checkpoint that has its prediction head (mtp.*)"
    )


def run_hybrid_demo(open_llm: OpenLLM, console: Console, *, max_tokens: int) -> bool:
    """Hold the conversation with either way of decoding and show the numbers; the model is in memory twice.

    Args:
        open_llm: called with the kind of a decoder, or None for plain decoding.
    Returns:
        Whether every text is the same, token for token.
    Raises:
        InvalidArgumentError: the model has no chat template.
    """
    console.print("A chat about a lighthouse manual with a model most of whose layers are recurrent.  The next turn")
    console.print(
        "starts from a checkpoint of their state; the model's own head proposes tokens that it then checks.\n"
    )
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    with open_llm(DECODER) as fast, open_llm(None) as plain:  # in this order, since not every model has a head
        turns = _converse(plain, fast, params, console)
    console.print(hybrid_table(turns))
    console.print(Text(LEGEND, style="dim"))
    same = all(turn.same for turn in turns)
    verdict = "the texts are identical, token for token" if same else "the texts DIFFER"
    console.print(Text(verdict, style="bold green" if same else "bold red"))
    return same


def _converse(plain: LLM, fast: LLM, params: SamplingParams, console: Console) -> list[Pair]:
    if not fast.tokenizer.has_chat_template:
        raise InvalidArgumentError("this model has no chat template, and the demo is a chat; choose another model")
    messages = [{"role": "system", "content": f"Answer briefly from this manual.\n\n{excerpt(fast)}"}]
    turns = []
    for number, question in enumerate(QUESTIONS, start=1):
        messages.append({"role": "user", "content": question})
        turn = ask_in_turns(plain, fast, messages, params, console, task=f"turn {number}")
        turns.append(turn)
        messages.append({"role": "assistant", "content": turn.plain.text})
        console.print(Text(question, style="bold cyan"))
        console.print(Text(f"   {turn.fast.text.strip()}\n"))
    return turns


def excerpt(llm: LLM) -> str:
    """The manual's first sentences, as many as fit into a part of the model's context."""
    room = llm.memory_budget.max_model_len // DOCUMENT_SHARE
    text = ""
    for sentence in load_document().split(". "):
        longer = f"{text}{sentence}. "
        if len(llm.tokenizer.encode(longer)) > room:
            break
        text = longer
    return text.strip()


def hybrid_table(turns: list[Pair]) -> Table:
    """Reuse, steps and rate of either way, and what became of the proposals; reuse is that of the first run."""
    table = Table(title="plain and with the head", title_justify="left", box=box.SIMPLE_HEAVY, padding=(0, 1, 0, 0))
    for heading in ("turn", "prompt\ntokens", "reused\nplain", "reused\nmtp", *HEADINGS):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, turn in enumerate(turns, start=1):
        plain, fast = turn.plain_runs[0].reuse, turn.fast_runs[0].reuse
        reuse = (fast.prompt_tokens, plain.reused_tokens, fast.reused_tokens)
        table.add_row(str(number), *map(str, reuse), *turn.cells())
    return table
