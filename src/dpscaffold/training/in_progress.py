"""One run while it goes on: rounds, evaluation, checkpoints, and what it leaves behind.

The only place that knows all the parts.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from dpscaffold.engines import ENGINES, Engine, Hardware, Memories, Simulator, State
from dpscaffold.engines.machine import BackgroundWorker, DeferredWork, device_failed, stop_signals
from dpscaffold.engines.memories import slot_metrics
from dpscaffold.engines.rounds import rounds
from dpscaffold.errors import BadInput, DeviceLost, Diverged, nearest
from dpscaffold.federation import Federation
from dpscaffold.models.model import Model
from dpscaffold.models.storage import WITHIN
from dpscaffold.models.trained import Origin
from dpscaffold.randomness.streams import Randomness
from dpscaffold.runs.account import PrivacyAccount
from dpscaffold.runs.data_key import fresh_key, identity, open_key
from dpscaffold.runs.folder import Identity, RunFolder
from dpscaffold.runs.history import HistoryRow
from dpscaffold.runs.journal import Anchor
from dpscaffold.runs.log import RunLog
from dpscaffold.runs.written import plain, to_toml
from dpscaffold.setting import Setting
from dpscaffold.training.evaluator import Evaluator, Measures, Metrics, judging
from dpscaffold.training.events import Checkpointed, Ended, Evaluated, Listener, RoundDone
from dpscaffold.training.optimum import Optimum
from dpscaffold.training.result import Result, summarise
from dpscaffold.training.stopping import Stopping

CPU = torch.device("cpu")

#: A metric of one's own: the model and the evaluation data → a number, under the function's name.
OwnMetric = Callable[[Model, Federation], float]


class RunInProgress:
    """One run in progress."""

    #: Judge models in a thread beside the next round on a CPU as well, as on a GPU.
    ahead = False

    def __init__(
        self,
        setting: Setting,
        federation: Federation,
        hardware: Hardware,
        engine: str,
        listener: Listener,
        metrics: Sequence[str | OwnMetric] = (),
        dissimilarity: bool = True,
    ) -> None:
        if engine not in ENGINES:
            raise BadInput(
                f"engine is {engine!r}{nearest(engine, ENGINES)}; choose one of "
                f"{', '.join(ENGINES)}"
            )
        self.setting, self.federation, self.hardware = setting, federation, hardware
        self.device, self.engine_name, self.tell = hardware.devices[0], engine, listener
        if hardware.threads is not None and self.device.type == "cpu":
            torch.set_num_threads(hardware.threads)
        named = tuple([metric for metric in metrics if isinstance(metric, str)])
        self.measures = Measures(named, dissimilarity)
        self.optimum_loss: float | None = None
        self.own = {m.__name__: m for m in metrics if not isinstance(m, str)}
        if named:
            self.measures.chosen(federation.target)  # refuses here, not at the first evaluation
        self.accounts = PrivacyAccount(setting)
        self.stated = setting.to_dict()
        self.seed = setting.seed()
        self.folder: RunFolder | None = None
        self.log: RunLog | None = None
        self.history: list[HistoryRow] = []
        self.saved: dict[str, Any] | None = None
        self.seconds = 0.0
        self.stored = 0  # the round that was stored last
        self.stopping: Stopping | None = None
        self.beside: str | None = None
        self.data_key: Path | None = None
        self.origin = Origin(setting.label, federation.title)

    @cached_property
    def randomness(self) -> Randomness:
        """Made when it is first needed, and the seed of a resumed run is known."""
        return self.setting.randomness(self.seed)

    @cached_property
    def evaluate(self) -> Evaluator:
        """Made when it is first needed, and the optimum is known."""
        strength = self.setting.plan.regularisation
        task = judging(self.setting.task, self.device)
        given = (self.federation, task, strength, self.device)
        return Evaluator(*given, self.optimum_loss, self.measures)

    def open(self, out: Path | None, resume: bool, config: Mapping[str, Any] | None) -> None:
        """Claim the run folder, or pick up what it holds."""
        columns = dict((config or {}).get("data", {}))
        label = columns.get("label")  # several labels are found by their names
        label = label if isinstance(label, str) else None
        self.origin = replace(self.origin, label=label, site=columns.get("user"))
        if out is None:
            if resume:
                raise BadInput("resume is asked for without a run folder; name it with out (--out)")
            if self.data_key is not None:
                raise BadInput(
                    f"data_key is {self.data_key} without a run folder, and nothing of the run is "
                    f"stored to be compared; name a folder with out"
                )
            self.accounts.check_room()
            self.accounts.book()
            return
        described = self.stated if config is None else config
        self._refuse_claims(dict(described.get("privacy") or {}))
        digest = self.federation.digest()
        self.folder = RunFolder(out)
        if resume and self.folder.holds_run:
            self.folder.lock()
            longer = self.folder.is_outgrown(self.setting.plan)
            self.folder.check_same(described, longer)
            self.folder.check_setting(self.stated, longer)
            data = identity(self.folder.data_key(self.data_key), digest.value)
            known = Identity(data, digest.covers, self.engine_name, self.beside)
            self.folder.check_identity(known)
            if self.accounts.run is not None:
                self.seed = self.folder.kept_seed()
            self._pick_up(self.folder, data)
            self.accounts.extend(self.folder)
            if longer:
                self.folder.replan(to_toml(described), self.stated)
        else:
            self.accounts.check_room()
            self.folder.check_free()
            key = fresh_key() if self.data_key is None else open_key(self.data_key)
            data = identity(key, digest.value)
            known = Identity(data, digest.covers, self.engine_name, self.beside)
            seed = None if self.accounts.run is None else self.seed
            self.folder.begin(to_toml(described), known, self.stated, key, seed)
            self.log = RunLog(self.folder.path)
            self.accounts.attach(self.folder, data, self.seed)
        self.log = self.log or RunLog(self.folder.path)
        slower = getattr(self.setting.task, "slower", "")
        if slower:  # the module was looked at when the setting was made
            self.log.note(slower)

    def _refuse_claims(self, said: Mapping[str, Any]) -> None:
        """The configuration of a folder must not claim more than the run does."""
        claims = {
            "secret": bool(said.get("secret")) and not self.setting.secret,
            "release": bool(said.get("release")) and self.accounts.allowed is None,
        }
        for name in [name for name, false in claims.items() if false]:
            raise BadInput(
                f"config says privacy.{name} = true, and the run does not keep it; give "
                f"{'release=True' if name == 'release' else 'Gaussian(secret=True)'}, or leave it "
                f"out of config"
            )

    def close(self) -> None:
        """Let other processes work on the run folder."""
        if self.log is not None:
            self.log.close()
        if self.folder:
            self.folder.release()

    def _pick_up(self, folder: RunFolder, data: str) -> None:
        """Go on from the last checkpoint; everything is checked before anything is written."""
        saved = folder.load_checkpoint()
        if saved is None:
            self.accounts.attach(folder, data, self.seed)
            folder.rewind_metrics(0)
            return
        state = State.from_dict(saved["state"], self.device)
        journal = saved["journal"]
        anchor = Anchor.read(journal, "checkpoint.pt") if journal is not None else None
        folder.check_metrics(state.round, saved.get("metrics"))
        self.accounts.attach(folder, data, self.seed, state.round, anchor)
        self.saved, self.stored = saved, state.round
        self.hardware = replace(self.hardware, chunk=saved["chunk"], threads=saved["threads"])
        if self.device.type == "cpu":
            torch.set_num_threads(saved["threads"])
        self.seconds = saved["seconds"]
        self.history = folder.rewind_metrics(state.round)

    def go(self, optimum: Optimum | None) -> Result:
        """Run the rounds that are left; a device that gives up ends the run where it was stored."""
        try:
            return self._go(optimum)
        except RuntimeError as error:
            if not device_failed(error):
                raise
            raise DeviceLost(self._lost(error)) from error

    def _lost(self, error: RuntimeError) -> str:
        """What happened, and how to go on; the device itself cannot be asked any more."""
        names = ",".join(str(device) for device in self.hardware.devices)
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        what = f"device is {names}, and it gave up in round {self.accounts.begun} ({said})"
        if self.folder is None:
            return f"{what}; nothing of the run is stored: name a folder (out), then it can go on"
        where = f"checkpoint of round {self.stored}" if self.stored else "beginning"
        return f"{what}; once it is back, the run goes on from its {where} with --resume"

    def _go(self, optimum: Optimum | None) -> Result:
        """Run the rounds that are left."""
        self.optimum_loss = optimum.loss if optimum else None
        engine, state, ended, message = self._run()
        if self.accounts.refusal:
            ended, message = "budget", self.accounts.refusal
            if state.round and (not self.history or self.history[-1].round < state.round):
                row = HistoryRow(state.round, self.accounts.live(state.round))
                self._judge(state, engine.memories, row, BackgroundWorker(CPU))()
                self._checkpoint(state, engine.memories)
        return self._finish(state, ended, message, optimum)

    def _run(self) -> tuple[Engine, State, str, str]:
        """Rounds up to the last, or to whatever ends them: the state then, how it ended and why."""
        setting, plan, ended, message = self.setting, self.setting.plan, "completed", ""
        make = ENGINES[self.engine_name]
        engine = make(setting, self.federation, self.hardware, self.randomness)
        if isinstance(engine, Simulator):
            self.hardware = replace(self.hardware, chunk=engine.chunk)
        state = State.initial(setting, self.device)
        if self.saved is not None:
            state = State.from_dict(self.saved["state"], self.device).under(setting)
            engine.memories.restore(self.saved["memories"])
        if self.folder is not None and (self.stopping is not None or plan.max_rounds is not None):
            self._book_all()
        draw = partial(self.accounts.draw, self.randomness)
        counted = plan.rounds if self.stopping is not None else 0  # when it ends is an output
        started = time.perf_counter() - self.seconds
        with (
            stop_signals() as stop,
            BackgroundWorker(self.device, self.ahead) as aside,
            DeferredWork() as owed,
        ):
            for done in rounds(setting, engine, draw, state):
                owed.settle()
                round, state = done.number, done.state
                if self._comes_again(engine, state):
                    continue
                live = self.accounts.live(max(round, counted))
                row = HistoryRow(round, {**done.gathered.metrics, **live})
                stores = round % plan.checkpoint_every == 0 or round == plan.rounds
                if round % plan.evaluate_every == 0 or round == plan.rounds:
                    judged = self._judge(state, engine.memories, row, aside)
                    if aside.overlaps and round < plan.rounds and not stop and not self.stopping:
                        self.seconds = time.perf_counter() - started
                        kept = self._snapshot(state, engine.memories) if stores else None
                        if self.device.type == "cpu":  # where it would be what goes on changing
                            kept = copy.deepcopy(kept)
                        owed.by(partial(self._conclude, state, judged, kept))
                        continue
                    row = judged()
                self.tell(RoundDone(round, plan.rounds, (state.params,), (row,)))
                self.seconds = time.perf_counter() - started
                if stores or stop:
                    self._checkpoint(state, engine.memories)
                if round < plan.rounds and self._stops(row):
                    message = f"stopped early after round {round} of {plan.rounds}"
                    self._checkpoint(state, engine.memories)
                    break
                if stop and round < plan.rounds:
                    ended, message = "interrupted", f"stopped by {stop[0]} after round {round}"
                    break
        return engine, state, ended, message

    def _comes_again(self, engine: Engine, state: State) -> bool:
        """Whether batches of the round were cut short, so that it comes again with room for every
        record. A state that is not finite for another reason is refused."""
        cut = False
        finite = bool(torch.isfinite(state.params).all())
        if isinstance(engine, Simulator):
            # It may have had to take smaller chunks.
            self.hardware = replace(self.hardware, chunk=engine.chunk)
            cut = not finite and engine.cut_short()
        if not cut:
            self._check_finite(state, finite)
        return cut

    def _book_all(self) -> None:
        """Put all planned rounds into the ledger where outputs may decide how many are run."""
        if self.stopping is not None or self.setting.plan.max_rounds is not None:
            self.accounts.count_rest(self.randomness)

    def _stops(self, row: HistoryRow) -> bool:
        """Whether the public rows say that it is enough."""
        if self.stopping is None or "validation" not in row.metrics:
            return False
        values = [old.metrics["validation"] for old in self.history]
        return self.stopping.is_over([-math.inf if value is None else value for value in values])

    def _judge(
        self, state: State, memories: Memories, row: HistoryRow, aside: BackgroundWorker
    ) -> Callable[[], HistoryRow]:
        """Begin to judge the output, where it is an average the last iterate too; what is returned
        waits for the answer and notes it."""
        # Read now: they belong to this round, and the next one changes them.
        norms = slot_metrics(self.setting.algorithm, state.server, memories)

        def judged() -> Metrics:
            found = self.evaluate(state.output)
            if state.averaged:
                last = self.evaluate(state.params)
                found = found | {f"last_{key}": value for key, value in last.items()}
            return found

        answer = aside.begin(judged)

        def noted() -> HistoryRow:
            own = self._judged_by_own(state)
            metrics = {**row.metrics, **answer.result(), **own, **norms}
            found = HistoryRow(row.round, plain(metrics))
            self.history.append(found)
            if self.folder:
                self.folder.append_metrics(found)
            self.tell(Evaluated(state.round, (found,)))
            return found

        return noted

    def _judged_by_own(self, state: State) -> dict[str, float]:
        """Metrics of one's own, and that which stops the run early."""
        if not self.own and self.stopping is None:
            return {}
        model = Model.of(self.federation, self.setting.task, state.output.cpu())
        found = {name: float(of(model, self.federation)) for name, of in self.own.items()}
        if self.stopping is not None:
            found["validation"] = self.stopping.value(model)
        return found

    def _conclude(
        self, state: State, judged: Callable[[], HistoryRow], kept: dict[str, Any] | None
    ) -> None:
        """Tell and store a round that was judged while the next one ran."""
        row = judged()
        self.tell(RoundDone(state.round, self.setting.plan.rounds, (state.params,), (row,)))
        if kept is not None:
            self._store(kept)

    def _check_finite(self, state: State, finite: bool) -> None:
        if finite:
            return
        kept = ""
        if self.folder:
            self.accounts.count_rest(self.randomness)  # its outputs have stopped it
            kept = f"; the last checkpoint is kept in {self.folder.path}"
        if self.folder and self.accounts.run is not None:
            kept += f", and all {self.accounts.ledger.rounds} planned rounds are counted there"
        raise Diverged(
            f"the run diverged at round {state.round}: the parameters are no longer finite; lower "
            f"plan.learning_rate (now {self.setting.plan.learning_rate:g}) or privacy.noise, or "
            f"raise plan.regularisation{kept}"
        )

    def _checkpoint(self, state: State, memories: Memories) -> None:
        if self.folder:
            self._store(self._snapshot(state, memories))

    def _snapshot(self, state: State, memories: Memories) -> dict[str, Any]:
        """What a checkpoint of this moment holds, but for the metrics that are written by then."""
        anchor = self.accounts.anchor
        return {
            "state": state.to_dict(),
            "memories": memories.to_dict(),
            "chunk": self.hardware.chunk,
            "threads": torch.get_num_threads(),
            "journal": vars(anchor) if anchor else None,
            "seconds": self.seconds,
        }

    def _store(self, snapshot: dict[str, Any]) -> None:
        """Write a checkpoint."""
        if not self.folder:
            return
        self.folder.save_checkpoint({**snapshot, "metrics": self.folder.metrics_digest})
        self.stored = snapshot["state"]["round"]
        self.tell(Checkpointed(self.stored))

    def _finish(self, state: State, ended: str, message: str, optimum: Optimum | None) -> Result:
        """Write what a finished (or halted) run leaves behind."""
        self._book_all()
        statement = self.accounts.statement()
        result = Result(
            self.setting,
            self.federation,
            self.history,
            state.output.cpu(),
            state.round,
            ended,
            statement,
            optimum,
            self.folder.path if self.folder else None,
            self.seconds,
            message,
            self.origin,
        )
        if self.folder:
            self.accounts.write_statement(self.folder, statement)
            summary = summarise(result)
            if ended != "interrupted":
                summary["model"] = self._save_model(self.folder, result.model)
            self.folder.write_text("summary.json", json.dumps(plain(summary), indent=2) + "\n")
        self.tell(Ended(state.round, ended, message))
        return result

    def _save_model(self, folder: RunFolder, model: Model) -> str:
        """Write the model; what cannot be stored (a preparation of one's own) is said instead."""
        try:
            return str(model.save(folder.file(WITHIN)).relative_to(folder.path))
        except BadInput as problem:
            return f"not stored: {problem}"
