"""Auditing with one training run, on the real data (Steinke, Nasr, Jagielski 2023).

Some records of the federation become canaries. For each a coin decides which of its two forms is
in the data; the run goes its way, and the adversary guesses the coins from what the server sees.
The guesses of many canaries in one run are not independent, and the theorem does not need it.

The other records are trained on as they are, so this is a private run over them like any other: it
has a run folder with a ledger and a statement, keeps the limits of its setting, and takes its grant
from the budget file before it begins.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dpscaffold.algorithms import Participant, Slots, Upload
from dpscaffold.audit.limits import one_run_epsilon
from dpscaffold.audit.subject import AuditedRun
from dpscaffold.config import Run
from dpscaffold.engine import Engine, State
from dpscaffold.engine.aggregate import Averaged
from dpscaffold.engine.steps import Drawn, Participation
from dpscaffold.errors import BadInput
from dpscaffold.federation import Federation, Records
from dpscaffold.privacy import SERVER, Mechanism, epsilon
from dpscaffold.privacy.numbers import digits_up, round_up
from dpscaffold.randomness.streams import Randomness
from dpscaffold.runs.account import AnyAccount, account_of
from dpscaffold.runs.folder import RunFolder
from dpscaffold.tasks import Batch
from dpscaffold.tasks.clipping import row_squares
from dpscaffold.training.opening import Asked, Begun, begun


@dataclass(frozen=True)
class RealRunCost:
    """What the run took from the privacy of the real records, as its folder states it."""

    folder: str
    epsilon: float
    delta: float
    towards: str
    simulated: bool
    budget_file: str | None

    @property
    def sentence(self) -> str:
        """For people."""
        who = "the server" if self.towards == "server" else self.towards
        said = (
            f"The one run trained on the real records and spent epsilon = "
            f"{round_up(self.epsilon)} towards {who}, at delta = {digits_up(self.delta)}; its "
            f"ledger is in {self.folder}."
        )
        if self.simulated:
            said += " It is a simulation: with secret noise it would have spent that much."
        if self.budget_file is not None:
            said += f" All its planned rounds are recorded in {self.budget_file}."
        return said


@dataclass(frozen=True)
class OneRun:
    """What one run proves: of ``canaries`` coins, ``guesses`` were guessed, ``right`` rightly.
    ``spent`` is what it cost."""

    canaries: int
    guesses: int
    right: int
    rounds: int
    claimed: float
    proved: float
    delta: float
    confidence: float
    spent: RealRunCost

    @property
    def ratio(self) -> float:
        """The proved part of the claim."""
        return self.proved / self.claimed if self.claimed > 0 else float(self.proved > 0)

    @property
    def beaten(self) -> bool:
        """Whether the claim is refuted."""
        return self.proved > self.claimed


@dataclass(frozen=True)
class Canaries:
    """Where the canaries are and what they look like: rows of the training table, their users,
    raw features (m, d), and the labels of both forms (m,). ``present`` are the coins."""

    rows: Tensor
    users: Tensor
    features: Tensor
    labels: tuple[Tensor, Tensor]
    present: Tensor


def refuse_unfit(data: Federation) -> None:
    """Refuse data that have no place for canaries."""
    if data.target.kind != "class":
        raise BadInput(
            "wrong-target",
            f"--one-run needs a target of classes, and this one is {data.target}; leave it out",
        )
    if data.mapped:
        raise BadInput(
            "data-not-in-memory",
            "--one-run needs data in memory, and these were stored by 'dpscaffold data prepare'; "
            "name their source in [data]",
        )
    if not bool((data.train.sizes >= 2).any()):
        raise BadInput(
            "too-few-records", "--one-run finds no user with two records to make a canary of one"
        )


def place(
    setting: Run, data: Federation, count: int, rng: np.random.Generator
) -> tuple[Federation, Canaries]:
    """The federation with some of its records turned into canaries, at most half of each user's.

    Under replace-one the two forms differ in their label, under zero-out one of them is empty.
    """
    refuse_unfit(data)
    sizes, offsets = data.train.sizes, data.train.offsets
    each = torch.clamp(sizes // 2, max=max(1, -(-count // data.users)))
    chosen = [
        int(offsets[user]) + rng.choice(int(sizes[user]), int(each[user]), replace=False)
        for user in range(data.users)
    ]
    rows = torch.tensor(np.concatenate(chosen))
    users = torch.repeat_interleave(torch.arange(data.users), each)
    kept = torch.tensor(rng.permutation(len(rows))[:count])
    rows, users = rows[kept], users[kept]
    directions = torch.tensor(rng.standard_normal((len(rows), data.dimension)), dtype=torch.float32)
    clip = float(setting.privacy.clip) if setting.privacy else 1.0
    features = 16 * clip * directions / directions.norm(dim=1, keepdim=True)
    low = torch.tensor(rng.integers(0, data.classes, len(rows)))
    high = (low + 1) % data.classes
    present = torch.tensor(rng.integers(0, 2, len(rows)), dtype=torch.bool)
    table, labels = data.train.features.clone(), data.train.labels.clone()
    table[rows], labels[rows] = features, torch.where(present, low, high)
    if setting.sampling == "poisson":
        labels[rows] = low
        table[rows[~present]] = float("nan")  # an empty record adds exactly nothing
    changed = replace(data, train=Records(table, labels, data.train.offsets))
    return changed, Canaries(rows, users, features, (low, high), present)


class _Scored(Averaged):
    """The law of an engine, with every upload held against the canaries of its user."""

    def __init__(self, run: Run, data: Federation, canaries: Canaries) -> None:
        super().__init__([run])
        self.run, self.data, self.canaries = run, data, canaries
        self.scores = torch.zeros(len(canaries.rows))
        order = canaries.users.tolist()
        self.held = {
            user: torch.tensor([k for k, u in enumerate(order) if u == user]) for user in set(order)
        }

    def participate(
        self, of: Participation, drawn: Drawn, users: Mapping[int, Sequence[int]]
    ) -> tuple[Upload, Slots]:
        """The uploads of these users of each run."""
        upload, kept = super().participate(of, drawn, users)
        for place, user in enumerate(users[0]):
            if user in self.held:
                self._score(user, place, upload, of.at)
        return upload, kept

    def _score(self, user: int, place: int, upload: Upload, at: Participant) -> None:
        """Add how much of each of a user's canaries is in the noised gradients of this round."""
        plan, mine = self.run.settled, self.held[user]
        if "control" in upload.totals:
            mean = upload.totals["control"][place] + at.memory["control"][place]
        else:
            mean = -upload.params[place] / (plan.step_size * plan.local_steps)
        x, records = at.broadcast.params[place], int(self.run.sizes[user])
        here, there = self._forms(mine, x)
        # All else is known to the adversary: what is left of the mean is canaries and noise.
        known = self._others(user, x) + (here + there).sum(0) / 2
        left = mean - known / records
        # All canaries of the user together, so that one does not blur another.
        self.scores[mine] += torch.linalg.lstsq((here - there).T, left[:, None]).solution[:, 0]

    def _forms(self, mine: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Clipped gradients at x of each canary's two forms, (canaries, P)."""
        features = self.canaries.features[mine]
        here, there = (
            self._clipped(features[:, None], labels[mine][:, None], x)
            for labels in self.canaries.labels
        )
        return here, torch.zeros_like(there) if self.run.sampling == "poisson" else there

    def _others(self, user: int, x: Tensor) -> Tensor:
        """The sum at x over a user's records that are no canaries, (P,)."""
        features, labels = self.data.train.of(user)
        kept = torch.ones(len(labels), dtype=torch.bool)
        start = int(self.data.train.offsets[user])
        kept[self.canaries.rows[self.held[user]] - start] = False
        return self._clipped(features[kept][None], labels[kept][None], x)[0]

    def _clipped(self, features: Tensor, labels: Tensor, x: Tensor) -> Tensor:
        """Sums of clipped gradients of raw records (U, B, d) by the task's own code, (U, P)."""
        task, privacy = self.run.task, self.run.privacy
        assert privacy is not None and not isinstance(privacy.clip, str)
        rows = task.prepare(features)
        squares = row_squares(rows.flatten(0, 1)).view(labels.shape)
        clip = torch.full((len(labels),), float(privacy.clip))
        batch = Batch(rows, labels, squares=squares)
        return task.clipped_sum(x.repeat(len(labels), 1), batch, clip).total


@dataclass(frozen=True)
class OneRunRequest:
    """The one run that is asked for: on which data, with how many canaries, and its folder.

    ``rng`` places the canaries. The setting has a seed of its own, so that no other run shares its
    draw of participants, or noise that comes from a seed.
    """

    setting: Run
    federation: Federation
    run: Mechanism
    canaries: int
    out: Path
    rng: np.random.Generator

    @classmethod
    def of(
        cls, case: AuditedRun, canaries: int, out: Path, seed: int | None = None
    ) -> OneRunRequest:
        """From what is audited; without a ``seed`` all draws come from the operating system."""
        rng, setting = np.random.default_rng(seed), case.setting
        own = None if setting.secret and seed is None else int(rng.integers(1 << 62))
        setting = replace(setting, plan=setting.plan.changed(seed=own))
        return cls(setting, case.federation, case.subject.run, canaries, out, rng)

    def check(self) -> None:
        """Refuse, before anything is played or written, what could not be run or reserved."""
        refuse_unfit(self.federation)
        account_of(self.setting).check_room()
        RunFolder(self.out).check_free()


def play_one_run(asked: OneRunRequest, confidence: float, seconds: float) -> OneRun:
    """One run of the setting on its real data, as far as the seconds reach; its claim is that of
    the rounds that were played."""
    setting, run = asked.setting, asked.run
    data, placed = place(setting, asked.federation, asked.canaries, asked.rng)
    wanted, law = Asked(setting, asked.federation, out=asked.out), _Scored(setting, data, placed)
    with begun(wanted) as start:
        streams = setting.randomness(start.seed)
        engine = Engine([setting], [data], streams=[streams], law=law)
        done = _rounds(start.account, engine, streams, seconds)
        spent = _spent(setting, start)
    claimed = epsilon(run, SERVER, done)
    # The surest guesses only, how many being fixed in advance; a canary that was never drawn is
    # not among them unless all are guessed.
    guesses = max(1, len(placed.rows) // 5)
    surest = law.scores.abs().argsort(descending=True)[:guesses]
    right = int(((law.scores[surest] > 0) == placed.present[surest]).sum())
    proved = one_run_epsilon(len(placed.rows), guesses, right, run.delta, confidence)
    return OneRun(
        len(placed.rows), guesses, right, done, claimed, proved, run.delta, confidence, spent
    )


def _rounds(account: AnyAccount, engine: Engine, streams: Randomness, seconds: float) -> int:
    """Play the rounds, each in the ledger before it runs; returns how many there were."""
    started, state = time.monotonic(), State.initial(account.setting)
    while state.round < account.setting.plan.rounds:
        draw = account.draw(streams, state.round + 1)
        if draw is None:
            break
        state = engine.round(state, [draw]).state
        if time.monotonic() - started > seconds:
            break
    return state.round


def _spent(setting: Run, start: Begun) -> RealRunCost:
    """Write the run's statement, and say what is in it."""
    assert start.folder is not None
    said = start.account.statement()
    file = setting.limits.budget_file
    assert said.epsilon is not None and said.delta is not None
    return RealRunCost(
        str(start.folder.path),
        said.epsilon,
        said.delta,
        "everybody" if said.quotes_given else "server",
        said.seeded,
        None if file is None else str(file),
    )
