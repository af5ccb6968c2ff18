"""The session rules that need no device, over a scripted session (specification, behaviours tagged S)."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from edgellm.errors import (
    INPUT_TOO_LONG_MARKER,
    AdmissionError,
    ContractViolation,
    InputTooLongError,
    SessionLostError,
    UnsupportedRequestError,
)
from edgellm.request import CancelToken, LLMGenerationRequest
from edgellm.sampling.params import SamplingParams
from edgellm.sampling.structured import StructuredOutput
from edgellm.session.base import RuntimeSession
from edgellm.session.frame import SessionState
from edgellm.session.types import (
    AdmissionStatus,
    FinishReason,
    RequestId,
    ResidentRef,
    SequenceWork,
    SessionOptions,
    StepResult,
)
from edgellm.streaming import StreamChannel
from edgellm.testing.scripted_session import Script, ScriptedRuntime, ScriptedSession
from edgellm.testing.session_driver import SessionDriver
from edgellm.testing.toy_tokenizer import EOS_ID, ToyTokenizer

TOKENIZER = ToyTokenizer()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def make(
    *, compact: bool = True, script: Script | None = None, **options: Any
) -> tuple[ScriptedRuntime, SessionDriver]:
    runtime = ScriptedRuntime(script=script, **options)
    return runtime, SessionDriver(runtime.open_session(SessionOptions(allow_compact_execution=compact)))


def core(drive: SessionDriver) -> ScriptedSession:
    assert isinstance(drive.session, ScriptedSession)
    return drive.session


def request(prompt: str = "hello!", *, channel: StreamChannel | None = None, **fields: Any) -> LLMGenerationRequest:
    params = {name: fields.pop(name) for name in list(fields) if name in SamplingParams.__dataclass_fields__}
    params.setdefault("max_tokens", 8)
    return LLMGenerationRequest(prompt=prompt, sampling=SamplingParams(**params), stream_channel=channel, **fields)


def fingerprint(drive: SessionDriver) -> object:
    """Everything a refused call must leave alone (specification 5.2)."""
    session = core(drive)
    session.check_invariants()
    ledgers = [(r.ref, r.committed, r.prompt_remaining, tuple(r.generated), r.reason) for r in session._order]
    return ledgers, session._slots.available(), session._next_step_id, frozenset(session._runtime.leased)


def text_of(channel: StreamChannel) -> str:
    out = ""
    while (chunk := channel.try_pop()) is not None:
        out += chunk.text
    return out


# ---- identity and admission -----------------------------------------------------------------------------


@pytest.mark.parametrize("request_id", [0, -3])
def test_behaviour_5_request_id_0_is_a_violation_and_changes_nothing(request_id: int) -> None:
    _, drive = make()
    before = fingerprint(drive)
    with pytest.raises(ContractViolation, match=f"request id is {request_id}"):
        drive.session.admit(request(), RequestId(request_id))
    assert fingerprint(drive) == before


def test_behaviour_6_a_resident_id_cannot_be_admitted_again() -> None:
    _, drive = make()
    drive.admit(request(), request_id=7)
    before = fingerprint(drive)
    with pytest.raises(ContractViolation, match="request 7 is resident already"):
        drive.session.admit(request(), RequestId(7))
    assert fingerprint(drive) == before


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"adapter_name": "a"}, "adapter_name is 'a'"),
        ({"speech_output": True}, "speech_output"),
        ({"save_system_prompt_kv_cache": True}, "save_system_prompt_kv_cache"),
        ({"trajectory": True}, "trajectory"),
        ({"num_sequences": 2}, "num_sequences is 2, the limit is 1"),
    ],
    ids=["behaviour_10_adapter", "11_speech", "11_capture", "11_trajectory", "11_two_sequences"],
)
def test_162_behaviours_10_and_11_kinds_that_are_never_served(fields: dict[str, Any], match: str) -> None:
    _, drive = make()
    drive.admit(request())
    before = fingerprint(drive)
    with pytest.raises(UnsupportedRequestError, match=match) as caught:
        drive.session.admit(request(**fields), RequestId(9))
    assert isinstance(caught.value, ValueError)
    assert fingerprint(drive) == before
    assert drive.step(drive.context(1)).ok


def test_admission_reports_lengths_of_the_templated_prompt_and_the_cached_prefix() -> None:
    _, drive = make(script=Script(cached_prefix=lambda prompt: 4))
    messages = [{"role": "user", "content": "hi"}]
    result = drive.admit(LLMGenerationRequest(messages=messages, sampling=SamplingParams(max_tokens=2)))
    assert result.prompt_length == len("[user]hi\n[assistant]")
    assert result.prefill_start == 4
    assert not drive.session.idle()
    executed = drive.step(drive.context(1)).execution[0]
    assert (executed.past_length, executed.query_length) == (4, result.prompt_length - 4)


def test_content_items_are_joined_before_the_template() -> None:
    _, drive = make()
    items = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    result = drive.admit(LLMGenerationRequest(messages=[{"role": "user", "content": items}]))
    assert result.prompt_length == len("[user]ab\n[assistant]")


BAD_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({}, "has none"),
    ({"prompt": "a", "prompt_token_ids": [3]}, "has prompt_token_ids, prompt"),
    ({"prompt": ""}, "the prompt is empty"),
    ({"prompt_token_ids": []}, "the prompt is empty"),
    ({"messages": []}, "messages is empty"),
    ({"prompt_token_ids": [5, 512, 6]}, "prompt token 512 at position 1 .* from 0 to 511"),
    ({"prompt_token_ids": [5, -1]}, "prompt token -1 at position 1"),
    ({"prompt_token_ids": [2**40]}, "prompt token 1099511627776"),
    ({"prompt_token_ids": [1.5]}, "is 1.5; a token id is an integer"),
    ({"prompt_token_ids": [True]}, "is True; a token id is an integer"),
    ({"prompt_token_ids": [[1, 2]]}, "flat list of integers"),
    ({"prompt_token_ids": [[1, 2], [3]]}, "flat list of integers for one prompt"),
    ({"prompt": 7}, "prompt is a int"),
    ({"prompt": "x" * (2**20 + 1)}, "has 1048577 bytes, the limit is 1048576"),
    ({"prompt": "\ud800"}, "lone surrogates"),
    ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\] has the role 'robot'; known roles are system"),
    ({"messages": [{"role": "user"}]}, r"messages\[0\] has no content"),
    ({"messages": ["hello"]}, r"messages\[0\] is a str"),
    ({"messages": "hello"}, "messages is a str"),
    ({"messages": [{"role": "user", "content": "x"}] * 4097}, "has 4097 entries, the limit is 4096"),
    ({"messages": [{"role": "user", "content": "x" * (2**17 + 1)}]}, "has 131073 bytes, the limit is 131072"),
    ({"messages": [{"role": "user", "content": "x" * 2**17}] * 9}, "hold 1179648 bytes of text"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 19}]}, "19 items, the limit is 18"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "no encoder is loaded"),
    ({"messages": [{"role": "user", "content": 5}]}, "must be text or a list"),
    ({"prompt": "a", "sampling": SamplingParams(logit_bias={512: 1.0})}, "logit_bias names token id 512"),
    ({"prompt": "a", "sampling": "greedy"}, "sampling is a str"),
]


@pytest.mark.parametrize(("fields", "match"), BAD_REQUESTS, ids=[match[:40] for _, match in BAD_REQUESTS])
def test_section_5_3_bad_requests_are_refused_and_a_stream_beside_runs_on(fields: dict[str, Any], match: str) -> None:
    _, drive = make()
    drive.admit(request())
    drive.step(drive.context(1))
    before = fingerprint(drive)
    with pytest.raises(AdmissionError, match=match):
        drive.session.admit(LLMGenerationRequest(**fields), RequestId(2))
    assert fingerprint(drive) == before
    drive.run()
    assert len(drive.finished[1].generated_ids) == 8


def test_a_tokenizer_that_raises_is_an_admission_error() -> None:
    class Broken(ToyTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            raise RuntimeError("no such merge")

    _, drive = make(tokenizer=Broken())
    with pytest.raises(AdmissionError, match="tokenizer failed on this prompt: no such merge"):
        drive.admit(request())
    assert drive.session.idle()


def test_behaviour_12_prompt_beyond_the_capacity_carries_the_marker() -> None:
    _, drive = make(max_kv_capacity=16)
    with pytest.raises(InputTooLongError, match="has 17 tokens, the model context is 16") as caught:
        drive.admit(request("x" * 17))
    assert INPUT_TOO_LONG_MARKER in str(caught.value)
    assert drive.session.idle()


def test_prompt_beyond_the_whole_pool_never_fits_and_says_so() -> None:
    _, drive = make(num_pages=3, page_size=4)
    with pytest.raises(InputTooLongError, match=r"never fits: it needs 4 pages .* has 3; raise kv_budget"):
        drive.admit(request("x" * 12))
    assert drive.admit(request("x" * 10)).status is AdmissionStatus.ADMITTED


def test_behaviour_13_uncached_part_beyond_s_in_in_single_cohort_gives_the_lease_back() -> None:
    runtime, drive = make(compact=False, max_input_length=8)
    before = fingerprint(drive)
    with pytest.raises(InputTooLongError, match="9 of the prompt's 9 tokens are not cached, one step takes 8"):
        drive.admit(request("x" * 9))
    assert fingerprint(drive) == before
    assert runtime.leased == set()


def test_behaviour_14_long_prompt_with_a_short_uncached_tail_is_admitted() -> None:
    _, drive = make(compact=False, max_input_length=8, script=Script(cached_prefix=lambda prompt: 12))
    assert drive.admit(request("x" * 20)).prefill_start == 12


def test_compact_bounds_only_chunks_by_s_in() -> None:
    _, drive = make(max_input_length=8)
    assert drive.admit(request("x" * 30)).status is AdmissionStatus.ADMITTED
    drive.run(chunk=8)
    assert len(drive.finished[1].generated_ids) == 8


def test_behaviour_15_no_slot_is_no_capacity_and_a_retry_succeeds_after_one_finished() -> None:
    _, drive = make(max_batch_size=2)
    drive.admit(request(max_tokens=1))
    drive.admit(request())
    before = fingerprint(drive)
    late = request()
    assert drive.admit(late).status is AdmissionStatus.NO_CAPACITY
    assert fingerprint(drive) == before
    drive.step(drive.context(1))
    retried = drive.admit(late)
    assert retried.status is AdmissionStatus.ADMITTED
    assert retried.ref == ResidentRef(0, 2)


def test_behaviour_16_page_pressure_is_no_capacity_and_leaks_no_slot() -> None:
    script = Script()
    script.admissions.extend([AdmissionStatus.NO_CAPACITY, None])
    _, drive = make(script=script)
    before = fingerprint(drive)
    assert drive.admit(request()).status is AdmissionStatus.NO_CAPACITY
    assert fingerprint(drive) == before
    assert drive.admit(request()).ref == ResidentRef(0, 2)


def test_rejected_reservation_is_final_and_has_a_reason() -> None:
    script = Script()
    script.admissions.append(AdmissionStatus.REJECTED)
    _, drive = make(script=script)
    result = drive.admit(request())
    assert (result.status, result.reason) == (AdmissionStatus.REJECTED, "scripted rejected")
    assert drive.session.idle()


def test_behaviour_19_failed_reservation_loses_the_session() -> None:
    script = Script()
    script.admissions.append(OSError("device fell off the bus"))
    _, drive = make(script=script)
    with pytest.raises(SessionLostError, match="device fell off the bus"):
        drive.admit(request())
    with pytest.raises(ContractViolation, match="the session is lost"):
        drive.admit(request())
    assert core(drive).state is SessionState.LOST
    assert drive.session.residents() == []
    drive.session.close()


def test_behaviour_20_single_cohort_second_admission_before_the_context_step() -> None:
    _, drive = make(compact=False)
    drive.admit(request())
    before = fingerprint(drive)
    with pytest.raises(ContractViolation, match="request 1 was admitted and its context step has not run"):
        drive.admit(request())
    assert fingerprint(drive) == before


def test_behaviour_21_compact_admits_beside_an_unfinished_prompt() -> None:
    _, drive = make()
    drive.admit(request())
    drive.step(drive.context(1, 2))
    assert drive.admit(request()).status is AdmissionStatus.ADMITTED


def test_behaviour_22_failure_while_seating_rolls_everything_back() -> None:
    script = Script()
    script.seat_failures.append(MemoryError("no room"))
    runtime, drive = make(script=script)
    before = fingerprint(drive)
    channel = StreamChannel.create()
    result = drive.admit(request(channel=channel))
    assert (result.status, result.reason) == (AdmissionStatus.REJECTED, "seating failed: no room")
    assert fingerprint(drive) == before
    assert runtime.leased == set()
    assert not channel.is_attached()
    assert drive.admit(request(channel=channel)).status is AdmissionStatus.ADMITTED


def test_a_channel_in_use_rejects_the_request() -> None:
    _, drive = make()
    channel = StreamChannel.create()
    drive.admit(request(channel=channel))
    result = drive.admit(request(channel=channel))
    assert result.status is AdmissionStatus.REJECTED
    assert "already serves a sequence" in result.reason
    assert len(drive.session.residents()) == 1


def test_behaviour_23_budget_is_clamped_and_ends_with_length_there() -> None:
    _, drive = make(max_kv_capacity=16)
    drive.admit(request("x" * 10, max_tokens=500))
    drive.run()
    assert drive.finished[1].terminal_reason is FinishReason.LENGTH
    assert len(drive.finished[1].generated_ids) == 16 - 10


def test_behaviour_24_no_room_to_generate_is_rejected() -> None:
    _, drive = make(max_kv_capacity=16)
    result = drive.admit(request("x" * 16))
    assert result.status is AdmissionStatus.REJECTED
    assert result.reason == (
        "the prompt has 16 tokens; together with an answer of at least 1 it exceeds the 16 that a sequence may reach; "
        "shorten the prompt"
    )
    assert drive.admit(request("x" * 15)).status is AdmissionStatus.ADMITTED


def test_behaviour_25_session_lost_is_not_an_admission_error() -> None:
    assert not issubclass(SessionLostError, AdmissionError)
    assert not issubclass(AdmissionError, SessionLostError)


# ---- exclusivity and uniform sampling -------------------------------------------------------------------


def test_behaviour_26_token_callback_requires_exclusive_admission_and_a_guide_does_not() -> None:
    """Lifted for guides: a matcher belongs to its resident, not to a row, so guided sequences share steps."""
    _, drive = make()
    assert drive.session.requires_exclusive_admission(request(token_callback=lambda token_ids: None))
    guided = request()
    guided.sampling = SamplingParams(structured=StructuredOutput(regex="a"))
    assert not drive.session.requires_exclusive_admission(guided)
    guided.token_callback = lambda token_ids: None
    assert drive.session.requires_exclusive_admission(guided)
    assert not drive.session.requires_exclusive_admission(request())


def test_behaviours_27_to_29_exclusive_residents_refuse_company() -> None:
    _, drive = make()
    seen: list[list[int]] = []
    exclusive = request(token_callback=seen.append, max_tokens=3)
    drive.admit(request(max_tokens=1))
    with pytest.raises(ContractViolation, match="request 5 needs the session to itself, 1 sequences are resident"):
        drive.session.admit(exclusive, RequestId(5))
    drive.run()
    drive.admit(exclusive)
    assert drive.session.exclusive_resident()
    with pytest.raises(ContractViolation, match="has the session to itself"):
        drive.session.admit(request(), RequestId(9))
    drive.step(drive.context(2))
    drive.step(drive.decode(2))
    assert drive.session.exclusive_resident()
    assert drive.step(drive.decode(2)).finished
    assert not drive.session.exclusive_resident()
    assert [token for call in seen for token in call] == drive.finished[2].generated_ids


def test_168_plan_with_an_exclusive_resident_and_others_is_a_violation() -> None:
    """Admission never lets both in; should it ever, no step runs them together."""
    _, drive = make()
    for _ in range(2):
        drive.admit(request())
    core(drive)._order[0].exclusive = True
    before = fingerprint(drive)
    with pytest.raises(ContractViolation, match="V14 exclusive resident"):
        drive.session.execute([drive.context(1), drive.context(2)])
    assert fingerprint(drive) == before
    core(drive)._order[0].exclusive = False
    assert drive.step(drive.context(1), drive.context(2)).ok


def test_a_token_callback_that_raises_ends_its_own_request() -> None:
    def broken(token_ids: list[int]) -> None:
        raise ValueError("callback bug")

    _, drive = make()
    drive.admit(request(token_callback=broken))
    result = drive.step(drive.context(1))
    assert result.ok
    assert drive.finished[1].terminal_reason is FinishReason.ERROR
    assert "callback bug" in drive.finished[1].error_message
    assert drive.admit(request()).status is AdmissionStatus.ADMITTED


def test_a_callback_cannot_drive_the_session() -> None:
    _, drive = make()
    drive.admit(request(token_callback=lambda token_ids: drive.session.execute([]) and None))
    drive.step(drive.context(1))
    assert "not re-entrant" in drive.finished[1].error_message


def test_behaviour_31_uniform_sampling_on_a_speculative_deployment_only() -> None:
    _, vanilla = make()
    assert not vanilla.session.requires_uniform_sampling(request())
    _, speculative = make(uniform_sampling=True)
    assert speculative.session.requires_uniform_sampling(request())
    assert not speculative.session.requires_uniform_sampling(request(disable_spec_decode=True))


def test_behaviour_32_disagreeing_sampling_fails_loudly() -> None:
    _, drive = make(uniform_sampling=True)
    drive.admit(request(temperature=0.7))
    before = fingerprint(drive)
    with pytest.raises(ContractViolation, match="one set of sampling parameters per batch"):
        drive.admit(request(temperature=0.8))
    assert fingerprint(drive) == before
    assert drive.admit(request(temperature=0.7)).status is AdmissionStatus.ADMITTED


# ---- step results ---------------------------------------------------------------------------------------


def test_behaviours_48_and_51_context_then_decode_results() -> None:
    _, drive = make()
    for number in (1, 2, 3):
        drive.admit(request())
        result = drive.step(drive.context(number))
        assert result.work is SequenceWork.CONTEXT
        assert [d.query_length for d in result.execution] == [6]
        assert [(ref.slot, len(delta.token_ids)) for ref, delta in result.deltas] == [(number - 1, 1)]
    result = drive.step_all()
    assert result.work is SequenceWork.DECODE
    assert [p.request_id for p in result.participants] == [1, 2, 3]
    assert [d.query_length for d in result.execution] == [1, 1, 1]
    assert [ref for ref, _ in result.deltas] == drive.session.residents()


def test_behaviour_49_first_token_ends_the_sequence_in_its_context_step() -> None:
    _, drive = make(script=Script(tokens={1: [EOS_ID]}))
    drive.admit(request())
    result = drive.step(drive.context(1))
    assert result.deltas == []
    assert drive.finished[1].terminal_reason is FinishReason.END_ID
    assert drive.finished[1].generated_ids == [EOS_ID]
    assert drive.session.idle()


def test_behaviour_50_budget_1_ends_with_length_in_the_context_step() -> None:
    _, drive = make()
    drive.admit(request(max_tokens=1))
    drive.step(drive.context(1))
    assert drive.finished[1].terminal_reason is FinishReason.LENGTH


def test_behaviour_52_non_final_chunk_yields_no_token() -> None:
    _, drive = make()
    drive.admit(request())
    result = drive.step(drive.context(1, 4))
    assert result.deltas == []
    assert result.execution[0].select_last_token_logits is False
    assert core(drive)._order[0].committed == 4


def test_behaviour_54_mixed_step_reports_work_per_sequence() -> None:
    _, drive = make()
    drive.admit(request())
    drive.step(drive.context(1))
    drive.admit(request("other"))
    result = drive.step(drive.decode(1), drive.context(2, 4))
    assert result.compact
    assert result.work is SequenceWork.CONTEXT
    assert [d.work for d in result.execution] == [SequenceWork.DECODE, SequenceWork.CONTEXT]
    assert [ref.slot for ref, _ in result.deltas] == [0]


def test_behaviour_55_compact_step_of_decodes_only() -> None:
    _, drive = make()
    for number in (1, 2):
        drive.admit(request())
        drive.step(drive.context(number))
    result = drive.step(drive.decode(2))
    assert result.compact
    assert result.work is SequenceWork.DECODE


def test_behaviour_58_speculative_step_reports_the_accepted_length() -> None:
    _, drive = make(script=Script(commits_per_decode={1: 4}))
    drive.admit(request(max_tokens=20))
    drive.step(drive.context(1))
    result = drive.step(drive.decode(1))
    assert result.execution[0].query_length == 4
    assert len(result.deltas[0][1].token_ids) == 4
    assert core(drive)._order[0].committed == 6 + 4


def test_accepted_run_stops_at_the_first_finish() -> None:
    _, drive = make(script=Script(tokens={1: [100, 101, EOS_ID, 102]}, commits_per_decode={1: 3}))
    drive.admit(request(max_tokens=20))
    drive.run()
    assert drive.finished[1].generated_ids == [100, 101, EOS_ID]


def test_behaviours_59_and_62_step_ids_and_refs_never_repeat() -> None:
    _, drive = make(max_batch_size=1)
    refs = []
    for _ in range(3):
        drive.admit(request(max_tokens=2))
        refs += drive.session.residents()
        stale = drive.context(len(refs))
        drive.run()
        with pytest.raises(ContractViolation, match="has no resident"):
            drive.session.execute([stale])
    assert refs == [ResidentRef(0, 1), ResidentRef(0, 2), ResidentRef(0, 3)]
    assert [result.step_id for result in drive.results] == [1, 2, 3, 4, 5, 6]


def test_behaviour_60_prefill_that_fails_before_the_engine() -> None:
    _, drive = make(script=Script(row_errors={1: (0, "encoder said no")}))
    channel = StreamChannel.create()
    drive.admit(request(channel=channel))
    result = drive.step(drive.context(1))
    assert (result.ok, result.step_id, result.execution, result.compact) == (True, 0, [], False)
    assert drive.finished[1].terminal_reason is FinishReason.ERROR
    assert drive.finished[1].generated_ids == []
    assert drive.finished[1].error_message == "encoder said no"
    assert channel.reason() is FinishReason.ERROR


def test_a_row_that_fails_alone_leaves_the_others() -> None:
    _, drive = make(script=Script(row_errors={2: (2, "no page")}))
    for number in (1, 2, 3):
        drive.admit(request())
        drive.step(drive.context(number))
    drive.step_all()
    result = drive.step_all()
    assert [d.identity.request_id for d in result.execution] == [1, 3]
    assert drive.finished[2].terminal_reason is FinishReason.ERROR
    assert len(drive.finished[2].generated_ids) == 2
    drive.run()
    assert [len(drive.finished[number].generated_ids) for number in (1, 3)] == [8, 8]


def test_behaviours_61_and_63_deltas_and_snapshots_give_each_token_once_under_mixed_finishes() -> None:
    _, drive = make()
    for number, length in enumerate((3, 1, 7, 5), start=1):
        drive.admit(request("prompt number " + "i" * number, max_tokens=length))
    drive.run(chunk=5)
    solo_runtime, solo = make()
    for number, length in enumerate((3, 1, 7, 5), start=1):
        solo.admit(request("prompt number " + "i" * number, max_tokens=length))
        solo.run()
        assert drive.finished[number].generated_ids == solo.finished[number].generated_ids
        assert len(drive.finished[number].generated_ids) == length
        assert drive.finished[number].generated_ids[: len(drive.deltas[number])] == drive.deltas[number]
    assert solo_runtime.leased == set()


def test_published_prefix_and_refused_device_facts_reach_the_result() -> None:
    _, drive = make(script=Script(published={2}))
    drive.admit(request())
    assert drive.step(drive.context(1)).published_prefix is False
    assert drive.step(drive.decode(1)).published_prefix is True
    assert drive.step(drive.decode(1)).graph_launched is False


# ---- cancellation, stops and streams --------------------------------------------------------------------


def test_behaviour_67_cancel_before_the_context_step_runs_nothing() -> None:
    _, drive = make()
    token = CancelToken()
    drive.admit(request(), cancel_token=token)
    token.cancel()
    result = drive.step(drive.context(1))
    assert (result.ok, result.step_id, result.execution) == (True, 0, [])
    assert drive.finished[1].terminal_reason is FinishReason.CANCELLED
    assert drive.session.idle()


def test_behaviours_68_and_69_a_cancelled_resident_leaves_with_the_step_that_names_it() -> None:
    _, drive = make()
    token = CancelToken()
    drive.admit(request(), cancel_token=token)
    drive.admit(request())
    drive.step(drive.context(1), drive.context(2))
    token.cancel()
    drive.step(drive.decode(2))
    assert len(drive.session.residents()) == 2
    result = drive.step(drive.decode(1), drive.decode(2))
    assert [d.identity.request_id for d in result.execution] == [2]
    assert drive.finished[1].terminal_reason is FinishReason.CANCELLED
    assert len(drive.finished[1].generated_ids) == 1
    drive.run()
    assert len(drive.finished[2].generated_ids) == 8


def test_behaviour_70_cancel_seen_first_wins_over_end_of_sequence() -> None:
    _, drive = make(script=Script(tokens={1: [100, EOS_ID]}))
    token = CancelToken()
    drive.admit(request(), cancel_token=token)
    drive.step(drive.context(1))
    token.cancel()
    drive.step(drive.decode(1))
    assert drive.finished[1].terminal_reason is FinishReason.CANCELLED


def test_behaviour_71_cancel_through_the_channel_alone() -> None:
    _, drive = make()
    channel = StreamChannel.create()
    drive.admit(request(channel=channel))
    drive.step(drive.context(1))
    channel.cancel()
    drive.step(drive.decode(1))
    assert drive.finished[1].terminal_reason is FinishReason.CANCELLED
    assert channel.is_finished()


def test_behaviour_72_stop_string_against_end_of_sequence_and_cancel() -> None:
    script = Script(tokens={1: [*ids("ab"), EOS_ID], 2: ids("xab")})
    _, drive = make(script=script)
    drive.admit(request(stop=["b"]))
    drive.run()
    assert drive.finished[1].terminal_reason is FinishReason.STOP_WORDS
    token = CancelToken()
    drive.admit(request(stop=["b"]), cancel_token=token)
    drive.step(drive.context(2))
    drive.step(drive.decode(2))
    token.cancel()
    drive.step(drive.decode(2))
    assert drive.finished[2].terminal_reason is FinishReason.CANCELLED
    assert drive.response(2).finish_reason is FinishReason.CANCELLED


def test_stop_token_ids_end_and_ignore_eos_goes_on() -> None:
    _, drive = make(script=Script(tokens={1: [EOS_ID, 120, 121], 2: [100, 300]}))
    drive.admit(request(ignore_eos=True, max_tokens=3))
    drive.admit(request(stop_token_ids=[300]))
    drive.run()
    assert drive.finished[1].terminal_reason is FinishReason.LENGTH
    assert drive.finished[1].generated_ids == [EOS_ID, 120, 121]
    assert drive.finished[2].terminal_reason is FinishReason.END_ID
    assert drive.finished[2].generated_ids == [100, 300]


def test_behaviour_88_stop_string_over_two_pieces_is_trimmed_and_never_streamed() -> None:
    _, drive = make(script=Script(tokens={1: ids("one STOP two")}))
    channel = StreamChannel.create()
    drive.admit(request(channel=channel, stop=["STOP"], max_tokens=40))
    drive.run()
    response = drive.response(1)
    assert response.text == "one "
    assert response.stop_match == "STOP"
    assert response.finish_reason is FinishReason.STOP_WORDS
    assert response.token_ids == ids("one STOP")
    assert text_of(channel) == "one "
    assert channel.reason() is FinishReason.STOP_WORDS


def test_stop_string_is_kept_on_request() -> None:
    _, drive = make(script=Script(tokens={1: ids("one STOP two")}))
    channel = StreamChannel.create()
    drive.admit(request(channel=channel, stop=["STOP"], include_stop_str_in_output=True, max_tokens=40))
    drive.run()
    assert drive.response(1).text == "one STOP"
    assert text_of(channel) == "one STOP"


def test_stream_text_is_whole_characters_and_equals_the_response() -> None:
    answer = "naïve — 漢字 🎉"
    _, drive = make(script=Script(tokens={1: [*ids(answer), EOS_ID]}))
    channel = StreamChannel.create()
    drive.admit(request(channel=channel, max_tokens=60))
    drive.run()
    assert drive.response(1).text == answer
    assert text_of(channel) == answer


def test_unfinished_character_at_the_end_is_replaced() -> None:
    _, drive = make(script=Script(tokens={1: ids("é")[:1]}))
    channel = StreamChannel.create()
    drive.admit(request(channel=channel, max_tokens=1))
    drive.run()
    assert drive.response(1).text == "\ufffd"
    assert text_of(channel) == "\ufffd"


def test_held_back_text_comes_with_the_terminal_chunk_of_a_cancelled_stream() -> None:
    _, drive = make(script=Script(tokens={1: ids("xST")}))
    channel = StreamChannel.create()
    token = CancelToken()
    drive.admit(request(channel=channel, stop=["STOP"]), cancel_token=token)
    drive.step(drive.context(1))
    drive.step(drive.decode(1))
    drive.step(drive.decode(1))
    token.cancel()
    drive.step(drive.decode(1))
    assert text_of(channel) == "xST"
    assert channel.reason() is FinishReason.CANCELLED


# ---- failures -------------------------------------------------------------------------------------------


def refused() -> tuple[ScriptedRuntime, SessionDriver, StepResult, list[StreamChannel]]:
    """Resident 1 decodes, residents 2 and 3 have unfinished prompts; then a compact step is declined."""
    runtime, drive = make()
    channels = [StreamChannel.create() for _ in range(3)]
    for channel in channels:
        drive.admit(request(channel=channel))
    drive.step(drive.context(1), drive.context(2, 2))
    runtime.script.refuse_compact("operator rope refused 9 rows")
    return runtime, drive, drive.step(drive.decode(1), drive.context(2)), channels


def test_behaviour_73_compact_refusal_reports_and_pushes_nothing() -> None:
    _, drive, result, channels = refused()
    assert (result.ok, result.compact, result.compact_refused) == (False, True, True)
    assert result.failure == "operator rope refused 9 rows"
    assert (result.step_id, result.execution, result.deltas, result.finished) == (0, [], [], [])
    assert [p.request_id for p in result.participants] == [1, 2]
    assert text_of(channels[1]) == ""
    with pytest.raises(ContractViolation, match="the session is refused"):
        drive.session.execute([drive.decode(1)])


def test_behaviour_74_compact_stays_off_in_later_sessions() -> None:
    runtime, drive, _, _ = refused()
    assert drive.session.capabilities().compact is False
    assert drive.session.capabilities().reason == "operator rope refused 9 rows"
    drive.session.close()
    with runtime.open_session(SessionOptions(allow_compact_execution=True)) as later:
        assert later.capabilities().compact is False
        assert later.capabilities().reason == "operator rope refused 9 rows"


def test_behaviour_75_released_request_completes_in_another_session() -> None:
    runtime, drive, _, channels = refused()
    moved = drive.live[2]
    drive.session.release_for_readmission(moved.identity.resident)
    assert not channels[1].is_attached()
    assert moved.identity.resident in drive.session.residents()
    drive.session.close()
    assert channels[0].reason() is FinishReason.ERROR
    assert not channels[1].is_finished()
    again = SessionDriver(runtime.open_session(SessionOptions()))
    again.admit(moved.request)
    again.run()
    assert channels[1].reason() is FinishReason.LENGTH
    assert len(text_of(channels[1])) == 8


def test_behaviour_76_release_for_readmission_refuses_everybody_else() -> None:
    _, drive, _, _ = refused()
    session = drive.session
    with pytest.raises(ContractViolation, match="completed its prompt"):
        session.release_for_readmission(drive.live[1].identity.resident)
    for stale in (ResidentRef(0, 9), ResidentRef(3, 1), ResidentRef()):
        with pytest.raises(ContractViolation, match="is not a live resident"):
            session.release_for_readmission(stale)
    session.release_for_readmission(drive.live[2].identity.resident)
    with pytest.raises(ContractViolation, match="was released already"):
        session.release_for_readmission(drive.live[2].identity.resident)
    _, healthy = make()
    healthy.admit(request())
    with pytest.raises(ContractViolation, match="only after a refused compact step"):
        healthy.session.release_for_readmission(healthy.live[1].identity.resident)


def test_behaviour_77_closing_after_a_refusal_returns_every_lease() -> None:
    runtime, drive, _, _ = refused()
    drive.session.close()
    assert runtime.leased == set()


def test_behaviour_78_step_failure_ends_the_session() -> None:
    runtime, drive = make()
    drive.admit(request())
    runtime.script.steps.append(RuntimeError("kernel fault"))
    result = drive.step(drive.context(1))
    assert (result.ok, result.compact_refused) == (False, False)
    assert result.failure == "RuntimeError: kernel fault"
    for call in (lambda: drive.session.execute([drive.context(1)]), lambda: drive.admit(request())):
        with pytest.raises(ContractViolation, match="the session is lost"):
            call()
    assert drive.session.capabilities().compact is True


def test_refusal_outside_a_compact_step_is_a_plain_failure() -> None:
    runtime, drive = make(compact=False)
    drive.admit(request())
    runtime.script.refuse_compact()
    result = drive.step(drive.context(1))
    assert (result.ok, result.compact_refused) == (False, False)


def test_behaviour_79_closing_after_any_failure_finishes_channels_with_error() -> None:
    runtime, drive = make(script=Script(tokens={1: ids("abc")}))
    channel = StreamChannel.create()
    drive.admit(request(channel=channel))
    drive.step(drive.context(1))
    runtime.script.steps.append(RuntimeError("kernel fault"))
    drive.step(drive.decode(1))
    drive.session.close()
    drive.session.close()
    assert channel.reason() is FinishReason.ERROR
    assert text_of(channel) == "a"


def test_a_detokenizer_that_raises_ends_its_own_row_only() -> None:
    class Fragile(ToyTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            if token_id == 400:
                raise RuntimeError("bad piece")
            return super().token_bytes(token_id)

    _, drive = make(script=Script(tokens={1: [100, 400]}), tokenizer=Fragile())
    drive.admit(request(channel=StreamChannel.create()))
    drive.admit(request(channel=StreamChannel.create()))
    drive.run()
    assert drive.finished[1].terminal_reason is FinishReason.ERROR
    assert "bad piece" in drive.finished[1].error_message
    assert drive.finished[2].terminal_reason is FinishReason.LENGTH


# ---- session life ---------------------------------------------------------------------------------------


def test_behaviour_81_one_session_at_a_time() -> None:
    runtime, drive = make()
    with pytest.raises(ContractViolation, match="a session is open"):
        runtime.open_session()
    drive.session.close()
    with runtime.open_session() as session:
        assert session.idle()


def test_behaviour_82_idle_on_open_and_after_the_last_eviction() -> None:
    _, drive = make()
    assert drive.session.idle()
    drive.admit(request(max_tokens=1))
    assert not drive.session.idle()
    drive.run()
    assert drive.session.idle()
    drive.admit(request(max_tokens=1))
    drive.run()
    assert sorted(drive.finished) == [1, 2]


def test_behaviour_83_without_the_option_compact_is_off_and_says_why() -> None:
    _, drive = make(compact=False)
    capabilities = drive.session.capabilities()
    assert capabilities.compact is False
    assert "allow_compact_execution" in capabilities.reason
    _, allowed = make()
    assert (allowed.session.capabilities().compact, allowed.session.capabilities().reason) == (True, "")


def test_behaviour_84_copy_residents_reuses_the_list() -> None:
    _, drive = make()
    out: list[ResidentRef] = [ResidentRef(9, 9)]
    same = out
    drive.admit(request())
    drive.admit(request())
    drive.session.copy_residents(out)
    assert out is same
    assert out == drive.session.residents() == [ResidentRef(0, 1), ResidentRef(1, 1)]


def test_behaviour_85_defaults_of_a_minimal_subclass() -> None:
    class Minimal(RuntimeSession):
        def admit(self, request: Any, request_id: Any, cancel_token: Any = None) -> Any: ...
        def execute(self, plan: Any) -> Any: ...
        def materialize(self, result: Any, stop_strings: Any) -> Any: ...
        def residents(self) -> list[ResidentRef]:
            return [ResidentRef(0, 1)]

        def idle(self) -> bool:
            return False

        def exclusive_resident(self) -> bool:
            return False

        def requires_exclusive_admission(self, request: Any) -> bool:
            return False

    minimal = Minimal()
    assert minimal.requires_uniform_sampling(request()) is False
    assert minimal.capabilities().compact is False
    assert minimal.capabilities().reason
    assert minimal.context_cache_metrics() is None
    out: list[ResidentRef] = []
    minimal.copy_residents(out)
    assert out == [ResidentRef(0, 1)]
    minimal.release_for_readmission(ResidentRef(0, 1))
    with pytest.raises(ContractViolation):
        minimal.release_for_readmission(ResidentRef(0, 2))


def test_two_threads_cannot_drive_one_session() -> None:
    _, drive = make()
    drive.admit(request())
    caught: list[ContractViolation] = []

    def intrude() -> None:
        for call in (
            lambda: drive.session.execute([drive.context(1)]),
            lambda: drive.session.admit(request(), RequestId(5)),
            lambda: drive.session.residents(),
        ):
            try:
                call()
            except ContractViolation as error:
                caught.append(error)

    thread = threading.Thread(target=intrude, name="intruder")
    thread.start()
    thread.join()
    assert len(caught) == 3
    for error in caught:
        assert "'intruder'" in str(error)
        assert "'MainThread'" in str(error)
    assert drive.step(drive.context(1)).ok


def test_materialize_is_pure_and_reports_everything() -> None:
    _, drive = make(script=Script(cached_prefix=lambda prompt: 4))
    drive.admit(request("hello!", max_tokens=3))
    drive.run()
    first, second = drive.response(1), drive.response(1)
    assert first == second
    assert first.prompt_tokens == 6
    assert first.reuse is not None
    assert first.reuse.reused_tokens == 4
    assert first.iterations == 3
    snapshot = drive.finished[1]
    assert snapshot.raw_input_ids == ids("hello!")
    assert snapshot.token_ids == ids("o!") + snapshot.generated_ids
