"""Decode rows of a rank session: what the cache hears about them when a step is over."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edgellm.cache.advances import HOLD_TOKEN, OneTokenAdvances, completed_token
from edgellm.cache.types import HOLD_COMMITTED_STATE_LENGTH, ContextCacheSequenceAdvance
from edgellm.errors import InvariantError
from edgellm.session._decode_lane import token_column
from edgellm.session.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from edgellm.decoding.base import DecodingStrategy, StepTokens
    from edgellm.session.resident import Resident
    from edgellm.session.types import ScheduledSequenceDescriptor

_HOLD = ContextCacheSequenceAdvance()
_WITHDRAWN = frozenset({FinishReason.CANCELLED, FinishReason.ERROR})


def new_token(resident: Resident) -> int:
    """What this step gave a resident whose prompt is complete; a hold for one that leaves unfinished."""
    new = resident.generated[resident.reported :]  # a step's tokens are reported when it is over
    return completed_token(resident.index, new, withdrawn=resident.reason in _WITHDRAWN)


def one_token_column(tokens: StepTokens) -> npt.NDArray[np.int32] | None:
    """(n,) int32, the token of each row of a decode step, -1 in rows with an error.

    None when somebody got more or fewer than one, or wants log-probabilities: then look at each row.
    """
    if tokens.logprobs.count(None) != len(tokens.logprobs) or tokens.committed.count(1) != len(tokens.token_ids):
        return None
    column = token_column(tokens.token_ids)
    if column is not None:
        column[list(tokens.errors)] = HOLD_TOKEN
    return column


def spread_tokens(size: int, indices: Sequence[int], token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """(size,) int32 in resident order: the tokens of some residents, everybody else holds."""
    spread = np.full(size, HOLD_TOKEN, dtype=np.int32)
    spread[indices] = token_ids
    return spread


def one_token_advances(order: Sequence[Resident], decoded: Sequence[Resident]) -> OneTokenAdvances:
    """Plain decoding: one token for each row that decoded, everybody else holds."""
    token_ids = np.full(len(order), HOLD_TOKEN, dtype=np.int32)
    for resident in decoded:
        token_ids[resident.index] = new_token(resident)
    return OneTokenAdvances(token_ids)


def run_advances(order: Sequence[Resident], decoded: Sequence[Resident]) -> list[ContextCacheSequenceAdvance]:
    """Speculative decoding: what was kept of each run, everybody else holds."""
    advances = [_HOLD] * len(order)
    for resident in decoded:
        if resident.reason in _WITHDRAWN:
            continue
        new = resident.generated[resident.reported :]
        if not new:
            raise InvariantError(
                f"{resident.ref} took part in a step and got no token; a decoder returns one or an error"
            )
        advances[resident.index] = ContextCacheSequenceAdvance(new, resident.committed)
    return advances


def common_lengths(order: Sequence[Resident], decoded: Sequence[Resident], decoder: DecodingStrategy) -> list[int]:
    """How far base and draft state agree for each row that decoded; everybody else holds."""
    lengths = [HOLD_COMMITTED_STATE_LENGTH] * len(order)
    for resident in decoded:
        if resident.reason not in _WITHDRAWN:
            lengths[resident.index] = common_length(resident, decoder)
    return lengths


def common_length(resident: Resident, decoder: DecodingStrategy) -> int:
    """How far base and draft state of one resident agree; never beyond what the session keeps."""
    common = decoder.common_state_length(resident.ref.slot)
    if common is None:
        raise InvariantError(f"decoder {decoder.name!r} owns draft pages and does not say how far they reach")
    return min(common, resident.committed)


def draft_limits(
    rows: Sequence[Resident], descriptors: Sequence[ScheduledSequenceDescriptor], plan_row: Sequence[int]
) -> npt.NDArray[np.int32]:
    """(N,) int32, most tokens worth proposing for each row of a batch: what its budget leaves beside the sure one.

    Args:
        plan_row: per batch row, its index in `rows`.
    """
    limits = np.zeros(len(plan_row), np.int32)
    for row, index in enumerate(plan_row):
        resident = rows[index]
        if not (resident.request.disable_spec_decode or resident.prompt_remaining):
            limits[row] = max(0, resident.rule.max_new_tokens - len(resident.generated) - 1)
    return limits
