"""Batch compaction: the old-to-new mapping, and retiring sequences by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from edgellm.cache import ending, policy_calls
from edgellm.cache.acquire import let_go
from edgellm.cache.policy import LedgerOnlyPolicy
from edgellm.cache.types import ContextCacheCoordinatorStatus
from edgellm.errors import ContractViolation, InvalidArgumentError

if TYPE_CHECKING:
    from edgellm.cache.coordinator import ContextCacheCoordinator
    from edgellm.cache.request import Impl, RequestHandle

Status = ContextCacheCoordinatorStatus


def check_mapping(old_to_new: Sequence[int], new_batch_size: int, *, num_sequences: int) -> None:
    """One entry per sequence; -1 retires, survivors keep their order and are dense from 0.

    Raises:
        InvalidArgumentError: wrong length, a gap, a duplicate, a reordering, or a wrong batch size.
    """
    if len(old_to_new) != num_sequences:
        raise InvalidArgumentError(
            f"the mapping has {len(old_to_new)} entries for {num_sequences} sequences; pass one for each"
        )
    survivors = [new for new in old_to_new if new != -1]
    if survivors != list(range(len(survivors))):
        raise InvalidArgumentError(
            f"the mapping is {list(old_to_new)}; -1 retires, and survivors must be numbered 0, 1, 2 ... in their order"
        )
    if new_batch_size != len(survivors):
        raise InvalidArgumentError(
            f"new_batch_size is {new_batch_size} and the mapping keeps {len(survivors)}; they must agree"
        )


def begin(
    coordinator: ContextCacheCoordinator,
    request: RequestHandle,
    old_to_new: Sequence[int],
    new_batch_size: int,
    device_batch_mapping: Any,
) -> Status:
    """Check and remember a mapping; publish first what only waited for the stream."""
    impl = request.impl
    check_mapping(old_to_new, new_batch_size, num_sequences=len(impl.sequences))
    if impl.has_pending_device_work() and not impl.awaiting_first_spec_completion():
        raise ContractViolation("begin_batch_compaction needs a settled request; complete the step before")
    status = policy_calls.call_terminalize(coordinator, request)
    if status is not Status.OK:
        return status
    if impl.has_pending_device_work():
        raise ContractViolation("begin_batch_compaction needs a settled request; complete the step before")
    mapping = list(old_to_new)
    if device_batch_mapping is not None:
        _upload_mapping(mapping, device_batch_mapping)
    impl.mark_device_work_enqueued()
    impl.compaction.mapping = mapping
    impl.compaction.batch_size = new_batch_size
    return Status.OK


def _upload_mapping(mapping: list[int], device_batch_mapping: Any) -> None:
    import torch

    host = torch.from_numpy(np.asarray(mapping, dtype=np.int32))
    device_batch_mapping[: len(mapping)].copy_(host)


def compact(coordinator: ContextCacheCoordinator, request: RequestHandle) -> Status:
    """Clear the retired rows, wait, then give the retired leases back and close the ranks."""
    impl = request.impl
    require_nothing_staged(impl)
    mapping = impl.compaction.mapping
    retired = [sequence for sequence, new in zip(impl.sequences, mapping, strict=True) if new < 0]
    survivors = [index for index, new in enumerate(mapping) if new >= 0]
    coordinator.rows.clear(retired)
    coordinator.rows.upload()
    drained = False
    try:
        drained = coordinator._quarantine.drain(impl)
    finally:
        if not drained:
            ending.hold(coordinator, request.take())
    if not drained:
        return Status.POISONED
    for sequence in retired:
        coordinator._occupied.pop(sequence.resident.slot, None)
        let_go(coordinator, sequence)
    impl.keep_sequences(survivors)
    impl.compaction.mapping, impl.compaction.batch_size = [], -1
    if not survivors:
        _emptied(coordinator, impl)
    return Status.OK


def _emptied(coordinator: ContextCacheCoordinator, impl: Impl) -> None:
    """A batch without sequences is finishing; a container idles, and tries again to build a policy it had to lose."""
    if not impl.is_container:
        impl.mark_finishing()
    elif isinstance(impl.policy, LedgerOnlyPolicy):
        policy_calls.renew_policy(coordinator, impl)


def require_nothing_staged(impl: Impl) -> None:
    for slot, sequence in enumerate(impl.sequences):
        if sequence.staged_hybrid_publication is not None or sequence.frozen_spec_prefill_length is not None:
            raise ContractViolation(f"slot {slot} still has a staged endpoint; terminalize it before compaction")
