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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import torch
from torch import Tensor

from dpscaffold.engines.machine import sent
from dpscaffold.errors import BadInput
from dpscaffold.randomness.philox import Words, philox, standard_normals, whole_numbers
from dpscaffold.randomness.streams import BATCHES, NOISE

#: How many 64-bit numbers are held at a time; results do not depend on it.
_HELD = 1 << 24

#: A Poisson batch is wider than its padded width with at most this chance, as a power of two. With
#: 2²⁸ batches in a run, a run meets one with chance 2⁻¹⁰⁰, and then draws again at full width.
_OVERFLOW_BITS = 128

_LARGEST = 2**63 - 1


@dataclass(frozen=True)
class DeviceBatches:
    """K batches of U participants: ``index`` (K, U, B) int64 into each one's records, ascending,
    and ``weight`` (K, U, B) float32, 0 for padding (index 0), or None where nothing is padded.

    ``overflowed`` () bool, on the device, says that a Poisson batch did not fit into B; ``again``
    draws the same batches at full width. Nothing may leave before :meth:`complete` has been asked,
    once a round: it is the one place that waits for the device.
    """

    index: Tensor
    weight: Tensor | None
    overflowed: Tensor | None = None
    again: Callable[[], DeviceBatches] | None = None

    def complete(self) -> DeviceBatches:
        """These batches, or, in the rare case that one was cut short, the same ones uncut."""
        if self.overflowed is not None and self.again is not None and bool(self.overflowed):
            return self.again()
        return self


class DeviceDraws:
    """The draws of U participations: ``users[u]`` takes part in round ``rounds[u]`` of the run with
    ``seeds[u]``. Several runs may be stacked.

    >>> pair = DeviceDraws([7, 7], [1, 1], [3, 4], torch.device("cpu"))
    >>> one = DeviceDraws([7], [1], [4], torch.device("cpu"))
    >>> bool((pair.normals(0, 2, 5)[:, 1] == one.normals(0, 2, 5)[:, 0]).all())
    True
    """

    def __init__(
        self,
        seeds: Sequence[int],
        rounds: Sequence[int],
        users: Sequence[int],
        device: torch.device,
    ) -> None:
        if not len(seeds) == len(rounds) == len(users):
            raise BadInput(
                "count-differs",
                f"there are {len(seeds)} seeds, {len(rounds)} rounds and {len(users)} users; give "
                f"one of each per participation",
            )
        _within_words("round", rounds)
        _within_words("user", users)
        self._take(sent(addresses(seeds, rounds, users), device))

    @classmethod
    def at(cls, where: Tensor) -> DeviceDraws:
        """The draws at addresses (U, 6) that are on the device already: see :func:`addresses`."""
        made = cls.__new__(cls)
        made._take(where)
        return made

    def _take(self, where: Tensor) -> None:
        self.device, self._count = where.device, len(where)
        user, round, *keys = where.split(1, dim=1)
        self._user, self._round = user, round
        self._keys = {BATCHES: (keys[0], keys[1]), NOISE: (keys[2], keys[3])}

    def normals(self, first: int, steps: int, size: int) -> Tensor:
        """Standard normals of this many steps from step ``first`` on, (steps, U, size) float32."""
        _within_words("step", [first, first + steps - 1])
        out = torch.empty(steps, self._count, size, device=self.device)
        blocks = -(-size // 4)
        for start, stop in _pieces(steps, self._count * blocks):
            words = self._words(NOISE, first + start, stop - start, blocks)
            out[start:stop] = standard_normals(words)[..., :size]
        return out

    def fixed(
        self, first: int, steps: int, records: Sequence[int], batch_sizes: Sequence[int]
    ) -> DeviceBatches:
        """Batches of exactly ``batch_sizes[u]`` of ``records[u]`` records, uniform, none twice.

        Each record gets a random key whose low bits are its number, and the smallest keys are
        taken. No two keys are equal, so the size is exact; the law is uniform but for the chance,
        below R²·2^(log₂R − 63) a batch (4·10⁻⁹ at 4,000 records), that two random parts are equal.
        """
        _fitting(records, batch_sizes, self._count)
        counts = sent(sizes_of(records, batch_sizes), self.device)
        even = min(batch_sizes) == max(batch_sizes)
        return self.fixed_of(first, steps, counts, max(records), max(batch_sizes), even)

    def fixed_of(
        self, first: int, steps: int, counts: Tensor, most: int, width: int, even: bool
    ) -> DeviceBatches:
        """The same of sizes (U, 4) that are on the device (:func:`sizes_of`): ``most`` is no less
        than any number of records, ``width`` than any batch, and ``even`` says that all batches
        have that width. Wider ones draw the same."""
        sizes, wide, low, _ = counts.split(1, dim=1)
        _within_words("step", [first, first + steps - 1])
        number = torch.arange(most, device=self.device)
        wanted = torch.arange(width, device=self.device) < wide
        padded = None if even else wanted.float().expand(steps, -1, -1)
        index = torch.empty(steps, self._count, width, dtype=torch.int64, device=self.device)
        for start, stop in _pieces(steps, self._count * most):
            keys = self._whole(first + start, stop - start, most)
            keys = torch.where(number < sizes, (keys & ~low) | number, _LARGEST)
            taken = keys.topk(width, dim=-1, largest=False, sorted=False).values
            if even:
                index[start:stop] = (taken & low).sort(dim=-1).values
                continue
            # Of a participant with smaller batches, its smallest keys.
            taken = torch.where(wanted, taken.sort(dim=-1).values & low, _LARGEST)
            index[start:stop] = torch.where(wanted, taken.sort(dim=-1).values, 0)
        return DeviceBatches(index, padded)

    def poisson(
        self,
        first: int,
        steps: int,
        records: Sequence[int],
        batch_sizes: Sequence[int],
        width: int | None = None,
    ) -> DeviceBatches:
        """Batches that hold each of R = ``records[u]`` records with chance ``batch_sizes[u]``/R.

        A record is in if 63 random bits are below ⌊rate·2⁶³⌋. Batches are padded to ``width``, by
        default :func:`poisson_width`, and never truncated: see :class:`DeviceBatches`.
        """
        _fitting(records, batch_sizes, self._count)
        pairs = zip(records, batch_sizes, strict=True)
        widest = max(poisson_width(*pair) for pair in pairs) if width is None else width
        counts = sent(sizes_of(records, batch_sizes), self.device)
        return self.poisson_of(first, steps, counts, max(records), widest)

    def poisson_of(
        self, first: int, steps: int, counts: Tensor, most: int, width: int
    ) -> DeviceBatches:
        """The same of sizes (U, 4) that are on the device: see :meth:`fixed_of`."""
        sizes, _, _, below = counts.split(1, dim=1)
        _within_words("step", [first, first + steps - 1])
        places = torch.arange(width, device=self.device)

        def again() -> DeviceBatches:
            return self.poisson_of(first, steps, counts, most, most)

        number = torch.arange(most, device=self.device)
        shape = (steps, self._count, width)
        index = torch.zeros(shape, dtype=torch.int64, device=self.device)
        weight = torch.zeros(shape, device=self.device)
        overflowed = torch.zeros((), dtype=torch.bool, device=self.device)
        for start, stop in _pieces(steps, self._count * most):
            keys = self._whole(first + start, stop - start, most)
            chosen = (keys < below) & (number < sizes)
            count = chosen.cumsum(dim=-1)
            # Records that were not drawn, or do not fit, all go to one place beyond the last.
            place = torch.where(chosen, count - 1, width).clamp_max_(width)
            room = index.new_zeros(stop - start, self._count, width + 1)
            room.scatter_(2, place, number.expand_as(place))
            real = places < count[..., -1:]
            index[start:stop] = torch.where(real, room[..., :width], 0)
            weight[start:stop] = real
            overflowed |= (count[..., -1] > width).any()
        return DeviceBatches(index, weight, overflowed, again)

    def _whole(self, first: int, steps: int, count: int) -> Tensor:
        """``count`` numbers in [0, 2⁶³) for every step and participant, (steps, U, count)."""
        return whole_numbers(self._words(BATCHES, first, steps, -(-count // 2)))[..., :count]

    def _words(self, purpose: int, first: int, steps: int, blocks: int) -> Words:
        """Random words at places 0, …, blocks − 1 of every stream, (steps, U, blocks) each."""
        _within_words("step", [first, first + steps - 1])
        _within_words("place", [blocks])
        place = torch.arange(blocks, device=self.device)
        step = torch.arange(first, first + steps, device=self.device)[:, None, None]
        return philox((place, step, self._user, self._round), self._keys[purpose])


def stream_key(seed: int, purpose: int) -> tuple[int, int]:
    """The key of a run's streams for one purpose: two words, a hash of both.

    >>> stream_key(7, 1) == stream_key(7, 2)
    False
    """
    digest = hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=8, person=b"dpscaffold")
    value = int.from_bytes(digest.digest(), "little")
    return value & 0xFFFFFFFF, value >> 32


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


def _pieces(steps: int, numbers: int) -> list[tuple[int, int]]:
    """Ranges of steps whose numbers may be held at a time."""
    block = max(1, _HELD // max(1, numbers))
    return [(start, min(steps, start + block)) for start in range(0, steps, block)]


def addresses(seeds: Sequence[int], rounds: Sequence[int], users: Sequence[int]) -> Tensor:
    """User, round and the four words of both purposes' keys, one row a participation, (U, 6)."""
    made = np.empty((len(users), 6), dtype=np.int64)
    made[:, 0], made[:, 1] = users, rounds
    made[:, 2:] = np.array([_both_keys(seed) for seed in seeds], dtype=np.int64).reshape(-1, 4)
    return torch.from_numpy(made)


def sizes_of(records: Sequence[int], batch_sizes: Sequence[int]) -> Tensor:
    """R_u, b_u, the bits that number R_u records, and ⌊(b_u/R_u)·2⁶³⌋, (U, 4)."""
    rows = [_sizes(r, b) for r, b in zip(records, batch_sizes, strict=True)]
    return torch.from_numpy(np.array(rows, dtype=np.int64).reshape(-1, 4))


@lru_cache(maxsize=1 << 16)
def _sizes(records: int, batch: int) -> tuple[int, int, int, int]:
    below = min(_LARGEST, (batch << 63) // records)
    return records, batch, (1 << (records - 1).bit_length()) - 1, below


@cache
def _both_keys(seed: int) -> tuple[int, ...]:
    """The keys of a run's batches and of its noise."""
    return *stream_key(seed, BATCHES), *stream_key(seed, NOISE)


def _fitting(records: Sequence[int], batch_sizes: Sequence[int], count: int) -> None:
    """Refuse sizes that are not one a participant, or batches larger than the data."""
    if not len(records) == len(batch_sizes) == count:
        raise BadInput(
            "count-differs",
            f"there are {len(records)} numbers of records and {len(batch_sizes)} batch sizes for "
            f"{count} participants; give one of each",
        )
    for total, batch in zip(records, batch_sizes, strict=True):
        if not 1 <= batch <= total:
            raise BadInput(
                "out-of-range",
                f"a batch of {batch} of {total} records; it must hold 1 to {total}",
            )


def _within_words(name: str, values: Sequence[int]) -> None:
    """Refuse what does not fit into a word of the counter: two addresses would share a stream."""
    for value in values:
        if not 0 <= value < 2**32:
            raise BadInput(
                "out-of-range", f"{name} is {value}; streams are numbered from 0 to 2^32 − 1"
            )
