"""The frontier's part of a RESULT.md: accuracy by ε, what was searched for it, and what planning
loses."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dpscaffold.config import Configuration
from dpscaffold.paper.archive import FinishedRun
from dpscaffold.paper.ladders import at_end
from dpscaffold.paper.planned import PlannedCell, compared, planner_parts
from dpscaffold.paper.results import CaseResult, Place, Results, average, last
from dpscaffold.paper.text import TUNING, Provenance, markdown, percent, rate
from dpscaffold.paper.whole_plans import LINE, plan_parts


def frontier_parts(results: Results, made: Provenance) -> list[str]:
    """Accuracy by ε for every row, or what planning costs where that is what was made."""
    if results.experiment.plans:
        return planner_parts(results, made.planned)
    planned = {one.place: one for one in compared(results, made.planned)}
    parts = ["## Test accuracy (%) of the averaged model by ε towards the server"]
    parts += [*results.experiment.about, TUNING]
    for row in results.rows:
        columns = results.columns(row)
        lines = results.lines(row)
        header = ["ε", "batches, neighbours", *lines, "σ_g", "η₀", "planned (its η₀)"]
        places = [[(row, column, line) for line in lines] for column in columns]
        rows = [_cells(results, here, planned) for here in places]
        parts += [f"### {row}", markdown(header, rows), *_tried(results, row)]
    return [*parts, *plan_parts(results)]


def _cells(
    results: Results, places: Sequence[Place], planned: Mapping[Place, PlannedCell]
) -> list[str]:
    """The row of the table for one ε, whose ``places`` are one for each algorithm."""
    epsilon, _, sampling = places[0][1].partition(" ")
    ways = {"poisson": "Poisson, zero-out", "fixed": "fixed size, replace-one"}
    made = [place for place in places if place in results.places]
    noises = [_noise(results.shown(place)[0].finished) for place in made]
    ours = [
        f"{100 * planned[p].accuracy:.2f} ({planned[p].planned:g})" if p in planned else "–"
        for p in made
    ]
    return [
        epsilon,
        ways.get(sampling, "not private"),
        *(_both(results, place) for place in places),
        ", ".join(filter(None, noises)),
        ", ".join(_rate(results, place) for place in made if place[2] != LINE),
        "" if planned.keys().isdisjoint(made) else ", ".join(ours),
    ]


def _tried(results: Results, row: str) -> list[str]:
    """Which C and averaged shares were tried in a row, and how often the best lies at an end of
    them; nothing where there was no choice."""
    sentences = []
    for name, dial in (("C", _clip), ("tail", _tail)):
        tried = {
            place: {dial(runs[0]) for runs in found.values()}
            for place, found in results.places.items()
            if place[0] == row
        }
        searched = [place for place, values in tried.items() if len(values) > 1]
        if searched:
            every = set().union(*map(tried.__getitem__, searched))
            shown = [dial(results.shown(place)[0]) for place in searched]
            sentences.append(f"{name} {_ends(every, shown)}")
    return [f"Also searched: {'; '.join(sentences)}."] if sentences else []


def _ends(tried: Collection[float], best: Sequence[float]) -> str:
    """How often the best of each entry is the smallest or the largest of all that were tried."""
    low, high = min(tried), max(tried)
    return (
        f"among {', '.join(f'{value:g}' for value in sorted(tried))} in {len(best)} entries, whose "
        f"best is the smallest of all in {best.count(low)} and the largest in {best.count(high)}"
    )


def _clip(run: CaseResult) -> float:
    """C; 0 represents none."""
    privacy = run.case.settings.privacy
    return float(privacy.clip) if privacy and privacy.clip != "median" else 0.0


def _tail(run: CaseResult) -> float:
    return run.case.settings.plan.tail


def _both(results: Results, place: Place) -> str:
    """The averaged model's accuracy, and in brackets that of the last iterates of the same
    choice."""
    if place not in results.places:
        return ""
    choice = results.chosen(place)
    averaged, late = (results.summary(place, choice, value) for value in (average, last))
    return f"{percent(averaged)} ({percent(late)})"


def _rate(results: Results, place: Place) -> str:
    """The η₀ that is shown, with a mark where no smaller or no larger one was tried with its K, C
    and averaged share."""
    found = {choice: runs[0].case.settings for choice, runs in results.places[place].items()}
    choice = results.chosen(place)
    shown = found[choice]
    alike = [one.plan for one in found.values() if _dials(one) == _dials(shown)]
    at_an_end = at_end([plan.rate for plan in alike], shown.plan.rate)
    return rate(choice) + ("†" if at_an_end else "")


def _dials(settings: Configuration) -> tuple[object, ...]:
    plan, privacy = settings.plan, settings.privacy
    return plan.local_steps, privacy and privacy.clip, plan.tail


def _noise(finished: FinishedRun) -> str:
    noise = finished.made.get("noise")
    return "" if noise is None else f"{noise:.3g}"
