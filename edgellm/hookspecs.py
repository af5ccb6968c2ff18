"""Every hook of edgellm.  Hooks run at start-up and only register; chosen objects are called directly.

A plugin is a module or object named by an entry point in the group `edgellm.plugins`.  It states the API
range it was built for as `EDGELLM_API = ((major, minor), (major, minor))`, lowest and highest inclusive.
Adding an optional argument raises the minor number; removing or re-meaning one raises the major number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from edgellm.plugins import DecoderRegistrar, PolicyRegistrar
    from edgellm.shipped import CheckpointRegistrar

API_VERSION = (1, 3)
ENTRY_POINT_GROUP = "edgellm.plugins"

hookspec = pluggy.HookspecMarker("edgellm")
hookimpl = pluggy.HookimplMarker("edgellm")


class HookSpecs:
    """The hooks, as pluggy sees them."""

    @hookspec
    def edgellm_register_publication_policies(self, register: PolicyRegistrar) -> None:
        """Register publication policies: what they serve, with which priority, and their factory.

        Call `register(name, factory, serves, priority=0)` once per policy.  `serves(profile,
        speculative_request) -> bool` says for which deployments and requests the policy is right;
        `factory(coordinator)` builds one policy object per request handle, and one at start-up as a check.
        """

    @hookspec
    def edgellm_register_decoders(self, register: DecoderRegistrar) -> None:
        """Register decoding strategies: call `register(name, factory, kind, priority=0)` once per decoder.

        `kind` is the decoder kind it serves (`"vanilla"`, `"eagle"`, ...).  `factory(context)` builds it from a
        `DecoderContext`; one without parameters is called without.  With `fits=`, a function of a `DecoderChoice`, it
        refuses models and options before the model's weights are read.
        """

    @hookspec
    def edgellm_register_checkpoints(self, register: CheckpointRegistrar) -> None:
        """Register checkpoints that the plugin's package holds: `register(name, folder, ...)` once each.

        A model: `register(name, folder, remedy=...)`; `LLM(name)` loads it.  A draft: with `decoder`, the kind that it
        is for, and `target`, an `edgellm.shipped.DraftTarget`; that decoder finds it for such a model where the caller
        names no draft.  Register it also where its files may be missing: `remedy` then says how to get them.
        """
