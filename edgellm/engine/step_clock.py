"""`StepClock`: measures steps, keeps them within the step-time budget, and counts the gaps between tokens."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from edgellm.engine.step_cost import StepCostModel, StepWork
from edgellm.log import get_logger
from edgellm.session._ledger import with_prompt_left
from edgellm.session.types import SequenceWork

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgellm.engine.config import StepLimits
    from edgellm.engine.metrics import EngineMetrics
    from edgellm.engine.step_planner import LengthLedger
    from edgellm.session.base import RuntimeSession
    from edgellm.session.types import ScheduledSequenceDescriptor, StepResult


_logger = get_logger(__name__)


class StepClock:
    """Belongs to the actor; survives sessions, so what was learned of a device is kept.

    Gaps between tokens are not measured row by row.  A step with n decode rows records n times the time since the
    step with decode rows before it (or since the step that completed the first prompt); so the gap includes
    admission and everything else between two steps, and prefill-first steps that decoding residents sat out.  A
    resident that was paused while others decoded is counted with their gap; under speculation a row's tokens count as
    one.
    """

    def __init__(self, metrics: EngineMetrics, budget_ms: float | None) -> None:
        self._metrics = metrics
        self._budget = None if budget_ms is None else budget_ms / 1e3
        self.model = StepCostModel()
        self._started = 0.0
        self._tokens_at = 0.0  # end of the latest step that residents who decode got tokens from
        self._decoding = False  # whether somebody who decodes is resident, after the latest step
        self._chunks = 0
        self._page_size = 1
        self._warned = False

    def prompt_tokens(self, lengths: list[LengthLedger], limits: StepLimits) -> int | None:
        """Most prompt tokens of the next step; None where nothing bounds them.

        With decode rows, what this boundary took already (draining, admitting) is taken off the budget.  Steps without
        decode rows are bounded likewise: who arrives, cancels or times out meanwhile waits for the step.
        """
        if self._budget is None:
            return None
        self._page_size = limits.page_size
        prompts = with_prompt_left(lengths)
        if not prompts or not limits.compact:
            return None
        spent = time.perf_counter() - self._tokens_at if self._decoding and limits.mixed else 0.0
        return self.model.prompt_tokens_within(
            self._budget - spent,
            decode_rows=len(lengths) - len(prompts) if limits.mixed else 0,
            past=max(seat.committed for seat in prompts),
            page_size=limits.page_size,
        )

    def execute(self, session: RuntimeSession, plan: Sequence[ScheduledSequenceDescriptor]) -> StepResult:
        """`session.execute(plan)`, measured."""
        self._started = started = time.perf_counter()
        result = session.execute(plan)
        seconds = time.perf_counter() - started
        self._metrics.step_duration.record(seconds)
        if self._budget is not None and result.ok and len(result.execution):
            self._learn(result, seconds, self._budget)
        return result

    def note_tokens(self, result: StepResult, lengths: list[LengthLedger]) -> None:
        """After a commit: record the gap that this step ends.

        Args:
            lengths: those who are still resident.
        """
        metrics = self._metrics
        chunks, self._chunks = metrics.chunks - self._chunks, metrics.chunks
        rows = len(result.execution) - chunks
        if rows > 0 or not self._decoding:
            now = time.perf_counter()
            if rows > 0:
                since = self._tokens_at if self._decoding else self._started
                metrics.inter_token.record(now - since, rows)
            self._tokens_at = now
        if chunks or result.finished or not self._decoding:
            self._decoding = len(lengths) > len(with_prompt_left(lengths))

    def _learn(self, result: StepResult, seconds: float, budget: float) -> None:
        metrics, execution = self._metrics, result.execution
        decodes = result.work is SequenceWork.DECODE  # then its descriptors need not be made
        work = StepWork(decode_rows=len(execution)) if decodes else StepWork.of_plan(execution)
        unreachable = self._is_unreachable(budget)
        if work.prompt_tokens:
            spent = self._started - self._tokens_at if self._decoding and work.decode_rows else 0.0
            metrics.budget_steps += 1
            metrics.steps_over_budget += spent + seconds > budget
            metrics.budget_unreachable += unreachable
            metrics.budget_predicted_us += int(self.model.predict(work) * 1e6)
            metrics.budget_measured_us += int(seconds * 1e6)
        self.model.observe(work, seconds)

    def _is_unreachable(self, budget: float) -> bool:
        """Whether even the smallest step with prompt work is expected to take longer; says so once."""
        least = self.model.least(self._page_size)
        if least is None or least <= budget:
            return False
        if not self._warned:
            self._warned = True
            _logger.warning(
                "step_time_budget_ms is %g and cannot be kept: a step with one page of a prompt (%d tokens) is "
                "expected to take %.3g ms; raise the budget, or lower page_size",
                budget * 1e3,
                self._page_size,
                least * 1e3,
            )
        return True
