"""What is asked of a run, and how it begins, or goes on where its folder stands."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dpscaffold
from dpscaffold.config import Run
from dpscaffold.config.release import check_release
from dpscaffold.engine.device import CPU
from dpscaffold.engine.distributed import ALONE, Comm, refuse_differing
from dpscaffold.errors import BadInput, nearest
from dpscaffold.federation import Federation
from dpscaffold.federation.tables import Digest
from dpscaffold.models.model import Model
from dpscaffold.models.trained import Origin
from dpscaffold.privacy.seeds import Seed
from dpscaffold.runs.account import AnyAccount, account_of
from dpscaffold.runs.checkpoint import Checkpoint
from dpscaffold.runs.folder import Identity, RunFolder
from dpscaffold.runs.history import HistoryRow
from dpscaffold.runs.secret import Secret, fresh_key, open_key
from dpscaffold.runs.written import plain, to_toml
from dpscaffold.training.evaluator import OPTIMUM, Measures
from dpscaffold.training.optimum import require_convex
from dpscaffold.training.stopping import Stopping
from dpscaffold.training.training import OnRound, ignore, pick_up

#: The engines by name.
ENGINES = ("simulator", "loop")

#: Your own metric: the model and the evaluation data → a number, under the function's name.
OwnMetric = Callable[[Model, Federation], float]

#: What a run folder's config.toml says where nobody gave the step size.
CHOSEN = "# plan.learning_rate was chosen from public numbers: sizes, plan and noise.\n"


@dataclass(frozen=True)
class Asked:
    """What is asked of a run, checked: what runs, on which records and processes, and where it is
    kept.

    Args:
        run: Plan, mechanism, task and algorithm.
        federation: The records.
        device: Where this process computes.
        chunk: How many users are computed at once; None chooses it.
        engine: ``"simulator"`` or ``"loop"``.
        out: The run folder; None stores nothing.
        resume: Whether a run in that folder is continued.
        tables: What the folder's ``config.toml`` will say.
        home: The folder of the configuration, where it names files of a user's own.
        metrics: Names, or functions of the model and the federation.
        stopping: Ends the run early.
        data_key: The file with the key of the records' identity.
        on_round: Called after every round with its row.
        progress: Whether a live line is shown.
        comm: The processes that share the run.
    """

    run: Run
    federation: Federation
    device: torch.device = CPU
    chunk: int | None = None
    engine: str = "simulator"
    out: Path | None = None
    resume: bool = False
    tables: Mapping[str, Any] = field(default_factory=dict)
    home: str | None = None
    metrics: tuple[str | OwnMetric, ...] = ()
    stopping: Stopping | None = None
    data_key: Path | None = None
    on_round: OnRound = ignore
    progress: bool = False
    comm: Comm = ALONE

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise BadInput(
                "unknown-engine",
                f"engine is {self.engine!r}{nearest(self.engine, ENGINES)}; choose one of "
                f"{', '.join(ENGINES)}",
            )
        if self.out is None:
            self._refuse_without_folder()
        check_release(self.run, self.federation)
        if OPTIMUM in self.named:
            require_convex(self.run.task)
        self.measures.chosen(self.federation.target)  # refuses here, not at the first evaluation
        if self.stopping is not None:  # rows that do not fit are refused before the first round
            first = self.run.task.initial(self.run.plan.public_seed)
            self.stopping.value(Model.of(self.federation, self.run.task, first))

    def _refuse_without_folder(self) -> None:
        """Refuse what only a run folder can keep."""
        privacy = self.run.privacy
        file = None if privacy is None else privacy.budget_file
        reasons = {
            "resume is asked for": self.resume,
            f"data_key is {self.data_key}": self.data_key is not None,
            "a release is asked for": self.releases,
            f"privacy.budget_file is '{file}'": file is not None,
        }
        for reason in [reason for reason, given in reasons.items() if given]:
            raise BadInput(
                "no-run-folder",
                f"{reason} without a run folder, which keeps the run's ledger and its privacy "
                f"statement; name one with out (--out), such as out='runs/first'",
            )

    @property
    def releases(self) -> bool:
        """Whether the model is meant for release."""
        return self.run.privacy is not None and self.run.privacy.allowed is not None

    @property
    def named(self) -> tuple[str, ...]:
        """The metrics that have names."""
        return tuple(metric for metric in self.metrics if isinstance(metric, str))

    @property
    def measures(self) -> Measures:
        """What the evaluator measures."""
        return Measures.of(self.named, self.run.task)

    @property
    def origin(self) -> Origin:
        """Where the model will come from; several labels are found by their names."""
        columns = self.tables.get("data", {})
        label = columns.get("label")
        label = label if isinstance(label, str) else None
        return Origin(self.run.label, self.federation.title, label=label, site=columns.get("user"))


@dataclass(frozen=True)
class Begun:
    """A run whose folder is claimed and whose ledger is open: what it draws from, and where it
    goes on."""

    account: AnyAccount
    seed: Seed
    folder: RunFolder | None = None
    saved: Checkpoint | None = None
    history: Sequence[HistoryRow] = ()


@contextmanager
def begun(asked: Asked) -> Iterator[Begun]:
    """Claim the run's folder, or pick up the run that it holds; other processes are kept out until
    the end. Of several that share the run the first alone has its folder and its ledger."""
    account = account_of(asked.run)
    if asked.comm.rank > 0:
        yield Begun(account, asked.run.seed())
        return
    if asked.out is None:
        account.check_room()
        yield Begun(account, asked.run.seed())
        return
    folder, digest = RunFolder(asked.out), asked.federation.digest()
    open_ = _reopened if asked.resume and folder.holds_run else _opened
    try:
        yield open_(asked, account, folder, digest)
    finally:
        folder.release()


def _opened(asked: Asked, account: AnyAccount, folder: RunFolder, digest: Digest) -> Begun:
    """Claim a folder for a new run."""
    account.check_room()
    folder.check_free()
    key = fresh_key() if asked.data_key is None else open_key(asked.data_key)
    seed = asked.run.seed()
    secret = Secret(key, None if account.run is None else seed)
    known = _identity(asked, secret, digest)
    chosen = CHOSEN if asked.run.plan.learning_rate is None else ""
    folder.begin(chosen + to_toml(asked.tables), known, secret)
    account.attach(folder, known.data, seed)
    return Begun(account, seed, folder)


def _reopened(asked: Asked, account: AnyAccount, folder: RunFolder, digest: Digest) -> Begun:
    """Continue the run of a folder, if it is the same run."""
    folder.lock()
    secret = folder.secret(private=account.run is not None)
    if asked.data_key is not None and not secret.is_of(asked.data_key):
        raise BadInput(
            "data-key-changed",
            f"--data-key is {asked.data_key}, and the run in {folder.path} began with another key; "
            f"leave it out to resume",
        )
    known = _identity(asked, secret, digest)
    folder.check_same(known, asked.tables)
    seed = secret.seed or asked.run.seed()
    saved, history = pick_up(folder, account, known.data, seed)
    if folder.plan["rounds"] != asked.run.plan.rounds:
        folder.replan(to_toml(asked.tables), known)
    return Begun(account, seed, folder, saved, history)


def _identity(asked: Asked, secret: Secret, digest: Digest) -> Identity:
    """What the run is, on these records."""
    data = secret.identity(digest.value)
    return Identity(asked.run.to_dict(), asked.engine, data, digest.covers, asked.home)


def check_same(asked: Asked) -> None:
    """Refuse processes that do not run the same thing together."""
    comm, federation = asked.comm, asked.federation
    if comm.count == 1:
        return
    if asked.engine != "simulator":
        raise BadInput(
            "not-applicable",
            f"engine is {asked.engine!r}, and only the simulator runs on several ranks; leave it "
            f"out, or use one process",
        )
    if comm.count > asked.run.users:
        raise BadInput(
            "too-many-ranks",
            f"{comm.count} ranks were started for {asked.run.users} users; start at most one rank "
            f"for each user",
        )
    versions = {
        "version of dpscaffold": dpscaffold.__version__,
        "version of PyTorch": torch.__version__.partition("+")[0],
        "version of NumPy": np.__version__,
    }
    names = [one if isinstance(one, str) else one.__name__ for one in asked.metrics]
    compared = [plain(asked.run.to_dict()), names, federation.declared_sizes]
    said = json.dumps(compared, sort_keys=True, default=repr)
    facts = {
        **versions,
        "configuration": hashlib.sha256(said.encode()).hexdigest(),
        "data": federation.digest().value,
    }
    refuse_differing(comm, facts, frozenset(versions))
