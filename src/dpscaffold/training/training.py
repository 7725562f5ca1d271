"""The rounds of one run with everything around them, in the one order that is safe."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from dpscaffold.algorithms import Algorithm, Server
from dpscaffold.config import Run
from dpscaffold.engine import Round, State
from dpscaffold.engine.device import CPU
from dpscaffold.engine.distributed import ALONE, Comm
from dpscaffold.engine.state import Engine
from dpscaffold.errors import Diverged
from dpscaffold.privacy.seeds import Seed
from dpscaffold.randomness.streams import Randomness
from dpscaffold.runs.account import AnyAccount
from dpscaffold.runs.checkpoint import Checkpoint
from dpscaffold.runs.folder import RunFolder
from dpscaffold.runs.history import HistoryRow, MetricValues
from dpscaffold.runs.written import plain
from dpscaffold.training.stopping import Stopping

#: Called after every round with what is known of it: few metrics between evaluations.
OnRound = Callable[[HistoryRow], None]

#: The metrics of a model.
Evaluate = Callable[[State], MetricValues]


def ignore(row: HistoryRow) -> None:
    """Nobody follows the run."""


@dataclass(frozen=True)
class Ending:
    """How a run ended: ``completed``, ``interrupted``, ``budget`` or ``stalled``, and why."""

    how: str
    message: str = ""


@dataclass(kw_only=True)
class Training:
    """Takes the rounds of one run over an engine. For every round, in this order:

    1. draw the participants and enter them in the ledger (:meth:`PrivacyAccount.draw`);
    2. have the engine take the round, which counts what it asks for once more;
    3. refuse a model that is not finite: all planned rounds are counted then;
    4. evaluate the model where that is due, and store the metrics;
    5. call ``on_round``;
    6. write a checkpoint where that is due, and only then acknowledge uploads;
    7. end where a signal, the budget or the rows of a public file say so.

    Args:
        run: What is run.
        engine: Where rounds are taken.
        account: The ledger.
        randomness: The streams from which participants are drawn.
        evaluate: Gives the metrics of a model.
        folder: Where metrics and checkpoints are stored; None stores nothing.
        stopping: Stops the run early, by ``validation`` among these metrics.
        on_round: Called after every round.
        every: The number of rounds from one checkpoint to the next.
        comm: The processes that take the rounds together.
        device: Where the server's state is.
    """

    run: Run
    engine: Engine
    account: AnyAccount
    randomness: Randomness
    evaluate: Evaluate
    folder: RunFolder | None = None
    stopping: Stopping | None = None
    on_round: OnRound = ignore
    every: int = 1
    comm: Comm = ALONE
    device: torch.device = CPU

    def __post_init__(self) -> None:
        self.state = State.initial(self.run, self.device)
        self.history: list[HistoryRow] = []
        self.seconds = 0.0
        #: The round that was stored last.
        self.stored = 0

    def restore(self, saved: Checkpoint, history: list[HistoryRow]) -> None:
        """Go on from a checkpoint, and the rows that were stored before it."""
        self.state = saved.state.to(self.device).under(self.run)
        self.history, self.seconds, self.stored = history, saved.seconds, saved.state.round
        self.engine.restore(vars(saved))

    def advance(self, stop: Sequence[str] = ()) -> Ending:
        """Take the rounds that are left, up to the last or to whatever ends the run. ``stop`` fills
        with the names of signals that ask the process to stop."""
        started = time.perf_counter() - self.seconds
        if self.stopping is not None and self.folder is not None:
            self.account.count_rest(self.randomness)  # its outputs decide when it ends
        while self.state.round < self.run.plan.rounds:
            number = self.state.round + 1
            draw = self.comm.first(partial(self.account.draw, self.randomness, number))
            if draw is None:
                return self._out_of_budget()
            done = self.engine.round(self.state, [draw], partial(self.account.count_again, number))
            if not bool(torch.isfinite(done.state.params).all()):
                raise self._diverged(number)

            self.state = done.state
            self.seconds = time.perf_counter() - started
            row = self._row(done)
            if self._is_due(self.run.plan.evaluate_every):
                row = self._evaluated(row)
            self.on_round(row)

            ending = self._ending(row, stop)
            if ending is not None or self._is_due(self.every):
                self._save()
                ending = ending or self._ending(row, stop)  # a signal may have come
            if ending is not None:
                return ending
        return Ending("completed")

    def _diverged(self, round: int) -> Diverged:
        """What to say of a model that is not finite, once all that it may tell is counted."""
        kept = ""
        if self.folder is not None:
            self.account.count_rest(self.randomness)  # its outputs have stopped it
            kept = f"; the last checkpoint is kept in {self.folder.path}"
        if self.folder is not None and self.account.run is not None:
            kept += f", and all {self.account.rounds} planned rounds are counted there"
        return Diverged(
            f"the run diverged at round {round}: the parameters are no longer finite; lower "
            f"plan.learning_rate (now {self.run.settled.learning_rate:g}) or privacy.noise, or "
            f"raise plan.regularisation{kept}"
        )

    def _row(self, done: Round) -> HistoryRow:
        """The round's row before it is evaluated, with ε after the round; that of all rounds where
        an output decides when the run ends."""
        counted = done.state.round if self.stopping is None else self.run.plan.rounds
        of_round = {name: float(value) for name, value in done.metrics.items()}
        spent = self.comm.first(partial(self.account.live, counted))
        return HistoryRow(done.state.round, {**of_round, **spent})

    def _is_due(self, every: int) -> bool:
        return self.state.round % every == 0 or self.state.round == self.run.plan.rounds

    def _evaluated(self, row: HistoryRow) -> HistoryRow:
        """The row with the metrics of the model, stored."""
        norms = slot_metrics(self.run.algorithm, self.state.server, self.engine.norms())
        values = {**row.metrics, **self.evaluate(self.state), **norms}
        found = HistoryRow(row.round, plain(values))
        self.history.append(found)
        if self.folder is not None:
            self.folder.append_metrics(found)
        return found

    def _ending(self, row: HistoryRow, stop: Sequence[str]) -> Ending | None:
        """How and why the run ends after this round, before the last; None where it goes on."""
        last = self.run.plan.rounds
        if row.round == last:
            return None
        if self._stops_early(row):
            return Ending("completed", f"stopped early after round {row.round} of {last}")
        caught = self.comm.first(partial(tuple, stop))
        if caught:
            return Ending("interrupted", f"stopped by {caught[0]} after round {row.round}")
        return None

    def _stops_early(self, row: HistoryRow) -> bool:
        """Whether the public rows say that it is enough."""
        if self.stopping is None or "validation" not in row.metrics:
            return False
        values = [old.metrics["validation"] for old in self.history]
        return self.stopping.is_over([-math.inf if value is None else value for value in values])

    def _out_of_budget(self) -> Ending:
        """Evaluate and store the model that the budget leaves."""
        round = self.state.round
        if round and (not self.history or self.history[-1].round < round):
            spent = self.comm.first(partial(self.account.live, round))
            self._evaluated(HistoryRow(round, spent))
            self._save()
        return Ending("budget", self.comm.first(lambda: self.account.refusal))

    def _save(self) -> None:
        """Write a checkpoint, where the run has a folder; then its uploads may be forgotten. All
        processes have a part in what it holds."""
        if not self.comm.first(lambda: self.folder is not None):
            return
        held = self.engine.memory()
        if self.folder is not None:
            saved = Checkpoint(self.state.to(CPU), self.account.anchor, self.seconds, **held)
            self.folder.save_checkpoint(saved)
        self.stored = self.state.round
        self.engine.acknowledge(self.stored)


def slot_metrics(
    algorithm: Algorithm, server: Server, norms: Mapping[str, float]
) -> dict[str, float | None]:
    """What a row of metrics shows of the server's and the users' slots, in every kind of run:
    ``control_norm`` always (None where there are no controls), the norm of each slot of the server,
    and the largest norm over users, from ``norms``, of each slot that is not private."""
    kept = {f"{name}_norm": float(slot.norm()) for name, slot in server.slots.items()}
    largest = {
        f"largest_user_{name}": norm for name, norm in norms.items() if name in algorithm.shared
    }
    return {"control_norm": None, **kept, **largest}


def pick_up(
    folder: RunFolder, account: AnyAccount, data: str, seed: Seed, resent: bool = False
) -> tuple[Checkpoint | None, list[HistoryRow]]:
    """The last checkpoint of a folder with the rows before it, or None where the run begins; all is
    checked before anything is written. ``data`` and ``seed`` identify the run, ``resent`` says that
    participants send an upload that was lost again (see :meth:`PrivacyAccount.attach`)."""
    saved = folder.load_checkpoint()
    if saved is None:
        account.attach(folder, data, seed, stored=resent)
        return None, folder.rewind_metrics(0)
    round = saved.state.round
    folder.check_metrics(round, saved.metrics)
    account.attach(folder, data, seed, saved.journal, stored=resent)
    return saved, folder.rewind_metrics(round)
