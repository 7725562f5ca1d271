"""Many runs at once: seeds, heterogeneity levels and step sizes that share shapes, in one
simulator.

A stack is a list of :class:`~dpscaffold.config.Run` that agree in task, algorithm, T, K and
kind of privacy. Each of its runs draws the participants, batches and noise that it would draw
alone, and agrees with that run to float tolerance. A run that diverges is reported as such and
leaves the others alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dpscaffold.config import Run
from dpscaffold.engines import Hardware, Simulator, State
from dpscaffold.engines.fast.lockstep import Lockstep
from dpscaffold.engines.rounds import plain_draws, stacked_rounds
from dpscaffold.errors import BadInput
from dpscaffold.federation import Federation
from dpscaffold.randomness.streams import Randomness
from dpscaffold.runs.history import HistoryRow
from dpscaffold.training.evaluator import Evaluator, Metrics, evaluate_all, late
from dpscaffold.training.events import Listener, RoundDone, silence
from dpscaffold.training.shared_draws import shared_draws

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
    device = torch.device(device)
    schedule = schedule or Schedule()
    started = time.perf_counter()
    streams = shared_draws(settings)
    evaluators = evaluators_of(settings, federations, device, optima)
    given = (settings, federations, streams, device)
    in_step, outcomes = Lockstep.of(*given), None
    if in_step is not None:
        with suppress(torch.cuda.OutOfMemoryError):  # the simulator makes do with less
            outcomes = _trained(in_step, settings, evaluators, schedule, tell)
        in_step = None
    outcomes = outcomes or _trained(RunByRun(*given), settings, evaluators, schedule, tell) or []
    for outcome in outcomes:
        outcome.seconds = (time.perf_counter() - started) / len(outcomes)
    return outcomes


def _trained(
    moved: RunByRun | Lockstep,
    settings: Sequence[Run],
    evaluators: Sequence[Evaluator],
    schedule: Schedule,
    tell: Listener,
) -> list[Outcome] | None:
    """All rounds of all runs; None where they have to be taken run by run after all."""
    outcomes = [Outcome(setting) for setting in settings]
    last = settings[0].plan.rounds
    evaluated = set(schedule.rounds(last))
    for round in moved.rounds():
        models = moved.models
        if round in evaluated:
            found = evaluate_all(evaluators, models, schedule.full)
            rows = [HistoryRow(round, values) for values in found]
            for outcome, row in zip(outcomes, rows, strict=True):
                outcome.history.append(row)
        tell(RoundDone(round, last))
    if moved.in_vain:
        return None
    _conclude(outcomes, moved, evaluators, schedule.full)
    return outcomes


def _conclude(
    outcomes: Sequence[Outcome],
    moved: RunByRun | Lockstep,
    evaluators: Sequence[Evaluator],
    full: bool,
) -> None:
    """Fill in the final models and their averages, and drop what follows a divergence."""
    averages = moved.averages
    means = evaluate_all(evaluators, averages, full) if averages else [{}] * len(outcomes)
    final = averages or moved.models
    for outcome, lost, mean, model in zip(outcomes, moved.diverged, means, final, strict=True):
        outcome.diverged, outcome.model = lost, model.cpu()
        outcome.average = mean if lost is None else {}
        outcome.history = [one for one in outcome.history if lost is None or one.round < lost]


class RunByRun:
    """A stack in the simulator, whose host moves the server of one run after the other."""

    def __init__(
        self,
        settings: Sequence[Run],
        federations: Sequence[Federation],
        streams: Sequence[Randomness],
        device: torch.device,
    ) -> None:
        self.settings, self.streams, self.device = settings, streams, device
        self.engine = Simulator(settings, federations, Hardware(device), streams)
        self.states = [State.initial(setting, device) for setting in settings]
        self.diverged: list[int | None] = [None] * len(settings)
        #: A round that was cut short comes again at once.
        self.in_vain = False

    def rounds(self) -> Iterator[int]:
        """The rounds, each when it is done."""
        drawings = [plain_draws(*one) for one in zip(self.settings, self.streams, strict=True)]
        for done in stacked_rounds(self.settings, self.engine, drawings, self.states):
            if not self._set_aside(done[0].number):
                yield done[0].number

    @property
    def models(self) -> list[Tensor]:
        """x^t of every run."""
        return [state.params for state in self.states]

    @property
    def averages(self) -> list[Tensor] | None:
        """The averaged iterates; None where the plan asks for none."""
        return [state.average for state in self.states] if self.states[0].averaged else None

    def _set_aside(self, round: int) -> bool:
        """Note runs that are no longer finite, and restart them from x⁰ so that their rows cost no
        surprises; or say that the round was cut short, and comes again."""
        finite = torch.isfinite(torch.stack(self.models)).all(1).tolist()
        if not all(finite) and self.engine.cut_short():
            return True
        for k in (k for k, fine in enumerate(finite) if not fine):
            self.diverged[k] = self.diverged[k] or round
            fresh = State.initial(self.settings[k], self.device)
            self.states[k] = replace(fresh, round=round, averaged=self.states[k].averaged)
            self.engine.begin_anew(k)
        return False


def evaluators_of(
    settings: Sequence[Run],
    federations: Sequence[Federation],
    device: torch.device,
    optima: Mapping[tuple[int, float], float] | None = None,
) -> list[Evaluator]:
    """One evaluator per run; those of one federation share its records."""
    first: dict[int, Evaluator] = {}
    found = []
    task = settings[0].task
    for setting, data in zip(settings, federations, strict=True):
        strength = setting.plan.regularisation
        base = first.setdefault(id(data), Evaluator(data, task, strength, device))
        found.append(base.sharing(strength, (optima or {}).get((id(data), strength))))
    return found
