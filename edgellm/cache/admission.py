"""Admission: argument checks and effective policies.  Nothing here changes anything."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from edgellm.cache.types import (
    ContextCacheBatchAdmission,
    ContextCacheCommitPolicy,
    ContextCacheLookupPolicy,
    ContextCacheSequenceAdmission,
    DecodingKvHeadroom,
    DecodingTokenStateContract,
    Retention,
    RetentionPriority,
)
from edgellm.errors import InputTooLongError, InvalidArgumentError, UnsupportedRequestError

if TYPE_CHECKING:
    from edgellm.cache.coordinator import ContextCacheCoordinator
    from edgellm.session.types import ResidentRef


def check_batch(coordinator: ContextCacheCoordinator, batch: ContextCacheBatchAdmission) -> None:
    """Errors of a whole batch that need no state."""
    _require_member("lookup_policy", batch.lookup_policy, ContextCacheLookupPolicy)
    _require_member("commit_policy", batch.commit_policy, ContextCacheCommitPolicy)
    _require_member("token_state_contract", batch.token_state_contract, DecodingTokenStateContract)
    if batch.speculative_request and not coordinator.profile.is_speculative:
        raise UnsupportedRequestError(
            "the request is speculative and this deployment has no speculative decoder; set speculative_request=False"
        )
    if batch.replay_tail_length < 0:
        raise InvalidArgumentError(f"replay_tail_length is {batch.replay_tail_length}; it must be 0 or more")
    limit = coordinator.deployment.max_batch_size
    if len(batch.sequences) > limit:
        raise InvalidArgumentError(f"the batch has {len(batch.sequences)} sequences, the limit is {limit}; split it")


def _require_member(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise InvalidArgumentError(f"{name} is {value!r}; pass a {kind.__name__}")


def check_headroom(headroom: DecodingKvHeadroom, *, paired: bool) -> None:
    """Base look-ahead is always positive; draft look-ahead exists exactly with a paired draft working set."""
    if headroom.base_extra_tokens <= 0:
        raise InvalidArgumentError(
            f"base_extra_tokens is {headroom.base_extra_tokens}; at least 1 is needed for the look-ahead token"
        )
    if headroom.draft_extra_tokens < 0 or (headroom.draft_extra_tokens > 0) != paired:
        wanted = "positive for a request with a paired draft" if paired else "0 for a request without a paired draft"
        raise InvalidArgumentError(f"draft_extra_tokens is {headroom.draft_extra_tokens}; it must be {wanted}")


def check_sequences(
    coordinator: ContextCacheCoordinator,
    admissions: Sequence[ContextCacheSequenceAdmission],
    headroom: DecodingKvHeadroom,
) -> None:
    """`check_sequence` for a batch, and no resident slot named twice."""
    slots: set[int] = set()
    for admission in admissions:
        check_sequence(coordinator, admission, headroom)
        if admission.resident.slot in slots:
            raise InvalidArgumentError(f"slot {admission.resident.slot} is named twice in one batch; give each its own")
        slots.add(admission.resident.slot)


def check_sequence(
    coordinator: ContextCacheCoordinator, admission: ContextCacheSequenceAdmission, headroom: DecodingKvHeadroom
) -> None:
    """Errors of one sequence: tokens, media, policies, retention, boundaries, row width, resident slot."""
    num_tokens = len(admission.token_ids)
    if num_tokens == 0:
        raise InvalidArgumentError("token_ids is empty; a sequence needs at least 1 token")
    num_media = len(admission.per_position_media_hash)
    if num_media not in (0, num_tokens):
        raise InvalidArgumentError(f"{num_media} media digests for {num_tokens} tokens; pass none or one per token")
    if admission.lookup_policy is not None:
        _require_member("lookup_policy", admission.lookup_policy, ContextCacheLookupPolicy)
    if admission.commit_policy is not None:
        _require_member("commit_policy", admission.commit_policy, ContextCacheCommitPolicy)
    _check_retention(admission.retention)
    _check_boundaries(admission, num_tokens)
    room = coordinator.row_capacity_tokens
    extra = max(headroom.base_extra_tokens, headroom.draft_extra_tokens)
    if num_tokens + extra > room:
        raise InputTooLongError(
            f"{num_tokens} tokens and {extra} of headroom exceed the {room} of a page-table row; "
            "shorten the prompt or raise max_kv_capacity"
        )
    check_resident_free(coordinator, admission.resident)


def _is_finite_time(seconds: Any) -> bool:
    return bool(0 < seconds < float("inf"))


def _check_retention(retention: Retention) -> None:
    _require_member("retention", retention, Retention)
    _require_member("retention.priority", retention.priority, RetentionPriority)
    ttl: Any = retention.ttl_seconds
    if ttl is None:
        return
    if isinstance(ttl, bool) or not isinstance(ttl, numbers.Real) or not _is_finite_time(ttl):
        raise InvalidArgumentError(f"ttl_seconds is {ttl!r}; pass a positive number, or None")


def is_integer(value: object) -> bool:
    """An integer of Python or numpy; True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _check_boundaries(admission: ContextCacheSequenceAdmission, num_tokens: int) -> None:
    tail = admission.replay_tail_length
    if tail is not None and not (is_integer(tail) and 0 <= tail <= num_tokens):
        raise InvalidArgumentError(f"replay_tail_length is {tail!r}; it must be from 0 to the prompt's {num_tokens}")
    for boundary in admission.checkpoint_boundaries:
        if not (is_integer(boundary) and 0 < boundary <= num_tokens):
            raise InvalidArgumentError(f"checkpoint boundary {boundary!r} must be from 1 to the prompt's {num_tokens}")


def check_resident_free(coordinator: ContextCacheCoordinator, resident: ResidentRef) -> None:
    """The slot is in range, its epoch live, and no other sequence occupies it."""
    limit = coordinator.deployment.max_batch_size
    if not 0 <= resident.slot < limit:
        raise InvalidArgumentError(f"slot {resident.slot} is not in [0, {limit}); acquire one from the slot pool")
    if resident.epoch == 0:
        raise InvalidArgumentError(f"slot {resident.slot} has epoch 0, which is never live; acquire the slot")
    if resident.slot in coordinator._occupied:
        raise InvalidArgumentError(f"slot {resident.slot} is occupied by a live sequence; release it first")


def effective_lookup_policy(
    batch_policy: ContextCacheLookupPolicy,
    override: ContextCacheLookupPolicy | None,
    *,
    forced_bypass: bool,
) -> ContextCacheLookupPolicy:
    """Forced bypass, else the sequence's own wish, else the batch's."""
    if forced_bypass:
        return ContextCacheLookupPolicy.BYPASS
    return batch_policy if override is None else override


def batch_is_forced_to_bypass(coordinator: ContextCacheCoordinator, batch: ContextCacheBatchAdmission) -> bool:
    """A disabled cache, a batch that asks for bypass, or speculation beside media: nobody looks up or publishes."""
    if not coordinator.config.enabled or batch.lookup_policy is ContextCacheLookupPolicy.BYPASS:
        return True
    speculative = batch.speculative_request
    return any(media_forces_bypass(coordinator, sequence, speculative) for sequence in batch.sequences)


def media_forces_bypass(
    coordinator: ContextCacheCoordinator, admission: ContextCacheSequenceAdmission, speculative_request: bool
) -> bool:
    """Draft state beside media is not reused; checkpoints (hybrid with MTP) carry the media's identity and are."""
    return speculative_request and not coordinator.profile.uses_checkpoint_reuse and has_media(admission)


def has_media(admission: ContextCacheSequenceAdmission) -> bool:
    return any(digest is not None and not digest.is_zero() for digest in admission.per_position_media_hash)
