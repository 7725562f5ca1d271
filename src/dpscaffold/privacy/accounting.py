"""ε of a run: the noise that hides a record, as often as it was used.

Over the random draw of participants, T rounds cost what Theorem 1 says: a round shows nothing of a
user with probability 1 − m/M, and K noised steps otherwise. Given that a user took part n times,
its records have spent n·K adaptively composed steps; so has everybody in the worst case (the cap),
whatever selection and stopping look at.

>>> from dpscaffold.privacy import SERVER, describe
>>> run = describe(rounds=400, local_steps=50, users=100, cohort_size=20,
...                records=4000, batch_sizes=800, noise=60, delta=2.5e-6)
>>> round(epsilon(run, SERVER), 2), round(epsilon(run, SERVER, times=80), 2)
(0.86, 0.84)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from dpscaffold.errors import BadInput
from dpscaffold.privacy.adversary import ALONE, Adversary, adversaries, no_guarantee, noise_seen
from dpscaffold.privacy.loss import Loss, participation_losses
from dpscaffold.privacy.mechanism import Mechanism
from dpscaffold.privacy.preparation import Cost, with_costs

#: The loss in each direction of a neighbouring pair: one where they are the same.
Laws = tuple[Loss, ...]
#: What hides a record in one local step: b_i/R_i (1 with a user as unit) and the noise multiplier.
Step = tuple[float, float]

#: At most this many steps are evaluated for one ε, and this many for the ε of each user; beyond,
#: neighbours are merged, to the worse of both.
MOST_STEPS, MOST_RATES = 16, 48

#: The noise of every member of a secure sum is at least this many steps of the grid.
STEPS_OF_NOISE = 2.0**10
#: Rounding is accounted for models of at most this many parameters, and for ε up to this.
MOST_PARAMETERS, MOST_EPSILON = 2.0**40, 64.0


@lru_cache(maxsize=256)
def group_steps(run: Mechanism, who: Adversary) -> tuple[Step, ...]:
    """The step of each group's users, as an adversary sees it."""
    rates = [1.0 if run.unit == "user" else group.rate for group in run.groups]
    return tuple(zip(rates, noise_seen(run, who).multipliers.tolist(), strict=True))


def worst_step(steps: Iterable[Step]) -> Step:
    """A step that hides no user better than any of these: the largest rate with the least noise.

    δ(ε) of one step is convex in the rate and smallest at rate 0, hence never falls with it; the
    step with the larger rate dominates, and domination survives adaptive composition and a
    data-independent coin (Zhu, Dong, Wang 2022).
    """
    rates, noises = zip(*steps, strict=True)
    return max(rates), min(noises)


def unbeaten(often: Mapping[Step, int]) -> list[tuple[Step, int]]:
    """Those of these steps, and how often each was taken, that no other exceeds in rate and in
    count with no more noise: one of them has the largest ε.

    >>> unbeaten({(0.2, 3.0): 1, (0.1, 3.0): 1, (0.1, 4.0): 2})
    [((0.2, 3.0), 1), ((0.1, 4.0), 2)]
    """
    order = sorted(often.items(), key=lambda item: (-item[0][0], item[0][1], -item[1]))
    found: list[tuple[Step, int]] = []
    least: dict[int, float] = {}  # the least noise by count; rates fall, so it is of one as large
    for (rate, noise), count in order:
        if not any(times >= count and other <= noise for times, other in least.items()):
            found.append(((rate, noise), count))
            least[count] = noise
    return found


def _front(steps: Iterable[Step]) -> list[Step]:
    """The steps that no other one exceeds, at most a few: one of them is the worst user's."""
    front = [step for step, _ in unbeaten(dict.fromkeys(steps, 1))]
    size = math.ceil(len(front) / MOST_STEPS)
    return [worst_step(front[k : k + size]) for k in range(0, len(front), size)]


def rounded_steps(steps: Sequence[Step]) -> tuple[Step, ...]:
    """One step for each of these, in order; beyond :data:`MOST_RATES` distinct ones, of a few
    together the one that hides no user better than any of them.

    >>> rounded_steps([(0.2, 3.0), (0.1, 3.0)])
    ((0.2, 3.0), (0.1, 3.0))
    """
    distinct = sorted(set(steps), key=lambda step: (step[1], step[0]))
    if len(distinct) <= MOST_RATES:
        return tuple(steps)
    found: dict[Step, Step] = {}
    for part in np.array_split(np.arange(len(distinct)), MOST_RATES):
        members = [distinct[k] for k in part]
        found |= dict.fromkeys(members, worst_step(members))
    return tuple(found[step] for step in steps)


def step_laws(
    run: Mechanism,
    who: Adversary,
    step: Step,
    rounds: int | None = None,
    times: int | None = None,
    costs: tuple[Cost, ...] = (),
) -> Laws:
    """The loss of a record of a user whose step is hidden so: over the draw of this many rounds, or
    given that the user took part this many ``times``, extra attempts included; with what else read
    the records (``costs``), as the adversary sees it. Refused where nothing is guaranteed."""
    check_guaranteed(run)
    kind = (run.sampling, run.unit, run.local_steps)
    if times is not None:
        drawn, certain = 0, times
    else:
        drawn, certain = run.rounds if rounds is None else rounds, run.extra
    laws = _composed(step, kind, run.user_ratio, drawn, certain)
    if run.secure is not None and noise_seen(run, who).theorem == "4":
        # What rounding may tell counts as an infinite loss.
        lost = rounding_cost(run.cohort_size, drawn + certain)
        laws = tuple(replace(law, infinite=min(1.0, law.infinite + lost)) for law in laws)
    if who == ALONE:  # the noise of other sites hides no cost
        costs = tuple(cost.if_others_collude for cost in costs)
    return tuple(with_costs(law, costs) for law in laws)


@lru_cache(maxsize=256)
def _composed(
    step: Step, kind: tuple[str, str, int], user_ratio: float, drawn: int, certain: int
) -> Laws:
    """The loss of ``drawn`` rounds, in each of which a user takes part with probability l, and of
    ``certain`` participations besides."""
    once = participation_losses(*step, *kind)
    if not drawn:
        return tuple(law.power(certain) for law in once)
    laws = tuple(law.mixed(user_ratio).power(drawn) for law in once)
    if not certain:
        return laws
    return tuple(law.compose(one.power(certain)) for law, one in zip(laws, once, strict=True))


@lru_cache(maxsize=256)
def losses(
    run: Mechanism,
    who: Adversary,
    rounds: int | None = None,
    times: int | None = None,
    costs: tuple[Cost, ...] = (),
    worst: bool = False,
) -> Laws:
    """The losses of the users that could be the worst, with what else read the records (``costs``).

    ``worst`` asks for one user that stands for all (one law for each direction), as several runs
    are composed with.
    """
    steps = group_steps(run, who)
    chosen = [worst_step(steps)] if worst else _front(steps)
    return tuple(law for step in chosen for law in step_laws(run, who, step, rounds, times, costs))


def epsilon(
    run: Mechanism,
    who: Adversary,
    rounds: int | None = None,
    *,
    times: int | None = None,
    costs: Sequence[Cost] = (),
) -> float:
    """ε at the run's δ against an adversary, for the user that is hidden least.

    Args:
        run: The run.
        who: The adversary.
        rounds: The number of rounds, over whose random draw ε holds; by default all of them.
        times: Instead: how often every user took part at most, however that came about.
        costs: Further private mechanisms on the same records.

    Infinite without noise. Refused where nothing is guaranteed.
    """
    if min(rounds or 0, times or 0) < 0:
        raise BadInput(
            "out-of-range",
            f"rounds={rounds} and times={times} cannot have been run; give 0 or more",
        )
    count = (run.rounds if rounds is None else rounds) if times is None else times
    if not count and not costs:
        return 0.0
    if run.noise == 0.0:
        return math.inf
    front = _front(group_steps(run, who))
    return max(step_epsilon(run, who, step, rounds, times, tuple(costs)) for step in front)


def capped(run: Mechanism, who: Adversary, costs: Sequence[Cost] = ()) -> float:
    """ε if every user took part in every planned round and attempt: it holds whatever selection and
    stopping look at, and against a server that chooses who takes part."""
    return epsilon(run, who, times=run.rounds + run.extra, costs=costs)


def spent(run: Mechanism, times: int, costs: Sequence[Cost] = ()) -> float:
    """ε towards the server of whoever took part this often."""
    return epsilon(run, adversaries(run)["server"], times=times, costs=costs)


@lru_cache(maxsize=4096)
def step_epsilon(
    run: Mechanism,
    who: Adversary,
    step: Step,
    rounds: int | None = None,
    times: int | None = None,
    costs: tuple[Cost, ...] = (),
) -> float:
    """ε of a user whose step is hidden so; infinite where ``costs`` have spent δ."""
    laws = step_laws(run, who, step, rounds, times, costs)
    if sum(cost.delta for cost in costs) >= run.delta:
        return math.inf
    value = max(law.epsilon(run.delta) for law in laws)
    if math.isinf(value):
        raise BadInput(
            "delta-too-small",
            f"delta={run.delta} is below what double precision can resolve after this many steps; "
            f"give a larger delta",
        )
    return value


def epsilons_by_group(
    run: Mechanism, who: Adversary, rounds: int | None = None, costs: Sequence[Cost] = ()
) -> list[float]:
    """ε of a record of each group's users over the draw. Beyond a few distinct groups, several have
    the largest of their ε.

    >>> from dpscaffold.privacy import SERVER, describe
    >>> run = describe(rounds=9, local_steps=2, users=2, cohort_size=1, records=50, batch_sizes=5,
    ...                noise=2.0, louder=[1.0, 3.0])
    >>> loose, strict = epsilons_by_group(run, SERVER)
    >>> strict < loose == epsilon(run, SERVER)
    True
    """
    steps = group_steps(run, who)
    order = np.lexsort(np.transpose(steps))  # by noise, then by rate
    found = np.zeros(len(steps))
    for places in np.array_split(order, min(len(order), MOST_RATES)):
        front = _front(steps[place] for place in places)
        each = [step_epsilon(run, who, step, rounds, None, tuple(costs)) for step in front]
        found[places] = max(each)
    return [float(value) for value in found]


def check_guaranteed(run: Mechanism) -> None:
    """Refuse a run that has no guarantee."""
    reason = no_guarantee(run)
    if reason is not None:
        raise BadInput("no-privacy", f"no guarantee: {reason}")


def rounding_cost(members: int, attempts: int) -> float:
    """What the rounding of secure sums adds to δ(ε), for every ε up to 64 and up to 2⁴⁰ parameters.

    By the Lemma of docs/privacy-proofs.md a coordinate's law is changed by factors within 1 ± η,
    where log η < log(2(h − 1)) + log 2 − 2π²s²/h. Over n attempts and P parameters δ(ε) grows by
    at most 2nPη(1 + e^ε), as long as nPη is small.

    >>> rounding_cost(members=100, attempts=400)
    0.0
    """
    log_eta = math.log(4 * max(1, members - 1)) - 2 * math.pi**2 * STEPS_OF_NOISE**2 / members
    count = math.log(2 * max(1, attempts) * MOST_PARAMETERS) + MOST_EPSILON + 1
    return math.exp(min(0.0, log_eta + count))
