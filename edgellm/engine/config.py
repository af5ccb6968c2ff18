"""`EngineConfig` and `SchedulingOptions`, and the step limits they resolve to for one deployment."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from edgellm.argument_check import INT32_MAX, check_flag, check_int, check_number, check_positive
from edgellm.errors import InvalidArgumentError
from edgellm.foreign import describe_value

if TYPE_CHECKING:
    from edgellm.session.types import SessionCapabilities

UNLIMITED_TOKENS = INT32_MAX
MAX_IDLE_WAIT_SECONDS = 3600.0


class SchedulingMode(Enum):
    """AUTO mixes prompt chunks with decode rows where the session can, else prefills first."""

    AUTO = "auto"
    MIXED = "mixed"
    PREFILL_FIRST = "prefill_first"


class SchedulingPolicy(Enum):
    FCFS = "fcfs"
    PRIORITY = "priority"


class Preemption(Enum):
    NONE = "none"
    PAUSE = "pause"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingOptions:
    """How a step is filled.

    Attributes:
        ifb_scheduling_mode: mixed or prefill_first; auto chooses by what the session can execute.
        max_num_tokens: budget of a step that has decode rows, in tokens; 0 takes the default.
        max_chunk_tokens: longest prompt chunk beside decode rows; a multiple of the page size; 0 takes the
            default.
        max_prompt_step_tokens: budget of a step without decode rows; 0 is all that a step can hold.  A
            smaller one makes the engine look at arrivals and cancellations more often.
        scheduling_policy: fcfs, or priority (a smaller value is more urgent).
        preemption: pause lets less urgent residents miss steps while an urgent prompt is unfinished.
        priority_reserved_slots: seats that only requests with priority < 0 may take.
        max_pause_steps: most steps in a row that a resident is paused; 0 is unlimited.
        step_time_budget_ms: how long a step may take, in milliseconds, as far as prompt work decides it; None does
            not bound it.  The cost of a step is learned from the steps that ran (`StepCostModel`), and a prompt
            always gets a page, so a budget below a page's time is exceeded: that is logged once, and counted in
            `EngineMetrics.budget_unreachable`.  It bounds the longest gap between two
            tokens, and with it how long an arrival, a cancel or a deadline waits for the step before it.
        max_overtakes: how often one waiting request may be passed by later ones while it cannot be seated, or
            while later ones share a prefix with a resident; 0 seats strictly in order.
        prefix_aware: seat requests that share a prefix with a resident next to it, within `max_overtakes`.
        priority_aging_seconds: waiting so long improves a request's place in the backlog by one priority; None
            orders by priority alone, so that a steady urgent load starves the rest.  Pausing and reserved seats
            keep to the request's own priority.
    """

    ifb_scheduling_mode: SchedulingMode = SchedulingMode.AUTO
    max_num_tokens: int = 0
    max_chunk_tokens: int = 0
    max_prompt_step_tokens: int = 0
    scheduling_policy: SchedulingPolicy = SchedulingPolicy.FCFS
    preemption: Preemption = Preemption.NONE
    priority_reserved_slots: int = 0
    max_pause_steps: int = 0
    step_time_budget_ms: float | None = None
    max_overtakes: int = 8
    prefix_aware: bool = True
    priority_aging_seconds: float | None = None

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "ifb_scheduling_mode", _choice("ifb_scheduling_mode", self.ifb_scheduling_mode, SchedulingMode))
        set_field(self, "scheduling_policy", _choice("scheduling_policy", self.scheduling_policy, SchedulingPolicy))
        set_field(self, "preemption", _choice("preemption", self.preemption, Preemption))
        for name in _COUNT_OPTIONS:
            check_int(name, getattr(self, name), low=0)
        for name in ("step_time_budget_ms", "priority_aging_seconds"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        check_flag("prefix_aware", self.prefix_aware)
        self._check_policy()

    def _check_policy(self) -> None:
        """Refuse options that would have no effect under the others."""
        if self.priority_aging_seconds is not None and self.scheduling_policy is not SchedulingPolicy.PRIORITY:
            raise InvalidArgumentError(
                f"priority_aging_seconds is {self.priority_aging_seconds} with scheduling_policy "
                f"{self.scheduling_policy.value} and would have no effect; set scheduling_policy to priority"
            )
        if self.preemption is Preemption.PAUSE and self.scheduling_policy is not SchedulingPolicy.PRIORITY:
            raise InvalidArgumentError(
                f"preemption is pause with scheduling_policy {self.scheduling_policy.value}; pausing compares "
                "priorities: set scheduling_policy to priority"
            )
        if self.max_pause_steps and self.preemption is not Preemption.PAUSE:
            raise InvalidArgumentError(
                f"max_pause_steps is {self.max_pause_steps} with preemption none and would have no effect; "
                "set preemption to pause"
            )


_COUNT_OPTIONS = (
    "max_num_tokens",
    "max_chunk_tokens",
    "max_prompt_step_tokens",
    "priority_reserved_slots",
    "max_pause_steps",
    "max_overtakes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits of one engine.

    Attributes:
        command_queue_capacity: submits that may wait for the actor's next look; rounded up to a power of
            two, at least 2.
        max_pending_requests: requests accepted and not yet terminal, wherever they are.
        max_batch_size: most residents; None takes what the session offers.
        idle_wait: seconds a parked actor sleeps when nobody wakes it; only a backstop, of at most an hour.
        step_token_budget: tokens of prompt work beside decode rows from which the default of
            `scheduling.max_num_tokens` follows: 256 suits a CPU, 2048 a large GPU.
        max_admissions_per_boundary: None is one in a single-cohort session and unlimited in a compact one.
        max_replays: how often one request may begin again in a new session after the session under it was lost,
            as long as nothing of it was shown to anybody; 0 lets it fail.
        max_reopen_attempts: how often in a row opening a session may fail before the engine gives up; later
            attempts wait a little.
        scheduling: see `SchedulingOptions`.
    """

    command_queue_capacity: int = 64
    max_pending_requests: int = 256
    max_batch_size: int | None = None
    idle_wait: float = 0.05
    step_token_budget: int = 256
    max_admissions_per_boundary: int | None = None
    max_replays: int = 1
    max_reopen_attempts: int = 3
    scheduling: SchedulingOptions = field(default_factory=SchedulingOptions)

    def __post_init__(self) -> None:
        check_int("command_queue_capacity", self.command_queue_capacity, low=1)
        check_int("max_pending_requests", self.max_pending_requests, low=1)
        check_int("step_token_budget", self.step_token_budget, low=1)
        if self.max_batch_size is not None:
            check_int("max_batch_size", self.max_batch_size, low=1)
        if self.max_admissions_per_boundary is not None:
            check_int("max_admissions_per_boundary", self.max_admissions_per_boundary, low=1)
        check_int("max_replays", self.max_replays, low=0)
        check_int("max_reopen_attempts", self.max_reopen_attempts, low=1)
        check_number("idle_wait", self.idle_wait, low=0.0, high=MAX_IDLE_WAIT_SECONDS, low_open=True)
        if not isinstance(self.scheduling, SchedulingOptions):
            raise InvalidArgumentError(
                f"scheduling is {describe_value(self.scheduling)}; pass an edgellm.SchedulingOptions"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """What the options mean for one session: every number that planning and admission need.

    Attributes:
        mixed: prompt chunks and decode rows share a step.
        compact: the session runs any subset of residents (False: whole cohort or one pending prompt).
        max_batch_size: most residents.
        max_step_tokens: T_max = B * S_in, the most tokens in one step.
        max_input_length: S_in, the longest chunk of one sequence.
        page_size: P; chunks that do not finish their prompt end on a page boundary.
        max_num_tokens, max_chunk_tokens: budget and chunk limit of a step with decode rows.
        max_prompt_step_tokens: budget of a step without decode rows.
        max_admissions: most admissions between two steps.
    """

    mixed: bool
    compact: bool
    max_batch_size: int
    max_step_tokens: int
    max_input_length: int
    page_size: int
    max_num_tokens: int
    max_chunk_tokens: int
    max_prompt_step_tokens: int
    max_admissions: int


def resolve_step_limits(
    config: EngineConfig, capabilities: SessionCapabilities, *, after_refusal: bool = False
) -> StepLimits:
    """Check `config` against what the session can do and fill in the defaults.

    Args:
        after_refusal: the session lost compact execution at run time; modes that need it fall back.
    Raises:
        InvalidArgumentError: the options contradict the deployment.
    """
    seats = _resolve_batch_size(config, capabilities)
    mixed = _resolve_mode(config.scheduling, capabilities, after_refusal=after_refusal)
    _check_reserved(config.scheduling, seats)
    _check_budget(config.scheduling, capabilities, after_refusal=after_refusal)
    max_input = capabilities.max_input_length or UNLIMITED_TOKENS
    max_step = min(max(1, capabilities.max_batch_size) * max_input, UNLIMITED_TOKENS)
    page = capabilities.kv_page_size
    max_num = _resolve_max_num_tokens(config, seats, page, max_step)
    max_chunk = _resolve_max_chunk_tokens(config, seats, page, max_num)
    prompt_step = _resolve_prompt_step(config.scheduling, page, max_step)
    admissions = config.max_admissions_per_boundary or (UNLIMITED_TOKENS if capabilities.compact else 1)
    return StepLimits(
        mixed=mixed,
        compact=capabilities.compact,
        max_batch_size=seats,
        max_step_tokens=max_step,
        max_input_length=max_input,
        page_size=page,
        max_num_tokens=max_num,
        max_chunk_tokens=min(max_chunk, max(page, _round_down(max_input, page))),
        max_prompt_step_tokens=prompt_step,
        max_admissions=admissions if capabilities.compact else 1,
    )


def _resolve_batch_size(config: EngineConfig, capabilities: SessionCapabilities) -> int:
    offered = max(1, capabilities.max_batch_size)
    seats = offered if config.max_batch_size is None else config.max_batch_size
    if seats > offered:
        raise InvalidArgumentError(
            f"max_batch_size is {seats}, the session seats {offered}; lower it or open the runtime with more slots"
        )
    return seats


def _resolve_mode(options: SchedulingOptions, capabilities: SessionCapabilities, *, after_refusal: bool) -> bool:
    explicit = options.ifb_scheduling_mode is SchedulingMode.MIXED
    if explicit and not capabilities.compact and not after_refusal:
        raise InvalidArgumentError(
            "ifb_scheduling_mode is mixed, but the session cannot execute compact steps "
            f"({capabilities.reason}); use auto or prefill_first"
        )
    mixed = capabilities.compact and options.ifb_scheduling_mode is not SchedulingMode.PREFILL_FIRST
    if options.preemption is Preemption.PAUSE and not mixed and not after_refusal:
        raise InvalidArgumentError(
            f"preemption is pause, but steps are prefill_first ({capabilities.reason or 'as chosen'}); "
            "pausing needs the mixed mode"
        )
    return mixed


def _check_reserved(options: SchedulingOptions, seats: int) -> None:
    if options.priority_reserved_slots >= seats and options.priority_reserved_slots > 0:
        raise InvalidArgumentError(
            f"priority_reserved_slots is {options.priority_reserved_slots} of {seats} seats; ordinary requests could "
            "never be admitted: leave at least one seat"
        )


def _check_budget(options: SchedulingOptions, capabilities: SessionCapabilities, *, after_refusal: bool) -> None:
    if options.step_time_budget_ms is not None and not capabilities.compact and not after_refusal:
        raise InvalidArgumentError(
            f"step_time_budget_ms is {options.step_time_budget_ms}, but the session runs prompts whole "
            f"({capabilities.reason}), so a step cannot be kept short; leave it at None"
        )


def _resolve_max_num_tokens(config: EngineConfig, seats: int, page: int, max_step: int) -> int:
    wanted, lowest = config.scheduling.max_num_tokens, seats + page
    if wanted:
        if not lowest <= wanted <= max_step:
            raise InvalidArgumentError(
                f"max_num_tokens is {wanted}; it must be from {lowest} (batch {seats} + page {page}) to {max_step}"
            )
        return wanted
    default = min(_round_up(max(config.step_token_budget, page) + seats, page), _round_down(max_step, page))
    # A deployment so small that a page does not fit beside the decode rows holds whole prompts only.
    return min(max(default, lowest), max_step)


def _resolve_max_chunk_tokens(config: EngineConfig, seats: int, page: int, max_num: int) -> int:
    wanted, highest = config.scheduling.max_chunk_tokens, max_num - seats
    if wanted:
        if wanted % page or not page <= wanted <= highest:
            raise InvalidArgumentError(
                f"max_chunk_tokens is {wanted}; it must be a multiple of the page size {page} from {page} to {highest} "
                "(max_num_tokens - batch)"
            )
        return wanted
    default = min(_round_down(max(config.step_token_budget, page), page), _round_down(highest, page))
    return max(page, default)


def _resolve_prompt_step(options: SchedulingOptions, page: int, max_step: int) -> int:
    wanted = options.max_prompt_step_tokens
    if wanted and not page <= wanted <= max_step:
        raise InvalidArgumentError(f"max_prompt_step_tokens is {wanted}; it must be 0 or from {page} to {max_step}")
    return wanted or max_step


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _round_down(value: int, multiple: int) -> int:
    return value // multiple * multiple


def _choice(name: str, value: object, kind: type[Enum]) -> Enum:
    try:
        return value if isinstance(value, kind) else kind(value)
    except ValueError:
        choices = ", ".join(str(member.value) for member in kind)
        raise InvalidArgumentError(f"{name} is {describe_value(value)}; choose one of {choices}") from None
