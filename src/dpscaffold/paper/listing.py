"""The list of experiments with their size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from dpscaffold.paper.definition import experiment, names
from dpscaffold.paper.reproduce import chosen_cases
from dpscaffold.paper.runner import user_steps

if TYPE_CHECKING:
    from dpscaffold.paper.reproduce import ReproduceRequest


def listing(request: ReproduceRequest) -> list[dict[str, str]]:
    """One entry per experiment: its name, what it shows, its runs and its user-steps."""
    rows = []
    for name in names():
        chosen = experiment(name)
        cases, folded = chosen_cases(chosen, request)
        every = {case.digest: case for case in [*cases, *folded]}
        folds = f"+{len(folded)}" if folded else ""
        steps = sum(user_steps(case) for case in every.values())

        rows.append(
            {
                "name": name,
                "shows": chosen.brief,
                "runs": f"{len(every) - len(folded)}{folds}",
                "user-steps": f"{steps / 1e6:.1f} M",
            }
        )
    return rows


def as_table(rows: list[dict[str, str]]) -> Table:
    """The list for a terminal, 80 columns wide."""
    table = Table(
        title="Experiments",
        title_justify="left",
        box=None,
        caption="runs + cross-validation; runs that experiments share are made once",
        caption_justify="left",
        padding=(0, 1),
        collapse_padding=True,
        pad_edge=False,
    )
    for name in ("name", "shows"):
        table.add_column(name, no_wrap=True)
    for name in ("runs", "user-steps"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    return table
