"""Philox-4x32-10: random words that are a function of a key and a counter.

A stream needs no state: word n of a stream is computed from its address, in any order, on any
device and for millions of addresses at once, with the same integers everywhere. The generator is
that of Salmon, Moraes, Dror and Shaw, *Parallel random numbers: as easy as 1, 2, 3* (2011); it
passes all of TestU01. It is **not** a cipher: noise that must hold against an adversary comes from
:mod:`dpscaffold.randomness.csprng`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import cache
from typing import cast

import torch
from torch import Tensor

#: Four words of 32 bits, each in an int64 tensor.
Words = tuple[Tensor, Tensor, Tensor, Tensor]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


#: The same in one kernel, for GPUs: compiled by the driver's own compiler when first used.
_KERNEL = """
template <typename T>
void philox10(T a, T b, T c, T d, T first, T second, T& w, T& x, T& y, T& z) {
  unsigned int p = (unsigned int)a, q = (unsigned int)b, r = (unsigned int)c, s = (unsigned int)d;
  unsigned int j = (unsigned int)first, k = (unsigned int)second;
  for (int round = 0; round < 10; ++round) {
    unsigned long long left = (unsigned long long)p * 0xD2511F53ULL;
    unsigned long long right = (unsigned long long)r * 0xCD9E8D57ULL;
    p = (unsigned int)(right >> 32) ^ q ^ j;
    r = (unsigned int)(left >> 32) ^ s ^ k;
    q = (unsigned int)right;
    s = (unsigned int)left;
    j += 0x9E3779B9u;
    k += 0xBB67AE85u;
  }
  w = (T)p; x = (T)q; y = (T)r; z = (T)s;
}
"""

#: The first word at counter zero under key zero, as its authors published it.
_KNOWN = 0x6627E8D5

_log = logging.getLogger(__name__)


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four random words of 32 bits for every counter, under a key of two words; all broadcast.

    On a GPU one kernel does all ten rounds, where it can be compiled; the words are the same.

    >>> zero = torch.zeros((), dtype=torch.int64)
    >>> [hex(int(word)) for word in philox((zero, zero, zero, zero), (zero, zero))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    fused = _fused() if key[0].is_cuda else None
    return plain_philox(counter, key) if fused is None else fused(*counter, *key)


@cache
def _fused() -> Callable[..., Words] | None:
    """All ten rounds as one kernel of a GPU, checked against a published answer; None where it does
    not compile."""
    try:
        made = torch.cuda.jiterator._create_multi_output_jit_fn(_KERNEL, num_outputs=4)
        zero = torch.zeros(1, dtype=torch.int64, device="cuda")
        if int(made(zero, zero, zero, zero, zero, zero)[0]) == _KNOWN:
            return cast("Callable[..., Words]", made)
        _log.warning(
            "the fused generator gives wrong words; the plain one is used, which is slower"
        )
    except Exception as error:  # PyTorch may drop this interface: the plain way stays
        _log.warning(
            "the fused generator does not compile (%s); the plain one is slower",
            str(error).splitlines()[:1],
        )
    return None


def plain_philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """:func:`philox` in operations that every device has."""
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
