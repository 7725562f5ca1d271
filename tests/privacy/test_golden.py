"""The numbers that the paper prints, and ours for the same algorithm, noise and neighbours."""

from __future__ import annotations

import pytest
from privacy.explicit_pairs import composed_epsilon, step_pair
from privacy.published import ALL, FEMNIST, MNIST, SYNTHETIC, TABLE_1
from world import (
    epsilon,
    epsilon_given,
    published_epsilon,
    published_rounds,
    renyi_epsilon,
)


@pytest.mark.parametrize(
    ("base", "changes", "printed"),
    [
        (SYNTHETIC, {}, 12.906),
        (SYNTHETIC, {"local_steps": 100}, 12.913),
        (SYNTHETIC, {"cohort": 5}, 4.155),
        (FEMNIST, {}, 11.361),
        (FEMNIST, {"local_steps": 100}, 11.432),
        (MNIST, {}, 7.149),
    ],
)
def test_published_epsilon(base, changes, printed):
    assert published_epsilon(**{**base, **changes}) == pytest.approx(printed, rel=0.001)


@pytest.mark.parametrize(
    ("noise", "printed"),
    [
        (10, (542, 488, 428, 324, 72)),
        (20, (545, 502, 451, 352, 83)),
        (40, (546, 505, 457, 360, 86)),
        (80, (546, 506, 458, 362, 87)),
    ],
)
def test_published_rounds_at_epsilon_3(noise, printed):
    found = [
        published_rounds(3.0, **{**TABLE_1, "noise": noise, "local_steps": steps})
        for steps in (1, 5, 10, 20, 40)
    ]
    assert tuple(found) == printed


@pytest.mark.parametrize(
    ("name", "sampling", "value"),
    [
        ("synthetic", "fixed", 0.860),
        ("femnist", "fixed", 1.676),
        ("mnist", "fixed", 0.777),
        ("table 1", "fixed", 0.978),
        ("synthetic", "poisson", 0.404),
        ("femnist", "poisson", 0.769),
        ("mnist", "poisson", 0.356),
        ("table 1", "poisson", 0.446),
    ],
)
def test_random_participation_by_loss_distribution(name, sampling, value):
    found = epsilon("server", **ALL[name], sampling=sampling)
    assert found == pytest.approx(value, rel=0.005)


@pytest.mark.parametrize(
    ("name", "value"),
    [("synthetic", 1.999), ("femnist", 4.002), ("mnist", 1.889), ("table 1", 2.300)],
)
def test_random_participation_by_renyi(name, value):
    assert renyi_epsilon(**ALL[name]) == pytest.approx(value, rel=0.001)


@pytest.mark.parametrize(
    ("name", "value"), [("synthetic", 4.726), ("femnist", 10.046), ("mnist", 4.317)]
)
def test_every_round_by_renyi(name, value):
    run = {**ALL[name], "cohort": ALL[name]["users"]}
    assert renyi_epsilon(**run) == pytest.approx(value, rel=0.001)


@pytest.mark.parametrize(
    ("name", "value"), [("synthetic", 0.397), ("femnist", 0.757), ("mnist", 0.341)]
)
def test_ledger_at_the_expected_number_of_participations(name, value):
    run = {**ALL[name], "sampling": "poisson"}
    expected = run["rounds"] * run["cohort"] // run["users"]
    found = epsilon_given([[0]] * expected, **run)
    assert found == {0: pytest.approx(value, rel=0.005)}
    assert found[0] == pytest.approx(epsilon("server", **run), rel=0.05)


def shown_by(pair, run) -> float:
    """ε of one pair of datasets of which a step shows this."""
    chance = run["cohort"] / run["users"]
    return composed_epsilon(run["delta"], *pair, run["local_steps"], chance, run["rounds"])


@pytest.mark.parametrize(
    ("name", "least"),
    [("synthetic", 0.855), ("femnist", 1.657), ("mnist", 0.769), ("table 1", 0.956)],
)
def test_never_below_explicit_datasets_and_tight(name, least):
    """Two concrete datasets, by characteristic functions: the bound is above them, and by
    little."""
    run = ALL[name]
    claimed = epsilon("server", **run)
    shown = [
        shown_by(step_pair(0.2, run["noise"], kind), run)
        for kind in ("opposite", "aligned", "absent")
    ]
    assert max(shown) == pytest.approx(least, abs=0.001)
    assert max(shown) <= claimed <= 1.03 * max(shown)


@pytest.mark.parametrize("name", ["synthetic", "table 1"])
def test_poisson_is_exact_both_ways(name):
    """For add/remove the aligned datasets are the worst pair, so claimed and shown agree, claimed
    above."""
    run = ALL[name]
    claimed = epsilon("server", **run, sampling="poisson")
    shown = max(
        shown_by(step_pair(0.2, 2 * run["noise"], kind), run) for kind in ("aligned", "absent")
    )
    assert shown <= claimed <= 1.002 * shown
