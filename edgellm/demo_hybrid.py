"""The third demonstration: a chat with a hybrid model, decoded plainly and with its multi-token prediction head."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources, util
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from edgellm.demo import QUESTIONS, load_document
from edgellm.errors import InvalidArgumentError
from edgellm.sampling.params import SamplingParams
from edgellm.terminal import waiting

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from rich.console import Console

    from edgellm.llm import LLM
    from edgellm.outputs import RequestOutput

    OpenLLM = Callable[[str | None], AbstractContextManager[LLM]]

DECODER = "mtp"
PLUGIN, SHIPPED_FOLDER = "edgellm_hybrid", "model"
DOCUMENT_SHARE = 3  # the document takes at most this part of the context


@dataclass(frozen=True, slots=True)
class HybridTurn:
    """One question, answered plainly and with the head; both reuse the conversation so far."""

    question: str
    plain: RequestOutput
    mtp: RequestOutput


def shipped_hybrid() -> Path | None:
    """The hybrid checkpoint that edgellm-hybrid brings; None where it brings none, or is not installed."""
    if util.find_spec(PLUGIN) is None:
        return None
    folder = Path(str(resources.files(PLUGIN))) / SHIPPED_FOLDER
    return folder if (folder / "config.json").is_file() else None


def hybrid_model(given: str | None) -> str:
    """The checkpoint to show.

    Args:
        given: what the caller named; None takes the shipped one.
    Raises:
        InvalidArgumentError: none was named and none is shipped.
    """
    if given is not None:
        return given
    shipped = shipped_hybrid()
    if shipped is None:
        raise InvalidArgumentError(
            "demo --hybrid shows a hybrid model, and no checkpoint of one is installed with edgellm-hybrid; pass "
            "--model with the folder of a Qwen3-Next or Qwen3.5 checkpoint that has its prediction head (mtp.*)"
        )
    return str(shipped)


def run_hybrid_demo(open_llm: OpenLLM, console: Console, *, max_tokens: int) -> bool:
    """Hold the conversation with either way of decoding and show the numbers.

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
    with_head = _converse(open_llm, DECODER, params, console)  # first, since not every model has a head
    plain = _converse(open_llm, None, params, console)
    turns = [HybridTurn(*each) for each in zip(QUESTIONS, plain, with_head, strict=True)]
    for turn in turns:
        console.print(Text(turn.question, style="bold cyan"))
        console.print(Text(f"   {turn.mtp.text.strip()}\n"))
    console.print(hybrid_table(turns))
    same = all(turn.plain.token_ids == turn.mtp.token_ids for turn in turns)
    verdict = "the texts are identical, token for token" if same else "the texts DIFFER"
    console.print(Text(verdict, style="bold green" if same else "bold red"))
    return same


def _converse(open_llm: OpenLLM, decoder: str | None, params: SamplingParams, console: Console) -> list[RequestOutput]:
    with open_llm(decoder) as llm:
        if not llm.tokenizer.has_chat_template:
            raise InvalidArgumentError("this model has no chat template, and the demo is a chat; choose another model")
        messages = [{"role": "system", "content": f"Answer briefly from this manual.\n\n{excerpt(llm)}"}]
        outputs = []
        for number, question in enumerate(QUESTIONS, start=1):
            messages.append({"role": "user", "content": question})
            with waiting(console, f"turn {number}: {decoder or 'plain decoding'}"):
                (output,) = llm.chat(messages, params)
            outputs.append(output)
            messages.append({"role": "assistant", "content": output.text})
        return outputs


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


def hybrid_table(turns: list[HybridTurn]) -> Table:
    """Reuse and rate of either way, and what became of the proposals."""
    table = Table(title="plain and with the head", title_justify="left", box=box.SIMPLE_HEAVY, padding=(0, 1, 0, 0))
    for heading in ("turn", "prompt\ntokens", "reused\nplain", "reused\nmtp", "tokens", "proposed", "kept",
                    "tok/s\nplain", "tok/s\nmtp", "faster"):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    for number, turn in enumerate(turns, start=1):
        plain, fast = turn.plain.timings.tokens_per_second, turn.mtp.timings.tokens_per_second
        table.add_row(
            str(number),
            str(turn.mtp.reuse.prompt_tokens),
            str(turn.plain.reuse.reused_tokens),
            str(turn.mtp.reuse.reused_tokens),
            str(len(turn.mtp.token_ids)),
            str(turn.mtp.proposed_draft_tokens),
            str(turn.mtp.accepted_draft_tokens),
            f"{plain:.1f}",
            f"{fast:.1f}",
            f"{fast / max(plain, 0.001):.2f}x",
        )
    return table
