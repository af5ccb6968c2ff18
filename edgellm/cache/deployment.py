"""Which deployments the context cache serves, and the geometry checks of one."""

from __future__ import annotations

from typing import Any

from edgellm.cache.types import (
    BaseStateKind,
    ContextCacheConfig,
    ContextCacheDeploymentProfile,
    ContextCachePhysicalResources,
    DeploymentConfig,
    ResourceDemand,
    SpecReuseContract,
)
from edgellm.errors import InvalidArgumentError, UnsupportedModelError

MAX_PAGES = 2**31 - 1
_ATTENTION_ONLY = ContextCacheDeploymentProfile()

# Decoder kind -> what it needs of reused state.  None: not speculative.
SPEC_REUSE_CONTRACTS: dict[str, SpecReuseContract | None] = {
    "vanilla": None,
    "mtp": SpecReuseContract(owns_paged_spec_state=True, future_dependency_tokens=1),
    "eagle": SpecReuseContract(owns_paged_spec_state=True, future_dependency_tokens=1),
    "dflash": SpecReuseContract(owns_paged_spec_state=True, future_dependency_tokens=0),
    "jetspec": SpecReuseContract(owns_paged_spec_state=True, future_dependency_tokens=0),
    "dspark": SpecReuseContract(owns_paged_spec_state=True, future_dependency_tokens=0),
    "shared_kv_mtp": SpecReuseContract(owns_paged_spec_state=False, future_dependency_tokens=0),
    "prompt_lookup": SpecReuseContract(owns_paged_spec_state=False, future_dependency_tokens=0),
}

VERIFYING_DECODERS = ("shared_kv_mtp",)
"""Kinds whose engine only verifies proposals: it has no stand-alone target that could decode without them."""

_WITHOUT_DRAFT_MODEL = ("prompt_lookup",)
_ATTENTION_DECODERS = "vanilla, eagle, shared_kv_mtp or prompt_lookup"
_HYBRID_DECODERS = ("vanilla", "mtp", "prompt_lookup")


def resolve_spec_reuse_contract(
    decoder_kind: str, *, has_draft_config: bool = False, has_spec_config: bool = False
) -> SpecReuseContract | None:
    """The reuse contract of a decoder kind; None when it is not speculative.

    Raises:
        InvalidArgumentError: an unknown kind, or a speculative one without its draft or speculative configuration.
    """
    if decoder_kind not in SPEC_REUSE_CONTRACTS:
        raise InvalidArgumentError(
            f"decoder kind {decoder_kind!r} has no reuse contract; known kinds: {', '.join(SPEC_REUSE_CONTRACTS)}"
        )
    contract = SPEC_REUSE_CONTRACTS[decoder_kind]
    needs_draft = contract is not None and decoder_kind not in _WITHOUT_DRAFT_MODEL
    if needs_draft and not (has_draft_config and has_spec_config):
        raise InvalidArgumentError(
            f"decoder {decoder_kind!r} needs a draft and a speculative configuration "
            f"(draft: {has_draft_config}, speculative: {has_spec_config}); pass both"
        )
    return contract


def check_support(
    base_state_kind: BaseStateKind,
    decoder_kind: str,
    *,
    bidirectional_vision_attention: bool = False,
    trajectory_runner: bool = False,
    tensor_parallel_size: int = 1,
) -> None:
    """The support matrix of the context cache.

    Raises:
        UnsupportedModelError: the combination is rejected; the message says which part of it.
    """
    if bidirectional_vision_attention:
        raise UnsupportedModelError("bidirectional vision attention depends on later tokens; disable the context cache")
    if trajectory_runner:
        raise UnsupportedModelError("action and trajectory runners have no reusable context; disable the context cache")
    if tensor_parallel_size != 1:
        raise UnsupportedModelError(f"tensor_parallel_size is {tensor_parallel_size}; the context cache serves 1 only")
    resolve_spec_reuse_contract(decoder_kind, has_draft_config=True, has_spec_config=True)
    if base_state_kind is BaseStateKind.PURE_RECURRENT and decoder_kind != "vanilla":
        raise UnsupportedModelError(f"decoder {decoder_kind!r} on a pure recurrent model is not supported; use vanilla")
    if base_state_kind is BaseStateKind.HYBRID and decoder_kind not in _HYBRID_DECODERS:
        raise UnsupportedModelError(
            f"decoder {decoder_kind!r} on a hybrid model is not supported; use vanilla, mtp or prompt_lookup"
        )
    if base_state_kind is BaseStateKind.ATTENTION_ONLY and decoder_kind == "mtp":
        raise UnsupportedModelError(
            f"decoder 'mtp' on an attention-only model is not supported; use {_ATTENTION_DECODERS}"
        )


def check_config(config: ContextCacheConfig) -> None:
    """Numbers that policies and the coordinator count with.

    Raises:
        InvalidArgumentError: a checkpoint interval that is no positive integer, or a deadline that is not positive.
    """
    interval, deadline = config.checkpoint_interval_tokens, config.policy_deadline_seconds
    if interval is not None and (isinstance(interval, bool) or not isinstance(interval, int) or interval < 1):
        raise InvalidArgumentError(
            f"checkpoint_interval_tokens is {interval!r}; pass an integer of at least 1, or None"
        )
    if deadline is not None and not deadline > 0:
        raise InvalidArgumentError(f"policy_deadline_seconds is {deadline!r}; pass a positive number, or None")


def check_geometry(deployment: DeploymentConfig, profile: ContextCacheDeploymentProfile = _ATTENTION_ONLY) -> None:
    """Sizes that no deployment can do without.

    The pool may be smaller than `max_batch_size` full sequences: admissions then wait for pages.  Pure recurrent
    models have no pages.

    Raises:
        InvalidArgumentError: a size is out of range.
    """
    needed = ["max_batch_size", "max_input_length", "max_kv_capacity", "page_size"]
    needed += ["num_pages"] if profile.has_attention else []
    needed += ["num_draft_pages"] if profile.owns_paged_spec_state else []
    for name in needed:
        value = getattr(deployment, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidArgumentError(f"{name} is {value!r}; it must be an integer of at least 1")
    for name in ("num_pages", "num_draft_pages"):
        value = getattr(deployment, name)
        if not 0 <= value <= MAX_PAGES:
            raise InvalidArgumentError(f"{name} is {value}; it must be from 0 to {MAX_PAGES}")


def check_resources(
    deployment: DeploymentConfig, profile: ContextCacheDeploymentProfile, resources: ContextCachePhysicalResources
) -> None:
    """Deployment, pools, tables and snapshot storage agree on every size they share.

    Raises:
        InvalidArgumentError: names both values.
    """
    check_geometry(deployment, profile)
    paired = profile.owns_paged_spec_state
    has_draft = (resources.draft_cache is not None, resources.draft_page_table is not None)
    if has_draft != (paired, paired):
        wanted = "a draft cache and a draft page table" if paired else "neither a draft cache nor a draft page table"
        raise InvalidArgumentError(f"this profile needs {wanted}; got cache {has_draft[0]}, table {has_draft[1]}")
    if profile.has_attention:
        if resources.base_page_table is None:
            raise InvalidArgumentError("base_page_table is None; pass the page table that the executor reads")
        _check_pair("base", resources.base_cache, resources.base_page_table, deployment, deployment.num_pages)
    if paired:
        _check_pair("draft", resources.draft_cache, resources.draft_page_table, deployment, deployment.num_draft_pages)
    _check_copying(profile, resources)
    _check_storage(deployment, profile, resources.snapshot_storage)


def _check_copying(profile: ContextCacheDeploymentProfile, resources: ContextCachePhysicalResources) -> None:
    """Reuse that begins inside a page needs somebody who copies pages."""
    if profile.uses_checkpoint_reuse:
        return
    caches = [("base_cache", resources.base_cache)]
    caches += [("draft_cache", resources.draft_cache)] if profile.owns_paged_spec_state else []
    for name, cache in caches:
        if not callable(getattr(cache, "copy_pages", None)):
            raise InvalidArgumentError(
                f"{name} is {type(cache).__name__} and cannot copy_pages(sources, targets); reuse needs it"
            )


def _check_storage(deployment: DeploymentConfig, profile: ContextCacheDeploymentProfile, storage: Any) -> None:
    if not profile.uses_checkpoint_reuse:
        if storage is not None:
            raise InvalidArgumentError("an attention-only model keeps no recurrent snapshots; pass no snapshot_storage")
        return
    if storage is None:
        raise InvalidArgumentError(
            f"a {profile.base_state_kind.value} model needs snapshot_storage for its recurrent checkpoints"
        )
    _agree("snapshot storage: page_size", storage.page_size, deployment.page_size)
    for family, slots in (
        ("recurrent", storage.num_recurrent_slots),
        ("partial", storage.num_partial_slots if profile.has_attention else 1),
    ):
        if slots < 1:
            raise InvalidArgumentError(f"the {family} snapshot pool has {slots} slots; raise its budget to at least 1")


def pool_capacities(
    deployment: DeploymentConfig, profile: ContextCacheDeploymentProfile, resources: ContextCachePhysicalResources
) -> ResourceDemand:
    """Units of the four pools.

    A pure recurrent model has no KV pages, but its index wants a number for each block that a sequence in flight or
    a checkpoint may stand for; nothing is behind them, so there are enough for all.
    """
    storage = resources.snapshot_storage
    recurrent = storage.num_recurrent_slots if profile.uses_checkpoint_reuse else 0
    base = deployment.num_pages
    if not profile.has_attention:
        base = (deployment.max_batch_size + recurrent) * deployment.pages_per_slot
        if base > MAX_PAGES:
            raise InvalidArgumentError(
                f"{recurrent} recurrent snapshots of up to {deployment.pages_per_slot} blocks exceed {MAX_PAGES}; "
                "lower recurrent_snapshot_pool_bytes or raise page_size"
            )
    return ResourceDemand(
        base_kv_pages=base,
        draft_kv_pages=deployment.num_draft_pages if profile.owns_paged_spec_state else 0,
        recurrent_snapshot_slots=recurrent,
        partial_kv_snapshot_slots=storage.num_partial_slots if profile.is_hybrid else 0,
    )


def _check_pair(which: str, cache: Any, table: Any, deployment: DeploymentConfig, num_pages: int) -> None:
    _agree(f"{which} page table: num_pages", table.num_pages, num_pages)
    _agree(f"{which} page table: num_slots", table.num_slots, deployment.max_batch_size)
    _agree(f"{which} page table: pages_per_slot", table.pages_per_slot, deployment.pages_per_slot)
    if cache is not None:
        _agree(f"{which} cache: num_pages", cache.num_pages, num_pages)
        _agree(f"{which} cache: page_size", cache.page_size, deployment.page_size)


def _agree(what: str, value: int, expected: int) -> None:
    if value != expected:
        raise InvalidArgumentError(f"{what} is {value} and the deployment says {expected}; build both from one config")
