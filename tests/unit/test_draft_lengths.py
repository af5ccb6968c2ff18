"""How many tokens are proposed: what steps cost, what was kept, and when nothing is worth it."""

from __future__ import annotations

import ast
import inspect
import random
from pathlib import Path

import pytest
from test_core_stubs import built_names, built_parameters, declared_names, same_parameters, stub_parameters

from edgellm.decoding import _length_records, _throughput_guard
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
    asked = []
    for _ in range(16 + 32 + 64 + 128 + 256 + 512 + 512):
        asked.append(lengths.limits([0], [4])[0])
        lengths.observe(0, asked[-1], 0)
    tried = [place + 1 for place, number in enumerate(asked) if number]
    assert tried == [16, 48, 115, 243, 499, 1011]  # ever more rarely, and one round of a hundred at most
    assert set(asked) == {0, 1}


def test_a_trial_goes_on_with_twice_as_many_while_all_are_kept() -> None:
    lengths = taught(1.0, 0.5)
    keep(lengths, 0, 0.0)
    asked = []
    for _ in range(20):
        asked.append(lengths.limits([0], [5])[0])
        lengths.observe(0, asked[-1], min(asked[-1], 3))
    assert asked[14:18] == [0, 1, 2, 4]
    assert asked[18] <= 1


def test_a_trial_takes_along_all_that_are_idle() -> None:
    lengths = taught(1.0, 0.5)
    for slot in range(3):
        keep(lengths, slot, 0.0)
    slots, tried = [0], []
    for number in range(60):
        slots = [0] if number < 5 else [0, 1] if number < 12 else [0, 1, 2]
        chosen = lengths.limits(slots, [4] * len(slots))
        for slot, proposed in zip(slots, chosen, strict=True):
            lengths.observe(slot, proposed, 0)
        if any(chosen):
            tried.append((number + 1, chosen))
    assert tried == [(16, [1, 1, 1]), (48, [1, 1, 1])]


def test_a_new_request_does_not_start_the_trials_anew() -> None:
    lengths = taught(1.0, 0.5)
    keep(lengths, 0, 0.0)
    tried = []
    for number in range(250):
        if number % 10 == 0:
            lengths.unseat(0)
            lengths.seat(0)
        chosen = lengths.limits([0], [4])[0]
        lengths.observe(0, chosen, 0)
        if chosen:
            tried.append(number + 1)
    assert tried == [16, 48, 115, 243]


def test_a_sequence_that_gets_better_is_found_out() -> None:
    lengths = taught(1.0, 0.1)
    keep(lengths, 0, 0.0)
    for _ in range(400):
        number = lengths.limits([0], [4])[0]
        lengths.observe(0, number, number)
    assert lengths.limits([0], [4]) == [4]


def test_a_stall_while_proposing_hardly_changes_what_is_proposed() -> None:
    lengths = taught(1.0, 0.05)
    keep(lengths, 0, 1.0)
    for depth in [4, 3, 4, 2, 4, 4, 1, 4, 4, 4]:
        lengths.observe_proposing(depth, 0.02 * depth)
    before = lengths.limits([0], [4])
    lengths.observe_proposing(4, 500.0)
    assert lengths.per_depth < 0.06
    assert lengths.limits([0], [4]) == before == [4]


@pytest.mark.parametrize("depths", [(3, 3, 3, 3), (1, 2, 3, 4), (0, 3, 0, 3)])
def test_the_first_slow_calls_are_forgotten(depths: tuple[int, ...]) -> None:
    lengths = DraftLengths()
    lengths.times.observe(4, 60.0)
    lengths.observe_proposing(3, 60.0)
    for depth in depths:
        lengths.times.observe(1 + depth, 1.0 + 0.1 * depth)
        lengths.observe_proposing(depth, 0.2 * depth)
    assert lengths.times.predict(1) == pytest.approx(1.0, abs=0.31)
    assert lengths.per_depth == pytest.approx(0.2)


def test_what_a_draft_does_anyway_is_no_cost_of_proposing() -> None:
    lengths = taught(1.0, 0.05)
    keep(lengths, 0, 1.0)
    for depth in (4, 0, 1, 4, 1, 0, 1, 1):
        lengths.observe_proposing(depth, 2.0 + 0.2 * depth)  # it writes state of its own, whatever is proposed
    assert lengths.per_depth == pytest.approx(0.2)
    assert lengths.limits([0], [4]) == [4]


def test_a_draft_seen_at_one_depth_only_may_cost_something_at_none() -> None:
    lengths = taught(1.0, 0.05)
    for _ in range(20):
        lengths.observe_proposing(4, 2.8)
    assert lengths.per_depth == pytest.approx(0.7)
    for _ in range(20):
        lengths.observe_proposing(0, 2.0)
    assert lengths.per_depth == pytest.approx(0.2)


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


@pytest.mark.parametrize(("share", "kept_of_tried"), [(0.0, 0.0), (0.5, 5 / 6), (1.0, 1.0)])
def test_a_new_sequence_is_expected_to_fare_as_all_did(share: float, kept_of_tried: float) -> None:
    lengths = taught(1.0, 0.1)
    assert lengths.acceptance(0) == pytest.approx(0.7)
    other = lengths.acceptance(3)
    keep(lengths, 0, share, rounds=300)
    assert lengths.acceptance(3) == other
    for slot in (0, 3, 9):
        lengths.unseat(slot)
        lengths.seat(slot)
        assert lengths.acceptance(slot) == pytest.approx(kept_of_tried, abs=0.01)


def test_a_useless_draft_costs_its_first_rounds_once_not_once_a_request() -> None:
    lengths, rounds, proposed = taught(1.0, 0.3), 0, 0
    for _ in range(40):
        lengths.seat(0)
        for _ in range(12):  # answers shorter than the wait before the next try
            (number,) = lengths.limits([0], [4])
            lengths.observe(0, number, 0)
            rounds, proposed = rounds + 1, proposed + number
    assert 3 <= proposed - 4 <= rounds // 64 + 8, (proposed, rounds)


def plain_lengths(acceptances: list[float], most: list[int], times: StepTimes, per_depth: float) -> list[int]:
    """The choice for a step as the module's docstring puts it, one proposal after the other."""
    idle = times.predict(len(most))
    best, best_rate = [0] * len(most), len(most) / idle
    for depth in range(1, max(most) + 1):
        chosen, seconds, expected = [0] * len(most), idle + depth * per_depth, float(len(most))
        while True:
            open_ones = [row for row, number in enumerate(chosen) if number < min(most[row], depth)]
            gains = [acceptances[row] ** (chosen[row] + 1) for row in open_ones]
            if not gains or max(gains) * seconds < expected * times.per_row:
                break
            expected, seconds = expected + max(gains), seconds + times.per_row
            chosen[open_ones[gains.index(max(gains))]] += 1
        if expected / seconds <= best_rate:
            break
        best, best_rate = chosen, expected / seconds
    return best


def test_many_sequences_get_what_the_search_one_by_one_gives_them() -> None:
    chance = random.Random(5)
    for per_row, per_depth in ((0.001, 0.01), (0.02, 0.05), (0.1, 0.2)):
        lengths = taught(1.0, per_row)
        for slot in range(20):
            keep(lengths, slot, chance.random(), rounds=20)
        lengths.observe_proposing(1, per_depth)
        most = [chance.randrange(8) for _ in range(20)]
        acceptances = [lengths.acceptance(slot) for slot in range(20)]
        wanted = plain_lengths(acceptances, most, lengths.times, per_depth)
        assert lengths.limits(range(20), most) == wanted
        assert 0 < sum(wanted) < sum(most) or per_row > 0.05


def test_a_slot_below_zero_is_refused() -> None:
    with pytest.raises(IndexError, match="slot -1 is negative"):
        DraftLengths().seat(-1)


def test_the_stub_declares_the_records() -> None:
    stub_path = Path(_length_records.__file__).with_name("_length_records.pyi")
    stub = declared_names(ast.parse(stub_path.read_text(encoding="utf-8")).body)
    assert set(stub) == built_names(_length_records) == {"LengthRecords"}
    methods = {node.name: node for node in ast.walk(stub["LengthRecords"]) if isinstance(node, ast.FunctionDef)}
    assert set(methods) == {name for name in vars(_length_records.LengthRecords) if not name.startswith("_")}
    for name, declared in methods.items():
        built = inspect.signature(getattr(_length_records.LengthRecords, name))
        assert same_parameters(stub_parameters(declared), built_parameters(built)), name


def test_the_stub_declares_the_guard() -> None:
    stub_path = Path(_throughput_guard.__file__).with_name("_throughput_guard.pyi")
    stub = declared_names(ast.parse(stub_path.read_text(encoding="utf-8")).body)
    assert set(stub) == built_names(_throughput_guard) == {"ThroughputGuard"}
    assert all(name.startswith("_") for name in vars(_throughput_guard.ThroughputGuard))
