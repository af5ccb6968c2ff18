"""The compiled modules beside the session against their stubs; a debug build of them is made by the same switch."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from types import ModuleType

import pytest
from test_core_stubs import (
    built_names,
    built_parameters,
    declared_names,
    same_parameters,
    stub_parameters,
)

import edgellm.session

SESSION = Path(edgellm.session.__file__).parent
MODULES = sorted(path.stem for path in SESSION.glob("*.pyx"))


def load(name: str) -> ModuleType:
    return importlib.import_module(f"edgellm.session.{name}")


def stub(name: str) -> dict[str, ast.stmt]:
    return declared_names(ast.parse((SESSION / f"{name}.pyi").read_text(encoding="utf-8")).body)


def test_the_modules_are_found() -> None:
    assert "_step_plan" in MODULES
    assert all(name.startswith("_") for name in MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_stub_declares_exactly_the_public_names_of_the_module(name: str) -> None:
    assert set(stub(name)) == built_names(load(name))


@pytest.mark.parametrize("name", MODULES)
def test_stub_functions_and_members_equal_those_of_the_module(name: str) -> None:
    module = load(name)
    for public, node in stub(name).items():
        if isinstance(node, ast.FunctionDef):
            built = built_parameters(inspect.signature(getattr(module, public)))
            assert same_parameters(stub_parameters(node), built), public
        if isinstance(node, ast.ClassDef):
            cls = getattr(module, public)
            assert set(declared_names(node.body)) == {member for member in vars(cls) if not member.startswith("_")}, (
                public
            )
