"""Every plan, for random deployments, options and residents, is one that a session accepts."""

from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.engine.config import EngineConfig, SchedulingOptions, resolve_step_limits
from edgellm.engine.step_planner import LengthLedger, StepPlanner
from edgellm.session.plan_check import PlanLimits, StepShape, check_plan
from edgellm.session.types import ResidentRef, SequenceIdentity, SequenceWork, SessionCapabilities


@st.composite
def deployments(draw):
    """(capabilities, config) that agree."""
    batch = draw(st.integers(1, 8))
    page = draw(st.sampled_from([1, 2, 4, 16, 32]))
    max_input = draw(st.integers(1, 200))
    compact = draw(st.booleans())
    caps = SessionCapabilities(compact, "" if compact else "no", batch, max_input, page)
    max_step = batch * max_input
    options = {
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
        "ifb_scheduling_mode": draw(st.sampled_from(["auto", "prefill_first"] + ["mixed"] * compact)),
    }
    if batch + page <= max_step and draw(st.booleans()):
        options["max_num_tokens"] = draw(st.integers(batch + page, max_step))
        if draw(st.booleans()):
            options["max_chunk_tokens"] = page * draw(st.integers(1, (options["max_num_tokens"] - batch) // page))
    if page <= max_step and draw(st.booleans()):
        options["max_prompt_step_tokens"] = draw(st.integers(page, max_step))
    mixed = compact and options["ifb_scheduling_mode"] != "prefill_first"
    if mixed and options["scheduling_policy"] == "priority" and draw(st.booleans()):
        options |= {"preemption": "pause", "max_pause_steps": draw(st.integers(0, 3))}
    config = EngineConfig(step_token_budget=draw(st.integers(1, 300)), scheduling=SchedulingOptions(**options))
    return caps, config


@st.composite
def residents_of(draw, caps):
    """Residents that admission could have seated."""
    slots = draw(st.permutations(range(caps.max_batch_size)))[: draw(st.integers(1, caps.max_batch_size))]
    single = not caps.compact
    residents, pending = [], False
    for index, slot in enumerate(slots):
        # A single-cohort session holds one pending prompt, the latest; it fits one step.
        may_prefill = not single or index == len(slots) - 1
        left = 0
        if may_prefill and draw(st.booleans()):
            left = draw(st.integers(1, caps.max_input_length if single else 500))
        pending |= left > 0
        residents.append(
            LengthLedger(
                identity=SequenceIdentity(slot + 1, ResidentRef(slot, 1)),
                arrival=draw(st.integers(1, 1000)) * 10 + slot,
                priority=draw(st.integers(-2, 2)),
                committed=draw(st.integers(0, 200)),
                prompt_remaining=left,
                cancelled=draw(st.booleans()) and draw(st.booleans()),
            )
        )
    if len(residents) == 1 and draw(st.booleans()):
        residents[0].exclusive = True
        residents[0].prompt_remaining = min(residents[0].prompt_remaining, caps.max_input_length)
    return residents


@st.composite
def situations(draw):
    caps, config = draw(deployments())
    return caps, config, draw(residents_of(caps))


def validate(plan, residents, caps) -> StepShape:
    seats = [None] * caps.max_batch_size
    for resident in residents:
        seats[resident.ref.slot] = resident
    limits = PlanLimits(caps.max_batch_size, caps.max_input_length, 1 << 20, caps.compact)
    return check_plan(plan, seats=seats, order=residents, limits=limits)


def make(caps, config):
    limits = resolve_step_limits(config, caps)
    return limits, StepPlanner(limits, config.scheduling)


@settings(max_examples=400, deadline=None)
@given(situations())
def test_behaviour_33_every_plan_passes_the_sessions_validation_and_keeps_its_budget(situation):
    caps, config, residents = situation
    limits, planner = make(caps, config)
    plan = planner.plan(residents)
    validate(plan, residents, caps)
    if residents[0].exclusive or not caps.compact:
        return
    by_ref = {resident.ref: resident for resident in residents}
    charged = [d for d in plan if not by_ref[d.identity.resident].cancelled]
    chunks = [d for d in charged if d.work is SequenceWork.CONTEXT]
    total = sum(d.query_length for d in charged)
    if not chunks:
        return
    if any(d.work is SequenceWork.DECODE for d in charged):
        assert total <= limits.max_num_tokens
        assert all(d.query_length <= limits.max_chunk_tokens for d in chunks)
    else:
        assert total <= limits.max_prompt_step_tokens


@settings(max_examples=400, deadline=None)
@given(situations())
def test_behaviour_27_the_first_prompt_always_progresses_and_chunks_end_on_page_boundaries(situation):
    caps, config, residents = situation
    limits, planner = make(caps, config)
    order = planner._order
    prompts = sorted((r for r in residents if r.prompt_remaining and not r.cancelled), key=order)
    plan = planner.plan(residents)
    chunk = {d.identity.resident: d.query_length for d in plan if d.work is SequenceWork.CONTEXT}
    if prompts:
        assert chunk.get(prompts[0].ref, 0) > 0
    tiny = caps.max_input_length < limits.page_size
    for resident in residents:
        length = chunk.get(resident.ref, 0)
        if length and length < resident.prompt_remaining and not resident.cancelled and not tiny:
            assert (resident.committed + length) % limits.page_size == 0


@settings(max_examples=150, deadline=None)
@given(situations())
def test_fairness_everybody_finishes_and_nobody_is_paused_past_the_limit(situation):
    """F1, F2, F5: drive the plans until every prompt is done; decode rows run in every step but paused ones."""
    caps, config, residents = situation
    _, planner = make(caps, config)
    pause_limit = config.scheduling.max_pause_steps
    residents = [r for r in residents if not r.cancelled]
    absent = dict.fromkeys((r.ref for r in residents), 0)
    steps = 0
    while any(r.prompt_remaining for r in residents):
        steps += 1
        assert steps < 2000
        plan = planner.plan(residents)
        validate(plan, residents, caps)
        named = {d.identity.resident: d for d in plan}
        for resident in residents:
            decoding = resident.prompt_remaining == 0
            if planner.limits.mixed and decoding and not resident.exclusive:
                absent[resident.ref] = 0 if resident.ref in named else absent[resident.ref] + 1
                if not planner._pauses:
                    assert absent[resident.ref] == 0
                elif pause_limit:
                    assert absent[resident.ref] <= pause_limit
        for resident in residents:
            entry = named.get(resident.ref)
            if entry is not None:
                resident.committed += entry.query_length
                if entry.work is SequenceWork.CONTEXT:
                    resident.prompt_remaining -= entry.query_length
