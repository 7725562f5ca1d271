"""Every ε of what was released: by each bound, towards each view, given who took part and at
several δ; and what it means for one person."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dpscaffold.privacy.bound import (
    ALONE,
    PARTICIPANT,
    REPEATED,
    SERVER,
    THIRD_PARTY,
    Bound,
    Laws,
    views_of,
)
from dpscaffold.privacy.bounds import (
    AGGREGATE_PARTICIPANT,
    BOUNDS,
    CAP,
    LEDGER,
    PAPER_THIRD_PARTY,
    RANDOM_PARTICIPATION,
    RANDOM_PARTICIPATION_RDP,
    SECURE_CAP,
    SECURE_SUMS,
    aggregate_among,
    among,
    bound_for,
)
from dpscaffold.privacy.by_user import epsilon_by_user, epsilons_by_user
from dpscaffold.privacy.costs import Cost
from dpscaffold.privacy.human import human_terms, ledger_terms, losses, spent_laws
from dpscaffold.privacy.ledger import Ledger
from dpscaffold.privacy.mechanism import Mechanism
from dpscaffold.privacy.statement_types import (
    BoundRow,
    EpsilonAtDelta,
    EpsilonByUser,
    HumanTerms,
    PlannedEpsilon,
    SpentByUsers,
    Statement,
    ViewGuarantee,
)
from dpscaffold.privacy.tradeoff import TradeOff

#: At which fractions of its own δ a statement gives ε too.
DELTAS = (1.0, 0.1, 0.01, 0.001)


@dataclass(frozen=True)
class Released:
    """This many rounds of a mechanism; ``ledger`` says who took part in them, None in a plan.

    ``costs`` are private mechanisms on the same records, part of every ε; ``colluders`` is how many
    participants pool what they know.

    >>> from dpscaffold.privacy import describe
    >>> run = describe(rounds=400, local_steps=50, users=100, cohort_size=20,
    ...                records=4000, batch_sizes=800, noise=60, delta=2.5e-6)
    >>> round(Released(run, rounds=400).towards("server").epsilon, 2)
    0.86
    """

    run: Mechanism
    rounds: int
    ledger: Ledger | None = None
    costs: tuple[Cost, ...] = ()
    colluders: int = 1

    @property
    def repeats(self) -> tuple[int, ...]:
        """Those of the rounds that were run again with fresh noise: how often each."""
        return self.ledger.repeats if self.ledger else ()

    def bound(self, view: str) -> Bound:
        """The bound that is quoted towards a view."""
        if view == ALONE:
            return RANDOM_PARTICIPATION
        return bound_for(self.run, view, self.repeats, self.colluders)

    def guaranteed(self, groups: tuple[int, ...], simulated: bool) -> Statement:
        """The part of a statement that has numbers, where there is a guarantee."""
        return Statement(
            simulated=simulated,
            guarantee=True,
            server=self.towards(SERVER),
            third_party=self.towards(THIRD_PARTY),
            participant=replace(self.towards(PARTICIPANT), colluders=self.colluders),
            paper_third_party=self._published(),
            alone=self._alone() if self.run.secure is not None else None,
            by_user=self._by_user() if self.run.unequal else None,
            ledger=self._spent(self.ledger) if self.ledger is not None else None,
            planned=self._planned() if self.ledger is not None else None,
            epsilon_by_delta=self._by_delta(),
            human=self.for_people(groups),
        )

    def _alone(self) -> ViewGuarantee:
        """What a site's own noise guarantees."""
        said, ledger = self.towards(ALONE), self.ledger
        spent = None if ledger is None else ledger.without_secure_sums().largest()
        return replace(said, ledger=spent, note="all other sites collude with the server")

    def _by_user(self) -> EpsilonByUser:
        """What is guaranteed to each user towards the server."""
        run, bound = self.run, self.bound(SERVER)
        each = epsilons_by_user(bound, run, self.rounds, self.costs, self.repeats)
        noises = [run.noise * run.group_of(user).louder for user in range(run.users)]
        return epsilon_by_user(bound.name, each, noises)

    def _spent(self, ledger: Ledger) -> SpentByUsers:
        """What users spent given who took part."""
        largest = ledger.largest()
        counts, spread = ledger.distribution()
        return SpentByUsers(
            epsilon=largest,
            bound=LEDGER.name,
            replace_one=self._replacing(largest, spent_laws(ledger, self.costs)),
            participations=counts,
            epsilon_over_users=spread,
        )

    def _planned(self) -> PlannedEpsilon:
        bound = bound_for(self.run, SERVER)
        whole = bound.epsilon(self.run, costs=self.costs)
        return PlannedEpsilon(self.run.rounds, whole)

    def for_people(self, groups: tuple[int, ...]) -> dict[str, HumanTerms]:
        """What the quoted bounds and the ledger mean for one person, by view."""
        terms = {
            view: human_terms(
                self.bound(view), self.run, self.rounds, self.costs, self.repeats, groups
            )
            for view in views_of(self.run)
        }
        given = ledger_terms(self.ledger, self.costs, groups) if self.ledger is not None else None
        return terms | ({"ledger": given} if given else {})

    def by_bound(self, reason: str | None = None) -> tuple[BoundRow, ...]:
        """The table of bounds; ``reason`` is why none of them holds."""
        # That against participants is for as many as are asked about.
        against = aggregate_among(among(self.run, self.colluders))
        bounds = [against if b is AGGREGATE_PARTICIPANT else b for b in BOUNDS.values()]
        if self.run.secure is None:
            bounds = [bound for bound in bounds if bound not in (SECURE_SUMS, SECURE_CAP)]
        return tuple(self._row(bound, reason or self._barred(bound)) for bound in bounds)

    def _barred(self, bound: Bound) -> str | None:
        """Why a bound that would hold for the plan does not hold for what was run, or None."""
        if self.repeats and bound.repeated is None and bound is not LEDGER:
            return bound.applies(self.run) or REPEATED
        return None

    def _row(self, bound: Bound, reason: str | None) -> BoundRow:
        """One line of the table of bounds, the cost of other mechanisms included."""
        run, ledger = self.run, self.ledger
        # Bounds that count nobody else's noise hold if all others collude.
        own = (RANDOM_PARTICIPATION, RANDOM_PARTICIPATION_RDP, CAP) if run.secure else ()
        epsilon: float | None = None
        if reason is None:
            if bound is LEDGER:
                reason = None if ledger is not None else bound.applies(run)
                epsilon = ledger.largest() if ledger is not None else None
            else:
                reason = bound.applies(run)
                # The cap holds whatever stopping looks at, so it counts every planned round.
                counted = run.rounds if bound in (CAP, SECURE_CAP) else self.rounds
                if not reason:
                    epsilon = bound.epsilon(run, counted, self.costs, self.repeats)
        return BoundRow(
            name=bound.name,
            title=bound.title,
            views=(*bound.views, *([ALONE] if bound in own else [])),
            epsilon=None if epsilon is None else _finite(epsilon),
            delta=run.delta,
            neighbours=run.neighbours,
            applies=reason is None,
            reason=reason,
            theorem=bound.theorem_for(run),
            assumptions=tuple(bound.assumptions),
            reference=bound.reference,
            explanation=bound.explain(),
        )

    def towards(self, view: str) -> ViewGuarantee:
        """What is quoted towards a view, and by which bound."""
        own = tuple(cost.if_others_collude for cost in self.costs)
        if view == ALONE and own != self.costs:
            return replace(self, costs=own).towards(ALONE)
        run, bound = self.run, self.bound(view)
        epsilon = _finite(bound.epsilon(run, self.rounds, self.costs, self.repeats))
        laws = losses(bound, run, self.rounds, self.costs, self.repeats)
        added = "loss distributions composed adaptively (Zhu, Dong, Wang 2022)"
        alone = bound.epsilon(run, self.rounds, repeats=self.repeats) if self.costs else None
        return replace(
            self._guarantee(bound, epsilon, laws),
            training_alone=alone,
            composition=added if self.costs else None,
            ledger=self.ledger.largest() if self.ledger is not None else None,
        )

    def capped(self) -> ViewGuarantee:
        """What the cap guarantees towards everybody: all rounds with everybody in them, whatever
        selection and stopping look at."""
        epsilon = _finite(CAP.epsilon(self.run, self.rounds))
        return self._guarantee(CAP, epsilon, losses(CAP, self.run, self.rounds))

    def _guarantee(self, bound: Bound, epsilon: float | None, laws: Laws) -> ViewGuarantee:
        """ε by a bound, with what it relies on."""
        return ViewGuarantee(
            epsilon,
            replace_one=self._replacing(epsilon, laws),
            delta=self.run.delta,
            bound=bound.name,
            neighbours=self.run.neighbours,
            theorem=bound.theorem_for(self.run),
            assumptions=tuple(bound.assumptions),
            reference=bound.reference,
        )

    def _replacing(self, epsilon: float | None, laws: Laws) -> float | None:
        """ε for replacing one record by another. Where ε itself is for removing a record's content,
        or for adding or removing it, two such changes lead from one dataset to the other, so it is
        that of a group of two; None where none is proved. For full batches this is exact: twice the
        shift of the same Gaussian."""
        if self.run.relation == "replace-one" or epsilon == 0:
            return epsilon
        if not laws:
            return None
        return _finite(TradeOff.of(laws).epsilon(self.run.delta, group=2))

    def _published(self) -> ViewGuarantee:
        """The paper's own number, which is no theorem for every loss."""
        bound = PAPER_THIRD_PARTY
        reason = bound.applies(self.run) or (REPEATED if self.repeats else None)
        epsilon = None if reason else _finite(bound.epsilon(self.run, self.rounds, self.costs))
        return ViewGuarantee(
            epsilon,
            bound=bound.name,
            reason=reason,
            note="for comparison only; not a theorem for every loss",
            reference=bound.reference,
        )

    def _by_delta(self) -> tuple[EpsilonAtDelta, ...]:
        """ε of every view, and given who took part, at several δ, from the run's own down; None
        where it cannot be resolved."""
        run, bounds = self.run, {view: self.bound(view) for view in views_of(self.run)}
        laws = {
            bound: losses(bound, run, self.rounds, self.costs, self.repeats)
            for bound in set(bounds.values())
        }
        columns = {view: laws[bound] for view, bound in bounds.items()}
        if self.ledger is not None and (spent := spent_laws(self.ledger, self.costs)):
            columns["ledger"] = spent
        return tuple(
            EpsilonAtDelta(
                run.delta * part,
                {
                    name: _finite(max(law.epsilon(run.delta * part) for law in of))
                    for name, of in columns.items()
                },
            )
            for part in DELTAS
        )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
