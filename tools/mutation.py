"""Mutation testing of `edgellm/cache` and of the policy plugins, with mutmut.

mutmut wants each mutated module at the path its import name gives, so this tool lays out a workspace
(`build/mutation`): the package with its compiled modules, the plugins' packages at the top, the tests.  It then runs
mutmut there and prints the counts and the survivors by module.  Needs `pip install mutmut` (3.8 or later) beside the
development tools and the extensions built in place.

    python tools/mutation.py                       # everything that has no verdict yet
    python tools/mutation.py 'edgellm.cache.endpoints.*'   # these again
    python tools/mutation.py --survivors           # survivors and time-outs again, after tests were added
    python tools/mutation.py --fresh               # forget all verdicts
    python tools/mutation.py --report              # counts and survivors of the last run, with their diffs
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PLUGIN_PACKAGES = ("edgellm_eagle", "edgellm_hybrid", "edgellm_shared_kv", "edgellm_template")
# What is fast: a mutant meets only the tests that call its function, the quick ones first.
TESTS = (
    "tests/unit/test_cache_deployment.py",
    "tests/unit/test_cache_invariants.py",
    "tests/unit/test_checkpoint_plan.py",
    "tests/unit/test_common_state.py",
    "tests/unit/test_coordinator.py",
    "tests/unit/test_coordinator_faults.py",
    "tests/unit/test_coordinator_flavours.py",
    "tests/unit/test_coordinator_policies.py",
    "tests/unit/test_coordinator_reading.py",
    "tests/unit/test_coordinator_refusals.py",
    "tests/unit/test_coordinator_retention.py",
    "tests/unit/test_growth.py",
    "tests/unit/test_manager_view.py",
    "tests/unit/test_policy_faults_mended.py",
    "tests/unit/test_publication_helpers.py",
    "tests/unit/test_rank_session.py",
    "tests/unit/test_request_adapter.py",
    "tests/policies/test_builtin_policy_conforms.py",
    "tests/policies/test_isolation.py",
    "tests/cases",
    "plugins",
)
# Seconds each, and they add no kill to the rest; the last depends on how busy the machine is.
TOO_SLOW = (
    "tests/cases/test_speculation.py::test_case_18_pages_reserved_for_drafts_come_back",
    "tests/cases/test_chunks_and_pages.py::test_case_08_no_page_is_free_twice",
    "tests/unit/test_rank_session.py::test_behaviour_90_soak_of_random_admit_execute_cancel",
    "tests/unit/test_coordinator_policies.py::test_slow_hooks_are_counted_and_the_third_switches_publication_off",
)
# The wording of errors and logs is not a behaviour: no mutants of it.
TEXT_LINES = (r"^\s*raise \w+\(", r"^\s*f?\"", r"^\s*_?(logger|log)\.", r"= f\"", r"^\s*return f\"")
# The conformance suites judge one traffic run several times.  Each mutant must run it anew (the process it is forked
# from has run it), and every test that judges it must be known to depend on it.
CONFTEST = """import os
import sys

import pytest


def forget_traffic():
    module = sys.modules.get("edgellm.testing.conformance")
    if module is not None:
        module._TRAFFIC.clear()


def pytest_sessionstart(session):
    forget_traffic()


@pytest.fixture(autouse=True)
def traffic_is_counted_for_every_test():
    if os.environ.get("MUTANT_UNDER_TEST") == "stats":
        forget_traffic()
"""
STATUS = {0: "survived", 1: "killed", 3: "killed", 5: "no tests", 33: "no tests", None: "not run"}
TIMEOUTS = {-24, 24, -9, 36, 152, 255}


def _copy_if_changed(source: str, target: str) -> str:
    """Copy with a new time stamp, by which mutmut knows a changed source; leave equal files alone."""
    there = Path(target)
    if not there.exists() or there.read_bytes() != Path(source).read_bytes():
        shutil.copyfile(source, target)
    return target


def lay_out(workspace: Path) -> None:
    """Copy what changed since the last time; mutmut keys its verdicts by the source of each function."""
    workspace.mkdir(parents=True, exist_ok=True)
    how = {
        "ignore": shutil.ignore_patterns("__pycache__", "*.pyx", "*.cpp", "*.c", "*.cu", ".hypothesis"),
        "dirs_exist_ok": True,
        "copy_function": _copy_if_changed,
    }
    shutil.copytree(ROOT / "edgellm", workspace / "edgellm", **how)
    shutil.copytree(ROOT / "tests", workspace / "tests", **how)
    for plugin in sorted((ROOT / "plugins").iterdir()):
        if not (plugin / "pyproject.toml").is_file():
            continue
        shutil.copytree(plugin / "tests", workspace / "plugins" / plugin.name / "tests", **how)
        for package in (plugin / "src").glob("edgellm_*[!o]"):
            if package.name in PLUGIN_PACKAGES:
                shutil.copytree(package, workspace / package.name, **how)
    mutants = workspace / "mutants"
    if mutants.exists():  # mutmut renews Python sources there, and compiled modules it copies once
        for module in (workspace / "edgellm").rglob("*.so"):
            _copy_if_changed(str(module), str(mutants / module.relative_to(workspace)))
    (workspace / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (workspace / "pyproject.toml").write_text(_settings(), encoding="utf-8")


def _settings() -> str:
    """This project's pytest settings and those of mutmut."""
    pytest_settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[tool.pytest.ini_options]")[2]
    pytest_settings = pytest_settings.partition("\n[")[0]
    tests = [name for name in TESTS if (ROOT / name).exists()]
    # Unraisable errors: what a mutant leaves to its finalizers would end the run of all the others.
    options = [
        "-m",
        "not slow",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:unraisableexception",
        *(f"--deselect={name}" for name in TOO_SLOW),
    ]
    mutmut = {
        "source_paths": ["edgellm", *PLUGIN_PACKAGES],
        "only_mutate": ["edgellm/cache/*.py", *(f"{name}/*.py" for name in PLUGIN_PACKAGES)],
        "also_copy": ["plugins", "conftest.py"],
        "pytest_add_cli_args_test_selection": tests,
        "pytest_add_cli_args": options,
        "do_not_mutate_patterns": list(TEXT_LINES),
        "timeout_multiplier": 3.0,
        "timeout_constant": 3.0,
        "use_git_change_detection": False,
        "track_dependencies": False,
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in mutmut.items()]
    return "[tool.pytest.ini_options]" + pytest_settings + "\n\n[tool.mutmut]\n" + "\n".join(lines) + "\n"


def run_inside(budget: float, only: str, arguments: list[str]) -> None:
    """mutmut's own command line in this process, with two changes.

    No garbage collection: a collected handle's `__del__` would enter mutmut's call recorder while that changes its
    context variable, and Python 3.11 then crashes.  And a mutant meets its quickest tests up to `budget` seconds: of
    those whose name matches `only`, where any does.
    """
    import gc

    import mutmut.__main__ as program
    from mutmut.state import state

    gc.disable()
    collect = program.collect_or_load_stats

    def collect_and_trim(*args: Any, **kwargs: Any) -> None:
        collect(*args, **kwargs)
        seconds, tests_of = state().duration_by_test, state().tests_by_mangled_function_name
        for function, tests in tests_of.items():
            kept, total = set(), 0.0
            chosen = [test for test in tests if re.search(only, test)] or tests
            for test in sorted(chosen, key=lambda name: seconds[name]):
                total += seconds[test]
                if kept and total > budget:
                    break
                kept.add(test)
            tests_of[function] = kept

    program.collect_or_load_stats = collect_and_trim
    program.cli(arguments)


def verdicts(workspace: Path) -> dict[str, int | None]:
    """The exit status of every mutant by name; None where it did not run."""
    found: dict[str, int | None] = {}
    for meta in sorted((workspace / "mutants").rglob("*.meta")):
        found.update(json.loads(meta.read_text(encoding="utf-8"))["exit_code_by_key"])
    return found


def status_of(code: int | None) -> str:
    return "timed out" if code in TIMEOUTS else STATUS.get(code, f"exit {code}")


def print_counts(found: dict[str, int | None]) -> None:
    by_module: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for name, code in found.items():
        by_module[name.rpartition(".x")[0]][status_of(code)] += 1
    total: collections.Counter[str] = collections.Counter()
    for module, counts in sorted(by_module.items()):
        total.update(counts)
        print(f"{module:40} {sum(counts.values()):5}  " + ", ".join(f"{n} {s}" for s, n in sorted(counts.items())))
    print(f"{'all':40} {sum(total.values()):5}  " + ", ".join(f"{n} {s}" for s, n in sorted(total.items())))


def main() -> int:
    if sys.argv[1:2] == ["--inside"]:
        run_inside(float(sys.argv[2]), sys.argv[3], sys.argv[4:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="mutants to run again; shell patterns of module.function")
    parser.add_argument("--workspace", type=Path, default=ROOT / "build" / "mutation")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--budget", type=float, default=10.0, help="seconds of tests that a mutant meets, quick first")
    parser.add_argument("--tests", default="", help="regular expression; only these tests, as after adding to them")
    parser.add_argument("--survivors", action="store_true", help="run survivors and time-outs again")
    parser.add_argument("--fresh", action="store_true", help="forget all verdicts first")
    parser.add_argument("--report", action="store_true", help="run nothing; print survivors with their diffs")
    options = parser.parse_args()
    workspace: Path = options.workspace.resolve()
    command = [sys.executable, __file__, "--inside", str(options.budget), options.tests]
    status = 0
    if not options.report:
        if options.fresh:
            shutil.rmtree(workspace, ignore_errors=True)
        lay_out(workspace)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "EDGELLM_PLUGINS": ""}
        names = options.names or []
        if options.survivors:
            again = {"survived", "timed out"}  # on a busy machine, running out of time is no verdict
            names = [*names, *(name for name, code in verdicts(workspace).items() if status_of(code) in again)]
        run = [*command, "run", "--max-children", str(options.jobs), *names]
        status = subprocess.run(run, cwd=workspace, env=environment, check=False).returncode
    found = verdicts(workspace)
    for name, code in sorted(found.items()):
        if code == 0:
            print(name)
            if options.report:
                shown = subprocess.run(
                    [*command, "show", name], cwd=workspace, capture_output=True, text=True, check=False
                )
                print("\n".join(line for line in shown.stdout.splitlines() if line[:1] in "+-@"))
    print_counts(found)
    return status


if __name__ == "__main__":
    sys.exit(main())
