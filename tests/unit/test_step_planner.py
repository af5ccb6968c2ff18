"""Step planning: exact plans for each rule, and the limits they follow from."""

import pytest

from edgellm.engine.config import (
    EngineConfig,
    Preemption,
    SchedulingMode,
    SchedulingOptions,
    SchedulingPolicy,
    resolve_step_limits,
)
from edgellm.engine.step_planner import LengthLedger, StepPlanner
from edgellm.errors import InvalidArgumentError
from edgellm.session.plan_check import PlanLimits, StepShape, check_plan
from edgellm.session.types import ResidentRef, SequenceIdentity, SequenceWork, SessionCapabilities

P = 128


def capabilities(batch=4, max_input=2048, page=P, compact=True) -> SessionCapabilities:
    return SessionCapabilities(
        compact=compact,
        reason="" if compact else "single-cohort deployment",
        max_batch_size=batch,
        max_input_length=max_input,
        kv_page_size=page,
    )


def limits(caps=None, *, budget=512, **options):
    config = EngineConfig(step_token_budget=budget, scheduling=SchedulingOptions(**options))
    return resolve_step_limits(config, caps or capabilities())


def planner(caps=None, *, budget=512, **options) -> StepPlanner:
    return StepPlanner(limits(caps, budget=budget, **options), SchedulingOptions(**options))


def seat(slot, *, left=0, committed=0, **kwargs) -> LengthLedger:
    return LengthLedger(
        identity=SequenceIdentity(slot + 1, ResidentRef(slot, 1)),
        arrival=kwargs.pop("arrival", slot + 1),
        committed=committed,
        prompt_remaining=left,
        **kwargs,
    )


def rows(plan):
    """(slot, work letter, query, past, select) per entry."""
    return [
        (
            d.identity.resident.slot,
            "C" if d.work is SequenceWork.CONTEXT else "D",
            d.query_length,
            d.past_length,
            d.select_last_token_logits,
        )
        for d in plan
    ]


def check(plan, residents, caps):
    seats = [None] * caps.max_batch_size
    for resident in residents:
        seats[resident.ref.slot] = resident
    plan_limits = PlanLimits(caps.max_batch_size, caps.max_input_length, 1 << 20, caps.compact)
    return check_plan(plan, seats=seats, order=residents, limits=plan_limits)


# ---- limits -------------------------------------------------------------------------------------------


def test_behaviour_21_the_numeric_example():
    got = limits()
    assert got.max_step_tokens == 8192
    assert got.max_num_tokens == 640
    assert got.max_chunk_tokens == 512
    assert got.mixed
    assert got.max_prompt_step_tokens == 8192


def test_cpu_defaults_follow_from_a_step_token_budget_of_256():
    got = limits(capabilities(batch=8, max_input=8192, page=32), budget=256)
    assert EngineConfig().step_token_budget == 256
    assert (got.max_num_tokens, got.max_chunk_tokens) == (288, 256)


def test_default_budget_holds_a_page_when_pages_are_larger_than_it():
    got = limits(capabilities(batch=2, page=128), budget=16)
    assert (got.max_num_tokens, got.max_chunk_tokens) == (256, 128)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_num_tokens": 131}, "max_num_tokens is 131; it must be from 132"),
        ({"max_num_tokens": 8193}, "to 8192"),
        ({"max_chunk_tokens": 200}, "multiple of the page size 128"),
        ({"max_num_tokens": 640, "max_chunk_tokens": 640}, "from 128 to 636"),
        ({"max_prompt_step_tokens": 100}, "max_prompt_step_tokens is 100"),
        ({"max_prompt_step_tokens": 8193}, "max_prompt_step_tokens is 8193"),
        ({"priority_reserved_slots": 4}, "priority_reserved_slots is 4 of 4"),
        ({"preemption": "pause"}, "scheduling_policy"),
        ({"preemption": "pause", "scheduling_policy": "priority", "ifb_scheduling_mode": "prefill_first"}, "mixed"),
        ({"max_pause_steps": 2}, "max_pause_steps is 2"),
        ({"max_num_tokens": -1}, "max_num_tokens is -1"),
        ({"max_num_tokens": True}, "max_num_tokens is True"),
        ({"ifb_scheduling_mode": "sideways"}, "auto, mixed, prefill_first"),
        ({"scheduling_policy": "lifo"}, "fcfs, priority"),
        ({"preemption": "kill"}, "none, pause"),
    ],
)
def test_behaviour_22_range_errors_name_value_and_limit(options, match):
    with pytest.raises(InvalidArgumentError, match=match):
        limits(**options)


def test_behaviour_22_edges_of_the_ranges_are_legal():
    assert limits(max_num_tokens=132).max_chunk_tokens == 128
    assert limits(max_num_tokens=8192, max_chunk_tokens=8064).max_chunk_tokens == 2048


def test_behaviour_22_mixed_without_compact_is_an_error_auto_falls_back():
    single = capabilities(compact=False)
    with pytest.raises(InvalidArgumentError, match="single-cohort deployment"):
        limits(single, ifb_scheduling_mode=SchedulingMode.MIXED)
    with pytest.raises(InvalidArgumentError, match="pausing needs the mixed mode"):
        limits(single, preemption=Preemption.PAUSE, scheduling_policy=SchedulingPolicy.PRIORITY)
    got = limits(single)
    assert not got.mixed
    assert got.max_admissions == 1
    config = EngineConfig(scheduling=SchedulingOptions(ifb_scheduling_mode="mixed"))
    assert not resolve_step_limits(config, single, after_refusal=True).mixed


def test_batch_size_is_bounded_by_the_session():
    with pytest.raises(InvalidArgumentError, match="max_batch_size is 5, the session seats 4"):
        resolve_step_limits(EngineConfig(max_batch_size=5), capabilities())
    assert resolve_step_limits(EngineConfig(max_batch_size=2), capabilities()).max_batch_size == 2
    assert resolve_step_limits(EngineConfig(), capabilities()).max_batch_size == 4


@pytest.mark.parametrize(
    "bad", [{"max_pending_requests": 0}, {"max_batch_size": 0}, {"idle_wait": 0}, {"step_token_budget": 0}]
)
def test_engine_config_ranges(bad):
    with pytest.raises(InvalidArgumentError, match=next(iter(bad))):
        EngineConfig(**bad)


# ---- mixed --------------------------------------------------------------------------------------------


def test_behaviour_23_three_decode_rows_and_a_prompt_of_1000():
    residents = [seat(i, committed=10 + i) for i in range(3)] + [seat(3, left=1000)]
    plan = planner().plan(residents)
    decode = [(0, "D", 1, 10, True), (1, "D", 1, 11, True), (2, "D", 1, 12, True)]
    assert rows(plan) == [*decode, (3, "C", 512, 0, False)]
    residents[3].committed, residents[3].prompt_remaining = 512, 488
    assert rows(planner().plan(residents))[3] == (3, "C", 488, 512, True)


def test_behaviour_24_a_chunk_from_an_unaligned_start_ends_on_a_page_boundary():
    residents = [seat(0, committed=5), seat(1, left=2000, committed=100)]
    assert rows(planner().plan(residents))[1] == (1, "C", 412, 100, False)


def test_behaviour_25_without_decode_rows_a_whole_prompt_runs_in_one_step():
    residents = [seat(0, left=2000), seat(1, left=1500)]
    assert rows(planner().plan(residents)) == [(0, "C", 2000, 0, True), (1, "C", 1500, 0, True)]


def test_behaviour_26_a_prompt_that_finds_no_aligned_room_is_skipped_a_shorter_one_still_fits():
    residents = [seat(0, committed=7), seat(1, left=512), seat(2, left=500), seat(3, left=90)]
    plan = planner().plan(residents)
    # budget 640 - 1 row; 512 for the first leaves 127: no page for the second, but the third is shorter.
    assert rows(plan) == [(0, "D", 1, 7, True), (1, "C", 512, 0, True), (3, "C", 90, 0, True)]


def test_prompts_are_filled_in_arrival_order_not_in_resident_order():
    residents = [seat(0, left=600, arrival=9), seat(1, left=600, arrival=2), seat(2, committed=1)]
    plan = planner().plan(residents)
    assert rows(plan) == [(2, "D", 1, 1, True), (1, "C", 512, 0, False)]


def test_priority_policy_orders_by_priority_then_arrival():
    residents = [seat(0, left=600, priority=1), seat(1, left=600, priority=0), seat(2, committed=1)]
    plan = planner(scheduling_policy="priority").plan(residents)
    assert rows(plan)[1] == (1, "C", 512, 0, False)
    assert rows(planner().plan(residents))[1] == (0, "C", 512, 0, False)


def test_max_prompt_step_tokens_bounds_a_step_without_decode_rows():
    residents = [seat(0, left=2000), seat(1, left=100)]
    plan = planner(max_prompt_step_tokens=300).plan(residents)
    assert rows(plan) == [(0, "C", 256, 0, False)]


def test_a_deployment_with_inputs_shorter_than_a_page_still_progresses():
    caps = capabilities(batch=2, max_input=20, page=32)
    residents = [seat(0, committed=40), seat(1, left=50)]
    plan = planner(caps).plan(residents)
    assert rows(plan) == [(0, "D", 1, 40, True), (1, "C", 20, 0, False)]
    assert check(plan, residents, caps) is StepShape.COMPACT


def test_behaviour_32_an_exclusive_resident_runs_its_whole_prompt_then_its_row_alone():
    residents = [seat(0, left=2000, exclusive=True)]
    assert rows(planner(max_prompt_step_tokens=128).plan(residents)) == [(0, "C", 2000, 0, True)]
    residents = [seat(0, committed=2000, exclusive=True)]
    assert rows(planner().plan(residents)) == [(0, "D", 1, 2000, True)]


def test_behaviour_34_full_cohort_decode_is_in_resident_order():
    residents = [seat(2, committed=4, arrival=9), seat(0, committed=5, arrival=1), seat(3, committed=6, arrival=5)]
    plan = planner(scheduling_policy="priority").plan(residents)
    assert [entry[0] for entry in rows(plan)] == [2, 0, 3]
    assert check(plan, residents, capabilities()) is StepShape.FULL_COHORT_DECODE


def test_an_empty_ledger_gives_an_empty_plan():
    assert planner().plan([]) == []


# ---- prefill first ------------------------------------------------------------------------------------


def test_behaviour_28_prefill_first_starves_decode_only_while_prompts_are_pending():
    chosen = planner(ifb_scheduling_mode="prefill_first")
    residents = [seat(0, committed=5), seat(1, left=300), seat(2, left=200)]
    assert rows(chosen.plan(residents)) == [(1, "C", 300, 0, True), (2, "C", 200, 0, True)]
    residents[1].prompt_remaining = residents[2].prompt_remaining = 0
    assert [entry[1] for entry in rows(chosen.plan(residents))] == ["D", "D", "D"]


def test_behaviour_28_under_the_priority_policy_only_the_best_class_prefills():
    chosen = planner(ifb_scheduling_mode="prefill_first", scheduling_policy="priority")
    residents = [seat(0, left=10, priority=5), seat(1, left=20, priority=-1), seat(2, left=30, priority=-1)]
    assert rows(chosen.plan(residents)) == [(1, "C", 20, 0, True), (2, "C", 30, 0, True)]


def test_single_cohort_runs_the_pending_prompt_whole_then_everybody():
    caps = capabilities(compact=False)
    residents = [seat(0, committed=5), seat(1, left=2000, committed=48)]
    plan = planner(caps).plan(residents)
    assert rows(plan) == [(1, "C", 2000, 48, True)]
    assert check(plan, residents, caps) is StepShape.WHOLE_PROMPT
    residents[1].prompt_remaining = 0
    assert check(planner(caps).plan(residents), residents, caps) is StepShape.FULL_COHORT_DECODE


# ---- pause --------------------------------------------------------------------------------------------

PAUSE = {"scheduling_policy": "priority", "preemption": "pause"}


def test_behaviour_29_less_urgent_decoders_pause_until_the_urgent_prompt_is_done():
    chosen = planner(**PAUSE)
    residents = [seat(0, committed=5, priority=1), seat(1, committed=6, priority=0), seat(2, left=900, priority=0)]
    assert rows(chosen.plan(residents)) == [(1, "D", 1, 6, True), (2, "C", 512, 0, False)]
    assert chosen.num_paused == 1
    residents[2].committed, residents[2].prompt_remaining = 512, 388
    assert rows(chosen.plan(residents)) == [(1, "D", 1, 6, True), (2, "C", 388, 512, True)]
    residents[2].committed, residents[2].prompt_remaining = 900, 0
    assert [entry[0] for entry in rows(chosen.plan(residents))] == [0, 1, 2]
    assert (chosen.num_paused, residents[0].paused_steps) == (0, 0)


def test_behaviour_29_with_every_decoder_paused_the_prompt_runs_whole():
    residents = [seat(0, committed=5, priority=1), seat(1, left=2000, priority=0)]
    assert rows(planner(**PAUSE).plan(residents)) == [(1, "C", 2000, 0, True)]


def test_behaviour_30_a_decoder_is_absent_at_most_max_pause_steps_in_a_row():
    chosen = planner(capabilities(max_input=128), **PAUSE, max_pause_steps=2)
    decoder, prompt = seat(0, committed=5, priority=1), seat(1, left=1280, priority=0)
    present = []
    while prompt.prompt_remaining:
        plan = chosen.plan([decoder, prompt])
        present.append(any(d.identity.resident.slot == 0 for d in plan))
        done = next(d.query_length for d in plan if d.identity.resident.slot == 1)
        prompt.committed += done
        prompt.prompt_remaining -= done
    assert present == [False, False, True] * 3 + [False]


# ---- cancelled ----------------------------------------------------------------------------------------


def test_behaviour_31_a_cancelled_resident_is_planned_though_it_would_be_paused():
    residents = [seat(0, committed=5, priority=1, cancelled=True), seat(1, left=900, priority=0)]
    plan = planner(**PAUSE).plan(residents)
    # It charges no budget and is no reason to keep the prompt short.
    assert rows(plan) == [(0, "D", 1, 5, True), (1, "C", 900, 0, True)]


def test_cancelled_prompts_get_one_token_and_leave_the_budget_to_others():
    residents = [seat(0, committed=3), seat(1, left=900, cancelled=True), seat(2, left=512)]
    plan = planner(max_num_tokens=640).plan(residents)
    assert rows(plan) == [(0, "D", 1, 3, True), (1, "C", 1, 0, False), (2, "C", 512, 0, True)]
    assert check(plan, residents, capabilities()) is StepShape.COMPACT


def test_cancelled_work_stays_inside_the_step_limit():
    caps = capabilities(batch=2, max_input=128)
    residents = [seat(0, committed=3, cancelled=True), seat(1, left=256)]
    plan = planner(caps, max_num_tokens=256).plan(residents)
    assert rows(plan) == [(0, "D", 1, 3, True), (1, "C", 128, 0, False)]
    assert check(plan, residents, caps) is StepShape.COMPACT


def test_only_cancelled_residents_still_make_a_plan():
    residents = [seat(0, left=900, cancelled=True), seat(1, left=1, cancelled=True)]
    assert rows(planner().plan(residents)) == [(0, "C", 1, 0, False), (1, "C", 1, 0, True)]


def test_cancelled_decoder_leaves_during_prefill_first():
    residents = [seat(0, committed=3, cancelled=True), seat(1, committed=3), seat(2, left=50)]
    plan = planner(ifb_scheduling_mode="prefill_first").plan(residents)
    assert rows(plan) == [(0, "D", 1, 3, True), (2, "C", 50, 0, True)]


# ---- a cap on prompt tokens beside decode rows --------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt_tokens", "chunk"),
    [(None, 512), (4096, 512), (300, 256), (128, 128), (127, 128), (0, 128)],
)
def test_prompt_tokens_cap_the_chunk_beside_decode_rows_down_to_a_page(prompt_tokens, chunk):
    residents = [seat(0, committed=9), seat(1, left=1000)]
    plan = planner().plan(residents, prompt_tokens=prompt_tokens)
    assert rows(plan) == [(0, "D", 1, 9, True), (1, "C", chunk, 0, False)]
    check(plan, residents, capabilities())


def test_prompt_tokens_are_shared_by_the_prompts_of_a_step():
    residents = [seat(0, committed=9), seat(1, left=1000), seat(2, left=100), seat(3, left=100)]
    plan = planner().plan(residents, prompt_tokens=300)
    assert rows(plan)[1:] == [(1, "C", 256, 0, False)]  # 44 tokens are left: less than a page of the next
    plan = planner().plan(residents, prompt_tokens=360)
    assert rows(plan)[1:] == [(1, "C", 256, 0, False), (2, "C", 100, 0, True)]


def test_prompt_tokens_let_the_head_reach_its_page_boundary_or_its_end():
    aligned = planner().plan([seat(0, committed=9), seat(1, committed=200, left=500)], prompt_tokens=1)
    assert rows(aligned)[1:] == [(1, "C", 56, 200, False)]
    last = planner().plan([seat(0, committed=9), seat(1, committed=200, left=70)], prompt_tokens=1)
    assert rows(last)[1:] == [(1, "C", 70, 200, True)]


def test_prompt_tokens_bound_a_compact_step_without_decode_rows_too():
    plan = planner().plan([seat(1, left=1000)], prompt_tokens=128)
    assert rows(plan) == [(1, "C", 128, 0, False)]
