"""The distinguishing game, played against the real engine: what an attacker can prove stays below
the claim.

In each game a user holds one of two neighbouring datasets, which differ in one record at the clip
bound, and takes part in one round; the attacker sees everything that user and another one produced.
Two thousand games per dataset run as the users of one simulated round. Half of the games choose the
attacker's threshold, the other half give error rates with exact (Clopper–Pearson) confidence
limits, and

    ε ≥ log((true positives − δ) / false positives)

holds for any (ε, δ)-DP mechanism, so the right-hand side at the limits is a lower bound on ε that
is wrong with probability at most 5 %. The seeds are fixed: these tests pass or fail for good.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import beta
from small import Driven, Trial, simulator
from stated import at_most

from dpscaffold.algorithms import Upload, scaffold
from dpscaffold.config.gaussian import Gaussian
from dpscaffold.config.plan import Plan
from dpscaffold.engine import Engine
from dpscaffold.engine.aggregate import Averaged
from dpscaffold.federation import Federation
from dpscaffold.randomness.streams import Randomness
from dpscaffold.tasks import Logistic

GAMES, RECORDS, CLIP, DELTA = 2000, 8, 0.1, 0.01


def lower_epsilon(
    inside: np.ndarray, outside: np.ndarray, delta: float, confidence: float = 0.95
) -> float:
    """The ε that the games prove, over several statistics (rows), which share the chance of
    error."""
    tail = (1 - confidence) / (2 * len(inside))
    best = 0.0
    for a, b in zip(inside, outside, strict=True):
        half = len(a) // 2
        candidates = np.quantile(
            np.concatenate([a[:half], b[:half]]), np.linspace(0.02, 0.998, 300)
        )
        chosen = candidates[np.argmax(_bounds(a[:half], b[:half], candidates, delta, 0.05))]
        best = max(best, float(_bounds(a[half:], b[half:], np.array([chosen]), delta, tail)[0]))
    return best


def _bounds(
    a: np.ndarray, b: np.ndarray, thresholds: np.ndarray, delta: float, tail: float
) -> np.ndarray:
    """The lower bound for each threshold, each error rate at its one-sided limit."""
    hits = len(a) - np.searchsorted(np.sort(a), thresholds, side="right")
    false = len(b) - np.searchsorted(np.sort(b), thresholds, side="right")
    low = np.where(hits > 0, beta.ppf(tail, np.maximum(hits, 1), len(a) - hits + 1), 0.0)
    high = np.where(
        false < len(b), beta.ppf(1 - tail, false + 1, np.maximum(len(b) - false, 1)), 1.0
    )
    return np.log(np.maximum(low - delta, high * 1e-9) / high).clip(min=0.0)


def the_setting(steps: int, data_ratio: float = 1.0) -> Trial:
    """Pairs of users: a victim, whose first record has label 0 in even and 1 in odd games, and a
    bystander.

    The noise √K keeps the claim within reach of this many games: a participation has multiplier 1
    in all.
    """
    features = torch.ones(RECORDS, 1)
    balanced = torch.tensor([1, 0] * (RECORDS // 2))
    present = balanced.clone()
    present[0] = 0
    users = []
    for game in range(2 * GAMES):
        users += [(features, present if game % 2 == 0 else balanced), (features, balanced)]
    federation = Federation.from_arrays(
        users, [(features[:1], balanced[:1])] * len(users), classes=2
    )
    plan = Plan(
        rounds=1,
        local_steps=steps,
        user_ratio=1.0,
        data_ratio=data_ratio,
        learning_rate=1e-6,
        regularisation=0.0,
    )
    privacy = Gaussian(CLIP, math.sqrt(steps))
    return Trial.of(federation, Logistic(1, 2), scaffold(), plan, privacy)


def play(setting: Trial, randomness: Randomness | None = None) -> tuple[np.ndarray, np.ndarray]:
    """One round of the real engine; the attacker projects control variates on the record's
    gradient.

    A control variate is the mean of the round's noised gradients, all that a participation reveals
    here. The statistics are the victim's own and its difference from the bystander's.
    """
    driven = Driven(simulator(setting, randomness or Randomness(11)))
    driven.round_of(range(setting.users))
    direction = torch.tensor([-1.0, -1.0, 1.0, 1.0]) / 2
    scores = (driven.reached.memory @ direction).numpy() * int(setting.batch_sizes[0]) / (2 * CLIP)
    victim, bystander = scores[::2], scores[1::2]
    statistics = np.stack([victim, victim - bystander])
    return statistics[:, ::2], statistics[:, 1::2]


def claimed(setting: Trial) -> float:
    """ε of one participation, as the ledger would have it."""
    run = setting.describe(delta=DELTA)
    assert run is not None
    return at_most(run, 1)


@pytest.mark.parametrize(("steps", "data_ratio"), [(1, 1.0), (4, 1.0), (4, 0.5)])
def test_what_can_be_proved_is_below_the_claim(steps, data_ratio):
    """One step and one participation. With full batches the games also prove a good part of the
    claim."""
    setting = the_setting(steps, data_ratio)
    proved = lower_epsilon(*play(setting), DELTA)
    assert proved <= claimed(setting)
    if data_ratio == 1.0:
        assert proved > 0.4 * claimed(setting)


@pytest.mark.parametrize("steps", [1, 4])
def test_halved_noise_is_caught(steps):
    setting = the_setting(steps)
    assert setting.privacy is not None
    weaker = replace(setting, privacy=setting.privacy.changed(noise=setting.privacy.noise / 2))
    assert lower_epsilon(*play(weaker), DELTA) > claimed(setting)


def test_noise_shared_between_users_is_caught():
    class SameForAll(Randomness):
        def normals(self, round: int, user: int) -> np.random.Generator:
            return super().normals(round, user // 2)

    setting = the_setting(1)
    assert lower_epsilon(*play(setting, SameForAll(11)), DELTA) > claimed(setting)


def test_a_correction_computed_before_the_noise_is_caught(monkeypatch):
    """Uploads carry noise, but the control variate is built from the gradients as they were before
    it."""
    proper = Averaged.participate

    def leaky(self, *given):
        *others, drawn, users = given
        drawn = list(drawn)
        noised, _ = proper(self, *others, drawn, users)
        bare, kept = proper(self, *others, [(batch, None) for batch, _ in drawn], users)
        return Upload(noised.params, bare.totals), kept

    monkeypatch.setattr(Averaged, "participate", leaky)
    monkeypatch.setattr(Engine, "draws_on_device", False)  # a GPU's own steps come another way
    setting = the_setting(1)
    assert lower_epsilon(*play(setting), DELTA) > claimed(setting)


def test_the_lower_bound_keeps_its_confidence():
    """On Gaussian scores of known ε, 400 audits exceed it in at most 5 % of cases (and are not
    idle)."""
    rng = np.random.default_rng(3)
    # One Gaussian of multiplier 1: the threshold test alone can prove at most its ε at this δ.
    from privacy.explicit_pairs import gaussian_epsilon

    true = gaussian_epsilon(DELTA, 1.0)
    found = [
        lower_epsilon(rng.normal(1, 1, (1, 400)), rng.normal(0, 1, (1, 400)), DELTA)
        for _ in range(400)
    ]
    assert np.mean(np.array(found) > true) <= 0.05
    assert np.median(found) > 0.25 * true
