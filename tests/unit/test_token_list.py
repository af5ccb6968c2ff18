"""The one-pass conversion of a list of ids: the same as numpy's, and nothing that numpy would bend."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.session._token_list import int64_of


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_equals_numpy(ids: list[int]) -> None:
    array = int64_of(ids)
    assert array is not None
    assert array.dtype == np.int64
    assert array.tolist() == ids


class Number(int):
    """A subclass may convert to anything."""


@pytest.mark.parametrize("odd", [True, 1.0, np.int64(3), Number(3), 2**63, -(2**63) - 1, None, [1], "1"])
def test_leaves_everything_else_to_the_slow_path(odd: object) -> None:
    assert int64_of([1, odd, 2]) is None  # type: ignore[list-item]
