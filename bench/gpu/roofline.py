"""Draws the kernels of a results file against what the card allows: a log-log roofline, as SVG.

python bench/gpu/roofline.py bench/results/2026-11-30-cuda-kernels-h200.md --out docs/images/roofline-h200.svg

Williams, Waterman, Patterson: "Roofline: an insightful visual performance model" (2009).  Bytes are those that must be
moved at least: keys and values once, weights once, rows in and out.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

READ_GBPS, PEAK_TFLOPS = 4548.0, 785.0  # measured on one H200: reading 8 GiB, and a bfloat16 product of 8192^3
KV_HEADS, HEAD_DIM, ELEMENT = 8, 128, 2
SHAPES = {  # N, K of each linear layer
    "0.6B": {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)},
    "8B": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)},
}
COLOURS = {"decode attention": "#1f6f8b", "prefill attention": "#d1495b", "deterministic linear": "#66a182"}


@dataclass(frozen=True)
class Point:
    """One measurement: operations, bytes, seconds."""

    kind: str
    flop: float
    num_bytes: float
    seconds: float


def decode_points(text: str) -> Iterator[Point]:
    for row in re.findall(r"^\| (32|16) \| (?:16|64) \| (\d+) \| (\d+) \| ([\d.]+) \| [\d.]+ \| [\d.]+ \|", text, re.M):
        heads, batch, context, micros = int(row[0]), int(row[1]), int(row[2]), float(row[3])
        keys = batch * context
        yield Point(
            "decode attention",
            4.0 * keys * heads * HEAD_DIM,
            2.0 * keys * KV_HEADS * HEAD_DIM * ELEMENT,
            micros * 1e-6,
        )


def prefill_points(text: str) -> Iterator[Point]:
    for row in re.findall(
        r"^\| (32|16) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| \d+ \| \d+ \| \d+ \| \d+ \|", text, re.M
    ):
        heads, batch, rows, past, tflops = (int(value) for value in row)
        flop = 4.0 * batch * heads * HEAD_DIM * rows * (past + (rows + 1) / 2)
        elements = batch * HEAD_DIM * (2 * rows * heads + 2 * (past + rows) * KV_HEADS)
        yield Point("prefill attention", flop, elements * ELEMENT, flop / (tflops * 1e12))


def linear_points(text: str) -> Iterator[Point]:
    for model, name, rows, micros in re.findall(r"^(0\.6B|8B) (\w+) +M= *(\d+) ours +([\d.]+) us", text, re.M):
        if name not in SHAPES[model]:
            continue
        outputs, inputs = SHAPES[model][name]
        m = int(rows)
        elements = outputs * inputs + m * (outputs + inputs)
        yield Point("deterministic linear", 2.0 * m * outputs * inputs, elements * ELEMENT, float(micros) * 1e-6)


def draw(points: list[Point], out: Path) -> None:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    ridge = PEAK_TFLOPS * 1e3 / READ_GBPS
    axes.loglog([0.5, ridge, 2e4], [0.5 * READ_GBPS / 1e3, PEAK_TFLOPS, PEAK_TFLOPS], color="#333333", linewidth=1.2)
    axes.text(0.6, 0.75 * READ_GBPS / 1e3, f"{READ_GBPS:,.0f} GB/s", rotation=31, fontsize=9)
    axes.text(ridge * 3, PEAK_TFLOPS * 1.12, f"{PEAK_TFLOPS:.0f} TFLOP/s", fontsize=9)
    for kind, colour in COLOURS.items():
        chosen = [point for point in points if point.kind == kind]
        axes.scatter(
            [point.flop / point.num_bytes for point in chosen],
            [point.flop / point.seconds / 1e12 for point in chosen],
            s=22,
            color=colour,
            label=kind,
        )
    axes.set_xlabel("operations a byte")
    axes.set_ylabel("TFLOP/s")
    axes.grid(alpha=0.3, which="both")
    axes.legend(loc="lower right")
    figure.savefig(out, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    describe(out, "Roofline of the kernels on one H200", f"{len(points)} measurements against what the card allows.")


def describe(picture: Path, title: str, description: str) -> None:
    """Writes the title and description that a screen reader reads aloud into an SVG, as its first children."""
    opening, body = re.split(r"(?<=>)\n", picture.read_text(encoding="utf-8").partition("<svg")[2], maxsplit=1)
    words = f"<title>{escape(title)}</title>\n <desc>{escape(description)}</desc>"
    picture.write_text(f"<svg{opening}\n {words}\n{body}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="A results file of bench/results.")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    text = options.results.read_text(encoding="utf-8")
    points = [*decode_points(text), *prefill_points(text), *linear_points(text)]
    if not points:
        raise SystemExit(f"{options.results} holds no table that this script knows")
    draw(points, options.out)
    print(f"{len(points)} points: {options.out}")


if __name__ == "__main__":
    main()
