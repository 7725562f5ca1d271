"""Step sizes that are tried besides those of a definition, until no best choice lies at an end.

A row of a definition may have a ``ladder`` of η₀. Where the best of the step sizes that were tried
at a place is the smallest or the largest of them, the next rung on that side is run too. Once the
best lies inside, columns that are searched ``finely`` try the row's ``finer`` values on either
side of it, and then the same search with its other ``steps`` K, for every algorithm that has local
steps of its own.
What is asked for follows from the definition and the finished runs alone, so an interrupted search
goes on where it stopped, and results are drawn from the same runs that were searched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dpscaffold.paper.archive import Archive
from dpscaffold.paper.cases import Case
from dpscaffold.paper.definition import Experiment, Level, rate_label
from dpscaffold.paper.results import Place, Results, Summary, average


def widened(experiment: Experiment, cases: Sequence[Case], archive: Archive) -> list[Case]:
    """The cases that are to be tried next, at every place whose runs are all finished. Empty when
    the search is over."""
    rows = {row.label: row for row in experiment.rows if row.ladder}
    fine = {column.label for column in experiment.columns if column.finely}
    if not rows:
        return []
    asked: dict[Place, dict[int, dict[float, list[Case]]]] = {}
    for case in cases:
        place = (case.labels["row"], case.labels["column"], case.labels["line"])
        plan = case.tables["plan"]
        at_steps = asked.setdefault(place, {}).setdefault(int(plan["local_steps"]), {})
        at_steps.setdefault(float(plan["learning_rate"]), []).append(case)
    results = Results(experiment, cases, (), archive)
    found: list[Case] = []
    for place, by_steps in asked.items():
        if place[0] in rows:
            row = rows[place[0]]
            if place[1] not in fine:
                row = replace(row, finer=(), steps=())
            searches = [_search(row, results, tried) for tried in by_steps.values()]
            found += [case for search in searches for case in search.next()]
            if all(search.over for search in searches):
                found += searches[0].with_other_steps(tuple(by_steps))
    return found


@dataclass(frozen=True)
class Search:
    """The step sizes that were tried at one place with one K, each with its seeds; ``best`` is None
    while some are unfinished, and ``failed`` says that every one diverged."""

    row: Level
    tried: dict[float, list[Case]]
    best: float | None
    failed: bool

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
        best = self.best
        near = sorted(self.row.ladder, key=lambda rate: abs(rate / best - best / rate))[:3]
        others = [steps for steps in self.row.steps if steps not in known]
        return [
            at_rate(case, rate, steps)
            for steps in others
            for rate in sorted(near)
            for case in seeds
        ]


def _search(row: Level, results: Results, tried: dict[float, list[Case]]) -> Search:
    """What is known of one place and K."""
    first = next(iter(tried.values()))[0].labels
    done = results.places.get((first["row"], first["column"], first["line"]), {})
    runs = {rate: done.get(cases[0].labels["choice"], []) for rate, cases in tried.items()}
    if any(len(runs[rate]) < len(cases) for rate, cases in tried.items()):
        return Search(row, tried, None, False)
    found = {rate: Summary.of([average(run) for run in runs[rate]]) for rate in tried}
    best = max(found, key=lambda rate: (not found[rate].diverged, found[rate].rank))
    return Search(row, tried, best, bool(found[best].diverged))


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
    """The next step sizes on the side where the best one lies at the end; below all where every one
    ``failed``, that is diverged. At the ladder's own end there is none.

    >>> rungs([0.1, 0.3], 0.3, [0.03, 0.1, 0.3, 1.0]), rungs([0.1, 0.3, 1.0], 0.3, [0.03, 3.0])
    ([1.0], [])
    >>> rungs([0.1, 0.3], 0.3, [0.03, 0.1, 0.3, 1.0], failed=True)
    [0.03]
    """
    below = [rate for rate in ladder if rate < min(tried)]
    above = [rate for rate in ladder if rate > max(tried)]
    found = []
    if below and (failed or best == min(tried)):
        found.append(max(below))
    if above and not failed and best == max(tried):
        found.append(min(above))
    return found


def at_end(tried: Sequence[float], best: float) -> bool:
    """Whether the best step size lies at an end of those tried.

    >>> at_end([0.1, 0.3, 1.0], 0.3), at_end([0.1, 0.3], 0.3)
    (False, True)
    """
    return best in (min(tried), max(tried))


def at_rate(case: Case, rate: float, steps: int | None = None) -> Case:
    """The same run with another η₀, and another K where one is given."""
    own = " (K = " in case.labels["choice"]
    shown = steps if steps is not None else case.tables["plan"]["local_steps"] if own else None
    changed = case.with_set({"plan.learning_rate": rate})
    if steps is not None:
        changed = changed.with_set({"plan.local_steps": steps})
    return replace(changed, labels=case.labels | {"choice": rate_label(rate, shown)})
