"""Calls into what plugins registered: whatever they raise or return, the error names the plugin and what it did."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from edgellm.cache.types import (
    ContextCacheDeploymentProfile,
    DecodingKvHeadroom,
    DecodingTokenStateContract,
    SpecReuseContract,
)
from edgellm.decoding.base import DecoderCapabilities, DecodingStrategy
from edgellm.errors import FOREIGN_ERRORS, CallerError, PluginError
from edgellm.foreign import describe_error

if TYPE_CHECKING:
    from edgellm.cache.coordinator import ContextCacheCoordinator
    from edgellm.cache.policy import PublicationPolicy
    from edgellm.decoding.options import DecoderChoice, DecoderContext
    from edgellm.plugins import DecoderRegistration, PolicyRegistration

ResultT = TypeVar("ResultT")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


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


def check_fits(registration: DecoderRegistration, choice: DecoderChoice) -> None:
    """Let the decoder refuse a model or options that it can tell from their configs.

    Raises:
        PluginError: its `fits` is broken.
        EdgeLLMError: it refused (`CallerError`).
    """
    if registration.fits is None:
        return
    try:
        registration.fits(choice)
    except CallerError:
        raise
    except FOREIGN_ERRORS as error:
        what = f"`fits` of decoder {registration.name!r}"
        raise _fault(registration, f"{what} raised {describe_error(error)}") from error


def build_decoder(registration: DecoderRegistration, context: DecoderContext | None = None) -> DecodingStrategy:
    """A new decoder, whose statements about itself are of the right types.

    Args:
        context: for factories that take one; None where no model is at hand (tests, the toy model).
    Raises:
        PluginError: the factory raised, or returned something that is no usable decoder.
        EdgeLLMError: the factory refused what the caller asked for (`CallerError`).
    """
    what = f"decoder {registration.name!r}"
    make = partial(_make, registration.factory, context)
    try:
        decoder = _call(registration, f"the factory of {what}", make, DecodingStrategy, "a DecodingStrategy")
    except PluginError as error:
        if context is not None and isinstance(error.__cause__, CallerError):
            raise error.__cause__ from None  # a draft that is missing or does not fit is no fault of the plugin
        raise
    _check_name(registration, what, lambda: decoder.name)
    statements: dict[str, tuple[type[Any], ...]] = {
        "capabilities": (DecoderCapabilities,),
        "required_kv_headroom": (DecodingKvHeadroom,),
        "token_state_contract": (DecodingTokenStateContract,),
        "spec_reuse_contract": (SpecReuseContract, type(None)),
        "draft_bytes_per_page": (int,),
        "boundary_hidden_width": (int,),
    }
    for method, types in statements.items():
        needed = f"a {types[0].__name__}{' or None' if len(types) > 1 else ''}"
        _call(registration, f"{method} of {what}", getattr(decoder, method), types, needed)
    return decoder


def _make(factory: Callable[..., Any], context: DecoderContext | None) -> Any:
    """What the factory gives; it may take the context, or nothing."""
    if context is None or not _takes_argument(factory):
        return factory()
    return factory(context)


def _takes_argument(factory: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # a builtin
        return False
    return any(parameter.kind in _POSITIONAL and parameter.default is parameter.empty for parameter in parameters)


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
