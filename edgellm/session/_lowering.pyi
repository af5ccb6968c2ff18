from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgellm.session._ledger import ResidentRow
from edgellm.session._step_plan import StepPlan

_Int32Array = npt.NDArray[np.int32]

def tokens_to_run(rows: Sequence[ResidentRow], plan: StepPlan) -> int: ...
def lower_rows(
    rows: Sequence[ResidentRow],
    plan: StepPlan,
    token_ids: _Int32Array,
    positions: _Int32Array,
    query_start: _Int32Array,
    query_len: _Int32Array,
    past_len: _Int32Array,
    state_index: _Int32Array,
    logits_index: npt.NDArray[np.int64],
    logits_to_seq: _Int32Array,
) -> tuple[list[int], list[int], int]: ...
