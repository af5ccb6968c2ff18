"""The distributions under `plugins/`: their metadata, their entry points, and who serves what once they are loaded."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from edgellm.cache.types import BaseStateKind, ContextCacheDeploymentProfile, SpecReuseContract
from edgellm.errors import PluginError
from edgellm.hookspecs import API_VERSION, ENTRY_POINT_GROUP
from edgellm.plugins import PluginStatus, load_plugins, missing_policy_distribution

tomllib = pytest.importorskip("tomllib", reason="tomllib is in the standard library from Python 3.11")

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = sorted(project.parent for project in (ROOT / "plugins").glob("*/pyproject.toml"))

ATTENTION, RECURRENT, HYBRID = BaseStateKind.ATTENTION_ONLY, BaseStateKind.PURE_RECURRENT, BaseStateKind.HYBRID
EAGLE, DFLASH, SHARED_KV = SpecReuseContract(True, 1), SpecReuseContract(True, 0), SpecReuseContract(False, 0)

# (base state, speculative contract of the deployment, speculative request) -> (policy, distribution that brings it)
SERVED = [
    (ATTENTION, None, False, "base-endpoint", "edgellm"),
    (ATTENTION, EAGLE, False, "base-endpoint", "edgellm"),
    (ATTENTION, SHARED_KV, False, "base-endpoint", "edgellm"),
    (ATTENTION, EAGLE, True, "eagle-spec", "edgellm-eagle"),
    (ATTENTION, DFLASH, True, "eagle-spec", "edgellm-eagle"),
    (ATTENTION, SHARED_KV, True, "shared-kv-spec", "edgellm-shared-kv"),
    (RECURRENT, None, False, "hybrid-snapshot", "edgellm-hybrid"),
    (HYBRID, None, False, "hybrid-snapshot", "edgellm-hybrid"),
    (HYBRID, EAGLE, False, "hybrid-snapshot", "edgellm-hybrid"),
    (HYBRID, EAGLE, True, "hybrid-mtp", "edgellm-hybrid"),
    (HYBRID, SHARED_KV, True, "hybrid-snapshot", "edgellm-hybrid"),
    (HYBRID, SHARED_KV, False, "hybrid-snapshot", "edgellm-hybrid"),
]
# Deployments that nothing serves, and no distribution would: a decoder they have no state for.
UNSERVED = [(RECURRENT, EAGLE), (RECURRENT, SHARED_KV)]


# What a plugin needs beside edgellm, and the module that registers where it is not `policy`.
NEEDS = {"edgellm-lookup": ("edgellm-shared-kv",)}
MODULES = {
    "edgellm-eagle": "plugin",
    "edgellm-hybrid": "plugin",
    "edgellm-lookup": "decoder",
    "edgellm-shared-kv": "plugin",
}


def project_of(folder):
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


ROOT_PROJECT = project_of(ROOT)


@pytest.fixture
def own_plugins(monkeypatch):
    """(entry point name, module) of every plugin here, installed or not."""
    found = []
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(folder / "src")
        ((name, module),) = project_of(folder)["entry-points"][ENTRY_POINT_GROUP].items()
        found.append((name, importlib.import_module(module)))
    return found


@pytest.fixture
def loaded(own_plugins):
    return load_plugins(extra=own_plugins, autoload=False, strict=True)


def test_the_plugins_of_this_project_are_here():
    names = [folder.name for folder in FOLDERS]
    assert names == ["edgellm-eagle", "edgellm-hybrid", "edgellm-lookup", "edgellm-shared-kv", "edgellm-template"]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_plugin_is_a_distribution_of_its_own(folder):
    project, package = project_of(folder), folder.name.replace("-", "_")
    assert project["name"] == folder.name
    for same in ("version", "license", "license-files", "requires-python"):
        assert project[same] == ROOT_PROJECT[same], same
    own = [f"edgellm>={ROOT_PROJECT['version']},<0.2"]
    own += [f"{other}>={ROOT_PROJECT['version']},<0.2" for other in NEEDS.get(folder.name, ())]
    assert project["dependencies"] == own
    module = MODULES.get(folder.name, "policy")
    assert project["entry-points"] == {ENTRY_POINT_GROUP: {folder.name.removeprefix("edgellm-"): f"{package}.{module}"}}
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (folder / "src" / package / "py.typed").read_bytes() == b""
    assert sorted(folder.glob("tests/test_*.py")), "a plugin has tests"


@pytest.mark.parametrize("folder", FOLDERS[:-1], ids=lambda folder: folder.name)  # the template's is about writing one
def test_the_readme_of_a_plugin_names_what_it_registers(folder, loaded):
    text = (folder / project_of(folder)["readme"]).read_text(encoding="utf-8")
    entry = folder.name.removeprefix("edgellm-")
    registered = [*loaded.policies, *loaded.decoders]
    names = [registration.name for registration in registered if registration.plugin == entry]
    assert names
    assert not [name for name in names if f"`{name}`" not in text]


def test_every_plugin_loads_beside_the_others(own_plugins, loaded):
    own = [report for report in loaded.reports if report.status is not PluginStatus.BUILTIN]
    assert [(report.name, report.status, report.reason) for report in own] == [
        (name, PluginStatus.LOADED, "") for name, _ in own_plugins
    ]
    for report in own:
        low, high = report.api_range
        assert low <= API_VERSION <= high


@pytest.mark.parametrize(("kind", "contract", "speculative", "policy", "distribution"), SERVED)
def test_the_right_policy_is_chosen(loaded, kind, contract, speculative, policy, distribution):
    profile = ContextCacheDeploymentProfile(kind, contract)
    assert loaded.choose_policy(profile, speculative).name == policy
    assert missing_policy_distribution(profile, speculative) == distribution


@pytest.mark.parametrize(("kind", "contract", "speculative", "policy", "distribution"), SERVED)
def test_without_plugins_the_missing_distribution_is_named(kind, contract, speculative, policy, distribution):
    bare = load_plugins(autoload=False)
    profile = ContextCacheDeploymentProfile(kind, contract)
    if distribution == "edgellm":
        assert bare.choose_policy(profile, speculative).name == policy
        return
    assert (ROOT / "plugins" / distribution).is_dir()
    with pytest.raises(
        PluginError, match=rf"\(installed: base-endpoint\); install package {distribution} .*/plugins/{distribution}\)$"
    ):
        bare.choose_policy(profile, speculative)


@pytest.mark.parametrize(
    ("kind", "contract"),
    [
        (BaseStateKind.PURE_RECURRENT, SpecReuseContract(True, 1)),
        (BaseStateKind.PURE_RECURRENT, SpecReuseContract(False, 0)),
    ],
)
def test_what_no_distribution_serves_names_none(loaded, kind, contract):
    profile = ContextCacheDeploymentProfile(kind, contract)
    assert missing_policy_distribution(profile, True) is None
    with pytest.raises(PluginError, match=r"use another decoder with this model$"):
        loaded.choose_policy(profile, True)


@pytest.mark.parametrize("left_out", ["eagle", "hybrid", "shared-kv"])
def test_one_missing_plugin_is_missed_by_its_own_requests_only(own_plugins, left_out):
    rest = load_plugins(extra=[pair for pair in own_plugins if pair[0] != left_out], autoload=False, strict=True)
    for kind, contract, speculative, policy, distribution in SERVED:
        profile = ContextCacheDeploymentProfile(kind, contract)
        if distribution == f"edgellm-{left_out}":
            with pytest.raises(PluginError, match=rf"; install package {distribution} .*/plugins/{distribution}\)$"):
                rest.choose_policy(profile, speculative)
        else:
            assert rest.choose_policy(profile, speculative).name == policy


@pytest.mark.parametrize(("kind", "contract"), UNSERVED)
def test_combinations_that_do_not_exist_are_served_by_nobody(loaded, kind, contract):
    with pytest.raises(PluginError):
        loaded.choose_policy(ContextCacheDeploymentProfile(kind, contract), True)
