"""Makes the privacy statement of a plan or a run: what is promised, to whom, by which theorem, and
what is not covered (:class:`~dpscaffold.privacy.page.Statement`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from dpscaffold.privacy.accounting import Laws, epsilons_by_group
from dpscaffold.privacy.adversary import THIRD_PARTY, adversaries, no_guarantee, noise_seen
from dpscaffold.privacy.mechanism import Mechanism
from dpscaffold.privacy.numbers import digits_up
from dpscaffold.privacy.page import Guarantee, Held, JournalHead, StatedPart, Statement
from dpscaffold.privacy.parts import (
    Part,
    Proof,
    check_addable,
    given_the_draw,
    over_the_draw,
    shared_draw,
    shared_noise,
    sum_of,
    total_delta,
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
    colluders: int = 1
    cap: int = 0
    fixed_in_advance: bool = False
    journal: JournalHead | None = None


#: Codes, and a sentence each.
Sentences = tuple[tuple[str, str], ...]
#: What is said under a code, of what no ε covers and of what has to be true.
SENTENCES = {
    "seed": (
        "The stored seed: whoever has it can remove the noise. Publish results, not the seed."
    ),
    "metrics": "Accuracy and losses computed on the records, if published.",
    "tuning": "Hyperparameters chosen by looking at results on these records.",
    "simulated-sums": "Secure sums that one process simulates: it sees every upload.",
    "single-uploads": (
        "Numbers computed from single uploads (largest_drift, largest_user_…): they count as "
        "uploads."
    ),
    "other-runs": "Other runs on these records: add them with `dpscaffold privacy RUN RUN`.",
    "unchanged": "users (sites) run this software unchanged",
    "blind": "nobody chose participants, or when to stop, by results",
    "unbroken": "nobody breaks X25519, HKDF, ChaCha20 or Ed25519",
    "draw": "nobody chose the seed of the draw (else quote ε given the draw)",
}


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
    begun = [part for k, part in enumerate(parts) if k == 0 or part.rounds]
    said = Statement(
        held=facts.held,
        seeded=facts.seeded,
        preparation=prepared(facts.preparation, begun[0].run.unit if begun else "record"),
        outside=_outside(begun, facts),
        journal=facts.journal,
    )
    if not begun:
        return replace(said, reason="the run is not private (no clipping, no noise)")
    check_addable(begun)
    said = replace(
        said,
        users=parts[-1].run.users,
        delta=total_delta(begun),
        neighbours=begun[0].run.neighbours,
        unit=begun[0].run.unit,
        needs=_needs(begun, facts),
        parts=tuple(_stated(part, facts, len(begun) > 1) for part in begun),
    )
    if reason := _why_nothing(begun):
        return replace(said, reason=reason)
    found = [_towards(begun, facts, name) for name in adversaries(begun[-1].run)]
    proved: dict[str, Laws] = {}
    for one, proof in found:
        if one.epsilon is not None:
            proved[proof.theorem] = (*proved.get(proof.theorem, ()), *proof.losses)
    guarantees = [one for one, _ in found]
    if facts.held == "sites" and any(part.run.user_ratio < 1 for part in begun):
        honest = f"{guarantees[0].words}, if it follows the protocol"
        guarantees[:1] = [replace(guarantees[0], words=honest), _hostile(begun)]
    return replace(
        said,
        guarantees=tuple(guarantees),
        by_group=_by_group(begun),
        curves={theorem: _curve(laws) for theorem, laws in proved.items()},
        quotes_given=_have_run(begun) and _draw_known(begun, facts),
    )


def _have_run(parts: Sequence[Part]) -> bool:
    """Whether it is known who took part in every part."""
    return all(part.ledger is not None for part in parts)


def _why_nothing(parts: Sequence[Part]) -> str | None:
    """Why nothing is guaranteed, or None."""
    reasons = [no_guarantee(part.run) or _delta_spent(part) for part in parts]
    reason = next(filter(None, reasons), None) or shared_noise(parts)
    return reason if reason or _have_run(parts) else shared_draw(parts)


def _delta_spent(part: Part) -> str | None:
    """Why nothing is left for the training, or None."""
    if sum(cost.delta for cost in part.costs) < part.run.delta:
        return None
    names = ", ".join(cost.name for cost in part.costs if cost.delta)
    return f"δ = {part.run.delta:.3g} is spent by other mechanisms ({names})"


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
    words, finite = "anybody who is given the winner alone", math.isfinite(epsilon)
    guess = Proof.of_sum(epsilon, run.delta).guess if finite else None
    winner = Guarantee("third_party", words, _finite(epsilon), "selection", guess)
    trials = ("trials", "How many trials there were, their scores and how long they took.")
    more = (("preparation", sentence) for sentence in outside)
    return replace(
        said,
        guarantees=(winner,),
        curves={},
        by_group=(),
        outside=tuple(dict.fromkeys((*said.outside, trials, *more))),
    )


def _towards(parts: Sequence[Part], facts: Facts, name: str) -> tuple[Guarantee, Proof]:
    """What is promised towards one adversary, and its proof."""
    run = parts[-1].released
    who = adversaries(run, facts.colluders)[name]
    seen = noise_seen(run, who)
    asked = (parts, name, facts.colluders, facts.fixed_in_advance)
    proof = over_the_draw(*asked)
    given = given_the_draw(*asked) if _have_run(parts) else None
    if facts.cap and len(parts) > 1:
        capped, smaller = within_cap(parts, facts.cap), attrgetter("epsilon")
        proof = min(proof, capped, key=smaller)
        given = given and min(given, capped, key=smaller)
    over = None if shared_draw(parts) else proof
    guarantee = Guarantee(
        name,
        who.words,
        over.epsilon if over else None,
        proof.theorem,
        over.guess if over else None,
        replace_one=_replacing(parts, over or given),
        given=given.epsilon if given else None,
        given_guess=given.guess if given else None,
        not_more=None if seen.theorem != "1" or who.sees == "uploads" else seen.not_more,
        knows=who.knows,
    )
    return guarantee, proof


def _replacing(parts: Sequence[Part], proof: Proof | None) -> float | None:
    """ε for replacing one record by another, where ε is for removing a record's content, or for
    adding or removing it: two such changes lead from one dataset to the other, so it is that of a
    group of two."""
    if proof is None or parts[0].run.relation == "replace-one":
        return None
    return _finite(proof.of_pairs())


def _hostile(parts: Sequence[Part]) -> Guarantee:
    """A server that need not follow the protocol: it has everybody take part in every round."""
    proof = sum_of([part.for_everybody() for part in parts], "cap")
    words = "a hostile server, which may choose who takes part"
    return Guarantee("hostile", words, proof.epsilon, "cap", proof.guess)


def _by_group(parts: Sequence[Part]) -> tuple[float, ...]:
    """ε over the draw towards the server of each group of users, the sum over the parts. Users who
    are alike in one part may differ in another; none where all have the same noise, or the parts
    are of other users."""
    alike = not any(part.run.unequal for part in parts)
    if alike or parts[0].people or len({part.run.users for part in parts}) > 1:
        return ()
    each = [
        np.array(epsilons_by_group(part.released, part.against("server"), part.rounds, part.costs))
        for part in parts
    ]
    kinds = np.unique(np.stack([part.run.places for part in parts]), axis=1)
    return tuple(sum(one[kind] for one, kind in zip(each, kinds, strict=True)).tolist())


def _stated(part: Part, facts: Facts, several: bool) -> StatedPart:
    """One part, without the list of each user's group, which may be long."""
    released = part.released
    stored = StatedPart(replace(released, membership=()), part.rounds, part.name, part.costs)
    if several and no_guarantee(released) is None:
        known = adversaries(released, facts.colluders)
        each = {name: part.over_the_draw(who).epsilon for name, who in known.items()}
        stored = replace(stored, epsilons=each)
    if part.ledger is None:
        return stored
    times, users = np.unique(part.ledger.participations, return_counts=True)
    counts = dict(zip(times.tolist(), users.tolist(), strict=True))
    most = tuple(part.ledger.most_by_group().tolist())
    return replace(stored, most_often=most, participations=counts)


def _curve(laws: Laws) -> tuple[float, tuple[float, ...]]:
    """δ(ε) at a few values of ε, rounded up."""
    curve = TradeOff.of(laws, POINTS)
    deltas = tuple(float(digits_up(delta, 4)) for delta in curve.deltas.tolist())
    return float(curve.epsilons[-1]), deltas


def _said(code: str, holds: bool = True) -> Sentences:
    """What is said under this code, where it holds."""
    return ((code, SENTENCES[code]),) if holds else ()


def _outside(parts: Sequence[Part], facts: Facts) -> Sentences:
    """What no ε covers."""
    unit = parts[0].run.unit if parts else "record"
    large = large_delta(parts[0].run, total_delta(parts)) if parts else None
    steps = [step for step in facts.preparation if step.protection not in WITHIN]
    secure = bool(parts) and parts[0].run.secure is not None
    seen = [noise_seen(part.run, THIRD_PARTY) for part in parts]
    found = (
        *([("large-delta", large)] if large else ()),
        *_said("seed", facts.seeded),
        *_said("metrics"),
        *(("preparation", sentence_of(step, unit)) for step in steps),
        *(
            ("allowed", f"Released all the same (privacy.release: {what}).")
            for what in facts.allowed or ()
        ),
        *_said("tuning"),
        *_said("simulated-sums", secure and facts.held != "sites"),
        *_said("single-uploads", not secure and any(noise.theorem == "2" for noise in seen)),
        *_said("other-runs", bool(parts)),
    )
    return tuple(dict.fromkeys(found))


def _needs(parts: Sequence[Part], facts: Facts) -> Sentences:
    """What has to be true for the guarantees to hold."""
    return (
        *_said("unchanged"),
        *_said("blind"),
        *_said("unbroken", any(part.run.secure is not None for part in parts)),
        *_said("draw", facts.draw_given and all(part.ledger is None for part in parts)),
    )


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
