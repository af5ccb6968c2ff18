"""The compiled core against what it says about itself: stubs, typedef mirror, light imports."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import edgellm._core
import edgellm.cache.types as cache_types

CORE = Path(edgellm._core.__file__).parent
MODULES = sorted(path.stem for path in CORE.glob("*.pyx"))

# Python's name for each typedef of types.pxd; None where the value is a plain int or its own class below.
TYPEDEF_MIRRORS = {
    "page_id_t": "PageId",
    "node_id_t": "NodeId",
    "record_id_t": "RecordId",
    "slot_t": None,
    "token_t": None,
}


def load(name: str) -> ModuleType:
    return importlib.import_module(f"edgellm._core.{name}")


def stub_tree(name: str) -> ast.Module:
    return ast.parse((CORE / f"{name}.pyi").read_text(encoding="utf-8"))


def is_alias(node: ast.AST) -> bool:
    return isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias"


def declared_names(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Public functions, classes and values that a stub body declares; type aliases exist for checkers only."""
    names: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not is_alias(node):
            names[node.target.id] = node
    return {name: node for name, node in names.items() if not name.startswith("_")}


def built_names(module: ModuleType) -> set[str]:
    """Public names the built module defines itself: its functions and classes, and upper-case constants."""
    own = {name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__}
    constants = {name for name in vars(module) if name.isupper()}
    return {name for name in own | constants if not name.startswith("_")}


def stub_parameters(node: ast.FunctionDef) -> list[tuple[str, str, str | None]]:
    """(name, kind, default) of each parameter but self."""
    arguments = node.args
    positional = arguments.posonlyargs + arguments.args
    defaults = [None] * (len(positional) - len(arguments.defaults)) + [ast.unparse(d) for d in arguments.defaults]
    out = [(a.arg, "positional", d) for a, d in zip(positional, defaults, strict=True)]
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        out.append((argument.arg, "keyword", None if default is None else ast.unparse(default)))
    return [entry for entry in out if entry[0] != "self"]


def built_parameters(signature: inspect.Signature) -> list[tuple[str, str, str | None]]:
    out = []
    for parameter in signature.parameters.values():
        kind = "keyword" if parameter.kind is inspect.Parameter.KEYWORD_ONLY else "positional"
        default = None if parameter.default is inspect.Parameter.empty else repr(parameter.default)
        out.append((parameter.name, kind, default))
    return [entry for entry in out if entry[0] != "self"]


def same_parameters(stub: list[tuple[str, str, str | None]], built: list[tuple[str, str, str | None]]) -> bool:
    """Equal names and kinds; a default of `...` in the stub stands for any."""
    if [entry[:2] for entry in stub] != [entry[:2] for entry in built]:
        return False
    return all(
        left == right or (left == "..." and right is not None)
        for left, right in zip((e[2] for e in stub), (e[2] for e in built), strict=True)
    )


def constructor_parameters(module: ModuleType, cls: type) -> list[tuple[str, str, str | None]]:
    """Of a class: from the object where it says so, else from the source (a compiled constructor has no signature)."""
    if inspect.isfunction(vars(cls).get("__init__")) or hasattr(vars(cls).get("__init__"), "__signature__"):
        return built_parameters(inspect.signature(vars(cls)["__init__"]))
    source = (CORE / f"{module.__name__.rpartition('.')[2]}.pyx").read_text(encoding="utf-8")
    body = re.split(rf"^(?:cdef )?class {cls.__name__}\b", source, flags=re.MULTILINE)[1]
    body = re.split(r"^(?:cdef )?class ", body, flags=re.MULTILINE)[0]
    found = re.search(r"^    def __c?init__\((.*?)\):", body, flags=re.MULTILINE | re.DOTALL)
    assert found is not None, f"{cls.__name__} has no constructor in its source"
    untyped = re.sub(r"\b[\w\[\]:]+ (?=\w+ *(?:=|,|\)|$))", "", found[1])
    definition = ast.parse(f"def constructor({untyped}): ...").body[0]
    assert isinstance(definition, ast.FunctionDef)
    return stub_parameters(definition)


@pytest.mark.parametrize("name", MODULES)
def test_each_module_is_a_triple(name: str) -> None:
    assert (CORE / f"{name}.pxd").exists()
    assert (CORE / f"{name}.pyi").exists()


@pytest.mark.parametrize("name", MODULES)
def test_stub_declares_exactly_the_public_names_of_the_module(name: str) -> None:
    assert set(declared_names(stub_tree(name).body)) == built_names(load(name))


@pytest.mark.parametrize("name", MODULES)
def test_stub_signatures_equal_those_of_the_module_functions(name: str) -> None:
    module = load(name)
    for function, node in declared_names(stub_tree(name).body).items():
        if isinstance(node, ast.FunctionDef):
            built = built_parameters(inspect.signature(getattr(module, function)))
            assert same_parameters(stub_parameters(node), built), function


@pytest.mark.parametrize("name", MODULES)
def test_stub_classes_have_the_members_and_signatures_of_the_module(name: str) -> None:
    module = load(name)
    for class_name, node in declared_names(stub_tree(name).body).items():
        if not isinstance(node, ast.ClassDef):
            continue
        cls = getattr(module, class_name)
        members = declared_names(node.body)
        assert set(members) == {member for member in vars(cls) if not member.startswith("_")}, class_name
        for member, definition in members.items():
            value = inspect.getattr_static(cls, member)
            if isinstance(definition, ast.FunctionDef) and callable(value):
                built = built_parameters(inspect.signature(value))
                assert same_parameters(stub_parameters(definition), built), f"{class_name}.{member}"
        init = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
        if init is not None:
            assert same_parameters(stub_parameters(init), constructor_parameters(module, cls)), f"{class_name}.__init__"


def test_every_typedef_has_its_python_mirror() -> None:
    text = (CORE / "types.pxd").read_text(encoding="utf-8")
    names = re.findall(r"^ctypedef \w+ (\w+)", text, re.MULTILINE)
    assert "page_id_t" in names
    for name in names:
        mirror = TYPEDEF_MIRRORS[name]
        if mirror is not None:
            assert getattr(cache_types, mirror).__supertype__ is int
    assert re.findall(r"uint64_t (\w+)", text.partition("struct block_hash_t")[2]) == list(
        cache_types.Hash128.__dataclass_fields__
    )


def test_core_imports_neither_torch_nor_cupy() -> None:
    imports = "\n".join(f"import edgellm._core.{name}" for name in MODULES)
    heavy = "{'torch', 'cupy', 'transformers', 'pluggy'}"
    script = f"import sys\n{imports}\nprint(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
