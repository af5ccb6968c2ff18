"""Result types of the coordinator's calls.  Shortage is a result, misuse is an exception."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edgellm.cache.types import AcquireStatus, ContextCacheCoordinatorStatus, ReuseReport

if TYPE_CHECKING:
    from edgellm._core.block_hash import TokenChain
    from edgellm._core.cache_manager import CacheRequestLease
    from edgellm._core.planners import ReusePlan
    from edgellm.cache.request import RequestHandle


@dataclass(slots=True)
class AcquireSequenceResult:
    """One sequence's lookup and lease.

    Attributes:
        plan: the plan that was carried out.
        forced_cold: always False: a hit evicts leaves only, so it is never harder to lease than a cold run.
        planning_ns: lookup, plan and acquire, monotonic nanoseconds.
    """

    chain: TokenChain
    plan: ReusePlan
    lease: CacheRequestLease | None = None
    status: AcquireStatus = AcquireStatus.INSUFFICIENT_CAPACITY
    forced_cold: bool = False
    planning_ns: int = 0


@dataclass(slots=True)
class AdmissionResult:
    """An admitted batch: its handle, and per sequence where prefill begins and why."""

    request: RequestHandle
    prefill_starts: list[int]
    reuse: list[ReuseReport] = field(default_factory=list)


@dataclass(slots=True)
class BeginRequestResult:
    status: ContextCacheCoordinatorStatus = ContextCacheCoordinatorStatus.REQUEST_FAILED
    admission: AdmissionResult | None = None


@dataclass(slots=True)
class AdmitSequenceResult:
    """What became of one joiner.

    Attributes:
        insufficient_capacity: the refusal is transient pool pressure; retry at a later step.
        prefill_start: token offset at which its prefill begins (the reused prefix length).
        reuse: the reuse report, once admitted.
    """

    status: ContextCacheCoordinatorStatus = ContextCacheCoordinatorStatus.REQUEST_FAILED
    insufficient_capacity: bool = False
    prefill_start: int = 0
    reuse: ReuseReport | None = None
