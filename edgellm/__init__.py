"""edgellm: an LLM runtime for one edge box, with exact context reuse.

The public names, loaded on first use: importing `edgellm` or `edgellm._core` imports neither torch nor
transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgellm import errors
    from edgellm.async_engine import AsyncEngine, AsyncTokenStream
    from edgellm.cache.types import Retention, RetentionPriority, ReuseReport, ReuseStopReason
    from edgellm.decoding.options import SpeculativeOptions
    from edgellm.engine.config import SchedulingOptions
    from edgellm.engine_api import Engine, ServingMetrics, SubmittedRequest
    from edgellm.errors import EdgeLLMError
    from edgellm.llm import LLM
    from edgellm.outputs import RequestOutput, RequestTimings, TokenStream
    from edgellm.sampling.params import SamplingParams
    from edgellm.sampling.structured import StructuredOutput

__version__ = "0.1.0.dev0"

_HOMES = {
    "AsyncEngine": "edgellm.async_engine",
    "AsyncTokenStream": "edgellm.async_engine",
    "EdgeLLMError": "edgellm.errors",
    "Engine": "edgellm.engine_api",
    "LLM": "edgellm.llm",
    "RequestOutput": "edgellm.outputs",
    "RequestTimings": "edgellm.outputs",
    "Retention": "edgellm.cache.types",
    "RetentionPriority": "edgellm.cache.types",
    "ReuseReport": "edgellm.cache.types",
    "ReuseStopReason": "edgellm.cache.types",
    "SamplingParams": "edgellm.sampling.params",
    "SchedulingOptions": "edgellm.engine.config",
    "SpeculativeOptions": "edgellm.decoding.options",
    "ServingMetrics": "edgellm.engine_api",
    "StructuredOutput": "edgellm.sampling.structured",
    "SubmittedRequest": "edgellm.engine_api",
    "TokenStream": "edgellm.outputs",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "AsyncTokenStream",
    "EdgeLLMError",
    "Engine",
    "RequestOutput",
    "RequestTimings",
    "Retention",
    "RetentionPriority",
    "ReuseReport",
    "ReuseStopReason",
    "SamplingParams",
    "SchedulingOptions",
    "ServingMetrics",
    "SpeculativeOptions",
    "StructuredOutput",
    "SubmittedRequest",
    "TokenStream",
    "__version__",
    "errors",
]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("edgellm.errors")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'edgellm' has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
