"""One runtime request as the coordinator holds it: handle, state machine, sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from edgellm.cache.lengths import LengthLedger
from edgellm.cache.types import (
    BlockKeyExtras,
    ContextCacheCommitPolicy,
    ContextCacheLookupPolicy,
    DecodingTokenStateContract,
    Hash128,
    HybridCheckpointKey,
    HybridSnapshotReservation,
    PublicationPoint,
    Retention,
    ReuseReport,
)
from edgellm.errors import ContractViolation, InvariantError
from edgellm.log import get_logger

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from edgellm._core.block_hash import TokenChain
    from edgellm._core.cache_manager import CacheRequestLease
    from edgellm.cache.coordinator import ContextCacheCoordinator
    from edgellm.cache.policy import PublicationPolicy
    from edgellm.cache.policy_step import PolicyStep
    from edgellm.runtime.device import Stream
    from edgellm.session.types import ResidentRef

logger = get_logger(__name__)


class Phase(Enum):
    ADMITTED = "admitted"
    EXECUTING = "executing"
    FINISHING = "finishing"


@dataclass(frozen=True, slots=True)
class StagedHybridPublication:
    """A checkpoint reserved (and, once `captured`, copied) but not yet published; checkpoint deployments only."""

    checkpoint: HybridCheckpointKey
    snapshots: HybridSnapshotReservation
    point: PublicationPoint
    captured: bool = False


@dataclass(frozen=True, slots=True)
class BoundaryCall:
    """What the runtime asked an MTP hook for; a policy may do that, or nothing.

    Attributes:
        length: tokens of the checkpoint to publish, or None to restore a hidden row.
        row: of `hidden_states[slot]`, to save or to restore.
    """

    slot: int
    length: int | None
    hidden_states: Any
    row: int

    def same_as(self, slot: int, length: int | None, hidden_states: Any, row: int) -> bool:
        asked = (self.slot, self.length, self.row) == (slot, length, row)
        return asked and self.hidden_states is hidden_states


class SequenceState:
    """One live sequence.  Its lengths live in the request's `LengthLedger` at `index`.

    Owns one lease; the coordinator releases it.  `chain` is the only copy of the tokens.

    Attributes:
        template_boundaries: prompt lengths that the caller named; checkpoints there are anchors.
        wanted_checkpoints: where the policy wants this prompt's recurrent checkpoints, ascending.
        branch_point: whole blocks that the cache knew at admission: where an earlier prompt parted from this one.
        policy_overruns: hooks about this sequence that took longer than the deadline.
        boundary_restored: its saved MTP hidden row was copied back.
    """

    __slots__ = (
        "__weakref__",
        "_lengths",
        "boundary_restored",
        "branch_point",
        "chain",
        "commit_policy",
        "frozen_spec_prefill_length",
        "index",
        "joined",
        "key_extras",
        "lease",
        "lookup_policy",
        "per_position_media_hash",
        "policy_overruns",
        "published_exact_length",
        "replay_tail_length",
        "resident",
        "retention",
        "reuse_report",
        "staged_hybrid_publication",
        "template_boundaries",
        "wanted_checkpoints",
    )

    def __init__(
        self,
        *,
        lease: CacheRequestLease,
        chain: TokenChain,
        resident: ResidentRef,
        key_extras: BlockKeyExtras,
        per_position_media_hash: Sequence[Hash128 | None],
        lookup_policy: ContextCacheLookupPolicy,
        commit_policy: ContextCacheCommitPolicy,
        replay_tail_length: int,
        reuse_report: ReuseReport,
        joined: bool,
        retention: Retention,
        template_boundaries: tuple[int, ...] = (),
    ) -> None:
        self.lease = lease
        self.chain = chain
        self.resident = resident
        self.key_extras = key_extras
        self.per_position_media_hash = per_position_media_hash
        self.lookup_policy = lookup_policy
        self.commit_policy = commit_policy
        self.replay_tail_length = replay_tail_length
        self.reuse_report = reuse_report
        self.joined = joined
        self.retention = retention
        self.template_boundaries = template_boundaries
        self.wanted_checkpoints: tuple[int, ...] = ()
        self.branch_point = 0
        self.policy_overruns = 0
        self.boundary_restored = False
        self.published_exact_length = 0
        self.frozen_spec_prefill_length: int | None = None
        self.staged_hybrid_publication: StagedHybridPublication | None = None
        self.index = -1
        self._lengths: LengthLedger | None = None

    def attach(self, lengths: LengthLedger, index: int) -> None:
        """Say where this sequence's lengths are."""
        self._lengths = lengths
        self.index = index

    @property
    def lengths(self) -> LengthLedger:
        if self._lengths is None:
            raise InvariantError("the sequence is not part of a request; append it with Impl.append_sequence")
        return self._lengths

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """(num_tokens,) int32, a copy."""
        return self.chain.token_ids()

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.num_tokens[self.index])

    @property
    def reuse_token_length(self) -> int:
        return int(self.lengths.reuse[self.index])

    @property
    def committed_state_length(self) -> int:
        return int(self.lengths.committed[self.index])

    @property
    def common_state_length(self) -> int:
        return int(self.lengths.common[self.index])

    @property
    def published_full_block_count(self) -> int:
        return int(self.lengths.offered_blocks[self.index])

    @property
    def finalized(self) -> bool:
        return bool(self.lengths.finalized[self.index])


class RequestSlotToken:
    """One unit of the coordinator's active count, and the room to quarantine it: taken once, dropped once."""

    __slots__ = ("owner",)

    def __init__(self, owner: ContextCacheCoordinator) -> None:
        owner._quarantine.reserve()
        self.owner: ContextCacheCoordinator | None = owner
        owner._active_requests += 1

    def drop(self) -> None:
        owner, self.owner = self.owner, None
        if owner is not None:
            owner._active_requests -= 1
            owner._quarantine.unreserve()


@dataclass(slots=True)
class _Compaction:
    """The one outstanding old-to-new mapping; batch size -1 means none."""

    mapping: list[int] = field(default_factory=list)
    batch_size: int = -1


class Impl:
    """What a handle owns: state variables, policy, sequences in execution order.

    A *container* began without sequences: it lives as long as a session, everybody joins it, and it
    stays executing when it is empty.
    """

    __slots__ = (
        "_awaiting",
        "_copying",
        "_pending",
        "_phase",
        "boundary_call",
        "chains",
        "commit_policy",
        "compaction",
        "dropped",
        "faults_about_nobody",
        "hook_slot",
        "is_container",
        "leases",
        "lengths",
        "lookup_policy",
        "owner",
        "publication_policy",
        "refused_slot",
        "replay_tail_length",
        "request_slot",
        "sequences",
        "speculative_request",
        "step",
        "stream",
        "token_state_contract",
        "tracks_common",
    )

    def __init__(self, owner: ContextCacheCoordinator, stream: Stream, capacity: int) -> None:
        self.request_slot = RequestSlotToken(owner)
        self.owner = owner
        self.stream = stream
        self.publication_policy: PublicationPolicy | None = None
        self.speculative_request = False
        self.faults_about_nobody = 0
        self.tracks_common = False  # base and draft state may differ in length; otherwise common is committed
        self.token_state_contract = DecodingTokenStateContract.COMMITTED_PLUS_LOOKAHEAD
        self.lookup_policy = ContextCacheLookupPolicy.USE_CACHE
        self.commit_policy = ContextCacheCommitPolicy.INCLUDING_GENERATED_TOKENS
        self.replay_tail_length = 0
        self.is_container = False
        self.dropped = False  # its handle was collected; the next call of the coordinator abandons it
        self.step: PolicyStep | None = None  # during a policy hook that is given advances
        self.hook_slot: int | None = None  # during a policy hook about one sequence
        self.boundary_call: BoundaryCall | None = None  # during an MTP hook: what the runtime asked for
        self.compaction = _Compaction()
        self.refused_slot: int | None = None
        self.sequences: list[SequenceState] = []
        self.leases: list[CacheRequestLease] = []
        self.chains: list[TokenChain] = []
        self.lengths = LengthLedger(capacity)
        self._phase = Phase.ADMITTED
        self._pending = False
        self._awaiting = False
        self._copying = False

    # --- queries -----------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        return self._phase

    def admitted(self) -> bool:
        return self._phase is Phase.ADMITTED

    def executing(self) -> bool:
        return self._phase is Phase.EXECUTING

    def finishing(self) -> bool:
        return self._phase is Phase.FINISHING

    def has_pending_device_work(self) -> bool:
        return self._pending

    def awaiting_first_spec_completion(self) -> bool:
        return self._awaiting

    def needs_drain(self) -> bool:
        """Whether the device may still touch its pages: a step is pending, or copies were enqueued at rest."""
        return self._pending or self._copying

    def compaction_outstanding(self) -> bool:
        return self.compaction.batch_size >= 0

    @property
    def policy(self) -> PublicationPolicy:
        if self.publication_policy is None:
            raise InvariantError("the request has no publication policy; begin_request chooses one")
        return self.publication_policy

    # --- transitions -------------------------------------------------------------------------------------

    def open_container(self) -> None:
        """admitted -> executing and idle, with nothing enqueued."""
        self._require(Phase.ADMITTED, "open_container")
        self._phase = Phase.EXECUTING

    def begin_prefill(self) -> None:
        """admitted -> executing, with prefill work enqueued on the stream."""
        self._require(Phase.ADMITTED, "begin_prefill")
        self._phase = Phase.EXECUTING
        self._pending = True

    def mark_device_work_enqueued(self) -> None:
        self._require(Phase.EXECUTING, "mark_device_work_enqueued")
        self._pending = True

    def mark_copies_enqueued(self) -> None:
        """Rows and copies of one sequence are on their way; the request stays settled.  The next wait covers them."""
        self._copying = True

    def mark_device_work_synchronized(self) -> None:
        """The stream is known to be idle."""
        self._pending = self._copying = False

    def mark_device_work_resolved_without_sync(self) -> None:
        """The work is provably complete and nothing asynchronous remains."""
        self._pending = self._copying = False

    def work_state(self) -> tuple[bool, bool, bool]:
        """What is under way, for `restore_work_state`."""
        return self._pending, self._awaiting, self._copying

    def restore_work_state(self, state: tuple[bool, bool, bool]) -> None:
        """Put it back after a policy hook about one sequence: the step is everybody's, and ends later."""
        self._pending, self._awaiting, self._copying = state

    def begin_spec_draft_init(self) -> None:
        self._require(Phase.EXECUTING, "begin_spec_draft_init")
        if not self._pending:
            raise ContractViolation("begin_spec_draft_init needs pending device work; call prepare_prefill first")
        self._awaiting = True

    def end_spec_draft_init(self) -> None:
        self._awaiting = False

    def mark_finishing(self) -> None:
        self._phase = Phase.FINISHING

    def _require(self, phase: Phase, call: str) -> None:
        if self._phase is not phase:
            raise ContractViolation(f"{call} needs a request that is {phase.value}; this one is {self._phase.value}")

    # --- sequences ---------------------------------------------------------------------------------------

    def append_sequence(self, sequence: SequenceState, *, coverage: int, draft_coverage: int) -> None:
        """Add a sequence at the end of the execution order; the request owns its lease from here.

        When memory runs out in the middle, nothing was added and the lease stays the caller's.
        """
        index = len(self.sequences)
        try:
            self.lengths.append(
                reuse=sequence.reuse_report.reused_tokens,
                num_tokens=sequence.chain.num_tokens,
                coverage=coverage,
                draft_coverage=draft_coverage,
                publishes=sequence.lookup_policy is ContextCacheLookupPolicy.USE_CACHE,
                publishes_generated=sequence.commit_policy is ContextCacheCommitPolicy.INCLUDING_GENERATED_TOKENS,
            )
            self.sequences.append(sequence)
            self.leases.append(sequence.lease)
            self.chains.append(sequence.chain)
        except BaseException:
            del self.sequences[index:], self.leases[index:], self.chains[index:]
            self.lengths.size = index
            raise
        sequence.attach(self.lengths, index)

    def pop_sequence(self) -> SequenceState:
        """Remove the last sequence; the caller releases its lease."""
        self.lengths.pop()
        self.leases.pop()
        self.chains.pop()
        return self.sequences.pop()

    def keep_sequences(self, survivors: list[int]) -> None:
        """Keep the named sequences in this order (leases of the others are the caller's)."""
        self.sequences = [self.sequences[index] for index in survivors]
        self.leases = [sequence.lease for sequence in self.sequences]
        self.chains = [sequence.chain for sequence in self.sequences]
        self.lengths.keep(survivors)
        for index, sequence in enumerate(self.sequences):
            sequence.attach(self.lengths, index)

    def destroy(self) -> None:
        """Release every lease, then drop the active count: in this order, so the count outlives the pages."""
        for sequence in self.sequences:
            self.owner.let_go(sequence)
        self.owner._forget_residents(self)
        self.sequences, self.leases, self.chains = [], [], []
        self.lengths.size = 0
        self.request_slot.drop()


class RequestHandle:
    """The caller's hold on one request.  Never copied; ends by `finish`, `abandon` or `close`.

    As a context manager it abandons the request on exit when nobody finished it.
    """

    __slots__ = ("__weakref__", "_impl")

    def __init__(self, impl: Impl | None = None) -> None:
        self._impl = impl

    def valid(self) -> bool:
        return self._impl is not None

    @property
    def impl(self) -> Impl:
        """The state behind a valid handle."""
        if self._impl is None:
            raise ContractViolation("the request handle is empty: it was finished, abandoned or moved; begin a new one")
        return self._impl

    @property
    def refused_slot(self) -> int | None:
        """The sequence (execution order) whose growth the last `prepare_decode_step` refused."""
        return self.impl.refused_slot

    @property
    def num_sequences(self) -> int:
        return len(self.impl.sequences)

    def sequence(self, slot: int) -> SequenceState:
        """The sequence at position `slot` of the execution order."""
        sequences = self.impl.sequences
        if not 0 <= slot < len(sequences):
            raise ContractViolation(f"slot {slot} is out of range; the request has {len(sequences)} sequences")
        return sequences[slot]

    def take(self) -> Impl:
        """Empty the handle and return what it held."""
        impl = self.impl
        self._impl = None
        return impl

    def abandon(self) -> None:
        """Drop the request without finishing it: drain, then release; publishes nothing.  Never raises."""
        if self._impl is not None:
            self._impl.owner.refuse_in_hook("abandon")
            impl = self.take()
            impl.owner._abandon(impl)

    close = abandon

    def __enter__(self) -> RequestHandle:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.abandon()

    def __reduce_ex__(self, protocol: object) -> str:
        raise TypeError("a request handle is never copied or pickled; hand the object itself over")

    def __del__(self) -> None:
        # A last resort: every path of the product ends its handles explicitly.  The collector may run this in any
        # thread and in the middle of anything, so nothing is waited for here: the next call of the coordinator is.
        impl = getattr(self, "_impl", None)
        if impl is not None:
            logger.error("a request handle was dropped while its request was live; the next call abandons it")
            impl.dropped = True
            impl.owner._has_dropped = True
