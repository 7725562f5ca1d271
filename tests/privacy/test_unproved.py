"""What no bound was proved for is refused: kinds of runs, and algorithms with other uploads."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import wraps

import pytest
import torch
from privacy.explicit_pairs import gaussian_epsilon
from privacy.settings import SMALL, run_of
from refusals import refuses
from small import federation

from dpscaffold import Budget, Gaussian, Logistic, Plan, fedavg, fedprox, scaffold, train
from dpscaffold.algorithms import ALGORITHMS, with_momentum
from dpscaffold.algorithms.base import Algorithm, Upload
from dpscaffold.algorithms.fedavg import along_gradient, send_move
from dpscaffold.privacy import (
    BOUNDS,
    Ledger,
    Mechanism,
    aggregate_among,
    statement,
)
from dpscaffold.privacy.ledger import spent
from dpscaffold.privacy.queries import participation_losses
from dpscaffold.privacy.renyi import participation_curve

RUN = run_of(SMALL, memory=False, local_steps=1, cohort_size=4)


@dataclass(frozen=True)
class Shuffled(Mechanism):
    """A kind of run that does not exist: a field that no bound looks at."""

    shuffled: bool = False


PLANTED = {
    "sampling": replace(RUN, sampling="shuffled"),
    "unit": replace(RUN, unit="site"),
    "weighting": replace(RUN, weighting="trust"),
    "clip": replace(RUN, clip="quantile"),
    "shuffled": Shuffled(**{f.name: getattr(RUN, f.name) for f in fields(RUN)}, shuffled=True),
}


@pytest.mark.parametrize("run", PLANTED.values(), ids=PLANTED)
def test_every_bound_refuses_a_new_kind_of_run(run):
    for bound in (*BOUNDS.values(), aggregate_among(2)):
        assert "no guarantee: no bound" in bound.applies(run), bound.name
        with refuses("bound-not-applicable"):
            bound.epsilon(run)
    with refuses("no-privacy"):
        spent(run, 3, run.groups[0])
    ledger = Ledger(RUN)
    ledger.record(1, [0])
    ledger.run = run
    with refuses("no-privacy"):
        ledger.largest()


def test_every_bound_lists_the_kinds_that_it_is_proved_for():
    kinds = {(unit, sampling) for unit in ("record", "user") for sampling in ("fixed", "poisson")}
    for bound in (*BOUNDS.values(), aggregate_among(2)):
        assert set(bound.proved_for) <= kinds
        for unit, sampling in kinds - set(bound.proved_for):
            run = replace(RUN, unit=unit, sampling=sampling)
            assert "not for" in bound.applies(run), bound.name
            with refuses("bound-not-applicable"):
                bound.epsilon(run)


def test_an_unknown_step_has_no_law():
    with refuses("no-loss-distribution: sampling='shuffled'"):
        participation_losses(0.2, 1.0, "shuffled", "record", 1)
    with refuses("no-loss-distribution: unit='site'"):
        participation_losses(0.2, 1.0, "fixed", "site", 1)
    with refuses("no-renyi-curve: sampling='shuffled'"):
        participation_curve(PLANTED["sampling"])


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
def test_the_aggregate_is_for_one_sum_of_linear_uploads(algorithm: Algorithm):
    """Two sums with other weights can be solved for both uploads, so nothing but a user's own noise
    hides it: everyone in every round with all records is T Gaussians of multiplier σ_g."""
    rounds, noise, delta = 6, 4.0, 1e-5
    plan = Plan(
        rounds=rounds, local_steps=1, user_ratio=1.0, data_ratio=1.0, weighting="records",
        warm_rounds=1 if algorithm.warm_up else 0,
    )  # fmt: skip
    data, task = federation((9, 12)), Logistic(4, 3)
    budget = Budget(delta=delta)
    said = train(data, task, algorithm, plan, Gaussian(noise=noise), budget=budget).privacy
    truth = gaussian_epsilon(delta, math.sqrt(rounds) / noise)
    for view in ("third_party", "participant"):
        assert said[view]["bound"] == "random_participation"
        assert said[view]["epsilon"] >= truth
    reasons = {row["name"]: row["reason"] for row in said["bounds"]}
    assert "not known to be one vector" in reasons["aggregate"]


def test_uploads_can_be_recovered_from_two_sums():
    """What the third party does: x and the total give two equations for two uploads."""
    uploads, weights = torch.randn(2, 5), torch.tensor([3.0, 4.0]) / 7
    mean, total = weights @ uploads, uploads.sum(0) / 2
    solved = torch.linalg.solve(
        torch.stack([weights, torch.full((2,), 0.5)]), torch.stack([mean, total])
    )
    assert torch.allclose(solved, uploads, atol=1e-5)


def test_who_sends_one_sum():
    one = {name for name, make in ALGORITHMS.items() if make().one_sum}
    assert one == {"fedavg", "fedsgd", "fedprox", "ridge"}
    assert with_momentum(fedavg()).one_sum and not scaffold().one_sum
    assert fedavg().replace(warm_up=scaffold()).memory
    assert not any(algorithm.one_sum for algorithm in OTHERS.values())


def test_a_description_that_says_nothing_of_uploads_is_refused():
    """What is not said counts as the weaker claim."""
    stored = RUN.to_dict()
    assert stored.pop("one_sum") is True
    old = Mechanism.from_dict(stored)
    assert statement(old)["third_party"]["bound"] == "random_participation"
    assert statement(RUN)["third_party"]["bound"] == "aggregate"


def test_sampling_users_counts_the_others_noise_in_one_sum_only():
    run = run_of(SMALL, unit="user", memory=False, hidden_draw=True, local_steps=1, cohort_size=4)
    several = replace(run, one_sum=False)
    louder = replace(several, noise=run.noise * 2)  # √m = 2
    by = BOUNDS["user_sampling"]
    assert by.epsilon(run) < by.epsilon(several)
    assert by.epsilon(run) == pytest.approx(by.epsilon(louder))
