"""What sites let out of their three numbers: noise that covers every record, drawn once."""

from __future__ import annotations

import json
import math
import random
import secrets
import shutil
from collections import Counter

import pytest
import torch
from deploy.test_own_budgets import federated
from deploy.test_personal_deployed import SECRET, _run, finished
from deploy.test_site_model import SITE
from deploy.test_sites import FIXED
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses
from scipy.stats import chi2
from typer.testing import CliRunner

from dpscaffold import load_model
from dpscaffold.cli import app
from dpscaffold.cli.subject import Numbers, from_source
from dpscaffold.cli.together import parts_of
from dpscaffold.deployment.protocol import joining
from dpscaffold.deployment.protocol.joining import (
    LIMIT,
    SENSITIVITY,
    STEPS,
    NoisedJoining,
    in_steps,
    read_joining,
    scale_for,
)
from dpscaffold.deployment.protocol.messages import new_key, pack, sign
from dpscaffold.deployment.provision import read_signing_key
from dpscaffold.deployment.server.joining import mean_of
from dpscaffold.deployment.site.ledger import SiteLedger
from dpscaffold.privacy.further import COMPARISON
from dpscaffold.privacy.showing import round_up
from dpscaffold.randomness.laplace import discrete_laplace
from dpscaffold.runs.ledger import read_account
from dpscaffold.tasks import Logistic
from dpscaffold.tasks.near import SiteRows, fit_near

metric = st.floats(0, 1)
three = st.tuples(metric, metric, metric)


# --- the mechanism


def probability(z, scale):
    """Of the integer z under discrete Laplace noise, in closed form."""
    decay = math.exp(-1 / scale)
    return (1 - decay) / (1 + decay) * decay ** abs(z)


@pytest.mark.parametrize("scale", [1, 3])
def test_the_noise_has_its_law_and_no_other(scale):
    """A chi-square test at 10⁻⁶; noise of another scale fails it."""
    below = random.Random(scale).randrange
    count, most = 20_000, 4 * scale
    drawn = Counter(max(-most, min(most, discrete_laplace(scale, below))) for _ in range(count))

    def statistic(of):
        inner = {z: count * probability(z, of) for z in range(-most + 1, most)}
        tail = (count - sum(inner.values())) / 2
        wanted = inner | {-most: tail, most: tail}
        return sum((drawn[z] - w) ** 2 / w for z, w in wanted.items())

    worst = chi2.ppf(1 - 1e-6, 2 * most)
    assert statistic(scale) < worst
    assert statistic(scale + 1) > worst


def test_the_noise_comes_from_the_operating_system():
    assert discrete_laplace.__defaults__ == (secrets.randbelow,)
    assert len({discrete_laplace(10**9) for _ in range(20)}) == 20


@given(three, three)
def test_no_change_of_a_site_moves_the_numbers_further_than_accounted(one, other):
    """Whatever the three metrics are before and after: one record, or all, may have changed."""

    def sent(local, common, personal):
        return in_steps(common - local), in_steps(personal - local)

    moved = sum(abs(a - b) for a, b in zip(sent(*one), sent(*other), strict=True))
    assert moved <= SENSITIVITY


def test_the_accounted_change_is_attained():
    assert abs(in_steps(1.0) - in_steps(-1.0)) == SENSITIVITY / 2 == 2 * STEPS


@given(st.floats(1e-3, 50.0))
def test_the_loss_is_at_most_epsilon(epsilon):
    """log P(z)/P(z + Δ) = Δ/t for the farthest pair, and never more."""
    scale = scale_for(epsilon)
    assert SENSITIVITY / scale <= epsilon * (1 + 1e-12)
    assert SENSITIVITY / max(1, scale - 1) > epsilon or scale == 1


def test_one_record_may_change_every_prediction():
    """Why the sensitivity is not one over the number of test records: the local model is fitted
    without noise, and one record of those that it is fitted to decides on all answers."""
    task, test = Logistic(1, 2), torch.ones(50, 1)
    accuracies = []
    for label in (0, 1):
        rows = SiteRows(torch.ones(1, 1), torch.tensor([label]))
        fit = fit_near(task, rows, task.initial(0), 0.01)
        answers = task.scores(fit.params, task.prepare(test)).argmax(1)
        accuracies.append(float((answers == 1).double().mean()))
    assert accuracies == [0.0, 1.0]
    assert abs(in_steps(0.5 - accuracies[0]) - in_steps(0.5 - accuracies[1])) <= SENSITIVITY / 2


# --- at the site


def allowed(folder, epsilon="2.0", privacy=SECRET, **given):
    """A finished run, north's ``site.toml`` with its key, and the server's folder."""
    world, site = finished(folder, privacy=privacy, **given)
    server = federated(folder / "fed")
    shutil.copy(folder / "fed" / "north" / "site.key", site.parent / "site.key")
    more = f"evaluation_epsilon = {epsilon}\n" if epsilon else ""
    site.write_text(SITE.format(zeros=64 * "0") + more)
    return world, site, server


def ledger_of(site):
    return SiteLedger(site.parent / "state" / "ledger.jsonl", "north")


def said(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_a_site_says_it_once_and_its_ledger_has_it(tmp_path):
    world, site, _ = allowed(tmp_path)
    before, out = ledger_of(site), tmp_path / "north.joining"
    done = said("site", "joining", site, "--out", out)
    assert done.exit_code == 0, done.output
    after = ledger_of(site)
    (entry,) = set(after.runs) - set(before.runs)
    grant = after.runs[entry].grant
    assert grant.delta == 0.0 and after.runs[entry].participations == 1
    found = read_joining(out)
    assert found.site == "north" and found.run == world.enrolled.run
    assert grant.epsilon == found.epsilon <= 2.0 and found.scale == scale_for(2.0)
    loose = after.left(world.policies["north"]).epsilon
    assert before.left(world.policies["north"]).epsilon - loose == pytest.approx(found.epsilon)
    # Sent again it is the same, at no cost.
    again = said("site", "joining", site, "--out", tmp_path / "again", "--json")
    assert json.loads(again.output)["again"] and ledger_of(site).anchor == after.anchor
    assert (tmp_path / "again").read_bytes() == out.read_bytes()
    lines = said("site", "ledger", site).output
    assert "for a noised comparison of models" in lines and "ε spent 2" in lines
    # What leaves later is composed with it.
    _run("site", "personalise", site, "--noised", "--epsilon", "1", "--out", tmp_path / "own")
    stated = load_model(tmp_path / "own").privacy
    assert any(cost.name == "noised comparison" for cost in stated.extra_costs)
    assert stated.server.epsilon > before.runs[world.enrolled.run].grant.epsilon + 2.9


def test_the_ledger_is_written_before_noise_is_drawn(tmp_path, monkeypatch):
    _, site, _ = allowed(tmp_path)
    before, out = set(ledger_of(site).runs), tmp_path / "north.joining"

    def dies(scale):
        assert len(ledger_of(site).runs) == len(before) + 1
        raise KeyboardInterrupt

    monkeypatch.setattr(joining, "discrete_laplace", dies)
    said("site", "joining", site, "--out", out)
    assert not out.exists() and len(ledger_of(site).runs) == len(before) + 1
    monkeypatch.undo()
    spent = ledger_of(site).anchor
    with refuses("session-spent"):
        _run("site", "joining", site, "--out", out)
    assert not out.exists() and ledger_of(site).anchor == spent


@pytest.mark.parametrize(
    ("epsilon", "policy", "code"),
    [
        ("", "", "not-allowed: policy.evaluation_epsilon"),
        ("40.0", "epsilon = 30.0", "budget-too-small"),
        ("2.0", "max_runs = 1\nepsilon = 1e6", "budget-too-small: 0 runs"),
        ("-1.0", "", "out-of-range: evaluation_epsilon"),
    ],
)
def test_what_the_policy_does_not_allow_spends_nothing(tmp_path, epsilon, policy, code):
    _, site, _ = allowed(tmp_path, epsilon)
    if policy:
        site.write_text(site.read_text().replace("epsilon = 1e6", policy, 1))
    was, out = ledger_of(site).anchor, tmp_path / "north.joining"
    with refuses(code):
        _run("site", "joining", site, "--out", out)
    assert ledger_of(site).anchor == was and not out.exists()


def test_a_rehearsal_has_nothing_to_compose_with(tmp_path):
    _, site, _ = allowed(tmp_path, privacy=FIXED)
    was = ledger_of(site).anchor
    with refuses("no-privacy"):
        _run("site", "joining", site, "--out", tmp_path / "out")
    assert ledger_of(site).anchor == was


# --- at the server


def test_the_server_shows_the_mean_with_its_noise(tmp_path):
    _, site, server = allowed(tmp_path, "1e6")
    run, out = tmp_path / "run", tmp_path / "north.joining"
    _run("site", "joining", site, "--out", out)
    stated = json.loads((run / "privacy.json").read_text())
    found = json.loads(said("server", "joining", run, out, "--server", server, "--json").output)
    assert found["sites"] == ["north"] and abs(found["personal_gain"]) <= LIMIT + 0.01
    kept = json.loads((run / "joining.json").read_text())
    assert kept == found | {"released": kept["released"]}
    assert said("report", run, "--out", tmp_path / "page.html").exit_code == 0
    assert found["sentence"] in (tmp_path / "page.html").read_text()
    before, page = stated, (run / "privacy.md").read_text()
    both = round_up(before["quoted"]["epsilon"] + found["epsilon"])
    again = json.loads((run / "privacy.json").read_text())
    assert again | {"outside": before["outside"]} == before
    (sentence,) = [one for one in again["outside"] if one not in before["outside"]]
    assert f"epsilon is at most {both}" in sentence and sentence in page
    assert "the noised comparison of sites" in " ".join(said("privacy", run).output.split())
    with refuses("combined-twice: 'north'"):
        _run("server", "joining", run, out, out, "--server", server)
    stranger = read_joining(out)
    for name, key, code in (
        ("north", new_key(), "bad-signature: 'north'"),
        ("nobody", new_key(), "bad-signature: 'nobody'"),
    ):
        forged = NoisedJoining(stranger.run, name, "accuracy", 5, 5, 1)
        (tmp_path / "forged").write_bytes(forged.to_bytes(key))
        with refuses(code):
            _run("server", "joining", run, tmp_path / "forged", "--server", server)
    assert json.loads((run / "joining.json").read_text()) == kept


def test_what_was_released_once_stays_in_the_statement(tmp_path):
    """Files of other sites, and other files of one, in commands of their own."""
    world, _, server = allowed(tmp_path)
    run, epsilon = tmp_path / "run", read_account(tmp_path / "run").statement().quoted_epsilon

    def give(name, scale):
        key = read_signing_key(tmp_path / "fed" / name / "site.key")
        path = tmp_path / f"{name}-{scale}.joining"
        path.write_bytes(
            NoisedJoining(world.enrolled.run, name, "accuracy", 5, 5, scale).to_bytes(key)
        )
        _run("server", "joining", run, path, "--server", server)
        stated = json.loads((run / "privacy.json").read_text())["outside"]
        assert tuple(stated) == read_account(run).statement().outside
        return next(one for one in stated if one.startswith(COMPARISON))

    assert f"at most {round_up(epsilon + 4)} " in give("north", 1000)
    second = give("east", 16000)
    assert "(east, north)" in second and f"at most {round_up(epsilon + 4)} " in second
    assert give("north", 1000) == second
    assert f"at most {round_up(epsilon + 6)} " in give("north", 2000)


def test_what_was_released_after_a_run_is_added_to_several_runs(tmp_path):
    _, site, server = allowed(tmp_path, "1e6")
    run, out = tmp_path / "run", tmp_path / "north.joining"
    _run("site", "joining", site, "--out", out)
    before = parts_of(run, from_source(run, Numbers(), None), 1)
    _run("server", "joining", run, out, "--server", server)
    (alone,), (both,) = before, parts_of(run, from_source(run, Numbers(), None), 1)
    assert both.epsilon("server") >= 0.999 * (alone.epsilon("server") + 4000)


def test_a_file_of_another_run_is_refused(tmp_path):
    _, site, server = allowed(tmp_path)
    other = NoisedJoining("another", "north", "accuracy", 5, 5, 1)
    (tmp_path / "other").write_bytes(other.to_bytes(read_signing_key(site.parent / "site.key")))
    with refuses("other-federation: another"):
        _run("server", "joining", tmp_path / "run", tmp_path / "other", "--server", server)
    assert not (tmp_path / "run" / "joining.json").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"common": 10**9},
        {"personal": 0.5},
        {"scale": 0},
        {"common": True},
        {"more": 1},
        {"site": 3},
        {"format": "x"},
    ],
    ids=str,
)
def test_numbers_that_no_site_writes_are_refused(tmp_path, change):
    header = {"format": joining.FORMAT, "version": joining.__version__, "run": "r"}
    header |= {"site": "north", "metric": "accuracy", "common": 1, "personal": 2, "scale": 9}
    path = tmp_path / "north.joining"
    path.write_bytes(pack(sign(header, {}, new_key())))
    assert read_joining(path).personal == 2
    path.write_bytes(pack(sign(header | change, {}, new_key())))
    with refuses("not-a-joining-file"):
        read_joining(path)


def test_the_mean_and_its_noise_are_right():
    """Over many sites with a difference of nine points: within five deviations, and the deviation
    is that of the noise."""
    draw, sent = random.Random(5).randrange, []
    for k in range(400):
        noise = [discrete_laplace(scale_for(2.0), draw) for _ in range(2)]
        values = in_steps(-0.03) + noise[0], in_steps(0.09) + noise[1]
        sent.append(NoisedJoining("r", f"s{k}", "accuracy", *values, scale_for(2.0)))
    found = mean_of(sent)
    assert found.noise == pytest.approx(LIMIT / STEPS * math.sqrt(2 / 400) * 2000, rel=1e-3)
    assert abs(found.personal - 0.09) < 5 * found.noise
    assert abs(found.common + 0.03) < 5 * found.noise
    many = [one.personal for one in sent]
    mean = sum(many) / 400
    spread = math.sqrt(sum((one - mean) ** 2 for one in many) / 399) / 20 * LIMIT / STEPS
    assert spread == pytest.approx(found.noise, rel=0.25)
    assert "helps on average over 400 sites" in found.sentence
    assert "too large to say" in mean_of(sent[:2]).sentence
