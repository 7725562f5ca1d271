"""What tests of laws ask of the product, in words that no rewrite of it changes.

Suites that state what must hold whatever the inside looks like (privacy, crashes, clipping,
conformance) reach the product through this file alone, so that when an internal name moves, only
this file follows. It translates and computes nothing of its own.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from oracle import renyi
from small import (
    CPU,
    ENGINES,
    EQUAL,
    EVERY,
    PLAN,
    PRIVACIES,
    TASKS,
    UNEQUAL,
    WAYS,
    Driven,
    Reached,
    Trial,
    assert_agree,
    assert_identical,
    federation,
    final,
    setting,
    simulator,
    uploads,
)
from torch import Tensor

from dpscaffold import (
    BadInput,
    Gaussian,
    Logistic,
    Plan,
    Task,
    fedavg,
    load_model,
    state,
    synthetic,
    train,
)
from dpscaffold.algorithms import Upload
from dpscaffold.cli import app, main
from dpscaffold.data.sources.catalogue import CATALOGUE, Dataset, Published
from dpscaffold.data.storage import load
from dpscaffold.engine import Draw, Engine, State
from dpscaffold.engine.oracle import OneByOne
from dpscaffold.engine.query import Numbers, query_of_step
from dpscaffold.models.export import FORMATS as EXPORT_FORMATS
from dpscaffold.paper.formula import most_rounds, published
from dpscaffold.privacy import Ledger, Mechanism, SecureSums, Statement, adversaries, describe
from dpscaffold.privacy import epsilon as epsilon_against
from dpscaffold.randomness.streams import Randomness
from dpscaffold.runs.budget_file import BudgetFile
from dpscaffold.runs.folder import RunFolder
from dpscaffold.runs.ledger import read_account
from dpscaffold.tasks import Batch, ClippedSum
from dpscaffold.tasks.base import clip_factors
from dpscaffold.tasks.clipping import LayerOuter, clip_outer, clip_unseen, row_squares

__all__ = [
    "EDITS",
    "ENGINES",
    "EQUAL",
    "EVERY",
    "EXPORT_FORMATS",
    "PLAN",
    "PRIVACIES",
    "TASKS",
    "UNEQUAL",
    "WAYS",
    "ClippedSum",
    "Upload",
    "app",
    "assert_agree",
    "assert_identical",
    "federation",
    "final",
    "row_squares",
    "setting",
    "uploads",
]


class Refused(BadInput):
    """Something that has no answer, with the code of the refusal."""


@contextmanager
def _refusing() -> Iterator[None]:
    """Whatever refuses inside, it is one kind of refusal outside."""
    try:
        yield
    except BadInput as reason:
        raise Refused(reason.code, str(reason)) from reason


# --- accounting ---------------------------------------------------------------------------------

View = Literal["server", "third_party", "participant"]


def _mechanism(
    *,
    users: int,
    cohort: int,
    rounds: int,
    local_steps: int,
    size: int | Sequence[int],
    batch: int | Sequence[int],
    noise: float,
    delta: float,
    clip: float | Literal["median"] = 1.0,
    sampling: Literal["fixed", "poisson"] = "fixed",
    unit: Literal["record", "user"] = "record",
    memory: bool = True,
    linear: bool | None = None,
    weighting: Literal["uniform", "records"] = "uniform",
    declines: bool = False,
    secure: tuple[int, int] | None = None,
    extra: int = 0,
    louder: Sequence[float] | None = None,
) -> Mechanism:
    """T rounds of K noised steps, in each of which m of M users take part.

    Args:
        users: M.
        cohort: m.
        rounds: T.
        local_steps: K.
        size: R_i, one number or one per user.
        batch: b_i, likewise.
        noise: σ_g.
        delta: δ.
        clip: C.
        sampling: How a batch is drawn.
        unit: What is protected.
        memory: Whether users keep something between rounds, as in SCAFFOLD.
        linear: Whether an upload is one vector that is linear in the noised gradient; by default
            what is true of an algorithm with memory or without.
        weighting: Of the mean over participants.
        declines: Whether a drawn user may stay away.
        secure: Colluders and the shortest list, where the server sees only sums.
        extra: How many attempts there were beyond the rounds.
        louder: σ_i over σ_g for each user.
    """
    return describe(
        rounds=rounds,
        local_steps=local_steps,
        users=users,
        cohort_size=cohort,
        records=size,
        batch_sizes=batch,
        noise=noise,
        clip=clip,
        sampling=sampling,
        unit=unit,
        memory=memory,
        one_sum=not memory if linear is None else linear,
        weighting=weighting,
        delta=delta,
        declines="users may stay away" if declines else None,
        secure=None if secure is None else SecureSums(*secure),
        extra=extra,
        louder=louder,
    )


def epsilon(view: View, *, colluders: int = 1, **numbers: Any) -> float:
    """ε towards an adversary over the draw of participants, before it is rounded for people.

    Args:
        view: Who tries to find out: the server, whoever is given the model, or participants.
        colluders: How many participants pool what they know.
        numbers: What is run, as in :func:`_mechanism`.
    """
    with _refusing():
        run = _mechanism(**numbers)
        return epsilon_against(run, adversaries(run, colluders)[view])


def epsilon_given(took_part: Sequence[Sequence[int]], **numbers: Any) -> dict[int, float]:
    """ε of each user who took part, given who took part in each round."""
    with _refusing():
        ledger = Ledger(_mechanism(**numbers))
        for round, cohort in enumerate(took_part, 1):
            ledger.record(round, cohort)
        users = Counter(user for cohort in took_part for user in cohort)
        found = {user: ledger.of(user) for user in users}
        assert ledger.largest() == max(found.values(), default=0.0)
        return found


def published_epsilon(**numbers: Any) -> float:
    """The number that the paper prints, which is no theorem for every loss."""
    with _refusing():
        return published(_mechanism(**numbers))


def published_rounds(epsilon: float, **numbers: Any) -> int:
    """The largest T for which the paper's number is at most ε."""
    with _refusing():
        return most_rounds(_mechanism(**numbers), epsilon)


def renyi_epsilon(**numbers: Any) -> float:
    """ε over the draw by Rényi divergences: looser, and computed by other means."""
    return renyi.renyi_epsilon(_mechanism(**numbers))


# --- runs ---------------------------------------------------------------------------------------

#: A run with secret noise, one to publish, and a simulation whose noise comes from its seed.
RunKind = Literal["secret", "release", "seeded"]
KINDS: dict[str, dict[str, bool]] = {
    "secret": {"secret": True},
    "release": {"release": True},
    "seeded": {},
}

DATA = synthetic(users=4, records=13, dimension=2, classes=2)


def make(
    folder: Path,
    kind: RunKind,
    *,
    rounds: int,
    local_steps: int,
    user_ratio: float,
    noise: float,
    seed: int | None = None,
    checkpoint_every: int = 2,
    budget: Path | None = None,
) -> None:
    """Start a run of four users in a folder, or go on with it; every step takes all records.

    Args:
        folder: The run folder.
        kind: Who knows the noise.
        rounds: T; more than a finished run has gives it more rounds.
        local_steps: K.
        user_ratio: l.
        noise: σ_g.
        seed: Who decides on the draw: somebody with a seed, or nobody.
        checkpoint_every: The rounds between two states from which a run can go on.
        budget: A budget file that the run shares with others.
    """
    plan = Plan(
        rounds=rounds,
        local_steps=local_steps,
        user_ratio=user_ratio,
        data_ratio=1.0,
        learning_rate=0.5,
        seed=seed,
        checkpoint_every=checkpoint_every,
        evaluate_every=100,
    )
    with _refusing():
        train(
            DATA,
            Logistic(2, 2),
            fedavg(),
            plan,
            Gaussian(clip=1.0, noise=noise, budget_file=budget, **KINDS[kind]),
            out=folder,
            resume=True,
        )


@contextmanager
def watched(
    before: Callable[[int], None], after: Callable[[int, tuple[int, ...]], None]
) -> Iterator[None]:
    """``before(round)`` is called when the users of a round are about to compute, and
    ``after(round, users)`` when their uploads have left. Either may raise: the run dies there."""
    real = Engine.round

    def round(self: Engine, state: State, draws: Any, count: Any = None) -> Any:
        before(state.round + 1)
        found = real(self, state, draws)
        after(state.round + 1, tuple(map(int, draws[0].active)))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "round", round)
        yield


@dataclass(frozen=True)
class Stated:
    """What is said of the privacy of a run or of several: ε towards each view over the draw, and
    given who took part under ``"given"``; None where nothing is guaranteed. ``quoted`` is the ε to
    quote."""

    guarantee: bool
    simulated: bool
    delta: float
    epsilon: dict[str, float | None]
    quoted: float | None
    quotes_given: bool


def _stated(said: Statement) -> Stated:
    views: dict[str, float | None] = {
        view: said.towards(view).epsilon for view in ("server", "third_party", "participant")
    }
    given = said.towards("server").given
    quoted = said.epsilon
    return Stated(
        said.guarantee,
        said.seeded,
        said.delta or 0.0,
        {**views, "given": given},
        quoted,
        said.quotes_given,
    )


def spent(folder: Path) -> Stated:
    """What a run folder states to anybody who reads it."""
    with _refusing():
        return _stated(read_account(folder).statement())


def spent_together(folders: Sequence[Path], fixed_in_advance: bool) -> Stated:
    """What several runs on the same records state together."""
    with _refusing():
        return _stated(state(*folders, fixed_in_advance=fixed_in_advance))


def open_budget(path: Path, epsilon: float, delta: float) -> None:
    """A file in which several runs on the same records enter what they spend."""
    BudgetFile.open(path, epsilon=epsilon, delta=delta)


def budget_spent(path: Path) -> tuple[float, float]:
    """ε and δ of all that was entered in a budget file."""
    return BudgetFile(path).read().spent


def has_journal(folder: Path) -> bool:
    """Whether a run folder says yet who took part."""
    return (folder / "ledger.jsonl").exists()


#: What a careless or dishonest person does to a run folder.
EDITS = ("claim", "claim release", "config", "cut", "remove")


def edit_run(folder: Path, edit: str, amount: int) -> None:
    """Take the configuration out of a run folder, claim in it that the run was secret or released,
    cut lines off the journal's end, or remove the file of this number."""
    config, journal = folder / "config.toml", folder / "ledger.jsonl"
    if edit == "config":
        config.unlink()
    elif edit == "cut":
        lines = journal.read_text().splitlines(keepends=True)
        journal.write_text("".join(lines[: max(1, len(lines) - amount)]))
    elif edit == "remove":
        files = sorted(path for path in folder.iterdir() if path.is_file())
        files[amount % len(files)].unlink()
    elif config.exists():
        key = "release" if edit == "claim release" else "secret"
        config.write_text(_claiming(config.read_text(), key))


def _claiming(text: str, key: str) -> str:
    """The configuration with a key of its privacy set to true."""
    kept = [line for line in text.splitlines() if not line.startswith(f"{key} =")]
    if "[privacy]" not in kept:
        kept.append("[privacy]")
    kept.insert(kept.index("[privacy]") + 1, f"{key} = true")
    return "\n".join(kept) + "\n"


def is_readable(folder: Path) -> bool:
    """Whether a run folder is so far that somebody can ask what it states."""
    return (folder / "ledger.head").exists() and b"\n" in (folder / "ledger.jsonl").read_bytes()


def is_complete(folder: Path) -> bool:
    """Whether the statement of a run folder is written."""
    return (folder / "model" / "privacy.json").exists()


def has_model(folder: Path) -> bool:
    """Whether a finished run has its model, which must load, and says so."""
    load_model(folder)
    return RunFolder(folder).summary().model == "model"


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics."""
    return [dict(row) for row in RunFolder(folder).metrics()]


def times_released(folder: Path) -> Counter[int]:
    """How often each round was released, read off the journal with nothing but json."""
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    return Counter(line["round"] for line in lines if "round" in line)


def budget_total(path: Path) -> tuple[float, float]:
    """ε and δ that a budget file was opened with."""
    contents = BudgetFile(path).read()
    return contents.epsilon, contents.delta


@dataclass(frozen=True)
class Written:
    """A statement as a file or the command line gives it."""

    text: dict[str, Any]

    @property
    def rounds(self) -> int:
        """How many rounds it counts."""
        return sum(part["rounds"] for part in self.text["parts"])

    @property
    def server(self) -> float:
        """ε towards the server over the draw."""
        return self._server["epsilon"]

    @property
    def given(self) -> float:
        """ε given who took part."""
        return self._server["given"]

    @property
    def _server(self) -> dict[str, Any]:
        """What is promised towards the server."""
        return next(one for one in self.text["guarantees"] if one["adversary"] == "server")

    @property
    def planned(self) -> float:
        """ε towards the server of the whole plan."""
        runs = (Mechanism.from_json(part["mechanism"], "a file") for part in self.text["parts"])
        return sum(_epsilon(replace(run, extra=0)) for run in runs)

    @property
    def without_journal(self) -> dict[str, Any]:
        """All but where the journal stood, which has a secret of its own."""
        return {key: value for key, value in self.text.items() if key != "journal"}


def written(folder: Path) -> Written:
    """The statement that a run left in its folder."""
    return Written(state(folder).to_json())


def read_statement(text: str) -> Written:
    """A statement in JSON."""
    return Written(json.loads(text))


def epsilon_of(stated: Written, rounds: int, repeats: Sequence[int]) -> float:
    """ε towards the server of so many rounds of what a statement describes."""
    run = Mechanism.from_json(stated.text["parts"][0]["mechanism"], "a file")
    return _epsilon(replace(run, extra=sum(repeats)), rounds)


def _epsilon(run: Mechanism, rounds: int | None = None) -> float:
    return epsilon_against(run, adversaries(run)["server"], rounds)


def after_metrics(noticed: Callable[[dict[str, object]], None]) -> None:
    """Call this with every row of metrics once it is written; there is no way back."""
    real = RunFolder.append_metrics

    def append(self: RunFolder, row: dict[str, object]) -> None:
        real(self, row)
        noticed(row)

    RunFolder.append_metrics = append  # type: ignore[method-assign]


#: Mistakes that are planted in a process of its own before it starts, as its ``sitecustomize``.
BROKEN = {
    "a journal that forgets a round": """
import dpscaffold.runs.journal as journal
import dpscaffold.runs.account as accounts
def forgetful(self, line, real=journal.Journal.append):
    if line.get('round') != 3:
        real(self, line)
journal.Journal.append = forgetful
""",
    "a configuration that is written first": """
import dpscaffold.runs.folder as runfolder
def early(self, config, identity, secret=None, real=runfolder.RunFolder.begin):
    self.path.mkdir(parents=True, exist_ok=True)
    real(self, config, identity, secret)
    text = self.file("secret.json").read_text()
    self.file("secret.json").unlink()
    self.write_text("secret.json", text)
runfolder.RunFolder.begin = early
""",
}


# --- commands and files -------------------------------------------------------------------------

#: What commands import when they need it.
_LATE = (
    "data.loading",
    "data.drafts.profile",
    "models.export",
    "paper.reproduce",
    "models.predict",
    "deployment.provision.invitations",
    "report.story",
    "training.train",
    "cli.audit",
    "cli.demo",
    "cli.train",
    "cli.tune",
)


def import_all() -> None:
    """Import whatever a command may need, so that a fork of this process needs no more."""
    for name in _LATE:
        importlib.import_module(f"dpscaffold.{name}")


def command(words: Sequence[str]) -> int:
    """Run a command in this process; its exit status."""
    sys.argv = ["dpscaffold", *words]
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def digest_of(folder: Path) -> str:
    """The digest of a stored federation, all of which must load."""
    return load(folder).digest().value


def publish(name: str, contents: dict[str, bytes]) -> None:
    """Enter a dataset of these files in the catalogue of what can be downloaded."""
    files = tuple(
        Published(file, len(content), hashlib.md5(content).hexdigest())
        for file, content in contents.items()
    )
    CATALOGUE[name] = Dataset(name, "for the campaign", files)


# --- clipping -----------------------------------------------------------------------------------


def clipped_sums(
    task: Task, params: Tensor, x: Tensor, y: Tensor, clip: Any, weight: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The clipped sum of each user, (U, P), of records (U, n, D), and the bounds used.

    Args:
        task: The task.
        params: Where gradients are taken, (U, P).
        x: Features as a table holds them.
        y: Labels, (U, n).
        clip: C of each user, (U,), ``"median"``, or None for no clipping.
        weight: 1 for a record, 0 for padding, (U, n).
    """
    found = task.clipped_sum(params, Batch(task.prepare(x), y, weight), clip)
    return found.total, found.bound


def released(
    engine: str,
    task: Task,
    privacy: Gaussian,
    params: Tensor,
    x: Tensor,
    y: Tensor,
    divisor: int,
    classes: int,
) -> Tensor:
    """H of one batch on either engine's path, the noise being zero."""
    query, draws = query_of_step(privacy.step), torch.zeros(1, task.parameters)
    column = torch.ones(1, 1)
    clip = column if privacy.clip == "median" else column * float(privacy.clip)
    numbers = Numbers(
        column, column, column * divisor, column, clip, column * privacy.noise, column * 0, 1
    )
    batch = Batch(task.prepare(x)[None], y[None])
    return query(_ways(task)[engine], params[None], batch, numbers, draws)[0]


def _ways(task: Task) -> dict[str, Any]:
    """The clipped sums of each engine."""
    return {"loop": OneByOne(task), "simulator": task}


def mean_of(
    gradients: Tensor, task: Task, privacy: Gaussian, dimension: int, classes: int
) -> Tensor:
    """What the readable engine makes of these gradients, (n, P), with no noise and divisor 1."""

    class Given(OneByOne):
        def gradients(self, *records: Any) -> Tensor:
            return gradients

    column, nothing = torch.ones(1, 1), torch.zeros(1, gradients.shape[1])
    clip = column if privacy.clip == "median" else column * float(privacy.clip)
    numbers = Numbers(column, column, column, column, clip, column * 0, column * 0, 1)
    batch = Batch(torch.zeros(1, len(gradients), dimension), torch.zeros(1, len(gradients)))
    return query_of_step(privacy.step)(Given(task), nothing, batch, numbers, nothing)[0]


def clipped_products(
    left: Tensor,
    right: Tensor,
    clip: Tensor,
    *,
    bias: bool = False,
    weight: Tensor | None = None,
    looks: bool = True,
    known: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The sums of clipped gradients of a linear layer, and what became of the errors.

    Record n of user s has the gradient left[s, :, n]·right[s, :, n]ᵀ, with a column of its own for
    the bias. ``looks`` says that the form may look whether numbers are ordinary, as on a CPU;
    ``known`` are squared norms of ordinary rows, which then need no care.
    """
    part = LayerOuter(left.clone(), right.clone(), known, bias=bias, tame=known is not None)
    (clip_outer if looks else clip_unseen)([part], weight, clip)
    return part.total(), part.left


def clip_factor(norms: Tensor, clip: Tensor) -> Tensor:
    """What gradients of these norms, (users, n), are multiplied by."""
    return clip_factors(norms, None, clip)[0]


# --- engines ------------------------------------------------------------------------------------
# Federations, settings, and every way of taking a run to its end are those of tests/small.py.


def changed(run: Trial, **parts: Any) -> Trial:
    """The same run with another ``algorithm``, ``task`` or ``privacy``, or other keys of the
    plan."""
    own = {name: parts.pop(name) for name in ("algorithm", "task", "privacy") if name in parts}
    return replace(run, plan=run.plan.changed(**parts), **own)


def step_size(run: Trial) -> float:
    """η_l of a local step."""
    return run.plan.step_size


def server_at_start(run: Trial) -> Any:
    """x⁰ and what the server keeps besides it, as an algorithm's ``update`` takes it."""
    return State.initial(run, CPU).server


@dataclass(frozen=True)
class Draws:
    """What chance decides in a run, read off its streams."""

    run: Trial

    def members(self, round: int) -> np.ndarray:
        """The users who take part in a round."""
        return self.run.randomness().cohort(round, self.run.users, self.run.cohort_size)

    def batches(
        self, round: int, user: int, size: int, batch: int, steps: int, sampling: str
    ) -> list[np.ndarray]:
        """The records of each local step."""
        drawn = self.run.randomness().batches(round, user, size, batch, steps, sampling)
        return [drawn.of(step) for step in range(steps)]

    def noise(self, round: int, user: int, size: int) -> Callable[[], np.ndarray]:
        """The next standard normal vector of a user, from call to call."""
        stream = self.run.randomness().normals(round, user)
        return lambda: stream.standard_normal(size, dtype="float32")


class Recorder(Randomness):
    """Streams that remember what they gave, by (round, user)."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.given: dict[tuple[str, int, int], np.ndarray] = {}

    def batches(self, round: int, user: int, *law: Any, **more: Any) -> Any:
        """The real batches, remembered without their padding."""
        drawn = super().batches(round, user, *law, **more)
        assert ("batches", round, user) not in self.given, (
            "a user's batches were drawn twice in a round"
        )
        self.given["batches", round, user] = np.concatenate(
            [drawn.of(k) for k in range(len(drawn.count))]
        )
        return drawn

    def normals(self, round: int, user: int) -> np.random.Generator:
        """The real stream; its first numbers are remembered."""
        assert ("noise", round, user) not in self.given, "a user's noise was drawn twice in a round"
        self.given["noise", round, user] = super().normals(round, user).standard_normal(8)
        return super().normals(round, user)


def drawn_by(engine: str, run: Trial) -> dict[tuple[str, int, int], np.ndarray]:
    """All batches (``"batches"``) and the first numbers of all noise (``"noise"``) that a run asked
    for, by round and user; nothing may be drawn twice."""
    recorder = Recorder(run.plan.public_seed)
    final(engine, run, recorder)
    return recorder.given


@contextmanager
def counted_batches(trials: int) -> Iterator[dict[int, tuple[int, int]]]:
    """How many records would be drawn of how many in this many steps, by user, at the sizes with
    which the runs inside draw theirs."""
    counts: dict[int, tuple[int, int]] = {}
    real = Randomness.batches

    def batches(
        self: Randomness,
        round: int,
        user: int,
        records: int,
        batch: int,
        steps: int,
        sampling: Any,
        out: Any = None,
        declared: int | None = None,
    ) -> Any:
        many = real(self, round, user, records, batch, trials, sampling, None, declared)
        counts[user] = (int(many.count.sum()), records * trials)
        return real(self, round, user, records, batch, steps, sampling, out, declared)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Randomness, "batches", batches)
        yield counts


@dataclass(frozen=True)
class Round:
    """A finished round: who came, the mean move, the totals of what else was sent, and where the
    server is now."""

    number: int
    arrived: tuple[int, ...]
    move: Tensor
    totals: dict[str, Tensor]
    params: Tensor
    largest_drift: float | None


class Drive:
    """One run on an engine, round by round."""

    def __init__(self, engine: str, run: Trial) -> None:
        self._driven = WAYS[engine](run)
        self._users = range(run.users)

    def round_of(self, drawn: Sequence[int], active: Sequence[int] | None = None) -> Round:
        """The next round with these participants, of whom only ``active`` ones do anything."""
        everybody = np.array(drawn, dtype=np.int64)
        there = everybody if active is None else np.array(active, dtype=np.int64)
        done = self._driven.rounds(Draw(everybody, there))
        mean = done.uploads[0].mean
        return Round(
            done.state.round,
            tuple(done.arrived),
            mean.params,
            dict(mean.totals),
            done.state.params.cpu(),
            done.metrics.get("largest_drift"),
        )

    def drive(self, rounds: int | None = None) -> Drive:
        """All rounds of the run, or up to one of them."""
        self._driven.drive(rounds)
        return self

    def remember(self, value: float) -> None:
        """Put this number into everything that every user remembers."""
        memories = self._driven.engine.memories
        slots = memories.recall(self._users)
        memories.keep(self._users, {n: torch.full_like(v, value) for n, v in slots.items()})

    def checkpoint(self) -> Any:
        """What a checkpoint would hold."""
        return copy.deepcopy((self._driven.state.to_dict(), self._driven.engine.memories.to_dict()))

    def restore(self, saved: Any) -> None:
        """Go back to a checkpoint."""
        state, memories = saved
        self._driven.state = State.from_dict(state).to(self._driven.engine.device)
        self._driven.engine.memories.restore(memories)

    @property
    def reached(self) -> Reached:
        """Where the run stands."""
        return self._driven.reached


class Stack:
    """Several runs on the fast engine at once; those that cannot run alike are refused."""

    def __init__(self, runs: Sequence[Trial], chunk: int | None = None) -> None:
        self._driven = Driven(simulator(runs, chunk=chunk))

    def drive(self, rounds: int | None = None) -> list[Reached]:
        """Where every run stands after all rounds, or so many."""
        return self._driven.drive(rounds).all_reached


def keeps_records(way: str, run: Trial) -> bool:
    """Whether all records are at hand from the first round on."""
    return bool(WAYS[way](run).engine.store.resident)


def hand_out_draws_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU takes the draws that a CPU makes, so that both take the same steps."""
    monkeypatch.setattr(Engine, "draws_on_device", False)
