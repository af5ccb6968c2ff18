"""The built-in policy passes the conformance suite wherever it serves."""

from __future__ import annotations

from suite_runner import EAGLE

from edgellm.builtin.base_endpoint import BaseEndpointPolicy
from edgellm.testing.conformance import PolicyConformance


class TestOnAttentionModels(PolicyConformance):
    policy = BaseEndpointPolicy


class TestWithTwoTokensAPage(PolicyConformance):
    policy = BaseEndpointPolicy
    page_size = 2


class TestPlainRequestsBesideADraftModel(PolicyConformance):
    policy = BaseEndpointPolicy
    profile = EAGLE
