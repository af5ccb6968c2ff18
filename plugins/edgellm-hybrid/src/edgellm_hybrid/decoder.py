"""`HybridMtpDecoder`: chains from the multi-token prediction head that a hybrid checkpoint brings with it.

The head shares embedding and output matrix with the model and keeps one attention layer's pages of its own.  The first
proposal reads the model's hidden row, each further one the head's own.  (Gloeckle et al., "Better and Faster Large
Language Models via Multi-token Prediction", 2024; DeepSeek-AI, "DeepSeek-V3", 2024, section 2.2.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from edgellm.decoding.adaptive import DraftLengths
from edgellm.decoding.draft_model import DraftModel, HostDraft
from edgellm.decoding.draft_ops import draft_ops
from edgellm.decoding.paged_draft import PagedDraftDecoder
from edgellm.errors import BrokenInvariantError, UnsupportedModelError
from edgellm.models.qwen_mtp import MtpHead, load_mtp, mtp_config
from edgellm.models.step import HiddenRequest
from edgellm.runtime.kv_cache import KVCache

if TYPE_CHECKING:
    from edgellm.decoding.draft_model import DraftHead
    from edgellm.decoding.options import DecoderChoice, DecoderContext
    from edgellm.models.device_ops import DeviceOps
    from edgellm.models.loader import LoadedModel
    from edgellm.models.qwen_hybrid_weights import MtpWeights
    from edgellm.runtime.batch import Executor

NUM_DRAFTS = 3


class HybridMtpDecoder(PagedDraftDecoder):
    """Draft state stands beside the model's own: both roll back to what was accepted, and are checkpointed together.

    Args:
        model: that runs; its embedding and output matrix are the head's too.
        weights: of the head.
        page_size: tokens a page of the head's KV pool.
    """

    name = "hybrid-mtp"

    def __init__(
        self,
        model: LoadedModel,
        weights: MtpWeights,
        *,
        page_size: int,
        num_drafts: int = NUM_DRAFTS,
        adaptive: bool = True,
    ) -> None:
        super().__init__(num_drafts, DraftLengths() if adaptive else None)
        self._model = model
        self._weights = weights
        self._page_size = page_size
        self._pages: KVCache | None = None
        self._draft: DraftModel | None = None

    @property
    def draft(self) -> DraftModel:
        if self._draft is None:
            raise BrokenInvariantError(f"decoder {self.name!r} has no pages yet; call open_draft first")
        return self._draft

    def draft_bytes_per_page(self) -> int:
        return self._cache(1).bytes_per_page

    def open_draft(self, num_pages: int) -> Any:
        self._pages = self._cache(num_pages)
        self._draft = HostDraft(self._head(None), self._pages)
        return self._pages

    def boundary_hidden_width(self) -> int:
        return self._model.config.hidden_size

    def new_hidden_row(self) -> torch.Tensor:
        embedding = self._model.weights.embedding
        return torch.zeros((1, self._model.config.hidden_size), dtype=embedding.dtype, device=embedding.device)

    def attach(self, executor: Executor) -> None:
        super().attach(executor)
        self._request_hidden(executor, HiddenRequest(normed=True))

    def device_parts(self, ops: DeviceOps) -> tuple[DraftHead, KVCache]:
        return self._head(ops), self._open_pages()

    def _head(self, ops: DeviceOps | None) -> MtpHead:
        return MtpHead(self._model, self._weights, draft_ops(ops, self._model.weights.embedding.device))

    def _open_pages(self) -> KVCache:
        if self._pages is None:
            raise BrokenInvariantError(f"decoder {self.name!r} has no pages yet; call open_draft first")
        return self._pages

    def _cache(self, num_pages: int) -> KVCache:
        embedding = self._model.weights.embedding
        return KVCache.for_model(
            mtp_config(self._model),
            num_pages=num_pages,
            page_size=self._page_size,
            dtype=embedding.dtype,
            device=embedding.device,
        )


def check_fits(choice: DecoderChoice) -> None:
    """
    Raises:
        InvalidArgumentError: a draft was given: the head is the model's own; or trees are asked for.
        UnsupportedModelError: the checkpoint has no head.
    """
    choice.require_no_draft("decoder 'mtp' takes the model's own head")
    choice.require_chains()
    if not getattr(choice.config, "num_mtp_layers", 0):
        raise UnsupportedModelError(
            f"{choice.path} has no multi-token prediction head (mtp.*); use another decoder, or a checkpoint with one"
        )


def build(context: DecoderContext) -> HybridMtpDecoder:
    """Raises: as `check_fits`."""
    check_fits(context.choice)
    options, model = context.options, context.model
    return HybridMtpDecoder(
        model,
        load_mtp(model),
        page_size=context.page_size,
        num_drafts=(options.num_drafts if options is not None else None) or NUM_DRAFTS,
        adaptive=options is None or options.adaptive,
    )
