"""Cases 21 and 22: finish rules inside one accepted run, and cancels in every state."""

from __future__ import annotations

import pytest
from engine_hand import Hand
from plugin_policies import PLUGINS

from edgellm.engine.records import TerminalStatus
from edgellm.plugins import load_plugins
from edgellm.request import LLMGenerationRequest
from edgellm.sampling.params import SamplingParams
from edgellm.sampling.structured import StructuredOutput
from edgellm.session.types import FinishReason, SessionOptions
from edgellm.streaming import StreamChannel
from edgellm.testing.scripted_session import Script, ScriptedRuntime
from edgellm.testing.session_driver import SessionDriver
from edgellm.testing.toy_drafter import ScriptedDrafter
from edgellm.testing.toy_runtime import toy_runtime
from edgellm.testing.toy_tokenizer import EOS_ID

SPECULATIVE = ["eagle", "dflash", "shared-kv", "mtp"]
COMPACT = SessionOptions(allow_compact_execution=True)
STOP = 300
RUN = [10, 11, STOP, 20, 21, 22]


def flavoured(flavour, **options):
    return toy_runtime(flavour, plugins=load_plugins(extra=PLUGINS, autoload=False, strict=True), **options)


def run_scripted(tokens, *, first=99, **sampling):
    """(snapshot, deltas, streamed tokens, executed lengths) of one accepted run behind a first token."""
    script = Script(tokens={1: [first, *tokens]}, commits_per_decode={1: len(tokens)})
    drive = SessionDriver(ScriptedRuntime(script=script).open_session(COMPACT))
    channel = StreamChannel.create()
    drive.admit(
        LLMGenerationRequest(prompt="abc", sampling=SamplingParams(**sampling), stream_channel=channel), request_id=1
    )
    drive.run()
    streamed = [token for chunk in channel for token in chunk.token_ids]
    response = drive.response(1)
    executed = [row.query_length for result in drive.results for row in result.execution]
    drive.session.close()
    return drive.finished[1], response, streamed, executed


@pytest.mark.parametrize("cap", [4, 5, 6, 7])
def test_case_21_a_stop_token_inside_a_run_wins_over_a_later_cap(cap):
    """sgl-project/sglang #31599: run [10, 11, STOP, 20, 21, 22], cap 5.

    Expect: nothing behind STOP in ids, stream, usage or committed length; reason stop, also with the cap exactly there.
    """
    snapshot, response, streamed, executed = run_scripted(RUN, stop_token_ids=(STOP,), max_tokens=cap)
    assert snapshot.generated_ids == streamed == response.token_ids == [99, 10, 11, STOP]
    assert snapshot.terminal_reason is FinishReason.END_ID
    assert snapshot.generate_length == 4
    assert executed == [3, 3]


@pytest.mark.parametrize("place", range(6))
def test_case_21_end_of_sequence_at_each_position_of_a_run(place):
    """openvinotoolkit/openvino.genai #4081: the same with the model's own end token."""
    tokens = [*RUN[:place], EOS_ID, *RUN[place + 1 :]]
    snapshot, response, streamed, executed = run_scripted(tokens, max_tokens=20)
    assert snapshot.generated_ids == streamed == response.token_ids == [99, *RUN[:place], EOS_ID]
    assert snapshot.terminal_reason is FinishReason.END_ID
    assert executed == [3, place + 1]


@pytest.mark.parametrize("cap", [2, 3, 4])
def test_case_21_a_cap_inside_a_run(cap):
    """vllm-project/vllm PR #47616: the cap before the stop token is a length, and cuts the run there."""
    snapshot, _, streamed, executed = run_scripted(RUN, stop_token_ids=(STOP,), max_tokens=cap)
    expected = [99, *RUN][:cap]
    assert snapshot.generated_ids == streamed == expected
    reason = FinishReason.END_ID if expected[-1] == STOP else FinishReason.LENGTH
    assert snapshot.terminal_reason is reason
    assert sum(executed) == 3 + cap - 1


def test_case_21_a_stop_string_over_two_tokens_of_a_run():
    """The text ends before it; ids name what was generated, nothing behind the token that completed it."""
    letters = [2 + ord(letter) for letter in "xSTyz"]
    snapshot, response, streamed, executed = run_scripted(letters, first=2 + ord("w"), stop=["ST"], max_tokens=20)
    assert response.text == "wx"
    assert response.finish_reason is FinishReason.STOP_WORDS
    assert snapshot.generated_ids == streamed == [2 + ord(letter) for letter in "wxST"]
    assert executed == [3, 3]


@pytest.mark.parametrize("flavour", SPECULATIVE)
@pytest.mark.parametrize("place", [2, 3, 4])
def test_case_21_logprobs_are_as_many_as_tokens_and_nothing_behind_the_stop_is_published(flavour, place):
    """One entry a token, the same values as decoded one by one; a later prompt reuses only what is in the text."""
    runtime = flavoured(flavour, drafter=ScriptedDrafter(default=3))
    # A decoder that only verifies refuses `disable_spec_decode`; the plain deployment of its model stands in for it.
    verifies_only = flavour == "shared-kv"
    plain = flavoured("attention") if verifies_only else runtime
    prompt = [40 + n for n in range(9)]
    truth = runtime.solo(prompt, 12)
    params = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 12, "logprobs": 1}
    values = []
    for disabled, served_by in ((False, runtime), (True, plain)):
        drive = SessionDriver(served_by.open_session(COMPACT))
        drive.admit(
            LLMGenerationRequest(
                prompt_token_ids=prompt,
                sampling=SamplingParams(stop_token_ids=(truth[place - 1],), **params),
                disable_spec_decode=disabled and not verifies_only,
            )
        )
        drive.run()
        snapshot = drive.finished[1]
        assert snapshot.generated_ids == truth[:place]
        assert snapshot.terminal_reason is FinishReason.END_ID
        assert len(snapshot.logprobs) == place
        assert sum(row.query_length for result in drive.results for row in result.execution) <= len(prompt) + place - 1
        values.append(snapshot.logprobs)
        drive.session.close()
    assert values[0] == values[1]
    drive = SessionDriver(runtime.open_session(COMPACT))
    again = drive.admit(
        LLMGenerationRequest(prompt_token_ids=[*prompt, *truth], sampling=SamplingParams(**{**params, "max_tokens": 3}))
    )
    assert again.prefill_start <= len(prompt) + place - 1
    drive.run()
    assert drive.finished[1].generated_ids == runtime.solo([*prompt, *truth], 3)
    drive.session.close()
    runtime.close()
    if plain is not runtime:
        plain.close()


@pytest.mark.parametrize("flavour", ["attention", *SPECULATIVE])
def test_case_21_a_grammar_that_ends_inside_a_run(flavour):
    """The matcher takes what is in the text and no token more; the neighbour's text is its own."""
    runtime = flavoured(flavour, drafter=ScriptedDrafter(default=3))
    drive = SessionDriver(runtime.open_session(COMPACT))
    prompt, other = [5, 6, 7, 8, 9], [50, 51, 52]
    params = {"temperature": 0.0, "max_tokens": 12}
    guided = SamplingParams(structured=StructuredOutput(choice=["ab"]), **params)
    drive.admit(LLMGenerationRequest(prompt_token_ids=prompt, sampling=guided))
    drive.admit(LLMGenerationRequest(prompt_token_ids=other, sampling=SamplingParams(ignore_eos=True, **params)))
    drive.run()
    assert drive.response(1).text == "ab"
    assert drive.finished[1].terminal_reason is FinishReason.END_ID
    assert drive.finished[1].generated_ids == [2 + ord("a"), 2 + ord("b"), EOS_ID]
    assert drive.finished[2].generated_ids == runtime.solo(other, 12)
    drive.session.close()
    runtime.close()


LONG = list(range(10, 46))
STATES = {
    "queued": lambda hand, record: True,
    "first chunk": lambda hand, record: 0 < hand.remaining(record) < len(LONG),
    "mixed step": lambda hand, record: hand.committed(record) >= 20,
    "decoding": lambda hand, record: hand.committed(record) >= len(LONG),
    "verifying": lambda hand, record: hand.committed(record) >= len(LONG) + 3,
}


@pytest.mark.parametrize("how", ["handle", "stream", "deadline", "twice"])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("flavour", ["attention", "hybrid", "recurrent", "eagle", "mtp"])
def test_case_22_a_cancel_in_every_state_gives_everything_back_without_further_traffic(flavour, state, how):
    """ROCm/ATOM PR #1562, NVIDIA/TensorRT-LLM #10810, vllm-project/vllm #44100: stream, handle, timeout, twice.

    Expect: at most one more step for it, pools at the baseline without further traffic, the neighbour's text its own.
    """
    hand = Hand(flavoured(flavour, drafter=ScriptedDrafter(default=1)))
    params = {"temperature": 0.0, "ignore_eos": True, "logprobs": 2}
    near = [5, 6, 7]
    neighbour = hand.submit(
        LLMGenerationRequest(prompt_token_ids=near, sampling=SamplingParams(max_tokens=40, **params))
    )
    hand.until(lambda: hand.committed(neighbour) > 4, "the neighbour never decoded")
    record = hand.submit(
        LLMGenerationRequest(
            prompt_token_ids=LONG,
            sampling=SamplingParams(max_tokens=12, **params),
            stream_channel=StreamChannel.create() if how == "stream" else None,
        )
    )
    hand.until(lambda: STATES[state](hand, record), f"never {state}")
    if how == "stream":
        record.channel.cancel()
    elif how == "deadline":
        record.expire()
    else:
        record.cancel()
    if how == "twice":
        record.cancel()
    steps = hand.steps()
    hand.boundary()
    assert record.status is TerminalStatus.CANCELLED
    assert record.timed_out == (how == "deadline")
    assert hand.steps() - steps <= 1
    assert hand.residents() == {neighbour.id}
    hand.until(lambda: neighbour.outcome_published, "the neighbour never ended")
    assert neighbour.response.token_ids == hand.runtime.solo(near, 40)
    assert len(neighbour.response.logprobs) == 40
    assert hand.leased() == 0
    again = hand.submit(LLMGenerationRequest(prompt_token_ids=LONG, sampling=SamplingParams(max_tokens=12, **params)))
    hand.until(lambda: again.outcome_published, "the repeated prompt never ended")
    assert again.response.token_ids == hand.runtime.solo(LONG, 12)
    hand.close()
