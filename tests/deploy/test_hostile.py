"""A hostile server with the coordinator's key: one test for each thing that it cannot do."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from deploy.world import World, same_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses
from stated import at_most

from dpscaffold.config.gaussian import Gaussian
from dpscaffold.deployment.protocol.enrolment import EnrolledRun, NotEnrolled, begin_with, offer_to
from dpscaffold.deployment.protocol.messages import (
    REASONS,
    SERVER,
    VERSION,
    SignedMessage,
    ask,
    commitment,
    digest,
    fresh_id,
    new_key,
    public_of,
    sign,
    unpack,
)
from dpscaffold.deployment.site.file import Policy
from dpscaffold.privacy import describe

SECRET = Gaussian(clip=0.7, noise=20.0, secret=True)
CENTRE = {"step": "centre", "fit": "private", "norm_bound": 4.0, "noise": 2.0}
STRICT = {
    "epsilon": 40.0,
    "delta": 1e-4,
    "max_runs": 2,
    "max_local_steps": 5,
    "units": ("record",),
}


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path, "scaffold", privacy=SECRET, policy=STRICT, rounds=8, user_ratio=1.0)
    made.enrol()
    return made


def offered(world, **changes):
    """What a site says to the offer with some of its tables changed."""
    offer = dict(world.enrolled.offer)
    for table, change in changes.items():
        offer[table] = change if not isinstance(change, dict) else {**offer[table], **change}
    return world.reason("north", offer_message(world, offer))


def offer_message(world, offer, run=None, **fields):
    head = {"offer": offer, "commitment": "c", "seen": 0, "seen_total": 0}
    return ask("offer", run or fresh_id(), "north", head | fields, {}, world.key)


# --- run code at a site


def test_it_cannot_run_code_at_a_site(world, tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text("raise SystemExit('this ran')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert offered(world, algorithm={"name": "planted:make"}) == "policy-algorithm"
    task = {"kind": "module", "module": "planted:make", "hidden": 6}
    assert offered(world, task=task) == "policy-model"
    assert "planted" not in sys.modules


# --- lower noise, raise clip, K, rounds or runs beyond the policy


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"privacy": {"noise": 0.5}}, "policy-epsilon"),
        ({"privacy": {"clip": 0.0}}, "bad-offer"),
        ({"privacy": {"clip": "median"}}, "policy-clip"),
        ({"privacy": {"unit": "user"}}, "policy-unit"),
        ({"privacy": {"secret": False}}, "policy-unprotected"),
        ({"privacy": None}, "policy-unprotected"),
        ({"plan": {"local_steps": 6}}, "policy-steps"),
        ({"task": {"kind": "mlp", "hidden": 1_000_000}}, "policy-model"),
        ({"task": {"kind": "mlp", "hidden": 1 << 40}}, "policy-model"),
        ({"plan": {"rounds": 100_000}}, "policy-epsilon"),
        ({"rows": {"prepare": [{"step": "whiten"}]}}, "preparation"),
        ({"rows": {"prepare": [CENTRE]}}, "preparation"),
        ({"rows": {"prepare": [{"step": "pca"}]}}, "bad-offer"),
        ({"rows": {"features": 5}}, "data-unfit"),
        ({"plan": {"rounds": "8"}}, "bad-offer"),
        ({"plan": {"rounds": -1}}, "bad-offer"),
        ({"plan": {"rounds": True}}, "bad-offer"),
        ({"plan": {"learning_rate": 1e400}}, "bad-signature"),
        ({"privacy": {"noise": "20"}}, "bad-offer"),
        ({"plan": None}, "bad-offer"),
        ({"task": 3}, "bad-offer"),
        ({"format": 2}, "bad-offer"),
        ({"extra": 1}, "bad-offer"),
    ],
)
def test_it_cannot_go_beyond_the_policy(world, changes, code):
    before = world.ledger("north").anchor
    if code == "bad-signature":  # an infinity cannot even be written into a message
        with pytest.raises(ValueError):
            offered(world, **changes)
        return
    assert offered(world, **changes) == code
    assert world.ledger("north").anchor == before  # nothing was recorded


def test_it_cannot_have_more_rounds_than_were_granted(world):
    cap = world.ledger("north").runs[world.enrolled.run].grant.participations
    assert cap == 10  # T + 2
    for k in range(cap):
        vectors = {"params": np.full(15, 0.01 * k, "<f4")}
        assert world.reason("north", world.task("north", 8, vectors)) == ""
    assert world.reason("north", world.task("north", 8, {"params": np.ones(15, "<f4")})) == (
        "budget-spent"
    )
    assert world.reason("north", world.task("north", 9)) == "bad-round"
    assert world.count("north") == cap


def test_it_cannot_have_more_runs_than_the_policy_allows(world):
    def another():
        world.fresh_server()
        world.enrol()
        world.round()

    world.round()
    another()
    with pytest.raises(NotEnrolled) as refused:
        another()
    assert set(refused.value.reasons.values()) == {"policy-runs"}
    ledger = world.ledger("north")
    reserved = sum(entry.grant.epsilon for entry in ledger.runs.values())
    assert reserved <= 40.0 and len(ledger.runs) == 2


def test_runs_that_never_began_are_not_held_against_the_next(tmp_path):
    world = World(tmp_path, "scaffold", privacy=SECRET, policy=STRICT, rounds=8, user_ratio=1.0)
    for _ in range(5):
        offer_to(world.post, world.enrolled)
        world.fresh_server()
    world.enrol()
    assert world.drive(2).state.round == 2


# --- change a plan in mid-run


def test_it_cannot_change_the_plan_in_mid_run(world):
    plan = {**world.enrolled.offer, "plan": {**world.enrolled.offer["plan"], "seed": 7}}
    assert world.reason("north", world.task("north", plan=digest(plan))) == "plan-changed"
    promise = commitment(world.enrolled.run, SERVER, world.enrolled.nonce)
    again = offer_message(world, plan, world.enrolled.run, commitment=promise)
    assert world.reason("north", again) == "plan-changed"


def test_a_stricter_policy_counts_at_once_and_a_looser_one_does_not(world):
    before = world.policies["north"]
    world.policies["north"] = before.model_copy(update={"max_local_steps": 2})
    assert world.reason("north", world.task("north")) == "policy-steps"
    world.policies["north"] = before.model_copy(update={"epsilon": world.cost("north", 1)})
    assert world.reason("north", world.task("north")) == ""
    other = {"params": np.ones(15, "<f4")}
    assert world.reason("north", world.task("north", 1, other)) == "budget-spent"
    cap = world.ledger("north").runs[world.enrolled.run].grant
    world.policies["north"] = before.model_copy(update={"epsilon": cap.epsilon / 2})
    allowed = [world.reason("north", world.task("north", 2, {"params": np.full(15, k, "<f4")}))
               for k in range(10)]  # fmt: skip
    assert "budget-spent" in allowed and world.count("north") < cap.participations
    world.policies["north"] = before.model_copy(update={"epsilon": 1e5})
    codes = [world.reason("north", world.task("north", 3, {"params": np.full(15, -k, "<f4")}))
             for k in range(12)]  # fmt: skip
    assert codes[-1] == "budget-spent" and world.count("north") == cap.participations


#: A stricter value of every number of the policy, and the code of the next answer.
STRICTER = {
    "epsilon": (1e-3, "budget-spent"),
    "delta": (1e-11, "budget-spent"),
    "max_local_steps": (2, "policy-steps"),
    "units": (("user",), "policy-unit"),
    "algorithms": (("fedavg",), "policy-algorithm"),
    "tasks": (("mlp",), "policy-model"),
    "max_parameters": (14, "policy-model"),
    "max_runs": (1, "budget-spent"),
    "approval": ("each-run", "awaiting-approval"),
}


def test_every_number_of_the_policy_is_in_the_table():
    """All but what is for preparation (test_preparation_deployed.py)."""
    assert {*STRICTER, "preparation"} == set(Policy.model_fields)


@pytest.mark.parametrize(
    ("name", "privacy"), [*((name, SECRET) for name in STRICTER), ("units", None)]
)
def test_every_stricter_number_counts_from_the_next_message(tmp_path, name, privacy):
    value, code = STRICTER[name]
    code = "policy-unprotected" if privacy is None else code
    loose = STRICT | {"units": ("record", "none")}
    world = World(tmp_path, "scaffold", privacy=privacy, policy=loose, rounds=8, user_ratio=1.0)
    if name == "max_runs":  # one run is reserved before this one
        offer_to(world.post, EnrolledRun.fresh(world.enrolled.offer, world.names))
    world.enrol()
    other = {"params": np.ones(15, "<f4")}
    assert world.reason("north", world.task("north", 1)) == ""
    begun = world.ledger("north").anchor
    changed = world.policies["north"].model_copy(update={name: value})
    world.policies["north"] = changed
    assert world.reason("north", world.task("north", 2, other)) == code
    assert world.ledger("north").anchor == begun  # nothing was counted or computed


@pytest.mark.parametrize("name", ["epsilon", "delta", "max_local_steps"])
def test_a_policy_that_became_stricter_before_the_run_began_stops_it(tmp_path, name):
    world = World(tmp_path, "scaffold", privacy=SECRET, policy=STRICT, rounds=8, user_ratio=1.0)
    enrolled = offer_to(world.post, world.enrolled)
    changed = world.policies["north"].model_copy(update={name: STRICTER[name][0]})
    world.policies["north"] = changed
    with refuses("not-enrolled"):
        begin_with(world.post, enrolled)
    assert not world.ledger("north").runs[enrolled.run].began


def test_delta_counts_over_all_runs_together(tmp_path):
    """Two grants of δ/2 each: below their sum neither run goes on, and at it both do."""
    world = World(tmp_path, "scaffold", privacy=SECRET, policy=STRICT, rounds=8, user_ratio=1.0)
    offer_to(world.post, EnrolledRun.fresh(world.enrolled.offer, world.names))
    world.enrol()
    before = world.policies["north"]
    for delta, code in ((0.99e-4, "budget-spent"), (1e-4, "")):
        world.policies["north"] = before.model_copy(update={"delta": delta})
        assert world.reason("north", world.task("north", 1)) == code
    # More runs to come are no reason to end this one, though a new grant would be smaller.
    world.policies["north"] = before.model_copy(update={"max_runs": 20})
    assert world.reason("north", world.task("north", 2)) == ""


def test_a_stricter_share_of_one_run_lowers_its_cap(world):
    """What is served costs no more than today's epsilon, by an account of its own."""
    grant = world.ledger("north").runs[world.enrolled.run].grant
    share = grant.epsilon / 2
    world.policies["north"] = world.policies["north"].model_copy(update={"epsilon": share})
    for k in range(12):
        world.reason("north", world.task("north", 1, {"params": np.full(15, k, "<f4")}))
    served = world.count("north")

    def cost(n):
        steps = world.setting.plan.local_steps
        return at_most(
            describe(
                rounds=n,
                local_steps=steps,
                users=1,
                cohort_size=1,
                records=12,
                batch_sizes=4,
                noise=SECRET.noise,
                delta=grant.delta,
            )
        )

    assert 0 < served < grant.participations
    assert cost(served) <= share < cost(served + 1)


# --- choose or repeat a draw for free


def test_it_cannot_choose_the_draw(tmp_path):
    world = World(tmp_path, "scaffold", privacy=SECRET, policy=STRICT, rounds=8, user_ratio=0.4)
    world.enrol()
    drawn = {t: world.names[int(world.draw(t).drawn[0])] for t in range(1, 9)}
    for number, chosen in drawn.items():
        for name in world.names:
            if name != chosen:
                assert world.reason(name, world.task(name, number)) == "not-drawn"
    other = dict(world.enrolled.nonces) | {SERVER: fresh_id()}
    head = {"nonces": other, "seen": 0, "seen_total": 0}
    message = ask("draw", world.enrolled.run, "north", head, {}, world.key)
    assert world.reason("north", message) == "bad-draw"


def test_it_cannot_begin_a_run_twice(world):
    def begin(**changes):
        head = {
            "roster": list(world.names),
            "sizes": list(world.enrolled.sizes),
            "commitments": dict(world.enrolled.commitments),
            "seen": 0,
            "seen_total": 0,
        }
        message = ask("begin", world.enrolled.run, "north", head | changes, {}, world.key)
        return world.reason("north", message)

    assert begin() == ""
    assert begin(roster=["north"], sizes=[12]) == "roster-changed"
    assert begin(sizes=[9, 12, 8]) == "roster-changed"
    promises = dict(world.enrolled.commitments) | {SERVER: commitment("x", SERVER, "y")}
    assert begin(commitments=promises) == "roster-changed"
    assert begin(roster=["north", "north", "east"]) == "roster-changed"
    assert begin(roster="north") == "roster-changed"
    world.memory("north").forget()  # even where the site lost its folder of the run
    assert world.reason("north", world.task("north")) == "unknown-run"
    promise = world.enrolled.commitments[SERVER]
    offer = offer_message(world, world.enrolled.offer, world.enrolled.run, commitment=promise)
    assert world.reason("north", offer) == ""
    assert begin(roster=["east", "north"], sizes=[9, 12]) == "bad-draw"
    assert begin(sizes=[9, 12, 8]) == "roster-changed"
    assert begin() == ""


def test_the_nonce_is_shown_only_after_all_have_committed(tmp_path):
    world = World(tmp_path, "scaffold", privacy=SECRET, policy=STRICT, rounds=8, user_ratio=1.0)
    enrolled = offer_to(world.post, world.enrolled)
    head = {
        "roster": list(world.names),
        "sizes": list(enrolled.sizes),
        "commitments": {k: v for k, v in enrolled.commitments.items() if k != "east"},
        "seen": 0,
        "seen_total": 0,
    }
    message = ask("begin", enrolled.run, "north", head, {}, world.key)
    assert world.reason("north", message) == "bad-draw"
    assert not world.ledger("north").runs[enrolled.run].began
    secret = world.sites["north"].state.run(enrolled.run).enrolment().nonce
    assert all(secret.encode() not in raw for _, raw in world.exchange.answered)


# --- make a site repeat noise


def test_it_cannot_make_a_site_repeat_its_noise(tmp_path):
    """Answers to one repeated round number, with nearly equal x: independent noise of the stated
    variance.

    The difference of two uploads has variance 2·K·(η_l·2Cσ_g/b)² in every entry (the gradients
    themselves add less than 2 %); 20 differences of 15 entries are chi-square with 300 degrees of
    freedom, of relative deviation 0.082, so five of them leave [0.59, 1.41]. A repeated stream
    gives 0, a scale that is half or twice as large 0.25 or 4.
    """
    loose = STRICT | {"epsilon": 2e5}
    world = World(tmp_path, "scaffold", privacy=SECRET, policy=loose, rounds=60, user_ratio=1.0)
    world.enrol()
    plan, batch = world.setting.plan, int(world.setting.batch_sizes[1])
    scale = plan.step_size * (2 * 0.7 * 20.0 / batch) * np.sqrt(plan.local_steps)
    moves = []
    for k in range(40):
        x = np.full(15, 1e-6 * k, "<f4")
        answer = world.send("north", world.task("north", 1, {"params": x}))
        assert answer.header["fresh"] is True
        moves.append(answer.vectors["params"].astype(np.float64))
    apart = (np.array(moves[::2]) - np.array(moves[1::2])) / (np.sqrt(2) * scale)
    assert 0.59 < float(np.mean(apart**2)) < 1.41
    assert world.count("north") == 40  # and each is counted


def test_the_same_question_gets_the_same_bytes_and_costs_nothing(world):
    first = world.send("north", world.task("north"))
    again = world.send("north", world.task("north"))
    assert first.header["fresh"] is True and again.header["fresh"] is False
    assert same_bytes(first, again) and first.header["upload"] == again.header["upload"]
    assert world.count("north") == 1
    other = world.send("north", world.task("north", 1, {"params": np.ones(15, "<f4")}))
    assert other.header["fresh"] is True and world.count("north") == 2
    earlier = world.send("north", world.task("north"))  # the first question is no longer at hand
    assert earlier.header["fresh"] is True and not same_bytes(first, earlier)


def test_it_cannot_go_back_to_an_earlier_round(world):
    assert world.reason("north", world.task("north", 3)) == ""
    assert world.reason("north", world.task("north", 2)) == "stale-round"
    assert world.count("north") == 1


# --- tell a record by NaN or overflow


@pytest.mark.parametrize(
    ("vectors", "code"),
    [
        ({"params": np.full(15, np.nan, "<f4")}, "not-finite"),
        ({"shared.control": np.full(15, np.inf, "<f4")}, "not-finite"),
        ({"params": np.full(15, 3e38, "<f4")}, "out-of-range"),
        ({"params": np.full(15, 10_001, "<f4")}, "out-of-range"),
        ({"params": np.zeros(14, "<f4")}, "bad-shape"),
        ({"shared.control": None}, "bad-shape"),
        ({"shared.other": np.zeros(15, "<f4")}, "bad-shape"),
        ({"restore.control": np.zeros(3, "<f4")}, "bad-shape"),
        ({"restore.control": np.full(15, np.nan, "<f4")}, "not-finite"),
        ({"restore.control": np.full(15, 1e9, "<f4")}, "out-of-range"),
    ],
)
def test_it_cannot_send_what_makes_a_record_show(world, vectors, code):
    assert world.reason("north", world.task("north", 1, vectors)) == code
    assert world.count("north") == 0


def test_the_largest_numbers_give_finite_uploads_whatever_the_record(world):
    """At the policy's limit an extreme record does not decide whether the upload is finite."""
    for value in (1e3, -1e3):
        answer = world.send("north", world.task("north", 1, {"params": np.full(15, value, "<f4")}))
        assert all(np.isfinite(vector).all() for vector in answer.vectors.values())


# --- corrupt a ledger or memory unnoticed


def test_it_cannot_acknowledge_what_it_never_had(world):
    world.send("north", world.task("north"))
    assert world.reason("north", world.task("north", 2, acknowledged="f" * 32)) == "state-mismatch"
    assert world.reason("north", world.task("north", 2, acknowledged=3)) == "state-mismatch"
    assert world.memory("north").acknowledged().upload == ""


def test_it_cannot_reach_files_by_a_runs_name(world):
    for run in ("../../escape", "/etc", "", "A" * 3, "ab" * 40):
        message = ask("task", run, "north", {"seen": 0, "seen_total": 0}, {}, world.key)
        assert world.reason("north", message) == "unknown-run"


def test_seen_beyond_the_ledger_stops_the_site_until_its_operator_acts(world):
    from dpscaffold.deployment.site.recovery import recover

    world.send("north", world.task("north"))
    assert world.reason("north", world.task("north", 1, seen=2)) == "ledger-behind"
    assert world.reason("north", world.task("north", 1)) == "ledger-behind"  # and stays so
    said = recover(world.sites["north"].state, "north", world.policies["north"])
    assert len(said) == 1
    entry = world.ledger("north").runs[world.enrolled.run]
    assert entry.participations == entry.grant.participations
    assert world.reason("north", world.task("north", 2)) == "budget-spent"


# --- messages that are no messages


def test_strangers_and_mistakes_are_refused(world):
    task = world.task("north")
    stranger = sign(task.header, task.vectors, new_key())
    assert world.reason("north", stranger) == "bad-signature"
    assert world.reason("north", SignedMessage(task.header, task.vectors)) == "bad-signature"
    assert world.reason("east", task) == "not-for-me"
    old = sign({**task.header, "version": VERSION + 1}, task.vectors, world.key)
    assert world.reason("north", old) == "version"
    odd = sign({**task.header, "kind": "execute"}, task.vectors, world.key)
    assert world.reason("north", odd) == "version"
    echo = sign({**task.header, "direction": "answer"}, task.vectors, world.key)
    assert world.reason("north", echo) == "bad-signature"
    assert world.count("north") == 0


JUNK = st.dictionaries(
    st.sampled_from(
        [
            "version",
            "kind",
            "direction",
            "run",
            "site",
            "nonce",
            "offer",
            "commitment",
            "roster",
            "sizes",
            "commitments",
            "nonces",
            "plan",
            "round",
            "acknowledged",
            "seen",
            "seen_total",
            "heads",
            "over",
        ]
    ),
    st.none()
    | st.booleans()
    | st.integers(-5, 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.lists(st.integers(0, 3), max_size=3)
    | st.dictionaries(st.text(max_size=3), st.integers(0, 3), max_size=2),
)


@settings(max_examples=120, deadline=None)
@given(
    junk=JUNK,
    kind=st.sampled_from(["offer", "begin", "draw", "task", "settle"]),
    known=st.booleans(),
)
def test_whatever_it_signs_gets_a_code_and_changes_nothing(shared_world, junk, kind, known):
    world = shared_world
    before = world.ledger("north").anchor
    head = {"run": world.enrolled.run, "site": "north", "version": VERSION, "direction": "ask"}
    head |= {"kind": kind, "seen": 0, "seen_total": 0} if known else {}
    header = {**junk, **head} if known else {**head, **junk}
    if kind == "task":
        header.setdefault("acknowledged", "nothing")
    answer = world.send("north", sign(header, {}, world.key))
    if answer.header["status"] == "no":
        assert answer.header["reason"] in REASONS
        assert answer.header["reason"] != "site-error", world.logs["north"][-1]
    assert answer.signed_by(public_of(world.keys["north"]))
    assert world.ledger("north").anchor == before


@pytest.fixture(scope="module")
def shared_world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    made = World(folder, "scaffold", privacy=SECRET, policy=STRICT, rounds=8, user_ratio=1.0)
    made.enrol()
    return made


def test_nothing_that_leaves_names_an_error(world, monkeypatch):
    """Unforeseen trouble is one code; its text stays in the site's log."""
    monkeypatch.setattr(
        type(world.sites["north"]),
        "_compute",
        lambda *a: (_ for _ in ()).throw(RuntimeError("patient 17 has no pulse")),
    )
    answer = world.send("north", world.task("north"))
    assert answer.header["reason"] == "site-error" and not answer.vectors
    assert "patient" not in str(answer.header)
    assert any("patient 17" in line for line in world.logs["north"])
    assert world.count("north") == 1  # counted before it was computed


def test_every_answer_of_a_run_is_a_code_or_an_upload(world):
    world.drive()
    world.engine.settle(world.state.output)
    allowed = {
        "version kind direction run site nonce status records declared cap uploads commitment "
        "participations total nonce_shown upload round fresh ledger"
    }
    for _, raw in world.exchange.answered:
        message = unpack(raw)
        assert set(message.header) <= set(" ".join(allowed).split())


def test_enrolled_survives_its_file(world):
    import json

    assert EnrolledRun.from_dict(json.loads(json.dumps(world.enrolled.to_dict()))) == world.enrolled
