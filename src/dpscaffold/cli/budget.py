"""``dpscaffold budget``: a privacy budget that several runs over the same records share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dpscaffold.errors import BadInput
from dpscaffold.privacy.showing import round_up
from dpscaffold.report.fitting import legible
from dpscaffold.runs.budget_file import BudgetFile, BudgetFileContents


def budget_command(
    file: Annotated[Path, typer.Argument(help="The budget file.")],
    epsilon: Annotated[
        float | None, typer.Option("--epsilon", help="Create the file with this total ε.")
    ] = None,
    delta: Annotated[
        float | None, typer.Option("--delta", help="Create the file with this total δ.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the contents as JSON.")] = False,
) -> None:
    """Show what runs have spent of a budget file, or create one with --epsilon and --delta.

    Runs use it with privacy.budget_file = "FILE" in their configuration.
    """
    if (epsilon is None) != (delta is None):
        one, other = ("--epsilon", "--delta") if delta is None else ("--delta", "--epsilon")
        raise BadInput(
            "missing-argument",
            f"{one} is given without {other}; give both to open a new budget file",
        )
    if epsilon is not None and delta is not None:
        BudgetFile.open(file, epsilon, delta)
    contents = BudgetFile(file).read()
    if as_json:
        typer.echo(json.dumps(contents.to_json(), indent=2, allow_nan=False))
    else:
        show(contents, Console(soft_wrap=False, highlight=False))


def show(contents: BudgetFileContents, console: Console) -> None:
    """A row per run, then what is spent and left: spent rounded up, left rounded down."""
    if contents.grants:
        head = ("run", "rounds", "of", "epsilon", "delta", "noise")
        rows = [
            (
                run,
                str(contents.participations.get(run, 0)),
                str(grant.rounds),
                round_up(grant.epsilon),
                f"{grant.delta:.3g}",
                "secret" if grant.noise_seed is None else f"seed {grant.noise_seed}",
            )
            for run, grant in contents.grants.items()
        ]
        console.print(legible(head, rows, console.width))
        neighbours = next(iter(contents.grants.values())).neighbours
        console.print(f"neighbours: {neighbours}")
    epsilon, delta = contents.left
    spent = contents.spent
    console.print(
        f"granted: epsilon = {round_up(spent[0])} of {contents.epsilon:g}, delta = {spent[1]:.3g} "
        f"of {contents.delta:g} (epsilon and delta add: Rogers, Roth, Ullman, Vadhan 2016)"
    )
    console.print(f"left: epsilon = {int(epsilon * 1000) / 1000:.3f}, delta = {delta:.3g}")
