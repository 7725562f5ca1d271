"""The ε of an experiment is that of what runs, whatever the sizes of its users."""

from __future__ import annotations

import pytest
from stated import over_draw

from dpscaffold.config import parse
from dpscaffold.data.loading import load_federation
from dpscaffold.paper.cases import Case
from dpscaffold.paper.epsilons import epsilons
from dpscaffold.paper.solving import run_of, sizes_of, solved_noise

TABLES = {
    "data": {"source": "synthetic", "users": 10, "records": 200, "size_spread": 0.5},
    "plan": {"rounds": 20, "local_steps": 5, "user_ratio": 0.5},
    "privacy": {"epsilon": 1.0},
}


def test_unequal_users_pay_for_the_smallest():
    """ε = 1 asked, with sizes that spread: the run costs at most 1, and the table says so."""
    solved = solved_noise(Case({}, TABLES)).settings
    federation = load_federation(solved.data)
    costs = over_draw(solved.setting(federation).describe())
    assert 0.98 < costs <= 1.0
    assert epsilons(solved)["server, random participation (PLD)"] == pytest.approx(costs)


@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_the_sizes_are_those_of_the_data(spread):
    """From the configuration where they follow from it, else from the data."""
    data = parse({"data": TABLES["data"] | {"size_spread": spread}}).data
    assert sizes_of(data) == load_federation(data).roster.sizes
    assert (len(set(sizes_of(data))) > 1) == bool(spread)


def test_what_is_described_is_what_runs():
    """The description of a configuration is that of its setting."""
    settings = parse(TABLES | {"privacy": {"noise": 5.0, "user_epsilon": 4.0}})
    assert run_of(settings) == settings.setting(load_federation(settings.data)).describe()
