"""`Resident`: everything the session keeps for one seated sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.session._ledger import ResidentRow
from edgellm.session.finish import OVERRIDDEN_BY_STOP_STRING
from edgellm.session.types import BatchResult, FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from edgellm.cache.types import ReuseReport
    from edgellm.request import CancelToken, LLMGenerationRequest
    from edgellm.sampling.logprobs import TokenLogprobs
    from edgellm.session.finish import FinishRule
    from edgellm.session.prompt import TokenizedPrompt
    from edgellm.session.text import TextPipeline
    from edgellm.session.types import SequenceIdentity


class Resident(ResidentRow):
    """Ledger, tokens, text and stream of one sequence; keyed by its ref, never by a batch row.

    What a decode step reads and changes of it is C members of `ResidentRow`.

    Attributes:
        prompt: (prompt_length,) int32, the whole prompt; owned, not modified.
        tokenized: the prompt with what is known about its boundaries.
        index: its place in resident order, -1 before it is seated.
        prefill_start: reused prefix in tokens.
        committed: positions with materialised state, as steps reported them.
        state_length: positions that really have state; more than `committed` while the prompt is incomplete
            and another sequence published a part of it, else equal.
        prompt_remaining: prompt tokens not yet run.
        generated: generated ids, the end token included.
        reported: generated tokens that a delta already carried.
        streamed: generated tokens that a stream chunk already carried.
        reason: NOT_FINISHED until the sequence is terminal; the first reason stays.
        terminal: whether `reason` is set.
        exclusive: it needs the session to itself.
        uniform: its decoder takes one set of sampling parameters per batch.
        seen_publications: the cache's count of published blocks when the sequence last looked for its prompt.
        released: its channel was detached for readmission; it produces nothing any more.
        proposed_drafts, accepted_drafts: draft tokens that were verified, and those that are in the text.
    """

    __slots__ = (
        "accepted_drafts",
        "error_message",
        "pending_text",
        "prefill_start",
        "prompt",
        "proposed_drafts",
        "released",
        "request",
        "reuse",
        "seen_publications",
        "streamed",
        "tokenized",
        "uniform",
    )

    def __init__(
        self,
        *,
        identity: SequenceIdentity,
        request: LLMGenerationRequest,
        prompt: TokenizedPrompt,
        rule: FinishRule,
        cancel_token: CancelToken | None,
        text: TextPipeline | None,
        exclusive: bool,
        uniform: bool,
    ) -> None:
        super().__init__(
            identity, rule=rule, cancel_token=cancel_token, prompt_remaining=len(prompt), exclusive=exclusive
        )
        self.request = request
        self.tokenized = prompt
        self.prompt: npt.NDArray[np.int32] = prompt.token_ids
        self.text = text
        self.uniform = uniform
        self.channel = request.stream_channel
        self.reuse: ReuseReport | None = None
        self.seen_publications = -1
        self.prefill_start = 0
        self.logprobs = None if request.sampling.logprobs is None else []
        self.streamed = 0
        self.pending_text = ""
        self.error_message = ""
        self.released = False
        self.proposed_drafts = 0
        self.accepted_drafts = 0

    @property
    def prompt_length(self) -> int:
        return len(self.prompt)

    def start_at(self, prefill_start: int, reuse: ReuseReport | None) -> None:
        """Begin the ledger behind a reused prefix."""
        self.prefill_start = prefill_start
        self.committed = prefill_start
        self.state_length = prefill_start
        self.prompt_remaining = len(self.prompt) - prefill_start
        self.reuse = reuse

    def end(self, reason: FinishReason, message: str = "") -> None:
        """Make the sequence terminal; the first reason stays."""
        if not self.terminal:
            self.reason = reason
            self.terminal = True
            self.error_message = message

    def fail(self, message: str) -> None:
        """End with ERROR, whatever ended the sequence before."""
        self.reason, self.terminal, self.error_message = FinishReason.ERROR, True, message

    def accept(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None) -> None:
        """Append accepted tokens until one of them ends the sequence; the rest of the run is dropped."""
        self.iterations += 1
        for index, token_id in enumerate(token_ids):
            if self.terminal:
                return
            self.generated.append(token_id)
            if self.sampling is not None:
                self.sampling.record(token_id)
            if self.logprobs is not None and logprobs is not None:
                self.logprobs.append(logprobs[index])
            stop_matched = False
            if self.text is not None:
                self.pending_text += self.text.push((token_id,))
                stop_matched = self.text.match is not None
            self.reason = self.rule.decide(token_id, len(self.generated), stop_matched)
            self.terminal = self.reason is not FinishReason.NOT_FINISHED

    def flush_text(self) -> None:
        """Release the text that was held back; call when the sequence became terminal."""
        if self.text is None:
            return
        self.pending_text += self.text.finish()
        if self.text.match is not None and self.reason in OVERRIDDEN_BY_STOP_STRING:
            self.reason = FinishReason.STOP_WORDS

    def take_text(self) -> str:
        text, self.pending_text = self.pending_text, ""
        return text

    def snapshot(self) -> BatchResult:
        """Everything a response needs; independent of this object afterwards."""
        params = self.request.sampling
        return BatchResult(
            token_ids=self.prompt[self.prefill_start :].tolist() + self.generated,
            raw_input_ids=self.prompt.tolist(),
            generate_length=len(self.generated),
            terminal_reason=self.reason,
            iterations=self.iterations,
            effective_prefill_length=len(self.prompt),
            accepted_draft_tokens=self.accepted_drafts,
            proposed_draft_tokens=self.proposed_drafts,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            reuse=self.reuse,
            stop_match=None if self.text is None else self.text.match,
            skip_special_tokens=params.skip_special_tokens,
            include_stop_str_in_output=params.include_stop_str_in_output,
            error_message=self.error_message,
        )
