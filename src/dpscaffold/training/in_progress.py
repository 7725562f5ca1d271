"""One simulated run: its folder, its engine, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from dpscaffold.config import Run
from dpscaffold.engines import ENGINES, Engine, Hardware, Simulator, State
from dpscaffold.engines.machine import device_failed, stop_signals
from dpscaffold.engines.rounds import FinishedRound
from dpscaffold.errors import BadInput, DeviceLost, nearest
from dpscaffold.federation import Federation
from dpscaffold.federation.tables import Digest
from dpscaffold.models.model import Model
from dpscaffold.models.personal import own_models
from dpscaffold.models.storage import WITHIN
from dpscaffold.models.trained import Origin
from dpscaffold.randomness.streams import Randomness
from dpscaffold.runs.checkpoint import Checkpoint
from dpscaffold.runs.data_key import fresh_key, identity, open_key
from dpscaffold.runs.folder import Identity, RunFolder
from dpscaffold.runs.log import RunLog
from dpscaffold.runs.written import to_toml
from dpscaffold.training.driver import CPU, Ending, RunDriver
from dpscaffold.training.evaluator import (
    DISSIMILARITY,
    OF_TRAINING,
    Evaluator,
    Measures,
    Metrics,
    evaluation_task,
)
from dpscaffold.training.events import Ended, Listener
from dpscaffold.training.optimum import Optimum
from dpscaffold.training.result import Result, summarise

#: Your own metric: the model and the evaluation data → a number, under the function's name.
OwnMetric = Callable[[Model, Federation], float]

#: What a run folder's config.toml says where nobody gave the step size.
CHOSEN = "# plan.learning_rate was chosen from public numbers: sizes, plan and noise.\n"


class RunInProgress(RunDriver):
    """One simulated run in progress."""

    def __init__(
        self,
        setting: Run,
        federation: Federation,
        hardware: Hardware,
        engine: str,
        listener: Listener,
        metrics: Sequence[str | OwnMetric] = (),
    ) -> None:
        if engine not in ENGINES:
            raise BadInput(
                "unknown-engine",
                f"engine is {engine!r}{nearest(engine, ENGINES)}; choose one of "
                f"{', '.join(ENGINES)}",
            )
        super().__init__(setting, None, listener)
        self.federation, self.hardware = federation, hardware
        self.device, self.engine_name = hardware.device, engine
        self.checkpoint_every = setting.plan.checkpoint_every
        if hardware.threads is not None and self.device.type == "cpu":
            torch.set_num_threads(hardware.threads)
        named = tuple([metric for metric in metrics if isinstance(metric, str)])
        self.measures = Measures(
            tuple(name for name in named if name not in OF_TRAINING),
            setting.task.convex or DISSIMILARITY in named,
        )
        self.optimum_loss: float | None = None
        self.own = {m.__name__: m for m in metrics if not isinstance(m, str)}
        if named:
            self.measures.chosen(federation.target)  # refuses here, not at the first evaluation
        self.stated = setting.to_dict()
        self.seed = setting.seed()
        self.log: RunLog | None = None
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
        task = evaluation_task(self.setting.task, self.device)
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
        self.accounts.reserve()

    def _begin(self, folder: RunFolder, described: Mapping[str, Any], digest: Digest) -> None:
        """Claim a folder for a new run."""
        self.accounts.check_room()
        folder.check_free()
        key = fresh_key() if self.data_key is None else open_key(self.data_key)
        data = identity(key, digest.value)
        known = Identity(data, digest.covers, self.engine_name, self.home)
        seed = None if self.accounts.run is None else self.seed
        chosen = CHOSEN if self.setting.plan.learning_rate is None else ""
        folder.begin(chosen + to_toml(described), known, self.stated, key, seed)
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
        self.pick_up(folder, data, self.seed)
        if self.saved is not None:
            self._share_out_as(self.saved)
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

    def _share_out_as(self, saved: Checkpoint) -> None:
        """Share out the work as before: it decides the last bits of sums."""
        self.hardware = replace(self.hardware, chunk=saved.chunk, threads=saved.threads)
        if self.device.type == "cpu" and saved.threads is not None:
            torch.set_num_threads(saved.threads)

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
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        what = f"device is {self.device}, and it gave up in round {self.accounts.begun} ({said})"
        return f"{what}; {self.continues}"

    @property
    def continues(self) -> str:
        """How a run that something ended goes on."""
        if self.folder is None:
            return "nothing of the run is stored: with a folder (out) it could continue"
        where = f"checkpoint of round {self.stored_round}" if self.stored_round else "beginning"
        return f"once it is back, the run continues from its {where} with --resume"

    def _go(self, optimum: Optimum | None) -> Result:
        """Run the rounds that are left."""
        self.optimum_loss = optimum.loss if optimum else None
        state, engine = self.start(), self.make_engine()
        if isinstance(engine, Simulator):
            self.hardware = replace(self.hardware, chunk=engine.chunk)
        if self.saved is not None:
            engine.memories.restore(self.saved.memories)
        with stop_signals() as stop:
            if self.folder is not None:
                self._reserve_all()
            ending = self.take_rounds(engine, state, stop)
        return self._finish(self.state, ending, optimum)

    def make_engine(self) -> Engine:
        """What gathers the rounds."""
        make = ENGINES[self.engine_name]
        return make(self.setting, self.federation, self.hardware, self.randomness)

    def is_repeated(self, done: FinishedRound, finite: bool) -> bool:
        """Whether batches of the round were cut short, so that it comes again with room for every
        record."""
        if not isinstance(self.engine, Simulator):
            return False
        # It may have had to take smaller chunks.
        self.hardware = replace(self.hardware, chunk=self.engine.chunk)
        return not finite and self.engine.cut_short()

    def _reserve_all(self) -> None:
        """Put all planned rounds into the ledger where outputs may decide how many are run."""
        if self.stopping is not None:
            self.accounts.count_rest(self.randomness)

    def evaluated(self, state: State) -> Metrics:
        """Metrics of the output, and of the last iterate too where the output is an average."""
        found = self.evaluate(state.output)
        if state.averaged:
            last = self.evaluate(state.params)
            found = found | {f"last_{key}": value for key, value in last.items()}
        return found | self._own_metrics(state)

    def _own_metrics(self, state: State) -> dict[str, float]:
        """Your own metrics, and the one that stops the run early."""
        if not self.own and self.stopping is None:
            return {}
        model = Model.of(self.federation, self.setting.task, state.output.cpu())
        found = {name: float(of(model, self.federation)) for name, of in self.own.items()}
        if self.stopping is not None:
            found["validation"] = self.stopping.value(model)
        return found

    def checkpoint(self, state: State) -> Checkpoint:
        """The state, the users' slots and how the work was shared out."""
        return Checkpoint(
            state.to(CPU),
            self.accounts.anchor,
            self.seconds,
            memories=self.engine.memories.to_dict(),
            chunk=self.hardware.chunk,
            threads=torch.get_num_threads(),
        )

    def _finish(self, state: State, ending: Ending, optimum: Optimum | None) -> Result:
        """Write what a finished (or halted) run leaves behind."""
        self._reserve_all()
        statement = self.accounts.statement()
        result = Result(
            self.setting,
            self.federation,
            self.history,
            state.output.cpu(),
            state.round,
            ending.how,
            statement,
            optimum,
            self.folder.path if self.folder else None,
            self.seconds,
            ending.message,
            self.origin,
            own=own_models(self.setting, self.engine.memories, state.output),
        )
        if self.folder:
            self.accounts.write_statement(self.folder, statement)
            model = None
            if ending.how != "interrupted":
                model = self._save_model(self.folder, result.model)
            self.folder.write_summary(summarise(result, model))
        self.tell(Ended(state.round, ending.how, ending.message))
        return result

    def _save_model(self, folder: RunFolder, model: Model) -> str:
        """Write the model; what cannot be stored (your own preparation) is said instead."""
        try:
            return str(model.save(folder.file(WITHIN)).relative_to(folder.path))
        except BadInput as problem:
            return f"not stored: {problem}"
