from collections.abc import Sequence

from edgellm.session._ledger import LengthRow
from edgellm.session._step_plan import StepPlan

FULL_COHORT_DECODE: int
WHOLE_PROMPT: int
COMPACT: int
LOOK_CLOSER: int

def quick_shape(
    plan: StepPlan,
    seats: Sequence[LengthRow | None],
    order: Sequence[LengthRow],
    max_batch_size: int,
    max_input_length: int,
    max_kv_capacity: int,
    compact: bool,
) -> int: ...
