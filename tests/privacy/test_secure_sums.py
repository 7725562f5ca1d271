"""Secure sums (Theorem 4): the Lemma in exact arithmetic, the bound by brute force, golden
values."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from dpscaffold.privacy import (
    BOUNDS,
    CAP,
    RANDOM_PARTICIPATION,
    Ledger,
    PrivacyError,
    bound_for,
    calibrate_noise,
    describe,
    round_up,
    statement,
)
from dpscaffold.privacy.aggregate import secure_factors
from dpscaffold.privacy.bounds import SECURE_CAP, SECURE_SUMS
from dpscaffold.privacy.composition import RunPart, together
from dpscaffold.privacy.drawn import FROM_SYSTEM
from dpscaffold.privacy.laws import participations_laws, rounding_cost
from dpscaffold.privacy.mechanism import Mechanism, SecureTerms
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


def rounded_sum(means: list[float], s: float, reach: int, scale: int) -> np.ndarray:
    """The law of Σ rint(x_j) on −reach…reach, x_j ~ N(μ_j, s²), integers over ``scale``."""
    law = np.array([scale], dtype=object)
    for mean in means:
        edges = [mpmath.ncdf((n - mpmath.mpf(1) / 2 - mean) / s) for n in range(-reach, reach + 2)]
        each = [int(mpmath.nint((b - a) * scale)) for a, b in itertools.pairwise(edges)]
        law = np.convolve(law, np.array(each, dtype=object)) // scale
    middle = len(law) // 2
    return law[middle - reach : middle + reach + 1]


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
        *[(2, s) for s in (1, 2, 4)],
        *[(3, s) for s in (1, 2, 4)],
        *[(4, s) for s in (1, 2, 4)],
        *[pytest.param(h, s, marks=pytest.mark.slow) for h, s in ((3, 8), (4, 8))],
    ],
)
def test_the_lemma_by_exact_convolution(h, s):
    """Rounding each of h noised values, or their sum less uniforms, gives laws within η."""
    digits = int(2 * math.pi**2 * s**2 / h / math.log(10)) + 40
    with mpmath.workdps(digits + 25):
        means = [0.3, -0.21, 0.47, 0.05][:h]
        reach, scale = int(s * math.sqrt(5 * digits)) + 3, 10 ** (digits + 20)
        law = rounded_sum(means, s, reach, scale)
        total, deviation = mpmath.fsum(mpmath.mpf(m) for m in means), s * mpmath.sqrt(h)
        points = range(-3 * s, 3 * s + 1, s)
        ratios = [
            mpmath.mpf(int(law[reach + n])) / scale / smoothed(n, total, deviation, h)
            for n in points
        ]
        worst, bound = max(abs(ratio - 1) for ratio in ratios), eta(s, h)
        assert 0 < worst <= bound


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
    with pytest.raises(PrivacyError, match="secure_sums"):
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
    with pytest.raises(PrivacyError, match="secure sums of at least"):
        thirty(secure=terms)
    with pytest.raises(PrivacyError, match="voids=-1"):
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
