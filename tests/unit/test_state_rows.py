"""`StateRows`: what a reference reads of the rows of a step on the device."""

from __future__ import annotations

import numpy as np
import torch

from edgellm.kernels.cpu.recurrent_rows import RecurrentRows
from edgellm.kernels.cu.state_rows import StateRows


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_rows_without_padding_are_those_of_the_host() -> None:
    starts, slots, kept = (0, 3, 4, 9), (5, 0, 2), (-1, 4, 7)
    host = RecurrentRows(*(np.array(values, np.int32) for values in (starts, slots, kept)))
    device = StateRows(ints(*starts), ints(*slots), ints(*kept))
    assert device.spans() == host.spans() == [(0, 3, 5, -1), (3, 4, 0, 4), (4, 9, 2, 7)]
    assert device.num_rows == host.num_sequences


def test_padding_is_skipped_and_nobody_keeps_anything() -> None:
    rows = StateRows(ints(0, 2, 3, 4), ints(1, -1, 0))
    assert rows.spans() == [(0, 2, 1, -1), (3, 4, 0, -1)]
    assert rows.num_rows == 3
