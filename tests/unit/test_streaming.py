"""`StreamChannel`: order, endings, cancellation, and the two ways to read it."""

import asyncio
import threading
import time

import pytest

from edgellm.errors import ContractViolation, InvalidArgumentError
from edgellm.request import CancelToken
from edgellm.sampling.logprobs import TokenLogprobs
from edgellm.session.types import FinishReason
from edgellm.streaming import DEFAULT_MAX_PENDING_CHUNKS, StreamChannel, StreamChunk


def chunk(*token_ids: int, text: str = "") -> StreamChunk:
    return StreamChunk(token_ids=list(token_ids), text=text)


def last(*token_ids: int, reason: FinishReason = FinishReason.LENGTH, text: str = "") -> StreamChunk:
    return StreamChunk(token_ids=list(token_ids), text=text, finished=True, reason=reason)


def test_constructor_is_refused_the_factory_is_the_only_way():
    with pytest.raises(ContractViolation, match="create"):
        StreamChannel()
    assert not StreamChannel.create().is_finished()


def test_chunks_arrive_in_order_and_finish_adds_a_terminal_chunk():
    channel = StreamChannel.create()
    channel.push(chunk(1, text="a"))
    channel.push(chunk(2, 3, text="bc"))
    assert channel.finish(FinishReason.END_ID)
    assert list(channel) == [
        chunk(1, text="a"),
        chunk(2, 3, text="bc"),
        StreamChunk(finished=True, reason=FinishReason.END_ID),
    ]
    assert channel.is_exhausted()


def test_finish_is_idempotent_and_the_first_reason_wins():
    channel = StreamChannel.create()
    assert channel.finish(FinishReason.LENGTH)
    assert not channel.finish(FinishReason.ERROR)
    assert channel.reason() is FinishReason.LENGTH
    assert [c.reason for c in channel] == [FinishReason.LENGTH]


def test_terminal_chunk_finishes_and_later_pushes_are_dropped():
    channel = StreamChannel.create()
    assert channel.push(last(7, reason=FinishReason.STOP_WORDS))
    assert not channel.push(chunk(8))
    assert not channel.finish(FinishReason.ERROR)
    assert list(channel) == [last(7, reason=FinishReason.STOP_WORDS)]


def test_finish_without_a_reason_is_an_error_that_changes_nothing():
    channel = StreamChannel.create(stream_interval=4)
    channel.push(chunk(1))
    with pytest.raises(InvalidArgumentError, match="NOT_FINISHED"):
        channel.finish(FinishReason.NOT_FINISHED)
    with pytest.raises(InvalidArgumentError, match="reason"):
        channel.push(StreamChunk(finished=True))
    with pytest.raises(InvalidArgumentError, match="reason"):
        channel.push(StreamChunk(reason=FinishReason.LENGTH))
    channel.finish(FinishReason.LENGTH)
    assert [c.token_ids for c in channel] == [[1]]


def test_attach_once_and_not_when_finished():
    channel = StreamChannel.create()
    channel.attach()
    with pytest.raises(ContractViolation, match="already serves"):
        channel.attach()
    finished = StreamChannel.create()
    finished.finish(FinishReason.CANCELLED)
    with pytest.raises(ContractViolation, match="single use"):
        finished.attach()


def test_detach_lets_an_unfinished_channel_serve_a_second_residency():
    channel = StreamChannel.create()
    with pytest.raises(ContractViolation, match="not attached"):
        channel.detach()
    channel.attach()
    channel.detach()
    channel.attach()
    channel.finish(FinishReason.LENGTH)
    with pytest.raises(ContractViolation, match="finished"):
        channel.detach()


def test_skip_special_tokens_is_set_before_attach():
    channel = StreamChannel.create(skip_special_tokens=True)
    channel.set_skip_special_tokens(False)
    assert channel.skip_special_tokens is False
    channel.attach()
    with pytest.raises(ContractViolation, match="attached"):
        channel.set_skip_special_tokens(True)
    assert channel.skip_special_tokens is False


def test_behaviour_43_interval_4_gives_chunks_of_4_or_more_and_delivers_the_tail():
    channel = StreamChannel.create(stream_interval=4)
    for token in range(10):
        channel.push(chunk(token, text=str(token)))
    assert channel.finish(FinishReason.LENGTH)
    got = list(channel)
    assert [c.token_ids for c in got] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [c.text for c in got] == ["0123", "4567", "89"]
    assert [c.finished for c in got] == [False, False, True]


def test_interval_below_one_counts_as_one():
    channel = StreamChannel.create(stream_interval=0)
    channel.set_stream_interval(-3)
    assert channel.stream_interval == 1
    channel.push(chunk(1))
    assert channel.try_pop() == chunk(1)


def test_merged_chunks_keep_one_logprob_entry_a_token():
    a, b = TokenLogprobs(1, -0.5), TokenLogprobs(2, -0.25)
    channel = StreamChannel.create(stream_interval=2)
    channel.push(StreamChunk([1], "x", logprobs=[a]))
    channel.push(StreamChunk([2], "y", logprobs=[b]))
    assert channel.try_pop() == StreamChunk([1, 2], "xy", logprobs=[a, b])


def test_behaviour_46_a_stalled_consumer_neither_blocks_the_producer_nor_loses_text():
    channel = StreamChannel.create(max_pending_chunks=3)
    for token in range(1000):
        channel.push(chunk(token))
    channel.finish(FinishReason.LENGTH)
    got = list(channel)
    assert len(got) == 3
    assert [t for c in got for t in c.token_ids] == list(range(1000))
    assert got[-1].finished
    with pytest.raises(InvalidArgumentError, match="-1"):
        StreamChannel.create(max_pending_chunks=-1)


def test_pending_chunks_are_delivered_after_finish_and_after_cancel():
    for end in (lambda c: c.finish(FinishReason.LENGTH), lambda c: c.cancel()):
        channel = StreamChannel.create()
        channel.push(chunk(1))
        channel.push(chunk(2))
        end(channel)
        assert [c.token_ids for c in channel][:2] == [[1], [2]]


def test_cancel_releases_a_waiting_consumer_at_once():
    channel = StreamChannel.create()
    got: list[StreamChunk | None] = []
    reader = threading.Thread(target=lambda: got.append(channel.wait_pop()))
    reader.start()
    time.sleep(0.02)
    channel.cancel()
    reader.join(5)
    assert got == [None]
    assert channel.is_cancelled()
    assert channel.is_exhausted()
    assert not channel.is_finished()


def test_cancel_after_the_end_has_no_effect():
    channel = StreamChannel.create()
    channel.finish(FinishReason.LENGTH)
    channel.cancel()
    assert not channel.is_cancelled()
    assert channel.reason() is FinishReason.LENGTH


def test_cancel_listeners_run_once_also_when_added_late():
    channel = StreamChannel.create()
    calls: list[str] = []
    channel.add_cancel_listener(lambda: calls.append("early"))
    channel.cancel()
    channel.cancel()
    channel.add_cancel_listener(lambda: calls.append("late"))
    assert calls == ["early", "late"]


def test_wait_pop_times_out_and_try_pop_never_waits():
    channel = StreamChannel.create()
    started = time.monotonic()
    assert channel.wait_pop(0.02) is None
    assert 0.015 < time.monotonic() - started < 5
    assert channel.try_pop() is None
    assert not channel.is_exhausted()


def test_consume_calls_the_handler_without_the_lock_and_returns_the_reason():
    channel = StreamChannel.create()
    seen: list[int] = []

    def handler(item: StreamChunk) -> None:
        channel.push(chunk(99))  # would deadlock if the lock were held; dropped after the end
        seen.extend(item.token_ids)

    channel.push(chunk(1))
    channel.push(last(2))
    assert channel.consume(handler) is FinishReason.LENGTH
    assert seen == [1, 2]


def test_consume_cancels_the_stream_when_its_handler_raises():
    channel = StreamChannel.create()
    channel.push(chunk(1))
    with pytest.raises(ZeroDivisionError):
        channel.consume(lambda _: 1 // 0)
    assert channel.is_cancelled()


def test_consume_follows_a_producer_on_another_thread():
    channel = StreamChannel.create()

    def produce() -> None:
        for token in range(200):
            channel.push(chunk(token))
        channel.finish(FinishReason.END_ID)

    producer = threading.Thread(target=produce)
    producer.start()
    seen: list[int] = []
    assert channel.consume(lambda c: seen.extend(c.token_ids)) is FinishReason.END_ID
    producer.join(5)
    assert seen == list(range(200))


def test_async_iterator_is_woken_by_a_producer_thread():
    channel = StreamChannel.create()

    def produce() -> None:
        for token in range(50):
            time.sleep(0.0005)
            channel.push(chunk(token))
        channel.finish(FinishReason.END_ID)

    async def read() -> list[StreamChunk]:
        return [item async for item in channel]

    producer = threading.Thread(target=produce)
    producer.start()
    got = asyncio.run(asyncio.wait_for(read(), 10))
    producer.join(5)
    assert [t for c in got for t in c.token_ids] == list(range(50))
    assert got[-1].reason is FinishReason.END_ID


def test_async_iterator_ends_when_cancelled_from_another_thread():
    channel = StreamChannel.create()
    threading.Timer(0.02, channel.cancel).start()

    async def read() -> list[StreamChunk]:
        return [item async for item in channel]

    assert asyncio.run(asyncio.wait_for(read(), 5)) == []


def test_pushing_after_the_readers_event_loop_closed_is_harmless():
    channel = StreamChannel.create()

    async def give_up() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(channel.__anext__(), 0.01)

    asyncio.run(give_up())
    assert channel.push(chunk(1))
    assert channel.try_pop() == chunk(1)


def test_a_stream_whose_event_loop_was_closed_under_the_reader_is_cancelled():
    channel, request = StreamChannel.create(), CancelToken()
    channel.claim(request.cancel)
    loop = asyncio.new_event_loop()
    task = loop.create_task(channel.__anext__())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert not request.cancelled
    assert channel.push(chunk(1))
    assert channel.is_cancelled()
    assert request.cancelled
    task._log_destroy_pending = False


def test_each_cancel_tells_the_request_again_and_the_listeners_once():
    channel = StreamChannel.create()
    told: list[str] = []
    channel.claim(lambda: told.append("request"))
    channel.add_cancel_listener(lambda: told.append("listener"))
    channel.cancel()
    channel.cancel()
    assert told == ["request", "listener", "request"]
    late = StreamChannel.create()
    late.cancel()
    late.claim(lambda: told.append("late"))
    assert told[3:] == ["late"]


def test_a_second_async_reader_is_refused_instead_of_hanging():
    async def read_twice():
        channel = StreamChannel.create()
        first = asyncio.ensure_future(channel.__anext__())
        await asyncio.sleep(0)
        with pytest.raises(ContractViolation, match="one reader"):
            await channel.__anext__()
        channel.attach()
        channel.push(StreamChunk(token_ids=[1], text="a"))
        return await asyncio.wait_for(first, 5)

    assert asyncio.run(read_twice()).token_ids == [1]


# ---- back-pressure ------------------------------------------------------------------------------------


def test_behaviour_46_the_default_bounds_the_chunks_and_keeps_every_token():
    channel = StreamChannel.create()
    assert channel.max_pending_chunks == DEFAULT_MAX_PENDING_CHUNKS == 64
    for token in range(5000):
        channel.push(chunk(token, text="x"))
    channel.finish(FinishReason.LENGTH)
    got = list(channel)
    assert [len(c.token_ids) for c in got] == [1] * 63 + [5000 - 63]
    assert [t for c in got for t in c.token_ids] == list(range(5000))
    assert got[-1].text == "x" * (5000 - 63)
    assert (got[-1].finished, got[-1].reason) == (True, FinishReason.LENGTH)


def test_a_reader_that_catches_up_gets_single_chunks_again():
    channel = StreamChannel.create(max_pending_chunks=2)
    for token in range(4):
        channel.push(chunk(token))
    assert channel.try_pop() == chunk(0)
    channel.push(chunk(4))  # there is room again: not merged into what was merged before
    assert [channel.try_pop(), channel.try_pop(), channel.try_pop()] == [chunk(1, 2, 3), chunk(4), None]


def test_zero_does_not_bound_and_one_hands_over_everything():
    free, one = StreamChannel.create(max_pending_chunks=0), StreamChannel.create(max_pending_chunks=1)
    for token in range(200):
        free.push(chunk(token))
        one.push(chunk(token))
    assert free.try_pop() == chunk(0)
    assert one.try_pop() == chunk(*range(200))


def test_merging_changes_no_chunk_of_the_producer_nor_one_that_was_read():
    channel = StreamChannel.create(max_pending_chunks=1)
    first, second = StreamChunk([1], "a", logprobs=[TokenLogprobs(1, -1.0)]), StreamChunk([2], "b")
    channel.push(first)
    channel.push(second)
    read = channel.try_pop()
    channel.push(chunk(3))
    assert (first.token_ids, second.token_ids) == ([1], [2])
    assert read == StreamChunk([1, 2], "ab", logprobs=[TokenLogprobs(1, -1.0)])


def test_a_long_stall_costs_linear_work():
    """100,000 merges; copying what is unread each time would be 5 * 10**9 list entries, minutes instead of this."""
    channel = StreamChannel.create(max_pending_chunks=1)
    started = time.process_time()
    for token in range(100_000):
        channel.push(chunk(token, text="x"))
    assert time.process_time() - started < 10
    assert len(channel.try_pop().token_ids) == 100_000


# ---- listeners ----------------------------------------------------------------------------------------


def test_a_listener_hears_of_chunks_the_end_and_nothing_that_is_held_back():
    channel = StreamChannel.create(stream_interval=2)
    calls: list[bool] = []
    channel.add_listener(lambda: calls.append(channel.is_finished()))
    assert calls == []
    channel.push(chunk(1))
    assert calls == []
    channel.push(chunk(2))
    channel.push(chunk(3))
    assert calls == [False]
    channel.finish(FinishReason.LENGTH)
    assert calls == [False, True]


def test_a_listener_added_late_is_called_at_once():
    calls: list[str] = []
    waiting, ended, gone = (StreamChannel.create() for _ in range(3))
    waiting.push(chunk(1))
    ended.finish(FinishReason.LENGTH)
    gone.cancel()
    for name, channel in (("waiting", waiting), ("ended", ended), ("gone", gone)):
        channel.add_listener(lambda name=name: calls.append(name))
    assert calls == ["waiting", "ended", "gone"]


def test_a_listener_hears_a_cancel_and_a_removed_one_nothing():
    channel = StreamChannel.create()
    calls: list[str] = []

    def removed() -> None:
        calls.append("removed")

    channel.add_listener(lambda: calls.append("kept"))
    channel.add_listener(removed)
    channel.remove_listener(removed)
    channel.remove_listener(removed)
    channel.cancel()
    assert calls == ["kept"]


def test_a_listener_that_raises_disturbs_neither_producer_nor_the_others(caplog):
    channel = StreamChannel.create()
    calls: list[int] = []

    def broken() -> None:
        raise SystemExit("listener bug")

    channel.add_listener(broken)
    channel.add_listener(lambda: calls.append(1))
    assert channel.push(chunk(1))
    assert calls == [1]
    assert "a stream listener raised" in caplog.text


def test_one_event_loop_follows_many_streams_through_listeners_without_a_thread_each():
    channels = [StreamChannel.create() for _ in range(20)]

    def produce() -> None:
        for token in range(25):
            for channel in channels:
                channel.push(chunk(token))
        for channel in channels:
            channel.finish(FinishReason.END_ID)

    async def follow() -> list[list[int]]:
        loop, threads = asyncio.get_running_loop(), threading.active_count()
        ready: asyncio.Queue[int] = asyncio.Queue()
        for index, channel in enumerate(channels):
            channel.add_listener(lambda index=index: loop.call_soon_threadsafe(ready.put_nowait, index))
        producer = threading.Thread(target=produce)
        producer.start()
        got: list[list[int]] = [[] for _ in channels]
        while not all(channel.is_exhausted() for channel in channels):
            index = await asyncio.wait_for(ready.get(), 10)
            while (item := channels[index].try_pop()) is not None:
                got[index] += item.token_ids
            assert threading.active_count() <= threads + 1
        producer.join()
        return got

    assert asyncio.run(follow()) == [list(range(25))] * 20


# ---- claims, and the collector ------------------------------------------------------------------------


def test_a_claimed_channel_belongs_to_one_request():
    channel = StreamChannel.create()
    first, second = CancelToken(), CancelToken()
    channel.claim(first.cancel)
    with pytest.raises(InvalidArgumentError, match="its own channel"):
        channel.claim(second.cancel)
    with pytest.raises(ContractViolation, match="before submitting"):
        channel.set_skip_special_tokens(True)
    channel.unclaim(second.cancel)
    with pytest.raises(InvalidArgumentError, match="its own channel"):
        channel.claim(second.cancel)
    channel.unclaim(first.cancel)
    channel.claim(second.cancel)
    channel.attach()
    channel.detach()
    channel.attach()
    channel.finish(FinishReason.LENGTH)
    with pytest.raises(InvalidArgumentError):
        channel.claim(first.cancel)


def test_a_cancel_from_inside_a_push_does_not_deadlock():
    """The collector may run a dropped stream's finaliser anywhere, also where this thread holds the channel's lock."""
    channel = StreamChannel.create(max_pending_chunks=1)

    class Tokens(list):
        def __iter__(self):
            channel.cancel()
            return super().__iter__()

    channel.push(StreamChunk(token_ids=Tokens([1])))
    pusher = threading.Thread(target=channel.push, args=(StreamChunk(token_ids=Tokens([2])),), daemon=True)
    pusher.start()
    pusher.join(5)
    assert not pusher.is_alive()
    assert channel.is_cancelled()
    assert [c.token_ids for c in channel] == [[1, 2]]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("stream_interval", "1", "stream_interval is '1'; it must be an integer"),
        ("stream_interval", None, "stream_interval is None; it must be an integer"),
        ("stream_interval", 1.5, r"stream_interval is 1\.5; it must be an integer"),
        ("max_pending_chunks", True, "max_pending_chunks is True; it must be an integer from 0"),
        ("max_pending_chunks", 10**400, r"max_pending_chunks is 10+\.\.\.; it must be an integer from 0"),
        ("skip_special_tokens", 1, "skip_special_tokens is 1; it must be True or False"),
    ],
)
def test_options_of_another_type_are_refused(option, value, message):
    with pytest.raises(InvalidArgumentError, match=message):
        StreamChannel.create(**{option: value})


def test_a_wait_may_be_longer_than_a_lock_takes_and_must_be_a_number():
    channel = StreamChannel.create()
    channel.push(StreamChunk(token_ids=[7]))
    assert channel.wait_pop(1e308).token_ids == [7]
    with pytest.raises(InvalidArgumentError, match="timeout is nan; it must be a number of seconds, 0 or more"):
        channel.wait_pop(float("nan"))
