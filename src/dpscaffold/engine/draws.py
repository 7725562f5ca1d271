"""Batches and noise drawn on the device that uses them.

Streams are keyed by (run, purpose, round, user, step), as on the CPU, by a counter-based generator
(:mod:`dpscaffold.randomness.philox`): the key is a hash of the run's seed and the purpose, the
counter is (place, step, user, round). So a participant's draws are the same alone or in a stack, in
whatever chunks of users or steps, again after a resume, and as integers on every device. Nothing
waits for the device, and nothing is proportional to the number of users who do not take part.

A seed means another run here than with the streams of :mod:`dpscaffold.randomness.streams`. Secret
runs do not draw here: whoever holds the seed, or enough of the output, can repeat these streams.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from dpscaffold.engine.device import tried
from dpscaffold.randomness.philox import philox, standard_normals, whole_numbers
from dpscaffold.randomness.streams import BATCHES, NOISE

#: How many 64-bit numbers are held at a time; results do not depend on it.
_HELD = 1 << 24

#: How many numbers of noise are held at a time.
HELD_NOISE = 1 << 28

#: A Poisson batch is wider than its padded width with at most this chance, as a power of two. With
#: 2²⁸ batches in a run, a run meets one with chance 2⁻¹⁰⁰, and then draws again at full width.
_OVERFLOW_BITS = 128

_LARGEST = 2**63 - 1

#: Records of a participant that a program holds at a time, places of noise that it fills, and the
#: steps of one launch.
_MOST, _PLACES, _GRID = 1 << 14, 256, 1 << 16


@dataclass(frozen=True)
class DeviceBatches:
    """K batches of U participants: ``index`` (K, U, B) int64 into each one's records, and
    ``weight`` (K, U, B) float32, 0 for padding (index 0), or None where nothing is padded.
    ``overflowed`` () bool, on the device, says that a Poisson batch did not fit into B."""

    index: Tensor
    weight: Tensor | None
    overflowed: Tensor | None = None


@dataclass(frozen=True)
class DeviceDraws:
    """The draws of U participations. ``where`` (U, 6) int64 holds the number of each user, the
    round, and the words of the keys of its run's batches and noise (:func:`stream_keys`); ``sizes``
    (U, 4) are those of :func:`sizes_of`.

    >>> sizes, keys = torch.from_numpy(sizes_of(np.array([9]), np.array([3]))), stream_keys(7)
    >>> def draws(user):
    ...     return DeviceDraws(torch.tensor([[user, 1, *keys]]), sizes)
    >>> pair = DeviceDraws(torch.tensor([[3, 1, *keys], [4, 1, *keys]]), sizes.expand(2, 4))
    >>> bool((pair.normals(0, 2, 5)[:, 1] == draws(4).normals(0, 2, 5)[:, 0]).all())
    True
    """

    where: Tensor
    sizes: Tensor

    def normals(self, first: int, steps: int, size: int) -> Tensor:
        """Standard normals of this many steps from step ``first`` on, (steps, U, size) float32."""
        count, blocks, where = len(self.where), -(-size // 4), self.where
        out = torch.empty(steps, count, size, device=where.device)

        def program() -> Tensor:
            from dpscaffold.engine.programs import normals

            grid = (count, steps, -(-blocks // _PLACES))
            normals[grid](out, where, first, count, size, _PLACES, num_warps=4)
            return out

        if self._fits(steps, 0) and tried("normals", where.device, program) is not None:
            return out
        for start, stop in _pieces(steps, count * blocks):
            step, place = self._counters(first + start, first + stop, blocks)
            user, round, _, _, *key = where.split(1, dim=1)
            words = philox((place, step, user, round), (key[0], key[1]))
            out[start:stop] = standard_normals(words)[..., :size]
        return out

    def fixed(self, steps: int, most: int, width: int, even: bool) -> DeviceBatches:
        """Batches of exactly b_u of R_u records, uniform, none twice: ``most`` is no less than any
        number of records, ``width`` than any batch, and ``even`` says that all have that width.

        Each record gets a random key whose low bits are its number, and the smallest keys are
        taken. No two keys are equal, so the size is exact; the law is uniform but for the chance,
        below R²·2^(log₂R − 63) a batch (4·10⁻⁹ at 4,000 records), that two random parts are equal.
        """
        count, wide, low, _ = self.sizes.split(1, dim=1)
        users, device = len(self.where), self.where.device
        wanted = torch.arange(width, device=device) < wide
        weight = None if even else wanted.float().expand(steps, -1, -1)
        index = torch.zeros(steps, users, width, dtype=torch.int64, device=device)

        def program() -> Tensor:
            from dpscaffold.engine.programs import fixed

            fixed[(users, steps)](index, self.where, self.sizes, users, width, **_blocks(most))
            return index

        if self._fits(steps, most) and tried("fixed batches", device, program) is not None:
            return DeviceBatches(index, weight)
        number = torch.arange(most, device=device)
        for start, stop in _pieces(steps, users * most):
            keys = self._whole(start, stop, most)
            keys = torch.where(number < count, (keys & ~low) | number, _LARGEST)
            taken = keys.topk(width, dim=-1, largest=False, sorted=not even).values
            # Of a participant with smaller batches, its smallest keys.
            index[start:stop] = (taken & low) if even else (taken & low).where(wanted, 0)
        return DeviceBatches(index, weight)

    def poisson(self, steps: int, most: int, width: int) -> DeviceBatches:
        """Batches that hold each of R_u records with chance b_u/R_u, padded to ``width``.

        A record is in if 63 random bits are below ⌊rate·2⁶³⌋.
        """
        sizes, _, _, below = self.sizes.split(1, dim=1)
        device, users = self.where.device, len(self.where)
        places, number = torch.arange(width, device=device), torch.arange(most, device=device)
        index = torch.zeros(steps, users, width, dtype=torch.int64, device=device)
        counts = torch.zeros(steps, users, 1, dtype=torch.int64, device=device)

        def program() -> Tensor:
            from dpscaffold.engine.programs import poisson

            given = (index, counts, self.where, self.sizes, users, width)
            poisson[(users, steps)](*given, **_blocks(most))
            return index

        if not self._fits(steps, most) or tried("Poisson batches", device, program) is None:
            for start, stop in _pieces(steps, users * most):
                keys = self._whole(start, stop, most)
                chosen = (keys < below) & (number < sizes)
                total = chosen.cumsum(dim=-1)
                # Records that were not drawn, or do not fit, all go to one place beyond the last.
                target = torch.where(chosen, total - 1, width).clamp_max_(width)
                room = index.new_zeros(stop - start, users, width + 1)
                room.scatter_(2, target, number.expand_as(target))
                counts[start:stop] = total[..., -1:]
                index[start:stop] = torch.where(places < total[..., -1:], room[..., :width], 0)
        weight = (places < counts).float()
        return DeviceBatches(index, weight, (counts > width).any())

    def _fits(self, steps: int, most: int) -> bool:
        """Whether one launch of a program has room for all of it."""
        return steps < _GRID and most <= _MOST

    def _whole(self, first: int, last: int, most: int) -> Tensor:
        """Numbers in [0, 2⁶³) of these steps for every record of every participant."""
        step, place = self._counters(first, last, -(-most // 2))
        user, round, *key = self.where[:, :4].split(1, dim=1)
        return whole_numbers(philox((place, step, user, round), (key[0], key[1])))[..., :most]

    def _counters(self, first: int, last: int, blocks: int) -> tuple[Tensor, Tensor]:
        """Steps (K, 1, 1) and places (blocks,) of the streams."""
        device = self.where.device
        step = torch.arange(first, last, device=device)[:, None, None]
        return step, torch.arange(blocks, device=device)


@dataclass(frozen=True)
class DrawnSteps:
    """Everything that is drawn for K steps of U rows: the ``batches`` of V distinct rows, which of
    them each row has (``places`` (U,), None: each its own), where its records begin (``starts``
    (U,)), and how many normals a step takes (None: none)."""

    draws: DeviceDraws
    batches: DeviceBatches
    places: Tensor | None
    starts: Tensor
    noise: int | None

    @property
    def all_normals(self) -> Tensor | None:
        """The normals of all steps at once, (K, V, P)."""
        steps = len(self.batches.index)
        return None if self.noise is None else self.draws.normals(0, steps, self.noise)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None]]:
        """Record numbers, weights and normals of every distinct row, step by step."""
        batches, normals = self.batches, None
        steps, rows, _ = batches.index.shape
        block = max(1, HELD_NOISE // (rows * (self.noise or 1)))
        for k in range(steps):
            if self.noise is not None and k % block == 0:
                normals = self.draws.normals(k, min(block, steps - k), self.noise)
            weight = None if batches.weight is None else batches.weight[k]
            yield batches.index[k], weight, None if normals is None else normals[k % block]


def stream_keys(seed: int) -> tuple[int, int, int, int]:
    """Two words each of the keys of a run's batches and noise: hashes of both.

    >>> len(set(stream_keys(7)))
    4
    """
    words = []
    for purpose in (BATCHES, NOISE):
        text = f"{seed}/{purpose}".encode()
        digest = hashlib.blake2b(text, digest_size=8, person=b"dpscaffold").digest()
        words += [int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")]
    return words[0], words[1], words[2], words[3]


def sizes_of(records: np.ndarray, batches: np.ndarray) -> np.ndarray:
    """R_u, b_u, the bits that number R_u records, and ⌊(b_u/R_u)·2⁶³⌋, (U, 4) int64."""
    pairs, places = np.unique(np.stack([records, batches]), axis=1, return_inverse=True)
    rows = [
        (r, b, (1 << (r - 1).bit_length()) - 1, min(_LARGEST, (b << 63) // r))
        for r, b in pairs.T.tolist()
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 4)[places.reshape(-1)]


@cache
def poisson_width(records: int, batch: int) -> int:
    """A width that a Poisson batch of rate batch/records exceeds with chance below 2⁻¹²⁸.

    By Chernoff's bound P(n ≥ w) ≤ exp(−R·KL(w/R ‖ q)); all of the records where that is not less.

    >>> poisson_width(4000, 800), poisson_width(10, 2)
    (1153, 10)
    """
    rate, least = batch / records, _OVERFLOW_BITS * math.log(2)
    low, high = batch, records  # the smallest w for which P(n > w) is small enough
    while low < high:
        middle = (low + high) // 2
        if records * _divergence((middle + 1) / records, rate) >= least:
            high = middle
        else:
            low = middle + 1
    return low


def _divergence(share: float, rate: float) -> float:
    """KL(share ‖ rate) of two coins, for share ≥ rate; infinite where the share is impossible."""
    if share > 1 or rate >= 1:
        return math.inf if share > 1 else 0.0
    rest = 0.0 if share == 1 else (1 - share) * math.log((1 - share) / (1 - rate))
    return share * math.log(share / rate) + rest


def rounded_up(count: int) -> int:
    """The next number with three leading bits: at most a quarter more, and few different ones.

    >>> [rounded_up(count) for count in (3, 9, 16, 17, 4000)]
    [3, 10, 16, 20, 4096]
    """
    step = 1 << max(0, count.bit_length() - 3)
    return -(-count // step) * step


def _blocks(most: int) -> dict[str, int]:
    """The shape of a program for this many records: places of two each, a power of two, and sixteen
    records or so a thread."""
    places = max(16, 1 << (max(1, most - 1)).bit_length() - 1)
    return {"PLACES": places, "num_warps": min(16, max(1, places // 256))}


def _pieces(steps: int, numbers: int) -> Iterator[tuple[int, int]]:
    """Ranges of steps whose numbers may be held at a time."""
    block = max(1, _HELD // max(1, numbers))
    return ((start, min(steps, start + block)) for start in range(0, steps, block))
