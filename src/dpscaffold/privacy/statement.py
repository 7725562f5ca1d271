"""Makes the privacy statement of a plan or a run: what is promised, to whom, by which theorem, and
what is not covered (:class:`~dpscaffold.privacy.page.Statement`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dpscaffold.privacy.accounting import Laws, capped, epsilons_by_group, losses
from dpscaffold.privacy.adversary import adversaries, no_guarantee, noise_seen
from dpscaffold.privacy.mechanism import Mechanism
from dpscaffold.privacy.page import Guarantee, Held, JournalHead, StatedPart, Statement
from dpscaffold.privacy.parts import (
    Part,
    added,
    check_addable,
    given_the_draw,
    law_of_sum,
    over_the_draw,
    shared_draw,
    shared_noise,
    within_cap,
)
from dpscaffold.privacy.preparation import (
    WITHIN,
    Preparation,
    prepared,
    sentence_of,
)
from dpscaffold.privacy.tradeoff import TradeOff

#: How many points of δ(ε) a statement holds for each theorem.
POINTS = 64


@dataclass(frozen=True)
class Facts:
    """What is true of a run besides its mechanism.

    Attributes:
        held: Who held the records.
        seeded: Whether the noise comes from a stored seed.
        draw_given: Whether somebody may have chosen who took part.
        preparation: The steps that made the features.
        allowed: The exceptions from a release's rules; None where nothing is released.
        planned: The keys that were chosen from public facts.
        colluders: How many participants pool what they know.
        cap: The most often that a user takes part in all parts, 0 where nothing bounds it.
        fixed_in_advance: Whether no part was planned after seeing an earlier one's outputs.
        journal: The state of the run's journal.
    """

    held: Held = "plan"
    seeded: bool = False
    draw_given: bool = False
    preparation: tuple[Preparation, ...] = ()
    allowed: tuple[str, ...] | None = None
    planned: tuple[str, ...] = ()
    colluders: int = 1
    cap: int = 0
    fixed_in_advance: bool = False
    journal: JournalHead | None = None


METRICS = "Accuracy and losses computed on the records, if published."
OTHER_RUNS = "Other runs on these records: add them with `dpscaffold privacy RUN RUN`."
TUNED = "Hyperparameters chosen by looking at results on these records."
SINGLE = (
    "Numbers computed from single uploads (largest_drift, largest_user_…): they count as uploads."
)
SEEDED = "The stored seed: whoever has it can remove the noise. Publish results, not the seed."
SIMULATED_SUMS = "Secure sums that one process simulates: it sees every upload."
UNCHANGED = "users (sites) run this software unchanged"
BLIND = "nobody chose participants, or when to stop, by results"
UNBROKEN = "nobody breaks X25519, HKDF, ChaCha20 or Ed25519"
#: What a whole plan chooses; of less than this something else was settled otherwise.
WHOLE_PLAN = frozenset({"algorithm", "plan", "privacy.clip"})


def state(parts: Sequence[Part], facts: Facts = Facts()) -> Statement:
    """The statement of a plan, a run or several runs, whose mechanisms are ``parts``; of none, that
    of a run without privacy.

    >>> from dpscaffold.privacy import describe
    >>> run = describe(rounds=400, local_steps=50, users=100, cohort_size=20,
    ...                records=4000, batch_sizes=800, noise=60, delta=2.5e-6)
    >>> said = state([Part(run, 400)])
    >>> round(said.epsilon, 2), said.towards("server").theorem
    (0.86, '1')
    """
    steps = prepared(facts.preparation, parts[0].run.unit if parts else "record")
    said = Statement(
        held=facts.held,
        users=parts[-1].run.users if parts else 0,
        seeded=facts.seeded,
        preparation=steps,
        planned=facts.planned,
        journal=facts.journal,
    )
    if not parts:
        reason = "the run is not private (no clipping, no noise)"
        return replace(said, reason=reason, outside=_outside(parts, facts))
    begun = [part for k, part in enumerate(parts) if k == 0 or part.rounds]
    check_addable(begun)
    delta = added(part.run.delta for part in begun)
    said = replace(
        said,
        delta=delta,
        neighbours=begun[0].run.neighbours,
        unit=begun[0].run.unit,
        outside=_outside(begun, facts, delta),
        needs=_needs(begun, facts),
    )
    reasons = [no_guarantee(part.run) for part in begun]
    why_not = next(filter(None, reasons), None) or _delta_spent(begun) or shared_noise(begun)
    if why_not is not None:
        return replace(said, reason=why_not, parts=_stated(begun, facts))
    known = all(part.ledger is not None for part in begun)
    if not known and (one_draw := shared_draw(begun)):
        return replace(said, reason=one_draw, parts=_stated(begun, facts))
    if not begun[0].people and _unequal(begun):
        said = replace(said, by_group=_by_group(begun))
    found = [_towards(begun, facts, name, known) for name in adversaries(begun[-1].run)]
    proved: dict[str, Laws] = {}
    for one, laws in found:
        if one.epsilon is not None:
            proved[one.theorem] = (*proved.get(one.theorem, ()), *laws)
    curves = {theorem: _curve(laws) for theorem, laws in proved.items()}
    guarantees = [one for one, _ in found]
    if _may_be_ground(begun, facts):
        honest = f"{guarantees[0].words}, if it follows the protocol"
        guarantees[:1] = [replace(guarantees[0], words=honest), _hostile(begun)]
    return replace(
        said,
        guarantees=tuple(guarantees),
        curves=curves,
        parts=_stated(begun, facts),
        quotes_given=known and _draw_known(begun, facts),
    )


def _delta_spent(parts: Sequence[Part]) -> str | None:
    """Why nothing is left for the training, or None."""
    for part in parts:
        if sum(cost.delta for cost in part.costs) >= part.run.delta:
            names = ", ".join(cost.name for cost in part.costs if cost.delta)
            return f"δ = {part.run.delta:.3g} is spent by other mechanisms ({names})"
    return None


def _draw_known(parts: Sequence[Part], facts: Facts) -> bool:
    """Whether somebody may know who took part in a part whose noise is secret."""
    if any(part.secret and part.drawn.given for part in parts) or shared_draw(parts):
        return True
    return facts.draw_given and not facts.seeded


def without_guarantee(reason: str) -> Statement:
    """The statement of a model that no guarantee covers, for this reason."""
    return Statement(reason=reason.rstrip("."))


def of_winner(
    run: Mechanism, epsilon: float, steps: Sequence[Preparation], outside: Sequence[str]
) -> Statement:
    """The statement of the winner of a private tuning, for whoever is given the winner alone; the
    δ is the run's."""
    said = state([Part(run, run.rounds)], Facts(held="one computer", preparation=tuple(steps)))
    curve = TradeOff.of(law_of_sum(epsilon, run.delta)) if math.isfinite(epsilon) else None
    winner = Guarantee(
        "third_party",
        "anybody who is given the winner alone",
        _finite(epsilon),
        "selection",
        None if curve is None else 0.5 + curve.advantage() / 2,
    )
    trials = ("trials", "How many trials there were, their scores and how long they took.")
    more = (("preparation", sentence) for sentence in outside)
    return replace(
        said,
        guarantees=(winner,),
        curves={},
        by_group=(),
        outside=tuple(dict.fromkeys((*said.outside, trials, *more))),
    )


def _towards(parts: Sequence[Part], facts: Facts, name: str, known: bool) -> tuple[Guarantee, Laws]:
    """What is promised towards one adversary, and the losses behind it."""
    run = parts[-1].released
    who = adversaries(run, facts.colluders)[name]
    seen = noise_seen(run, who)
    value, laws = over_the_draw(parts, name, facts.colluders, facts.fixed_in_advance)
    theorem = seen.theorem
    if len(parts) > 1:
        theorem = "convolved" if facts.fixed_in_advance else "sum"
    given, given_laws = math.nan, laws
    if known:
        given, given_laws = given_the_draw(parts, name, facts.fixed_in_advance)
    if facts.cap and len(parts) > 1:
        most, most_laws = within_cap(parts, facts.cap)
        if most < value:
            value, laws, theorem = most, most_laws, "cap"
        if known and most < given:
            given, given_laws = most, most_laws
    if shared_draw(parts):
        value = math.nan
    curve = TradeOff.of(laws) if math.isfinite(value) else None
    given_curve = TradeOff.of(given_laws) if math.isfinite(given) else None
    shown = given_curve if curve is None else curve
    guarantee = Guarantee(
        name,
        who.words,
        _finite(value),
        theorem,
        guess=None if curve is None else 0.5 + curve.advantage() / 2,
        replace_one=_replacing(parts, name, facts, theorem, shown),
        given=_finite(given),
        given_guess=None if given_curve is None else 0.5 + given_curve.advantage() / 2,
        not_more=None if seen.theorem != "1" or who.sees == "uploads" else seen.not_more,
        knows=who.knows,
    )
    return guarantee, laws


def _replacing(
    parts: Sequence[Part], name: str, facts: Facts, theorem: str, curve: TradeOff | None
) -> float | None:
    """ε for replacing one record by another, where ε is for removing a record's content, or for
    adding or removing it: two such changes lead from one dataset to the other, so it is that of a
    group of two. That of several parts is the sum, as their ε is."""
    if parts[0].run.relation == "replace-one" or curve is None:
        return None
    if theorem == "sum":
        each = (
            TradeOff.of(part.losses(part.against(name, facts.colluders))).epsilon(
                part.run.delta, group=2
            )
            for part in parts
        )
        return _finite(added(each))
    return _finite(curve.epsilon(added(part.run.delta for part in parts), group=2))


def _may_be_ground(parts: Sequence[Part], facts: Facts) -> bool:
    """Whether a hostile server could choose among draws until it likes one."""
    return facts.held == "sites" and any(part.run.user_ratio < 1 for part in parts)


def _hostile(parts: Sequence[Part]) -> Guarantee:
    """A server that need not follow the protocol: it has everybody take part in every round."""
    whos = [part.against("server") for part in parts]
    if len(parts) == 1:
        (part,), (who,) = parts, whos
        most, costs = part.released.rounds + part.released.extra, part.costs_towards(who)
        value = capped(part.released, who, costs)
        laws = losses(part.released, who, None, most, costs)
    else:
        value = added(
            capped(part.released, who, part.costs_towards(who))
            for part, who in zip(parts, whos, strict=True)
        )
        laws = law_of_sum(value, added(part.run.delta for part in parts))
    words = "a hostile server, which may choose who takes part"
    guess = 0.5 + TradeOff.of(laws).advantage() / 2
    return Guarantee("hostile", words, _finite(value), "cap", guess)


def _unequal(parts: Sequence[Part]) -> bool:
    return any(part.run.unequal for part in parts)


def _by_group(parts: Sequence[Part]) -> tuple[float, ...]:
    """ε over the draw towards the server of each group of users, the sum over the parts. Users who
    are alike in one part may differ in another; none where the parts are of other users."""
    each = [
        np.array(epsilons_by_group(part.released, part.against("server"), part.rounds, part.costs))
        for part in parts
    ]
    if len(parts) == 1:
        return tuple(each[0].tolist())
    users = parts[0].run.users
    if any(part.run.users != users for part in parts):
        return ()
    places = [np.array(part.run.membership or np.zeros(users, dtype=int)) for part in parts]
    kinds = np.unique(np.stack(places), axis=1)
    return tuple(sum(one[kind] for one, kind in zip(each, kinds, strict=True)).tolist())


def _stated(parts: Sequence[Part], facts: Facts) -> tuple[StatedPart, ...]:
    return tuple(_stated_part(part, facts, len(parts) > 1) for part in parts)


def _stated_part(part: Part, facts: Facts, several: bool) -> StatedPart:
    """One part, without the list of each user's group, which may be long."""
    released = part.released
    counts: dict[int, int] = {}
    most: tuple[int, ...] = ()
    if part.ledger is not None:
        users = np.bincount(part.ledger.participations)
        counts = {int(n): int(users[n]) for n in np.flatnonzero(users)}
        most = tuple(part.ledger.most_by_group().tolist())
    epsilons: dict[str, float | None] = {}
    if several and no_guarantee(released) is None:
        names = adversaries(released, facts.colluders)
        epsilons = {name: _finite(part.epsilon(who)) for name, who in names.items()}
    return StatedPart(
        mechanism={**replace(released, membership=()).to_dict(), "membership": []},
        rounds=part.rounds,
        name=part.name,
        delta=part.run.delta,
        costs=part.costs,
        most_often=most,
        participations=counts,
        epsilons=epsilons,
    )


def _curve(laws: Laws) -> tuple[float, tuple[float, ...]]:
    """δ(ε) at a few values of ε, rounded up."""
    curve = TradeOff.of(laws, POINTS)
    deltas = [_rounded_up(delta) for delta in curve.deltas.tolist()]
    return float(curve.epsilons[-1]), tuple(deltas)


def _rounded_up(value: float, digits: int = 4) -> float:
    if value <= 0:
        return 0.0
    step = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    return float(f"{math.ceil(value / step) * step:.{digits}g}")


def _outside(
    parts: Sequence[Part], facts: Facts, delta: float | None = None
) -> tuple[tuple[str, str], ...]:
    """What no ε covers."""
    found: list[tuple[str, str]] = []
    if parts and delta is not None and (note := large_delta(parts[0].run, delta)):
        found.append(("large-delta", note))
    if facts.seeded:
        found.append(("seed", SEEDED))
    found.append(("metrics", METRICS))
    found += [
        ("preparation", sentence_of(step, parts[0].run.unit if parts else "record"))
        for step in facts.preparation
        if step.protection not in WITHIN
    ]
    found += [
        ("allowed", f"Released all the same (privacy.allow: {what}).")
        for what in facts.allowed or ()
    ]
    if not set(facts.planned) >= WHOLE_PLAN:
        found.append(("tuning", TUNED))
    if parts and parts[0].run.secure is not None:
        found += [("simulated-sums", SIMULATED_SUMS)] if facts.held != "sites" else []
    elif parts and any(
        noise_seen(p.run, adversaries(p.run)["third_party"]).theorem == "2" for p in parts
    ):
        found.append(("single-uploads", SINGLE))
    if parts:
        found.append(("other-runs", OTHER_RUNS))
    return tuple(dict.fromkeys(found))


def _needs(parts: Sequence[Part], facts: Facts) -> tuple[tuple[str, str], ...]:
    """What has to be true for the guarantees to hold."""
    found = [("unchanged", UNCHANGED), ("blind", BLIND)]
    if any(part.run.secure is not None for part in parts):
        found.append(("unbroken", UNBROKEN))
    if facts.draw_given and all(part.ledger is None for part in parts):
        found.append(("draw", "nobody chose the seed of the draw (else quote ε given the draw)"))
    return tuple(found)


def large_delta(run: Mechanism, delta: float) -> str | None:
    """What to say of a δ from 1/n up, n being how many are protected; None below.

    >>> from dpscaffold.privacy import describe
    >>> run = describe(rounds=4, local_steps=5, users=10, cohort_size=2, records=40, batch_sizes=8,
    ...                noise=6)
    >>> large_delta(run, run.delta), "1/400" in large_delta(run, 1 / 400)
    (None, True)
    """
    if delta * run.protected < 1 - 1e-9:
        return None
    return (
        f"δ = {delta:.3g} is not below 1/{run.protected}, one over the number of {run.unit}s: "
        f"publishing one {run.unit} at random in the clear has such a δ. Use "
        f"1/{10 * run.protected} or less."
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
