"""`Recovery`: which requests survive the loss of their session.

After a refused compact step, prompts that have produced nothing move to the next session.  After any loss, requests
of which nothing was shown to anybody begin again there: same id, arrival, priority, deadline and pending
reservation.  Nothing was shown while no chunk of the stream was read and no token callback was called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.foreign import call_foreign
from edgellm.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from edgellm.engine.backlog import Backlog
    from edgellm.engine.coordinator import RequestCoordinator, Seat
    from edgellm.engine.metrics import EngineMetrics
    from edgellm.engine.records import RequestRecord
    from edgellm.session.base import RuntimeSession

_logger = get_logger(__name__)


class Recovery:
    """Moves residents of a lost session back to the backlog; belongs to the actor."""

    def __init__(
        self,
        *,
        metrics: EngineMetrics,
        backlog: Backlog,
        coordinator: RequestCoordinator,
        max_replays: int,
        device_healthy: Callable[[], bool] | None,
    ) -> None:
        self._metrics = metrics
        self._backlog = backlog
        self._coordinator = coordinator
        self._max_replays = max_replays
        self._device_healthy = device_healthy

    def device_answers(self) -> bool:
        """Ask the device; a question that raises is a no."""
        ask = self._device_healthy
        if ask is None:
            return True
        answers: list[bool] = []
        error = call_foreign(lambda: answers.append(bool(ask())))
        if error is not None:
            _logger.error("asking for the device's health raised", exc_info=error)
        return answers == [True]

    def may_replay(self, record: RequestRecord) -> bool:
        """Whether the request may begin again; counts the replay when it may."""
        if not self._has_replay_left(record) or not self.device_answers():
            return False
        self._count_replay(record)
        return True

    def readmit_prompts(self, session: RuntimeSession) -> None:
        """After a refused compact step: move residents that have produced nothing, under their old arrival."""
        for seat in self._coordinator.seats():
            record = seat.record
            if not seat.lengths.prompt_remaining or record.cancelled:
                continue
            if record.readmitted:
                _logger.error("request %d would be readmitted twice", record.id)
                continue
            try:
                session.release_for_readmission(seat.lengths.ref)
            except Exception:  # this request fails with the session, others may move
                _logger.exception("request %d could not be released for readmission", record.id)
                continue
            record.readmitted = True
            self._requeue(seat)
            self._metrics.readmitted += 1

    def replay_unseen(self, session: RuntimeSession) -> None:
        """After a loss: move residents of which nothing was shown; the others stay, to fail."""
        if not self._max_replays or not len(self._coordinator) or not self.device_answers():
            return
        for seat in self._coordinator.seats():
            record = seat.record
            if not self._has_replay_left(record):
                continue
            try:
                released = session.release_for_replay(seat.lengths.ref)
            except Exception:  # the session's state is unknown; this request fails with it, others may move
                _logger.exception("request %d could not be released for a replay", record.id)
                continue
            if released:
                self._count_replay(record)
                self._requeue(seat)

    def _has_replay_left(self, record: RequestRecord) -> bool:
        return not record.cancelled and record.replays < self._max_replays

    def _count_replay(self, record: RequestRecord) -> None:
        record.replays += 1
        record.first_token_at = 0.0
        self._metrics.replayed += 1

    def _requeue(self, seat: Seat) -> None:
        self._coordinator.detach(seat)
        self._backlog.add(seat.record)
