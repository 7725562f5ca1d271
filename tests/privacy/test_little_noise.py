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

from dpscaffold import Gaussian
from dpscaffold.privacy import (
    AGGREGATE,
    CAP,
    RANDOM_PARTICIPATION,
    USER_SAMPLING,
    Cost,
    Ledger,
    Mechanism,
    human_terms,
)
from dpscaffold.privacy.mechanism import LEAST_NOISE, MOST_NOISE

LITTLE = [0.0999, 0.05, 0.03, 0.01, 1e-3, LEAST_NOISE]
FULL = {"batch_sizes": 100}
RARE = {"batch_sizes": 1, "local_steps": 8}


def shown_steps(run: Mechanism) -> np.ndarray:
    """The chance of each number of steps in whose batch the record is."""
    steps = run.local_steps
    rate = 1.0 if run.unit == "user" else run.worst.rate
    one = run.user_ratio * binom.pmf(np.arange(steps + 1), steps, rate)
    one[0] += 1 - run.user_ratio
    chances = np.ones(1)
    for _ in range(run.rounds):
        chances = np.convolve(chances, one)
    return chances


def exact(run: Mechanism) -> float:
    """ε of random participation, by the closed form; Poisson batches need l = 1."""
    poisson = run.unit == "record" and run.sampling == "poisson"
    rate = 1.0 if run.unit == "user" else run.worst.rate
    z = run.noise * (2 if poisson else 1)
    chances = shown_steps(run)
    n = np.arange(1, len(chances))
    middle = n * (np.log(rate) + 1 / (2 * z**2))
    if poisson and rate < 1:
        assert run.user_ratio == 1
        middle = middle + (len(chances) - 1 - n) * np.log1p(-rate)
    width = np.sqrt(n) / z

    def excess(epsilon: float) -> float:
        away = (middle - epsilon) / width
        with np.errstate(over="ignore"):
            rest = np.exp(width**2 / 2 - away * width + log_ndtr(away - width))
        return float(np.dot(chances[1:], np.exp(log_ndtr(away)) - rest)) - run.delta

    return float(brentq(excess, 0.0, middle[-1] + 40 * width[-1], xtol=1e-9, rtol=1e-14))


@pytest.mark.parametrize("noise", LITTLE)
@pytest.mark.parametrize("more", [{}, FULL, RARE], ids=["rate 0.2", "all records", "rate 0.01"])
@pytest.mark.parametrize("kind", ["fixed", "poisson", "user"])
def test_never_below_the_closed_form_and_close_to_it(noise, more, kind):
    more = {**more, "unit": "user"} if kind == "user" else {**more, "sampling": kind}
    if kind == "poisson":
        more["cohort_size"] = SMALL["users"]
        noise = noise / 2  # the multiplier is 2σ_g
    run = run_of(SMALL, noise=max(noise, LEAST_NOISE), **more)
    truth, stated = exact(run), RANDOM_PARTICIPATION.epsilon(run)
    assert truth * (1 - 1e-9) <= stated <= truth * 1.01, stated / truth


@pytest.mark.parametrize("noise", [0.0999, 0.06])
def test_poisson_batches_against_an_explicit_pair(noise):
    """Between σ_g = 0.05 and 0.1: by characteristic functions."""
    run = run_of(SMALL, noise=noise, sampling="poisson", cohort_size=10, delta=1e-3)
    losses, probs = step_pair(0.2, 2 * noise, "aligned")
    truth = composed_epsilon(1e-3, losses, probs, 3, 1.0, 20, points=1 << 13)
    assert truth * (1 - 1e-6) <= RANDOM_PARTICIPATION.epsilon(run) <= truth * 1.01


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
@pytest.mark.parametrize("unit", ["record", "user"])
def test_nothing_jumps_as_the_noise_falls(sampling, unit):
    """Every bound, the ledger included, rises steadily as the noise falls past 0.1."""
    run = run_of(SMALL, local_steps=1, memory=False, sampling=sampling, unit=unit, hidden_draw=True)
    bounds = [
        b for b in (RANDOM_PARTICIPATION, CAP, AGGREGATE, USER_SAMPLING) if not b.applies(run)
    ]

    def spent(noise: float) -> list[float]:
        changed = replace(run, noise=noise)
        ledger = Ledger(changed)
        ledger.record(1, [0])
        return [ledger.largest(), *(bound.epsilon(changed) for bound in bounds)]

    values = np.array([spent(noise) for noise in np.geomspace(0.25, 0.04, 40)])
    assert (np.diff(values, axis=0) > 0).all()
    above, below = np.array(spent(0.1)), np.array(spent(0.1 * (1 - 1e-6)))
    assert (abs(below / above - 1) < 0.01).all()


def test_other_mechanisms_and_human_terms_beside_very_little_noise():
    run = run_of(SMALL, noise=0.05)
    plain = RANDOM_PARTICIPATION.epsilon(run)
    with_mean = RANDOM_PARTICIPATION.epsilon(run, costs=[Cost("mean", noise=3.0)])
    assert plain < with_mean < plain * 1.02
    terms = human_terms(RANDOM_PARTICIPATION, run)
    shown = 1 - shown_steps(run)[0]  # whether any batch with the record was used
    assert shown * (1 - 1e-9) <= terms.advantage <= shown * 1.001


@pytest.mark.parametrize("noise", [LEAST_NOISE / 2, MOST_NOISE * 2, 1e-300, 1e300])
def test_one_range_of_noise_for_all(noise):
    for refused in (lambda: Gaussian(noise=noise), lambda: run_of(SMALL, noise=noise)):
        with refuses("noise-out-of-range: from 1e-09"):
            refused()
