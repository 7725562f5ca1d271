"""All of a round's users on one axis: the fast engine.

A *row* is one participant of one run. Rows are stacked to (U, P), and the same pure functions as in
the loop engine move them. Several runs of equal shape may share the stack: their participants are
simply more rows, with their own step sizes, clips, noise scales and slots.
"""

from __future__ import annotations

from collections.abc import Sequence

from dpscaffold.algorithms import Algorithm, Broadcast, Slots, Upload
from dpscaffold.engines.aggregate import Aggregate
from dpscaffold.engines.ahead import Ahead
from dpscaffold.engines.hardware import Hardware
from dpscaffold.engines.memories import Memories
from dpscaffold.engines.stacking import (
    StackedBroadcast,
    by_run,
    joined,
    of_slice,
    part,
    refuse_unlike,
)
from dpscaffold.engines.state import Draw, Gathered
from dpscaffold.engines.worker import Worker
from dpscaffold.federation import Federation
from dpscaffold.local.drawing import Row
from dpscaffold.randomness import Randomness
from dpscaffold.setting import Setting


class Simulator:
    """Gathers the rounds of one setting, or of several that share task, algorithm and shapes.

    Chunks of rows go to the hardware's devices in turn. A GPU draws its own batches and noise; with
    ``ahead`` (by default in a secret run on a GPU) a background thread of the CPU draws the next
    round's batches while this one computes, and the draws are the same.
    """

    def __init__(
        self,
        settings: Sequence[Setting],
        federations: Sequence[Federation],
        hardware: Hardware | None = None,
        randomness: Sequence[Randomness] | None = None,
        ahead: bool | None = None,
    ) -> None:
        self.settings, self.federations = list(settings), list(federations)
        self.hardware = hardware or Hardware()
        self.device = self.hardware.device
        self.randomness = list(randomness) if randomness else [s.randomness() for s in settings]
        for other in self.settings[1:]:
            refuse_unlike(self.settings[0], other)
        workers = {d: Worker(self.settings, self.federations, d) for d in self.hardware.devices}
        self.workers = [workers[device] for device in self.hardware.devices]
        self.chunk = self.hardware.chunk or min(w.fitting_chunk() for w in self.workers)
        self.all_memories: list[Memories] = [self.fresh_memories(s) for s in self.settings]
        # A GPU draws for itself, unless the run is secret.
        secret = any(one.secret for one in self.randomness)
        ahead = (self.device.type == "cuda" and secret) if ahead is None else ahead
        self.ahead = Ahead(self._expected) if ahead else None

    @property
    def memories(self) -> Memories:
        """The slots of the first run's users (the only one, outside a stack)."""
        return self.all_memories[0]

    def fresh_memories(self, setting: Setting) -> Memories:
        """Nobody seen yet."""
        return Memories(setting.algorithm.remembers, setting.task.parameters, self.device)

    def gather(self, phase: Algorithm, broadcast: Broadcast, draw: Draw) -> Gathered:
        """One round of a single run."""
        return self.gather_all(phase, [broadcast], [draw])[0]

    def gather_all(
        self, phase: Algorithm, broadcasts: Sequence[Broadcast], draws: Sequence[Draw]
    ) -> list[Gathered]:
        """The same round of every stacked run."""
        rows = [
            self._row(run, user) for run, draw in enumerate(draws) for user in draw.active.tolist()
        ]
        told = StackedBroadcast(broadcasts)
        sums = [
            Aggregate(setting, draw, told.params[0])
            for setting, draw in zip(self.settings, draws, strict=True)
        ]
        for number, start in enumerate(range(0, len(rows), self.chunk)):
            chunk = rows[start : start + self.chunk]
            worker = self.workers[number % len(self.workers)]
            upload, kept = self._participate(worker, phase, chunk, told)
            # Run by run, not as one product with a matrix of weights: there 0·NaN of a run that
            # diverged would poison the others.
            for run, where, users in by_run(chunk):
                sums[run].add(users, part(upload, where))
                self.all_memories[run].keep(users, of_slice(kept, where))
        return [one.gathered() for one in sums]

    def _participate(
        self, worker: Worker, phase: Algorithm, rows: list[Row], told: StackedBroadcast
    ) -> tuple[Upload, Slots]:
        """K local steps of these rows on a worker's device; the answer is on the first."""
        memory = joined([self.all_memories[run].recall(users) for run, _, users in by_run(rows)])
        drawn = self.ahead.indices(told.round, rows) if self.ahead else None
        upload, kept = worker.participate(phase, rows, told.to(rows, worker.device), memory, drawn)
        if worker.device == self.device:
            return upload, kept
        home = {name: value.to(self.device) for name, value in upload.totals.items()}
        return Upload(upload.params.to(self.device), home), {
            name: value.to(self.device) for name, value in kept.items()
        }

    def _row(self, run: int, user: int) -> Row:
        setting = self.settings[run]
        size, batch = int(self.federations[run].train.sizes[user]), int(setting.batches[user])
        declared = setting.declared(user)
        return Row(
            user, size, batch, setting.plan, setting.privacy, self.randomness[run], run, declared
        )

    def _expected(self, round: int) -> list[Row] | None:
        """The rows of a round if nobody declines, where they fit one chunk."""
        if round > self.settings[0].plan.rounds:
            return None
        rows = [
            self._row(run, int(user))
            for run, setting in enumerate(self.settings)
            for user in self.randomness[run].participants(
                round, setting.users, setting.participants
            )
        ]
        return rows if len(rows) <= self.chunk else None
