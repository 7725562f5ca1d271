"""Ridge regression in one round: exact where there is no noise, refused where it cannot work."""

import numpy as np
import pytest
import torch
from refusals import refuses

from dpscaffold import Gaussian, Linear, Logistic, Mlp, Plan, ridge, synthetic, train
from dpscaffold.algorithms import with_momentum
from dpscaffold.config import Secure, load, make_run
from dpscaffold.federation import Federation
from dpscaffold.federation.schema import Target
from dpscaffold.tasks import LOSSES, Batch
from dpscaffold.tasks.ridge import RidgeSums

DATA = synthetic(users=4, records=60, dimension=5, classes=3, seed=2)
TASK = Logistic(5, 3)


def numbers(ranged=True):
    """Four users whose target is a number."""
    rng = np.random.default_rng(0)
    parts = []
    for size in (30, 20, 50, 40):
        x = rng.normal(size=(size, 5))
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        y = np.clip(x @ [0.5, -0.2, 0.1, 0, 0.3] + 0.05 * rng.normal(size=size), -1, 1)
        parts.append((torch.tensor(x).float(), torch.tensor(y).float()))
    target = Target("number", low=-1, high=1) if ranged else Target("number")
    return Federation.from_arrays(parts, parts, target=target)


def exact(task, features, targets):
    """Ridge regression by scikit-learn, on the rows that the sums are of."""
    linear_model = pytest.importorskip("sklearn.linear_model")
    rows = features.double().numpy() / task.bound
    rows = rows / np.maximum(1.0, np.linalg.norm(rows, axis=1, keepdims=True))
    rows = np.hstack([rows, np.ones((len(rows), 1))]) / np.sqrt(2)
    alpha = task.penalty * len(rows)
    return rows, linear_model.Ridge(alpha, fit_intercept=False, solver="svd").fit(rows, targets)


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_with_little_noise_it_is_the_ridge_regression_of_scikit_learn(sampling):
    """Classes: the scores are three times the exact least squares estimates of the indicators."""
    privacy = Gaussian(1.3, 0.05, sampling)
    result = train(DATA, TASK, ridge(strength=1000.0), Plan.one_round(), privacy)
    train_rows = DATA.train.features
    indicators = np.eye(3)[DATA.train.labels.numpy()]
    rows, found = exact(result.setting.task, train_rows, indicators)
    norms = train_rows.norm(dim=1, keepdim=True)
    inside = train_rows / (norms / 1.3).clamp_min(1.0)
    scores = result.model.scores(inside, prepared=True)
    assert result.setting.task.penalty > 1e-6
    assert scores.numpy() == pytest.approx(3 * found.predict(rows), abs=2e-3)


def test_a_number_is_fitted_like_scikit_learn_too():
    data = numbers()
    result = train(data, Linear(5, 1, LOSSES["squared"]), ridge(), Plan.one_round())
    rows, found = exact(result.setting.task, data.train.features, data.train.labels.numpy())
    answers = result.model.predict(data.train.features, prepared=True)
    assert answers.numpy() == pytest.approx(found.predict(rows), abs=1e-5)


@pytest.mark.parametrize("secret", [False, True])
@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_both_engines_make_the_same_sums(sampling, secret):
    """The loop adds record by record what the simulator multiplies out; secret noise differs."""
    privacy = Gaussian(0.8, 0.05 if secret else 0.5, sampling, secret=secret)
    made = [
        train(DATA, TASK, ridge(), Plan.one_round(), privacy, engine=engine).params
        for engine in ("loop", "simulator")
    ]
    assert made[0].tolist() == pytest.approx(made[1].tolist(), abs=0.02 if secret else 1e-6)


def test_records_that_are_not_finite_add_nothing():
    task = RidgeSums(2, 0)
    rows = torch.tensor([[[0.3, 0.4], [np.nan, 0.1], [np.inf, 1.0], [3e38, -3e38], [0.1, 0.2]]])
    labels = torch.tensor([[0.5, 0.1, 0.2, -0.7, np.nan]])
    total = task.clipped_sum(torch.zeros(1, task.parameters), Batch(rows, labels), torch.ones(1))
    alone = task.contributions(rows[0, [0, 3]], labels[0, [0, 3]], clipped=True)
    assert torch.allclose(total.total[0], alone.sum(0), rtol=1e-14, atol=1e-14)
    assert total.total.dtype == torch.float64  # float32 would round before the noise


def test_the_penalty_follows_the_noise():
    """λ = 0.3·√(2pM)/μ_G for the sum, where μ_G² is 0.3 of μ²."""
    privacy = Gaussian(1.0, 2.0, "poisson")
    setting = make_run(DATA.roster, TASK, ridge(), Plan.one_round(), privacy)
    mu = 1 / (2 * 2.0)
    wanted = 0.3 * np.sqrt(2 * 6 * 4) / (np.sqrt(0.3) * mu)
    assert setting.task.penalty * sum(DATA.roster.sizes) == pytest.approx(wanted)


def test_epsilon_is_solved_for_and_stated():
    privacy = Gaussian(1.0, epsilon=1.0)
    result = train(DATA, TASK, ridge(), Plan.one_round(), privacy)
    assert result.privacy.towards("server").epsilon == pytest.approx(1.0, rel=1e-3)
    assert result.privacy.run.query == "sums"
    assert result.setting.task.penalty > 0


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_one_secure_sum_takes_less_noise_for_the_same_epsilon(engine):
    """Four users, one colluder: √3 times less; the penalty follows, and ε alone is larger."""
    privacy = Gaussian(1.0, epsilon=1.0, sampling="poisson")
    plain = make_run(DATA.roster, TASK, ridge(), Plan.one_round(), privacy)
    given = (DATA, TASK, ridge(), Plan.one_round(), privacy)
    result = train(*given, secure=Secure(colluders=1), engine=engine)
    assert plain.privacy.noise / result.setting.privacy.noise == pytest.approx(3**0.5, rel=2e-3)
    assert plain.task.penalty / result.setting.task.penalty == pytest.approx(3**0.5, rel=2e-3)
    assert result.privacy.towards("server").epsilon == pytest.approx(1.0, rel=1e-3)
    assert result.privacy.towards("server").theorem == "4"
    assert result.final.metrics["test_accuracy"] > 0.4


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"plan": Plan(rounds=3)}, "plan.rounds is 3"),
        ({"task": Mlp(5, 3)}, "task.kind"),
        ({"algorithm": with_momentum(ridge())}, "algorithm.server"),
        ({"privacy": Gaussian("median", 1.0)}, "privacy.clip"),
    ],
)
def test_what_cannot_be_one_sum_is_refused(changes, named):
    given = {"task": TASK, "algorithm": ridge(), "plan": Plan.one_round(), "privacy": None}
    given |= changes
    with refuses(f"not-a-sum: {named}"):
        make_run(DATA.roster, given["task"], given["algorithm"], given["plan"], given["privacy"])


def test_a_number_needs_a_range():
    with refuses("not-a-sum: low and high"):
        train(numbers(ranged=False), Linear(5, 1, LOSSES["squared"]), ridge(), Plan.one_round())


@pytest.mark.parametrize("share", [0.0, 1.0, float("nan")])
def test_a_share_lies_between_0_and_1(share):
    with refuses("not-a-number|out-of-range: algorithm.share"):
        ridge(share=share)


def test_a_configuration_needs_only_the_name():
    settings = load(None, ["algorithm.name=ridge"])
    assert settings.plan == Plan.one_round()
    assert load(None, ["algorithm.name=ridge", "plan.rounds=2"]).plan.rounds == 2
