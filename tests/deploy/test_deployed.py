"""A deployed run's folder: an ordinary run folder, resumable at any moment, counted truthfully."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from deploy.test_sites import simulated
from deploy.world import LOOSE, World, largest_gap, memories_of
from in_memory import Crash, Delivery
from refusals import refuses
from small import federation
from stated import written
from typer.testing import CliRunner

from dpscaffold import train
from dpscaffold.cli import app
from dpscaffold.config.gaussian import Gaussian
from dpscaffold.deployment.protocol.agreement import read_offer
from dpscaffold.deployment.protocol.exchange import ExchangeStopped
from dpscaffold.deployment.protocol.messages import new_key
from dpscaffold.deployment.server.agreed import evaluation_on
from dpscaffold.deployment.server.run import DeployedRun, Deployment
from dpscaffold.deployment.server.sites import Patience
from dpscaffold.models.loading import load_model
from dpscaffold.privacy import THIRD_PARTY, noise_seen
from dpscaffold.runs.folder import RunFolder
from dpscaffold.runs.ledger import read_account

FIXED = Gaussian(clip=0.7, noise=0.8)
SECRET = Gaussian(clip=0.7, noise=20.0, secret=True)


def deployment(world, out, limits=None, patience=None, observer=None):
    offer = read_offer(world.enrolled.offer)
    scorer = evaluation_on(offer, *world.data.test.of(0))
    config = {"plan": world.setting.plan.model_dump(), "privacy": {"secret": world.secret}}
    private = world.setting.privacy is not None
    return Deployment(
        offer,
        world.correspondence(),
        RunFolder(out),
        config,
        limits or (Gaussian(noise=1.0, delta=1e-5) if private else None),
        patience or Patience(1, 2, 0.0),
        scorer=scorer,
        observer=observer,
    )


class Killed(BaseException):
    """The server's process is gone."""


def killer(at):
    def observer(round, row):
        if round == at:
            raise Killed

    return observer


def test_a_run_is_an_ordinary_run_folder(tmp_path):
    world = World(tmp_path / "sites", "scaffold", privacy=FIXED, rounds=4, evaluate_every=2)
    served = deployment(world, tmp_path / "run").run(world.names, resume=False)
    assert served.ended == "completed"
    memories = memories_of(*(site.state.path for site in world.sites.values()))
    assert len(memories) == 3
    assert largest_gap(served.state.server.slots, memories) < 1e-5
    assert torch.equal(served.state.params, simulated(world).reached.params)
    assert [row["round"] for row in served.history] == [2, 4]
    assert 0 <= served.history[-1]["test_accuracy"] <= 1
    assert torch.equal(load_model(tmp_path / "run").params, served.state.output)
    figure = str(tmp_path / "comparison.png")
    for command in (
        ["privacy", str(tmp_path / "run")],
        ["compare", str(tmp_path / "run"), "--out", figure],
    ):
        assert CliRunner().invoke(app, command).exit_code == 0, command
    said = CliRunner().invoke(app, ["server", "status", str(tmp_path / "run"), "--json"])
    status = json.loads(said.output)
    assert status["phase"] == "completed" and set(status["sites"]) == set(world.names)


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "scaffold-balanced"])
def test_its_metrics_of_controls_are_those_of_a_simulated_run(tmp_path, algorithm):
    world = World(
        tmp_path / "sites", algorithm, privacy=FIXED, evaluate_every=1, weighting="records"
    )
    served = deployment(world, tmp_path / "run").run(world.names, resume=False)
    setting = world.setting
    alone = train(world.data, setting.task, setting.algorithm, setting.plan, setting.privacy)
    shown = {"control_norm", *(f"{name}_norm" for name in setting.algorithm.keeps)}
    shown |= {f"largest_user_{name}" for name in setting.algorithm.remembers}
    for found, meant in zip(served.history, alone.history, strict=True):
        norms = {name for name in found if "norm" in name or name.startswith("largest_user")}
        assert norms <= shown  # and no numbers of its own next to them
        for name in shown:
            wanted = None if meant[name] is None else pytest.approx(meant[name], rel=1e-4, abs=1e-7)
            assert found[name] == wanted, name


@pytest.mark.parametrize("kill", [1, 2, 4])
def test_a_killed_server_resumes_to_the_same_end(tmp_path, kill):
    world = World(tmp_path / "sites", "scaffold", privacy=FIXED, rounds=4)
    with pytest.raises(Killed):
        deployment(world, tmp_path / "run", observer=killer(kill)).run(world.names, False)
    served = deployment(world, tmp_path / "run").run(world.names, resume=True)
    assert served.ended == "completed"
    assert torch.equal(served.state.params, simulated(world).reached.params)


def test_a_server_killed_before_its_checkpoint_counts_the_round_once(tmp_path, monkeypatch):
    """The round is asked again and the sites repeat their stored answers: one release."""
    world = World(tmp_path / "sites", "scaffold", privacy=SECRET, rounds=4, user_ratio=1.0)
    real = DeployedRun.memory

    def die(self):
        if self.training.state.round == 3:
            raise Killed
        return real(self)

    monkeypatch.setattr(DeployedRun, "memory", die)
    with pytest.raises(Killed):
        deployment(world, tmp_path / "run").run(world.names, False)
    monkeypatch.undo()
    deployment(world, tmp_path / "run").run(world.names, resume=True)
    account = read_account(tmp_path / "run")
    assert account.ledger.participations.tolist() == [4, 4, 4]
    assert account.ledger.extra == 0
    # A release after the run that cannot be added must not be left out of its ε.
    (tmp_path / "run" / "joining.json").write_text("{}")
    with refuses("wrong-version"):
        read_account(tmp_path / "run")


def test_a_fresh_answer_to_a_repeated_round_is_counted_again(tmp_path, monkeypatch):
    world = World(tmp_path / "sites", "scaffold", privacy=SECRET, rounds=4, user_ratio=1.0)
    deaths = {"left": 1}

    def die(name, at):
        if name == "north" and at == "counted" and deaths["left"]:
            deaths["left"] -= 1
            raise Crash

    world.steps, world.exchange.attempts = die, 3
    served = deployment(world, tmp_path / "run").run(world.names, False)
    counts = read_account(tmp_path / "run").ledger.participations.tolist()
    assert counts == [4, 5, 4] and world.ledger("north").total == 5
    assert served.statement.towards("server").epsilon is not None


def test_a_hostile_server_has_a_row_where_not_all_sites_take_part(tmp_path):
    """It can ask for draws until it likes one, so nothing over the draw holds against it."""
    world = World(tmp_path / "sites", "fedavg", privacy=SECRET, rounds=3, user_ratio=0.7)
    said = deployment(world, tmp_path / "run").run(world.names, False).statement
    hostile, server = said.towards("hostile"), said.towards("server")
    assert said.held == "sites" and hostile.theorem == "cap"
    assert hostile.epsilon > server.epsilon


def test_a_party_may_stay_away_so_the_aggregate_bound_is_refused(tmp_path):
    world = World(
        tmp_path / "sites", "fedavg", privacy=SECRET, rounds=3, local_steps=1, user_ratio=1.0
    )
    deployment(world, tmp_path / "run").run(world.names, False)
    run = read_account(tmp_path / "run").ledger.run
    assert "stay away" in str(noise_seen(run, THIRD_PARTY).not_more)
    said = written(tmp_path / "run")
    assert said.towards("third_party").theorem == "1"
    assert said.towards("third_party").epsilon == said.towards("server").epsilon


def test_a_stalled_run_keeps_its_checkpoint_and_goes_on(tmp_path):
    world = World(tmp_path / "sites", "scaffold", privacy=FIXED, rounds=4, user_ratio=1.0)
    away = {"on": True}
    world.exchange.fate = lambda name, signed, attempt: Delivery(
        lose_ask=away["on"] and signed.header.get("round", 0) >= 3 and name == "north"
    )
    patience = Patience(3, 1, 0.0)
    served = deployment(world, tmp_path / "run", patience=patience).run(world.names, False)
    assert served.ended == "stalled" and served.state.round == 2
    assert "the quorum is 3" in served.message
    assert not (tmp_path / "run" / "model").exists()
    away["on"] = False
    served = deployment(world, tmp_path / "run", patience=patience).run(world.names, True)
    assert served.ended == "completed"
    assert torch.equal(served.state.params, simulated(world).reached.params)


def test_a_run_is_resumed_as_itself_or_not_at_all(tmp_path):
    world = World(tmp_path / "sites", "scaffold", privacy=FIXED, rounds=4)
    with pytest.raises(Killed):
        deployment(world, tmp_path / "run", observer=killer(2)).run(world.names, False)
    with refuses("roster-changed: somebody has to be left"):
        deployment(world, tmp_path / "run").run(("coast",), True)
    other = World(tmp_path / "others", "scaffold", privacy=FIXED, rounds=5)
    with refuses("configuration-changed: plan.rounds"):
        deployment(other, tmp_path / "run").run(world.names, True)
    with refuses("run-exists"):
        deployment(world, tmp_path / "run").run(world.names, False)


def without(world, out, name, resume=True):
    """The run in ``out`` with the roster that is left when a site is removed."""
    made, said = deployment(world, out), []
    left = tuple(one for one in world.names if one != name)
    made.post.publics = {one: made.post.publics[one] for one in left}
    made.post.admitted = lambda: left
    made.say = said.append
    return made.run((*left, "coast"), resume), said


@pytest.mark.parametrize("user_ratio", [1.0, 0.4])
def test_a_removed_site_is_passed_over_when_the_run_is_resumed(tmp_path, user_ratio):
    """As if it stayed away: the draw, and so everybody else's part, is the one that was agreed."""
    ended = {}
    for how in ("removed", "away"):
        world = World(tmp_path / how, "scaffold", privacy=FIXED, rounds=6, user_ratio=user_ratio)
        out = tmp_path / f"run-{how}"
        with pytest.raises(Killed):
            deployment(world, out, observer=killer(2)).run(world.names, False)
        before = world.ledger("north").total
        if how == "removed":
            served, said = without(world, out, "north")
            assert any("north was removed" in one for one in said)
            assert any("coast was admitted" in one for one in said)
        else:
            world.exchange.fate = lambda name, signed, attempt: Delivery(lose_ask=name == "north")
            patience = Patience(0, 2, 0.0)
            served = deployment(world, out, patience=patience).run(world.names, True)
        assert served.ended == "completed" and world.ledger("north").total == before
        ended[how] = served
    assert torch.equal(ended["removed"].state.params, ended["away"].state.params)
    assert ended["removed"].participations == ended["away"].participations
    assert ended["removed"].setting.users == 3


def test_a_site_that_was_admitted_late_takes_part_in_the_next_run(tmp_path):
    """The run in progress goes on without it, or is stopped for a new one with everybody; the
    ledgers of the others hold both, and each run states what it cost by itself."""
    data = federation((9, 12, 7, 8))
    world = World(tmp_path / "sites", "scaffold", privacy=SECRET, data=data, rounds=4)
    world.policies = {n: p.model_copy(update={"max_runs": 2}) for n, p in world.policies.items()}
    late, first, second = world.names[-1], tmp_path / "first", tmp_path / "second"
    early = world.names[:-1]
    with pytest.raises(Killed):
        deployment(world, first, observer=killer(2)).run(early, False)
    made, said = deployment(world, first), []
    made.say, made.observer = said.append, killer(3)
    with pytest.raises(Killed):
        made.run(world.names, True)
    assert any(f"{late} was admitted" in one and "--continue" in one for one in said)
    assert not world.ledger(late).runs and RunFolder(first).load_checkpoint().state.round == 3
    before = {name: world.ledger(name).total for name in early}
    served = deployment(world, second).run(world.names, False)
    assert served.ended == "completed" and served.setting.users == 4
    assert world.ledger(late).total == served.participations[3]
    for name, count in zip(early, served.participations, strict=False):
        ledger = world.ledger(name)
        assert ledger.total == before[name] + count and len(ledger.granted) == 2
        spent = sum(run.grant.epsilon for run in ledger.runs.values())
        assert ledger.left(world.policies[name]).epsilon == pytest.approx(LOOSE["epsilon"] - spent)
    with refuses("not-enrolled: policy-runs"):  # both grants are spent for good
        deployment(world, tmp_path / "third").run(world.names, False)


@pytest.mark.parametrize("averaging", ["none", "uniform"])
def test_a_checkpoint_holds_no_more_than_it_needs(tmp_path, averaging):
    """x, c and each site's c_i, and an average where there is one; no room of a growing table."""
    privacy, plan = SECRET, {"rounds": 2, "user_ratio": 1.0, "averaging": averaging}
    world = World(tmp_path / "sites", "scaffold", privacy=privacy, **plan)
    deployment(world, tmp_path / "run").run(world.names, False)
    path, size = tmp_path / "run" / "checkpoint.pt", world.setting.task.parameters
    saved = torch.load(path, weights_only=True)
    state, mirror = saved["state"], saved["sites"]["mirror"]["slots"]["control"]
    assert mirror.shape == (3, size) and mirror.untyped_storage().nbytes() == 3 * 4 * size
    stored = state["average"].untyped_storage().nbytes()
    assert stored == (4 if averaging == "none" else 4 * size)
    again = RunFolder(tmp_path / "run").load_checkpoint().state
    assert again.average.shape == (size,) and again.average.is_contiguous()
    assert bool(again.average.any()) is (averaging != "none")


def test_a_run_that_has_not_begun_needs_its_whole_roster(tmp_path):
    world = World(tmp_path / "sites", "scaffold", privacy=FIXED, rounds=4)
    world.exchange.fate = lambda name, signed, attempt: Delivery(
        lose_ask=signed.header["kind"] == "begin" and name == "north"
    )
    with refuses("not-enrolled: --resume"):
        deployment(world, tmp_path / "run").run(world.names, False)
    with refuses("roster-changed: every site has to begin it … admit north again"):
        without(world, tmp_path / "run", "north")
    assert all(world.ledger(name).total == 0 for name in world.names)


def test_a_run_folder_from_a_backup_goes_on(tmp_path):
    """Rounds that the sites have answered since are passed over, without new grants."""
    world, out = World(tmp_path / "sites", "scaffold", privacy=SECRET, rounds=7), tmp_path / "run"
    with pytest.raises(Killed):
        deployment(world, out, observer=killer(2)).run(world.names, False)
    shutil.copytree(out, tmp_path / "backup")
    with pytest.raises(Killed):
        deployment(world, out, observer=killer(5)).run(world.names, True)
    shutil.rmtree(out)
    shutil.copytree(tmp_path / "backup", out)
    served = deployment(world, out).run(world.names, True)
    assert served.ended == "completed" and served.state.round == 7
    counts = read_account(out).ledger.participations.tolist()
    for name, count in zip(world.names, counts, strict=True):
        assert count >= world.ledger(name).total  # the server states no less than was released
        assert len(world.ledger(name).runs) == 1


def test_a_secure_run_needs_all_its_members(tmp_path):
    world = World(tmp_path / "sites", "fedavg", privacy=SECRET, rounds=4)
    secure = replace(world.enrolled, offer={"secure": {"colluders": 1}}, nonces={"": "0"})
    with refuses("roster-changed: keys of all members … admit south again"):
        deployment(world, tmp_path / "run")._check_roster(secure, ("east", "north"))


def test_a_run_goes_on_under_a_new_coordinators_key(tmp_path):
    """The server's key is replaced between two rounds; sites that took the notice over go on, and
    messages of the old key are refused."""
    world = World(tmp_path / "sites", "scaffold", privacy=FIXED, rounds=4, user_ratio=1.0)
    with pytest.raises(Killed):
        deployment(world, tmp_path / "run", observer=killer(2)).run(world.names, False)
    old, world.key = world.key, new_key()
    for name in world.names:
        world.restart(name)
    stale = deployment(world, tmp_path / "run")
    stale.post.key = old
    assert stale.run(world.names, True).ended == "stalled"
    assert all(world.ledger(name).total == 2 for name in world.names)
    served = deployment(world, tmp_path / "run").run(world.names, True)
    assert served.ended == "completed"
    assert torch.equal(served.state.params, simulated(world).reached.params)


def test_uploads_that_do_no_good_are_not_added(tmp_path):
    """A site may send any upload of its own; one that is not finite is dropped."""
    world = World(tmp_path / "sites", "scaffold", privacy=FIXED, rounds=2, user_ratio=1.0)
    world.enrol()
    real = world.sites["north"]._compute

    def poisoned(*given):
        made = real(*given)
        bad = {**made.vectors, "params": np.full(15, np.nan, "<f4")}
        return type(made)(**{**vars(made), "vectors": bad})

    world.sites["north"]._compute = poisoned
    done = world.round()
    assert done.arrived == (0, 2)
    assert world.engine.last.reasons == {"north": "bad-upload"}
    assert torch.isfinite(world.state.params).all()


def test_the_sites_must_have_the_sizes_that_the_noise_was_solved_for(tmp_path):
    world = World(tmp_path / "sites", "scaffold", privacy=SECRET, rounds=4)
    wrong = deployment(world, tmp_path / "run")
    wrong.records = {"east": 9, "north": 12, "south": 8}
    with refuses("sizes-differ: east = 9 … north = 12 … south = 7"):
        wrong.run(world.names, False)
    assert [entry.began for entry in world.ledger("north").runs.values()] == [False]
    right = deployment(world, tmp_path / "other")
    right.records = {"east": 9, "north": 12, "south": 7}
    assert right.run(world.names, False).ended == "completed"


class StoppedAway:
    """An exchange that must stop in a given round."""

    def __init__(self, real, at):
        self.real, self.at = real, at

    def ask(self, questions, accept):
        if any(signed.header.get("round") == self.at for signed in questions.values()):
            raise ExchangeStopped("asked to stop while the SuperLink was away")
        return self.real.ask(questions, accept)


def test_a_server_told_to_stop_ends_with_its_checkpoint_and_goes_on(tmp_path):
    world = World(tmp_path / "sites", "scaffold", privacy=SECRET, rounds=4, user_ratio=1.0)
    stopped = deployment(world, tmp_path / "run")

    def observer(round, row):
        if round == 2:
            stopped.stop.append("SIGTERM")

    stopped.observer = observer
    served = stopped.run(world.names, False)
    assert served.ended == "interrupted" and served.state.round == 2
    assert "stopped by SIGTERM" in served.message
    again = deployment(world, tmp_path / "run")
    again.post.exchange, again.stop = StoppedAway(world.exchange, at=3), ["SIGTERM"]
    assert "SuperLink was away" in again.run(world.names, True).message
    served = deployment(world, tmp_path / "run").run(world.names, True)
    assert served.ended == "completed"
    assert read_account(tmp_path / "run").ledger.participations.tolist() == [4, 4, 4]


def test_a_deployed_run_that_diverged_counts_its_planned_rounds(tmp_path, monkeypatch):
    """Its outputs stopped it; and an answer that was given twice in the last round is counted."""
    from dpscaffold.deployment.server.sites import Sites
    from dpscaffold.errors import Diverged

    world = World(tmp_path / "sites", "scaffold", privacy=SECRET, rounds=4, user_ratio=1.0)
    real = Sites.gather

    def blows_up(self, phase, broadcast, draw):
        gathered = real(self, phase, broadcast, draw)
        if broadcast.round == 2:
            gathered.mean.params.fill_(float("inf"))
            self.post.seen["north"] = 3  # the site's own ledger has one more
        return gathered

    monkeypatch.setattr(Sites, "gather", blows_up)
    with pytest.raises(Diverged):
        deployment(world, tmp_path / "run").run(world.names, False)
    ledger = read_account(tmp_path / "run").ledger
    assert ledger.rounds == 4 and ledger.participations.tolist() == [4, 5, 4]
