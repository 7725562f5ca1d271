"""Step sizes tried on surrogates, all in one stack, and the one that does best on average."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import torch

from dpscaffold.errors import BadInput
from dpscaffold.federation import Federation
from dpscaffold.planning.shape import Shape
from dpscaffold.planning.surrogate import (
    Kind,
    SurrogateAssumptions,
    SurrogateSetting,
    invented,
    kinds,
)
from dpscaffold.setting import Setting
from dpscaffold.training.events import Listener, StackBegun, silence
from dpscaffold.training.stack import Outcome, Schedule, split, train_stack

#: η₀ that are tried first, a factor of about three apart; more follow where the best is at an end.
RATES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)

#: How many times the grid is widened by one on the side of the best.
WIDENINGS = 4

#: What a choice may lose and still count as good: one point.
FLAT = 0.01

#: Scores of this many records that differ by less cannot be told apart: a tenth of a point.
CLOSE = 0.001

#: Surrogates of each separation, each with its own data, participants and noise.
SEEDS = (0, 1)

#: Participants of a stack: surrogates are small, so more of them fit than real runs.
ROWS = {"cpu": 1024, "cuda": 4096}

#: Weights that a stack holds at most: that many numbers, several times over.
HELD = {"cpu": 1 << 27, "cuda": 1 << 31}


@dataclass(frozen=True)
class StepSizeTrial:
    """η₀ and the score of its averaged model on every surrogate: accuracy, or R² of a number. A run
    that diverged scores 0. ``own_models`` of them, the last, have users with models of their
    own."""

    rate: float
    scores: tuple[float, ...]
    own_models: int = 0

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
    """
    most = max(trial.score for trial in trials)
    close = [trial for trial in trials if trial.score >= most - CLOSE]
    return min(close, key=lambda trial: trial.rate)


@dataclass(frozen=True)
class Choice:
    """What was tried for one setting, in the order of η₀."""

    setting: Setting
    trials: tuple[StepSizeTrial, ...]

    @property
    def best(self) -> StepSizeTrial:
        """That which the rule chooses."""
        return best_trial(self.trials)

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
    settings: Sequence[Setting],
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


def first_rates(setting: Setting) -> list[float]:
    """The η₀ to begin with: :data:`RATES` where the surrogate has the rounds and the classes of the
    setting, else those that are as much on it."""
    pace = Shape.of(setting).pace(setting)
    return [_round(rate / pace) for rate in RATES]


def search(
    asked: Sequence[tuple[Setting, Sequence[float]]], bench: Bench, widen: bool = True
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

    setting: Setting
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
    setting: Setting, guess: SurrogateAssumptions, device: torch.device | str = "cpu"
) -> Choice:
    """The best η₀ of one setting.

    >>> from dpscaffold import Gaussian, Logistic, Plan, scaffold, synthetic
    >>> roster = synthetic(users=10, records=40).roster
    >>> plan = Plan(rounds=8, local_steps=2, regularisation=0.0)
    >>> public = Setting(roster, Logistic(40, 10), scaffold(), plan, Gaussian(1.0, 1.0))
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
    stand_ins: dict[tuple[object, ...], Federation] = field(default_factory=dict)

    @property
    def ahead(self) -> bool:
        """Whether to try what may be asked for next, too: a GPU's stack takes as long as its rounds
        do, however wide it is, and one after it takes that long again."""
        return self.device.type == "cuda"

    def run(self, asked: Sequence[tuple[Setting, float]]) -> list[StepSizeTrial]:
        """One trial for each (setting, η₀)."""
        runs, data, owner = [], [], []
        reduced = {
            id(setting): SurrogateSetting.of(setting)
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
        scores: list[list[float]] = [[] for _ in asked]
        for k, outcome, federation in zip(owner, self._train(runs, data), data, strict=True):
            scores[k].append(_score(outcome, federation))
        own = len(self.seeds) if self.guess.own_models else 0
        return [
            StepSizeTrial(rate, tuple(found), own if len(one.roster.schema.target.classes) else 0)
            for (one, rate), found in zip(asked, scores, strict=True)
        ]

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

    def _train(self, runs: list[Setting], data: list[Federation]) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        kind, most = self.device.type, max((run.task.parameters for run in runs), default=1)
        stacks = split(runs, self.device, rows=max(1, min(ROWS[kind], HELD[kind] // most)))
        for number, stack in enumerate(stacks, 1):
            first = runs[stack[0]].plan
            work = float(sum(runs[k].cohort_size for k in stack)) * first.rounds
            self.tell(StackBegun("planning", number, len(stacks), first.rounds, work))
            found = train_stack(
                [runs[k] for k in stack],
                [data[k] for k in stack],
                Schedule(),
                self.device,
                self.tell,
            )
            outcomes |= dict(zip(stack, found, strict=True))
        return [outcomes[k] for k in range(len(runs))]


def _choice(setting: Setting, trials: dict[float, StepSizeTrial]) -> Choice:
    ordered = tuple(trials[rate] for rate in sorted(trials))
    choice = Choice(setting, ordered)
    plan = replace(setting.plan, learning_rate=choice.rate)
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
