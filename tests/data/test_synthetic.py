"""The synthetic federation: its two dials, its preprocessing and its label noise.

Alarms have chance 10⁻⁶.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from refusals import refuses
from scipy.stats import binom, chi2
from sklearn.linear_model import LogisticRegression

from dpscaffold.data.synthesis import synthetic
from dpscaffold.federation import Federation

ALARM = 1e-6


def agreement(data: Federation) -> float:
    """How well a model of one user predicts another's labels, averaged over pairs: low when laws
    differ."""
    tables = [tuple(part.numpy() for part in data.train.of(i)) for i in range(data.users)]
    scores = []
    for i, (x, y) in enumerate(tables):
        if len(set(y.tolist())) < 2:
            continue
        model = LogisticRegression(max_iter=200).fit(x, y)
        scores += [model.score(*other) for j, other in enumerate(tables) if j != i]
    return float(np.mean(scores))


def spread(data: Federation) -> float:
    """The variance of the users' mean features around the pooled mean, relative to all variance."""
    means = torch.stack([data.train.of(i)[0].mean(0) for i in range(data.users)])
    return float(means.var(0).sum() / data.train.features.var(0).sum())


def label_spread(data: Federation) -> float:
    """Mean total-variation distance of the users' label frequencies from the pooled ones."""
    counts = torch.stack(
        [torch.bincount(data.train.of(i)[1], minlength=data.classes) for i in range(data.users)]
    )
    shares = counts / counts.sum(1, keepdim=True)
    pooled = counts.sum(0) / counts.sum()
    return float((shares - pooled).abs().sum(1).mean() / 2)


def test_beta_moves_the_features_apart():
    """v_i has variance 1 + β around the common centre: the share of variance between users grows
    with β."""
    shares = [
        spread(synthetic(beta=beta, users=30, records=80, seed=1)) for beta in (0.0, 3.0, 30.0)
    ]
    assert shares[0] < shares[1] < shares[2]


def test_the_features_have_the_stated_covariance():
    """Within a user Σ_jj = j^−1.2 and between users 1 + β: after pooled scaling, feature j keeps
    their ratio."""
    beta, users = 2.0, 400
    data = synthetic(beta=beta, users=users, records=40, dimension=6, seed=0)
    # Rows are scaled to unit norm afterwards, so compare ratios within a user, feature by feature.
    within = torch.stack([data.train.of(i)[0].var(0) for i in range(users)]).mean(0)
    ratio = (within / within[0]).numpy()
    j = np.arange(1, 7)
    raw = j**-1.2 / (1 + beta + j**-1.2)
    np.testing.assert_allclose(ratio, raw / raw[0], rtol=0.35)


def test_every_user_has_a_model_of_its_own():
    """A model learnt at one user is of little use at another, already at α = β = 0.

    Among iid users it is.
    """
    iid = agreement(synthetic(iid=True, users=8, records=150, seed=2))
    own = agreement(synthetic(users=8, records=150, seed=2))
    assert iid > 0.6 and own < 0.5 * iid


def test_alpha_enters_the_models_and_argmax_forgets_its_scale():
    """W_i and b_i ~ N(0, (1 + α)Id) once u_i is integrated out: each α draws other labels of the
    same law.

    As the appendix writes it, α scales W_i and b_i together, which no argmax can see.
    """
    low, high = (synthetic(alpha=a, users=40, records=100, seed=2) for a in (0.0, 50.0))
    assert not torch.equal(low.train.labels, high.train.labels)
    assert abs(label_spread(low) - label_spread(high)) < 0.1


def test_iid_users_share_one_law():
    """The same W, b and v for all: label frequencies and feature means agree up to sampling."""
    iid, own = (
        synthetic(alpha=1, beta=1, iid=flag, users=12, records=400, seed=3)
        for flag in (True, False)
    )
    assert spread(iid) < 0.02 < spread(own)
    assert label_spread(iid) < 0.1 < label_spread(own)
    assert not torch.equal(iid.train.of(0)[0], iid.train.of(1)[0])


def test_rows_have_unit_norm():
    """Every train and test row, so that a logistic gradient is never longer than 2."""
    data = synthetic(alpha=5, beta=5, users=5, records=60)
    for part in (data.train, data.test):
        torch.testing.assert_close(
            part.features.norm(dim=1), torch.ones(len(part)), rtol=1e-5, atol=1e-5
        )


def test_features_are_standardised_over_all_users_and_not_per_user():
    """The pooled mean of the standardised directions is near zero while the users' own means are
    far from it."""
    data = synthetic(beta=5, users=40, records=100, seed=1)
    x = data.train.features
    pooled = x.mean(0).norm()
    own = torch.stack([data.train.of(i)[0].mean(0).norm() for i in range(40)]).mean()
    assert float(pooled) < 0.25 * float(own)
    assert float(own) > 0.7
    # Pooled scaling makes all features count alike, although their raw within-user variances fall
    # as j^−1.2.
    spreads = x.std(0)
    assert float(spreads.max() / spreads.min()) < 2


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_the_stated_share_of_labels_is_redrawn(share):
    """Against the same seed without label noise, a fraction p·(1 − 1/10) of labels differs, spread
    evenly."""
    clean, noised = (synthetic(users=20, records=1000, label_noise=p, seed=4) for p in (0.0, share))
    assert torch.equal(clean.train.features, noised.train.features)
    changed = clean.train.labels != noised.train.labels
    n, rate = len(changed), share * 0.9
    assert binom.ppf(ALARM / 2, n, rate) <= int(changed.sum()) <= binom.isf(ALARM / 2, n, rate)
    # The new labels are uniform over the classes, given that they differ from the old one.
    old, new = clean.train.labels[changed], noised.train.labels[changed]
    expected = np.array([(old != c).sum().item() / 9 for c in range(10)])
    found = torch.bincount(new, minlength=10).numpy()
    assert ((found - expected) ** 2 / expected).sum() < 1.1 * chi2.isf(ALARM, 9)


def test_five_per_cent_is_the_default():
    """The default is the paper's 5 %."""
    assert torch.equal(
        synthetic(users=3, records=200).train.labels,
        synthetic(users=3, records=200, label_noise=0.05).train.labels,
    )


def test_the_seed_makes_the_data():
    """The same seed gives the same federation to the bit, another seed another one; users
    differ."""
    one, two, other = (synthetic(users=4, records=50, seed=s) for s in (7, 7, 8))
    assert one.train.digest() == two.train.digest() and one.test.digest() == two.test.digest()
    assert one.train.digest() != other.train.digest()
    assert not torch.equal(one.train.of(0)[0], one.train.of(1)[0])


def test_a_user_does_not_depend_on_how_many_others_there_are():
    """User 0 has the same labels among 2 users as among 5: only the pooled scaling changes."""
    few, many = (synthetic(users=n, records=60, seed=1) for n in (2, 5))
    assert torch.equal(few.train.of(0)[1], many.train.of(0)[1])


@pytest.mark.parametrize(
    ("records", "train", "test"), [(5000, 4000, 1000), (50, 40, 10), (2, 1, 1), (3, 2, 1)]
)
def test_four_fifths_train_and_one_fifth_tests(records, train, test):
    """80/20 per user, and never an empty side."""
    data = synthetic(users=2, records=records, dimension=3)
    assert data.train.sizes.tolist() == [train, train] and data.test.sizes.tolist() == [test, test]


def test_unequal_sizes_spread_around_the_stated_one():
    """Log-normal sizes of mean ``records``; each user still splits 80/20."""
    data = synthetic(users=200, records=300, dimension=2, size_spread=0.5, seed=1)
    sizes = (data.train.sizes + data.test.sizes).double()
    assert len(set(sizes.tolist())) > 100
    assert float(sizes.mean()) == pytest.approx(300, rel=0.2)
    assert float(sizes.log().std()) == pytest.approx(0.5, rel=0.25)
    torch.testing.assert_close(
        data.test.sizes.double() / sizes, torch.full((200,), 0.2).double(), atol=0.02, rtol=0
    )


def test_it_says_how_the_features_were_made():
    """The privacy statement must repeat that the scaling was fitted without noise."""
    assert any("pooled" in sentence for sentence in synthetic(users=2, records=10).preprocessing)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alpha", -1.0), ("beta", float("nan")), ("users", 0), ("users", 2.5), ("records", 1),
        ("dimension", 0), ("classes", 1), ("label_noise", 1.5), ("label_noise", -0.1),
        ("size_spread", -0.2), ("test_ratio", 0.0),
        ("test_ratio", 1.0), ("seed", -1), ("alpha", float("inf")),
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_name(name, value):
    """One sentence with the argument and the value."""
    with refuses(f"not-a-number|not-a-whole-number|out-of-range: data.{name} is {value}"):
        synthetic(**{name: value})
