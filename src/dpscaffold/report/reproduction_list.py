"""The list of experiments with their size and an estimate of their time on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from dpscaffold.experiments.definition import experiment, names
from dpscaffold.experiments.probe import Probe
from dpscaffold.experiments.reproduce import chosen_cases
from dpscaffold.experiments.runner import user_steps
from dpscaffold.report.progress import duration

if TYPE_CHECKING:
    import torch

    from dpscaffold.experiments.reproduce import Wish


def listing(wish: Wish, device: torch.device) -> Table:
    """One line per experiment; the time comes from a few timed rounds of each shape."""
    probe = Probe(device)
    table = Table(title=f"experiments (time on {device}, estimated from a short probe)", title_justify="left")
    for name, side in (
        ("name", "left"),
        ("shows", "left"),
        ("paper", "left"),
        ("runs", "right"),
        ("user-steps", "right"),
        ("time", "right"),
    ):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    for name in names():
        chosen = experiment(name)
        cases, folded = chosen_cases(chosen, wish)
        every = {case.digest: case for case in [*cases, *folded]}
        folds = f" + {len(folded)} folds" if folded else ""
        steps = sum(user_steps(case) for case in every.values())
        time = duration(probe.seconds(list(every.values())))
        runs = f"{len(every) - len(folded)}{folds}"
        table.add_row(name, chosen.title, chosen.paper, runs, f"{steps / 1e6:.1f} M", time)
    return table
