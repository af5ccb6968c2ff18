"""Philox4x32-10, the counter-based random function behind every draw.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (2011); the bit pattern is that of
the Random123 library, whose known-answer vectors are in the tests.  A draw is a pure function of
`(seed, position, purpose)`: no generator state exists, so a result cannot depend on the batch, the slot, the
chunking, or on what was drawn before.
"""

from __future__ import annotations

from enum import IntEnum

_MASK32 = 0xFFFFFFFF
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_ROUNDS = 10


class DrawPurpose(IntEnum):
    """Why a number is drawn: separates several draws at one position.  Values never change meaning."""

    TOKEN = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four uint32 words from a 128-bit counter and a 64-bit key, ten rounds.  Pure."""
    word_0, word_1, word_2, word_3 = counter
    key_0, key_1 = key
    for _ in range(_ROUNDS):
        product_0 = word_0 * _MULTIPLIER_0
        product_1 = word_2 * _MULTIPLIER_1
        word_0 = (product_1 >> 32) ^ word_1 ^ key_0
        word_2 = (product_0 >> 32) ^ word_3 ^ key_1
        word_1 = product_1 & _MASK32
        word_3 = product_0 & _MASK32
        key_0 = (key_0 + _WEYL_0) & _MASK32
        key_1 = (key_1 + _WEYL_1) & _MASK32
    return word_0, word_1, word_2, word_3


def uniform(seed: int, position: int, purpose: DrawPurpose = DrawPurpose.TOKEN) -> float:
    """One number of [0, 1) with 53 random bits.

    Args:
        seed: 64-bit, the key: low word first.
        position: absolute index of the token that is being chosen; counter words 0 (low) and 1 (high).
        purpose: counter word 2; word 3 is zero.
    """
    counter = (position & _MASK32, (position >> 32) & _MASK32, int(purpose), 0)
    high, low, _, _ = philox4x32(counter, (seed & _MASK32, (seed >> 32) & _MASK32))
    return ((high >> 5) * 67108864 + (low >> 6)) * (1.0 / 9007199254740992.0)
