"""The bounds: each with a name, the adversary it holds against, its assumptions and its theorem.

>>> from dpscaffold.privacy import describe
>>> run = describe(rounds=400, local_steps=50, users=100, cohort_size=20,
...                records=4000, batch_sizes=800, noise=60, delta=2.5e-6)
>>> round(RANDOM_PARTICIPATION.epsilon(run), 2), round(PAPER_THIRD_PARTY.epsilon(run), 1)
(0.86, 12.9)
>>> AGGREGATE.applies(run)
'users keep a memory between rounds (control variates), which carries earlier noise'
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

from dpscaffold.privacy import laws
from dpscaffold.privacy.bound import PARTICIPANT, THIRD_PARTY, VIEWS, Bound, Kind
from dpscaffold.privacy.errors import PrivacyError
from dpscaffold.privacy.mechanism import Mechanism, Query

_DRAW = "participants are drawn uniformly, m of M, independently of the data and of all outputs"
_ALL = tuple(VIEWS)
_RECORDS: tuple[Kind, ...] = (("record", "fixed"), ("record", "poisson"))
#: Bounded sums may take the place of clipped gradients (docs/privacy-proofs.md, Bounded sums).
_WITH_SUMS: tuple[Query, ...] = ("gradients", "sums")
_USERS: tuple[Kind, ...] = (("user", "fixed"), ("user", "poisson"))

RANDOM_PARTICIPATION = Bound(
    name="random_participation",
    title="random participation (PLD)",
    views=_ALL,
    theorem=(
        "disjoint mixture at rate l of K adaptively composed steps, T times (docs/privacy.md, "
        "Theorem 1)"
    ),
    assumptions=(_DRAW, "users that decline stay in the pool"),
    reference="Balle, Barthe, Gaboardi 2018; Zhu, Dong, Wang 2022; Doroshenko et al. 2022",
    explanation=(
        "Even if it is revealed who takes part, a round shows nothing of a user with probability "
        "1 − l and K noised steps with probability l, so its privacy loss is 0 or that of K "
        "steps. The losses of the T rounds add, and their exact distribution, rounded up on a "
        "grid, gives ε."
    ),
    proved_for=(*_RECORDS, *_USERS),
    condition=laws.always,
    laws=laws.random_participation_laws,
    repeated=laws.repeated_laws,
    queries=_WITH_SUMS,
    unequal=True,
)

RANDOM_PARTICIPATION_RDP = Bound(
    name="random_participation_rdp",
    title="random participation (RDP)",
    views=_ALL,
    theorem="1/(α−1)·log(1 − l + l·exp((α−1)·K·ε_s(α))), T times (docs/privacy.md, Theorem 1)",
    assumptions=(_DRAW, "users that decline stay in the pool"),
    reference=(
        "Wang, Balle, Kasiviswanathan 2019; Mironov, Talwar, Zhang 2019; Canonne, Kamath, "
        "Steinke 2020"
    ),
    explanation=(
        "The same argument as random participation, with Rényi divergences in place of loss "
        "distributions. It is looser and serves as a cross-check."
    ),
    proved_for=(*_RECORDS, *_USERS),
    condition=laws.without_voids,
    value=laws.random_participation_rdp,
    queries=_WITH_SUMS,
    unequal=True,
)

#: The same with one law per direction, to compose several runs; never quoted for one run.
RANDOM_WORST = replace(
    RANDOM_PARTICIPATION,
    laws=laws.worst_participation_laws,
    repeated=laws.worst_repeated_laws,
)

_NOT_A_PARTICIPANT = "the adversary is not a participant and knows no participant's noise"

AGGREGATE = Bound(
    name="aggregate",
    title="aggregate (PLD)",
    views=(THIRD_PARTY,),
    theorem=(
        "multiplier √(Σ_j(σ_j·w_j/b_j)²)/(w_i/b_i), random participation (docs/privacy.md, "
        "Theorem 2)"
    ),
    assumptions=(
        _DRAW,
        "one local step, no memory",
        "every participant really adds its noise",
        _NOT_A_PARTICIPANT,
        "nothing that is computed from single uploads (largest_drift) is published",
    ),
    reference="docs/privacy.md, Theorem 2; Balle, Barthe, Gaboardi 2018; Zhu, Dong, Wang 2022",
    explanation=(
        "A third party sees only the sum of the uploads, where the noise of all participants "
        "hides each one. With one local step and no memory, the sum is one Gaussian query per "
        "round with that larger noise."
    ),
    proved_for=(*_RECORDS, *_USERS),
    condition=laws.aggregate_condition,
    laws=laws.aggregate_laws,
    queries=_WITH_SUMS,
    unequal=True,
)


@cache
def aggregate_among(colluders: int) -> Bound:
    """The aggregate as k colluding participants see it: all but their own noise hides a user.

    The multiplier loses the k largest (w_j/b_j)² among the others, so it is σ_g·√(m − k) for equal
    users. From k = m − 1 on nothing but a user's own noise is left, and the bound does not apply.

    >>> from dpscaffold.privacy import describe
    >>> run = describe(rounds=9, local_steps=1, users=8, cohort_size=8, records=50, batch_sizes=50,
    ...                noise=2.0, memory=False, one_sum=True)
    >>> AGGREGATE.epsilon(run) < aggregate_among(3).epsilon(run) < RANDOM_PARTICIPATION.epsilon(run)
    True
    """
    if colluders < 1:
        raise PrivacyError(
            "out-of-range",
            f"colluders={colluders} is nobody; give at least 1, or ask for the view third_party",
        )
    return Bound(
        name="aggregate_participant",
        title=f"aggregate against {colluders} participant{'s' * (colluders > 1)} (PLD)",
        views=(PARTICIPANT,),
        theorem=(
            f"multiplier √(Σ_j(σ_j·w_j/b_j)²)/(w_i/b_i) without the k = {colluders} largest terms "
            f"among the others, random participation (docs/privacy.md, Theorem 2)"
        ),
        assumptions=(
            _DRAW,
            "one local step, no memory",
            "every other participant really adds its noise",
            f"at most {colluders} participants pool what they know, and the server is not one",
            "nothing that is computed from single uploads (largest_drift) is published",
        ),
        reference=AGGREGATE.reference,
        explanation=(
            "Participants know their own uploads, noise included, and subtract them from the sum. "
            "What is left is one Gaussian query per round with the noise of the others."
        ),
        proved_for=(*_RECORDS, *_USERS),
        condition=partial(laws.collusion_condition, colluders=colluders),
        laws=partial(laws.aggregate_laws, colluders=colluders),
        queries=_WITH_SUMS,
        unequal=True,
    )


AGGREGATE_PARTICIPANT = aggregate_among(1)

USER_SAMPLING = Bound(
    name="user_sampling",
    title="user sampling (PLD)",
    views=(THIRD_PARTY,),
    theorem=(
        "amplification by sampling without replacement at rate l, the user being what is sampled"
    ),
    assumptions=(_DRAW, "no memory", "who took part is not revealed", _NOT_A_PARTICIPANT),
    reference=(
        "Balle, Barthe, Gaboardi 2018, Theorem 11; Wang, Balle, Kasiviswanathan 2019, Theorem 9"
    ),
    explanation=(
        "With a user as the unit, the sampled element is the protected one, so hiding who took "
        "part amplifies as for any sample without replacement. A participation is K Gaussian "
        "queries, that is one of multiplier σ_g/√K."
    ),
    proved_for=_USERS,
    condition=laws.user_sampling_condition,
    laws=laws.user_sampling_laws,
)

CAP = Bound(
    name="cap",
    title="every allowed participation (PLD)",
    views=_ALL,
    theorem="adaptive composition of min(T, max_participations)·K steps",
    assumptions=("none on selection or stopping: both may look at outputs",),
    reference="Balle, Barthe, Gaboardi 2018; Zhu, Dong, Wang 2022",
    explanation=(
        "A user takes part in at most every round, or as often as max_participations allows, "
        "whatever selection and stopping look at. So it has spent at most the composition of that "
        "many participations."
    ),
    proved_for=(*_RECORDS, *_USERS),
    condition=laws.always,
    laws=laws.cap_laws,
    repeated=laws.repeated_cap_laws,
    queries=_WITH_SUMS,
    unequal=True,
)

_SECURE = (
    "the server and at most k of the sites share what they know; the others keep their keys "
    "and add their noise",
    "one local step, no memory, uploads rounded after their noise was added in float64",
    "every attempt is recorded and uses a fresh batch, fresh noise and fresh masks",
    "computational: nobody breaks X25519, HKDF, ChaCha20 or Ed25519 (SIM-CDP, static corruption)",
)
_SECURE_REFERENCE = (
    "docs/privacy-proofs.md, Theorem 4; Mironov, Pandey, Reingold, Vadhan 2009; Zhu, Dong, Wang "
    "2022"
)
_SECURE_EXPLANATION = (
    "The server sees only the sum of a list's uploads, which holds the noise of all its honest "
    "members. Rounding after adding the noise changes nothing that could be measured."
)

SECURE_SUMS = Bound(
    name="secure_sums",
    title="secure sums (PLD)",
    views=_ALL,
    theorem=(
        "multiplier σ_g·√(m − k) for equal users, random participation, and every void attempt "
        "(docs/privacy-proofs.md, Theorem 4)"
    ),
    assumptions=(_DRAW, *_SECURE),
    reference=_SECURE_REFERENCE,
    explanation=_SECURE_EXPLANATION,
    proved_for=(*_RECORDS, *_USERS),
    condition=laws.secure_condition,
    laws=laws.secure_laws,
    repeated=laws.secure_repeated_laws,
    queries=_WITH_SUMS,
    unequal=True,
)

#: The same with one law per direction, to compose several runs; never quoted for one run.
SECURE_WORST = replace(SECURE_SUMS, laws=laws.secure_worst_laws, repeated=laws.secure_worst_laws)

SECURE_CAP = Bound(
    name="secure_cap",
    title="secure sums, every allowed attempt (PLD)",
    views=_ALL,
    theorem=(
        "adaptive composition of every attempt at multiplier σ_g·√(m − k) for equal users "
        "(docs/privacy-proofs.md, Theorem 4)"
    ),
    assumptions=("none on selection or stopping: both may look at outputs", *_SECURE),
    reference=_SECURE_REFERENCE,
    explanation=_SECURE_EXPLANATION,
    proved_for=(*_RECORDS, *_USERS),
    condition=laws.secure_condition,
    laws=laws.secure_cap_laws,
    repeated=laws.secure_cap_laws,
    queries=_WITH_SUMS,
    unequal=True,
)

LEDGER = Bound(
    name="ledger",
    title="ledger (PLD)",
    views=_ALL,
    theorem="adaptive composition of n_i·K steps, given who took part",
    assumptions=("selection and stopping never look at outputs or private metrics",),
    reference="Balle, Barthe, Gaboardi 2018; Zhu, Dong, Wang 2022",
    explanation=(
        "Given who took part, a record of a user that took part n_i times has spent the "
        "composition of n_i·K steps. The run reports the largest over users, and the distribution."
    ),
    proved_for=(*_RECORDS, *_USERS),
    condition=laws.needs_ledger,
    queries=_WITH_SUMS,
    unequal=True,
)

PAPER_THIRD_PARTY = Bound(
    name="paper_third_party",
    title="as published (RDP)",
    views=(THIRD_PARTY,),
    theorem=(
        "RDP of a step with σ_g·√(lM), K times, amplified at l, T times; not a theorem for "
        "every loss"
    ),
    assumptions=(
        "the noise of all users averages out over the local steps",
        "sampling users amplifies",
    ),
    reference="Noble, Bellet, Dieuleveut 2022, appendix on privacy, 'Implementation'",
    explanation=(
        "The number the paper prints, for comparison only: its proof takes for granted that "
        "sampling users amplifies a record's ε and that noise averages out over adaptive local "
        "steps. Both fail for some losses (docs/published-bound.md shows three): do not quote it "
        "as a guarantee."
    ),
    proved_for=(("record", "fixed"),),
    condition=laws.published_condition,
    value=laws.published,
)

#: All bounds by name, in the order in which a table shows them.
BOUNDS: dict[str, Bound] = {
    bound.name: bound
    for bound in (
        RANDOM_PARTICIPATION,
        RANDOM_PARTICIPATION_RDP,
        LEDGER,
        CAP,
        SECURE_SUMS,
        SECURE_CAP,
        AGGREGATE,
        AGGREGATE_PARTICIPANT,
        USER_SAMPLING,
        PAPER_THIRD_PARTY,
    )
}


def bound_named(name: str) -> Bound:
    """The bound of that name."""
    try:
        return BOUNDS[name]
    except KeyError:
        raise PrivacyError(
            "unknown-bound", f"bound={name!r} is unknown; give one of {', '.join(BOUNDS)}"
        ) from None


def bound_for(run: Mechanism, view: str, repeats: Sequence[int] = (), colluders: int = 1) -> Bound:
    """The tightest proved bound against an adversary: the one that is quoted and calibrated by.

    Plans and runs both use this function, so that nothing is calibrated by a bound that the run
    does not state. The choice does not depend on the noise: where they apply, user sampling is
    never above the aggregate (log(1 + (e^ε − 1)/l) ≥ ε), nor the aggregate above random
    participation (the sum contains at least a user's own noise).

    Args:
        run: The run.
        view: ``"server"``, ``"third_party"``, ``"participant"`` or ``"paper_third_party"``.
        repeats: How often rounds were run again with fresh noise.
        colluders: The number of participants who share what they know.

    >>> from dpscaffold.privacy import describe
    >>> run = describe(rounds=9, local_steps=1, users=8, cohort_size=4, records=50, batch_sizes=5,
    ...                noise=2.0, memory=False, one_sum=True)
    >>> [bound_for(run, view).name for view in ("server", "third_party", "participant")]
    ['random_participation', 'aggregate', 'aggregate_participant']
    """
    view = view.replace("-", "_")
    if view == PAPER_THIRD_PARTY.name:
        return PAPER_THIRD_PARTY
    if view not in VIEWS:
        raise PrivacyError(
            "unknown-view",
            f"view={view!r} is unknown; give server, third_party, participant or paper_third_party",
        )
    better: tuple[Bound, ...] = ()
    if run.secure is not None:
        covered = view != PARTICIPANT or among(run, colluders) <= run.secure.colluders
        held = covered and SECURE_SUMS.applies(run) is None
        return SECURE_SUMS if held else RANDOM_PARTICIPATION
    if view == THIRD_PARTY:
        better = (USER_SAMPLING, AGGREGATE)
    elif view == PARTICIPANT:
        better = (aggregate_among(among(run, colluders)),) if run.users > 1 else ()
    if repeats:  # none of these is proved for a round that was run twice
        better = ()
    return next((bound for bound in better if bound.applies(run) is None), RANDOM_PARTICIPATION)


def among(run: Mechanism, colluders: int) -> int:
    """``colluders`` as a number of users who can pool what they know and leave one to protect."""
    if not 1 <= colluders < max(2, run.users):
        raise PrivacyError(
            "out-of-range",
            f"colluders={colluders} of {run.users} users; give at least 1 and leave one to protect",
        )
    return colluders
