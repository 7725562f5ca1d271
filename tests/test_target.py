"""The ε that a run keeps within: what the next round would spend, counted by hand."""

from __future__ import annotations

import pytest
from stated import over_draw

from dpscaffold.config.budget import Budget
from dpscaffold.privacy import Cost, Ledger, describe
from dpscaffold.runs.parts import Parts, spent_in_parts
from dpscaffold.runs.target import EpsilonTarget

RUN = describe(
    rounds=2,
    local_steps=3,
    users=10,
    cohort_size=4,
    records=100,
    batch_sizes=20,
    noise=4.0,
    delta=1e-5,
)
COSTS = (Cost("a private mean", noise=6.0),)
ONE, TWO = Parts((4,)), Parts((2, 4))


def spent(rounds, again=0, costs=()):
    return over_draw(RUN, rounds, costs, again)


def after_three_rounds():
    ledger = Ledger(RUN)
    for number in (1, 2, 3):
        ledger.record(number, [0, 1, 2, number])
    return ledger


@pytest.mark.parametrize(
    ("parts", "round", "again", "meant"),
    [
        (ONE, 4, False, spent(4, costs=COSTS)),
        (ONE, 3, True, spent(3, 1, COSTS)),
        (TWO, 4, False, spent(2, costs=COSTS) + spent(2)),
        (TWO, 3, True, spent(2, costs=COSTS) + spent(1, 1)),
        (TWO, 2, True, spent(2, 1, COSTS) + spent(1)),
    ],
)
def test_a_round_runs_only_where_all_that_is_spent_by_then_fits(parts, round, again, meant):
    """Of a run in one part and in two, whose ε add; a round that is run again counts twice."""
    for epsilon, fits in ((meant * 1.0001, True), (meant * 0.9999, False)):
        target = EpsilonTarget.of(RUN, COSTS, Budget(target_epsilon=epsilon), planned=4)
        said = target.refuses(round, again, after_three_rounds(), parts)
        assert (said == "") == fits
        assert fits or said == f"one more would exceed epsilon = {epsilon:g} towards the server"


def test_parts_that_have_not_begun_have_spent_nothing():
    asked = []

    def price(part, rounds, extra):
        asked.append((part, rounds, extra))
        return 1.0

    ledger = after_three_rounds()
    assert spent_in_parts(Parts((2, 3, 9)), ledger, price, 3) == 2.0
    assert asked == [(0, 2, 0), (1, 1, 0)]
