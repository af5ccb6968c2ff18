"""Where the recurrent checkpoints of a prompt go: the policy's answer, asked for once and checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgellm.cache.policy import CheckpointContext
from edgellm.cache.policy_calls import charge_time, name_of, renew_policy, switch_off, timed
from edgellm.cache.types import ContextCacheLookupPolicy
from edgellm.errors import PluginError
from edgellm.log import get_logger

if TYPE_CHECKING:
    from edgellm._core.planners import ReusePlan
    from edgellm.cache.coordinator import ContextCacheCoordinator
    from edgellm.cache.request import Impl, SequenceState

logger = get_logger(__name__)


def place_checkpoints(
    coordinator: ContextCacheCoordinator, impl: Impl, sequence: SequenceState, plan: ReusePlan
) -> None:
    """Ask the policy where the checkpoints of a prompt go.  A faulty answer places none and is charged as ever."""
    bypass = sequence.lookup_policy is ContextCacheLookupPolicy.BYPASS
    if not coordinator.profile.uses_checkpoint_reuse or bypass:
        return
    context = CheckpointContext(
        num_tokens=sequence.num_tokens,
        reuse_token_length=plan.reuse_token_length,
        known_token_length=plan.known_token_length,
        page_size=coordinator.page_size,
        interval=coordinator.config.checkpoint_interval_tokens,
        template_boundaries=sequence.template_boundaries,
        replay_tail_length=sequence.replay_tail_length,
    )
    answer, fault, elapsed = timed(
        coordinator, impl, impl.policy, lambda policy: _placed(policy.plan_checkpoints(context), context)
    )
    charge_time(coordinator, impl, lambda: [sequence.index], elapsed)
    if fault is None:
        sequence.wanted_checkpoints = answer
        known = min(plan.known_token_length, sequence.num_tokens - 1)
        sequence.branch_point = known // coordinator.page_size * coordinator.page_size
        return
    logger.error("publication policy %s is at fault (slot %d): %s", name_of(impl.policy), sequence.index, fault)
    coordinator.counters.policy_failures += 1
    switch_off(coordinator, impl, sequence.index)
    renew_policy(coordinator, impl)


def _placed(answer: Sequence[int], context: CheckpointContext) -> tuple[int, ...]:
    """The answer of `plan_checkpoints`, ascending.  Raises PluginError when it is nonsense."""
    lengths = sorted({int(length) for length in answer})
    wrong = [length for length in lengths if not 0 < length <= context.num_tokens]
    if wrong:
        raise PluginError(f"plan_checkpoints answered {wrong}; they must be from 1 to {context.num_tokens}, the prompt")
    return tuple(lengths)
