"""Context reuse with recurrent and hybrid models; see `edgellm_hybrid.policy` and `edgellm_hybrid.placement`."""

from edgellm_hybrid.policy import HybridMtpPolicy, HybridSnapshotPolicy

__all__ = ["HybridMtpPolicy", "HybridSnapshotPolicy"]
