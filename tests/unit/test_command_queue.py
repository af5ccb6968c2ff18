"""Command queue and engine channel: bounds, the gate, reservations, cancel by id, one exit."""

import threading

import pytest

from edgellm.engine.command_queue import (
    CommandQueue,
    EngineChannel,
    ShutdownCommand,
    ShutdownMode,
    SubmitCommand,
)
from edgellm.engine.config import EngineConfig
from edgellm.engine.metrics import EngineMetrics
from edgellm.engine.records import RequestHandle, RequestRecord, TerminalStatus
from edgellm.errors import ContractViolation, InvalidArgumentError, RequestCancelled, RequestFailed, SubmitError
from edgellm.request import LLMGenerationRequest, LLMGenerationResponse
from edgellm.session.types import FinishReason
from edgellm.streaming import StreamChannel


def make_channel(**config: int) -> EngineChannel:
    return EngineChannel(EngineConfig(**config), EngineMetrics())


def make_record(channel: EngineChannel, request_id: int | None = None) -> RequestRecord:
    return RequestRecord(
        request_id=channel.next_id() if request_id is None else request_id,
        request=LLMGenerationRequest(prompt="p"),
        channel=StreamChannel.create(),
        note_cancel=channel.note_cancel,
    )


def response() -> LLMGenerationResponse:
    return LLMGenerationResponse(text="t", token_ids=[1], finish_reason=FinishReason.END_ID, prompt_tokens=1)


@pytest.mark.parametrize(("asked", "got"), [(1, 2), (2, 2), (3, 4), (5, 8), (64, 64), (65, 128)])
def test_behaviour_1_capacity_rounds_up_to_a_power_of_two(asked, got):
    assert CommandQueue(asked).capacity == got


@pytest.mark.parametrize("capacity", [0, -1])
def test_behaviour_1_capacity_below_one_is_an_error(capacity):
    with pytest.raises(InvalidArgumentError, match=str(capacity)):
        CommandQueue(capacity)
    with pytest.raises(InvalidArgumentError, match="command_queue_capacity"):
        EngineConfig(command_queue_capacity=capacity)


def test_behaviour_2_push_to_a_full_queue_returns_false_and_drops_the_command():
    channel = make_channel()
    queue = CommandQueue(2)
    commands = [SubmitCommand(make_record(channel)) for _ in range(3)]
    assert [queue.push(command) for command in commands] == [True, True, False]
    assert queue.pop() is commands[0]
    assert queue.push(commands[2])
    assert [queue.pop(), queue.pop(), queue.pop()] == [commands[1], commands[2], None]


def test_queue_is_fifo_per_producer():
    queue = CommandQueue(4096)
    channel = make_channel(max_pending_requests=4096)
    per_thread = [[SubmitCommand(make_record(channel)) for _ in range(200)] for _ in range(4)]
    threads = [threading.Thread(target=lambda mine=mine: [queue.push(c) for c in mine]) for mine in per_thread]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    popped = []
    while (command := queue.pop()) is not None:
        popped.append(command)
    assert len(popped) == 800
    for mine in per_thread:
        assert [c for c in popped if c in mine] == mine


def test_shutdown_command_bypasses_a_full_queue():
    channel = make_channel(command_queue_capacity=2)
    for _ in range(2):
        channel.accept(make_record(channel))
    channel.begin_shutdown(ShutdownMode.DRAIN)
    commands = [channel.queue.pop() for _ in range(3)]
    assert isinstance(commands[2], ShutdownCommand)


def test_behaviour_2_full_queue_refuses_the_post_and_forgets_the_record():
    channel = make_channel(command_queue_capacity=2)
    for _ in range(2):
        channel.accept(make_record(channel))
    record = make_record(channel)
    with pytest.raises(SubmitError, match="command queue"):
        channel.accept(record)
    assert channel.pending == 2
    assert channel.metrics.submitted == 2
    assert channel.metrics.refused == 1
    channel.cancel_record(record.id)
    assert not record.cancelled


def test_behaviour_3_the_pending_limit_counts_beyond_the_queue():
    channel = make_channel(max_pending_requests=3)
    for _ in range(3):
        channel.accept(make_record(channel))
        channel.queue.pop()
    with pytest.raises(SubmitError, match="max_pending_requests is 3"):
        channel.accept(make_record(channel))
    assert channel.pending == 3


def test_request_ids_start_at_1_and_increase():
    channel = make_channel()
    assert [channel.next_id() for _ in range(4)] == [1, 2, 3, 4]
    assert channel.pending == 0


def test_the_first_shutdown_mode_wins_and_closes_the_gate():
    channel = make_channel()
    record = make_record(channel)
    channel.begin_shutdown(ShutdownMode.DRAIN)
    channel.begin_shutdown(ShutdownMode.CANCEL)
    assert channel.shutdown_mode is ShutdownMode.DRAIN
    assert len(channel.queue) == 1
    with pytest.raises(SubmitError, match="shutting down"):
        channel.accept(record)
    assert channel.metrics.refused == 1


def test_behaviour_7_cancel_with_a_full_queue_still_works():
    channel = make_channel(command_queue_capacity=2)
    records = [make_record(channel) for _ in range(2)]
    for record in records:
        channel.accept(record)
    channel.cancel_record(records[1].id)
    assert [record.cancelled for record in records] == [False, True]
    assert records[1].channel.is_cancelled()
    assert channel.take_cancel_note()
    assert not channel.take_cancel_note()


def test_behaviour_8_late_cancel_of_a_retired_id_touches_nobody():
    channel = make_channel()
    old, new = make_record(channel), make_record(channel)
    channel.accept(old)
    channel.accept(new)
    channel.terminate(old, TerminalStatus.COMPLETED, response=response())
    channel.cancel_record(old.id)
    old.cancel()
    channel.cancel_record(99)
    assert not new.cancelled
    assert not old.cancelled
    assert not channel.take_cancel_note()


def test_cancelling_the_stream_plants_the_flag_on_the_record():
    channel = make_channel()
    record = make_record(channel)
    channel.accept(record)
    record.channel.cancel()
    assert record.cancelled
    assert record.cancel_token.cancelled
    assert channel.take_cancel_note()


def test_terminate_publishes_once_gives_the_reservation_back_and_ends_the_stream():
    channel = make_channel()
    record = make_record(channel)
    channel.accept(record)
    channel.terminate(record, TerminalStatus.EXECUTION_ERROR, "broken")
    channel.terminate(record, TerminalStatus.CANCELLED)
    assert channel.pending == 0
    assert (record.status, record.error_message) == (TerminalStatus.EXECUTION_ERROR, "broken")
    assert (channel.metrics.failed, channel.metrics.cancelled) == (1, 0)
    assert record.channel.reason() is FinishReason.ERROR
    assert record.request is None
    with pytest.raises(ContractViolation, match="final"):
        record.publish(TerminalStatus.COMPLETED, "", response())


def test_behaviour_10_error_outcome_survives_a_later_cancel_of_the_stream():
    channel = make_channel()
    record = make_record(channel)
    channel.accept(record)
    channel.terminate(record, TerminalStatus.EXECUTION_ERROR, "the device caught fire")
    record.channel.cancel()
    with pytest.raises(RequestFailed, match="the device caught fire"):
        RequestHandle(record).get(1)


def test_outcome_is_published_before_the_stream_ends():
    channel = make_channel()
    record = make_record(channel)
    seen = []
    record.add_done_callback(lambda: seen.append(record.channel.is_finished()))
    channel.accept(record)
    channel.terminate(record, TerminalStatus.CANCELLED)
    assert seen == [False]
    assert record.channel.reason() is FinishReason.CANCELLED


def test_a_raising_done_callback_hinders_nobody():
    channel = make_channel()
    record = make_record(channel)
    seen = []
    record.add_done_callback(lambda: 1 // 0)
    record.add_done_callback(lambda: seen.append("second"))
    channel.accept(record)
    channel.terminate(record, TerminalStatus.COMPLETED, response=response())
    record.add_done_callback(lambda: seen.append("late"))
    assert seen == ["second", "late"]
    assert RequestHandle(record).get(1).text == "t"


def test_get_of_a_cancelled_request_does_not_wait_for_the_outcome():
    channel = make_channel()
    record = make_record(channel)
    handle = RequestHandle(record)
    with pytest.raises(TimeoutError, match=r"0\.01"):
        handle.get(0.01)
    threading.Timer(0.02, handle.cancel).start()
    with pytest.raises(RequestCancelled, match=f"request {record.id}"):
        handle.get(10)
    assert not handle.ready()


def test_get_after_a_finished_stream_waits_for_the_outcome():
    channel = make_channel()
    record = make_record(channel)
    channel.accept(record)
    record.channel.finish(FinishReason.END_ID)
    handle = RequestHandle(record)
    with pytest.raises(TimeoutError):
        handle.get(0.01)
    threading.Timer(0.02, lambda: channel.terminate(record, TerminalStatus.COMPLETED, response=response())).start()
    assert handle.get(10).text == "t"


def test_cancel_after_the_stream_ended_still_waits_for_the_outcome():
    channel = make_channel()
    record = make_record(channel)
    channel.accept(record)
    record.channel.finish(FinishReason.ERROR)
    handle = RequestHandle(record)
    handle.cancel()
    with pytest.raises(TimeoutError):
        handle.get(0.01)
    channel.terminate(record, TerminalStatus.EXECUTION_ERROR, "row fault")
    with pytest.raises(RequestFailed, match="row fault"):
        handle.get(1)


def test_interrupt_in_get_cancels_the_request(monkeypatch):
    channel = make_channel()
    record = make_record(channel)

    def interrupted(self, timeout):
        raise KeyboardInterrupt

    monkeypatch.setattr(RequestRecord, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        RequestHandle(record).get()
    assert record.cancelled
    assert record.channel.is_cancelled()


def test_park_returns_at_once_with_a_command_and_wakes_on_one():
    channel = EngineChannel(EngineConfig(idle_wait=30.0), EngineMetrics())
    channel.accept(make_record(channel))
    channel.park()
    channel.queue.pop()
    threading.Timer(0.02, lambda: channel.accept(make_record(channel))).start()
    channel.park()
    assert channel.metrics.actor_wakeups == 2
    assert len(channel.queue) == 1
