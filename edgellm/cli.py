"""The command line: `edgellm generate | chat | demo | bench | doctor | plugins`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from edgellm import __version__, envs
from edgellm.bench_serve.command import bench_app
from edgellm.errors import EdgeLLMError, InvalidArgumentError
from edgellm.fetch import DEFAULT_MODEL
from edgellm.log import show_on_stderr
from edgellm.memory import count
from edgellm.terminal import fetch_progress, load_progress, piped_width, waiting

if TYPE_CHECKING:
    from edgellm.decoding.options import SpeculativeOptions
    from edgellm.llm import LLM
    from edgellm.outputs import RequestOutput
    from edgellm.plugins import Plugins
    from edgellm.sampling.params import SamplingParams

app = typer.Typer(
    name="edgellm",
    help="An LLM runtime for one edge box, with exact context reuse.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")
# Answers go to stdout, everything about them to stderr, so that output can be piped.
out = Console(soft_wrap=True, highlight=False, markup=False, width=piped_width())
err = Console(stderr=True, soft_wrap=True, highlight=False)

TIME_DECIMALS = 3
DRAFT_OPTIONS = {
    "draft": "--draft",
    "num_drafts": "--num-drafts",
    "top_k": "--draft-top-k",
    "depth": "--draft-depth",
}

ModelOption = Annotated[str, typer.Option("--model", "-m", help="Hugging Face folder, .gguf file or a known name.")]
DemoModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="Hugging Face folder, .gguf file or a known name; "
        f"default: {DEFAULT_MODEL}, with --hybrid edgellm-hybrid-7m.",
    ),
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
DtypeOption = Annotated[str, typer.Option(help="auto, float32, bfloat16 or (on CUDA) float16.")]
KvDtypeOption = Annotated[str, typer.Option(help="Element type of the KV pool: auto or (on CUDA) fp8.")]
DeterministicOption = Annotated[
    bool, typer.Option("--deterministic", help="On CUDA: answers do not depend on what else runs, to the bit; slower.")
]
KvBudgetOption = Annotated[
    str | None,
    typer.Option(
        help="KV pool: an integer is tokens (4096), a number with a decimal point a fraction of free memory (0.25, at "
        "most 0.95), a number with a unit bytes (2GiB)."
    ),
]
SpeculativeOption = Annotated[
    str | None,
    typer.Option(help="Decode speculatively: prompt_lookup, eagle, mtp, or another installed decoder's kind."),
]
DraftOption = Annotated[
    str | None, typer.Option(help="Folder of the draft model; left out, the one that a plugin brings for this model.")
]
NumDraftsOption = Annotated[int | None, typer.Option(help="Most tokens proposed in a round.")]
DraftTopKOption = Annotated[
    int, typer.Option(help="1 proposes chains; 2 to 8 trees (eagle): so many tokens are considered behind each.")
]
DraftDepthOption = Annotated[
    int | None, typer.Option(help="Longest way through a tree, 1 to 15; needs --draft-top-k of 2 or more.")
]
PageSizeOption = Annotated[int, typer.Option(help="Tokens a page.")]
MaxLenOption = Annotated[int | None, typer.Option(help="Most tokens of one sequence; default: the model's context.")]
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens to generate.")]
TemperatureOption = Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")]
TopPOption = Annotated[float, typer.Option(help="Keep the smallest set of tokens with this probability.")]
TopKOption = Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")]
SeedOption = Annotated[int | None, typer.Option(help="Makes sampling reproducible.")]
StopOption = Annotated[list[str] | None, typer.Option(help="Stop where this text appears; may be repeated.")]
NoCacheOption = Annotated[bool, typer.Option("--no-cache", help="Compute every prompt in full.")]


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The options that decide which LLM is made."""

    model: str
    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    deterministic: bool = False
    kv_budget: str | None = None
    page_size: int = 32
    max_model_len: int | None = None
    speculative: SpeculativeOptions | None = None


def main() -> None:
    """Run the command line; an error of edgellm becomes one red line and exit code 1."""
    if envs.log_level_is_set():
        show_on_stderr()
    try:
        app()
    except EdgeLLMError as error:
        err.print(Text.assemble(("error: ", "bold red"), str(error)))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _show_version(value: bool) -> None:
    if value:
        out.print(f"edgellm {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """An LLM runtime for one edge box, with exact context reuse."""


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from standard input.")],
    model: ModelOption = DEFAULT_MODEL,
    chat_template: Annotated[
        bool, typer.Option("--chat/--raw", help="Send the prompt as a user message, or as it is.")
    ] = True,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    kv_dtype: KvDtypeOption = "auto",
    deterministic: DeterministicOption = False,
    kv_budget: KvBudgetOption = None,
    page_size: PageSizeOption = 32,
    max_model_len: MaxLenOption = None,
    speculative: SpeculativeOption = None,
    draft: DraftOption = None,
    num_drafts: NumDraftsOption = None,
    draft_top_k: DraftTopKOption = 1,
    draft_depth: DraftDepthOption = None,
    max_tokens: MaxTokensOption = 256,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    seed: SeedOption = None,
    stop: StopOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming text.")] = False,
) -> None:
    """Answer one prompt; with --raw, continue it as it is (for a model without a chat template)."""
    text = sys.stdin.read() if prompt == "-" else prompt
    params = _sampling(max_tokens, temperature, top_p, top_k, seed, stop)
    spec = parse_speculative(speculative, draft, num_drafts, draft_top_k, draft_depth)
    choice = ModelChoice(model, device, dtype, kv_dtype, deterministic, kv_budget, page_size, max_model_len, spec)
    request: Any = [{"role": "user", "content": text}] if chat_template else text
    with open_llm(choice) as llm:
        if chat_template:
            require_chat_template(llm, "pass --raw to send the prompt as it is")
        with llm.stream(request, params) as stream:
            for piece in stream:
                if not as_json:
                    out.print(piece, end="")
            output = stream.output
        if as_json:
            out.print(json.dumps(_as_plain(output), ensure_ascii=False))
            return
        out.print()
        err.print(Text(describe_turn(output), style="dim"))


@app.command()
def chat(
    model: ModelOption = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    kv_dtype: KvDtypeOption = "auto",
    deterministic: DeterministicOption = False,
    kv_budget: KvBudgetOption = None,
    page_size: PageSizeOption = 32,
    max_model_len: MaxLenOption = None,
    speculative: SpeculativeOption = None,
    draft: DraftOption = None,
    num_drafts: NumDraftsOption = None,
    draft_top_k: DraftTopKOption = 1,
    draft_depth: DraftDepthOption = None,
    max_tokens: MaxTokensOption = 512,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    seed: SeedOption = None,
    stop: StopOption = None,
    no_cache: NoCacheOption = False,
) -> None:
    """Chat; each turn shows how much of the conversation was reused.

    /reset starts anew, /quit ends.  Ctrl-C stops an answer and drops that turn, question included, from the
    conversation.
    """
    params = _sampling(max_tokens, temperature, top_p, top_k, seed, stop)
    spec = parse_speculative(speculative, draft, num_drafts, draft_top_k, draft_depth)
    choice = ModelChoice(model, device, dtype, kv_dtype, deterministic, kv_budget, page_size, max_model_len, spec)
    with open_llm(choice) as llm:
        require_chat_template(llm, "use edgellm generate --raw for it")
        out.print(
            "Type a message.  /reset starts a new conversation, /quit ends.  Ctrl-C stops an answer and drops it."
        )
        chat_loop(llm, params, system=system, use_cache=not no_cache)


@app.command()
def demo(
    max_tokens: Annotated[int, typer.Option(help="Most tokens an answer.")] = 40,
    model: DemoModelOption = None,
    device: DeviceOption = "auto",
    kv_budget: KvBudgetOption = "8192",
    speculative: Annotated[
        bool,
        typer.Option("--speculative", help="Show speculation instead, with every draft there is: the same text."),
    ] = False,
    hybrid: Annotated[
        bool, typer.Option("--hybrid", help="Show a hybrid model instead, and its multi-token prediction head.")
    ] = False,
) -> None:
    """Three demonstrations, of which the first is a four-turn chat over a 2,000-token document, cold and warm.

    --speculative answers tasks plainly and with every draft there is, --hybrid holds a chat with a hybrid model plainly
    and with its prediction head.  Both compare two ways side by side: the model is in memory twice.
    """
    from edgellm.demo import run_demo

    if speculative and hybrid:
        raise InvalidArgumentError("--speculative and --hybrid are two demonstrations; pass one of them")
    # float32 everywhere: the answers with and without reuse are compared token by token.
    choice = ModelChoice(model or DEFAULT_MODEL, device=device, dtype="float32", kv_budget=kv_budget)
    if speculative:
        _speculative_demo(choice, max_tokens)
        return
    if hybrid:
        _hybrid_demo(choice, model, max_tokens)
        return
    with open_llm(choice) as llm:
        require_chat_template(llm, "the demo is a chat; choose another model")
        same = run_demo(llm, out, max_tokens=max_tokens)
    if not same:
        raise typer.Exit(1)


def _speculative_demo(choice: ModelChoice, max_tokens: int) -> None:
    from edgellm.demo_speculative import run_speculative_demo, shipped_drafts

    find_drafts = partial(shipped_drafts, choice.model)
    if not run_speculative_demo(_opener(choice), out, max_tokens=max_tokens, find_drafts=find_drafts):
        raise typer.Exit(1)


def _hybrid_demo(choice: ModelChoice, given: str | None, max_tokens: int) -> None:
    from edgellm.demo_hybrid import hybrid_model, run_hybrid_demo

    model = hybrid_model(given)
    if not run_hybrid_demo(_opener(replace(choice, model=model)), out, max_tokens=max_tokens):
        raise typer.Exit(1)


def _opener(choice: ModelChoice) -> Callable[[str | None], AbstractContextManager[LLM]]:
    """Opens the model with the decoder of a kind, or plainly."""

    def open_with(decoder: str | None) -> AbstractContextManager[LLM]:
        return open_llm(replace(choice, speculative=parse_speculative(decoder, None, None)))

    return open_with


@app.command()
def doctor(
    fetch: Annotated[bool, typer.Option("--fetch", help="Fetch the default model when it is absent.")] = False,
) -> None:
    """Show versions, devices, memory, plugins, and test the default model against known tokens."""
    from edgellm.doctor import Status, run_checks

    table = Table(title=f"edgellm {__version__}", title_justify="left", box=box.SIMPLE_HEAVY)
    for heading in ("check", "status", "detail"):
        table.add_column(heading, overflow="fold")
    styles = {Status.OK: "green", Status.NOTE: "yellow", Status.FAILED: "bold red"}
    failed = False
    with fetch_progress(err, DEFAULT_MODEL) as on_fetch:
        checks = list(run_checks(on_fetch=on_fetch if fetch else None))
    for check in checks:
        table.add_row(check.name, Text(check.status.value, styles[check.status]), Text(check.detail))
        failed |= check.status is Status.FAILED
    out.print(table)
    for check in checks:
        if check.path:
            out.print(f"{check.name}: {check.path}")
    if failed:
        raise typer.Exit(1)


@app.command()
def plugins() -> None:
    """List plugins: name, version, API range, what they register, status; then the order in which they are asked, and
    the kinds of decoders that --speculative takes."""
    from edgellm.plugins import PluginStatus, load_plugins

    loaded = load_plugins(strict=False)
    reports = loaded.reports
    styles = {PluginStatus.FAILED: "bold red", PluginStatus.SKIPPED: "yellow"}
    table = Table(box=box.SIMPLE_HEAVY, padding=(0, 1, 0, 0))
    for heading in ("name", "package", "version", "API", "registers", "status"):
        table.add_column(heading, overflow="fold", no_wrap=heading != "package")
    for report in reports:
        api = "-".join(f"{major}.{minor}" for major, minor in report.api_range or ()) or "unknown"
        style = styles.get(report.status, "green")
        hooks = "\n".join(hook.rsplit("_", 1)[-1] for hook in report.hooks) or "nothing"
        table.add_row(report.name, report.distribution, report.version, api, hooks, Text(report.status.value, style))
    out.print(table)
    for line in _order_of_asking(loaded):
        out.print(line)
    for each in loaded.shipped:
        what = "a model" if each.target is None else f"a draft for {each.target.name}, decoder {each.decoder}"
        out.print(f"{each.name}: {what}, {'present' if each.is_present else f'no files; {each.remedy}'}")
    for report in reports:
        if report.reason:
            out.print(f"{report.name}: {report.reason}")
    if any(report.status is PluginStatus.FAILED for report in reports):
        raise typer.Exit(1)


# ---- pieces -------------------------------------------------------------------------------------------


def _order_of_asking(loaded: Plugins) -> list[str]:
    """Lines that say which policy and decoder is taken, and which kinds of decoders there are to name."""
    from edgellm.decoder_choice import PLAIN

    policies = sorted(loaded.policies, key=lambda policy: -policy.priority)
    decoders = sorted(loaded.decoders, key=lambda decoder: -decoder.priority)
    lines = [
        "policies, the first that serves a request (priority): "
        + ", ".join(f"{each.name} ({each.priority})" for each in policies),
        "decoders, name [kind] (priority): "
        + ", ".join(f"{each.name} [{each.kind}] ({each.priority})" for each in decoders),
    ]
    kinds = sorted({each.kind for each in decoders} - {PLAIN})
    return [*lines, f"kinds that speculative= and --speculative take: {', '.join(kinds)}"] if kinds else lines


def _sampling(
    max_tokens: int, temperature: float, top_p: float, top_k: int, seed: int | None, stop: list[str] | None
) -> SamplingParams:
    from edgellm.sampling.params import SamplingParams

    return SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop or ()
    )


def parse_kv_budget(text: str | None) -> int | float | str | None:
    """`--kv-budget` as `LLM` takes it: an integer is tokens, with a decimal point a fraction, else bytes with a unit.

    Raises:
        InvalidArgumentError: empty text.
    """
    if text is None:
        return None
    if not text.strip():
        raise InvalidArgumentError("--kv-budget is empty; pass tokens (4096), bytes (2GiB) or a fraction (0.25)")
    for kind, pattern in ((int, r"[+-]?\d+"), (float, r"[+-]?(\d+\.\d*|\.\d+)")):
        number = text.strip().replace("_", "")
        if re.fullmatch(pattern, number):
            return kind(number)
    return text


def parse_speculative(
    decoder: str | None, draft: str | None, num_drafts: int | None, top_k: int = 1, depth: int | None = None
) -> SpeculativeOptions | None:
    """`SpeculativeOptions` of the command line's options; None without a decoder.

    Raises:
        InvalidArgumentError: an option is out of range, or needs --speculative.
    """
    from edgellm.decoding.options import SpeculativeOptions

    if decoder is not None:
        with in_options_of_drafts():
            return SpeculativeOptions(decoder=decoder, draft=draft, num_drafts=num_drafts, top_k=top_k, depth=depth)
    given = {"draft": draft, "num_drafts": num_drafts, "top_k": None if top_k == 1 else top_k, "depth": depth}
    for name, value in given.items():
        if value is not None:
            option = DRAFT_OPTIONS[name]
            raise InvalidArgumentError(f"{option} is {value!r} and --speculative is missing; name a decoder with it")
    return None


@contextmanager
def in_options_of_drafts() -> Iterator[None]:
    """Refusals that leave this block name the options of the command line, not the fields of `SpeculativeOptions`."""
    try:
        yield
    except InvalidArgumentError as error:
        fields = r"(?<!\S)(num_drafts|top_k|depth)(?=[ =])"  # words of a sentence, not parts of a path
        raise InvalidArgumentError(re.sub(fields, lambda found: DRAFT_OPTIONS[found[0]], str(error))) from None


@contextmanager
def open_llm(choice: ModelChoice) -> Iterator[LLM]:
    """Fetch and load with progress bars, show the memory budget, and close at the end."""
    with waiting(err, "importing torch"):
        from edgellm.llm import LLM
    with (
        fetch_progress(err, DEFAULT_MODEL) as on_fetch,
        load_progress(err) as on_load,
        in_options_of_drafts(),
    ):
        llm = LLM(
            choice.model,
            device=choice.device,
            dtype=choice.dtype,
            kv_dtype=choice.kv_dtype,
            deterministic=choice.deterministic,
            kv_budget=parse_kv_budget(choice.kv_budget),
            page_size=choice.page_size,
            max_model_len=choice.max_model_len,
            speculative=choice.speculative,
            on_fetch=on_fetch,
            on_load=on_load,
        )
    with llm:
        err.print(Text(llm.memory_budget.describe(), style="dim"))
        yield llm


def require_chat_template(llm: LLM, remedy: str) -> None:
    """Refuse a model that cannot write a conversation as a prompt.

    Raises:
        InvalidArgumentError: it has no chat template.
    """
    if not llm.tokenizer.has_chat_template:
        raise InvalidArgumentError(f"this model has no chat template, so it cannot chat; {remedy}")


def describe_turn(output: RequestOutput) -> str:
    """One line about a finished answer: reuse, time to first token, rate."""
    reuse, timings = output.reuse, output.timings
    drafts = ""
    if output.proposed_draft_tokens:
        drafts = f"{output.accepted_draft_tokens:,} of {count(output.proposed_draft_tokens, 'draft token')} kept, "
    return (
        f"[reused {reuse.reused_tokens:,} of {count(reuse.prompt_tokens, 'prompt token')} ({reuse.stop_reason.value}), "
        f"first token {timings.time_to_first_token_ms / 1000:.2f} s, {count(len(output.token_ids), 'token')}, "
        f"{drafts}{timings.tokens_per_second:.1f} tokens/s, {output.finish_reason}]"
    )


def chat_loop(llm: LLM, params: SamplingParams, *, system: str | None, use_cache: bool) -> None:
    """Read messages until /quit or the end of input; an answer that fails leaves the conversation as it was."""
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    while True:
        try:
            text = err.input(Text("> ", style="bold cyan")).strip()
        except (EOFError, KeyboardInterrupt):
            return
        if text == "/quit":
            return
        if text == "/reset":
            messages = list(start)
            err.print(Text("new conversation", style="dim"))
        elif text.startswith("/"):
            err.print(Text(f"{text} is not a command; there are /reset and /quit", style="yellow"))
        elif text:
            user = {"role": "user", "content": text}
            try:
                answer = _answer(llm, [*messages, user], params, use_cache)
            except EdgeLLMError as error:
                err.print(Text.assemble(("error: ", "bold red"), f"{error}  (/reset starts a new conversation)"))
                continue
            if answer is not None:
                messages += [user, {"role": "assistant", "content": answer}]


def _answer(llm: LLM, messages: list[dict[str, Any]], params: SamplingParams, use_cache: bool) -> str | None:
    """Stream one answer; None when Ctrl-C stopped it: the turn is then dropped from the conversation."""
    with llm.stream(messages, params, use_cache=use_cache) as stream:
        try:
            for piece in stream:
                out.print(piece, end="")
        except KeyboardInterrupt:
            out.print()
            err.print(Text("[stopped; this turn is dropped from the conversation]", style="yellow"))
            return None
        output = stream.output
    out.print()
    err.print(Text(describe_turn(output), style="dim"))
    return output.text


def _as_plain(output: RequestOutput) -> dict[str, Any]:
    plain = asdict(output)
    plain["reuse"]["stop_reason"] = output.reuse.stop_reason.value
    plain["timings"] = {name: round(value, TIME_DECIMALS) for name, value in plain["timings"].items()}
    return plain
