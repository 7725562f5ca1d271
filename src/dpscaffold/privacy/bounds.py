"""The bounds: each with a name, the adversary it holds against, its assumptions and its theorem.

>>> from dpscaffold.privacy import describe
>>> run = describe(rounds=400, local_steps=50, users=100, participants=20,
...                records=4000, batches=800, noise=60)
>>> round(RANDOM_PARTICIPATION.epsilon(run), 2), round(PAPER_THIRD_PARTY.epsilon(run), 1)
(0.86, 12.9)
>>> AGGREGATE.applies(run)
'users keep a memory between rounds (control variates), which carries earlier noise'
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from dpscaffold.privacy import renyi
from dpscaffold.privacy.aggregate import worst_steps
from dpscaffold.privacy.costs import Cost, with_costs
from dpscaffold.privacy.describe import Group, Run
from dpscaffold.privacy.errors import PrivacyError
from dpscaffold.privacy.loss import LossDistribution
from dpscaffold.privacy.steps import participation_losses, step_losses

SERVER, THIRD_PARTY = "server", "third_party"
VIEWS = {
    SERVER: (
        "sees every upload of every user and who took part in each round (the "
        "honest-but-curious server)"
    ),
    THIRD_PARTY: (
        "sees every global model (x^t, c^t), not who took part (anyone the model is handed to)"
    ),
}

REPEATED = "rounds were run again for the same participants with fresh noise"

Laws = tuple[LossDistribution, ...]


@dataclass(frozen=True)
class Bound:
    """One way to bound ε, as data: who it holds against, what it takes for granted, where it is
    proved.

    ``condition(run)`` gives the reason why it does not apply, or None. ``laws(run, rounds)`` gives
    the loss distributions it rests on, or ``value(run, rounds)`` its ε directly.
    """

    name: str
    title: str
    views: tuple[str, ...]
    theorem: str
    assumptions: tuple[str, ...]
    reference: str
    explanation: str
    condition: Callable[[Run], str | None]
    laws: Callable[[Run, int], Laws] | None = None
    value: Callable[[Run, int], float] | None = None
    repeated: Callable[[Run, int, tuple[int, ...]], Laws] | None = None

    def explain(self) -> str:
        """What it says and why, in two sentences."""
        return self.explanation

    def applies(self, run: Run) -> str | None:
        """None if the bound holds for this run, else the reason why it does not."""
        return no_guarantee(run) or self.condition(run)

    def epsilon(
        self,
        run: Run,
        rounds: int | None = None,
        costs: Sequence[Cost] = (),
        repeats: Sequence[int] = (),
    ) -> float:
        """ε at the run's δ after ``rounds`` (all of them by default), with further mechanisms if
        given.

        ``repeats`` has one entry for each of these rounds that was run again for the same
        participants with fresh noise: how many times. ε is infinite without noise. Raises
        :class:`PrivacyError` where the bound does not apply.
        """
        reason = self.applies(run)
        if reason:
            raise PrivacyError(f"the bound {self.name!r} does not apply: {reason}")
        rounds = run.rounds if rounds is None else rounds
        if rounds < 0:
            raise PrivacyError(f"rounds={rounds} cannot have been run; give 0 or more")
        if run.noise == 0.0:
            return math.inf if rounds else 0.0
        if repeats:
            if self.repeated is None:
                raise PrivacyError(f"the bound {self.name!r} does not apply: {REPEATED}")
            return largest_epsilon(
                self.repeated(run, rounds, tuple(repeats)), run.delta, tuple(costs)
            )
        if self.laws is None:
            if costs or self.value is None:
                raise PrivacyError(
                    f"the bound {self.name!r} cannot add the cost of other mechanisms"
                )
            return self.value(run, rounds) if rounds else 0.0
        if rounds == 0 and not costs:
            return 0.0
        return largest_epsilon(self.laws(run, rounds), run.delta, tuple(costs))


def largest_epsilon(laws: Laws, delta: float, costs: tuple[Cost, ...] = ()) -> float:
    """The larger ε over the directions of a neighbouring pair."""
    spoilt = sum(cost.delta for cost in costs)
    if spoilt >= delta:
        return math.inf
    value = max(with_costs(law, costs).epsilon(delta) for law in laws)
    if math.isinf(value):
        raise PrivacyError(
            f"delta={delta} is below what double precision can resolve after so many steps; give "
            f"a larger delta, or use the bound 'random_participation_rdp'"
        )
    return value


def no_guarantee(run: Run) -> str | None:
    """Why no bound at all holds for this run, or None."""
    if run.clip == "median":
        return (
            "no guarantee: the clip bound is read off private data (clip='median'); give a "
            "fixed clip"
        )
    if run.unit == "user" and run.weighting == "records":
        return (
            "no guarantee for a user's whole dataset: weights by records reveal how many records "
            "a user has; give weighting='uniform'"
        )
    return None


@lru_cache(maxsize=64)
def _round_laws(
    rate: float, noise: float, sampling: str, unit: str, steps: int, user_ratio: float
) -> Laws:
    """One round: the K-step loss with probability l, a loss of 0 otherwise."""
    return tuple(
        law.mixed(user_ratio) for law in participation_losses(rate, noise, sampling, unit, steps)
    )


def round_laws(run: Run) -> Laws:
    """One round of random participation for the worst group of users."""
    rate = run.worst.rate if run.unit == "record" else 1.0
    return _round_laws(rate, run.noise, run.sampling, run.unit, run.local_steps, run.user_ratio)


def participations_laws(run: Run, participations: int, group: Group | None = None) -> Laws:
    """n participations of K steps each: what a user who took part n times has spent."""
    rate = (group or run.worst).rate if run.unit == "record" else 1.0
    laws = participation_losses(rate, run.noise, run.sampling, run.unit, run.local_steps)
    return tuple(law.power(participations) for law in laws)


def _random_participation_laws(run: Run, rounds: int) -> Laws:
    return tuple(law.power(rounds) for law in round_laws(run))


def _repeated_laws(run: Run, rounds: int, repeats: tuple[int, ...]) -> Laws:
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


def _repeated_cap_laws(run: Run, rounds: int, repeats: tuple[int, ...]) -> Laws:
    return participations_laws(run, min(rounds, run.max_participations or rounds) + sum(repeats))


def _cap_laws(run: Run, rounds: int) -> Laws:
    return participations_laws(run, min(rounds, run.max_participations or rounds))


def _random_participation_rdp(run: Run, rounds: int) -> float:
    return renyi.random_participation(run.participation(), run.user_ratio, rounds, run.delta)


def _aggregate_laws(run: Run, rounds: int) -> Laws:
    """The worst of the groups, each with the smallest noise its set of companions may have.

    Where several could be the worst, their laws are all returned and the largest ε is taken.
    """
    laws: list[LossDistribution] = []
    for rate, noise in worst_steps(run):
        round_ = _round_laws(rate, noise, run.sampling, run.unit, 1, run.user_ratio)
        laws.extend(law.power(rounds) for law in round_)
    return tuple(laws)


def _aggregate_condition(run: Run) -> str | None:
    if run.memory:
        return "users keep a memory between rounds (control variates), which carries earlier noise"
    if run.local_steps > 1:
        return (
            f"local_steps={run.local_steps}: a user's second gradient is taken at a point that "
            f"contains its own first noise; it holds for 1 local step"
        )
    if run.max_participations is not None:
        return "a participant may decline (max_participations), and then adds no noise to the sum"
    return None


def _user_sampling_laws(run: Run, rounds: int) -> Laws:
    noise = run.noise / math.sqrt(run.local_steps)
    if run.local_steps == 1:
        noise *= math.sqrt(run.participants)  # only the sum of the m noises is seen
    return tuple(law.power(rounds) for law in step_losses(run.user_ratio, noise, "fixed"))


def _user_sampling_condition(run: Run) -> str | None:
    if run.unit != "user":
        return "sampling users does not amplify a record's ε; it holds for unit='user'"
    if run.memory:
        return (
            "users keep a memory between rounds (control variates), so the rounds do not draw "
            "users afresh"
        )
    if run.max_participations is not None:
        return "whether a user declines depends on its earlier rounds (max_participations)"
    return None


def _published(run: Run, rounds: int) -> float:
    noise = run.noise * math.sqrt(run.participants)
    return renyi.published(
        run.worst.rate, noise, run.local_steps, run.user_ratio, rounds, run.delta
    )


def _published_condition(run: Run) -> str | None:
    if run.unit != "record":
        return "the paper states it for records; it holds for unit='record'"
    if run.sampling != "fixed":
        return "the paper states it for batches of fixed size; it holds for sampling='fixed'"
    return None


def _always(run: Run) -> str | None:
    return None


def _needs_ledger(run: Run) -> str | None:
    return "it reads who took part; ask the run's Ledger for its largest() or of(user)"


_DRAW = "participants are drawn uniformly, m of M, independently of the data and of all outputs"
_BOTH = (SERVER, THIRD_PARTY)

RANDOM_PARTICIPATION = Bound(
    name="random_participation",
    title="random participation (PLD)",
    views=_BOTH,
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
    condition=_always,
    laws=_random_participation_laws,
    repeated=_repeated_laws,
)

RANDOM_PARTICIPATION_RDP = Bound(
    name="random_participation_rdp",
    title="random participation (RDP)",
    views=_BOTH,
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
    condition=_always,
    value=_random_participation_rdp,
)

AGGREGATE = Bound(
    name="aggregate",
    title="aggregate (PLD)",
    views=(THIRD_PARTY,),
    theorem=(
        "multiplier σ_g·√(Σ_j(w_j/b_j)²)/(w_i/b_i), random participation (docs/privacy.md, "
        "Theorem 2)"
    ),
    assumptions=(_DRAW, "one local step, no memory", "every participant really adds its noise"),
    reference="docs/privacy.md, Theorem 2; Balle, Barthe, Gaboardi 2018; Zhu, Dong, Wang 2022",
    explanation=(
        "A third party sees only the sum of the uploads, where the noise of all participants "
        "hides each one. With one local step and no memory, the sum is one Gaussian query per "
        "round with that larger noise."
    ),
    condition=_aggregate_condition,
    laws=_aggregate_laws,
)

USER_SAMPLING = Bound(
    name="user_sampling",
    title="user sampling (PLD)",
    views=(THIRD_PARTY,),
    theorem=(
        "amplification by sampling without replacement at rate l, the user being what is sampled"
    ),
    assumptions=(_DRAW, "no memory", "who took part is not revealed"),
    reference=(
        "Balle, Barthe, Gaboardi 2018, Theorem 11; Wang, Balle, Kasiviswanathan 2019, Theorem 9"
    ),
    explanation=(
        "With a user as the unit, the sampled element is the protected one, so hiding who took "
        "part amplifies as for any sample without replacement. A participation is K Gaussian "
        "queries, that is one of multiplier σ_g/√K."
    ),
    condition=_user_sampling_condition,
    laws=_user_sampling_laws,
)

CAP = Bound(
    name="cap",
    title="every allowed participation (PLD)",
    views=_BOTH,
    theorem="adaptive composition of min(T, max_participations)·K steps",
    assumptions=("none on selection or stopping: both may look at outputs",),
    reference="Balle, Barthe, Gaboardi 2018; Zhu, Dong, Wang 2022",
    explanation=(
        "A user takes part in at most every round, or as often as max_participations allows, "
        "whatever selection and stopping look at. So it has spent at most the composition of that "
        "many participations."
    ),
    condition=_always,
    laws=_cap_laws,
    repeated=_repeated_cap_laws,
)

LEDGER = Bound(
    name="ledger",
    title="ledger (PLD)",
    views=_BOTH,
    theorem="adaptive composition of n_i·K steps, given who took part",
    assumptions=("selection and stopping never look at outputs or private metrics",),
    reference="Balle, Barthe, Gaboardi 2018; Zhu, Dong, Wang 2022",
    explanation=(
        "Given who took part, a record of a user that took part n_i times has spent the "
        "composition of n_i·K steps. The run reports the largest over users, and the distribution."
    ),
    condition=_needs_ledger,
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
        "steps. Both fail for some losses (docs/privacy.md shows three), so do not quote it as a "
        "guarantee."
    ),
    condition=_published_condition,
    value=_published,
)

#: All bounds by name, in the order in which a table shows them.
BOUNDS: dict[str, Bound] = {
    bound.name: bound
    for bound in (
        RANDOM_PARTICIPATION,
        RANDOM_PARTICIPATION_RDP,
        LEDGER,
        CAP,
        AGGREGATE,
        USER_SAMPLING,
        PAPER_THIRD_PARTY,
    )
}


def bound_named(name: str) -> Bound:
    """The bound of that name."""
    try:
        return BOUNDS[name]
    except KeyError:
        raise PrivacyError(f"bound={name!r} is unknown; give one of {', '.join(BOUNDS)}") from None


def bound_for(run: Run, view: str, draw_hidden: bool = True, repeats: Sequence[int] = ()) -> Bound:
    """The bound to quote for a plan: the tightest proved one against that adversary.

    ``view`` is ``"server"``, ``"third_party"`` or ``"paper_third_party"``. Against a third party
    the bounds that may be better are always at or below random participation, so the smallest is
    found by asking them.
    ``draw_hidden=False`` says that anyone may learn who took part, which rules out sampling users
    as a gain.
    """
    view = view.replace("-", "_")
    if view == SERVER:
        return RANDOM_PARTICIPATION
    if view == PAPER_THIRD_PARTY.name:
        return PAPER_THIRD_PARTY
    if view != THIRD_PARTY:
        raise PrivacyError(
            f"view={view!r} is unknown; give server, third_party or paper_third_party"
        )
    others = [] if repeats else [AGGREGATE, USER_SAMPLING] if draw_hidden else [AGGREGATE]
    proved = [RANDOM_PARTICIPATION, *(bound for bound in others if bound.applies(run) is None)]
    return min(proved, key=lambda bound: bound.epsilon(run)) if len(proved) > 1 else proved[0]
