"""The statement of a run whose rounds were planned in parts: every ε and the δ are sums.

Part k is a mechanism of its own, chosen after seeing what the earlier parts showed, with
parameters fixed before it runs: (Σ ε_k, Σ δ_k) holds (Rogers, Roth, Ullman, Vadhan 2016), for every
bound that holds of each part. Given who took part, ε_k adds user by user. What a sum of (ε, δ)
means in human terms is less than a loss distribution would tell, and is stated as such.

A run that continues another one with other users adds to it in the same way. Its users take part
at most n times in both together, by a rule of their own, so the cap n holds too, and is stated
where it is smaller (docs/privacy-proofs.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dpscaffold.privacy.bound import ALONE, views_of
from dpscaffold.privacy.bounds import CAP, LEDGER
from dpscaffold.privacy.by_user import epsilon_by_user
from dpscaffold.privacy.composition import (
    ADDED,
    added,
    by_person,
    charged_parts,
    costs_of_part,
    law_of_sum,
    spent_by_users,
    total,
)
from dpscaffold.privacy.costs import Cost
from dpscaffold.privacy.errors import PrivacyError
from dpscaffold.privacy.human import GROUPS, terms_of
from dpscaffold.privacy.ledger import Ledger, distribution_of
from dpscaffold.privacy.mechanism import Mechanism
from dpscaffold.privacy.preparation import Preparation
from dpscaffold.privacy.quote import with_quote
from dpscaffold.privacy.released import Released
from dpscaffold.privacy.statement import large_delta, statement
from dpscaffold.privacy.statement_types import (
    BoundRow,
    EpsilonAtDelta,
    EpsilonByUser,
    HumanTerms,
    PartSummary,
    PlannedEpsilon,
    SpentByUsers,
    Statement,
    ViewGuarantee,
)


@dataclass(frozen=True)
class ContinuedParts:
    """How the parts of a run that continues another one belong together: who the users of each
    part are, and the most often that a user takes part in all (0: as often as it is drawn)."""

    people: tuple[tuple[str, ...], ...]
    cap: int


def statement_of_parts(
    parts: Sequence[Ledger],
    preparation: Sequence[Preparation] = (),
    seed_public: bool = False,
    draw_given: bool = False,
    allowed: Sequence[str] | None = None,
    extra_costs: Sequence[Cost] = (),
    groups: Sequence[int] = GROUPS,
    colluders: int = 1,
    planned: Sequence[str] = (),
    continued: ContinuedParts | None = None,
) -> Statement:
    """As :func:`statement`, of a run that was planned in these parts; one part is stated as it is.

    A part of which no round was run has released nothing. ``extra_costs`` were spent once, next to
    the first part. ``continued`` says that the run continues another one, whose parts come first.

    >>> from dpscaffold.privacy import describe
    >>> run = describe(rounds=4, local_steps=2, users=4, cohort_size=2, records=50, batch_sizes=5,
    ...                noise=4.0)
    >>> first, second = Ledger(run), Ledger(run)
    >>> first.record(1, [0, 1]); second.record(1, [0, 2])
    >>> one, both = statement_of_parts([first]), statement_of_parts([first, second])
    >>> both.server.epsilon == 2 * one.server.epsilon, both.delta == 2 * one.delta
    (True, True)
    """
    kept = [k for k, part in enumerate(parts) if k == 0 or part.rounds]
    begun = [parts[k] for k in kept]
    each = [
        statement(
            part.run,
            ledger=part,
            preparation=preparation,
            seed_public=seed_public,
            draw_given=draw_given,
            allowed=allowed,
            extra_costs=costs_of_part(extra_costs, k),
            groups=groups,
            colluders=colluders,
            planned=planned,
        )
        for k, part in enumerate(begun)
    ]
    if len(each) == 1:
        return each[0]
    # Of a run that continues another one the users are those of today.
    shown = -1 if continued else 0
    run = replace(begun[shown].run, rounds=sum(part.run.rounds for part in begun))
    charged = charged_parts(begun, extra_costs)
    said = _added(each, run, each[shown])
    if not said.guarantee:
        return said
    stated = replace(run, delta=min(said.delta or 0.0, 1 - 1e-12))
    people = [continued.people[k] for k in kept] if continued else ()
    said = _with_spent(_restated(said, each, stated), each, charged, people)
    if continued and continued.cap:
        said = _within_cap(said, begun, continued.cap)
    said = replace(said, human=_human(said, stated, tuple(groups)))
    said = with_quote(said, stated, [c.name for c in extra_costs], draw_given)
    return replace(said, quote=f"{said.quote} {_history(said, len(each), continued)}")


def _history(said: Statement, parts: int, continued: ContinuedParts | None) -> str:
    """How the parts came about, and what that means for their ε."""
    times = "once" if parts == 2 else f"{parts - 1} times"
    added = f"epsilon and delta are the sums of its {parts} parts, as for runs one after another"
    if continued is None:
        return f"The run was given more rounds {times} after it was planned: {added}."
    quoted = said.ledger if said.quotes_ledger else said.server
    if quoted is not None and quoted.bound == CAP.name:
        added = f"no site takes part more than {continued.cap} times in all of it (bound 'cap')"
    return f"The run went on {times} with other sites after it had begun: {added}."


def epsilon_within_cap(parts: Sequence[Ledger], cap: int, delta: float) -> float:
    """ε of every user that takes part at most ``cap`` times in all parts, each with the mechanism
    of its own, whatever selection and stopping look at."""
    return max(CAP.epsilon(_capped(part.run, cap, delta)) for part in parts)


def _capped(run: Mechanism, cap: int, delta: float) -> Mechanism:
    """A run of ``cap`` rounds in which everybody takes part."""
    return replace(run, rounds=cap, max_participations=None, delta=delta)


def _within_cap(said: Statement, parts: Sequence[Ledger], cap: int) -> Statement:
    """The statement with the cap wherever that says less."""
    runs = [_capped(part.run, cap, said.delta or 0.0) for part in parts]
    views = [Released(run, cap).capped() for run in runs]
    worst = max(views, key=lambda view: view.epsilon or math.inf)
    replacing = [view.replace_one for view in views]
    known = [value for value in replacing if value is not None]
    worst = replace(worst, replace_one=max(known) if len(known) == len(replacing) else None)
    most = worst.epsilon
    if most is None or said.ledger is None:
        return said
    ledger = said.ledger
    if most < (math.inf if ledger.epsilon is None else ledger.epsilon):
        ledger = replace(ledger, epsilon=most, bound=CAP.name, replace_one=worst.replace_one)

    def smaller(view: ViewGuarantee) -> ViewGuarantee:
        if view.epsilon is None or most >= view.epsilon:
            return replace(view, ledger=ledger.epsilon)
        return replace(worst, ledger=ledger.epsilon, colluders=view.colluders)

    return replace(
        said,
        ledger=ledger,
        server=smaller(said.server),
        third_party=smaller(said.third_party),
        participant=smaller(said.participant),
        bounds=tuple(
            replace(row, epsilon=most) if row.name == CAP.name and row.applies else row
            for row in said.bounds
        ),
        epsilon_by_delta=tuple(_row_within(row, runs) for row in said.epsilon_by_delta or ()),
    )


def _row_within(row: EpsilonAtDelta, runs: Sequence[Mechanism]) -> EpsilonAtDelta:
    """ε by view at another δ, at most that of the cap."""
    try:
        most = max(CAP.epsilon(replace(run, delta=row.delta)) for run in runs)
    except PrivacyError:  # a δ that cannot be resolved
        return row
    by_view = {v: e if e is None else min(e, most) for v, e in row.by_view.items()}
    return replace(row, by_view=by_view)


def _added(each: Sequence[Statement], run: Mechanism, first: Statement) -> Statement:
    """One part's statement for all rounds, with the parts and the δ of all of them."""
    deltas = [one.delta or 0.0 for one in each]
    assert first.mechanism is not None  # parts are those of a private run
    return replace(
        first,
        rounds=sum(one.rounds or 0 for one in each),
        mechanism=replace(first.mechanism, rounds=run.rounds),
        delta=added(deltas) if first.guarantee else first.delta,
        run=run,
        parts=tuple(
            PartSummary(
                one.rounds or 0, one.delta, {v: one.towards(v).epsilon for v in views_of(run)}
            )
            for one in each
        ),
    )


def _restated(said: Statement, each: Sequence[Statement], stated: Mechanism) -> Statement:
    """Every ε over the draw as the sum over the parts, at the δ of all of them."""
    delta, note = said.delta or 0.0, large_delta(stated)
    rest = [sentence for sentence in said.outside if sentence != each[0].delta_note]
    by_delta = zip(*(one.epsilon_by_delta or () for one in each), strict=True)
    return replace(
        said,
        server=_view([one.server for one in each], delta),
        third_party=_view([one.third_party for one in each], delta),
        participant=_view([one.participant for one in each], delta),
        alone=None if said.alone is None else _view([one.towards(ALONE) for one in each], delta),
        by_user=_users(each),
        paper_third_party=_view([one.paper_third_party for one in each], delta),
        bounds=tuple(_row(same, delta) for same in zip(*(one.bounds for one in each), strict=True)),
        epsilon_by_delta=tuple(
            EpsilonAtDelta(
                added(row.delta for row in same),
                {v: total([row.by_view[v] for row in same]) for v in views_of(stated)},
            )
            for same in by_delta
        ),
        delta_note=note,
        outside=(*([note] if note else []), *rest),
    )


def _with_spent(
    said: Statement,
    each: Sequence[Statement],
    parts: Sequence[Ledger],
    people: Sequence[Sequence[str]],
) -> Statement:
    """What users spent given who took part, each user's sum over the parts, and ε as planned."""
    spent = spent_by_users(parts, people)
    counts, spread = distribution_of(by_person([p.participations for p in parts], people), spent)
    ledger = SpentByUsers(
        epsilon=float(spent.max()),
        bound=LEDGER.name,
        # The largest of each part, added: at least the largest sum over users.
        replace_one=total([one.ledger.replace_one if one.ledger else None for one in each]),
        participations=counts,
        epsilon_over_users=spread,
    )
    whole = total([one.planned.epsilon if one.planned else None for one in each])
    assert said.mechanism is not None
    return replace(
        said,
        ledger=ledger,
        planned=PlannedEpsilon(said.mechanism.rounds, whole),
        server=replace(said.server, ledger=ledger.epsilon),
        third_party=replace(said.third_party, ledger=ledger.epsilon),
        participant=replace(said.participant, ledger=ledger.epsilon),
        alone=_spent_alone(said.alone, parts),
    )


def _spent_alone(said: ViewGuarantee | None, parts: Sequence[Ledger]) -> ViewGuarantee | None:
    """The same for a server with which all other sites collude, in runs with secure sums."""
    if said is None:
        return None
    spent = spent_by_users([part.without_secure_sums() for part in parts])
    return replace(said, ledger=float(spent.max()))


def _users(each: Sequence[Statement]) -> EpsilonByUser | None:
    """ε of each user as the sum over the parts, where users have noise of their own."""
    found = [one.by_user for one in each if one.by_user is not None]
    if len(found) < len(each):
        return None
    epsilons = np.sum([one.epsilon for one in found], axis=0)
    return epsilon_by_user(found[0].bound, epsilons, found[0].noise)


def _view(same: Sequence[ViewGuarantee], delta: float) -> ViewGuarantee:
    """One view of all parts: the sum, and that it is one."""
    first = same[0]
    # What other mechanisms cost is counted in the first part.
    alone = [one.epsilon if one.training_alone is None else one.training_alone for one in same]
    return replace(
        first,
        epsilon=total([one.epsilon for one in same]),
        replace_one=total([one.replace_one for one in same]),
        delta=None if first.delta is None else delta,
        composition=first.composition if first.delta is None else ADDED,
        training_alone=None if first.training_alone is None else total(alone),
    )


def _row(same: Sequence[BoundRow], delta: float) -> BoundRow:
    """One bound of all parts; it applies where it does to each."""
    barred = next((row for row in same if not row.applies), None)
    if barred is not None:
        return replace(same[0], epsilon=None, delta=delta, applies=False, reason=barred.reason)
    return replace(same[0], epsilon=total([row.epsilon for row in same]), delta=delta)


def _human(said: Statement, run: Mechanism, groups: tuple[int, ...]) -> dict[str, HumanTerms]:
    """What (Σ ε, Σ δ) means for one person, by view."""
    spent = {view: said.towards(view).epsilon for view in views_of(run)}
    spent["ledger"] = said.ledger.epsilon if said.ledger else None
    found = {}
    for view, epsilon in spent.items():
        if epsilon is not None:
            found[view] = terms_of(law_of_sum(epsilon, run.delta), run, "added", groups)
    return found
