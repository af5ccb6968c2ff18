"""A rank runtime over the integer toy model: real cache, real session, exact text, no weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.cache.types import ContextCacheConfig, DeploymentConfig
from edgellm.plugins import load_plugins
from edgellm.runtime.rank_runtime import LLMRankRuntime
from edgellm.testing.toy import ToyExecutor
from edgellm.testing.toy_tokenizer import ToyTokenizer

if TYPE_CHECKING:
    from edgellm.cache.quarantine import StreamSynchronizer
    from edgellm.plugins import Plugins

TOY_VOCAB_SIZE = 512


class ToyRuntime(LLMRankRuntime):
    """`LLMRankRuntime` whose executor poisons every page that nobody leases or retains."""

    executor: ToyExecutor

    def __init__(
        self,
        *,
        max_batch_size: int = 4,
        max_input_length: int = 64,
        max_kv_capacity: int = 128,
        page_size: int = 4,
        num_pages: int = 96,
        config: ContextCacheConfig | None = None,
        tokenizer: ToyTokenizer | None = None,
        plugins: Plugins | None = None,
        reserve_growth: bool = True,
        synchronizer: StreamSynchronizer | None = None,
    ) -> None:
        tokenizer = tokenizer if tokenizer is not None else ToyTokenizer(TOY_VOCAB_SIZE)
        executor = ToyExecutor(vocab_size=tokenizer.vocab_size, num_pages=num_pages, page_size=page_size)
        super().__init__(
            executor,
            tokenizer,
            DeploymentConfig(
                max_batch_size=max_batch_size,
                max_input_length=max_input_length,
                max_kv_capacity=max_kv_capacity,
                page_size=page_size,
                num_pages=num_pages,
            ),
            plugins=plugins if plugins is not None else load_plugins(autoload=False),
            config=config,
            model_fingerprint="toy",
            kv_dtype="int64",
            reserve_growth=reserve_growth,
            synchronizer=synchronizer,
        )
        executor.watch(self.coordinator.manager.pools)
