"""`BasePrefix`: the base's committed keys and values, as the rows of one round attend to them on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edgellm.kernels.cpu.elementwise import rope_
from edgellm.kernels.cpu.linear import SKINNY_ROWS
from edgellm.kernels.cpu.paged_attention import PagedAttention

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from edgellm.runtime.kv_cache import KVCache
    from edgellm_shared_kv.assistant_model import AssistantConfig, AssistantLayer

    Int32Array = npt.NDArray[np.int32]


class BasePrefix:
    """What R rows see, in every step of a round: the tokens in front of the one that the round starts from.

    Borrows the base's pages and page table, and writes to neither.
    """

    def __init__(
        self,
        config: AssistantConfig,
        kv_cache: KVCache,
        *,
        slots: Int32Array,
        lengths: Int32Array,
        page_rows: Int32Array,
        query_dtype: torch.dtype,
        angles: list[torch.Tensor],
    ) -> None:
        """
        Args:
            slots: (R,) page-table row of each.
            lengths: (R,) committed tokens of each, at least 1; also the position of all its queries.
            page_rows: (num_slots, pages_per_slot) int32 page table of the base.
            angles: (2, R, rotating elements / 2) of these positions, for each layer.
        """
        self._angles = angles
        self._config = config
        self._layers = config.layers
        self._kv_cache = kv_cache
        layouts: dict[tuple[int, int, int], PagedAttention] = {}
        for layer in config.layers:
            if _kind(layer) not in layouts:
                layouts[_kind(layer)] = PagedAttention(
                    pages=kv_cache.pages(layer.donor),
                    num_heads=config.num_heads,
                    query_dtype=query_dtype,
                    query_rows=np.arange(len(slots)),
                    page_rows=page_rows,
                    slots=slots,
                    lengths=lengths,
                    scale=config.attention_scale,
                    window=layer.window,
                    short_step=len(slots) <= SKINNY_ROWS,
                )
        self._layouts = [layouts[_kind(layer)] for layer in config.layers]

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, query_norm: torch.Tensor | None) -> None:
        """See `Prefix`."""
        rope_(
            query,
            self._angles[layer],
            num_heads=self._config.num_heads,
            num_kv_heads=0,
            head_dim=self._layers[layer].head_dim,
            query_norm=query_norm,
            eps=self._config.rms_norm_eps,
        )
        self._layouts[layer].run(self._kv_cache.pages(self._layers[layer].donor), query, out)


def _kind(layer: AssistantLayer) -> tuple[int, int, int]:
    return layer.num_kv_heads, layer.head_dim, layer.window
