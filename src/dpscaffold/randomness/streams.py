"""Who takes part, which records, which noise.

Every draw comes from its own stream, keyed by (run, purpose, round, user); the K steps of a round
are drawn from their stream in order. So two users never share noise, and an engine may process
users in any order, in any chunks and on any device and still draw the same.

All streams are numpy generators on the CPU: their keys have 128 bits and more (a ``torch`` CPU
generator keeps 32 bits of its seed, which makes collisions between users likely in a long run), and
one law holds for all devices.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import NoReturn, TypeVar

import numpy as np

from dpscaffold.privacy.mechanism import Sampling
from dpscaffold.randomness.csprng import CipherStream

#: Where draws come from: a seed, in a simulation, or a cipher under a key of the system's.
Stream = np.random.Generator | CipherStream
Drawn = TypeVar("Drawn")

#: The purposes of a stream. The numbers are part of the meaning of a seed: never renumber them.
PARTICIPANTS, BATCHES, NOISE, WEIGHTS = 0, 1, 2, 3

#: How many random numbers are held at a time when batches are drawn.
_BLOCK = 1 << 21

_threads = threading.local()


@dataclass(frozen=True)
class Batches:
    """The K batches of one participant: ``index`` (K, B) into its records and ``count`` (K,), how
    many of each row are real; the rest is padding (index 0), which carries weight 0."""

    index: np.ndarray
    count: np.ndarray

    def of(self, step: int) -> np.ndarray:
        """The record numbers of one step, without padding."""
        return self.index[step, : self.count[step]]


class Randomness:
    """The streams of one run.

    ``Randomness(seed)`` is reproducible: for simulations and tests. ``Randomness(seed,
    secret=True)`` draws participants from the seed, and batches and noise from ciphers: **every
    call** takes a new key from the operating system, so a round that is asked for twice never
    repeats its noise. Keys are in memory only, for as long as their stream; pickling is refused.
    Whoever knows the seed of a reproducible run can subtract its noise, so a model that is handed
    out wants a secret one.

    >>> a, b = Randomness(7), Randomness(7)
    >>> bool((a.normals(1, 3).standard_normal(4) == b.normals(1, 3).standard_normal(4)).all())
    True
    >>> bool((a.normals(1, 3).standard_normal(4) == a.normals(1, 4).standard_normal(4)).any())
    False
    """

    def __init__(self, seed: int, secret: bool = False) -> None:
        self.seed = seed
        self.secret = secret

    def _stream(self, *address: int) -> np.random.Generator:
        sequence = np.random.SeedSequence(self.seed, spawn_key=address)
        return np.random.Generator(np.random.SFC64(sequence))

    def _private(self, *address: int) -> Stream:
        """A stream that touches records or hides them: the cipher's where the run is secret."""
        return CipherStream() if self.secret else self._stream(*address)

    def cohort(self, round: int, users: int, count: int) -> np.ndarray:
        """``count`` of ``users`` users, uniformly without replacement, sorted, (count,) int64."""
        drawn = self._stream(PARTICIPANTS, round).choice(users, count, replace=False, shuffle=False)
        return np.sort(drawn)

    def batches(
        self,
        round: int,
        user: int,
        records: int,
        batch: int,
        steps: int,
        sampling: Sampling,
        out: np.ndarray | None = None,
        declared: int | None = None,
    ) -> Batches:
        """K fresh batches of one user: exactly ``batch`` of ``records``, or each with rate
        batch/records, where ``declared`` represents the records in the rate if it is given.

        ``out``, (K, batch) int64, receives the indices of batches of fixed size in place of a new
        array.
        """
        stream = self._private(BATCHES, round, user)
        if sampling == "poisson":
            return _draw_poisson(stream, records, batch / (declared or records), steps)
        return _draw_fixed(
            stream, records, np.empty((steps, batch), dtype=np.int64) if out is None else out
        )

    def normals(self, round: int, user: int) -> Stream:
        """The stream of one user's noise in one round: standard normals, step after step."""
        return self._private(NOISE, round, user)

    def weights(self) -> np.random.Generator:
        """The stream of a network's initial weights."""
        return self._stream(WEIGHTS)

    def __repr__(self) -> str:
        return f"Randomness(seed={self.seed}, secret={self.secret})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("Randomness is never pickled: its noise must not be written anywhere")


class OneRound(Randomness):
    """The streams of a secret run for the time of one round, which may have to be run again before
    anything of it has left: a user's draws are then the same.

    Keys are held in memory by this object alone, which goes when the round is done.

    >>> held = OneRound(Randomness(7, secret=True))
    >>> one, again = held.normals(1, 3), held.normals(1, 3)
    >>> bool((one.standard_normal(4) == again.standard_normal(4)).all())
    True
    """

    def __init__(self, of: Randomness) -> None:
        super().__init__(of.seed, secret=True)
        self._keys: dict[tuple[int, ...], bytes] = {}

    def _private(self, *address: int) -> Stream:
        return CipherStream(self._keys.setdefault(address, os.urandom(32)))


def _draw_fixed(stream: Stream, records: int, index: np.ndarray) -> Batches:
    """Uniform subsets of ``records`` records, one into each row of ``index`` (K, b).

    Two exact ways, chosen by cost alone: Floyd's algorithm (numpy's ``choice``) for small batches;
    for large ones the ``batch`` smallest of ``records`` random keys, whose low bits carry the
    record's number.
    """
    steps, batch = index.shape
    if batch == records:
        index[:] = np.arange(records)
    elif 6 * batch < records and isinstance(stream, np.random.Generator):
        for k in range(steps):
            index[k] = stream.choice(records, batch, replace=False, shuffle=False)
    else:
        block = max(1, _BLOCK // records)
        for start in range(0, steps, block):
            _draw_smallest(stream, records, index[start : start + block])
    return Batches(index, np.full(steps, batch))


def _draw_smallest(stream: Stream, records: int, index: np.ndarray) -> None:
    """The numbers of the b smallest of ``records`` random keys into each row of ``index`` (K, b).

    Positive doubles compare like their bit patterns, so the upper bits of a uniform double serve as
    a random key (no tie before about 2^40 draws) and the lower bits may hold the number. Most keys
    are left out by one comparison, with a bound that is too low for fewer than one batch in 10⁸
    (six standard deviations); then, as ever, the smallest are found exactly.
    """
    steps, batch = index.shape
    low = np.uint64((1 << max(1, (records - 1).bit_length())) - 1)
    bound = (batch + 6 * (batch * (1 - batch / records)) ** 0.5) / records
    keys = stream.random(out=_scratch(steps, records)).view(np.uint64)
    if bound < 1:
        _take_few(keys, batch, low, np.array(bound).view(np.uint64), index)
        return
    keys = _numbered(keys, np.arange(records, dtype=np.uint64), low)
    keys.partition(batch - 1, axis=1)
    np.bitwise_and(keys[:, :batch], low, out=index, casting="unsafe")


def _take_few(
    keys: np.ndarray, batch: int, low: np.uint64, bound: np.ndarray, index: np.ndarray
) -> None:
    """The smallest of keys (K, R) that are few below a bound.

    All steps at once but for the last: from Python, many small operations would take longer than
    what they do, and threads that draw side by side would wait for each other.
    """
    steps, records = keys.shape
    # The number's bits are not in the keys yet: a few too many pass, and are looked for below.
    above = ((bound | low) + np.uint64(1)).view(np.float64)
    places = np.flatnonzero(keys.ravel().view(np.float64) < above)
    ends = np.searchsorted(places, np.arange(steps + 1) * records)
    few = keys.ravel().take(places)
    places -= np.repeat(np.arange(steps) * records, np.diff(ends))
    few = _numbered(few, places.view(np.uint64), low)
    rows = np.split(few, ends[1:-1])
    if (few >= bound).any():
        rows = [row[row < bound] for row in rows]
    short = [k for k, row in enumerate(rows) if len(row) < batch]
    for k in short:  # the bound was too low
        rows[k] = _numbered(keys[k], np.arange(records, dtype=np.uint64), low)
    for row in rows:
        row.partition(batch - 1)
    if rows[0].base is few and not short:
        smallest = few.take(ends[:-1, None] + np.arange(batch))
    else:
        smallest = np.stack([row[:batch] for row in rows])
    np.bitwise_and(smallest, low, out=index, casting="unsafe")


def _numbered(keys: np.ndarray, numbers: np.ndarray, low: np.uint64) -> np.ndarray:
    """Keys, in place, with numbers in their low bits."""
    keys &= ~low
    keys |= numbers
    return keys


def _scratch(rows: int, columns: int) -> np.ndarray:
    """A (rows, columns) float64 array that this thread reuses: fresh pages would cost more than the
    draw."""
    size = rows * columns
    if getattr(_threads, "keys", None) is None or _threads.keys.size < size:
        _threads.keys = np.empty(size)
    keys: np.ndarray = _threads.keys[:size].reshape(rows, columns)
    return keys


def _draw_poisson(stream: Stream, records: int, rate: float, steps: int) -> Batches:
    """``steps`` Poisson samples of this rate, padded to the longest and never truncated."""
    if 6 * rate < 1 and isinstance(stream, np.random.Generator):
        count = stream.binomial(records, rate, steps)
        drawn = [stream.choice(records, n, replace=False, shuffle=False) for n in count]
    else:
        drawn = []
        block = max(1, _BLOCK // records)
        for start in range(0, steps, block):
            chosen = stream.random(out=_scratch(min(block, steps - start), records)) < rate
            drawn += [np.flatnonzero(row) for row in chosen]
        count = np.array([len(row) for row in drawn])
    index = np.zeros((steps, max(1, int(count.max()))), dtype=np.int64)
    for k, row in enumerate(drawn):
        index[k, : len(row)] = row
    return Batches(index, count)


class NoiseStreams:
    """The noise of several participants side by side, drawn a few steps at a time.

    Drawing in blocks of steps gives the same numbers as drawing all at once, so memory is bounded
    without changing a run. Noise from ciphers is in double precision, for the grid that it is
    rounded to after it was added.
    """

    def __init__(self, streams: Sequence[Stream], size: int) -> None:
        self._streams = streams
        self._size = size
        secret = any(isinstance(stream, CipherStream) for stream in streams)
        self._dtype: type[np.floating] = np.float64 if secret else np.float32

    @classmethod
    def of(cls, round: int, whose: Sequence[tuple[Randomness, int]], size: int) -> NoiseStreams:
        """The noise of these users in a round, each from the streams of its run."""
        return cls([randomness.normals(round, user) for randomness, user in whose], size)

    def draw(self, steps: int) -> np.ndarray:
        """Standard normals for the next ``steps`` steps, (steps, U, P) float32 or float64."""
        out = np.empty((len(self._streams), steps, self._size), dtype=self._dtype)

        def fill(u: int) -> None:
            stream = self._streams[u]
            if isinstance(stream, CipherStream):
                out[u] = stream.standard_normal((steps, self._size))
            else:
                stream.standard_normal(dtype=self._dtype, out=out[u])

        in_threads(fill, len(self._streams), worthwhile=out.size > 1 << 16)
        return out.transpose(1, 0, 2)


@cache
def _pool() -> ThreadPoolExecutor:
    """Threads for drawing: numpy's generators release the interpreter's lock, so cores add up."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return ThreadPoolExecutor(max_workers=min(16, cores), thread_name_prefix="draw")


def draw_alone() -> None:
    """From now on this thread draws by itself: others like it keep the other cores busy."""
    _threads.alone = True


def in_threads(task: Callable[[int], Drawn], count: int, worthwhile: bool = True) -> list[Drawn]:
    """[task(0), …, task(count−1)], in threads where that pays."""
    if not worthwhile or count < 2 or getattr(_threads, "alone", False):
        return [task(u) for u in range(count)]
    return list(_pool().map(task, range(count)))
