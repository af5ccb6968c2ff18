"""Which deployments the context cache serves, and the geometry checks of one."""

from __future__ import annotations

from typing import Any

from edgellm.cache.types import (
    BaseStateKind,
    ContextCacheDeploymentProfile,
    ContextCachePhysicalResources,
    DeploymentConfig,
    SpecReuseContract,
)
from edgellm.errors import InvalidArgumentError, UnsupportedModelError

MAX_PAGES = 2**31 - 1

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

_WITHOUT_DRAFT_MODEL = ("prompt_lookup",)
_HYBRID_DECODERS = ("vanilla", "mtp")


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
        raise UnsupportedModelError(f"decoder {decoder_kind!r} on a hybrid model is not supported; use vanilla or mtp")
    if base_state_kind is BaseStateKind.ATTENTION_ONLY and decoder_kind == "mtp":
        raise UnsupportedModelError("plain MTP on an attention-only model is not supported; use vanilla or eagle")


def check_geometry(deployment: DeploymentConfig) -> None:
    """Sizes that no deployment can do without.

    The pool may be smaller than `max_batch_size` full sequences: admissions then wait for pages.

    Raises:
        InvalidArgumentError: a size is out of range.
    """
    for name in ("max_batch_size", "max_input_length", "max_kv_capacity", "page_size", "num_pages"):
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
    """Deployment, pools and tables agree on every size they share.

    Raises:
        InvalidArgumentError: names both values.
    """
    check_geometry(deployment)
    paired = profile.owns_paged_spec_state
    has_draft = (resources.draft_cache is not None, resources.draft_page_table is not None)
    if has_draft != (paired, paired):
        wanted = "a draft cache and a draft page table" if paired else "neither a draft cache nor a draft page table"
        raise InvalidArgumentError(f"this profile needs {wanted}; got cache {has_draft[0]}, table {has_draft[1]}")
    if resources.base_page_table is None:
        raise InvalidArgumentError("base_page_table is None; pass the page table that the executor reads")
    _check_pair("base", resources.base_cache, resources.base_page_table, deployment, deployment.num_pages)
    if paired:
        _check_pair("draft", resources.draft_cache, resources.draft_page_table, deployment, deployment.num_draft_pages)


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
