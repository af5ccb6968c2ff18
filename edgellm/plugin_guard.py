"""Calls into what plugins registered: whatever they raise or return, the error names the plugin and what it did."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from edgellm.cache.types import (
    ContextCacheDeploymentProfile,
    DecodingKvHeadroom,
    DecodingTokenStateContract,
    SpecReuseContract,
)
from edgellm.decoding.base import DecoderCapabilities, DecodingStrategy
from edgellm.errors import FOREIGN_ERRORS, PluginError
from edgellm.foreign import describe_error

if TYPE_CHECKING:
    from edgellm.cache.coordinator import ContextCacheCoordinator
    from edgellm.cache.policy import PublicationPolicy
    from edgellm.plugins import DecoderRegistration, PolicyRegistration

ResultT = TypeVar("ResultT")


def serves(registration: PolicyRegistration, profile: ContextCacheDeploymentProfile, speculative_request: bool) -> bool:
    """What the policy's `serves` says.

    Raises:
        PluginError: it raised, or returned something else than a bool.
    """
    what = f"`serves` of publication policy {registration.name!r}"
    return _call(registration, what, lambda: registration.serves(profile, speculative_request), bool, "True or False")


def build_policy(registration: PolicyRegistration, coordinator: ContextCacheCoordinator) -> PublicationPolicy:
    """A new policy object.

    Raises:
        PluginError: the factory raised, or returned something that is no usable policy.
    """
    from edgellm.cache.policy import PublicationPolicy  # the coordinator, which policies need, needs this file

    what = f"publication policy {registration.name!r}"
    policy = _call(
        registration,
        f"the factory of {what}",
        lambda: registration.factory(coordinator),
        PublicationPolicy,
        "a PublicationPolicy",
    )
    _check_name(registration, what, lambda: policy.name)
    return policy


def build_decoder(registration: DecoderRegistration) -> DecodingStrategy:
    """A new decoder, whose statements about itself are of the right types.

    Raises:
        PluginError: the factory raised, or returned something that is no usable decoder.
    """
    what = f"decoder {registration.name!r}"
    decoder = _call(
        registration,
        f"the factory of {what}",
        registration.factory,
        DecodingStrategy,
        "a DecodingStrategy",
    )
    _check_name(registration, what, lambda: decoder.name)
    statements: dict[str, tuple[type[Any], ...]] = {
        "capabilities": (DecoderCapabilities,),
        "required_kv_headroom": (DecodingKvHeadroom,),
        "token_state_contract": (DecodingTokenStateContract,),
        "spec_reuse_contract": (SpecReuseContract, type(None)),
    }
    for method, types in statements.items():
        needed = f"a {types[0].__name__}{' or None' if len(types) > 1 else ''}"
        _call(registration, f"{method} of {what}", getattr(decoder, method), types, needed)
    return decoder


def _call(
    registration: PolicyRegistration | DecoderRegistration,
    what: str,
    function: Callable[[], Any],
    types: type[ResultT] | tuple[type[ResultT], ...],
    needed: str,
) -> ResultT:
    try:
        result = function()
    except FOREIGN_ERRORS as error:
        raise _fault(registration, f"{what} raised {describe_error(error)}") from error
    if not isinstance(result, types):
        raise _fault(registration, f"{what} returned {_show(result)}; {needed} is needed")
    return result


def _check_name(
    registration: PolicyRegistration | DecoderRegistration, what: str, name_of: Callable[[], object]
) -> None:
    try:
        name = name_of()
    except FOREIGN_ERRORS as error:
        raise _fault(registration, f"the name of {what} raised {describe_error(error)}") from error
    if not isinstance(name, str):
        raise _fault(registration, f"{what} has the name {_show(name)}; text is needed")


def _show(value: object) -> str:
    try:
        return repr(value)
    except FOREIGN_ERRORS:
        return f"a {type(value).__name__}"


def _fault(registration: PolicyRegistration | DecoderRegistration, did: str) -> PluginError:
    return PluginError(
        f"plugin {registration.plugin!r} ({registration.distribution}): {did}; "
        "mend or uninstall it, or leave it out with EDGELLM_PLUGINS"
    )
