"""The context-cache manager once more, in plain Python, and a driver that compares the two after every operation."""

from cache_model.checkpoints import CacheModel
from cache_model.lockstep import Lockstep

__all__ = ["CacheModel", "Lockstep"]
