"""The template is certified by the suite that every policy runs, and does what it says."""

from __future__ import annotations

from edgellm.cache.types import BaseStateKind, ContextCacheDeploymentProfile, SpecReuseContract
from edgellm.plugins import PolicyRegistration
from edgellm.testing.conformance import PolicyConformance
from edgellm.testing.toy_batch_driver import ToyBatchDriver
from edgellm.testing.toy_driver import ToyDriver
from edgellm_template import policy as plugin

# Installed beside the built-in policy it is never chosen.
ALONE = [PolicyRegistration("template-prompt-only", plugin.PromptOnlyPolicy, plugin.serves, 0, "edgellm-template")]


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


def test_a_prompts_end_is_a_record_and_its_chunks_are_not():
    driver = ToyDriver(ContextCacheDeploymentProfile(), policies=ALONE)
    sequence = driver.admit(list(range(10)))
    driver.prefill_chunk(sequence, 8)
    assert (driver.coordinator.metrics().published_blocks, driver.coordinator.metrics().published_endpoints) == (2, 0)
    driver.prefill(sequence)
    assert (driver.coordinator.metrics().published_blocks, driver.coordinator.metrics().published_endpoints) == (2, 1)
    driver.close()


def test_a_batch_publishes_the_prompts_of_all_its_sequences():
    driver = ToyBatchDriver(ContextCacheDeploymentProfile(), policies=ALONE)
    driver.begin(list(range(10)), list(range(20, 26)))
    driver.prefill_batch()
    counted = driver.coordinator.metrics()
    assert (counted.published_blocks, counted.published_endpoints, counted.policy_failures) == (3, 2, 0)
    for _ in range(6):
        driver.step()
    assert driver.coordinator.metrics().published_blocks == 3  # answers stay private
    driver.close()
