"""Random numbers that nobody can foresee: a cipher's stream under a key from the operating system.

A statistical generator passes every test of chance and can still be taken apart: whoever learns a
stretch of its output learns the rest. A stream here is AES-256 in counter mode under a key that is
drawn for it alone and that no other object holds, so that one user's noise tells nothing of
another's, and a round number that is repeated repeats no noise.

Normals are made in double precision. Their last bits are not a secret to rely on: what leaves a
user is rounded to a public grid (:func:`on_grid`), far coarser than the steps between two normals
and far finer than the noise, so no released number could have come from one dataset only.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

if TYPE_CHECKING:
    from torch import Tensor

#: The grid's step is at most 2⁻ᴳ of the noise's standard deviation. Rounding to it is a function of
#: the noised sum, and adds a variance of 2⁻²ᴳ/12 of the noise's.
GRID_BITS = 20

_ONE = np.uint64(0x3FF << 52)  # the bit pattern of 1.0
_ROOM = bytes(1 << 20)


class CipherStream:
    """The stream of one key, which is drawn here and kept nowhere else, unless it is given: whoever
    gives one answers for it.

    It offers the few methods of :class:`numpy.random.Generator` that draws need.

    >>> one, other = CipherStream(), CipherStream()
    >>> bool((one.standard_normal(8) == other.standard_normal(8)).any())
    False
    """

    def __init__(self, key: bytes | None = None) -> None:
        key = os.urandom(32) if key is None else key
        self._encrypt = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()

    def bits(self, count: int) -> np.ndarray:
        """The next ``count`` words of 64 bits, (count,) uint64."""
        out = np.empty(count, dtype=np.uint64)
        view = out.data.cast("B")
        for start in range(0, len(view), len(_ROOM)):
            end = min(len(view), start + len(_ROOM))
            self._encrypt.update_into(_ROOM[: end - start], view[start:end])
        return out

    def random(self, out: np.ndarray) -> np.ndarray:
        """Uniform numbers in [0, 1) with 52 bits, into ``out`` (float64)."""
        words = self.bits(out.size)
        words >>= np.uint64(12)
        words |= _ONE  # a double in [1, 2), whose 52 bits are the stream's
        np.subtract(words.view(np.float64).reshape(out.shape), 1.0, out=out)
        return out

    def standard_normal(self, size: int | tuple[int, ...]) -> np.ndarray:
        """Standard normals in double precision, by Box and Muller's transform.

        The radius √(−2 log u) comes from a u of 128 bits, so that the tail is as fine as the
        middle: the largest value that can be drawn lies beyond 13 standard deviations.
        """
        count = math.prod(size) if isinstance(size, tuple) else size
        pairs = (count + 1) // 2
        high, low, turn = self.bits(3 * pairs).reshape(3, pairs).astype(np.float64)
        high *= 2.0**-64
        low += 0.5  # never log 0
        low *= 2.0**-128
        high += low
        import torch

        radius = torch.from_numpy(high).log_().mul_(-2.0).sqrt_()
        angle = torch.from_numpy(turn).mul_(2 * math.pi * 2.0**-64)
        normals = torch.stack([angle.cos(), angle.sin()]).mul_(radius)
        return normals.view(-1)[:count].numpy().reshape(size)

    def __repr__(self) -> str:
        return "CipherStream()"

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a CipherStream is never pickled: its key must not be written anywhere")


def on_grid(values: Tensor, spread: Tensor) -> Tensor:
    """Float64 ``values`` (U, P) rounded to multiples of a power of two below 2⁻²⁰ of ``spread``
    (U, 1), the standard deviation of their noise; where there is no noise they stay as they are.

    The grid depends on C, σ_g and b alone. So a rounded value is a function of the noised one, and
    every multiple near the mean can be reached from every dataset.

    >>> import torch
    >>> on_grid(torch.tensor([[0.3, -1.7]], dtype=torch.float64), torch.tensor([[2.0**19]]))
    tensor([[ 0.5000, -1.5000]], dtype=torch.float64)
    """
    step = grid_step(spread)
    return ((values / step).round() * step).where(spread > 0, values)


def grid_step(spread: Tensor) -> Tensor:
    """The distance of the grid's values for a noise of this standard deviation, in float64."""
    safe = spread.double().where(spread > 0, 1.0)
    return (safe.log2().floor() - GRID_BITS).exp2()
