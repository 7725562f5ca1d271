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
from dpscaffold.algorithms import Algorithm, fednova
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


@pytest.mark.parametrize("schedule", ["linear", "cosine", "inverse-sqrt"])
@pytest.mark.parametrize("name", sorted(set(EVERY) - {"fedsgd"}))
def test_the_simulator_takes_the_steps_of_the_loop(name: str, schedule: str) -> None:
    run = setting(name, privacy="poisson", schedule=schedule, steps_by_user=STEPS)
    assert_agree(final("simulator", run), final("loop", run))


@pytest.mark.parametrize("privacy", sorted(PRIVACIES))
@pytest.mark.parametrize("task", ["mlp", "module"])
def test_so_for_every_task_and_privacy(task: str, privacy: str) -> None:
    run = setting("fednova", task, privacy, schedule="linear", steps_by_user=STEPS)
    assert_agree(final("simulator", run), final("loop", run))


def least_squares() -> tuple[Federation, list[tuple[np.ndarray, np.ndarray]]]:
    """Three users with their own linear laws."""
    stream = np.random.default_rng(5)
    tables = []
    for k in range(3):
        x = stream.standard_normal((12, 2)).astype(np.float32)
        tables.append((x, (x @ [k - 1.0, 2.0 * k] + k).astype(np.float32)))
    return Federation.from_arrays(tables, tables, target="number"), tables


def optimum(tables: list[tuple[np.ndarray, np.ndarray]], weights: tuple[float, ...]) -> np.ndarray:
    """argmin Σ w_i·mean((a·x − b)²/2) over slopes and intercept."""
    total, right = np.zeros((3, 3)), np.zeros(3)
    for weight, (x, y) in zip(weights, tables, strict=True):
        a = np.column_stack([x, np.ones(len(x))])
        total += weight * a.T @ a / len(x)
        right += weight * a.T @ y / len(x)
    return np.linalg.solve(total, right)


@pytest.mark.parametrize(
    ("algorithm", "weights"), [(fednova(), (1, 1, 1)), (fedavg(), (6, 1, 2))], ids=["nova", "avg"]
)
def test_fednova_reaches_the_optimum_that_fedavg_misses(
    algorithm: Algorithm, weights: tuple[float, ...]
) -> None:
    """FedAvg with K_i minimises the losses weighted by K_i; FedNova the losses as they are."""
    data, tables = least_squares()
    result = train(data, Linear(2, 1, LOSSES["squared"]), algorithm, UNEVEN)
    exact, other = optimum(tables, weights), optimum(tables, (6, 1, 2))
    found = result.params.double().numpy()
    assert np.abs(found - exact).max() < 0.06
    if algorithm.name == "fednova":
        assert np.abs(found - other).max() > 0.3


def test_scaffold_keeps_the_mean_of_its_own_steps() -> None:
    """Full batches, no noise: SCAFFOLD with unequal K_i still ends at the common optimum."""
    data, tables = least_squares()
    plan = UNEVEN.changed(learning_rate=0.3)
    found = train(data, Linear(2, 1, LOSSES["squared"]), scaffold(), plan).params.double().numpy()
    assert np.abs(found - optimum(tables, (1, 1, 1))).max() < 0.03


def test_the_schedules_are_what_they_say() -> None:
    plan = Plan(rounds=10, local_steps=2, data_ratio=0.5, learning_rate=1.0)

    def sizes(schedule: str) -> list[float]:
        changed = plan.changed(schedule=schedule)
        return [changed.step_size_in(t) for t in range(1, 11)]

    assert sizes("constant") == [1.0] * 10
    assert sizes("linear") == pytest.approx([1 - k / 10 for k in range(10)])
    assert sizes("cosine") == pytest.approx(
        [(1 + math.cos(math.pi * k / 10)) / 2 for k in range(10)]
    )
    assert sizes("inverse-sqrt") == pytest.approx([1 / math.sqrt(t) for t in range(1, 11)])


def test_epsilon_is_that_of_the_largest_number_of_steps() -> None:
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
        ({"schedule": "step"}, "unknown-choice: plan.schedule is 'step'"),
    ],
)
def test_bad_ones_are_one_sentence(given: dict[str, object], said: str) -> None:
    with refuses(said):
        Plan(local_steps=5, **given)  # type: ignore[arg-type]


def test_every_user_needs_a_number() -> None:
    with refuses("count-differs: has 2 … for 6"):
        setting("fedavg", steps_by_user=(3, 1))
