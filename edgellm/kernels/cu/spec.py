"""What a kernel is: its source, its parameter struct and the table of its variants, each declared once."""

from __future__ import annotations

import ctypes
import importlib
import re
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

from edgellm.errors import KernelError

FOLDER = Path(__file__).resolve().parent
NAMESPACE = "edgellm"
_EXPORT = re.compile(r"^SPECS?\b.*=", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Variant:
    """One instantiation: the key that wrappers look up and the template arguments it stands for."""

    key: tuple[Hashable, ...]
    arguments: str  # "__nv_bfloat16, 128"; empty for a function that is no template


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One `__global__` function of a device source and all its variants.

    `min_arch` and `max_arch` bound the compute capabilities (10 * major + minor) it compiles for; `arch_suffix` is
    "a" where it uses instructions of one architecture only.
    """

    name: str
    entry: str
    params: type[ctypes.Structure]
    params_name: str
    variants: tuple[Variant, ...]
    source: str = ""
    min_arch: int = 80
    arch_suffix: str = ""
    max_arch: int | None = None

    @property
    def source_path(self) -> Path:
        return FOLDER / (self.source or f"{self.name}.cu")

    def expression(self, key: tuple[Hashable, ...]) -> str:
        """The C++ name of a variant, for example `edgellm::paged_decode<__nv_bfloat16, 128>`.

        Raises:
            KernelError: no such variant; the message lists those there are.
        """
        for variant in self.variants:
            if variant.key == key:
                name = f"{NAMESPACE}::{self.entry}"
                return f"{name}<{variant.arguments}>" if variant.arguments else name
        known = ", ".join(str(variant.key) for variant in self.variants)
        raise KernelError(f"kernel {self.name} has no variant {key}; its variants are {known}")

    def supports(self, arch: int) -> bool:
        """Whether it compiles for a compute capability such as 87."""
        return self.min_arch <= arch and (self.max_arch is None or arch <= self.max_arch)


def ops() -> tuple[str, ...]:
    """Names of the op modules of this package: those that assign `SPEC` or `SPECS`.  Imports nothing."""
    modules = sorted(FOLDER.glob("*.py"))
    return tuple(path.stem for path in modules if _EXPORT.search(path.read_text(encoding="utf-8")))


def specs_of(op: str) -> tuple[KernelSpec, ...]:
    """The specs that one op module exports as `SPEC` or `SPECS`.

    Raises:
        KernelError: it exports neither.
    """
    module = importlib.import_module(f"{__package__}.{op}")
    specs = getattr(module, "SPECS", None) or getattr(module, "SPEC", None)
    if specs is None:
        raise KernelError(f"{module.__name__} exports neither SPEC nor SPECS; declare its kernels there")
    return specs if isinstance(specs, tuple) else (specs,)


def registry() -> tuple[KernelSpec, ...]:
    """Every spec of every op module, by name.

    Raises:
        KernelError: an op module exports none, or two specs share a name.
    """
    found: dict[str, KernelSpec] = {}
    for op in ops():
        for spec in specs_of(op):
            if spec.name in found:
                raise KernelError(f"two kernels are named {spec.name} ({op} exports the second); rename one")
            found[spec.name] = spec
    return tuple(found[name] for name in sorted(found))
