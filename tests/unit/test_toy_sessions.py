"""Rank sessions over every flavour of state and speculation (decoder behaviours 1 to 5, 8 to 10, 12, 13, 15 and 21).

Whatever nobody holds is poisoned before each forward; between steps every byte of state of every resident is compared
with a plain-Python twin, and all pools are counted again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from plugin_policies import PLUGINS

from edgellm.cache.types import ContextCacheConfig, ContextCacheLookupPolicy, ReuseStopReason
from edgellm.engine.config import EngineConfig
from edgellm.engine.engine import RequestEngine
from edgellm.errors import BrokenInvariantError, RequestCancelled, UnsupportedRequestError
from edgellm.plugins import load_plugins
from edgellm.request import CancelToken, LLMGenerationRequest
from edgellm.sampling.params import SamplingParams
from edgellm.session.types import AdmissionStatus, FinishReason, SessionOptions, StepResult
from edgellm.testing.recount import require_baseline
from edgellm.testing.session_driver import SessionDriver
from edgellm.testing.toy_drafter import ScriptedDrafter
from edgellm.testing.toy_driver import FLAVOURS, FlakySynchronizer
from edgellm.testing.toy_runtime import TOY_VOCAB_SIZE, ToyFlavourRuntime, toy_runtime

SPECULATIVE = [name for name, profile in FLAVOURS.items() if profile.is_speculative]
CHECKPOINTED = [name for name, profile in FLAVOURS.items() if profile.uses_checkpoint_reuse]
VERIFYING = ["shared-kv"]  # no stand-alone target: speculation cannot be turned off
PAIRED = [name for name, profile in FLAVOURS.items() if profile.owns_paged_spec_state]


def runtime_of(flavour: str, **options: Any) -> ToyFlavourRuntime:
    return toy_runtime(flavour, plugins=load_plugins(extra=PLUGINS, autoload=False, strict=True), **options)


class Bench:
    """One runtime with an open session; every step is followed by a check of all state."""

    def __init__(self, flavour: str, *, compact: bool = True, **options: Any) -> None:
        self.runtime = runtime_of(flavour, **options)
        self.drive = self.open(compact=compact)

    def open(self, *, compact: bool = True) -> SessionDriver:
        self.drive = SessionDriver(self.runtime.open_session(SessionOptions(allow_compact_execution=compact)))
        return self.drive

    def admit(self, prompt: list[int], max_tokens: int = 9, **fields: Any) -> int:
        """The id under which the request was admitted."""
        assert self.drive.admit(request(prompt, max_tokens, **fields)).status is AdmissionStatus.ADMITTED
        return max(self.drive.live)

    def step(self, *plan: Any, chunk: int | None = None) -> StepResult:
        result = self.drive.step(*plan) if plan else self.drive.step_all(chunk)
        assert result.ok, result.failure
        self.runtime.check()
        return result

    def run(self, chunk: int | None = None) -> None:
        while self.drive.live:
            self.step(chunk=chunk)

    def text(self, number: int) -> list[int]:
        return self.drive.finished[number].generated_ids

    def close(self) -> None:
        self.drive.session.close()
        require_baseline(self.runtime.coordinator)
        assert self.runtime.coordinator.metrics().policy_failures == 0
        self.runtime.close()


Make = Callable[..., Bench]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Bench] = []

    def build(flavour: str, **options: Any) -> Bench:
        made.append(Bench(flavour, **options))
        return made[-1]

    yield build
    for bench in made:
        bench.close()


def prompt_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, TOY_VOCAB_SIZE), k=length)


def request(prompt: list[int], max_tokens: int = 9, **fields: Any) -> LLMGenerationRequest:
    params = {name: fields.pop(name) for name in list(fields) if name in SamplingParams.__dataclass_fields__}
    params = {"temperature": 0.0, "ignore_eos": True, **params}
    return LLMGenerationRequest(
        prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens, **params), **fields
    )


every_flavour = pytest.mark.parametrize("flavour", FLAVOURS)


# ---- text -----------------------------------------------------------------------------------------------


@every_flavour
@pytest.mark.parametrize("chunk", [1, 3, 4, 7, None])
def test_decoder_behaviour_1_any_chunking_gives_the_text_of_a_solo_run(make: Make, flavour: str, chunk: int) -> None:
    bench = make(flavour, config=ContextCacheConfig(checkpoint_interval_tokens=6, policy_deadline_seconds=None))
    prompt = prompt_of(1, 23)
    number = bench.admit(prompt, 12)
    bench.run(chunk)
    assert bench.text(number) == bench.runtime.solo(prompt, 12)
    assert bench.drive.finished[number].terminal_reason is FinishReason.LENGTH


@every_flavour
def test_a_batch_of_five_with_staggered_arrival(make: Make, flavour: str) -> None:
    bench = make(flavour, max_batch_size=5)
    prompts = {}
    for number in range(1, 6):
        prompts[bench.admit(prompt_of(number, 5 + 3 * number), 6 + number)] = 6 + number
        bench.step(chunk=4)
        bench.step(chunk=4)
    bench.run(4)
    for number, count in prompts.items():
        assert bench.text(number) == bench.runtime.solo(prompt_of(number, 5 + 3 * number), count)


@every_flavour
def test_single_cohort_sessions_and_the_blocking_path(make: Make, flavour: str) -> None:
    bench = make(flavour, compact=False)
    first = bench.admit(prompt_of(1, 11))
    bench.step(bench.drive.context(first))
    second = bench.admit(prompt_of(2, 9))
    bench.step(bench.drive.context(second))
    bench.run()
    bench.drive.session.close()
    for number, prompt in ((first, prompt_of(1, 11)), (second, prompt_of(2, 9))):
        assert bench.text(number) == bench.runtime.solo(prompt, 9)
    assert bench.runtime.handle_request(request(prompt_of(3, 70), 9)).token_ids == bench.runtime.solo(
        prompt_of(3, 70), 9
    )


@every_flavour
def test_rows_that_are_not_named_are_held(make: Make, flavour: str) -> None:
    bench = make(flavour)
    one, two, three = (bench.admit(prompt_of(number, 6)) for number in (1, 2, 3))
    bench.step(bench.drive.context(one), bench.drive.context(three, 2))
    held = bench.drive.live[three].committed
    for _ in range(2):
        bench.step(bench.drive.decode(one))
    assert bench.drive.live[three].committed == held
    assert bench.drive.live[two].committed == 0
    bench.run()
    for number in (one, two, three):
        assert bench.text(number) == bench.runtime.solo(prompt_of(number, 6), 9)


# ---- reuse ----------------------------------------------------------------------------------------------


@every_flavour
def test_decoder_behaviour_21_the_second_turn_reuses_and_equals_a_cold_run(make: Make, flavour: str) -> None:
    bench = make(flavour)
    first = prompt_of(7, 23)
    bench.admit(first, 12)
    bench.run(5)
    second = [*first, *bench.text(1), 5, 6, 7]
    number = bench.admit(second, 12)
    # The answer leaves 34 tokens of state.  A draft that trails by what was accepted last (behaviour 10) catches up
    # where the answer ends, and the token behind that is the same, so no look-ahead is lost.
    assert bench.drive.live[number].committed == 34
    bench.run(5)
    assert bench.text(number) == bench.runtime.solo(second, 12)
    reuse = bench.drive.finished[number].reuse
    assert reuse is not None
    assert reuse.reused_tokens == 34


@every_flavour
@pytest.mark.parametrize("suffix", [1, 2, 5])
def test_a_prompt_that_ends_right_behind_what_is_known(make: Make, flavour: str, suffix: int) -> None:
    bench = make(flavour)
    first = prompt_of(3, 16)
    bench.admit(first, 2)
    bench.run()
    longer = [*first, *prompt_of(4, suffix)]
    number = bench.admit(longer)
    assert bench.drive.live[number].committed >= 15
    bench.run(2)
    assert bench.text(number) == bench.runtime.solo(longer, 9)


@pytest.mark.parametrize("flavour", CHECKPOINTED)
def test_a_chunk_that_crosses_checkpoints_leaves_what_small_chunks_leave(make: Make, flavour: str) -> None:
    kept = []
    for chunk in (None, 1, 5):
        bench = make(flavour, config=ContextCacheConfig(checkpoint_interval_tokens=5, policy_deadline_seconds=None))
        prompt = prompt_of(2, 31)
        bench.admit(prompt, 3, checkpoint_boundaries=(4, 9))
        result = bench.step(chunk=chunk)
        if chunk is None:
            assert [(row.query_length, row.past_length) for row in result.execution] == [(31, 0)]
            assert result.published_prefix
        bench.run(chunk)
        found = []
        for length in (5, 10, 11, 12, 21, 26, 31):
            number = bench.admit([*prompt[:length], 400], 2)
            found.append(bench.drive.live[number].committed)
            bench.run()
        kept.append(found)
    assert kept[0] == kept[1] == kept[2]
    assert kept[0][:2] == [4, 9]  # boundaries that the caller named; the ladder's rungs follow
    assert len(set(kept[0])) >= 4


@every_flavour
def test_a_prompt_in_flight_takes_over_what_another_publishes(make: Make, flavour: str) -> None:
    config = ContextCacheConfig(checkpoint_interval_tokens=8, policy_deadline_seconds=None)
    bench = make(flavour, config=config)
    prompt = prompt_of(5, 30)
    one, two = bench.admit(prompt), bench.admit([*prompt[:25], *prompt_of(6, 5)])
    bench.step(bench.drive.context(one, 25))
    before = bench.runtime.executor.tokens_computed
    bench.step(bench.drive.context(two, 26))
    assert bench.runtime.executor.tokens_computed - before < 26
    bench.run(7)
    assert bench.text(one) == bench.runtime.solo(prompt, 9)
    assert bench.text(two) == bench.runtime.solo([*prompt[:25], *prompt_of(6, 5)], 9)
    reuse = bench.drive.finished[two].reuse
    assert reuse is not None
    assert reuse.reused_tokens >= 16


# ---- speculation ----------------------------------------------------------------------------------------

SAMPLED = [
    {},
    {"temperature": 0.9, "seed": 7, "top_k": 40},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.2, "seed": 3, "presence_penalty": 0.7, "logprobs": 2},
    {"temperature": 0.0, "logit_bias": {9: 100.0}, "logprobs": 0},
]


@pytest.mark.parametrize("flavour", SPECULATIVE)
@pytest.mark.parametrize("params", SAMPLED, ids=range(len(SAMPLED)))
def test_decoder_behaviour_2_speculation_changes_no_token(make: Make, flavour: str, params: dict[str, Any]) -> None:
    bench = make(flavour)
    plain = make("attention") if flavour in VERIFYING else bench
    on = bench.admit(prompt_of(1, 9), 14, **params)
    off = plain.admit(prompt_of(1, 9), 14, disable_spec_decode=flavour not in VERIFYING, **params)
    bench.run(4)
    plain.run(4)
    with_drafts, without = bench.drive.finished[on], plain.drive.finished[off]
    assert with_drafts.generated_ids == without.generated_ids
    assert with_drafts.logprobs == without.logprobs
    assert (without.proposed_draft_tokens, without.iterations) == (0, 14)
    assert with_drafts.proposed_draft_tokens > 0


@pytest.mark.parametrize("flavour", VERIFYING)
def test_speculation_cannot_be_turned_off_where_the_decoder_only_verifies(make: Make, flavour: str) -> None:
    bench = make(flavour)
    with pytest.raises(
        UnsupportedRequestError, match=r"disable_spec_decode is True, .* \(shared_kv_mtp\) only verifies"
    ):
        bench.drive.admit(request(prompt_of(1, 9), disable_spec_decode=True))
    assert bench.drive.session.idle()
    number = bench.admit(prompt_of(1, 9))
    bench.run()
    assert bench.text(number) == bench.runtime.solo(prompt_of(1, 9), 9)


@pytest.mark.parametrize("flavour", SPECULATIVE)
def test_rows_with_different_sampling_share_a_batch(make: Make, flavour: str) -> None:
    bench = make(flavour)
    greedy, warm = request(prompt_of(1, 9)), request(prompt_of(2, 9), temperature=1.0, seed=5)
    assert not bench.drive.session.requires_uniform_sampling(greedy)
    bench.drive.admit(greedy)
    bench.drive.admit(warm)
    bench.run()
    assert bench.text(1) == bench.runtime.solo(prompt_of(1, 9), 9)
    number = bench.admit(prompt_of(2, 9), temperature=1.0, seed=5)
    bench.run()
    assert bench.text(number) == bench.text(2)  # the same seed alone, behaviour 15


@pytest.mark.parametrize("flavour", SPECULATIVE)
@pytest.mark.parametrize(("accepts", "steps"), [(3, 3), (0, 12), (1, 6)])
def test_decoder_behaviour_3_drafts_that_agree_always_or_never(
    make: Make, flavour: str, accepts: int, steps: int
) -> None:
    bench = make(flavour, drafter=ScriptedDrafter(default=accepts))
    number = bench.admit(prompt_of(1, 8), 13)
    bench.step()
    lengths = []
    while bench.drive.live:
        result = bench.step()
        assert all(row.query_length >= 1 for row in result.execution)
        lengths.append(result.execution[0].query_length)
    assert lengths == [accepts + 1] * steps
    assert bench.text(number) == bench.runtime.solo(prompt_of(1, 8), 13)
    snapshot = bench.drive.finished[number]
    assert snapshot.accepted_draft_tokens == accepts * steps
    assert snapshot.iterations == steps + 1


@pytest.mark.parametrize("flavour", SPECULATIVE)
@pytest.mark.parametrize("stop", ["token", "string", "length"])
@pytest.mark.parametrize("place", range(2, 8))
def test_decoder_behaviour_13_an_end_inside_an_accepted_run(make: Make, flavour: str, stop: str, place: int) -> None:
    bench = make(flavour, drafter=ScriptedDrafter(default=3))
    prompt = prompt_of(11, 10)
    truth = bench.runtime.solo(prompt, 20)
    assert len(set(truth[:10])) == 10
    end = truth[place - 1]
    if stop == "token":
        number = bench.admit(prompt, 20, stop_token_ids=(end,))
    elif stop == "string":
        decode = bench.runtime.tokenizer.decode
        number = bench.admit(prompt, 20, stop=decode([end]))
        place = next(count for count in range(1, 21) if decode([end]) in decode(truth[:count]))
    else:
        number = bench.admit(prompt, place)
    other = bench.admit(prompt_of(12, 5), 16)
    results = []
    while number in bench.drive.live:
        results.append(bench.step())
    reason = {"token": FinishReason.END_ID, "string": FinishReason.STOP_WORDS, "length": FinishReason.LENGTH}[stop]
    assert bench.text(number) == truth[:place]
    assert bench.drive.finished[number].terminal_reason is reason
    ran = [row.query_length for result in results for row in result.execution if row.identity.request_id == number]
    assert sum(ran) == len(prompt) + place - 1  # committed == tokens - 1, whatever was accepted behind the end
    bench.run()
    assert bench.text(other) == bench.runtime.solo(prompt_of(12, 5), 16)
    again = bench.admit([*prompt, *truth[:place], 3, 4], 6)
    assert bench.drive.live[again].committed >= 8
    bench.run()
    assert bench.text(again) == bench.runtime.solo([*prompt, *truth[:place], 3, 4], 6)


@pytest.mark.parametrize("flavour", SPECULATIVE)
def test_an_answer_up_to_the_length_limit(make: Make, flavour: str) -> None:
    bench = make(flavour, max_kv_capacity=32, drafter=ScriptedDrafter(default=3))
    number = bench.admit(prompt_of(1, 9), 100)
    bench.run()
    assert bench.text(number) == bench.runtime.solo(prompt_of(1, 9), 32 - 9 - 3)


# ---- shortage -------------------------------------------------------------------------------------------


@every_flavour
def test_a_full_pool_refuses_and_admits_later(make: Make, flavour: str) -> None:
    if flavour == "recurrent":
        pytest.skip("pure recurrent models have no pages")
    bench = make(flavour, num_pages=10, max_kv_capacity=40)
    first = bench.admit(prompt_of(1, 17), 8)
    refused = bench.drive.admit(request(prompt_of(2, 15), 8))
    assert refused.status is AdmissionStatus.NO_CAPACITY
    bench.step()
    assert bench.drive.admit(request(prompt_of(2, 15), 8)).status is AdmissionStatus.NO_CAPACITY
    bench.run()
    second = bench.admit(prompt_of(2, 15), 8)
    bench.run()
    assert bench.text(first) == bench.runtime.solo(prompt_of(1, 17), 8)
    assert bench.text(second) == bench.runtime.solo(prompt_of(2, 15), 8)


@pytest.mark.parametrize("flavour", PAIRED)
def test_a_full_draft_pool_refuses_and_everybody_admitted_ends_well(make: Make, flavour: str) -> None:
    bench = make(flavour, num_pages=64, num_draft_pages=11, max_kv_capacity=44)
    numbers = [bench.admit(prompt_of(1, 8), 8)]  # 8 + 6 + 4 positions at the end: 5 pages
    bench.step()
    numbers.append(bench.admit(prompt_of(2, 8), 8))
    assert bench.drive.admit(request(prompt_of(3, 8), 8)).status is AdmissionStatus.NO_CAPACITY
    bench.run()
    numbers.append(bench.admit(prompt_of(3, 8), 8))
    bench.run()
    for seed, number in enumerate(numbers, start=1):
        assert bench.drive.finished[number].terminal_reason is FinishReason.LENGTH
        assert bench.text(number) == bench.runtime.solo(prompt_of(seed, 8), 8)


@pytest.mark.parametrize("flavour", CHECKPOINTED)
def test_one_snapshot_slot_costs_reuse_and_no_answer(make: Make, flavour: str) -> None:
    config = ContextCacheConfig(checkpoint_interval_tokens=4, policy_deadline_seconds=None)
    bench = make(flavour, recurrent_slots=1, partial_slots=1, config=config)
    numbers = {}
    for seed in range(1, 5):
        numbers[bench.admit(prompt_of(seed, 14), 6)] = seed
        bench.step(chunk=5)
    bench.run(5)
    for number, seed in numbers.items():
        assert bench.text(number) == bench.runtime.solo(prompt_of(seed, 14), 6)


@every_flavour
def test_page_pressure_in_mid_answer_ends_one_and_no_other(make: Make, flavour: str) -> None:
    if flavour == "recurrent":
        pytest.skip("pure recurrent models have no pages")
    bench = make(flavour, num_pages=12, max_kv_capacity=48, reserve_growth=False)
    numbers = [bench.admit(prompt_of(seed, 9), 24) for seed in (1, 2)]
    bench.run(6)
    reasons = [bench.drive.finished[number].terminal_reason for number in numbers]
    assert sorted(reason.value for reason in reasons) == ["error", "length"]
    for seed, number in enumerate(numbers, start=1):
        truth = bench.runtime.solo(prompt_of(seed, 9), 24)
        assert bench.text(number) == truth[: len(bench.text(number))]
    assert "no free page" in bench.drive.finished[numbers[reasons.index(FinishReason.ERROR)]].error_message


# ---- ends and failures ----------------------------------------------------------------------------------


@every_flavour
@pytest.mark.parametrize("steps", range(6))
def test_a_cancel_at_every_state_leaves_the_others_alone(make: Make, flavour: str, steps: int) -> None:
    bench = make(flavour)
    token = CancelToken()
    other = bench.admit(prompt_of(1, 12), 12)
    bench.drive.admit(request(prompt_of(2, 13), 12), cancel_token=token)
    victim = max(bench.drive.live)
    third = bench.admit(prompt_of(3, 6), 12)
    for _ in range(steps):
        bench.step(chunk=5)
    token.cancel()
    bench.step(chunk=5)
    assert bench.drive.finished[victim].terminal_reason is FinishReason.CANCELLED
    late = bench.admit(prompt_of(2, 13), 12)
    bench.run(5)
    for seed, number in ((1, other), (3, third), (2, late)):
        assert bench.text(number) == bench.runtime.solo(
            prompt_of(seed, 13 if seed == 2 else 12 if seed == 1 else 6), 12
        )


@every_flavour
@pytest.mark.parametrize("steps", range(5))
def test_a_session_closes_with_everybody_aboard(make: Make, flavour: str, steps: int) -> None:
    bench = make(flavour)
    bench.admit(prompt_of(1, 13))
    bench.admit(prompt_of(2, 6))
    for _ in range(steps):
        bench.step(chunk=5)
    bench.drive.session.close()
    require_baseline(bench.runtime.coordinator)
    drive = bench.open()
    number = bench.admit(prompt_of(1, 13))
    bench.run()
    assert drive.finished[number].generated_ids == bench.runtime.solo(prompt_of(1, 13), 9)


@every_flavour
def test_a_failed_step_loses_the_session_and_nothing_else(make: Make, flavour: str) -> None:
    bench = make(flavour)
    bench.admit(prompt_of(1, 13))
    bench.step()
    bench.step()
    bench.runtime.executor.fail_next()
    result = bench.drive.step_all()
    assert not result.ok
    assert "injected device failure" in result.failure
    bench.drive.session.close()
    require_baseline(bench.runtime.coordinator)
    bench.open()
    number = bench.admit(prompt_of(1, 13))
    bench.run()
    assert bench.text(number) == bench.runtime.solo(prompt_of(1, 13), 9)


@every_flavour
def test_a_wait_that_failed_once_does_not_end_the_runtime(make: Make, flavour: str) -> None:
    sync = FlakySynchronizer()
    bench = make(flavour, synchronizer=sync)
    bench.admit(prompt_of(1, 13), 2)
    sync.failing = True
    while bench.drive.live:
        if not bench.drive.step_all().ok:
            break
    assert bench.runtime.coordinator.poisoned
    bench.drive.session.close()
    with pytest.raises(BrokenInvariantError, match="refuses new requests"):
        bench.open()
    sync.failing = False
    bench.open()
    assert not bench.runtime.coordinator.poisoned
    number = bench.admit(prompt_of(1, 13))
    bench.run(5)
    assert bench.text(number) == bench.runtime.solo(prompt_of(1, 13), 9)


@pytest.mark.parametrize("flavour", CHECKPOINTED)
def test_a_failure_behind_a_published_piece_leaves_a_right_checkpoint(make: Make, flavour: str) -> None:
    bench = make(flavour)
    prompt = prompt_of(1, 21)
    bench.admit(prompt, checkpoint_boundaries=(9,))
    forward, calls = bench.runtime.executor.forward_verify, []

    def second_fails(batch: Any) -> Any:
        calls.append(batch.num_tokens)
        if len(calls) == 2:
            bench.runtime.executor.fail_next()
        return forward(batch)

    bench.runtime.executor.forward_verify = second_fails  # type: ignore[method-assign]
    assert not bench.drive.step_all().ok
    assert calls == [9, 12]
    bench.drive.session.close()
    bench.open()
    number = bench.admit(prompt)
    assert bench.drive.live[number].committed == 9
    bench.run()
    assert bench.text(number) == bench.runtime.solo(prompt, 9)


@every_flavour
def test_a_request_without_the_cache_shares_steps_and_leaves_no_trace(make: Make, flavour: str) -> None:
    """Each is as if it ran alone: the normal one reuses and publishes, the other neither looks up nor publishes."""
    bench = make(flavour)
    trunk = prompt_of(8, 16)
    bench.admit(trunk, 4)
    bench.run()
    normal_prompt, private_prompt = [*trunk, *prompt_of(9, 6)], [*trunk, *prompt_of(10, 6)]
    normal = bench.admit(normal_prompt, 7)
    private = bench.admit(private_prompt, 7, lookup_policy=ContextCacheLookupPolicy.BYPASS)
    bench.run(6)
    together = [result for result in bench.drive.results if len(result.execution) == 2]
    assert len(together) >= 2
    for number, prompt in ((normal, normal_prompt), (private, private_prompt)):
        assert bench.text(number) == bench.runtime.solo(prompt, 7)
    reports = [bench.drive.finished[number].reuse for number in (normal, private)]
    assert reports[0].reused_tokens > 0
    assert (reports[1].reused_tokens, reports[1].stop_reason) == (0, ReuseStopReason.BYPASS)
    # Longer than the trunk is found of the normal one only.
    starts = []
    for prompt in (normal_prompt, private_prompt):
        starts.append(bench.drive.admit(request([*prompt, *prompt_of(11, 3)], 2)).prefill_start)
        bench.run()
    assert starts[0] > len(trunk) >= starts[1]


# ---- anything at any time -------------------------------------------------------------------------------


@every_flavour
@pytest.mark.parametrize("seed", range(2))
def test_random_plans_over_a_small_pool(make: Make, flavour: str, seed: int) -> None:
    rng = random.Random(f"{flavour} {seed}")
    switched_off = 0.0 if flavour in VERIFYING else 0.2
    config = ContextCacheConfig(checkpoint_interval_tokens=6, policy_deadline_seconds=None)
    pools = {"num_pages": 26, "num_draft_pages": 24, "recurrent_slots": 6, "partial_slots": 5}
    bench = make(flavour, max_batch_size=5, max_kv_capacity=48, config=config, **pools)
    tokens: dict[int, CancelToken] = {}
    wanted: dict[int, tuple[list[int], int]] = {}
    trunks = [prompt_of(seed * 10 + number, 18) for number in range(3)]
    for _ in range(70):
        if rng.random() < 0.5:
            prompt = [*rng.choice(trunks)[: rng.randrange(19)], *prompt_of(rng.randrange(10**6), rng.randint(1, 9))]
            count, token = rng.randint(1, 12), CancelToken()
            fields = {
                "disable_spec_decode": rng.random() < switched_off,
                "cache_salt": rng.choice([None, None, None, "a"]),
            }
            if rng.random() < 0.3:
                fields["checkpoint_boundaries"] = tuple(sorted(rng.sample(range(1, len(prompt) + 1), 1)))
            admitted = bench.drive.admit(request(prompt, count, **fields), cancel_token=token)
            if admitted.status is AdmissionStatus.ADMITTED:
                number = max(bench.drive.live)
                tokens[number], wanted[number] = token, (prompt, count)
        live = list(bench.drive.live)
        if live:
            if rng.random() < 0.07:
                tokens[rng.choice(live)].cancel()
            named = rng.sample(live, rng.randint(1, len(live)))
            bench.step(*(bench.drive.work(number, rng.randint(1, 20)) for number in named))
    bench.run(7)
    for number, (prompt, count) in wanted.items():
        snapshot = bench.drive.finished[number]
        truth = bench.runtime.solo(prompt, count)
        if snapshot.terminal_reason is not FinishReason.CANCELLED:
            assert snapshot.terminal_reason is FinishReason.LENGTH, snapshot.error_message
            assert snapshot.generated_ids == truth
        assert snapshot.generated_ids == truth[: snapshot.generate_length]
    assert bench.runtime.coordinator.metrics().reused_tokens > 0


# ---- under an engine ------------------------------------------------------------------------------------


@every_flavour
def test_an_engine_serves_random_traffic(flavour: str) -> None:
    rng = random.Random(5)
    switched_off = 0.0 if flavour in VERIFYING else 0.2
    runtime = runtime_of(flavour, max_batch_size=5, num_pages=60, recurrent_slots=6, partial_slots=4)
    trunk = prompt_of(99, 20)
    wanted = []
    with RequestEngine(runtime, EngineConfig(idle_wait=5.0)) as engine:
        for number in range(40):
            prompt = [*trunk[: rng.randrange(20)], *prompt_of(number, rng.randint(1, 12))]
            count = rng.randint(1, 10)
            handle = engine.submit(request(prompt, count, disable_spec_decode=rng.random() < switched_off))
            if rng.random() < 0.2:
                handle.cancel()
            wanted.append((handle, prompt, count))
        for handle, prompt, count in wanted:
            try:
                assert handle.get(30).token_ids == runtime.solo(prompt, count)
            except RequestCancelled:
                continue
    require_baseline(runtime.coordinator)
    metrics = runtime.coordinator.metrics()
    assert metrics.policy_failures == 0
    assert metrics.reused_tokens > 0
