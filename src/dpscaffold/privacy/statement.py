"""Builds the privacy statement of a plan or a run: what is promised, to whom, by which theorem."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from dpscaffold.privacy.bound import THIRD_PARTY, no_guarantee, views_of
from dpscaffold.privacy.costs import Cost
from dpscaffold.privacy.human import GROUPS
from dpscaffold.privacy.ledger import Ledger
from dpscaffold.privacy.mechanism import Mechanism
from dpscaffold.privacy.preparation import Preparation, left_open, sentence_of
from dpscaffold.privacy.quote import with_quote
from dpscaffold.privacy.released import Released
from dpscaffold.privacy.selected import WinnerGuarantee
from dpscaffold.privacy.showing import digits_up, round_up
from dpscaffold.privacy.statement_types import (
    CostEntry,
    MechanismSummary,
    PreparationStep,
    QuotedEpsilon,
    RateRange,
    SecureSummary,
    Statement,
    ViewGuarantee,
)

NO_NOISE = "no noise is added (noise=0), so epsilon is infinite"
SINGLE_UPLOADS = (
    "`largest_drift`, `largest_user_control` and every other `largest_user_` number are computed "
    "from single uploads: they belong to the server's view, whose epsilon covers them, and are "
    "outside Theorem 2. Whoever is given them counts as the server."
)
TUNING = "Hyperparameters tuned on private records."
TUNING_OF_A_RELEASE = (
    "Tuning: every run on these records whose results were looked at to choose this plan has spent "
    "privacy of its own, which is not in these numbers. Put them together with `dpscaffold privacy "
    "RUN RUN …`, or choose the plan on public data."
)
SIMULATED_SUMS = (
    "Simulated secure sums: one process adds the uploads and sees each of them. Only a deployed "
    "federation hides them from the server."
)
NOT_PRIVATE = "no guarantee: the run is not private (no clipping, no noise)"


def statement(
    run: Mechanism | None,
    ledger: Ledger | None = None,
    preparation: Sequence[Preparation] = (),
    seed_public: bool = False,
    draw_given: bool = False,
    allowed: Sequence[str] | None = None,
    extra_costs: Sequence[Cost] = (),
    rounds: int | None = None,
    groups: Sequence[int] = GROUPS,
    colluders: int = 1,
    planned: Sequence[str] = (),
) -> Statement:
    """Everything that may be said about a run's privacy.

    ``run=None`` is a run without privacy. ``ledger`` adds what was spent given who took part,
    next to the bound over the draw, never in its place. ``preparation`` are the steps that made the
    features; those whose ``protection`` is ``"unprotected"`` or ``"drafted"`` are outside the
    guarantee. ``seed_public`` says that the seed of noise and draw is stored next to the results:
    such a run is a simulation. ``draw_given`` says that the seed of the draw was somebody's choice.
    ``allowed`` is the exceptions from a release's rules, None where nothing is released.
    ``extra_costs`` are
    private mechanisms on the same records, part of every ε that is stated. ``rounds`` defaults to
    the recorded ones with a ledger, else to the planned. ``groups`` are the numbers of records of
    one person to look at together, ``colluders`` how many participants pool what they know in the
    view ``participant``. ``planned`` names the keys of the configuration that were chosen on a
    public surrogate instead of private records.

    >>> from dpscaffold.privacy import describe
    >>> run = describe(rounds=400, local_steps=50, users=100, cohort_size=20,
    ...                records=4000, batch_sizes=800, noise=60, delta=2.5e-6)
    >>> said = statement(run)
    >>> round(said.server.epsilon, 2), said.server.bound
    (0.86, 'random_participation')
    """
    steps = _prepared(preparation, "record" if run is None else run.unit)
    if run is None:
        return replace(
            _unprotected(NOT_PRIVATE),
            preprocessing=tuple(step.sentence for step in steps),
            preparation=steps,
            outside=_outside(preparation, False, ledger, None, planned),
        )
    if seed_public:  # it is the seed of the draw too
        run = replace(run, hidden_draw=False)
    costs = tuple(extra_costs)
    ledger = ledger.charged(costs) if ledger is not None else None
    rounds = rounds if rounds is not None else (ledger.rounds if ledger else run.rounds)
    released = Released(run, rounds, ledger, costs, colluders)
    reason = no_guarantee(run) or (NO_NOISE if run.noise == 0.0 else None)
    note = large_delta(run)
    outside = [*_of_uploads(run), *_outside(preparation, seed_public, ledger, allowed, planned)]
    said = replace(
        _unprotected(reason) if reason else released.guaranteed(tuple(groups), seed_public),
        simulated=seed_public,
        delta=run.delta,
        delta_note=note,
        rounds=rounds,
        mechanism=_mechanism(run),
        views=views_of(run),
        bounds=released.by_bound(reason),
        extra_costs=tuple(CostEntry(c.name, c.noise, c.epsilon, c.delta) for c in costs),
        preprocessing=tuple(step.sentence for step in steps),
        preparation=steps,
        tuning=chosen_in_public(planned) if planned else None,
        outside=(*([note] if note else []), *outside),
        run=run,
    )
    return said if reason else with_quote(said, run, [cost.name for cost in costs], draw_given)


def winner_statement(
    run: Mechanism,
    given: WinnerGuarantee,
    preparation: Sequence[Preparation],
    outside: Sequence[str],
) -> Statement:
    """The statement of the winner of a private tuning, for whoever is given the winner alone.

    ``run`` is the winner's mechanism; ``given`` is what
    :meth:`~dpscaffold.privacy.selected.SelectionCost.to_third_parties` says.
    """
    reason = None if math.isfinite(given.epsilon) else "the trials together have no finite epsilon"
    epsilon = None if reason else given.epsilon
    not_covered = "it saw every trial and not the winner alone: this statement does not cover it"
    steps = _prepared(preparation, run.unit)
    each = "user" if run.unit == "user" else "record"
    note = large_delta(replace(run, delta=given.delta))
    return replace(
        _unprotected(not_covered),
        guarantee=reason is None,
        reason=reason,
        delta=given.delta,
        delta_note=note,
        rounds=run.rounds,
        mechanism=_mechanism(run),
        views={THIRD_PARTY: given.adversary},
        third_party=ViewGuarantee(epsilon, bound="selection", theorem=given.method),
        quoted=QuotedEpsilon(epsilon=epsilon, bound="selection", towards=THIRD_PARTY),
        preprocessing=tuple(step.sentence for step in steps),
        preparation=steps,
        outside=(
            *([note] if note else []),
            "Metrics computed on private records without noise, if they are published.",
            "How many trials there were, their scores and how long they took.",
            *outside,
        ),
        run=run,
        quote=f"No guarantee: {reason}."
        if reason
        else f"Each {each} is protected with epsilon = {round_up(given.epsilon)} at delta = "
        f"{digits_up(given.delta)} towards a third party who is given the winner of a private "
        f"tuning alone ({run.neighbours}).",
    )


#: What a whole plan chooses; of less than this something else was settled otherwise.
WHOLE_PLAN = frozenset({"algorithm", "plan", "privacy.clip"})


def chosen_in_public(planned: Sequence[str]) -> str:
    """What is said of keys that were chosen on a public surrogate, and of those that were not.

    >>> "other" in chosen_in_public(["plan", "algorithm", "privacy.clip"])
    False
    >>> chosen_in_public(["plan.learning_rate"]).split("; ")[2]
    'other hyperparameters, if they were tuned on private records, are outside the guarantee.'
    """
    said = (
        f"{', '.join(planned)}: chosen from public facts, by a formula or on a public surrogate; "
        f"no record was read for it, and no privacy was spent on it"
    )
    if set(planned) >= WHOLE_PLAN:
        return f"{said}."
    return (
        f"{said}; other hyperparameters, if they were tuned on private records, are outside the "
        f"guarantee."
    )


def large_delta(run: Mechanism) -> str | None:
    """What to say of a δ from 1/n up, n being how many are protected; None below.

    >>> from dpscaffold.privacy import describe
    >>> plan = dict(rounds=4, local_steps=5, users=10, cohort_size=2, records=40, batch_sizes=8)
    >>> large_delta(describe(**plan, noise=6)), "1/400" in large_delta(
    ...     describe(**plan, noise=6, delta="1/records"))
    (None, True)
    """
    if run.delta * run.protected < 1 - 1e-9:
        return None
    what = "user" if run.unit == "user" else "record"
    return (
        f"delta = {run.delta:.3g} is not below 1/{run.protected}, one over the number of {what}s: "
        f"a mechanism that publishes one {what} at random in the clear has such a delta, so quote "
        f"epsilon at a smaller one, 1/{10 * run.protected} or less."
    )


def uncovered(reason: str) -> Statement:
    """The statement of a model that no guarantee covers, for this reason."""
    return _unprotected(reason.rstrip("."))


def _unprotected(reason: str) -> Statement:
    """A statement without any guarantee, for this reason."""
    nothing = ViewGuarantee(reason=reason)
    return Statement(
        simulated=False,
        guarantee=False,
        reason=reason,
        server=nothing,
        third_party=nothing,
        participant=nothing,
        paper_third_party=nothing,
        quote=reason[0].upper() + reason[1:] + ".",
    )


def _of_uploads(run: Mechanism) -> list[str]:
    """What is said of single uploads; a deployed site may always stay away."""
    if run.secure is None:
        return [SINGLE_UPLOADS]
    return [SIMULATED_SUMS] if run.may_decline is None else []


#: What a clipped mean is, and why it costs nothing.
CLIPPED = (
    "moves longer than the median of their round are scaled down to it before they are averaged; "
    "this is computed from uploads alone, so by post-processing it costs no epsilon"
)


def _mechanism(run: Mechanism) -> MechanismSummary:
    """What is released, in words and numbers."""
    # Of a whole user not even the size may be revealed, and no rate plays a part.
    rates = sorted(group.rate for group in run.groups) if run.unit == "record" else None
    scale = "2C·σ_g" if run.unit == "user" else "2C·σ_g/b"
    louder = [group.louder for group in run.groups]
    terms, secure = run.secure, None
    if terms is not None:
        secure = SecureSummary(terms.colluders, terms.least, run.voids)
    return MechanismSummary(
        unit=run.unit,
        neighbours=run.neighbours,
        relation=run.relation,
        sampling={"fixed": "batches of fixed size", "poisson": "Poisson batches"}[run.sampling],
        rate=RateRange(rates[0], rates[-1]) if rates else None,
        clip=run.clip,
        noise=run.noise,
        noise_scale=f"standard deviation {scale} on the batch mean of clipped gradients",
        noise_range=RateRange(run.noise, run.noise * max(louder)) if run.unequal else None,
        rounds=run.rounds,
        local_steps=run.local_steps,
        users=run.users,
        participants=run.cohort_size,
        memory=run.memory,
        weighting=run.weighting,
        max_participations=run.max_participations,
        may_decline=run.declines,
        secure=secure,
        aggregation=None if run.aggregation == "mean" else CLIPPED,
    )


def _prepared(preparation: Sequence[Preparation], unit: str) -> tuple[PreparationStep, ...]:
    """How the records were prepared, each step with its protection."""
    return tuple(PreparationStep(sentence_of(step, unit), step.protection) for step in preparation)


def _outside(
    preparation: Sequence[Preparation],
    seed_public: bool,
    ledger: Ledger | None,
    allowed: Sequence[str] | None = None,
    planned: Sequence[str] = (),
) -> tuple[str, ...]:
    """What no bound covers."""
    # A release says it unless the whole plan was chosen in public: the rest may rest on other runs.
    tuned = not planned if allowed is None else not set(planned) >= WHOLE_PLAN
    outside = [
        "Metrics computed on private records (accuracy, losses, dissimilarity), if they are "
        "published.",
        *([TUNING if allowed is None else TUNING_OF_A_RELEASE] if tuned else []),
        *left_open(preparation),
    ]
    outside += [f"Released all the same (privacy.allow: {what})." for what in allowed or ()]
    if seed_public:
        outside.append(
            "The noise is derived from a seed stored in the run folder: anyone holding the seed "
            "can remove the noise. Publish results of a simulation, not its seed."
        )
    if ledger is not None:
        outside.append(
            "Stopping or selecting participants by outputs or private metrics; if that happened, "
            "quote the bound 'cap' instead of the ledger, and the planned number of rounds "
            "instead of those run."
        )
    return tuple(outside)
