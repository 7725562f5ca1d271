"""The stages of a search for a whole plan: a quick look at all candidates, a close one at the best,
and a last one at the chosen.

A *quick look* tries five η₀, a factor of three apart around the one that the run would choose by
itself, on half of the surrogates, in few rounds. It finds the η₀ of every candidate. A *close look*
compares the best of them on all surrogates, η₀ by η₀. The *last look* tries the chosen one with η₀
a factor of √3 smaller and larger.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dpscaffold.algorithms.registry import RIVALS
from dpscaffold.config import Run
from dpscaffold.planning.shape import Fidelity
from dpscaffold.planning.trial import (
    SEEDS,
    Bench,
    Choice,
    StepSizeTrial,
    at_rate,
    close_to,
)

#: Differences that count as none where surrogates cannot tell better: half a point.
TOLERANCE = 0.005

#: A candidate that loses more than this in a quick look is not looked at closely.
PROMISING = 0.02

#: Candidates that are looked at closely, at most.
CLOSE_LOOKS = 2

#: Steps of the longest runs that surrogates still follow step by step.
MOST_STEPS = 50

QUICK_LOOK = Fidelity(12, MOST_STEPS, steps_in_all=1250, work=2.7e9)
CLOSE_LOOK = Fidelity(12, MOST_STEPS, work=6e9)

#: η₀ of a quick look, as multiples of the one that a run chooses by itself
#: (:func:`~dpscaffold.config.rate.choose_rate`), and of a close look, of the best so far.
QUICK, CLOSE = (1 / 9, 1 / 3, 1.0, 3.0, 9.0), (1 / 3, 1.0, 3.0)

#: How far the η₀ of the last look lie from the chosen one: half as far as those before, in logs.
FINER = math.sqrt(3.0)

#: Surrogates of a quick look: half of them.
FEWER = SEEDS[:1]


@dataclass
class PlanSearch:
    """Looks at candidates on surrogates."""

    bench: Bench

    def _quick(self, title: str) -> Bench:
        return replace(self.bench, seeds=FEWER, fidelity=QUICK_LOOK, title=title)

    def _close(self, title: str) -> Bench:
        return replace(self.bench, fidelity=CLOSE_LOOK, title=title)

    def compared(self, settings: Sequence[Run]) -> list[Choice]:
        """Every candidate after a quick look, the promising ones after a close one."""
        found = self._quick("trying step sizes").choices(_around(settings, QUICK))
        near = promising(found)
        close = self._close("comparing the best candidates")
        tried = close.choices(_around([one.setting for one in near], CLOSE))
        return [at_rate(replace(one, cautious=True)) for one in tried] + [
            one for one in found if one not in near
        ]

    def refined(self, best: Choice) -> Choice:
        """The chosen candidate with η₀ a factor of √3 smaller or larger, if that is better."""
        rates = [_digits(best.rate / FINER), _digits(best.rate * FINER)]
        bench = self._close("trying step sizes in between")
        [finer] = bench.choices([(best.setting, rates)])
        return best_of(best, finer.trials)

    def without_privacy(self, best: Choice) -> Choice:
        """The same candidate without privacy, with the same step size or a larger one."""
        plain, rates = noise_free(best.setting), [best.rate, 3 * best.rate]
        return self._close("training without privacy").choices([(plain, rates)])[0]


def promising(found: Sequence[Choice]) -> list[Choice]:
    """The candidates whose score is near the best, the best first, and at most a few."""
    ordered = sorted(found, key=lambda one: -one.score)
    best = ordered[0]
    near = [one for one in ordered if one.score >= best.score - PROMISING]
    return near[:CLOSE_LOOKS]


def preferred(tried: Sequence[Choice]) -> Choice:
    """The best candidate. Of those that surrogates cannot tell from it, which is within the
    standard error of the difference and at least half a point, the algorithm that is
    made for users who differ; of several of these the best."""
    close = [one for one in tried if one.cautious] or list(tried)
    best = max(close, key=lambda one: one.score)
    ties = [one for one in close if one.score >= best.score - _indistinct(best.best, one.best)]
    drifting = [one for one in ties if one.setting.algorithm.name == RIVALS[0]]
    return max(drifting or ties, key=lambda one: one.score)


def _indistinct(best: StepSizeTrial, other: StepSizeTrial) -> float:
    return max(TOLERANCE, best.error(other))


def best_of(chosen: Choice, finer: Sequence[StepSizeTrial]) -> Choice:
    """The choice with the best η₀ of its own and ``finer`` ones. What is within a tenth of a point
    of it counts as equal: then its own η₀ stays.

    The one-standard-error rule chose among η₀ a factor of three apart. It is not asked again: it
    would go one more step down wherever scores are flat."""
    trials = {one.rate: one for one in (*chosen.trials, *finer)}
    tried = (chosen.best, *finer)
    least = close_to(max(one.score for one in tried))
    near = [one for one in tried if one.score >= least]
    best = min(near, key=lambda one: (one.rate != chosen.rate, one.rate))
    ordered = tuple(trials[rate] for rate in sorted(trials))
    return at_rate(replace(chosen, trials=ordered, settled=best.rate))


def noise_free(setting: Run) -> Run:
    """The same run without privacy, in which sizes need not be declared."""
    roster = replace(setting.roster, declared=False)
    return replace(setting, roster=roster, privacy=None, secure=None)


def _digits(rate: float) -> float:
    return float(f"{rate:.2g}")


def _around(settings: Sequence[Run], times: Sequence[float]) -> list[tuple[Run, list[float]]]:
    """Every setting with multiples of its η₀."""
    asked = []
    for one in settings:
        rate = one.settled.learning_rate
        assert rate is not None
        asked.append((one, [_digits(rate * factor) for factor in times]))
    return asked
