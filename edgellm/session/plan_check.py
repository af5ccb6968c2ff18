"""Plan validation: does a plan describe exactly what the session would execute?

Pure functions over the residents' ledgers.  The scripted and the rank session call the same code, and a
planner may be fuzzed against it.  The first broken rule raises; nothing is ever modified.

A `StepPlan` that breaks no rule is accepted by the same rules in C (`_plan_check.pyx`); whatever those do not
accept comes here, for the message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from edgellm.errors import ContractViolation
from edgellm.foreign import call_foreign, describe_error, describe_value
from edgellm.session._ledger import LengthRow
from edgellm.session._plan_check import COMPACT, FULL_COHORT_DECODE, LOOK_CLOSER, WHOLE_PROMPT, quick_shape
from edgellm.session._step_plan import StepPlan
from edgellm.session.types import ResidentRef, ScheduledSequenceDescriptor, SequenceIdentity, SequenceWork

_INT32_MAX = 2**31 - 1


class SeatLedger(Protocol):
    """What validation reads of one resident; `Resident` and an engine's mirror both have this form.

    Lengths are in tokens.  `prompt_remaining` is what is left of the prompt, `committed` the positions with
    materialised state.
    """

    @property
    def request_id(self) -> int: ...
    @property
    def ref(self) -> ResidentRef: ...
    @property
    def committed(self) -> int: ...
    @property
    def prompt_remaining(self) -> int: ...
    @property
    def exclusive(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """Attributes: B, S_in and C of the deployment in tokens, and whether compact steps are available."""

    max_batch_size: int
    max_input_length: int
    max_kv_capacity: int
    compact: bool

    @property
    def max_step_tokens(self) -> int:
        """T_max = B * S_in."""
        return self.max_batch_size * self.max_input_length


class StepShape(Enum):
    """How a valid plan runs."""

    FULL_COHORT_DECODE = "full_cohort_decode"
    WHOLE_PROMPT = "whole_prompt"
    COMPACT = "compact"


_SHAPE_OF_CODE = {
    FULL_COHORT_DECODE: StepShape.FULL_COHORT_DECODE,
    WHOLE_PROMPT: StepShape.WHOLE_PROMPT,
    COMPACT: StepShape.COMPACT,
}


def as_step_plan(plan: object) -> StepPlan:
    """A list of descriptors in packed form.

    Raises:
        ContractViolation: no sequence of descriptors, or a field of a wrong type or too large for a plan.
    """
    if not isinstance(plan, Sequence):
        raise ContractViolation(
            f"plan type: the plan is {describe_value(plan)}; pass a list of ScheduledSequenceDescriptor"
        )
    entries: list[ScheduledSequenceDescriptor] = []
    error = call_foreign(lambda: entries.extend(plan))
    if error is not None:
        raise ContractViolation(f"plan type: the plan cannot be read ({describe_error(error)})") from error
    for index, entry in enumerate(entries):
        if not _has_exact_types(entry):
            raise ContractViolation(f"plan type: plan[{index}] {_wrong_type(entry)}")
    return StepPlan(entries)


def _has_exact_types(entry: ScheduledSequenceDescriptor) -> bool:
    if type(entry) is not ScheduledSequenceDescriptor or type(entry.identity) is not SequenceIdentity:
        return False
    identity = entry.identity
    return (
        type(entry.work) is SequenceWork
        and type(entry.query_length) is type(entry.past_length) is type(identity.request_id) is int
        and type(entry.select_last_token_logits) is bool
        and type(identity.resident) is ResidentRef
        and type(identity.resident.slot) is type(identity.resident.epoch) is int
    )


def _wrong_type(entry: object) -> str:
    """The first part of a descriptor that has a wrong type, for a message."""
    if type(entry) is not ScheduledSequenceDescriptor:
        return f"is {describe_value(entry)}; it must be a ScheduledSequenceDescriptor"
    if type(entry.identity) is not SequenceIdentity:
        return f"has identity {describe_value(entry.identity)}; it must be a SequenceIdentity"
    identity, ref = entry.identity, entry.identity.resident
    if type(ref) is not ResidentRef:
        return f"has resident {describe_value(ref)}; it must be a ResidentRef"
    for name, value, kind in (
        ("work", entry.work, SequenceWork),
        ("query_length", entry.query_length, int),
        ("past_length", entry.past_length, int),
        ("select_last_token_logits", entry.select_last_token_logits, bool),
        ("request_id", identity.request_id, int),
        ("slot", ref.slot, int),
        ("epoch", ref.epoch, int),
    ):
        if type(value) is not kind:
            return f"has {name} {describe_value(value)}; its type must be {kind.__name__}"
    return ""


def check_plan(
    plan: Sequence[ScheduledSequenceDescriptor],
    *,
    seats: Sequence[SeatLedger | None],
    order: Sequence[SeatLedger],
    limits: PlanLimits,
) -> StepShape:
    """Check `plan` against the residents and say how it runs.

    Args:
        seats: per slot, its resident or None.
        order: the residents in resident order.

    Raises:
        ContractViolation: the first broken rule, with identity and both values.
    """
    if type(plan) is not StepPlan:
        plan = as_step_plan(plan)
    if isinstance(seats, list) and isinstance(order, list) and _has_rows(order):
        code = quick_shape(
            plan,
            seats,
            order,
            limits.max_batch_size,
            limits.max_input_length,
            limits.max_kv_capacity,
            limits.compact,
        )
        if code != LOOK_CLOSER:
            return _SHAPE_OF_CODE[code]
    _check_size(plan, limits)
    if _is_full_cohort_decode(plan, order, limits):
        return StepShape.FULL_COHORT_DECODE
    seen = bytearray(len(seats))
    for descriptor in plan:
        seat = _live_seat(descriptor, seats)
        slot = seat.ref.slot
        if seen[slot]:
            raise _violation("V4 one entry a sequence", descriptor, f"slot {slot} is named twice; name it once")
        seen[slot] = 1
        _check_lengths(descriptor, seat, limits)
    return _check_shape(plan, order, limits)


def _has_rows(order: list[SeatLedger]) -> bool:
    return bool(order) and isinstance(order[0], LengthRow)


def _is_full_cohort_decode(
    plan: Sequence[ScheduledSequenceDescriptor], order: Sequence[SeatLedger], limits: PlanLimits
) -> bool:
    """V10, the plan of most steps, in one short loop; a plan that misses it by anything is checked in full."""
    if len(plan) != len(order):
        return False
    decode, capacity = SequenceWork.DECODE, limits.max_kv_capacity
    for descriptor, seat in zip(plan, order, strict=True):
        identity = descriptor.identity
        if (
            descriptor.work is not decode
            or descriptor.past_length != seat.committed
            or descriptor.query_length != 1
            or seat.prompt_remaining
            or not descriptor.select_last_token_logits
            or descriptor.past_length >= capacity
            or identity.request_id != seat.request_id
            or not (identity.resident is seat.ref or identity.resident == seat.ref)
        ):
            return False
    return True


def _check_size(plan: Sequence[ScheduledSequenceDescriptor], limits: PlanLimits) -> None:
    if not plan:
        raise ContractViolation("V1 plan size: the plan is empty; name at least one resident, or do not execute")
    if len(plan) > limits.max_batch_size:
        raise ContractViolation(
            f"V1 plan size: the plan names {len(plan)} sequences, the limit is max_batch_size {limits.max_batch_size}"
        )


def _live_seat(descriptor: ScheduledSequenceDescriptor, seats: Sequence[SeatLedger | None]) -> SeatLedger:
    request_id, ref = descriptor.identity.request_id, descriptor.identity.resident
    if request_id == 0 or ref.epoch == 0 or not 0 <= ref.slot < len(seats):
        raise _violation(
            "V2 identity", descriptor, f"request id and epoch must not be 0, the slot must be in [0, {len(seats)})"
        )
    seat = seats[ref.slot]
    if seat is None:
        raise _violation("V3 live resident", descriptor, f"slot {ref.slot} has no resident; its ref is stale")
    if seat.ref.epoch != ref.epoch:
        raise _violation(
            "V3 live resident", descriptor, f"the slot is in epoch {seat.ref.epoch}, the plan says {ref.epoch}"
        )
    if seat.request_id != request_id:
        raise _violation(
            "V3 live resident", descriptor, f"the slot belongs to request {seat.request_id}, the plan says {request_id}"
        )
    return seat


def _check_lengths(descriptor: ScheduledSequenceDescriptor, seat: SeatLedger, limits: PlanLimits) -> None:
    query, past = descriptor.query_length, descriptor.past_length
    if query <= 0 or past < 0:
        raise _violation(
            "V5 lengths", descriptor, f"query_length {query} must be at least 1 and past_length {past} at least 0"
        )
    if past + query > min(limits.max_kv_capacity, _INT32_MAX):
        raise _violation(
            "V5 lengths", descriptor, f"past {past} + query {query} exceeds the capacity of {limits.max_kv_capacity}"
        )
    if past != seat.committed:
        raise _violation(
            "V6 past length", descriptor, f"past_length is {past}, the committed length is {seat.committed}"
        )
    remaining = seat.prompt_remaining
    if descriptor.work is SequenceWork.DECODE:
        if remaining:
            raise _violation("V7 work", descriptor, f"work is decode, but {remaining} prompt tokens are left to run")
        if query != 1 or not descriptor.select_last_token_logits:
            raise _violation(
                "V8 decode row",
                descriptor,
                f"a decode row has query_length 1 and selects logits; the plan says query_length {query}, "
                f"select_last_token_logits {descriptor.select_last_token_logits}",
            )
        return
    _check_chunk(descriptor, remaining)


def _check_chunk(descriptor: ScheduledSequenceDescriptor, remaining: int) -> None:
    query = descriptor.query_length
    if not remaining:
        raise _violation("V7 work", descriptor, "work is context, but the prompt is complete; plan a decode row")
    if query > remaining:
        raise _violation("V9 chunk", descriptor, f"query_length is {query}, only {remaining} prompt tokens are left")
    if descriptor.select_last_token_logits != (query == remaining):
        raise _violation(
            "V9 chunk",
            descriptor,
            f"select_last_token_logits is {descriptor.select_last_token_logits} for {query} of {remaining} tokens; "
            f"it is True exactly on the chunk that ends the prompt",
        )


def _check_shape(
    plan: Sequence[ScheduledSequenceDescriptor], order: Sequence[SeatLedger], limits: PlanLimits
) -> StepShape:
    """Rules for everything but the full-cohort decode step."""
    exclusive = next((seat for seat in order if seat.exclusive), None)
    if exclusive is not None:
        _check_alone(plan, order, "V14 exclusive resident")
        _check_input_length(plan[0], limits)
        return StepShape.WHOLE_PROMPT
    if not limits.compact:
        _check_single_cohort(plan, order)
        _check_input_length(plan[0], limits)
        return StepShape.WHOLE_PROMPT
    total = 0
    for descriptor in plan:
        _check_input_length(descriptor, limits)
        total += descriptor.query_length
    if total > limits.max_step_tokens:
        raise ContractViolation(
            f"V13 step tokens: the plan has {total} tokens, the limit is {limits.max_step_tokens} "
            f"(max_batch_size {limits.max_batch_size} x max_input_length {limits.max_input_length})"
        )
    return StepShape.COMPACT


def _check_single_cohort(plan: Sequence[ScheduledSequenceDescriptor], order: Sequence[SeatLedger]) -> None:
    pending = next((seat for seat in order if seat.prompt_remaining), None)
    if pending is None:
        named = [descriptor.identity.resident.slot for descriptor in plan]
        wanted = [seat.ref.slot for seat in order]
        raise ContractViolation(
            f"V15 full cohort: a single-cohort decode step names every resident in resident order; "
            f"the plan names slots {named}, the residents are in slots {wanted}"
        )
    if len(plan) != 1 or plan[0].identity.resident != pending.ref:
        raise ContractViolation(
            f"V12 pending admission: request {pending.request_id} in slot {pending.ref.slot} was admitted and has not "
            f"run; the next plan holds its context step and nothing else, this one names {len(plan)} sequences"
        )
    _check_alone(plan, [pending], "V11 context step")


def _check_alone(plan: Sequence[ScheduledSequenceDescriptor], order: Sequence[SeatLedger], rule: str) -> None:
    """The plan is one descriptor over the whole uncommitted prompt of the only seat in `order`."""
    seat = order[0]
    if len(plan) != 1 or len(order) != 1:
        raise ContractViolation(
            f"{rule}: request {seat.request_id} runs in a plan of its own, this one names {len(plan)} sequences"
        )
    query = plan[0].query_length
    if plan[0].work is SequenceWork.CONTEXT and query != seat.prompt_remaining:
        raise _violation(
            rule, plan[0], f"the step covers the whole prompt: {seat.prompt_remaining} tokens are left, not {query}"
        )


def _check_input_length(descriptor: ScheduledSequenceDescriptor, limits: PlanLimits) -> None:
    if descriptor.work is SequenceWork.CONTEXT and descriptor.query_length > limits.max_input_length:
        raise _violation(
            "V13 chunk length",
            descriptor,
            f"query_length is {descriptor.query_length}, the limit is max_input_length {limits.max_input_length}",
        )


def _violation(rule: str, descriptor: ScheduledSequenceDescriptor, detail: str) -> ContractViolation:
    request_id, ref = descriptor.identity.request_id, descriptor.identity.resident
    return ContractViolation(f"{rule}: request {request_id} (slot {ref.slot}, epoch {ref.epoch}): {detail}")
