"""What a run leaves: a table for people, JSON for programs, a picture."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from edgellm import __version__
from edgellm.bench_serve.measure import Outcome, Summary
from edgellm.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgellm.bench_serve.measure import Sample, Spread

FORMAT = 1
PICTURES = (".png", ".svg")
PACKAGES = ("numpy", "torch", "transformers", "tokenizers")
DECIMALS = 6


def table_of(summary: Summary, title: str) -> Table:
    """The numbers of a run."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAVY, padding=(0, 1, 0, 0))
    table.add_column("milliseconds", no_wrap=True)
    for heading in ("p50", "p90", "p99", "max", "mean"):
        table.add_column(heading, justify="right", no_wrap=True)
    rows: tuple[tuple[str, Spread], ...] = (
        ("time to first token", summary.time_to_first_token),
        ("between two tokens", summary.inter_token),
        ("end to end", summary.end_to_end),
        ("queue", summary.queue),
    )
    for name, spread in rows:
        values = (spread.p50, spread.p90, spread.p99, spread.max, spread.mean)
        table.add_row(name, *(f"{value:,.1f}" if spread.count else "-" for value in values))
    return table


def lines_of(summary: Summary) -> list[str]:
    """What the table does not show."""
    return [
        f"{summary.completed} of {summary.requests} requests completed, {summary.refused} refused, "
        f"{summary.failed} failed, in {summary.wall_seconds:.2f} s",
        f"{summary.generated_tokens:,} tokens generated: {summary.output_tokens_per_second:.1f} tokens/s, "
        f"{summary.requests_per_second:.2f} requests/s",
        f"{summary.reused_tokens:,} of {summary.prompt_tokens:,} prompt tokens reused ({summary.reuse_share:.1%})",
    ]


def as_plain(summary: Summary, samples: Sequence[Sample], settings: dict[str, Any]) -> dict[str, Any]:
    """Everything that a run says and needs to be repeated, as JSON types."""
    numbers = asdict(summary)
    numbers["output_tokens_per_second"] = summary.output_tokens_per_second
    numbers["requests_per_second"] = summary.requests_per_second
    numbers["reuse_share"] = summary.reuse_share
    plain = {
        "format": FORMAT,
        "command": " ".join(sys.argv),
        "settings": settings,
        "versions": versions(),
        "machine": machine(),
        "units": "spreads in milliseconds, request times in seconds from the start",
        "summary": numbers,
        "requests": [_plain_sample(sample) for sample in samples],
    }
    rounded: dict[str, Any] = _rounded(plain)
    return rounded


def versions() -> dict[str, str]:
    """edgellm, Python and the packages that matter for speed."""
    return {"edgellm": __version__, "python": platform.python_version()} | {
        name: metadata.version(name) for name in PACKAGES
    }


def machine() -> dict[str, Any]:
    """Processor, cores that this process may use, system, load."""
    import torch

    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "processor": _processor(),
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "load_average": list(os.getloadavg()),
    }


def check_targets(json_path: Path | None, plot_path: Path | None) -> None:
    """Refuse what could not be written, before minutes of measuring.

    Raises:
        InvalidArgumentError: no such folder, another kind of picture, or matplotlib is missing.
    """
    for option, path in (("--json", json_path), ("--plot", plot_path)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise InvalidArgumentError(f"{option} is {str(path)!r}; name a file in a folder that exists")
    if plot_path is None:
        return
    if plot_path.suffix.lower() not in PICTURES:
        raise InvalidArgumentError(f"--plot is {str(plot_path)!r}; its name must end in {' or '.join(PICTURES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidArgumentError("--plot needs matplotlib, which is not installed; pip install 'edgellm[bench]'")


def write_json(path: Path, plain: dict[str, Any]) -> None:
    """Raises: InvalidArgumentError when the file cannot be written."""
    try:
        path.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidArgumentError(f"cannot write {path}: {error}") from error


def write_plot(path: Path, samples: Sequence[Sample], title: str) -> None:
    """Distributions of the two latencies, and the requests over time, as PNG or SVG.

    Raises:
        InvalidArgumentError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    done = [sample for sample in samples if sample.outcome is Outcome.COMPLETED and sample.token_times]
    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display, whatever backend is configured
    figure.suptitle(title, fontsize=11)
    first, between, timeline = figure.subplot_mosaic([["first", "between"], ["time", "time"]]).values()
    _draw_shares(first, [sample.time_to_first_token for sample in done], "time to first token (ms)")
    _draw_shares(between, [gap for sample in done for gap in sample.gaps], "between two tokens (ms)")
    _draw_timeline(timeline, samples)
    try:
        figure.savefig(path, format=path.suffix.lower().lstrip("."), dpi=120)
    except OSError as error:
        raise InvalidArgumentError(f"cannot write {path}: {error}") from error


def _draw_shares(axes: Any, seconds: Sequence[float], label: str) -> None:
    ordered = sorted(1000.0 * value for value in seconds)
    count = len(ordered)
    axes.step(ordered, [100.0 * (rank + 1) / count for rank in range(count)], where="post", color="#1f6f8b")
    axes.set_xlabel(label)
    axes.set_ylabel("share at or below (%)")
    axes.set_ylim(0, 102)
    axes.grid(alpha=0.3)


def _draw_timeline(axes: Any, samples: Sequence[Sample]) -> None:
    """One row a request: waiting for its first token, then generating."""
    for row, sample in enumerate(samples):
        first = sample.token_times[0] if sample.token_times else sample.finished
        waits = "#c9c9c9" if sample.outcome is Outcome.COMPLETED else "#d1495b"
        axes.barh(row, first - sample.sent, left=sample.sent, color=waits, height=0.8)
        axes.barh(row, sample.finished - first, left=first, color="#1f6f8b", height=0.8)
    axes.set_xlabel("seconds from the start (grey: until the first token, blue: generating, red: refused or failed)")
    axes.set_ylabel("request")
    axes.set_xlim(left=0)
    axes.invert_yaxis()


def _plain_sample(sample: Sample) -> dict[str, Any]:
    plain = asdict(sample)
    plain["outcome"] = sample.outcome.value
    return plain


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, DECIMALS)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value
