"""`StepCostModel`: learns what a step costs, is cautious at first, and keeps its promise under noise."""

import random

import pytest

from edgellm.engine.step_cost import StepCostModel, StepWork
from edgellm.session.types import ResidentRef, ScheduledSequenceDescriptor, SequenceIdentity, SequenceWork

PAGE = 16
BUDGET = 0.05


def cost(work: StepWork) -> float:
    return 0.004 + 0.0005 * work.decode_rows + 0.0002 * work.prompt_tokens + 2e-8 * work.attention


def chunk(past: int, tokens: int, rows: int = 8) -> StepWork:
    return StepWork(rows, tokens, tokens * (past + tokens / 2))


def enter_a_prompt(model: StepCostModel, length: int, duration, *, rows: int = 8) -> list[tuple[int, float]]:
    """Chunks of a prompt beside decode rows: (tokens, seconds) each."""
    past, steps = 0, []
    while past < length:
        fits = model.prompt_tokens_within(BUDGET, decode_rows=rows, past=past, page_size=PAGE)
        tokens = min(length - past, max(PAGE, fits // PAGE * PAGE))
        work = chunk(past, tokens, rows)
        seconds = duration(work)
        model.observe(work, seconds)
        steps.append((tokens, seconds))
        past += tokens
    return steps


def test_it_begins_with_a_page_and_at_most_doubles():
    model = StepCostModel()
    assert model.prompt_tokens_within(10.0, decode_rows=8, past=0, page_size=PAGE) == PAGE
    tokens = [tokens for tokens, _ in enter_a_prompt(model, 4000, lambda work: 1e-6)]
    assert tokens[:5] == [16, 32, 64, 128, 256]


def test_it_keeps_the_budget_and_uses_most_of_it():
    model = StepCostModel()
    steps = enter_a_prompt(model, 6000, cost) + enter_a_prompt(model, 6000, cost)
    assert sum(seconds > BUDGET for _, seconds in steps) <= len(steps) // 50
    used = [seconds for _, seconds in steps[len(steps) // 2 : -1]]
    assert sum(used) / len(used) > 0.7 * BUDGET


@pytest.mark.parametrize("noise", [0.1, 0.5])
def test_under_noise_few_steps_take_longer_than_the_budget(noise):
    rng, model = random.Random(7), StepCostModel()
    steps = []
    for _ in range(8):
        steps += enter_a_prompt(model, 6000, lambda work: cost(work) * rng.uniform(1, 1 + noise))
    assert sum(seconds > BUDGET for _, seconds in steps) <= 0.03 * len(steps)
    assert sum(tokens for tokens, _ in steps) / len(steps) >= 2 * PAGE


def test_it_follows_a_device_that_becomes_slower():
    model = StepCostModel()
    enter_a_prompt(model, 6000, cost)
    enter_a_prompt(model, 6000, lambda work: 3 * cost(work))
    late = enter_a_prompt(model, 6000, lambda work: 3 * cost(work))
    assert sum(seconds > BUDGET for _, seconds in late) <= 0.05 * len(late)


def test_one_outlier_does_not_shape_the_fit():
    model = StepCostModel()
    enter_a_prompt(model, 6000, cost)
    before = model.prompt_tokens_within(BUDGET, decode_rows=8, past=1000, page_size=PAGE)
    model.observe(chunk(1000, 96), 100 * cost(chunk(1000, 96)))
    after = model.prompt_tokens_within(BUDGET, decode_rows=8, past=1000, page_size=PAGE)
    assert after >= 0.6 * before


def test_a_page_is_given_whatever_it_costs():
    model = StepCostModel()
    for _ in range(20):
        model.observe(StepWork(decode_rows=8), 1.0)
    for seconds in (0.0, -1.0, BUDGET):
        assert model.prompt_tokens_within(seconds, decode_rows=8, past=0, page_size=PAGE) == PAGE


def test_the_least_step_is_a_page_and_unknown_at_first():
    model, rng = StepCostModel(), random.Random(2)
    for _ in range(200):
        assert (model.least(PAGE) is None) == (model.observed < 16)
        work = chunk(rng.randrange(2000), rng.randrange(1, 256), rng.randrange(0, 9))
        model.observe(work, cost(work))
    assert model.least(PAGE) == pytest.approx(cost(StepWork(0, PAGE, PAGE * PAGE / 2)), rel=0.05)


def test_the_least_step_is_never_more_than_decode_rows_alone_took():
    model = StepCostModel()
    for _ in range(40):
        model.observe(StepWork(decode_rows=8), 0.010)
    assert 0.005 < model.least(PAGE) <= 0.010


def test_longer_pasts_and_more_rows_leave_less_room():
    model = StepCostModel()
    rng = random.Random(3)
    for _ in range(300):
        work = chunk(rng.randrange(8000), rng.randrange(1, 256), rng.randrange(1, 64))
        model.observe(work, cost(work))

    def room(rows, past):
        return model.prompt_tokens_within(BUDGET, decode_rows=rows, past=past, page_size=PAGE)

    assert room(8, 0) > room(8, 4000) > room(8, 8000)
    assert room(8, 100) > room(40, 100)
    work = chunk(3000, 100)
    assert model.predict(work) / model.margin == pytest.approx(cost(work), rel=0.05)
    assert cost(chunk(0, room(8, 0))) <= BUDGET


def test_coefficients_are_never_negative():
    model, rng = StepCostModel(), random.Random(5)
    for _ in range(200):
        model.observe(chunk(rng.randrange(1000), rng.randrange(0, 64), rng.randrange(9)), rng.random() * 0.01)
        assert min(model._weights) >= 0.0


def test_work_is_read_off_the_end_of_a_plan():
    def entry(work, query, past):
        return ScheduledSequenceDescriptor(SequenceIdentity(1, ResidentRef(0, 1)), work, query, past)

    plan = [
        entry(SequenceWork.DECODE, 1, 900),
        entry(SequenceWork.DECODE, 1, 800),
        entry(SequenceWork.CONTEXT, 10, 100),
        entry(SequenceWork.CONTEXT, 4, 0),
    ]
    assert StepWork.of_plan(plan) == StepWork(2, 14, 10 * 105 + 4 * 2)
    assert StepWork.of_plan(plan[:2]) == StepWork(2)
    assert StepWork.of_plan([]) == StepWork()
