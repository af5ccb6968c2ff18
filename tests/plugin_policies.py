"""The publication policies of this repository's plugins, whatever `EDGELLM_PLUGINS` says."""

from __future__ import annotations

import functools

import edgellm_eagle.policy
import edgellm_hybrid.policy
import edgellm_shared_kv.policy
from edgellm.plugins import PolicyRegistration, load_plugins

PLUGINS = (
    ("eagle", edgellm_eagle.policy),
    ("hybrid", edgellm_hybrid.policy),
    ("shared-kv", edgellm_shared_kv.policy),
)


@functools.cache
def all_policies() -> tuple[PolicyRegistration, ...]:
    """The built-in policy and the plugins'."""
    return tuple(load_plugins(extra=PLUGINS, autoload=False, strict=True).policies)
