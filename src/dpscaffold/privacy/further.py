"""The statement of something that was made of a run's model and of the same records once more.

A mechanism that reads what a run released, and the records again, is composed with the run: ε and δ
add, whatever its parameters were chosen by, as long as they were fixed before it began (Rogers,
Roth, Ullman, Vadhan 2016).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dpscaffold.privacy.composition import ADDED, added
from dpscaffold.privacy.errors import PrivacyError
from dpscaffold.privacy.mechanism import Mechanism
from dpscaffold.privacy.quote import SIMULATION
from dpscaffold.privacy.showing import digits_up, round_up
from dpscaffold.privacy.statement_types import CostEntry, QuotedEpsilon, Statement, ViewGuarantee

#: The name of the bound in statements of composed mechanisms.
COMPOSED = "added"


@dataclass(frozen=True)
class FurtherRelease:
    """One more mechanism on the records: its name, and its (ε, δ) for the run's neighbours."""

    name: str
    epsilon: float
    delta: float


def with_further(said: Statement, releases: Sequence[FurtherRelease]) -> Statement:
    """A run's statement for whoever also sees what further mechanisms on its records released.

    Every ε and the δ are sums. The ε that counts of the run is the largest that it states towards
    an adversary: where the draw was known, what was spent given who took part.

    >>> from dpscaffold.privacy import describe, statement
    >>> run = describe(rounds=4, local_steps=2, users=4, cohort_size=2, records=50, batch_sizes=5,
    ...                noise=4.0, delta=1e-5)
    >>> said = statement(run)
    >>> both = with_further(said, [FurtherRelease("a count", 0.5, 1e-6)])
    >>> round(both.server.epsilon - said.server.epsilon, 9), round(both.delta * 1e6, 9)
    (0.5, 11.0)
    """
    run = said.run
    if not said.guarantee or run is None or said.delta is None:
        raise PrivacyError(
            "no-privacy",
            f"the run has no guarantee to compose with ({said.reason}); noise on top cannot give "
            f"it one",
        )
    delta = added([said.delta, *(one.delta for one in releases)])
    given = (said.quoted_epsilon or 0.0) if said.quotes_ledger else 0.0

    def with_all(view: ViewGuarantee) -> ViewGuarantee:
        return _view(view, given, releases, delta, run)

    server = with_all(said.server)
    costs = tuple(CostEntry(one.name, None, one.epsilon, one.delta) for one in releases)
    return Statement(
        simulated=said.simulated,
        guarantee=True,
        delta=delta,
        rounds=said.rounds,
        mechanism=said.mechanism,
        views=said.views,
        quoted=QuotedEpsilon(epsilon=server.epsilon, bound=COMPOSED, towards="server"),
        quote=_quote(said, run, server, delta, releases),
        extra_costs=(*(said.extra_costs or ()), *costs),
        preprocessing=said.preprocessing,
        preparation=said.preparation,
        tuning=said.tuning,
        outside=said.outside,
        run=run,
        server=server,
        third_party=with_all(said.third_party),
        participant=with_all(said.participant),
        alone=None if said.alone is None else with_all(said.alone),
    )


def _view(
    one: ViewGuarantee,
    given: float,
    releases: Sequence[FurtherRelease],
    delta: float,
    run: Mechanism,
) -> ViewGuarantee:
    if one.epsilon is None:
        return one
    alone = max(one.epsilon, one.ledger or 0.0, given)
    return ViewGuarantee(
        epsilon=added([alone, *(release.epsilon for release in releases)]),
        delta=delta,
        bound=COMPOSED,
        neighbours=run.neighbours,
        theorem=ADDED,
        assumptions=one.assumptions,
        reference=one.reference,
        training_alone=alone,
        composition=ADDED,
        colluders=one.colluders,
    )


def _quote(
    said: Statement,
    run: Mechanism,
    server: ViewGuarantee,
    delta: float,
    releases: Sequence[FurtherRelease],
) -> str:
    assert server.epsilon is not None and server.training_alone is not None
    names = ", ".join(dict.fromkeys(one.name for one in releases))
    spent = added(one.epsilon for one in releases)
    would = "would be" if said.simulated else "is"
    sentence = (
        f"Each record {would} protected with epsilon = {round_up(server.epsilon)} at delta = "
        f"{digits_up(delta)} towards a server that sees the run's uploads and all that was "
        f"released since ({run.neighbours}): {round_up(server.training_alone)} for the run and "
        f"{round_up(spent)} for {names}; epsilon and delta are added."
    )
    return f"{SIMULATION} {sentence}" if said.simulated else sentence
