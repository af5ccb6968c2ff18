"""The vanilla decoder: one forward pass, one token per selected row."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from edgellm.decoding.base import DecodingStrategy, StepTokens
from edgellm.errors import InvalidArgumentError
from edgellm.hookspecs import hookimpl

if TYPE_CHECKING:
    import torch

    from edgellm.decoding.options import DecoderChoice
    from edgellm.plugins import DecoderRegistrar
    from edgellm.runtime.batch import Executor, RaggedBatch
    from edgellm.sampling.result import SampleResult
    from edgellm.sampling.sampler import Sampler, SamplingState

EDGELLM_API = ((1, 1), (1, 3))


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
        result = _sample_beside_next_step(executor, batch, sampler, rows, logits)
        return StepTokens(
            token_ids=[[token_id] for token_id in result.token_ids],
            committed=committed,
            logprobs=[None if logprobs is None else [logprobs] for logprobs in result.logprobs],
            errors=result.errors,
        )


def _sample_beside_next_step(
    executor: Executor, batch: RaggedBatch, sampler: Sampler, rows: Sequence[SamplingState], logits: torch.Tensor
) -> SampleResult:
    """Choose tokens; an executor that can computes the next step while the host goes on with them."""
    run_ahead = getattr(executor, "run_ahead", None)
    if run_ahead is None or all(state.num_output + 1 >= state.params.max_tokens for state in rows):
        return sampler.sample(logits, rows)
    result = sampler.sample(logits, rows, beside=partial(run_ahead, batch))
    executor.ran_ahead_with(result.token_ids)  # type: ignore[attr-defined]
    return result


def check_fits(choice: DecoderChoice) -> None:
    """
    Raises:
        InvalidArgumentError: options say what to propose.
    """
    nothing = "decoder 'vanilla' proposes nothing"
    choice.require_no_draft(nothing)
    choice.require_chains()
    if choice.options is not None and choice.options.num_drafts is not None:
        raise InvalidArgumentError(f"num_drafts is {choice.options.num_drafts}; {nothing}, leave it out")


@hookimpl
def edgellm_register_decoders(register: DecoderRegistrar) -> None:
    register("vanilla", VanillaDecoder, "vanilla", fits=check_fits)
