"""`HybridMtpDecoder`: chains from the multi-token prediction head that a hybrid checkpoint brings with it.

The head shares embedding and output matrix with the model and keeps one attention layer's pages of its own.  The first
proposal reads the model's hidden row, each further one the head's own.  (Gloeckle et al., "Better and Faster Large
Language Models via Multi-token Prediction", 2024; DeepSeek-AI, "DeepSeek-V3", 2024, section 2.2.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from edgellm.decoding.adaptive import DraftLengths
from edgellm.decoding.paged_draft import DraftModel, PagedDraftDecoder, draft_batch
from edgellm.errors import BrokenInvariantError, InvalidArgumentError, UnsupportedModelError
from edgellm.models.qwen_mtp import MtpHead, load_mtp
from edgellm.models.step import HiddenRequest
from edgellm.runtime.executor_cpu import CpuStep
from edgellm.runtime.kv_cache import KVCache

if TYPE_CHECKING:
    from edgellm.decoding.options import DecoderContext
    from edgellm.decoding.paged_draft import DraftRows
    from edgellm.runtime.batch import Executor

NUM_DRAFTS = 3


class MtpDraft:
    """The head over its pages; see `DraftModel`."""

    def __init__(self, head: MtpHead, kv_cache: KVCache) -> None:
        self._head = head
        self._kv_cache = kv_cache

    @torch.inference_mode()
    def forward(self, rows: DraftRows) -> tuple[list[int], torch.Tensor]:
        batch = draft_batch(rows)
        step = CpuStep(batch, self._head.config, self._kv_cache, rows.hidden.dtype, None)
        ends = torch.from_numpy(batch.logits_index)
        logits, hidden = self._head.forward(
            torch.from_numpy(rows.token_ids), torch.from_numpy(batch.positions), rows.hidden, step, ends
        )
        return logits.argmax(dim=1).tolist(), hidden[ends]


class HybridMtpDecoder(PagedDraftDecoder):
    """Draft state stands beside the model's own: both roll back to what was accepted, and are checkpointed together.

    Args:
        head: of the model that runs.
        page_size: tokens a page of the head's KV pool.
    """

    name = "hybrid-mtp"

    def __init__(self, head: MtpHead, *, page_size: int, num_drafts: int = NUM_DRAFTS, adaptive: bool = True) -> None:
        super().__init__(num_drafts, DraftLengths() if adaptive else None)
        self._head = head
        self._page_size = page_size
        self._draft: MtpDraft | None = None

    @property
    def draft(self) -> DraftModel:
        if self._draft is None:
            raise BrokenInvariantError(f"decoder {self.name!r} has no pages yet; call open_draft first")
        return self._draft

    def draft_bytes_per_page(self) -> int:
        return self._cache(1).bytes_per_page

    def open_draft(self, num_pages: int) -> Any:
        cache = self._cache(num_pages)
        self._draft = MtpDraft(self._head, cache)
        return cache

    def boundary_hidden_width(self) -> int:
        return self._head.config.hidden_size

    def new_hidden_row(self) -> torch.Tensor:
        return torch.zeros((1, self._head.config.hidden_size), dtype=self._head.dtype)

    def attach(self, executor: Executor) -> None:
        executor.request_hidden(HiddenRequest(normed=True))  # type: ignore[attr-defined]

    def _cache(self, num_pages: int) -> KVCache:
        config = self._head.config
        return KVCache(
            num_layers=1,
            num_pages=num_pages,
            num_kv_heads=config.num_kv_heads,
            page_size=self._page_size,
            head_dim=config.head_dim,
            dtype=self._head.dtype,
        )


def build(context: DecoderContext) -> HybridMtpDecoder:
    """
    Raises:
        InvalidArgumentError: a draft was given: the head is the model's own.
        UnsupportedModelError: the checkpoint has no head.
    """
    options, model = context.options, context.model
    if options is not None and options.draft is not None:
        raise InvalidArgumentError(
            f"draft is {str(options.draft)!r}; decoder 'mtp' takes the model's own head, leave it out"
        )
    if not getattr(model.config, "num_mtp_layers", 0):
        raise UnsupportedModelError(
            f"{model.path} has no multi-token prediction head (mtp.*); use another decoder, or a checkpoint with one"
        )
    return HybridMtpDecoder(
        load_mtp(model),
        page_size=context.page_size,
        num_drafts=(options.num_drafts if options is not None else None) or NUM_DRAFTS,
        adaptive=options is None or options.adaptive,
    )
