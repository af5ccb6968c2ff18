"""The command `edgellm bench serve`: options, one run, and what it leaves."""

from __future__ import annotations

import asyncio
import math
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from edgellm.errors import InvalidArgumentError
from edgellm.fetch import DEFAULT_MODEL
from edgellm.terminal import fetch_progress, load_progress, waiting

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from edgellm.async_engine import AsyncEngine
    from edgellm.bench_serve.measure import Sample, Summary
    from edgellm.bench_serve.workload import PlannedRequest, RecordedOptions, SyntheticOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayOptions:
    """How a workload is played.

    Attributes:
        clients: so many send one request after the other; None sends each at its arrival.
        warmup: requests that run before and are not counted.
        timeout: seconds of each request; None does not limit it.
    """

    clients: int | None
    warmup: int
    timeout: float | None

    def __post_init__(self) -> None:
        if self.clients is not None and self.clients < 1:
            raise InvalidArgumentError(f"--clients is {self.clients}; it must be at least 1")
        if self.warmup < 0:
            raise InvalidArgumentError(f"--warmup is {self.warmup}; it must be 0 or more")
        if self.timeout is not None and not (math.isfinite(self.timeout) and self.timeout > 0):
            raise InvalidArgumentError(f"--timeout is {self.timeout}; it must be above 0 seconds")


bench_app = typer.Typer(help="Measure.", no_args_is_help=True)


@bench_app.callback()
def _bench() -> None:
    """Measure."""


@bench_app.command()
def serve(
    workload: Annotated[str, typer.Option(help="synthetic, or the path of a recording (JSON lines).")] = "synthetic",
    requests: Annotated[int, typer.Option(help="Requests; of a recording, at most so many.")] = 32,
    rate: Annotated[float | None, typer.Option(help="Synthetic: arrivals a second.")] = None,
    clients: Annotated[
        int | None, typer.Option(help="So many clients, each asks when it has its answer; default 4 without --rate.")
    ] = None,
    prompt_tokens: Annotated[
        str, typer.Option(help="Synthetic: 128 (always), 64-256 (uniform) or lognormal:200:0.5 (median, sigma).")
    ] = "64-256",
    output_tokens: Annotated[str, typer.Option(help="Synthetic: likewise.")] = "32",
    shared_prefix: Annotated[float, typer.Option(help="Synthetic: part of the prompts that share a beginning.")] = 0.5,
    shared_prefix_tokens: Annotated[int, typer.Option(help="Synthetic: length of that beginning.")] = 64,
    shared_prefixes: Annotated[int, typer.Option(help="Synthetic: how many different ones.")] = 1,
    block_tokens: Annotated[
        int, typer.Option(help="Recording: tokens that a block of 512 becomes; prompts shrink in proportion.")
    ] = 512,
    max_output_tokens: Annotated[int | None, typer.Option(help="Recording: cut answers to this.")] = None,
    speed: Annotated[float, typer.Option(help="Recording: 2 plays it twice as fast.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the workload.")] = 0,
    warmup: Annotated[int, typer.Option(help="Requests that run before and are not counted.")] = 2,
    timeout: Annotated[float | None, typer.Option(help="Most seconds a request.")] = None,
    model: Annotated[str, typer.Option("--model", "-m", help="Folder, .gguf file or known name.")] = DEFAULT_MODEL,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or (on CUDA) float16.")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="Element type of the KV pool: auto or (on CUDA) fp8.")] = "auto",
    deterministic: Annotated[bool, typer.Option("--deterministic", help="On CUDA: equal bits in any batch.")] = False,
    kv_budget: Annotated[str | None, typer.Option(help="KV pool, as for edgellm chat.")] = None,
    page_size: Annotated[int, typer.Option(help="Tokens a page.")] = 32,
    max_batch_size: Annotated[int, typer.Option(help="Most sequences at once.")] = 8,
    max_model_len: Annotated[int | None, typer.Option(help="Most tokens of one sequence.")] = None,
    speculative: Annotated[str | None, typer.Option(help="Kind of a speculative decoder, prompt_lookup say.")] = None,
    draft: Annotated[str | None, typer.Option(help="Folder of the draft model that the decoder needs.")] = None,
    num_drafts: Annotated[int | None, typer.Option(help="Most tokens proposed in a round.")] = None,
    draft_top_k: Annotated[int, typer.Option(help="1 proposes chains, 2 to 8 trees (eagle).")] = 1,
    draft_depth: Annotated[int | None, typer.Option(help="Longest way through a tree, 1 to 15.")] = None,
    step_time_budget_ms: Annotated[float | None, typer.Option(help="Aim for the longest step.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write everything measured to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it to this .png or .svg file.")] = None,
) -> None:
    """Run a workload against an engine in this process and show latencies, throughput and reuse."""
    from edgellm.bench_serve.report import check_targets
    from edgellm.bench_serve.workload import Lengths, RecordedOptions, SyntheticOptions
    from edgellm.cli import err, out, parse_kv_budget, parse_speculative

    check_targets(json_path, plot)
    options: SyntheticOptions | RecordedOptions
    if workload == "synthetic":
        if rate is not None and clients is not None:
            raise InvalidArgumentError("--rate and --clients exclude each other: arrivals come by time or by answers")
        options = SyntheticOptions(
            requests=requests,
            rate=rate,
            prompt_tokens=Lengths.parse("--prompt-tokens", prompt_tokens),
            output_tokens=Lengths.parse("--output-tokens", output_tokens),
            shared_prefix_share=shared_prefix,
            shared_prefix_tokens=shared_prefix_tokens,
            shared_prefixes=shared_prefixes,
            seed=seed,
        )
        clients = 4 if rate is None and clients is None else clients
    else:
        options = RecordedOptions(
            path=Path(workload),
            limit=requests,
            block_tokens=block_tokens,
            max_output_tokens=max_output_tokens,
            speed=speed,
            seed=seed,
        )
    engine_options = {
        "model": model,
        "device": device,
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        "deterministic": deterministic,
        "kv_budget": parse_kv_budget(kv_budget),
        "page_size": page_size,
        "max_batch_size": max_batch_size,
        "max_model_len": max_model_len,
        "speculative": parse_speculative(speculative, draft, num_drafts, draft_top_k, draft_depth),
        "step_time_budget_ms": step_time_budget_ms,
        "max_pending_requests": max(256, requests),
    }
    how = PlayOptions(clients=clients, warmup=warmup, timeout=timeout)
    if not run(options, engine_options, how, out, err, files=(json_path, plot)).completed:
        raise typer.Exit(1)


def run(
    options: SyntheticOptions | RecordedOptions,
    engine_options: dict[str, Any],
    how: PlayOptions,
    out: Console,
    err: Console,
    *,
    files: tuple[Path | None, Path | None],
) -> Summary:
    """Read the workload, load, play, show, write.

    Args:
        files: where to write JSON and the picture; None leaves it out.
    """
    make_requests = prepare(options)
    with waiting(err, "importing torch"):
        from edgellm.async_engine import AsyncEngine
        from edgellm.bench_serve import report
        from edgellm.bench_serve.measure import summarise
    with fetch_progress(err, DEFAULT_MODEL) as on_fetch, load_progress(err) as on_load:
        engine = AsyncEngine(**engine_options, on_fetch=on_fetch, on_load=on_load)
        asyncio.run(engine.start())
    samples = asyncio.run(_measure(engine, make_requests, how, err))
    summary = summarise(samples)
    kind = type(options).__name__.removesuffix("Options").lower()
    title = f"{kind} workload, {Path(engine_options['model']).name}"
    out.print(report.table_of(summary, title))
    for line in report.lines_of(summary):
        out.print(line)
    for error in sorted({sample.error for sample in samples if sample.error})[:3]:
        err.print(Text(error, style="yellow"))
    speculative = engine_options.get("speculative")
    settings = {
        "workload": kind,
        **{name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items()},
        "clients": how.clients,
        "warmup": how.warmup,
        "timeout_seconds": how.timeout,
        "engine": {**engine_options, "speculative": None if speculative is None else asdict(speculative)},
    }
    json_path, plot_path = files
    if json_path is not None:
        report.write_json(json_path, report.as_plain(summary, samples, settings))
        err.print(Text(f"wrote {json_path}", style="dim"))
    if plot_path is not None:
        report.write_plot(plot_path, samples, title)
        err.print(Text(f"wrote {plot_path}", style="dim"))
    return summary


async def _measure(
    engine: AsyncEngine, make_requests: Callable[[int], list[PlannedRequest]], how: PlayOptions, err: Console
) -> list[Sample]:
    from edgellm.bench_serve.driver import play, warm_up

    async with engine:
        workload = make_requests(engine.tokenizer.vocab_size)
        err.print(Text(engine.memory_budget.describe(), style="dim"))
        await warm_up(engine, how.warmup, engine.tokenizer.vocab_size)
        with waiting(err, f"{len(workload)} requests"):
            return await play(engine, workload, clients=how.clients, timeout_seconds=how.timeout)


def prepare(options: SyntheticOptions | RecordedOptions) -> Callable[[int], list[PlannedRequest]]:
    """Read and check the workload; the result makes its requests for a vocabulary of so many tokens.

    Raises:
        InvalidArgumentError: a recording is absent or malformed, or a distribution draws a length that is too long.
    """
    from edgellm.bench_serve.workload import SyntheticOptions, read_recording, replay, synthetic

    if isinstance(options, SyntheticOptions):
        synthetic(options, vocab_size=2)  # lengths are the same for any vocabulary
        return partial(synthetic, options)
    return partial(replay, read_recording(options), options)
