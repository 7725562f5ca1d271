"""Step sizes that change over rounds, and users with their own number of local steps (FedNova).

Oracles: the loop engine, and gradient descent written with NumPy for least squares, whose optimum
has a closed form.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from refusals import refuses
from small import EVERY, PRIVACIES, assert_agree, final, setting

from dpscaffold import Federation, Linear, Plan, fedavg, scaffold, train
from dpscaffold.algorithms import fednova
from dpscaffold.tasks import LOSSES

STEPS = (3, 1, 2, 3, 1, 2)
UNEVEN = Plan(
    rounds=300,
    local_steps=6,
    steps_by_user=(6, 1, 2),
    user_ratio=1.0,
    data_ratio=1.0,
    learning_rate=0.12,
    regularisation=0.0,
    evaluate_every=2000,
)

CASES = [
    *((name, "logistic", "poisson") for name in EVERY if name != "fedsgd"),
    *(("fednova", task, privacy) for task in ("mlp", "module") for privacy in PRIVACIES),
]


@pytest.mark.parametrize("schedule", ["linear", "cosine", "inverse-sqrt"])
@pytest.mark.parametrize(("name", "task", "privacy"), CASES)
def test_the_simulator_takes_the_steps_of_the_loop(name, task, privacy, schedule):
    run = setting(name, task, privacy, schedule=schedule, steps_by_user=STEPS)
    assert_agree(final("simulator", run), final("loop", run))


def least_squares() -> list[tuple[np.ndarray, np.ndarray]]:
    """Three users with their own linear laws."""
    stream = np.random.default_rng(5)
    tables = []
    for k in range(3):
        x = stream.standard_normal((12, 2)).astype(np.float32)
        tables.append((x, (x @ [k - 1.0, 2.0 * k] + k).astype(np.float32)))
    return tables


def optimum(weights: tuple[float, ...]) -> np.ndarray:
    """argmin Σ w_i·mean((a·x − b)²/2) over slopes and intercept."""
    total, right = np.zeros((3, 3)), np.zeros(3)
    for weight, (x, y) in zip(weights, least_squares(), strict=True):
        a = np.column_stack([x, np.ones(len(x))])
        total += weight * a.T @ a / len(x)
        right += weight * a.T @ y / len(x)
    return np.linalg.solve(total, right)


@pytest.mark.parametrize(
    ("algorithm", "rate", "weights"),
    [(fednova(), 0.12, (1, 1, 1)), (fedavg(), 0.12, (6, 1, 2)), (scaffold(), 0.3, (1, 1, 1))],
    ids=["nova", "avg", "scaffold"],
)
def test_unequal_steps_do_not_move_the_optimum_but_of_fedavg(algorithm, rate, weights):
    """FedAvg with K_i minimises the losses weighted by K_i; FedNova, and SCAFFOLD with full batches
    and no noise, the losses as they are."""
    tables = least_squares()
    data = Federation.from_arrays(tables, tables, target="number")
    plan = UNEVEN.changed(learning_rate=rate)
    result = train(data, Linear(2, 1, LOSSES["squared"]), algorithm, plan)
    found = result.params.double().numpy()
    assert np.abs(found - optimum(weights)).max() < 0.06
    other = optimum((1, 1, 1) if weights == (6, 1, 2) else (6, 1, 2))
    assert np.abs(found - other).max() > 0.3


def test_the_schedules_are_what_they_say():
    plan = Plan(rounds=10, local_steps=2, data_ratio=0.5, learning_rate=1.0)
    meant = {
        "constant": [1.0] * 10,
        "linear": [1 - k / 10 for k in range(10)],
        "cosine": [(1 + math.cos(math.pi * k / 10)) / 2 for k in range(10)],
        "inverse-sqrt": [1 / math.sqrt(t) for t in range(1, 11)],
    }
    for schedule, sizes in meant.items():
        changed = plan.changed(schedule=schedule)
        assert [changed.step_size_in(t) for t in range(1, 11)] == pytest.approx(sizes)


def test_epsilon_is_that_of_the_largest_number_of_steps():
    uneven, even = (
        setting("fednova", privacy="fixed", steps_by_user=steps).describe()
        for steps in (STEPS, None)
    )
    assert uneven is not None and uneven == even


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"steps_by_user": (1, 0)}, "out-of-range: plan.steps_by_user"),
        ({"steps_by_user": ()}, "wrong-length"),
        ({"steps_by_user": (5, 9)}, "steps-disagree: plan.local_steps = 9"),
        ({"steps_by_user": (3, 1)}, "count-differs: has 2 … for 6"),
        ({"schedule": "step"}, "unknown-choice: plan.schedule is 'step'"),
    ],
)
def test_bad_ones_are_one_sentence(given, said):
    with refuses(said):
        setting("fedavg", local_steps=3 if "count" in said else 5, **given)
