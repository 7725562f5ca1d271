"""A run whose rounds were planned in parts: what each of them has spent."""

from __future__ import annotations

from dpscaffold.privacy import Ledger, describe
from dpscaffold.runs.parts import Parts, spent_in_parts

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


def test_parts_that_have_not_begun_have_spent_nothing():
    asked = []

    def price(part, rounds, extra):
        asked.append((part, rounds, extra))
        return 1.0

    ledger = Ledger(RUN)
    for number in (1, 2, 3):
        ledger.record(number, [0, 1, 2, number])
    assert spent_in_parts(Parts((2, 3, 9)), ledger, price, 3) == 2.0
    assert asked == [(0, 2, 0), (1, 1, 0)]
