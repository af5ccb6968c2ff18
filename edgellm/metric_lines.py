"""Metrics for people: one a line, latencies in a readable unit."""

from __future__ import annotations

from dataclasses import fields
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def metric_lines(metrics: Any) -> str:
    """`name: value` of every field of a dataclass, one a line, in order; a group of them is indented below its name."""
    lines = []
    for entry in fields(metrics):
        value = getattr(metrics, entry.name)
        text = _text(value)
        lines.append(f"{entry.name}:{_indented(text)}" if "\n" in text else f"{entry.name}: {text}")
    return "\n".join(lines)


def milliseconds(micros: float) -> str:
    return f"{micros / 1000:,.3g} ms" if micros < 1e6 else f"{micros / 1e6:,.3g} s"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return _counts(value)
    if isinstance(value, float):
        return f"{value:,.3f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _counts(values: Mapping[Any, int]) -> str:
    """The entries that are not 0."""
    named = {key.value if isinstance(key, Enum) else key: number for key, number in values.items() if number}
    return ", ".join(f"{name} {number:,}" for name, number in named.items()) or "none"


def _indented(text: str) -> str:
    return "".join(f"\n  {line}" for line in text.splitlines())
