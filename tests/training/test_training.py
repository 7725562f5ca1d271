"""The rounds of a run: few frames to the first gradient, an order that is safe whatever an engine
does, and nothing that is read too late."""

from __future__ import annotations

import shutil
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refuses
from typed import SMALL

from dpscaffold import BadInput, Gaussian, Logistic, Mlp, Plan, fedavg, synthetic, train
from dpscaffold.algorithms import Server, Upload
from dpscaffold.cli.train import train_command
from dpscaffold.config import Run, make_run
from dpscaffold.engine import Count, Draw, Round, RoundUploads, State
from dpscaffold.errors import Diverged
from dpscaffold.runs.account import PrivacyAccount
from dpscaffold.runs.folder import Identity, RunFolder
from dpscaffold.runs.history import HistoryRow
from dpscaffold.runs.ledger import read_account
from dpscaffold.runs.secret import Secret
from dpscaffold.training.training import Training, ignore, pick_up

DATA = synthetic(users=4, records=40, dimension=4, classes=3)
PLAN = Plan(rounds=6, local_steps=2, user_ratio=0.5, evaluate_every=2, checkpoint_every=1)
SECRET = Gaussian(clip=1.0, noise=10.0, secret=True)


class Stop(Exception):
    """A process that dies."""


# --- frames


def test_few_frames_lead_from_the_command_to_the_first_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands between is what somebody has to read to follow a run."""
    (tmp_path / "c.toml").write_text(SMALL)

    def first(*given: Any) -> Any:
        frames = [frame for frame in traceback.extract_stack() if "dpscaffold/" in frame.filename]
        names = [f"{Path(frame.filename).parent.name}.{frame.name}" for frame in frames]
        raise Stop(names[names.index("cli.train_command") :])

    monkeypatch.setattr(Mlp, "clipped_sum", first)
    with pytest.raises(Stop) as stopped:
        train_command(tmp_path / "c.toml", ["task.kind=mlp"], tmp_path / "run", quiet=True)
    (names,) = stopped.value.args
    assert len(names) <= 12, names


# --- an engine that voids attempts, loses questions and replies, and dies


@dataclass
class Site:
    """A user with a count of its own, which keeps each upload until it is acknowledged."""

    count: int = 0
    kept: dict[tuple[int, int], float] = field(default_factory=dict)
    over: int = 0

    def answer(self, round: int, attempt: int, counted: Callable[[], int]) -> float:
        """The upload of an attempt. A new one is a release: it must be in the ledger by then."""
        assert round > self.over, "a round was asked again that was acknowledged"
        if (round, attempt) not in self.kept:
            self.count += 1
            assert counted() >= self.count, "a release left before it was counted"
            self.kept[round, attempt] = float(self.count)
        return self.kept[round, attempt]


@dataclass
class Coordinator:
    """An engine over sites in memory. It remembers nothing of a round that it did not finish, so
    it counts every attempt after the first before the questions leave."""

    folder: Path
    run: Run
    sites: list[Site]
    chance: np.random.Generator
    faults: float
    order: list[str] = field(default_factory=list)

    def happens(self) -> bool:
        return bool(self.chance.random() < self.faults)

    def counted(self, user: int) -> int:
        """How often the ledger on the disk has this user."""
        return int(read_account(self.folder).ledger.participations[user])

    def round(self, state: State, draws: Sequence[Draw], count: Count) -> Round:
        self.order.append("round")
        number, users, attempt = state.round + 1, draws[0].active.tolist(), 1
        while True:
            replies = {}
            for user in users:
                if self.happens():
                    continue  # the question was lost
                if self.happens():
                    raise Stop
                site = self.sites[user]
                reply = site.answer(number, attempt, lambda user=user: self.counted(user))
                if not self.happens():
                    replies[user] = reply
            if len(replies) == len(users):
                break
            attempt += 1
            count(users)
        server = Server(state.params + sum(replies.values()), state.server.slots)
        uploads = RoundUploads(Upload(server.params), tuple(users), {"attempts": float(attempt)})
        return Round(state.moved(server, [self.run]), [uploads])

    def acknowledge(self, round: int) -> None:
        self.order.append("acknowledged")
        saved = RunFolder(self.folder).load_checkpoint()
        assert saved is not None and saved.state.round == round, "not on the disk yet"
        for site in self.sites:
            if not self.happens():
                site.over, site.kept = round, {}

    def memory(self) -> dict[str, Any]:
        self.order.append("saved")
        return {"sites": {"round": 1}}

    def restore(self, memory: Mapping[str, Any]) -> None:
        assert memory["sites"] == {"round": 1}

    def norms(self) -> dict[str, float]:
        return {}


def begun(engine: Coordinator, on_round: Callable[[HistoryRow], None]) -> Training:
    """A training over the engine, in its folder: a new run, or the one that is there."""
    folder, account = RunFolder(engine.folder), PrivacyAccount(engine.run)
    if folder.holds_run:
        folder.lock()
        seed = folder.secret(private=True).seed
    else:
        seed = engine.run.seed()
        known = Identity(engine.run.to_dict(), "sites", "d", "all")
        folder.begin("", known, Secret(bytes(32), seed))

    def evaluate(state: State) -> dict[str, float]:
        engine.order.append("evaluated")
        return {"norm": float(state.params.norm())}

    randomness = engine.run.randomness(seed)
    training = Training(
        run=engine.run, engine=engine, account=account, randomness=randomness, folder=folder,
        evaluate=evaluate, on_round=on_round,
    )  # fmt: skip
    saved, history = pick_up(folder, account, "d", seed, resent=True)
    if saved is not None:
        training.restore(saved, history)
    return training


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("faults", [0.0, 0.05, 0.2])
def test_no_site_is_ahead_of_the_ledger(tmp_path: Path, seed: int, faults: float) -> None:
    """Attempts are void, questions and replies are lost, the server dies anywhere: at every moment
    the ledger on the disk is at or above the sites' own counts, after a resume too."""
    run = make_run(DATA.roster, Logistic(4, 3), fedavg(), PLAN, SECRET)
    chance, sites = np.random.default_rng(seed), [Site() for _ in range(4)]
    shown: list[int] = []
    engine = Coordinator(tmp_path / "run", run, sites, chance, faults)

    def on_round(row: HistoryRow) -> None:
        shown.append(row.round)
        if engine.happens():
            raise Stop

    for _ in range(1000):
        training = begun(engine, on_round)
        try:
            ending = training.advance()
        except Stop:
            continue
        finally:
            assert training.folder is not None
            training.folder.release()
        break
    assert ending.how == "completed" and training.state.round == 6
    assert [row.round for row in training.history] == [2, 4, 6]
    ledger = read_account(tmp_path / "run").ledger
    assert all(ledger.participations[user] >= site.count for user, site in enumerate(sites))
    if not faults:
        assert [site.count for site in sites] == ledger.participations.tolist()
        turn = ["round", "saved", "acknowledged"]
        assert shown == [1, 2, 3, 4, 5, 6]
        assert engine.order == [*turn, "round", "evaluated", *turn[1:]] * 3


def test_a_model_that_is_not_finite_counts_all_rounds(tmp_path: Path) -> None:
    """Its outputs have ended the run, so the ledger has what was planned."""
    run = make_run(DATA.roster, Logistic(4, 3), fedavg(), PLAN, SECRET)

    class Wild(Coordinator):
        def round(self, state: State, draws: Sequence[Draw], count: Count) -> Round:
            done = super().round(state, draws, count)
            broken = Server(done.state.params * torch.inf, done.state.server.slots)
            return replace(done, state=replace(done.state, server=broken))

    engine = Wild(tmp_path / "run", run, [Site() for _ in range(4)], np.random.default_rng(0), 0.0)
    with pytest.raises(Diverged, match="all 6 planned rounds are counted"):
        begun(engine, ignore).advance()
    assert read_account(tmp_path / "run").rounds == 6
    assert "acknowledged" not in engine.order


# --- what is read, is read before the first round


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that died after three of six rounds."""
    folder = tmp_path_factory.mktemp("cut") / "run"

    def die(row: HistoryRow) -> None:
        if row.round == 4:
            raise Stop

    with pytest.raises(Stop):
        train(DATA, Logistic(4, 3), fedavg(), PLAN, SECRET, out=folder, on_round=die)
    return folder


@pytest.mark.parametrize("damage", ["cut", "garbage", "bytes", "gone"])
def test_damaged_files_are_noticed_before_the_first_round(
    cut: Path, tmp_path: Path, damage: str
) -> None:
    """A run that resumes spends nothing before all that its end needs was read."""
    outcomes: Counter[str] = Counter()
    for name in sorted(path.name for path in cut.iterdir() if path.is_file()):
        folder = tmp_path / name
        shutil.copytree(cut, folder)
        path, shown = folder / name, []
        if damage == "gone":
            path.unlink()
        else:
            held = path.read_bytes()
            cuts = {"cut": held[: len(held) // 2], "garbage": b'{"a": [', "bytes": held + b"\xff"}
            path.write_bytes(cuts[damage])
        try:
            train(
                DATA, Logistic(4, 3), fedavg(), PLAN, SECRET, out=folder, resume=True,
                on_round=lambda row, shown=shown: shown.append(row.round),
            )  # fmt: skip
            outcomes["done"] += 1
        except BadInput as error:
            assert not shown, (name, error)
            outcomes["refused"] += 1
    assert outcomes["refused"] >= 3, outcomes


def test_public_rows_and_metrics_are_read_before_the_first_round(tmp_path: Path) -> None:
    shown: list[HistoryRow] = []
    for metrics in (["auk"], ["rmse"], ["auc"]):
        with refuses("unknown-metric|wrong-target"):
            train(
                DATA, Logistic(4, 3), fedavg(), PLAN, SECRET, out=tmp_path / "run",
                metrics=metrics, on_round=shown.append,
            )  # fmt: skip
    assert not shown and not (tmp_path / "run").exists()
