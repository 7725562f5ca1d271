"""The frontier's part of a RESULT.md: accuracy by ε for every algorithm."""

from __future__ import annotations

from collections.abc import Sequence

from dpscaffold.paper.archive import FinishedRun
from dpscaffold.paper.definition import Place
from dpscaffold.paper.results import Results, average, last
from dpscaffold.paper.text import TUNING, Provenance, markdown, percent, rate


def frontier_parts(results: Results, made: Provenance) -> list[str]:
    """Accuracy by ε for every row."""
    parts = ["## Test accuracy (%) of the averaged model by ε towards the server"]
    parts += [*results.experiment.about, TUNING]
    for row in results.rows:
        columns = results.columns(row)
        lines = results.lines(row)
        header = ["ε", "batches, neighbours", *lines, "σ_g", "η₀"]
        places = [[(row, column, line) for line in lines] for column in columns]
        rows = [_cells(results, here) for here in places]
        parts += [f"### {row}", markdown(header, rows)]
    return parts


def _cells(results: Results, places: Sequence[Place]) -> list[str]:
    """The row of the table for one ε, whose ``places`` are one for each algorithm."""
    epsilon, _, sampling = places[0][1].partition(" ")
    ways = {"poisson": "Poisson, zero-out", "fixed": "fixed size, replace-one"}
    made = [place for place in places if place in results.places]
    noises = [_noise(results.shown(place)[0].finished) for place in made]
    return [
        epsilon,
        ways.get(sampling, "not private"),
        *(_both(results, place) for place in places),
        ", ".join(filter(None, noises)),
        ", ".join(rate(results.chosen(place)) for place in made),
    ]


def _both(results: Results, place: Place) -> str:
    """The averaged model's accuracy, and in brackets that of the last iterates of the same
    choice."""
    if place not in results.places:
        return ""
    choice = results.chosen(place)
    averaged, late = (results.summary(place, choice, value) for value in (average, last))
    return f"{percent(averaged)} ({percent(late)})"


def _noise(finished: FinishedRun) -> str:
    noise = finished.made.get("noise")
    return "" if noise is None else f"{noise:.3g}"
