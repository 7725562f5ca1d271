"""What several parts promise together: rounds that a run was given later, runs over the same
records, and the other mechanisms that read them.

Where a plan may have been chosen after seeing an earlier part's outputs, the ε and the δ of the
parts add; this holds for mechanisms chosen adaptively, each with parameters that were fixed before
it ran (Rogers, Roth, Ullman, Vadhan 2016). Where every plan was fixed in advance, the parts are one
adaptive composition with known dominating pairs, and their losses convolve (Zhu, Dong, Wang 2022),
which is never worse.

Both take for granted that the parts' noise and draws are independent. Runs that share the seed of
their noise reveal its difference: together they have no guarantee. Runs with noise of their own but
one seed for the draw have the same users take part, and so have copies of one run that both went
on: only what was spent given who took part adds up. A seed that is not known counts as shared.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpscaffold.errors import BadInput
from dpscaffold.privacy.accounting import (
    Laws,
    Step,
    capped,
    check_guaranteed,
    epsilon,
    group_steps,
    losses,
    rounded_steps,
    step_epsilon,
    step_laws,
    worst_step,
)
from dpscaffold.privacy.adversary import ALONE, SERVER, Adversary, adversaries, noise_seen
from dpscaffold.privacy.ledger import Ledger
from dpscaffold.privacy.loss import LONGEST, Loss, privacy_parameters
from dpscaffold.privacy.mechanism import Mechanism
from dpscaffold.privacy.preparation import Cost
from dpscaffold.privacy.seeds import FRESH, UNKNOWN, SeedKnowledge
from dpscaffold.privacy.solve import guess
from dpscaffold.privacy.tradeoff import TradeOff


@dataclass(frozen=True)
class Part:
    """Rounds of one mechanism, and what else was fixed together with it.

    Attributes:
        run: The mechanism, of as many rounds as were planned.
        rounds: How many of them were run.
        ledger: Who took part in them; None in a plan.
        costs: Other private mechanisms on the same records, such as the preparation of data.
        name: What a table calls it.
        secret: Whether its noise came from the operating system.
        drawn: What is known about the seed of the draw.
        data: The identity of the records, where it can be compared with that of other parts.
        source: Parts of one source are rounds of one run: their noise and draws differ.
        people: Who the users are, where parts differ in them.
    """

    run: Mechanism
    rounds: int
    ledger: Ledger | None = None
    costs: tuple[Cost, ...] = ()
    name: str = ""
    secret: bool = False
    drawn: SeedKnowledge = UNKNOWN
    data: str | None = None
    source: str | None = None
    people: tuple[str, ...] = ()

    @property
    def released(self) -> Mechanism:
        """The mechanism with every attempt that was made beyond its rounds."""
        return self.run if self.ledger is None else self.ledger.released

    def against(self, name: str, colluders: int = 1) -> Adversary:
        """The adversary of that name; whom this part does not know sees its uploads."""
        return adversaries(self.run, colluders).get(name, SERVER)

    def over_the_draw(self, who: Adversary) -> Proof:
        """ε over the draw of participants."""
        run, theorem = self.released, noise_seen(self.released, who).theorem
        laws = losses(run, who, self.rounds, None, self.costs)
        return Proof(epsilon(run, who, self.rounds, costs=self.costs), run.delta, laws, theorem)

    def for_everybody(self) -> Proof:
        """ε if every user took part in every planned round and attempt: it holds against a server
        that chooses who takes part."""
        who, run = self.against("server"), self.released
        laws = losses(run, who, None, run.rounds + run.extra, self.costs)
        return Proof(capped(run, who, self.costs), run.delta, laws, "cap")

    def worst_losses(self, who: Adversary, times: int | None = None) -> Laws:
        """The losses of one user that stands for all: over the draw, or given that it took part
        this many ``times``."""
        return losses(self.released, who, self.rounds, times, self.costs, True)

    def charged(self) -> Ledger:
        """Its ledger, with what else read the records."""
        assert self.ledger is not None
        return self.ledger.charged(self.costs)


@dataclass(frozen=True)
class Proof:
    """An ε at its δ, the losses that it is read off, and the name of the theorem that proves it
    (:data:`~dpscaffold.privacy.page.THEOREMS`); ``summands`` are those that were added."""

    epsilon: float
    delta: float
    losses: Laws
    theorem: str
    summands: tuple[Proof, ...] = ()

    @classmethod
    def of_sum(cls, epsilon: float, delta: float, theorem: str = "sum") -> Proof:
        """From an ε and its δ alone."""
        laws = (privacy_parameters(epsilon, min(delta, 1 - 1e-12), epsilon / 64 or 1.0),)
        return cls(epsilon, delta, laws, theorem)

    @classmethod
    def of_losses(cls, losses: Laws, delta: float, theorem: str) -> Proof:
        """From losses, at this δ."""
        return cls(max(law.epsilon(delta) for law in losses), delta, losses, theorem)

    @property
    def guess(self) -> float:
        """How often the best guess whether a record was used is right, at even odds."""
        return guess(self.losses)

    def of_pairs(self) -> float:
        """ε of two changes, one after another; that of a sum is the sum."""
        if self.summands:
            return math.fsum(one.of_pairs() for one in self.summands)
        return TradeOff.of(self.losses).epsilon(self.delta, group=2)


def sum_of(proofs: Sequence[Proof], theorem: str = "sum") -> Proof:
    """Of mechanisms that were chosen one after another: ε and δ add."""
    if len(proofs) == 1:
        return proofs[0]
    delta = math.fsum(proof.delta for proof in proofs)
    found = Proof.of_sum(math.fsum(proof.epsilon for proof in proofs), delta, theorem)
    return replace(found, summands=tuple(proofs))


def over_the_draw(
    parts: Sequence[Part], name: str, colluders: int = 1, fixed_in_advance: bool = False
) -> Proof:
    """ε of all parts against the adversary of that name, at the sum of their δ.

    >>> from dpscaffold.privacy import describe
    >>> run = describe(rounds=100, local_steps=5, users=60, cohort_size=12, records=800,
    ...                batch_sizes=160, noise=10)
    >>> parts = [Part(run, 100), Part(run, 100)]
    >>> once = over_the_draw(parts[:1], "server").epsilon
    >>> twice = over_the_draw(parts, "server").epsilon
    >>> fixed = over_the_draw(parts, "server", fixed_in_advance=True).epsilon
    >>> twice == 2 * once, fixed < 0.8 * twice
    (True, True)
    """
    if not fixed_in_advance or len(parts) == 1:
        return sum_of([part.over_the_draw(part.against(name, colluders)) for part in parts])
    laws = convolved([part.worst_losses(part.against(name, colluders)) for part in parts])
    return Proof.of_losses(laws, total_delta(parts), "convolved")


def given_the_draw(
    parts: Sequence[Part],
    name: str = "server",
    colluders: int = 1,
    fixed_in_advance: bool = False,
) -> Proof:
    """The same given who took part, for the user that spent most: each user's sum over the parts.

    Where the records cannot be compared, the largest of each part add. Where every plan was fixed
    in advance, one user stands for all: it took part as often as anybody, at the worst rate.
    """
    alone = ALONE if name == ALONE.name else None
    delta = total_delta(parts)
    if len(parts) == 1:
        ledger = parts[0].charged()
        return Proof(ledger.largest(alone), delta, ledger.losses(alone), "given")
    if fixed_in_advance:
        most = [int(part.charged().participations.max()) for part in parts]
        laws = convolved(
            [
                part.worst_losses(part.against(name, colluders), times)
                for part, times in zip(parts, most, strict=True)
            ]
        )
        return Proof.of_losses(laws, delta, "given")
    if _of_same_users(parts) or parts[0].people:
        value = float(spent_by_users(parts, alone).max())
    else:
        value = math.fsum(part.charged().largest(alone) for part in parts)
    return Proof.of_sum(value, delta, "given")


def total_delta(parts: Sequence[Part]) -> float:
    """The δ of all parts together."""
    return math.fsum(part.run.delta for part in parts)


def _of_same_users(parts: Sequence[Part]) -> bool:
    """Whether the parts are of one run, or of runs over the same data."""
    runs, data = {part.source for part in parts}, {part.data for part in parts}
    return any(len(known) == 1 and None not in known for known in (runs, data))


def spent_by_users(parts: Sequence[Part], who: Adversary | None = None) -> NDArray[np.float64]:
    """ε of every user given who took part, (M,): its sum over the parts."""
    each = [part.charged().epsilons(who) for part in parts]
    return by_person(each, [part.people for part in parts])


def by_person(each: Sequence[NDArray[Any]], people: Sequence[Sequence[str]] = ()) -> NDArray[Any]:
    """The sum over several tables of users, in the order in which ``people`` first names them.

    >>> by_person([np.array([1, 2]), np.array([10, 20])], [("a", "b"), ("b", "c")]).tolist()
    [1, 12, 20]
    """
    if not any(people):
        return np.asarray(np.sum(each, axis=0))
    places = {name: k for k, name in enumerate(dict.fromkeys(n for one in people for n in one))}
    found = np.zeros(len(places), dtype=each[0].dtype)
    for values, names in zip(each, people, strict=True):
        found[[places[name] for name in names]] += values
    return found


def within_cap(parts: Sequence[Part], times: int) -> Proof:
    """ε of every user that takes part at most ``times`` times in all parts, whatever selection and
    stopping look at; at the sum of their δ.

    How often in which part is not known, so a user counts with its largest rate, its least noise
    and the most local steps: n participations of two kinds can cost more than n of either. The
    attempts beyond the rounds of every part count besides, and what else read the records.
    """
    hidden: dict[str, list[Step]] = {}
    for part in parts:
        check_guaranteed(part.run)
        steps = group_steps(part.run, ALONE)
        names = part.people or tuple(map(str, range(part.run.users)))
        for user, name in enumerate(names):
            hidden.setdefault(name, []).append(steps[part.run.place(user)])
    run = replace(
        parts[-1].run,
        delta=total_delta(parts),
        local_steps=max(part.run.local_steps for part in parts),
    )
    most = times + sum(part.run.extra for part in parts)
    costs = tuple(cost for part in parts for cost in part.costs)
    worst = set(rounded_steps([worst_step(own) for own in hidden.values()]))
    value = max(step_epsilon(run, ALONE, step, None, most, costs) for step in worst)
    laws = tuple(law for step in worst for law in step_laws(run, ALONE, step, None, most, costs))
    return Proof(value, run.delta, laws, "cap")


def convolved(each: Sequence[Laws]) -> Laws:
    """One law per direction: a record is in all parts or in none, so directions do not mix."""
    reach = sum(
        max(len(law.probs) * law.interval + abs(law.losses[0]) for law in laws) for laws in each
    )
    finest = min(law.interval for laws in each for law in laws)
    interval = max(finest, 4 * reach / LONGEST)
    return tuple(
        reduce(Loss.compose, [law.on_grid(interval) for law in laws])
        for laws in zip(*each, strict=True)
    )


def allowed_in_parts(parts: Sequence[Part], place: int, users: Sequence[int]) -> list[int]:
    """Those of the drawn users whose participation in part ``place`` keeps Σ_k ε_k(n_k), over the
    n_k times that they took part in each part, within the ε of a user; in their order.

    It rests on counts and public numbers alone, as within one part.

    >>> from dpscaffold.privacy import describe
    >>> run = describe(rounds=9, local_steps=2, users=4, cohort_size=4, records=50, batch_sizes=5,
    ...                noise=4.0)
    >>> once, twice = (epsilon(run, SERVER, times=n) for n in (1, 2))
    >>> first, second = Ledger(run, twice), Ledger(run, twice)
    >>> first.record(1, [0, 1]); first.record(2, [0])
    >>> parts = [Part(run, 9, first), Part(run, 9, second)]
    >>> twice < 2 * once, allowed_in_parts(parts, 1, [3, 1, 0])
    (True, [3])
    """
    now = parts[place].charged()
    if now.user_budget is None or len(parts) == 1:
        return now.allowed(users)
    elsewhere = spent_by_users([part for k, part in enumerate(parts) if k != place])
    return [user for user in users if elsewhere[user] + now.of(user, more=1) <= now.user_budget]


def shared_noise(parts: Sequence[Part]) -> str | None:
    """Why nothing is guaranteed about parts of which two share the seed of their noise, or None."""
    for one, other in _strangers(parts):
        if not (one.secret or other.secret) and one.drawn.is_shared_with(other.drawn):
            return (
                f"{_shared(one, other, 'share')}, and with it their noise, which cancels between "
                f"them: nothing is guaranteed about both together"
            )
    return None


def shared_draw(parts: Sequence[Part]) -> str | None:
    """Why only the ledgers add up, or None where each run's participants were drawn again."""
    for one, other in _strangers(parts):
        if one.drawn.is_shared_with(other.drawn):
            return (
                f"{_shared(one, other, 'drew their participants from')}: the second draw is no "
                f"chance to whoever saw the first, so only what was spent given who took part adds "
                f"up"
            )
    return None


def _strangers(parts: Sequence[Part]) -> list[tuple[Part, Part]]:
    """Pairs of parts that are not of one run."""
    pairs = itertools.combinations(parts, 2)
    return [(a, b) for a, b in pairs if a.source is None or a.source != b.source]


def _shared(one: Part, other: Part, verb: str) -> str:
    """What two runs have in common; a seed of the operating system is not shown."""
    names = f"{one.name} and {other.name}"
    if one.drawn.is_copy_of(other.drawn):
        return f"{names} are copies of one run (their journals begin alike) and {verb} one seed"
    if None in (one.drawn.value, other.drawn.value) and one.drawn.mark != other.drawn.mark:
        return f"{names} may {verb} one seed, which is not known of both"
    secret = one.drawn.origin in FRESH
    return f"{names} {verb} {'one seed' if secret else f'the seed {one.drawn.value}'}"


def check_addable(parts: Sequence[Part]) -> None:
    """Refuse what cannot be added: other neighbours, other records."""
    first = parts[0]
    for part in parts[1:]:
        if (part.run.unit, part.run.neighbours) != (first.run.unit, first.run.neighbours):
            raise BadInput(
                "units-differ",
                f"{part.name} protects {part.run.neighbours} where {first.name} protects "
                f"{first.run.neighbours}; give runs with the same unit and neighbours",
            )
        if None not in (part.data, first.data) and part.data != first.data:
            raise BadInput(
                "records-differ",
                f"{part.name} ran on other data than {first.name} (their identities differ); give "
                f"runs over the same records, or say --same-records if only their preparation "
                f"differs",
            )
