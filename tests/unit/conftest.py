"""Fixtures of the engine's tests; see `engine_rig`."""

from engine_rig import brake, start

__all__ = ["brake", "start"]
