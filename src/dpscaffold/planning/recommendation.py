"""From public facts to a whole plan: candidates tried on surrogates, and the best of them.

For a given ε and T the noise of a round's mean hardly depends on K, s and l (σ_g grows as
s√(K·l·T), and the mean divides by b√(mK)). So l is the most that one can afford, K at most ten
steps, and s a fifth of the records; T, the algorithm, C and η₀ are tried. The mean is weighted by
records, so that a user with few of them, whose noise is the loudest, is heard the least.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from dpscaffold.algorithms import ALGORITHMS, Algorithm, Cohort, Known, Server
from dpscaffold.algorithms.registry import RIVALS
from dpscaffold.checks import choice, least_ratio
from dpscaffold.errors import BadInput
from dpscaffold.planning.facts import Facts, Limits, least_batch_ratio, rounds_tried
from dpscaffold.planning.nearest import unmet
from dpscaffold.planning.shape import Shape
from dpscaffold.planning.trial import SEEDS, Bench, Choice, first_rates, search
from dpscaffold.privacy import PrivacyError
from dpscaffold.privacy.describe import Delta
from dpscaffold.privacy.mechanism import Relation
from dpscaffold.setting import Setting
from dpscaffold.setting.budget import Budget, View
from dpscaffold.setting.gaussian import Gaussian
from dpscaffold.setting.plan import Plan, Weighting
from dpscaffold.tasks import LOSSES, Linear, Logistic, Task
from dpscaffold.training.events import Listener, silence

#: A cheaper candidate is preferred where it loses at most this: half a point.
TOLERANCE = 0.005

#: Steps beyond which K brings nothing that was measured.
STEPS = 10

#: ε next to the one asked for, as multiples of it.
AROUND = (0.1, 0.3, 3.0, 10.0)

#: Surrogates of the comparisons that only complete the picture: half of those that decide η₀.
FEWER = SEEDS[:1]

#: Fields of a plan that are chosen here, and those that are left as they were given.
CHOSEN = tuple(
    f"plan.{name}" for name in ("rounds", "local_steps", "user_ratio", "learning_rate", "averaging")
)
LEFT = ("server_rate", "tail", "warm_rounds", "max_rounds")

VIEWS: tuple[View, ...] = ("server", "third-party", "participant", "paper-third-party")


@dataclass(frozen=True)
class Goal:
    """The ε to keep, against whom, and how batches are drawn.

    Args:
        epsilon: The ε to keep.
        view: The adversary.
        delta: δ; by default a tenth of one over the number of records.
        sampling: ``"poisson"`` or ``"fixed"``.
    """

    epsilon: float
    view: View = "server"
    delta: Delta | None = None
    sampling: Literal["fixed", "poisson"] = "poisson"

    def __post_init__(self) -> None:
        choice("--view", self.view, VIEWS)
        choice("--sampling", self.sampling, ("fixed", "poisson"))
        if not self.epsilon > 0:
            raise BadInput("out-of-range", f"epsilon is {self.epsilon}; it must be positive")


@dataclass(frozen=True)
class Preset:
    """What is settled beforehand; None leaves it to the planner.

    Of ``plan`` those fields count that no planner chooses (η_g, the tail, the warm rounds, the most
    rounds that the run may be given later), of ``budget`` the limits next to δ and
    the view, and ``neighbours`` and ``declared`` (sizes that are constants) say what is hidden: σ_g
    is solved for the run with all of these. ``remarks`` are sentences on what it is not solved for.
    """

    algorithm: Algorithm | None = None
    clip: float | None = None
    data_ratio: float | None = None
    weighting: Weighting | None = None
    regularisation: float = 0.0
    task: Task | None = None
    plan: Plan | None = None
    budget: Budget | None = None
    neighbours: Relation | None = None
    declared: bool = False
    remarks: tuple[str, ...] = ()

    @property
    def chosen(self) -> tuple[str, ...]:
        """The keys of a configuration that are left to the planner: none that was settled before,
        by whatever it was settled.

        >>> Preset().chosen, Preset(clip=1.0, plan=Plan(seed=3)).chosen
        (('algorithm', 'plan', 'privacy.clip'), ('algorithm', 'plan'))
        >>> Preset(data_ratio=0.1).chosen[1:4]
        ('plan.rounds', 'plan.local_steps', 'plan.user_ratio')
        """
        plan = (*CHOSEN, *self._unset("plan", "data_ratio", "weighting"))
        return (
            *(() if self.algorithm is not None else ("algorithm",)),
            *(plan if self._settles_plan else ("plan",)),
            *self._unset("privacy", "clip"),
        )

    def _unset(self, table: str, *names: str) -> list[str]:
        return [f"{table}.{name}" for name in names if getattr(self, name) is None]

    @property
    def _settles_plan(self) -> bool:
        """Whether any key of the plan was settled before."""
        usual, given = Plan(), self.plan or Plan()
        settled = self.data_ratio is not None or self.weighting is not None
        changed = any(getattr(given, name) != getattr(usual, name) for name in LEFT)
        return settled or changed or self.regularisation != 0


@dataclass(frozen=True)
class Recommendation:
    """The plan that did best on surrogates.

    ``setting`` is the run with its solved noise, ``choice`` what its η₀ were worth, ``tried`` the
    best of every other candidate, ``public`` the best score without noise, ``curve`` the best
    scores by ε, on half of the surrogates, and ``noiseless`` that without noise on the same half.
    """

    facts: Facts
    goal: Goal
    setting: Setting
    choice: Choice
    tried: tuple[Choice, ...]
    public: float
    curve: tuple[tuple[float, float], ...] = field(default=())
    noiseless: float | None = None
    preset: Preset = field(default_factory=Preset)

    @property
    def kept(self) -> float:
        """The share of the score without privacy that is kept, on the surrogates."""
        return self.choice.score / self.public if self.public > 0 else 0.0

    @property
    def traffic(self) -> int:
        """Bytes over all rounds, down and up, float32."""
        down, up = numbers_sent(self.setting)
        return 4 * (down + up) * self.setting.cohort_size * self.setting.plan.rounds

    @property
    def local_steps(self) -> int:
        """T·m·K: batches that are drawn and clipped by all users together."""
        plan = self.setting.plan
        return plan.rounds * plan.local_steps * self.setting.cohort_size

    @property
    def smaller(self) -> str:
        """What was made smaller on the surrogate."""
        return Shape.of(self.setting).smaller_than(self.setting)


def recommend(
    facts: Facts,
    goal: Goal,
    limits: Limits | None = None,
    preset: Preset | None = None,
    *,
    device: torch.device | str = "cpu",
    tell: Listener = silence,
    curve: bool = True,
) -> Recommendation:
    """Choose algorithm, T, K, l, s, C, η₀ and σ_g from public facts alone.

    Args:
        facts: Public facts about the federation.
        goal: The ε to keep, against whom, and how batches are drawn.
        limits: The most rounds, local steps and participants.
        preset: What is already decided, such as the algorithm or the clip.
        device: Where surrogates are trained.
        tell: Called with events while it works.
        curve: Also compute the accuracy on surrogates at other ε.

    >>> facts = Facts.of(users=10, records=40, features=5, classes=2)
    >>> found = recommend(facts, Goal(8.0), Limits(rounds=8, local_steps=2), curve=False)
    >>> found.setting.plan.rounds <= 8, found.setting.privacy.noise > 0
    (True, True)
    """
    limits, preset = limits or Limits(), preset or Preset()
    first = _candidates(facts, goal, limits, preset)
    bench = Bench(facts.guess, torch.device(device), tell)
    tried = _tried(first, bench)
    best = _cheapest(tried)
    nearby = _nearby(best, goal.epsilon, curve)
    others: dict[float, Choice] | None = None
    if preset.clip is None:
        clips, others = _clips(best, bench, nearby)
        found = _best_clip(clips)
        if found is not clips[1]:  # try it as thoroughly as the others were
            best = search([(found.setting, first_rates(found.setting))], bench)[0]
            nearby, others = _nearby(best, goal.epsilon, curve), None
    if others is None:
        others = _at_once(nearby, replace(bench, seeds=FEWER))
    public = _without_privacy(best, bench)
    points = [(epsilon, one.score) for epsilon, one in others.items()]
    points += [(goal.epsilon, _of_fewer(best))] if curve else []
    left = tuple(one for one in tried if one is not best)
    score = max(public.score, best.score)
    beside_score = max(_of_fewer(public), _of_fewer(best))
    return Recommendation(
        facts, goal, best.setting, best, left, score, tuple(sorted(points)), beside_score, preset
    )


def _rates_around_best(known: Choice) -> list[float]:
    place = known.trials.index(known.best)
    return [trial.rate for trial in known.trials[max(0, place - 1) : place + 2]]


def _best_clip(clips: Sequence[Choice]) -> Choice:
    """The best choice; the one in the middle, which is the usual C, where others hardly beat it."""
    return max(clips, key=lambda one: one.score - TOLERANCE * (one is not clips[1]))


def _without_privacy(best: Choice, bench: Bench) -> Choice:
    """The same setting without privacy, with the best of the larger step sizes."""
    rates = [rate for rate in first_rates(best.setting) if rate >= best.rate / 3] or [best.rate]
    return search([(replace(best.setting, privacy=None), rates)], bench, widen=False)[0]


def _tried(settings: Sequence[Setting], bench: Bench) -> list[Choice]:
    """η₀ of every candidate: of those with the most rounds among all rates, and of an algorithm's
    fewer rounds around that."""
    most: dict[str, int] = {}  # an algorithm's own: with all rounds it may not keep ε
    for one in settings:
        most[one.algorithm.name] = max(one.plan.rounds, most.get(one.algorithm.name, 0))
    whole = [one for one in settings if one.plan.rounds == most[one.algorithm.name]]
    lengths = {one.algorithm.name: Shape.of(one).rounds for one in whole}
    # Where the surrogate of fewer rounds has no fewer, it has nothing new to tell.
    fewer = [one for one in settings if Shape.of(one).rounds < lengths[one.algorithm.name]]
    found = search([(one, first_rates(one)) for one in whole], bench)
    near = {known.setting.algorithm.name: _rates_around_best(known) for known in found}
    return found + search([(one, near[one.algorithm.name]) for one in fewer], bench)


Wanted = dict[float, tuple[Setting, list[float]]]


def _clips(
    best: Choice, bench: Bench, nearby: Wanted
) -> tuple[list[Choice], dict[float, Choice] | None]:
    """Half the clip, the clip and twice the clip, on half of the surrogates; where the bench looks
    ahead, the other ε in the same stack, which the clip leaves alone more often than not."""
    near = [best.rate / 3, best.rate, best.rate * 3]
    clips = [_clipped(best.setting, factor) for factor in (0.5, 1.0, 2.0)]
    ahead = nearby if bench.ahead else {}
    asked = [(one, near) for one in clips] + list(ahead.values())
    found = search(asked, replace(bench, seeds=FEWER), widen=False)
    others = dict(zip(ahead, found[len(clips) :], strict=True)) if bench.ahead else None
    return found[: len(clips)], others


def _at_once(wanted: Wanted, bench: Bench) -> dict[float, Choice]:
    """What each of these comes to, all in one stack."""
    return dict(zip(wanted, search(list(wanted.values()), bench, widen=False), strict=True))


def _local_steps(algorithm: Algorithm, most: int, ratio: float) -> int:
    """K of an algorithm: the usual one within ``most``, or one pass over batches of ``ratio``."""
    if not algorithm.full_pass:
        return min(most, STEPS)
    steps = round(1 / ratio)
    if steps > most:
        raise BadInput(
            "one-pass-steps",
            f"local steps are at most {most}, and {algorithm.name} takes one pass over the data, "
            f"{steps} steps; allow {steps}, or a plan.data_ratio of {least_ratio(most):g}",
        )
    return steps


def _algorithms(preset: Preset) -> list[Algorithm]:
    return (
        [ALGORITHMS[name]() for name in RIVALS] if preset.algorithm is None else [preset.algorithm]
    )


def _warm_rounds(algorithm: Algorithm, plan: Plan, share: float) -> int:
    if algorithm.warm_up is None:
        return 0
    return round(4 / share) if plan.warm_rounds is None else plan.warm_rounds


def _candidates(facts: Facts, goal: Goal, limits: Limits, preset: Preset) -> list[Setting]:
    """Every algorithm with T, T/2 and T/4 of the rounds that one can afford."""
    share = limits.share(facts.users)
    ratio = least_batch_ratio(facts.sizes, preset.data_ratio)
    base, task = preset.plan or Plan(), preset.task or default_task(facts)
    mechanism = Gaussian(preset.clip or 1.0, 1.0, goal.sampling, neighbours=preset.neighbours)
    budget = replace(preset.budget or Budget(), delta=goal.delta, view=goal.view)
    roster = replace(facts.roster, declared=preset.declared)
    found = []
    for algorithm in _algorithms(preset):
        for rounds in rounds_tried(limits.rounds, _warm_rounds(algorithm, base, share)):
            own = _local_steps(algorithm, limits.local_steps, ratio)
            plan = replace(
                base,
                rounds=rounds,
                local_steps=own,
                user_ratio=share,
                data_ratio=ratio,
                regularisation=preset.regularisation,
                weighting=preset.weighting or "records",
                averaging="tail",
            )
            found.append(Setting(roster, task, algorithm, plan, mechanism, budget))
    if not found:
        raise _no_round_left(facts.users, share, limits.rounds, base.warm_rounds)
    return _solved(found, goal.epsilon)


def _no_round_left(users: int, share: float, rounds: int, warm: int | None) -> BadInput:
    """The refusal of a limit on rounds that a warm start takes up by itself."""
    if warm is not None:
        return BadInput(
            "no-rounds-left",
            f"the most rounds are {rounds}, and plan.warm_rounds is {warm}; allow {warm + 1} "
            f"rounds or more, or fewer that warm up",
        )
    warm, enough = round(4 / share), _enough_participants(users, rounds)
    more = f", or {enough} participants" if enough else ""
    return BadInput(
        "no-rounds-left",
        f"the most rounds are {rounds}, and the warm start alone takes {warm} with "
        f"{round(share * users)} of {users} users in a round; allow {warm + 1} rounds or "
        f"more{more}",
    )


def _enough_participants(users: int, rounds: int) -> int | None:
    """The smallest m whose warm start, of round(4·M/m) rounds, leaves a round to train in."""
    return next((m for m in range(1, users + 1) if round(4 * users / m) < rounds), None)


def _solved(settings: Sequence[Setting], epsilon: float) -> list[Setting]:
    """Those that can keep ε, with their noise; where none can, the first says why."""
    found, refused = [], []
    for setting in settings:
        try:
            found.append(setting.calibrated(epsilon))
        except PrivacyError as error:
            refused.append((setting, error))
    if refused and not found:
        why = refused[0][1]
        raise unmet([setting for setting, _ in refused], epsilon, why) from why
    return found


def _clipped(setting: Setting, factor: float) -> Setting:
    """σ_g is in units of the sensitivity, so another C needs no other σ_g."""
    assert setting.privacy is not None
    assert not isinstance(setting.privacy.clip, str)
    return replace(setting, privacy=replace(setting.privacy, clip=factor * setting.privacy.clip))


def _cheapest(tried: Sequence[Choice]) -> Choice:
    """The T of the best score, fewer rounds only where that gains more than half a point: a
    surrogate that is easier than the real data is learnt in too few rounds. Then, of those that
    lose at most half a point at this T, the one with the least traffic."""
    most = max(one.setting.plan.rounds for one in tried)
    best = max(tried, key=lambda one: one.score + TOLERANCE * (one.setting.plan.rounds == most))
    same = [one for one in tried if one.setting.plan.rounds == best.setting.plan.rounds]
    good = [one for one in same if one.score >= best.score - TOLERANCE]
    return min(good, key=lambda one: sum(numbers_sent(one.setting)) * one.setting.plan.rounds)


def _nearby(best: Choice, epsilon: float, curve: bool) -> Wanted:
    """The same plan at those other ε that it can keep, each with three η₀; none without a
    ``curve``."""
    found: Wanted = {}
    for factor in AROUND if curve else ():
        middle = best.rate * factor**0.5
        rates = [middle / 3, middle, middle * 3]
        # The plan stands, though an ε next to it cannot be kept.
        with suppress(PrivacyError):
            found[epsilon * factor] = best.setting.calibrated(epsilon * factor), rates
    return found


def _of_fewer(best: Choice) -> float:
    """The score on the surrogates that the other ε are tried on."""
    whole = best.best
    part = whole.scores[:: len(SEEDS)]
    return replace(whole, scores=part, own_models=whole.own_models // len(SEEDS)).score


def default_task(facts: Facts) -> Task:
    """A linear model: softmax for classes, least squares for a number."""
    if facts.classes:
        return Logistic(facts.features, facts.classes)
    return Linear(facts.features, 1, LOSSES["squared"])


def numbers_sent(setting: Setting) -> tuple[int, int]:
    """How many numbers one participant is sent in a round, and sends back."""
    algorithm, length = setting.algorithm, setting.task.parameters
    slots = {name: torch.zeros(1) for name in algorithm.keeps}
    own = {name: torch.zeros(1, 1) for name in algorithm.shared}
    cohort = Cohort((0,), torch.ones(1), Known(1, 1.0), own, torch.zeros(1, dtype=torch.bool))
    announced = algorithm.announce(Server(torch.zeros(1), slots), cohort)
    up = sum(length if size == "vector" else 1 for size in algorithm.shared.values())
    return length * (1 + len(announced)), length + up


def as_tables(found: Recommendation) -> dict[str, Any]:
    """The tables of a configuration without ``[data]``: the facts, the task's kind, the algorithm,
    the plan and the promise, from which ``train`` solves σ_g for the users that are there."""
    setting, facts, goal = found.setting, found.facts, found.goal
    assert setting.privacy is not None
    same = len(set(facts.sizes)) == 1
    return {
        "facts": {
            "users": facts.users,
            "records": facts.sizes[0] if same else list(facts.sizes),
            "features": facts.features,
            "classes": facts.classes,
            "similarity": "unknown" if facts.similarity is None else facts.similarity,
            "row_norm": "none" if facts.row_norm is None else facts.row_norm,
            "planned": list(found.preset.chosen),
        },
        "task": {"kind": "logistic" if facts.classes else "linear"},
        "algorithm": {"name": setting.algorithm.name, **setting.algorithm.numbers},
        "plan": {
            "rounds": setting.plan.rounds,
            "local_steps": setting.plan.local_steps,
            "user_ratio": setting.plan.user_ratio,
            "data_ratio": setting.plan.data_ratio,
            "learning_rate": found.choice.rate,
            "regularisation": setting.plan.regularisation,
            "weighting": setting.plan.weighting,
            "averaging": setting.plan.averaging,
        },
        "privacy": {
            "clip": setting.privacy.clip,
            "epsilon": goal.epsilon,
            "view": goal.view,
            "sampling": goal.sampling,
            **({"delta": goal.delta} if goal.delta is not None else {}),
        },
    }
