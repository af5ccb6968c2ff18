"""Value types of the context cache: the words that coordinator, policies and session share.

Pure Python, no torch: `_core` and its tests import this.  Lengths are in tokens, counts in pages.
"""

from __future__ import annotations

import numbers
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, NewType

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from edgellm.session.types import ResidentRef

PageId = NewType("PageId", int)
RecordId = NewType("RecordId", int)
NodeId = NewType("NodeId", int)

UNUSED_PAGE_ENTRY = -1
HOLD_COMMITTED_STATE_LENGTH = -1


class ResourceType(IntEnum):
    """The four typed pools, in the order of every per-type list."""

    BASE_KV_PAGE = 0
    DRAFT_KV_PAGE = 1
    RECURRENT_SNAPSHOT = 2
    PARTIAL_KV_SNAPSHOT = 3


class ContextCacheLookupPolicy(Enum):
    USE_CACHE = "use_cache"
    BYPASS = "bypass"


class ContextCacheCommitPolicy(Enum):
    INCLUDING_GENERATED_TOKENS = "including_generated_tokens"
    PREFILL_STATE_ONLY = "prefill_state_only"


class ContextCacheCoordinatorStatus(Enum):
    OK = "ok"
    REQUEST_FAILED = "request_failed"
    POISONED = "poisoned"


class PublicationPoint(Enum):
    PREFILL_CHUNK = "prefill_chunk"
    PREFILL_END = "prefill_end"
    DECODE_BLOCK = "decode_block"
    DECODE_END = "decode_end"


class DecodingTokenStateContract(Enum):
    """How the token list and the materialised state relate at a rest point.

    COMMITTED_PLUS_LOOKAHEAD: one token more than state.  FULLY_COMMITTED: equal lengths.
    """

    COMMITTED_PLUS_LOOKAHEAD = "committed_plus_lookahead"
    FULLY_COMMITTED = "fully_committed"


class BaseStateKind(Enum):
    ATTENTION_ONLY = "attention_only"
    PURE_RECURRENT = "pure_recurrent"
    HYBRID = "hybrid"


class AcquireStatus(Enum):
    ACQUIRED = "acquired"
    INSUFFICIENT_CAPACITY = "insufficient_capacity"


class PublishStatus(Enum):
    PUBLISHED = "published"
    EXISTING_RECORD = "existing_record"


class ReusePlanMode(Enum):
    """Flavour of a plan and of the lease made from it."""

    VANILLA = "vanilla"
    SPEC = "spec"
    HYBRID = "hybrid"
    HYBRID_MTP = "hybrid_mtp"


class RetentionPriority(IntEnum):
    """Which unused context goes first when pages are short: LOW before NORMAL before HIGH."""

    LOW = 0
    NORMAL = 1
    HIGH = 2


@dataclass(frozen=True, slots=True)
class Retention:
    """How long a request's context is worth keeping once nobody uses it.

    Attributes:
        priority: the class it is evicted from; shared blocks keep the highest one they were given.
        ttl_seconds: after this time without use it goes before everything else; None keeps it by recency alone.  Any
            real number is kept as a float (the largest one where none is as large); anything else is kept as it is,
            for admission to refuse.
    """

    priority: RetentionPriority = RetentionPriority.NORMAL
    ttl_seconds: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "ttl_seconds", _as_float(self.ttl_seconds))


def _as_float(value: Any) -> Any:
    """A real number of any type (numpy's, fractions) as a float; anything else, and what raises, as it is."""
    if type(value) is float or isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    number: Any = value
    try:
        return float(number)
    except OverflowError:
        return sys.float_info.max if number > 0 else -sys.float_info.max
    except Exception:  # a number of somebody else's that is broken
        return value


class ReusePlanKind(Enum):
    STANDARD = "standard"
    NO_REUSABLE_PREFIX = "no_reusable_prefix"
    FULL_INPUT_REWIND = "full_input_rewind"


class ReuseStopReason(str, Enum):
    """Why matching stopped where it did (the reuse report's vocabulary).  A member equals its value: "no_record"."""

    FULL = "full"
    NO_RECORD = "no_record"
    EVICTED = "evicted"
    NO_CHECKPOINT = "no_checkpoint"
    POLICY = "policy"
    SALT = "salt"
    MEDIA = "media"
    LOOKAHEAD_REPLAY = "lookahead_replay"
    TEMPLATE_TAIL = "template_tail"
    BYPASS = "bypass"
    DISABLED = "disabled"


@dataclass(frozen=True, slots=True)
class ResourceDemand:
    """Units wanted (or owned) per pool; also used for capacities."""

    base_kv_pages: int = 0
    draft_kv_pages: int = 0
    recurrent_snapshot_slots: int = 0
    partial_kv_snapshot_slots: int = 0

    def get(self, kind: ResourceType) -> int:
        return self.as_tuple()[kind]

    def as_tuple(self) -> tuple[int, int, int, int]:
        return (
            self.base_kv_pages,
            self.draft_kv_pages,
            self.recurrent_snapshot_slots,
            self.partial_kv_snapshot_slots,
        )

    def is_non_negative(self) -> bool:
        return min(self.as_tuple()) >= 0


@dataclass(frozen=True, slots=True)
class ResourceId:
    """One unit of one pool; ids of different pools never compare equal."""

    type: ResourceType
    index: int


@dataclass(frozen=True, slots=True)
class Hash128:
    hi: int
    lo: int

    def is_zero(self) -> bool:
        return self.hi == 0 and self.lo == 0


@dataclass(frozen=True, slots=True)
class AdapterKey:
    """Identity of a weight adapter; a reload under the same id raises `generation`."""

    id: int
    generation: int


@dataclass(frozen=True, slots=True)
class MediaSpanKey:
    content_digest: Hash128
    placement_digest: Hash128
    offset_within_block: int
    item_order: int
    modality: int


@dataclass(frozen=True, slots=True)
class BlockKeyExtras:
    """Request-constant identity beside the tokens.  `None` (absent) differs from a zero value."""

    media: tuple[MediaSpanKey, ...] = ()
    adapter: AdapterKey | None = None
    position_digest: Hash128 | None = None
    custom_embedding_digest: Hash128 | None = None
    isolation_digest: Hash128 | None = None


class CheckpointKind(IntEnum):
    """Why a recurrent checkpoint was placed where it is; decides what may supersede it.

    TAIL: end of a prompt or reply.  LADDER: at a distance chosen by the policy.  BRANCH: where two prompts were seen
    to part.  ANCHOR: a boundary that the caller named.
    """

    TAIL = 0
    LADDER = 1
    BRANCH = 2
    ANCHOR = 3


@dataclass(frozen=True, slots=True)
class HybridCheckpointKey:
    """Identity of a recurrent checkpoint: the hash of exactly the tokens it stands for, and how many they are."""

    exact_prefix_digest: Hash128
    exact_length: int


@dataclass(frozen=True, slots=True)
class HybridSnapshotReservation:
    """Snapshot slots that a lease holds for a capture; nothing can be found in them before they are published."""

    recurrent_snapshot_slot: int
    partial_kv_snapshot_slot: int | None = None


@dataclass(frozen=True, slots=True)
class CacheRecordKey:
    """What an endpoint record is about: the hash of its last full block, and how many blocks lead to it."""

    terminal_hash: Hash128
    full_block_count: int


@dataclass(frozen=True, slots=True)
class CacheRecord:
    """A snapshot of one record, as it was when asked for.

    Attributes:
        node: the block-tree node it ends at.
        base_page_path: canonical base page of each block, first block first.
        draft_page_path: draft pages of the same blocks, or None without draft state.
        exact_checkpoint_length: tokens a recurrent checkpoint stands for, or None.
    """

    id: RecordId
    key: CacheRecordKey
    node: NodeId
    base_page_path: tuple[PageId, ...]
    draft_page_path: tuple[PageId, ...] | None = None
    recurrent_snapshot_slot: int | None = None
    partial_kv_snapshot_slot: int | None = None
    exact_checkpoint_length: int | None = None


@dataclass(frozen=True, slots=True)
class ContextCacheManagerMetrics:
    """Cumulative counters; a unit is *reclaimed* when an eviction put it on its free list at once."""

    evicted_records: int = 0
    reclaimed_base_kv_pages: int = 0
    reclaimed_draft_kv_pages: int = 0
    reclaimed_recurrent_snapshots: int = 0
    reclaimed_partial_kv_snapshots: int = 0


@dataclass(frozen=True, slots=True)
class SpecReuseContract:
    """What a speculative decoder needs of reused state; absent for vanilla decoding."""

    owns_paged_spec_state: bool
    future_dependency_tokens: int


@dataclass(frozen=True, slots=True)
class DecodingKvHeadroom:
    """Token positions beyond the committed length that the next forward may write."""

    base_extra_tokens: int = 1
    draft_extra_tokens: int = 0

    @property
    def write_ahead(self) -> int:
        """Positions behind the look-ahead token's: no text reaches them, and the pools have room for them."""
        return max(self.base_extra_tokens, self.draft_extra_tokens) - 1


@dataclass(frozen=True, slots=True)
class ContextCacheConfig:
    """What the context cache may keep, and how long a policy may take.

    Attributes:
        enabled: False manages pages all the same and reuses nothing.
        max_records: most endpoint records; None bounds them by pages only.
        recurrent_snapshot_pool_bytes, partial_kv_snapshot_pool_bytes: budgets of the two snapshot slabs.
        encoder_embedding_cache_budget_bytes: read by the encoder-output cache, not here.
        checkpoint_interval_tokens: distance of recurrent checkpoints inside a prompt; None places none by distance.
        policy_deadline_seconds: longest time one policy hook may take before it is charged; None is no limit.
    """

    enabled: bool = True
    max_records: int | None = None
    recurrent_snapshot_pool_bytes: int = 0
    partial_kv_snapshot_pool_bytes: int = 0
    encoder_embedding_cache_budget_bytes: int = 256 * 1024 * 1024
    checkpoint_interval_tokens: int | None = 512
    policy_deadline_seconds: float | None = 0.05


@dataclass(frozen=True, slots=True)
class ContextCacheDeploymentProfile:
    base_state_kind: BaseStateKind = BaseStateKind.ATTENTION_ONLY
    spec_reuse_contract: SpecReuseContract | None = None

    @property
    def has_attention(self) -> bool:
        return self.base_state_kind is not BaseStateKind.PURE_RECURRENT

    @property
    def is_hybrid(self) -> bool:
        return self.base_state_kind is BaseStateKind.HYBRID

    @property
    def is_pure_recurrent(self) -> bool:
        return self.base_state_kind is BaseStateKind.PURE_RECURRENT

    @property
    def uses_checkpoint_reuse(self) -> bool:
        return self.base_state_kind is not BaseStateKind.ATTENTION_ONLY

    @property
    def is_speculative(self) -> bool:
        return self.spec_reuse_contract is not None

    @property
    def owns_paged_spec_state(self) -> bool:
        return self.spec_reuse_contract is not None and self.spec_reuse_contract.owns_paged_spec_state


@dataclass(frozen=True, slots=True)
class DeploymentConfig:
    """Geometry of one deployment, all of it known before the first request.

    Attributes:
        max_batch_size: B, residents at most.
        max_input_length: S_in, uncached prompt tokens that one chunk may hold.
        max_kv_capacity: C, positions one sequence may reach: prompt, answer, and behind them
            `DecodingKvHeadroom.write_ahead`.
        page_size: P, tokens per page.
        num_pages: pages in the base KV pool.
    """

    max_batch_size: int
    max_input_length: int
    max_kv_capacity: int
    page_size: int
    num_pages: int
    num_draft_pages: int = 0

    @property
    def pages_per_slot(self) -> int:
        """Width of a page-table row."""
        return row_width(self.max_kv_capacity, self.page_size)


def row_width(max_kv_capacity: int, page_size: int) -> int:
    """Entries of a page-table row: pages of a full sequence plus one for look-ahead."""
    return -(-max_kv_capacity // page_size) + 1


@dataclass(slots=True)
class ContextCacheSequenceAdmission:
    """One complete logical input, before its executable suffix is derived.

    Attributes:
        token_ids: (n,) int32, the whole prompt; copied by the coordinator.
        resident: the scheduler's physical identity; never derived from batch order.
        per_position_media_hash: empty, or one digest (or None) per token.
        lookup_policy: overrides the batch's policy for this sequence.
        commit_policy: likewise.
        replay_tail_length: likewise; tokens of the volatile generation prompt at the end of the input.
        salted: the isolation digest holds a salt of the request's own (the reuse report then says so).
        retention: priority and time to live of what this sequence leaves behind.
        checkpoint_boundaries: lengths at which the next request is likely to match; checkpoint deployments keep a
            recurrent checkpoint there, others ignore them.  The first of several is taken for the end of the
            instructions that conversations share, and is kept longest.
    """

    token_ids: npt.NDArray[np.int32] | Sequence[int]
    resident: ResidentRef
    key_extras: BlockKeyExtras = field(default_factory=BlockKeyExtras)
    per_position_media_hash: Sequence[Hash128 | None] = ()
    lookup_policy: ContextCacheLookupPolicy | None = None
    commit_policy: ContextCacheCommitPolicy | None = None
    replay_tail_length: int | None = None
    retention: Retention = field(default_factory=Retention)
    checkpoint_boundaries: Sequence[int] = ()
    salted: bool = False


@dataclass(slots=True)
class ContextCacheBatchAdmission:
    sequences: list[ContextCacheSequenceAdmission] = field(default_factory=list)
    speculative_request: bool = False
    token_state_contract: DecodingTokenStateContract = DecodingTokenStateContract.COMMITTED_PLUS_LOOKAHEAD
    lookup_policy: ContextCacheLookupPolicy = ContextCacheLookupPolicy.USE_CACHE
    commit_policy: ContextCacheCommitPolicy = ContextCacheCommitPolicy.INCLUDING_GENERATED_TOKENS
    replay_tail_length: int = 0


@dataclass(slots=True)
class ContextCacheSequenceAdvance:
    """Host-visible progress of one sequence after a synchronised step.

    `HOLD_COMMITTED_STATE_LENGTH` with no accepted token leaves the sequence's length ledger alone.
    """

    accepted_token_ids: Sequence[int] = ()
    committed_state_length: int = HOLD_COMMITTED_STATE_LENGTH

    @property
    def accepted_token_count(self) -> int:
        return len(self.accepted_token_ids)


@dataclass(frozen=True, slots=True)
class ReuseReport:
    """What the cache did for one prompt, and why not more.

    Attributes:
        prompt_tokens: length of the whole prompt.
        reused_tokens: prompt tokens whose state was not computed again.
        matched_tokens: prompt tokens the cache knew (`reused <= matched`).
        stop_reason: why matching stopped at `stop_position`.
        stop_position: token index at which matching stopped.
    """

    prompt_tokens: int
    reused_tokens: int
    matched_tokens: int
    stop_reason: ReuseStopReason
    stop_position: int

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.reused_tokens


@dataclass(slots=True)
class ContextCachePhysicalResources:
    """Borrowed device-side owners; they must outlive the coordinator."""

    base_cache: Any
    base_page_table: Any
    draft_cache: Any = None
    draft_page_table: Any = None
    snapshot_storage: Any = None
