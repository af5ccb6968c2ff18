"""Toy drivers for the cases: every one is closed at the end, and must have everything back then."""

from __future__ import annotations

import random

import pytest
from plugin_policies import all_policies

from edgellm.testing.toy_driver import FLAVOURS, ToyDriver


@pytest.fixture
def open_toy():
    """Opens drivers by name of flavour."""
    opened = []

    def open_one(flavour: str, *, kind: type[ToyDriver] = ToyDriver, **options) -> ToyDriver:
        driver = kind(FLAVOURS[flavour], **{"policies": all_policies(), **options})
        opened.append(driver)
        return driver

    yield open_one
    for driver in opened:
        driver.close()


@pytest.fixture
def tokens():
    """`tokens(seed, count)`: the same random token ids for the same arguments."""
    return lambda seed, count: random.Random(seed).choices(range(3, 40_000), k=count)
