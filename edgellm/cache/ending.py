"""Ending requests: finish, abandon, quarantine, recover, shutdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.cache import policy_calls
from edgellm.cache.types import ContextCacheCoordinatorStatus
from edgellm.log import get_logger

if TYPE_CHECKING:
    from edgellm.cache.coordinator import ContextCacheCoordinator
    from edgellm.cache.request import Impl, RequestHandle

logger = get_logger(__name__)

Status = ContextCacheCoordinatorStatus


def finish(coordinator: ContextCacheCoordinator, request: RequestHandle) -> Status:
    """Publish what only waited for the stream, wait, and give everything back."""
    terminalized = policy_calls.call_terminalize(coordinator, request)
    impl = request.take()
    if terminalized is Status.POISONED:
        hold(coordinator, impl)
        return Status.POISONED
    if not _drain_or_hold(coordinator, impl):
        return Status.POISONED
    release(coordinator, impl)
    return Status.OK


def abandon(coordinator: ContextCacheCoordinator, impl: Impl) -> None:
    """The handle is gone while its request lives: drain, release, publish nothing.  Never raises."""
    if impl.needs_drain() and not _drain_or_hold(coordinator, impl):
        return
    release(coordinator, impl)


def _drain_or_hold(coordinator: ContextCacheCoordinator, impl: Impl) -> bool:
    """Wait for a request's stream, or quarantine it.  An interrupted wait proves nothing and quarantines too."""
    drained = False
    try:
        drained = coordinator._quarantine.drain(impl)
    finally:
        if not drained:
            hold(coordinator, impl)
    return drained


def release(coordinator: ContextCacheCoordinator, impl: Impl) -> None:
    """Clear the rows of a drained request and give its leases back."""
    try:
        coordinator.rows.clear(impl.sequences)
    except Exception:
        logger.exception("rows of an ended request could not be cleared")
        coordinator._quarantine.poison("rows of an ended request could not be cleared")
    impl.mark_finishing()
    impl.destroy()


def hold(coordinator: ContextCacheCoordinator, impl: Impl) -> None:
    """Quarantine a request whose device work may still run."""
    coordinator._live.pop(id(impl), None)
    coordinator._quarantine.hold(impl)


def collect_dropped(coordinator: ContextCacheCoordinator) -> None:
    """Abandon the requests whose handles the garbage collector took since the last call."""
    coordinator._has_dropped = False
    for impl in [impl for impl in coordinator._live.values() if impl.dropped]:
        abandon(coordinator, impl)


def shutdown(coordinator: ContextCacheCoordinator) -> Status:
    """Drain quarantined requests before physical resources go."""
    if not _drain_quarantine(coordinator):
        coordinator._quarantine.poison("a quarantined stream could not be drained")
        return Status.POISONED
    return Status.REQUEST_FAILED if coordinator.active_requests > 0 else Status.OK


def recover(coordinator: ContextCacheCoordinator) -> bool:
    """Admit again after poison, once the quarantined streams and the coordinator's own are proven idle."""
    quarantine = coordinator._quarantine
    if not _drain_quarantine(coordinator):
        return False
    if quarantine.poisoned and not quarantine.wait(coordinator.stream):
        return False
    quarantine.lift_poison()
    return True


def _drain_quarantine(coordinator: ContextCacheCoordinator) -> bool:
    return coordinator._quarantine.drain_all(lambda impl: release(coordinator, impl))
