"""From public facts to a whole plan: candidates tried on surrogates, and the best of them.

For a given ε and T the noise of a round's mean hardly depends on K, s and l (σ_g grows as
s√(K·l·T), and the mean divides by b√(mK)). So l is the most that one can afford, K at most ten
steps, s a fifth of the records, T all the rounds that one can afford, and C is 1; the algorithm and
η₀ are tried. The mean is weighted by records, so that a user with few of them, whose noise is the
loudest, is heard the least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from dpscaffold.algorithms import ALGORITHMS, Algorithm, Cohort, Known, Server
from dpscaffold.algorithms.registry import ONE_PASS, RIVALS
from dpscaffold.checks import choice, least_ratio
from dpscaffold.config import Run, make_run, solve_noise
from dpscaffold.config.gaussian import Gaussian, NoisedStep, View
from dpscaffold.config.plan import Plan, Weighting
from dpscaffold.config.secure import Secure
from dpscaffold.errors import BadInput
from dpscaffold.planning.facts import Facts, Limits, least_batch_ratio
from dpscaffold.planning.nearest import unmet
from dpscaffold.planning.shape import Shape
from dpscaffold.planning.stages import CLOSE_LOOK, PlanSearch, preferred
from dpscaffold.planning.trial import Bench, Choice
from dpscaffold.privacy.mechanism import Delta, Unit
from dpscaffold.tasks import LOSSES, Linear, Logistic, Task
from dpscaffold.training.events import Listener, silence

#: Steps beyond which K brings nothing that was measured.
STEPS = 10

VIEWS: tuple[View, ...] = ("server", "third-party", "participant")


@dataclass(frozen=True)
class Goal:
    """The ε to keep, against whom, and how batches are drawn.

    Args:
        epsilon: The ε to keep.
        view: The adversary.
        delta: δ; by default a tenth of one over the number of records.
        sampling: ``"poisson"`` or ``"fixed"``.
        unit: What is hidden: one ``"record"``, or everything of one ``"user"``.
    """

    epsilon: float
    view: View = "server"
    delta: Delta | None = None
    sampling: Literal["fixed", "poisson"] = "poisson"
    unit: Unit = "record"

    def __post_init__(self) -> None:
        choice("--unit", self.unit, ("record", "user"))
        choice("--view", self.view, VIEWS)
        choice("--sampling", self.sampling, ("fixed", "poisson"))
        if not self.epsilon > 0:
            raise BadInput("out-of-range", f"epsilon is {self.epsilon}; it must be positive")


@dataclass(frozen=True)
class Preset:
    """What is settled beforehand; None leaves it to the planner.

    Of ``plan`` those fields count that no planner chooses (η_g, the warm rounds, the most rounds
    that the run may be given later), of ``limits`` those next to δ and the view. ``declared`` says
    that sizes are constants, ``absent`` why users may stay away. σ_g is solved for
    the run with all of these; ``remarks`` are sentences on what it is not solved for.
    With ``secure`` the server sees sums only: one local step, and an algorithm without memory.
    ``available`` are secure sums that the plan may use if they are better. ``budgets`` are those of
    users by name; the plan is made for the usual one.
    """

    algorithm: Algorithm | None = None
    clip: float | None = None
    data_ratio: float | None = None
    weighting: Weighting | None = None
    regularisation: float = 0.0
    task: Task | None = None
    plan: Plan | None = None
    limits: Gaussian | None = None
    declared: bool = False
    absent: str | None = None
    remarks: tuple[str, ...] = ()
    secure: Secure | None = None
    available: Secure | None = None
    budgets: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Recommendation:
    """The plan that did best on surrogates.

    ``setting`` is the run with its solved noise, ``choice`` what its η₀ were worth, ``tried`` the
    best of every other candidate, and ``public`` the best score without noise.
    """

    facts: Facts
    goal: Goal
    setting: Run
    choice: Choice
    tried: tuple[Choice, ...]
    public: float
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
        return Shape.of(self.setting, CLOSE_LOOK).smaller_than(self.setting)


def plan(
    facts: Facts,
    goal: Goal,
    limits: Limits | None = None,
    preset: Preset | None = None,
    *,
    device: torch.device | str = "cpu",
    tell: Listener = silence,
) -> Recommendation:
    """Choose algorithm, T, K, l, s, C, η₀ and σ_g from public facts alone.

    Args:
        facts: Public facts about the federation.
        goal: The ε to keep, against whom, and how batches are drawn.
        limits: The most rounds, local steps and participants.
        preset: What is already decided, such as the algorithm or the clip.
        device: Where surrogates are trained.
        tell: Called with events while it works.

    >>> facts = Facts.of(users=10, records=40, features=5, classes=2)
    >>> found = plan(facts, Goal(8.0), Limits(rounds=8, local_steps=2))
    >>> found.setting.plan.rounds <= 8, found.setting.privacy.noise > 0
    (True, True)
    """
    limits, preset = limits or Limits(), preset or Preset()
    settings = _candidates(facts, goal, limits, preset)
    looks = PlanSearch(Bench(facts.guess, torch.device(device), tell))
    tried = looks.compared(settings)
    chosen = preferred(tried)
    left = tuple(one for one in tried if one is not chosen)
    best = looks.refined(chosen)
    public = max(looks.without_privacy(best).score, best.score)
    return Recommendation(facts, goal, best.setting, best, left, public, preset)


def _local_steps(algorithm: Algorithm, most: int, ratio: float) -> list[int]:
    """K to try: at most ten steps, and one step. An algorithm that takes one pass over the data has
    the K of batches of ``ratio``."""
    if algorithm.name not in ONE_PASS:
        return list(dict.fromkeys([min(most, STEPS), 1]))
    steps = round(1 / ratio)
    if steps > most:
        raise BadInput(
            "one-pass-steps",
            f"local steps are at most {most}, and {algorithm.name} takes one pass over the data, "
            f"{steps} steps; allow {steps}, or a plan.data_ratio of {least_ratio(most):g}",
        )
    return [steps]


def _algorithms(preset: Preset, secure: Secure | None) -> list[Algorithm]:
    """The one that was asked for, or those that are compared: with secure sums the ones without a
    memory."""
    if preset.algorithm is not None:
        return [preset.algorithm]
    rivals = [ALGORITHMS[name]() for name in RIVALS]
    return [one for one in rivals if secure is None or not one.memory]


def _warm_rounds(algorithm: Algorithm, plan: Plan, share: float) -> int:
    if algorithm.warm_up is None:
        return 0
    return round(4 / share) if plan.warm_rounds is None else plan.warm_rounds


def _candidates(facts: Facts, goal: Goal, limits: Limits, preset: Preset) -> list[Run]:
    """Every algorithm and K with all the rounds that one can afford; with secure sums too where
    they are available."""
    share = limits.share(facts.users)
    found = [
        setting
        for secure in dict.fromkeys([preset.secure, preset.secure or preset.available])
        for algorithm in _algorithms(preset, secure)
        for setting in _of_algorithm(facts, goal, limits, preset, algorithm, secure)
    ]
    if not found:
        warm = None if preset.plan is None else preset.plan.warm_rounds
        raise _no_round_left(facts.users, share, limits.rounds, warm)
    return _solved(found, goal.epsilon)


def _of_algorithm(
    facts: Facts,
    goal: Goal,
    limits: Limits,
    preset: Preset,
    algorithm: Algorithm,
    secure: Secure | None,
) -> list[Run]:
    """The candidates of one algorithm. Secure sums that are merely available are left out where
    they are not proved, or where too few take part."""
    share, ratio = limits.share(facts.users), least_batch_ratio(facts.sizes, preset.data_ratio)
    most = 1 if secure is not None else limits.local_steps
    steps = _local_steps(algorithm, most, ratio)
    if preset.algorithm is None and not algorithm.memory:
        steps = [1]  # with more steps its users drift apart: the rival corrects for that
    if limits.rounds <= _warm_rounds(algorithm, preset.plan or Plan(), share):
        return []
    plans = [_plan(goal, preset, share, ratio, K, limits.rounds) for K in steps]
    try:
        return [_setting(facts, goal, preset, algorithm, plan, secure) for plan in plans]
    except BadInput as error:
        if secure is not preset.secure and error.code in ("secure-not-proved", "too-few-sites"):
            return []
        raise


def _setting(
    facts: Facts,
    goal: Goal,
    preset: Preset,
    algorithm: Algorithm,
    plan: Plan,
    secure: Secure | None,
) -> Run:
    """A candidate, its noise not solved for yet."""
    clip, task = preset.clip or 1.0, preset.task or default_task(facts)
    step = NoisedStep(clip=clip, noise=1.0, sampling=goal.sampling, unit=goal.unit)
    limits = preset.limits or Gaussian(noise=1.0)
    privacy = limits.with_step(step).changed(delta=goal.delta, view=goal.view)
    return make_run(
        replace(facts.roster, declared=preset.declared),
        task,
        algorithm,
        plan,
        privacy,
        secure,
        preset.absent,
    )


def _plan(goal: Goal, preset: Preset, share: float, ratio: float, steps: int, rounds: int) -> Plan:
    """The plan of a candidate; what the configuration settles stays."""
    weighting: Weighting = "records" if goal.unit == "record" else "uniform"
    given = preset.plan or Plan()
    return given.changed(
        rounds=rounds,
        local_steps=steps,
        user_ratio=share,
        data_ratio=ratio,
        learning_rate=None,
        regularisation=preset.regularisation,
        weighting=preset.weighting or weighting,
        averaging="tail",
    )


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


def _solved(settings: Sequence[Run], epsilon: float) -> list[Run]:
    """Those that can keep ε, with their noise; where none can, the first says why."""
    found, refused = [], []
    for setting in settings:
        try:
            found.append(solve_noise(setting, epsilon))
        except BadInput as error:
            refused.append((setting, error))
    if refused and not found:
        why = refused[0][1]
        raise unmet([setting for setting, _ in refused], epsilon, why) from why
    return found


def default_task(facts: Facts) -> Task:
    """A linear model: softmax for classes, least squares for a number."""
    if facts.classes:
        return Logistic(facts.features, facts.classes)
    return Linear(facts.features, 1, LOSSES["squared"])


def numbers_sent(setting: Run) -> tuple[int, int]:
    """How many numbers one participant is sent in a round, and sends back."""
    algorithm, length = setting.algorithm, setting.task.parameters
    slots = {name: torch.zeros(1) for name in algorithm.keeps}
    own = {name: torch.zeros(1, 1) for name in algorithm.shared}
    one = torch.zeros(1)
    cohort = Cohort(one, one + 1, Known(1, 1.0), own, one.bool())
    announced = algorithm.announce(Server(torch.zeros(1), slots), cohort)
    up = sum(length if size == "vector" else 1 for size in algorithm.shared.values())
    return length * (1 + len(announced)), length + up


def as_tables(found: Recommendation) -> dict[str, Any]:
    """The tables of a configuration without ``[data]``: the facts, the task's kind, the algorithm,
    the plan and the promise, from which ``train`` solves σ_g for the users that are there."""
    setting, facts, goal = found.setting, found.facts, found.goal
    assert setting.privacy is not None
    secure = setting.secure
    same = len(set(facts.sizes)) == 1
    return {
        "facts": {
            "users": facts.users,
            "records": facts.sizes[0] if same else list(facts.sizes),
            "features": facts.features,
            "classes": facts.classes,
            "similarity": "unknown" if facts.similarity is None else facts.similarity,
            "row_norm": "none" if facts.row_norm is None else facts.row_norm,
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
            "epsilon": goal.epsilon if found.preset.budgets is None else dict(found.preset.budgets),
            "view": goal.view,
            "sampling": goal.sampling,
            **({"delta": goal.delta} if goal.delta is not None else {}),
            **({"unit": goal.unit} if goal.unit != "record" else {}),
        },
        **({"secure": secure.model_dump(exclude_none=True)} if secure is not None else {}),
    }
