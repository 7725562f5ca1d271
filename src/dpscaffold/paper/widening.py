"""Step sizes that are tried besides those of a definition, until no best choice lies at an end.

A row of a definition may have a ``ladder`` of η₀. Where the best of the step sizes that were tried
at a place is the smallest or the largest of them, the next rung on that side is run too. Once the
best lies inside, columns that are searched ``finely`` try the row's ``finer`` values on either
side of it, then the same search with its other ``steps`` K, for every algorithm that has local
steps of its own, then, at the best K, with the next smaller and larger of its ``clips`` C, going on
while the best C lies at an end of those tried, and last, at the best K and C, in the same way with
its ``tails``, the share of the rounds whose models are averaged.
What is asked for follows from the definition and the finished runs alone, so an interrupted search
goes on where it stopped, and results are drawn from the same runs that were searched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dpscaffold.paper.archive import Archive
from dpscaffold.paper.cases import Case
from dpscaffold.paper.definition import Experiment, Level, rate_label
from dpscaffold.paper.results import Place, Results, Summary, average
from dpscaffold.plan import Plan

#: What a search of η₀ is made with: K, C (None without privacy), and the averaged share of rounds.
Fixed = tuple[int, float | None, float]


def widened(experiment: Experiment, cases: Sequence[Case], archive: Archive) -> list[Case]:
    """The cases that are to be tried next, at every place whose runs are all finished. Empty when
    the search is over."""
    rows = {row.label: row for row in experiment.rows if row.ladder}
    fine = {column.label for column in experiment.columns if column.finely}
    if not rows:
        return []
    asked: dict[Place, dict[Fixed, dict[float, list[Case]]]] = {}
    for case in cases:
        place = (case.labels["row"], case.labels["column"], case.labels["line"])
        here = asked.setdefault(place, {}).setdefault(_fixed(case), {})
        here.setdefault(float(case.tables["plan"]["learning_rate"]), []).append(case)
    results = Results(experiment, cases, (), archive)
    found: list[Case] = []
    for place, by_fixed in asked.items():
        if place[0] in rows:
            row = rows[place[0]]
            if place[1] not in fine:
                row = replace(row, finer=(), steps=(), clips=(), tails=())
            searches = {fixed: _search(row, results, tried) for fixed, tried in by_fixed.items()}
            found += [case for search in searches.values() for case in search.next()]
            if all(search.over for search in searches.values()):
                found += _others(searches)
    return found


def _fixed(case: Case) -> Fixed:
    clip = case.tables["privacy"]["clip"] if case.private else None
    plan = case.tables["plan"]
    return int(plan["local_steps"]), clip, float(plan.get("tail", Plan.tail))


def _others(searches: dict[Fixed, Search]) -> list[Case]:
    """Where all searches of a place are over: those with the row's other K, when they are over too
    those with the next C on either side of the best one, and then with the next averaged shares on
    either side of the best one with that K and C."""
    own = next(iter(searches.values()))
    row = own.row
    if more := own.with_other_steps([steps for steps, _, _ in searches]):
        return more
    # Other shares are tried with the best K and C alone, so they never change which these are.
    (steps, clip, tail), best = max(searches.items(), key=lambda item: item[1].reached)
    clips = [other for of, other, _ in searches if of == steps and other is not None]
    if clip is not None and (more := best.with_other_clips(beside(clips, clip, row.clips))):
        return more
    tails = [share for *others, share in searches if others == [steps, clip]]
    return best.with_other_tails(beside(tails, tail, row.tails))


@dataclass(frozen=True)
class Search:
    """The step sizes that were tried at one place with one K, C and averaged share, each with its
    seeds; ``best`` is None while some are unfinished, ``failed`` says that every one diverged, and
    ``reached`` is the best mean accuracy."""

    row: Level
    tried: dict[float, list[Case]]
    best: float | None
    failed: bool
    reached: float = -math.inf

    @property
    def rates(self) -> list[float]:
        """What to try next: the next rung, or else what lies between the best and its
        neighbours."""
        if self.best is None:
            return []
        rates = tuple(self.tried)
        further = rungs(rates, self.best, self.row.ladder, self.failed)
        if further or self.failed:
            return further
        return between(rates, self.best, self.row.finer)

    @property
    def over(self) -> bool:
        """Whether all is finished and nothing is left to try."""
        return self.best is not None and not self.rates

    def next(self) -> list[Case]:
        """The cases of these step sizes."""
        seeds = next(iter(self.tried.values()))
        return [at_rate(case, rate) for rate in self.rates for case in seeds]

    def with_other_steps(self, known: Sequence[int]) -> list[Case]:
        """Where the search is over: the rungs around the best, with the row's other K."""
        seeds = next(iter(self.tried.values()))
        if self.best is None or seeds[0].settings.algorithm.build().full_pass:
            return []
        near = _near(self.row.ladder, self.best)
        others = [steps for steps in self.row.steps if steps not in known]
        return [at_rate(case, rate, steps) for steps in others for rate in near for case in seeds]

    def with_other_clips(self, clips: Sequence[float]) -> list[Case]:
        """The rungs around where each C would have the best step as long as here: ηC the same."""
        seeds = next(iter(self.tried.values()))
        if self.best is None or self.failed:
            return []
        own = float(seeds[0].tables["privacy"]["clip"])
        return [
            at_rate(case, rate, clip=clip)
            for clip in clips
            for rate in _near(self.row.ladder, self.best * own / clip)
            for case in seeds
        ]

    def with_other_tails(self, tails: Sequence[float]) -> list[Case]:
        """The rungs around the best step size, with other shares of the rounds averaged."""
        seeds = next(iter(self.tried.values()))
        if self.best is None or self.failed:
            return []
        near = _near(self.row.ladder, self.best)
        return [at_rate(case, rate, tail=tail) for tail in tails for rate in near for case in seeds]


def _near(ladder: Sequence[float], middle: float) -> list[float]:
    """The three rungs nearest to a step size, by their ratio."""
    return sorted(sorted(ladder, key=lambda rate: abs(math.log(rate / middle)))[:3])


def beside(tried: Sequence[float], best: float, values: Sequence[float]) -> list[float]:
    """The next of some values below and above the best one, where they are not tried yet.

    >>> beside([1.5], 1.5, [0.5, 1.0, 2.0]), beside([1.0, 1.5, 2.0], 1.5, [0.5, 1.0, 2.0])
    ([1.0, 2.0], [])
    >>> beside([1.0, 1.5, 2.0], 1.0, [0.5, 1.0, 2.0])
    [0.5]
    """
    known = [*values, *tried]
    below = max((value for value in known if value < best), default=best)
    above = min((value for value in known if value > best), default=best)
    return [value for value in (below, above) if value not in tried]


def _search(row: Level, results: Results, tried: dict[float, list[Case]]) -> Search:
    """What is known of one place and K."""
    first = next(iter(tried.values()))[0].labels
    done = results.places.get((first["row"], first["column"], first["line"]), {})
    runs = {rate: done.get(cases[0].labels["choice"], []) for rate, cases in tried.items()}
    if any(len(runs[rate]) < len(cases) for rate, cases in tried.items()):
        return Search(row, tried, None, False)
    found = {rate: Summary.of([average(run) for run in runs[rate]]) for rate in tried}
    best = max(found, key=lambda rate: (not found[rate].diverged, found[rate].rank))
    failed = bool(found[best].diverged)
    return Search(row, tried, best, failed, -math.inf if failed else found[best].rank)


def between(tried: Sequence[float], best: float, finer: Sequence[float]) -> list[float]:
    """The finer step sizes between the best of those tried and its neighbours.

    >>> between([0.1, 0.3, 1.0], 0.3, [0.05, 0.17, 0.5, 1.7])
    [0.17, 0.5]
    >>> between([0.1, 0.17, 0.3, 0.5, 1.0], 0.17, [0.05, 0.17, 0.5, 1.7])
    []
    """
    below = max((rate for rate in tried if rate < best), default=best)
    above = min((rate for rate in tried if rate > best), default=best)
    return [rate for rate in finer if below < rate < above and rate not in tried]


def rungs(
    tried: Sequence[float], best: float, ladder: Sequence[float], failed: bool = False
) -> list[float]:
    """The next step sizes on the side where the best one lies at the end, and those between it and
    its neighbours where a planned one was tried beyond a gap; below all where every one ``failed``,
    that is diverged. At the ladder's own end there is none.

    >>> rungs([0.1, 0.3], 0.3, [0.03, 0.1, 0.3, 1.0]), rungs([0.1, 0.3, 1.0], 0.3, [0.03, 3.0])
    ([1.0], [])
    >>> rungs([0.1, 0.3], 0.3, [0.03, 0.1, 0.3, 1.0], failed=True)
    [0.03]
    >>> rungs([0.1, 3.0], 3.0, [0.1, 0.3, 1.0, 3.0, 10.0])
    [1.0, 10.0]
    """
    if failed:
        return [max(below)] if (below := [rate for rate in ladder if rate < min(tried)]) else []
    next_below = max((rate for rate in ladder if rate < best), default=best)
    next_above = min((rate for rate in ladder if rate > best), default=best)
    found = [rate for rate in (next_below, next_above) if rate not in tried and rate != best]
    return [rate for rate in found if not any(_within(other, rate, best) for other in tried)]


def _within(one: float, end: float, other: float) -> bool:
    return min(end, other) < one < max(end, other)


def at_end(tried: Sequence[float], best: float) -> bool:
    """Whether the best step size lies at an end of those tried.

    >>> at_end([0.1, 0.3, 1.0], 0.3), at_end([0.1, 0.3], 0.3)
    (False, True)
    """
    return best in (min(tried), max(tried))


def at_rate(
    case: Case,
    rate: float,
    steps: int | None = None,
    clip: float | None = None,
    tail: float | None = None,
) -> Case:
    """The same run with another η₀, and another K, C and averaged share where they are given; a
    choice names those that are not its entry's own."""
    changes: dict[str, Any] = {"plan.learning_rate": rate}
    if steps is not None:
        changes["plan.local_steps"] = steps
    if clip is not None:
        changes["privacy.clip"] = clip
    if tail is not None:
        changes["plan.tail"] = tail
    changed, before = case.with_set(changes), case.labels["choice"]
    if steps is None and "K = " in before:
        steps = changed.tables["plan"]["local_steps"]
    if clip is None and "C = " in before:
        clip = changed.tables["privacy"]["clip"]
    if tail is None and "tail = " in before:
        tail = changed.tables["plan"]["tail"]
    return replace(changed, labels=case.labels | {"choice": rate_label(rate, steps, clip, tail)})
