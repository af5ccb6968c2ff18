"""`ContextCacheMetrics`: what the context cache did since the runtime started, and its gauges now."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

from edgellm.metric_lines import metric_lines


class PoolGauge(NamedTuple):
    """Free and total units of one pool."""

    free: int = 0
    capacity: int = 0

    def __str__(self) -> str:
        return f"{self.free:,} of {self.capacity:,} free"


_EMPTY = PoolGauge()


@dataclass(slots=True)
class ContextCacheMetrics:
    """Cumulative counters, then gauges.  `metrics()` of the coordinator returns a copy.

    Two relations always hold: the three plan counters add up to `admitted_sequences`, and
    `publication_attempts == committed_publications + existing_publications`.

    Attributes:
        hit_sequences: sequences of which some prompt tokens were known at admission (a full rewind to 0 counts).
        lookup_bypass_sequences: private pages by policy.
        matched_tokens, reused_tokens: prompt tokens known at admission, and those of them not computed again; what came
            later is in `rebound_tokens`, and answers' reuse reports have the sum of both.
        publication_attempts: endpoints offered for retention at prefill end and decode end.
        block_publications: publications of completed chunks and generated blocks, without an endpoint.
        published_blocks: blocks that became findable, over all publications.
        rebound_tokens: prompt tokens a sequence got from a producer in flight after its own admission.
        policy_failures: faults of publication policies; the sequences they were about went on unpublished.
        policy_deadline_overruns: policy hooks that took longer than the deadline, without waits for the device.
        slowest_policy_nanoseconds: what the longest of these took.
        tail_copies, tail_copied_tokens: sequences that began inside a page, and the tokens copied for them.
        spec_replays, spec_replayed_tokens: plans that gave known tokens up because draft state looks ahead, and how
            many tokens that was.
        spec_pair_publications: endpoints with draft pages of their own.
        forced_cold_sequences: always 0; a hit is never harder to lease than a cold run.
        growth_refusals: decode steps that one sequence could not get its next page for.
        planning_nanoseconds: lookup, plan and acquire of admitted sequences, monotonic clock.
        quarantined_requests: gauge; requests whose stream could not be drained.
    """

    admitted_sequences: int = 0
    hit_sequences: int = 0
    media_aware_sequences: int = 0
    lookup_bypass_sequences: int = 0
    forced_cold_sequences: int = 0
    standard_plans: int = 0
    no_reusable_prefix_plans: int = 0
    full_input_rewind_plans: int = 0
    matched_tokens: int = 0
    reused_tokens: int = 0
    publication_attempts: int = 0
    committed_publications: int = 0
    existing_publications: int = 0
    published_endpoints: int = 0
    block_publications: int = 0
    published_blocks: int = 0
    rebound_tokens: int = 0
    policy_failures: int = 0
    policy_deadline_overruns: int = 0
    slowest_policy_nanoseconds: int = 0
    tail_copies: int = 0
    tail_copied_tokens: int = 0
    growth_refusals: int = 0
    hybrid_restores: int = 0
    hybrid_snapshot_pressure_skips: int = 0
    hybrid_capture_synchronizations: int = 0
    spec_replays: int = 0
    spec_replayed_tokens: int = 0
    spec_pair_publications: int = 0
    planning_nanoseconds: int = 0

    quarantined_requests: int = 0
    current_records: int = 0
    base_kv_pages: PoolGauge = _EMPTY
    draft_kv_pages: PoolGauge = _EMPTY
    recurrent_snapshots: PoolGauge = _EMPTY
    partial_kv_snapshots: PoolGauge = _EMPTY
    evicted_records: int = 0
    reclaimed_base_kv_pages: int = 0
    reclaimed_draft_kv_pages: int = 0
    reclaimed_recurrent_snapshots: int = 0
    reclaimed_partial_kv_snapshots: int = 0

    def __str__(self) -> str:
        """One metric a line."""
        return metric_lines(self)

    def as_dict(self) -> dict[str, int | PoolGauge]:
        """Field names and values, in order."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
