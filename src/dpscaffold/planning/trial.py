"""Step sizes tried on surrogates, all in one stack, and the one that does best on average."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import torch

from dpscaffold.config import Run
from dpscaffold.errors import BadInput
from dpscaffold.federation import Federation
from dpscaffold.planning.shape import Fidelity, Shape
from dpscaffold.planning.surrogate import (
    Kind,
    SurrogateAssumptions,
    SurrogateSetting,
    invented,
    kinds,
)
from dpscaffold.training.events import Listener, StackBegun, silence
from dpscaffold.training.stack import Outcome, Schedule, split, train_stack

#: η₀ that are tried first, a factor of about three apart; more follow where the best is at an end.
RATES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)

#: How many times the grid is widened by one on the side of the best.
WIDENINGS = 4

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

    @property
    def ends(self) -> list[float]:
        """The next η₀, a factor of three on, where the best is the first or last of those tried."""
        rates = [trial.rate for trial in self.trials]
        found = []
        if self.rate == rates[0]:
            found.append(_round(rates[0] / 3))
        if self.rate == rates[-1]:
            found.append(_round(rates[-1] * 3))
        return found


def choose_rates(
    settings: Sequence[Run],
    guess: SurrogateAssumptions,
    rates: Sequence[float] | None = None,
    widen: bool = True,
    seeds: Sequence[int] = SEEDS,
    device: torch.device | str = "cpu",
    tell: Listener = silence,
) -> list[Choice]:
    """The best η₀ of every setting, each on its own surrogates; nothing but their public facts is
    used. With ``widen`` the grid goes on where the best lies at an end."""
    if rates is not None and not rates:
        raise BadInput("empty-list", "rates is empty; give the step sizes to choose from")
    bench = Bench(guess, torch.device(device), tell, tuple(seeds))
    return search([(one, rates or first_rates(one)) for one in settings], bench, widen)


def first_rates(
    setting: Run, fidelity: Fidelity | None = None, rates: Sequence[float] = RATES
) -> list[float]:
    """The η₀ to begin with: ``rates`` where the surrogate has the rounds and the classes of the
    setting, else those that are as much on it."""
    pace = Shape.of(setting, fidelity).pace(setting)
    return [_round(rate / pace) for rate in rates]


def search(
    asked: Sequence[tuple[Run, Sequence[float]]], bench: Bench, widen: bool = True
) -> list[Choice]:
    """The best η₀ of every setting among rates of its own, all of them at once; with ``widen`` one
    more follows at an end where the best lies, wave by wave.

    Where the bench looks ahead, all that may follow is tried in the first wave. It counts as tried
    only if it would have been, so the choices are the same."""
    searches = [
        _StepSizeSearch(setting, list(rates), _beyond(rates) if widen and bench.ahead else [])
        for setting, rates in asked
    ]
    for _ in range(WIDENINGS + 1 if widen else 1):
        _run_wave(searches, bench)
        if not any(one.wanted for one in searches):
            break
    return [one.choice for one in searches]


def _run_wave(searches: Sequence[_StepSizeSearch], bench: Bench) -> None:
    """Try everything that is missing at once, and choose."""
    missing = [(one, rate) for one in searches for rate in one.missing]
    found = bench.run([(one.setting, rate) for one, rate in missing]) if missing else []
    for (one, rate), trial in zip(missing, found, strict=True):
        one.known[rate] = trial
    for one in searches:
        one.choose()


@dataclass
class _StepSizeSearch:
    """The search of one setting's η₀: the rates ``wanted`` next, and those to look ``ahead`` at."""

    setting: Run
    wanted: list[float]
    ahead: list[float]
    known: dict[float, StepSizeTrial] = field(default_factory=dict)
    tried: dict[float, StepSizeTrial] = field(default_factory=dict)
    choice: Choice = field(init=False)

    @property
    def missing(self) -> list[float]:
        """The rates whose trials are not known yet."""
        rates = dict.fromkeys([*self.wanted, *(self.ahead if self.wanted else [])])
        return [rate for rate in rates if rate not in self.known]

    def choose(self) -> None:
        """Choose among what was wanted so far; what is wanted next follows."""
        self.tried |= {rate: self.known[rate] for rate in self.wanted}
        self.choice = _choice(self.setting, self.tried)
        self.wanted = self.choice.ends


def _beyond(rates: Sequence[float]) -> list[float]:
    """The η₀ that widening may come to, on both sides.

    >>> _beyond([0.01, 0.03, 0.1])
    [0.003, 0.3, 0.001, 0.9, 0.0003, 3.0, 0.0001, 9.0]
    """
    low, high, found = min(rates), max(rates), []
    for _ in range(WIDENINGS):
        low, high = _round(low / 3), _round(high * 3)
        found += [low, high]
    return found


def choose_rate(
    setting: Run, guess: SurrogateAssumptions, device: torch.device | str = "cpu"
) -> Choice:
    """The best η₀ of one setting.

    >>> from dpscaffold import Gaussian, Logistic, Plan, scaffold, synthetic
    >>> roster = synthetic(users=10, records=40).roster
    >>> plan = Plan(rounds=8, local_steps=2, regularisation=0.0)
    >>> public = Run(roster, Logistic(40, 10), scaffold(), plan, Gaussian(1.0, 1.0))
    >>> len(choose_rate(public, SurrogateAssumptions()).trials) >= len(RATES)
    True
    """
    return choose_rates([setting], guess, device=device)[0]


@dataclass
class Bench:
    """Runs settings on their surrogates, all that fit together in one stack."""

    guess: SurrogateAssumptions
    device: torch.device
    tell: Listener
    seeds: tuple[int, ...] = SEEDS
    fidelity: Fidelity = field(default_factory=Fidelity)
    title: str = "planning"
    stand_ins: dict[tuple[object, ...], Federation] = field(default_factory=dict)

    @property
    def ahead(self) -> bool:
        """Whether to try what may be asked for next, too: a GPU's stack takes as long as its rounds
        do, however wide it is, and one after it takes that long again."""
        return self.device.type == "cuda"

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


def _choice(setting: Run, trials: dict[float, StepSizeTrial]) -> Choice:
    ordered = tuple(trials[rate] for rate in sorted(trials))
    choice = Choice(setting, ordered)
    plan = setting.plan.changed(learning_rate=choice.rate)
    return replace(choice, setting=replace(setting, plan=plan))


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


def _round(rate: float) -> float:
    return float(f"{rate:.1g}")
