"""ε of runs with very little noise, against closed forms that share nothing with the package.

Where σ is small, a step in whose batch the record is shows it almost surely. Its loss is then
log q + 1/(2z²) + N(0, 1)/z, with z the noise multiplier, but for a part below e^{−1/(2z²)/2}; any
other step has a loss of 0 (batches of fixed size) or log(1 − q) (Poisson). So given the number of
such steps the loss of a whole run is normal, and δ(ε) is a sum of Gaussian ones over that number.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from privacy.explicit_pairs import composed_epsilon, step_pair
from privacy.settings import SMALL, run_of
from refusals import refuses
from scipy.optimize import brentq
from scipy.special import log_ndtr
from scipy.stats import binom

from dpscaffold.privacy import (
    SERVER,
    Cost,
    Ledger,
    Mechanism,
    adversaries,
    capped,
    describe,
    epsilon,
    losses,
)
from dpscaffold.privacy.mechanism import LEAST_NOISE, LEAST_STATED, MOST_NOISE

LITTLE = [0.0999, 0.07, LEAST_STATED]
FULL = {"batch_sizes": 100}
RARE = {"batch_sizes": 1, "local_steps": 8}


def shown_steps(run: Mechanism) -> np.ndarray:
    """The chance of each number of steps in whose batch the record is."""
    steps = run.local_steps
    rate = 1.0 if run.unit == "user" else run.groups[0].rate
    one = run.user_ratio * binom.pmf(np.arange(steps + 1), steps, rate)
    one[0] += 1 - run.user_ratio
    chances = np.ones(1)
    for _ in range(run.rounds):
        chances = np.convolve(chances, one)
    return chances


def exact(run: Mechanism) -> float:
    """ε of random participation, by the closed form; Poisson batches need l = 1."""
    poisson = run.unit == "record" and run.sampling == "poisson"
    rate = 1.0 if run.unit == "user" else run.groups[0].rate
    z = run.noise * (2 if poisson else 1)
    chances = shown_steps(run)
    n = np.arange(1, len(chances))
    middle = n * (np.log(rate) + 1 / (2 * z**2))
    if poisson and rate < 1:
        assert run.user_ratio == 1
        middle = middle + (len(chances) - 1 - n) * np.log1p(-rate)
    width = np.sqrt(n) / z

    def excess(at: float) -> float:
        away = (middle - at) / width
        with np.errstate(over="ignore"):
            rest = np.exp(width**2 / 2 - away * width + log_ndtr(away - width))
        return float(np.dot(chances[1:], np.exp(log_ndtr(away)) - rest)) - run.delta

    return float(brentq(excess, 0.0, middle[-1] + 40 * width[-1], xtol=1e-9, rtol=1e-14))


@pytest.mark.parametrize("noise", LITTLE)
@pytest.mark.parametrize("more", [{}, FULL, RARE], ids=["rate 0.2", "all records", "rate 0.01"])
@pytest.mark.parametrize("kind", ["fixed", "poisson", "user"])
def test_never_below_the_closed_form_and_close_to_it(noise, more, kind):
    more = {**more, "unit": "user"} if kind == "user" else {**more, "sampling": kind}
    if kind == "user":
        noise *= np.sqrt({**SMALL, **more}["local_steps"])  # the steps together are one Gaussian
    if kind == "poisson":
        more["cohort_size"] = SMALL["users"]
    run = run_of(SMALL, noise=noise, **more)
    truth, stated = exact(run), epsilon(run, SERVER)
    assert truth * (1 - 1e-9) <= stated <= truth * 1.01, stated / truth


@pytest.mark.parametrize("noise", [0.06, 0.0999, 0.17, 0.3])
@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_explicit_pairs_of_datasets(noise, sampling):
    """By characteristic functions: batches of fixed size are a little above any pair of datasets,
    Poisson batches are exact."""
    run = run_of(SMALL, noise=noise, sampling=sampling, cohort_size=10, delta=1e-3)
    pair = step_pair(0.2, noise * (2 if sampling == "poisson" else 1), "aligned")
    truth = composed_epsilon(1e-3, *pair, 3, 1.0, 20, points=1 << 15)
    within = 1.01 if sampling == "poisson" else 1.08
    assert truth * (1 - 1e-6) <= epsilon(run, SERVER) <= truth * within


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
@pytest.mark.parametrize("unit", ["record", "user"])
def test_nothing_jumps_as_the_noise_falls(sampling, unit):
    """Towards everybody, with the cap and given who took part, ε rises steadily past 0.1."""
    run = run_of(SMALL, local_steps=1, memory=False, sampling=sampling, unit=unit)

    def spent(noise: float) -> list[float]:
        changed = replace(run, noise=noise)
        ledger = Ledger(changed)
        ledger.record(1, [0])
        seen = [epsilon(changed, who) for who in adversaries(changed).values()]
        return [ledger.largest(), capped(changed, SERVER), *seen]

    values = np.array([spent(noise) for noise in np.geomspace(0.25, LEAST_STATED, 30)])
    assert (np.diff(values, axis=0) > 0).all()
    above, below = np.array(spent(0.1)), np.array(spent(0.1 * (1 - 1e-6)))
    assert (abs(below / above - 1) < 0.01).all()


def test_other_mechanisms_and_a_guess_next_to_very_little_noise():
    run = run_of(SMALL, noise=0.05)
    plain = epsilon(run, SERVER)
    assert plain < epsilon(run, SERVER, costs=[Cost("mean", noise=3.0)]) < plain * 1.02
    (law,) = losses(run, SERVER)
    shown = 1 - shown_steps(run)[0]  # whether any batch with the record was used
    assert shown * (1 - 1e-9) <= law.delta(0.0) <= shown * 1.001


@pytest.mark.parametrize("noise", [LEAST_NOISE * 0.99, MOST_NOISE * 1.01, 1e-300, 1e300])
def test_one_range_of_noise(noise):
    with refuses("noise-out-of-range: from 1e-09"):
        run_of(SMALL, noise=noise)


def test_nothing_is_stated_of_noise_that_hides_nothing():
    """Many steps on a whole user have less than one."""
    users = describe(**{**SMALL, "unit": "user", "local_steps": 100, "noise": 0.3})
    with refuses("no-privacy: at least 0.5"):
        epsilon(users, SERVER)
    with refuses("no-privacy: at least 0.05"):
        epsilon(run_of(SMALL, noise=LEAST_STATED * 0.99), SERVER)
