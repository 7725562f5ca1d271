"""What the parts of a RESULT.md share: tables in Markdown, numbers in words, and what a result was
made with."""

from __future__ import annotations

from dataclasses import dataclass

from dpscaffold.paper.results import SeedSummary, Value, average, last

TUNING = (
    "Choosing hyperparameters on private records is outside every privacy guarantee, here as in "
    "the paper."
)


#: See :attr:`dpscaffold.paper.cases.Case.objective`.
Objective = tuple[str, float]


@dataclass(frozen=True)
class Provenance:
    """What a result was made with: the command as typed, the scale, the test accuracy of each
    objective's optimum, and the rows that were asked for where not all were."""

    command: str
    scale: float
    optima: dict[Objective, float]
    rows: tuple[str, ...] = ()


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table; a column that is empty in every row is left out."""
    filled = [any(row[k] for row in rows) for k in range(len(header))]
    header, *rows = [
        [cell for cell, keep in zip(row, filled, strict=True) if keep] for row in (header, *rows)
    ]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def percent(summary: SeedSummary) -> str:
    """Mean ± deviation in %; the mean alone of a single run. Runs that diverged are counted, not
    hidden.

    >>> percent(SeedSummary(0.5, 0.01, 3)), percent(SeedSummary(0.5, 0.0, 1))
    ('50.00 ± 1.00', '50.00')
    >>> percent(SeedSummary(0.5, 0.01, 2, 1))
    '50.00 ± 1.00 (1 of 3 diverged)'
    """
    if not summary.runs:
        return "diverged"
    text = f"{100 * summary.mean:.2f}"
    if summary.runs > 1:
        text += f" ± {100 * summary.deviation:.2f}"
    if summary.diverged:
        text += f" ({summary.diverged} of {summary.runs + summary.diverged} diverged)"
    return text


def rate(choice: str) -> str:
    """A choice of η₀ alone without its name."""
    return choice.removeprefix("η₀ = ")


#: Both outputs of a run and their names.
OUTPUTS: tuple[tuple[Value, str], ...] = ((last, "last"), (average, "average"))
