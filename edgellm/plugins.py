"""Discovery, version check, isolation and report of plugins; choosing a policy or decoder.

Hooks run once, here, and only register.  One broken plugin is skipped and listed, never fatal, unless
`EDGELLM_PLUGINS_STRICT=1`.  Built-ins register through the same hooks and always stay.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import pluggy

from edgellm import envs, plugin_guard
from edgellm.cache.types import ContextCacheDeploymentProfile
from edgellm.errors import FOREIGN_ERRORS, InvalidArgumentError, PluginError
from edgellm.foreign import describe_error
from edgellm.hookspecs import API_VERSION, ENTRY_POINT_GROUP, HookSpecs
from edgellm.log import get_logger
from edgellm.shipped import CheckpointRegistrar, ShippedCheckpoint

if TYPE_CHECKING:
    from edgellm.decoding.options import DecoderChoice

logger = get_logger(__name__)

ApiVersion = tuple[int, int]
ServesPredicate = Callable[[ContextCacheDeploymentProfile, bool], bool]

DISTRIBUTION_OF_DECODER = {
    "eagle": "edgellm-eagle",
    "mtp": "edgellm-hybrid",
    "shared_kv_mtp": "edgellm-shared-kv",
    "prompt_lookup": "edgellm-lookup",
}


class PluginStatus(Enum):
    BUILTIN = "builtin"
    LOADED = "loaded"
    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class PluginReport:
    """One line of `edgellm plugins`.

    Attributes:
        api_range: lowest and highest API version the plugin states, or None when unknown.
        hooks: names of the hooks it implements.
        distribution, version: of the package that brings it; empty for a name that no installed plugin has.
        reason: why it was skipped or failed; empty otherwise.
    """

    name: str
    distribution: str
    version: str
    api_range: tuple[ApiVersion, ApiVersion] | None
    hooks: tuple[str, ...]
    status: PluginStatus
    reason: str = ""

    @property
    def remedy(self) -> str:
        """How an installed plugin that is left out comes to serve; empty where it serves."""
        installed = f"package {self.distribution} is installed, and"
        if self.status is PluginStatus.SKIPPED:
            left_out = f"EDGELLM_PLUGINS leaves out its plugin {self.name!r}"
            return f"{installed} {left_out}: add that name, or unset the variable"
        if self.status is PluginStatus.FAILED:
            return f"{installed} its plugin {self.name!r} is left out: {self.reason}"
        return ""


@dataclass(frozen=True, slots=True)
class PolicyRegistration:
    """One registered policy.  `distribution` is name and version of what brought the plugin, for messages."""

    name: str
    factory: Callable[..., Any]
    serves: ServesPredicate
    priority: int
    plugin: str
    distribution: str = "unknown"


@dataclass(frozen=True, slots=True)
class DecoderRegistration:
    """One registered decoder.  `distribution` as in `PolicyRegistration`; `fits` is asked before weights are read."""

    name: str
    factory: Callable[..., Any]
    kind: str
    priority: int
    plugin: str
    distribution: str = "unknown"
    fits: Callable[[DecoderChoice], None] | None = None


RegistrationT = TypeVar("RegistrationT", PolicyRegistration, DecoderRegistration)


def _check_registration(what: str, name: object, factory: object, priority: object) -> None:
    if not isinstance(name, str) or not name:
        raise InvalidArgumentError(f"{what} name is {name!r}; it must be non-empty text")
    if not callable(factory):
        raise InvalidArgumentError(f"{what} {name!r} has factory {factory!r}; it must be callable")
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidArgumentError(f"{what} {name!r} has priority {priority!r}; it must be an integer")


def _require_new_name(what: str, name: str, known: Iterable[PolicyRegistration | DecoderRegistration]) -> None:
    for other in known:
        if other.name == name:
            raise InvalidArgumentError(f"{what} {name!r} is already registered by {other.plugin!r}; rename it")


class PolicyRegistrar:
    """The callback of `edgellm_register_publication_policies`; checks at the moment of registration."""

    def __init__(self, plugin: str, known: Iterable[PolicyRegistration] = (), *, distribution: str = "unknown") -> None:
        self._plugin = plugin
        self._distribution = distribution
        self._known = list(known)
        self.added: list[PolicyRegistration] = []

    def __call__(self, name: str, factory: Callable[..., Any], serves: ServesPredicate, priority: int = 0) -> None:
        """Register one policy.

        Raises:
            InvalidArgumentError: wrong types, or the name is taken.
        """
        _check_registration("publication policy", name, factory, priority)
        if not callable(serves):
            raise InvalidArgumentError(f"publication policy {name!r} has serves {serves!r}; it must be callable")
        _require_new_name("publication policy", name, [*self._known, *self.added])
        self.added.append(PolicyRegistration(name, factory, serves, priority, self._plugin, self._distribution))


class DecoderRegistrar:
    """The callback of `edgellm_register_decoders`; checks at the moment of registration."""

    def __init__(
        self, plugin: str, known: Iterable[DecoderRegistration] = (), *, distribution: str = "unknown"
    ) -> None:
        self._plugin = plugin
        self._distribution = distribution
        self._known = list(known)
        self.added: list[DecoderRegistration] = []

    def __call__(
        self,
        name: str,
        factory: Callable[..., Any],
        kind: str,
        priority: int = 0,
        *,
        fits: Callable[[DecoderChoice], None] | None = None,
    ) -> None:
        """Register one decoder.

        Args:
            fits: called with a `DecoderChoice` before the model's weights are read; raises what the factory would
                raise, where config and options alone tell.
        Raises:
            InvalidArgumentError: wrong types, or the name is taken.
        """
        _check_registration("decoder", name, factory, priority)
        if not isinstance(kind, str) or not kind:
            raise InvalidArgumentError(f"decoder {name!r} has kind {kind!r}; it must be non-empty text")
        if fits is not None and not callable(fits):
            raise InvalidArgumentError(f"decoder {name!r} has fits {fits!r}; it must be callable")
        _require_new_name("decoder", name, [*self._known, *self.added])
        self.added.append(DecoderRegistration(name, factory, kind, priority, self._plugin, self._distribution, fits))


def _by_priority(registrations: Iterable[RegistrationT]) -> list[RegistrationT]:
    return sorted(registrations, key=lambda registration: -registration.priority)  # stable: first registered wins


def how_to_get(distribution: str, reports: Iterable[PluginReport] = ()) -> str:
    """What to do for what a distribution of ours registers, as an imperative without a full stop.

    Args:
        reports: of the plugins that are installed: one may only be left out.
    """
    remedies = (report.remedy for report in reports if report.distribution == distribution)
    install = f"install package {distribution} (in the source tree of edgellm: pip install ./plugins/{distribution})"
    return next(filter(None, remedies), install)


def missing_policy_distribution(profile: ContextCacheDeploymentProfile, speculative_request: bool) -> str | None:
    """The distribution that brings the policy such a request needs; None when no distribution of ours does."""
    if profile.uses_checkpoint_reuse:
        served = not speculative_request or profile.is_hybrid
        return "edgellm-hybrid" if served else None
    if not speculative_request:
        return "edgellm"
    return "edgellm-eagle" if profile.owns_paged_spec_state else "edgellm-shared-kv"


@dataclass(slots=True)
class Plugins:
    """What was registered, and a report line for every plugin seen."""

    policies: list[PolicyRegistration] = field(default_factory=list)
    decoders: list[DecoderRegistration] = field(default_factory=list)
    shipped: list[ShippedCheckpoint] = field(default_factory=list)
    reports: list[PluginReport] = field(default_factory=list)

    def choose_policy(self, profile: ContextCacheDeploymentProfile, speculative_request: bool) -> PolicyRegistration:
        """The first match in order of priority, then of registration.

        Raises:
            PluginError: nobody serves it (the message names the distribution to install, or what leaves it out), or a
                `serves` is broken.
        """
        return choose_policy(self.policies, profile, speculative_request, self.reports)

    def require_policies(self, profile: ContextCacheDeploymentProfile) -> None:
        """Whether every kind of request of a deployment is served.

        Raises: as `choose_policy`.
        """
        for speculative_request in sorted({False, profile.is_speculative}):
            self.choose_policy(profile, speculative_request)

    def choose_decoder(self, kind: str) -> DecoderRegistration:
        """The decoder of a kind with the highest priority.

        Raises:
            PluginError: nobody serves it; the message names the distribution to install, or what leaves it out.
        """
        for registration in _by_priority(self.decoders):
            if registration.kind == kind:
                return registration
        known = sorted({registration.kind for registration in self.decoders})
        distribution = DISTRIBUTION_OF_DECODER.get(kind)
        remedy = how_to_get(distribution, self.reports) if distribution else "choose one of those installed"
        raise PluginError(f"no installed decoder is of kind {kind!r} (installed kinds: {', '.join(known)}); {remedy}")


def choose_policy(
    registrations: Iterable[PolicyRegistration],
    profile: ContextCacheDeploymentProfile,
    speculative_request: bool,
    reports: Iterable[PluginReport] = (),
) -> PolicyRegistration:
    """See `Plugins.choose_policy`."""
    ordered = _by_priority(registrations)
    for registration in ordered:
        if plugin_guard.serves(registration, profile, speculative_request):
            return registration
    flavour = f"{'speculative' if speculative_request else 'plain'} requests on {profile.base_state_kind.value} models"
    names = ", ".join(registration.name for registration in ordered) or "none"
    distribution = missing_policy_distribution(profile, speculative_request)
    remedy = how_to_get(distribution, reports) if distribution else "use another decoder with this model"
    raise PluginError(f"no installed publication policy serves {flavour} (installed: {names}); {remedy}")


class _Found(NamedTuple):
    """One plugin before it is loaded."""

    name: str
    distribution: str
    version: str
    load: Callable[[], Any]

    @property
    def origin(self) -> str:
        """Name and version of what brings it; empty where nothing does."""
        return f"{self.distribution} {self.version}".strip()


def _builtins() -> list[_Found]:
    from edgellm.builtin import base_endpoint, vanilla

    version = _own_version()
    return [
        _Found("base-endpoint", "edgellm", version, lambda: base_endpoint),
        _Found("vanilla", "edgellm", version, lambda: vanilla),
    ]


def _own_version() -> str:
    try:
        return importlib.metadata.version("edgellm")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"


def _installed() -> list[_Found]:
    found = []
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        dist = entry_point.dist
        name, version = (dist.name, dist.version) if dist is not None else ("unknown", "")
        found.append(_Found(entry_point.name, name, version, entry_point.load))
    return sorted(found, key=lambda plugin: plugin.name)


def _stated_api_range(plugin: object) -> tuple[ApiVersion, ApiVersion]:
    """The plugin's `EDGELLM_API`; raises PluginError when absent, malformed or not covering ours."""
    stated = getattr(plugin, "EDGELLM_API", None)
    if stated is None:
        raise PluginError(f"it states no EDGELLM_API range; ours is {API_VERSION}: add EDGELLM_API = ((1, 1), (1, 3))")
    try:
        low, high = (tuple(int(part) for part in bound) for bound in stated)
        if len(low) != 2 or len(high) != 2:
            raise ValueError
    except (TypeError, ValueError):
        raise PluginError(f"its EDGELLM_API is {stated!r}; it must be ((major, minor), (major, minor))") from None
    return (low[0], low[1]), (high[0], high[1])


def _check_api_range(api_range: tuple[ApiVersion, ApiVersion]) -> None:
    low, high = api_range
    if not low <= API_VERSION <= high:
        raise PluginError(
            f"it was built for API {low} to {high} and this edgellm has {API_VERSION}; install a matching version of it"
        )


class _Loader:
    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._manager = pluggy.PluginManager("edgellm")
        self._manager.add_hookspecs(HookSpecs)
        self.plugins = Plugins()

    def load(self, found: _Found, *, builtin: bool) -> None:
        """Load, check, register and collect one plugin; on any failure leave no trace but a report line."""
        plugin: Any = None
        api_range: tuple[ApiVersion, ApiVersion] | None = None
        hooks: tuple[str, ...] = ()
        try:
            plugin = found.load()
            api_range = _stated_api_range(plugin)
            _check_api_range(api_range)
            self._manager.register(plugin, name=found.name)
            hooks = self._hooks_of(plugin)
            self._manager.check_pending()
            if not hooks:
                raise PluginError("it implements no hook; mark at least one function with edgellm.hookspecs.hookimpl")
            self._collect(plugin, found)
        except FOREIGN_ERRORS as error:  # a plugin may raise anything, and must not take the others down
            if builtin:
                raise
            self._fail(found, plugin, api_range, hooks, error)
            return
        status = PluginStatus.BUILTIN if builtin else PluginStatus.LOADED
        self._report(found, api_range, hooks, status)

    def skip(self, found: _Found) -> None:
        self._report(found, None, (), PluginStatus.SKIPPED, "not named in EDGELLM_PLUGINS")

    def missing(self, name: str, known: Iterable[str]) -> None:
        names = ", ".join(sorted(known)) or "none"
        error = PluginError(
            f"EDGELLM_PLUGINS names it, and no plugin of that name is installed (installed: {names}); install it, or "
            "mend the list"
        )
        self._fail(_Found(name, "", "", lambda: None), None, None, (), error)

    def _hooks_of(self, plugin: Any) -> tuple[str, ...]:
        return tuple(sorted(caller.name for caller in self._manager.get_hookcallers(plugin) or ()))

    def _collect(self, plugin: Any, found: _Found) -> None:
        """Run this plugin's hooks alone; keep what it registered only when all of them succeed."""
        others = [other for other in self._manager.get_plugins() if other is not plugin]
        distribution = found.origin
        policies = PolicyRegistrar(found.name, self.plugins.policies, distribution=distribution)
        decoders = DecoderRegistrar(found.name, self.plugins.decoders, distribution=distribution)
        shipped = CheckpointRegistrar(found.name, self.plugins.shipped, distribution=distribution)
        self._manager.subset_hook_caller("edgellm_register_publication_policies", others)(register=policies)
        self._manager.subset_hook_caller("edgellm_register_decoders", others)(register=decoders)
        self._manager.subset_hook_caller("edgellm_register_checkpoints", others)(register=shipped)
        self.plugins.policies += policies.added
        self.plugins.decoders += decoders.added
        self.plugins.shipped += shipped.added

    def _fail(
        self,
        found: _Found,
        plugin: Any,
        api_range: tuple[ApiVersion, ApiVersion] | None,
        hooks: tuple[str, ...],
        error: BaseException,
    ) -> None:
        if plugin is not None and self._manager.is_registered(plugin):
            self._manager.unregister(plugin)
        reason = str(error) if isinstance(error, PluginError) else describe_error(error)
        origin = f" ({found.origin})" if found.origin else ""
        logger.warning("plugin %s%s is left out: %s", found.name, origin, reason)
        if self._strict:
            raise PluginError(f"plugin {found.name!r}{origin}: {reason}") from error
        self._report(found, api_range, hooks, PluginStatus.FAILED, reason)

    def _report(
        self,
        found: _Found,
        api_range: tuple[ApiVersion, ApiVersion] | None,
        hooks: tuple[str, ...],
        status: PluginStatus,
        reason: str = "",
    ) -> None:
        self.plugins.reports.append(
            PluginReport(found.name, found.distribution, found.version, api_range, hooks, status, reason)
        )


def load_plugins(
    *,
    extra: Iterable[tuple[str, Any]] = (),
    selection: tuple[str, ...] | None = None,
    strict: bool | None = None,
    autoload: bool = True,
) -> Plugins:
    """Load the built-ins, then the installed plugins, then `extra`.

    Args:
        extra: (name, plugin object) pairs that are not installed, for tests and embedding applications.
        selection: entry point names to load; None reads `EDGELLM_PLUGINS` (unset means all).  Built-ins are
            always loaded, named or not.
        strict: raise on the first failure; None reads `EDGELLM_PLUGINS_STRICT`.
        autoload: False looks at no installed plugin.
    Raises:
        PluginError: strict only; names plugin, distribution and reason.
        InvalidArgumentError: an environment variable has a value that means nothing.
    """
    envs.check_values()
    loader = _Loader(strict=envs.plugins_strict() if strict is None else strict)
    builtins = _builtins()
    for found in builtins:
        loader.load(found, builtin=True)
    wanted = envs.plugin_selection() if selection is None else selection
    installed = _installed() if autoload else []
    for found in installed:
        if wanted is None or found.name in wanted:
            loader.load(found, builtin=False)
        else:
            loader.skip(found)
    if autoload and wanted is not None:
        for name in sorted(set(wanted) - {found.name for found in (*installed, *builtins)}):
            loader.missing(name, (found.name for found in installed))
    for name, plugin in extra:
        loader.load(_Found(name, "local", "0", lambda plugin=plugin: plugin), builtin=False)  # type: ignore[misc]
    return loader.plugins
