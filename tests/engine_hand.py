"""An engine's actor whose boundaries the test's own thread runs, over the integer toy model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from edgellm.engine.actor import EngineActor
from edgellm.engine.command_queue import EngineChannel
from edgellm.engine.config import EngineConfig
from edgellm.engine.metrics import EngineMetrics
from edgellm.engine.records import RequestRecord
from edgellm.request import LLMGenerationRequest
from edgellm.session.types import SessionOptions
from edgellm.testing.recount import recount

if TYPE_CHECKING:
    from edgellm.runtime.rank_runtime import LLMRankRuntime


class Hand:
    """Steps can be counted, and pages read, between two boundaries."""

    def __init__(self, runtime: LLMRankRuntime, config: EngineConfig | None = None) -> None:
        self.runtime = runtime
        config = config if config is not None else EngineConfig(step_token_budget=8)
        self.channel = EngineChannel(config, EngineMetrics())
        self.actor = EngineActor(
            channel=self.channel,
            config=config,
            open_session=lambda: runtime.open_session(SessionOptions(allow_compact_execution=True)),
            device_healthy=None,
            close_runtime=None,
        )
        self.actor._open()

    def submit(self, asked: LLMGenerationRequest) -> RequestRecord:
        record = RequestRecord(
            request_id=self.channel.next_id(),
            request=asked,
            channel=asked.stream_channel,
            note_cancel=self.channel.note_cancel,
            note_stream=self.channel.note_stream,
        )
        self.channel.accept(record)
        return record

    def boundary(self) -> None:
        self.actor._drain()
        if self.actor.queued() or self.actor.resident():
            self.actor._boundary()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Run boundaries until the condition holds."""
        for _ in range(200):
            if condition():
                return
            self.boundary()
        raise AssertionError(what)

    def steps(self) -> int:
        return int(self.runtime.executor.num_forwards)

    def leased(self) -> int:
        """Units of all four pools that somebody holds."""
        return sum(pool.leased for pool in recount(self.runtime.coordinator).pools)

    def residents(self) -> set[int]:
        return {int(seat.record.id) for seat in self.actor._coordinator.seats()}

    def remaining(self, record: RequestRecord) -> int:
        """Prompt tokens that a resident still has to run; -1 when it has no seat."""
        seats = {seat.record.id: seat.lengths.prompt_remaining for seat in self.actor._coordinator.seats()}
        return seats.get(record.id, -1)

    def committed(self, record: RequestRecord) -> int:
        return {seat.record.id: seat.lengths.committed for seat in self.actor._coordinator.seats()}.get(record.id, 0)

    def close(self) -> None:
        """End everything; nothing may be leased any more."""
        self.actor._final_sweep()
        assert self.leased() == 0
        self.runtime.close()
