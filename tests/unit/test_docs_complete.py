"""Every hook, environment variable, command, make target and public name is documented."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import edgellm
from edgellm import envs
from edgellm.hookspecs import HookSpecs

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = re.compile(r"""["'](EDGELLM_[A-Z_]+)["']""")
# Constants that look like variables: a plugin's module attribute, and a marker in error messages.
NOT_VARIABLES = {"EDGELLM_API", "EDGELLM_INPUT_TOO_LONG"}

pytestmark = pytest.mark.skipif(
    not (ROOT / "README.md").is_file(), reason="the documentation is not beside an installed package"
)


def documentation() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))])


def hooks() -> list[str]:
    return sorted(name for name in vars(HookSpecs) if name.startswith("edgellm_"))


def used_variables() -> dict[str, str]:
    """Variable name to a file that names it, over the library in every language and its build."""
    found: dict[str, str] = {}
    sources = [path for ending in ("py", "pyx", "c", "h") for path in sorted((ROOT / "edgellm").rglob(f"*.{ending}"))]
    for path in [ROOT / "setup.py", *sources]:
        for name in VARIABLE.findall(path.read_text(encoding="utf-8")):
            found.setdefault(name, str(path.relative_to(ROOT)))
    return {name: where for name, where in found.items() if name not in NOT_VARIABLES}


def test_the_scan_sees_hooks_and_variables() -> None:
    assert "edgellm_register_publication_policies" in hooks()
    assert {"EDGELLM_HOME", "EDGELLM_DEBUG"} <= used_variables().keys()


@pytest.mark.parametrize("hook", hooks())
def test_hook_is_documented(hook: str) -> None:
    assert f"`{hook}`" in documentation(), f"{hook} is in no documentation page"
    assert (getattr(HookSpecs, hook).__doc__ or "").strip(), f"{hook} has no docstring"


def test_every_variable_in_use_is_declared() -> None:
    declared = {variable.name for variable in envs.VARIABLES}
    undeclared = {name: where for name, where in used_variables().items() if name not in declared}
    assert not undeclared, f"declare these in edgellm/envs.py: {undeclared}"


@pytest.mark.parametrize("variable", [variable.name for variable in envs.VARIABLES])
def test_variable_is_documented_and_used(variable: str) -> None:
    assert f"`{variable}`" in documentation(), f"{variable} is in no documentation page"
    assert variable in used_variables()


def test_only_envs_reads_the_environment() -> None:
    readers = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "edgellm").rglob("*.py"))
        if re.search(r"os\.environ\.get|os\.environ\[|os\.getenv", path.read_text(encoding="utf-8"))
    ]
    assert readers == ["edgellm/envs.py"]


def test_make_targets_are_in_help_and_contributing() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.search(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)[1].split())  # type: ignore[index]
    shown = set(re.findall(r'@echo "make (\w+)', makefile))
    assert {"demo", "test", "lint", "bench", "kernels", "wheelcheck", "parity"} <= targets & shown
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert not [target for target in shown - {"demo"} if f"`make {target}`" not in contributing]


def test_public_names_load_and_are_listed() -> None:
    for name in edgellm.__all__:
        assert getattr(edgellm, name) is not None
        assert name in dir(edgellm)
    with pytest.raises(AttributeError, match="no attribute 'Motor'; public names: LLM"):
        _ = edgellm.Motor
