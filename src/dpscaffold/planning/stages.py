"""The stages of a search for a whole plan: a quick look at all candidates, a close one at the best,
and a last one at the chosen.

A *quick look* tries few and widely spaced η₀ on half of the surrogates, in few rounds. It finds the
η₀ of every candidate and whether another clip is better. A *close look* compares the best of them
on all surrogates, η₀ by η₀, and scores averages over several shares of the rounds at once. The
*last look* tries the chosen one with η₀ a factor of √3 smaller and larger.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dpscaffold.algorithms.registry import RIVALS
from dpscaffold.planning.shape import Fidelity, Shape
from dpscaffold.planning.trial import (
    SEEDS,
    Bench,
    Choice,
    StepSizeTrial,
    close_to,
    first_rates,
    search,
)
from dpscaffold.setting import Setting
from dpscaffold.setting.plan import Plan

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

#: η₀ of a quick look, a factor of ten apart; those a factor of three around the best follow.
COARSE = (0.03, 0.3, 3.0, 30.0)

#: Shares of the rounds that may be averaged, besides the half.
TAILS = (0.25, 0.125)

#: How far the η₀ of the last look lie from the chosen one: half as far as those before, in logs.
FINER = math.sqrt(3.0)

#: Surrogates of a quick look: half of them.
FEWER = SEEDS[:1]


@dataclass
class PlanSearch:
    """Looks at candidates on surrogates; ``clips`` says whether C may be chosen."""

    bench: Bench
    clips: bool

    def _quick(self, title: str) -> Bench:
        return replace(self.bench, seeds=FEWER, fidelity=QUICK_LOOK, title=title)

    def _close(self, title: str, tails: tuple[float, ...] = ()) -> Bench:
        return replace(self.bench, fidelity=CLOSE_LOOK, tails=tails, title=title)

    def compared(self, settings: Sequence[Setting], tails: tuple[float, ...]) -> list[Choice]:
        """Every candidate after a quick look, the promising ones after a close one."""
        found = self._rates(settings)
        if self.clips:
            found = self._with_clips(found)
        near = promising(found)
        bench = self._close("comparing the best candidates", tails)
        asked = [(one.setting, _around(one.rate)) for one in near]
        close = [_averaged(replace(one, cautious=True)) for one in search(asked, bench)]
        return close + [one for one in found if one not in near]

    def _rates(self, settings: Sequence[Setting]) -> list[Choice]:
        """The best η₀ of every candidate at a quick look, within a factor of three."""
        quick = self._quick("trying step sizes")
        asked = [(one, first_rates(one, QUICK_LOOK, COARSE)) for one in settings]
        coarse = search(asked, quick)
        finer = [(one.setting, _around(one.rate)[::2]) for one in coarse]
        return [
            merged(one, other)
            for one, other in zip(coarse, search(finer, quick, widen=False), strict=True)
        ]

    def _with_clips(self, found: Sequence[Choice]) -> list[Choice]:
        """The promising candidates with half or twice the clip, where that is better by more than
        half a point. Where gradients are clipped, half of C with twice η₀ moves as far."""
        near = promising(found)
        asked = [
            (clipped(one.setting, factor), [one.rate, one.rate / factor])
            for one in near
            for factor in (0.5, 2.0)
        ]
        tried = search(asked, self._quick("trying clips"), widen=False)
        kept = []
        for one in found:
            place = near.index(one) if one in near else None
            others = [] if place is None else tried[2 * place : 2 * place + 2]
            kept.append(max([one, *others], key=lambda c: c.score - TOLERANCE * (c is not one)))
        return kept

    def shorter(self, best: Choice, fewer: Sequence[Setting]) -> list[Choice]:
        """The same candidate in fewer rounds, where its surrogate has fewer too: the most of them
        first, and still fewer only while that loses nothing. Fewer rounds have less noise in each,
        so their η₀ is somewhat larger."""
        length, found = Shape.of(best.setting, CLOSE_LOOK).rounds, list[Choice]()
        bench = self._close("trying fewer rounds")
        for one in sorted(fewer, key=lambda one: -one.plan.rounds):
            if Shape.of(one, CLOSE_LOOK).rounds < length:
                asked = as_chosen(one, best.setting), [_digits(best.rate * FINER)]
                [tried] = search([asked], bench, widen=False)
                found.append(replace(tried, cautious=True))
                if found[-1].score < best.score:
                    break
        return found

    def refined(self, best: Choice, tails: tuple[float, ...]) -> Choice:
        """The chosen candidate with η₀ a factor of √3 smaller or larger and an averaged share of
        its own, if that is better."""
        rates = [_digits(best.rate / FINER), _digits(best.rate * FINER)]
        return best_pair(best, self._between(best.setting, rates, tails))

    def last_look(self, setting: Setting, tails: tuple[float, ...]) -> Choice:
        """The last look at a plan that was chosen without it, at its own η₀ too."""
        trials = self._between(setting, [setting.plan.learning_rate], tails)
        return self.refined(Choice(setting, trials), tails)

    def _between(
        self, setting: Setting, rates: Sequence[float], tails: tuple[float, ...]
    ) -> tuple[StepSizeTrial, ...]:
        """These η₀ at a close look, with all shares of the rounds where there is a choice."""
        others = [share for share in (Plan.tail, *tails) if share != setting.plan.tail]
        bench = self._close("trying step sizes in between", tuple(others) if tails else ())
        return search([(setting, rates)], bench, widen=False)[0].trials

    def more_steps(self, best: Choice, more: Sequence[Setting]) -> list[Choice]:
        """The same candidate with more local steps, at its η₀."""
        asked = [(as_chosen(one, best.setting), [best.rate]) for one in more]
        bench = self._close("trying more local steps")
        found = search(asked, bench, widen=False) if asked else []
        return [replace(one, cautious=True) for one in found]

    def without_privacy(self, best: Choice) -> Choice:
        """The same candidate without privacy, with the same step size or a larger one."""
        plain, rates = noise_free(best.setting), [best.rate, 3 * best.rate]
        return search([(plain, rates)], self._close("training without privacy"), widen=False)[0]


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


def clearly_best(best: Choice, others: Sequence[Choice]) -> Choice:
    """The best of others where it is better than surrogates can err, else ``best``."""
    better = [one for one in others if one.score > best.score + _indistinct(best.best, one.best)]
    return max(better, key=lambda one: one.score) if better else best


def _indistinct(best: StepSizeTrial, other: StepSizeTrial) -> float:
    return max(TOLERANCE, best.error(other))


def _averaged(choice: Choice) -> Choice:
    """The choice with the share of the rounds to average that is better than the usual one by more
    than the standard error, and by half a point."""
    trial = choice.best
    shares = {share: trial.averaging(share) for share, _ in trial.by_tail}
    better = {
        share: other
        for share, other in shares.items()
        if other.score > trial.score + _indistinct(trial, other)
    }
    if not better:
        return choice
    share = max(better, key=lambda one: better[one].score)
    plan = replace(choice.setting.plan, tail=share)
    trials = tuple(one.averaging(share) for one in choice.trials)
    found = replace(choice, setting=replace(choice.setting, plan=plan), trials=trials)
    return at_rate(found)


def best_pair(chosen: Choice, finer: Sequence[StepSizeTrial]) -> Choice:
    """The choice with the η₀, of its own and ``finer`` ones, and the averaged share that have the
    best score together. What is within a tenth of a point of it counts as equal: then its own share
    and its own η₀ stay.

    The one-standard-error rule chose among η₀ a factor of three apart. It is not asked again: it
    would go one more step down wherever scores are flat."""
    own, rate = chosen.setting.plan.tail, chosen.rate
    trials = {one.rate: one for one in (*chosen.trials, *finer)}
    pairs = [
        (one if share == own else one.averaging(share), share)
        for one in (chosen.best, *finer)
        for share in (own, *(share for share, _ in one.by_tail))
    ]
    told = close_to(max(trial.score for trial, _ in pairs))
    near = [(trial, share) for trial, share in pairs if trial.score >= told]
    best, tail = min(near, key=lambda pair: (pair[1] != own, pair[0].rate != rate, pair[0].rate))
    if tail != own:
        trials = {
            eta: one.averaging(tail) for eta, one in trials.items() if tail in dict(one.by_tail)
        }
    plan = replace(chosen.setting.plan, tail=tail, learning_rate=best.rate)
    ordered = tuple(trials[eta] for eta in sorted(trials))
    return replace(
        chosen, setting=replace(chosen.setting, plan=plan), trials=ordered, settled=best.rate
    )


def at_rate(choice: Choice) -> Choice:
    """The choice with its own best η₀ in its setting."""
    plan = replace(choice.setting.plan, learning_rate=choice.rate)
    return replace(choice, setting=replace(choice.setting, plan=plan))


def merged(one: Choice, other: Choice) -> Choice:
    """Two searches of one candidate together."""
    trials = {trial.rate: trial for trial in (*other.trials, *one.trials)}
    return at_rate(replace(one, trials=tuple(trials[rate] for rate in sorted(trials))))


def as_chosen(setting: Setting, chosen: Setting) -> Setting:
    """A candidate with the clip and the averaged share of another."""
    assert setting.privacy is not None and chosen.privacy is not None
    plan = replace(setting.plan, tail=chosen.plan.tail)
    privacy = replace(setting.privacy, clip=chosen.privacy.clip)
    return replace(setting, plan=plan, privacy=privacy)


def noise_free(setting: Setting) -> Setting:
    """The same run without privacy, in which sizes need not be declared."""
    roster = replace(setting.roster, declared=False)
    return replace(setting, roster=roster, privacy=None, secure=None)


def clipped(setting: Setting, factor: float) -> Setting:
    """σ_g is in units of the sensitivity, so another C needs no other σ_g."""
    assert setting.privacy is not None and not isinstance(setting.privacy.clip, str)
    return replace(setting, privacy=replace(setting.privacy, clip=factor * setting.privacy.clip))


def _digits(rate: float) -> float:
    return float(f"{rate:.2g}")


def _around(rate: float) -> list[float]:
    """η₀ and those a factor of three from it."""
    return [float(f"{value:.1g}") for value in (rate / 3, rate, 3 * rate)]
