"""Philox4x32-10 against Random123's known answers, and the uniform numbers made from it."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm.sampling.philox import DrawPurpose, philox4x32, uniform

# Random123, tests/kat_vectors, "philox4x32 10": counter, key, answer.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers_of_random123(counter, key, answer):
    assert philox4x32(words(counter), words(key)) == words(answer)


def test_agrees_with_numpys_philox_rounds_on_random_input():
    """One round written with NumPy's uint64 arithmetic, ten times: an independent spelling of the algorithm."""
    rng = np.random.default_rng(5)
    for _ in range(50):
        counter = tuple(int(word) for word in rng.integers(0, 2**32, 4))
        key = tuple(int(word) for word in rng.integers(0, 2**32, 2))
        state, round_key = np.array(counter, np.uint64), np.array(key, np.uint64)
        for _ in range(10):
            products = state[[0, 2]] * np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
            high, low = products >> np.uint64(32), products & np.uint64(0xFFFFFFFF)
            state = np.array(
                [high[1] ^ state[1] ^ round_key[0], low[1], high[0] ^ state[3] ^ round_key[1], low[0]], np.uint64
            )
            weyl = np.array([0x9E3779B9, 0xBB67AE85], np.uint64)
            round_key = (round_key + weyl) & np.uint64(0xFFFFFFFF)
        assert philox4x32(counter, key) == tuple(int(word) for word in state)


def test_uniform_uses_27_and_26_bits_of_the_first_two_words():
    expected = ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53
    assert uniform(0, 0) == expected
    assert expected == 0.39904647231489565


def test_uniform_puts_seed_in_the_key_and_position_and_purpose_in_the_counter():
    seed, position = 0x299F31D0_A4093822, 0x85A308D3_243F6A88
    high, low, _, _ = philox4x32((0x243F6A88, 0x85A308D3, 2, 0), (0xA4093822, 0x299F31D0))
    assert uniform(seed, position, DrawPurpose.ACCEPT) == ((high >> 5) * 2**26 + (low >> 6)) / 2**53


def test_each_input_changes_the_number():
    base = uniform(7, 100)
    others = [uniform(8, 100), uniform(7, 101), uniform(7 + 2**32, 100), uniform(7, 100 + 2**32)]
    others += [uniform(7, 100, purpose) for purpose in DrawPurpose if purpose is not DrawPurpose.TOKEN]
    assert len({base, *others}) == len(others) + 1


def test_purposes_keep_their_values():
    assert {purpose.name: purpose.value for purpose in DrawPurpose} == {
        "TOKEN": 0, "DRAFT": 1, "ACCEPT": 2, "RESIDUAL": 3
    }  # fmt: skip


@pytest.mark.parametrize("axis", ["position", "seed"])
def test_uniform_is_flat_and_uncorrelated_along_positions_and_seeds(axis):
    count, bins = 20_000, 50
    numbers = np.array([uniform(11, i) if axis == "position" else uniform(i, 11) for i in range(count)])
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    observed = np.bincount((numbers * bins).astype(int), minlength=bins)
    chi_square = float(((observed - count / bins) ** 2 / (count / bins)).sum())
    # 49 degrees of freedom: the middle 99.8 % lies in 24.7 to 85.4.
    assert 24.0 < chi_square < 86.0
    correlation = float(np.corrcoef(numbers[:-1], numbers[1:])[0, 1])
    assert abs(correlation) < 4.0 / count**0.5
