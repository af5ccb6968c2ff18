"""Runs the conformance suite on a policy as pytest would, and says which tests failed."""

from __future__ import annotations

from edgellm.cache.types import BaseStateKind, ContextCacheDeploymentProfile, SpecReuseContract
from edgellm.testing.conformance import PolicyConformance

ATTENTION = ContextCacheDeploymentProfile()
EAGLE = ContextCacheDeploymentProfile(spec_reuse_contract=SpecReuseContract(True, 1))
HYBRID = ContextCacheDeploymentProfile(BaseStateKind.HYBRID)


def failures(policy, profile=ATTENTION, *, speculative=False, **attributes):
    """Test name to message, for every test of the suite that failed."""
    suite = type(
        "Suite",
        (PolicyConformance,),
        {"policy": policy, "profile": profile, "speculative": speculative, **attributes},
    )
    failed = {}
    for name in sorted(name for name in dir(suite) if name.startswith("test_")):
        try:
            getattr(suite(), name)()
        except AssertionError as error:
            failed[name] = str(error)
    return failed
