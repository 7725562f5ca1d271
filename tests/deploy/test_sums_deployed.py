"""Secure sums in a run folder, in the files of a server and a site, and over kills at random."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from deploy.sums import SECRET, SumWorld
from deploy.test_deployed import Killed, deployment, killer
from deploy.test_sites import simulated
from deploy.test_sums import values_by_label
from deploy.world import TABLE, new_site
from in_memory import Crash, Delivery
from refusals import refuses

from dpscaffold.config.secure import Secure
from dpscaffold.deployment.protocol.enrolment import NotEnrolled
from dpscaffold.deployment.protocol.messages import fingerprint, public_of, unpack
from dpscaffold.deployment.provision import read_signing_key
from dpscaffold.deployment.server.config import load_served
from dpscaffold.deployment.server.run import DeployedRun, Deployment
from dpscaffold.deployment.server.sites import Patience
from dpscaffold.deployment.site.file import read_site_file
from dpscaffold.deployment.site.operation import _run_line, ledger_lines
from dpscaffold.models.loading import load_model
from dpscaffold.runs.written import to_toml


def served_by(world, out, **given) -> Deployment:
    made = deployment(world, out, **given)
    made.records = world.sizes
    return made


def test_a_run_with_secure_sums_is_an_ordinary_run_folder(tmp_path):
    world = SumWorld(tmp_path / "sites", rounds=4, evaluate_every=2)
    served = served_by(world, tmp_path / "run").run(world.names, resume=False)
    assert served.ended == "completed"
    assert torch.equal(served.state.params, simulated(world).reached.params)
    assert torch.equal(load_model(tmp_path / "run").params, served.state.output)


def test_its_statement_is_that_of_the_sum_and_has_what_a_site_has_alone(tmp_path):
    world = SumWorld(tmp_path / "sites", privacy=SECRET, rounds=4)
    served = served_by(world, tmp_path / "run").run(world.names, resume=False)
    (run,) = world.ledger("east").runs
    world.enrolled = replace(world.enrolled, run=run)
    assert served.statement.towards("server").theorem == "4"
    assert "alone" in (tmp_path / "run" / "model" / "privacy.json").read_text()
    assert [world.count(name) for name in world.names] == [4, 4, 4, 4]


@pytest.mark.parametrize("kill", [1, 2, 4])
def test_a_killed_server_resumes_to_the_same_end(tmp_path, kill):
    world = SumWorld(tmp_path / "sites", rounds=4)
    with pytest.raises(Killed):
        served_by(world, tmp_path / "run", observer=killer(kill)).run(world.names, False)
    served = served_by(world, tmp_path / "run").run(world.names, resume=True)
    assert served.ended == "completed"
    assert torch.equal(served.state.params, simulated(world).reached.params)


def test_a_server_killed_before_its_checkpoint_repeats_the_attempt(tmp_path, monkeypatch):
    world = SumWorld(tmp_path / "sites", rounds=4)
    real = DeployedRun.memory

    def die(self):
        if self.training.state.round == 3:
            raise Killed
        return real(self)

    monkeypatch.setattr(DeployedRun, "memory", die)
    with pytest.raises(Killed):
        served_by(world, tmp_path / "run").run(world.names, False)
    monkeypatch.setattr(DeployedRun, "memory", real)
    served = served_by(world, tmp_path / "run").run(world.names, True)
    assert torch.equal(served.state.params, simulated(world).reached.params)
    counts = [next(iter(world.ledger(name).runs.values())).participations for name in world.names]
    assert counts == [4, 4, 4, 4]


@pytest.mark.parametrize("seed", range(3))
def test_random_kills_of_sites_and_server_change_nothing(tmp_path, seed):
    """Sites die at any step of a task, answers get lost, and the server dies at random. Every label
    has one value, every value was in a ledger before it left, and the rehearsal ends where the
    simulator does whenever nobody was passed over."""
    stream = np.random.default_rng(seed)
    world = SumWorld(tmp_path / "sites", secure=Secure(1, 3, 500), rounds=10, site={"voids": 500})
    world.exchange.attempts = 3
    left = {"kills": 12}

    def steps(name, step):
        if left["kills"] and stream.random() < 0.05:
            left["kills"] -= 1
            raise Crash

    def fate(site, message, attempt):
        return Delivery(lose_answer=bool(stream.random() < 0.1), repeat=bool(stream.random() < 0.1))

    def observer(round, row):
        if left["kills"] and stream.random() < 0.3:
            left["kills"] -= 1
            raise Killed

    world.steps, world.exchange.fate = steps, fate
    ended, resume, arrived = "", False, []
    while ended != "completed":
        made = served_by(world, tmp_path / "run", patience=Patience(1, 50, 0.0), observer=observer)
        try:
            served = made.run(world.names, resume)
            ended, arrived = served.ended, served.history
        except Killed:
            pass
        resume = True
    assert left["kills"] == 0 and arrived
    assert values_by_label(world) == {}
    for name in world.names:
        (reserved,) = world.ledger(name).runs.values()
        labels = {label for label in labels_of(world) if label[0] == name}
        assert reserved.participations >= len(labels)
    assert torch.isfinite(served.state.params).all()


def labels_of(world):
    asked = {}
    for name, raw in world.exchange.sent:
        head = unpack(raw).header
        asked[name, head["nonce"]] = head
    found = set()
    for name, raw in world.exchange.answered:
        head = unpack(raw).header
        if head["kind"] == "task" and head["status"] == "yes":
            question = asked[name, head["nonce"]]
            found.add((name, question["round"], question["attempt"]))
    return found


# --- the server's file


PLAN = """
[schema]
features = ["age", "sex", "bmi"]
categories = { sex = ["f", "m"] }
label = "ill"
classes = ["no", "yes"]
[algorithm]
name = "fedavg"
[plan]
rounds = 5
local_steps = 1
user_ratio = 1.0
[privacy]
noise = 20.0
[secure]
colluders = 1
least = 3
voids = 5
[deploy]
records = { east = 60, north = 60, south = 60, west = 60 }
"""


def plan_file(tmp_path, old="", new=""):
    path = tmp_path / "plan.toml"
    assert old in PLAN
    path.write_text(PLAN.replace(old, new))
    return load_served(path)


def test_a_servers_plan_may_ask_for_secure_sums(tmp_path):
    offer = plan_file(tmp_path).offer()
    assert offer.secure.least == 3 and offer.rows == TABLE.model_copy(update={"missing": 0.0})
    assert offer.to_dict()["secure"] == {"colluders": 1, "least": 3, "voids": 5}


def test_noise_can_be_solved_for_the_sum(tmp_path):
    """Of four sites one may collude: the same ε needs √3 times less noise at each."""
    text = PLAN.replace("noise = 20.0", "epsilon = 1.0").replace("voids = 5", "voids = 0")
    plain = text[: text.index("[secure]")] + text[text.index("[deploy]") :]
    noises = []
    for given in (plain, text):
        (tmp_path / "plan.toml").write_text(given)
        noises.append(load_served(tmp_path / "plan.toml").offer().privacy.noise)
    assert noises[0] / noises[1] == pytest.approx(3**0.5, rel=1e-3)


@pytest.mark.parametrize(("rounds", "voids"), [(5, 1), (20, 1), (50, 3), (400, 20)])
def test_a_plan_has_room_for_restarts_unless_it_says_otherwise(tmp_path, rounds, voids):
    """One void for every 20 rounds; the noise is solved for them, and the run folder keeps them."""
    text = PLAN.replace("rounds = 5", f"rounds = {rounds}").replace("noise = 20.0", "epsilon = 1.0")
    found = {}
    for given in ("", "voids = 0", f"voids = {voids}"):
        (tmp_path / "plan.toml").write_text(text.replace("voids = 5", given))
        found[given] = load_served(tmp_path / "plan.toml")
    default, none, same = found.values()
    assert default.offer() == same.offer() and default.offer().secure.voids == voids
    assert default.offer().privacy.noise > 1.005 * none.offer().privacy.noise
    assert none.offer().secure.voids == 0
    (tmp_path / "kept.toml").write_text(to_toml(default.resolved()))
    assert load_served(tmp_path / "kept.toml").offer() == default.offer()


def test_one_round_has_no_voids_unless_it_asks_for_them(tmp_path):
    """A second participation would cost 41 per cent more noise."""
    text = (
        PLAN.replace("voids = 5\n", "")
        .replace('"fedavg"', '"ridge"')
        .replace("rounds = 5\nlocal_steps = 1\nuser_ratio = 1.0", "")
    )
    (tmp_path / "plan.toml").write_text(text)
    assert load_served(tmp_path / "plan.toml").offer().secure.voids == 0


@pytest.mark.parametrize("voids", [0, 1])
def test_a_lost_answer_stalls_a_run_only_where_no_void_is_left(tmp_path, voids):
    world = SumWorld(tmp_path / "sites", privacy=SECRET, secure=Secure(1, 3, voids), rounds=2)
    deaths = ["north"]

    def die(name, step):
        if step == "computed" and name in deaths:
            deaths.remove(name)
            raise Crash

    world.steps, world.exchange.attempts = die, 3
    made, said = served_by(world, tmp_path / "run"), []
    made.say = said.append
    served = made.run(world.names, resume=False)
    assert f"epsilon includes {voids} attempts" in said[1]
    assert served.ended == ("completed" if voids else "stalled")
    if not voids:
        assert "secure.voids is 0 in the plan" in served.message
        assert "start another run with a larger one" in served.message


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("records = {", "# {", r"give deploy.records with the public size of every site"),
        ("local_steps = 1", "local_steps = 2", "local_steps is 2, and secure sums"),
        ('name = "fedavg"', 'name = "scaffold"', "whose users keep a memory"),
        ("least = 3", "least = 2", "at least two honest sites"),
        ("least = 3", "least = 5", "only 4 sites take part"),
        (", south = 60, west = 60", "", "only 2 sites take part"),
    ],
)
def test_a_plan_that_is_not_proved_is_refused_before_anybody_is_asked(tmp_path, old, new, said):
    with refuses(f"epsilon-without-sizes|secure-not-proved|too-few-sites: {said}"):
        plan_file(tmp_path, old, new).offer()


# --- a site's file


def site_file(folder, secure: str):
    """A site with records of a table, and this ``[secure]``."""
    path = new_site(folder, 'source = "csv"\npath = "records.csv"')
    (path.parent / "records.csv").write_text("age,sex,bmi,ill\n" + "41,f,22.5,no\n" * 60)
    path.write_text(path.read_text() + secure)
    return path


def found_by(path, offer=None):
    flower = pytest.importorskip("dpscaffold.deployment.transports.flower.operation")
    return list(flower.check_site(path, offer, connect=False))


MEMBERS = """
[secure]
least = 3
epsilon_alone = 50.0
members = { east = "2414-be14-a0ea-7ff3-1e76-35f9-0995-4303", south = "aaaa-bbbb" }
"""


def test_site_check_shows_who_the_members_are(tmp_path):
    path = site_file(tmp_path, MEMBERS)
    said = "\n".join(sentence for sentence, good in found_by(path) if good)
    own = fingerprint(public_of(read_signing_key(path.parent / "site.key")))
    assert f"this site is north, fingerprint {own}" in said
    assert "confirmed member east: fingerprint 2414-be14-a0ea" in said
    assert "at least 3 members, 1 of whom may collude; 2 others are confirmed" in said


def test_site_check_says_that_too_few_are_confirmed(tmp_path):
    path = site_file(tmp_path, MEMBERS.replace("least = 3", "least = 5"))
    assert any("2 others are confirmed" in said for said, good in found_by(path) if not good)


def test_site_check_judges_a_plan_with_secure_sums(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN)
    path = site_file(tmp_path, MEMBERS)
    (judged,) = [said for said, _ in found_by(path, plan) if "would be" in said]
    assert "would be accepted" in judged and "together with 1 of the other sites" in judged
    assert "if all other sites collude" in judged
    path.write_text(path.read_text().replace(MEMBERS, ""))
    assert any("policy-secure" in said for said, good in found_by(path, plan) if not good)
    plan.write_text(PLAN.replace("north = 60, ", "coast = 60, "))
    path.write_text(path.read_text() + MEMBERS)
    assert any("not a member" in said for said, good in found_by(path, plan) if not good)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("least = 3", "least = 2", "at least two honest sites"),
        ("least = 3", "least = 3\ncolluders = 2", "give 4 or more"),
        ("epsilon_alone = 50.0", "", "epsilon_alone"),
        ("least = 3", "lest = 3", "lest"),
        ("least = 3", "colluders = -1", "colluders"),
    ],
)
def test_a_secure_table_that_makes_no_sense_is_refused(tmp_path, old, new, said):
    path = site_file(tmp_path, MEMBERS.replace(old, new))
    with refuses(f"missing-key|out-of-range|too-few-sites|unknown-key: {said}"):
        read_site_file(path)


def test_the_ledger_shows_both_epsilons(tmp_path):
    world = SumWorld(tmp_path / "sites", privacy=SECRET)
    world.enrol()
    world.drive()
    reserved = world.ledger("east").runs[world.enrolled.run]
    line = _run_line(reserved)
    assert line["epsilon_spent"] < line["epsilon_granted"]
    assert line["epsilon_spent"] < line["epsilon_alone_spent"] < line["epsilon_alone_granted"]
    said = {"site": "east", "runs": [line], "recovered": [], "epsilon_left": 1.0}
    said |= {"epsilon_reserved": 1.0, "runs_left": 1, "promise": "", "theorem": ""}
    assert "if all others collude" in ledger_lines(said)[1]


def test_a_process_that_ends_after_a_message_takes_part_in_no_secure_sum(tmp_path):
    world = SumWorld(tmp_path / "sites", privacy=SECRET)
    world.sites["east"].keeps_keys = False
    with pytest.raises(NotEnrolled, match="policy-secure"):
        world.enrol()
