"""The loss distributions that the bounds rest on, and when each bound applies."""

from __future__ import annotations

import math
from functools import lru_cache

from dpscaffold.privacy import renyi
from dpscaffold.privacy.aggregate import worst_steps
from dpscaffold.privacy.bound import Laws
from dpscaffold.privacy.loss import LossDistribution
from dpscaffold.privacy.mechanism import Group, Mechanism
from dpscaffold.privacy.queries import participation_losses, step_losses

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
    """One round of random participation for the worst group of users."""
    rate = run.worst.rate if run.unit == "record" else 1.0
    return _round_laws(rate, run.noise, run.sampling, run.unit, run.local_steps, run.user_ratio)


def participations_laws(run: Mechanism, participations: int, group: Group | None = None) -> Laws:
    """n participations of K steps each: what a user who took part n times has spent."""
    rate = (group or run.worst).rate if run.unit == "record" else 1.0
    laws = participation_losses(rate, run.noise, run.sampling, run.unit, run.local_steps)
    return tuple(law.power(participations) for law in laws)


def random_participation_laws(run: Mechanism, rounds: int) -> Laws:
    """T rounds of random participation."""
    return tuple(law.power(rounds) for law in round_laws(run))


def repeated_laws(run: Mechanism, rounds: int, repeats: tuple[int, ...]) -> Laws:
    """A round run 1 + r times on one draw is a loss of (1 + r)·K steps with probability l, else
    0."""
    laws = []
    rate = run.worst.rate if run.unit == "record" else 1.0
    once = participation_losses(rate, run.noise, run.sampling, run.unit, run.local_steps)
    for law in once:
        total = law.mixed(run.user_ratio).power(max(0, rounds - len(repeats)))
        for extra in set(repeats):
            # One grid for all: powers of the same step only differ in interval if one had to be
            # coarsened.
            more = law.power(1 + extra).mixed(run.user_ratio).power(repeats.count(extra))
            ratio = round(more.interval / total.interval)
            total = total.coarser(ratio).compose(
                more.coarser(round(total.interval / more.interval))
            )
        laws.append(total)
    return tuple(laws)


def repeated_cap_laws(run: Mechanism, rounds: int, repeats: tuple[int, ...]) -> Laws:
    """Every allowed participation, and every round that was run again."""
    return participations_laws(run, min(rounds, run.max_participations or rounds) + sum(repeats))


def cap_laws(run: Mechanism, rounds: int) -> Laws:
    """Every allowed participation."""
    return participations_laws(run, min(rounds, run.max_participations or rounds))


def random_participation_rdp(run: Mechanism, rounds: int, gaussians: tuple[float, ...]) -> float:
    """ε by Rényi divergences, with further Gaussian mechanisms of these multipliers."""
    return renyi.random_participation(
        run.participation(), run.user_ratio, rounds, run.delta, gaussians
    )


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
    if run.memory:
        return "users keep a memory between rounds (control variates), which carries earlier noise"
    if run.local_steps > 1:
        return (
            f"local_steps={run.local_steps}: a user's second gradient is taken at a point that "
            f"contains its own first noise; it holds for 1 local step"
        )
    if not run.one_sum:
        return (
            "uploads are not known to be one vector each that is linear in the noised gradient; "
            "two sums of them, or one of anything else, may show a single user's noise"
        )
    if run.declines is not None:
        return f"a participant may decline ({run.declines}), and then adds no noise to the sum"
    return None


def collusion_condition(run: Mechanism, colluders: int) -> str | None:
    """Why the noise of the other participants hides nobody from k colluding ones, or None."""
    if colluders >= run.cohort_size - 1:
        return (
            f"{colluders} colluding participants may be all the companions of a user in a round "
            f"of {run.cohort_size}, and then no noise but its own hides it"
        )
    return aggregate_condition(run)


def user_sampling_laws(run: Mechanism, rounds: int) -> Laws:
    """T rounds in which the protected user is itself what is sampled."""
    noise = run.noise / math.sqrt(run.local_steps)
    if run.local_steps == 1 and run.one_sum:
        noise *= math.sqrt(run.cohort_size)  # only the sum of the m noises is seen
    return tuple(law.power(rounds) for law in step_losses(run.user_ratio, noise, "fixed"))


def user_sampling_condition(run: Mechanism) -> str | None:
    """Why sampling users is not a gain here, or None."""
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


def needs_ledger(run: Mechanism) -> str | None:
    """It is not a function of the plan."""
    return "it reads who took part; ask the run's Ledger for its largest() or of(user)"
