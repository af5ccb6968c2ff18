"""`Sampler` and `SamplingState`: exact choices, failures of single rows, independence of the batch."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from edgellm.errors import InvalidArgumentError
from edgellm.sampling.filters import draw, min_p_indices, top_k_ids, top_p_indices, weights_of
from edgellm.sampling.params import SamplingParams
from edgellm.sampling.penalties import TokenCounter, apply_output_penalties, apply_repetition
from edgellm.sampling.philox import uniform
from edgellm.sampling.sampler import NO_TOKEN, Sampler, SamplingState
from edgellm.sampling.structured import StructuredOutput

INF, NAN = math.inf, math.nan
GREEDY = SamplingParams(temperature=0.0)


def state(params: SamplingParams = GREEDY, *, prompt=(0,), vocab_size: int = 8, eos=(), output=()) -> SamplingState:
    made = SamplingState(params, list(prompt), vocab_size, eos)
    for token_id in output:
        made.record(token_id)
    return made


def sample(rows, states):
    return Sampler().sample(torch.tensor(rows, dtype=torch.float32), states)


def choose(row, params: SamplingParams, **keywords) -> int:
    result = sample([row], [state(params, vocab_size=len(row), **keywords)])
    assert result.errors == {}
    return result.token_ids[0]


class TestGreedy:
    def test_largest_logit_wins(self):
        assert sample([[0, 3, 1, 2], [5, -1, 0, 4]], [state(vocab_size=4)] * 2).token_ids == [1, 0]

    @pytest.mark.parametrize("vocab_size", [2, 7, 8, 33, 1000, 49_152])
    def test_lowest_id_among_equals(self, vocab_size):
        rng = np.random.default_rng(vocab_size)
        logits = rng.normal(size=(6, vocab_size)).astype(np.float32).round(1)
        expected = [int(np.flatnonzero(row == row.max())[0]) for row in logits]
        states = [state(vocab_size=vocab_size) for _ in range(6)]
        assert Sampler().sample(torch.from_numpy(logits), states).token_ids == expected

    def test_lowest_id_among_equals_with_other_settings_on(self):
        tied = [1.0, 2.0, 2.0, 2.0]
        assert choose(tied, SamplingParams(temperature=0, logprobs=1)) == 1
        assert choose(tied, SamplingParams(temperature=0, logit_bias={1: -1.0})) == 2
        assert choose(tied, SamplingParams(temperature=0, repetition_penalty=2.0), prompt=[1]) == 2
        assert choose(tied, SamplingParams(temperature=1, top_k=1)) == 1

    def test_filters_do_not_matter(self):
        assert choose([0, 3, 1, 2], SamplingParams(temperature=0, top_k=2, top_p=0.1, min_p=0.9)) == 1

    def test_all_zero_and_very_negative_rows(self):
        assert sample([[0.0] * 4, [-3e38] * 4], [state(vocab_size=4)] * 2).token_ids == [0, 0]

    def test_tiny_temperatures_approach_greedy_without_overflow(self):
        for temperature in (1e-3, 1e-30, 1e-300, 5e-324):
            assert choose([3e38, -3e38, 1.0, 3.1e38], SamplingParams(temperature=temperature, seed=1)) == 3


class TestPlainRows:
    def test_only_settings_that_change_the_choice_leave_the_fast_path(self):
        assert state(SamplingParams(temperature=0, seed=3, top_k=5, top_p=0.5, stop=["x"], max_tokens=9)).plain_greedy
        for changed in (
            {"temperature": 1.0}, {"logprobs": 0}, {"logit_bias": {1: 1.0}}, {"repetition_penalty": 1.1},
            {"presence_penalty": 0.1}, {"frequency_penalty": 0.1}, {"min_tokens": 1, "stop_token_ids": [2]},
        ):  # fmt: skip
            assert not state(SamplingParams(**{"temperature": 0.0, **changed})).plain_greedy, changed

    def test_rows_become_plain_when_min_tokens_is_reached(self):
        row = state(SamplingParams(temperature=0, min_tokens=2), eos=[1])
        assert [row.plain_greedy, row.record(3), row.plain_greedy, row.record(3), row.plain_greedy] == [
            False, None, False, None, True
        ]  # fmt: skip

    def test_min_tokens_without_any_end_token_stays_plain(self):
        assert state(SamplingParams(temperature=0, min_tokens=2)).plain_greedy

    def test_penalty_memory_exists_only_with_a_penalty(self):
        plain = state(SamplingParams(temperature=0.5, top_p=0.9))
        assert (plain.seen, plain.output) == (None, None)
        repeated = state(SamplingParams(repetition_penalty=1.2))
        assert repeated.seen is not None
        assert repeated.output is None
        frequent = state(SamplingParams(frequency_penalty=0.2))
        assert frequent.seen is None
        assert frequent.output is not None


class TestBadLogits:
    @pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=1), SamplingParams(temperature=0, logprobs=2)])
    @pytest.mark.parametrize(
        ("row", "found"),
        [([0.0, NAN, 1.0], "NaN"), ([0.0, INF, 1.0], "+inf"), ([-INF] * 3, "no finite value"), ([NAN, INF, 0], "NaN")],
    )
    def test_the_row_fails_and_its_neighbours_do_not(self, params, row, found):
        states = [state(params, vocab_size=3) for _ in range(3)]
        result = sample([[0, 9e3, 0], row, [9e3, 0, 0]], states)
        assert result.token_ids == [1, NO_TOKEN, 0]
        assert list(result.errors) == [1]
        assert found in result.errors[1]
        assert result.logprobs[1] is None

    def test_nan_anywhere_is_found(self):
        for place in (0, 1, 31, 32, 63, 64, 99):
            logits = torch.zeros(1, 100)
            logits[0, place] = NAN
            assert Sampler().sample(logits, [state(vocab_size=100)]).errors.keys() == {0}

    def test_minus_infinity_only_excludes_tokens(self):
        for seed in range(200):
            assert choose([-INF, 0.0, -INF, 0.1], SamplingParams(seed=seed)) in (1, 3)
        assert choose([-INF, 0.0, -INF, 0.1], GREEDY) == 3

    def test_infinite_total_does_not_arise_from_large_finite_logits(self):
        assert choose([3e38, -3e38, 0.0], SamplingParams(seed=4, logprobs=2)) == 0


EDGES = {
    "repetition_penalty": [1e-3, 100.0],
    "temperature": [5e-324, 1e-40, 100.0],
    "top_p": [5e-324, 0.9, 1.0],
    "min_p": [0.0, 5e-324, 0.9, 1.0],
    "logit_bias": [{0: -100.0, 1: 100.0}],
    "presence_penalty": [-2.0],
    "logprobs": [None, 3],
}


class TestExtremes:
    @pytest.mark.parametrize(
        "row", [[3.4e38, -3.4e38, 1.0, 0.0], [1e-45, -1e-45, 0.0, -INF], [-3.4e38, -3.3e38, -INF, -INF]]
    )
    def test_every_corner_of_the_ranges_chooses_a_token(self, row):
        """Whatever finite logits meet whatever parameters are allowed, arithmetic gives no NaN and no infinity."""
        for values in itertools.product(*EDGES.values()):
            params = SamplingParams(seed=1, **dict(zip(EDGES, values, strict=True)))
            result = sample([row], [state(params, vocab_size=4, prompt=[0, 1], output=[1, 2])])
            assert result.errors == {}, params
            assert row[result.token_ids[0]] > -INF, params


class TestIsolation:
    class BrokenGuide:
        """A grammar that fails in the midst of a row."""

        def __init__(self, error: BaseException) -> None:
            self.error = error

        def restrict(self, logits: np.ndarray) -> str:
            raise self.error

        allowed_words = restrict

    @pytest.mark.parametrize(
        "error", [IndexError("out of range"), MemoryError(), type("PanicError", (BaseException,), {})()]
    )
    def test_what_one_row_raises_ends_that_row_alone(self, error):
        form = StructuredOutput(regex="a")
        guided = SamplingState(
            SamplingParams(structured=form, logprobs=1),
            [0],
            4,
            guide=self.BrokenGuide(error),  # type: ignore[arg-type]
        )
        states = [state(vocab_size=4), guided, state(SamplingParams(seed=1, top_p=0.5), vocab_size=4)]
        result = sample([[0, 3, 1, 2], [0, 1, 2, 3], [9e3, 0, 0, 0]], states)
        assert result.token_ids == [1, NO_TOKEN, 0]
        assert list(result.errors) == [1]
        assert result.errors[1].startswith(f"sampling this sequence failed ({type(error).__name__}")
        assert result.logprobs == [None] * 3

    def test_parameters_that_overflow_all_the_same_end_their_row_alone(self):
        """Made past the check of ranges, as something to come might be."""
        overflowing = SamplingParams(min_p=0.9, seed=1)
        object.__setattr__(overflowing, "repetition_penalty", 1e-308)
        states = [state(vocab_size=4), state(overflowing, vocab_size=4), state(vocab_size=4)]
        with np.errstate(all="ignore"):
            result = sample([[0, 3, 1, 2], [5, 1, 2, 3], [9, 0, 0, 0]], states)
        assert result.token_ids == [1, NO_TOKEN, 0]
        assert list(result.errors) == [1]


class TestFilters:
    def test_top_k_keeps_exactly_k_and_lower_ids_among_equals(self):
        logits = np.array([1.0, 5.0, 5.0, 0.0, 5.0, 9.0])
        expected = {1: [5], 2: [1, 5], 3: [1, 2, 5], 4: [1, 2, 4, 5], 5: [0, 1, 2, 4, 5], 6: list(range(6))}
        for k, ids in expected.items():
            assert top_k_ids(logits, k).tolist() == ids
        assert top_k_ids(logits, 100).tolist() == list(range(6))

    def test_top_k_counts_excluded_tokens_last(self):
        assert top_k_ids(np.array([-INF, 2.0, -INF, 1.0]), 3).tolist() == [0, 1, 3]

    @pytest.mark.parametrize(
        ("weights", "top_p", "kept"),
        [
            ([4, 2, 1, 1], 0.5, [0]),
            ([4, 2, 1, 1], 0.5000001, [0, 1]),
            ([4, 2, 1, 1], 0.75, [0, 1]),
            ([4, 2, 1, 1], 0.875, [0, 1, 2]),
            ([4, 2, 1, 1], 0.9, [0, 1, 2, 3]),
            ([1, 1, 2, 4], 0.875, [0, 2, 3]),
            ([1, 1, 1, 1], 0.5, [0, 1]),
            ([1, 1, 1, 1], 1e-12, [0]),
            ([0, 0, 1, 0], 0.999999, [2]),
        ],
    )
    def test_top_p_keeps_the_smallest_set_that_reaches_the_share(self, weights, top_p, kept):
        assert top_p_indices(np.array(weights, np.float64), top_p).tolist() == kept

    def test_top_p_of_a_flat_tail_needs_more_than_the_first_floor(self):
        weights = np.concatenate(([1.0], np.full(5000, 1e-3), np.full(5000, 1e-6)))
        assert len(top_p_indices(weights, 0.1)) == 1
        assert len(top_p_indices(weights, 0.5)) == 2004
        total = float(np.cumsum(weights)[-1])
        reached = np.cumsum(weights)
        for share in (0.9, 0.9999, 0.999999):
            assert len(top_p_indices(weights, share)) == int(np.searchsorted(reached, share * total)) + 1

    def test_min_p_is_relative_to_the_largest(self):
        weights = np.array([8.0, 4.0, 2.0, 1.0])
        assert min_p_indices(weights, 0.25).tolist() == [0, 1, 2]
        assert min_p_indices(weights, 0.2500001).tolist() == [0, 1]
        assert min_p_indices(weights, 1.0).tolist() == [0]

    def test_weights_are_exp_of_scaled_differences(self):
        assert weights_of(np.array([0.0, 2.0, -INF]), 1.0).tolist() == [math.exp(-2), 1.0, 0.0]
        assert weights_of(np.array([0.0, 2.0]), 0.5).tolist() == [math.exp(-4), 1.0]

    @pytest.mark.parametrize(
        ("number", "index"),
        [(0.0, 1), (0.2499, 1), (0.25, 3), (0.4999, 3), (0.5, 4), (0.99999, 4), (1 - 2**-53, 4)],
    )
    def test_draw_inverts_the_cdf_and_never_lands_on_weight_zero(self, number, index):
        assert draw(np.array([0.0, 1.0, 0.0, 1.0, 2.0, 0.0, 0.0]), number) == index

    def test_draw_at_the_upper_end_of_awkward_totals(self):
        for total in (1.0, 0.1, 3.0, 1e-300, 1e300, 1.9999999999999998):
            assert draw(np.array([0.0, total, 0.0]), 1 - 2**-53) == 1

    def test_order_top_k_then_top_p_of_what_is_left(self):
        """Shares 0.4, 0.3, 0.2, 0.1: top_k=2 leaves 4/7 and 3/7, so top_p=0.55 then keeps one token, not two."""
        logits = np.log([0.1, 0.4, 0.2, 0.3]).tolist()
        both = {choose(logits, SamplingParams(seed=s, top_k=2, top_p=0.55)) for s in range(100)}
        alone = {choose(logits, SamplingParams(seed=s, top_p=0.55)) for s in range(100)}
        assert (both, alone) == ({1}, {1, 3})

    def test_temperature_is_applied_before_top_p(self):
        logits = np.log([0.1, 0.4, 0.2, 0.3]).tolist()
        cold = {choose(logits, SamplingParams(seed=s, temperature=0.1, top_p=0.9)) for s in range(100)}
        hot = {choose(logits, SamplingParams(seed=s, temperature=10.0, top_p=0.9)) for s in range(200)}
        assert (cold, hot) == ({1}, {0, 1, 2, 3})


class TestPenalties:
    def test_repetition_divides_positive_and_multiplies_negative_once_per_token(self):
        logits = np.array([3.0, -3.0, 0.0, 4.0, -0.5, 0.75])
        seen = TokenCounter(6)
        seen.add_prompt([0, 0, 1, 4, 5])
        seen.add(1)
        seen.add(2)
        apply_repetition(logits, seen, 1.5)
        assert logits.tolist() == [2.0, -4.5, 0.0, 4.0, -0.75, 0.5]

    def test_presence_once_and_frequency_per_occurrence(self):
        logits = np.array([3.0, -3.0, 0.0])
        output = TokenCounter(3)
        for token_id in (0, 0, 0, 1):
            output.add(token_id)
        apply_output_penalties(logits, output, presence=0.5, frequency=0.25)
        assert logits.tolist() == [1.75, -3.75, 0.0]

    def test_prompt_counts_for_repetition_only(self):
        row = [2.0, 1.5, 0.0]
        assert choose(row, SamplingParams(temperature=0, repetition_penalty=2.0), prompt=[0]) == 1
        assert choose(row, SamplingParams(temperature=0, presence_penalty=2.0), prompt=[0]) == 0
        assert choose(row, SamplingParams(temperature=0, presence_penalty=2.0), prompt=[], output=[0]) == 1
        assert choose(row, SamplingParams(temperature=0, frequency_penalty=0.3), output=[0]) == 0
        assert choose(row, SamplingParams(temperature=0, frequency_penalty=0.3), output=[0, 0]) == 1

    def test_repetition_comes_before_presence(self):
        """(3 / 2) - 1 = 0.5 loses to 0.7; (3 - 1) / 2 = 1 would win."""
        params = SamplingParams(temperature=0, repetition_penalty=2.0, presence_penalty=1.0)
        assert choose([3.0, 0.7], params, prompt=[], output=[0]) == 1

    def test_counter_grows_past_its_first_buffer_and_keeps_order(self):
        counter = TokenCounter(1000)
        for token_id in [*range(500, 300, -1), 500, 500]:
            counter.add(token_id)
        assert counter.ids.tolist() == list(range(500, 300, -1))
        assert counter.counts_of(np.array([500, 301, 0])).tolist() == [3, 1, 0]

    def test_prompt_with_repeats_is_counted_at_once(self):
        counter = TokenCounter(10)
        counter.add(5)
        counter.add_prompt(np.array([7, 5, 7, 2], np.int32))
        assert sorted(counter.ids.tolist()) == [2, 5, 7]
        assert counter.counts_of(np.array([2, 5, 7])).tolist() == [1, 2, 2]
        counter.add(2)
        assert sorted(counter.ids.tolist()) == [2, 5, 7]


class TestBiasAndMinTokens:
    def test_bias_moves_the_choice(self):
        assert choose([2.0, 1.0, 0.0], SamplingParams(temperature=0, logit_bias={2: 2.5})) == 2
        assert choose([2.0, 1.0, 0.0], SamplingParams(temperature=0, logit_bias={0: -100, 2: 0.5})) == 1

    def test_min_tokens_excludes_end_and_stop_ids_until_reached(self):
        params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[1])
        row = [9.0, 8.0, 1.0, 0.0]
        assert choose(row, params, eos=[0]) == 2
        assert choose(row, params, eos=[0], output=[3]) == 2
        assert choose(row, params, eos=[0], output=[3, 3]) == 0

    def test_ignored_end_tokens_may_be_chosen_early(self):
        params = SamplingParams(temperature=0, min_tokens=2, ignore_eos=True, stop_token_ids=[1])
        assert choose([9.0, 8.0, 1.0], params, eos=[0]) == 0
        assert choose([8.0, 9.0, 1.0], params, eos=[0]) == 0

    def test_nothing_left_fails_the_row(self):
        result = sample([[1.0, -INF]], [state(SamplingParams(min_tokens=1), eos=[0], vocab_size=2)])
        assert result.token_ids == [NO_TOKEN]
        assert "min_tokens=1" in result.errors[0]

    def test_end_tokens_beyond_the_vocabulary_are_ignored(self):
        assert choose([9.0, 1.0], SamplingParams(temperature=0, min_tokens=1), eos=[0, 77]) == 1


class TestLogprobs:
    ROW = (2.0, 1.0, 0.0, 1.0)

    def expected(self, row) -> list[float]:
        total = math.log(math.fsum(math.exp(value) for value in row))
        return [value - total for value in row]

    def logprobs(self, params: SamplingParams, **keywords):
        result = sample([list(self.ROW)], [state(params, vocab_size=4, **keywords)])
        return result.token_ids[0], result.logprobs[0]

    def test_chosen_only(self):
        token_id, record = self.logprobs(SamplingParams(temperature=0, logprobs=0))
        assert (token_id, record.token_id, record.top) == (0, 0, ())
        assert record.logprob == pytest.approx(self.expected(self.ROW)[0], abs=1e-12)

    def test_top_is_descending_with_lower_ids_first(self):
        _, record = self.logprobs(SamplingParams(temperature=0, logprobs=3))
        assert [token_id for token_id, _ in record.top] == [0, 1, 3]
        assert [value for _, value in record.top] == pytest.approx([self.expected(self.ROW)[i] for i in (0, 1, 3)])

    def test_more_than_the_vocabulary_gives_the_vocabulary(self):
        _, record = self.logprobs(SamplingParams(temperature=0, logprobs=50))
        assert [token_id for token_id, _ in record.top] == [0, 1, 3, 2]
        assert math.fsum(math.exp(value) for _, value in record.top) == pytest.approx(1.0, abs=1e-12)

    def test_bias_is_seen(self):
        _, record = self.logprobs(SamplingParams(temperature=0, logprobs=1, logit_bias={2: 5.0}))
        assert record.token_id == 2
        assert record.logprob == pytest.approx(self.expected((2.0, 1.0, 5.0, 1.0))[2], abs=1e-12)

    def test_penalties_temperature_filters_and_min_tokens_are_not_seen(self):
        params = SamplingParams(
            temperature=0.3, top_k=2, top_p=0.9, min_p=0.1, repetition_penalty=3.0, presence_penalty=1.0,
            frequency_penalty=1.0, min_tokens=5, logprobs=4, seed=1,
        )  # fmt: skip
        token_id, record = self.logprobs(params, prompt=[0], output=[0, 1], eos=[0])
        assert token_id in (1, 2, 3)
        assert dict(record.top) == pytest.approx(dict(enumerate(self.expected(self.ROW))))
        assert record.logprob == pytest.approx(self.expected(self.ROW)[token_id])

    def test_excluded_tokens_are_not_listed(self):
        result = sample([[1.0, -INF, 0.0]], [state(SamplingParams(temperature=0, logprobs=3), vocab_size=3)])
        assert [token_id for token_id, _ in result.logprobs[0].top] == [0, 2]

    def test_only_rows_that_asked_get_them(self):
        asked = state(SamplingParams(temperature=0, logprobs=1), vocab_size=4)
        result = sample([list(self.ROW)] * 2, [state(vocab_size=4), asked])
        assert result.logprobs[0] is None
        assert result.logprobs[1] is not None


SETTINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, top_k=20, seed=2, logprobs=2),
    SamplingParams(temperature=1.3, top_p=0.8, seed=3, repetition_penalty=1.2),
    SamplingParams(temperature=1.0, min_p=0.05, seed=4, frequency_penalty=0.5),
    SamplingParams(temperature=0.0, presence_penalty=1.0, logit_bias={5: 3.0}),
    SamplingParams(temperature=0.9, top_k=50, top_p=0.95, min_p=0.01, seed=2**64 - 1, min_tokens=4),
    SamplingParams(temperature=1.0, seed=7, logit_bias={9: -5.0}),
]


class TestIndependence:
    """The choice of a row depends on its own logits and state alone."""

    def rows(self):
        rng = np.random.default_rng(17)
        logits = torch.from_numpy((rng.normal(size=(8, 997)) * 2).astype(np.float32))
        states = [
            state(params, prompt=range(row + 1), vocab_size=997, eos=[3], output=range(row))
            for row, params in enumerate(SETTINGS)
        ]
        return logits, states

    def test_alone_in_a_batch_and_permuted(self):
        logits, states = self.rows()
        batch = Sampler().sample(logits, states)
        alone = [Sampler().sample(logits[row : row + 1], [states[row]]) for row in range(8)]
        assert [result.token_ids[0] for result in alone] == batch.token_ids
        assert [result.logprobs[0] for result in alone] == batch.logprobs
        for seed in range(5):
            order = np.random.default_rng(seed).permutation(8)
            permuted = Sampler().sample(logits[order], [states[row] for row in order])
            assert permuted.token_ids == [batch.token_ids[row] for row in order]
            assert permuted.logprobs == [batch.logprobs[row] for row in order]

    def test_memory_layout_does_not_matter(self):
        logits, states = self.rows()
        expected = Sampler().sample(logits, states).token_ids
        transposed = logits.t().contiguous().t()
        assert not transposed.is_contiguous()
        assert Sampler().sample(transposed, states).token_ids == expected
        wide = torch.zeros(8, 2000)
        wide[:, 3:1000] = logits
        assert Sampler().sample(wide[:, 3:1000], states).token_ids == expected

    def test_nothing_is_modified(self):
        logits, states = self.rows()
        before, positions = logits.clone(), [row.position for row in states]
        first = Sampler().sample(logits, states).token_ids
        assert torch.equal(logits, before)
        assert [row.position for row in states] == positions
        assert Sampler().sample(logits, states).token_ids == first

    def test_history_matters_only_through_position_and_counts(self):
        """Arriving at one position by recording or by a longer prompt gives the same token."""
        logits = torch.from_numpy(np.random.default_rng(3).normal(size=(1, 50)).astype(np.float32))
        params = SamplingParams(seed=5, repetition_penalty=1.3)
        recorded = state(params, prompt=[1, 2, 3], vocab_size=50, output=[4, 5])
        prompted = state(params, prompt=[1, 2, 3, 4, 5], vocab_size=50)
        assert recorded.position == prompted.position == 5
        assert Sampler().sample(logits, [recorded]).token_ids == Sampler().sample(logits, [prompted]).token_ids

    def test_half_precision_logits_are_accepted(self):
        logits = torch.tensor([[0.0, 2.0, 1.0]], dtype=torch.bfloat16)
        assert Sampler().sample(logits, [state(vocab_size=3)]).token_ids == [1]
        assert Sampler().sample(logits, [state(SamplingParams(seed=0), vocab_size=3)]).token_ids[0] in (0, 1, 2)


class TestRandomness:
    def test_the_number_is_that_of_seed_and_position(self):
        row = state(SamplingParams(seed=99), prompt=range(5), vocab_size=8)
        assert row.uniform() == uniform(99, 5)
        row.record(1)
        assert row.uniform() == uniform(99, 6)
        assert row.uniform(offset=3) == uniform(99, 9)

    def test_sequences_repeat_with_the_seed_and_differ_without(self):
        def run(seed):
            row = state(SamplingParams(seed=seed), vocab_size=64)
            tokens = []
            for _ in range(24):
                tokens.append(Sampler().sample(torch.zeros(1, 64), [row]).token_ids[0])
                row.record(tokens[-1])
            return tokens

        assert run(1) == run(1)
        assert run(1) != run(2)
        assert run(None) != run(None)
        assert len(set(run(1))) > 12

    def test_no_seed_draws_one_of_64_bits_per_state(self):
        seeds = [state(SamplingParams()).seed for _ in range(64)]
        assert len(set(seeds)) == 64
        assert 0 <= min(seeds) <= max(seeds) < 2**64
        assert max(seeds) > 2**56
        assert state(SamplingParams(seed=0)).seed == 0

    @pytest.mark.parametrize(
        ("params", "shares"),
        [
            ({}, [0.1, 0.2, 0.3, 0.4]),
            ({"temperature": 0.5}, [1 / 30, 4 / 30, 9 / 30, 16 / 30]),
            ({"top_k": 2}, [0, 0, 3 / 7, 4 / 7]),
            ({"top_p": 0.7001}, [0, 2 / 9, 3 / 9, 4 / 9]),
            ({"min_p": 0.6}, [0, 0, 3 / 7, 4 / 7]),
            ({"logit_bias": {0: math.log(4)}}, [4 / 13, 2 / 13, 3 / 13, 4 / 13]),
        ],
    )
    def test_shares_match_the_distribution(self, params, shares):
        """Chi-square over 4,000 draws (3 degrees of freedom at most: below 16.3 in 999 of 1,000)."""
        count = 4000
        logits = torch.tensor(np.log([[0.1, 0.2, 0.3, 0.4]]), dtype=torch.float32)
        row = state(SamplingParams(seed=2024, **params), vocab_size=4)
        observed = [0] * 4
        for _ in range(count):
            token_id = Sampler().sample(logits, [row]).token_ids[0]
            observed[token_id] += 1
            row.record(token_id)
        assert all(found == 0 for found, share in zip(observed, shares, strict=True) if share == 0)
        pairs = [(found, share * count) for found, share in zip(observed, shares, strict=True) if share]
        chi_square = sum((found - expected) ** 2 / expected for found, expected in pairs)
        assert chi_square < 16.3
        flat = count / len(pairs)
        assert sum((found - flat) ** 2 / flat for found, _ in pairs) > 16.3


class TestState:
    def test_position_starts_after_the_prompt_and_follows_records(self):
        row = state(GREEDY, prompt=[1, 2, 3])
        assert (row.position, row.num_output) == (3, 0)
        row.record(4)
        assert (row.position, row.num_output) == (4, 1)

    def test_clone_is_independent_and_continues_identically(self):
        logits = torch.from_numpy(np.random.default_rng(8).normal(size=(1, 32)).astype(np.float32))
        params = SamplingParams(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.5)
        original = state(params, prompt=[1, 2], vocab_size=32, output=[3])
        copy = original.clone()
        assert (copy.seed, copy.position) == (original.seed, original.position)
        assert Sampler().sample(logits, [copy]).token_ids == Sampler().sample(logits, [original]).token_ids
        copy.record(9)
        assert 9 not in original.seen.ids
        assert 9 not in original.output.ids
        assert (original.position, copy.position) == (3, 4)

    @pytest.mark.parametrize(
        ("params", "name"),
        [
            (SamplingParams(logit_bias={8: 1.0}), "logit_bias contains token id 8"),
            (SamplingParams(stop_token_ids=[2, 9]), "stop_token_ids contains token id 9"),
        ],
    )
    def test_ids_outside_the_vocabulary_are_refused_by_name(self, params, name):
        with pytest.raises(InvalidArgumentError, match=f"{name}, .* vocabulary of 8 tokens; use ids from 0 to 7"):
            state(params)
        state(params, vocab_size=10)

    def test_prompt_outside_the_vocabulary_is_refused_where_it_is_counted(self):
        for bad in (8, -1):
            with pytest.raises(InvalidArgumentError, match=f"prompt_token_ids contains token id {bad},"):
                state(SamplingParams(repetition_penalty=1.1), prompt=[1, bad])

    @pytest.mark.parametrize("token_id", [-1, 8])
    def test_recording_an_impossible_token_changes_nothing(self, token_id):
        row = state(SamplingParams(frequency_penalty=1.0))
        with pytest.raises(InvalidArgumentError, match=f"token id {token_id}"):
            row.record(token_id)
        assert (row.position, row.num_output, len(row.output.ids)) == (1, 0, 0)


class TestShapes:
    @pytest.mark.parametrize("shape", [(8,), (1, 2, 8), (3, 8)])
    def test_logits_must_have_a_row_per_state(self, shape):
        with pytest.raises(InvalidArgumentError, match=r"sampling 2 rows needs \(2, vocab_size\)"):
            Sampler().sample(torch.zeros(shape), [state(), state()])

    def test_logits_must_be_as_wide_as_the_vocabulary(self):
        with pytest.raises(InvalidArgumentError, match="vocabulary of 8 tokens, the logits have 9"):
            Sampler().sample(torch.zeros(1, 9), [state()])

    def test_no_rows_give_an_empty_result(self):
        result = Sampler().sample(torch.zeros(0, 8), [])
        assert (result.token_ids, result.logprobs, result.errors) == ([], [], {})
