"""Streamed text equals the one-shot text, however tokens split characters, stops cut it and readers come late."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st
from stream_reading import drained, joined

from edgellm.request import LLMGenerationRequest
from edgellm.sampling.params import SamplingParams
from edgellm.session.types import FinishReason, SessionOptions
from edgellm.streaming import StreamChannel, StreamChunk
from edgellm.testing.scripted_session import Script, ScriptedRuntime
from edgellm.testing.session_driver import SessionDriver
from edgellm.testing.toy_tokenizer import EOS_ID, PAD_ID, ToyTokenizer

ENCODE = ToyTokenizer().encode
LETTERS = st.text(alphabet="ab\u00e9\u20ac\U0001f600 ", max_size=12)
BROKEN_BYTES = st.sampled_from([0xC3, 0xE2, 0x82, 0xF0, 0x9F, 0xFF]).map(lambda byte: [byte + 2])
WORDS = st.sampled_from([[300], [301]])
SPECIAL = st.just([PAD_ID])
TOKENS = st.lists(st.one_of(LETTERS.map(ENCODE), BROKEN_BYTES, WORDS, SPECIAL), min_size=1, max_size=6).map(
    lambda pieces: [token for piece in pieces for token in piece][:40] or [PAD_ID]
)
STOPS = st.lists(
    st.one_of(
        st.text(alphabet="ab\u00e9\u20ac w3", min_size=1, max_size=3), st.sampled_from(["<pad>", "\ufffd", "w300 a"])
    ),
    max_size=3,
)


@settings(max_examples=300, deadline=None)
@given(
    tokens=TOKENS,
    ends=st.booleans(),
    stops=STOPS,
    include_stop=st.booleans(),
    skip=st.booleans(),
    late=st.integers(0, 45),
    interval=st.integers(1, 5),
    pending=st.integers(0, 3),
    run=st.integers(1, 4),
    read_after=st.sets(st.integers(0, 40)),
)
@example(  # the stop string completes only with the replacement of a cut character
    tokens=[*ENCODE("a"), 0xE2 + 2],
    ends=False,
    stops=["a\ufffd"],
    include_stop=False,
    skip=True,
    late=1,
    interval=1,
    pending=1,
    run=1,
    read_after=set(),
)
@example(  # an earlier stop string is undecided when a later one is complete
    tokens=ENCODE("ab"),
    ends=True,
    stops=["aba", "b"],
    include_stop=True,
    skip=False,
    late=2,
    interval=5,
    pending=1,
    run=2,
    read_after={0},
)
def test_any_reader_gets_the_text_of_the_response(
    tokens: list[int],
    ends: bool,
    stops: list[str],
    include_stop: bool,
    skip: bool,
    late: int,
    interval: int,
    pending: int,
    run: int,
    read_after: set[int],
) -> None:
    script = [*tokens, EOS_ID] if ends else tokens
    runtime = ScriptedRuntime(
        script=Script(tokens={1: script, 2: script}, commits_per_decode={1: run, 2: run}), max_batch_size=2
    )
    drive = SessionDriver(runtime.open_session(SessionOptions(allow_compact_execution=True)))
    params = SamplingParams(
        max_tokens=len(script),
        stop=stops,
        skip_special_tokens=skip,
        include_stop_str_in_output=include_stop,
    )
    early = StreamChannel.create(stream_interval=interval, max_pending_chunks=pending)
    later = StreamChannel.create(max_pending_chunks=pending)
    drive.admit(LLMGenerationRequest(prompt="p", sampling=params, stream_channel=early))
    drive.admit(LLMGenerationRequest(prompt="p", sampling=params))
    chunks: dict[StreamChannel, list[StreamChunk]] = {early: [], later: []}
    steps = 0
    while drive.live:
        if steps == late and 2 in drive.live:
            drive.session.attach_stream(drive.live[2].identity.resident, later)
        drive.step_all()
        if steps in read_after:
            for channel, got in chunks.items():
                got += drained(channel)
        steps += 1
    for channel, got in chunks.items():
        got += drained(channel)
    for request_id, channel in ((1, early), (2, later)):
        response = drive.response(request_id)
        # A reader that never came is served by the engine, from this very response.
        if channel.is_attached():
            assert joined(chunks[channel]) == (response.token_ids, response.text, response.finish_reason)
    assert drive.response(1) == drive.response(2)
    assert all(len(chunk.token_ids) >= interval for chunk in chunks[early][:-1])


@settings(max_examples=200, deadline=None)
@given(sizes=st.lists(st.integers(0, 3), max_size=60), limit=st.integers(1, 4), reads=st.sets(st.integers(0, 59)))
def test_a_bounded_channel_never_holds_more_chunks_and_never_loses_one(
    sizes: list[int], limit: int, reads: set[int]
) -> None:
    channel = StreamChannel.create(max_pending_chunks=limit)
    got: list[StreamChunk] = []
    next_token = 0
    for number, size in enumerate(sizes):
        ids = list(range(next_token, next_token + size))
        next_token += size
        channel.push(StreamChunk(ids, "".join(map(str, ids))))
        assert len(channel._pending) + (channel._merged is not None) <= limit
        if number in reads and (chunk := channel.try_pop()) is not None:
            got.append(chunk)
    channel.finish(FinishReason.LENGTH)
    unread = drained(channel)
    assert len(unread) <= limit
    ids, text, reason = joined(got + unread)
    assert (ids, text, reason) == (
        list(range(next_token)),
        "".join(map(str, range(next_token))),
        FinishReason.LENGTH,
    )
    assert [chunk.finished for chunk in got + unread] == [False] * (len(got) + len(unread) - 1) + [True]
