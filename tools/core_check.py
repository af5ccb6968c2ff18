"""Build the Cython modules in a copy of this tree and run their tests there.

    python tools/core_check.py --debug     this Python; EDGELLM_DEBUG=1 (checks, line trace, assertions);
                                           the tests of the core, and those of the session's compiled modules
    python tools/core_check.py --matrix    every other Python 3.10 to 3.13 found on this machine;
                                           the tests of the core, without torch
    python tools/core_check.py --ends      the oldest and the newest of them

A copy, because a debug build must not overwrite the normal one and Cython rebuilds by file time alone.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "core"
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
REQUIREMENTS = ("numpy", "cython", "setuptools", "pluggy", "pytest", "pytest-timeout", "hypothesis")
CORE_IMPORT = re.compile(r"^\s*(?:from|import)\s+edgellm\b([\w.]*)", re.MULTILINE)
# Test helpers that need the core alone count as core.
CORE_HELPERS = (".testing.cache_workout", ".testing.random_operations")
CORE_MODULES = ("._core", ".errors", ".cache.types", *CORE_HELPERS)
ALL_FOLDERS = ("unit", "property", "fuzz", "cython")
EXACT_FOLDERS = ("unit", "cython")  # what another Python may change; random runs say nothing new there
SESSION_IMPORT = re.compile(r"\bedgellm\.session\._")
SESSION_FOLDERS = ("unit", "property")
# These reach the compiled modules through what is built on them.
SESSION_INDIRECT = ("unit/test_lowering.py", "unit/test_plan_check.py", "unit/test_scripted_session.py")
NEEDS_TORCH = re.compile(r"^\s*(?:from|import)\s+(?:torch|transformers)\b", re.MULTILINE)


def core_tests(root: Path, folders: tuple[str, ...] = ALL_FOLDERS) -> list[str]:
    """Test files that touch the core and nothing above it: these must pass without torch."""
    found = []
    for folder in folders:
        for path in sorted((root / "tests" / folder).glob("test_*.py")):
            text = path.read_text(encoding="utf-8")
            imports = CORE_IMPORT.findall(text)
            is_core = any(name.startswith(("._core", *CORE_HELPERS)) for name in imports)
            if is_core and all(name.startswith(CORE_MODULES) for name in imports) and not NEEDS_TORCH.search(text):
                found.append(str(path.relative_to(root)))
    return found


def session_tests(root: Path) -> list[str]:
    """Test files of the session's compiled modules, which may need all of edgellm and torch."""
    files = [path for folder in SESSION_FOLDERS for path in sorted((root / "tests" / folder).glob("test_*.py"))]
    found = [path for path in files if SESSION_IMPORT.search(path.read_text(encoding="utf-8"))]
    found += [root / "tests" / name for name in SESSION_INDIRECT]
    return [str(path.relative_to(root)) for path in found]


def copy_tree(target: Path) -> None:
    """A clean copy of the sources: no build products, no environments."""
    if target.exists():
        shutil.rmtree(target)
    ignore = shutil.ignore_patterns(
        "*.so", "*.cpp", "_ops.c", "__pycache__", ".*", "build", "dist", "*.egg-info", "results", "docs", "plugins"
    )
    shutil.copytree(ROOT, target, ignore=ignore)


def run(command: list[str], cwd: Path, **environment: str) -> str:
    """Run a command and return its output; stop the whole check, showing the output, when it fails."""
    joined = {**os.environ, **environment}
    done = subprocess.run(command, cwd=cwd, env=joined, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{done.stdout}\ncore_check: exit code {done.returncode} from {' '.join(command)} in {cwd}")
    return done.stdout


def environment_for(python: str, name: str) -> str:
    """The interpreter of a virtual environment of `python` that holds what the core's tests need."""
    folder = ROOT / "build" / f"core-venv-{name}"
    interpreter = str(folder / "bin" / "python")
    if not (folder / ".ready").exists():
        run([python, "-m", "venv", "--clear", str(folder)], ROOT)
        pip = [interpreter, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        run([*pip, "-c", "constraints.txt", *REQUIREMENTS], ROOT)
        (folder / ".ready").touch()
    return interpreter


def check(python: str, name: str, *, debug: bool) -> None:
    """Build with `python` in a copy of the tree and run the core's tests there; with `debug` the session's as well."""
    started = time.monotonic()
    tree = WORK / name
    copy_tree(tree)
    tests = core_tests(tree, ALL_FOLDERS if debug else EXACT_FOLDERS)
    if not tests:
        raise SystemExit(
            "core_check: no core test was found below tests/unit, tests/property, tests/fuzz and tests/cython"
        )
    if debug:
        tests += session_tests(tree)
    flag = "1" if debug else "0"
    run([python, "setup.py", "--quiet", "build_ext", "--inplace", "-j2"], tree, EDGELLM_DEBUG=flag)
    output = run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests], tree, EDGELLM_DEBUG=flag)
    print(f"{output}core_check: {name} passed, {len(tests)} files, {time.monotonic() - started:.0f} s", flush=True)


def working_python(version: str) -> str | None:
    """An interpreter of `version`: on PATH, or among pyenv's; None when this machine has none that runs."""
    candidates = [shutil.which(f"python{version}")]
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    candidates += [str(path / "bin" / "python") for path in sorted(pyenv.glob(f"{version}.*"))]
    for candidate in filter(None, candidates):
        probe = [candidate, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]
        answer = subprocess.run(probe, capture_output=True, text=True, check=False)
        if answer.returncode == 0 and answer.stdout.strip() == version:
            return candidate
    return None


def check_versions(versions: Sequence[str]) -> None:
    """Every one but this, two at a time: half of the work is waiting for the package index."""
    this = "{}.{}".format(*sys.version_info[:2])
    with ThreadPoolExecutor(max_workers=2) as pool:
        for _ in pool.map(check_version, [version for version in versions if version != this]):
            pass


def check_version(version: str) -> None:
    python = working_python(version)
    if python is None:
        print(f"core_check: Python {version} is not installed here, skipped", flush=True)
        return
    check(environment_for(python, version), f"py{version}", debug=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--debug", action="store_true")
    choice.add_argument("--matrix", action="store_true")
    choice.add_argument("--ends", action="store_true")
    options = parser.parse_args()
    if options.debug:
        check(sys.executable, "debug", debug=True)
    else:
        check_versions(VERSIONS if options.matrix else (VERSIONS[0], VERSIONS[-1]))


if __name__ == "__main__":
    main()
