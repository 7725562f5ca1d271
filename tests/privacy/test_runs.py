"""What a run tells the accountant: its uploads, its neighbours, and who may stay away."""

from __future__ import annotations

import json
import math
from functools import wraps

import pytest
import torch
from privacy.explicit_pairs import gaussian_epsilon
from privacy.settings import SMALL, run_of
from refusals import refuses
from small import federation

from dpscaffold import Gaussian, Logistic, Plan, fedavg, fedprox, scaffold, train
from dpscaffold.algorithms import ALGORITHMS, with_momentum
from dpscaffold.algorithms.base import Algorithm, Upload
from dpscaffold.algorithms.fedavg import along_gradient, send_move
from dpscaffold.config import make_run
from dpscaffold.federation import Federation, Records
from dpscaffold.privacy import Mechanism, Part, noise_seen, state
from dpscaffold.privacy.adversary import THIRD_PARTY
from dpscaffold.randomness.streams import Randomness


def with_total(local, at):
    """FedAvg's upload, and the mean gradient as a total next to it."""
    upload, kept = send_move(local, at)
    return Upload(upload.params, {"gradient": local.mean_gradient}), kept


def signs(gradient, y, at):
    """The sum of signs shows single signs."""
    return gradient.sign()


@wraps(along_gradient)
def wrapped(gradient, y, at):
    return gradient.sign()


class Pulled(type(fedprox().direction)):
    def __call__(self, gradient, y, at):
        return gradient.sign()


OTHERS = {
    "totals": fedavg().replace(finish=with_total),
    "signs": fedavg().replace(direction=signs),
    "wrapped": fedavg().replace(direction=wrapped),
    "subclass": fedavg().replace(direction=Pulled(0.1)),
    "warm-up": fedavg().replace(warm_up=fedavg().replace(finish=with_total)),
}


@pytest.mark.parametrize("algorithm", OTHERS.values(), ids=OTHERS)
def test_others_hide_a_record_in_one_sum_of_linear_uploads_alone(algorithm: Algorithm):
    """Two sums with other weights can be solved for both uploads, so nothing but a user's own noise
    hides it: everyone in every round with all records is T Gaussians of multiplier σ_g."""
    rounds, noise, delta = 6, 4.0, 1e-5
    plan = Plan(
        rounds=rounds, local_steps=1, user_ratio=1.0, data_ratio=1.0, weighting="records",
        warm_rounds=1 if algorithm.warm_up else 0,
    )  # fmt: skip
    data, privacy = federation((9, 12)), Gaussian(noise=noise, delta=delta)
    said = train(data, Logistic(4, 3), algorithm, plan, privacy)
    truth = gaussian_epsilon(delta, math.sqrt(rounds) / noise)
    for name in ("third_party", "participant"):
        one = said.privacy.towards(name)
        assert one.theorem == "1" and one.epsilon >= truth and "one vector" in one.not_more
    assert not algorithm.one_sum


def test_who_sends_one_sum():
    one = {name for name, make in ALGORITHMS.items() if make().one_sum}
    assert one == {"fedavg", "fedsgd", "fedprox", "ridge"}
    assert with_momentum(fedavg()).one_sum and not scaffold().one_sum
    assert fedavg().replace(warm_up=scaffold()).memory


def test_what_a_stored_description_does_not_say_counts_as_the_weaker_claim():
    run = run_of(SMALL, memory=False, local_steps=1, cohort_size=4)
    stored = run.to_json()
    assert stored.pop("one_sum") is True
    assert noise_seen(run, THIRD_PARTY).theorem == "2"
    assert noise_seen(Mechanism.from_json(stored, "a file"), THIRD_PARTY).theorem == "1"


PLAN = Plan(rounds=2, local_steps=2, user_ratio=1.0, data_ratio=0.5)


def described(data: Federation, weighting: str = "uniform", **limits: object) -> Mechanism:
    privacy = Gaussian(**{"noise": 4.0, "sampling": "poisson", **limits})
    plan = PLAN.changed(weighting=weighting)
    run = make_run(data.roster, Logistic(4, 3), fedavg(), plan, privacy).describe()
    assert run is not None
    return run


def without_one(data: Federation, user: int) -> Federation:
    """The same federation, but for the last training record of a user."""
    tables = [data.train.of(i) for i in range(data.users)]
    tables[user] = (tables[user][0][:-1], tables[user][1][:-1])
    records = Records.from_users([x for x, _ in tables], [y for _, y in tables])
    return Federation(records, data.test, data.classes, declared_sizes=data.declared_sizes)


def test_a_budget_per_user_lets_users_stay_away():
    data = federation((9, 12, 4, 7, 15, 6))
    plan = Plan(rounds=4, local_steps=1, user_ratio=0.5, data_ratio=0.25)
    for limits, theorem in (({"user_epsilon": 3.0}, "1"), ({}, "2")):
        said = train(data, Logistic(4, 3), fedavg(), plan, Gaussian(noise=4.0, **limits))
        assert said.privacy.towards("third_party").theorem == theorem
        assert (said.privacy.run.declines == "user_epsilon") == (theorem == "1")


def test_add_remove_needs_declared_sizes():
    declared = federation().declaring(10)
    assert described(declared).relation == "add-remove"
    assert described(federation()).relation == "zero-out"
    with refuses("not-applicable"):
        described(declared, sampling="fixed")
    for wrong in (0, [5, 5], [5] * 5 + [-1]):
        with refuses("count-differs: declared_sizes"):
            federation().declaring(wrong)


def test_nothing_that_is_accounted_tells_whether_a_record_is_there():
    whole = federation().declaring([10, 12, 5, 8, 14, 7])
    for weighting in ("uniform", "records"):
        one, other = (described(data, weighting) for data in (whole, without_one(whole, 2)))
        assert one == other and [g.records for g in one.groups] == [10, 12, 5, 8, 14, 7]
    # Computed from the data they would reveal it: that is why it is called zero-out.
    assert described(federation()) != described(without_one(federation(), 2))


def test_the_rate_is_that_of_the_declared_size():
    """Of 60 records each is drawn with chance 8/40, whatever the 60: 5 standard errors, and
    8/60 is rejected."""
    drawn = Randomness(3).batches(1, 0, 60, 8, 4000, "poisson", declared=40)
    mean, error = drawn.count.mean(), (60 * 0.2 * 0.8 / 4000) ** 0.5
    assert abs(mean - 12) < 5 * error < abs(mean - 8)


def test_a_user_as_unit_tells_nothing_of_sizes():
    """Runs on users of other sizes state the same, and δ comes from M."""
    said = []
    for sizes in ((9, 12, 4, 7, 15, 6), (20, 5, 8, 30, 6, 11)):
        torch.manual_seed(0)
        private = Gaussian(noise=4.0, unit="user")
        said.append(train(federation(sizes), Logistic(4, 3), fedavg(), PLAN, private).privacy)
    assert json.dumps(said[0].to_json()) == json.dumps(said[1].to_json())
    assert said[0].delta == pytest.approx(1 / 60)


def test_what_is_planned_is_what_the_run_states():
    run = described(federation((50,) * 6), sampling="fixed")
    planned = state([Part(run, run.rounds)])
    said = train(federation((50,) * 6), Logistic(4, 3), fedavg(), PLAN, Gaussian(noise=4.0))
    assert said.privacy.towards("server").epsilon == planned.epsilon
