"""Streams that several runs of a stack share: what one of them drew in a round is not drawn again.

Runs of one seed draw the same participants, batches and noise whatever their step size, so a sweep over step
sizes needs each of them once. Nothing changes in what a run sees.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpscaffold.randomness import Batches, Randomness, Sampling
from dpscaffold.setting import Setting


class SharedDraws(Randomness):
    """The streams of a seed, each read once a round and handed out as often as it is asked for.

    >>> shared, alone = SharedDraws(3), Randomness(3)
    >>> first = shared.noise(1, 0).standard_normal(out=np.empty(4, np.float32), dtype=np.float32)
    >>> again = shared.noise(1, 0).standard_normal(out=np.empty(4, np.float32), dtype=np.float32)
    >>> own = alone.noise(1, 0).standard_normal(4, dtype=np.float32)
    >>> bool((first == own).all() and (again == own).all())
    True
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._round = 0
        self._guard = threading.Lock()
        self._locks: dict[tuple[int, ...], threading.Lock] = {}
        self._batches: dict[tuple[Any, ...], Batches] = {}
        self._tapes: dict[int, Tape] = {}

    def _turn_to(self, round: int) -> None:
        """Forget the last round."""
        with self._guard:
            if round != self._round:
                self._round = round
                self._batches, self._tapes, self._locks = {}, {}, {}

    def batches(
        self,
        round: int,
        user: int,
        records: int,
        batch: int,
        steps: int,
        sampling: Sampling,
        out: np.ndarray | None = None,
    ) -> Batches:
        """As in a run of its own, drawn at the first asking."""
        self._turn_to(round)
        key = (user, records, batch, steps, sampling)
        with self._guard:
            lock = self._locks.setdefault((user, records, batch, steps), threading.Lock())
        with lock:
            if key not in self._batches:
                self._batches[key] = super().batches(round, user, records, batch, steps, sampling)
        drawn = self._batches[key]
        if out is None:
            return drawn
        np.copyto(out, drawn.index)
        return Batches(out, drawn.count)

    def noise(self, round: int, user: int) -> np.random.Generator:
        """The same stream from its beginning."""
        self._turn_to(round)
        with self._guard:
            if user not in self._tapes:
                self._tapes[user] = Tape(super().noise(round, user))
        return Reader(self._tapes[user])  # type: ignore[return-value]


class Tape:
    """Standard normals of one stream, kept as they are drawn."""

    def __init__(self, stream: np.random.Generator) -> None:
        self.stream = stream
        self.lock = threading.Lock()
        self.parts: list[np.ndarray] = []
        self.ends: list[int] = []

    def read(self, start: int, out: np.ndarray) -> None:
        """Copy the numbers from ``start`` on into a flat ``out``, drawing what is not there yet."""
        with self.lock:
            drawn = self.ends[-1] if self.ends else 0
            missing = start + len(out) - drawn
            if missing > 0:
                self.parts.append(self.stream.standard_normal(missing, dtype=np.float32))
                self.ends.append(drawn + missing)
        place = 0
        for end, part in zip(self.ends, self.parts, strict=False):
            first = end - len(part)
            low, high = max(start + place, first), min(start + len(out), end)
            if low < high:
                out[place : place + high - low] = part[low - first : high - first]
                place += high - low


class Reader:
    """Stands for a generator of standard normals that reads a tape."""

    def __init__(self, tape: Tape) -> None:
        self._tape, self._place = tape, 0

    def standard_normal(
        self, size: int | None = None, dtype: Any = np.float32, out: np.ndarray | None = None
    ) -> np.ndarray:
        """The next numbers, float32."""
        target = out if out is not None else np.empty(size or 1, dtype=np.float32)
        flat = target.reshape(-1)
        self._tape.read(self._place, flat)
        self._place += flat.size
        if not np.shares_memory(flat, target):
            target[...] = flat.reshape(target.shape)
        return target


class SameForEveryUser(Randomness):
    """All users draw the batches and the noise of user 0, as the paper's published code does.

    Only for the experiment that shows what this does to accuracy: the noise of the participants then adds
    up instead of averaging out, and the server could subtract one user's upload from another's.

    >>> same = SameForEveryUser(0)
    >>> bool((same.noise(1, 3).standard_normal(4) == same.noise(1, 8).standard_normal(4)).all())
    True
    """

    def batches(self, round: int, user: int, *arguments: Any, **more: Any) -> Batches:
        """User 0's batches."""
        return super().batches(round, 0, *arguments, **more)

    def noise(self, round: int, user: int) -> np.random.Generator:
        """User 0's noise."""
        return super().noise(round, 0)


def shared_draws(settings: Sequence[Setting]) -> list[Randomness]:
    """One object per seed that more than one run has; a run alone with its seed draws for itself."""
    seeds = [setting.plan.seed for setting in settings]
    shared = {seed: SharedDraws(seed) for seed in set(seeds) if seeds.count(seed) > 1}
    return [shared.get(s.plan.seed) or s.randomness() for s in settings]
