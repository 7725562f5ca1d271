"""A budget for each user: solved, weighed, run, stated and compared; and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from refusals import refuses
from scipy.optimize import linprog
from small import UNEQUAL, federation, setting
from stated import page_of, written
from typer.testing import CliRunner

from dpscaffold import Gaussian, Plan, fedavg, train
from dpscaffold.audit.subject import _described
from dpscaffold.cli import app
from dpscaffold.config import Secure, make_run, parse, solve_noise
from dpscaffold.config.budgets import own_noises
from dpscaffold.privacy import adversaries, epsilons_by_group, noise_seen, round_up
from dpscaffold.report.runs import comparison_table, read_run

TABLE = {"default": 6.0, "1": 1.0, "4": 2.5}
BUDGETS = np.array([6.0, 1.0, 6.0, 6.0, 2.5, 6.0])


def spent_by(run, rounds=None):
    """ε of each user, where no two are alike; with a user as unit, of each kind of them."""
    each = np.array(epsilons_by_group(run, adversaries(run)["server"], rounds))
    return each[list(run.membership)]


def private(table=TABLE, **changes: object) -> Gaussian:
    return Gaussian(0.7, epsilon=table, **changes)


@pytest.mark.parametrize("changes", [{}, {"sampling": "poisson"}, {"unit": "user"}], ids=str)
def test_the_noise_of_each_user_keeps_its_own_budget(changes):
    run = setting("scaffold", "logistic", private(**changes))
    spent = spent_by(run.mechanism)
    assert (spent <= BUDGETS).all() and (spent >= 0.98 * BUDGETS).all()
    alone = setting("scaffold", "logistic", Gaussian(0.7, epsilon=1.0, **changes))
    if changes:  # there, every user has one rate
        assert run.privacy.noise_of(1) == pytest.approx(alone.privacy.noise, rel=1e-3)
    for user in range(6):
        assert run.privacy_of(user).noise == run.privacy.noise_by_user[user]


@pytest.mark.parametrize("weighting", ["uniform", "records", "noise"])
@pytest.mark.parametrize("colluders", [0, 2])
def test_secure_sums_keep_every_budget(weighting, colluders):
    plain = setting("fedavg", "logistic", local_steps=1, user_ratio=1.0, weighting=weighting)
    parts = (plain.roster, plain.task, plain.algorithm, plain.plan)
    run = make_run(*parts, private(), Secure(colluders))
    spent = spent_by(run.mechanism)
    assert noise_seen(run.mechanism, adversaries(run.mechanism)["server"]).theorem == "4"
    assert (spent <= BUDGETS).all()
    assert (spent / BUDGETS).max() > 0.98  # somebody needs all of the noise
    loud = run.weights * run.known(range(6)).spread[:, 0]
    assert loud.numpy() == pytest.approx(float(loud[0]), rel=1e-3)  # equal noise in the sum


def test_weights_by_noise_give_the_mean_of_a_sum_the_least_noise():
    """Against a solver of the whole convex problem that knows nothing of its shape: the least a
    with a·√(m − k) ≥ z_i·ω_i/b_i and Σω_i = 1."""
    run = replace(
        setting("fedavg", "logistic", "fixed", local_steps=1, user_ratio=1.0, weighting="noise"),
        secure=Secure(1),
    )
    found = solve_noise(run, private().epsilon)
    batches = np.array([size // 3 for size in UNEQUAL], dtype=float)
    weights = found.weights.numpy() / found.weights.sum().item()
    common = np.array(found.privacy.noise_by_user) * weights / batches
    assert common == pytest.approx(common.mean(), rel=1e-3)
    multipliers = np.array(own_noises(run.mechanism, BUDGETS.tolist()))
    best = linprog(
        [0.0] * 6 + [1.0],
        A_ub=np.hstack([np.diag(multipliers / batches), np.full((6, 1), -math.sqrt(5))]),
        b_ub=np.zeros(6),
        A_eq=[[1.0] * 6 + [0.0]],
        b_eq=[1.0],
        bounds=[(0, None)] * 7,
    )
    assert best.success and common.mean() <= 1.005 * best.x[6]


def test_a_run_states_every_budget(tmp_path):
    data = federation(UNEQUAL)
    plan = Plan(rounds=3, local_steps=2, user_ratio=0.5, data_ratio=1 / 3, weighting="noise")
    run = setting("fedavg", "logistic", "fixed", data)
    result = train(data, run.task, fedavg(), plan, private(), out=tmp_path / "run")
    said = result.privacy
    assert said.by_group == pytest.approx(spent_by(result.setting.mechanism, 3))
    assert said.towards("server").epsilon == max(said.by_group) <= 6.0
    assert said.by_group[1] <= 1.0
    assert written(tmp_path / "run").by_group == said.by_group
    page = page_of(tmp_path / "run")
    assert round_up(min(said.by_group)) in page and round_up(max(said.by_group)) in page
    record = read_run(tmp_path / "run")
    low, high = round_up(min(said.by_group)), round_up(max(said.by_group))
    assert f"{low}–{high}" in str(comparison_table([record], 20))
    answer = CliRunner().invoke(
        app, ["report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")]
    )
    assert answer.exit_code == 0, answer.output


def test_more_rounds_add_up_for_each_user(tmp_path):
    data = federation(UNEQUAL)
    run = setting("fedavg", "logistic", "fixed", data)
    plan = Plan(rounds=2, local_steps=2, user_ratio=0.5, data_ratio=1 / 3)
    solved = setting("fedavg", "logistic", private(), data).privacy
    one = train(data, run.task, fedavg(), plan, solved, out=tmp_path / "run")
    more = plan.changed(rounds=4)
    two = train(data, run.task, fedavg(), more, solved, out=tmp_path / "run", resume=True)
    assert np.array(two.privacy.by_group) == pytest.approx(2 * np.array(one.privacy.by_group))
    assert two.privacy.towards("server").epsilon >= max(two.privacy.by_group) * (1 - 1e-9)


BAD = {
    "unknown-user: nowhere": {"default": 1.0, "nowhere": 2.0},
    "missing-key: '1' … default": {"0": 1.0},
    "missing-key: '0' … default": {},
    "out-of-range: privacy.epsilon.1 is 0": {"default": 1.0, "1": 0.0},
    "out-of-range: privacy.epsilon.1 is -2": {"default": 1.0, "1": -2},
    "not-a-number": {"default": 1.0, "1": True},
    "not-a-number|wrong-type": {"default": 1.0, "1": "two"},
    "out-of-range|not-a-number|not-finite": {"default": 1.0, "1": math.inf},
}


@pytest.mark.parametrize("code", BAD)
def test_a_table_that_makes_no_sense_is_refused(code):
    with refuses(code):
        setting("fedavg", "logistic", private(BAD[code]))


def test_other_mistakes_are_refused():
    data = federation(UNEQUAL)
    with refuses("noise-or-epsilon"):
        Gaussian(0.7, 2.0, epsilon=TABLE)
    with refuses("noise-out-of-range: noise[1] is 0.0"):
        Gaussian(0.7, (2.5, 0.0))
    with refuses("not-a-number: noise[0] is 'loud'"):
        Gaussian(0.7, ("loud", 2.5))
    with refuses("not-a-list: noise"):
        Gaussian(0.7, ())
    with refuses("unknown-key: noise_by_user"):
        Gaussian(0.7, 2.5, noise_by_user=(2.5, 3.0))
    with refuses("count-differs: privacy.noise … 2 … 6"):
        setting("fedavg", "logistic", Gaussian(0.7, (2.5, 3.0)))
    with refuses("count-differs: privacy.noise … 2 … 6"):
        setting("fedavg", "logistic", Gaussian(0.7, (3.0, 3.0)))
    with refuses("median-clip: noise"):
        setting("fedavg", "logistic", Gaussian("median", 1.0), weighting="noise")
    named = replace(data.roster, names=("default", *data.roster.names[1:]))
    run = setting("fedavg", "logistic", "fixed", data)
    with refuses("conflicting-arguments: default"):
        make_run(named, run.task, run.algorithm, run.plan, private({"default": 1.0}))


def test_audits_and_experiments_refuse_users_that_differ():
    data = federation(UNEQUAL)
    run = setting("fedavg", "logistic", private(), data)
    with refuses("not-applicable: noise of their own"):
        _described(run)
    tables = {"privacy": {"epsilon": TABLE}, "plan": {"weighting": "noise"}}
    with refuses("missing-argument"):
        parse(tables).describe([100] * 10)
