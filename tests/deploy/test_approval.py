"""A person's yes before a run, and the log of everything that was asked, decided and sent."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from deploy.world import World
from refusals import refuses
from typer.testing import CliRunner

from dpscaffold import Gaussian
from dpscaffold.cli import app
from dpscaffold.deployment.protocol.enrolment import begin_with, offer_to
from dpscaffold.deployment.protocol.messages import fingerprint, public_of
from dpscaffold.deployment.site.approval import chosen, decide, request_lines, requests_in
from dpscaffold.deployment.site.audit import AuditLog, verified

SECRET = Gaussian(clip=0.7, noise=20.0, secret=True)


@pytest.fixture
def world(tmp_path):
    """Sites of which north wants a person's yes to each run."""
    world = World(tmp_path, "scaffold", privacy=SECRET, rounds=4, user_ratio=1.0)
    change(world, approval="each-run")
    return world


def change(world, **keys):
    world.policies["north"] = world.policies["north"].model_copy(update=keys)


def requests(world):
    return requests_in(world.folder / "north" / "state")


def events(world, name="north"):
    return [line["event"] for line in AuditLog(world.folder / name / "state").lines()]


def refused_offer(world, reason):
    with refuses(f"not-enrolled: north: {reason}"):
        offer_to(world.post, world.enrolled)


def say(world, decision):
    found = requests(world)
    return decide(found.state, chosen(found, world.enrolled.run[:6]), decision)


def test_nothing_is_booked_before_a_person_says_yes(world):
    refused_offer(world, "awaiting-approval")
    assert not world.ledger("north").runs and world.memory("north").enrolment() is None
    (request,) = requests(world).all()
    assert request.decision == "waiting" and request.plan == world.enrolled.plan
    say(world, "approved")
    world.enrol()
    reserved = world.ledger("north").runs[world.enrolled.run].grant
    assert (reserved.participations, reserved.epsilon, reserved.delta) == (
        request.participations, request.epsilon, request.delta)  # fmt: skip
    world.drive()
    assert world.count("north") == 4


def test_the_sites_without_the_key_decide_by_their_policy(world):
    refused_offer(world, "awaiting-approval")
    (request,) = requests_in(world.folder / "east" / "state").all()
    assert (request.decision, request.by) == ("approved", "policy")


def test_a_run_is_refused_for_good_and_in_the_middle(world):
    refused_offer(world, "awaiting-approval")
    say(world, "refused")
    refused_offer(world, "not-approved")
    say(world, "approved")
    world.enrol()
    world.round()
    say(world, "refused")
    before = world.ledger("north").anchor
    assert world.reason("north", world.task("north", 2)) == "not-approved"
    assert world.ledger("north").anchor == before
    say(world, "approved")
    assert world.reason("north", world.task("north", 2)) == ""


@pytest.mark.parametrize("keys", [{"epsilon": 1e5}, {"delta": 5e-3}])
def test_a_decision_is_for_one_grant(world, keys):
    """A grant that is not the approved one is asked again; the same one is not."""
    refused_offer(world, "awaiting-approval")
    say(world, "approved")
    change(world, **keys)
    if "epsilon" in keys:  # other ε left, same grant
        offer_to(world.post, world.enrolled)
        return
    refused_offer(world, "awaiting-approval")
    assert requests(world).find(world.enrolled.run).decision == "waiting"


def test_what_the_policy_decided_is_not_a_persons_yes(world):
    change(world, approval="policy")
    enrolled = offer_to(world.post, world.enrolled)
    change(world, approval="each-run")
    with refuses("not-enrolled: north: awaiting-approval"):
        begin_with(world.post, enrolled)
    say(world, "approved")
    begin_with(world.post, enrolled)


def test_a_lost_or_damaged_request_is_no_yes(world):
    refused_offer(world, "awaiting-approval")
    say(world, "approved")
    world.enrol()
    path = requests(world).state / "requests" / f"{world.enrolled.run}.json"
    kept = path.read_text()
    for damage in ("{", kept.replace('"by"', '"who"'), "[]"):
        path.write_text(damage)
        assert world.reason("north", world.task("north")) == "state-damaged"
    path.unlink()
    assert world.reason("north", world.task("north")) == "awaiting-approval"
    assert not world.count("north")


def test_requests_that_wait_are_bounded(world, monkeypatch):
    monkeypatch.setattr("dpscaffold.deployment.site.approval.MOST_WAITING", 2)
    for _ in range(4):
        refused_offer(world, "awaiting-approval")
        world.fresh_server()
    assert len(requests(world).all()) == 2


def test_old_requests_are_removed_and_no_refusal_is_forgotten(world, monkeypatch):
    """A server offers one run after another and begins none. What is kept is bounded, apart from
    what people refused; the log has every request."""
    monkeypatch.setattr("dpscaffold.deployment.site.approval.MOST_KEPT", 3)
    monkeypatch.setattr("dpscaffold.deployment.site.answer.MOST_UNUSED", 2)
    years = (f"{year}-01-01T09:00:00+00:00" for year in count(2026))  # no two at the same time
    monkeypatch.setattr("dpscaffold.deployment.site.approval.now", lambda: next(years))
    change(world, approval="policy")
    no = world.enrolled
    offer_to(world.post, no)
    say(world, "refused")
    world.fresh_server()
    yes = world.enrolled
    world.enrol()
    world.round()
    for _ in range(9):
        world.fresh_server()
        offer_to(world.post, world.enrolled)
    found = {one.run: one.decision for one in requests(world).all()}
    assert found[no.run] == "refused" and found[yes.run] == "approved"
    assert len(found) <= 2 + 2 + 3 and world.enrolled.run in found
    folder = requests(world).state
    assert len(list((folder / "requests").iterdir())) == 2 * len(found)
    assert len(list((folder / "runs").iterdir())) <= 1 + 2
    assert events(world).count("request") == 11
    assert verified(folder, world.ledger("north").total, None).uploads == 1
    with refuses("not-enrolled: north: not-approved"):
        offer_to(world.post, no)


def test_a_request_says_who_asks_what_is_learnt_what_it_costs_and_what_leaves(world):
    refused_offer(world, "awaiting-approval")
    (request,) = requests(world).all()
    text = "\n".join(request_lines(request, "fl.example:8443"))
    assert fingerprint(public_of(world.key)) in text and "fl.example:8443" in text
    left = world.ledger("north").left(world.policies["north"]).epsilon
    assert f"{left} is left before" in text and "for each record" in text
    assert f"{request.participations} times 30 numbers" in text  # 15 parameters, and c_i
    assert "number of records (12)" in text and "scaffold" in text
    shown = float(text.partition("ε at most ")[2].split()[0])
    assert request.epsilon <= shown <= request.epsilon + 1e-3


def test_a_servers_words_cannot_change_what_a_person_reads(world):
    """A class name with a line of its own, a cursor that moves up, writing from right to left."""
    refused_offer(world, "awaiting-approval")
    (request,) = requests(world).all()
    strange = "yes\n  costs     ε at most 0.001", "\x1b[3A\x1b[2K", "\u202eno"
    lines = request_lines(replace(request, label="\r", classes=strange, columns=strange), "here")
    honest = request_lines(request, "here")
    assert len(lines) == len(honest) and lines[3] == honest[3]
    assert all(line.isprintable() for line in lines)


def test_a_request_without_privacy_says_so(tmp_path):
    world = World(tmp_path, "fedavg", user_ratio=1.0)
    change(world, approval="each-run")
    refused_offer(world, "awaiting-approval")
    text = "\n".join(request_lines(requests(world).all()[0], "here"))
    assert "NO PRIVACY GUARANTEE" in text and "WITHOUT SECRET NOISE" in text


# --- the audit log


def test_every_request_decision_and_upload_is_logged(world):
    refused_offer(world, "awaiting-approval")
    say(world, "approved")
    world.enrol()
    world.drive(2)
    assert events(world) == ["request", "answer", "decision", "answer", "answer", "answer",
                             "upload", "upload"]  # fmt: skip
    lines = list(AuditLog(requests(world).state).lines())
    assert [line.get("reason") for line in lines[:2]] == [None, "awaiting-approval"]
    assert [line["round"] for line in lines[-2:]] == [1, 2]
    assert lines[-1]["bytes"] == 4 * 30 and lines[2]["by"] not in ("", "policy")


def test_an_upload_that_cannot_be_logged_does_not_leave(world, monkeypatch):
    change(world, approval="policy")
    world.enrol()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(AuditLog, "write", full)
    answer = world.send("north", world.task("north"))
    assert answer.header["reason"] == "site-error" and not answer.vectors
    monkeypatch.undo()
    assert world.send("north", world.task("north")).header["fresh"] is False
    assert world.count("north") == 1


def test_strangers_do_not_fill_the_log_and_repeated_refusals_count_once(world):
    change(world, approval="policy")
    world.enrol()
    before = len(events(world))
    other = World(world.folder / "other", "scaffold", privacy=SECRET, rounds=4, user_ratio=1.0)
    stranger = other.task("north")
    for _ in range(3):
        assert world.reason("north", stranger) == "bad-signature"
    for _ in range(3):
        assert world.reason("north", world.task("north", 9)) == "bad-round"
    assert len(events(world)) == before + 1


def test_a_changed_log_is_found_and_stops_the_site(world):
    change(world, approval="policy")
    world.enrol()
    world.drive(1)
    state = requests(world).state
    found = verified(state, 1, None)
    anchor, path = f"{found.lines}:{found.head}", state / "audit.jsonl"
    world.drive(2)
    verified(state, 2, anchor)
    kept = path.read_text()
    path.write_text(kept.replace('"round": 1', '"round": 3'))
    with refuses("audit-damaged"):
        verified(state, 2, None)
    assert world.reason("north", world.task("north", 3)) == "site-error"
    path.write_text("".join(kept.splitlines(keepends=True)[:2]))
    with refuses("audit-damaged: --since is"):
        verified(state, 2, anchor)
    path.write_text(kept)
    with refuses("ledger-behind: 2 different uploads"):
        verified(state, 1, None)
    with refuses("bad-anchor"):
        verified(state, 2, "x:1")


# --- commands


@pytest.fixture
def site(world, tmp_path):
    """The folder of north with a ``site.toml``, for the commands."""
    from deploy.world import new_site

    refused_offer(world, "awaiting-approval")
    path = new_site(tmp_path / "cli", 'source = "npz"\npath = "data.npz"')
    world.close("north")
    shutil.copytree(world.folder / "north" / "state", path.parent / "state")
    return path


def said(*words):
    return CliRunner().invoke(app, ["site", *map(str, words)])


def test_commands_list_and_decide(site, world):
    run = world.enrolled.run
    shown = said("requests", site)
    assert shown.exit_code == 0 and f"run {run}: waiting" in shown.output
    (entry,) = json.loads(said("requests", site, "--json", "--waiting").output)
    assert entry["run"] == run and np.isfinite(entry["epsilon"])
    plan = json.loads((site.parent / "state" / "requests" / f"{run}.offer.json").read_text())
    assert plan == world.enrolled.offer
    no = said("approve", run[:8], site)
    with refuses("not-confirmed"):
        raise no.exception
    assert json.loads(said("requests", site, "--json").output)[0]["decision"] == "waiting"
    assert said("approve", run[:8], site, "--yes").exit_code == 0
    assert "no request waits" in said("requests", site, "--waiting").output
    assert said("refuse", run, site, "--yes").exit_code == 0
    assert json.loads(said("requests", site, "--json").output)[0]["decision"] == "refused"
    checked = said("audit", site)
    assert checked.exit_code == 0 and "intact: 4 lines" in checked.output
    logged = [json.loads(line) for line in said("audit", site, "--json").output.splitlines()]
    assert [line["event"] for line in logged] == ["request", "answer", "decision", "decision"]


def test_commands_refuse_in_one_sentence(site, tmp_path):
    for words, code in (
        (["approve", "zz", site, "--yes"], "unknown-request: RUN is 'zz'"),
        (["refuse", "", site, "--yes"], "unknown-request: 0 requests"),
        (["audit", site, "--since", "3:ab"], "bad-anchor"),
    ):
        with refuses(code):
            raise said(*words).exception
    shutil.rmtree(site.parent / "state")
    for words in (["requests", site], ["approve", "aa", site], ["audit", site]):
        with refuses("not-started"):
            raise said(*words).exception
    assert not (site.parent / "state").exists()
