"""`Eagle3Decoder`: chains or trees from an EAGLE-3 head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgellm.decoding.draft_ops import draft_ops
from edgellm.decoding.options import SpeculativeOptions
from edgellm.decoding.tree_draft import TreeDraftDecoder, TreeShape
from edgellm.decoding.tree_passes import HostTreeDraft
from edgellm.errors import BrokenInvariantError
from edgellm.models.step import HiddenRequest
from edgellm.runtime.kv_cache import KVCache
from edgellm.shipped import draft_folder
from edgellm_eagle.checkpoint import read_head
from edgellm_eagle.head import Eagle3Head
from edgellm_eagle.head_config import hidden_layers

if TYPE_CHECKING:
    from edgellm.decoding.draft_model import DraftHead
    from edgellm.decoding.options import DecoderContext
    from edgellm.models.config import ModelConfig
    from edgellm.models.device_ops import DeviceOps
    from edgellm.runtime.batch import Executor
    from edgellm_eagle.checkpoint import HeadWeights

NUM_DRAFTS = 4


class Eagle3Decoder(TreeDraftDecoder):
    """The target's hidden rows in front of its layers 2, n / 2 and n - 3 go into the head, as in its training."""

    name = "eagle3"

    def __init__(
        self,
        config: ModelConfig,
        weights: HeadWeights,
        *,
        target_layers: int,
        page_size: int,
        shape: TreeShape | None = None,
        adaptive: bool = True,
    ) -> None:
        """
        Args:
            config, weights: of the head; see `read_head`.
            target_layers: n.
            page_size: tokens a page of the head's own KV pool.
            shape: of proposals; None is chains of `NUM_DRAFTS`.
        """
        super().__init__(shape or TreeShape(NUM_DRAFTS, 1, NUM_DRAFTS), adaptive=adaptive)
        self._config = config
        self._weights = weights
        self._page_size = page_size
        self._hidden = HiddenRequest(hidden_layers(target_layers))
        self._pages: KVCache | None = None
        self._draft: HostTreeDraft | None = None

    @property
    def draft(self) -> HostTreeDraft:
        if self._draft is None:
            self._draft = HostTreeDraft(self._head(None), self._open_pages())
        return self._draft

    def draft_bytes_per_page(self) -> int:
        return self._cache(1).bytes_per_page

    def open_draft(self, num_pages: int) -> Any:
        self._pages = self._cache(num_pages)
        return self._pages

    def attach(self, executor: Executor) -> None:
        super().attach(executor)
        self._request_hidden(executor, self._hidden)

    def device_parts(self, ops: DeviceOps) -> tuple[DraftHead, KVCache]:
        return self._head(ops), self._open_pages()

    def _head(self, ops: DeviceOps | None) -> Eagle3Head:
        return Eagle3Head(self._config, self._weights, draft_ops(ops, self._weights.embedding.device))

    def _open_pages(self) -> KVCache:
        if self._pages is None:
            raise BrokenInvariantError(f"decoder {self.name!r} has no pages yet; call open_draft first")
        return self._pages

    def _cache(self, num_pages: int) -> KVCache:
        embedding = self._weights.embedding
        return KVCache.for_model(
            self._config, num_pages=num_pages, page_size=self._page_size, dtype=embedding.dtype, device=embedding.device
        )


def build(context: DecoderContext) -> Eagle3Decoder:
    """
    Raises:
        InvalidArgumentError: no head was given, and none is brought for this model.
        UnsupportedModelError, WeightFileError: it is no EAGLE-3 head of this target, or damaged.
    """
    options, model = context.options or SpeculativeOptions(decoder="eagle"), context.model
    folder = draft_folder(context.choice, "eagle", "an EAGLE-3 head")
    config, weights = read_head(folder, model.config, model.weights.embedding)
    return Eagle3Decoder(
        config,
        weights,
        target_layers=model.config.num_layers,
        page_size=context.page_size,
        shape=TreeShape.of_options(options, NUM_DRAFTS),
        adaptive=options.adaptive,
    )
