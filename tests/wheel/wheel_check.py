"""Build the wheel, install it into a clean environment, and use it there, away from the source tree.

Run by `make wheelcheck`.  Catches what an in-place build hides: files missing from the wheel, dependencies
missing from the metadata, extensions that only load beside their sources.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "wheelcheck"
REQUIRED = ("edgellm/_core/types.pxd", "edgellm/_core/block_hash.pyi", "edgellm/data/lighthouse_manual.txt",
            "edgellm/py.typed")  # fmt: skip
TEST_TOOLS = ("pytest", "pytest-timeout", "hypothesis")

sys.path.insert(0, str(ROOT / "tools"))
from core_check import copy_tree, core_tests  # noqa: E402


def run(command: list[str], cwd: Path, **environment: str) -> None:
    subprocess.run(command, cwd=cwd, check=True, env={**os.environ, **environment})


def build_wheel() -> Path:
    """Build from a clean copy, so that nothing left in the working tree can slip in."""
    source, dist = WORK / "source", WORK / "dist"
    copy_tree(source)
    shutil.rmtree(dist, ignore_errors=True)
    run([sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--wheel-dir", str(dist), str(source)], WORK)
    (wheel,) = dist.glob("edgellm-*.whl")
    return wheel


def check_contents(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    missing = [name for name in REQUIRED if name not in names]
    compiled = {Path(name).name.split(".")[0] for name in names if name.endswith(".so")}
    sources = {path.stem for path in (ROOT / "edgellm" / "_core").glob("*.pyx")}
    if missing or not sources <= compiled:
        raise SystemExit(f"wheel_check: {wheel.name} lacks {missing + sorted(sources - compiled)}")
    tops = {name.split("/")[0] for name in names}
    foreign = sorted(top for top in tops if top != "edgellm" and not top.endswith(".dist-info"))
    if foreign:
        raise SystemExit(f"wheel_check: {wheel.name} also installs {foreign}")


def install(wheel: Path) -> str:
    """A clean environment with the wheel and the test tools; returns its interpreter."""
    folder = WORK / "venv"
    run([sys.executable, "-m", "venv", "--clear", str(folder)], WORK)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt")]
    run([*pip, str(wheel), *TEST_TOOLS], WORK)
    return python


def lay_out_tests() -> Path:
    """The tests without the package: only the installed one can be imported."""
    place = WORK / "tests_only"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(ROOT / "tests", place / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", place)
    return place


def main() -> None:
    started = time.monotonic()
    WORK.mkdir(parents=True, exist_ok=True)
    wheel = build_wheel()
    check_contents(wheel)
    python = install(wheel)
    place = lay_out_tests()
    environment = {"PYTHONPATH": "", "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *core_tests(place)], place, **environment)
    run([python, str(place / "tests" / "wheel" / "smoke.py"), str(ROOT)], place, **environment)
    print(f"wheel_check: {wheel.name} passed in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
