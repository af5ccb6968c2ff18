"""The vanilla decoder: one forward pass, one token per selected row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgellm.decoding.base import DecodingStrategy, StepTokens
from edgellm.hookspecs import hookimpl

if TYPE_CHECKING:
    from edgellm.plugins import DecoderRegistrar
    from edgellm.runtime.batch import Executor, RaggedBatch
    from edgellm.sampling.sampler import Sampler, SamplingState

EDGELLM_API = ((1, 1), (1, 1))


class VanillaDecoder(DecodingStrategy):
    """Forward, then sample each selected row by its own parameters."""

    name = "vanilla"

    def run_step(
        self, executor: Executor, batch: RaggedBatch, sampler: Sampler, rows: Sequence[SamplingState]
    ) -> StepTokens:
        logits = executor.forward(batch)
        committed: list[int] = batch.query_len.tolist()
        if not rows:
            return StepTokens(token_ids=[], committed=committed, logprobs=[])
        result = sampler.sample(logits, rows)
        return StepTokens(
            token_ids=[[token_id] for token_id in result.token_ids],
            committed=committed,
            logprobs=[None if logprobs is None else [logprobs] for logprobs in result.logprobs],
            errors=result.errors,
        )


@hookimpl
def edgellm_register_decoders(register: DecoderRegistrar) -> None:
    register("vanilla", VanillaDecoder, "vanilla")
