"""Build the wheels, install them into a clean environment, and use them there, away from the source tree.

Run by `make wheelcheck`: edgellm's own wheel and one of each plugin under `plugins/`.  Catches what an in-place
build hides: files missing from a wheel, dependencies or entry points missing from the metadata, extensions that
only load beside their sources.
"""

from __future__ import annotations

import os
import re
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
from core_check import EXACT_FOLDERS, copy_tree, core_tests  # noqa: E402


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


def build_plugin_wheels() -> list[Path]:
    """One wheel of each plugin, built from a clean copy with the setuptools of this environment."""
    source, dist = WORK / "plugins", WORK / "plugin-dist"
    for folder in (source, dist):
        shutil.rmtree(folder, ignore_errors=True)
    ignore = shutil.ignore_patterns("__pycache__", "build", "*.egg-info", ".*")
    shutil.copytree(ROOT / "plugins", source, ignore=ignore)
    folders = [str(project.parent) for project in sorted(source.glob("*/pyproject.toml"))]
    pip = [sys.executable, "-m", "pip", "wheel", "-qq", "--disable-pip-version-check"]
    run([*pip, "--no-deps", "--no-build-isolation", "--wheel-dir", str(dist), *folders], WORK)
    wheels = sorted(dist.glob("*.whl"))
    if len(wheels) != len(folders):
        raise SystemExit(f"wheel_check: {len(folders)} plugins made {len(wheels)} wheels in {dist}")
    return wheels


def check_plugin_contents(wheel: Path) -> None:
    """One package with its sources, its type marker, its licence, its data and its entry point; nothing else."""
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    package = wheel.name.split("-")[0]
    info = f"{package}-{wheel.name.split('-')[1]}.dist-info"
    required = {f"{package}/__init__.py", f"{package}/py.typed", f"{info}/entry_points.txt", f"{info}/licenses/LICENSE"}
    if f"{info}/entry_points.txt" in names:
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        required |= {
            f"{module.replace('.', '/')}.py" for module in re.findall(r"= ([\w.]+)$", entry_points, re.MULTILINE)
        }
    required |= package_data(package)
    missing = sorted(required - set(names))
    foreign = sorted({name.split("/")[0] for name in names} - {package, info})
    if missing or foreign:
        raise SystemExit(f"wheel_check: {wheel.name} lacks {missing} and also installs {foreign}")


def package_data(package: str) -> set[str]:
    """What lies in a plugin's package beside its modules: checkpoints, where they are there, and their cards."""
    source = ROOT / "plugins" / package.replace("_", "-") / "src"
    files = [path for path in (source / package).rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    return {str(path.relative_to(source)) for path in files}


def device_sources() -> list[str]:
    """CUDA sources and headers, which are compiled where they run: a wheel without one breaks there only."""
    found = [path for ending in ("cu", "cuh") for path in (ROOT / "edgellm").rglob(f"*.{ending}")]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def check_contents(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    missing = [name for name in REQUIRED if name not in names]
    compiled = {Path(name).name.split(".")[0] for name in names if name.endswith(".so")}
    missing += [name for name in device_sources() if name not in names]
    sources = {path.stem for path in (ROOT / "edgellm").rglob("*.pyx")}
    if missing or not sources <= compiled:
        raise SystemExit(f"wheel_check: {wheel.name} lacks {missing + sorted(sources - compiled)}")
    tops = {name.split("/")[0] for name in names}
    foreign = sorted(top for top in tops if top != "edgellm" and not top.endswith(".dist-info"))
    if foreign:
        raise SystemExit(f"wheel_check: {wheel.name} also installs {foreign}")


def install(wheels: list[Path]) -> str:
    """A clean environment with the wheels and the test tools; returns its interpreter."""
    folder = WORK / "venv"
    run([sys.executable, "-m", "venv", "--clear", str(folder)], WORK)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt")]
    run([*pip, *map(str, wheels), *TEST_TOOLS], WORK)
    return python


def lay_out_tests() -> Path:
    """The tests without the package: only the installed one can be imported."""
    place = WORK / "tests_only"
    shutil.rmtree(place, ignore_errors=True)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "tests", place / "tests", ignore=ignore)
    for tests in sorted((ROOT / "plugins").glob("*/tests")):
        shutil.copytree(tests, place / "plugins" / tests.parent.name / "tests", ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", place)
    return place


def main() -> None:
    started = time.monotonic()
    WORK.mkdir(parents=True, exist_ok=True)
    wheel, plugins = build_wheel(), build_plugin_wheels()
    check_contents(wheel)
    for plugin in plugins:
        check_plugin_contents(plugin)
    python = install([wheel, *plugins])
    place = lay_out_tests()
    environment = {"PYTHONPATH": "", "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    run([*pytest, *core_tests(place, EXACT_FOLDERS)], place, **environment)
    run([*pytest, "plugins", "-k", "not Conformance"], place, **environment)  # `make unit` ran the whole of it
    run([python, str(place / "tests" / "wheel" / "smoke.py"), str(ROOT)], place, **environment)
    print(f"wheel_check: {wheel.name} and {len(plugins)} plugins passed in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
