"""Everything that needs a GPU, in one run with a time budget: build, kernel compile, tests, benches; one text report.

python tools/gpu_check.py --seconds 600 --out results.txt [--only tests|bench] [--jobs 8]
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "numpy", "cython", "transformers", "pytest", "cupy-cuda13x", "cupy-cuda12x")
SHORTEST = 15.0  # seconds; a step that could only run for less is not begun
LAST_LINES = 40


@dataclass(frozen=True)
class Step:
    """A command, what it is called, and how much of the budget it may take at most."""

    name: str
    command: tuple[str, ...]
    most_seconds: float
    kind: str


def steps(python: str, model: str, jobs: int) -> Iterator[Step]:
    build = (python, "setup.py", "--quiet", "build_ext", "--inplace", "--parallel", str(max(1, jobs)))
    yield Step("build", build, 240, "build")
    pytest = (python, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-p", "no:benchmark")
    spread = ("-n", str(jobs), "--dist", "loadfile") if jobs > 1 else ()
    yield Step("tests", (*pytest, *spread, "--durations=5", "tests/parity/cuda"), 900, "tests")
    if shutil.which("compute-sanitizer"):
        for tool in ("memcheck", "racecheck"):
            sanitizer = ("compute-sanitizer", "--tool", tool, "--target-processes", "all", "--error-exitcode", "9")
            command = (*sanitizer, *pytest, "-k", "sanitizer", "tests/parity/cuda")
            yield Step(f"sanitizer, {tool}", command, 240, "tests")
    for path in sorted((ROOT / "bench/gpu").glob("bench_*.py")):
        if path.name != "bench_end_to_end.py":
            yield Step(path.name, (python, str(path)), 120, "bench")
    bench = (python, "bench/gpu/bench_end_to_end.py", "--peers", "--seconds")
    for size in model.split(","):
        yield Step(f"end to end {size}", (*bench, "170", "--model", size), 200, "bench")


def search_path() -> str:
    """Where the steps find the project, the plugins that were not installed, and what the caller added."""
    plugins = sorted(map(str, (ROOT / "plugins").glob("*/src")))
    return os.pathsep.join([str(ROOT), str(ROOT / "bench/gpu"), *plugins, os.environ.get("PYTHONPATH", "")])


def header(arguments: list[str]) -> str:
    import torch

    lines = [
        f"date: {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC",
        f"command: python tools/gpu_check.py {' '.join(arguments)}",
        f"Python {sys.version.split()[0]}, {os.cpu_count()} cores",
    ]
    for package in PACKAGES:
        try:
            lines.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        major, minor = torch.cuda.get_device_capability()
        lines.append(f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}, CUDA {torch.version.cuda}")
        lines.append(f"memory: {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    else:
        lines.append("no GPU: tests that need one are skipped")
    return "\n".join(lines)


def run(step: Step, seconds: float, log: Path) -> tuple[str, float]:
    """Run a step; its whole output goes to `log`, the returned text says how it ended."""
    environment = os.environ | {"PYTHONPATH": search_path()}
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        try:
            code = subprocess.run(
                step.command,
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                check=False,
            ).returncode
            ended = "ok" if code == 0 else f"exit status {code}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {seconds:.0f} s"
    return ended, time.monotonic() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=900.0, help="Budget of the whole run.")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.txt"), help="The report; logs lie beside it.")
    parser.add_argument("--only", choices=("tests", "bench"), help="Leave out the other half.")
    parser.add_argument("--jobs", type=int, default=1, help="Test processes (pytest-xdist) and compilers.")
    parser.add_argument("--no-build", action="store_true", help="The extensions are built already.")
    parser.add_argument("--model", default="0.6B,8B", help="Sizes of the end-to-end bench.")
    options = parser.parse_args()
    ends = time.monotonic() + options.seconds
    options.out.parent.mkdir(parents=True, exist_ok=True)
    report = [header(sys.argv[1:]), ""]
    failed = 0
    for number, step in enumerate(steps(sys.executable, options.model, options.jobs)):
        if step.kind == "build" and options.no_build:
            continue
        if options.only not in (None, step.kind) and step.kind != "build":
            continue
        left = ends - time.monotonic()
        if left < SHORTEST:
            report.append(f"== {step.name}: not begun, the time is up")
            failed += 1
            continue
        log = options.out.with_name(f"{options.out.stem}.{number:02}.log")
        ended, took = run(step, min(left, step.most_seconds), log)
        failed += ended != "ok"
        last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        report += [f"== {step.name}: {ended}, {took:.1f} s", *last, ""]
        options.out.write_text("\n".join(report), encoding="utf-8")
        print(f"{step.name}: {ended}, {took:.1f} s", flush=True)
    report.append(f"{failed} steps did not pass" if failed else "every step passed")
    options.out.write_text("\n".join(report) + "\n", encoding="utf-8")
    print(f"report: {options.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
