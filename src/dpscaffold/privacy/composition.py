"""Several runs over the same records: what they promise together.

Where a plan may have been chosen after seeing an earlier run's outputs, the ε and the δ of the runs
add; this holds for mechanisms chosen adaptively, each with parameters that were fixed before it ran
(Rogers, Roth, Ullman, Vadhan 2016). Where every plan was fixed in advance, the runs are one
adaptive composition with known dominating pairs, and their loss distributions convolve (Zhu, Dong,
Wang 2022), which is never worse.

Both take for granted that the runs' noise and draws are independent. Runs that share the seed of
their noise reveal its difference: together they have no guarantee. Runs with noise of their own but
one seed for the draw have the same users take part, and so have copies of one run that both went
on: only what was spent given who took part adds up. A seed that is not known counts as shared.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpscaffold.privacy.bound import Bound, Laws
from dpscaffold.privacy.bounds import RANDOM_WORST, SECURE_SUMS, SECURE_WORST
from dpscaffold.privacy.costs import Cost, with_costs
from dpscaffold.privacy.drawn import FRESH, UNKNOWN, SeedKnowledge
from dpscaffold.privacy.errors import PrivacyError
from dpscaffold.privacy.human import GROUPS, check_group, losses, terms_of
from dpscaffold.privacy.laws import participations_laws
from dpscaffold.privacy.ledger import Ledger, spent
from dpscaffold.privacy.loss import LONGEST, LossDistribution, privacy_parameters
from dpscaffold.privacy.mechanism import Mechanism
from dpscaffold.privacy.statement_types import HumanTerms

ADDED = "epsilon and delta added (Rogers, Roth, Ullman, Vadhan 2016)"
CONVOLVED = "loss distributions convolved, every plan being fixed in advance (Zhu, Dong, Wang 2022)"
#: The name of what was spent given who took part, next to the views.
GIVEN = "ledger"


@dataclass(frozen=True)
class RunPart:
    """One of the runs: its mechanism, what was run of it, and where its randomness came from.

    ``bounds`` has the bound to quote for each view. ``secret`` says that the noise came from the
    operating system, ``drawn`` what is known about the seed; ``data`` is the identity of the
    records, where it can be compared with the other runs'.
    """

    name: str
    run: Mechanism
    rounds: int
    bounds: Mapping[str, Bound]
    ledger: Ledger | None = None
    costs: tuple[Cost, ...] = ()
    secret: bool = False
    drawn: SeedKnowledge = UNKNOWN
    data: str | None = None
    #: Parts of one source are rounds of one run: their noise and draws differ.
    source: str | None = None

    @property
    def repeats(self) -> tuple[int, ...]:
        """Rounds that were run again with fresh noise."""
        return self.ledger.repeats if self.ledger else ()

    def epsilon(self, view: str) -> float:
        """ε of this run alone at its own δ."""
        return self.bounds[view].epsilon(self.run, self.rounds, self.costs, self.repeats)

    def laws(self, view: str) -> Laws:
        """Its loss distributions, one for each direction of a neighbouring pair."""
        laws = losses(self.bounds[view], self.run, self.rounds, self.costs, self.repeats)
        if len(laws) <= directions(self.run):
            return laws
        # Several users could be the worst. These bounds have one worst user, and hold too.
        one = SECURE_WORST if self.bounds[view] is SECURE_SUMS else RANDOM_WORST
        return losses(one, self.run, self.rounds, self.costs, self.repeats)

    def charged(self) -> Ledger:
        """Its ledger, with what its data's preparation cost."""
        assert self.ledger is not None
        return self.ledger.charged(self.costs)

    def given_laws(self) -> Laws:
        """At least what any user spent given who took part: the most often, at the worst rate."""
        assert self.ledger is not None
        most = int(self.ledger.participations.max())
        return tuple(with_costs(law, self.costs) for law in participations_laws(self.run, most))


@dataclass(frozen=True)
class SingleRun:
    """One run as the table lists it; its ε by view, at its own δ."""

    name: str
    epsilon: Mapping[str, float | None]
    delta: float
    rounds: int


@dataclass(frozen=True)
class JointGuarantee:
    """What several runs promise together.

    ``epsilon`` is by view, and given who took part under ``"ledger"`` where every run has a ledger;
    None where nothing is guaranteed, for the ``reason`` given. ``quoted`` is the one of them to
    quote: given who took part, where the draw of a run was somebody's choice. ``same_records`` says
    whether the identities of the data were compared; if not, the runs count as over the same
    records. ``colluders`` participants pool what they know of all runs in the view ``participant``.
    """

    method: str
    delta: float
    neighbours: str
    epsilon: Mapping[str, float | None]
    reason: str | None
    same_records: bool
    simulated: bool
    runs: tuple[SingleRun, ...]
    human: Mapping[str, HumanTerms]
    colluders: int = 1
    quoted: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            **asdict(replace(self, human={})),
            "human": {view: terms.to_json() for view, terms in self.human.items()},
        }


def directions(run: Mechanism) -> int:
    """2 where the two orders of a neighbouring pair have different losses, else 1."""
    return 2 if run.unit == "record" and run.sampling == "poisson" else 1


def together(
    parts: Sequence[RunPart],
    fixed_in_advance: bool = False,
    colluders: int = 1,
    groups: Sequence[int] = GROUPS,
) -> JointGuarantee:
    """ε and δ of several runs over the same records, each part at its own δ.

    The δ in all is the sum of the runs'.

    Args:
        parts: The runs.
        fixed_in_advance: Whether no plan was chosen after seeing an earlier run's outputs.
        colluders: The number of colluders that the parts' bounds were chosen for.
        groups: The numbers of records of one person to look at together.

    >>> from dpscaffold.privacy import describe
    >>> from dpscaffold.privacy.bounds import RANDOM_PARTICIPATION
    >>> from dpscaffold.privacy.drawn import FROM_SYSTEM
    >>> run = describe(rounds=100, local_steps=5, users=60, cohort_size=12, records=800,
    ...                batch_sizes=160, noise=10)
    >>> parts = [
    ...     RunPart(
    ...         name, run, 100, {"server": RANDOM_PARTICIPATION}, secret=True, drawn=FROM_SYSTEM
    ...     )
    ...     for name in ("a", "b")
    ... ]
    >>> added, convolved = together(parts), together(parts, fixed_in_advance=True)
    >>> convolved.epsilon["server"] < 0.8 * added.epsilon["server"]
    True
    """
    _check(parts)
    for size in groups:
        check_group(size)
    delta = added(part.run.delta for part in parts)
    reason = shared_noise(parts)
    over_draw = reason or shared_draw(parts)
    views = [view for view in parts[0].bounds if all(view in part.bounds for part in parts)]
    known = [*views, GIVEN] if all(part.ledger is not None for part in parts) else views
    epsilon: dict[str, float | None] = {}
    human: dict[str, HumanTerms] = {}
    whole = replace(parts[0].run, delta=min(delta, 1 - 1e-12))
    for view in known:
        if reason or (over_draw and view != GIVEN):
            epsilon[view] = None
            continue
        laws = _convolved(parts, view) if fixed_in_advance else ()
        value = max(law.epsilon(delta) for law in laws) if laws else _added(parts, view)
        epsilon[view] = value if math.isfinite(value) else None
        if math.isfinite(value) and delta < 1:
            laws = laws or law_of_sum(value, delta)
            human[view] = terms_of(laws, whole, "together", groups)
    return JointGuarantee(
        method=CONVOLVED if fixed_in_advance else ADDED,
        delta=delta,
        neighbours=parts[0].run.neighbours,
        epsilon=epsilon,
        reason=over_draw,
        same_records=all(part.data is not None for part in parts),
        simulated=any(not part.secret for part in parts),
        runs=tuple(_alone(part, known) for part in parts),
        human=human,
        colluders=colluders,
        quoted=_quoted(parts, epsilon),
    )


def _quoted(parts: Sequence[RunPart], epsilon: Mapping[str, float | None]) -> str | None:
    """Which ε to quote. Over the draw holds for a draw that nobody chose; so does what simulations
    would promise with secret noise. None where there is no such ε."""
    over = [view for view in epsilon if view != GIVEN][:1]
    chosen = any(part.secret and part.drawn.given for part in parts)
    return next((v for v in ([] if chosen else over) + [GIVEN] if epsilon.get(v) is not None), None)


def _strangers(parts: Sequence[RunPart]) -> list[tuple[RunPart, RunPart]]:
    """Pairs of parts that are not of one run."""
    pairs = itertools.combinations(parts, 2)
    return [(a, b) for a, b in pairs if a.source is None or a.source != b.source]


def shared_noise(parts: Sequence[RunPart]) -> str | None:
    """Why nothing is guaranteed about runs of which two share the seed of their noise, or None."""
    for one, other in _strangers(parts):
        if not (one.secret or other.secret) and one.drawn.is_shared_with(other.drawn):
            return (
                f"{_shared(one, other, 'share')}, and with it their noise, which cancels between "
                f"them: nothing is guaranteed about both together"
            )
    return None


def shared_draw(parts: Sequence[RunPart]) -> str | None:
    """Why only the ledgers add up, or None where each run's participants were drawn again."""
    for one, other in _strangers(parts):
        if one.drawn.is_shared_with(other.drawn):
            return (
                f"{_shared(one, other, 'drew their participants from')}: the second draw is no "
                f"chance to whoever saw the first, so only what was spent given who took part adds "
                f"up"
            )
    return None


def _shared(one: RunPart, other: RunPart, verb: str) -> str:
    """What two runs have in common; a seed of the operating system is not shown."""
    names = f"{one.name} and {other.name}"
    if one.drawn.is_copy_of(other.drawn):
        return f"{names} are copies of one run (their journals begin alike) and {verb} one seed"
    if None in (one.drawn.value, other.drawn.value) and one.drawn.mark != other.drawn.mark:
        return f"{names} may {verb} one seed, which is not known of both"
    secret = one.drawn.origin in FRESH
    return f"{names} {verb} {'one seed' if secret else f'the seed {one.drawn.value}'}"


def _check(parts: Sequence[RunPart]) -> None:
    """Refuse what cannot be added: other neighbours, other records."""
    if len(parts) < 2:
        raise PrivacyError(
            "too-few-runs", f"{len(parts)} run has nothing to be composed with; give at least 2"
        )
    first = parts[0]
    for part in parts[1:]:
        if (part.run.unit, part.run.neighbours) != (first.run.unit, first.run.neighbours):
            raise PrivacyError(
                "units-differ",
                f"{part.name} protects {part.run.neighbours} where {first.name} protects "
                f"{first.run.neighbours}; give runs with the same unit and neighbours",
            )
        if None not in (part.data, first.data) and part.data != first.data:
            raise PrivacyError(
                "records-differ",
                f"{part.name} ran on other data than {first.name} (their identities differ); give "
                f"runs over the same records, or say --same-records if only their preparation "
                f"differs",
            )


def _added(parts: Sequence[RunPart], view: str) -> float:
    if view != GIVEN:
        return added(part.epsilon(view) for part in parts)
    if len({part.data for part in parts}) == 1 and parts[0].data is not None:
        # The same data, so the same users: the largest sum, not the sum of the largest.
        return float(spent_by_users([part.charged() for part in parts]).max())
    return added(part.charged().largest() for part in parts)


def spent_by_users(
    ledgers: Sequence[Ledger], people: Sequence[Sequence[str]] = ()
) -> NDArray[np.float64]:
    """ε of every user given who took part, (M,): its sum over several ledgers of the same users.
    ``people`` names the users of each ledger, where they differ."""
    return np.asarray(by_person([ledger.epsilons() for ledger in ledgers], people))


def by_person(each: Sequence[NDArray[Any]], people: Sequence[Sequence[str]] = ()) -> NDArray[Any]:
    """The sum over several tables of users, in the order in which ``people`` first names them.

    >>> by_person([np.array([1, 2]), np.array([10, 20])], [("a", "b"), ("b", "c")]).tolist()
    [1, 12, 20]
    """
    if not people:
        return np.asarray(np.sum(each, axis=0))
    places = {name: k for k, name in enumerate(dict.fromkeys(n for one in people for n in one))}
    found = np.zeros(len(places), dtype=each[0].dtype)
    for values, names in zip(each, people, strict=True):
        found[[places[name] for name in names]] += values
    return found


def added(values: Iterable[float]) -> float:
    """ε, or δ, of mechanisms that were chosen one after another: the sum."""
    return math.fsum(values)


def total(values: Sequence[float | None]) -> float | None:
    """The same, or None where one of the values is missing."""
    known = [value for value in values if value is not None]
    return added(known) if len(known) == len(values) else None


def costs_of_part(costs: Sequence[Cost], part: int) -> tuple[Cost, ...]:
    """What preparing the data cost is spent once, by the first part of a run."""
    return tuple(costs) if part == 0 else ()


def charged_parts(parts: Sequence[Ledger], costs: Sequence[Cost]) -> tuple[Ledger, ...]:
    """The ledgers of a run's parts, with what preparing the data cost."""
    return tuple(part.charged(costs_of_part(costs, k)) for k, part in enumerate(parts))


def allowed_in_parts(
    parts: Sequence[Ledger], place: int, costs: Sequence[Cost], users: Sequence[int]
) -> list[int]:
    """Those of the drawn users whose participation in part ``place`` keeps Σ_k ε_k(n_k), over the
    n_k times that they took part in each part, within the ε of a user; in their order.

    It rests on counts and public numbers alone, as within one part. Where ``max_participations``
    is set it holds over all parts together.

    >>> from dpscaffold.privacy import describe
    >>> run = describe(rounds=9, local_steps=2, users=4, cohort_size=4, records=50, batch_sizes=5,
    ...                noise=4.0)
    >>> once, twice = (spent(run, n, run.group_of(0)) for n in (1, 2))
    >>> first, second = Ledger(run, twice), Ledger(run, twice)
    >>> first.record(1, [0, 1]); first.record(2, [0])
    >>> twice < 2 * once, allowed_in_parts([first, second], 1, (), [3, 1, 0])
    (True, [3])
    """
    now, most = parts[place], parts[place].run.max_participations
    budget = now.user_budget
    taken = np.sum([part.participations for part in parts], axis=0)
    others = [part for k, part in enumerate(charged_parts(parts, costs)) if k != place]
    elsewhere = spent_by_users(others)

    def fits(user: int) -> bool:
        if most is not None and taken[user] >= most:
            return False
        next_count = int(now.participations[user]) + 1
        one = spent(now.run, next_count, now.run.group_of(user), costs_of_part(costs, place))
        return budget is None or elsewhere[user] + one <= budget

    return [user for user in users if fits(user)]


def law_of_sum(epsilon: float, delta: float) -> Laws:
    """All that a sum of (ε, δ) tells of the losses."""
    return (privacy_parameters(epsilon, delta, epsilon / 64 or 1.0),)


def _convolved(parts: Sequence[RunPart], view: str) -> Laws:
    """One law per direction: a record is in all runs or in none, so directions do not mix."""
    each = [part.given_laws() if view == GIVEN else part.laws(view) for part in parts]
    reach = sum(
        max(len(law.probs) * law.interval + abs(law.losses[0]) for law in laws) for laws in each
    )
    finest = min(law.interval for laws in each for law in laws)
    interval = max(finest, 4 * reach / LONGEST)
    found: list[LossDistribution] = []
    for direction in range(directions(parts[0].run)):
        chosen = [laws[direction].on_grid(interval) for laws in each]
        law = chosen[0]
        for other in chosen[1:]:
            law = law.compose(other)
        found.append(law)
    return tuple(found)


def _alone(part: RunPart, views: Sequence[str]) -> SingleRun:
    values: dict[str, float | None] = {}
    for view in views:
        value = part.charged().largest() if view == GIVEN else part.epsilon(view)
        values[view] = value if math.isfinite(value) else None
    return SingleRun(part.name, values, part.run.delta, part.rounds)
