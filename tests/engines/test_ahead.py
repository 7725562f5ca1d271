"""Drawing the next round's batches in the background changes nothing but the time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small import Driven, Trial, simulator

from dpscaffold import Gaussian, Logistic, Plan, scaffold, synthetic
from dpscaffold.engines import Draw


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_draws_made_ahead_are_the_same_even_where_users_decline(draws_of_the_cpu, sampling):
    """Bit for bit the run without it; a user who declines only makes the draw be made again."""
    federation = synthetic(alpha=1, beta=1, users=12, records=60, size_spread=0.4)
    plan = Plan(rounds=6, local_steps=4, user_ratio=0.5)
    setting = Trial.of(
        federation,
        Logistic(40, 10),
        scaffold(),
        plan,
        Gaussian(clip=1.0, noise=2.0, sampling=sampling),
    )
    runs = [Driven(simulator(setting, ahead=ahead)) for ahead in (False, True)]
    for round in range(1, 7):
        drawn = setting.randomness().cohort(round, 12, 6)
        active = drawn[1:] if round == 3 else drawn
        for engine in runs:
            engine.round(Draw(drawn, np.asarray(active)))
    assert runs[1].engine.ahead._held is None  # nothing is drawn beyond the last round
    assert torch.equal(runs[0].reached.params, runs[1].reached.params)
