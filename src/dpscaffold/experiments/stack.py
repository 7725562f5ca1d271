"""Many runs at once: seeds, heterogeneity levels and step sizes that share shapes, in one
simulator.

A stack is a list of :class:`~dpscaffold.setting.Setting` that agree in task, algorithm, T, K and
kind of privacy. Each of its runs draws the participants, batches and noise that it would draw
alone, and agrees with that run to float tolerance. A run that diverges is reported as such and
leaves the others alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dpscaffold.engines import Hardware, Simulator, State
from dpscaffold.errors import BadInput
from dpscaffold.events import Evaluated, Listener, RoundDone, silence
from dpscaffold.experiments.beside import Evaluations
from dpscaffold.experiments.draws import shared_draws
from dpscaffold.federation import Federation
from dpscaffold.metrics import Evaluator, evaluate_all, judging, late
from dpscaffold.rounds import plain_draws, stacked_rounds
from dpscaffold.setting import Setting

#: Rows (participants of all runs) that one stack holds, by kind of device. Beyond it a CPU gains
#: nothing.
ROWS = {"cpu": 64, "cuda": 1024}


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
        gaps = max(1, count - 1)
        late = {last - math.floor(k * (span - 1) / gaps + 0.5) for k in range(count)}
        return tuple(sorted(regular | late | {last}))


@dataclass
class Outcome:
    """What became of one run of a stack.

    ``history`` has one row per evaluated round with the metrics of the last iterate x^t,
    ``average`` those of the average of iterates that the plan asks for (empty without one), and
    ``diverged`` the round at which the parameters stopped being finite, else None. ``model`` are
    the parameters that the plan gives out: that average, or the last iterate.
    """

    setting: Setting
    history: list[dict[str, Any]] = field(default_factory=list)
    average: dict[str, Any] = field(default_factory=dict)
    diverged: int | None = None
    seconds: float = 0.0
    model: Tensor | None = None

    def late(self, metric: str, fraction: float = 0.1) -> float | None:
        """The mean of a metric over the last ``fraction`` of rounds; None for a run that
        diverged."""
        return late(self.history, metric, self.setting.plan.rounds, fraction, self.diverged)


def stack_key(setting: Setting) -> tuple[object, ...]:
    """Settings with equal keys may share a stack."""
    numbers = tuple(sorted(setting.algorithm.numbers.items()))
    return (*setting.structure.values(), numbers)


def split(
    settings: Sequence[Setting], device: torch.device, rows: int | None = None
) -> list[list[int]]:
    """Positions of the settings, grouped into stacks of at most ``rows`` participants, in their
    order.

    >>> from dpscaffold import Logistic, Plan, scaffold, synthetic
    >>> roster = synthetic(users=10, records=20).roster
    >>> task = Logistic(40, 10)
    >>> runs = [Setting(roster, task, scaffold(), Plan(rounds=r)) for r in (3, 4, 3)]
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
    settings: Sequence[Setting],
    federations: Sequence[Federation],
    schedule: Schedule | None = None,
    device: torch.device | str = "cpu",
    tell: Listener = silence,
    optima: Mapping[tuple[int, float], float] | None = None,
) -> list[Outcome]:
    """Run all settings, each on its federation, together and return each one's outcome.

    The settings must agree as :func:`stack_key` says; ``schedule`` says when the models are judged,
    and
    ``optima`` gives F(x*) by (id of the federation, λ).

    >>> from dpscaffold import Logistic, Plan, scaffold, synthetic
    >>> federation = synthetic(users=10, records=20)
    >>> plan = dict(rounds=2, local_steps=3, averaging="tail")
    >>> task = Logistic(40, 10)
    >>> plans = [Plan(seed=s, **plan) for s in (0, 1)]
    >>> runs = [Setting(federation.roster, task, scaffold(), plan) for plan in plans]
    >>> [outcome.history[-1]["round"] for outcome in train_stack(runs, [federation] * 2)]
    [2, 2]
    """
    if not settings:
        raise BadInput("a stack needs at least one run, and none was given")
    device = torch.device(device)
    schedule = schedule or Schedule()
    started = time.perf_counter()
    streams = shared_draws(settings)
    engine = Simulator(settings, federations, Hardware.on(device), streams)
    states = [State.initial(setting, device) for setting in settings]
    evaluators = evaluators_of(settings, federations, device, optima)
    outcomes = [Outcome(setting) for setting in settings]
    evaluated = set(schedule.rounds(settings[0].plan.rounds))
    drawings = [plain_draws(*one) for one in zip(settings, streams, strict=True)]
    last = settings[0].plan.rounds
    with Evaluations(evaluators, schedule.full, device) as evaluations:
        for done in stacked_rounds(settings, engine, drawings, states):
            round = done[0].number
            if _set_aside_diverged(engine, states, outcomes, round):
                continue
            models = [state.params for state in states]
            if round in evaluated:
                evaluations.ask(round, models)
            rows: list[dict[str, Any]] = [{"round": round} for _ in states]
            for judged, found in evaluations.found(wait=round == last):
                known = [{"round": judged, **row} for row in found]
                _note(outcomes, known, judged)
                tell(Evaluated(judged, known))
                rows = known if judged == round else rows
            tell(RoundDone(round, last, models, rows))
    if states[0].averaged:
        means = evaluate_all(evaluators, [state.average for state in states], schedule.full)
        for outcome, row in zip(outcomes, means, strict=True):
            outcome.average = row if outcome.diverged is None else {}
    for outcome, state in zip(outcomes, states, strict=True):
        outcome.model = (state.average if state.averaged else state.params).cpu()
        outcome.seconds = (time.perf_counter() - started) / len(outcomes)
    return outcomes


def evaluators_of(
    settings: Sequence[Setting],
    federations: Sequence[Federation],
    device: torch.device,
    optima: Mapping[tuple[int, float], float] | None = None,
) -> list[Evaluator]:
    """One evaluator per run; those of one federation share its records."""
    first: dict[int, Evaluator] = {}
    found = []
    task = judging(settings[0].task, device)
    for setting, data in zip(settings, federations, strict=True):
        strength = setting.plan.regularisation
        base = first.setdefault(id(data), Evaluator(data, task, strength, device))
        found.append(base.sharing(strength, (optima or {}).get((id(data), strength))))
    return found


def _note(outcomes: Sequence[Outcome], rows: Sequence[dict[str, Any]], round: int) -> None:
    """Add the evaluated round to the history of the runs that were still finite then."""
    for outcome, row in zip(outcomes, rows, strict=True):
        if outcome.diverged is None or outcome.diverged > round:
            outcome.history.append(row)


def _set_aside_diverged(
    engine: Simulator, states: list[State], outcomes: Sequence[Outcome], round: int
) -> bool:
    """Note runs that are no longer finite, and restart them from x⁰ so that their rows cost no
    surprises; or say that the round was cut short, and comes again."""
    finite = torch.isfinite(torch.stack([state.params for state in states])).all(1).tolist()
    if not all(finite) and engine.cut_short():
        return True
    for k, (outcome, fine) in enumerate(zip(outcomes, finite, strict=True)):
        if not fine:
            if outcome.diverged is None:
                outcome.diverged = round
            fresh = State.initial(outcome.setting, engine.device)
            states[k] = replace(fresh, round=round, averaged=states[k].averaged)
            engine.begin_anew(k)
    return False
