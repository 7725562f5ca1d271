"""The rounds of one run with everything around them, in the one order that is safe.

Simulated runs (:mod:`~dpscaffold.training.in_progress`) and deployed runs
(:mod:`dpscaffold.deployment.server.run`) have the same driver, which differs in a few methods.
Experiments on stacks of runs (:mod:`~dpscaffold.training.stack`) need none of it but the loop
(:mod:`~dpscaffold.engines.rounds`): they have no ledger and no folder.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from dpscaffold.config import Run
from dpscaffold.engines import Engine, State
from dpscaffold.engines.memories import slot_metrics
from dpscaffold.engines.rounds import FinishedRound, rounds
from dpscaffold.errors import Diverged
from dpscaffold.privacy.seeds import Seed
from dpscaffold.randomness.streams import Randomness
from dpscaffold.runs.account import PrivacyAccount
from dpscaffold.runs.checkpoint import Checkpoint
from dpscaffold.runs.folder import RunFolder
from dpscaffold.runs.history import HistoryRow, MetricValues
from dpscaffold.runs.written import plain
from dpscaffold.training.events import Checkpointed, Evaluated, Listener, RoundDone, silence
from dpscaffold.training.stopping import Stopping

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Ending:
    """How a run ended: ``completed``, ``interrupted``, ``budget`` or ``stalled``, and why."""

    how: str
    message: str = ""


class RunDriver:
    """Takes the rounds of one run. For every round, in this order:

    1. draw the participants and enter them in the ledger (:meth:`PrivacyAccount.draw`);
    2. gather their uploads and move the server (:func:`~dpscaffold.engines.rounds.rounds`);
    3. count what was released beyond that, or take the round again (:meth:`is_repeated`);
    4. refuse a model that is not finite;
    5. evaluate the model where that is due, and store the metrics;
    6. tell the listener;
    7. write a checkpoint where that is due, and only then acknowledge uploads (:meth:`stored`);
    8. end where a signal, the budget or the rows of a public file say so.
    """

    #: Where the server's state is.
    device = CPU
    #: The number of rounds from one checkpoint to the next.
    checkpoint_every = 1
    #: Stops the run early.
    stopping: Stopping | None = None

    def __init__(
        self,
        setting: Run,
        folder: RunFolder | None,
        tell: Listener = silence,
        before: int = 0,
    ) -> None:
        """``before`` is the number of rounds that a run took which this one continues."""
        self.setting, self.folder, self.tell = setting, folder, tell
        self.accounts = PrivacyAccount(setting, before)
        self.history: list[HistoryRow] = []
        self.saved: Checkpoint | None = None
        self.seconds = 0.0
        #: ε after the last round, as :meth:`PrivacyAccount.live` gives it.
        self.spent: MetricValues = {}
        #: The round that was stored last.
        self.stored_round = 0

    # --- what differs between kinds of run

    @property
    def randomness(self) -> Randomness:
        """The streams from which participants are drawn."""
        raise NotImplementedError

    def is_repeated(self, done: FinishedRound, finite: bool) -> bool:
        """Whether the engine takes this round again, and it does not count. Called for each round
        before anything else is made of it."""
        return False

    def measured(self, done: FinishedRound) -> MetricValues:
        """What the round itself adds to its row of metrics."""
        return {}

    def evaluated(self, state: State) -> MetricValues:
        """Metrics of the model."""
        return {}

    def checkpoint(self, state: State) -> Checkpoint:
        """What a checkpoint of this moment holds."""
        raise NotImplementedError

    def stored(self, state: State, row: HistoryRow) -> None:
        """Called when a checkpoint of the round is on the disk."""

    # --- the beginning

    def pick_up(self, folder: RunFolder, data: str, seed: Seed, resent: bool = False) -> None:
        """Continue from the folder's last checkpoint, or begin; all is checked before anything is
        written. ``data`` and ``seed`` identify the run, ``resent`` says that participants send an
        upload that was lost again (see :meth:`PrivacyAccount.attach`)."""
        saved = folder.load_checkpoint()
        if saved is None:
            self.accounts.attach(folder, data, seed, stored=resent)
            folder.rewind_metrics(0)
            return
        round = saved.state.round
        folder.check_metrics(round, saved.metrics)
        self.accounts.attach(folder, data, seed, round, saved.journal, stored=resent)
        self.saved, self.stored_round, self.seconds = saved, round, saved.seconds
        self.history = folder.rewind_metrics(round)

    def start(self) -> State:
        """The state before the next round, as the checkpoint has it."""
        if self.saved is None:
            return State.initial(self.setting, self.device)
        return self.saved.state.to(self.device).under(self.setting)

    # --- rounds

    def take_rounds(self, engine: Engine, state: State, stop: Sequence[str]) -> Ending:
        """The rounds that are left, up to the last or to whatever ends them. ``stop`` fills with
        the names of signals that ask the process to stop. ``self.state`` is the last state."""
        self.engine, self.state, last = engine, state, self.setting.plan.rounds
        draw = partial(self.accounts.draw, self.randomness)
        started = time.perf_counter() - self.seconds
        for done in rounds(self.setting, engine, draw, state):
            self.state, round = done.state, done.number
            finite = bool(torch.isfinite(done.state.server.params).all())
            if self.is_repeated(done, finite):
                continue
            if not finite:
                self._refuse_divergence(round)
            row = self._row(done, self.measured(done))
            if self._is_due(round, self.setting.plan.evaluate_every):
                row = self._evaluate(done.state, row)
            self.tell(RoundDone(round, last, (done.state.server.params,), (row,)))
            self.seconds = time.perf_counter() - started
            ending = self._ending(round, row, stop)
            if ending or self._is_due(round, self.checkpoint_every):
                self._store(done.state, row)
                ending = ending or self._ending(round, row, stop)  # a signal may have come
            if ending:
                return ending
        if self.accounts.refusal:
            self._evaluate_last()
            return Ending("budget", self.accounts.refusal)
        return Ending("completed")

    def _refuse_divergence(self, round: int) -> None:
        kept = ""
        if self.folder:
            self.accounts.count_rest(self.randomness)  # its outputs have stopped it
            kept = f"; the last checkpoint is kept in {self.folder.path}"
        if self.folder and self.accounts.run is not None:
            kept += f", and all {self.accounts.ledger.rounds} planned rounds are counted there"
        raise Diverged(
            f"the run diverged at round {round}: the parameters are no longer finite; lower "
            f"plan.learning_rate (now {self.setting.settled.learning_rate:g}) or privacy.noise, or "
            f"raise plan.regularisation{kept}"
        )

    def _row(self, done: FinishedRound, measured: MetricValues) -> HistoryRow:
        """The round's row before it is evaluated, with ε after the round; that of all rounds where
        an output decides when the run ends."""
        rounds = done.number if self.stopping is None else self.setting.plan.rounds
        self.spent = self.accounts.live(rounds)
        of_round = {name: float(value) for name, value in done.gathered.metrics.items()}
        return HistoryRow(done.number, {**measured, **of_round, **self.spent})

    def _is_due(self, round: int, every: int) -> bool:
        return round % every == 0 or round == self.setting.plan.rounds

    def _ending(self, round: int, row: HistoryRow, stop: Sequence[str]) -> Ending | None:
        """How and why the run ends after this round, before the last; None where it goes on."""
        last = self.setting.plan.rounds
        if round == last:
            return None
        if self._stops_early(row):
            return Ending("completed", f"stopped early after round {round} of {last}")
        return Ending("interrupted", f"stopped by {stop[0]} after round {round}") if stop else None

    def _stops_early(self, row: HistoryRow) -> bool:
        """Whether the public rows say that it is enough."""
        if self.stopping is None or "validation" not in row.metrics:
            return False
        values = [old.metrics["validation"] for old in self.history]
        return self.stopping.is_over([-math.inf if value is None else value for value in values])

    def _evaluate(self, state: State, row: HistoryRow) -> HistoryRow:
        """Evaluate the model, and store its row with what the round itself added."""
        norms = slot_metrics(self.setting.algorithm, state.server, self.engine.memories)
        values = plain({**row.metrics, **self.evaluated(state), **norms})
        found = HistoryRow(row.round, values)
        self.history.append(found)
        if self.folder:
            self.folder.append_metrics(found)
        self.tell(Evaluated(state.round, (found,)))
        return found

    def _evaluate_last(self) -> None:
        """Evaluate and store the model of a run that its budget has ended."""
        state = self.state
        if state.round and (not self.history or self.history[-1].round < state.round):
            row = HistoryRow(state.round, self.accounts.live(state.round))
            self._evaluate(state, row)
            if self.folder:
                self._write(self.checkpoint(state))

    def _store(self, state: State, row: HistoryRow) -> None:
        """Write a checkpoint, where the run has a folder."""
        if self.folder:
            self._write(self.checkpoint(state))
            self.stored(state, row)

    def _write(self, checkpoint: Checkpoint) -> None:
        assert self.folder is not None
        self.folder.save_checkpoint(checkpoint)
        self.stored_round = checkpoint.state.round
        self.tell(Checkpointed(self.stored_round))
