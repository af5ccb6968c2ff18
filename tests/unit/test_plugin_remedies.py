"""What an error says to do where no plugin serves: install a package, or let in one that is installed."""

from __future__ import annotations

import logging
import types

import pytest
from typer.testing import CliRunner

from edgellm import cli
from edgellm.cache.types import BaseStateKind, ContextCacheDeploymentProfile, SpecReuseContract
from edgellm.errors import PluginError
from edgellm.hookspecs import API_VERSION, hookimpl
from edgellm.plugins import Plugins, load_plugins

LOOKUP = ContextCacheDeploymentProfile(spec_reuse_contract=SpecReuseContract(False, 0))
HYBRID = ContextCacheDeploymentProfile(base_state_kind=BaseStateKind.HYBRID)
IN_THE_TREE = "(in the source tree of edgellm: pip install ./plugins/"


class EntryPoint:
    """An installed plugin, as the standard library shows it."""

    def __init__(self, name: str, *, decoder: tuple[str, str] = ("a", "b"), api: object = API_VERSION) -> None:
        self.name = name
        self.dist = types.SimpleNamespace(name=f"edgellm-{name}", version="2.5")
        self._decoder = decoder
        self._api = api

    def load(self) -> object:
        plugin = types.ModuleType(self.name)
        plugin.EDGELLM_API = (self._api, self._api)  # type: ignore[attr-defined]
        name, kind = self._decoder

        @hookimpl
        def edgellm_register_decoders(register: object) -> None:
            register(name, lambda: None, kind)  # type: ignore[operator]

        plugin.edgellm_register_decoders = edgellm_register_decoders  # type: ignore[attr-defined]
        return plugin


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All the plugins of the project, as far as their entry points go."""
    monkeypatch.delenv("EDGELLM_PLUGINS", raising=False)
    entries = [
        EntryPoint("eagle", decoder=("eagle3", "eagle")),
        EntryPoint("hybrid", decoder=("hybrid-mtp", "mtp")),
        EntryPoint("lookup", decoder=("prompt-lookup", "prompt_lookup")),
        EntryPoint("shared-kv", decoder=("shared-kv-mtp", "shared_kv_mtp"), api=(7, 0)),
    ]
    monkeypatch.setattr("edgellm.plugins.importlib.metadata.entry_points", lambda *, group: entries)


def refusal(loaded: Plugins, wanted: str | ContextCacheDeploymentProfile) -> str:
    """The error for a kind of decoder, or for the policies of a profile."""
    ask = loaded.choose_decoder if isinstance(wanted, str) else loaded.require_policies
    with pytest.raises(PluginError) as caught:
        ask(wanted)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize(
    ("wanted", "package"), [("eagle", "edgellm-eagle"), (LOOKUP, "edgellm-shared-kv"), (HYBRID, "edgellm-hybrid")]
)
def test_a_package_that_is_not_installed_is_named_with_its_folder(wanted: object, package: str) -> None:
    message = refusal(load_plugins(autoload=False), wanted)  # type: ignore[arg-type]
    assert message.endswith(f"; install package {package} {IN_THE_TREE}{package})")


@pytest.mark.parametrize(
    ("wanted", "name"), [("eagle", "eagle"), ("mtp", "hybrid"), (LOOKUP, "shared-kv"), (HYBRID, "hybrid")]
)
def test_a_plugin_that_is_switched_off_is_to_be_switched_on(
    wanted: object, name: str, installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGELLM_PLUGINS", "lookup")
    message = refusal(load_plugins(), wanted)  # type: ignore[arg-type]
    assert message.endswith(
        f"; package edgellm-{name} is installed, and EDGELLM_PLUGINS leaves out its plugin {name!r}: add that name, or "
        "unset the variable"
    )


def test_a_plugin_that_failed_to_load_says_why(installed: None) -> None:
    message = refusal(load_plugins(), "shared_kv_mtp")
    assert "; package edgellm-shared-kv is installed, and its plugin 'shared-kv' is left out: it was built for API" in (
        message
    )


def test_a_name_that_nobody_has_is_shown_with_those_there_are(
    installed: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("EDGELLM_PLUGINS", "looup,eagle")
    with caplog.at_level(logging.WARNING, logger="edgellm"):
        load_plugins()
    assert caplog.messages == [
        "plugin looup is left out: EDGELLM_PLUGINS names it, and no plugin of that name is installed (installed: "
        "eagle, hybrid, lookup, shared-kv); install it, or mend the list"
    ]
    with pytest.raises(PluginError, match=r"^plugin 'looup': EDGELLM_PLUGINS names it"):
        load_plugins(strict=True)


def test_a_package_without_metadata_is_unknown_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("EDGELLM_PLUGINS", raising=False)
    entry = EntryPoint("lone", api=(7, 0))
    entry.dist = None  # type: ignore[assignment]
    monkeypatch.setattr("edgellm.plugins.importlib.metadata.entry_points", lambda *, group: [entry])
    with caplog.at_level(logging.WARNING, logger="edgellm"):
        load_plugins()
    assert caplog.messages[0].startswith("plugin lone (unknown) is left out: it was built for API")


def test_the_list_of_plugins_says_which_kinds_there_are(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGELLM_PLUGINS", "eagle,lookup")
    lines = CliRunner().invoke(cli.app, ["plugins"]).output.splitlines()
    assert (
        "decoders, name [kind] (priority): vanilla [vanilla] (0), eagle3 [eagle] (0), prompt-lookup [prompt_lookup] (0)"
    ) in lines
    assert "kinds that speculative= and --speculative take: eagle, prompt_lookup" in lines
