"""Step sizes that are tried besides those of a definition, until no best choice lies at an end.

A row of a definition may have a ``ladder`` of η₀. Where the best of the step sizes that were tried
at a place is the smallest or the largest of them, the next rung on that side is run too. What is
asked for follows from the definition and the finished runs alone, so an interrupted search goes on
where it stopped, and results are drawn from the same runs that were searched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dpscaffold.paper.archive import Archive
from dpscaffold.paper.cases import Case
from dpscaffold.paper.definition import Experiment, rate_label
from dpscaffold.paper.results import Place, Results, average


def widened(experiment: Experiment, cases: Sequence[Case], archive: Archive) -> list[Case]:
    """The cases of the next rungs: at every place whose runs are all finished, and whose best η₀
    is at an end of those tried. Empty when the search is over."""
    ladders = {row.label: row.ladder for row in experiment.rows if row.ladder}
    if not ladders:
        return []
    asked: dict[Place, dict[float, list[Case]]] = {}
    for case in cases:
        place = (case.labels["row"], case.labels["column"], case.labels["line"])
        rate = case.tables["plan"]["learning_rate"]
        asked.setdefault(place, {}).setdefault(rate, []).append(case)
    results = Results(experiment, cases, (), archive)
    found: list[Case] = []
    for place, tried in asked.items():
        done = results.places.get(place, {})
        if sum(map(len, done.values())) == sum(map(len, tried.values())):
            best = results.best(place, average)
            failed = bool(results.summary(place, best, average).diverged)
            for rung in rungs(tuple(tried), _rate(tried, best), ladders.get(place[0], ()), failed):
                found += [at_rate(case, rung) for case in next(iter(tried.values()))]
    return found


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


def at_rate(case: Case, rate: float) -> Case:
    """The same run with another η₀."""
    labels = case.labels | {"choice": rate_label(rate)}
    return replace(case.with_set({"plan.learning_rate": rate}), labels=labels)


def _rate(tried: dict[float, list[Case]], choice: str) -> float:
    return next(rate for rate, cases in tried.items() if cases[0].labels["choice"] == choice)
