"""Pearson's chi-square test of counts against known probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

SMALLEST_EXPECTED = 5.0
_NORMAL_QUANTILE = 3.719  # one in 10,000: seeds are fixed, so a test that passes once always passes


def agrees(counts: Mapping[Hashable, int], probabilities: Mapping[Hashable, float]) -> bool:
    """Whether draws from `probabilities` are at least so far from them in more than one of 10,000 runs."""
    statistic, freedom = chi_square(counts, probabilities)
    return statistic < critical_value(freedom)


def chi_square(counts: Mapping[Hashable, int], probabilities: Mapping[Hashable, float]) -> tuple[float, int]:
    """The statistic and its degrees of freedom; outcomes that are expected less than five times count as one."""
    impossible = [outcome for outcome in counts if outcome not in probabilities]
    if impossible:
        raise AssertionError(f"{impossible[0]!r} was drawn, and its probability is 0")
    draws = sum(counts.values())
    cells, rest = [], [0.0, 0.0]
    for outcome, probability in probabilities.items():
        cell = [float(counts.get(outcome, 0)), draws * probability]
        if cell[1] >= SMALLEST_EXPECTED:
            cells.append(cell)
        else:
            rest = [rest[0] + cell[0], rest[1] + cell[1]]
    if rest[1] >= SMALLEST_EXPECTED:
        cells.append(rest)
    return sum((seen - expected) ** 2 / expected for seen, expected in cells), len(cells) - 1


def critical_value(freedom: int) -> float:
    """The 0.9999 quantile (Wilson and Hilferty, "The distribution of chi-square", 1931)."""
    spread = 2.0 / (9.0 * freedom)
    return float(freedom * (1.0 - spread + _NORMAL_QUANTILE * spread**0.5) ** 3)
