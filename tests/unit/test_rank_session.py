"""`RankRuntimeSession` over the integer toy model (specification behaviours tagged G, and part P of the cache's).

Every text is compared with the toy's plain-Python twin, free pages are poisoned, and pools are recounted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgellm.cache.types import (
    ContextCacheCommitPolicy,
    ContextCacheConfig,
    ContextCacheLookupPolicy,
    Retention,
    RetentionPriority,
    ReuseStopReason,
)
from edgellm.errors import (
    INPUT_TOO_LONG_MARKER,
    AdmissionError,
    CompactRefusedError,
    ContractViolation,
    InputTooLongError,
    RequestFailed,
    SessionLostError,
    StepDeviceError,
)
from edgellm.request import CancelToken, LLMGenerationRequest
from edgellm.sampling.params import SamplingParams
from edgellm.session.types import (
    AdmissionStatus,
    FinishReason,
    RequestId,
    ResidentRef,
    SequenceIdentity,
    SequenceWork,
    SessionOptions,
)
from edgellm.streaming import StreamChannel
from edgellm.testing.recount import recount, require_baseline
from edgellm.testing.session_driver import SessionDriver
from edgellm.testing.toy import toy_generate
from edgellm.testing.toy_runtime import TOY_VOCAB_SIZE, ToyRuntime

P = 4


class Bench:
    """One runtime with an open session; `close` checks that nothing leaked."""

    def __init__(self, *, compact: bool = True, **options: Any) -> None:
        self.runtime = ToyRuntime(page_size=P, **options)
        self.drive = self.open(compact=compact)

    def open(self, *, compact: bool = True) -> SessionDriver:
        self.drive = SessionDriver(self.runtime.open_session(SessionOptions(allow_compact_execution=compact)))
        return self.drive

    def close(self) -> None:
        self.drive.session.close()
        require_baseline(self.runtime.coordinator)
        self.runtime.close()


@pytest.fixture
def benches() -> Iterator[list[Bench]]:
    made: list[Bench] = []
    yield made
    for bench in made:
        bench.close()


@pytest.fixture
def bench(benches: list[Bench]) -> Bench:
    benches.append(Bench())
    return benches[-1]


def prompt_of(length: int, start: int = 100) -> list[int]:
    return list(range(start, start + length))


def request(prompt: list[int], max_tokens: int = 8, **fields: Any) -> LLMGenerationRequest:
    params = {name: fields.pop(name) for name in list(fields) if name in SamplingParams.__dataclass_fields__}
    params = {"temperature": 0.0, "ignore_eos": True, **params}
    return LLMGenerationRequest(
        prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens, **params), **fields
    )


def twin(prompt: list[int], count: int) -> list[int]:
    return toy_generate(prompt, count, TOY_VOCAB_SIZE)


# ---- admission ------------------------------------------------------------------------------------------


def test_behaviour_7_valid_text_request_in_an_empty_session(bench: Bench) -> None:
    result = bench.drive.admit(
        LLMGenerationRequest(
            messages=[{"role": "user", "content": "hi"}], sampling=SamplingParams(max_tokens=2, temperature=0.0)
        )
    )
    assert result.status is AdmissionStatus.ADMITTED
    assert (result.prefill_start, result.prompt_length) == (0, len("[user]hi\n[assistant]"))
    assert not bench.drive.session.idle()


def test_164_behaviour_8_shared_prefix_starts_at_a_page_multiple(bench: Bench) -> None:
    drive = bench.drive
    first, second = [*prompt_of(16), 7], [*prompt_of(16), 9, 9]
    drive.admit(request(first, 4))
    drive.run()
    computed = bench.runtime.executor.tokens_computed
    result = drive.admit(request(second, 4))
    assert result.prefill_start == 16
    step = drive.step(drive.context(2))
    assert (step.execution[0].past_length, step.execution[0].query_length) == (16, 2)
    assert bench.runtime.executor.tokens_computed == computed + 2
    drive.run()
    assert drive.finished[2].generated_ids == twin(second, 4)
    reuse = drive.response(2).reuse
    assert reuse is not None
    assert (reuse.prompt_tokens, reuse.reused_tokens, reuse.matched_tokens) == (18, 16, 16)


def test_behaviour_9_full_hit_still_computes_a_token(bench: Bench) -> None:
    drive = bench.drive
    prompt = prompt_of(16)
    for number in (1, 2):
        result = drive.admit(request(prompt, 4))
        drive.run()
        assert drive.finished[number].generated_ids == twin(prompt, 4)
    assert result.prefill_start == 15


def test_an_answer_that_ends_on_its_first_token_leaves_the_whole_prompt(bench: Bench) -> None:
    drive = bench.drive
    prompt = prompt_of(14)
    drive.admit(request(prompt, 1))
    drive.run()
    assert drive.admit(request([*prompt, 5, 6], 2)).prefill_start == 14
    drive.run()
    assert drive.finished[2].generated_ids == twin([*prompt, 5, 6], 2)


def test_a_salted_request_says_that_its_salt_is_new(bench: Bench) -> None:
    drive = bench.drive
    for salt in (None, "tenant"):
        asked = request(prompt_of(9), 1)
        asked.cache_salt = salt
        drive.admit(asked)
        drive.run()
    reuse = drive.response(2).reuse
    assert reuse is not None
    assert (reuse.reused_tokens, reuse.stop_reason) == (0, ReuseStopReason.SALT)


def test_retention_reaches_the_cache(bench: Bench) -> None:
    drive, coordinator = bench.drive, bench.runtime.coordinator
    asked = request(prompt_of(9), 1)
    asked.retention = Retention(RetentionPriority.HIGH, ttl_seconds=60)
    drive.admit(asked)
    lease = drive.session._request.sequence(0).lease
    assert lease.priority is RetentionPriority.HIGH
    assert lease.expiry > coordinator.clock()
    drive.run()


def test_162_behaviour_12_prompt_beyond_the_capacity(benches: list[Bench]) -> None:
    bench = Bench(max_kv_capacity=32)
    benches.append(bench)
    with pytest.raises(InputTooLongError, match="has 33 tokens") as caught:
        bench.drive.admit(request(prompt_of(33)))
    assert INPUT_TOO_LONG_MARKER in str(caught.value)
    assert isinstance(caught.value, RuntimeError)
    assert bench.drive.session.idle()
    require_baseline_of_live(bench)


def require_baseline_of_live(bench: Bench) -> None:
    """No sequence holds a page, though the session is open."""
    assert recount(bench.runtime.coordinator).leased == 0


def test_never_fits_is_refused_at_once_and_differs_from_no_capacity(benches: list[Bench]) -> None:
    bench = Bench(num_pages=8)
    benches.append(bench)
    with pytest.raises(InputTooLongError, match="never fits: it needs 9 pages of 4 tokens, the whole KV pool has 8"):
        bench.drive.admit(request(prompt_of(32)))
    bench.drive.admit(request(prompt_of(8), 12))
    assert bench.drive.admit(request(prompt_of(20, 300))).status is AdmissionStatus.NO_CAPACITY
    bench.drive.run()
    assert bench.drive.admit(request(prompt_of(20, 300))).status is AdmissionStatus.ADMITTED
    bench.drive.run()
    assert bench.drive.finished[2].generated_ids == twin(prompt_of(20, 300), 8)


def test_behaviour_13_uncached_part_beyond_s_in_returns_the_lease(benches: list[Bench]) -> None:
    bench = Bench(compact=False, max_input_length=8)
    benches.append(bench)
    with pytest.raises(InputTooLongError, match="9 of the prompt's 9 tokens are not cached, one step takes 8"):
        bench.drive.admit(request(prompt_of(9)))
    require_baseline_of_live(bench)
    assert bench.drive.session.idle()


def test_behaviour_14_long_prompt_with_a_short_uncached_tail(benches: list[Bench]) -> None:
    bench = Bench(max_input_length=8)
    benches.append(bench)
    bench.drive.admit(request([*prompt_of(16), 3], 2))
    bench.drive.run(chunk=8)
    bench.drive.session.close()
    single = bench.open(compact=False)
    assert single.admit(request([*prompt_of(16), 5, 5], 3)).prefill_start == 16
    single.run()
    assert single.finished[1].generated_ids == twin([*prompt_of(16), 5, 5], 3)


def test_behaviour_15_no_slot_then_admitted_after_a_finish(benches: list[Bench]) -> None:
    bench = Bench(max_batch_size=1)
    benches.append(bench)
    bench.drive.admit(request(prompt_of(5), 2))
    late = request(prompt_of(6), 2)
    assert bench.drive.admit(late).status is AdmissionStatus.NO_CAPACITY
    bench.drive.run()
    assert bench.drive.admit(late).status is AdmissionStatus.ADMITTED


@pytest.mark.parametrize("reserve", [True, False])
def test_165_behaviour_16_page_pressure_is_no_capacity_and_leaks_nothing(benches: list[Bench], reserve: bool) -> None:
    bench = Bench(num_pages=10, reserve_growth=reserve)
    benches.append(bench)
    bench.drive.admit(request(prompt_of(24), 4))
    leased = recount(bench.runtime.coordinator).leased
    late = request(prompt_of(20, 300), 4)
    for _ in range(3):
        assert bench.drive.admit(late).status is AdmissionStatus.NO_CAPACITY
        assert recount(bench.runtime.coordinator).leased == leased
    bench.drive.run()
    assert bench.drive.admit(late).status is AdmissionStatus.ADMITTED
    bench.drive.run()
    assert bench.drive.finished[2].generated_ids == twin(prompt_of(20, 300), 4)


def test_growth_reserve_lets_everybody_run_to_the_end(benches: list[Bench]) -> None:
    """Prompts of two pages each fit four times, their answers do not: they take turns, and none fails."""
    bench = Bench(num_pages=12)
    benches.append(bench)
    waiting = [request(prompt_of(7, 100 + 10 * i), 20) for i in range(4)]
    admitted = 0
    while waiting or bench.drive.live:
        while waiting and bench.drive.admit(waiting[0]).status is AdmissionStatus.ADMITTED:
            waiting.pop(0)
            admitted += 1
        bench.drive.step_all()
    for number in range(1, 5):
        assert bench.drive.finished[number].generated_ids == twin(prompt_of(7, 90 + 10 * number), 20)


def test_without_the_reserve_a_row_that_finds_no_page_fails_alone(benches: list[Bench]) -> None:
    bench = Bench(num_pages=6, reserve_growth=False)
    benches.append(bench)
    for i in range(2):
        assert bench.drive.admit(request(prompt_of(7, 100 + 10 * i), 14)).status is AdmissionStatus.ADMITTED
    bench.drive.run()
    ends = {number: bench.drive.finished[number].terminal_reason for number in (1, 2)}
    assert sorted(reason.value for reason in ends.values()) == ["error", "length"]
    for number, reason in ends.items():
        snapshot = bench.drive.finished[number]
        assert snapshot.generated_ids == twin(prompt_of(7, 90 + 10 * number), len(snapshot.generated_ids))
        if reason is FinishReason.ERROR:
            assert "raise kv_budget" in snapshot.error_message


def test_165_behaviour_19_failed_lease_loses_the_session(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise StepDeviceError("copy engine hung")

    with monkeypatch.context() as patch:
        patch.setattr(bench.runtime.coordinator, "admit_sequence", broken)
        with pytest.raises(SessionLostError, match="copy engine hung"):
            bench.drive.admit(request(prompt_of(5)))
    with pytest.raises(ContractViolation, match="lost"):
        bench.drive.session.execute([])


def test_a_copy_with_wrong_pages_is_refused_and_the_session_goes_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a partly reused page: what the copy is given is checked before the device hears of it."""
    cache = bench.runtime.coordinator.resources.base_cache
    copy_pages, limit = cache.copy_pages, cache.num_pages
    bench.drive.admit(request(prompt_of(9)))
    bench.drive.run()

    def beyond(sources: np.ndarray, targets: np.ndarray) -> None:
        copy_pages(sources, targets + limit)

    with monkeypatch.context() as patch:
        patch.setattr(cache, "copy_pages", beyond)
        result = bench.drive.admit(request(prompt_of(6)))
    assert result.status is AdmissionStatus.REJECTED
    assert f"are not all in [0, {limit})" in result.reason
    require_baseline_of_live(bench)
    bench.drive.admit(request(prompt_of(6)))
    bench.drive.run()
    assert bench.drive.finished[2].generated_ids == twin(prompt_of(6), 8)


def test_a_device_that_fails_under_a_copy_loses_the_session_and_says_why(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.drive.admit(request(prompt_of(9)))
    bench.drive.run()

    def broken(*_: object) -> None:
        raise StepDeviceError("copying 1 page failed: illegal address")

    monkeypatch.setattr(bench.runtime.coordinator.resources.base_cache, "copy_pages", broken)
    with pytest.raises(SessionLostError, match="request 2 failed: copying 1 page failed: illegal address") as caught:
        bench.drive.admit(request(prompt_of(6)))
    assert isinstance(caught.value.__cause__, StepDeviceError)


def test_behaviour_22_seating_failure_retracts_the_lease(bench: Bench) -> None:
    channel = StreamChannel.create()
    channel.attach()
    result = bench.drive.admit(request(prompt_of(9), stream_channel=channel))
    assert result.status is AdmissionStatus.REJECTED
    require_baseline_of_live(bench)
    assert (bench.runtime.page_table.rows == -1).all()
    assert bench.drive.session.idle()
    bench.drive.admit(request(prompt_of(9)))
    bench.drive.run()
    assert bench.drive.finished[1].generated_ids == twin(prompt_of(9), 8)


def test_behaviours_23_and_24_budget(benches: list[Bench]) -> None:
    bench = Bench(max_kv_capacity=32)
    benches.append(bench)
    bench.drive.admit(request(prompt_of(20), 500))
    bench.drive.run()
    assert bench.drive.finished[1].generated_ids == twin(prompt_of(20), 12)
    assert bench.drive.finished[1].terminal_reason is FinishReason.LENGTH
    assert bench.drive.admit(request(prompt_of(32))).status is AdmissionStatus.REJECTED


def test_stop_token_id_outside_the_vocabulary_is_an_admission_error(bench: Bench) -> None:
    with pytest.raises(AdmissionError, match="stop_token_ids"):
        bench.drive.admit(request(prompt_of(5), stop_token_ids=[TOY_VOCAB_SIZE]))
    assert bench.drive.session.idle()


# ---- identity of context --------------------------------------------------------------------------------


def test_salts_separate_and_equal_salts_share(bench: Bench) -> None:
    prompt = [*prompt_of(16), 3]
    starts = []
    for salt in (None, "a", "a", "", None):
        starts.append(bench.drive.admit(request(prompt, 2, cache_salt=salt)).prefill_start)
        bench.drive.run()
    assert starts == [0, 0, 16, 0, 16]


def test_lookup_bypass_neither_reads_nor_publishes(bench: Bench) -> None:
    prompt = [*prompt_of(16), 3]
    bypass = ContextCacheLookupPolicy.BYPASS
    assert bench.drive.admit(request(prompt, 2, lookup_policy=bypass)).prefill_start == 0
    bench.drive.run()
    assert bench.drive.admit(request(prompt, 2)).prefill_start == 0
    bench.drive.run()
    result = bench.drive.admit(request(prompt, 2, lookup_policy=bypass))
    bench.drive.run()
    assert result.prefill_start == 0
    reuse = bench.drive.response(3).reuse
    assert reuse is not None
    assert reuse.stop_reason is ReuseStopReason.BYPASS


def test_generated_tokens_are_reused_by_the_next_turn_unless_the_policy_says_no(bench: Bench) -> None:
    for policy, start, expected in (
        (ContextCacheCommitPolicy.INCLUDING_GENERATED_TOKENS, 100, 20),
        (ContextCacheCommitPolicy.PREFILL_STATE_ONLY, 300, 12),
    ):
        prompt = prompt_of(12, start)
        number = bench.drive._next_id
        bench.drive.admit(request(prompt, 9, commit_policy=policy))
        bench.drive.run()
        answer = bench.drive.finished[number].generated_ids
        assert answer == twin(prompt, 9)
        history = [*prompt, *answer, 5, 6]
        assert bench.drive.admit(request(history, 3)).prefill_start == expected
        bench.drive.run()
        assert bench.drive.finished[number + 1].generated_ids == twin(history, 3)


def test_disabled_cache_gives_the_same_text_without_reuse(benches: list[Bench]) -> None:
    bench = Bench(config=ContextCacheConfig(enabled=False))
    benches.append(bench)
    prompt = prompt_of(17)
    for number in (1, 2):
        assert bench.drive.admit(request(prompt, 5)).prefill_start == 0
        bench.drive.run()
        assert bench.drive.finished[number].generated_ids == twin(prompt, 5)
    assert bench.drive.session.context_cache_metrics() is None


# ---- steps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 7, 13, 40])
def test_behaviours_52_and_53_any_split_of_the_prompt_gives_the_same_tokens(benches: list[Bench], chunk: int) -> None:
    bench = Bench()
    benches.append(bench)
    prompt = prompt_of(30)
    bench.drive.admit(request(prompt, 6))
    while bench.drive.live[1].prompt_remaining:
        result = bench.drive.step(bench.drive.context(1, chunk))
        recount(bench.runtime.coordinator)
        final = not bench.drive.live[1].prompt_remaining
        assert len(result.deltas) == (1 if final else 0)
        assert result.execution[0].select_last_token_logits is final
    bench.drive.run()
    assert bench.drive.finished[1].generated_ids == twin(prompt, 6)


def test_behaviour_54_mixed_steps_give_the_tokens_of_pure_ones(bench: Bench) -> None:
    prompts = [prompt_of(9), prompt_of(14, 200), prompt_of(5, 300)]
    bench.drive.admit(request(prompts[0], 12))
    bench.drive.step(bench.drive.context(1))
    bench.drive.admit(request(prompts[1], 6))
    result = bench.drive.step(bench.drive.decode(1), bench.drive.context(2, 6))
    assert (result.compact, result.work) == (True, SequenceWork.CONTEXT)
    bench.drive.admit(request(prompts[2], 9))
    bench.drive.run(chunk=3)
    for number, (prompt, count) in enumerate(zip(prompts, (12, 6, 9), strict=True), start=1):
        assert bench.drive.finished[number].generated_ids == twin(prompt, count)


def test_behaviour_56_unnamed_residents_are_untouched(bench: Bench) -> None:
    drive, runtime = bench.drive, bench.runtime
    for number in (1, 2):
        drive.admit(request(prompt_of(6, 100 * number), 20))
        drive.step(drive.context(number))
    slot = drive.live[1].identity.resident.slot
    row = runtime.page_table.rows[slot].copy()
    pages = runtime.executor.cache.pages[row[row >= 0]].copy()
    for _ in range(6):
        drive.step(drive.decode(2))
    assert (runtime.page_table.rows[slot] == row).all()
    assert (runtime.executor.cache.pages[row[row >= 0]] == pages).all()
    drive.run()
    assert drive.finished[1].generated_ids == twin(prompt_of(6, 100), 20)


def test_behaviours_61_and_63_random_finish_order_in_one_container(bench: Bench) -> None:
    lengths = (7, 2, 11, 5)
    for number, length in enumerate(lengths, start=1):
        bench.drive.admit(request(prompt_of(3 + number, 100 * number), length))
    seen = bench.drive.session.residents()
    while bench.drive.live:
        bench.drive.step_all(chunk=2)
        recount(bench.runtime.coordinator)
        left = bench.drive.session.residents()
        assert left == [ref for ref in seen if ref in left]
    for number, length in enumerate(lengths, start=1):
        assert bench.drive.finished[number].generated_ids == twin(prompt_of(3 + number, 100 * number), length)


def test_164_behaviour_65_published_prefix_is_exact(bench: Bench) -> None:
    """True exactly on steps after which one more block of the same tokens can be found."""
    prompt = prompt_of(10)
    bench.drive.admit(request(prompt, 9))
    tokens = prompt + twin(prompt, 9)
    committed = 0
    while bench.drive.live:
        result = bench.drive.step_all(chunk=3)
        before, committed = committed, committed + result.execution[0].query_length
        assert result.published_prefix is (committed // P > before // P)
    assert bench.drive.admit(request([*tokens, 5], 1)).prefill_start == committed


def test_identical_prompts_in_flight_share_their_producer(bench: Bench) -> None:
    """The second asks while the first still computes; it takes over what became findable and skips that work."""
    prompt = prompt_of(40)
    bench.drive.admit(request(prompt, 4))
    bench.drive.admit(request(prompt, 4))
    for _ in range(4):
        bench.drive.step(bench.drive.context(1, 8))
    computed = bench.runtime.executor.tokens_computed
    bench.drive.step(bench.drive.context(2, 8))
    assert bench.runtime.executor.tokens_computed == computed
    bench.drive.step(bench.drive.context(2, 24))
    assert bench.runtime.executor.tokens_computed == computed
    bench.drive.run()  # both compute the last 8 tokens in one step, so there is no producer to share with
    for number in (1, 2):
        assert bench.drive.finished[number].generated_ids == twin(prompt, 4)
    reuse = bench.drive.response(2).reuse
    assert reuse is not None
    assert reuse.reused_tokens == 32


def test_logprobs_are_reported_per_generated_token(bench: Bench) -> None:
    bench.drive.admit(request(prompt_of(6), 3, logprobs=2))
    bench.drive.run()
    logprobs = bench.drive.response(1).logprobs
    assert logprobs is not None
    assert [entry.token_id for entry in logprobs] == twin(prompt_of(6), 3)
    assert all(entry.top[0][0] == entry.token_id for entry in logprobs)


def test_behaviour_80_row_without_a_choice_fails_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = bench.runtime.executor.forward

    def poisoned(batch: Any) -> Any:
        logits = forward(batch)
        for row, sequence in enumerate(batch.logits_to_seq.tolist()):
            if batch.state_index[sequence] == 0 and batch.past_len[sequence] == 8:
                logits[row] = float("nan")
        return logits

    monkeypatch.setattr(bench.runtime.executor, "forward", poisoned)
    for number in (1, 2):
        bench.drive.admit(request(prompt_of(6, 100 * number), 8))
    bench.drive.run()
    failed = bench.drive.finished[1]
    assert failed.terminal_reason is FinishReason.ERROR
    assert "NaN" in failed.error_message
    assert failed.generated_ids == twin(prompt_of(6, 100), 3)
    assert bench.drive.finished[2].generated_ids == twin(prompt_of(6, 200), 8)


# ---- cancellation ---------------------------------------------------------------------------------------


def test_behaviours_67_to_69_cancellation_returns_pages_without_touching_others(bench: Bench) -> None:
    tokens = [CancelToken() for _ in range(3)]
    for number, token in enumerate(tokens, start=1):
        bench.drive.admit(request(prompt_of(9, 100 * number), 12), cancel_token=token)
    tokens[2].cancel()
    result = bench.drive.step_all(chunk=5)
    assert [d.identity.request_id for d in result.execution] == [1, 2]
    assert bench.drive.finished[3].terminal_reason is FinishReason.CANCELLED
    bench.drive.step_all()
    tokens[0].cancel()
    bench.drive.step_all()
    assert bench.drive.finished[1].terminal_reason is FinishReason.CANCELLED
    bench.drive.run()
    assert bench.drive.finished[2].generated_ids == twin(prompt_of(9, 200), 12)
    require_baseline_of_live(bench)


def test_everybody_cancelled_runs_nothing(bench: Bench) -> None:
    tokens = [CancelToken() for _ in range(2)]
    for number, token in enumerate(tokens, start=1):
        bench.drive.admit(request(prompt_of(5, 100 * number)), cancel_token=token)
    bench.drive.step_all()
    forwards = bench.runtime.executor.num_forwards
    for token in tokens:
        token.cancel()
    result = bench.drive.step_all()
    assert (result.ok, result.step_id, result.execution) == (True, 0, [])
    assert bench.runtime.executor.num_forwards == forwards
    assert bench.drive.session.idle()


# ---- failures -------------------------------------------------------------------------------------------


def test_167_behaviours_73_to_77_compact_refusal_and_readmission(bench: Bench) -> None:
    channels = [StreamChannel.create() for _ in range(2)]
    prompts = [prompt_of(9), prompt_of(13, 300)]
    for prompt, channel in zip(prompts, channels, strict=True):
        bench.drive.admit(request(prompt, 6, stream_channel=channel))
    bench.drive.step(bench.drive.context(1), bench.drive.context(2, 4))
    bench.runtime.executor.fail_next(CompactRefusedError("operator attention refused 2 sequences"))
    result = bench.drive.step(bench.drive.decode(1), bench.drive.context(2))
    assert (result.ok, result.compact_refused) == (False, True)
    assert result.failure == "operator attention refused 2 sequences"
    session = bench.drive.session
    with pytest.raises(ContractViolation, match="completed its prompt"):
        session.release_for_readmission(bench.drive.live[1].identity.resident)
    session.release_for_readmission(bench.drive.live[2].identity.resident)
    moved = bench.drive.live[2].request
    session.close()
    require_baseline(bench.runtime.coordinator)
    assert channels[0].reason() is FinishReason.ERROR
    again = bench.open()
    assert again.session.capabilities().compact is False
    assert again.session.capabilities().reason == "operator attention refused 2 sequences"
    again.admit(moved)
    again.run()
    assert again.finished[1].generated_ids == twin(prompts[1], 6)
    assert channels[1].reason() is FinishReason.LENGTH


def test_behaviours_78_and_79_device_failure_ends_the_session_and_leaks_nothing(bench: Bench) -> None:
    channel = StreamChannel.create()
    bench.drive.admit(request(prompt_of(9), stream_channel=channel))
    bench.drive.step(bench.drive.context(1))
    bench.runtime.executor.fail_next()
    result = bench.drive.step(bench.drive.decode(1))
    assert (result.ok, result.compact_refused, result.execution) == (False, False, [])
    assert result.failure.startswith("StepDeviceError: toy executor")
    with pytest.raises(ContractViolation, match="lost"):
        bench.drive.step(bench.drive.decode(1))
    bench.drive.session.close()
    assert channel.reason() is FinishReason.ERROR
    require_baseline(bench.runtime.coordinator)
    again = bench.open()
    again.admit(request(prompt_of(9)))
    again.run()
    assert again.finished[1].generated_ids == twin(prompt_of(9), 8)


def test_failed_drain_at_close_quarantines_and_refuses_new_sessions() -> None:
    healthy = [True]
    runtime = ToyRuntime(synchronizer=lambda stream: healthy[0])
    drive = SessionDriver(runtime.open_session(SessionOptions(allow_compact_execution=True)))
    drive.admit(request(prompt_of(9)))
    drive.step(drive.context(1))
    healthy[0] = False
    drive.session.close()
    assert recount(runtime.coordinator).leased > 0
    with pytest.raises(Exception, match="refuses new requests"):
        runtime.open_session()
    healthy[0] = True
    runtime.close()
    assert recount(runtime.coordinator).leased == 0


# ---- session life ---------------------------------------------------------------------------------------


def test_behaviour_81_latch_between_session_and_blocking_request(bench: Bench) -> None:
    with pytest.raises(ContractViolation, match="holds this runtime"):
        bench.runtime.open_session()
    with pytest.raises(ContractViolation, match="holds this runtime"):
        bench.runtime.handle_request(request(prompt_of(5)))
    with pytest.raises(ContractViolation, match="a session is open"):
        bench.runtime.close()
    bench.drive.session.close()
    assert bench.runtime.handle_request(request(prompt_of(5), 3)).token_ids == twin(prompt_of(5), 3)
    bench.open()


def test_behaviour_86_metrics_grow_across_sessions(bench: Bench) -> None:
    for _ in range(2):
        bench.drive.admit(request(prompt_of(17), 2))
        bench.drive.run()
        bench.drive.session.close()
        bench.open()
    metrics = bench.drive.session.context_cache_metrics()
    assert metrics is not None
    assert (metrics.admitted_sequences, metrics.hit_sequences, metrics.reused_tokens) == (2, 1, 16)


def test_behaviour_87_materialize_equals_the_blocking_path(bench: Bench) -> None:
    def make() -> LLMGenerationRequest:
        return request(prompt_of(9), 20, temperature=1.0, seed=7, stop=["w3"], lookup_policy=bypass)

    bypass = ContextCacheLookupPolicy.BYPASS
    bench.drive.admit(make())
    bench.drive.run()
    response = bench.drive.response(1)
    bench.drive.session.close()
    assert bench.runtime.handle_request(make()) == response
    bench.open()


def test_blocking_request_chunks_a_prompt_longer_than_the_input_length(benches: list[Bench]) -> None:
    bench = Bench(max_input_length=8)
    benches.append(bench)
    bench.drive.session.close()
    assert bench.runtime.handle_request(request(prompt_of(30), 5)).token_ids == twin(prompt_of(30), 5)
    bench.open()


def test_blocking_request_raises_its_failure(bench: Bench) -> None:
    bench.drive.session.close()
    bench.runtime.executor.fail_next()
    with pytest.raises(RequestFailed, match="toy executor: injected"):
        bench.runtime.handle_request(request(prompt_of(5)))
    with pytest.raises(AdmissionError, match="an answer of at least 1 it exceeds the 128"):
        bench.runtime.handle_request(request(prompt_of(128)))
    assert bench.runtime.handle_request(request(prompt_of(5), 3)).token_ids == twin(prompt_of(5), 3)
    bench.open()


def test_single_cohort_session_runs_context_alone_and_decodes_together(benches: list[Bench]) -> None:
    bench = Bench(compact=False)
    benches.append(bench)
    for number in (1, 2, 3):
        bench.drive.admit(request(prompt_of(5 + number, 100 * number), 6))
        result = bench.drive.step(bench.drive.context(number))
        assert (result.compact, result.work) == (False, SequenceWork.CONTEXT)
    while bench.drive.live:
        result = bench.drive.step_all()
        assert (result.compact, result.work) == (False, SequenceWork.DECODE)
    for number in (1, 2, 3):
        assert bench.drive.finished[number].generated_ids == twin(prompt_of(5 + number, 100 * number), 6)


def test_166_finished_refs_are_over_and_no_token_is_reported_twice(benches: list[Bench]) -> None:
    bench = Bench(max_batch_size=1)
    benches.append(bench)
    drive, refs = bench.drive, []
    for number in (1, 2):
        prompt = prompt_of(4, 100 * number)
        refs.append(drive.admit(request(prompt, 3)).ref)
        last = drive.decode(number)
        drive.run()
        text = twin(prompt, 3)
        assert drive.finished[number].generated_ids == text
        assert drive.deltas[number] == text[:2]  # the last token comes with the snapshot
        with pytest.raises(ContractViolation, match="slot 0 has no resident; its ref is stale"):
            drive.session.execute([last])
    assert [(ref.slot, ref.epoch) for ref in refs] == [(0, 1), (0, 2)]
    drive.admit(request(prompt_of(4), 2))
    drive.step(drive.context(3))
    stale = replace(drive.decode(3), identity=SequenceIdentity(RequestId(3), refs[0]))
    with pytest.raises(ContractViolation, match="the slot is in epoch 3, the plan says 1"):
        drive.session.execute([stale])
    drive.run()


@pytest.mark.parametrize("wrong", ["past_length", "epoch", "request_id", "duplicate", "partial_set"])
def test_163_a_plan_that_does_not_fit_is_refused_and_the_session_goes_on(benches: list[Bench], wrong: str) -> None:
    bench = Bench(compact=False)
    benches.append(bench)
    drive = bench.drive
    for number in (1, 2):
        drive.admit(request(prompt_of(5, 100 * number), 4))
        drive.step(drive.context(number))
    first, second = drive.decode(1), drive.decode(2)
    identity = first.identity
    plan, match = {
        "past_length": ([replace(first, past_length=6), second], "past_length is 6, the committed length is 5"),
        "epoch": (
            [replace(first, identity=replace(identity, resident=ResidentRef(0, 9))), second],
            "the slot is in epoch 1, the plan says 9",
        ),
        "request_id": (
            [replace(first, identity=replace(identity, request_id=RequestId(2))), second],
            "the slot belongs to request 1, the plan says 2",
        ),
        "duplicate": ([first, first], "named twice"),
        "partial_set": ([first], "names every resident in resident order"),
    }[wrong]
    pages = bench.runtime.page_table.rows.copy()
    computed = bench.runtime.executor.tokens_computed
    with pytest.raises(ContractViolation, match=match):
        drive.session.execute(plan)
    assert (bench.runtime.page_table.rows == pages).all()
    assert bench.runtime.executor.tokens_computed == computed
    drive.run()
    for number in (1, 2):
        assert drive.finished[number].generated_ids == twin(prompt_of(5, 100 * number), 4)


@pytest.mark.parametrize("work", [SequenceWork.CONTEXT, SequenceWork.DECODE])
def test_161_a_row_without_token_ends_the_step_unless_it_failed(
    benches: list[Bench], monkeypatch: pytest.MonkeyPatch, work: SequenceWork
) -> None:
    """A decoder that forgets a row would otherwise have its last token counted twice."""
    bench = Bench()
    benches.append(bench)
    drive, decoder = bench.drive, bench.runtime.decoder
    run_step = decoder.run_step

    def forgetful(*args: Any) -> Any:
        tokens = run_step(*args)
        tokens.token_ids[0] = []
        return tokens

    drive.admit(request(prompt_of(5), 4))
    if work is SequenceWork.DECODE:
        drive.step(drive.context(1))
    monkeypatch.setattr(decoder, "run_step", forgetful)
    result = drive.step(drive.work(1))
    assert (result.ok, result.deltas) == (False, [])
    assert "slot 0 took part in a step and got no token" in result.failure
    monkeypatch.undo()
    drive.session.close()
    assert bench.open().admit(request(prompt_of(5), 4)).status is AdmissionStatus.ADMITTED
    bench.drive.run()
    assert bench.drive.finished[1].generated_ids == twin(prompt_of(5), 4)


def test_behaviour_90_soak_of_random_admit_execute_cancel() -> None:
    """Thousands of random steps on a pool that is always short; every text exact, every page accounted for."""
    random = np.random.default_rng(5)
    bench = Bench(num_pages=20, max_kv_capacity=48)
    drive, live_tokens = bench.drive, {}
    expected: dict[int, tuple[list[int], int]] = {}
    prefix = prompt_of(10, 50)
    steps = 0
    while steps < 1500:
        if random.random() < 0.5 and len(drive.live) < 4:
            length = int(random.integers(1, 12))
            prompt = prefix[: int(random.integers(0, 11))] + [int(t) for t in random.integers(2, 400, length)]
            count = int(random.integers(1, 14))
            token = CancelToken()
            number = drive._next_id
            if drive.admit(request(prompt, count), cancel_token=token).status is AdmissionStatus.ADMITTED:
                live_tokens[number], expected[number] = token, (prompt, count)
        for number in list(drive.live):
            if random.random() < 0.03:
                live_tokens[number].cancel()
        names = [number for number in drive.live if random.random() < 0.8]
        if names:
            random.shuffle(names)
            assert drive.step(*(drive.work(number, int(random.integers(1, 9))) for number in names)).ok
            steps += 1
            if steps % 20 == 0:
                recount(bench.runtime.coordinator)
                assert bench.drive.session._request.num_sequences == len(drive.live)  # type: ignore[attr-defined]
        for number in list(drive.finished):
            prompt, count = expected.pop(number)
            snapshot = drive.finished.pop(number)
            made = snapshot.generated_ids
            assert made == twin(prompt, len(made))
            if snapshot.terminal_reason is FinishReason.LENGTH:
                assert len(made) == count
            else:
                assert snapshot.terminal_reason is FinishReason.CANCELLED
    bench.close()
