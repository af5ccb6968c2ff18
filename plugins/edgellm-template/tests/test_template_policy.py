"""The template is certified by the suite that every policy runs, and does what it says."""

from __future__ import annotations

from edgellm.cache.types import BaseStateKind, ContextCacheDeploymentProfile, SpecReuseContract
from edgellm.testing.conformance import PolicyConformance
from edgellm_template import policy as plugin


class TestPromptOnlyPolicy(PolicyConformance):
    policy = plugin.PromptOnlyPolicy
    publishes_generated = False


def test_it_serves_plain_requests_on_attention_models_only():
    attention = ContextCacheDeploymentProfile()
    assert plugin.serves(attention, False)
    assert not plugin.serves(attention, True)
    assert not plugin.serves(ContextCacheDeploymentProfile(BaseStateKind.HYBRID), False)
    eagle = ContextCacheDeploymentProfile(spec_reuse_contract=SpecReuseContract(True, 1))
    assert plugin.serves(eagle, False)
    assert not plugin.serves(eagle, True)
