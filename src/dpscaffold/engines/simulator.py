"""All of a round's users on one axis: the fast engine.

A *row* is one participant of one run. Rows are stacked to (U, P), and the same pure functions as in
the loop engine move them. Several runs of equal shape may share the stack: their participants are
simply more rows, with their own step sizes, clips, noise scales and slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dpscaffold.algorithms import Algorithm, Broadcast, Slots, Upload
from dpscaffold.config import Run
from dpscaffold.engines.aggregate import new_aggregate
from dpscaffold.engines.fast.shards import Shards
from dpscaffold.engines.fast.stacking import (
    StackedBroadcast,
    by_run,
    joined,
    of_slice,
    part,
    refuse_unlike,
)
from dpscaffold.engines.fast.worker import Worker
from dpscaffold.engines.machine import Hardware, sent
from dpscaffold.engines.memories import Memories
from dpscaffold.engines.participation.drawing import Row
from dpscaffold.engines.state import Draw, RoundUploads
from dpscaffold.federation import Federation
from dpscaffold.randomness.streams import OneRound, Randomness


@dataclass(frozen=True)
class _Last:
    """The last round: what was asked for, and its users' slots before it where it may have to be
    run again."""

    phase: Algorithm
    broadcasts: list[Broadcast]
    draws: list[Draw]
    before: list[tuple[Memories, list[int], Slots]] = field(default_factory=list)


class Simulator:
    """Gathers the rounds of one setting, or of several that share task, algorithm and shapes.

    The cores of a CPU share the rows (:mod:`~dpscaffold.engines.fast.cores`). A GPU draws its own
    batches and noise, unless the run is secret.
    """

    #: The number of the federations' first user, where they are a share of larger ones.
    first_user = 0

    def __init__(
        self,
        settings: Sequence[Run],
        federations: Sequence[Federation],
        hardware: Hardware | None = None,
        randomness: Sequence[Randomness] | None = None,
    ) -> None:
        self.settings, self.federations = list(settings), list(federations)
        self.hardware = hardware or Hardware()
        self.device = self.hardware.device
        self.randomness = list(randomness) if randomness else [s.randomness() for s in settings]
        for other in self.settings[1:]:
            refuse_unlike(self.settings[0], other)
        self.worker = self._make_worker()
        self._sizes = [data.train.offsets.diff().numpy() for data in self.federations]
        self._batches = [setting.batch_sizes.numpy() for setting in self.settings]
        self._shards = Shards(self.worker, self.hardware.chunk or self._fitting_chunk())
        self._streams: dict[tuple[int, int], Randomness] = {}
        self._last: _Last | None = None
        #: The last round is to be gathered once more: see :meth:`cut_short`.
        self.to_redo = False
        self.all_memories: list[Memories] = [self.fresh_memories(s) for s in self.settings]
        #: The slots of the first run's users (the only one, outside a stack).
        self.memories = self.all_memories[0]

    def _make_worker(self) -> Worker:
        given = (self.settings, self.federations, self.device, self.hardware.cores)
        return Worker(*given)

    @property
    def chunk(self) -> int:
        """How many rows are computed together; fewer from when memory was not enough."""
        return self._shards.chunk

    def _fitting_chunk(self) -> int:
        """As many rows as fit."""
        rows = sum(setting.cohort_size for setting in self.settings)
        return min(self.worker.fitting_chunk(), max(1, rows))

    def fresh_memories(self, setting: Run) -> Memories:
        """Nobody seen yet."""
        return Memories(setting.algorithm.remembers, setting.task.parameters, self.device)

    def begin_anew(self, run: int) -> None:
        """Forget the users of one of the stacked runs."""
        self.all_memories[run] = self.fresh_memories(self.settings[run])
        self.memories = self.all_memories[0]

    def gather(self, phase: Algorithm, broadcast: Broadcast, draw: Draw) -> RoundUploads:
        """One round of a single run."""
        return self.gather_all(phase, [broadcast], [draw])[0]

    def gather_all(
        self, phase: Algorithm, broadcasts: Sequence[Broadcast], draws: Sequence[Draw]
    ) -> list[RoundUploads]:
        """The same round of every stacked run."""
        round = broadcasts[0].round
        rows = [
            row
            for run, draw in enumerate(draws)
            for row in self._rows(round, run, draw.active.tolist())
        ]
        broadcast = StackedBroadcast(broadcasts)
        last = _Last(phase, list(broadcasts), list(draws))
        self._last, self.to_redo = last, False
        self.worker.cut.flags.clear()
        sums = [
            new_aggregate(*one, phase) for one in zip(self.settings, draws, broadcasts, strict=True)
        ]

        def work(shard: Sequence[Row]) -> tuple[Upload, Slots]:
            return self._participate(phase, shard, broadcast)

        try:
            for shard, (upload, kept) in self._shards.answers(rows, work):
                # Run by run, not as one product with a matrix of weights: there 0·NaN of a run that
                # diverged would poison the others.
                for run, where, users in by_run(shard):
                    sums[run].add(users, part(upload, where))
                    memories = self.all_memories[run]
                    if self.worker.cut.flags:
                        last.before.append((memories, users, memories.recall(users)))
                    memories.keep(users, of_slice(kept, where))
        finally:
            self._forget(round)
        return [one.gathered() for one in sums]

    def cut_short(self) -> bool:
        """Whether Poisson batches of the last round did not fit, so that what it made is not a
        number: it is then to be gathered :meth:`again`. Waits for the device, which the round
        itself does not: ask where a number is not finite."""
        self.to_redo = self.worker.cut.happened()
        return self.to_redo

    def again(self) -> list[RoundUploads]:
        """The last round with the same draws, and room for every record in every batch."""
        last = self._last
        assert last is not None
        for memories, users, slots in last.before:
            memories.keep(users, slots)
        try:
            self.worker.cut.whole = True
            return self.gather_all(last.phase, last.broadcasts, last.draws)
        finally:
            self.worker.cut.whole = False

    def _participate(
        self, phase: Algorithm, rows: Sequence[Row], broadcast: StackedBroadcast
    ) -> tuple[Upload, Slots]:
        """K local steps of these rows."""
        memory, sent = self._recalled(rows), broadcast.to(rows, self.device)
        return self.worker.participate(phase, rows, sent, memory)

    def _recalled(self, rows: Sequence[Row]) -> Slots:
        """The slots of all rows; where they are is sent to the device once."""
        runs = [(self.all_memories[run], where, users) for run, where, users in by_run(rows)]
        places = [place for memories, _, users in runs for place in memories.places(users)]
        there = sent(torch.tensor(places), self.device)
        return joined([memories.recall_at(there[where]) for memories, where, _ in runs])

    def _rows(
        self, round: int, run: int, users: Sequence[int], members: int | None = None
    ) -> list[Row]:
        """The participants of a run in a round, who share its mechanism; or some of ``members``
        that take part."""
        setting, sizes, batches = self.settings[run], self._sizes[run], self._batches[run]
        roster, streams = setting.roster, self._of_round(round, run)
        sums, step_size = setting.sums, setting.settled.step_size_in(round)
        taking_part = None if sums is None else members or len(users)
        by_noise = setting.plan.weighting == "noise"
        return [
            Row(
                user,
                int(sizes[user - self.first_user]),
                int(batches[user]),
                setting.plan,
                setting.privacy_of(user, taking_part),
                streams,
                step_size,
                run,
                roster.sizes[user] if roster.declared else None,
                sums,
                float(setting.weights[user]) if by_noise else None,
            )
            for user in users
        ]

    def _of_round(self, round: int, run: int) -> Randomness:
        """A run's streams; those of a secret run are held until the round is done, so that rows
        which did not fit are drawn again as they were."""
        streams = self.randomness[run]
        if type(streams) is not Randomness or not streams.secret:
            return streams
        return self._streams.setdefault((round, run), OneRound(streams))

    def _forget(self, round: int) -> None:
        """A round that is done is never drawn again."""
        for key in [key for key in self._streams if key[0] <= round]:
            del self._streams[key]
