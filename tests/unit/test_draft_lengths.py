"""How many tokens are proposed: what steps cost, what was kept, and when nothing is worth it."""

from __future__ import annotations

import pytest

from edgellm.decoding.adaptive import DraftLengths, StepTimes


def taught(fixed: float, per_row: float) -> DraftLengths:
    """Lengths that saw steps of 1 to 8 rows."""
    lengths = DraftLengths()
    for _ in range(4):
        for rows in (1, 2, 4, 8):
            lengths.times.observe(rows, fixed + per_row * rows)
    return lengths


def keep(lengths: DraftLengths, slot: int, share: float, rounds: int = 60) -> None:
    """Rounds of ten proposals of which the first `share` are kept."""
    for _ in range(rounds):
        lengths.observe(slot, 10, round(10 * share))


def test_times_are_a_line_over_rows() -> None:
    lengths = taught(5.0, 0.25)
    assert lengths.times.per_row == pytest.approx(0.25)
    assert lengths.times.predict(16) == pytest.approx(9.0)


def test_a_stall_hardly_moves_the_line() -> None:
    lengths = taught(5.0, 0.25)
    lengths.times.observe(2, 500.0)
    assert lengths.times.predict(2) < 7.0


def test_a_row_that_seems_to_cost_nothing_or_less_costs_nothing() -> None:
    times = StepTimes()
    for rows, seconds in ((1, 3.0), (8, 2.0)):
        times.observe(rows, seconds)
    assert times.per_row == 0.0


def test_one_size_of_step_says_nothing_of_a_rows_cost() -> None:
    times = StepTimes()
    for _ in range(5):
        times.observe(4, 2.0)
    assert times.per_row == 0.0
    assert times.predict(9) == pytest.approx(2.0)


def test_before_anything_was_measured_everything_is_tried() -> None:
    lengths = DraftLengths()
    lengths.seat(0)
    assert lengths.limits([0], [5]) == [5]


def test_free_rows_are_all_used() -> None:
    lengths = taught(5.0, 0.0)
    lengths.seat(3)
    assert lengths.limits([3], [7]) == [7]


@pytest.mark.parametrize(("share", "least", "most"), [(1.0, 8, 8), (0.5, 2, 7), (0.0, 0, 0)])
def test_what_is_kept_decides_how_far_to_go(share: float, least: int, most: int) -> None:
    lengths = taught(1.0, 0.1)
    keep(lengths, 0, share)
    assert least <= lengths.limits([0], [8])[0] <= most


def best_by_trying(acceptances: list[float], most: int, fixed: float, per_row: float) -> float:
    """Tokens a second of the best lengths, all of them tried."""
    if not acceptances:
        return 0.0
    options = [[]]
    for _ in acceptances:
        options = [[*chosen, number] for chosen in options for number in range(most + 1)]
    return max(rate(acceptances, chosen, fixed, per_row) for chosen in options)


def rate(acceptances: list[float], chosen: list[int], fixed: float, per_row: float) -> float:
    tokens = sum(sum(a**j for j in range(k + 1)) for a, k in zip(acceptances, chosen, strict=True))
    return tokens / (fixed + per_row * (len(chosen) + sum(chosen)))


@pytest.mark.parametrize("per_row", [0.01, 0.1, 0.4])
def test_no_choice_of_lengths_gives_more_tokens_a_second(per_row: float) -> None:
    lengths = taught(1.0, per_row)
    for slot, share in enumerate((0.9, 0.6, 0.2)):
        keep(lengths, slot, share)
    acceptances = [lengths.acceptance(slot) for slot in range(3)]
    chosen = lengths.limits([0, 1, 2], [5, 5, 5])
    best = best_by_trying(acceptances, 5, 1.0, per_row)
    assert rate(acceptances, chosen, 1.0, per_row) == pytest.approx(best, rel=1e-6)


def test_a_sequence_for_which_nothing_pays_is_tried_again_now_and_then() -> None:
    lengths = taught(1.0, 0.5)
    keep(lengths, 0, 0.0)
    asked = [lengths.limits([0], [4])[0] for _ in range(16 + 32 + 64 + 128 + 128)]
    assert [place + 1 for place, number in enumerate(asked) if number] == [16, 48, 112, 240, 368]  # ever more rarely
    assert set(asked) == {0, 1}
    lengths.observe(0, 1, 1)
    asked = [lengths.limits([0], [1])[0] for _ in range(17)]
    assert asked.count(1) >= 1  # what was kept once is tried again soon


def test_a_sequence_that_gets_better_is_found_out() -> None:
    lengths = taught(1.0, 0.1)
    keep(lengths, 0, 0.0)
    for _ in range(400):
        number = lengths.limits([0], [4])[0]
        lengths.observe(0, number, number)
    assert lengths.limits([0], [4]) == [4]


@pytest.mark.parametrize("per_depth", [0.01, 0.2, 0.5])
def test_a_draft_that_takes_time_shortens_the_chains_to_the_best_length(per_depth: float) -> None:
    lengths = taught(1.0, 0.05)
    keep(lengths, 0, 0.7)
    lengths.observe_proposing(4, 4 * per_depth)
    a = lengths.acceptance(0)

    def speed(length: int) -> float:
        return sum(a**j for j in range(length + 1)) / (1.0 + 0.05 * (1 + length) + per_depth * length)

    assert lengths.limits([0], [8]) == [max(range(9), key=speed)]


def test_a_draft_that_costs_more_than_it_brings_is_left_alone() -> None:
    lengths = taught(1.0, 0.05)
    lengths.seat(0)
    lengths.observe_proposing(1, 2.0)
    assert lengths.limits([0], [8]) == [0]


def test_nothing_is_proposed_where_nothing_may_be() -> None:
    lengths = taught(1.0, 0.0)
    assert [lengths.limits([0], [0]) for _ in range(40)] == [[0]] * 40


def test_a_new_sequence_in_the_slot_starts_afresh() -> None:
    lengths = taught(1.0, 0.1)
    keep(lengths, 0, 0.0)
    lengths.unseat([0][0])
    lengths.seat(0)
    assert lengths.acceptance(0) == pytest.approx(0.7)
