"""Philox-4x32-10: random words that are a function of a key and a counter.

A stream needs no state: word n of a stream is computed from its address, in any order, on any
device and for millions of addresses at once, with the same integers everywhere. The generator is
that of Salmon, Moraes, Dror and Shaw, *Parallel random numbers: as easy as 1, 2, 3* (2011); it
passes all of TestU01. It is **not** a cipher: noise that must hold against an adversary comes from
:mod:`dpscaffold.randomness.csprng`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Four words of 32 bits, each in an int64 tensor.
Words = tuple[Tensor, Tensor, Tensor, Tensor]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four random words of 32 bits for every counter, under a key of two words; all broadcast.

    >>> zero = torch.zeros((), dtype=torch.int64)
    >>> [hex(int(word)) for word in philox((zero, zero, zero, zero), (zero, zero))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    a, b, c, d = counter
    first, second = key
    for round in range(10):
        # The product of two 32-bit words wraps to the right 64 bits, whatever their sign is.
        left, right = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a = ((right >> 32) ^ b ^ first) & _MASK
        c = ((left >> 32) ^ d ^ second) & _MASK
        b, d = right & _MASK, left & _MASK
        if round < 9:
            first, second = (first + _KEY_STEPS[0]) & _MASK, (second + _KEY_STEPS[1]) & _MASK
    return a, b, c, d


def whole_numbers(words: Words) -> Tensor:
    """Two uniform numbers in [0, 2⁶³) from four words: (…, n) each → (…, 2n)."""
    a, b, c, d = words
    upper = 0x7FFFFFFF
    pair = torch.stack([((a & upper) << 32) | b, ((c & upper) << 32) | d], dim=-1)
    return pair.flatten(-2)


def standard_normals(words: Words) -> Tensor:
    """Four standard normals from four words, by Box and Muller in float64: (…, n) each → (…, 4n).

    Of each 64 bits, 40 make the radius √(−2 ln u) and 24 the angle, so that tails reach 7.5
    standard deviations (with chance 5·10⁻¹⁴ beyond) and no radius is infinite. Given as float32.
    """
    a, b, c, d = words
    parts = []
    for high, low in ((a, b), (c, d)):
        uniform = (((high << 8) | (low >> 24)).double() + 0.5) * 2.0**-40
        angle = ((low & 0xFFFFFF).double() + 0.5) * (2 * math.pi * 2.0**-24)
        radius = uniform.log_().mul_(-2).sqrt_()
        parts += [(radius * angle.cos()).float(), (radius * angle.sin()).float()]
    return torch.stack(parts, dim=-1).flatten(-2)
