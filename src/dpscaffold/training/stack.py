"""Many runs at once: seeds, heterogeneity levels and step sizes that share shapes, in one
engine.

A stack is a list of :class:`~dpscaffold.config.Run` that agree in task, algorithm, T, K and
kind of privacy. Each of its runs draws the participants, batches and noise that it would draw
alone, and agrees with that run to float tolerance. A run that diverges is reported as such and
leaves the others alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dpscaffold.config import Run
from dpscaffold.engine import Draw, Engine, State
from dpscaffold.errors import BadInput
from dpscaffold.federation import Federation
from dpscaffold.randomness.streams import Randomness
from dpscaffold.runs.history import HistoryRow
from dpscaffold.tasks.metrics import metrics_for, shown_metric
from dpscaffold.training.evaluator import Evaluator, Measures, Metrics, late
from dpscaffold.training.events import Listener, RoundDone, silence

#: Rows (participants of all runs) that one stack holds, by kind of device. Beyond it a CPU gains
#: nothing.
ROWS = {"cpu": 64, "cuda": 1024}

#: After this many rounds the host waits for the device, so that progress is what was done.
WAITS = 16


@dataclass(frozen=True)
class Schedule:
    """When to evaluate: every ``every`` rounds, and ``late`` times within the last 10 % of the
    rounds.

    ``full`` asks for losses and dissimilarities too, not for test accuracy alone.

    >>> Schedule(every=4, late=2).rounds(20)
    (4, 8, 12, 16, 19, 20)
    >>> Schedule(late=3).rounds(100)
    (91, 95, 100)
    """

    every: int | None = None
    late: int = 1
    full: bool = False

    def rounds(self, last: int) -> tuple[int, ...]:
        """The evaluated rounds of a run of ``last`` rounds; the last one is always among them."""
        regular = set(range(self.every, last + 1, self.every)) if self.every else set()
        span = max(1, round(0.1 * last))
        count = min(span, self.late)
        steps = max(1, count - 1)
        late = {last - math.floor(k * (span - 1) / steps + 0.5) for k in range(count)}
        return tuple(sorted(regular | late | {last}))


@dataclass
class Outcome:
    """What became of one run of a stack.

    ``history`` has one row per evaluated round with the metrics of the last iterate x^t,
    ``average`` those of the average of iterates that the plan asks for (empty without one), and
    ``diverged`` the round at which the parameters stopped being finite, else None. ``model`` are
    the parameters that the plan gives out: that average, or the last iterate.
    """

    setting: Run
    history: list[HistoryRow] = field(default_factory=list)
    average: Metrics = field(default_factory=dict)
    diverged: int | None = None
    seconds: float = 0.0
    model: Tensor | None = None

    def late(self, metric: str, fraction: float = 0.1) -> float | None:
        """The mean of a metric over the last ``fraction`` of rounds; None for a run that
        diverged."""
        return late(self.history, metric, self.setting.plan.rounds, fraction, self.diverged)


def stack_key(setting: Run) -> tuple[object, ...]:
    """Settings with equal keys may share a stack."""
    numbers = tuple(sorted(setting.algorithm.numbers.items()))
    return (*setting.structure.values(), numbers)


def split(
    settings: Sequence[Run], device: torch.device, rows: int | None = None
) -> list[list[int]]:
    """Positions of the settings, grouped into stacks of at most ``rows`` participants, in their
    order.

    >>> from dpscaffold import Logistic, Plan, scaffold, synthetic
    >>> roster = synthetic(users=10, records=20).roster
    >>> task = Logistic(40, 10)
    >>> runs = [Run(roster, task, scaffold(), Plan(rounds=r)) for r in (3, 4, 3)]
    >>> split(runs, torch.device("cpu"))
    [[0, 2], [1]]
    """
    limit = rows or ROWS[device.type]
    stacks: list[list[int]] = []
    open_stacks: dict[tuple[object, ...], tuple[int, int]] = {}
    for k, setting in enumerate(settings):
        key = stack_key(setting)
        place, held = open_stacks.get(key, (-1, limit))
        if held + setting.cohort_size > limit:
            stacks.append([])
            place, held = len(stacks) - 1, 0
        stacks[place].append(k)
        open_stacks[key] = (place, held + setting.cohort_size)
    return stacks


def train_stack(
    settings: Sequence[Run],
    federations: Sequence[Federation],
    schedule: Schedule | None = None,
    device: torch.device | str = "cpu",
    tell: Listener = silence,
    optima: Mapping[tuple[int, float], float] | None = None,
) -> list[Outcome]:
    """Run all settings, each on its federation, together and return each one's outcome.

    The settings must agree as :func:`stack_key` says; ``schedule`` says when the models are
    evaluated, and ``optima`` gives F(x*) by (id of the federation, λ).

    >>> from dpscaffold import Logistic, Plan, scaffold, synthetic
    >>> federation = synthetic(users=10, records=20)
    >>> plan = dict(rounds=2, local_steps=3, averaging="tail")
    >>> task = Logistic(40, 10)
    >>> plans = [Plan(seed=s, **plan) for s in (0, 1)]
    >>> runs = [Run(federation.roster, task, scaffold(), plan) for plan in plans]
    >>> [outcome.history[-1].round for outcome in train_stack(runs, [federation] * 2)]
    [2, 2]
    """
    if not settings:
        raise BadInput("too-few-runs", "a stack needs at least one run, and none was given")
    device, schedule = torch.device(device), schedule or Schedule()
    started, last = time.perf_counter(), settings[0].plan.rounds
    streams = shared_draws(settings)
    engine = Engine(settings, federations, device, streams=streams)
    evaluators = evaluators_of(settings, federations, device, optima or {}, schedule.full)

    def evaluate(models: Tensor) -> list[Metrics]:
        return measured(evaluators, models, schedule.full)

    outcomes = [Outcome(setting) for setting in settings]
    first = State.stack([State.initial(setting, device) for setting in settings])
    state = first
    diverged = torch.zeros(len(settings), dtype=torch.int64, device=device)
    evaluated = set(schedule.rounds(last))
    for number in range(1, last + 1):
        state = engine.round(state, _drawn(settings, streams, number)).state
        lost = ~torch.isfinite(state.params).all(1)
        diverged = diverged.where(~lost | (diverged > 0), number)
        if number in evaluated:
            for outcome, values in zip(outcomes, evaluate(state.params), strict=True):
                outcome.history.append(HistoryRow(number, values))
        if number % WAITS == 0 or number in evaluated:
            state = _restarted(state, first, lost, engine)  # waits for the device
        tell(RoundDone(number, last))

    # The final models and their averages; what follows a divergence is dropped.
    means: list[Metrics] = [{}] * len(outcomes)
    if bool(state.averaged.any()):
        means = evaluate(state.average)
    final = zip(outcomes, diverged.tolist(), means, state.output, strict=True)
    for outcome, end, mean, model in final:
        outcome.diverged, outcome.model = end or None, model.cpu()
        outcome.average = {} if end else mean
        outcome.history = [one for one in outcome.history if not end or one.round < end]
        outcome.seconds = (time.perf_counter() - started) / len(outcomes)
    return outcomes


def _restarted(state: State, first: State, lost: Tensor, engine: Engine) -> State:
    """Runs that are no longer finite begin again at x⁰: numbers that are none take longer."""
    for k in lost.nonzero().flatten().tolist():
        engine.memories.forget(k)
        for mine, fresh in zip(_tensors(state), _tensors(first), strict=True):
            mine[k] = fresh[k]
    return state


def _tensors(state: State) -> list[Tensor]:
    return [state.params, state.average, *state.server.slots.values()]


def measured(evaluators: Sequence[Evaluator], models: Tensor, full: bool) -> list[Metrics]:
    """The metrics of each evaluator's own model, (S, P). Without ``full``, and where accuracy is
    shown, all models of one federation are scored together."""
    groups: dict[int, list[int]] = {}  # by the federation's id, while the evaluators hold it
    for k, one in enumerate(evaluators):
        groups.setdefault(id(one.federation), []).append(k)
    rows: list[Metrics] = [{} for _ in evaluators]
    for members in groups.values():
        first = evaluators[members[0]]
        if full or shown_metric(first.federation.target) != "test_accuracy":
            for k in members:
                rows[k] = evaluators[k](models[k])
            continue
        for k, accuracy in zip(members, first.accuracies(models[members]), strict=True):
            rows[k]["test_accuracy"] = accuracy
    return rows


def _drawn(settings: Sequence[Run], streams: Sequence[Randomness], number: int) -> list[Draw]:
    """Who takes part in a round of each run; runs of one seed and equal cohorts share a draw."""
    known: dict[tuple[int, int, int], Draw] = {}
    draws = []
    for setting, one in zip(settings, streams, strict=True):
        key = id(one), setting.users, setting.cohort_size
        if key not in known:
            known[key] = Draw.all(one.cohort(number, *key[1:]))
        draws.append(known[key])
    return draws


def evaluators_of(
    settings: Sequence[Run],
    federations: Sequence[Federation],
    device: torch.device,
    optima: Mapping[tuple[int, float], float],
    full: bool,
) -> list[Evaluator]:
    """One evaluator per run; those of one federation share its records. Without ``full`` they
    measure the metric that is shown alone."""
    first: dict[int, Evaluator] = {}
    found = []
    for setting, data in zip(settings, federations, strict=True):
        if id(data) not in first:
            shown = metrics_for(data.target)[0].name
            measures = Measures() if full else Measures((shown,), training=False)
            first[id(data)] = Evaluator(data, setting.task, 0.0, device, measures=measures)
        strength = setting.plan.regularisation
        found.append(first[id(data)].sharing(strength, optima.get((id(data), strength))))
    return found


def shared_draws(settings: Sequence[Run]) -> list[Randomness]:
    """One object per seed. Runs of one seed draw the same participants, batches and noise whatever
    their step size, and the engine draws once for all that hold the same object. Secret runs keep
    their own.

    >>> from dpscaffold import Logistic, Plan, scaffold, synthetic
    >>> roster = synthetic(users=4, records=20).roster
    >>> plans = [Plan(user_ratio=0.5, seed=s) for s in (0, 0, 1)]
    >>> task = Logistic(40, 10)
    >>> drawn = shared_draws([Run(roster, task, scaffold(), plan) for plan in plans])
    >>> drawn[0] is drawn[1], drawn[0] is drawn[2]
    (True, False)
    """
    own = [setting.randomness() for setting in settings]
    first: dict[int, Randomness] = {}
    return [one if one.secret else first.setdefault(one.seed, one) for one in own]
