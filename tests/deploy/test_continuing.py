"""A run that goes on with one site more: nobody grants twice, and nobody counts too little."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from deploy.test_deployed import FIXED, SECRET, Killed, deployment, killer
from deploy.world import World, largest_gap, memories_of
from in_memory import Crash, Delivery
from refusals import refuses
from small import Driven, federation, simulator
from stated import at_most, spent
from typer.testing import CliRunner

from dpscaffold import Gaussian
from dpscaffold.cli import app
from dpscaffold.config.personal import PersonalSettings
from dpscaffold.deployment.protocol.messages import SERVER, ask, new_key
from dpscaffold.deployment.server.continuing import read_counts
from dpscaffold.deployment.site.approval import request_lines
from dpscaffold.deployment.site.operation import _run_line, ledger_lines
from dpscaffold.deployment.site.recovery import recover
from dpscaffold.privacy import Statement
from dpscaffold.runs.folder import RunFolder
from dpscaffold.runs.ledger import read_account
from dpscaffold.runs.stating import state

ROUNDS, STOP = 5, 2


class Joined:
    """Sites of which the first joins late: the others take ``stop`` rounds without it."""

    def __init__(self, folder, algorithm="scaffold", privacy=SECRET, stop=STOP, **given):
        plan = {"rounds": ROUNDS, "user_ratio": 1.0, "evaluate_every": 1} | given
        data = federation((9, 12, 7, 8))
        self.world = World(folder / "sites", algorithm, privacy=privacy, data=data, **plan)
        self.first, self.second = folder / "first", folder / "second"
        self.late, *self.early = self.world.names
        self.stop, self.said = stop, []

    def begin(self):
        with pytest.raises(Killed):
            made = deployment(self.world, self.first, observer=killer(self.stop))
            made.run(tuple(self.early), False)
        return self

    def made(self, out=None, observer=None):
        found = deployment(self.world, out or self.second, observer=observer)
        found.say = self.said.append
        return found

    def go_on(self, names=None, out=None, observer=None, continues=None):
        made = self.made(out, observer)
        return made.run(tuple(names or self.world.names), False, continues or self.first)

    def resume(self, names=None, out=None, observer=None):
        return self.made(out, observer).run(tuple(names or self.world.names), True)

    def run_in(self, out):
        return json.loads((out / "sites.json").read_text())["run"]

    def entry(self, name, out):
        return self.world.ledger(name).runs[self.run_in(out)]

    def message(self, kind, name, run, **fields):
        head = {"seen": 0, "seen_total": 0, "heads": []} | fields
        return ask(kind, run, name, head, {}, self.world.key)

    def offer(self, name, run, continues, **fields):
        head = {"offer": self.world.enrolled.offer, "commitment": "00", "after": 2} | fields
        return self.message("offer", name, run, continues=continues, **head)

    def ask_task(self, name, run, round, **fields):
        """A task of this run as a server that wants one more participation would send it."""
        saved = RunFolder(self.first).load_checkpoint()
        slots = {f"shared.{k}": v.numpy() for k, v in saved.state.server.slots.items()}
        vectors = {"params": saved.state.params.numpy()} | slots
        known = saved.sites["acknowledged"].get(name, "")
        plan = self.world.enrolled.plan
        head = {"plan": plan, "round": round, "acknowledged": known, "seen": 0, "seen_total": 0}
        return ask("task", run, name, head | fields, vectors, self.world.key)


@pytest.fixture
def joined(tmp_path):
    return Joined(tmp_path).begin()


# --- an honest continuation


def test_nobody_grants_twice_and_every_participation_counts(joined):
    world = joined.world
    before = {name: world.ledger(name).left(world.policies[name]) for name in joined.early}
    served = joined.go_on()
    assert served.ended == "completed" and served.setting.users == 4
    assert served.participations == (3, 3, 3, 3)
    for name in joined.early:
        ledger, entry = world.ledger(name), joined.entry(name, joined.second)
        assert ledger.left(world.policies[name]) == before[name]  # epsilon, delta and runs
        assert (entry.participations, entry.used, ledger.total) == (3, 5, 5)
        assert entry.grant == joined.entry(name, joined.first).grant
        assert entry.used <= entry.grant.participations
    assert len(world.ledger(joined.late).granted) == 1
    assert any(f"{joined.late} joined" in one for one in joined.said)


def state_after(joined):
    """The state of the first run for the sites of the second, by hand."""
    saved = RunFolder(joined.first).load_checkpoint()
    mirror = saved.sites["mirror"]
    users = [joined.world.names.index(joined.early[user]) for user in mirror["users"]]
    slots = dict(saved.state.server.slots)
    for name, values in mirror["slots"].items():
        if name in slots:
            total = np.sum(values.numpy().astype(np.float64), axis=0)
            slots[name] = torch.from_numpy((total / 4).astype(np.float32))
    server = replace(saved.state.server, slots=slots)
    return replace(saved.state, server=server), users, own_slots(joined, mirror["users"])


def own_slots(joined, users):
    """What the sites that took part remember, on their own disks."""
    run, known = joined.run_in(joined.first), RunFolder(joined.first).load_checkpoint().sites
    held = []
    for name in (joined.early[user] for user in users):
        memory = joined.world.sites[name].state.run(run)
        held.append(memory.settle(known["acknowledged"][name], None, memory.pending()).slots)
    names = held[0] if held else ()
    return {name: torch.from_numpy(np.stack([one[name] for one in held])) for name in names}


@pytest.mark.parametrize("averaging", ["none", "uniform"])
@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "scaffold-balanced", "fedprox"])
def test_it_ends_where_a_simulation_from_that_state_does(tmp_path, algorithm, averaging):
    joined = Joined(tmp_path, algorithm, FIXED, user_ratio=0.8, averaging=averaging).begin()
    state, users, slots = state_after(joined)
    served = joined.go_on()
    engine = simulator(joined.world.setting, chunk=1)
    engine.memories.restore({"users": users, "slots": slots})
    driven = Driven(engine)
    driven.state = state
    end = driven.drive().state
    assert torch.equal(served.state.params, end.params)
    assert torch.equal(served.state.output, end.output) and end.round == ROUNDS
    for name, value in end.server.slots.items():
        assert torch.equal(served.state.server.slots[name], value)
    if algorithm == "scaffold":
        memories = memories_of(*(site.state.path for site in joined.world.sites.values()))
        assert largest_gap(served.state.server.slots, memories) < 1e-5


def test_a_server_optimiser_goes_on(tmp_path):
    algorithm = {"name": "fedavg", "server": "momentum"}
    joined = Joined(tmp_path, algorithm, FIXED).begin()
    state = state_after(joined)[0]
    assert bool(state.server.slots["velocity"].any())
    driven = Driven(simulator(joined.world.setting, chunk=1))
    driven.state = state
    served = joined.go_on()
    assert torch.equal(served.state.params, driven.drive().reached.params)


def test_personal_models_stay_with_their_sites(tmp_path):
    personal = PersonalSettings(kind="mean-regularised", strength=0.5)
    joined = Joined(tmp_path, "scaffold", FIXED, personal=personal).begin()
    old = joined.run_in(joined.first)
    boxes = {n: joined.world.sites[n].state.run(old) for n in joined.early}
    kept = {n: box.settle(box.pending().upload, None, box.pending()) for n, box in boxes.items()}
    taken = {}

    def watch(name, step):
        if step == "settled" and name not in taken and name in joined.early:
            run = joined.run_in(joined.second)
            taken[name] = joined.world.sites[name].state.run(run).acknowledged()

    joined.world.steps = watch
    assert joined.go_on().ended == "completed"
    for name in joined.early:
        for slot in ("personal", "joined", "control"):
            np.testing.assert_array_equal(taken[name].slots[slot], kept[name].slots[slot])
    run = joined.run_in(joined.second)
    counts = {
        name: site.state.run(run).acknowledged().slots["joined"][0]
        for name, site in joined.world.sites.items()
    }
    assert counts == {joined.late: 3.0} | dict.fromkeys(joined.early, 5.0)


def test_a_site_that_left_counts_no_more(tmp_path):
    """c is the mean over the sites of today, and the one that left is asked nothing."""
    joined = Joined(tmp_path, "scaffold", FIXED).begin()
    gone, names = joined.early[0], [joined.late, *joined.early[1:]]
    before = joined.world.ledger(gone).total
    served = joined.go_on(names)
    assert served.ended == "completed" and served.setting.users == 3
    memories = memories_of(*(joined.world.sites[name].state.path for name in names))
    assert len(memories) == 3
    assert largest_gap(served.state.server.slots, memories) < 1e-5
    assert joined.world.ledger(gone).total == before
    assert any(f"{gone} is not on the roster" in one for one in joined.said)


def test_a_chain_of_continuations_keeps_to_the_first_grant(tmp_path):
    joined = Joined(tmp_path, rounds=6)
    first, *rest = reversed(joined.world.names)
    outs = [tmp_path / f"run{k}" for k in range(3)]
    names = [first, rest[0]]
    with pytest.raises(Killed):
        made = deployment(joined.world, outs[0], observer=killer(2))
        made.run(tuple(names), False)
    for k in (1, 2):
        names.append(rest[k])
        watch = killer(4) if k == 1 else None
        go = lambda k=k, watch=watch: joined.go_on(names, outs[k], watch, outs[k - 1])  # noqa: E731
        if watch:
            with pytest.raises(Killed):
                go()
        else:
            assert go().ended == "completed"
    ledger = joined.world.ledger(first)
    assert len(ledger.granted) == 1 and ledger.total == 6
    entry = joined.entry(first, outs[2])
    assert (entry.before, entry.used, entry.remaining) == (4, 6, entry.grant.participations - 6)
    account = read_account(outs[2])
    assert [part.rounds for part in account.parts] == [6, 4, 2]
    shown = joined.world.ledger(rest[1]).runs[joined.run_in(outs[2])]
    assert (shown.before, shown.used) == (2, 4)


# --- what is stated


def test_the_statement_counts_both_folders(joined):
    served = joined.go_on()
    account = read_account(joined.second)
    first, second = account.parts  # whoever stopped the first one knew its outputs and its draw
    assert (first.rounds, second.rounds, second.run.rounds) == (ROUNDS, 3, 3)
    assert first.run.users == 3 and second.run.users == 4
    # Each part by itself: all rounds that the first one planned, and those of the second.
    alone = [part.run for part in account.parts]
    sums = sum(at_most(run, rounds) for run, rounds in zip(alone, (ROUNDS, 3), strict=True))
    said, delta = served.statement, alone[0].delta + alone[1].delta
    assert said.delta == pytest.approx(delta)
    cap = max(entry for entry in joined_caps(joined))
    worst = max(at_most(replace(run, rounds=cap, delta=delta), cap) for run in alone)
    server = said.towards("server")
    assert server.epsilon == pytest.approx(min(sums, worst)) and server.theorem == "cap"
    # No site has spent more, by its own exact count at this delta.
    for user, name in enumerate(joined.world.names):
        run = replace(second.run, delta=delta, rounds=9)
        used = joined.entry(name, joined.second).used
        assert spent(run, used, user) <= said.towards("server").epsilon
    assert server.given == said.epsilon == server.epsilon
    assert len(said.parts) == 2 and said.run.users == 4
    only = state(joined.first, delta=delta)
    assert said.towards("server").epsilon > only.towards("server").epsilon


def joined_caps(joined):
    return [joined.entry(name, joined.second).grant.participations for name in joined.world.names]


def test_the_sum_is_stated_where_it_is_smaller(tmp_path):
    """With few of many sites in a round, the draw hides more than the cap. Given who took part,
    every user has the sum of what it spent in each part."""
    joined = Joined(tmp_path, "fedavg", stop=50, rounds=60, user_ratio=0.34).begin()
    said = joined.go_on().statement
    account = read_account(joined.second)
    server = said.towards("server")
    assert server.theorem == "sum" and len(said.parts) == 2
    assert server.epsilon == pytest.approx(sum(one.epsilons["server"] for one in said.parts))
    totals = dict.fromkeys(joined.world.names, 0.0)
    for part, names in zip(account.parts, (joined.early, joined.world.names), strict=True):
        for user, name in enumerate(names):
            totals[name] += spent(part.run, int(part.ledger.participations[user]), user)
    assert server.given == pytest.approx(max(totals.values()), rel=1e-9)
    assert said.epsilon == server.given


def test_every_row_of_the_metrics_counts_the_first_run(joined):
    served = joined.go_on()
    first = read_account(joined.first).statement().towards("server").epsilon
    live = [row["epsilon_server"] for row in served.history]
    assert all(value >= first for value in live) and live == sorted(live)
    status = json.loads((joined.second / "status.json").read_text())
    assert status["epsilon"] == live[-1] >= served.statement.towards("server").epsilon


@pytest.mark.parametrize("damage", ["gone", "shortened", "names"])
def test_the_first_run_cannot_be_left_out(joined, damage):
    joined.go_on()
    earlier = joined.second / "earlier"
    if damage == "gone":
        shutil.rmtree(earlier)
    elif damage == "shortened":
        text = (earlier / "ledger.jsonl").read_text().splitlines(keepends=True)
        (earlier / "ledger.jsonl").write_text("".join(text[:-1]))
    else:
        people = json.loads((earlier / "people.json").read_text())
        (earlier / "people.json").write_text(json.dumps(people | {"cap": 1}))
    with refuses("run-file-changed|ledger-damaged"):
        read_account(joined.second)


def test_the_commands_show_the_total(joined, tmp_path):
    served = joined.go_on()
    said = CliRunner().invoke(app, ["privacy", str(joined.second), "--json"])
    stated = Statement.from_json(json.loads(said.output), "the output")
    assert stated.towards("server").epsilon == served.statement.towards("server").epsilon
    assert stated.held == "sites"
    assert stated.towards("hostile").epsilon is None  # all sites take part in every round
    figure = str(tmp_path / "comparison.png")
    for command in (
        ["privacy", str(joined.second)],
        ["privacy", str(joined.second), "--delta", "1e-4"],
        ["report", str(joined.second), "--out", str(tmp_path / "report.html")],
        ["compare", str(joined.first), str(joined.second), "--out", figure],
        ["server", "status", str(joined.first)],
    ):
        found = CliRunner().invoke(app, command)
        assert found.exit_code == 0, (command, found.output)
    assert "went on" in found.output
    with refuses("run-copied: first … second"):
        CliRunner().invoke(
            app, ["privacy", str(joined.first), str(joined.second)], catch_exceptions=False
        )


def test_a_participation_that_the_first_ledger_missed_is_counted(joined):
    """The first folder was restored from a backup: sites have taken part more often."""
    backup = joined.first.with_name("backup")
    shutil.copytree(joined.first, backup)
    with pytest.raises(Killed):
        joined.resume(joined.early, joined.first, killer(3))
    shutil.rmtree(joined.first)
    shutil.copytree(backup, joined.first)
    joined.go_on()
    counts = read_counts(joined.second, joined.world.names)
    for name in joined.early:
        assert counts[name] >= joined.entry(name, joined.second).used == 6
    assert read_account(joined.second).parts[0].ledger.extra  # not of its planned rest


# --- crashes


@pytest.mark.parametrize("continues", [True, False])
def test_a_grant_is_not_kept_for_other_records(tmp_path, continues):
    """A site that ends between its ledger's line and its folder, and comes back with fewer records:
    each of them is in more batches than the grant's ε counts."""
    joined = Joined(tmp_path, data_ratio=0.25).begin()
    world, name, old = joined.world, joined.early[1], joined.run_in(joined.first)
    asked = joined.offer(name, "aa", old)
    if not continues:
        offer = joined.world.enrolled.offer
        asked = joined.message("offer", name, "aa", offer=offer, commitment="00")

    def end(site, step):
        if (site, step) == (name, "reserved"):
            raise Crash

    world.steps = end
    with pytest.raises(Crash):
        world.send(name, asked)
    world.steps = lambda site, step: None
    world.restart(name)
    assert world.send(name, asked).header["status"] == "yes"
    (world.sites[name].state.run("aa").folder / "enrolment.json").unlink()
    world.write_data(name, world.names.index(name), slice(0, 4))
    world.restart(name)
    answer = world.send(name, asked).header
    assert (answer["status"], answer["reason"]) == ("no", "data-changed")


@pytest.mark.parametrize("step", ["reserved", "begun", "settled", "counted", "stored"])
def test_a_site_that_crashes_anywhere_goes_on_from_its_disk(tmp_path, step):
    """Between the line of the ledger and the first answer, say: its slots are moved then."""
    ended = {}
    for crashes in (False, True):
        joined = Joined(tmp_path / str(crashes), "scaffold", None).begin()
        deaths = {"left": int(crashes)}

        def die(name, at, joined=joined, deaths=deaths):
            if name == joined.early[0] and at == step and deaths["left"]:
                deaths["left"] -= 1
                raise Crash

        joined.world.steps, joined.world.exchange.attempts = die, 3
        ended[crashes] = joined.go_on()
        assert deaths["left"] == 0
        entry = joined.entry(joined.early[0], joined.second)
        assert entry.used == 5 + (crashes and step == "counted")
        ledger = joined.world.ledger(joined.early[0])
        assert len(ledger.granted) == 1 and ledger.total == entry.used
    assert torch.equal(ended[True].state.params, ended[False].state.params)


@pytest.mark.parametrize("at", ["offer", "begin", "draw"])
def test_a_server_that_dies_while_sites_enrol_goes_on(tmp_path, at):
    joined = Joined(tmp_path, "scaffold", None).begin()
    expected = Joined(tmp_path / "other", "scaffold", None).begin().go_on()
    last = joined.world.names[-1]

    def fate(name, message, attempt):
        if message.header["kind"] == at and name == last and message.header["run"] != old:
            raise Killed
        return Delivery()

    old, joined.world.exchange.fate = joined.run_in(joined.first), fate
    with pytest.raises(Killed):
        joined.go_on()
    joined.world.exchange.fate = lambda name, message, attempt: Delivery()
    if at == "offer":  # nobody has begun the rest, so the first run could still go on
        with pytest.raises(Killed):
            joined.resume(joined.early, joined.first, killer(3))
        with refuses("earlier-run-changed: after round 2"):
            joined.resume()
        return
    with refuses("run-continued: second"):
        joined.resume(joined.early, joined.first)
    served = joined.resume()
    assert served.ended == "completed"
    assert torch.equal(served.state.params, expected.state.params)


def test_a_server_killed_in_the_rest_resumes_it(joined):
    with pytest.raises(Killed):
        joined.go_on(observer=killer(4))
    served = joined.resume()
    assert served.ended == "completed" and served.state.round == ROUNDS
    for name in joined.early:
        assert joined.entry(name, joined.second).used == 5
    assert [part.rounds for part in read_account(joined.second).parts] == [ROUNDS, 3]


def test_a_new_site_that_says_no_has_cost_nobody_anything(joined):
    strict = joined.world.policies[joined.late].model_copy(update={"max_parameters": 1})
    joined.world.policies[joined.late] = strict
    with refuses("not-enrolled: policy-model"):
        joined.go_on()
    ledger = joined.world.ledger(joined.early[0])
    assert ledger.granted == [joined.run_in(joined.first)] and ledger.total == 2
    assert joined.resume(joined.early, joined.first).ended == "completed"
    with refuses("run-finished: first"):
        joined.go_on(out=joined.second.with_name("third"))


def test_a_second_try_replaces_the_first_offer(joined):
    """Offers of the rest that never began are let go: they hold nothing, and do not pile up."""
    world, keep = joined.world, joined.world.policies[joined.late]
    world.policies[joined.late] = keep.model_copy(update={"max_parameters": 1})
    for k in range(4):
        with refuses("not-enrolled: policy-model"):
            joined.go_on(out=joined.second.with_name(f"try{k}"))
    world.policies[joined.late] = keep
    name = joined.early[0]
    assert len(list((world.folder / name / "state" / "runs").iterdir())) == 2
    assert joined.go_on().ended == "completed"
    assert len(world.ledger(name).granted) == 1


# --- hostile servers


def test_the_first_run_is_never_answered_again(joined):
    with pytest.raises(Killed):
        joined.go_on(observer=killer(3))
    name, old = joined.early[0], joined.run_in(joined.first)
    used, plan = joined.entry(name, joined.second).used, joined.world.enrolled.plan
    asked = [joined.ask_task(name, old, 4)]
    asked += [joined.offer(name, old, old), joined.offer(name, old, "")]
    asked += [joined.message("settle", name, old, acknowledged="", over=False, statement={})]
    asked += [joined.message("begin", name, old, roster=[], sizes=[], commitments={})]
    asked += [joined.message("draw", name, old, nonces={})]
    asked += [joined.message("key", name, old, plan=plan)]
    assert [joined.world.reason(name, one) for one in asked] == ["run-continued"] * len(asked)
    world = joined.world.restart(name)  # also after it was started again
    assert world(joined.ask_task(name, old, 4)).header["reason"] == "run-continued"
    assert joined.entry(name, joined.second).used == used == joined.world.ledger(name).total


def test_all_participations_together_stay_within_the_grant(joined):
    """A server that asks as long as it gets answers, in the first run and then in the second."""
    world, name = joined.world, joined.early[0]
    old = joined.run_in(joined.first)
    n = joined.entry(name, joined.first).grant.participations
    answers = [world.reason(name, joined.ask_task(name, old, 3))]
    with pytest.raises(Killed):
        joined.go_on(observer=killer(3))
    run, plan = joined.run_in(joined.second), world.enrolled.plan
    fresh = RunFolder(joined.second).load_checkpoint().state
    for k in range(20):
        x = {"params": fresh.params.numpy() + k, "shared.control": fresh.params.numpy()}
        memory = world.sites[name].state.run(run)
        head = {"plan": plan, "round": 4, "acknowledged": memory.acknowledged().upload}
        head |= {"seen": 0, "seen_total": 0}
        answers.append(world.reason(name, ask("task", run, name, head, x, world.key)))
    assert answers.count("") + STOP + 1 == n and set(answers) == {"", "budget-spent"}
    assert world.ledger(name).total == n == joined.entry(name, joined.second).used
    uploads = joined.world.sites[name].audit.lines()
    assert len({one["upload"] for one in uploads if one["event"] == "upload"}) == n


def test_a_run_has_one_continuation(joined):
    """Two children: the second is refused at the server, and by a site whoever asks."""
    with pytest.raises(Killed):
        joined.go_on(observer=killer(3))
    third = joined.second.with_name("third")
    with refuses("run-continued: second"):
        joined.go_on(out=third)
    assert not third.exists()
    (joined.first / "continued.json").unlink()  # a server that forgets
    with refuses("not-enrolled: run-continued"):
        joined.go_on(out=third)
    for name in joined.early:
        assert joined.world.ledger(name).granted == [joined.run_in(joined.second)]


def test_two_children_that_were_offered_together_cannot_both_begin(joined):
    world, name = joined.world, joined.early[0]
    old = joined.run_in(joined.first)
    for run in ("aa", "bb"):
        assert world.send(name, joined.offer(name, run, old)).header["status"] == "yes"
    ledger = world.sites[name]._current_ledger()
    assert ledger.runs["aa"].released and ledger.granted == [old]
    ledger.begin("bb", "fixed")
    ledger = world.ledger(name)
    assert ledger.granted == ["bb"] and ledger.runs["bb"].before == 2
    assert world.reason(name, joined.offer(name, "aa", old)) == "run-continued"
    assert world.reason(name, joined.offer(name, "cc", old)) == "run-continued"
    assert world.reason(name, joined.offer(name, "dd", "aa")) == ""  # a run of which it has nothing
    assert world.ledger(name).runs["dd"].before == 0 and len(world.ledger(name).granted) == 2


def test_a_site_checks_that_somebody_joined(joined):
    """A server that only wants another draw."""
    world, name, old = joined.world, joined.early[0], joined.run_in(joined.first)
    said = world.send(name, joined.offer(name, "aa", old)).header
    sizes = [joined.world.data.roster.sizes[world.names.index(one)] for one in joined.early]
    for names in (joined.early, joined.early[:2]):
        commitments = dict.fromkeys([*names, SERVER], "00") | {name: said["commitment"]}
        begin = joined.message(
            "begin", name, "aa", roster=names, sizes=sizes[: len(names)], commitments=commitments
        )
        assert world.reason(name, begin) == "bad-continuation"
    assert world.ledger(name).granted == [old]
    with refuses("no-new-site: --resume"):
        joined.go_on(joined.early)
    with refuses("no-new-site: --resume"):
        joined.go_on(joined.early[:2])
    assert not joined.second.exists()


@pytest.mark.parametrize("change", ["noise", "clip", "local_steps", "rounds", "data_ratio"])
def test_a_grant_goes_on_with_its_own_mechanism_alone(joined, change):
    world, name, old = joined.world, joined.early[0], joined.run_in(joined.first)
    offer = json.loads(json.dumps(world.enrolled.offer))
    table = "privacy" if change in ("noise", "clip") else "plan"
    offer[table][change] = offer[table][change] * (0.5 if change != "rounds" else 2)
    if change in ("local_steps", "rounds"):
        offer[table][change] = int(offer[table][change])
    found = joined.message(
        *("offer", name, "aa"), continues=old, offer=offer, commitment="00", after=2
    )
    assert world.reason(name, found) == "plan-changed"
    assert "aa" not in world.ledger(name).runs


def test_other_records_need_a_grant_of_their_own(joined):
    world, name, old = joined.world, joined.early[0], joined.run_in(joined.first)
    world.write_data(name, world.names.index(name), slice(0, 6))
    world.restart(name)
    assert world.reason(name, joined.offer(name, "aa", old)) == "data-changed"
    assert world.ledger(name).granted == [old]


def test_an_account_that_differs_is_refused(joined, monkeypatch):
    """The plan is the same, and what is accounted is not: another version of the package, say."""
    world, name, old = joined.world, joined.early[0], joined.run_in(joined.first)
    site = world.sites[name]
    real = site.open_work

    def other(offer, policy):
        work = real(offer, policy)
        work.__dict__["terms"] = replace(work.terms, query="sums")
        return work

    monkeypatch.setattr(site, "open_work", other)
    assert world.reason(name, joined.offer(name, "aa", old)) == "bad-continuation"


def test_replayed_and_foreign_offers_do_nothing(joined):
    world, name, old = joined.world, joined.early[0], joined.run_in(joined.first)
    stranger = ask("offer", "aa", name, {"continues": old}, {}, new_key())
    assert world.reason(name, stranger) == "bad-signature"
    first = joined.offer(name, "aa", old)
    assert world.reason(name, first) == world.reason(name, first) == ""
    assert world.reason(name, joined.offer(name, "aa", "")) == "bad-continuation"
    assert world.reason(name, joined.offer(name, "aa", old, commitment="11")) == "plan-changed"
    assert world.reason(name, joined.offer(name, "bb", "../x")) == ""  # a run it never had
    assert world.reason(name, joined.offer(name, "cc", "ff", after=ROUNDS)) == "bad-continuation"
    assert world.reason(name, joined.offer(name, "cc", 7)) == "bad-continuation"
    lines = (world.folder / name / "state" / "ledger.jsonl").read_text().count('"continue"')
    assert lines == 1


def test_a_joining_site_grants_the_rounds_that_are_left(tmp_path):
    joined = Joined(tmp_path, rounds=20, stop=18).begin()
    joined.go_on()
    assert joined.entry(joined.late, joined.second).grant.participations == 4
    assert joined.entry(joined.early[0], joined.second).grant.participations == 22


def test_a_run_that_people_refused_is_not_continued(joined):
    world, name, old = joined.world, joined.early[0], joined.run_in(joined.first)
    requests = world.sites[name]._requests
    requests.decide(requests.find(old), "refused", "somebody")
    assert world.reason(name, joined.offer(name, "aa", old)) == "not-approved"


def test_people_are_asked_about_the_rest_too(joined):
    name = joined.early[0]
    policy = joined.world.policies[name]
    joined.world.policies[name] = policy.model_copy(update={"approval": "each-run"})
    with refuses("not-enrolled: awaiting-approval"):
        joined.go_on()
    requests = joined.world.sites[name]._requests
    (waiting,) = [one for one in requests.all() if one.decision == "waiting"]
    assert waiting.continues == joined.run_in(joined.first)
    assert waiting.participations == joined.entry(name, joined.first).remaining
    assert "nothing new" in "\n".join(request_lines(waiting, "here"))
    requests.decide(waiting, "approved", "somebody")
    assert joined.resume().ended == "completed"
    requests.decide(requests.find(waiting.continues), "refused", "somebody")
    run = joined.run_in(joined.second)
    assert joined.world.reason(name, joined.ask_task(name, run, 5)) == "not-approved"


def test_the_number_of_runs_counts_once(tmp_path):
    joined = Joined(tmp_path)
    for name, policy in joined.world.policies.items():
        joined.world.policies[name] = policy.model_copy(update={"max_runs": 1})
    assert joined.begin().go_on().ended == "completed"
    assert all(joined.entry(n, joined.second).used == 5 for n in joined.early)


def test_a_stricter_policy_counts_what_was_used_before(joined):
    """ε of 3 participations, when 2 are used: one is left for the rest."""
    name = joined.early[0]
    policy = joined.world.policies[name]
    joined.world.policies[name] = policy.model_copy(
        update={"epsilon": joined.world.cost(name, 3, joined.run_in(joined.first))}
    )
    joined.go_on()
    assert joined.world.ledger(name).total == 3


# --- ledgers: copies, backups, replay


def test_a_ledger_reads_back_as_it_was_written(joined):
    joined.go_on()
    for name in joined.world.names:
        live = joined.world.sites[name]._current_ledger()
        again = joined.world.ledger(name)
        assert live.granted == again.granted and live.total == again.total
        for run, entry in live.runs.items():
            assert replace(entry, account={}) == replace(again.runs[run], account={})


def test_a_copy_from_before_the_move_is_noticed(joined):
    """The state folder is put back as it was before the rest began."""
    world, name = joined.world, joined.early[0]
    state, backup = world.folder / name / "state", world.folder / name / "backup"
    shutil.copytree(state, backup)
    made = joined.made(observer=killer(3))
    with pytest.raises(Killed):
        made.run(world.names, False, joined.first)
    world.close(name)
    shutil.rmtree(state)
    shutil.copytree(backup, state)
    world.open(name)
    run = joined.run_in(joined.second)
    heads = [dict(vars(head)) for head in made.post.heads[name]]
    asked = joined.message("draw", name, run, nonces={}, seen=1, seen_total=3, heads=heads)
    assert world.reason(name, asked) == "ledger-behind"
    old = joined.run_in(joined.first)
    assert world.reason(name, joined.ask_task(name, old, 4)) == "ledger-behind"
    world.close(name)
    folder = world.open(name).state
    recover(folder, name, world.policies[name])
    ledger = world.ledger(name)
    assert not ledger.runs[old].remaining and ledger.left(world.policies[name]).epsilon == 0


def test_recovery_of_a_continued_run_spends_the_grant_where_it_is(joined):
    """A server has seen more of the first run than the ledger holds, after the rest began."""
    with pytest.raises(Killed):
        joined.go_on(observer=killer(3))
    world, name, old = joined.world, joined.early[0], joined.run_in(joined.first)
    asked = joined.message("draw", name, old, nonces={}, seen=4, seen_total=5)
    assert world.reason(name, asked) == "ledger-behind"
    recover(world.sites[name].state, name, world.policies[name])
    entry = joined.entry(name, joined.second)
    assert entry.remaining == 0 and entry.used == entry.grant.participations
    assert world.reason(name, joined.ask_task(name, joined.run_in(joined.second), 4)) in (
        "budget-spent",
        "state-mismatch",
    )


def test_a_lost_folder_of_the_rest_is_made_again(tmp_path):
    """The server knows the slots; the ledger knows the grant."""
    joined = Joined(tmp_path, "scaffold", FIXED).begin()
    with pytest.raises(Killed):
        joined.go_on(observer=killer(3))
    name, run = joined.early[0], joined.run_in(joined.second)
    joined.world.close(name)
    shutil.rmtree(joined.world.folder / name / "state" / "runs" / run)
    joined.world.open(name)
    assert joined.resume().ended == "completed"
    entry = joined.entry(name, joined.second)
    assert entry.used == 5 and joined.world.ledger(name).granted == [run]


def test_the_ledger_tells_people_what_happened(joined):
    joined.go_on()
    name = joined.early[0]
    ledger = joined.world.ledger(name)
    said = {"site": name, "theorem": "", "recovered": [], "promise": "", "runs_left": 1}
    said |= {"epsilon_left": 1.0, "epsilon_reserved": 1.0}
    said["runs"] = [_run_line(entry) for entry in ledger.runs.values()]
    first, second = ledger_lines(said)[1:3]
    assert "went on as run" in first and "ε" not in first
    assert "5 of 7 participations, 2 of them before, as run" in second
    line = said["runs"][1]
    assert line["epsilon_spent"] <= line["epsilon_granted"] and line["left"] == 2
    both = ledger.runs[joined.run_in(joined.second)]
    account = both.account
    assert line["epsilon_spent"] > _run_line(replace(both, before=0))["epsilon_spent"]
    assert account == ledger.runs[joined.run_in(joined.first)].account


def test_a_run_without_its_grant_takes_no_participation(tmp_path):
    """The ledger itself refuses, whoever asks it."""
    joined = Joined(tmp_path).begin()
    joined.go_on()
    ledger = joined.world.ledger(joined.early[0])
    with refuses("run-continued"):
        ledger.participate(joined.run_in(joined.first), 5)
    assert ledger.total == 5


# --- what cannot be continued


def test_the_first_folder_says_that_it_went_on(joined):
    joined.go_on()
    with refuses("run-continued: --out is … first … second"):
        joined.resume(joined.early, joined.first)
    with refuses("run-finished: second"):
        joined.go_on(out=joined.second.with_name("third"), continues=joined.second)
    with refuses("not-a-run: --continue"):
        joined.go_on(out=joined.second.with_name("third"), continues=joined.second / "earlier")


def test_a_changed_plan_is_refused_with_its_remedy(joined):
    made = joined.made()
    privacy = made.offer.privacy.changed(noise=21.0)
    made.offer = made.offer.model_copy(update={"privacy": privacy})
    with refuses("plan-changed: privacy.noise = 20.0 … 21.0"):
        made.run(joined.world.names, False, joined.first)
    made = joined.made()
    plan = made.offer.plan.model_copy(update={"rounds": 7})
    made.offer = made.offer.model_copy(update={"plan": plan})
    with refuses("configuration-changed: plan.rounds"):
        made.run(joined.world.names, False, joined.first)
    assert not joined.second.exists()


def test_what_has_no_rest_of_its_own_is_refused(joined):
    made = joined.made()
    noises = dict.fromkeys(joined.world.names, 20.0)
    cases = {
        "not-applicable: table": {"noises": noises},
        "not-applicable: secure": {"secure": {"colluders": 1}},
        "not-applicable: ridge": {
            "algorithm": made.offer.algorithm.model_copy(update={"name": "ridge"})
        },
    }
    for expected, update in cases.items():
        made = joined.made()
        made.offer = made.offer.model_copy(update=update)
        with refuses(expected):
            made.run(joined.world.names, False, joined.first)
    made = joined.made()
    made.limits = Gaussian(noise=1.0, delta=1e-5, user_epsilon=0.2)
    with refuses("not-applicable: privacy.user_epsilon"):
        made.run(joined.world.names, False, joined.first)
    with refuses("roster-changed: none of them"):
        joined.go_on([joined.late])
    assert not joined.second.exists()


def test_a_run_without_a_finished_round_is_resumed_instead(tmp_path):
    joined = Joined(tmp_path)
    joined.world.exchange.fate = lambda name, signed, attempt: Delivery(
        lose_ask=signed.header["kind"] == "begin" and name == joined.early[0]
    )
    with refuses("not-enrolled"):
        deployment(joined.world, joined.first).run(tuple(joined.early), False)
    with refuses("no-rounds-yet: --resume"):
        joined.go_on()


def test_a_run_in_progress_is_stopped_first(joined):
    busy = RunFolder(joined.first)
    busy.lock()
    try:
        with refuses("folder-in-use: --continue … stop it first"):
            joined.go_on()
    finally:
        busy.release()
    assert not joined.second.exists()


def test_a_run_without_privacy_goes_on_too(tmp_path):
    joined = Joined(tmp_path, "scaffold", None).begin()
    served = joined.go_on()
    assert served.ended == "completed" and not served.statement.guarantee


def test_a_child_that_comes_too_late_leaves_the_ledger_whole(joined):
    world, name, old = joined.world, joined.early[0], joined.run_in(joined.first)
    ledger = world.ledger(name)
    for run in ("aa", "bb"):
        ledger.offer_rest(run, old)
    ledger.begin("aa", "fixed")
    with refuses("run-continued"):
        ledger.begin("bb", "fixed")
    assert world.ledger(name).granted == ["aa"]


def test_an_offer_that_was_replaced_can_come_again(joined):
    """An operator tries another folder, then the first one again; the ledger stays whole."""
    world, name, old = joined.world, joined.early[0], joined.run_in(joined.first)
    for run in ("aa", "bb", "aa"):
        assert world.reason(name, joined.offer(name, run, old)) == ""
        assert world.ledger(name).granted == [old]
    ledger = world.ledger(name)
    assert ledger.runs["bb"].released and not ledger.runs["aa"].released
    with refuses("bad-continuation"):
        ledger.offer_rest("aa", old)
    ledger.begin("aa", "fixed")
    assert world.ledger(name).runs["aa"].used == 2 and world.ledger(name).granted == ["aa"]


def test_a_used_grant_is_never_taken_back(joined):
    """Grants without a participation are; the rest of a run that was used has one before."""
    world, name, old = joined.world, joined.early[0], joined.run_in(joined.first)
    ledger = world.ledger(name)
    ledger.offer_rest("aa", old)
    ledger.begin("aa", "fixed")
    assert ledger.runs["aa"].participations == 0 and ledger.unused(besides="") == []


def test_there_is_no_cap_where_a_site_grants_twice(joined):
    """A site whose state was lost grants afresh: what it may do in both is not its new n."""
    world, name = joined.world, joined.early[0]
    world.close(name)
    shutil.rmtree(world.folder / name / "state")
    world.open(name)
    made = joined.made()
    made.post.totals.clear()
    said = made.run(world.names, False, joined.first).statement
    account = read_account(joined.second)
    assert account.facts.cap == 0 and said.towards("server").theorem != "cap"
    assert said.towards("server").given > account.statement().parts[0].epsilons["server"]


@pytest.mark.slow
def test_a_site_joins_over_real_processes(tmp_path):
    """An operator's way: stop the server, admit the site, continue; on loopback, with TLS."""
    flower = pytest.importorskip("dpscaffold.deployment.transports.flower")
    flower.require()
    from deploy_demo import POLICY, demo_tables
    from local_federation import LocalFederation

    from dpscaffold.deployment.provision import admit, remove
    from dpscaffold.deployment.site.operation import ledger_of

    names, data = ("east", "north", "west"), federation((60, 60, 60))
    held = {name: tuple(t.numpy() for t in data.train.of(k)) for k, name in enumerate(names)}
    rounds = 12  # of which a busy machine leaves some to a server that is told to stop
    tables = demo_tables(rounds, rehearsal=False)
    tables["schema"] = {"features": data.dimension, "classes": data.classes}
    first, second = tmp_path / "first", tmp_path / "second"
    with LocalFederation(tmp_path / "fed", held, POLICY | {"max_runs": "1"}) as local:
        server = local.folder / "server"
        remove(server, "west")
        local.names = names[:2]
        local.start()
        plan = local.config("plan", tables)
        local.start_server(plan, first)
        local._await("server", "round 1:")
        assert local.stop("server") == 143
        admit(server, local.folder / "west" / "west.site")
        local.start_site("west")
        words = [str(plan), "--out", str(second), "--server", str(server)]
        local._start("server", "server", "run", *words, "--continue", str(first))
        assert local.processes["server"].wait(600) == 0, local.log("server")[-2000:]
        for name in names:
            said = ledger_of(local.folder / name / "site.toml")
            assert said["runs_left"] == 0 and said["runs"][-1]["left"] >= 0
        assert said["participations"] < rounds  # west joined late
    assert RunFolder(second).summary().ended == "completed"
    assert len(read_account(second).parts) == 2
