"""Step sizes that are tried besides those of a definition, until no best choice lies at an end.

A row of a definition may have a ``ladder`` of η₀. Where the best of the step sizes that were tried
at a place is the smallest or the largest of them, the next rung on that side is run too. Once the
best lies inside, columns that are searched ``finely`` try the row's ``finer`` values on either
side of it, then the same search with its other ``steps`` K, for every algorithm that has local
steps of its own, then, at the best K, with the next smaller and larger of its ``clips`` C, going on
while the best C lies at an end of those tried, and last, at the best K and C, in the same way with
its ``tails``, the share of the rounds whose models are averaged.

A search climbs from where it begins, so that algorithms may end on different peaks. When all
searches of a row and such a column are over, every algorithm is therefore also tried at the best
choice (K, C, averaged share and η₀) of every other one, and searches on from there by the same
rules, until no algorithm's best choice is untried by another.
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
from dpscaffold.paper.ladders import between, near, neighbours, rungs
from dpscaffold.paper.results import Place, Results, SeedSummary, average
from dpscaffold.setting.plan import Plan

#: What a search of η₀ is made with: K, C (None without privacy), and the averaged share of rounds.
Fixed = tuple[int, float | None, float]

#: The searches of one place, the definition's own first.
Searches = dict[Fixed, "Search"]


def _by_rate(cases: Sequence[Case]) -> dict[Place, dict[Fixed, dict[float, list[Case]]]]:
    """The cases by place, then by what a search keeps fixed, then by step size."""
    found: dict[Place, dict[Fixed, dict[float, list[Case]]]] = {}
    for case in cases:
        place = (case.labels["row"], case.labels["column"], case.labels["line"])
        here = found.setdefault(place, {}).setdefault(_fixed(case), {})
        here.setdefault(float(case.tables["plan"]["learning_rate"]), []).append(case)
    return found


def _searched_row(experiment: Experiment, place: Place) -> Level | None:
    """The row of a place, less what its column does not search finely; None without a ladder."""
    row = next((one for one in experiment.rows if one.label == place[0] and one.ladder), None)
    if row is None or any(one.label == place[1] and one.finely for one in experiment.columns):
        return row
    return replace(row, finer=(), steps=(), clips=(), tails=())


def widened(experiment: Experiment, cases: Sequence[Case], archive: Archive) -> list[Case]:
    """The cases that are to be tried next, at every place whose runs are all finished. Empty when
    the search is over."""
    if not any(row.ladder for row in experiment.rows):
        return []
    results = Results(experiment, cases, (), archive)
    entries: dict[tuple[str, str], list[Searches]] = {}
    for place, by_fixed in _by_rate(cases).items():
        row = _searched_row(experiment, place)
        if row is not None:
            searches = {fixed: _search(row, results, tried) for fixed, tried in by_fixed.items()}
            entries.setdefault(place[:2], []).append(searches)
    return [case for lines in entries.values() for case in _next(lines)]


def _fixed(case: Case) -> Fixed:
    clip = case.tables["privacy"]["clip"] if case.private else None
    plan = case.tables["plan"]
    return int(plan["local_steps"]), clip, float(plan.get("tail", Plan.tail))


def _next(lines: Sequence[Searches]) -> list[Case]:
    """What the algorithms of one row and column are to try next: each for itself, and once nobody
    has anything left, the best choices of the others."""
    found: list[Case] = []
    for searches in lines:
        found += [case for search in searches.values() for case in search.next()]
        if all(search.over for search in searches.values()):
            found += _others(searches)
    over = all(search.over for searches in lines for search in searches.values())
    return _crossed(lines) if over and not found else found


def _others(searches: Searches) -> list[Case]:
    """Where all searches of a place are over: those with the row's other K, when they are over too
    those with the next C on either side of the best one, unless that K had them with whatever
    averaged share, and then with the next averaged shares on either side of the best one, with its
    K and C."""
    own = next(iter(searches.values()))
    row, (_, own_clip, own_tail) = own.row, _fixed(own.seeds[0])
    known = [steps for steps, _, _ in searches]
    more = [] if own.full_pass else [steps for steps in row.steps if steps not in known]
    if more and own.best is not None:
        rates = near(row.ladder, own.best)
        return own.elsewhere({(steps, own_clip, own_tail): rates for steps in more})
    return _next_dials(searches, own, own_tail)


def _next_dials(searches: Searches, own: Search, own_tail: float) -> list[Case]:
    """The next C around the best search of a place, and then the next averaged shares."""
    row = own.row
    fixed, best = _top(searches)
    if best.best is None or best.failed:
        return []
    clips = _other_clips(searches, row, fixed, best.best)
    if clips:
        return own.elsewhere(clips)
    steps, clip, tail = fixed
    shares = [share for *others, share in searches if others == [steps, clip]]
    rates = near(row.ladder, best.best)
    tails = neighbours(shares, tail, (*row.tails, own_tail))
    return own.elsewhere({(steps, clip, share): rates for share in tails})


def _other_clips(
    searches: Searches, row: Level, fixed: Fixed, best: float
) -> dict[Fixed, list[float]]:
    """The next C on either side, with the step sizes around where ηC is that of the best."""
    steps, clip, tail = fixed
    if clip is None:
        return {}
    tried = [other for of, other, _ in searches if of == steps and other is not None]
    others = neighbours(tried, clip, row.clips)
    return {(steps, other, tail): near(row.ladder, best * clip / other) for other in others}


def _crossed(lines: Sequence[Searches]) -> list[Case]:
    """Where all searches of a row and column are over, every algorithm at the best choice of every
    other one that it has not tried. K stays an algorithm's own where either takes one pass over
    the data, whose K is no choice."""
    found: list[Case] = []
    for searches in lines:
        own, new = next(iter(searches.values())), dict[Fixed, list[float]]()
        for others in lines:
            other = next(iter(others.values()))
            (steps, clip, tail), top = _top(others)
            if others is searches or not own.row.finer or top.best is None or top.failed:
                continue
            if own.full_pass or other.full_pass:
                steps = _fixed(own.seeds[0])[0]
            fixed = steps, clip, tail
            rates = _untried(searches, fixed, top.best, own.row.ladder)
            new[fixed] = sorted({*new.get(fixed, ()), *rates})
        found += own.elsewhere(new)
    return found


def _untried(searches: Searches, fixed: Fixed, rate: float, ladder: Sequence[float]) -> list[float]:
    """A step size unless it was tried; a new search also gets those that it would try next."""
    if fixed in searches:
        return [] if rate in searches[fixed].tried else [rate]
    return [rate, *rungs([rate], rate, ladder)]


def _top(searches: Searches) -> tuple[Fixed, Search]:
    return max(searches.items(), key=lambda item: item[1].reached)


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

    @property
    def seeds(self) -> list[Case]:
        """The cases of one step size."""
        return next(iter(self.tried.values()))

    @property
    def full_pass(self) -> bool:
        """Whether the algorithm's K is one pass over the data, and no choice."""
        return self.seeds[0].settings.algorithm.build().full_pass

    def next(self) -> list[Case]:
        """The cases of these step sizes."""
        return [at_rate(case, rate) for rate in self.rates for case in self.seeds]

    def elsewhere(self, rates: dict[Fixed, list[float]]) -> list[Case]:
        """The cases with other K, C and averaged shares, each with its step sizes; their choices
        name what is not as here, so that this is an entry's own search."""
        here, found = _fixed(self.seeds[0]), list[Case]()
        for (steps, clip, tail), some in rates.items():
            other = (
                None if steps == here[0] else steps,
                None if clip == here[1] else clip,
                None if tail == here[2] else tail,
            )
            found += [at_rate(case, rate, *other) for rate in some for case in self.seeds]
        return found


def _search(row: Level, results: Results, tried: dict[float, list[Case]]) -> Search:
    """What is known of one place with one K, C and averaged share."""
    first = next(iter(tried.values()))[0].labels
    done = results.places.get((first["row"], first["column"], first["line"]), {})
    runs = {rate: done.get(cases[0].labels["choice"], []) for rate, cases in tried.items()}
    if any(len(runs[rate]) < len(cases) for rate, cases in tried.items()):
        return Search(row, tried, None, False)
    found = {rate: SeedSummary.of([average(run) for run in runs[rate]]) for rate in tried}
    best = max(found, key=lambda rate: (not found[rate].diverged, found[rate].rank))
    failed = bool(found[best].diverged)
    return Search(row, tried, best, failed, -math.inf if failed else found[best].rank)


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
