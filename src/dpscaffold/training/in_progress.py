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
from dpscaffold.federation.tables import Digest
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

    #: Judge models in a thread next to the next round on a CPU as well, as on a GPU.
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
                "unknown-engine",
                f"engine is {engine!r}{nearest(engine, ENGINES)}; choose one of "
                f"{', '.join(ENGINES)}",
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
        self.home: str | None = None
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
            self._begin_without_folder(resume)
            return
        described = self.stated if config is None else config
        self._refuse_claims(dict(described.get("privacy") or {}))
        digest = self.federation.digest()
        self.folder = RunFolder(out)
        if resume and self.folder.holds_run:
            self._reopen(self.folder, described, digest)
        else:
            self._begin(self.folder, described, digest)
        self.log = self.log or RunLog(self.folder.path)
        slower = getattr(self.setting.task, "slower", "")
        if slower:  # the module was looked at when the setting was made
            self.log.note(slower)

    def _begin_without_folder(self, resume: bool) -> None:
        if resume:
            raise BadInput(
                "no-run-folder",
                "resume is asked for without a run folder; name it with out (--out)",
            )
        if self.data_key is not None:
            raise BadInput(
                "no-run-folder",
                f"data_key is {self.data_key} without a run folder, and nothing of the run is "
                f"stored to be compared; name a folder with out",
            )
        self.accounts.check_room()
        self.accounts.book()

    def _begin(self, folder: RunFolder, described: Mapping[str, Any], digest: Digest) -> None:
        """Claim a folder for a new run."""
        self.accounts.check_room()
        folder.check_free()
        key = fresh_key() if self.data_key is None else open_key(self.data_key)
        data = identity(key, digest.value)
        known = Identity(data, digest.covers, self.engine_name, self.home)
        seed = None if self.accounts.run is None else self.seed
        folder.begin(to_toml(described), known, self.stated, key, seed)
        self.log = RunLog(folder.path)
        self.accounts.attach(folder, data, self.seed)

    def _reopen(self, folder: RunFolder, described: Mapping[str, Any], digest: Digest) -> None:
        """Continue the run of a folder, if it is the same run."""
        folder.lock()
        longer = folder.is_outgrown(self.setting.plan)
        folder.check_same(described, longer)
        folder.check_setting(self.stated, longer)
        data = identity(folder.data_key(self.data_key), digest.value)
        known = Identity(data, digest.covers, self.engine_name, self.home)
        folder.check_identity(known)
        if self.accounts.run is not None:
            self.seed = folder.kept_seed()
        self._pick_up(folder, data)
        self.accounts.extend(folder)
        if longer:
            folder.replan(to_toml(described), self.stated)

    def _refuse_claims(self, said: Mapping[str, Any]) -> None:
        """The configuration of a folder must not claim more than the run does."""
        claims = {
            "secret": bool(said.get("secret")) and not self.setting.secret,
            "release": bool(said.get("release")) and self.accounts.allowed is None,
        }
        for name in [name for name, false in claims.items() if false]:
            raise BadInput(
                "configuration-not-kept",
                f"config says privacy.{name} = true, and the run does not keep it; give "
                f"{'release=True' if name == 'release' else 'Gaussian(secret=True)'}, or leave it "
                f"out of config",
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
        setting, plan = self.setting, self.setting.plan
        engine, state = self._start()
        draw = partial(self.accounts.draw, self.randomness)
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
                row = HistoryRow(round, {**done.gathered.metrics, **self._live(round)})
                stores = self._is_due(round, plan.checkpoint_every)
                if self._is_due(round, plan.evaluate_every):
                    judged = self._judge(state, engine.memories, row, aside)
                    if aside.overlaps and self._goes_on_anyway(round, stop):
                        self.seconds = time.perf_counter() - started
                        kept = self._copied_snapshot(state, engine.memories) if stores else None
                        owed.by(partial(self._conclude, state, judged, kept))
                        continue
                    row = judged()
                self.tell(RoundDone(round, plan.rounds, (state.params,), (row,)))
                self.seconds = time.perf_counter() - started
                ending = self._ending(round, row, stop)
                if stores or ending:
                    self._checkpoint(state, engine.memories)
                if ending:
                    return engine, state, *ending
        return engine, state, "completed", ""

    def _start(self) -> tuple[Engine, State]:
        """The engine and the state before the next round, as the checkpoint has them."""
        make = ENGINES[self.engine_name]
        engine = make(self.setting, self.federation, self.hardware, self.randomness)
        if isinstance(engine, Simulator):
            self.hardware = replace(self.hardware, chunk=engine.chunk)
        state = State.initial(self.setting, self.device)
        if self.saved is not None:
            state = State.from_dict(self.saved["state"], self.device).under(self.setting)
            engine.memories.restore(self.saved["memories"])
        if self.folder is not None:
            self._book_all()
        return engine, state

    def _live(self, round: int) -> dict[str, float | None]:
        """ε after a round; that of all rounds where an output decides when the run ends."""
        return self.accounts.live(round if self.stopping is None else self.setting.plan.rounds)

    def _is_due(self, round: int, every: int) -> bool:
        return round % every == 0 or round == self.setting.plan.rounds

    def _goes_on_anyway(self, round: int, stop: Sequence[str]) -> bool:
        """Whether another round follows, whatever the evaluation of this one says."""
        return round < self.setting.plan.rounds and not stop and self.stopping is None

    def _ending(self, round: int, row: HistoryRow, stop: Sequence[str]) -> tuple[str, str] | None:
        """How and why the run ends after this round, before the last; None where it goes on."""
        last = self.setting.plan.rounds
        if round == last:
            return None
        if self._stops(row):
            return "completed", f"stopped early after round {round} of {last}"
        return ("interrupted", f"stopped by {stop[0]} after round {round}") if stop else None

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
        """Begin to evaluate the output, where it is an average the last iterate too; what is
        returned waits for the answer and notes it."""
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
        """Tell and store a round that was evaluated while the next one ran."""
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

    def _copied_snapshot(self, state: State, memories: Memories) -> dict[str, Any]:
        """A snapshot that the next round cannot change; other devices have copied it already."""
        snapshot = self._snapshot(state, memories)
        return copy.deepcopy(snapshot) if self.device.type == "cpu" else snapshot

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
