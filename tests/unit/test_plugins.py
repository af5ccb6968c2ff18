"""The plugin loader: isolation, version check, selection, report, and choosing by what is served."""

from __future__ import annotations

import types

import pytest
from coordinator_rig import Rig

import edgellm.plugins as plugins_module
from edgellm.builtin.base_endpoint import BaseEndpointPolicy
from edgellm.builtin.vanilla import VanillaDecoder
from edgellm.cache.policy import PublicationPolicy
from edgellm.cache.types import BaseStateKind, ContextCacheDeploymentProfile, SpecReuseContract
from edgellm.decoding.base import DecodingStrategy, StepTokens
from edgellm.errors import InvalidArgumentError, PluginError
from edgellm.hookspecs import API_VERSION, hookimpl
from edgellm.plugins import DecoderRegistrar, PluginStatus, PolicyRegistrar, load_plugins
from edgellm.testing.toy_runtime import ToyRuntime

ATTENTION = ContextCacheDeploymentProfile()
EAGLE = ContextCacheDeploymentProfile(spec_reuse_contract=SpecReuseContract(True, 1))
SHARED_KV = ContextCacheDeploymentProfile(spec_reuse_contract=SpecReuseContract(False, 0))
HYBRID = ContextCacheDeploymentProfile(base_state_kind=BaseStateKind.HYBRID)


def make_plugin(*, api=((1, 0), (1, 9)), policy=None, decoder=None, extra_hook=None):
    """A plugin module; `policy` and `decoder` are called with the registrar."""
    plugin = types.ModuleType("test_plugin")
    if api is not None:
        plugin.EDGELLM_API = api
    if policy is not None:

        @hookimpl
        def edgellm_register_publication_policies(register):
            policy(register)

        plugin.edgellm_register_publication_policies = edgellm_register_publication_policies
    if decoder is not None:

        @hookimpl
        def edgellm_register_decoders(register):
            decoder(register)

        plugin.edgellm_register_decoders = edgellm_register_decoders
    if extra_hook is not None:
        setattr(plugin, extra_hook, hookimpl(lambda: None))
    return plugin


class FakeEntryPoint:
    def __init__(self, name, load, distribution="edgellm-thing", version="2.5"):
        self.name = name
        self.load = load
        self.dist = types.SimpleNamespace(name=distribution, version=version)


@pytest.fixture
def install(monkeypatch):
    """Pretend that these entry points are installed."""

    def _install(*entry_points):
        def entry_points_of(*, group):
            assert group == "edgellm.plugins"
            return list(entry_points)

        monkeypatch.setattr(plugins_module.importlib.metadata, "entry_points", entry_points_of)

    monkeypatch.delenv("EDGELLM_PLUGINS", raising=False)
    monkeypatch.delenv("EDGELLM_PLUGINS_STRICT", raising=False)
    return _install


def report_of(plugins, name):
    (report,) = [report for report in plugins.reports if report.name == name]
    return report


def eagle_policy(register):
    register("eagle-spec", lambda coordinator: "eagle", lambda profile, spec: spec and profile.owns_paged_spec_state)


def test_builtins_register_through_the_same_hooks(install):
    install()
    plugins = load_plugins()
    assert [(report.name, report.status) for report in plugins.reports] == [
        ("base-endpoint", PluginStatus.BUILTIN),
        ("vanilla", PluginStatus.BUILTIN),
    ]
    assert report_of(plugins, "base-endpoint").hooks == ("edgellm_register_publication_policies",)
    assert report_of(plugins, "vanilla").hooks == ("edgellm_register_decoders",)
    assert report_of(plugins, "vanilla").api_range == ((1, 1), API_VERSION)
    assert plugins.choose_policy(ATTENTION, False).factory is BaseEndpointPolicy
    assert plugins.choose_decoder("vanilla").factory is VanillaDecoder


def test_installed_plugin_is_loaded_and_reported(install):
    install(FakeEntryPoint("eagle", lambda: make_plugin(policy=eagle_policy), "edgellm-eagle", "0.3"))
    plugins = load_plugins()
    report = report_of(plugins, "eagle")
    assert (report.distribution, report.version, report.status) == ("edgellm-eagle", "0.3", PluginStatus.LOADED)
    assert report.api_range == ((1, 0), (1, 9))
    assert report.hooks == ("edgellm_register_publication_policies",)
    assert report.reason == ""
    assert plugins.choose_policy(EAGLE, True).name == "eagle-spec"


def test_one_broken_plugin_does_not_take_the_others_down(install, caplog):
    def explode():
        raise ImportError("no module named broken_dependency")

    install(
        FakeEntryPoint("broken", explode, "edgellm-broken", "1.0"),
        FakeEntryPoint("eagle", lambda: make_plugin(policy=eagle_policy)),
    )
    plugins = load_plugins()
    broken = report_of(plugins, "broken")
    assert broken.status is PluginStatus.FAILED
    assert broken.reason == "ImportError: no module named broken_dependency"
    assert report_of(plugins, "eagle").status is PluginStatus.LOADED
    assert "edgellm-broken 1.0" in caplog.text


@pytest.mark.parametrize("api", [((2, 0), (2, 9)), ((0, 1), (0, 9)), ((1, 4), (1, 9))])
def test_version_outside_the_stated_range_is_refused_before_registration(install, api):
    calls = []
    install(FakeEntryPoint("old", lambda: make_plugin(api=api, policy=calls.append)))
    plugins = load_plugins()
    report = report_of(plugins, "old")
    assert report.status is PluginStatus.FAILED
    assert str(API_VERSION) in report.reason
    assert report.hooks == ()
    assert calls == []


@pytest.mark.parametrize(
    ("api", "words"), [(None, "states no EDGELLM_API"), ("1.0", "must be"), (((1,), (2,)), "must be")]
)
def test_missing_or_malformed_version_is_refused(install, api, words):
    install(FakeEntryPoint("odd", lambda: make_plugin(api=api, policy=eagle_policy)))
    report = report_of(load_plugins(), "odd")
    assert report.status is PluginStatus.FAILED
    assert words in report.reason


def test_unknown_hook_is_found_and_the_plugin_unregistered(install):
    install(
        FakeEntryPoint("typo", lambda: make_plugin(policy=eagle_policy, extra_hook="edgellm_register_polices")),
        FakeEntryPoint("zgood", lambda: make_plugin(policy=eagle_policy)),
    )
    plugins = load_plugins()
    typo = report_of(plugins, "typo")
    assert typo.status is PluginStatus.FAILED
    assert "edgellm_register_polices" in typo.reason
    # Had "typo" stayed registered, its policy name would collide with this one's, and the check would fail again.
    assert report_of(plugins, "zgood").status is PluginStatus.LOADED


def test_wrong_hook_arguments_are_refused(install):
    plugin = make_plugin()

    @hookimpl
    def edgellm_register_decoders(registrar_with_a_wrong_name):
        raise AssertionError("never called")

    plugin.edgellm_register_decoders = edgellm_register_decoders
    install(FakeEntryPoint("wrong", lambda: plugin), FakeEntryPoint("xgood", lambda: make_plugin(policy=eagle_policy)))
    plugins = load_plugins()
    assert report_of(plugins, "wrong").status is PluginStatus.FAILED
    assert report_of(plugins, "xgood").status is PluginStatus.LOADED


def test_plugin_that_raises_after_registering_leaves_nothing_behind(install):
    def register_then_raise(register):
        register("half", lambda coordinator: None, lambda profile, spec: True, priority=99)
        raise RuntimeError("changed my mind")

    install(FakeEntryPoint("half", lambda: make_plugin(policy=register_then_raise)))
    plugins = load_plugins()
    assert report_of(plugins, "half").reason == "RuntimeError: changed my mind"
    assert [policy.name for policy in plugins.policies] == ["base-endpoint"]
    assert plugins.choose_policy(ATTENTION, False).name == "base-endpoint"


def test_plugin_without_hooks_is_refused(install):
    install(FakeEntryPoint("empty", lambda: make_plugin()))
    assert "implements no hook" in report_of(load_plugins(), "empty").reason


def test_duplicate_name_is_refused_and_names_the_owner(install):
    def again(register):
        register("base-endpoint", lambda coordinator: None, lambda profile, spec: True)

    install(FakeEntryPoint("again", lambda: make_plugin(policy=again)))
    report = report_of(load_plugins(), "again")
    assert report.status is PluginStatus.FAILED
    assert "already registered by 'base-endpoint'" in report.reason


def test_environment_selects_by_name(install, monkeypatch):
    install(
        FakeEntryPoint("a", lambda: make_plugin(policy=eagle_policy)),
        FakeEntryPoint("b", lambda: pytest.fail("b is not selected and must not be imported")),
    )
    monkeypatch.setenv("EDGELLM_PLUGINS", "a")
    plugins = load_plugins()
    assert [(report.name, report.status.value) for report in plugins.reports] == [
        ("base-endpoint", "builtin"),
        ("vanilla", "builtin"),
        ("a", "loaded"),
        ("b", "skipped"),
    ]
    assert report_of(plugins, "b").reason == "not named in EDGELLM_PLUGINS"


def test_empty_selection_loads_none_but_keeps_the_builtins(install, monkeypatch):
    install(FakeEntryPoint("a", lambda: pytest.fail("must not be imported")))
    monkeypatch.setenv("EDGELLM_PLUGINS", "")
    plugins = load_plugins()
    assert [report.status.value for report in plugins.reports] == ["builtin", "builtin", "skipped"]
    assert plugins.choose_decoder("vanilla").name == "vanilla"


def test_selected_but_not_installed_is_reported(install, monkeypatch):
    install()
    monkeypatch.setenv("EDGELLM_PLUGINS", "ghost")
    report = report_of(load_plugins(), "ghost")
    assert report.status is PluginStatus.FAILED
    assert "no plugin of that name is installed (installed: none)" in report.reason


def test_strict_raises_with_distribution_and_reason(install, monkeypatch):
    install(FakeEntryPoint("old", lambda: make_plugin(api=((2, 0), (2, 0)), policy=eagle_policy), "edgellm-old", "7"))
    monkeypatch.setenv("EDGELLM_PLUGINS_STRICT", "1")
    with pytest.raises(PluginError, match=r"'old' \(edgellm-old 7\): it was built for API"):
        load_plugins()


@pytest.mark.parametrize(
    ("profile", "speculative", "distribution"),
    [
        (EAGLE, True, "edgellm-eagle"),
        (SHARED_KV, True, "edgellm-shared-kv"),
        (HYBRID, False, "edgellm-hybrid"),
        (ContextCacheDeploymentProfile(HYBRID.base_state_kind, EAGLE.spec_reuse_contract), True, "edgellm-hybrid"),
    ],
)
def test_missing_policy_names_the_distribution(install, profile, speculative, distribution):
    install()
    with pytest.raises(PluginError, match=rf"pip install \./plugins/{distribution}\)$"):
        load_plugins().choose_policy(profile, speculative)


def test_missing_decoder_names_the_distribution(install):
    install()
    known = r"kind 'eagle' \(installed kinds: vanilla\)"
    with pytest.raises(PluginError, match=rf"{known}; .*pip install \./plugins/edgellm-eagle\)$"):
        load_plugins().choose_decoder("eagle")
    with pytest.raises(PluginError, match="choose one of those installed"):
        load_plugins().choose_decoder("nonsense")


def test_priority_decides_and_ties_go_to_the_first(install):
    def own(priority, name):
        def hook(register):
            register(name, lambda coordinator: None, lambda profile, spec: not spec, priority)

        return hook

    install(
        FakeEntryPoint("a", lambda: make_plugin(policy=own(0, "tied"))),
        FakeEntryPoint("b", lambda: make_plugin(policy=own(-1, "lower"))),
    )
    assert load_plugins().choose_policy(ATTENTION, False).name == "base-endpoint"
    install(FakeEntryPoint("c", lambda: make_plugin(policy=own(1, "higher"))))
    assert load_plugins().choose_policy(ATTENTION, False).name == "higher"


def test_policy_chosen_by_serves_not_by_priority_alone(install):
    def hook(register):
        register("eagle-spec", lambda coordinator: None, lambda profile, spec: spec, priority=50)

    install(FakeEntryPoint("eagle", lambda: make_plugin(policy=hook)))
    plugins = load_plugins()
    assert plugins.choose_policy(EAGLE, False).name == "base-endpoint"
    assert plugins.choose_policy(EAGLE, True).name == "eagle-spec"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("", lambda c: None, lambda p, s: True), "name is ''"),
        (("x", "not callable", lambda p, s: True), "must be callable"),
        (("x", lambda c: None, True), "must be callable"),
        (("x", lambda c: None, lambda p, s: True, "high"), "must be an integer"),
    ],
)
def test_policy_registrar_checks_at_once(arguments, words):
    with pytest.raises(InvalidArgumentError, match=words):
        PolicyRegistrar("me")(*arguments)


def test_decoder_registrar_checks_kind_and_duplicates():
    register = DecoderRegistrar("me")
    register("one", VanillaDecoder, "vanilla")
    with pytest.raises(InvalidArgumentError, match="already registered by 'me'"):
        register("one", VanillaDecoder, "vanilla")
    with pytest.raises(InvalidArgumentError, match="has kind ''"):
        register("two", VanillaDecoder, "")
    assert [decoder.name for decoder in register.added] == ["one"]


def test_extra_plugins_need_no_installation(install):
    install()
    plugins = load_plugins(extra=[("mine", make_plugin(policy=eagle_policy))], autoload=False)
    assert report_of(plugins, "mine").distribution == "local"
    assert plugins.choose_policy(EAGLE, True).plugin == "mine"


def test_vanilla_runs_one_forward_and_samples_the_selected_rows():
    import numpy as np
    import torch

    calls = []

    class Recorder:
        def forward(self, batch):
            calls.append("forward")
            return torch.tensor([[0.0, 1.0], [1.0, 0.0]])

        def sample(self, logits, rows):
            calls.append("sample")
            assert logits.shape == (2, 2)
            return types.SimpleNamespace(token_ids=logits.argmax(-1).tolist(), logprobs=[None, "lp"], errors={1: "why"})

    recorder, decoder = Recorder(), VanillaDecoder()
    assert isinstance(decoder, DecodingStrategy)
    batch = types.SimpleNamespace(query_len=np.array([3, 1, 1], np.int32))
    step = decoder.run_step(recorder, batch, recorder, ["row0", "row1"])
    assert step == StepTokens(token_ids=[[1], [0]], committed=[3, 1, 1], logprobs=[None, ["lp"]], errors={1: "why"})
    assert calls == ["forward", "sample"]
    step = decoder.run_step(recorder, batch, recorder, [])
    assert step == StepTokens(token_ids=[], committed=[3, 1, 1], logprobs=[])
    assert calls == ["forward", "sample", "forward"]


# --- plugins that load and misbehave later -------------------------------------------------------------------

FACTORY = "the factory of publication policy 'x'"


class NamelessPolicy(BaseEndpointPolicy):
    name = None


class HalfPolicy(PublicationPolicy):
    """Abstract methods are missing."""


def leave(*_):
    raise SystemExit(3)


def with_policy(install, factory, serves=lambda profile, spec: not spec):
    def hook(register):
        register("x", factory, serves, priority=10)

    install(FakeEntryPoint("mine", lambda: make_plugin(policy=hook), "edgellm-mine", "1.2"))
    return load_plugins()


def with_decoder(install, factory):
    def hook(register):
        register("y", factory, "vanilla", priority=10)

    install(FakeEntryPoint("mine", lambda: make_plugin(decoder=hook), "edgellm-mine", "1.2"))
    return load_plugins()


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (lambda coordinator: 1 / 0, f"{FACTORY} raised ZeroDivisionError: division by zero"),
        (leave, f"{FACTORY} raised SystemExit: 3"),
        (lambda coordinator: None, f"{FACTORY} returned None; a PublicationPolicy is needed"),
        (lambda: None, f"{FACTORY} raised TypeError"),
        (HalfPolicy, f"{FACTORY} raised TypeError"),
        (NamelessPolicy, "publication policy 'x' has the name None; text is needed"),
    ],
)
def test_a_broken_policy_factory_is_named_when_the_coordinator_is_built(install, factory, words):
    plugins = with_policy(install, factory)
    with pytest.raises(PluginError) as caught:
        Rig(policies=plugins.policies)
    assert str(caught.value).startswith(f"plugin 'mine' (edgellm-mine 1.2): {words}")
    assert str(caught.value).endswith("; mend or uninstall it, or leave it out with EDGELLM_PLUGINS")


@pytest.mark.parametrize(
    ("serves", "words"),
    [
        (lambda profile, spec: 1 / 0, "raised ZeroDivisionError: division by zero"),
        (lambda profile, spec: "x", "returned 'x'; True or False is needed"),
        (lambda profile, spec: None, "returned None; True or False is needed"),
        (lambda: True, "raised TypeError"),
        (leave, "raised SystemExit: 3"),
    ],
)
def test_a_broken_serves_is_named(install, serves, words):
    plugins = with_policy(install, BaseEndpointPolicy, serves)
    with pytest.raises(PluginError) as caught:
        plugins.choose_policy(ATTENTION, False)
    assert f"plugin 'mine' (edgellm-mine 1.2): `serves` of publication policy 'x' {words}" in str(caught.value)


def test_a_factory_that_breaks_later_is_named_and_leaks_nothing(install):
    built = []

    def once(coordinator):
        if built:
            raise RuntimeError("only once")
        built.append(BaseEndpointPolicy(coordinator))
        return built[0]

    rig = Rig(policies=with_policy(install, once).policies)
    with pytest.raises(PluginError, match=r"'mine' \(edgellm-mine 1.2\): the factory.* raised RuntimeError: only once"):
        rig.begin(rig.admission([1, 2, 3], 0))
    assert rig.coordinator.active_requests == 0


def test_interrupting_a_factory_interrupts(install):
    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Rig(policies=with_policy(install, interrupt).policies)


class BadHeadroom(VanillaDecoder):
    def required_kv_headroom(self):
        return 1


class BadCapabilities(VanillaDecoder):
    def capabilities(self):
        raise OSError("no device")


class BadName(VanillaDecoder):
    name = 7


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (lambda: None, "the factory of decoder 'y' returned None; a DecodingStrategy is needed"),
        (lambda: 1 / 0, "the factory of decoder 'y' raised ZeroDivisionError: division by zero"),
        (leave, "the factory of decoder 'y' raised"),
        (DecodingStrategy, "the factory of decoder 'y' raised TypeError"),
        (BadName, "decoder 'y' has the name 7; text is needed"),
        (BadHeadroom, "required_kv_headroom of decoder 'y' returned 1; a DecodingKvHeadroom is needed"),
        (BadCapabilities, "capabilities of decoder 'y' raised OSError: no device"),
    ],
)
def test_a_broken_decoder_is_named_when_the_runtime_is_built(install, factory, words):
    plugins = with_decoder(install, factory)
    with pytest.raises(PluginError) as caught:
        ToyRuntime(plugins=plugins)
    assert str(caught.value).startswith(f"plugin 'mine' (edgellm-mine 1.2): {words}")


def test_a_hook_that_exits_is_left_out(install):
    install(FakeEntryPoint("a", lambda: make_plugin(policy=leave)), FakeEntryPoint("b", leave))
    plugins = load_plugins()
    assert report_of(plugins, "a").reason == "SystemExit: 3"
    assert report_of(plugins, "b").status is PluginStatus.FAILED
    assert plugins.choose_policy(ATTENTION, False).name == "base-endpoint"


def test_a_hook_that_is_interrupted_interrupts(install):
    def interrupt(register):
        raise KeyboardInterrupt

    install(FakeEntryPoint("a", lambda: make_plugin(policy=interrupt)))
    with pytest.raises(KeyboardInterrupt):
        load_plugins()


def test_an_error_that_cannot_be_shown_is_reported_all_the_same(install):
    class Unspeakable(Exception):
        def __str__(self):
            raise ValueError("no words")

    def hook(register):
        raise Unspeakable

    install(FakeEntryPoint("a", lambda: make_plugin(policy=hook)))
    assert report_of(load_plugins(), "a").reason == "Unspeakable"


def test_a_built_in_may_be_named_in_the_selection() -> None:
    plugins = load_plugins(selection=("vanilla",), strict=True)
    assert [report.name for report in plugins.reports if report.status is PluginStatus.FAILED] == []
    assert "vanilla" in [report.name for report in plugins.reports]
