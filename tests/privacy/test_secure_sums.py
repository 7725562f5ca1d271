"""Secure sums (Theorem 4): the Lemma in exact arithmetic, the bound by brute force, golden
values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from privacy.explicit_pairs import gaussian_epsilon
from refusals import refuses
from scipy import stats

from dpscaffold.privacy import (
    BOUNDS,
    CAP,
    RANDOM_PARTICIPATION,
    Ledger,
    bound_for,
    calibrate_noise,
    describe,
    round_up,
    statement,
)
from dpscaffold.privacy.aggregate import secure_factors
from dpscaffold.privacy.bounds import SECURE_CAP, SECURE_SUMS
from dpscaffold.privacy.composition import RunPart, together
from dpscaffold.privacy.costs import Cost
from dpscaffold.privacy.drawn import FROM_SYSTEM
from dpscaffold.privacy.laws import participations_laws, rounding_cost
from dpscaffold.privacy.mechanism import Mechanism, SecureTerms
from dpscaffold.privacy.selected import Trials, account
from dpscaffold.privacy.selection import TrialCount
from dpscaffold.privacy.statement_types import Statement

mpmath = pytest.importorskip("mpmath")


def thirty(noise: float = 1.4088, **changes: object) -> Mechanism:
    """30 sites with 400 records, all in every round, s = 0.2, T = 400."""
    plan = {
        "rounds": 400,
        "local_steps": 1,
        "users": 30,
        "cohort_size": 30,
        "records": 400,
        "batch_sizes": 80,
        "memory": False,
        "one_sum": True,
        "sampling": "poisson",
        "secure": SecureTerms(colluders=1, least=30),
    }
    return describe(noise=noise, **{**plan, **changes})  # type: ignore[arg-type]


def eta(s: float, h: int) -> mpmath.mpf:
    """The Lemma's bound on the relative deviation."""
    terms = mpmath.fsum(mpmath.exp(-2 * mpmath.pi**2 * s**2 * n**2 / h) for n in range(1, 12))
    return (1 + 2 * terms) ** (h - 1) - 1


def normal_cells(mean: float, s: int, reach: int, scale: int) -> np.ndarray:
    """P(rint(x) = n) for n in −reach…reach, x ~ N(μ, s²), integers over ``scale``.

    In a cell of half-width r = 1/(2s) around c = (n − μ)/s, φ(c + t) = φ(c)·exp(−ct − t²/2). Its
    Taylor terms b_k·(t/r)^k follow b_{k+1} = −r(c·b_k + r·b_{k−1})/(k + 1); the cell has the mass
    2r·Σ b_2k/(2k + 1).
    """
    centre = Fraction(mean)
    found = np.zeros(2 * reach + 1, dtype=object)
    step = mpmath.exp(-mpmath.mpf(1) / s**2)
    for sign in (1, -1):
        first = (0 if sign > 0 else -1) - centre
        value = mpmath.npdf(mpmath.mpf(first.numerator) / first.denominator / s)
        ratio = mpmath.exp(
            -(2 * sign * mpmath.mpf(first.numerator) / first.denominator + 1) / (2 * s**2)
        )
        for n in range(reach + 1) if sign > 0 else range(-1, -reach - 1, -1):
            found[reach + n] = _cell(int(value * scale), n - centre, s)
            value, ratio = value * ratio, ratio * step
    return found


def _cell(height: int, moved: Fraction, s: int) -> int:
    """The mass of one cell, as above, from φ(c) and s·c."""
    # r·c and r² as integers over one denominator.
    over = 4 * s * s * moved.denominator
    slope, curve = 2 * moved.numerator, moved.denominator
    before, term, total, k = 0, height, 0, 0
    while term or before:
        if k % 2 == 0:
            total += term // (k + 1)
        before, term = term, -(slope * term + curve * before) // (over * (k + 1))
        before, term = (before, term) if abs(term) > 1 else (before if abs(before) > 1 else 0, 0)
        k += 1
    return total // s


def rounded_sum(means: list[float], s: int, reach: int, scale: int) -> Callable[[int], mpmath.mpf]:
    """The law of Σ rint(x_j), x_j ~ N(μ_j, s²): two exact convolutions, joined where asked."""
    cells = [normal_cells(mean, s, reach, scale) for mean in means]
    halves = []
    for part in (cells[: len(cells) // 2], cells[len(cells) // 2 :]):
        law = part[0]
        for other in part[1:]:
            law = np.convolve(law, other) // scale
        middle = len(law) // 2
        halves.append(law[middle - reach : middle + reach + 1])
    left, right = halves

    def at(n: int) -> mpmath.mpf:
        low, high = max(-reach, n - reach), min(reach, n + reach)
        ours = left[reach + low : reach + high + 1]
        theirs = right[reach + n - high : reach + n - low + 1][::-1]
        return mpmath.mpf(int(ours @ theirs)) / scale**2

    return at


def smoothed(n: int, mean: float, deviation: mpmath.mpf, h: int) -> mpmath.mpf:
    """P(rint(S − U) = n): the density of S less h uniforms at n, an h-th difference of an h-fold
    antiderivative of the normal density."""

    def antiderivatives(x: mpmath.mpf) -> mpmath.mpf:
        below = mpmath.npdf(x, 0, deviation)
        found = mpmath.ncdf(x / deviation)
        for k in range(1, h):
            below, found = found, (x * found + deviation**2 * below) / k
        return found

    points = [n - mean + mpmath.mpf(h) / 2 - j for j in range(h + 1)]
    return mpmath.fsum(
        (-1) ** j * mpmath.binomial(h, j) * antiderivatives(x) for j, x in enumerate(points)
    )


@pytest.mark.parametrize(
    ("h", "s"),
    [
        *itertools.product((2, 3, 4), (1, 2, 4)),
        *[pytest.param(h, s, marks=pytest.mark.slow) for h, s in ((2, 8), (3, 8), (4, 8), (2, 16))],
    ],
)
def test_the_lemma_by_exact_convolution(h, s):
    """Rounding each of h noised values, or their sum less uniforms, gives laws within η, which is
    10⁻¹⁰⁹⁷ at h = 2, s = 16."""
    digits = int(2 * math.pi**2 * s**2 / h / math.log(10)) + 40
    with mpmath.workdps(digits + 25):
        means = [0.3, -0.21, 0.47, 0.05][:h]
        reach, scale = int(s * math.sqrt(5 * digits)) + 3, 10 ** (digits + 20)
        law = rounded_sum(means, s, reach, scale)
        total, deviation = mpmath.fsum(mpmath.mpf(m) for m in means), s * mpmath.sqrt(h)
        ratios = [law(n) / smoothed(n, total, deviation, h) for n in range(-3 * s, 3 * s + 1, s)]
        worst, bound = max(abs(ratio - 1) for ratio in ratios), eta(s, h)
        # With two values the bound is nearly met, so a larger deviation would be noticed.
        assert (bound / 1000 if h == 2 else 0) < worst <= bound


def test_the_cells_are_those_of_the_normal_law():
    """The Taylor series of a cell against differences of the normal distribution."""
    with mpmath.workdps(60):
        for mean, s in ((0.3, 1), (-0.21, 4)):
            cells = normal_cells(mean, s, 8 * s, 10**55)
            for n in (-7 * s, -s, 0, 1, 5 * s):
                ends = [mpmath.ncdf((n + half - mpmath.mpf(mean)) / s) for half in (-0.5, 0.5)]
                assert abs(mpmath.mpf(int(cells[8 * s + n])) / 10**55 - ends[1] + ends[0]) < 1e-50


@pytest.mark.parametrize("h", [2, 3, 4])
@pytest.mark.parametrize("s", [1.0, 4.0, 16.0])
@pytest.mark.parametrize("shift", [0.5, 1.0])
def test_a_rounded_sum_distinguishes_no_better_than_the_gaussian(h, s, shift):
    """δ(ε) of the sum of rounded values, summed exactly, against that of N(0, hs²) moved as far."""
    deviation = s * math.sqrt(h)
    moved = shift * deviation
    grid = np.arange(-int(12 * s) - 40, int(12 * s) + 41)

    def law(first: float) -> np.ndarray:
        total = np.ones(1)
        for mean in [first, -0.21, 0.47, 0.05][:h]:
            total = np.convolve(total, np.diff(stats.norm.cdf(grid, mean + 0.5, s)))
        return total

    slack = float(mpmath.mpf(eta(s, h))) if s < 4 else 1e-12
    for start in (0.0, 0.37):
        p, q = law(start + moved), law(start)
        for epsilon in (0.0, 0.3, 1.0, 2.0):
            found = float(np.maximum(p - math.exp(epsilon) * q, 0).sum())
            ratio = shift  # the shift over the deviation
            gaussian = stats.norm.cdf(ratio / 2 - epsilon / ratio) - math.exp(
                epsilon
            ) * stats.norm.cdf(-ratio / 2 - epsilon / ratio)
            assert found <= gaussian + slack * (1 + math.exp(epsilon))


def test_the_golden_values():
    """30 sites, one colluder, ε = 1: σ_g falls from 7.59 to 1.41. 20 voids make it 1.03, one void
    of every round 1.46."""
    plain = replace(thirty(), secure=None)
    assert calibrate_noise(plain, 1.0) == pytest.approx(7.59, abs=0.005)
    noise = calibrate_noise(thirty(), 1.0, SECURE_SUMS)
    assert noise == pytest.approx(1.41, abs=0.005)
    assert noise == pytest.approx(calibrate_noise(plain, 1.0) / math.sqrt(29), rel=1e-3)
    voids = [SECURE_SUMS.epsilon(thirty(noise, voids=n)) for n in (0, 20, 400)]
    assert voids == pytest.approx([1.0, 1.027, 1.462], abs=0.001)


def test_it_is_random_participation_with_the_noise_of_the_honest():
    """The same law as without secure sums at σ_g·√(m − k), whatever the sampling and the unit."""
    for sampling, unit in itertools.product(("fixed", "poisson"), ("record", "user")):
        run = thirty(2.0, sampling=sampling, unit=unit, cohort_size=12,
                     secure=SecureTerms(2, 12))  # fmt: skip
        other = replace(run, noise=2.0 * math.sqrt(10), secure=None)
        assert SECURE_SUMS.epsilon(run) == pytest.approx(
            RANDOM_PARTICIPATION.epsilon(other), rel=1e-4
        )
        # Rounding in float64 is taken off the noise, so ε is never below it.
        assert SECURE_SUMS.epsilon(run) >= RANDOM_PARTICIPATION.epsilon(other) * (1 - 1e-9)


def brute_force(run: Mechanism) -> list[float]:
    """The smallest multiplier over σ_g of each group, over all lists and all colluders."""
    assert run.secure is not None
    k, m = run.secure.colluders, run.cohort_size
    members = [group for group in run.groups for _ in range(group.users)]
    ratio = [(g.records if run.weighting == "records" else 1) / g.batch for g in members]
    found = {}
    for size in range(run.secure.least, m + 1):
        louder = (m - k) / (size - k)
        for chosen in itertools.combinations(range(len(members)), size):
            for i in chosen:
                others = sorted(ratio[j] ** 2 for j in chosen if j != i)
                honest = ratio[i] ** 2 + sum(others[: size - 1 - k])
                value = math.sqrt(louder * honest) / ratio[i]
                group = members[i]
                found[group] = min(found.get(group, math.inf), value)
    return [found[group] for group in run.groups]


@pytest.mark.parametrize("weighting", ["uniform", "records"])
@pytest.mark.parametrize(("k", "least"), [(1, 5), (1, 3), (2, 4), (0, 2)])
def test_unequal_sites_by_brute_force(weighting, k, least):
    """Every list, every set of colluders: nothing is below the factor, and something meets it."""
    run = thirty(1.0, users=7, cohort_size=5, records=[50, 60, 80, 80, 200, 500, 30],
                 batch_sizes=[5, 6, 8, 10, 20, 50, 15], weighting=weighting,
                 secure=SecureTerms(k, least))  # fmt: skip
    assert secure_factors(run) == pytest.approx(brute_force(run), rel=1e-5)
    assert (secure_factors(run) <= np.array(brute_force(run)) * (1 + 1e-12)).all()


def test_shorter_lists_never_lower_epsilon_and_voids_raise_it():
    """The noise follows the list; every attempt counts."""
    values = [SECURE_SUMS.epsilon(thirty(secure=SecureTerms(1, n))) for n in (3, 10, 30)]
    assert values == pytest.approx([values[0]] * 3, rel=1e-9)
    more = [SECURE_SUMS.epsilon(thirty(secure=SecureTerms(k, 30))) for k in (0, 1, 5, 20)]
    assert more == sorted(more) and more[0] < more[-1]
    for bound in (SECURE_SUMS, SECURE_CAP, RANDOM_PARTICIPATION, CAP):
        assert bound.epsilon(thirty(voids=5)) > bound.epsilon(thirty())
    # A round that was run again counts at least as much as a void that was allowed for.
    again = SECURE_SUMS.epsilon(thirty(), repeats=(1,) * 20)
    assert again == SECURE_SUMS.epsilon(thirty(voids=20))
    assert SECURE_SUMS.epsilon(thirty(voids=30), repeats=(1, 2)) == SECURE_SUMS.epsilon(
        thirty(voids=30)
    )


def test_the_cap_counts_every_attempt():
    """n attempts at multiplier z, whoever selects; alone, at the noise of a site."""
    run = thirty(voids=20)
    once = replace(run, rounds=420, voids=0)
    assert SECURE_CAP.epsilon(run) == pytest.approx(SECURE_CAP.epsilon(once), rel=1e-9)
    assert CAP.epsilon(run) == pytest.approx(CAP.epsilon(once), rel=1e-9)
    assert CAP.epsilon(run) > 5 * SECURE_CAP.epsilon(run)


def test_sampling_sites_pays_but_voids_do_not():
    """With l < 1 a void attempt is a whole participation, not one with probability l."""
    run = thirty(cohort_size=6, secure=SecureTerms(1, 6))
    doubled = SECURE_SUMS.epsilon(replace(run, rounds=800))
    assert SECURE_SUMS.epsilon(replace(run, voids=400)) > 1.5 * doubled


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"local_steps": 2}, "local_steps=2"),
        ({"memory": True}, "memory"),
        ({"one_sum": False}, "one vector each"),
        ({"secure": None}, "sees every upload"),
        ({"clip": "median"}, "private data"),
        ({"unproved_hooks": ("new",)}, "unproved_hooks"),
        ({"unit": "user", "weighting": "records"}, "weights by records"),
    ],
)
def test_what_is_not_proved_falls_back_to_the_own_noise(changes, reason):
    """The bound refuses, and the server's ε is that of a site's own noise."""
    run = thirty(**changes)
    said = SECURE_SUMS.applies(run)
    assert said is not None and reason in said
    with refuses("bound-not-applicable: secure_sums"):
        SECURE_SUMS.epsilon(run)
    assert bound_for(run, "server") is RANDOM_PARTICIPATION


def test_the_ledger_of_an_unproved_run_counts_the_own_noise_only():
    """Given who took part, nothing else hides a record there."""
    for run in (thirty(local_steps=2), thirty(memory=True), thirty(one_sum=False)):
        plain = replace(run, secure=None)
        assert participations_laws(run, 3)[0].epsilon(1e-6) == pytest.approx(
            participations_laws(plain, 3)[0].epsilon(1e-6)
        )


def test_which_bound_is_quoted():
    """Towards the server, third parties and up to k participants the sums; beyond k, own noise."""
    run = thirty(secure=SecureTerms(2, 30))
    for view in ("server", "third_party"):
        assert bound_for(run, view) is SECURE_SUMS
    assert bound_for(run, "participant", colluders=2) is SECURE_SUMS
    assert bound_for(run, "participant", colluders=3) is RANDOM_PARTICIPATION
    for name in ("aggregate", "aggregate_participant", "user_sampling"):
        assert BOUNDS[name].applies(run) is not None
    # A deployed site may always stay away; the noise then follows the shorter list.
    away = replace(run, may_decline="a deployed site may stay away")
    assert bound_for(away, "server", repeats=(1,)) is SECURE_SUMS


@pytest.mark.parametrize(
    "terms", [SecureTerms(1, 2), SecureTerms(-1, 5), SecureTerms(1, 31), SecureTerms(29, 30)]
)
def test_descriptions_that_hide_nobody_are_refused(terms):
    """Fewer than two honest members, or more than take part."""
    with refuses("too-few-sites"):
        thirty(secure=terms)
    with refuses("out-of-range: voids=-1"):
        thirty(voids=-1)


def test_rounding_costs_nothing_until_there_are_very_many_members():
    """It is part of every law, and refuses no number of sites silently."""
    assert rounding_cost(100, 10**6) == 0.0
    assert 0 < rounding_cost(100_000, 10**6) < 1e-10
    assert rounding_cost(1_000_000, 10**6) == 1.0


def test_the_statement_says_both_numbers():
    """ε towards server and k sites, ε alone, the assumption; in JSON, and after reading it back."""
    run = thirty(voids=20)
    said = statement(run)
    assert said.server.bound == "secure_sums" and said.alone is not None
    assert said.alone.bound == "random_participation"
    assert said.server.epsilon == SECURE_SUMS.epsilon(run)
    assert said.alone.epsilon == RANDOM_PARTICIPATION.epsilon(run)
    assert round_up(said.server.epsilon) in said.quote
    assert round_up(said.alone.epsilon) in said.quote and "X25519" in said.quote
    assert "at most 1 of the other sites" in said.quote
    assert "Simulated secure sums" in said.outside[0]
    assert said.mechanism is not None and said.mechanism.secure is not None
    assert (said.mechanism.secure.least, said.mechanism.secure.voids) == (30, 20)
    assert said.views is not None and "hostile" in said.views["server"]
    assert said.human is not None and {"server", "alone"} <= set(said.human)
    again = Statement.from_json(said.to_json())
    assert again == said and again.run == run


def test_a_statement_without_secure_sums_does_not_mention_them():
    """No key, no bound, no view."""
    said = statement(replace(thirty(), secure=None))
    text = str(said.to_json())
    assert "secure" not in text and "alone" not in said.to_json()


def test_given_who_took_part_the_sums_count_too():
    """The ledger's ε is towards server and colluders; next to it what the own noise gives."""
    run = thirty(rounds=9)
    ledger = Ledger(run)
    for number in (1, 2, 3):
        ledger.record(number, range(30))
    said = statement(run, ledger=ledger, draw_given=True)
    assert said.ledger is not None and said.alone is not None
    assert said.alone.ledger is not None and said.alone.ledger > 3 * said.ledger.epsilon
    assert ledger.largest() == pytest.approx(SECURE_CAP.epsilon(replace(run, rounds=3)), rel=1e-6)
    assert said.quote.startswith("Each record is protected with epsilon = ")
    assert round_up(said.alone.ledger) in said.quote


def test_runs_with_secure_sums_add_up():
    """Several runs: the server's ε of each."""
    run = thirty()
    parts = [
        RunPart(name, run, 400, {"server": SECURE_SUMS}, secret=True, drawn=FROM_SYSTEM)
        for name in ("a", "b")
    ]
    assert together(parts).epsilon["server"] == pytest.approx(2 * SECURE_SUMS.epsilon(run))
    joint = together(parts, fixed_in_advance=True).epsilon["server"]
    whole = SECURE_SUMS.epsilon(thirty(rounds=800, delta=2 * run.delta))
    assert joint == pytest.approx(whole, rel=0.01)


def test_bounds_that_do_not_count_void_attempts_refuse_them():
    """The Rényi bound and the published number count rounds only."""
    run = thirty(voids=5, sampling="fixed")
    for name in ("random_participation_rdp", "paper_third_party"):
        assert BOUNDS[name].applies(thirty(sampling="fixed")) is None
        assert "5 void attempts" in str(BOUNDS[name].applies(run))
    for bound in BOUNDS.values():
        if bound.applies(run) is None:
            more = bound.epsilon(run), bound.epsilon(replace(run, voids=0))
            assert more[0] > more[1], bound.name


def unequal(**changes: object) -> Mechanism:
    """Twelve sites of two sizes, of which neither is the worse in rate and in noise."""
    sizes = [100] * 6 + [330] * 6
    plan = {
        "rounds": 20,
        "users": 12,
        "cohort_size": 12,
        "records": sizes,
        "batch_sizes": [19] * 6 + [67] * 6,
        "secure": SecureTerms(colluders=1, least=12),
        "delta": 1e-5,
    }
    return thirty(3.0, **{**plan, **changes})


def test_several_runs_over_unequal_sites_keep_the_noise_of_the_sum():
    """Two runs are composed by one law that is worse than every site's, and still far below what a
    site's own noise gives."""
    run = unequal()
    assert len(SECURE_SUMS.laws(run, 20)) > 2  # type: ignore[misc]
    half = replace(run, delta=run.delta / 2)
    parts = [
        RunPart(name, half, 20, {"server": SECURE_SUMS}, secret=True, drawn=FROM_SYSTEM)
        for name in ("a", "b")
    ]
    joint = together(parts, fixed_in_advance=True).epsilon["server"]
    twice = replace(run, rounds=40)
    alone = BOUNDS["random_participation"].epsilon(twice)
    assert joint is not None
    assert SECURE_SUMS.epsilon(twice) * (1 - 1e-6) <= joint < 0.5 * alone
    voided = [replace(part, run=replace(half, voids=9)) for part in parts]
    assert together(voided, fixed_in_advance=True).epsilon["server"] > joint  # type: ignore[operator]


def test_private_trials_with_secure_sums_state_both_epsilons():
    stopping = TrialCount(3.0)
    """Towards the server the trials compose through their sums, towards all others by a site's own
    noise; the winner costs at least one trial, and void attempts count for everybody."""
    run = unequal()
    score = Cost("score", noise=20.0)
    found = account(Trials((run,), (0, 0, 0), stopping, score))
    plain = account(Trials((replace(run, secure=None),), (0, 0, 0), stopping, score))
    assert found.epsilon["alone"] == pytest.approx(plain.epsilon["server"], rel=1e-6)
    assert found.epsilon["server"] < 0.5 * found.epsilon["alone"]
    assert found.epsilon["server"] >= SECURE_SUMS.epsilon(replace(run, rounds=60))
    assert SECURE_SUMS.epsilon(run) < found.epsilon["third_party"] < found.epsilon["alone"]
    assert "alone" not in plain.epsilon and "alone" not in plain.to_server().to_json()
    assert found.to_server().to_json()["alone"] == found.epsilon["alone"]
    assert "at most 1 of the sites" in found.to_server().adversary
    assert round_up(found.epsilon["alone"]) in found.sentence(stopping)
    voided = account(Trials((replace(run, voids=9),), (0, 0, 0), stopping, score))
    assert all(voided.epsilon[view] > value for view, value in found.epsilon.items())


def test_a_sites_own_noise_pays_for_preparation_too():
    """If all others collude, a prepared mean is hidden by a site's own share of its noise. With
    full batches of all sites everything is a plain Gaussian: μ² adds."""
    rounds, noise, mean, share = 6, 4.0, 5.0, 0.5
    run = describe(
        rounds=rounds,
        local_steps=1,
        users=5,
        cohort_size=5,
        records=40,
        batch_sizes=40,
        noise=noise,
        memory=False,
        one_sum=True,
        delta=1e-5,
        secure=SecureTerms(1, 5),
    )
    ledger = Ledger(run)
    for number in range(1, rounds + 1):
        ledger.record(number, range(5))
    exact = gaussian_epsilon(1e-5, math.sqrt(rounds / noise**2 + 1 / (share * mean) ** 2))
    costs = [Cost("mean", noise=mean, alone=share)]
    for told in (None, ledger):
        said = statement(run, told, extra_costs=costs)
        assert exact <= said.alone.epsilon <= exact * 1.003
    assert exact <= said.alone.ledger <= exact * 1.003
