"""A real cache manager at work, and what its pages would hold: every reuse is checked against the contents.

Nothing here knows how the manager decides.  A `CacheWorkout` plays the device: it writes simulated state into the
pages that a lease names, never into a page that anybody else can see, and whenever the manager says that state exists
already (a shared page, a copied tail, a draft page, a restored snapshot) the content must be the right one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from edgellm._core.block_hash import TokenChain
from edgellm._core.block_index import DEFAULT_HASH_MASK
from edgellm._core.cache_manager import CacheRequestLease, ContextCacheManager
from edgellm.cache.types import (
    BaseStateKind,
    BlockKeyExtras,
    CheckpointKind,
    ContextCacheLookupPolicy,
    Hash128,
    HybridSnapshotReservation,
    ResourceDemand,
    ResourceType,
    RetentionPriority,
    ReusePlanMode,
    SpecReuseContract,
)
from edgellm.errors import InvariantError

if TYPE_CHECKING:
    from edgellm._core.cache_manager import AcquireResult, PublishResult

MEDIA = -1  # symbols below 0 are media positions, each number another content; text positions are token ids
MOST_ALLOCATIONS = 1000
MEDIA_NAMESPACE = 2  # in it, prompts hold media where others hold token 0, or 2

P = ParamSpec("P")
R = TypeVar("R")
Symbols = tuple[int, ...]
Content = tuple[int, Symbols]  # digest of everything before, symbols that the state was made from


@dataclass(frozen=True, slots=True)
class CacheFlavour:
    """One kind of deployment as the manager sees it.

    Attributes:
        contract: what speculative requests of it may reuse; None has no speculative requests.
    """

    name: str
    base_state_kind: BaseStateKind = BaseStateKind.ATTENTION_ONLY
    contract: SpecReuseContract | None = None

    @property
    def index_only(self) -> bool:
        return self.base_state_kind is BaseStateKind.PURE_RECURRENT

    @property
    def checkpoints(self) -> bool:
        return self.base_state_kind is not BaseStateKind.ATTENTION_ONLY

    @property
    def owns_draft(self) -> bool:
        return self.contract is not None and self.contract.owns_paged_spec_state

    @property
    def future_tokens(self) -> int:
        return 0 if self.contract is None else self.contract.future_dependency_tokens


FLAVOURS = {
    flavour.name: flavour
    for flavour in (
        CacheFlavour("vanilla"),
        CacheFlavour("spec", contract=SpecReuseContract(True, 1)),
        CacheFlavour("spec-no-future", contract=SpecReuseContract(True, 0)),
        CacheFlavour("spec-two-future", contract=SpecReuseContract(True, 2)),
        CacheFlavour("shared-kv", contract=SpecReuseContract(False, 0)),
        CacheFlavour("hybrid", BaseStateKind.HYBRID),
        CacheFlavour("recurrent", BaseStateKind.PURE_RECURRENT),
        CacheFlavour("hybrid-mtp", BaseStateKind.HYBRID, SpecReuseContract(True, 1)),
    )
}


@dataclass(eq=False, slots=True)
class StagedCheckpoint:
    """Snapshot slots a sequence holds for the state after `length` tokens."""

    reservation: HybridSnapshotReservation
    length: int
    is_written: bool = False


@dataclass(eq=False, slots=True)
class LiveSequence:
    """One sequence and how far its simulated state reaches.

    Attributes:
        symbols: token ids, or what stands for media.
        written: tokens whose base state is on the device.
        common: tokens whose base and draft state both are.
        digests: digest of the first i blocks, for every i up to what was asked for.
        model: what the model says about it, where a model runs beside.
    """

    namespace: int
    symbols: list[int]
    chain: TokenChain
    lease: CacheRequestLease
    speculative: bool
    written: int = 0
    common: int = 0
    sealed: bool = False
    staged: list[StagedCheckpoint] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    model: Any = None

    @property
    def paired(self) -> bool:
        return self.lease.mode in (ReusePlanMode.SPEC, ReusePlanMode.HYBRID_MTP)

    def before(self, block: int, page_size: int) -> int:
        """Digest of namespace and everything in front of a block."""
        if not self.digests:
            self.digests.append(hash((self.namespace,)))
        while len(self.digests) <= block:
            first = (len(self.digests) - 1) * page_size
            self.digests.append(hash((self.digests[-1], tuple(self.symbols[first : first + page_size]))))
        return self.digests[block]

    def forget_digests(self, block: int) -> None:
        """Blocks from this one on have grown."""
        del self.digests[block + 1 :]


def lease_state(lease: CacheRequestLease) -> tuple[object, ...]:
    return (
        lease.base_pages.tolist(),
        lease.draft_pages.tolist(),
        lease.shared_block_count,
        lease.shared_draft_block_count,
        lease.published_block_count,
        lease.published_draft_block_count,
        lease.rebound_page_count,
        lease.rebound_draft_page_count,
        lease.tail_source,
        lease.draft_tail_source,
        lease.recurrent_snapshot_slot,
        lease.partial_kv_snapshot_slot,
        lease.sealed,
    )


class PageContents:
    """What each unit of one pool holds: state made from these symbols behind that prefix."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.held: dict[int, Content] = {}

    def write(self, unit: int, content: Content) -> None:
        self.held[unit] = content

    def require(self, unit: int | None, content: Content, why: str) -> None:
        """The unit holds at least `content`; more symbols may follow."""
        held = None if unit is None else self.held.get(unit)
        before, symbols = content
        if held is None or held[0] != before or held[1][: len(symbols)] != symbols:
            raise InvariantError(f"{why}: {self.name} {unit} holds {held}, not {content}")


class CacheWorkout:
    """Drives one manager; every method leaves a checked state.

    Args:
        pages: base pages; draft pages likewise unless `draft_pages` says otherwise.
        recount_every: full recount after this many operations, cheap counts after the others.
        fault_every: every so many calls of the manager, memory runs out at each of its allocations in turn first,
            and nothing may have changed; 0 never.
    Raises:
        InvariantError: from any method: the manager, or a content, is wrong.
    """

    def __init__(
        self,
        flavour: CacheFlavour,
        page_size: int,
        pages: int,
        *,
        draft_pages: int | None = None,
        recurrent_slots: int = 4,
        partial_slots: int = 4,
        max_records: int | None = None,
        hash_mask: int = DEFAULT_HASH_MASK,
        recount_every: int = 1,
        fault_every: int = 0,
    ) -> None:
        checkpoints = flavour.checkpoints
        self.flavour = flavour
        self.page_size = page_size
        self.capacities = ResourceDemand(
            pages,
            (pages if draft_pages is None else draft_pages) if flavour.owns_draft else 0,
            recurrent_slots if checkpoints else 0,
            partial_slots if checkpoints and not flavour.index_only else 0,
        )
        self.manager = ContextCacheManager(
            page_size,
            self.capacities,
            max_records=max_records,
            base_state_kind=flavour.base_state_kind,
            spec_reuse_contract=flavour.contract,
            hash_mask=hash_mask,
        )
        self.max_records = max_records
        self.live: list[LiveSequence] = []
        self.contents = {kind: PageContents(kind.name.lower()) for kind in ResourceType}
        self.now = 0
        self.recount_every = recount_every
        self.fault_every = fault_every
        self.operations = self.calls = self.faults = 0

    # Small helpers

    @property
    def base(self) -> PageContents:
        return self.contents[ResourceType.BASE_KV_PAGE]

    @property
    def draft(self) -> PageContents:
        return self.contents[ResourceType.DRAFT_KV_PAGE]

    def chain(self, namespace: int, symbols: Sequence[int]) -> TokenChain:
        extras = BlockKeyExtras(isolation_digest=Hash128(0, namespace)) if namespace else BlockKeyExtras()
        media = [Hash128(7, -s) if s < 0 else None for s in symbols] if any(s < 0 for s in symbols) else ()
        chain = TokenChain(self.page_size, extras, media)
        chain.extend([max(0, s) for s in symbols])
        return chain

    def symbols_of(self, namespace: int, tokens: Sequence[int]) -> list[int]:
        """A prompt's symbols: in the media namespace, even tokens stand for media positions."""
        if namespace != MEDIA_NAMESPACE:
            return list(tokens)
        return [token if token % 2 else MEDIA - token for token in tokens]

    def content(self, sequence: LiveSequence, block: int, length: int) -> Content:
        """State of one block when the sequence's first `length` tokens are known."""
        first = block * self.page_size
        return sequence.before(block, self.page_size), tuple(
            sequence.symbols[first : min(length, first + self.page_size)]
        )

    def draft_content(self, sequence: LiveSequence, block: int, length: int) -> Content:
        """As `content`, for draft state: it was made with the `future_tokens` that follow, as far as they exist."""
        first = block * self.page_size
        end = min(length, first + self.page_size) + self.flavour.future_tokens
        return sequence.before(block, self.page_size), tuple(sequence.symbols[first:end])

    def call(self, method: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
        """One transaction of the manager; from time to time with every allocation failing in turn before it works."""
        self.calls += 1
        if not self.fault_every or self.calls % self.fault_every:
            return method(*arguments, **options)
        before = self.state()
        for allocation in range(1, MOST_ALLOCATIONS):
            self.manager._fail_after(allocation)
            try:
                result = method(*arguments, **options)
            except MemoryError:
                self.faults += 1
                self.manager.check_invariants()
                after = self.state()
                if after != before:
                    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
                    raise InvariantError(f"allocation {allocation} failed and left changes behind: {changed}") from None
            else:
                self.manager._fail_after(0)
                return result
        raise InvariantError(f"{method} passes more than {MOST_ALLOCATIONS} allocations")

    def state(self) -> list[object]:
        """Everything that can be seen from outside."""
        manager = self.manager
        seen: list[object] = []
        for kind in ResourceType:
            pool = manager.pools.pool(kind)
            seen += [pool.free_list(), [(pool.active_ref(i), pool.cache_ref(i)) for i in range(pool.capacity)]]
        seen += [manager.index.eviction_order(), manager.drafts.eviction_order(), manager.index.num_namespaces]
        seen += [[manager.record(i) for i in manager.records.lru_to_mru()], manager.metrics(), manager.num_live_leases]
        seen += [[page for page in range(manager.index.capacity) if page in manager.index]]
        seen += [[(s.chain.num_tokens, *lease_state(s.lease)) for s in self.live]]
        return seen

    # Acquire and release

    def acquire(
        self,
        namespace: int,
        symbols: Sequence[int],
        *,
        speculative: bool = False,
        bypass: bool = False,
        extra: int = 0,
        draft_extra: int = 0,
        reserve: int = 0,
        priority: RetentionPriority = RetentionPriority.NORMAL,
        ttl: int = 0,
    ) -> LiveSequence | None:
        """Plan and acquire one prompt; None when pages are short."""
        chain = self.chain(namespace, symbols)
        policy = ContextCacheLookupPolicy.BYPASS if bypass else ContextCacheLookupPolicy.USE_CACHE
        expiry = self.now + ttl if ttl else 0
        plan = self.manager.plan(chain, policy, speculative=speculative)
        self.observe("plan", namespace, symbols, speculative, bypass, plan)
        result = self.call(
            self.manager.acquire,
            plan,
            min_tokens=len(symbols) + extra if extra else 0,
            draft_min_tokens=len(symbols) + draft_extra if draft_extra else 0,
            reserve_pages=reserve,
            priority=priority,
            expiry=expiry,
        )
        sequence = None
        if result.lease is not None:
            sequence = LiveSequence(namespace, list(symbols), chain, result.lease, speculative)
            self.live.append(sequence)
            self.begin(sequence, result)
        self.observe("acquire", sequence, result, extra, draft_extra, reserve, priority, expiry)
        self.check(sequence)
        return sequence

    def begin(self, sequence: LiveSequence, result: AcquireResult) -> None:
        """What the device would do first: copy the tail, restore snapshots; then the reused state must be right."""
        plan, lease = result.plan, sequence.lease
        reuse = plan.reuse_token_length
        if sequence.symbols and not reuse < len(sequence.symbols):
            raise InvariantError(f"{reuse} of {len(sequence.symbols)} tokens are reused, nothing is left to compute")
        self.copy_tail(sequence)
        self.restore_snapshots(sequence, reuse)
        sequence.written = sequence.common = reuse
        if lease.tail_source is None and lease.draft_tail_source is not None:
            raise InvariantError("a draft tail is copied without its base tail")

    def copy_tail(self, sequence: LiveSequence) -> None:
        """Copy the pages that hold the first tokens of the first private page."""
        lease, count = sequence.lease, sequence.lease.tail_token_count
        if lease.tail_source is None:
            return
        block = lease.shared_block_count
        length = block * self.page_size + count
        if not 0 < count < self.page_size:
            raise InvariantError(f"{count} tokens are to be copied from a page of {self.page_size}")
        content = self.content(sequence, block, length)
        self.base.require(lease.tail_source, content, "the copied tail is of another prefix")
        self.base.write(int(lease.base_pages[block]), content)
        if sequence.paired:
            content = self.draft_content(sequence, block, length)
            self.draft.require(lease.draft_tail_source, content, "the copied draft tail is of another prefix")
            self.draft.write(int(lease.draft_pages[block]), content)

    def checkpoint_content(self, sequence: LiveSequence, length: int) -> Content:
        """State after exactly `length` tokens."""
        block = max(0, length - 1) // self.page_size
        return sequence.before(block, self.page_size), tuple(sequence.symbols[block * self.page_size : length])

    def restore_snapshots(self, sequence: LiveSequence, length: int) -> None:
        """Copy bound snapshots into the sequence's own state."""
        lease = sequence.lease
        if not self.flavour.checkpoints or lease.recurrent_snapshot_slot is None:
            if self.flavour.checkpoints and length:
                raise InvariantError(f"{length} tokens are reused without a recurrent snapshot")
            return
        content = self.checkpoint_content(sequence, length)
        self.contents[ResourceType.RECURRENT_SNAPSHOT].require(
            lease.recurrent_snapshot_slot, content, "the recurrent snapshot is of another prefix"
        )
        if lease.partial_kv_snapshot_slot is not None:
            self.contents[ResourceType.PARTIAL_KV_SNAPSHOT].require(
                lease.partial_kv_snapshot_slot, content, "the partial snapshot is of another prefix"
            )
            block = lease.shared_block_count
            self.base.write(int(lease.base_pages[block]), self.content(sequence, block, length))
            if sequence.paired:
                self.draft.write(int(lease.draft_pages[block]), self.draft_content(sequence, block, length))
        elif length % self.page_size and not self.flavour.index_only:
            raise InvariantError(f"a checkpoint at {length} tokens has no partial page")

    def release_sources(self, which: int) -> None:
        """The copies are on the stream: tail source and snapshots may be used for something else."""
        sequence = self.live[which]
        self.manager.release_tail_source(sequence.lease)
        if self.flavour.checkpoints:
            self.manager.release_restored_hybrid_snapshots(sequence.lease)
        self.observe("release_sources", sequence)
        self.check(sequence)

    def release(self, which: int) -> None:
        sequence = self.live.pop(which)
        sequence.lease.release()
        sequence.lease.release()
        self.observe("release", sequence)
        self.check(None)

    def finish(self) -> None:
        """Release everything and forget everything: every unit of every pool must be free."""
        while self.live:
            self.release(len(self.live) // 2)
        self.evict_all()
        leaks = self.count_leaks()
        if leaks:
            raise InvariantError(f"{leaks} units of {self.capacities} did not come back")

    def count_leaks(self) -> int:
        """Units that are neither free nor accounted for when nothing is live and nothing cached."""
        pools = self.manager.pools
        lost = 0
        for kind in ResourceType:
            free = pools.pool(kind).free_list()
            lost += pools.capacity(kind) - len(set(free)) + len(free) - len(set(free))
        return lost + self.manager.index.size + self.manager.records.size + self.manager.index.num_namespaces

    # Writing state

    def writable_blocks(self, sequence: LiveSequence) -> int:
        lease = sequence.lease
        if self.flavour.index_only:
            return 1 << 30
        return min(lease.num_base_pages, lease.num_draft_pages) if sequence.paired else lease.num_base_pages

    def compute(self, which: int, count: int, *, draft: bool = True) -> int:
        """Compute the next `count` tokens of a sequence as far as its pages reach; how many there were."""
        sequence = self.live[which]
        if sequence.sealed:
            return 0
        end = min(sequence.written + count, len(sequence.symbols), self.writable_blocks(sequence) * self.page_size)
        self.write_base(sequence, sequence.written, end)
        done, sequence.written = max(0, end - sequence.written), max(sequence.written, end)
        if not sequence.paired:
            sequence.common = sequence.written
        elif draft:
            # Draft state at a position is made from the tokens that follow it, so the newest must wait for them.
            end = min(sequence.written, len(sequence.symbols) - self.flavour.future_tokens)
            self.write_draft(sequence, sequence.common, end)
            sequence.common = max(sequence.common, end)
        self.check(sequence)
        return done

    def require_private(self, sequence: LiveSequence, kind: ResourceType, page: int, indexed: bool) -> None:
        holders = self.manager.pools.pool(kind).active_ref(page)
        if holders != 1 or indexed:
            raise InvariantError(f"{kind.name} {page} is written by one sequence, but {holders} hold it ({indexed=})")

    def write_base(self, sequence: LiveSequence, start: int, end: int) -> None:
        if self.flavour.index_only or end <= start:
            return
        pages = sequence.lease.base_pages.tolist()
        for block in range(start // self.page_size, -(-end // self.page_size)):
            self.require_private(sequence, ResourceType.BASE_KV_PAGE, pages[block], pages[block] in self.manager.index)
            self.base.write(pages[block], self.content(sequence, block, end))

    def write_draft(self, sequence: LiveSequence, start: int, end: int) -> None:
        if end <= start:
            return
        pages = sequence.lease.draft_pages.tolist()
        for block in range(start // self.page_size, -(-end // self.page_size)):
            cached = self.manager.pools.draft.cache_ref(pages[block]) > 0
            self.require_private(sequence, ResourceType.DRAFT_KV_PAGE, pages[block], cached)
            self.draft.write(pages[block], self.draft_content(sequence, block, end))

    # Growth

    def grow(self, which: int, base: int, draft: int) -> bool:
        sequence = self.live[which]
        if sequence.sealed:
            return False
        if sequence.paired:
            grown = self.call(self.manager.grow_spec_pages, sequence.lease, base, draft)
        else:
            grown = self.call(self.manager.grow_base_pages, sequence.lease, base)
        self.observe("grow", sequence, base, draft, grown)
        self.check(sequence)
        return grown

    def ensure_coverage(self, which: Sequence[int], extra: int, draft_extra: int) -> int:
        sequences = [self.live[i] for i in which if not self.live[i].sealed]
        lengths = [len(s.symbols) for s in sequences]
        refused = self.manager.ensure_coverage([s.lease for s in sequences], lengths, extra, draft_extra)
        self.observe("ensure_coverage", sequences, extra, draft_extra, refused)
        self.check(sequences[0] if sequences else None)
        return refused

    def append(self, which: Sequence[int], token: int, *, publish: bool, lookahead: int, fail_after: int = 0) -> int:
        """One decode step: every token so far is computed, then one more is known (computed, without look-ahead).

        Args:
            fail_after: memory runs out at this allocation (0: never): those in front are done then, the one at hand
                may have its token and not be published, the rest is as it was.
        Returns:
            How many sequences got the token.
        """
        sequences = [self.live[i] for i in which if self.can_append(self.live[i])]
        if lookahead == 0:
            sequences = [s for s in sequences if self.compute_ahead(s, token)]
        leases, chains = [s.lease for s in sequences], [s.chain for s in sequences]
        tokens = np.full(len(sequences), token, dtype=np.int32)
        self.manager._fail_after(fail_after)
        event = "append"
        try:
            self.manager.append_tokens(leases, chains, tokens, publish, lookahead=lookahead)
        except MemoryError:
            self.faults += 1
            event = "append_failed"
        self.manager._fail_after(0)
        served = [s for s in sequences if s.chain.num_tokens > len(s.symbols)]
        if served != sequences[: len(served)]:
            raise InvariantError("a sequence got its token although one in front of it was refused")
        for sequence in served:
            sequence.forget_digests(len(sequence.symbols) // self.page_size)
            sequence.symbols.append(token)
            sequence.written = sequence.common = len(sequence.symbols) - min(lookahead, 1)
        self.observe(event, sequences, len(served), publish, lookahead)
        self.check(sequences[0] if sequences else None)
        return len(served)

    def can_append(self, sequence: LiveSequence) -> bool:
        return not sequence.sealed and not sequence.paired and sequence.written == len(sequence.symbols)

    def compute_ahead(self, sequence: LiveSequence, token: int) -> bool:
        """State of a token that is not in the chain yet; False when its page was refused."""
        length = len(sequence.symbols)
        block = length // self.page_size
        if self.ensure_coverage([self.live.index(sequence)], 1, 0) >= 0:
            return False
        if not self.flavour.index_only:
            page = int(sequence.lease.base_pages[block])
            self.require_private(sequence, ResourceType.BASE_KV_PAGE, page, page in self.manager.index)
            before, symbols = self.content(sequence, block, length)
            self.base.write(page, (before, (*symbols, token)))
        return True

    def extend(self, which: int, tokens: Sequence[int]) -> None:
        """Accepted tokens of a speculative step: known, not computed yet."""
        sequence = self.live[which]
        if sequence.sealed:
            return
        sequence.chain.extend(tokens)
        sequence.forget_digests(len(sequence.symbols) // self.page_size)
        sequence.symbols.extend(tokens)
        self.check(sequence)

    # Publication

    def publish(self, which: int, *, make_record: bool, retain_tail: bool = False) -> PublishResult | None:
        """Publish what is computed; None when there is nothing to publish yet."""
        sequence = self.live[which]
        resident = sequence.written if self.flavour.checkpoints else sequence.common
        if self.flavour.checkpoints:
            make_record = retain_tail = False
        if sequence.sealed or resident < (1 if retain_tail else self.page_size):
            return None
        method = self.manager.publish_spec if sequence.lease.mode is ReusePlanMode.SPEC else self.manager.publish
        lease, chain = sequence.lease, sequence.chain
        result = self.call(method, lease, chain, resident, make_record=make_record, retain_tail=retain_tail)
        sequence.sealed = sequence.lease.sealed
        self.observe("publish", sequence, resident, make_record, retain_tail, result)
        self.check(sequence)
        return result

    def rebind(self, which: int) -> int:
        """Look again: state that others published since need not be computed."""
        sequence = self.live[which]
        if sequence.sealed or self.flavour.checkpoints or not sequence.symbols:
            return 0
        length = self.call(self.manager.rebind, sequence.lease, sequence.chain)
        self.observe("rebind", sequence, length)
        sequence.written, sequence.common = max(sequence.written, length), max(sequence.common, length)
        self.check(sequence)
        return length

    # Checkpoints

    def reserve_checkpoint(self, which: int) -> bool:
        """Slots for the state as it is now; False under pressure."""
        sequence = self.live[which]
        length = sequence.written
        if not length or not self.is_captureable(sequence):
            return False
        partial = not self.flavour.index_only and (sequence.paired or length % self.page_size != 0)
        reservation = self.call(self.manager.reserve_hybrid_snapshots, sequence.lease, partial)
        if reservation is not None:
            sequence.staged.append(StagedCheckpoint(reservation, length))
        self.observe("reserve", sequence, partial, reservation)
        self.check(sequence)
        return reservation is not None

    def is_captureable(self, sequence: LiveSequence) -> bool:
        """Base state has not run ahead of draft state, but for the entries that a restore makes again."""
        return sequence.common >= sequence.written - (self.flavour.future_tokens if sequence.paired else 0)

    def capture_checkpoint(self, which: int, staged: StagedCheckpoint) -> bool:
        """Copy the state into the slots; False when the sequence has moved on."""
        sequence = self.live[which]
        if staged.is_written or staged.length != sequence.written or not self.is_captureable(sequence):
            return False
        content = self.checkpoint_content(sequence, staged.length)
        slots = (staged.reservation.recurrent_snapshot_slot, staged.reservation.partial_kv_snapshot_slot)
        for kind, slot in zip((ResourceType.RECURRENT_SNAPSHOT, ResourceType.PARTIAL_KV_SNAPSHOT), slots, strict=True):
            if slot is not None:
                pool = self.manager.pools.pool(kind)
                if pool.active_ref(slot) != 1 or pool.cache_ref(slot):
                    raise InvariantError(f"{kind.name} {slot} is captured into, but not reserved")
                self.contents[kind].write(slot, content)
        self.call(self.manager.mark_snapshots_written, sequence.lease, staged.reservation)
        staged.is_written = True
        self.check(sequence)
        return True

    def publish_checkpoint(
        self, which: int, staged: StagedCheckpoint, *, kind: CheckpointKind, keep_lengths: Sequence[int] = ()
    ) -> PublishResult | None:
        """Make a captured checkpoint findable; its reservation stays until `retire_checkpoint`."""
        sequence = self.live[which]
        if not staged.is_written:
            return None
        method = self.manager.publish_hybrid_mtp if sequence.paired else self.manager.publish_hybrid
        lease, chain = sequence.lease, sequence.chain
        result = self.call(
            method, lease, chain, staged.length, staged.reservation, kind=kind, keep_lengths=keep_lengths
        )
        self.observe("publish_checkpoint", sequence, staged, kind, keep_lengths, result)
        self.check(sequence)
        return result

    def retire_checkpoint(self, which: int, staged: StagedCheckpoint) -> None:
        sequence = self.live[which]
        sequence.staged.remove(staged)
        self.call(self.manager.retire_hybrid_snapshot_reservation, sequence.lease, staged.reservation)
        self.observe("retire", sequence, staged)
        self.check(sequence)

    def rebind_checkpoint(self, which: int) -> int:
        """Look again for a checkpoint deeper than what is computed; the restore then happens at once."""
        sequence = self.live[which]
        restoring = sequence.lease.recurrent_snapshot_slot is not None
        if not self.flavour.checkpoints or restoring or not sequence.symbols or sequence.staged:
            return 0
        committed = sequence.written
        length = self.call(self.manager.rebind_checkpoint, sequence.lease, sequence.chain, committed)
        if length > sequence.written:
            self.restore_snapshots(sequence, length)
            sequence.written = sequence.common = length
        self.observe("rebind_checkpoint", sequence, committed, length)
        self.check(sequence)
        return length

    # Eviction and time

    def evict_record(self, which: int) -> None:
        record = self.manager.records.lru_to_mru()[which]
        self.call(self.manager.evict_record, record)
        self.observe("evict_record", record)
        self.check(None)

    def evict_all(self) -> int:
        count = self.call(self.manager.evict_all)
        self.observe("evict_all", count)
        self.check(None)
        return count

    def pass_time(self, nanoseconds: int) -> None:
        self.now += nanoseconds
        self.manager.set_now(self.now)
        self.observe("time")
        self.check(None)

    def expire(self) -> int:
        count = self.call(self.manager.expire)
        self.observe("expire", count)
        self.check(None)
        return count

    def note_withheld(self, which: int, block: int) -> None:
        sequence = self.live[which]
        if block < len(sequence.symbols) // self.page_size:
            self.call(self.manager.note_withheld, sequence.chain, block)
            self.observe("withheld", sequence, block)
            self.check(sequence)

    def set_volatile_from(self, which: int, position: int) -> None:
        sequence = self.live[which]
        self.manager.set_volatile_from(sequence.lease, position)
        self.observe("volatile", sequence, position)
        self.check(sequence)

    # Checks

    def check(self, touched: LiveSequence | None) -> None:
        """The manager's recount (cheap counts in between), then contents and exclusiveness from the outside."""
        self.operations += 1
        if self.operations % self.recount_every:
            self.manager.check_counts()
            if touched is not None:
                self.check_sequence(touched)
        else:
            self.manager.check_invariants()
            self.check_exclusive_pages()
            for sequence in self.live:
                self.check_sequence(sequence)

    def check_sequence(self, sequence: LiveSequence) -> None:
        """What was computed or reused is still there, on whatever pages the lease names now."""
        if self.flavour.index_only:
            return
        pages = sequence.lease.base_pages.tolist()
        for block in range(-(-sequence.written // self.page_size)):
            self.base.require(pages[block], self.content(sequence, block, sequence.written), "computed state is lost")
        if sequence.paired:
            pages = sequence.lease.draft_pages.tolist()
            for block in range(-(-sequence.common // self.page_size)):
                content = self.draft_content(sequence, block, sequence.common)
                self.draft.require(
                    pages[block], content, "draft state is lost, or was made with other tokens behind it"
                )

    def check_exclusive_pages(self) -> None:
        """No page is in two leases unless it is shared or published; no leased page is on a free list."""
        owners: dict[tuple[ResourceType, int], int] = {}
        for sequence in self.live:
            lease = sequence.lease
            for kind, pages, first in (
                (ResourceType.BASE_KV_PAGE, lease.base_pages.tolist(), sequence.written // self.page_size),
                (ResourceType.DRAFT_KV_PAGE, lease.draft_pages.tolist(), sequence.common // self.page_size),
            ):
                if len(set(pages)) != len(pages):
                    raise InvariantError(f"a lease holds {kind.name} {pages}: one of them twice")
                for page in pages[first:]:
                    owners[kind, page] = owners.get((kind, page), 0) + 1
        for (kind, page), count in owners.items():
            if count > 1 or self.manager.pools.pool(kind).active_ref(page) < 1:
                raise InvariantError(f"{kind.name} {page}: {count} sequences would write it")

    def observe(self, event: str, *facts: Any) -> None:
        """A call of the manager has returned; a model that runs beside may look.  Does nothing here."""
