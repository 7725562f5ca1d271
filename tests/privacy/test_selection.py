"""The best of a random number of trials: its laws, closed forms, another library, and brute
force."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from refusals import refuses
from scipy import stats
from scipy.special import logsumexp

from dpscaffold.privacy.selection import TrialCount, selected_profile, selected_renyi

LAWS = [
    TrialCount(7.0),
    TrialCount(7.0, 0.0),
    TrialCount(3.0, 0.5),
    TrialCount(12.0, -0.5),
    TrialCount(4.0, 3.0),
    TrialCount(5.0, math.inf),
    TrialCount(0.4, math.inf),
]
BOUNDED = [replace(law, most=most) for law in LAWS for most in (1, 4, 30)]


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_the_law_of_the_number_of_trials_is_the_theorems(law):
    chances = np.array([law.probability(j) for j in range(3000)])
    assert chances.sum() == pytest.approx(1, abs=1e-5)  # some laws have long tails
    assert chances @ np.arange(3000) == pytest.approx(law.mean, rel=1e-2)
    for q in (0.0, 0.3, 0.9, 0.99):
        assert law.generating(q) == pytest.approx(chances @ q ** np.arange(3000), abs=1e-9)
    slope = (law.generating(1.0) - law.generating(1 - 1e-7)) / 1e-7
    assert slope == pytest.approx(law.mean, rel=1e-3)  # f′(1) = E[J]


def test_geometric_logarithmic_and_poisson_are_the_textbooks():
    j = np.arange(0, 60)
    known = [
        (TrialCount(4.0), stats.geom(0.25).pmf(j)),
        (TrialCount(4.0, 0.0), stats.logser(1 - TrialCount(4.0, 0.0).gamma).pmf(j)),
        (TrialCount(4.0, math.inf), stats.poisson(4.0).pmf(j)),
    ]
    for law, chances in known:
        assert [law.probability(int(k)) for k in j] == pytest.approx(chances, abs=1e-12)
    # negative binomial, given that it is not 0
    law = TrialCount(6.0, 2.5)
    plain = stats.nbinom(2.5, law.gamma)
    expected = plain.pmf(j[1:]) / (1 - plain.pmf(0))
    assert [law.probability(int(k)) for k in j[1:]] == pytest.approx(expected, rel=1e-9)


def chi_square(law: TrialCount, draws: list[int]) -> float:
    """The p-value of draws under a law, cells of at least 20 expected draws."""
    cells, left, start = [], 1.0, 0
    while left * len(draws) > 60:
        chance, end = 0.0, start
        while chance * len(draws) < 20:
            chance += law.probability(end)
            end += 1
        cells.append((start, end, chance))
        left, start = left - chance, end
    counts = [sum(low <= d < high for d in draws) for low, high, _ in cells]
    counts.append(len(draws) - sum(counts))
    chances = [c for *_, c in cells]
    expected = np.array([*chances, 1 - sum(chances)]) * len(draws)
    return float(stats.chisquare(counts, expected).pvalue)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_drawn_numbers_follow_the_law_and_no_other(law):
    stream = random.Random(5)
    draws = [law.draw(stream) for _ in range(8000)]
    assert chi_square(law, draws) > 1e-4  # wrong once in 10,000
    for other in (TrialCount(2 * law.mean, law.shape), TrialCount(law.mean, abs(law.shape) + 0.8)):
        if other != law:
            assert chi_square(other, draws) < 1e-3, other  # a wrong mean or shape is seen


@pytest.mark.parametrize("law", BOUNDED, ids=str)
def test_a_bounded_law_is_the_law_given_that_it_is_kept(law):
    """Against the law without a bound, restricted and divided by hand; draws follow it, and neither
    the smaller of J and N nor the law without a bound."""
    free, n = replace(law, most=None), law.most
    whole = np.array([free.probability(j) for j in range(n + 1)])
    given_kept = whole / whole.sum()
    assert [law.probability(j) for j in range(-1, n + 3)] == pytest.approx(
        [0, *given_kept, 0, 0], abs=1e-12
    )
    assert law.within == pytest.approx(whole.sum(), rel=1e-12)
    assert law.expected == pytest.approx(given_kept @ np.arange(n + 1)) and law.expected <= law.mean
    for q in (0.0, 0.4, 1.0):
        assert law.generating(q) == pytest.approx(given_kept @ q ** np.arange(n + 1))
    stream = random.Random(7)
    counts = np.bincount([law.draw(stream) for _ in range(6000)], minlength=n + 1)
    assert len(counts) == n + 1  # none above the bound
    kept = given_kept * 6000 > 5
    others = max(1e-9, 6000 * given_kept[~kept].sum())
    expected = np.array([*(6000 * given_kept[kept]), others])
    found = np.array([*counts[kept], counts[~kept].sum()])
    assert stats.chisquare(found, expected * 6000 / expected.sum()).pvalue > 1e-4
    cut = whole.copy()
    cut[n] += 1 - whole.sum()  # the smaller of J and N
    if n > 1 and cut[n] > 1.2 * given_kept[n] and 6000 * given_kept[n] > 20:
        assert stats.binomtest(int(counts[n]), 6000, min(1.0, cut[n])).pvalue < 1e-3


def test_a_bound_costs_nothing_and_saves_where_it_binds():
    orders = np.array([2.0, 8.0, 40.0])
    curve = 0.01 * orders

    def profile(epsilon: float) -> float:
        return 1e-3 * math.exp(-epsilon)

    for law in LAWS:
        free = selected_renyi(law, orders, curve, profile)
        far = selected_renyi(replace(law, most=20_000), orders, curve, profile)
        near = selected_renyi(replace(law, most=9), orders, curve, profile)
        assert far == pytest.approx(free, rel=1e-3)
        if not law.poisson:
            assert (near < free).all()
            tight = selected_profile(replace(law, most=9), profile, lambda d: -math.log(d), 1e-5)
            assert tight < selected_profile(law, profile, lambda d: -math.log(d), 1e-5)


def test_stopping_at_the_bound_instead_of_drawing_again_would_cost_more():
    """Why J is drawn again above its bound: the smaller of J and 2 with a mean of 50 is nearly the
    constant 2, and the ratio of chances exceeds what the law without a bound allows."""
    law, eps = TrialCount(50.0), 0.3
    first = law.probability(1)

    def slope(q: float) -> float:  # f′ of the smaller of J and 2
        return first + 2 * (1 - first) * q

    q = 1e-3 * math.exp(eps)
    allowed = ((1 - 0.98 * 1e-3) / (1 - 0.98 * q)) ** 2
    assert slope(q) / slope(1e-3) > allowed
    drawn = replace(law, most=2)

    def given_kept(q: float) -> float:
        return drawn.probability(1) + 2 * drawn.probability(2) * q

    assert given_kept(q) / given_kept(1e-3) <= allowed


def test_closed_forms():
    """Pure ε-DP: (2 + η)ε whatever the mean; the theorems' own formulas, one order by hand."""
    for shape in (0.0, 0.5, 1.0, 2.0):
        law = TrialCount(20.0, shape)
        found = selected_profile(law, lambda e: float(e < 0.2), lambda d: 0.2, 1e-9)
        assert found == pytest.approx((2 + shape) * 0.2, rel=1e-9)
    orders, rho = np.array([2.0, 5.0, 50.0]), 0.02
    curve = rho * orders
    geometric = selected_renyi(TrialCount(10.0), orders, curve)
    hats = [2 * (1 - 1 / o) * rho * o + 2 * math.log(10) / o for o in (2, 5, 50)]
    assert geometric[1] == pytest.approx(5 * rho + min(hats) + math.log(10) / 4, rel=1e-12)
    poisson = selected_renyi(TrialCount(10.0, math.inf), orders, curve, lambda e: 1e-3 * e)
    paper = 5 * rho + 10 * 1e-3 * math.log(1.25) + math.log(10) / 4
    assert poisson[1] == pytest.approx(math.log(math.exp(-10) + math.exp(4 * paper)) / 4, rel=1e-12)
    assert 0 < poisson[1] - paper < 1e-5  # the paper's formula, and the outcome of no trial


@pytest.mark.parametrize("law", [TrialCount(8.0, s) for s in (1.0, 0.0, 2.0, math.inf)], ids=str)
def test_another_library_agrees(law):
    from dp_accounting import dp_event
    from dp_accounting.rdp import RdpAccountant
    from dp_accounting.rdp.rdp_privacy_accountant import compute_delta

    orders = np.array([1.5, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 512])
    curve = orders / (2 * 6.0**2)
    accountant = RdpAccountant(orders)
    event = dp_event.RepeatAndSelectDpEvent(dp_event.GaussianDpEvent(6.0), law.mean, law.shape)
    accountant.compose(event)
    # For Poisson it takes δ̂ from the curve, and so do we here; elsewhere from the exact profile.
    ours = selected_renyi(law, orders, curve, lambda e: float(compute_delta(orders, curve, e)[0]))
    found = [
        o + math.log1p(-1 / a) - math.log(1e-6 * a) / (a - 1)
        for a, o in zip(orders, ours, strict=True)
    ]
    assert accountant.get_epsilon(1e-6) == pytest.approx(min(found), rel=2e-3)
    assert (accountant.rdp <= ours * (1 + 1e-9)).all()  # it may use that curves are monotone


def hockey(p: np.ndarray, q: np.ndarray, epsilon: float) -> float:
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum())


def winner(law: TrialCount, q: np.ndarray) -> np.ndarray:
    """The winner's law among outputs in rising order: f(Q(≤ y)) − f(Q(< y)); what happens when
    nobody tried is an outcome of its own."""
    reached = np.array([law.generating(min(1.0, c)) for c in (0.0, *np.cumsum(q))])
    return np.concatenate([reached[:1], np.diff(reached)])


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.floats(0.02, 1), min_size=2, max_size=6),
    st.lists(st.floats(-0.8, 0.8), min_size=6, max_size=6),
    st.sampled_from([*LAWS, *BOUNDED]),
    st.sampled_from([1e-3, 1e-2, 0.05]),
)
def test_reported_epsilon_is_at_least_that_of_the_winner_itself(weights, tilts, law, delta):
    """Brute force over a mechanism with few outputs: the exact ε of the selection, both
    directions, never exceeds what is reported."""
    p = np.array(weights) / sum(weights)
    q = p * np.exp(tilts[: len(p)])
    q /= q.sum()

    def profile(epsilon: float) -> float:
        return max(hockey(p, q, epsilon), hockey(q, p, epsilon))

    def epsilon_of(target: float, of=profile) -> float:
        low, high = 0.0, 40.0
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if of(middle) > target else (low, middle)
        return high

    a, b = winner(law, p), winner(law, q)
    assume(a.sum() == pytest.approx(1) and b.sum() == pytest.approx(1))
    exact = epsilon_of(delta, lambda e: max(hockey(a, b, e), hockey(b, a, e)))
    if not law.poisson:
        assert selected_profile(law, profile, epsilon_of, delta) >= exact - 1e-9
    orders = np.array([1.2, 1.5, 2.0, 3.0, 5.0, 9.0, 20.0, 60.0, 300.0])

    def renyi(u: np.ndarray, v: np.ndarray) -> np.ndarray:
        u, v = u[u > 0], v[v > 0]
        logs = [o * np.log(u) + (1 - o) * np.log(v) for o in orders]
        return np.array([logsumexp(w) / (o - 1) for o, w in zip(orders, logs, strict=True)])

    curve = np.maximum(renyi(p, q), renyi(q, p))
    told = selected_renyi(law, orders, curve, profile)
    theirs = np.maximum(renyi(a, b), renyi(b, a))
    assert (told >= theirs - 1e-9).all()


def test_a_constant_number_of_trials_would_cost_more():
    """Why J is random: the best of exactly eight randomised answers tells more than (2 + η)ε."""
    eps = 0.3
    p = np.array([math.exp(eps), 1.0]) / (1 + math.exp(eps))
    fixed = [np.array([d[0] ** 8, 1 - d[0] ** 8]) for d in (p, p[::-1])]
    assert abs(math.log(fixed[0][0] / fixed[1][0])) == pytest.approx(8 * eps)
    drawn = [winner(TrialCount(8.0), d)[1:] for d in (p, p[::-1])]
    assert np.abs(np.log(drawn[0] / drawn[1])).max() <= 3 * eps


@pytest.mark.parametrize(
    ("mean", "shape", "said"),
    [
        (1.0, 1.0, "out-of-range: above 1"),
        (0.0, math.inf, "out-of-range: above 0"),
        (math.inf, 1.0, "out-of-range: at most 1,000,000"),
        (3.0, -1.0, "out-of-range: above -1"),
        (3.0, math.nan, "out-of-range: above -1"),
        (math.nan, 1.0, "out-of-range: above 1"),
    ],
)
def test_bad_laws_are_refused(mean, shape, said):
    with refuses(said):
        TrialCount(mean, shape)


@pytest.mark.parametrize(
    ("law", "said"),
    [({"mean": 5.0, "most": 0}, "out-of-range: are 0"),
     ({"mean": 5.0, "most": 2_000_000}, "out-of-range: from 1"),
     ({"mean": 9000.0, "most": 2}, "out-of-range"),
     ({"mean": 900.0, "shape": math.inf}, "out-of-range"),
     ({"mean": 5000.0, "shape": 900.0}, "out-of-range")],
)  # fmt: skip
def test_laws_that_cannot_be_drawn_are_refused(law, said):
    with refuses(said):
        TrialCount(**law)


def test_the_profile_is_not_used_where_it_is_not_proved():
    with refuses("bound-not-applicable"):
        selected_profile(TrialCount(2.0, math.inf), lambda e: 0.0, lambda d: 0.0, 1e-6)
    with refuses("bound-not-applicable"):
        selected_renyi(TrialCount(2.0, math.inf), np.array([2.0]), np.array([1.0]))
