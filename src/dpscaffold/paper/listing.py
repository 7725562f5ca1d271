"""The list of experiments with their size and, where asked, an estimate of their time here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from dpscaffold.paper.definition import experiment, names
from dpscaffold.paper.probe import Probe
from dpscaffold.paper.reproduce import chosen_cases
from dpscaffold.paper.runner import user_steps

if TYPE_CHECKING:
    import torch

    from dpscaffold.paper.reproduce import ReproduceRequest


def _empty_table(title: str, more: Sequence[str]) -> Table:
    table = Table(
        title=title,
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
    for name in ("runs", "user-steps", *more):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def listing(request: ReproduceRequest, device: torch.device, estimate: bool = False) -> Table:
    """One line per experiment, 80 columns wide; ``estimate`` adds the time, from a few timed rounds
    of each shape, which takes half a minute by itself."""
    probe = Probe(device) if estimate else None
    timed = f"Experiments; time on {device} estimated from a few rounds of each shape"
    plain = "Experiments; --estimate adds the time that each takes here"
    table = _empty_table(timed if estimate else plain, ("time",) if estimate else ())
    for name in names():
        chosen = experiment(name)
        cases, folded = chosen_cases(chosen, request)
        every = {case.digest: case for case in [*cases, *folded]}
        folds = f"+{len(folded)}" if folded else ""
        steps = sum(user_steps(case) for case in every.values())
        time = [about(probe.seconds(list(every.values())))] if probe else []
        runs = f"{len(every) - len(folded)}{folds}"
        table.add_row(name, chosen.brief, runs, f"{steps / 1e6:.1f} M", *time)
    return table


def as_rows(table: Table) -> list[dict[str, str]]:
    """The list as rows by column."""
    heads = [str(column.header) for column in table.columns]
    cells = [list(map(str, column.cells)) for column in table.columns]
    return [dict(zip(heads, row, strict=True)) for row in zip(*cells, strict=True)]


def about(seconds: float) -> str:
    """An estimate in few characters.

    >>> [about(s) for s in (40, 200, 8940, 142740)]
    ['40 s', '3 min', '2 h 29 min', '40 h']
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 600 else f"{round(minutes / 60)} h"
