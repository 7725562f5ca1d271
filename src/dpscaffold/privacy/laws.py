"""The loss distributions that the bounds rest on, and when each bound applies."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from dpscaffold.privacy import renyi
from dpscaffold.privacy.aggregate import (
    group_rates,
    own_multipliers,
    own_steps,
    secure_factors,
    secure_steps,
    worst_steps,
)
from dpscaffold.privacy.bound import Laws
from dpscaffold.privacy.loss import LossDistribution
from dpscaffold.privacy.mechanism import Mechanism
from dpscaffold.privacy.queries import participation_losses, step_losses

#: s: the noise of every member of a secure sum is at least this many steps of the grid.
STEPS_OF_NOISE = 2.0**10
#: Rounding is accounted for models of at most this many parameters, and for ε up to this.
MOST_PARAMETERS, MOST_EPSILON = 2.0**40, 64.0

DRAW_KNOWN = "who takes part can be known: the seed that draws participants is stored with the run"


@lru_cache(maxsize=64)
def _round_laws(
    rate: float, noise: float, sampling: str, unit: str, steps: int, user_ratio: float
) -> Laws:
    """One round: the K-step loss with probability l, a loss of 0 otherwise."""
    return tuple(
        law.mixed(user_ratio) for law in participation_losses(rate, noise, sampling, unit, steps)
    )


def round_laws(run: Mechanism) -> Laws:
    """One round of random participation for every user that could be the worst."""
    numbers = (run.sampling, run.unit, run.local_steps, run.user_ratio)
    return tuple(law for step in own_steps(run) for law in _round_laws(*step, *numbers))


#: One step of a user: b_i/R_i (1 with a user as unit), and the multiplier of the noise that hides
#: it.
Step = tuple[float, float]


@lru_cache(maxsize=64)
def group_steps(run: Mechanism) -> tuple[Step, ...]:
    """The step of each group's users as the server sees it: with their own noise, or with that of a
    secure sum where it is proved."""
    noise = own_multipliers(run)
    if run.secure is not None and secure_condition(run) is None:
        noise = run.noise * secure_factors(run)
    return tuple(zip(group_rates(run).tolist(), noise.tolist(), strict=True))


def worst_step(steps: Iterable[Step]) -> Step:
    """A step that hides no user better than any of these: the largest rate with the least noise.
    By the argument at :attr:`Mechanism.worst` its loss dominates that of each of them."""
    rates, noises = zip(*steps, strict=True)
    return max(rates), min(noises)


def participations_laws(run: Mechanism, participations: int, step: Step | None = None) -> Laws:
    """n participations of K steps each: what a user who took part n times has spent towards the
    server. With secure sums the noise of other members counts, where that is proved. Without a
    ``step`` one law for each direction, which holds for every user."""
    steps = group_steps(run)
    step = step or worst_step([steps[g] for g in run.protects or range(len(steps))])
    once = participation_losses(*step, run.sampling, run.unit, run.local_steps)
    laws = [law.power(participations) for law in once]
    if run.secure is None or secure_condition(run) is not None:
        return tuple(laws)
    return _rounded(run, participations, laws)


def _own_participations(run: Mechanism, participations: int) -> Laws:
    """n participations that are hidden by nothing but a user's own noise."""
    numbers = (run.sampling, run.unit, run.local_steps)
    return tuple(
        law.power(participations)
        for step in own_steps(run)
        for law in participation_losses(*step, *numbers)
    )


def random_participation_laws(run: Mechanism, rounds: int) -> Laws:
    """T rounds of random participation, and every void attempt."""
    laws = tuple(law.power(rounds) for law in round_laws(run))
    return _both(laws, _own_participations(run, run.voids)) if run.voids else laws


def alike(run: Mechanism) -> Mechanism:
    """The run in which every user has the smallest σ_i of all: no user is hidden better there."""
    groups = tuple(replace(group, louder=1.0) for group in run.groups)
    return replace(run, groups=groups, noise=run.least_noise)


def worst_participation_laws(run: Mechanism, rounds: int) -> Laws:
    """:func:`random_participation_laws` with one law per direction, which is at least that of every
    user: users with unequal noise cannot be composed over several runs otherwise."""
    return random_participation_laws(alike(run), rounds)


def worst_repeated_laws(run: Mechanism, rounds: int, repeats: tuple[int, ...]) -> Laws:
    """:func:`repeated_laws` with one law per direction."""
    return repeated_laws(alike(run), rounds, repeats)


def _both(ones: Laws, others: Laws) -> Laws:
    """Two sequences of releases, by direction. Powers of one step are on grids whose steps are
    multiples of each other."""

    def composed(one: LossDistribution, other: LossDistribution) -> LossDistribution:
        ratio = other.interval / one.interval
        return one.coarser(round(ratio)).compose(other.coarser(round(1 / ratio)))

    return tuple(composed(*pair) for pair in zip(ones, others, strict=True))


def repeated_laws(run: Mechanism, rounds: int, repeats: tuple[int, ...]) -> Laws:
    """A round run 1 + r times on one draw is a loss of (1 + r)·K steps with probability l, else
    0."""
    if run.voids or run.secure is not None:  # an attempt may be voided because of who took part
        extra = max(run.voids, sum(repeats))
        return random_participation_laws(replace(run, voids=extra), rounds)
    laws, numbers = [], (run.sampling, run.unit, run.local_steps)
    once = [law for step in own_steps(run) for law in participation_losses(*step, *numbers)]
    for law in once:
        total = law.mixed(run.user_ratio).power(max(0, rounds - len(repeats)))
        for extra in set(repeats):
            # One grid for all: powers of the same step only differ in interval if one had to be
            # coarsened.
            more = law.power(1 + extra).mixed(run.user_ratio).power(repeats.count(extra))
            (total,) = _both((total,), (more,))
        laws.append(total)
    return tuple(laws)


def repeated_cap_laws(run: Mechanism, rounds: int, repeats: tuple[int, ...]) -> Laws:
    """Every allowed participation, and every round that was run again."""
    return _own_participations(run, allowed_attempts(run, rounds, sum(repeats)))


def cap_laws(run: Mechanism, rounds: int) -> Laws:
    """Every allowed participation."""
    return _own_participations(run, allowed_attempts(run, rounds))


def allowed_attempts(run: Mechanism, rounds: int, again: int = 0) -> int:
    """The most attempts that a user takes part in, void ones included; ``again`` is how many
    rounds were run once more."""
    return min(rounds, run.max_participations or rounds) + max(run.voids, again)


def random_participation_rdp(run: Mechanism, rounds: int, gaussians: tuple[float, ...]) -> float:
    """ε by Rényi divergences, with further Gaussian mechanisms of these multipliers."""
    return renyi.random_participation(run, rounds, gaussians)


def aggregate_laws(run: Mechanism, rounds: int, colluders: int = 0) -> Laws:
    """The worst of the groups, each with the smallest noise its set of companions may have.

    The noise of ``colluders`` of the companions is known to the adversary and does not count.
    Where several could be the worst, their laws are all returned and the largest ε is taken.
    """
    laws: list[LossDistribution] = []
    for rate, noise in worst_steps(run, colluders):
        round_ = _round_laws(rate, noise, run.sampling, run.unit, 1, run.user_ratio)
        laws.extend(law.power(rounds) for law in round_)
    return tuple(laws)


def aggregate_condition(run: Mechanism) -> str | None:
    """Why the noise of the other participants may not be counted, or None."""
    if run.secure is not None:
        return "uploads are rounded and added as integers, which the bound 'secure_sums' covers"
    if reason := _one_step_condition(run):
        return reason
    if run.declines is not None:
        return f"a participant may decline ({run.declines}), and then adds no noise to the sum"
    return None


def _one_step_condition(run: Mechanism) -> str | None:
    """Why a round is not one sum of Gaussian queries, or None."""
    if run.memory:
        return "users keep a memory between rounds (control variates), which carries earlier noise"
    if run.local_steps > 1:
        return (
            f"local_steps={run.local_steps}: a user's second gradient is taken at a point that "
            f"contains its own first noise; it holds for 1 local step"
        )
    if run.aggregation != "mean":
        return (
            f"aggregation={run.aggregation!r}: the server scales large uploads down, so that a "
            f"round is not one sum of Gaussian queries; give aggregation='mean'"
        )
    if not run.one_sum:
        return (
            "uploads are not known to be one vector each that is linear in the noised gradient; "
            "two sums of them, or one of anything else, may show a single user's noise"
        )
    return None


def collusion_condition(run: Mechanism, colluders: int) -> str | None:
    """Why the noise of the other participants hides nobody from k colluding ones, or None."""
    if colluders >= run.cohort_size - 1:
        return (
            f"{colluders} colluding participants may be all the companions of a user in a round "
            f"of {run.cohort_size}, and then no noise but its own hides it"
        )
    return aggregate_condition(run)


def secure_laws(run: Mechanism, rounds: int) -> Laws:
    """T rounds of random participation and every void attempt, seen through secure sums."""
    laws: list[LossDistribution] = []
    for rate, noise in secure_steps(run):
        once = participation_losses(rate, noise, run.sampling, run.unit, 1)
        drawn = tuple(law.mixed(run.user_ratio).power(rounds) for law in once)
        void = tuple(law.power(run.voids) for law in once)
        laws.extend(_both(drawn, void) if run.voids else drawn)
    return _rounded(run, rounds + run.voids, laws)


def secure_repeated_laws(run: Mechanism, rounds: int, repeats: tuple[int, ...]) -> Laws:
    """The same where rounds were run again: an attempt may be voided because of who took part, so
    each counts as a further participation."""
    return secure_laws(replace(run, voids=max(run.voids, sum(repeats))), rounds)


def secure_cap_laws(run: Mechanism, rounds: int, repeats: tuple[int, ...] = ()) -> Laws:
    """Every attempt that a user may take part in, seen through secure sums."""
    attempts = allowed_attempts(run, rounds, sum(repeats))
    laws: list[LossDistribution] = []
    for rate, noise in secure_steps(run):
        once = participation_losses(rate, noise, run.sampling, run.unit, 1)
        laws.extend(law.power(attempts) for law in once)
    return _rounded(run, attempts, laws)


def least_hidden(run: Mechanism) -> Mechanism:
    """A run without secure sums that hides no user better than this run's sums hide any: the
    largest rate of all users with the smallest noise that the other members leave one of them."""
    noise = run.noise * float(secure_factors(run).min())
    return replace(alike(run), noise=noise, secure=None)


def secure_worst_laws(run: Mechanism, rounds: int, repeats: tuple[int, ...] = ()) -> Laws:
    """:func:`secure_laws` with one law per direction, which is at least that of every user. Laws of
    several runs can be composed direction by direction only in this form."""
    voids = max(run.voids, sum(repeats))
    hidden = replace(least_hidden(run), voids=voids)
    return _rounded(run, rounds + voids, list(random_participation_laws(hidden, rounds)))


def rounding_cost(members: int, attempts: int) -> float:
    """What rounding adds to δ(ε), for every ε up to 64 and up to 2⁴⁰ parameters.

    By the Lemma of docs/privacy-proofs.md a coordinate's law is changed by factors within 1 ± η,
    where log η < log(2(h − 1)) + log 2 − 2π²s²/h. Over n attempts and P parameters δ(ε) grows by
    at most 2nPη(1 + e^ε), as long as nPη is small.

    >>> rounding_cost(members=100, attempts=400)
    0.0
    """
    log_eta = math.log(4 * max(1, members - 1)) - 2 * math.pi**2 * STEPS_OF_NOISE**2 / members
    count = math.log(2 * max(1, attempts) * MOST_PARAMETERS) + MOST_EPSILON + 1
    return math.exp(min(0.0, log_eta + count))


def _rounded(run: Mechanism, attempts: int, laws: list[LossDistribution]) -> Laws:
    """The laws with what rounding costs, counted as an infinite loss."""
    cost = rounding_cost(run.cohort_size, attempts)
    return tuple(replace(law, infinite=min(1.0, law.infinite + cost)) for law in laws)


def secure_condition(run: Mechanism) -> str | None:
    """Why secure sums are not proved to hide this run's uploads, or None."""
    if run.secure is None:
        return "the server sees every upload; it is for runs with secure sums"
    return _one_step_condition(run)


def user_sampling_laws(run: Mechanism, rounds: int) -> Laws:
    """T rounds in which the protected user is itself what is sampled."""
    noise = run.noise / math.sqrt(run.local_steps)
    if _one_step_condition(run) is None:
        noise *= math.sqrt(run.cohort_size)  # only the sum of the m noises is seen
    return tuple(law.power(rounds) for law in step_losses(run.user_ratio, noise, "fixed"))


def user_sampling_condition(run: Mechanism) -> str | None:
    """Why sampling users is not a gain here, or None."""
    if run.secure is not None or run.voids:
        return "it is not proved for secure sums"
    if run.memory:
        return (
            "users keep a memory between rounds (control variates), so the rounds do not draw "
            "users afresh"
        )
    if run.declines is not None:
        return f"whether a user declines depends on its earlier rounds ({run.declines})"
    if not run.hidden_draw:
        return DRAW_KNOWN
    return None


def published(run: Mechanism, rounds: int, gaussians: tuple[float, ...]) -> float:
    """ε as the paper computes it."""
    noise = run.noise * math.sqrt(run.cohort_size)
    return renyi.published(
        run.worst.rate, noise, run.local_steps, run.user_ratio, rounds, run.delta, gaussians
    )


def always(run: Mechanism) -> str | None:
    """It asks nothing besides the kinds of runs that it is proved for."""
    return None


def without_voids(run: Mechanism) -> str | None:
    """It counts rounds, and no attempts that ended without a result."""
    return f"it does not count the {run.voids} void attempts" if run.voids else None


def published_condition(run: Mechanism) -> str | None:
    """It takes for granted that the noise of all users is averaged."""
    if run.aggregation != "mean":
        return f"aggregation={run.aggregation!r} is not the mean that the published formula is for"
    return without_voids(run)


def needs_ledger(run: Mechanism) -> str | None:
    """It is not a function of the plan."""
    return "it reads who took part; ask the run's Ledger for its largest() or of(user)"
