"""`SharedKvAssistant`: rounds of an assistant on the CPU, over pages of the base model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from edgellm.decoding.draft_ops import CpuDraftOps, DeviceDraftOps
from edgellm_shared_kv.assistant_head import AssistantHead
from edgellm_shared_kv.base_prefix import BasePrefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from edgellm.models.device_ops import DeviceOps
    from edgellm.runtime.kv_cache import KVCache
    from edgellm_shared_kv.assistant_model import AssistantConfig, AssistantWeights

    Int32Array = npt.NDArray[np.int32]


class SharedKvAssistant:
    """Borrows the base's embedding."""

    def __init__(self, config: AssistantConfig, weights: AssistantWeights) -> None:
        self._config = config
        self._weights = weights
        self._head = AssistantHead(config, weights, CpuDraftOps())

    def on_device(self, ops: DeviceOps) -> AssistantHead:
        """The head over operators of the device that the weights are on."""
        return AssistantHead(self._config, self._weights, DeviceDraftOps(ops, self._weights.embedding.device))

    def prefix(self, kv_cache: KVCache, *, slots: Int32Array, lengths: Int32Array, page_rows: Int32Array) -> BasePrefix:
        """What (R,) sequences have committed; see `BasePrefix`."""
        return BasePrefix(
            self._config,
            kv_cache,
            slots=slots,
            lengths=lengths,
            page_rows=page_rows,
            query_dtype=self._head.dtype,
            angles=self._head.angles(torch.from_numpy(lengths)),
        )

    @torch.inference_mode()
    def forward(
        self, token_ids: Sequence[int], hidden: torch.Tensor, prefix: BasePrefix
    ) -> tuple[list[int], torch.Tensor]:
        """One step of a round.

        Args:
            token_ids: (R,) the latest token of each row, of the base's vocabulary.
            hidden: (R, base's hidden size) the base's hidden row in front of it, or what the step before returned.
        Returns:
            (R,) the likeliest next tokens; (R, base's hidden size) hidden rows for the next step.
        """
        tokens, own = self._head.forward(torch.tensor(token_ids, dtype=torch.int32), hidden, prefix)
        return tokens.tolist(), own
