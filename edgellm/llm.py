"""`LLM`: load a model once, then generate, chat and stream from any thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.engine.engine import ShutdownMode
from edgellm.host import ModelHost

if TYPE_CHECKING:
    from types import TracebackType

    from edgellm.cache.metrics import ContextCacheMetrics
    from edgellm.engine.metrics import EngineMetrics


class LLM(ModelHost):
    """A model for scripts: `generate` and `chat` wait, `stream` yields text.  Options: see `__init__`.

    Threads: every method may be called from several threads at once.
    Ownership: `close()` (or the `with` block) ends running requests and frees the pool; later calls raise.
    """

    def engine_metrics(self) -> EngineMetrics:
        """Counters of the request engine."""
        return self._frontend.open_engine("engine_metrics").metrics()

    def cache_metrics(self) -> ContextCacheMetrics:
        """Counters of the context cache over this LLM's life: hits, reused tokens, evictions, free pages.

        May be read while the engine runs; each number is right by itself, together they are not one instant.
        """
        return self._frontend.open_runtime("cache_metrics").coordinator.metrics()

    def close(self) -> None:
        """Cancel what still runs, stop the engine, and let go of weights and KV pool.  Idempotent."""
        self._frontend.close(ShutdownMode.CANCEL)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
