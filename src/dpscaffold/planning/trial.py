"""Step sizes tried on surrogates, all in one stack, and the one that does best on average."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import torch

from dpscaffold.config import Run
from dpscaffold.federation import Federation
from dpscaffold.planning.shape import Fidelity
from dpscaffold.planning.surrogate import (
    Kind,
    SurrogateAssumptions,
    SurrogateSetting,
    invented,
    kinds,
)
from dpscaffold.training.events import Listener, StackBegun, silence
from dpscaffold.training.stack import Outcome, Schedule, split, train_stack

#: What a choice may lose and still count as good: one point.
FLAT = 0.01

#: Scores of this many records that differ by less cannot be told apart: a tenth of a point. Above
#: 1 − ROOM little is left to gain, and it shrinks with what is left: surrogates may be too easy.
CLOSE, ROOM = 0.001, 0.1

#: Surrogates of each separation, each with its own data, participants and noise.
SEEDS = (0, 1)

#: Participants of a stack: surrogates are small, so more of them fit than real runs.
ROWS = {"cpu": 1024, "cuda": 4096}

#: Weights that a stack holds at most: that many numbers, several times over. On a CPU they stay in
#: its cache: a stack of a network that does not takes up to twice as long.
HELD = {"cpu": 1 << 20, "cuda": 1 << 31}


@dataclass(frozen=True)
class StepSizeTrial:
    """η₀ and the score of its averaged model on every surrogate: accuracy, or R² of a number. A run
    that diverged scores 0. ``own_models`` of them, the last, have users with models of their
    own."""

    rate: float
    scores: tuple[float, ...]
    own_models: int = 0

    def error(self, other: StepSizeTrial) -> float:
        """The standard error of the difference of two mean scores, from the differences on each
        surrogate.

        >>> one, other = StepSizeTrial(1.0, (0.5, 0.9)), StepSizeTrial(3.0, (0.6, 0.9))
        >>> round(one.error(other), 3)
        0.05
        """
        apart = [a - b for a, b in zip(self.scores, other.scores, strict=True)]
        own, count = self.own_models, len(apart)
        if count < 2:
            return 0.0
        first = [(0.5 if own else 1.0) / (count - own)] * (count - own)
        weights = first + [0.5 / own] * own if own else first
        mean = math.fsum(w * d for w, d in zip(weights, apart, strict=True))
        squares = (w**2 * (d - mean) ** 2 for w, d in zip(weights, apart, strict=True))
        return math.sqrt(math.fsum(squares) * count / (count - 1))

    @property
    def score(self) -> float:
        """The mean; both kinds of surrogates weigh alike.

        >>> round(StepSizeTrial(0.1, (0.5, 0.7, 0.9)).score, 9)
        0.7
        >>> round(StepSizeTrial(0.1, (0.5, 0.7, 0.8), own_models=1).score, 9)
        0.7
        """
        first = self.scores[: len(self.scores) - self.own_models]
        means = [fmean(part) for part in (first, self.scores[len(first) :]) if part]
        return fmean(means)


def best_trial(trials: Sequence[StepSizeTrial]) -> StepSizeTrial:
    """The smallest η₀ whose mean over surrogates is the best, or so close to it that surrogates
    cannot tell them apart.

    >>> scores = {1.0: 0.80, 3.0: 0.8995, 10.0: 0.90}
    >>> best_trial([StepSizeTrial(rate, (score,)) for rate, score in scores.items()]).rate
    3.0
    >>> easy = {1.0: 0.9995, 3.0: 0.9999}
    >>> best_trial([StepSizeTrial(rate, (score,)) for rate, score in easy.items()]).rate
    3.0
    """
    least = close_to(max(trial.score for trial in trials))
    return min((one for one in trials if one.score >= least), key=lambda trial: trial.rate)


def close_to(score: float) -> float:
    """The least score that surrogates cannot tell from this one."""
    return score - CLOSE * min(1.0, max(0.0, 1 - score) / ROOM)


def within_error(trials: Sequence[StepSizeTrial]) -> StepSizeTrial:
    """The smallest η₀ whose mean over surrogates is within one standard error of the best: the
    one-standard-error rule.

    >>> trials = [StepSizeTrial(1.0, (0.5, 0.9)), StepSizeTrial(3.0, (0.58, 0.9))]
    >>> within_error(trials).rate, best_trial(trials).rate
    (1.0, 3.0)
    """
    best = best_trial(trials)
    near = [one for one in trials if one.score >= best.score - best.error(one)]
    return min([best, *near], key=lambda trial: trial.rate)


@dataclass(frozen=True)
class Choice:
    """What was tried for one setting, in the order of η₀. ``cautious`` chooses by the
    one-standard-error rule, unless the η₀ is ``settled``."""

    setting: Run
    trials: tuple[StepSizeTrial, ...]
    cautious: bool = False
    settled: float | None = None

    @property
    def best(self) -> StepSizeTrial:
        """That which the rule chooses."""
        if self.settled is not None:
            return next(trial for trial in self.trials if trial.rate == self.settled)
        return within_error(self.trials) if self.cautious else best_trial(self.trials)

    @property
    def score(self) -> float:
        """That of the best."""
        return self.best.score

    @property
    def rate(self) -> float:
        """η₀."""
        return self.best.rate

    @property
    def flat(self) -> tuple[float, float]:
        """The smallest and largest η₀ around the best, of those tried, that lose at most a
        point."""
        place = self.trials.index(self.best)
        low = high = place
        while low > 0 and self.trials[low - 1].score >= self.score - FLAT:
            low -= 1
        while high < len(self.trials) - 1 and self.trials[high + 1].score >= self.score - FLAT:
            high += 1
        return self.trials[low].rate, self.trials[high].rate


@dataclass
class Bench:
    """Runs settings on their surrogates, all that fit together in one stack."""

    guess: SurrogateAssumptions
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    tell: Listener = silence
    seeds: tuple[int, ...] = SEEDS
    fidelity: Fidelity = field(default_factory=Fidelity)
    title: str = "planning"
    stand_ins: dict[tuple[object, ...], Federation] = field(default_factory=dict)

    def choices(self, asked: Sequence[tuple[Run, Sequence[float]]]) -> list[Choice]:
        """The best η₀ of every setting among rates of its own, all of them at once."""
        found = iter(self.run([(one, rate) for one, rates in asked for rate in rates]))
        return [at_rate(Choice(one, tuple(next(found) for _ in rates))) for one, rates in asked]

    def run(self, asked: Sequence[tuple[Run, float]]) -> list[StepSizeTrial]:
        """One trial for each (setting, η₀)."""
        runs, data, owner = self._runs(asked)
        scores: list[list[float]] = [[] for _ in asked]
        found = self._train(runs, data)
        for k, outcome, federation in zip(owner, found, data, strict=True):
            scores[k].append(_score(outcome, federation))
        return [
            StepSizeTrial(rate, tuple(scores[k]), self._own_models(one))
            for k, (one, rate) in enumerate(asked)
        ]

    def _own_models(self, setting: Run) -> int:
        """How many of the surrogates have users with models of their own."""
        classes = setting.roster.schema.target.classes
        return len(self.seeds) if self.guess.own_models and classes else 0

    def _runs(
        self, asked: Sequence[tuple[Run, float]]
    ) -> tuple[list[Run], list[Federation], list[int]]:
        """The runs on all surrogates, their data, and which of ``asked`` each belongs to."""
        runs, data, owner = [], [], []
        reduced = {
            id(setting): SurrogateSetting.of(setting, self.fidelity)
            for setting in {id(s): s for s, _ in asked}.values()
        }
        for k, (setting, rate) in enumerate(asked):
            small = reduced[id(setting)]
            classes = len(setting.roster.schema.target.classes)
            for kind in kinds(self.guess, classes, self.seeds):
                stand_in = self._stand_in(small, kind)
                data.append(stand_in)
                runs.append(small.on(stand_in, rate, kind.seed))
                owner.append(k)
        return runs, data, owner

    def _stand_in(self, small: SurrogateSetting, kind: Kind) -> Federation:
        """The surrogate of this kind, made once for all settings that agree in what it is made
        from."""
        shape, target = small.shape, small.setting.roster.schema.target.kind
        key = (shape.users, shape.records, shape.features, shape.classes, target, kind)
        if key not in self.stand_ins:
            self.stand_ins[key] = invented(
                shape, target, self.guess, kind.separation, kind.seed, kind.differ
            )
        return self.stand_ins[key]

    def _train(self, runs: list[Run], data: list[Federation]) -> list[Outcome]:
        """What became of every run."""
        outcomes: dict[int, Outcome] = {}
        kind, most = self.device.type, max((run.task.parameters for run in runs), default=1)
        stacks = split(runs, self.device, rows=max(1, min(ROWS[kind], HELD[kind] // most)))
        for number, stack in enumerate(stacks, 1):
            first = runs[stack[0]].plan
            work = float(sum(runs[k].cohort_size for k in stack)) * first.rounds
            self.tell(StackBegun(self.title, number, len(stacks), first.rounds, work))
            found = train_stack(
                [runs[k] for k in stack],
                [data[k] for k in stack],
                Schedule(),
                self.device,
                self.tell,
            )
            outcomes |= zip(stack, found, strict=True)
        return [outcomes[k] for k in range(len(runs))]


def at_rate(choice: Choice) -> Choice:
    """The choice with its own best η₀ in its setting."""
    plan = choice.setting.plan.changed(learning_rate=choice.rate)
    return replace(choice, setting=replace(choice.setting, plan=plan))


def _score(outcome: Outcome, federation: Federation) -> float:
    """Accuracy of the averaged model, or R² = 1 − RMSE²/Var(y) at least 0."""
    if outcome.diverged is not None:
        return 0.0
    if federation.target.kind == "class":
        return outcome.average["test_accuracy"] or 0.0
    error = outcome.average["test_rmse"]
    if error is None or not math.isfinite(error):
        return 0.0
    spread = float(federation.test.labels.double().var())
    return max(0.0, 1 - error**2 / spread)
